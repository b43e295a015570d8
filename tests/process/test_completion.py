"""Completion of command lines: what may come next, and that real shells show it."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.programs import LIMIT_S, ROOT

from ichat.__main__ import ROLES
from ichat.cli import commands as terminal

ANSWERS = {
    "/v1/admin/workers": b'{"data": [{"worker_id": "m-0"}, {"worker_id": "m-1"}, {"worker_id": "$(touch${IFS}hacked)"}]}',
    "/v1/models": b'{"data": [{"id": "org/m:tag"}, {"id": "other"}, {"id": "a b"}]}',
    "/v1/admin/keys": b'{"keys": [{"name": "team-a", "source": "api"}, {"name": "mine", "source": "file"}]}',
}


class Site(BaseHTTPRequestHandler):
    def do_GET(self):
        body = ANSWERS[self.path]
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def gateway():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Return a directory with an `ichat.pyz` that runs the sources."""
    directory = tmp_path_factory.mktemp("bin")
    path = directory / "ichat.pyz"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m ichat "$@"\n')
    path.chmod(0o755)
    return directory


def run(program, *words, gateway="http://127.0.0.1:9"):
    done = subprocess.run(
        [program / "ichat.pyz", *words], capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={**os.environ, "ICHAT_GATEWAY": gateway},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def found(program, *words, gateway="http://127.0.0.1:9", cwd=None):
    """Return what may come next on a command line, without descriptions."""
    line = " ".join(["ichat.pyz", *words])
    with tempfile.NamedTemporaryFile("r") as out:
        done = subprocess.run(
            [program / "ichat.pyz"], capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=cwd,
            env={**os.environ, "ICHAT_GATEWAY": gateway, "COMP_LINE": line, "COMP_POINT": str(len(line)),
                 "_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "fish", "_ARGCOMPLETE_IFS": "\n",
                 "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": out.name},
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "")
        return out.read().splitlines()


def answered(program, *words, **more):
    """Return the names, once the gateway has answered within the command's short bound."""
    deadline = time.monotonic() + LIMIT_S
    while not (names := found(program, *words, **more)):
        assert time.monotonic() < deadline, words
    return names


def test_every_command_of_the_help_can_be_completed(program):
    """What the help lists is what the first word may be."""
    listed = set(re.findall(r"ichat\.pyz ([a-z-]+) ", run(program, "--help"))) - {"COMMAND"}
    assert set(found(program, "")) == listed | set(terminal.ALIASES) == {*ROLES, *terminal.COMMANDS, *terminal.ALIASES}
    assert found(program, "wor") == ["worker", "workers", "worker-show"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["logs", "--prev"], ["--previous"]),
        (["workers", "--js"], ["--json"]),
        (["worker", "--reasoning-field", ""], ["engine", "reasoning", "reasoning_content", "both"]),
        (["worker", "--reasoning-field=rea"], ["--reasoning-field=reasoning", "--reasoning-field=reasoning_content"]),
        (["gateway", "-c", "a"], ["afile.toml"]),
        (["gateway", "--config=a"], ["--config=afile.toml"]),
        (["gateway", "-c", "x", "--ch"], ["--check"]),
        (["gateway", "--check", "--ch"], []),
        (["config", ""], ["schema"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["convert", "a"], ["afile.toml"]),
        (["convert", "afile.toml", "--from", ""], ["litellm", "llama-swap"]),
        (["keys", "m"], ["make"]),
        (["keys", "make", ""], []),
        (["nonsense", ""], []),
    ],
)
def test_completion_offers_flags_values_and_files(program, words, expected, tmp_path):
    """Flags by their names, values by their choices, and files; nothing where nothing is known."""
    (tmp_path / "afile.toml").touch()
    assert found(program, *words, cwd=tmp_path) == expected


@pytest.mark.parametrize("place", [["--gateway={}"], ["-g", "{}"], ["--config=~/ichat.toml"], ["-c", "~/ichat.toml"]])
def test_the_gateway_of_the_command_line_is_asked(program, gateway, tmp_path, monkeypatch, place):
    """However its flag is written; shells hand over a tilde as it stands."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ichat.toml").write_text(f"[server_settings]\nport = {gateway.rpartition(':')[2]}\n")
    assert "m-0" in answered(program, "logs", *(word.format(gateway) for word in place), "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["logs", ""], ["$(touch${IFS}hacked)", "m-0", "m-1"]),
        (["logs", "--tail", "5", "m-1"], ["m-1"]),
        (["chat", ""], ["org/m:tag", "other"]),
        (["unload", "--drain-s", ""], []),
        (["keys", "withdraw", ""], ["team-a"]),
        (["usage", "--key", ""], ["mine", "team-a"]),
        (["usage", "--key=t"], ["--key=team-a"]),
        (["keys", "make", ""], []),
    ],
)
def test_names_come_from_the_gateway(program, gateway, words, expected):
    """Those of workers, of models, and of keys that can be withdrawn; a name with a blank is none that can be typed."""
    assert (answered if expected else found)(program, *words, gateway=gateway) == expected


def test_a_silent_gateway_does_not_delay_completion(program):
    """After a short bound there is nothing to show, and no error."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as silent:  # nothing accepts
        assert found(program, "logs", "", gateway=f"http://127.0.0.1:{silent.server_port}") == []


def needs(name):
    if shutil.which(name) is None:
        print(f"{name} is not installed: its completion is not tested")
        pytest.skip(f"{name} is not installed")


@pytest.fixture
def environment(program, gateway, tmp_path):
    (tmp_path / "afile.toml").touch()
    (tmp_path / "ichat.pyz").symlink_to(program / "ichat.pyz")
    for name in ("bash", "zsh", "fish"):
        (tmp_path / f"script.{name}").write_text(run(program, "completion", name))
    return {
        **os.environ, "PATH": f"{program}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "READY>", "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path), "ICHAT_GATEWAY": gateway,
    }  # fmt: skip


CANCEL = "\x15"
"""Ctrl-U takes the line away."""
AGAIN_S = 10
"""Longer than a command waits for its gateway's names: where they have not come by then, they are asked for again."""


def typed(argv, steps, environment):
    """Type each text into a shell on a terminal, once it has shown what the step before waits for.

    A line that begins with CANCEL is typed again as long as nothing has come: a busy gateway may have answered late.
    """
    main, theirs = pty.openpty()
    place = {"cwd": environment["HOME"], "env": environment, "start_new_session": True}
    with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, **place) as process:
        os.close(theirs)
        try:
            for keys, wanted in steps:
                os.write(main, keys.encode())
                shown, typed_at, deadline = "", time.monotonic(), time.monotonic() + LIMIT_S
                while not re.search(wanted, shown):
                    assert time.monotonic() < deadline, shown
                    if keys.startswith(CANCEL) and time.monotonic() > typed_at + AGAIN_S:
                        os.write(main, keys.encode())
                        typed_at = time.monotonic()
                    if select.select([main], [], [], 0.2)[0]:
                        shown += os.read(main, 65536).decode(errors="replace")
        finally:
            process.kill()
            os.close(main)


def test_bash_completes(environment):
    """A command, a name with a colon in it, and the name of a file; no name is run."""
    needs("bash")
    typed(["bash", "--norc", "--noprofile", "-i"], [
        ("source script.bash; echo OK\n", 'OK[^"]*READY>'),
        ("ichat.pyz comple\t", "completion"),
        (CANCEL + "ichat.pyz chat org/m:t\t", "org/m:tag"),
        (CANCEL + "~/ichat.pyz comple\t", "completion"),
        (CANCEL + "ichat.pyz logs \t\t", "m-1"),
        (CANCEL + "ichat.pyz gateway -c afi\t", "afile\\.toml"),
    ], environment)  # fmt: skip
    assert not os.path.exists(f"{environment['HOME']}/hacked")


def test_zsh_completes(environment):
    """The same, with descriptions."""
    needs("zsh")
    typed(["zsh", "-f", "-i"], [
        ("autoload -Uz compinit; compinit -u -D; source script.zsh; echo OK$((1))\n", "OK1"),
        ("ichat.pyz comple\t", "completion"),
        (CANCEL + "ichat.pyz chat org/m:t\t", "org/m:tag"),
        (CANCEL + "ichat.pyz logs --pre\t", "--previous"),
        (CANCEL + "ichat.pyz gateway -c afi\t", "afile.toml"),
        (CANCEL + "ichat.pyz keys withdraw \t", "team-a"),
    ], environment)  # fmt: skip
    assert not os.path.exists(f"{environment['HOME']}/hacked")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ichat.pyz comple", ["completion\twhat makes bash, zsh or fish complete these lines"]),
        ("ichat.pyz chat o", ["org/m:tag", "other"]),
        ("ichat.pyz gateway -c afi", ["afile.toml"]),
        ("ichat.pyz logs --prev", ["--previous\t"]),
    ],
)
def test_fish_completes(environment, line, expected):
    """The same, with descriptions."""
    needs("fish")
    deadline = time.monotonic() + LIMIT_S
    shown = []
    while not shown:  # a busy gateway may answer late
        assert time.monotonic() < deadline, line
        done = subprocess.run(
            ["fish", "--private", "-c", f'source script.fish; complete -C "{line}"'],
            capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=environment["HOME"], env=environment,
        )  # fmt: skip
        shown = done.stdout.splitlines()
    assert len(shown) == len(expected)
    assert all(one.startswith(start) for one, start in zip(shown, expected, strict=True))
