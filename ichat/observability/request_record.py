"""The facts of a request that has ended: metrics, the access log and the trace are made of them."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs

from ichat.observability.request_span import RequestSpan
from ichat.protocol.usage import UsedTokens
from ichat.routing.prefix_chain import PrefixChain

RESPONSE_PATH = b"/v1/responses/{id}"
"""How requests about an earlier response are counted, with any id."""
CLIENT_LEFT = 499
"""Stands for a status if the client left; that is no error."""
OTHER = "other"
"""The label of routes and models that are not counted apart."""

_NAMES = (
    "chat/completions", "completions", "embeddings", "rerank", "score", "classify", "pooling", "responses", "messages",
    "tokenize", "detokenize", "audio/transcriptions", "audio/translations",
)  # fmt: skip
ROUTES: Mapping[bytes, str] = {
    **{f"{base}/{name}".encode(): f"/v1/{name}" for base in ("", "/v1") for name in _NAMES},
    b"/v2/rerank": "/v1/rerank",
}
"""The label of each path for requests that name a model."""
LABELS: Mapping[bytes, str] = {**ROUTES, RESPONSE_PATH: RESPONSE_PATH.decode()}
"""The label under which requests to a path are counted; those to other paths have the label `OTHER`."""


@attrs.define(eq=False, kw_only=True)
class RequestRecord:
    """A request that has ended. Times are Trio's clock in seconds, sizes are bytes.

    Not frozen, since a record is made for every request: a frozen class sets each field by a call.
    """

    id: str
    client: str
    """The client's address, with its port where no proxy speaks for it."""
    method: str
    path: str
    route: str
    """The label of its path in metrics."""
    key_name: str
    """The name of the client's key; empty if it has none."""
    model: str
    """The model that it asked for; empty if that was never read."""
    status: int
    """Of the response; 499 where the client left."""
    error: str
    """The code of the error; empty if the request went well."""
    phase: str
    """The phase of the request when it was cut off (`RequestProgress.phase`); empty if it was not."""
    started_at: float
    ended_at: float
    queued_s: float
    bytes_in: int
    bytes_out: int
    usage: UsedTokens | None
    """The tokens that it used; None where nothing is known of them, or there was no answer."""
    trace_id: str
    span: RequestSpan | None = None
    """None where no spans are sent."""
    is_stream: bool = False
    """Whether the response is a stream of events."""
    is_counted: bool = True
    """Whether it was a request to a model. Other requests have a line in the access log and no other trace."""
    prefix: PrefixChain | None = None
    """The beginning of its prompt, and the endpoints believed to hold it, if its route depended on that."""
    worker: str = ""
    """The id of the worker or external route that was asked last; empty if none was."""
    answered_at: float | None = None
    """When the head of the response arrived."""
    first_at: float | None = None
    """When the first piece of its body arrived."""
    overhead_s: float | None = None
    """The gateway's own time before it asked the upstream, without the queue."""
    chunks: int = 0
    """Pieces of the response's body, as they were read."""
    alias: str = ""
    """The name that it asked for, if that stands for models; `model` is the model that answered, or was asked last."""
    passed: Sequence[tuple[str, str]] = ()
    """The models that could not answer it before, each with the reason."""
    own_id: str = ""
    """The gateway's own id; empty: it is `id`, or not known."""


class RecordSink(Protocol):
    """Receives the record of each request when the request has ended."""

    def ended(self, record: RequestRecord) -> None:
        """Note a request that has ended. The sink must not change the record."""
        ...
