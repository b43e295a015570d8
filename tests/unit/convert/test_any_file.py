"""Files as they may be: keys of both programs with any values in them."""

import functools

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.converting import check

from ichat.convert import litellm, llama_swap
from ichat.convert.command import PRODUCTS, convert
from ichat.convert.litellm_routes import PROVIDERS
from ichat.convert.llama_swap_models import SENTENCES
from ichat.errors import Exit

WORDS = st.sampled_from([
    "a", "b", "*", "a*", "os.environ/KEY", "${PORT}", "${a}", "vllm serve x --a 1", "http://h/v1", "openai/x", "openai/*",
    "30d", "", "model", "messages", "CUDA_VISIBLE_DEVICES=0", *(f"{name}/m" for name in PROVIDERS),
])  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats() | WORDS | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)


def tables(keys, inner=VALUES):
    return st.dictionaries(st.sampled_from(sorted(keys)), inner | VALUES, max_size=6)


PARAMS = tables({
    "model", "api_base", "api_key", "temperature", "extra_body", "extra_headers", "organization", "drop_params",
    "max_parallel_requests", "input_cost_per_token", "ssl_verify", "custom_llm_provider", "rpm",
})  # fmt: skip
ENTRY = st.fixed_dictionaries({"model_name": WORDS, "litellm_params": PARAMS}, optional={"model_info": VALUES})
LITELLM = tables(
    litellm.KEYS | litellm.OWN_KEYS,
    st.lists(ENTRY, max_size=3)
    | tables({"fallbacks", "context_window_fallbacks", "model_group_alias", "timeout", "num_retries", "max_budget"}),
)
MODEL = tables({
    "cmd", "proxy", "aliases", "env", "checkEndpoint", "ttl", "useModelName", "filters", "concurrencyLimit", "macros",
    "unlisted", *" ".join(SENTENCES["models"]).split(),
})  # fmt: skip
SWAP = tables(
    llama_swap.KEYS | {"models", "routing"},
    st.dictionaries(WORDS, MODEL | tables({"members", "targets", "models", "proxy"})),
)


@functools.cache
def kinds():
    return st.tuples(st.just("litellm"), LITELLM) | st.tuples(st.just("llama-swap"), SWAP)


@settings(max_examples=150, deadline=None)
@given(kinds())
def test_any_file_becomes_a_configuration_or_a_sentence(kind):
    """No value ends the command in any other way, and iChat accepts each result."""
    product, value = kind
    assert product in PRODUCTS
    try:
        text = convert(yaml.safe_dump(value, allow_unicode=True), "config.yaml", product).text()
    except Exit as refusal:
        text = "" if refusal.code == 64 else "not TOML"
    check(text)
