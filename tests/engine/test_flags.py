"""Every flag that the documents name, asked of the engines' own parsers."""

import pytest
from engine.flags_table import ALIASES, COUNTS, FILE, TABLES, Engine, sglang_rows, text, vllm_rows

from ichat.engines.flags import FlagOutcome

ROWS = [*sglang_rows(), *vllm_rows()]
TOGETHER = {
    "sglang": (
        ("--model m --served-model-name a b --max-model-len 32k --gpu-memory-utilization 0.5 --seed 3 -tp 2"
        " --enable-expert-parallel --no-enable-prefix-caching --rope-theta 5 --hf-overrides.a 1 --max-loras 2"
        " --max-cpu-loras 2 --lora-modules x=p --enable-lora --scheduling-policy priority --nnodes 2"
        " --master-addr 10.0.0.1 --distributed-executor-backend ray"),
        {
            "model_path": "m", "served_model_name": "a", "context_length": 32000, "mem_fraction_static": 0.5,
            "random_seed": 3, "tp_size": 2, "ep_size": 2, "disable_radix_cache": True, "max_loras_per_batch": 3,
            "json_model_override_args": '{"rope_parameters": {"rope_theta": 5.0}, "a": 1}', "max_loaded_loras": 3,
            "lora_paths": ["x=p"], "enable_lora": True, "enable_priority_scheduling": True, "use_ray": True,
            "schedule_low_priority_values_first": True, "dist_init_addr": "10.0.0.1:29501",
        },
    ),
    "vllm": (
        ("--model-path m --served-model-name a b --context-length 2048 --tp-size 2 --random-seed 3"
        " --speculative-model [ngram] --num-speculative-tokens 5 --ngram-prompt-lookup-max 4 --task embed"
        " --enable-chunked-prefill True --limit-mm-per-prompt image=2 --swap-space 4 --rope-theta 5"
        ' --rope-scaling {"type":"linear"} --hf-overrides {"a":1} --grammar-backend llguidance'),
        {
            "model": "m", "served_model_name": ["a", "b"], "max_model_len": 2048, "tensor_parallel_size": 2, "seed": 3,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
            "runner": "pooling", "convert": "embed", "enable_chunked_prefill": True, "model_tag": None,
            "limit_mm_per_prompt": {"image": 2},
            "hf_overrides": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5.0}, "a": 1},
        },
    ),
}  # fmt: skip
"""Command lines with words of all vocabularies, and what the engines' parsers shall make of them."""
WITHOUT_EFFECT = (
    "--scheduler-cls", "--enable-ssl-refresh", "--ssl-cert-reqs", "--uvicorn-log-level", "--log-level-http",
    "--disable-uvicorn-access-log",
)  # fmt: skip
"""Flags of an engine's own parser that a worker leaves out with a reason."""
OF_THE_SERVER = ("--ssl-keyfile k", "--ssl-certfile c", "--ssl-ca-certs c", "--grpc-port 1")
"""Flags of both engines that concern the HTTP server which the worker replaces."""


@pytest.fixture(scope="module")
def engines():
    """The parsers of both engines, each in its own environment."""
    made = {name: Engine(name) for name in TABLES}
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(params=TABLES)
def engine(request, engines):
    return engines[request.param]


def test_no_flag_is_missing():
    """The lists are as long as the documents."""
    assert len(sglang_rows()) == COUNTS["A"] + ALIASES
    for document in "B134":
        named = [row.words[0] for row in vllm_rows() if document in row.documents and row.words[0][:2] == "--"]
        assert len(named) == COUNTS[document], document
    for rows in (sglang_rows(), vllm_rows()):
        assert len({row.words[0] for row in rows}) == len(rows)


def test_the_table_is_what_the_engines_say(engines):
    """FLAGS.md is up to date."""
    assert FILE.read_text() == text(engines), "run `python tests/engine/flags_table.py`"


def test_no_flag_is_ignored_in_silence(engine):
    """A flag goes through as it is, or there is a reason; a refusal names the flag."""
    for row in ROWS:
        found = engine.translate(row.words)
        if isinstance(found, str):
            assert f"{row.words[0]} " in found
            continue
        (step,) = found
        assert isinstance(step, FlagOutcome)
        assert step.why or [step.passed[0].replace("_", "-"), *step.passed[1:]] == row.words


def test_a_flag_of_the_server_is_refused(engine):
    """With the reason, by the same table that the worker applies."""
    refused = [*OF_THE_SERVER, *(["--root-path /v1", "--enable-ssl-refresh"] if engine.name == "sglang" else [])]
    for words in refused:
        found = engine.translate(words.split())
        assert isinstance(found, str), words
        assert "own HTTP server, which an iChat worker replaces" in found


def test_no_engine_asks_for_a_key(engine):
    """The worker's check refuses it, so the table does: the gateway has no key for it."""
    for words in ("--api-key k", "--admin-api-key k"):
        assert "clients' keys belong to the gateway" in engine.translate(words.split())


def test_every_translated_flag_is_accepted_by_the_engine(engine):
    """The engine's own parser takes every result."""
    for row in ROWS:
        found = engine.translate(row.words)
        if not isinstance(found, str):
            words = ["--model", "m", *(word for step in found for word in step.passed)]
            assert "error" not in engine.parse(words), (row.words, words, engine.parse(words))


def test_nothing_is_translated_that_the_parser_knows(engine):
    """Names of the engine's own are never renamed; at most their values are, and what has no effect is left out."""
    own = {option for action in engine.parser._actions for option in action.option_strings}
    for row in ROWS:
        found = engine.translate(row.words)
        if row.words[0] in own and not isinstance(found, str):
            (step,) = found
            names = {word for word in step.passed if word[:2] == "--"}
            assert names <= {row.words[0], "--optimization-level"} or not names, row.words
            assert step.passed or row.words[0] in WITHOUT_EFFECT, row.words


def test_every_flag_of_one_engine_gets_an_answer_from_the_other(engines):
    """Whatever is given, the answer is steps or one sentence, and never a broken rule."""
    for name, other in (("vllm", "sglang"), ("sglang", "vllm")):
        for action in engines[other].parser._actions:
            for option in action.option_strings:
                for words in ([option], [option, "1"], [option, "x"], [option, "{}"]):
                    assert engines[name].translate(words), words


def test_command_lines_of_all_vocabularies(engine):
    """Together they mean what each of them means."""
    line, expected = TOGETHER[engine.name]
    steps = engine.translate(line.split(" "))
    assert not isinstance(steps, str), steps
    found = engine.parse([word for step in steps for word in step.passed])
    assert {key: found["values"][key] for key in expected} == expected
