"""The configuration itself, the keys that it names, its certificate, and the permissions of these files."""

import datetime as dt
import os
import pathlib
import pwd
import re
import shlex
import ssl
import stat
from collections.abc import Iterator, Mapping, Sequence

import attrs

from ichat.config import load as configuration
from ichat.config.own_secret import directory_for
from ichat.config.schema import Config
from ichat.doctor.findings import Finding
from ichat.doctor.machine import existing_part
from ichat.errors import Exit
from ichat.fleet.registered_servers import read_access, upstreams_of
from ichat.http.tls import server_context
from ichat.security.addresses import is_loopback
from ichat.security.key_file import load_keys
from ichat.security.keys import key_in
from ichat.security.made_keys import MadeKeys
from ichat.security.origins import site_of
from ichat.supervisor.state import PRIVATE_FILES, WORKERS_FILE, read_saved
from ichat.texts import reason_of

SOON = dt.timedelta(days=14)
"""A certificate that ends within this time is a warning."""

_SECRET = re.compile(r"authorization|api-?_?key|token|secret|password", re.IGNORECASE)
_ALL, _OTHERS, _OTHERS_WRITE = 0o077, 0o007, 0o002


@attrs.frozen
class FileMode:
    """The owner and the permissions of a file or a directory."""

    path: str
    mode: int
    owner: int
    is_writable: bool = True
    """Whether this user may write there."""


def read_mode(path: str) -> FileMode | None:
    """Return the permissions of a file; None if it does not exist, or cannot be seen."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return FileMode(path, stat.S_IMODE(status.st_mode), status.st_uid, os.access(path, os.W_OK))


def read_configuration(path: str | None) -> tuple[Config | None, list[Finding]]:
    """Return the configuration (the defaults if no file is named; None: it has mistakes), and the findings about it."""
    if path is None:
        sentence = "No configuration is named, so only this machine is examined, and a gateway at its usual port."
        return Config(), [Finding("warning", "file", sentence, "./ichat.pyz doctor -c ichat.toml")]
    try:
        config = configuration.load(pathlib.Path(path))
    except Exit as exit_:
        head, *problems = str(exit_).splitlines()
        said = [problem.strip() for problem in problems]
        sentences = [f"{path}: {one}{'' if one.endswith('?') else '.'}" for one in said] or [head]
        return None, [Finding("error", "file", sentence) for sentence in sentences]
    workers, routes = len(config.managed_workers), len(config.external_routes)
    servers = f"registered servers: {len(config.registered_servers)}, " if config.registered_servers else ""
    sentence = f"{path} is right (managed workers: {workers}, {servers}external routes: {routes})."
    return config, [Finding("ok", "file", sentence)]


def read_place(path: str | None) -> Config | None:
    """Return the settings of a file with mistakes that say where its gateway is; None: there are none."""
    settings = configuration.settings_of_refused(pathlib.Path(path)) if path is not None else None
    return Config(server_settings=settings) if settings is not None else None


def find_in_settings(path: str | None, config: Config) -> list[Finding]:
    """Return the findings about keys, certificate and files. It reads files, so it belongs in a thread."""
    made, problem = _read_made_keys(directory_for(config.server_settings))
    return [
        *_check_keys(config),
        *([Finding("error", "keys", problem)] if problem else []),
        *_check_exposure(config, has_made_keys=made.is_used),
        *_check_certificate(config, dt.datetime.now(dt.timezone.utc)),
        *check_modes(config, *_read_modes(path, config)),
        *_check_state(config),
        *check_names(config),
    ]


def check_names(config: Config) -> Iterator[Finding]:
    """Warn of names that refuse a share of their requests while one of their targets is away."""
    for alias in config.models:
        if alias.strict_shares and len([one for one in alias.targets if one.weight]) > 1 and not alias.fallbacks:
            sentence = (
                f"The name {alias.name} has strict_shares and no fallbacks: while one of its targets is away, its"
                " share of the requests is refused. Name fallbacks, or leave strict_shares out."
            )
            yield Finding("warning", "names", sentence)


def _check_keys(config: Config) -> Iterator[Finding]:
    """Ask for each key as the gateway does at its start."""
    security, found = config.security, list[Finding]()
    named = [(security.admin_key_env, "security.admin_key_env"), (security.join_token_env, "security.join_token_env")]
    named += [(key.key_env, f"security.keys[{number}].key_env") for number, key in enumerate(security.keys)]
    for variable, where in named:
        if variable is not None:
            try:
                key_in(variable, where)
            except Exit as exit_:
                sentence = str(exit_).partition(" A gateway that runs ")[0]
                found.append(Finding("error", "keys", sentence, f"export {variable}=…"))
    for where, one in upstreams_of(config).items():
        try:
            read_access(one, where, one.model_name)
        except Exit as exit_:
            command = f"export {one.api_key_env}=…" if "environment" in str(exit_) else ""
            found.append(Finding("error", "keys", str(exit_), command))
    yield from found or [Finding("ok", "keys", "Every key that the configuration names is there.")]


def _read_made_keys(directory: str | None) -> tuple[MadeKeys, str]:
    """Return the keys that were made over the API, and why they cannot be read; "" if they can, or none are there."""
    path = os.path.join(directory or "", "keys.json")
    if directory is None or not os.access(path, os.R_OK):
        return MadeKeys(), ""
    try:
        return load_keys(path), ""
    except Exit as exit_:
        return MadeKeys(is_used=True), str(exit_)


def _check_exposure(config: Config, *, has_made_keys: bool) -> Iterator[Finding]:
    host, security = config.server_settings.host, config.security
    if security.keys or has_made_keys:
        return
    names = ", ".join(site_of(config.server_settings).names)
    sentence = f"Clients need no key: they may ask by an address, or by {names} (server_settings.hosts)."
    yield Finding("ok", "names", sentence)
    if host == "localhost" or is_loopback(host):
        return
    yield Finding(
        "warning",
        "exposure",
        f"The gateway listens on {host or 'all addresses'} and clients need no key: every program that reaches it may"
        " use every model; give clients keys, or let server_settings.host be 127.0.0.1.",
        "./ichat.pyz key NAME",
    )


def _check_certificate(config: Config, now: dt.datetime) -> Iterator[Finding]:
    settings = config.server_settings
    if settings.tls_certificate is None or settings.tls_key is None:
        return
    try:
        server_context(settings.tls_certificate, settings.tls_key)
        first, last = validity_of(settings.tls_certificate)
    except (Exit, ValueError, OSError) as error:
        yield Finding("error", "certificate", str(error))
        return
    show = f"openssl x509 -in {shlex.quote(settings.tls_certificate)} -noout -dates -subject"
    if now >= last:
        sentence = f"The certificate {settings.tls_certificate} ended on {last:%Y-%m-%d}: renew it, then reload."
        yield Finding("error", "certificate", sentence, show)
    elif now < first:
        sentence = f"The certificate {settings.tls_certificate} is valid from {first:%Y-%m-%d} on: check this clock."
        yield Finding("error", "certificate", sentence, show)
    else:
        level = "warning" if last - now < SOON else "ok"
        sentence = f"The certificate fits its key, and is valid until {last:%Y-%m-%d}."
        yield Finding(level, "certificate", sentence, "./ichat.pyz reload" if level == "warning" else "")


def validity_of(path: str) -> tuple[dt.datetime, dt.datetime]:
    """Return from when to when the first certificate in a file is valid. Raises OSError or ValueError.

    CPython's tests read certificates by this function; its TLS module has the times only for a peer.
    """
    known: dict[str, str] = vars(ssl)["_ssl"]._test_decode_cert(path)
    first, last = (ssl.cert_time_to_seconds(known[name]) for name in ("notBefore", "notAfter"))
    return dt.datetime.fromtimestamp(first, dt.timezone.utc), dt.datetime.fromtimestamp(last, dt.timezone.utc)


def _read_modes(path: str | None, config: Config) -> tuple[FileMode | None, FileMode | None, Sequence[FileMode]]:
    """Return the permissions of the configuration, of the state directory, and of the private files."""
    directory, key = directory_for(config.server_settings), config.server_settings.tls_key
    private = [*([key] if key else []), *(os.path.join(directory, name) for name in PRIVATE_FILES if directory)]
    found = [mode for one in private if (mode := read_mode(one)) is not None]
    return read_mode(path) if path else None, read_mode(directory) if directory else None, found


def check_modes(
    config: Config, file: FileMode | None, directory: FileMode | None, private: Sequence[FileMode]
) -> Iterator[Finding]:
    """Yield findings about permissions: only the gateway's user should read secrets and change files."""
    found: list[Finding] = []
    if file and file.mode & _OTHERS_WRITE:
        sentence = f"Every user of this machine may change {file.path}, and so the programs that the gateway runs."
        found.append(Finding("error", "modes", sentence, f"chmod o-w {shlex.quote(file.path)}"))
    elif file and file.mode & _OTHERS and _has_secrets(config):
        sentence = f"{file.path} holds a secret, and every user of this machine may read it."
        found.append(Finding("warning", "modes", sentence, f"chmod 600 {shlex.quote(file.path)}"))
    if directory and not directory.is_writable:
        owner = _name_of(directory.owner)
        sentence = f"The state directory {directory.path} is {owner}'s, and this user may not write there: be {owner}."
        found.append(Finding("error", "modes", sentence, f"sudo -u {shlex.quote(owner)} ./ichat.pyz doctor -c FILE"))
    elif directory and directory.mode & _ALL:
        sentence = f"Other users may enter the state directory {directory.path}, where the workers' sockets are."
        found.append(Finding("error", "modes", sentence, f"chmod 700 {shlex.quote(directory.path)}"))
    is_key = {config.server_settings.tls_key}
    for one in private:
        if one.mode & (_OTHERS if one.path in is_key else _ALL):
            sentence = f"{one.path} holds secrets, and other users of this machine may read or change it."
            found.append(Finding("error", "modes", sentence, f"chmod 600 {shlex.quote(one.path)}"))
    yield from found or [Finding("ok", "modes", "The permissions of the gateway's files are right.")]


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"#{user}"


def _has_secrets(config: Config) -> bool:
    tables: list[Mapping[str, str]] = [route.headers for route in config.external_routes]
    tables += [worker.env for worker in config.managed_workers]
    return any(_SECRET.search(name) for table in tables for name in table)


def _check_state(config: Config) -> Iterator[Finding]:
    directory = directory_for(config.server_settings)
    if directory is None:
        return
    yield from _check_directory(config, directory)
    path = pathlib.Path(directory, WORKERS_FILE)
    if not os.path.exists(path):
        return
    try:
        _, reason = read_saved(path)
    except OSError as error:
        reason = reason_of(error)
    if reason:
        sentence = f"{path} is damaged ({reason}): the next gateway moves it aside and knows no worker from before."
        yield Finding("warning", "state", sentence, f"mv {shlex.quote(str(path))} {shlex.quote(f'{path}.damaged')}")


def _check_directory(config: Config, directory: str) -> Iterator[Finding]:
    """Yield a finding if a state directory that does not exist cannot be made."""
    there = existing_part(directory)
    if os.path.abspath(directory) == there or (os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)):
        return
    is_named = config.server_settings.state_directory is not None or bool(os.environ.get("STATE_DIRECTORY"))
    then = "the gateway cannot start" if is_named else "the gateway keeps nothing for its next start"
    sentence = f"The state directory {directory} cannot be made in {there}: {then}; make it, or name another directory."
    level = "error" if is_named else "warning"
    yield Finding(level, "state", sentence, f"sudo install -d -m 700 -o $(id -un) {shlex.quote(directory)}")
