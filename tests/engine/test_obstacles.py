"""Mistakes in the arguments of the real engines, found by their own lists of flags."""

import os
import subprocess
import time

import pytest
from support.programs import ROOT
from support.real_engines import ENGINES, LOAD_S, MODELS, PYZ, python_of

from ichat.engines.flag_check import refusals_of
from ichat.engines.kept_flags import Interpreter, read_kept

MISTAKES = {
    "vllm": {
        "--max-modl-len 8": "did you mean --max-model-len?",
        "--context-length many": "--max-model-len",
        "--dtype float61": "did you mean float16?",
        "--gpu-memory-utilization most": "takes a number",
        "--tensor-parallel-size": "needs a value",
        "--ssl-keyfile k": "vLLM's own HTTP server",
        "--api-key k": "clients' keys belong to the gateway",
        "--no-enforce-eagr": "did you mean --no-enforce-eager?",
        "--disable-radix-cach": "did you mean --disable-radix-cache?",
    },
    "sglang": {
        "--max-modl-len 8": "did you mean --max-model-len?",
        "--max-model-len many": "must be a whole number",
        "--dtype float61": "did you mean float16?",
        "--gpu-memory-utilization most": "--mem-fraction-static takes a number",
        "--tp-size": "needs a value",
        "--enable-ssl-refresh": "SGLang's own HTTP server",
        "--root-path /v1": "SGLang's own HTTP server",
        "--admin-api-key k": "clients' keys belong to the gateway",
        "--load-format safetensor": "did you mean safetensors?",
    },
}
RIGHT = {
    "vllm": "--max-model-len 32k --no-enable-prefix-caching -tp 2 --hf-overrides.a 1 -O3 --uvicorn-log-level info",
    "sglang": "--max-model-len 32k --enforce-eager -tp 2 --kv-cache-dtype auto --json-model-override-args {}",
}


@pytest.fixture(scope="module", params=ENGINES)
def kept(request, tmp_path_factory):
    """The engine's list, which a worker has kept whose flag was misspelt, and how that ended."""
    engine, base = request.param, str(tmp_path_factory.mktemp("state"))
    words = [
        python_of(engine),
        PYZ,
        "worker",
        "-be",
        engine,
        "--model",
        MODELS / "chat",
        "--port",
        "0",
        "--max-modl-len",
        "8",
    ]
    ends = []
    for _ in range(2):
        began = time.monotonic()
        done = subprocess.run(
            [str(word) for word in words], cwd=ROOT, env={**os.environ, "XDG_STATE_HOME": base}, capture_output=True,
            text=True, timeout=LOAD_S,
        )  # fmt: skip
        ends.append((done.returncode, done.stderr, time.monotonic() - began))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", base)
        found = read_kept(Interpreter.of(str(python_of(engine)), engine, {}))
    return engine, found, ends


def test_the_engine_is_imported_for_the_first_mistake_only(kept):
    """The list is kept although the engine refuses; the same words come the next time, without an import."""
    _, found, (first, second) = kept
    assert found is not None
    for code, said, _ in (first, second):
        assert (code, "did you mean --max-model-len?" in said) == (64, True), said
    assert ("importing" in first[1], "importing" in second[1]) == (True, False)


def test_mistakes_are_found_by_the_list(kept):
    """Names, kinds, choices, and flags of the server that the worker replaces."""
    engine, found, _ = kept
    for words, part in MISTAKES[engine].items():
        [refusal] = refusals_of(engine, words.split(), found.flags)
        assert part in refusal, (words, refusal)


def test_arguments_that_the_engine_accepts_are_no_mistakes(kept):
    """Every flag's own default and choices, and words of both vocabularies."""
    engine, found, _ = kept
    assert refusals_of(engine, RIGHT[engine].split(), found.flags) == []
    for flag in found.flags:
        if flag["is_hidden"] or flag["kind"] == "switch" or isinstance(flag["default"], dict | bool):
            continue
        default = flag["default"] if isinstance(flag["default"], list) else [flag["default"]]
        for values in ([str(one) for one in default if one is not None], flag["choices"][:1]):
            if values and values != [""]:
                assert refusals_of(engine, [flag["name"], *values], found.flags) == [], (flag["name"], values)
