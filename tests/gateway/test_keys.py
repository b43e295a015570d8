"""Keys that are made over the API: in force at once, refused once withdrawn, and kept for the next gateway."""

import json
import re
import stat
import time

import attrs
import jsonschema
import pytest
import trio
from support.peers import OWN_SECRET, plain
from support.programs import LIMIT_S

from ichat.admin.openapi import document
from ichat.cli import commands as terminal
from ichat.config import load as configuration
from ichat.config.schema import Key
from ichat.errors import EXIT_UNAVAILABLE, EXIT_USAGE, Exit
from ichat.roles import gateway
from ichat.security.key_file import save_keys
from ichat.security.keys import digest_of, hash_of
from ichat.security.made_keys import MadeKey, MadeKeys

ADMIN, DATA = "sk-admin-0123456789", "sk-data-0123456789"
CHAT = "/v1/chat/completions"
BODY = {"model": "m"}


class Site:
    """A gateway with one model, and a connection to it that stays open."""

    def __init__(self, port, client):
        self.port = port
        self.client = client

    async def ask(self, method, path, body=None, key=ADMIN, client=None):
        """Return the status and the parsed answer of a request."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        client = client or self.client
        await client.send(head.encode() + data)
        status, _, answer = await client.response(method.encode())
        return status, json.loads(answer)

    async def make(self, name, **more):
        status, made = await self.ask("POST", "/v1/admin/keys", {"name": name, **more})
        assert status == 201, made
        return made

    async def listed(self):
        status, found = await self.ask("GET", "/v1/admin/keys")
        assert status == 200
        return {one["name"]: one for one in found["keys"]}


async def hello(stream, head, body):
    await stream.send_all(plain(b'{"hello": 1}'))


def settings(tmp_path, more=""):
    text = f'state_directory = "{tmp_path / "state"}"\n[security]\nadmin_key_hash = "{hash_of(ADMIN)}"\n'
    return text + more


@pytest.fixture
async def site(serve, gateway_to, connect, tmp_path):
    _, upstream = await serve(hello)
    port = await gateway_to({"m": upstream, "other": upstream}, settings(tmp_path))
    return Site(port, await connect(port))


def is_as_said(value, name):
    said = document()["components"]
    jsonschema.validate(value, {"$ref": f"#/components/schemas/{name}", "components": said})


async def test_a_made_key_is_in_force_at_once(site, tmp_path):
    """The same connection may use it; the file has its hash and not the key, and nobody else may read the file."""
    assert (await site.ask("POST", CHAT, BODY, key="anything-goes-here"))[0] == 200, "no client needs a key yet"
    made = await site.make("team-a", models=["m"])
    is_as_said(made, "NewKey")
    assert (await site.ask("POST", CHAT, BODY, key=made["key"]))[0] == 200
    assert (await site.ask("POST", CHAT, {"model": "other"}, key=made["key"]))[0] == 403
    assert (await site.ask("POST", CHAT, BODY, key="anything-goes-here"))[0] == 401
    path = tmp_path / "state" / "keys.json"
    assert made["key"] not in path.read_text()
    assert digest_of(made["key"].encode()).hex() in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.glob("keys.json*")] == ["keys.json"]


async def test_the_list_has_every_key_and_no_secret(site, serve, gateway_to, connect, tmp_path):
    """Those of the configuration and those that were made, with what they may use and what they have used."""
    _, upstream = await serve(hello)
    more = f'[[security.keys]]\nname = "mine"\nkey_hash = "{hash_of(DATA)}"\nmax_in_flight = 3\n'
    port = await gateway_to({"m": upstream}, settings(tmp_path / "2", more))
    site = Site(port, await connect(port))
    before = time.time()
    made = await site.make("made", requests_per_minute=9, expires_in_s=60)
    await site.ask("POST", CHAT, BODY, key=made["key"])
    status, found = await site.ask("GET", "/v1/admin/keys")
    assert status == 200
    is_as_said(found, "Keys")
    assert found["keys_needed"]
    mine, shown = found["keys"]
    assert (mine["name"], mine["source"], mine["made_at"], mine["limits"]["max_in_flight"]) == ("mine", "file", None, 3)
    assert (mine["last_used_at"], mine["usage_now"]["requests_last_minute"]) == (None, None)
    assert (shown["name"], shown["source"], shown["state"]) == ("made", "api", "active")
    assert (shown["usage_now"]["requests_last_minute"], shown["usage_now"]["in_flight"]) == (1, 0)
    assert before - 1 <= shown["made_at"] <= shown["last_used_at"] + 1 <= time.time() + 2
    assert shown["expires_at"] == pytest.approx(shown["made_at"] + 60, abs=0.01)
    assert "key" not in shown
    assert "sha256" not in json.dumps(found)


async def test_a_withdrawn_key_is_refused_from_the_next_request_on(serve, gateway_to, connect, tmp_path):
    """Its request under way is answered. That none is left opens the gateway to nobody."""
    reached, goes_on = trio.Event(), trio.Event()

    async def waiting(stream, head, body):
        reached.set()
        await goes_on.wait()
        await hello(stream, head, body)

    _, upstream = await serve(waiting)
    port = await gateway_to({"m": upstream}, settings(tmp_path))
    site, client = Site(port, await connect(port)), await connect(port)
    made = await site.make("team-a")
    async with trio.open_nursery() as nursery:

        async def ask():
            assert (await site.ask("POST", CHAT, BODY, key=made["key"], client=client))[0] == 200

        nursery.start_soon(ask)
        await reached.wait()
        status, answer = await site.ask("DELETE", "/v1/admin/keys/team-a")
        assert (status, answer) == (200, {"name": "team-a", "state": "withdrawn", "keys_left": 0})
        is_as_said(answer, "WithdrawnKey")
        goes_on.set()
    for key in (made["key"], "anything-goes-here"):
        assert (await site.ask("POST", CHAT, BODY, key=key, client=await connect(port)))[0] == 401
    assert await site.listed() == {}
    assert (await site.ask("DELETE", "/v1/admin/keys/team-a"))[0] == 404


async def test_a_changed_key_has_its_new_limits_and_the_same_secret(site):
    """What is left out stays as it was; null takes a limit away; what was used stays used."""
    made = await site.make("team-a", requests_per_minute=1, models=["m"])
    assert (await site.ask("POST", CHAT, BODY, key=made["key"]))[0] == 200
    assert (await site.ask("POST", CHAT, BODY, key=made["key"]))[0] == 429
    status, changed = await site.ask("PATCH", "/v1/admin/keys/team-a", {"requests_per_minute": 2})
    assert (status, changed["models"], changed["limits"]["requests_per_minute"]) == (200, ["m"], 2)
    is_as_said(changed, "Key")
    assert (await site.ask("POST", CHAT, BODY, key=made["key"]))[0] == 200
    assert (await site.ask("POST", CHAT, BODY, key=made["key"]))[0] == 429
    status, changed = await site.ask("PATCH", "/v1/admin/keys/team-a", {"requests_per_minute": None, "models": None})
    assert (changed["models"], changed["limits"]["requests_per_minute"]) == (None, None)
    assert (await site.ask("POST", CHAT, {"model": "other"}, key=made["key"]))[0] == 200


async def test_limits_for_a_day_and_a_month(site, serve, gateway_to, connect, tmp_path):
    """They are those of `[[security.keys]]`: what was used is shown, and a budget needs a price."""
    await site.make("team-a", tokens_per_day=100, tokens_per_month=1000)
    shown = (await site.listed())["team-a"]
    assert (shown["limits"]["tokens_per_day"], shown["limits"]["tokens_per_month"]) == (100, 1000)
    assert (shown["usage_now"]["tokens_today"], shown["usage_now"]["cost_this_month"]) == (0, None)
    status, answer = await site.ask("PATCH", "/v1/admin/keys/team-a", {"budget_per_month": 5})
    assert (status, answer["error"]["code"]) == (400, "bad_request")
    assert "needs a price" in answer["error"]["message"]
    port = await gateway_to({}, settings(tmp_path / "2", '[prices."m"]\ninput = 1.5\n'))
    assert (await Site(port, await connect(port)).make("a", budget_per_month=5))["limits"]["budget_per_month"] == 5


async def test_an_expired_key_is_refused_until_it_gets_more_time(site, connect):
    """It is listed as expired, and the gateway is not open for that."""
    made = await site.make("team-a", expires_in_s=0.2)
    with trio.fail_after(LIMIT_S):
        while (await site.listed())["team-a"]["state"] == "active":
            await trio.sleep(0.02)
        while (await site.ask("POST", CHAT, BODY, key=made["key"], client=await connect(site.port)))[0] != 401:
            await trio.sleep(0.01)
    status, changed = await site.ask("PATCH", "/v1/admin/keys/team-a", {"expires_at": None})
    assert (status, changed["state"], changed["expires_at"]) == (200, "active", None)
    assert (await site.ask("POST", CHAT, BODY, key=made["key"]))[0] == 200


async def test_the_next_gateway_knows_them(serve, gateway_to, connect, tmp_path):
    """They are on the disk before the answer; a second start in the same directory has them, with their limits."""
    _, upstream = await serve(hello)
    text = f"[server_settings]\nport = 0\n{settings(tmp_path)}"
    text += f'[[external_routes]]\nmodel_name = "m"\napi_base = "http://127.0.0.1:{upstream}/v1"\n'
    config = configuration.parse(text, "test.toml")
    keys = []
    for start in range(2):
        async with trio.open_nursery() as nursery:
            port = await nursery.start(gateway.run, config)
            site = Site(port, await connect(port))
            if not start:
                keys = [(await site.make(name, max_in_flight=5))["key"] for name in ("a", "b")]
            assert [(await site.ask("POST", CHAT, BODY, key=key))[0] for key in keys] == [200, 200]
            assert {one["limits"]["max_in_flight"] for one in (await site.listed()).values()} == {5}
            nursery.cancel_scope.cancel()


async def test_a_name_is_taken_once(site, serve, gateway_to, connect, tmp_path):
    """By the configuration or over the API; and a key of the configuration is not changed over the API."""
    await site.make("team-a")
    status, answer = await site.ask("POST", "/v1/admin/keys", {"name": "team-a"})
    assert (status, answer["error"]["code"]) == (409, "key_exists")
    more = f'[[security.keys]]\nname = "mine"\nkey_hash = "{hash_of(DATA)}"\n'
    _, upstream = await serve(hello)
    port = await gateway_to({"m": upstream}, settings(tmp_path / "2", more))
    site = Site(port, await connect(port))
    status, answer = await site.ask("POST", "/v1/admin/keys", {"name": "mine"})
    assert (status, answer["error"]["code"]) == (409, "key_exists")
    for method, body in (("PATCH", {"models": []}), ("DELETE", None)):
        status, answer = await site.ask(method, "/v1/admin/keys/mine", body)
        assert (status, answer["error"]["code"]) == (409, "configured_key")


async def test_without_an_admin_key_the_own_user_makes_keys(gateway_to, connect, tmp_path):
    """The first key closes the models to all others, and the gateway's own user stays its operator."""
    port = await gateway_to({}, f'state_directory = "{tmp_path}"\n')
    site = Site(port, await connect(port))
    status, answer = await site.ask("POST", "/v1/admin/keys", {"name": "a"}, key="sk-nobody")
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    site = Site(port, await connect(port))
    status, _ = await site.ask("POST", "/v1/admin/keys", {"name": "a"}, key=OWN_SECRET)
    assert status == 201
    assert (await site.ask("GET", "/v1/admin/keys", key=OWN_SECRET))[0] == 200
    assert (await site.ask("GET", "/v1/models", key="sk-nobody"))[0] == 401


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({}, "name: is missing"),
        ({"name": "a b"}, "name: must be 1 to 128"),
        ({"name": "a", "models": "m"}, "models: must be an array"),
        ({"name": "a", "requests_per_minute": 0}, "requests_per_minute: must be from 1"),
        ({"name": "a", "metrics": "yes"}, "metrics: must be true or false"),
        ({"name": "a", "key_hash": hash_of(DATA)}, "the gateway makes this key itself"),
        ({"name": "a", "model": ["m"]}, "did you mean models?"),
        ({"name": "a", "expires_in_s": -1}, "expires_in_s must be a number of seconds from now"),
        ({"name": "a", "expires_at": 5}, "expires_at must be a number of seconds since 1970"),
        ({"name": "a", "expires_at": "soon"}, "expires_at must be a number of seconds since 1970"),
        ({"name": "a", "expires_in_s": 1, "expires_at": 2**31}, "leave one of them out"),
        ([], "A key is a JSON object"),
    ],
)
async def test_an_invalid_key_is_400_with_the_reason(site, table, sentence):
    """400, and the sentence says what is wrong; nothing was made."""
    status, answer = await site.ask("POST", "/v1/admin/keys", table)
    assert (status, answer["error"]["code"]) == (400, "bad_request")
    assert sentence in answer["error"]["message"]
    assert await site.listed() == {}


async def test_a_key_that_cannot_be_kept_is_not_made(site, tmp_path):
    """503, and neither the file nor what is in force has changed."""
    made = await site.make("team-a")
    before = (tmp_path / "state" / "keys.json").read_bytes()
    (tmp_path / "state" / "keys.json.new").mkdir()
    for method, path, body in (
        ("POST", "/v1/admin/keys", {"name": "b"}),
        ("PATCH", "/v1/admin/keys/team-a", {"models": []}),
        ("DELETE", "/v1/admin/keys/team-a", None),
    ):
        status, answer = await site.ask(method, path, body)
        assert (status, answer["error"]["code"]) == (503, "not_kept")
    assert (tmp_path / "state" / "keys.json").read_bytes() == before
    assert (await site.ask("POST", CHAT, BODY, key=made["key"]))[0] == 200
    assert list(await site.listed()) == ["team-a"]


async def test_there_are_so_many_at_most(serve, gateway_to, connect, tmp_path):
    """`limits.made_keys_max`; withdrawing one makes room."""
    port = await gateway_to({}, settings(tmp_path, "[limits]\nmade_keys_max = 1\n"))
    site = Site(port, await connect(port))
    await site.make("a")
    status, answer = await site.ask("POST", "/v1/admin/keys", {"name": "b"})
    assert (status, answer["error"]["code"]) == (409, "too_many_keys")
    await site.ask("DELETE", "/v1/admin/keys/a")
    await site.make("b")


@pytest.mark.parametrize(
    "damage", [b"", b"{", b'{"version": 2, "keys": []}', b'{"version": 1, "keys": [{"name": "a"}]}']
)
async def test_a_damaged_file_keeps_the_gateway_from_starting(tmp_path, damage):
    """It would be closed to the keys' owners, or open to all: an operator decides."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "keys.json").write_bytes(damage)
    config = configuration.parse(f"[server_settings]\nport = 0\n{settings(tmp_path)}", "test.toml")
    with pytest.raises(Exit, match="cannot be read from") as refusal:
        await gateway.run(config)
    assert refusal.value.code == EXIT_UNAVAILABLE
    assert (tmp_path / "state" / "keys.json").read_bytes() == damage


async def test_a_reload_keeps_them_and_takes_no_name_of_theirs(serve, connect, nursery, tmp_path):
    """A file with a made key's name, or its hash, is refused with a sentence; another one changes nothing of them."""
    _, upstream = await serve(hello)
    text = f"[server_settings]\nport = 0\n{settings(tmp_path)}"
    route = f'[[external_routes]]\nmodel_name = "m"\napi_base = "http://127.0.0.1:{upstream}/v1"\n'
    path = tmp_path / "ichat.toml"
    path.write_text(text + route)
    port = await nursery.start(gateway.run, *gateway.read_command_line(["-c", str(path)]))
    site = Site(port, await connect(port))
    made = await site.make("team-a", requests_per_minute=1)
    assert (await site.ask("POST", CHAT, BODY, key=made["key"]))[0] == 200
    for name, hash_, words in (
        ("team-a", hash_of(DATA), "a key made over the API"),
        ("b", hash_of(made["key"]), "team-a"),
    ):
        path.write_text(f'{text}[[security.keys]]\nname = "{name}"\nkey_hash = "{hash_}"\n{route}')
        status, answer = await site.ask("POST", "/v1/admin/config/reload")
        assert (status, answer["error"]["code"]) == (400, "bad_configuration")
        assert words in answer["error"]["message"]
    path.write_text(f'{text}[[security.keys]]\nname = "b"\nkey_hash = "{hash_of(DATA)}"\n{route}')
    status, answer = await site.ask("POST", "/v1/admin/config/reload")
    assert (status, answer["applied"]) == (200, True)
    assert (await site.ask("POST", CHAT, BODY, key=made["key"]))[0] == 429, "it is known, and what it used is, too"
    assert (await site.ask("POST", CHAT, BODY, key=DATA))[0] == 200
    assert list(await site.listed()) == ["b", "team-a"]


async def test_the_configuration_wins_at_a_start(serve, connect, nursery, tmp_path, caplog):
    """There is no gateway yet that could withdraw a key: what contradicts is left out, `--check` says it before."""
    _, upstream = await serve(hello)
    now, secrets = time.time(), {name: f"sk-{name}-0123456789" for name in ("name", "hash", "budget", "well", "old")}
    key = {name: Key(name, key_hash=hash_of(secret)) for name, secret in secrets.items()}
    key["budget"] = attrs.evolve(key["budget"], budget_per_month=1.0)
    key["old"] = attrs.evolve(key["old"], budget_per_month=1.0)
    made = {name: MadeKey(one, now - 100, now - 50 if name == "old" else None) for name, one in key.items()}
    (tmp_path / "state").mkdir()
    save_keys(str(tmp_path / "state" / "keys.json"), MadeKeys(made, is_used=True))
    path = tmp_path / "ichat.toml"
    text = f"[server_settings]\nport = 0\n{settings(tmp_path)}"
    for name, hash_ in (("name", hash_of(DATA)), ("other", hash_of(secrets["hash"]))):
        text += f'[[security.keys]]\nname = "{name}"\nkey_hash = "{hash_}"\n'
    text += f'[[external_routes]]\nmodel_name = "m"\napi_base = "http://127.0.0.1:{upstream}/v1"\n'
    path.write_text(text)
    with pytest.raises(Exit, match=r"security\.keys\[0\]\.name: .*; the made key budget\.budget_per") as refusal:
        gateway.read_command_line(["-c", str(path), "--check"])
    assert refusal.value.code == EXIT_USAGE
    assert "old" not in str(refusal.value)
    port = await nursery.start(gateway.run, *gateway.read_command_line(["-c", str(path)]))
    site = Site(port, await connect(port))
    asked = {
        name: (await site.ask("POST", CHAT, BODY, key=secret, client=await connect(port)))[0]
        for name, secret in secrets.items()
    }
    assert asked == {"name": 401, "hash": 200, "budget": 401, "well": 200, "old": 401}
    assert (await site.ask("POST", CHAT, BODY, key=DATA))[0] == 200
    states = {name: (one["source"], one["state"]) for name, one in (await site.listed()).items()}
    assert states == {
        "name": ("file", "active"), "other": ("file", "active"), "budget": ("api", "expired"),
        "well": ("api", "active"), "old": ("api", "expired"),
    }  # fmt: skip
    said = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert ["made key name" in said[0], "made key hash" in said[1], "made key budget" in said[2]] == [True] * 3
    assert len(said) == 3
    status, changed = await site.ask("PATCH", "/v1/admin/keys/budget", {"budget_per_month": None, "expires_at": None})
    assert (status, changed["state"]) == (200, "active")
    assert (await site.ask("POST", CHAT, BODY, key=secrets["budget"]))[0] == 200


@pytest.fixture
def command(site, capsys):
    """Run a command against the gateway: `code, out, err = await command("keys", "make", "a")`."""

    async def run(*words):
        argv = [*words, "--gateway", f"http://127.0.0.1:{site.port}", "--api-key", ADMIN]
        code = await trio.to_thread.run_sync(terminal.run, argv)
        # The gateway's access log is on standard output, too.
        found = capsys.readouterr()
        return code, [line for line in found.out.splitlines() if not line.startswith('{"time"')], found.err

    return run


async def test_keys_from_the_command_line(site, command, connect):
    """What is made goes to standard output alone, so that a shell can keep it; the list, a change and an end follow."""
    code, [secret], said = await command("keys", "make", "team-a", "--models", "m,other", "--expires-in", "30d")
    assert code == 0
    assert "stored nowhere" in said
    assert (await site.ask("POST", CHAT, BODY, key=secret))[0] == 200
    made = (await site.listed())["team-a"]
    assert made["models"] == ["m", "other"]
    assert made["expires_at"] - made["made_at"] == pytest.approx(30 * 24 * 3600, abs=1)
    _, [head, row], _ = await command("keys")
    assert head.split()[:4] == ["KEY", "FROM", "STATE", "MODELS"]
    assert row.split()[:4] == ["team-a", "api", "active", "m,other"]
    await command("keys", "change", "team-a", "--expires-in", "never", "--tokens-per-day", "5", "--models", "m")
    changed = (await site.listed())["team-a"]
    assert (changed["expires_at"], changed["limits"]["tokens_per_day"], changed["models"]) == (None, 5, ["m"])
    _, [other], said = await command("keys", "rotate", "team-a", "--overlap", "2h")
    assert "The old secret is accepted for another" in said
    assert [(await site.ask("POST", CHAT, BODY, key=one))[0] for one in (secret, other)] == [200, 200]
    _, lines, said = await command("keys", "withdraw", "team-a")
    assert (lines, "No key is left" in said) == (["team-a withdrawn"], True)
    assert (await site.ask("POST", CHAT, BODY, key=secret, client=await connect(site.port)))[0] == 401
    _, [shown], _ = await command("keys", "--json")
    assert json.loads(shown) == {"keys_needed": True, "keys": []}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["make"], "keys make: NAME is needed"),
        (["list", "a"], "keys list: NAME is for the other actions"),
        (["withdraw", "a", "--models", "m"], "the flags of a key are for make and change"),
        (["make", "a", "--overlap", "1h"], "keys make: --overlap is for rotate"),
        (["rotate", "a", "--overlap", "never"], "must be like 7d, 24h or 0s"),
        (["make", "a", "--expires-in", "soon"], "must be like 30d, 12h, 90m or 45s"),
        (["give", "a"], "invalid choice: 'give'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(words, sentence):
    """Exit 64, before any gateway is asked."""
    with pytest.raises(Exit, match=re.escape(sentence)) as refusal:
        terminal.run(["keys", *words, "--gateway", "http://127.0.0.1:9"])
    assert refusal.value.code == EXIT_USAGE


async def test_a_rotated_key_has_two_secrets_for_a_while(site, connect):
    """Limits and use are the name's; a second rotation ends the oldest secret; the old one ends by itself."""
    first = await site.make("team-a", requests_per_minute=100)
    assert first["old_secret_until"] is None
    await site.ask("POST", CHAT, BODY, key=first["key"])

    async def rotate(body):
        status, made = await site.ask("POST", "/v1/admin/keys/team-a/rotate", body)
        assert status == 200, made
        is_as_said(made, "NewKey")
        return made

    async def statuses(*keys):
        return [
            (await site.ask("POST", CHAT, BODY, key=one["key"], client=await connect(site.port)))[0] for one in keys
        ]

    second = await rotate({})
    assert second["old_secret_until"] == pytest.approx(time.time() + 24 * 3600, abs=60)
    assert second["usage_now"]["requests_last_minute"] == 1
    assert second["limits"]["requests_per_minute"] == 100
    assert await statuses(first, second) == [200, 200]
    third = await rotate({"overlap_s": 3600})
    assert await statuses(first, second, third) == [401, 200, 200]
    shown = (await site.listed())["team-a"]
    assert shown["usage_now"]["requests_last_minute"] == 5
    assert "key" not in shown
    fourth = await rotate({"overlap_s": 0.2})
    with trio.fail_after(LIMIT_S):
        while (await statuses(third)) != [401]:
            await trio.sleep(0.01)
    assert (await site.listed())["team-a"]["old_secret_until"] is None
    assert await statuses(fourth) == [200]
    fifth = await rotate({"overlap_s": 0})
    assert await statuses(fourth, fifth) == [401, 200]


@pytest.mark.parametrize(
    ("name", "body", "code"),
    [
        ("team-a", {"overlap_s": -1}, "bad_request"),
        ("team-a", {"overlap_s": 1e9}, "bad_request"),
        ("team-a", {"overlap_s": None}, "bad_request"),
        ("team-a", {"models": []}, "bad_request"),
        ("nobody", {}, "not_found"),
        ("gone", {}, "key_expired"),
    ],
)
async def test_a_rotation_that_cannot_be_changes_nothing(site, name, body, code):
    """The key goes on as it was."""
    made = await site.make("team-a")
    await site.make("gone", expires_in_s=0.01)
    with trio.fail_after(LIMIT_S):
        while (await site.listed())["gone"]["state"] == "active":
            await trio.sleep(0.01)
    _, answer = await site.ask("POST", f"/v1/admin/keys/{name}/rotate", body)
    assert answer["error"]["code"] == code
    assert (await site.ask("POST", CHAT, BODY, key=made["key"]))[0] == 200


async def test_the_next_gateway_knows_both_secrets(serve, gateway_to, connect, tmp_path):
    """They are on the disk, as hashes, before the answer."""
    _, upstream = await serve(hello)
    text = f"[server_settings]\nport = 0\n{settings(tmp_path)}"
    text += f'[[external_routes]]\nmodel_name = "m"\napi_base = "http://127.0.0.1:{upstream}/v1"\n'
    config = configuration.parse(text, "test.toml")
    keys = []
    for start in range(2):
        async with trio.open_nursery() as nursery:
            site = Site(port := await nursery.start(gateway.run, config), await connect(port))
            if not start:
                keys = [(await site.make("a"))["key"]]
                keys.append((await site.ask("POST", "/v1/admin/keys/a/rotate", {"overlap_s": 900}))[1]["key"])
            assert [(await site.ask("POST", CHAT, BODY, key=key))[0] for key in keys] == [200, 200]
            nursery.cancel_scope.cancel()
    assert not any(key in (tmp_path / "state" / "keys.json").read_text() for key in keys)
