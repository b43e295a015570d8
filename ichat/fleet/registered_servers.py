"""Servers that the configuration names, with their addresses, certificates and keys.

`[[registered_servers]]` become workers of the fleet; `proxy/external_routes.py` reads its upstreams here too.
"""

import urllib.parse
from collections.abc import Collection, Mapping

import attrs

from ichat.config.checks import slug_of
from ichat.config.schema import Config, ExternalRoute, RegisteredServer
from ichat.errors import EXIT_USAGE, Exit
from ichat.http.pool import Upstream
from ichat.http.tls import client_context
from ichat.routing.access import Access
from ichat.security.keys import read_key


@attrs.frozen(eq=False)
class Server:
    """One of `[[registered_servers]]`, as a worker of the fleet."""

    worker_id: str
    settings: RegisteredServer
    upstream: Upstream
    access: Access


def id_for(model_name: str, taken: Collection[str]) -> str:
    """Return a worker id for a model's name: readable, fit for a path, and the same at every start."""
    slug, number = slug_of(model_name), 0
    while f"{slug}-{number}" in taken:
        number += 1
    return f"{slug}-{number}"


def server_ids(config: Config) -> Mapping[str, RegisteredServer]:
    """Return the registered servers by their workers' ids, in the order of the file.

    An id that is made has `server` in it, so that it is no managed worker's.
    """
    taken = {one.worker_id for one in config.registered_servers if one.worker_id is not None}
    found: dict[str, RegisteredServer] = {}
    for one in config.registered_servers:
        worker_id = one.worker_id or id_for(f"{one.model_name[:80]}-server", taken)
        taken.add(worker_id)
        found[worker_id] = one
    return found


def read_servers(config: Config) -> Mapping[str, Server]:
    """Return the registered servers by their workers' ids. Raises Exit 64 as `read_access` does."""
    found: dict[str, Server] = {}
    for number, (worker_id, given) in enumerate(server_ids(config).items()):
        access, upstream = read_access(given, f"registered_servers[{number}]", f"worker {worker_id}")
        found[worker_id] = Server(worker_id, given, upstream, access)
    return found


def upstreams_of(config: Config) -> Mapping[str, ExternalRoute | RegisteredServer]:
    """Return the tables of all servers that the configuration names, by their paths in it."""
    routes = {f"external_routes[{number}]": one for number, one in enumerate(config.external_routes)}
    servers = {f"registered_servers[{number}]": one for number, one in enumerate(config.registered_servers)}
    return {**routes, **servers}


def read_access(given: ExternalRoute | RegisteredServer, where: str, name: str) -> tuple[Access, Upstream]:
    """Return how a server is addressed by its table; `where` is the table's path, `name` the server's in messages.

    Raises Exit 64 where the key is not in the environment, or the certificates are not usable.
    """
    headers = [(b"authorization", b"Bearer " + _key_of(given.api_key_env, where))] if given.api_key_env else []
    url = urllib.parse.urlsplit(given.api_base)
    prefix = url.path.rstrip("/")
    if isinstance(given, ExternalRoute):
        headers = [*((key.lower().encode(), value.encode()) for key, value in given.headers.items()), *headers]
    else:
        prefix = prefix.removesuffix("/v1") + "/v1"
    tls = client_context(given.ca_certificates) if url.scheme == "https" else None
    upstream = Upstream(name, url.hostname or "", url.port or (443 if tls else 80), tls, given.ca_certificates)
    return Access(prefix.encode(), headers), upstream


def _key_of(variable: str, where: str) -> bytes:
    key = read_key(variable)
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise Exit(EXIT_USAGE, f"{where}: the environment has no usable key in {variable}.")
    return key.encode()
