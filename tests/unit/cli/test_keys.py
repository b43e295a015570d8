"""Keys from the command line: its words become a request, and the answer a table or a secret with a note."""

import argparse
import time

import pytest

from ichat.cli.client import JsonReply
from ichat.cli.keys import add_key_flags, run_keys
from ichat.cli.screen import Screen
from ichat.errors import Exit


class Asked:
    """An API that notes each request and answers it with the same object."""

    def __init__(self, answer):
        self.answer, self.requests = answer, []

    def call(self, method, path, *, body=None):
        self.requests.append((method, path, body))
        return JsonReply(self.answer, '{"as": "sent"}\n')


def carry_out(*words, answer=None, as_json=False):
    usage = argparse.ArgumentParser()
    add_key_flags(usage)
    api = Asked(answer or {})
    assert run_keys(api, Screen(), argparse.Namespace(**vars(usage.parse_args(words)), json=as_json)) == 0
    return api.requests


@pytest.mark.parametrize(
    ("words", "request_"),
    [
        ((), ("GET", "/v1/admin/keys", None)),
        (("ls",), ("GET", "/v1/admin/keys", None)),
        (("make", "a"), ("POST", "/v1/admin/keys", {"name": "a"})),
        (("create", "a", "--models", "m,,n", "--max-in-flight", "3", "--metrics"),
         ("POST", "/v1/admin/keys", {"name": "a", "max_in_flight": 3, "metrics": True, "models": ["m", "n"]})),
        (("make", "a", "--expires-in", "12h"), ("POST", "/v1/admin/keys", {"name": "a", "expires_in_s": 43200.0})),
        (("change", "a", "--expires-in", "never"), ("PATCH", "/v1/admin/keys/a", {"expires_in_s": None})),
        (("change", "a", "--models", ""), ("PATCH", "/v1/admin/keys/a", {"models": []})),
        (("change", "a", "--budget-per-month", "2.5"), ("PATCH", "/v1/admin/keys/a", {"budget_per_month": 2.5})),
        (("rotate", "a"), ("POST", "/v1/admin/keys/a/rotate", {})),
        (("rotate", "a", "--overlap", "0s"), ("POST", "/v1/admin/keys/a/rotate", {"overlap_s": 0.0})),
        (("withdraw", "a/b?"), ("DELETE", "/v1/admin/keys/a%2Fb%3F", None)),
        (("delete", "a"), ("DELETE", "/v1/admin/keys/a", None)),
    ],
)  # fmt: skip
def test_the_words_of_a_command_are_one_request(words, request_):
    """A flag that is left out is left to the gateway."""
    assert carry_out(*words) == [request_]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("list", "a"), "keys list: NAME is for the other actions."),
        (("make",), "keys make: NAME is needed."),
        (("rotate", "a", "--metrics"), "keys rotate: the flags of a key are for make and change."),
        (("list", "--expires-in", "never"), "keys list: the flags of a key are for make and change."),
        (("change", "a", "--overlap", "1h"), "keys change: --overlap is for rotate."),
    ],
)
def test_words_that_do_not_fit_their_action_are_refused(words, sentence):
    with pytest.raises(Exit, match=sentence):
        carry_out(*words)


@pytest.mark.parametrize("words", [("make", "a", "--expires-in", "12"), ("rotate", "a", "--overlap", "never")])
def test_a_time_without_a_unit_is_refused(capsys, words):
    """An old secret is not accepted for ever."""
    with pytest.raises(SystemExit):
        carry_out(*words)
    assert "must be like" in capsys.readouterr().err


KEY = {"name": "a", "source": "api", "state": "active", "models": ["m", "n"], "limits": {"max_in_flight": 3, "x": 1},
       "usage_now": {"in_flight": 2}}  # fmt: skip


def test_a_key_is_a_line_of_its_terms_and_its_use(capsys):
    """Times are from now on; a key of an older gateway, of which nothing is known, is a line as well."""
    now = time.time()
    used = {**KEY, "expires_at": now + 90.5, "last_used_at": now - 3600}
    carry_out(answer={"keys": [used, {"name": "b", "expires_at": now - 1}, {"name": "c", "models": []}]})
    head, first, second, third = capsys.readouterr().out.splitlines()
    assert head.split() == ["KEY", "FROM", "STATE", "MODELS", "EXPIRES_IN", "LIMITS", "IN_FLIGHT", "LAST_USED"]
    assert first.split() == ["a", "api", "active", "m,n", "1m30s", "3", "at", "once", "2", "1h0m", "ago"]
    assert second.split() == ["b", "-", "-", "all", "-", "-", "-", "-"]
    assert third.split()[3] == "none"


@pytest.mark.parametrize(
    ("words", "answer", "out", "note"),
    [
        (("make", "a"), {"key": "sk-1", "name": "a"}, "sk-1\n", "The key a is stored nowhere"),
        (("rotate", "a"), {"key": "sk-2", "name": "a", "old_secret_until": 1e10}, "sk-2\n", "is accepted for another"),
        (("rotate", "a"), {"key": "sk-2", "name": "a", "old_secret_until": 1.0}, "sk-2\n", "is refused from now on."),
        (("withdraw", "a"), {"name": "a", "keys_left": 0}, "a withdrawn\n", "No key is left"),
        (("withdraw", "a"), {"name": "a", "keys_left": 1}, "a withdrawn\n", ""),
    ],
)
def test_a_secret_is_all_of_the_output(capsys, words, answer, out, note):
    """A script reads the secret; the operator reads the note beside it."""
    carry_out(*words, answer=answer)
    shown = capsys.readouterr()
    assert shown.out == out
    assert note in shown.err
    assert bool(note) == bool(shown.err)


def test_keys_as_json_are_what_the_gateway_sent(capsys):
    carry_out(as_json=True)
    assert capsys.readouterr().out == '{"as": "sent"}\n'
