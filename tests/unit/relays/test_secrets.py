"""What a relay is told has no secret: no key, no token, and no proof for workers."""

import json

from ichat.config import load as configuration
from ichat.http.pool import Upstream
from ichat.proxy.external_routes import external_endpoints
from ichat.proxy.steps import AttemptStep
from ichat.relays.endpoint_facts import endpoint_of, facts_of, step_with_keys
from ichat.relays.settings import RelaySettings
from ichat.routing.access import Access
from ichat.routing.endpoint import EndpointFacts

KEYS = {"CLIENT": "client-key-0123456789", "ADMIN": "admin-key-0123456789", "TOKEN": "join-token-0123456789"}
THEIRS = "upstream-key-0123456789"
CONFIG = """
[security]
admin_key_env = "ADMIN"
join_token_env = "TOKEN"
[[security.keys]]
name = "one"
key_env = "CLIENT"
[[external_routes]]
model_name = "m"
api_base = "https://example.org/v1"
api_key_env = "THEIRS"
"""


def carried(facts):
    """Return facts about an endpoint as a relay gets them, and their JSON."""
    text = json.dumps(facts_of(facts))
    return endpoint_of(json.loads(text)), text


def test_settings_and_facts_have_no_secret(monkeypatch):
    """However the configuration names keys: a relay gets neither the keys nor the names of their variables."""
    for name, key in {**KEYS, "THEIRS": THEIRS}.items():
        monkeypatch.setenv(name, key)
    config = configuration.parse(CONFIG, "test.toml")
    [endpoint] = external_endpoints(config)["m"]
    assert THEIRS in repr(endpoint.facts.access.own_headers)
    said = json.dumps(RelaySettings.of(config, 3).content()) + carried(endpoint.facts)[1]
    assert not [secret for secret in (*KEYS.values(), *KEYS, THEIRS, "THEIRS") if secret in said]


def test_a_key_is_sent_with_each_request_that_needs_it():
    """The relay leaves out the client's own key in its place, and allows the paths of models only, as its owner would."""
    access = Access(b"/v1", [(b"authorization", b"Bearer " + THEIRS.encode()), (b"x-their", b"1")])
    known, text = carried(EndpointFacts(b"e", Upstream("route m", "example.org", 80), access=access))
    assert THEIRS not in text
    assert (known.access.prefix, known.access.has_key) == (b"/v1", True)
    client = [(b"authorization", b"Bearer mine"), (b"x-their", b"2"), (b"x-mine", b"1")]
    assert known.access.headers_for(client) == [(b"x-mine", b"1")]
    step = step_with_keys(
        AttemptStep("e", "m", request_head=((b"a", b"b"),)), EndpointFacts(b"", known.upstream, access=access)
    )
    assert step.request_head == (*access.own_headers, (b"a", b"b"))
    bare = EndpointFacts(b"e", Upstream("worker w", "127.0.0.1", 80))
    plain = AttemptStep("e", "m")
    assert step_with_keys(plain, bare) is plain


def test_a_server_without_a_key_gets_the_clients_own():
    """As without relays."""
    known, _ = carried(EndpointFacts(b"e", Upstream("route m", "example.org", 80), access=Access(b"/v1", [])))
    client = [(b"authorization", b"Bearer mine")]
    assert (known.access.has_key, known.access.headers_for(client)) == (False, client)
