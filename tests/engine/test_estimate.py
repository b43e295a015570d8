"""Estimates against the engines' own figures, for models of each attention that is understood."""

import json
import subprocess

import pytest
from support.programs import ROOT
from support.real_engines import ENGINES, ENV, LOAD_S, MODELS, python_of

from ichat.placement.cache import tokens_in_cache
from ichat.placement.settings import settings_of
from ichat.preflight.model_memory import describe_model

CHAT, SHAPES = MODELS / "chat", MODELS / "shapes"
PLACES = {
    "chat": CHAT,
    **{name: SHAPES / name for name in ("grouped", "latent", "windows")},
    "small": SHAPES / "grouped",
}
KV_DTYPES = {"small": "fp8_e4m3"}


@pytest.fixture(scope="module", params=ENGINES)
def figures(request, room, tmp_path_factory):
    """Return an engine's name, and its figures for each model."""
    room.make(1)
    models = [f"{name}={place}:{KV_DTYPES.get(name, 'auto')}" for name, place in PLACES.items()]
    command = [python_of(request.param), ROOT / "tests/support/memory_figures.py", request.param, *models]
    log = tmp_path_factory.mktemp("figures") / "log"
    with log.open("w") as errors:
        done = subprocess.run(command, env=ENV[request.param], stdout=subprocess.PIPE, stderr=errors, timeout=LOAD_S)
    assert done.returncode == 0, log.read_text()[-4000:]
    lines = [json.loads(line) for line in done.stdout.decode().splitlines() if line.startswith('{"name"')]
    return request.param, {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", PLACES)
def test_estimates_are_the_engines_own_figures(figures, name):
    """Tokens in a KV cache of this size, and weights, within 1 %."""
    engine, found = figures
    told = found[name]
    model = describe_model(str(PLACES[name]), {}, {})
    arguments = {"kv_cache_dtype": KV_DTYPES.get(name, "auto"), "async_scheduling": False}
    if engine == "vllm":
        arguments["block_size"] = told["block"]
        assert model.shape.context == told["context"]
    settings = settings_of(engine, arguments)
    tokens = tokens_in_cache(model.shape, settings, told["cache_bytes"], model.shape.context, told.get("in_flight", 0))
    assert tokens == pytest.approx(told["tokens"], rel=0.01)
    assert model.weights().on_gpu() == pytest.approx(told["weights"], rel=0.01)
