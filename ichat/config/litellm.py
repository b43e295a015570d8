"""LiteLLM's settings that mean the same here, and for the other settings a sentence that names the replacement."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import attrs
from attrs import frozen

from ichat.config import checks
from ichat.config.openai_params import check_paths
from ichat.config.strict import Between, checked

RETRIES_MAX = 100


def _check_followers(name: str, models: Any) -> None:
    if name == "*":
        raise ValueError('"*" is not read: name each model that has fallbacks')
    if not isinstance(models, list) or not models:
        raise ValueError('must be like [{ "a" = ["b", "c"] }], a model and those that follow it')
    for model in [name, *cast("list[Any]", models)]:
        if type(model) is not str:
            raise ValueError("must have names of models as strings")
        checks.is_model_name(model)


def _are_fallbacks(values: Sequence[Any]) -> None:
    """Raise ValueError unless these are like [{ "a" = ["b", "c"] }]."""
    for value in values:
        table = cast("dict[str, Any]", value if isinstance(value, dict) else {"": None})
        for name, models in table.items():
            _check_followers(name, models)
    names = [name for value in values for name in value]
    taken = next((name for name in names if names.count(name) > 1), None)
    if taken is not None:
        raise ValueError(f"{taken!r} is named twice")


def _are_longer(values: Sequence[Any]) -> None:
    """Raise ValueError unless these are like [{ "a" = ["b"] }]."""
    _are_fallbacks(values)
    for value in values:
        for name, models in value.items():
            if len(models) > 1:
                raise ValueError(f"give {name!r} one model, the one with the longest context")


def _are_group_aliases(values: Mapping[str, Any]) -> None:
    """Raise ValueError unless these are like { "a" = "b", "c" = { model = "d", hidden = true } }."""
    for name, value in values.items():
        checks.is_model_name(name)
        table = cast("dict[str, Any]", value if isinstance(value, dict) else {"model": value})
        is_right = type(table.get("model")) is str and type(table.get("hidden", False)) is bool
        if not is_right or table.keys() - {"model", "hidden"}:
            raise ValueError(f'{name!r} must be a model\'s name, or like {{ model = "b", hidden = true }}')
        checks.is_model_name(table["model"])


def _by_key(groups: Mapping[str, str]) -> Mapping[str, str]:
    return {key: sentence for keys, sentence in groups.items() for key in keys.split()}


_SHARED = {
    "default_fallbacks": "use fallbacks in [[models]] for each name that needs them",
    "content_policy_fallbacks": "there is nothing like it: answers go to the client as they come",
    "allowed_fails allowed_fails_policy": "use circuit_breaker.failures_max",
    "cooldown_time disable_cooldowns": "use circuit_breaker.open_s; failures_max = 0 there switches it off",
    "retry_policy model_group_retry_policy retry_after": "use num_retries here, and fallback_on in [[models]]",
    "max_fallbacks": "a request goes through all fallbacks of its name, each once",
    "request_timeout timeout stream_timeout": "use timeouts.first_byte_s and timeouts.stream_stall_s",
    "cache cache_params cache_responses cache_kwargs caching_groups redis_host redis_port redis_password redis_url"
    " redis_db": 'there is no cache of answers: routing.policy = "prefix_aware" uses those of the engines',
    "set_verbose debug_level json_logs": "use server_settings.log_level; logs.access_log has a JSON line a request",
    "routing_strategy routing_strategy_args": "use routing.policy",
    "enable_pre_call_check enable_pre_call_checks optional_pre_call_checks": "use longer in [[models]]",
    "deployment_affinity_ttl_seconds": "use routing.session_header",
    "enable_tag_filtering tag_filtering_match_any": "use a name in [[models]] for each tag",
    "default_max_parallel_requests max_parallel_requests": "use max_in_flight of the worker or route, or in [routing]",
    "default_litellm_params": "use set in [[models]]",
    "default_priority polling_interval": "use nothing: in a queue keys take turns",
    "provider_budget_config": "use budget_per_month of [limits] or of [[security.keys]], with [prices]",
}  # fmt: skip


@frozen
class _Reliability:
    """Settings that LiteLLM reads in both of its tables."""

    fallbacks: list[Any] | None = checked(_are_fallbacks, None)
    context_window_fallbacks: list[Any] | None = checked(_are_longer, None)
    num_retries: int | None = checked(Between(0, RETRIES_MAX), None)


@frozen
class LitellmSettings(_Reliability):
    """`[litellm_settings]`: the defaults of all external routes, and what happens where a model cannot answer."""

    drop_params: bool = False
    additional_drop_params: list[str] = checked(check_paths, attrs.Factory(list[str]))
    allowed_openai_params: list[str] = checked(checks.are_params, attrs.Factory(list[str]))

    ELSEWHERE: ClassVar[Mapping[str, str]] = _by_key({
        **_SHARED,
        "model_group_alias": "use it in [router_settings], or [[models]]",
        "success_callback failure_callback callbacks service_callback service_callbacks langfuse_default_tags":
            "use /metrics, logs.access_log, and OTEL_EXPORTER_OTLP_ENDPOINT for traces",
        "turn_off_message_logging redact_user_api_key_info redact_messages_in_exceptions":
            "use nothing: prompts, answers and keys are never logged",
        "modify_params": "use set and drop in [[models]]",
        "force_ipv4": "use an address in api_base",
        "ssl_verify ssl_certificate": "use ca_certificates of the external route",
        "request_headers default_headers": "use headers of the external route",
        "key_generation_settings": "use `./ichat.pyz key` and [[security.keys]]",
        "max_budget budget_duration max_internal_user_budget":
            "use budget_per_month of [limits] or of [[security.keys]], with [prices]",
        "enable_json_schema_validation": "use nothing: the engines check it",
    })  # fmt: skip


@frozen
class RouterSettings(_Reliability):
    """`[router_settings]`: other names for models, and what overrides `[litellm_settings]`."""

    model_group_alias: dict[str, Any] = checked(_are_group_aliases, attrs.Factory(dict[str, Any]))

    ELSEWHERE: ClassVar[Mapping[str, str]] = _by_key({
        **_SHARED,
        "alerting_config": "use /metrics and the alerts of docs/operating.md",
        "client_ttl": "use timeouts.upstream_idle_s",
    })  # fmt: skip


@frozen
class GeneralSettings:
    """`[general_settings]`: none of them is read."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = _by_key({
        "master_key": "use security.admin_key_env or admin_key_hash",
        "completion_model embedding_model image_generation_model moderation_model infer_model_from_keys":
            "use a name in [[models]]: each request names its model",
        "database_url database_connection_pool_limit database_connection_timeout store_model_in_db"
        " allow_requests_on_db_unavailable disable_prisma_schema_update supported_db_objects":
            "use this file: there is no database, and a change of it is applied without a restart",
        "disable_spend_logs disable_spend_updates store_prompts_in_spend_logs proxy_batch_write_at"
        " maximum_spend_logs_retention_period maximum_spend_logs_retention_interval spend_report_frequency":
            "use [usage] and [prices]; `./ichat.pyz usage` and GET /v1/admin/usage show it",
        "max_parallel_requests": "use max_in_flight of [[security.keys]], of a route, or in [routing]",
        "global_max_parallel_requests": "use limits.max_in_flight",
        "background_health_checks health_check_interval health_check_details": "use health_path and health.interval_s",
        "alerting alerting_threshold alert_types alerting_args alert_to_webhook_url":
            "use /metrics and the alerts of docs/operating.md",
        "max_request_size_mb": "use limits.body_bytes_max",
        "max_response_size_mb": "use nothing: answers are relayed in pieces",
        "allowed_ips": "use server_settings.host and a firewall",
        "use_x_forwarded_for": "use security.trusted_proxies",
        "public_routes allowed_routes admin_only_routes": "use the keys: SECURITY.md says which opens what",
        "forward_client_headers_to_llm_api forward_openai_org_id":
            "use nothing: a client's headers go on, but for its key where the route has one",
        "custom_auth enable_jwt_auth litellm_jwtauth enable_oauth2_auth enable_oauth2_proxy_auth"
        " oauth2_config_mappings custom_sso user_api_key_cache_ttl litellm_key_header_name custom_key_generate":
            "use [[security.keys]]: there are no other accounts",
        "key_management_system key_management_settings use_azure_key_vault use_google_kms":
            "use key_env and api_key_env: the environment holds the keys",
        "pass_through_endpoints": "use [[external_routes]]",
        "enforced_params enforce_user_param": "use set in [[models]]",
        "litellm_license": "use nothing",
    })  # fmt: skip


WHOLE_FILE: Mapping[str, str] = {
    "model_list": "use [[external_routes]] and [[managed_workers]], a table for each model",
    "environment_variables": "use the gateway's own environment, or env of a managed worker",
    "callback_settings": "use OTEL_EXPORTER_OTLP_ENDPOINT for traces",
    "include": "use one file",
}
"""LiteLLM's tables that have no counterpart here."""


def table_of(given: Sequence[Any] | None) -> dict[str, list[str]]:
    """Return the models that follow each model, of fallbacks that were checked."""
    return {name: models for one in given or () for name, models in cast("dict[str, list[str]]", one).items()}


def first_given(router: Any, general: Any) -> Any:
    """Return the value of `[router_settings]`, or of `[litellm_settings]` if the former has none."""
    return general if router is None else router
