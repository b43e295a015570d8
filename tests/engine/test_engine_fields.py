"""Every field and header that a real engine reads of a request has been judged: it is taken off for workers, or it is harmless."""

import json
import os
import subprocess
import tomllib

import pytest
from support.programs import ROOT
from support.real_engines import ENGINES, ENV, python_of

from ichat.proxy.engine_control import CARRIER, HEADER_PREFIXES, HEADERS, MEMBERS

JUDGED = tomllib.loads((ROOT / "tests/engine/engine_fields.toml").read_text())
ORDINARY = {kind: {*judged["ordinary"], *judged["why_not"]} for kind, judged in JUDGED.items()}
CARRIED = {"kv_cache_report_mode"}
"""Members of `vllm_xargs` alone."""


def test_each_name_has_one_judgement():
    """No name is both harmless and taken off, nor judged twice."""
    assert ORDINARY["fields"].isdisjoint(MEMBERS)
    assert ORDINARY["headers"].isdisjoint(name.decode() for name in HEADERS)
    for judged in JUDGED.values():
        assert set(judged["ordinary"]).isdisjoint(judged["why_not"])
        assert judged["ordinary"] == sorted(set(judged["ordinary"]))


@pytest.fixture(scope="module")
def known():
    """What each engine reads: its fields and its headers, each with where."""

    def ask(engine):
        done = subprocess.run(
            [python_of(engine), ROOT / "tests/support/engine_classes.py", engine],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, **ENV[engine]},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return {engine: ask(engine) for engine in ENGINES}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_field_and_header_of_an_engine_has_been_judged(known, engine):
    """One that a release adds fails here, until it stands in `ichat/proxy/engine_control.py` or in `tests/engine/engine_fields.toml`."""
    fields, headers = known[engine]["fields"], known[engine]["headers"]
    assert len(fields) > 100, "the classes were not found"
    assert {name: where for name, where in fields.items() if name not in ORDINARY["fields"] | MEMBERS.keys()} == {}
    steering = {name.decode() for name in HEADERS} | {
        name for name in headers if name.encode().startswith(HEADER_PREFIXES)
    }
    assert {name: where for name, where in headers.items() if name not in ORDINARY["headers"] | steering} == {}


def test_no_judgement_is_left_over(known):
    """What no engine reads any more is not listed."""
    fields = known["vllm"]["fields"] | known["sglang"]["fields"]
    headers = known["vllm"]["headers"] | known["sglang"]["headers"]
    assert (ORDINARY["fields"] | MEMBERS.keys()) - CARRIED == fields.keys()
    assert CARRIER in fields
    assert ORDINARY["headers"] | {name.decode() for name in HEADERS} == headers.keys()
