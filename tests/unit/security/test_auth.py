"""The rules of access, which a reload replaces inside one object."""

import pytest

from ichat.config.schema import Key, Security
from ichat.errors import ApiError
from ichat.http.heads import RequestHead
from ichat.security.auth import Auth
from ichat.security.keys import hash_of


def asking(auth, key):
    head = RequestHead(b"POST", b"/v1/chat/completions", b"1.1", [(b"authorization", b"Bearer " + key)], 0)
    return auth.caller(head, "10.0.0.1")


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
