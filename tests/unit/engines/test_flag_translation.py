"""The common vocabulary of arguments, without an engine: the parsers here have as many flags as a test needs."""

import argparse
import contextlib
import json

import pytest

from ichat.config.package_data import read_toml
from ichat.engines import flag_table, old_vllm_flags
from ichat.engines.flags import ENGINE_KEYS, CommandLine, Flag, FlagValueError, Refusal, number
from ichat.engines.sglang import arguments as sglang
from ichat.engines.sglang import flags as sglang_args
from ichat.engines.translation import explain, translate
from ichat.engines.vllm import arguments as vllm
from ichat.engines.vllm import flags as vllm_args
from ichat.errors import EXIT_USAGE, Exit
from ichat.security.redact import masked, shown

VLLM = (
    "--model --max-model-len --speculative-config/-sc --hf-overrides --structured-outputs-config --tokenizer --seed"
    " --tensor-parallel-size/-tp --max-num-batched-tokens --limit-mm-per-prompt --runner --convert --api-key --host"
    " --enforce-eager! --no-enforce-eager! --enable-chunked-prefill! --no-enable-chunked-prefill! --enable-lora!"
    " --no-enable-prefix-caching! --enable-prefix-caching! --disable-log-stats! --lora-modules --served-model-name"
    " --master-addr --master-port --optimization-level --compilation-config --max-loras --enable-expert-parallel!"
    " --chat-template --help!/-h! --no-enable-log-requests! --enable-log-requests! --attention-backend --log-level"
)
SGLANG = (
    "--model-path/--model --context-length --mem-fraction-static --tp-size/--tensor-parallel-size --random-seed"
    " --disable-radix-cache! --chunked-prefill-size --max-prefill-tokens --served-model-name --json-model-override-args"
    " --speculative-algorithm --speculative-num-steps --speculative-eagle-topk --speculative-num-draft-tokens"
    " --speculative-draft-model-path --grammar-backend --constrained-json-disable-any-whitespace! --lora-paths"
    " --max-loras-per-batch --max-loaded-loras --is-embedding! --dist-init-addr --ep-size --enable-metrics! --api-key"
    " --cuda-graph-backend-decode --cuda-graph-backend-prefill --disable-cuda-graph! --kv-cache-dtype --device"
    " --max-total-tokens --page-size --cpu-offload-gb --log-requests! --limit-mm-data-per-request --nnodes --revision"
    " --max-running-requests --preferred-sampling-params --chat-template --reasoning-parser --log-level --help!"
)
ENGINES = ("vllm", "sglang")


def parser(options):
    """Make a parser: blanks separate flags, slashes the names of one, and ! says that it stands alone."""
    made = argparse.ArgumentParser(add_help=False)
    for words in options.split():
        names = [name.rstrip("!") for name in words.split("/")]
        made.add_argument(*names, **({"action": "store_true"} if "!" in words else {"nargs": "*"}))
    return made


def for_vllm(*argv, options=VLLM):
    return translate(argv, parser(options), vllm_args.table())


def for_sglang(*argv, options=SGLANG):
    return translate(argv, parser(options), sglang_args.table())


def passed(steps):
    return [word for step in steps for word in step.passed]


def refusal(translate_, *argv, **more):
    with pytest.raises(Exit) as caught:
        translate_(*argv, **more)
    assert caught.value.code == EXIT_USAGE
    return str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "m"],
        ["--model=m"],
        ["--served-model-name", "a", "b"],
        ["--max-model-len", "-1"],
        ["--chat-template=-x"],
        ["--enforce-eager"],
        ["--no-enforce-eager"],
        ["-tp", "2"],
        ["-tp=2"],
        ["--structured-outputs-config.backend", "xgrammar"],
        ["--speculative-config", '{"model": "-d"}'],
        ["--help=all"],
        ["-h"],
    ],
)
def test_a_flag_of_the_engine_is_unchanged(words):
    """A flag of the engine's own is neither changed nor remarked upon."""
    (step,) = for_vllm(*words)
    assert (step.given, step.passed, step.why) == (words, words, "")


def test_underscores_become_dashes_in_names_only():
    """`--max_model_len=x_y` keeps its value, and keys inside JSON their names."""
    assert passed(for_vllm("--max_model_len=1_0", "--seed", "a_b")) == ["--max-model-len=1_0", "--seed", "a_b"]
    assert passed(for_vllm("--structured_outputs_config.any_key", "1")) == ["--structured-outputs-config.any_key", "1"]
    assert passed(for_sglang("--context_length", "8")) == ["--context-length", "8"]


def test_a_flag_that_the_engine_still_has_is_left_alone():
    """An entry of the table holds only where the engine's parser does not know the very name."""
    assert passed(for_vllm("--swap-space", "4", options="--swap-space")) == ["--swap-space", "4"]
    (step,) = for_vllm("--swap-space", "4", options="--swap-space-2")
    assert step.passed == []
    assert "swaps nothing" in step.why


def test_the_beginning_of_a_name_is_not_the_name():
    """argparse would take it for the longer one."""
    assert "--max-model (did you mean --max-model-len?)" in refusal(for_vllm, "--max-model", "8")
    assert passed(for_vllm("--device", "cpu", options="--device-ids --device-memory-utilization")) == []
    assert "--context-len (did you mean --context-length?)" in refusal(for_sglang, "--context-len", "8")


def test_one_error_names_every_refusal():
    """One Exit 64 names everything that cannot be had."""
    text = refusal(for_sglang, "--worker-cls", "x", "--model", "m", "--middleware", "y", "--swap-space", "4")
    assert text.splitlines()[0] == "SGLang refuses these arguments:"
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["--worker-cls", "--middleware"]
    assert refusal(for_vllm, "x", "--model", "m") == (
        "vLLM refuses these arguments: 'x' stands alone; every value needs its flag before it"
    )


def test_an_unknown_flag_is_not_for_argparse_to_guess():
    """What is in no table is refused here, with the nearest name there is."""
    assert "(did you mean --tensor-parallel-size?)" in refusal(for_vllm, "--tensr-parallel-size", "2")
    assert "none of its flags is known to do the same" in refusal(for_sglang, "--zzz")


def test_vllm_names_for_sglang():
    """The common vocabulary: names and values become SGLang's."""
    cases = {
        ("--max-model-len", "32k"): ["--context-length", "32000"],
        ("--max_model_len=2K",): ["--context-length", "2048"],
        ("--gpu-memory-utilization", "0.8"): ["--mem-fraction-static", "0.8"],
        ("--seed", "1"): ["--random-seed", "1"],
        ("--seed=--x",): ["--random-seed=--x"],
        ("-tp", "2"): ["--tensor-parallel-size", "2"],
        ("--tensor-parallel-size", "2"): ["--tensor-parallel-size", "2"],
        ("--no-enable-prefix-caching",): ["--disable-radix-cache"],
        ("--enable-prefix-caching",): [],
        ("--enforce-eager",): [
            "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled",
        ],
        ("--max-num-batched-tokens", "8k"): ["--chunked-prefill-size", "8000"],
        ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8"): [
            "--chunked-prefill-size", "-1", "--max-prefill-tokens", "8",
        ],
        ("--runner", "pooling", "--convert", "embed"): ["--is-embedding"],
        ("--kv-cache-dtype", "fp8"): ["--kv-cache-dtype", "fp8_e4m3"],
        ("--kv-cache-dtype", "fp8_e5m2"): ["--kv-cache-dtype", "fp8_e5m2"],
        ("--cpu-offload-gb", "4.0"): ["--cpu-offload-gb", "4"],
        ("--block-size", "16", "--num-gpu-blocks-override", "10"): [
            "--page-size", "16", "--max-total-tokens", "160",
        ],
        ("--max-loras", "3", "--max-cpu-loras", "3"): ["--max-loras-per-batch", "4", "--max-loaded-loras", "4"],
        ("--structured-outputs-config.backend", "guidance"): ["--grammar-backend", "llguidance"],
        ("--guided-decoding-backend", "xgrammar"): ["--grammar-backend", "xgrammar"],
        ("--limit-mm-per-prompt", "image=2"): ["--limit-mm-data-per-request", '{"image": 2}'],
        ("--disable-log-requests",): [],
        ("--reasoning-parser", "deepseek_r1"): ["--reasoning-parser", "deepseek-r1"],
        ("--log-level", "INFO"): ["--log-level", "info"],
        ("--override-generation-config", '{"temperature": 1}'): ["--preferred-sampling-params", '{"temperature": 1}'],
    }  # fmt: skip
    for given, expected in cases.items():
        steps = for_sglang(*given)
        assert passed(steps) == expected, given
        assert all(step.why or step.given == step.passed for step in steps), given


def test_sglang_names_for_vllm():
    """SGLang's names do for vLLM what they can."""
    cases = {
        ("--model-path", "m"): ["--model", "m"],
        ("--context-length", "4096"): ["--max-model-len", "4096"],
        ("--tp-size", "2", "--ep-size", "2"): ["--tensor-parallel-size", "2", "--enable-expert-parallel"],
        ("--chunked-prefill-size", "-1"): ["--no-enable-chunked-prefill"],
        ("--disable-radix-cache",): ["--no-enable-prefix-caching"],
        ("--grammar-backend", "llguidance"): ["--structured-outputs-config", '{"backend": "guidance"}'],
        ("--lora-paths", "a=p", '{"lora_name": "b", "lora_path": "q"}'): [
            "--enable-lora", "--lora-modules", "a=p", '{"name": "b", "path": "q"}',
        ],
        ("--max-loras-per-batch", "4"): ["--max-loras", "3"],
        ("--dist-init-addr", "[::1]:5"): ["--master-addr", "::1", "--master-port", "5"],
        ("--attention-backend", "fa3"): ["--attention-backend", "FLASH_ATTN"],
        ("--attention-backend", "FLASHINFER"): ["--attention-backend", "FLASHINFER"],
        ("--disable-cuda-graph",): ["--enforce-eager"],
        ("--is-embedding",): ["--runner", "pooling"],
    }  # fmt: skip
    for given, expected in cases.items():
        assert passed(for_vllm(*given)) == expected, given
    assert "give --block-size as well" in refusal(for_vllm, "--max-total-tokens", "100")


def test_flags_that_speak_of_speculation_become_one_json():
    """Several old flags are one flag now, which the first of them carries; the others say where they are."""
    steps = for_vllm("--speculative-model", "d", "--seed", "1", "--num-speculative-tokens", "5")
    assert [step.passed for step in steps] == [
        ["--speculative-config", '{"model": "d", "num_speculative_tokens": 5}'], ["--seed", "1"], [],
    ]  # fmt: skip
    assert "it stands with --speculative-model" in steps[2].why
    found = passed(for_vllm("--speculative-model", "[ngram]", "--ngram-prompt-lookup-max", "4"))
    assert json.loads(found[1]) == {"method": "ngram", "prompt_lookup_max": 4}


@pytest.mark.parametrize(
    "own", [["--speculative-config", '{"model": "d"}'], ["--speculative-config.model=d"], ["-sc", '{"model": "d"}']]
)
def test_old_flags_are_put_into_the_json_that_is_given(own):
    """argparse would keep the last of two only; what contradicts is refused."""
    steps = for_vllm("--num-speculative-tokens", "5", *own)
    assert steps[0].passed == []
    assert steps[1].passed == ["--speculative-config", '{"num_speculative_tokens": 5, "model": "d"}']
    assert steps[1].why
    assert "two values for 'model'" in refusal(for_vllm, "--speculative-model", "e", *own)


def test_rope_scaling_is_an_override_now():
    """It joins the overrides that are given; vLLM would forget theta, so theta must be said."""
    scaling = '{"type": "dynamic", "factor": 2.0}'
    overrides = ["--hf-overrides", '{"a": 1}']
    found = passed(for_vllm("--rope-scaling", scaling, "--rope-theta", "10000", *overrides))
    assert json.loads(found[1]) == {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, "a": 1,
    }  # fmt: skip
    assert "give --rope-theta as well" in refusal(for_vllm, "--rope-scaling", scaling)
    steps = for_sglang("--rope-scaling", scaling, *overrides, "--json-model-override-args", '{"b": 2}')
    assert json.loads(passed(steps)[1]) == {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "a": 1, "b": 2}
    assert len(passed(steps)) == 2


def test_booleans_may_say_true_and_false():
    """`--x True`, `--x=false` and `--no-x` are what the engine has for them; another value is refused."""
    assert passed(for_vllm("--enable-chunked-prefill", "True")) == ["--enable-chunked-prefill"]
    assert passed(for_vllm("--enable-chunked-prefill=False")) == ["--no-enable-chunked-prefill"]
    assert passed(for_vllm("--no-enforce-eager", "False")) == ["--enforce-eager"]
    (step,) = for_vllm("--no-disable-log-stats")
    assert (step.passed, step.why) == ([], "vLLM is without it unless --disable-log-stats is given")
    assert passed(for_sglang("--no-enable-metrics", "--enable-metrics")) == ["--enable-metrics"]
    assert passed(for_sglang("--enable-prefix-caching", "False")) == ["--disable-radix-cache"]
    assert "--enforce-eager takes no value" in refusal(for_vllm, "--enforce-eager", "model")


def test_sglang_has_one_name_for_its_model():
    """The first name goes to the engine; all of them are in `given`, for the worker."""
    (step,) = for_sglang("--served-model-name", "a", "b", "c")
    assert (step.given[1:], step.passed) == (["a", "b", "c"], ["--served-model-name", "a"])
    assert "b and c" in step.why
    assert for_sglang("--served-model-name", "a")[0].why == ""


def test_vllms_speculation_for_sglang():
    """What corresponds is translated, and what does not is refused by name."""
    config = {"method": "eagle3", "model": "d", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}
    assert passed(for_sglang("--speculative-config", json.dumps(config))) == [
        "--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", "4", "--speculative-draft-model-path", "d",
    ]  # fmt: skip
    steps = for_sglang("--spec-method", "ngram", "--spec-tokens", "5", "--ngram-prompt-lookup-max", "4")
    assert passed(steps) == ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6"]
    assert steps[1].why.endswith("it goes with --spec-method")
    text = refusal(for_sglang, "--speculative-model", "d", "--num-speculative-tokens", "5")
    assert "--speculative-model with --num-speculative-tokens is refused: SGLang needs a `method`" in text
    config["disable_padded_drafter_batch"] = True
    assert "disable_padded_drafter_batch" in refusal(for_sglang, "--speculative-config", json.dumps(config))
    assert "is no JSON" in refusal(for_sglang, "--speculative-config", "{")


def test_adapters_are_translated():
    """vLLM's and SGLang's JSON for an adapter have different keys."""
    words = ["--lora-modules", "a=p", '{"name": "b", "path": "q", "base_model_name": "m"}']
    (step,) = for_sglang(*words)
    assert step.passed == ["--lora-paths", "a=p", '{"lora_name": "b", "lora_path": "q"}']
    assert "base_model_name" in step.why
    assert "`name` and `path`" in refusal(for_sglang, "--lora-modules", '{"name": "b"}')
    assert "no JSON" in refusal(for_sglang, "--lora-modules", "{")


def test_machines_meet_where_vllm_says():
    """Address and port are one flag of SGLang's, with vLLM's defaults for what is missing."""
    steps = for_sglang("--nnodes", "2", "--master-port", "5", "--master-addr", "10.0.0.1")
    assert passed(steps) == ["--nnodes", "2", "--dist-init-addr", "10.0.0.1:5"]
    assert "--dist-init-addr" in steps[1].why
    assert passed(for_sglang("--master-port", "5")) == ["--dist-init-addr", "127.0.0.1:5"]
    assert passed(for_sglang("--master-addr", "::1")) == ["--dist-init-addr", "[::1]:29501"]


def test_experts_are_spread_over_the_ranks_there_are():
    """SGLang wants their number, which vLLM takes from the other sizes."""
    assert passed(for_sglang("-tp", "4", "--enable-expert-parallel"))[-2:] == ["--ep-size", "4"]
    assert passed(for_sglang("--enable-expert-parallel")) == []
    assert "replicas share no experts" in refusal(for_sglang, "-ep", "-dp", "2")


def test_old_forms_of_values():
    """Names that stayed and values that changed."""
    assert passed(for_vllm("--limit-mm-per-prompt", "image=16,video=2")) == [
        "--limit-mm-per-prompt", '{"image": 16, "video": 2}',
    ]  # fmt: skip
    assert passed(for_vllm("--limit-mm-per-prompt", '{"image": 2}')) == ["--limit-mm-per-prompt", '{"image": 2}']
    assert passed(for_vllm("--limit-mm-per-prompt.image", "2")) == ["--limit-mm-per-prompt.image", "2"]
    assert passed(for_vllm("--compilation-config", "3")) == ["--optimization-level", "3"]
    assert passed(for_vllm("-O3")) == ["-O3"]
    assert passed(for_vllm("-O", '{"level": 3}')) == ["--compilation-config", '{"level": 3}']
    assert passed(for_vllm("--task", "score")) == ["--runner", "pooling", "--convert", "classify"]
    assert "--limit-mm-per-prompt takes JSON" in refusal(for_vllm, "--limit-mm-per-prompt", "image")


def test_numbers_as_vllm_writes_them():
    """Lower case is decimal, upper case binary."""
    assert [number(text) for text in ("7", "2k", "2K", "1.5k", "1M", "1m", "-1")] == [
        "7", "2000", "2048", "1500", "1048576", "1000000", "-1",
    ]  # fmt: skip
    for text in ("", "k", "1.5K", "1.5", "a"):
        with pytest.raises(FlagValueError):
            number(text)


@pytest.mark.parametrize("table", [vllm_args.table(), sglang_args.table()], ids=lambda table: table.engine)
@pytest.mark.parametrize(
    "values", [[], ["1"], ["x"], ["{}"], ["["], ["{"], ['["a"]'], ['{"a": {"b": 1}}'], ["a", "b"], [""]]
)
def test_no_value_breaks_a_rule(table, values):
    """Whatever stands after a flag, its rule answers or says what is wrong."""
    for name, entry in table.entries.items():
        flag = Flag(name, values)
        try:
            outcome = entry.rule(flag, CommandLine({}, [flag]))
        except FlagValueError as wrong:
            outcome = wrong
        assert str(outcome), name


@pytest.mark.parametrize(
    ("table", "names"),
    [(vllm_args.table(), vllm._SERVER_FLAGS), (sglang_args.table(), sglang._SERVER_FLAGS)],
    ids=ENGINES,
)
def test_every_refused_flag_is_in_the_table(table, names):
    """The worker looks again after the engine's import; the table, which is asked without one, has said it before."""
    for name in [*names, *ENGINE_KEYS]:
        entry = table.entries[f"--{name.replace('_', '-')}"]
        outcomes = []
        for values in ([], ["2"]):
            flag = Flag(name, values)
            with contextlib.suppress(FlagValueError):
                outcomes.append(entry.rule(flag, CommandLine({}, [flag])))
        assert entry.is_for_native, name
        assert any(isinstance(outcome, Refusal) for outcome in outcomes), name


@pytest.mark.parametrize(
    ("translate_", "own", "words", "why"),
    [
        (
            for_vllm,
            "--log-config-file",
            "--log-config-file log.json",
            "this vLLM has it for uvicorn, which the worker does without; set the variable VLLM_LOGGING_CONFIG_PATH",
        ),
        (for_vllm, "--api-key", "--api-key k", "clients' keys belong to the gateway ([[security.keys]] in its"),
        (for_sglang, "--api-key --admin-api-key", "--admin-api-key k", "clients' keys belong to the gateway"),
    ],
)
def test_an_engines_own_flag_without_effect_is_refused(translate_, own, words, why):
    """Also by the other engine, which does not know it."""
    for options in (f"--model {own}", "--model"):
        assert f"{words.split()[0]} is refused: " in (said := refusal(translate_, *words.split(), options=options))
        assert why in said


def test_a_file_for_the_log_goes_where_vllm_reads_it():
    """Newer releases read it themselves, first by the same flag and then as a part of their own JSON."""
    words = ["--log-config-file", "l.json"]
    [step] = for_vllm(*words, options="--log-config-file --logging-config")
    assert (step.passed, step.why) == (words, "")
    [step] = for_vllm(*words, options="--logging-config")
    assert step.passed == ["--logging-config", '{"pylogging_config_file": "l.json"}']


def test_an_access_log_that_is_not_there_needs_no_exceptions():
    """The flag is SGLang's own, and is left out with the reason."""
    [step] = for_sglang(
        "--uvicorn-access-log-exclude-prefixes", "/a", "/b", options="--uvicorn-access-log-exclude-prefixes"
    )
    assert (step.passed, step.why) == ([], "the worker serves without uvicorn, and the gateway logs the requests")


def test_secrets_are_not_logged():
    """Secrets go to the engine, and nowhere else."""
    steps = for_vllm("--hf-token", "k1", "--model=m", "--hf_token=k2", options=f"{VLLM} --hf-token")
    assert passed(steps) == ["--hf-token", "k1", "--model=m", "--hf-token=k2"]
    steps += for_sglang("--hf-overrides", '{"x": {"api_key": "k3"}}')
    for text in (explain(steps), str(steps), str(steps[0])):
        assert "***" in text
        assert not {"k1", "k2", "k3"} & {*text.replace('"', " ").replace("'", " ").replace("=", " ").split()}
    assert "k1" not in refusal(for_sglang, "--hf-token", "k1")
    assert "k1" not in refusal(for_vllm, "--api-key=k1", "k2")
    assert masked({"api_key": "k", "a": [{"token": "t", "b": 1}], "hf_token": None}) == {
        "api_key": "***", "a": [{"token": "***", "b": 1}], "hf_token": None,
    }  # fmt: skip
    assert shown(["--bucket-time-to-first-token", "1"]) == "--bucket-time-to-first-token 1"


def test_explain():
    """Given, got, why, and the whole command, which a shell reads back."""
    steps = for_sglang("--model", "my model", "--seed", "1", "--swap-space", "4")
    lines = [
        "--model 'my model' -> --model 'my model'",
        "--seed 1           -> --random-seed 1",
        "                      SGLang calls it --random-seed",
        "--swap-space 4     -> (nothing)",
        "                      vLLM swaps nothing any more; --kv-offloading-size keeps KV cache in the",
        "                      CPU's memory",
        "",
        "The engine gets:",
        "  --model 'my model' --random-seed 1",
    ]
    assert explain(steps).splitlines() == lines
    assert str(steps[1]) == "--seed 1 -> --random-seed 1: SGLang calls it --random-seed"
    assert str(steps[2]).startswith("--swap-space 4 -> nothing: ")


@pytest.mark.parametrize(
    ("package", "rules"),
    [
        ("ichat.engines", old_vllm_flags.RULES),
        ("ichat.engines.vllm", vllm_args.RULES),
        ("ichat.engines.sglang", sglang_args.RULES),
    ],
)
def test_a_flag_has_one_rule_in_each_place(package, rules):
    """A file of flags has only sections that are read, and each flag has one rule in it and the Python beside it."""
    data = read_toml(package, "flags.toml")
    sections = [*data.items(), *(data.pop("native")).items()]
    others = {"sentences", "vocabulary", "native"}
    assert {name for name, _ in sections} - others <= set(flag_table._SECTIONS)
    names = list(rules)
    for section, entries in sections:
        for key, given in entries.items() if section not in others else ():
            is_group = isinstance(given, dict) and "flags" in given
            names += (given["flags"] if is_group else key).split()
    assert all(name.startswith("-") for name in names)
    assert [name for name in names if names.count(name) > 1] == []
