"""What one request may do, asked once."""

import pytest

from ichat.config.schema import Key, Limits, Security
from ichat.errors import ApiError
from ichat.security.auth import Auth, Caller, ClientKey
from ichat.security.grant import Grant, admit, grant_of
from ichat.security.rate_limits import QuotaRefusal, Quotas

KEY = ClientKey("k", frozenset(("m", "n*")), engine_control=True)
CALLER = Caller("data", "1.2.3.4", is_local=False, key=KEY)
ANONYMOUS = Caller("anonymous", "1.2.3.4", is_local=False)


def quotas(**limits):
    return Quotas(Limits(), [Key(name="k", key_hash="sha256:" + "0" * 64, **limits)])


def test_a_grant_has_the_rights_of_its_key():
    """A client without a key has none of them, and its headers are its own."""
    auth = Auth(Security())
    assert admit(auth, quotas(), CALLER, 0, model="m", name="m").may_steer
    found = grant_of(auth, ANONYMOUS)
    assert (found.key_name, found.fairness_key, found.may_steer, found.hides_keys) == ("", "1.2.3.4", False, False)
    assert grant_of(auth, CALLER).hides_keys


def test_a_key_of_another_model_is_refused_and_takes_no_place():
    """The name that counts for the model is enough."""
    auth, limits = Auth(Security()), quotas(max_in_flight=1)
    with pytest.raises(ApiError) as refused:
        admit(auth, limits, CALLER, 0, model="other", name="other")
    assert refused.value.status == 403
    assert isinstance(admit(auth, limits, CALLER, 0, model="n1", name="n*"), Grant)


def test_a_grant_holds_its_place_until_it_is_closed():
    """A second close changes nothing, and the tokens count once."""
    auth, limits = Auth(Security()), quotas(max_in_flight=1, tokens_per_minute=10)
    grant = admit(auth, limits, CALLER, 0)
    assert isinstance(admit(auth, limits, CALLER, 1), QuotaRefusal)
    grant.close(9, 2)
    grant.close(9, 2)
    second = admit(auth, limits, CALLER, 3)
    assert isinstance(second, Grant)
    second.close(1, 3)
    refused = admit(auth, limits, CALLER, 4)
    assert refused.limit == "tokens_per_minute"
