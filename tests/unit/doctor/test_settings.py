"""Findings about a configuration: keys, names, permissions, certificates and the state directory."""

import datetime as dt
import os

import pytest
import trustme

from ichat.config import load as configuration
from ichat.config.schema import Config
from ichat.doctor.settings import (
    FileMode,
    check_modes,
    check_names,
    find_in_settings,
    read_configuration,
    read_mode,
    read_place,
    validity_of,
)


@pytest.fixture
def state(tmp_path, monkeypatch):
    """A state directory, and no variables of this environment."""
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


def config_of(text, state, **settings):
    lines = "".join(f"{name} = '{value}'\n" for name, value in {"state_directory": state, **settings}.items())
    return configuration.parse(f"[server_settings]\n{lines}{text}", "x.toml")


def problems(config, path=None):
    return [(one.level, one.name, one.sentence) for one in find_in_settings(path, config) if one.level != "ok"]


@pytest.mark.parametrize(("more", "expected"), [
    ("strict_shares = true", ["warning"]),
    ("strict_shares = true\nfallbacks = ['c']", []),
    ("", []),
])  # fmt: skip
def test_strict_shares_that_refuse_requests_are_found(more, expected):
    """A name with strict shares and no fallbacks refuses requests while one of its targets is away."""
    text = f"[[models]]\nname = 'n'\ntargets = [{{ model = 'a' }}, {{ model = 'b' }}]\n{more}\n"
    assert [one.level for one in check_names(configuration.parse(text, "x.toml"))] == expected


ROUTE = "[[external_routes]]\nmodel_name = 'r'\napi_base = 'http://h/v1'\n"
SECRET = configuration.parse(f"{ROUTE}headers = {{ x-api-key = 'k' }}\n", "x.toml")
WITH_TLS = configuration.parse("[server_settings]\ntls_certificate = '/c'\ntls_key = '/k'\n", "x.toml")


@pytest.mark.parametrize(
    ("config", "modes", "levels", "command"),
    [
        (Config(), (0o644, 0o700, []), ["ok"], ""),
        (Config(), (None, None, []), ["ok"], ""),
        (SECRET, (0o640, 0o700, []), ["ok"], ""),
        (SECRET, (0o644, 0o700, []), ["warning"], "chmod 600 '/a b'"),
        (SECRET, (0o646, 0o700, []), ["error"], "chmod o-w '/a b'"),
        (Config(), (0o644, 0o750, []), ["error"], "chmod 700 /state"),
        (Config(), (0o644, 0o700, [("/state/keys.json", 0o640)]), ["error"], "chmod 600 /state/keys.json"),
        (WITH_TLS, (0o644, 0o700, [("/k", 0o640)]), ["ok"], ""),
        (WITH_TLS, (0o644, 0o700, [("/k", 0o644)]), ["error"], "chmod 600 /k"),
        (Config(), (0o666, 0o755, [("/state/keys.json", 0o644)]), ["error"] * 3, "chmod o-w '/a b'"),
    ],
)
def test_files_that_others_may_use_are_named(config, modes, levels, command):
    """A group may read the configuration and the certificate's key; the other files are the gateway's alone."""
    file, directory, private = modes
    found = list(
        check_modes(
            config,
            None if file is None else FileMode("/a b", file, 0),
            None if directory is None else FileMode("/state", directory, 0),
            [FileMode(path, mode, 0) for path, mode in private],
        )
    )
    assert [one.level for one in found] == levels
    assert found[0].command == command


def test_a_directory_of_another_user_is_examined_as_that_user():
    """A directory of another user stays theirs, and its permissions are no matter then."""
    [found] = check_modes(Config(), None, FileMode("/state", 0o777, 0, is_writable=False), [])
    assert found.sentence == "The state directory /state is root's, and this user may not write there: be root."
    assert found.command == "sudo -u root ./ichat.pyz doctor -c FILE"
    [found] = check_modes(Config(), None, FileMode("/state", 0o700, 2**31 - 7, is_writable=False), [])
    assert found.command == "sudo -u '#2147483641' ./ichat.pyz doctor -c FILE"


def test_a_mode_is_that_of_the_file(tmp_path):
    file = tmp_path / "x"
    file.touch(mode=0o640)
    assert read_mode(str(file)) == FileMode(str(file), 0o640, os.getuid(), is_writable=True)
    assert read_mode(f"{file}/none") is None


@pytest.mark.parametrize(
    ("host", "keys", "expected"),
    [
        ("127.0.0.1", None, []),
        ("localhost", None, []),
        ("::1", None, []),
        ("0.0.0.0", None, [("warning", "exposure")]),
        ("::", None, [("warning", "exposure")]),
        ("10.0.0.1", '{"version": 1, "keys": []}', []),
        ("0.0.0.0", '{"version": 1, "ke', [("error", "keys")]),
    ],
)
def test_a_gateway_without_keys_on_all_addresses_is_exposed(state, host, keys, expected):
    """Keys that were made over the API count as well, and a damaged file of them keeps the gateway from starting."""
    if keys is not None:
        (state / "keys.json").write_text(keys)
        (state / "keys.json").chmod(0o600)
    found = problems(config_of("", state, host=host))
    assert [one[:2] for one in found] == expected
    if expected == [("error", "keys")]:
        assert found[0][2].startswith(f"The keys that were made over the API cannot be read from {state}/keys.json")


def test_each_variable_without_a_key_is_an_error(state, monkeypatch):
    """A variable that has a key is not named, and no key is shown."""
    for name in ("ADMIN", "JOIN", "UPSTREAM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLIENT", "sk-secret-of-a-client")
    text = "[security]\nadmin_key_env = 'ADMIN'\njoin_token_env = 'JOIN'\n"
    text += "keys = [{ name = 'a', key_env = 'CLIENT' }]\n" + ROUTE + "api_key_env = 'UPSTREAM'\n"
    found = list(find_in_settings(None, config_of(text, state)))
    assert [(one.level, one.command) for one in found if one.name == "keys"] == [
        ("error", "export ADMIN=…"), ("error", "export JOIN=…"), ("error", "export UPSTREAM=…"),
    ]  # fmt: skip
    assert "secret" not in str(found)
    for name in ("ADMIN", "JOIN", "UPSTREAM"):
        monkeypatch.setenv(name, "sk-0123456789012345678901234567890123456789")
    [found] = [one for one in find_in_settings(None, config_of(text, state)) if one.name == "keys"]
    assert found.level == "ok"


NOW = dt.datetime.now(dt.UTC)
DAY = dt.timedelta(days=1)


@pytest.mark.parametrize(
    ("first", "last", "level", "words"),
    [
        (-9 * DAY, 30 * DAY, "ok", "is valid until"),
        (-9 * DAY, 13 * DAY, "warning", "is valid until"),
        (-9 * DAY, -1 * DAY, "error", "ended on"),
        (1 * DAY, 30 * DAY, "error", "on: check this clock"),
    ],
)
def test_a_certificate_is_judged_by_its_dates(state, tmp_path, first, last, level, words):
    made = trustme.CA().issue_cert("localhost", not_before=NOW + first, not_after=NOW + last)
    cert, key = str(tmp_path / "c.pem"), str(tmp_path / "c.key")
    made.cert_chain_pems[0].write_to_path(cert)
    made.private_key_pem.write_to_path(key)
    os.chmod(key, 0o600)
    config = config_of("", state, tls_certificate=cert, tls_key=key)
    [found] = [one for one in find_in_settings(None, config) if one.name == "certificate"]
    assert found.level == level
    assert words in found.sentence


def test_the_dates_of_a_certificate_are_those_that_it_was_made_with(tmp_path):
    """Other files have none."""
    first, last = dt.datetime(2026, 3, 4, 5, 6, 7, tzinfo=dt.UTC), dt.datetime(2051, 6, 7, 8, 9, 10, tzinfo=dt.UTC)
    made = trustme.CA().issue_cert("x.example", not_before=first, not_after=last)
    path = str(tmp_path / "x.pem")
    made.private_key_and_cert_chain_pem.write_to_path(path)
    assert validity_of(path) == (first, last)
    made.private_key_pem.write_to_path(path)
    with pytest.raises(OSError, match="rror"):
        validity_of(path)


def test_a_damaged_state_is_named_and_left(state):
    saved = state / "workers.json"
    saved.write_text('{"version": 1, "sta')
    saved.chmod(0o600)
    [(level, name, sentence)] = problems(config_of("", state))
    assert (level, name) == ("warning", "state")
    assert sentence.startswith(f"{saved} is damaged (JSONDecodeError)")
    assert saved.exists()


def test_a_state_directory_below_a_file_cannot_be_made(tmp_path, monkeypatch):
    """A directory that is named is an error; without the usual directory the gateway starts all the same."""
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", f"{tmp_path}/file")
    (tmp_path / "file").touch()
    [(level, _, sentence)] = problems(config_of("", f"{tmp_path}/file/state"))
    assert (level, "the gateway cannot start" in sentence) == ("error", True)
    [(level, _, sentence)] = problems(Config())
    assert (level, "keeps nothing for its next start" in sentence) == ("warning", True)


def test_each_mistake_of_a_file_is_an_error(tmp_path):
    """The settings that say where its gateway is are known all the same, if they are right."""
    path = tmp_path / "x.toml"
    path.write_text("[server_settings]\nport = 7\n[limits]\nhead_bytes_maxx = 3\n[timeouts]\ndrain_s = 'x'\n")
    config, found = read_configuration(str(path))
    assert config is None
    assert [one.level for one in found] == ["error", "error"]
    assert found[0].sentence.endswith("head_bytes_maxx: unknown key; did you mean head_bytes_max?")
    assert "timeouts.drain_s" in found[1].sentence
    assert read_place(str(path)).server_settings.port == 7
    assert read_place(None) is None


def test_a_right_file_is_counted_and_none_is_a_warning(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(ROUTE)
    config, [found] = read_configuration(str(path))
    assert config.external_routes[0].model_name == "r"
    assert found.sentence == f"{path} is right (managed workers: 0, external routes: 1)."
    config, [found] = read_configuration(None)
    assert (config, found.level) == (Config(), "warning")
