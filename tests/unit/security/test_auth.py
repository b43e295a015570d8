"""The rules of access, which a reload replaces inside one object."""

import pytest

from ichat.config.schema import Key, Security
from ichat.errors import ApiError
from ichat.http.heads import RequestHead
from ichat.security.addresses import Sender, sender_of
from ichat.security.auth import Auth
from ichat.security.keys import hash_of


def asking(auth, key):
    head = RequestHead(b"POST", b"/v1/chat/completions", b"1.1", [(b"authorization", b"Bearer " + key)], 0)
    return auth.caller_by(sender_of(head, "10.0.0.1"))


def test_replaced_rules_hold_for_every_holder_of_the_object():
    """Keys of before are not known any more, not even those of callers that were remembered."""
    auth, other = (Auth(Security(keys=[Key(name, hash_of(f"sk-{name}"))])) for name in ("old", "new"))
    held = auth
    assert asking(held, b"sk-old").key_name == "old"
    auth.replace(other)
    assert asking(held, b"sk-new").key_name == "new"
    with pytest.raises(ApiError) as refusal:
        held.check("data", asking(held, b"sk-old"))
    assert refusal.value.status == 401


def test_a_sender_is_known_by_values_alone():
    """They need no head and no connection, and have only the headers that matter, all of them where several do."""
    auth = Auth(Security(keys=[Key("a", hash_of("sk-a"))], trusted_proxies=["10.0.0.1"]))
    assert auth.caller_by(Sender("10.0.0.1", b"Bearer sk-a")).key_name == "a"
    more = [(b"x-forwarded-for", b"192.0.2.7"), (b"x-api-key", b"sk-a"), (b"accept", b"*/*")]
    sender = sender_of(RequestHead(b"POST", b"/v1/completions", b"1.1", more, 0), "10.0.0.1:5")
    assert sender.judged == tuple(more[:2])
    assert (auth.caller_by(sender).key_name, auth.caller_by(sender).address) == ("a", "192.0.2.7")


def test_a_clients_key_is_remembered_for_its_pages_too():
    """A browser names the page that asks: with the key of a client that means nothing."""
    auth = Auth(Security(keys=[Key("a", hash_of("sk-a"))]))
    plain = asking(auth, b"sk-a")
    headers = [(b"authorization", b"Bearer sk-a"), (b"origin", b"https://e.example"), (b"sec-fetch-site", b"none")]
    assert (
        auth.caller_by(sender_of(RequestHead(b"POST", b"/v1/chat/completions", b"1.1", headers, 0), "10.0.0.1"))
        is plain
    )
