"""The facts about a request that every attempt at it needs."""

from collections.abc import Sequence

import attrs

from ichat.http.keepalive import KeepAlive
from ichat.http.relay import Relay
from ichat.http.request import Request
from ichat.http.request_body import NO_BODY, RequestBody
from ichat.http.server import Client, Taker
from ichat.observability.tracing import Trace
from ichat.proxy.context import GatewayContext
from ichat.proxy.targets import TargetWalk
from ichat.routing.prefix_chain import PrefixChain
from ichat.security.auth import Caller
from ichat.security.grant import Grant


@attrs.define(eq=False)
class ForwardedRequest:
    """A request, as all attempts at it see it. Times are Trio's clock."""

    context: GatewayContext
    request: Request
    client: Client
    caller: Caller
    path: bytes
    """Its path, as it is counted."""
    started_at: float
    grant: Grant = attrs.field(init=False)
    """Its permissions, once they are known."""
    body: RequestBody = NO_BODY
    """As the current model gets it; freed when a response begins."""
    prefix: PrefixChain | None = None
    """The beginning of its prompt, if its route may depend on that."""
    queued_s: float = 0.0
    load_waited_s: float = 0.0
    """How much of that its model was being loaded."""
    internal: Sequence[tuple[bytes, bytes]] = ()
    """Headers for the upstream that no client can send; only the control plane gets any."""
    taker: Taker | None = None
    """The receiver of the response, if that is not the client."""
    trace: Trace | None = None
    keepalive: KeepAlive | None = None
    relay: Relay | None = None
    """The relay of the newest attempt's response."""
    is_suspect: bool = False
    """Whether it may have members or headers that no worker gets from this caller."""
    is_background: bool = False
    """Whether its response is made after its end."""
    ticket: str = ""
    """Its worker reports the later usage under it; "" if there is none, or its upstream cannot report usage."""
    prompt_bytes: int = 0
    """The bytes of its body, if models learn from them how long prompts are; else 0."""
    is_copied: bool = False
    """Whether it belongs to the share of requests that is copied to its name's shadow."""
    walk: TargetWalk | None = None
    """Its way through the models of the name that it asked for; None for a name that is only a model's."""
