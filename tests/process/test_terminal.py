"""What a person sees who starts iChat on a terminal."""

import contextlib
import json
import pathlib
import re
import signal
import subprocess
import time
import urllib.request

import pytest
import trio
from support.deployments import free_port, worker
from support.programs import LIMIT_S, ROOT, ichat
from support.terminals import Pty

from ichat.admin.reload import ConfigFile
from ichat.config.schema import Config, Logs, ServerSettings
from ichat.errors import Exit
from ichat.roles import gateway


def ask(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)


def test_a_gateway_speaks_to_a_person(tmp_path):
    """It takes the file that is here, tells where its page is, and has a short line for a request to a model alone."""
    (tmp_path / "ichat.toml").write_text("[server_settings]\nport = 0\n" + worker())
    with contextlib.closing(Pty(["gateway"], cwd=tmp_path)) as screen:
        screen.until(r"\d\d:\d\d:\d\d the gateway listens on 127\.0\.0\.1:\d+\r\n")
        port = int(re.search(r"listens on 127\.0\.0\.1:(\d+)", screen.text)[1])
        screen.until(rf"\d\d:\d\d:\d\d the console: http://127\.0\.0\.1:{port}/console/#key=\S+\r\n")
        screen.until(r"\[m-0\] .*ready after")
        assert len(re.search(r"starting worker m-0: (.*)…\r\n", screen.text)[1]) < 200
        assert re.search(r"\x1b\[2m\[m-0\] .*\x1b\[0m\r\n", screen.text)
        deadline = time.monotonic() + LIMIT_S
        while not ask(port, "/v1/models")["data"]:
            assert time.monotonic() < deadline
        ask(port, "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}]})
        screen.until(r"\r\n\d\d:\d\d:\d\d 200 m (\d+ tok )?\d+\.\d s\r\n")
        assert "/v1/models" not in screen.text
        assert "{" not in screen.text
        screen.process.send_signal(signal.SIGTERM)
        assert screen.end() == 0


def test_a_refused_file_shows_each_mistake_on_its_line(tmp_path):
    """Each mistake has a line of its own, which begins with blanks as no record does."""
    path = tmp_path / "ichat.toml"
    path.write_text("[server_settings]\nport = 0\n")
    with contextlib.closing(Pty(["gateway"], cwd=tmp_path)) as screen:
        screen.until("the console: ")
        path.write_text("[server_settings]\nport = 0\nportt = 3\n")
        screen.until(
            r"was not accepted:\r\n {11}server_settings\.portt: unknown key; did you mean port\?\r\n {9}Nothing was"
        )


@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.3", "127.0.0.3"), ("::1", "[::1]")])
def test_the_link_leads_to_where_the_gateway_listens(tmp_path, host, shown):
    """Also where that is another address than 127.0.0.1."""
    (tmp_path / "ichat.toml").write_text(f'[server_settings]\nport = 0\nhost = "{host}"\n')
    with contextlib.closing(Pty(["gateway"], cwd=tmp_path)) as screen:
        screen.until(r"listens on \S+:\d+")
        port = int(re.search(r"listens on \S+:(\d+)", screen.text)[1])
        screen.until(rf"the console: http://{re.escape(shown)}:{port}/console/#key=\S+\r\n")


@pytest.mark.parametrize("is_fixed", [True, False])
def test_a_log_names_the_command_that_prints_the_link(gateway, is_fixed):
    """It is complete: typed as it stands, it finds this gateway."""
    program = gateway("", free_port() if is_fixed else 0)
    link = re.compile(r"`\./ichat\.pyz console (.*)` prints the console's link")
    program.until(lambda: link.search(program.text()))
    named = link.search(program.text())[1]
    assert named.startswith("-c " if is_fixed else f"--gateway http://127.0.0.1:{program.port}")
    done = subprocess.run(ichat("console", *named.split()), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"http://127.0.0.1:{program.port}/console/#key="), done.stderr


def test_json_can_be_had_on_a_terminal(tmp_path):
    """`logs.format` says so."""
    (tmp_path / "ichat.toml").write_text('[server_settings]\nport = 0\n[logs]\nformat = "json"\n')
    with contextlib.closing(Pty(["gateway"], cwd=tmp_path)) as screen:
        screen.until(r'\{"time": .*"message": "the gateway listens on 127\.0\.0\.1:\d+"\}')
        port = int(re.search(r"listens on 127\.0\.0\.1:(\d+)", screen.text)[1])
        ask(port, "/v1/models")
        screen.until(r'\{"time": .*"path": "/v1/models"')


def test_a_gateway_without_a_file(tmp_path, monkeypatch):
    """It begins empty; what is named has to be there, and there is nothing to check."""
    monkeypatch.chdir(tmp_path)
    config, file = gateway.read_command_line([])
    assert (config, file) == (Config(), ConfigFile(pathlib.Path("ichat.toml"), None))
    with pytest.raises(Exit, match=r"There is no ichat\.toml here to check; -c FILE names another file\."):
        gateway.read_command_line(["--check"])
    with pytest.raises(Exit, match=r"none\.toml cannot be read"):
        gateway.read_command_line(["-c", "none.toml"])
    pathlib.Path("ichat.toml").write_text("[server_settings]\nport = 4001\n")
    assert gateway.read_command_line([])[0].server_settings.port == 4001


async def test_a_file_that_comes_later_is_taken(tmp_path, nursery, caplog):
    """A gateway that began empty says so, and goes on with the file as soon as there is one."""
    caplog.set_level("INFO")
    path = tmp_path / "ichat.toml"
    config = Config(server_settings=ServerSettings(port=0), logs=Logs(access_log=""))
    with trio.fail_after(LIMIT_S):
        await nursery.start(gateway.run, config, ConfigFile(path, None))
        assert "launch a model on the console or with `./ichat.pyz run MODEL`" in caplog.text
        path.write_text(
            '[server_settings]\nport = 0\n[[external_routes]]\nmodel_name = "m"\napi_base = "http://x/v1"\n'
        )
        while "the file has changed" not in caplog.text:
            await trio.sleep(0.05)
