"""The ways to external routes and to workers elsewhere: name, connection, certificate, answer, key, and clock."""

import email.utils
import math
import ssl
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import attrs
import trio

from ichat.cli.json_values import Json
from ichat.config.schema import Config, ExternalRoute
from ichat.doctor.findings import Finding
from ichat.errors import Exit
from ichat.fleet.registered_servers import read_access, upstreams_of
from ichat.http import client
from ichat.http.heads import Headers
from ichat.http.pool import Upstream
from ichat.texts import reason_of

ASK_S = 5.0
SKEW_S = 30.0
"""A clock that differs more is a finding: certificates and signatures depend on it."""

Way = Literal["answered", "unknown_host", "not_connected", "not_trusted", "not_http", "silent", "not_asked"]


@attrs.frozen
class WayFacts:
    """The outcome of a request."""

    name: str
    """The worker's id, or the model of the external route or registered server."""
    place: str
    """Host and port."""
    way: Way
    words: str = ""
    status: int = 0
    skew_s: float | None = None
    """How far the other clock is ahead of this clock, in seconds; None: not known."""
    seconds: float = 0.0
    has_key: bool = False
    is_route: bool = True
    has_tls: bool = False
    key_variable: str | None = None


async def read_routes(config: Config, ends_at: float) -> list[WayFacts]:
    """Ask each external route and registered server for its models, as the gateway would: with its key."""
    found: dict[str, WayFacts | None] = {}
    upstreams = upstreams_of(config)

    async def ask(where: str) -> None:
        given = upstreams[where]
        try:
            access, upstream = read_access(given, where, given.model_name)
        except Exit:
            found[where] = None  # the findings about keys report it
            return
        health_path = given.health_path if isinstance(given, ExternalRoute) else None
        target = health_path or access.target_for(b"/v1/models").decode()
        way = await ask_way(given.model_name, upstream, target, access.headers_for([]))
        has_tls, variable = upstream.tls is not None, given.api_key_env
        found[where] = attrs.evolve(way, has_key=access.has_key, has_tls=has_tls, key_variable=variable)

    with trio.move_on_at(ends_at):
        await client.ask_each(upstreams, ask)
    left = {where: WayFacts(one.model_name, one.api_base, "not_asked") for where, one in upstreams.items()}
    ways = [found.get(where, one) for where, one in left.items()]
    return [one for one in ways if one is not None]


async def read_ways_to_workers(workers: Sequence[Json], ends_at: float) -> list[WayFacts]:
    """Ask each worker that the gateway did not start for its health."""
    asked = [one for one in workers if not one.get("managed") and one.get("host") and one.get("port")]
    found: dict[str, WayFacts] = {}

    async def ask(worker: Json) -> None:
        name = str(worker.get("worker_id"))
        way = await ask_way(name, Upstream(name, str(worker["host"]), int(worker["port"]), None), "/health", [])
        found[name] = attrs.evolve(way, is_route=False)

    with trio.move_on_at(ends_at):
        await client.ask_each(asked, ask)
    names = sorted(str(one.get("worker_id")) for one in asked)
    return [found.get(name, WayFacts(name, "", "not_asked", is_route=False)) for name in names]


async def ask_way(name: str, upstream: Upstream, target: str, headers: Headers) -> WayFacts:
    """Return the outcome of a GET, within ASK_S."""
    host = f"[{upstream.host}]" if ":" in upstream.host else upstream.host
    place, began = f"{host}:{upstream.port}", time.monotonic()
    own = [(b"accept", b"*/*"), (b"user-agent", b"ichat"), *headers]
    with trio.move_on_after(ASK_S):
        try:
            await trio.socket.getaddrinfo(upstream.host, upstream.port)
        except (OSError, UnicodeError) as error:
            return WayFacts(name, place, "unknown_host", str(error))
        try:
            async with await client.request(upstream, target, own) as response:
                seconds, date = time.monotonic() - began, response.headers.get(b"date", b"")
                return WayFacts(name, place, "answered", status=response.status, skew_s=_skew_of(date), seconds=seconds)
        except client.BROKEN as error:
            if isinstance(error.__cause__, ssl.SSLError):
                return WayFacts(name, place, "not_trusted", client.reason_of_failure(error))
            return WayFacts(name, place, "not_http", client.reason_of_failure(error))
        except OSError as error:
            return WayFacts(name, place, "not_connected", reason_of(client.first_cause(error)))
        except ValueError as error:
            return WayFacts(name, place, "not_http", str(error))
    return WayFacts(name, place, "silent")


def find_in_network(ways: Sequence[WayFacts]) -> list[Finding]:
    """Return the findings about the ways, and about this machine's clock."""
    asked = [way for way in ways if way.way != "not_asked"]
    findings = [finding for way in asked for finding in _check_way(way)]
    if left := [way.name for way in ways if way.way == "not_asked"]:
        sentence = f"{len(left)} of {len(ways)} ways were not known in time, that to {left[0]} first."
        findings.append(Finding("warning", "time", sentence))
    return [*findings, *_check_clock(asked)]


def _check_way(way: WayFacts) -> Iterator[Finding]:
    host = way.place.rpartition(":")[0]
    whose = "its" if way.is_route else "the worker's"
    curl = f"curl -v http{'s' if way.has_tls else ''}://{way.place}"
    broken = {
        "unknown_host": f"The host {host} cannot be resolved: correct its name, or this machine's DNS.",
        "not_connected": f"{way.place} cannot be reached ({way.words}): start {whose} server, or open the way to it.",
        "not_trusted": f"The certificate of {way.place} is not trusted ({way.words}): set its ca_certificates.",
        "silent": f"{way.place} did not answer within {ASK_S:g} s: look for a firewall between, or at its load.",
        "not_http": f"{way.place} does not answer as HTTP has it ({way.words}): look at http and https in api_base.",
    }
    commands = {"unknown_host": f"getent hosts {host}", "not_trusted": f"openssl s_client -connect {way.place}"}
    if way.way in broken:
        yield Finding("error", way.name, broken[way.way], commands.get(way.way, curl))
    elif way.status in (401, 403) and way.is_route:
        yield _check_refusal(way)
    elif way.status >= 500:
        sentence = f"{way.place} answers with status {way.status}: look at the log of {whose} server."
        yield Finding("error", way.name, sentence, curl)
    else:
        key = ", and accepts the key" if way.has_key and way.status < 300 else ""
        yield Finding("ok", way.name, f"{way.place} answers in {1000 * way.seconds:.0f} ms{key}.")


def _check_refusal(way: WayFacts) -> Finding:
    """A wrong key gets 401; a key that merely may not list the models may get 403."""
    named = "its key" if way.has_key else "a request without a key (set api_key_env)"
    key = f"the key in {way.key_variable}" if way.key_variable else named
    command = f"export {way.key_variable}=…" if way.key_variable else ""
    if way.status == 403:
        sentence = f"{way.place} does not list its models with {key} (status 403): check the key's purpose."
        return Finding("warning", way.name, sentence, command)
    sentence = f"{way.place} refuses {key} (status 401): correct it, and restart the gateway."
    return Finding("error", way.name, sentence, command)


def _check_clock(ways: Sequence[WayFacts]) -> Iterator[Finding]:
    told = [(way, way.skew_s) for way in ways if way.skew_s is not None]
    if not told:
        return
    way, skew_s = min(told, key=lambda one: abs(one[1]))
    if abs(skew_s) > SKEW_S:
        side = "behind" if skew_s > 0 else "ahead of"
        sentence = f"This machine's clock is {abs(skew_s):.0f} s {side} that of {way.place}: have it set by NTP."
        yield Finding("warning", "clock", sentence, "timedatectl status")
    else:
        yield Finding("ok", "clock", f"This machine's clock agrees with {way.place}.")


def _skew_of(date: bytes) -> float | None:
    """Return how far a clock is ahead by the Date of its response (RFC 9110, 6.6.1), in whole seconds."""
    try:
        skew_s = email.utils.parsedate_to_datetime(date.decode("ascii")).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None
    return skew_s if math.isfinite(skew_s) else None
