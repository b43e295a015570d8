"""The wheel, as pip and uv install it: every command, a gateway with relays, and workers in other environments."""

import json
import shutil
import sys
import tomllib

import pytest
from support.deployments import free_port, worker
from support.programs import words_of
from support.releases import ROOT, UV, VERSION, install, release_of_all, run

FAKE = str(ROOT / "tests/support/fake_engine")
CONSOLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ichat"]["console"]

pytestmark = [
    pytest.mark.skipif(shutil.which("git") is None, reason="needs git"),
    pytest.mark.skipif(not UV.exists(), reason="needs the build tools"),
]


@pytest.fixture(name="wheel", scope="module")
def wheel_fixture(tmp_path_factory):
    (wheel,) = release_of_all(tmp_path_factory).glob("*.whl")
    return wheel


@pytest.fixture(name="programs", scope="module")
def programs_fixture(tmp_path_factory, wheel):
    return install(tmp_path_factory.mktemp("installed") / "ichat", wheel)


HELPS = """
import json
from ichat.__main__ import ROLES
from ichat.cli.commands import COMMANDS, parser_of
parsers = [*(one.parser() for one in ROLES.values()), *map(parser_of, COMMANDS)]
print(json.dumps([one.format_help() for one in parsers]))
"""


def test_every_command_is_there_under_its_own_name(programs):
    """Each help, refusal and completion says `ichat`, and never the name of the pyz."""
    said = json.loads(run(programs / "python", "-c", HELPS, cwd="/"))
    said += [run(programs / "ichat", "--help"), run(programs / "ichat", "completion", "bash")]
    said += [run(programs / "ichat", *words, code=64) for words in (["nothing"], ["sweep"], ["worker", "--port", "x"])]
    assert len(said) > 30
    assert [text for text in said if "ichat.pyz" in text or "ichat" not in text] == []


def test_the_packages_in_use_are_listed(programs):
    """The requirements as they are installed, and the console's packages; in a checkout the latter alone."""
    first, python, *lines = run(programs / "ichat", "version", "--deps").splitlines()
    found = dict(line.split(" ") for line in lines)
    listed = json.loads(run(UV, "pip", "list", "--format", "json", "--python", programs / "python"))
    assert (first, python) == (f"ichat {VERSION}", f"Python {sys.version.split()[0]}")
    console = {name for name in found if name.startswith("console/")}
    assert console == {f"console/{name}" for name in CONSOLE}
    installed = {one["name"].lower().replace("_", "-"): one["version"] for one in listed} | {"ichat": None}
    assert {name: found[name] for name in found.keys() - console} == {
        name: version for name, version in installed.items() if name != "ichat"
    }


def test_without_an_engine_it_says_what_to_install(programs):
    """One sentence, with the command for this environment."""
    said = run(programs / "ichat", "worker", "--model", "x", code=69)
    command = f"uv pip install --python {programs / 'python'} vllm"
    assert said == f"vLLM is not installed for {programs / 'python'}: install it there (`{command}`).\n"


def gateway_of(programs, start, tmp_path, text):
    """Start a gateway of the wheel with two relays; it runs in a directory with an `ichat` that is not its own."""
    config = tmp_path / "ichat.toml"
    config.write_text(f"[server_settings]\nport = {free_port()}\nrelays = 2\n{text}")
    return start([programs / "ichat", "gateway", "-c", config], PYTHONPATH=FAKE).wait_for_port()


def test_a_gateway_starts_relays_and_workers_of_its_own_kind(programs, start, tmp_path):
    """All its processes run the installed program, and no variable puts its packages before another's."""
    program = gateway_of(programs, start, tmp_path, worker()).wait_until_ready("m-0")
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200
    ours = [one for one in program.descendants() if {"relay", "worker"} & set(words_of(one))]
    assert len(ours) == 3
    assert {tuple(words_of(one)[:2]) for one in ours} == {(str(programs / "python"), str(programs / "ichat"))}
    assert {one.environ()["PYTHONPATH"] for one in ours} == {FAKE}
    assert program.stop() == 0


def test_a_worker_runs_in_the_environment_that_has_its_engine(programs, wheel, start, tmp_path):
    """It needs the gateway's version there: a sentence says what to type while that is missing, or is another one."""
    place = tmp_path / "engine"
    python = install(place, None) / "python"
    config = tmp_path / "ichat.toml"
    config.write_text(worker(more=f'python = "{python}"'))
    remedy = f"run `uv pip install --python {python} ichat=={VERSION}`.\n"
    check = [programs / "ichat", "gateway", "-c", config, "--check"]
    assert remedy in run(*check, code=1, PYTHONPATH=FAKE)
    install(place, wheel)
    (metadata,) = place.rglob(f"ichat-{VERSION}.dist-info/METADATA")
    right = metadata.read_text()
    metadata.write_text(right.replace(f"\nVersion: {VERSION}\n", "\nVersion: 0.0.1\n", 1))
    assert remedy in run(*check, code=1, PYTHONPATH=FAKE)
    metadata.write_text(right)
    program = gateway_of(programs, start, tmp_path, config.read_text()).wait_until_ready("m-0")
    assert program.ask("/v1/chat/completions", {"model": "m"})[0] == 200
    (process,) = [one for one in program.descendants() if "worker" in words_of(one)]
    assert words_of(process)[:2] == [str(python), str(place / "bin/ichat")]
