"""Downloads from a hub of the tests, by the real libraries of the engines' environments."""

import contextlib
import fcntl
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time

import pytest
from support.model_hub import HubModel, ModelHub, has_part
from support.programs import LIMIT_S
from support.real_engines import PYZ, python_of

MIB = 1024 * 1024
CONFIG = b'{"architectures": ["LlamaForCausalLM"]}'
WEIGHTS = random.Random(1).randbytes(24 * MIB)
STOP = 12 * MIB
"""The libraries write pieces of 10 MiB: a part of the file is on the disk then."""
LIBRARIES = [("vllm", "huggingface"), ("sglang", "huggingface"), ("sglang", "modelscope")]
"""Each engine's environment with a hub's library in it."""


@pytest.fixture(name="hub")
def hub_fixture():
    with ModelHub() as hub:
        hub.models["org/tiny.1"] = HubModel({
            "config.json": CONFIG, "model.safetensors": WEIGHTS, "pytorch_model.bin": b"x" * MIB, "original/a.pth": b"x",
        })  # fmt: skip
        yield hub


class Puller:
    """Starts `ichat.pyz pull` with a directory for models; what it started ends with its context."""

    def __init__(self, hub, directory):
        self.cache = directory / "models"
        self.env = {**os.environ, **hub.environment(self.cache), "PYTHONPATH": "", "LC_ALL": "C.UTF-8"}
        self.env.pop("HF_TOKEN", None)
        self.cwd = directory
        self.started = []

    def start(self, library, *flags, model="org/tiny.1", before=None, **env):
        engine, hub = library
        command = [sys.executable, PYZ, "pull", model, f"--hub={hub}", f"--python={python_of(engine)}"]
        process = subprocess.Popen(
            [*map(str, command), *flags], env=self.env | env, cwd=self.cwd, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=before, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, library, *flags, **more):
        """Return the exit code, the output and the standard error."""
        process = self.start(library, *flags, **more)
        output, errors = process.communicate(timeout=LIMIT_S)
        return process.returncode, output.strip(), errors.strip()

    def end(self):
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()


@pytest.fixture(name="puller")
def puller_fixture(hub, tmp_path):
    puller = Puller(hub, tmp_path)
    yield puller
    puller.end()


def refusal(puller, library=LIBRARIES[0], **more):
    """Return the only sentence of a refused download."""
    code, output, errors = puller.run(library, **more)
    assert (code, output) == (69, ""), errors
    return errors.splitlines()[-1]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_model_is_downloaded_once_and_then_without_the_network(hub, puller, library):
    """The files that engines read are fetched; a second call asks the hub nothing."""
    code, directory, errors = puller.run(library)
    assert code == 0, errors
    assert {name for name in os.listdir(directory) if not name.startswith(".")} == {"config.json", "model.safetensors"}
    with open(f"{directory}/model.safetensors", "rb") as file:
        assert file.read() == WEIGHTS
    before = len(hub.requests)
    assert puller.run(library) == (0, directory, "")
    assert puller.run(library, HF_HUB_OFFLINE="1") == (0, directory, "")
    assert len(hub.requests) == before
    code, _, errors = puller.run(library, "--fresh")
    assert code == 0, errors
    assert len(hub.requests) > before


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_cut_or_killed_download_goes_on_where_it_was(hub, puller, library):
    """A cut is made good by the same process; after kill -9 the next process continues, and nothing comes twice."""
    hub.cuts, hub.stop_at = [11 * MIB], STOP
    first = puller.start(library)
    wait_until(lambda: has_part(puller.cache, 10 * MIB) and not hub.cuts)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=LIMIT_S)
    lock = puller.cache / ".locks/models--org--tiny.1/ichat.lock"
    wait_until(lambda: is_free(lock))
    hub.stop_at = None
    hub.go.set()
    code, directory, errors = puller.run(library)
    assert code == 0, errors
    with open(f"{directory}/model.safetensors", "rb") as file:
        assert file.read() == WEIGHTS
    assert any(begin >= 10 * MIB for path, begin in hub.ranges if path == "model.safetensors"), hub.ranges


def is_free(path):
    with path.open("r+b") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def wait_until(condition, limit_s=LIMIT_S):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s
        time.sleep(0.05)


def test_two_that_want_a_model_download_it_once(hub, puller):
    """The second shows the progress of the first, and is done with it."""
    hub.stop_at = STOP
    first = puller.start(LIBRARIES[0])
    assert hub.is_waiting.wait(LIMIT_S)
    second = puller.start(LIBRARIES[1])
    line = next(line for line in second.stderr if "by process" in line)
    assert "org/tiny.1: " in line
    assert " %" in line
    hub.go.set()
    for process in (first, second):
        output, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, errors
        assert "snapshots" in output
    assert hub.served["model.safetensors"] == len(WEIGHTS)
    assert len([one for one in hub.requests if one[1].startswith("/api/models")]) == 1


def test_the_next_takes_over_when_a_download_is_killed(hub, puller):
    """A lock without a holder is no lock."""
    hub.stop_at = STOP
    first = puller.start(LIBRARIES[0])
    assert hub.is_waiting.wait(LIMIT_S)
    second = puller.start(LIBRARIES[0])
    assert next(line for line in second.stderr if "by process" in line)
    hub.stop_at = None
    hub.go.set()
    os.kill(first.pid, signal.SIGKILL)
    output, errors = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, errors
    assert "snapshots" in output


def test_a_lock_of_another_program_is_named(hub, puller, tmp_path):
    """The process that has the hub's own lock of a file is named, and waited for."""
    info = hub.models["org/tiny.1"]
    lock = puller.cache / ".locks/models--org--tiny.1" / f"{digest_of(info.files['model.safetensors'])}.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = puller.start(LIBRARIES[0])
        line = next(line for line in process.stderr if str(lock) in line)
        assert "waiting for" in line
        assert "end it if it hangs" in line
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert "snapshots" in output
    assert (tmp_path / "models").is_dir()


def digest_of(content):
    import hashlib

    return hashlib.sha256(content).hexdigest()


GATED = {"X-Error-Code": "GatedRepo"}
REFUSALS = {
    "absent": ({"model": "org/none"}, {}, "There is no model org/none on {url}"),
    "a revision that is none": ({"revision": "v9"}, {}, "org/tiny.1 on {url} has no revision v9: correct the revision"),
    "gated": ({}, {"refusal": 403, "headers": GATED}, "{url} asks for a token (HF_TOKEN) for org/tiny.1: accept"),
    "gated, with a token": (
        {"HF_TOKEN": "hf_abc"}, {"refusal": 403, "headers": GATED}, "{url} refuses this token for org/tiny.1: accept"
    ),
    "no such token": ({"HF_TOKEN": "hf_abc"}, {
        "refusal": 401, "headers": {"X-Error-Message": "Invalid credentials in Authorization header"},
    }, "{url} refuses this token for org/tiny.1"),
    "too many requests": ({}, {"refusal": 429, "headers": {"Retry-After": "300"}}, "try again after 300 s, or log in"),
    "a broken hub": ({}, {"refusal": 503}, "{url} answers 503 for org/tiny.1: try again later"),
    "no room": ({}, {"sizes": {"model.safetensors": 10**18}}, "org/tiny.1 needs 931322574.62 GiB more in "),
    "no network": ({"HF_ENDPOINT": "http://127.0.0.1:1"}, {}, "http://127.0.0.1:1 cannot be reached (Connection refused)"),
    "offline": ({"HF_HUB_OFFLINE": "1"}, {}, "HF_HUB_OFFLINE keeps the rest away: unset it"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_a_sentence_that_says_what_to_do(hub, puller, case):
    """Nothing half-made stays, and standard output stays empty."""
    given, changes, sentence = REFUSALS[case]
    for name, value in changes.items():
        setattr(hub.models["org/tiny.1"], name, value)
    more = dict(given)
    flags = [f"--revision={more.pop('revision')}"] if "revision" in more else []
    code, output, errors = puller.run(LIBRARIES[0], *flags, **more)
    assert (code, output) == (69, ""), errors
    said = errors.splitlines()[-1]
    assert sentence.format(url=hub.url) in said
    assert not list(puller.cache.glob("models--*/snapshots/*")), "nothing was begun"


@pytest.mark.parametrize(("refusal_", "sentence"), [
    ({"refusal": 404}, "There is no model org/tiny.1 on {url}"), ({"refusal": 429, "headers": {"Retry-After": "99"}}, "after 99 s"),
])  # fmt: skip
def test_refusals_of_modelscope_are_sentences_as_well(hub, puller, refusal_, sentence):
    """The same sentences, by the errors of another library."""
    for name, value in refusal_.items():
        setattr(hub.models["org/tiny.1"], name, value)
    assert sentence.format(url=hub.url) in refusal(puller, LIBRARIES[2])


def test_a_short_pause_that_the_hub_asks_for_is_kept(hub, puller):
    """After it the download goes on by itself."""
    model = hub.models["org/tiny.1"]
    model.refusal, model.headers, model.refusals_left = 429, {"Retry-After": "1"}, 1
    code, output, errors = puller.run(LIBRARIES[0])
    assert code == 0, errors
    assert "waiting for 1 s" in errors
    assert "snapshots" in output


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_full_disk_ends_a_download_that_goes_on_later(hub, puller, library):
    """The part that is there stays, and counts."""
    more = {"before": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (15 * MIB, 15 * MIB))}
    said = refusal(puller, library, **more)
    assert "is full (File too large): make room and ask again" in said
    code, output, errors = puller.run(library)
    assert code == 0, errors
    assert output


def test_a_hub_that_falls_silent_is_given_up(hub, puller, tmp_path):
    """`downloads.stall_s` bounds that."""
    (tmp_path / "ichat.toml").write_text("[downloads]\nstall_s = 2\n")
    hub.stop_at = STOP
    said = refusal(puller, LIBRARIES[0])
    assert f"No byte for 2 s ({hub.url} has sent nothing of org/tiny.1)" in said


def test_progress_is_in_lines_where_there_is_no_terminal(hub, puller):
    """Per cent at once, and then every few seconds."""
    hub.stop_at = STOP
    process = puller.start(LIBRARIES[0])
    assert hub.is_waiting.wait(LIMIT_S)
    line = next(line for line in process.stderr if " %" in line)
    assert line.startswith("org/tiny.1: ")
    hub.go.set()
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert json.loads(
        (puller.cache / "models--org--tiny.1/.ichat" / f"{os.path.basename(output.strip())}.json").read_text()
    )
