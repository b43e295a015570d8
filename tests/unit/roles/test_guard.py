"""The flags of `worker --order`: the order brings all others."""

import os

import pytest

from ichat.config.schema import ManagedWorkerConfig
from ichat.errors import Exit
from ichat.roles.guard import leave_ray, place_of, read_command_line

ORDER = ["--order", "order-x", "--gateway-address", "http://gw:4000"]


def test_the_line_needs_the_code_and_the_gateway_alone():
    options = read_command_line(
        [*ORDER, "--gateway-ca=/ca.pem", "--advertise-host", "10.0.0.7", "--log-format", "json"]
    )
    assert (options.order, options.gateway_address, options.advertise_host) == ("order-x", "http://gw:4000", "10.0.0.7")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--model", "/m"], "the order brings --model"),
        (["--max-model-len=8"], "the order brings --max-model-len"),
        (["-n", "m"], "the order brings --served-model-name"),
        (["--port", "8001"], "the order brings --port"),
    ],
)
def test_flags_that_the_order_brings_are_refused(more, said):
    with pytest.raises(Exit) as refused:
        read_command_line([*ORDER, *more])
    assert refused.value.code == 64
    assert said in str(refused.value)


def test_an_order_needs_its_gateway():
    with pytest.raises(Exit) as refused:
        read_command_line(ORDER[:2])
    assert "--order needs --gateway-address" in str(refused.value)


@pytest.mark.parametrize(
    ("host", "shown", "found"),
    [
        ("127.0.0.1", None, ("127.0.0.1", None)),
        ("192.0.2.7", None, ("0.0.0.0", "192.0.2.7")),
        ("192.0.2.7", "10.0.0.7", ("0.0.0.0", "10.0.0.7")),
        ("2001:db8::7", None, ("::", "2001:db8::7")),
    ],
)
def test_an_address_of_another_machine_is_only_registered(host, shown, found):
    """A container behind a NAT has other addresses than its machine."""
    assert place_of(host, shown) == found


@pytest.mark.parametrize(
    ("arguments", "is_kept"),
    [
        ({}, False),
        ({"distributed_executor_backend": "mp"}, False),
        ({"distributed-executor-backend": "ray"}, True),
        ({"data_parallel_backend": "ray"}, True),
        ({"use_ray": True}, True),
    ],
)
def test_only_an_engine_that_uses_ray_keeps_its_variables(monkeypatch, arguments, is_kept):
    """Ray's token is for programs that may submit jobs."""
    for name in ("RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_ADDRESS", "ARRAY_RAY_"):
        monkeypatch.setenv(name, "1")
    leave_ray(ManagedWorkerConfig(model_name="m", model_path="/m", backend_args=arguments))
    assert [name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "ARRAY_RAY_")] == [is_kept, is_kept, True]
