"""Places that requests are sent to, with what this process counts and has seen of them."""

import math
from typing import NamedTuple, Protocol

import attrs

from ichat.http.heads import Headers
from ichat.http.pool import Upstream
from ichat.http.request_body import RequestBody
from ichat.listeners import Listeners
from ichat.protocol.messages import PROOF_HEADER, Heartbeat
from ichat.routing.access import Access
from ichat.routing.circuit_breaker import Circuit

REPORT_S = 10.0
"""How long a worker's report of its load counts."""
WORK_S = 30.0
"""Seconds after which a share of 1/e still counts of the requests that an endpoint got."""
AVERAGE_S = 10.0
"""Seconds after which a share of 1/e still counts of an earlier average load."""
NOTED_S = 0.02
"""How long a decaying average is reused before it is computed again, in seconds: its age hardly changes until then."""
AVOID_S = 10.0
"""How long an endpoint that could not be reached is chosen only if there is no other."""


class RequestTransform(Protocol):
    """The changes of an external route to requests on their way to its upstream."""

    @property
    def health_path(self) -> str:
        """The path of its health check; empty if it has none."""
        ...

    def changes(self, body: RequestBody) -> bool:
        """Return whether the upstream may get another body."""
        ...

    async def rewrite(self, body: RequestBody, path: bytes) -> RequestBody:
        """Return the body for the upstream; `path` is the request's. Raises ApiError 400."""
        ...


class EndpointFacts(NamedTuple):
    """An endpoint as the side that sends requests to it knows it: values, and no counts."""

    id: bytes
    upstream: Upstream
    route: RequestTransform | None = None
    access: Access | None = None
    reports_usage: bool = False
    """Whether its worker reports how many tokens each request used."""
    own_proof: bytes = b""
    """The proof to a worker that has a key of its own; empty: it has the token."""

    def proof_headers(self, proof: bytes) -> tuple[tuple[bytes, bytes], ...]:
        """Return the header by which a worker knows that its gateway sends a request; none on a unix socket.

        `proof` is empty if workers have no token; a worker with a key of its own gets its own proof.
        """
        proof = self.own_proof or proof
        return ((PROOF_HEADER, proof),) if proof and self.access is None and self.upstream.port else ()


class CacheHolder:
    """A start of an endpoint, as far as its engine's cache may hold prefixes. All notes about it end with it."""

    __slots__ = ("_average", "_noted_at", "_work", "endpoint", "wrong")

    def __init__(self, endpoint: "Endpoint") -> None:
        self.endpoint = endpoint
        self.wrong = 0
        """How many responses in a row showed that it held far less than was believed."""
        self._work = 0.0
        self._average = 0.0
        self._noted_at = 0.0
        """Of when the two are."""

    def __repr__(self) -> str:
        return f"<CacheHolder {self.endpoint.id.decode()}{'' if self.endpoint.holder is self else ', no more'}>"

    def lately(self, load: int, now: float, *, is_noted: bool = False) -> tuple[float, float]:
        """Return how many requests with a prefix it got lately, the older the less, and its average load.

        `load` is the number of requests in progress there now, and `is_noted` says that this will be remembered; see
        WORK_S, AVERAGE_S.
        """
        age_s = now - self._noted_at
        if age_s < NOTED_S:
            return self._work, self._average
        average = load + (self._average - load) * math.exp(-age_s / AVERAGE_S) if self._noted_at else 0.0
        work = self._work * math.exp(-age_s / WORK_S)
        if is_noted:
            self._work, self._average, self._noted_at = work, average, now
        return work, average

    def record_match(self, *, is_wrong: bool) -> int:
        """Record whether a response showed that it held far less than was believed; return how many did in a row."""
        self.wrong = self.wrong + 1 if is_wrong else 0
        return self.wrong

    def add_work(self, now: float) -> None:
        """Count a request with a prefix."""
        if now - self._noted_at >= NOTED_S:
            self.lately(self.endpoint.load(now), now, is_noted=True)
        self._work += 1


@attrs.define(eq=False)
class Endpoint:
    """A worker or an external route, as this process sends requests to it."""

    upstream: Upstream
    id: bytes
    """Its name in `x-ichat-worker` and in the access log."""
    in_flight_max: int
    route: RequestTransform | None = None
    """The changes of an external route to requests."""
    access: Access | None = None
    """The paths and the key of a server that the configuration names."""
    in_flight: int = 0
    """Requests of this process that it works on: counted at once, so never stale."""
    external_load: int = 0
    """Requests that it works on besides those, by its newest report."""
    reported_at: float = -math.inf
    avoid_until: float = -math.inf
    """Until then it is chosen only if there is no other: it could not be reached."""
    seen_at: float = -math.inf
    """When a response of it last began, or a health check asked for it."""
    unavailable_reason: str = ""
    """Why it gets no requests until its next heartbeat: no connection could be made, or it declined a request."""
    probe_failures: int | None = None
    """Health checks in a row that failed; None if it has none (`health_checks.py`)."""
    health_failure: str = ""
    """Why it gets no requests, if it fails its health checks; else empty."""
    timeouts: tuple[float, float] | None = None
    """Seconds until its first byte, and between two bytes, if they differ from the configuration."""
    circuit: Circuit = attrs.field(factory=Circuit)
    ready_since: float = -math.inf
    """When it was last found ready after it was not."""
    context_tokens: int | None = None
    """The most tokens of prompt and completion together, as its worker says; None: not known."""
    reports_prefixes: bool = False
    """Whether its worker wants the chains of requests, and reports what its engine's cache has lost."""
    reports_usage: bool = False
    """Whether its worker reports how many tokens each request used."""
    reports_late_usage: bool = False
    """Whether it reports the same of responses that are made in the background, once they are."""
    is_usage_lost: bool = False
    """Whether its report about a stream did not arrive; that is logged once."""
    holder: CacheHolder = attrs.field(default=attrs.Factory(CacheHolder, takes_self=True), init=False, repr=False)
    """The prefixes believed to be in its cache are noted for this holder."""
    facts: EndpointFacts = attrs.field(init=False, repr=False)
    troubled: Listeners[[]] = attrs.field(factory=Listeners[[]], init=False, repr=False)
    """Called when `trouble` begins or ends."""
    idle: Listeners[[]] = attrs.field(factory=Listeners[[]], init=False, repr=False)
    """Called when its last request in flight ends."""

    def __attrs_post_init__(self) -> None:
        self.facts = EndpointFacts(self.id, self.upstream, self.route, self.access, self.reports_usage)

    def _note_facts(self) -> None:
        self.facts = EndpointFacts(
            self.id, self.upstream, self.route, self.access, self.reports_usage, self.facts.own_proof
        )

    def reconfigure(self, upstream: Upstream, access: Access | None, route: RequestTransform | None = None) -> None:
        """Use other certificates and keys of the same upstream for later requests, and keep the counts."""
        self.route, self.access = route, access
        if self.upstream.tls is not None:
            self.upstream = upstream
        self._note_facts()

    def move(self, upstream: Upstream) -> None:
        """Send later requests to another address."""
        self.upstream = upstream
        self._note_facts()
        self.forget_probes()

    def use_proof(self, own_proof: bytes) -> None:
        """Prove to its worker by this that its gateway asks; empty: by the token."""
        if own_proof != self.facts.own_proof:
            self.facts = self.facts._replace(own_proof=own_proof)

    def limit(self, in_flight_max: int) -> None:
        """Send it at most this many requests at the same time."""
        self.in_flight_max = in_flight_max

    def headers_for(self, headers: Headers, proof: bytes) -> Headers:
        """Return the headers of a request with those that it needs.

        A server of the configuration gets its key. A worker gets the proof that its gateway asks, if that is not empty.
        """
        if self.access is not None:
            return self.access.headers_for(headers)
        return [*headers, *self.facts.proof_headers(proof)]

    def target_at_root(self, path: str) -> str:
        """Return the target of a path that stands beside `/v1`, such as /health."""
        return path if self.access is None else self.access.at_root(path.encode()).decode()

    def start_request(self) -> None:
        """Count a request that is sent there."""
        self.in_flight += 1

    def end_request(self) -> None:
        """Count the end of a request that was sent there."""
        self.in_flight -= 1
        if not self.in_flight:
            self.idle()

    async def wait_idle(self) -> None:
        """Wait until it has no request in flight."""
        if self.in_flight:
            await self.idle.wait()

    @property
    def trouble(self) -> str:
        """Why it gets no requests, in words that follow its name; empty if it does."""
        if self.health_failure:
            return f"fails its health checks: {self.health_failure}"
        return self.unavailable_reason

    def _set_trouble(self, unavailable_reason: str, health_failure: str) -> None:
        before = bool(self.unavailable_reason or self.health_failure)
        self.unavailable_reason, self.health_failure = unavailable_reason, health_failure
        if before != bool(unavailable_reason or health_failure):
            self.troubled()

    def begin(self) -> None:
        """Forget the observations of an earlier start of its worker."""
        self.circuit = Circuit(self.circuit.settings)
        self.is_usage_lost = False
        self.forget_probes()
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Forget which prefixes were believed to be in its cache."""
        self.holder = CacheHolder(self)

    def load(self, now: float) -> int:
        """Return how many requests it works on: its report counts while it is fresh."""
        return self.in_flight + (self.external_load if now - self.reported_at < REPORT_S else 0)

    def report(self, requests: int, now: float) -> None:
        """Record its own count of its requests, which corrects ours upwards, and that it can be reached."""
        self.external_load = max(0, requests - self.in_flight)
        self.reported_at = now
        self.record_reachable()

    def record_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Record what its worker reports of itself."""
        self.reports_prefixes, self.reports_usage = heartbeat.prefix_reports, heartbeat.usage_reports
        self.reports_late_usage = heartbeat.late_usage_reports
        if self.facts.reports_usage != self.reports_usage:
            self._note_facts()
        if heartbeat.state == "asleep":  # with an empty cache
            self.forget_prefixes()
        counts = (heartbeat.progress.get("running"), heartbeat.progress.get("waiting"))
        self.report(int(sum(count for count in counts if count is not None)), now)

    def ready_again(self, context_tokens: int | None, now: float) -> None:
        """Record that its worker is ready after it was not; `context_tokens` is the most of a prompt and its answer."""
        self.ready_since, self.context_tokens = now, context_tokens

    def see(self, now: float) -> None:
        """Record that a response of it begins, or that a health check asks for it."""
        self.seen_at = now

    def lose_usage(self) -> bool:
        """Record that its report about a stream did not arrive; return whether that is new in this start."""
        was_lost, self.is_usage_lost = self.is_usage_lost, True
        return not was_lost

    def record_reachable(self) -> None:
        """Record that it can be reached."""
        self.avoid_until = -math.inf
        self._set_trouble("", self.health_failure)

    def fail(self, now: float, why: str = "cannot be reached") -> None:
        """Record that it could not be reached, or accepts no requests for another reason."""
        self.avoid_until = now + AVOID_S
        self._set_trouble(why, self.health_failure)

    def record_probe(self, failure: str, failures_max: int) -> None:
        """Record the result of a health check; after `failures_max` failures in a row it gets no requests."""
        self.probe_failures = (self.probe_failures or 0) + 1 if failure else 0
        self._set_trouble(self.unavailable_reason, failure if self.probe_failures >= failures_max else "")

    def restore(
        self, avoid_until: float, unavailable_reason: str, probe_failures: int | None, health_failure: str
    ) -> None:
        """Go on with the observations of another process."""
        self.avoid_until, self.probe_failures = avoid_until, probe_failures
        self._set_trouble(unavailable_reason, health_failure)

    def forget_probes(self) -> None:
        """Forget the results of its health checks."""
        self.probe_failures = None
        self._set_trouble(self.unavailable_reason, "")
