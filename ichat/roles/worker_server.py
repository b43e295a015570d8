"""The worker's answers: its own routes, and everything else by the engine; and the contents of its heartbeats."""

import functools
import hmac
import json
import os
import pathlib
import secrets
import socket
import time
import urllib.parse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from ichat import __version__, errors
from ichat.engines.adapter import AdapterSettings, model_body, models_body
from ichat.engines.engine import Engine, EngineInfo, Measured
from ichat.engines.load_phases import downloaded, hub_cache
from ichat.engines.thread import EngineThread
from ichat.errors import ApiError
from ichat.hardware.machines import LOOK_S, MachineMonitor, MachineReport, machines_of
from ichat.http.heads import Headers, RequestHead
from ichat.http.request import Request
from ichat.http.server import Client
from ichat.listeners import Listeners
from ichat.observability.logs.capture import Capture
from ichat.observability.logs.endpoint import LogEndpoint
from ichat.protocol.messages import (
    INTERNAL,
    NAMES_MAX,
    PROOF_HEADER,
    WORKER_HEADER,
    Heartbeat,
    WorkerState,
    response_tag,
    sentence,
)
from ichat.protocol.prefixes import PREFIX_HEADER
from ichat.protocol.usage import USAGE_HEADER
from ichat.roles.worker_options import Options
from ichat.roles.worker_reports import LateUsages
from ichat.roles.worker_sleep import WorkerSleep
from ichat.security.addresses import address_in
from ichat.security.auth import CHANGES_MODELS, bearer_of
from ichat.security.keys import digest_of, proof_of
from ichat.security.origins import Site, is_from_here

if TYPE_CHECKING:
    from prometheus_client import Metric

SLEEP_PATHS = (b"/sleep", b"/wake")
LOAD_LOOK_S = 0.5
"""How often the engine's lines are read while it loads."""
GROUP_HEARTBEAT_S = 3.0
"""The longest heartbeat interval of a group's members: each is of no use without the others."""
_PROOF_HEADERS = frozenset((PROOF_HEADER, b"authorization"))
_CHANGES = CHANGES_MODELS | {b"/resume_memory_occupation", b"/wake_up"}
"""Routes after which the worker sends a heartbeat at once: its models change, or it accepts requests again."""
_NOT_FOR_ENGINE = _CHANGES | {b"/logs/stream", b"/beat", *SLEEP_PATHS}
"""The paths of requests that the engine's thread leaves to Trio, among those that change something."""
_WANTED = frozenset((PREFIX_HEADER, USAGE_HEADER))
"""The gateway's headers that the engine's thread reads: the chain, and the request to report the tokens."""
_JSON = [(b"content-type", b"application/json")]


class WorkerServer:
    """Answers the worker's requests and makes its heartbeats."""

    def __init__(
        self,
        options: Options,
        engine: Engine,
        thread: EngineThread,
        port: int,
        *,
        capture: Capture | None = None,
        token: str = "",
    ) -> None:
        """`capture` keeps the output of this process, if any does; `token` admits clients of other machines."""
        self.options = options
        self._token_digests = [digest_of(text) for text in (token.encode(), proof_of(token.encode()))] if token else []
        self.thread = thread
        self._engine = engine
        self._site = Site()
        self.changed: Listeners[[]] = Listeners()
        """Called when the gateway needs a heartbeat now."""
        self._sleep = WorkerSleep(engine, thread, self.changed)
        self.port = port
        self.id = options.worker_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self.pids = {os.getpid(): self.id}
        """The worker knows no process but its own."""
        self.draining = False
        self._created = int(time.time())
        self.start_id = secrets.token_hex(8)
        own = [(WORKER_HEADER, self.id.encode())]
        self.log = LogEndpoint(capture.buffer, capture.settle, own) if capture is not None else None
        self.late_usages = LateUsages(functools.partial(thread.run_in_trio, self.changed))
        engine.adapter.late_usage.add(self.late_usages.add)
        self.grouped: Listeners[[]] = Listeners()
        """Called when the worker turns out to be a member of a group."""
        self._machine_monitor = MachineMonitor(self, self.id)

    def __repr__(self) -> str:
        return f"<Worker {self.id}: {self.state()}, {self.thread!r}>"

    def adapter_settings(self, events_directory: str = "") -> AdapterSettings:
        """Return the settings of the engine's adapter; prefixes are reported by way of a directory."""
        options = self.options
        tag = response_tag(self.id, self.start_id)
        return AdapterSettings(
            tag,
            options.responses_max,
            options.responses_bytes_max,
            options.reasoning_field,
            options.prefix_reports if events_directory else "false",
            events_directory,
            frozenset(options.media_domains),
        )

    def state(self) -> WorkerState:
        """Return the state for the gateway."""
        if self.draining or self.thread.unready.is_set():
            return "draining"
        if self.thread.is_ready():
            return self._sleep.state
        if self.thread.is_following():
            return "following"
        return "loading" if self.thread.parsed.is_set() else "starting"

    def authenticate(self, head: RequestHead, peer: str) -> None:
        """Admit the unix socket, the token and its proof, without a token this machine, and any request for the health.

        Raises ApiError 401, 403.
        """
        address, headers = address_in(peer), head.headers
        if not address:
            return
        if not self._token_digests and is_from_here(headers, address, self._site.page(head.version, headers)):
            return
        if head.path == b"/health" and head.method in (b"GET", b"HEAD"):
            return
        if not self._token_digests:
            raise errors.forbidden(
                "This worker answers its own machine only, at 127.0.0.1 or `localhost`, through no proxy and no page of"
                " another origin: start it, and its gateway, with the same ICHAT_JOIN_TOKEN."
            )
        if not self._is_proven(head.headers):
            raise errors.invalid_api_key(
                "This worker has a token: it answers its gateway, and clients that send the token (ICHAT_JOIN_TOKEN) as"
                " `Authorization: Bearer`. Its gateway needs the same token (security.join_token_env)."
            )

    def _is_admitted(self, request: Request, client: Client) -> bool:
        """Return whether the sender of a request may use the routes that are not open to all."""
        try:
            self.authenticate(RequestHead(b"GET", b"/", request.version, request.headers, 0), client.peer)
        except ApiError:
            return False
        return True

    def _is_proven(self, headers: Headers) -> bool:
        """Return whether a request has the token, or the proof of it."""
        given = [digest_of(bearer_of(value)) for name, value in headers if name in _PROOF_HEADERS]
        return any(hmac.compare_digest(digest, known) for digest in given for known in self._token_digests)

    def _is_of_gateway(self, request: Request, client: Client) -> bool:
        """Return whether only the gateway can have sent a request; an engine may have a route like the gateway's."""
        return not address_in(client.peer) or self._is_proven(request.headers)

    async def answer(self, request: Request, client: Client, _caller: None) -> None:
        """Answer a request: the worker's own routes here, everything else by the engine."""
        changes_sleep = request.path in SLEEP_PATHS and self._is_of_gateway(request, client)
        is_read = request.method in (b"GET", b"HEAD")
        if is_read and request.path == b"/health":
            await self._send_health(request, client)
            return
        request.replace_headers(_external(request.headers))
        if request.path == b"/logs/stream":
            if self.log is None:
                raise ApiError(404, "not_found", "This worker keeps no log: start it with --log-streaming true.")
            await self.log.answer(request, client)
        elif request.path == b"/beat":
            await self._request_heartbeat(request, client)
        elif changes_sleep:
            await self._change_sleep(request, client)
        elif not is_read and b"%" in request.path:
            raise errors.bad_request("The path must be written without percent signs.")  # it selects the route
        elif self.draining and not self.thread.is_ready() and self.thread.failure is None:
            raise errors.draining()
        elif is_read and self._is_list_open() and (request.path + b"/").startswith(b"/v1/models/"):
            await self._send_models(request, client)
        elif is_read and request.path == b"/metrics":
            plain = [header for header in request.headers if header[0] != b"accept"]
            request.replace_headers(plain)
            report = self._machine_monitor.report
            await self.thread.answer(
                request, client, lambda status, body: (status, body + metrics_of(self.thread, report))
            )
        else:
            changes = request.path in _CHANGES  # reported to the gateway at once, so Trio must see the end
            next_request = None if changes else functools.partial(self._next_request, client)
            await self.thread.answer(request, client, next_request=next_request)
            if changes:
                self.changed()

    def _next_request(self, client: Client, head: RequestHead, body: bytes) -> Request | None:
        """Return a request that `answer` would pass to the engine; None for all others. Called in any thread."""
        if head.method != b"POST" or b"%" in head.path or head.path in _NOT_FOR_ENGINE:
            return None
        try:
            self.authenticate(head, client.peer)
        except ApiError:
            return None
        request = client.reader.request_of(head, body)
        request.replace_headers(_external(request.headers))
        return request

    def _is_list_open(self) -> bool:
        """Return whether the worker lists the models itself: an engine with a key guards its list with it."""
        info = self.thread.info
        return self.thread.is_ready() and info is not None and not info.args.get("api_key")

    async def _send_health(self, request: Request, client: Client) -> None:
        """Send 200 while requests are answered, or while a follower follows; otherwise 503.

        A client that may use the other routes gets the phase and the worker's id as well. Members of a group name the
        id that they look for, and learn no other id.
        """
        phase = self.thread.admission.closed
        is_well = (self.thread.is_ready() and not phase) or self.thread.is_following()
        status, headers = {"status": "ok" if is_well else "unavailable"}, list(_JSON)
        is_known = self._is_admitted(request, client)
        if is_known and not is_well:
            status["phase"] = phase or self.thread.phase
        if is_known or request.by_name.get(WORKER_HEADER) == self.id.encode():
            headers.append((WORKER_HEADER, self.id.encode()))
        await client.respond(request, 200 if is_well else 503, headers, json.dumps(status).encode())

    async def _request_heartbeat(self, request: Request, client: Client) -> None:
        """Send a heartbeat soon: a gateway that was restarted requests it from each worker it finds."""
        if request.method != b"POST":
            raise errors.method_not_allowed(request.method.decode("latin-1"), "/beat", "POST")
        if self.options.gateway_address is None:
            raise ApiError(
                409, "no_gateway", "This worker has no gateway: it was started without --gateway-address.", retry=False
            )
        self.changed()
        await client.respond(request, 200, _JSON, b'{"status": "ok"}')

    async def _change_sleep(self, request: Request, client: Client) -> None:
        """Let the engine sleep, or wake up, and answer when it does."""
        if request.method != b"POST":
            raise errors.method_not_allowed(request.method.decode("latin-1"), request.path.decode(), "POST")
        if self.draining:
            raise errors.draining()
        await (self._sleep.sleep() if request.path == b"/sleep" else self._sleep.wake())
        await client.respond(request, 200, _JSON, json.dumps({"state": self.state()}).encode())

    async def _send_models(self, request: Request, client: Client) -> None:
        """Send the answer to `/v1/models` or `/v1/models/NAME`, the same for every engine."""
        models = {model.id: model for model in self._engine.models()}
        name = urllib.parse.unquote(request.path[len(b"/v1/models/") :].decode("latin-1"))
        if not name:
            body = models_body(models.values(), self._created, self._engine.name)
        elif name in models:
            body = model_body(models[name], self._created, self._engine.name)
        else:
            raise errors.model_not_found(name, models)
        await client.respond(request, 200, _JSON, body)

    def heartbeat(self) -> Heartbeat:
        """Return everything that is known about this worker; its sender sets the address at which it is reached."""
        info = self.thread.info or EngineInfo("", self.options.served_model_name, {}, {})
        names, group = info.model_names, info.group
        interval, state, phases = self.options.heartbeat_interval, self.state(), self.thread.load.phases()
        return Heartbeat(
            worker_id=self.id,
            model_name=names[0] if names else "",
            model_names=names,
            models=list(self._engine.models()) if self.thread.is_ready() else [],
            group=group,
            host=self.options.advertise_host or self.options.host or "127.0.0.1",
            port=self.port,
            backend=self._engine.name,
            model_path=info.model_path,
            state=state,
            load=phases if state in ("starting", "loading") else [],
            loaded=phases if self.thread.load.has_ended else [],
            phase=self.thread.admission.closed or self.thread.phase,
            failure=sentence(str(self.thread.failure or "")),
            heartbeat_interval=min(interval, GROUP_HEARTBEAT_S) if group else interval,
            unix_socket=self.options.unix_socket is not None,
            max_in_flight=self.options.max_in_flight,
            pid=os.getpid(),
            start_id=self.start_id,
            args=info.args,
            changed_args=_bounded(info.changed_args),
            versions={"ichat": __version__, **info.versions},
            progress=attrs.asdict(self._engine.progress()),
            memory=self._engine.memory() if isinstance(self._engine, Measured) else None,
            can_sleep=not info.why_no_sleep,
            prefix_reports=info.held is not None,
            usage_reports=self._engine.adapter.reports_usage,
            late_usage_reports=self._engine.adapter.reports_usage and self._engine.adapter.reports_late_usage,
            late_usage=self.late_usages.some(),
            machine=self._machine_monitor.report.machine if self._machine_monitor.report else None,
        )

    async def watch_load(self) -> None:
        """Report the phases of the load until it has ended."""
        load, told = self.thread.load, 0
        while not (load.has_ended or self.thread.ended.is_set()):
            await trio.sleep(LOAD_LOOK_S)
            load.catch_up()
            if (info := self.thread.info) is not None:
                cache = pathlib.Path(info.args.get("download_dir") or hub_cache(os.environ))
                load.note(await trio.to_thread.run_sync(downloaded, info.model_path, cache, time.time()))
            if load.version != told:
                told = load.version
                self.changed()

    async def watch_machine_forever(self) -> None:
        """Inspect the machine at intervals, for the heartbeats and the metrics.

        Begins when the engine serves. Until then the engine may fork this process, which must not happen in the middle
        of a call into a driver.
        """
        await self.thread.ready.wait()
        await self._machine_monitor.watch_forever(max(LOOK_S, self.options.heartbeat_interval), self.changed)


def _external(headers: Headers) -> Headers:
    """Return the headers without those that only our own processes may send each other, but for `_WANTED`."""
    return [header for header in headers if not header[0].startswith(INTERNAL) or header[0] in _WANTED]


def _bounded(names: Sequence[str] | None) -> list[str] | None:
    """Return the names, or None if they are too many for a heartbeat."""
    return None if names is None or len(names) > NAMES_MAX else list(names)


def metrics_of(thread: EngineThread, report: MachineReport | None = None) -> bytes:
    """Return the worker's own metrics in Prometheus' text format, with its machine's GPUs, to follow the engine's.

    Must not be called before the engine is ready: engines decide at their import how prometheus_client works here.
    """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector

    from ichat.observability.prometheus_families import gpu_families

    class OurMetrics(Collector):
        def collect(self) -> "Iterable[Metric]":
            others = max(0, thread.in_flight - 1)  # without the request for the metrics
            yield GaugeMetricFamily("ichat_worker_in_flight", "Requests that the engine is answering.", others)
            yield GaugeMetricFamily("ichat_worker_load_seconds", "From the start until it was ready.", thread.load_s)
            yield CounterMetricFamily("ichat_engine_aborts", "Requests that their clients left.", thread.aborts)
            held = thread.info.held if thread.info is not None else None
            if held is not None:
                yield GaugeMetricFamily("ichat_worker_held_prefixes", "Prefixes in the engine's cache.", len(held))
                yield CounterMetricFamily("ichat_worker_prefix_reports", "Those that the gateway got.", held.reports)
            yield from gpu_families(machines_of(report, []) if report is not None else ())

    registry = CollectorRegistry()
    registry.register(OurMetrics())
    return generate_latest(registry)
