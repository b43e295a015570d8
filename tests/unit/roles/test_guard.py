"""The flags of `worker --order`: the order brings all others."""

import pytest

from ichat.errors import Exit
from ichat.roles.guard import read_command_line

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
