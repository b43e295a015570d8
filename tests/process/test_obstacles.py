"""One list of obstacles: what keeps a worker from starting is found by all that could tell it before, in one sentence.

These are `gateway --check`, `doctor`, a launch, a launch on trial (which the console's form shows) and the start.
"""

import argparse
import json
import os
import pathlib
import socket
import stat
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import attrs
import pytest
import trio
from support.deployments import free_port
from support.programs import LIMIT_S, ROOT, ichat

from ichat.cli.client import Api
from ichat.cli.gateway_address import GatewayAddress
from ichat.config.schema import Config, EngineSettings, ManagedWorkerConfig
from ichat.doctor.examination import examine
from ichat.engines.flag_check import refusals_of
from ichat.engines.flag_list import flags_of
from ichat.engines.kept_flags import Interpreter, KeptFlags, keep, read_kept
from ichat.errors import Exit
from ichat.preflight.obstacles import OF_THE_WORKER
from ichat.roles import gateway as gateway_role
from ichat.roles import worker_options

HERE = "PLACE"
"""Stands for the test's directory in the table."""
MISTAKES = {
    # The engines' arguments.
    "a misspelt flag": ({"max_modl_len": 1024}, "--max-modl-len (did you mean --max-model-len?) is no flag of vLLM's"),
    "a misspelt switch": ({"trust_remote_cod": True}, "--trust-remote-cod (did you mean --trust-remote-code?)"),
    "a misspelt flag that is off": ({"enforce_eagr": False}, "--no-enforce-eagr (did you mean --no-enforce-eager?)"),
    "a flag of nobody": ({"frobnicate": 1}, "--frobnicate is no flag of vLLM's"),
    "a word for a number": ({"max_model_len": "long"}, "--max-model-len takes a whole number, not 'long'"),
    "a word for a share": ({"gpu_memory_utilization": "most"}, "--gpu-memory-utilization takes a number, not 'most'"),
    "a choice that is none": ({"dtype": "float61"}, "not 'float61' (did you mean float16?)"),
    "no value": ({"tensor_parallel_size": True}, "--tensor-parallel-size needs a value"),
    "two values": ({"max_num_seqs": [1, 2]}, "--max-num-seqs takes one value, not 2 (1, 2)"),
    "broken JSON": ({"hf_overrides": "{a"}, "--hf-overrides takes JSON, not '{a'"),
    "a flag of the server": ({"ssl_keyfile": "k.pem"}, "--ssl-keyfile is refused: it concerns vLLM's own HTTP server"),
    "a key of its own": ({"api_key": "k"}, "--api-key is refused: clients' keys belong to the gateway"),
    "a key in the environment": (
        {"env": {"VLLM_API_KEY": "sk-0123456789"}}, "VLLM_API_KEY in the worker's environment has the engine ask for a key"
    ),
    "a file for uvicorn": ({"log_config_file": "/l.json"}, "set the variable VLLM_LOGGING_CONFIG_PATH"),
    "servers of its own": ({"api_server_count": 4}, "--api-server-count is refused: it concerns vLLM's own HTTP server"),
    "a flag of SGLang's": ({"schedule_conservativeness": 1.0}, "is refused: vLLM's scheduler has nothing like it"),
    "a number of SGLang's": ({"context_length": "many"}, "--max-model-len takes a whole number, not 'many'"),
    "another engine's slip": ({"backend": "fake", "lod_s": 1.0}, "--lod-s (did you mean --load-s?)"),
    "another engine's number": ({"backend": "fake", "children": "two"}, "--children takes a whole number, not 'two'"),
    "another engine's choice": ({"backend": "fake", "policy": "fare"}, "not 'fare' (did you mean fair?)"),
    # The model.
    "no such directory": ({"model_path": "/no/model"}, "There is no model /no/model: correct model_path"),
    "no such place here": ({"model_path": "./none"}, "There is no model ./none (seen from"),
    "an empty directory": ({"model_path": f"{HERE}/empty"}, "has no config.json"),
    "one directory too high": ({"model_path": HERE}, "has no config.json"),
    "a damaged config.json": ({"model_path": f"{HERE}/damaged"}, "config.json is not valid JSON"),
    "no architecture": ({"model_path": f"{HERE}/nameless"}, "names no architectures"),
    "pointers of Git LFS": ({"model_path": f"{HERE}/pointer"}, "is a pointer of Git LFS"),
    "weights that lack": ({"model_path": f"{HERE}/lacking"}, "1 of 1 files that model.safetensors.index.json names"),
    "a file that is no model": ({"model_path": f"{HERE}/model/model.safetensors"}, "is no GGUF model"),
    "no such model on the hub": ({"model_path": "org/absent"}, "There is no model org/absent on http"),
    "a model with terms": ({"model_path": "org/gated"}, "asks for a token (HF_TOKEN) for org/gated"),
    "no hub": (
        {"model_path": "org/any", "env": {"HF_ENDPOINT": "http://127.0.0.1:9"}}, "127.0.0.1:9 cannot be reached (Connection refused)"
    ),
    "no hub, by order": (
        {"model_path": "org/any", "env": {"HF_HUB_OFFLINE": "1"}}, "HF_HUB_OFFLINE keeps the engine from fetching it"
    ),
    # The interpreter.
    "no interpreter": ({"python": "/no/python"}, "There is no interpreter /no/python"),
    "a directory": ({"python": f"{HERE}/env"}, "is a directory: set python"),
    "not to be executed": ({"python": f"{HERE}/plain"}, "may not be executed by this user"),
    "without the engine": ({"python": f"{HERE}/without"}, "vLLM is not installed for"),
    "a broken one": ({"python": f"{HERE}/broken"}, "does not run (no libpython)"),
    # GPUs and ports.
    "no such GPU": ({"gpu_ids": [97]}, "There is no GPU 97"),
    "no such GPU for later": ({"gpu_ids": [97], "load": "on_demand"}, "There is no GPU 97"),
    "a GPU twice": ({"gpu_ids": [97, 97]}, "gpu_ids has a GPU twice (97, 97)"),
    "too few GPUs": ({"gpu_ids": [97], "tensor_parallel_size": 2}, "The model is spread over 2 GPUs, and the worker has 1"),
    "no address of this machine": ({"host": "198.51.100.1", "port": 0}, "The host 198.51.100.1 is no address of this machine"),
    "no such host": ({"host": "no such host", "port": 0}, "The host 'no such host' cannot be resolved"),
    "a port that is taken": ({"port": "TAKEN"}, "is taken by"),
}  # fmt: skip


def parser_like_vllms():
    """Make a parser with some flags as vLLM has them."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    for name, kind in (("max-model-len", int), ("max-num-seqs", int), ("gpu-memory-utilization", float)):
        add(f"--{name}", type=kind)
    add("--tensor-parallel-size", "-tp", type=int, default=1)
    add("--dtype", choices=["auto", "float16", "bfloat16"], default="auto")
    add("--hf-overrides", type=json.loads)
    add("--api-server-count", type=int)
    add("--model")
    for name in ("trust-remote-code", "enforce-eager"):
        add(f"--{name}", action=argparse.BooleanOptionalAction)
    for name in ("ssl-keyfile", "ssl-certfile", "uvicorn-log-level"):
        add(f"--{name}")
    return parser


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def hub():
    """A hub with no model that could be had."""

    class Replies(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response_only(404 if "absent" in self.path else 401)
            self.end_headers()

        def log_message(self, *_):
            """Write nothing."""

    class Hub(ThreadingHTTPServer):
        request_queue_size = 128

    server = Hub(("127.0.0.1", 0), Replies)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def place(tmp_path, monkeypatch, hub):
    """A directory with a good model, broken ones, and interpreters; no GPU, and a hub of its own."""
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "CUDA_VISIBLE_DEVICES", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", hub)
    monkeypatch.setenv("PYTHONPATH", "tests/support/fake_engine")  # as `Program` has it
    monkeypatch.chdir(ROOT)
    for name in ("model", "empty", "damaged", "nameless", "pointer", "lacking"):
        (tmp_path / name).mkdir()
        if name != "empty":
            (tmp_path / name / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
            (tmp_path / name / "model.safetensors").write_bytes(b"\0" * 2000)
    (tmp_path / "damaged/config.json").write_text("{")
    (tmp_path / "nameless/config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "pointer/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "lacking/model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    flags = tmp_path / "flags.json"
    flags.write_text(json.dumps({"flags": [attrs.asdict(one) for one in flags_of(parser_like_vllms())]}) + "\n")
    asks = f'case "$*" in *--list-flags*) echo asked >> {tmp_path}/asked; cat {flags};; esac'
    program(tmp_path / "env/bin/python", asks)
    program(tmp_path / "without", "exit 73")
    program(tmp_path / "broken", "echo no libpython >&2; exit 127")
    (tmp_path / "plain").write_text("")
    return tmp_path


def table_of(place, more, taken):
    """Return a worker with one mistake; all else of it is right."""
    table = {
        "model_name": "m", "model_path": f"{place}/model", "python": f"{place}/env/bin/python", "gpu_ids": [], **more
    }  # fmt: skip
    if table.get("backend") == "fake":
        table["python"] = sys.executable
    return json.loads(json.dumps(table).replace(HERE, str(place)).replace('"TAKEN"', str(taken)))


def toml_of(table):
    lines = []
    for key, value in table.items():
        inline = ", ".join(f"{name} = {json.dumps(one)}" for name, one in value.items()) if key == "env" else ""
        lines.append(f"{key} = {{ {inline} }}" if inline else f"{key} = {json.dumps(value)}")
    return "\n".join(["[[managed_workers]]", *lines, ""])


SILENT = "did not answer within"
"""Part of the sentence about a hub that is slow: this machine is busy."""


def once_the_hub_answers(ask, *args):
    """Return what `ask` returns, once the hub answered in time."""
    for _ in range(10):
        answer = ask(*args)
        if SILENT not in str(answer):
            break
    return answer


def findings_of(path):
    """Return what the doctor and `--check` find, by the workers' names."""
    groups = trio.run(examine, str(path), lambda: Api(GatewayAddress("http://127.0.0.1:9"), None))
    found = {}
    for finding in (one for group in groups if group.title == "Managed workers" for one in group.findings):
        found.setdefault(finding.name, []).append(finding)
    with pytest.raises(Exit) as raised:
        gateway_role.read_command_line(["-c", str(path), "--check"])
    lines = [line.strip().partition(": ") for line in str(raised.value).splitlines()[1:]]
    checked = {}
    for name, _, sentence in lines:
        checked.setdefault(name, []).append(sentence)
    return found, checked, raised.value


def test_every_mistake_is_found_by_all(place, gateway):
    """The doctor (which asks for the flags), `--check`, a launch, a launch on trial, and the start say the same."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        tables = {
            name: table_of(place, more, taken) | {"model_name": f"m{number}"}
            for number, (name, (more, _)) in enumerate(MISTAKES.items())
        }
        path = place / "examined.toml"
        text = "".join(map(toml_of, tables.values()))
        path.write_text(f'[server_settings]\nport = {free_port()}\nstate_directory = "{place}/other"\n{text}')
        found, checked, end = once_the_hub_answers(findings_of, path)
        assert (end.code, len(MISTAKES) >= 40) == (1, True)
        program = gateway("[restart]\nattempts_max = 1\n" + text)
        for number, (name, (_, part)) in enumerate(MISTAKES.items()):
            worker_id, body = f"m{number}-0", {**tables[name], "model_name": f"n{number}"}
            assert [one.level for one in found[worker_id] if part in one.sentence] == ["error"], (
                name,
                found[worker_id],
            )
            assert any(part in sentence for sentence in checked[worker_id]), (name, checked[worker_id])
            status, answer = once_the_hub_answers(program.ask, "/v1/admin/workers/launch?dry_run=1", body)
            assert (status, any(part in one for one in answer["objections"])) == (200, True), (name, answer)
            status, answer = once_the_hub_answers(program.ask, "/v1/admin/workers/launch", body)
            assert (status, part in answer["error"]["message"]) == (409, True), (name, answer)
            if body.get("load") == "on_demand":
                continue  # it starts once its model is wanted
            program.until(lambda worker_id=worker_id: program.state(worker_id) == "failed")
            worker = program.get(f"/v1/admin/workers/{worker_id}")[1]
            assert part in worker["cause"] or SILENT in worker["cause"], (name, worker["cause"])
    assert (place / "asked").read_text() == "asked\n"


def test_workers_without_mistakes_have_no_findings(place):
    """The same workers without their mistakes: nothing is found, and nothing was left unchecked."""
    more = (
        {"max_model_len": "32k", "dtype": "float16", "trust_remote_code": False, "client_stall_s": 9.0}, {"tp": 1},
        {"backend": "fake", "load_s": 0.5, "policy": "greedy"},
    )  # fmt: skip
    text = "".join(toml_of(table_of(place, one, 0) | {"model_name": f"m{n}"}) for n, one in enumerate(more))
    path = place / "examined.toml"
    path.write_text(f'[server_settings]\nport = {free_port()}\nstate_directory = "{place}/other"\n{text}')
    found, _, end = findings_of(path)
    assert [one.level for findings in found.values() for one in findings] == ["ok", "ok", "ok"]
    assert (end.code, str(end)) == (0, f"{path} is right.")


def test_a_check_says_what_it_did_not_check(place):
    """Without a kept list `--check` asks no engine, and never says that all is right."""
    path = place / "examined.toml"
    path.write_text(toml_of(table_of(place, {"max_modl_len": 8}, 0)))
    with pytest.raises(Exit) as raised:
        gateway_role.read_command_line(["-c", str(path), "--check"])
    assert (raised.value.code, str(raised.value)) == (
        0, f"{path} is well formed; the arguments for vllm were not checked: `./ichat.pyz doctor -c {path}` does.",
    )  # fmt: skip
    assert not (place / "asked").exists()


def test_a_doctor_that_gets_no_flags_says_so(place):
    """An interpreter that does not tell them leaves the arguments unchecked, which is a warning with the reason."""
    program(place / "env/bin/python", 'case "$*" in *--list-flags*) echo no torch >&2; exit 69;; esac')
    path = place / "examined.toml"
    path.write_text(toml_of(table_of(place, {"max_modl_len": 8}, 0)))
    groups = trio.run(examine, str(path), lambda: Api(GatewayAddress("http://127.0.0.1:9"), None))
    [found] = next(group.findings for group in groups if group.title == "Managed workers")
    assert found.level == "warning"
    assert "Its arguments could not be checked: The flags of vllm cannot be had" in found.sentence
    assert "(exit code 69): no torch" in found.sentence


def test_a_launch_on_trial_says_what_it_did_not_check(place, gateway):
    """That nothing keeps a worker from starting is not known where its engine did not tell its flags."""
    program(place / "env/bin/python", 'case "$*" in *--list-flags*) echo no torch >&2; exit 69;; esac')
    site = gateway("")
    for more, unchecked in (({"max_modl_len": 8}, "(exit code 69): no torch"), ({}, None)):
        status, answer = site.ask("/v1/admin/workers/launch?dry_run=1", table_of(place, more, 0))
        assert (status, answer["objections"]) == (200, [])
        assert answer["unchecked"] is unchecked or answer["unchecked"].endswith(unchecked)


# The command line of `worker`.


def run_worker(*words, **env):
    done = subprocess.run(
        ichat("worker", *words), cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=LIMIT_S
    )
    return done.returncode, done.stderr


@pytest.fixture
def own_vllm(place):
    """A vLLM of this interpreter's that nobody may import, and whose flags are kept."""
    (place / "library/vllm").mkdir(parents=True)
    (place / "library/vllm/__init__.py").write_text("raise SystemExit('imported')\n")
    search_path = os.pathsep.join([str(place / "library"), str(ROOT)])
    interpreter = Interpreter.of(sys.executable, "vllm", {"PYTHONPATH": search_path})
    keep(interpreter, KeptFlags([attrs.asdict(one) for one in flags_of(parser_like_vllms())], has_help=False))
    return search_path


def test_a_worker_refuses_a_key_in_its_environment(own_vllm):
    """The engine would ask for it; it is not imported for that."""
    code, said = run_worker("--model", "org/m", VLLM_API_KEY="k1", PYTHONPATH=own_vllm)
    assert (code, "imported" in said, "k1" in said) == (64, False, False), said
    assert "the environment variable VLLM_API_KEY is not for a worker: clients' keys belong to the gateway" in said


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["--model is missing: give a directory, or a name on the model hub"]),
        (["--model", "/no/model"], ["There is no model /no/model: correct --model"]),
        (["--model", f"{HERE}/empty"], ["has no config.json: set --model to a model's own directory"]),
        (
            ["--model", "org/m", "--max-modl-len", "8", "--dtype", "x"],
            ["did you mean --max-model-len?", "--dtype takes"],
        ),
    ],
)
def test_a_worker_finds_mistakes_without_importing_its_engine(place, own_vllm, words, parts):
    """A missing model, a missing directory, misspelt flags: the engine is not imported for them."""
    code, said = run_worker(*(word.replace(HERE, str(place)) for word in words), PYTHONPATH=own_vllm)
    assert (code, "imported" in said) == (64, False), said
    assert said.startswith("vLLM refuses these arguments:")
    assert all(part in said for part in parts), said


def test_a_worker_without_mistakes_goes_on(own_vllm):
    """Then the engine is imported, and says the rest."""
    code, said = run_worker("--model", "org/m", "--max-model-len", "8", "--port", "0", PYTHONPATH=own_vllm)
    assert "imported" in said, (code, said)


def test_the_workers_own_flags_are_known():
    """They may be arguments of a managed worker, and no engine is asked about them."""
    options = {option for action in worker_options.parser()._actions for option in action.option_strings}
    assert {option.lstrip("-").replace("-", "_") for option in options if option != "-h"} == OF_THE_WORKER


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], True),
        (["--log-streaming"], True),
        (["--log-streaming", "false"], False),
        (["--ls=true"], True),
        (["--no-log-streaming"], False),
    ],
)
def test_a_switch_may_stand_alone(words, expected):
    """`--log-streaming` is a switch that also takes a word; the engine's flags after it stay whole."""
    options, theirs = worker_options.read_command_line([*words, "--model", "m"])
    assert (options.log_streaming, theirs) == (expected, ["--model", "m"])


# The file.


@pytest.mark.parametrize(
    ("name", "text"),
    [("config.yaml", "model_list:\n  - model_name: a\n"), ("ichat.toml", "# mine\nmodel_list:\n  - a: b\n")],
)
def test_yaml_is_called_yaml(place, name, text):
    """Not an invalid line of TOML; it says which command makes TOML of it."""
    path = place / name
    path.write_text(text)
    with pytest.raises(Exit) as raised:
        gateway_role.read_command_line(["-c", str(path), "--check"])
    command = f"`./ichat.pyz convert {path} -o ichat.toml`"
    sentence = f"{path} is YAML, and iChat reads TOML: {command} converts LiteLLM's file or llama-swap's."
    assert (raised.value.code, str(raised.value)) == (64, sentence)


def test_the_doctor_takes_the_file_that_is_here(place):
    """Where none is named."""
    (place / "ichat.toml").write_text("[server_settings]\nportt = 3\n")
    done = subprocess.run(
        ichat("doctor"), cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 1
    assert "did you mean port?" in " ".join(done.stdout.split())


def test_commands_to_type_are_of_the_engines_environment(place):
    """`hf` is beside the interpreter, and not on the PATH; a GPU that is not there is left out of the table."""
    program(place / "env/bin/hf", "exit 0")
    more = {"model_path": "org/absent", "gpu_ids": [97]}
    path = place / "examined.toml"
    path.write_text(toml_of(table_of(place, more, 0)))
    groups = trio.run(examine, str(path), lambda: Api(GatewayAddress("http://127.0.0.1:9"), None))
    found = next(group.findings for group in groups if group.title == "Managed workers")
    assert f"{place}/env/bin/hf auth login" in [one.command for one in found]
    if "no NVIDIA GPU answers" in str(found):
        assert "gpu_ids = []" in [one.command for one in found]


# The kept lists.


def test_a_list_holds_until_its_interpreter_changes(place):
    """It is this user's alone, and holds for this interpreter, engine and search path, as they are."""
    python = str(place / "env/bin/python")
    interpreter, kept = Interpreter.of(python, "vllm", {}), KeptFlags([{"name": "--x"}], has_help=True)
    assert read_kept(interpreter) is None
    keep(interpreter, kept)
    assert read_kept(interpreter) == kept
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (interpreter.file(), interpreter.file().parent)]
    assert modes == [0o600, 0o700]
    assert read_kept(Interpreter.of(python, "sglang", {})) is None
    assert read_kept(Interpreter.of(python, "vllm", {"PYTHONPATH": "/else"})) is None
    assert read_kept(Interpreter.of(python, "vllm", {"PYTHONPATH": str(ROOT)})) == kept
    interpreter.file().chmod(0o666)
    assert read_kept(interpreter) is None
    interpreter.file().chmod(0o600)
    os.utime(python, ns=(1, 1))
    assert read_kept(interpreter) is None


def test_there_is_a_bound_to_the_lists(place, monkeypatch):
    """The oldest go first."""
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "home"))
    for number in range(5):
        interpreter = Interpreter.of(f"/python-{number}", "vllm", {})
        keep(interpreter, KeptFlags([], has_help=True), kept_max=3)
        os.utime(interpreter.file(), (number, number))
    assert [read_kept(Interpreter.of(f"/python-{n}", "vllm", {})) is not None for n in range(5)] == [0, 0, 1, 1, 1]


def test_a_damaged_list_is_none(place):
    """It is made again."""
    interpreter = Interpreter.of(str(place / "env/bin/python"), "vllm", {})
    keep(interpreter, KeptFlags([{"name": "--x"}], has_help=True))
    interpreter.file().write_text("{")
    assert read_kept(interpreter) is None


def test_a_list_that_cannot_be_written_is_remembered(place, monkeypatch):
    """By this process."""
    (place / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "file"))
    interpreter = Interpreter.of(str(place / "env/bin/python"), "vllm", {})
    keep(interpreter, KeptFlags([{"name": "--x"}], has_help=True))
    assert read_kept(interpreter) is not None


def test_flags_without_effect_are_left_out():
    """vLLM's parser has the flag, and its server, which would use it, is not there."""
    assert (
        refusals_of("vllm", ["--uvicorn-log-level", "info"], [attrs.asdict(f) for f in flags_of(parser_like_vllms())])
        == []
    )


def test_devices_of_another_vendor():
    """`gpu_ids` sets the variable that the engine's section names; NVIDIA's library is not asked about it."""
    from ichat.supervisor.launch import environment_of

    worker = ManagedWorkerConfig(model_name="m", model_path="m", gpu_ids=[1, 3])
    environment = environment_of(Config(engines={"vllm": EngineSettings(devices="HIP_VISIBLE_DEVICES")}), worker, "")
    assert environment["HIP_VISIBLE_DEVICES"] == "1,3"
    assert environment.get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")


def test_a_started_worker_has_its_gpus(place, gateway):
    """What the configuration says arrives in the environment of the process."""
    text = '[engines.fake]\ndevices = "ASCEND_RT_VISIBLE_DEVICES"\n'
    text += toml_of({"model_name": "m", "model_path": "/m", "backend": "fake", "gpu_ids": [2, 5]})
    program = gateway(text).wait_until_ready("m-0")
    pid = program.get("/v1/admin/workers/m-0")[1]["pid"]
    environment = pathlib.Path(f"/proc/{pid}/environ").read_text().split("\0")
    assert "ASCEND_RT_VISIBLE_DEVICES=2,5" in environment
    assert not any(line.startswith("CUDA_VISIBLE_DEVICES=") for line in environment)
