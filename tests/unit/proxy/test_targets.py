"""The route of a request at its beginning, and its body for each of its models."""

import json

import attrs
import pytest

from ichat.config.models import TargetConfig
from ichat.http.multipart import fields_of
from ichat.http.request_body import RequestBody, form_body
from ichat.proxy.steps import BodyEdits
from ichat.proxy.targets import body_for, reason_of_refusal, route_along
from ichat.routing.aliases import Alias, Plan
from ichat.routing.availability import Draining, Full, Loadable, NotReady, QueueTimeout, Unknown

BODY = b'{ "model" : "n", "messages":[1],\t"top_p": 1, "user":"u" }'


def alias_of(*models, **more):
    return Alias("n", (TargetConfig(models[0]),), **more)


async def fit(body, *models, **more):
    """Return the body for the first model of a name."""
    return await body_for(body, route_along(Plan(models, alias_of(*models, **more))).edits, "n")


def test_a_route_begins_at_the_chosen_model():
    """It has all that the name says."""
    alias = alias_of("a", goes_on=frozenset(("busy", "5xx")), longer="l", retries=2, set={"seed": b"5"})
    route = route_along(Plan(("a", "b"), attrs.evolve(alias, drop=frozenset(("user",)))), queue_s=3, is_bound=True)
    assert (route.model, route.ahead, route.name, route.goes_on) == ("a", ("b",), "n", ("5xx", "busy"))
    assert (route.longer, route.retries, route.queue_s, route.is_bound) == ("l", 2, 3, True)
    assert route.edits == BodyEdits("a", (("seed", b"5"),), ("user",))


@pytest.mark.parametrize(("refusal", "reason", "after_a_wait"), [
    (NotReady("", 1), "not_ready", "not_ready"),
    (NotReady("", 1, "circuit_breaker"), "circuit", "circuit"),
    (Unknown(), "not_ready", "not_ready"),
    (Full(3), "busy", "queue_full"),
    (QueueTimeout(), "queue_full", "queue_full"),
    (Loadable("", None), "loading", "not_ready"),
    (Loadable("", None, is_coming=True), "not_ready", "not_ready"),
    (Draining(), "", ""),
])  # fmt: skip
def test_refusals_and_their_reasons(refusal, reason, after_a_wait):
    """A model that was waited for in vain is not busy or loading any more: its queue is full, or it is not ready."""
    assert reason_of_refusal(refusal) == reason
    assert reason_of_refusal(refusal, has_waited=True) == after_a_wait
    assert reason_of_refusal(Full(3), 3) == "queue_full"


async def test_the_body_names_the_model_and_has_what_is_set():
    """The rest stays byte for byte; for the next model only the name changes."""
    more = {"set": {"top_p": b"0.5", "temperature": b"0"}, "drop": frozenset(("user",))}
    body = await fit(RequestBody(BODY, ("model", "messages", "top_p", "user")), "a", "b", **more)
    assert body.data == b'{ "temperature":0,"model" : "a", "messages":[1],\t"top_p": 0.5 }'
    assert json.loads(body.data) == {"temperature": 0, "model": "a", "messages": [1], "top_p": 0.5}
    assert body.names == ("temperature", "model", "messages", "top_p")
    assert (await fit(body, "b", **more)).data == body.data.replace(b'"a"', b'"b"')
    assert body.original.data is BODY


async def test_a_body_is_the_same_whether_it_is_searched_or_scanned():
    """What is set comes before `model` or before all, and nothing else differs."""
    given = {"top_k": b"3"}
    names = ("model", "messages", "top_p", "user")
    searched = await fit(RequestBody(BODY, names), "a", set=given)
    assert (searched.data, searched.names) == (
        BODY.replace(b'"model" : "n"', b'"top_k":3,"model" : "a"'),
        ("top_k", "model", "messages", "top_p", "user"),
    )
    escaped = BODY.replace(b'"u"', b'"\\u006f"')
    scanned = await fit(RequestBody(escaped, names), "a", set=given)
    assert json.loads(scanned.data) == {**json.loads(searched.data), "user": "o"}


async def test_a_name_that_is_its_own_model_changes_nothing():
    """The body is the same object: it was not even scanned."""
    body = RequestBody(BODY, ("model", "messages", "user"))
    assert await fit(body, "n") is body
    assert b"user" not in (await fit(body, "n", drop=frozenset(("user",)))).data


async def test_a_form_is_changed_as_well():
    """Text of one line is set; what a form cannot have so, a table or a line break, is not the client's to set either."""
    head = b'Content-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    parts = [(b"model", b"n"), (b"language", b"de"), (b"prompt", b"x"), (b"table", b"-1"), (b"lines", b"1")]
    form = b"--b\r\n" + b"--b\r\n".join(head % part for part in parts) + b"--b--\r\n"
    values = {"language": b'"en"', "temperature": b"0.5", "table": b"{}", "lines": b'"a\\nb"', 'no"name': b"1"}
    fields = await fields_of(form, b"multipart/form-data; boundary=b")
    body = await fit(form_body(form, fields), "a", set=values, drop=frozenset(("prompt",)))
    parts = [(b"temperature", b"0.5"), (b"model", b"a"), (b"language", b"en")]
    assert body.data == b"--b\r\n" + b"--b\r\n".join(head % part for part in parts) + b"--b--\r\n"
    assert body.names == ("temperature", "model", "language")
