"""Where the gateway of a command is: flags before the environment, the environment before the file here."""

import argparse

import pytest

from ichat.cli.gateway_address import GatewayAddress, add_flags, config_for, find_gateway
from ichat.config.own_secret import GATEWAY
from ichat.errors import Exit


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory, and an environment that names no gateway."""
    for name in ("ICHAT_GATEWAY", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def args_of(*words):
    usage = argparse.ArgumentParser()
    add_flags(usage)
    return usage.parse_args(words)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("gw.example", "http://gw.example"),
        ("127.0.0.1:9", "http://127.0.0.1:9"),
        ("http://gw/v1/", "http://gw"),
        ("https://gw.example/v1", "https://gw.example"),
        ("http://gw:80/below", "http://gw:80/below"),
        ("[::1]:9", "http://[::1]:9"),
    ],
)
@pytest.mark.parametrize("is_flag", [True, False])
def test_an_address_may_leave_out_scheme_and_version(here, monkeypatch, given, url, is_flag):
    if not is_flag:
        monkeypatch.setenv("ICHAT_GATEWAY", given)
    place = find_gateway(args_of("-g", given) if is_flag else args_of())
    assert (place.url, place.tls is not None) == (url, url.startswith("https:"))


@pytest.mark.parametrize(
    "given", ["ftp://gw", "http://", "http://gw:0", "http://gw:x", "http://gw?a", "http://gw#a", "http://me@gw", "g w"]
)
def test_an_address_that_cannot_be_asked_is_refused(here, given):
    with pytest.raises(Exit, match="The gateway's address must be like") as caught:
        find_gateway(args_of("-g", given))
    assert caught.value.code == 64


def test_flags_environment_file_and_the_usual_address_count_in_this_order(here, monkeypatch):
    """The file here counts only if neither a flag nor the environment names a gateway."""
    assert find_gateway(args_of()).url == GATEWAY
    (here / "ichat.toml").write_text("[server_settings]\nport = 7\nhost = '0.0.0.0'\nstate_directory = '/s'\n")
    (here / "other.toml").write_text("[server_settings]\nport = 9\nstate_directory = '/s'\n")
    assert config_for(args_of()) == "ichat.toml"
    assert find_gateway(args_of()) == GatewayAddress("http://127.0.0.1:7", None, "/s")
    assert find_gateway(args_of("-c", "other.toml")).url == "http://127.0.0.1:9"
    assert config_for(args_of("-g", "gw")) is None
    monkeypatch.setenv("ICHAT_GATEWAY", "far:1")
    assert find_gateway(args_of()).url == "http://far:1"
    assert find_gateway(args_of("-g", "gw")).url == "http://gw"
    assert find_gateway(args_of("-c", "other.toml")).url == "http://127.0.0.1:9"


def test_a_port_that_the_system_chooses_is_no_address(here):
    """The port is known to the gateway only."""
    (here / "c.toml").write_text("[server_settings]\nport = 0\n")
    with pytest.raises(Exit, match="use --gateway"):
        find_gateway(args_of("-c", "c.toml"))


@pytest.mark.parametrize("text", ["[server_settings]\nprot = 1\n", "[server_settings\n"])
def test_a_file_with_mistakes_of_no_running_gateway_is_refused(here, text):
    (here / "ichat.toml").write_text(text + f"state_directory = '{here}/state'\n")
    with pytest.raises(Exit, match=r"ichat\.toml") as caught:
        find_gateway(args_of())
    assert caught.value.code == 64


@pytest.mark.parametrize("flags", [["-g", "https://gw", "--ca-certificates", "none.pem"], ["-c", "tls.toml"]])
def test_certificates_that_cannot_be_read_are_refused(here, flags):
    """Also the gateway's own certificate, which is believed by its configuration."""
    (here / "tls.toml").write_text("[server_settings]\ntls_certificate = 'none.pem'\ntls_key = 'none.key'\n")
    with pytest.raises(Exit, match=r"none\.pem cannot be used: .*No such file"):
        find_gateway(args_of(*flags))


@pytest.mark.parametrize(
    ("url", "is_here"),
    [("http://127.0.0.1:1", True), ("https://localhost", True), ("http://[::1]:1", True), ("http://10.0.0.1", False)],
)
def test_a_gateway_on_loopback_is_here(url, is_here):
    assert GatewayAddress(url).is_here is is_here
