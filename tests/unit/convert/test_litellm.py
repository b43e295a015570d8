"""LiteLLM's configuration: each key of its public reference and examples is carried over, or named."""

import re
import tomllib

import pytest
from support.converting import check, converted, table_of

from ichat.config.aliases import ANY_FAILURE

# The keys that LiteLLM documents, by their tables. Those with a counterpart have tests of their own below.
LITELLM_SETTINGS = """
success_callback failure_callback callbacks service_callback service_callbacks turn_off_message_logging modify_params
enable_preview_features LITELLM_DISABLE_STOP_SEQUENCE_LIMIT redact_user_api_key_info mcp_aliases langfuse_default_tags
content_policy_fallbacks cache cache_params disable_end_user_cost_tracking force_ipv4
disable_end_user_cost_tracking_prometheus_only key_generation_settings disable_add_transform_inline_image_block
use_chat_completions_url_for_anthropic_messages disable_hf_tokenizer_download enable_json_schema_validation
enable_key_alias_format_validation disable_copilot_system_to_assistant default_team_settings telemetry
include_cost_in_streaming_usage websearch_interception_params max_budget budget_duration max_internal_user_budget
ssl_verify request_headers
""".split()
ROUTER_SETTINGS = """
redis_host redis_password redis_port redis_db redis_url enable_pre_call_check enable_pre_call_checks
content_policy_fallbacks enable_tag_filtering tag_filtering_match_any retry_policy allowed_fails_policy default_priority
polling_interval max_fallbacks default_litellm_params debug_level client_ttl cache_kwargs routing_strategy_args
caching_groups alerting_config assistants_config retry_after provider_budget_config model_group_retry_policy
cache_responses router_general_settings optional_pre_call_checks deployment_affinity_ttl_seconds
ignore_invalid_deployments search_tools guardrail_list routing_groups weights max_retries model_group_affinity_config
""".split()
GENERAL_SETTINGS = """
completion_model disable_spend_logs disable_spend_updates disable_master_key_return disable_reset_budget
disable_retry_on_max_parallel_request_limit_error disable_adding_master_key_hash_to_db disable_responses_id_security
enable_jwt_auth enforce_user_param reject_clientside_metadata_tags allowed_routes key_management_system database_url
database_connection_pool_limit database_connection_timeout allow_requests_on_db_unavailable custom_auth
infer_model_from_keys background_health_checks alerting alerting_threshold health_check_details public_routes alert_types
use_client_credentials_pass_through_routes enforced_params enable_oauth2_auth use_x_forwarded_for
service_account_settings image_generation_model store_model_in_db supported_db_objects user_mcp_management_mode
store_prompts_in_spend_logs max_response_size_mb proxy_budget_rescheduler_min_time proxy_budget_rescheduler_max_time
proxy_batch_write_at proxy_batch_polling_interval alerting_args custom_key_generate allowed_ips embedding_model
default_team_disabled alert_to_webhook_url key_management_settings allow_user_auth user_api_key_cache_ttl
disable_prisma_schema_update litellm_key_header_name moderation_model custom_sso allow_client_side_credentials
admin_only_routes use_azure_key_vault use_google_kms spend_report_frequency ui_access_mode litellm_jwtauth
litellm_license oauth2_config_mappings pass_through_endpoints enable_oauth2_proxy_auth forward_openai_org_id
forward_client_headers_to_llm_api maximum_spend_logs_retention_period maximum_spend_logs_retention_interval
""".split()
WHOLE_FILE = """
environment_variables callback_settings include guardrails mcp_servers search_tools vector_store_registry
finetune_settings files_settings assistant_settings credential_list prompts policies no_key_of_anybody
""".split()
LITELLM_PARAMS = """
tpm rpm itpm otpm order weight api_version timeout stream_timeout max_retries num_retries cooldown_time tags tag_regex
max_budget budget_duration default_api_key_tpm_limit default_api_key_rpm_limit litellm_credential_name region_name
aws_access_key_id aws_secret_access_key aws_region_name aws_role_name aws_bedrock_runtime_endpoint s3_bucket_name
s3_region_name aws_batch_role_arn vertex_project vertex_location vertex_credentials watsonx_region_name azure_ad_token
tenant_id client_id client_secret gcs_bucket_name use_in_pass_through use_litellm_proxy use_chat_completions_api
litellm_trace_id merge_reasoning_content_in_choices mock_response mock_timeout auto_router_config
complexity_router_config adaptive_router_config quality_router_default_model configurable_clientside_auth_params
keepalive_seconds allow_client_keepalive_override provider_affinity_header input_cost_per_second
output_cost_per_second cache_creation_input_token_cost max_file_size_mb vector_store_id milvus_text_field
valkey_host no_key_of_anybody
""".split()
MODEL_INFO = """
id mode base_model max_tokens max_input_tokens max_output_tokens supports_vision supports_function_calling tier team_id
access_groups health_check_timeout adaptive_router_preferences db_model additionalProp1
""".split()


@pytest.mark.parametrize("key", WHOLE_FILE)
def test_tables_of_a_litellm_file_are_named(key):
    """Those without a counterpart, known or not."""
    assert f"# - {key}: " in converted(f"model_list: []\n{key}: [1]\n")


@pytest.mark.parametrize(
    ("table", "keys"),
    [
        ("litellm_settings", LITELLM_SETTINGS), ("router_settings", ROUTER_SETTINGS),
        ("general_settings", GENERAL_SETTINGS),
    ],
)  # fmt: skip
def test_settings_of_litellm_without_a_counterpart_are_named(table, keys):
    """None is dropped in silence, and no value of theirs is shown: there may be secrets among them."""
    text = converted(f"{table}: {{{', '.join(f'{key}: hidden{n}' for n, key in enumerate(keys))}}}\n")
    named = " ".join(re.findall(r"^# (.*)$", text, re.MULTILINE))
    assert [key for key in keys if f"{table}.{key}" not in named] == []
    assert "hidden" not in text


def test_settings_of_a_deployment_without_a_counterpart_are_named():
    """A file has them by the dozen; each is named with its place."""
    params = "".join(f", {key}: hidden{n}" for n, key in enumerate(LITELLM_PARAMS))
    info = ", ".join(f"{key}: hidden{n}" for n, key in enumerate(MODEL_INFO))
    text = converted(
        f"model_list: [{{model_name: m, litellm_params: {{model: openai/x{params}}}, model_info: {{{info}}}}}]\n"
    )
    named = " ".join(re.findall(r"^# (.*)$", text, re.MULTILINE))
    assert [key for key in LITELLM_PARAMS if f"model_list[0].{key}" not in named] == []
    assert [key for key in MODEL_INFO if f"model_list[0].model_info.{key}" not in named] == []
    assert "hidden" not in text


SAME = (
    "openai/x, api_key: os.environ/K, max_parallel_requests: 7, drop_params: true, ssl_verify: /ca.pem,"
    " allowed_openai_params: [seed], additional_drop_params: [user]"
)
ENTRY = "model_list: [{{model_name: m, litellm_params: {{model: {}}}}}]\n"


@pytest.mark.parametrize(
    ("params", "route"),
    [
        ("openai/gpt-4o", {"upstream_model": "gpt-4o", "api_base": "https://api.openai.com/v1", "api_key_env": "OPENAI_API_KEY"}),
        ("gpt-4o", {"upstream_model": "gpt-4o", "api_base": "https://api.openai.com/v1", "api_key_env": "OPENAI_API_KEY"}),
        ("openai/m", {"api_base": "https://api.openai.com/v1", "api_key_env": "OPENAI_API_KEY"}),
        ("hosted_vllm/q, api_base: 'http://h:8000/v1'", {"upstream_model": "q", "api_base": "http://h:8000/v1"}),
        ("ollama/llama2", {"upstream_model": "llama2", "api_base": "http://localhost:11434/v1"}),
        ("ollama/llama2, api_base: 'http://h:11434'", {"upstream_model": "llama2", "api_base": "http://h:11434/v1"}),
        (
            "azure/dep, api_base: 'https://x.openai.azure.com/', api_key: os.environ/A",
            {"upstream_model": "dep", "api_base": "https://x.openai.azure.com/openai/v1", "api_key_env": "A"},
        ),
        ("anthropic/c", {"upstream_model": "c", "api_base": "https://api.anthropic.com/v1", "api_key_env": "ANTHROPIC_API_KEY"}),
        ("claude-x", {"upstream_model": "claude-x", "api_base": "https://api.anthropic.com/v1", "api_key_env": "ANTHROPIC_API_KEY"}),
        (
            "x, custom_llm_provider: openai, api_base: 'http://h/v1', api_key: none, organization: o, extra_headers: {A: b}",
            {
                "upstream_model": "x", "api_base": "http://h/v1",
                "headers": {"A": "b", "OpenAI-Organization": "o", "Authorization": "Bearer none"},
            },
        ),
        (
            SAME,
            {
                "upstream_model": "x", "api_base": "https://api.openai.com/v1", "api_key_env": "K", "max_in_flight": 7,
                "drop_params": True, "allowed_openai_params": ["seed"], "additional_drop_params": ["user"],
                "ca_certificates": "/ca.pem",
            },
        ),
    ],
)  # fmt: skip
def test_a_deployment_becomes_a_route(params, route):
    """With the upstream's URL in OpenAI's form, its name there, and the variable that has its key."""
    assert table_of(converted(ENTRY.format(params)))["external_routes"] == [{"model_name": "m", **route}]


def test_a_key_in_the_file_is_carried_with_its_right_place():
    """The route works at once, and the comment says where the key belongs."""
    text = converted(ENTRY.format("openai/x, api_key: sk-of-mine"))
    (route,) = table_of(text)["external_routes"]
    assert route["headers"] == {"Authorization": "Bearer sk-of-mine"}
    assert "# The key belongs into a variable of the gateway's environment: name that in api_key_env." in text


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ("bedrock/x", "'bedrock' has no API in OpenAI's form"),
        ("vertex_ai/x, vertex_project: p", "'vertex_ai' has no API in OpenAI's form"),
        ("auto_router/adaptive_router", "'auto_router' has no API in OpenAI's form"),
        ("hosted_vllm/x", "needs an api_base: 'hosted_vllm' has none of its own"),
        ("openai/x, api_base: os.environ/NO_SUCH_VARIABLE", "write api_base, which NO_SUCH_VARIABLE has"),
        ("'openai/*'", "passes any name on: use an external route for each model"),
        ("1", "needs a model_name and litellm_params with a model"),
    ],
)
def test_a_deployment_without_a_route_is_named(params, words):
    """With the reason, so that nobody looks for a model that is gone."""
    text = converted(ENTRY.format(params))
    assert "external_routes" not in table_of(text)
    assert words in " ".join(line.removeprefix("# ").strip("# ") for line in text.splitlines())


def test_a_route_that_is_refused_is_a_comment():
    """A URL with a query or a name of two lines does not make a file that iChat refuses."""
    text = converted(ENTRY.format("openai/x, api_base: 'http://h/v1?a=b'"))
    assert "external_routes" not in table_of(text)
    assert "# Left out: api_base: must be like https://host/v1" in text


def test_the_url_may_be_in_the_environment(monkeypatch):
    """iChat's file has the URL itself, so the value of now is written."""
    monkeypatch.setenv("BASE_OF_MINE", "http://h:1/v1")
    text = converted(ENTRY.format("openai/x, api_base: os.environ/BASE_OF_MINE"))
    assert table_of(text)["external_routes"][0]["api_base"] == "http://h:1/v1"
    assert "api_base is the value that BASE_OF_MINE has now." in text


def test_deployments_of_a_name_share_its_requests():
    """LiteLLM's load balancing: the same model_name several times."""
    text = converted("""
model_list:
  - {model_name: m, litellm_params: {model: openai/a, api_base: http://a/v1, api_key: os.environ/K, temperature: 0.1}}
  - {model_name: m, litellm_params: {model: openai/b, api_base: http://b/v1, api_key: os.environ/K, temperature: 0.2}}
""")
    routes = table_of(text)["external_routes"]
    assert [(one["model_name"], one["upstream_model"]) for one in routes] == [("m", "a"), ("m", "b")]
    assert "# - m, temperature: its deployments differ" in text


def test_parameters_of_a_deployment_are_set():
    """They replace the client's here, which a comment says; extra_body adds members as well."""
    text = converted(ENTRY.format("openai/x, temperature: 0.1, max_tokens: 20, extra_body: {provider: {zdr: true}}"))
    (name,) = table_of(text)["models"]
    assert name == {
        "name": "m", "set": {"temperature": 0.1, "max_tokens": 20, "provider": {"zdr": True}}, "fallback_on": ANY_FAILURE,
    }  # fmt: skip
    assert "# set replaces the client's members" in text


def test_prices_are_for_a_million_tokens():
    """LiteLLM's are for a token, in the deployment or in its model_info; a name has a single price."""
    text = converted("""
model_list:
  - model_name: m
    litellm_params: {model: openai/x, input_cost_per_token: 0.00000015}
    model_info: {output_cost_per_token: 6.0e-07, cache_read_input_token_cost: 7.5e-8}
  - {model_name: m, litellm_params: {model: openai/y, input_cost_per_token: 1}}
litellm_settings: {max_budget: 100, budget_duration: 30d}
""")
    assert table_of(text)["prices"] == {"m": {"input": 0.15, "output": 0.6, "cached": 0.075}}
    assert table_of(text)["limits"] == {"budget_per_month": 100}
    assert "a name has a single price" in text
    assert "litellm_settings.max_budget" not in text


def test_a_pattern_with_one_upstream_is_a_name():
    """A * in the name alone is a pattern of [[models]]; a * at the upstream as well passes any name on."""
    text = converted("model_list: [{model_name: 'claude-*', litellm_params: {model: openai/x, temperature: 1}}]\n")
    assert table_of(text)["external_routes"][0]["model_name"] == "x"
    pattern, route = table_of(text)["models"]
    assert (pattern["name"], pattern["targets"], pattern["set"]) == ("claude-*", [{"model": "x"}], {"temperature": 1})
    assert (route["name"], route["set"]) == ("x", {"temperature": 1})


MODELS = "model_list: [{}]\n".format(
    ", ".join(f"{{model_name: {name}, litellm_params: {{model: hosted_vllm/{name}, api_base: 'http://h/v1'}}}}" for name in "abc")
)  # fmt: skip


def names_in(text):
    return {one.pop("name"): one for one in table_of(text)["models"]}


def test_fallbacks_become_names():
    """As in LiteLLM they are for every failure; router_settings count before litellm_settings."""
    text = converted(f"""{MODELS}
litellm_settings: {{fallbacks: [{{a: [c]}}], context_window_fallbacks: [{{a: [b, c]}}, {{b: [c]}}], num_retries: 5}}
router_settings: {{fallbacks: [{{a: [other, c]}}, {{"*": [b]}}], model_group_alias: {{other: b, old: {{model: other, hidden: true}}}}}}
""")
    names = names_in(text)
    assert all(one.pop("fallback_on") == ANY_FAILURE for one in names.values())
    assert names == {
        "other": {"targets": [{"model": "b"}], "longer": "c"},
        "old": {"targets": [{"model": "b"}], "longer": "c", "hidden": True},
        "a": {"fallbacks": ["b", "c"], "longer": "b"},
        "b": {"longer": "c"},
    }
    assert table_of(text)["litellm_settings"] == {"num_retries": 5}
    for words in ("litellm_settings.fallbacks: the same setting of router_settings counts", "fallbacks.*: write"):
        assert words in text
    assert "context_window_fallbacks.a: a name has a single longer model" in text


def test_default_fallbacks_are_for_every_name():
    """A name with fallbacks of its own keeps them, and no name is its own fallback."""
    names = names_in(converted(f"{MODELS}litellm_settings: {{default_fallbacks: [c], fallbacks: [{{a: [b]}}]}}\n"))
    assert {name: one.get("fallbacks", []) for name, one in names.items()} == {"a": ["b"], "b": ["c"], "c": []}


def test_aliases_that_lead_in_a_circle_end():
    """LiteLLM accepts them; here each leads somewhere."""
    converted(f"{MODELS}router_settings: {{model_group_alias: {{x: y, y: x}}, fallbacks: [{{a: [x]}}]}}\n")


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("litellm_settings: {drop_params: true}", {"litellm_settings": {"drop_params": True}}),
        ("litellm_settings: {additional_drop_params: [user]}", {"litellm_settings": {"additional_drop_params": ["user"]}}),
        ("litellm_settings: {allowed_openai_params: [seed]}", {"litellm_settings": {"allowed_openai_params": ["seed"]}}),
        ("router_settings: {num_retries: 2}", {"litellm_settings": {"num_retries": 2}}),
        ("litellm_settings: {request_timeout: 10}", {"timeouts": {"first_byte_s": 10}}),
        ("router_settings: {timeout: 9, stream_timeout: 8}", {"timeouts": {"first_byte_s": 9, "stream_stall_s": 8}}),
        ("litellm_settings: {set_verbose: true}", {"server_settings": {"log_level": "debug"}}),
        ("litellm_settings: {set_verbose: false}", {}),
        ("litellm_settings: {json_logs: true}", {"logs": {"format": "json"}}),
        ("router_settings: {routing_strategy: simple-shuffle}", {"routing": {"policy": "random"}}),
        ("router_settings: {routing_strategy: least-busy}", {"routing": {"policy": "least_loaded"}}),
        ("router_settings: {allowed_fails: 3, cooldown_time: 30}", {"circuit_breaker": {"failures_max": 4, "open_s": 30}}),
        ("router_settings: {disable_cooldowns: true}", {"circuit_breaker": {"failures_max": 0}}),
        ("router_settings: {default_max_parallel_requests: 3}", {"routing": {"max_in_flight": 3}}),
        ("general_settings: {max_parallel_requests: 3}", {"routing": {"max_in_flight": 3}}),
        ("general_settings: {global_max_parallel_requests: 3}", {"limits": {"max_in_flight": 3}}),
        ("general_settings: {max_request_size_mb: 2}", {"limits": {"body_bytes_max": 2097152}}),
        ("general_settings: {health_check_interval: 300}", {"health": {"interval_s": 300}}),
        ("general_settings: {master_key: os.environ/M}", {"security": {"keys": [{"name": "litellm-master", "key_env": "M"}]}}),
    ],
)  # fmt: skip
def test_settings_of_litellm_with_a_counterpart_are_set(yaml, expected):
    """In iChat's words."""
    assert table_of(converted(yaml)) == expected


@pytest.mark.parametrize(
    "yaml",
    [
        "router_settings: {routing_strategy: usage-based-routing-v2}", "litellm_settings: {request_timeout: soon}",
        "litellm_settings: {fallbacks: 1}", "router_settings: {model_group_alias: 1}", "router_settings: {timeout: 0}",
        "litellm_settings: {fallbacks: [{a: b}]}", "litellm_settings: {default_fallbacks: b}", "litellm_settings: 3",
        "litellm_settings: {drop_params: maybe}", "general_settings: {master_key: ''}", "model_list: 3", "model_list: [3]",
        "litellm_settings: {json_logs: 7}", "router_settings: {model_group_alias: {a: 1}}",
    ],
)  # fmt: skip
def test_values_that_cannot_be_meant_are_named(yaml):
    """A value of the wrong type, out of range, or of a strategy that is not here: a remark, and no table."""
    text = converted(yaml)
    assert table_of(text) == {}
    assert "# Not carried over:" in text


def test_the_master_key_opens_models_only():
    """Where it closed LiteLLM, clients need a key here too: its hash is in the file, and a short key is called so."""
    text = converted("general_settings: {master_key: sk-1234}")
    (key,) = table_of(text)["security"]["keys"]
    assert re.fullmatch("sha256:[0-9a-f]{64}", key["key_hash"])
    assert "sk-1234" not in text
    assert "so that it can be guessed: replace it" in text


def test_tables_of_ichat_in_yaml_are_carried():
    """A file with workers beside LiteLLM's settings keeps them as they are."""
    text = converted("""
server_settings: {host: 0.0.0.0, port: 4001}
managed_workers:
  - {model_name: q, model_path: /m/q, backend: vllm, gpu_ids: [0], port: 8001, tensor_parallel_size: 1}
security: {open_metrics: true, keys: [{name: a, key_env: A}]}
engines: {vllm: {python: /p}}
models: [{name: n, targets: [{model: q}]}]
litellm_settings: {drop_params: True}
general_settings: {master_key: os.environ/M}
""")
    assert table_of(text) == {
        "server_settings": {"host": "0.0.0.0", "port": 4001},
        "managed_workers": [
            {"model_name": "q", "model_path": "/m/q", "backend": "vllm", "gpu_ids": [0], "port": 8001, "tensor_parallel_size": 1}
        ],
        "security": {"open_metrics": True, "keys": [{"name": "a", "key_env": "A"}, {"name": "litellm-master", "key_env": "M"}]},
        "engines": {"vllm": {"python": "/p"}},
        "models": [{"name": "n", "targets": [{"model": "q"}]}],
        "litellm_settings": {"drop_params": True},
    }  # fmt: skip


def test_tables_of_ichat_that_are_none_are_named():
    """A value that is no table is a remark, and an item without keys a comment with the reason."""
    text = converted("routing: random\nmanaged_workers: [q]\n", "litellm")
    assert table_of(text) == {}
    assert "# - routing: is no table" in text
    assert "# Left out: " in text
    assert "#[[managed_workers]]" in text


def test_a_name_breaks_out_of_no_comment():
    """A key with a line feed, and TOML after it, is a comment all the same."""
    text = converted('model_list: []\n"x\\n[security]\\nopen_metrics = true": 1\n')
    assert tomllib.loads(text) == {}
    check(text)
