"""The commands for models that are loaded on demand, against a real gateway with a fake engine."""

import json
import re
import sys
import urllib.request

import pytest
from support.deployments import worker
from support.exposition import Shown
from support.programs import LIMIT_S

from ichat.cli import commands as terminal
from ichat.errors import Exit

ON_DEMAND = 'load = "on_demand"\nmin_loaded_s = 0\nload_s = 0.3\n'
SITE = worker("a", ON_DEMAND) + worker("b", ON_DEMAND) + worker("c") + '[[swap_sets]]\nmembers = ["a", "b"]\n'


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command in this process: `code, out, err = run(program, "load", "a")`."""
    monkeypatch.delenv("ICHAT_API_KEY", raising=False)

    def command(program, *words):
        capsys.readouterr()
        try:
            code = terminal.run([*words, "--gateway", f"http://127.0.0.1:{program.port}"])
        except Exit as exit_:
            print(exit_, file=sys.stderr)
            code = exit_.code
        out, err = capsys.readouterr()
        return code, out, err

    return command


def test_models_are_loaded_and_unloaded_by_hand(gateway, run):
    """What a load evicts is said before, what has become of it after, and the metrics and views agree with it."""
    program = gateway(SITE)
    code, out, err = run(program, "load", "a")
    assert (code, out.split()[:3]) == (0, ["a-0", "ready", "after"]), err
    assert err.startswith("Loading it evicts no other worker.")
    explained = program.ask("/v1/admin/route", {"model": "b"})[1]
    assert explained["rule"] == "loading"
    assert [(one["worker_id"], one["kind"]) for one in explained["load"]["evicts"]] == [("a-0", "stop")]
    assert explained["load"]["worker_id"] == "b-0"
    assert program.ask("/v1/admin/route", {"model": "c"})[1]["load"] is None
    code, out, err = run(program, "load", "b", "--json")
    assert (code, json.loads(out)["worker_id"], json.loads(out)["state"]) == (0, "b-0", "ready")
    assert err.startswith("Loading it would stop worker a-0, which has been idle for ")
    models = {one["id"]: one["loaded"] for one in program.get("/v1/admin/cluster/status")[1]["models"]}
    assert models == {"a": False, "b": True, "c": None}
    assert program.state("a-0") == "cold"
    code, out, err = run(program, "unload", "b", "--drain-s", "0")
    assert (code, out.split()[:2]) == (0, ["b-0", "cold"]), err
    assert program.state("b-0") == "cold"
    with urllib.request.urlopen(f"http://127.0.0.1:{program.port}/metrics?workers=0", timeout=LIMIT_S) as answer:
        now = Shown(answer.read().decode())
    for model in ("a", "b"):
        assert now.get("ichat_model_loads_total", model=model, reason="command", result="ready") == 1
        assert now.get("ichat_model_load_seconds_count", model=model) == 1
        assert now.get("ichat_model_loaded", model=model) == 0
    assert now.get("ichat_swaps_total") == 1


def test_every_refused_model_command_is_one_sentence(gateway, run):
    """Each refusal is one sentence, and exit code 1."""
    program = gateway(SITE)
    for words, said in (
        (("load", "nothing"), "The model `nothing` does not exist."),
        (("unload", "c"), "on_demand"),
        (("sleep", "a"), "is not loaded"),
        (("wake", "a"), "is not asleep"),
    ):
        code, out, err = run(program, *words)
        assert (code, out) == (1, ""), words
        *before, last = err.splitlines()
        assert said in last
        assert all(re.match(r"\w+-0: \w+", line) for line in before), err  # what its workers do, if slow
