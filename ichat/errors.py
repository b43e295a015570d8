"""Every failure that a client can see, and the exit codes that an operator can see.

Inside, code raises an error made here; only `http/front_door.py` turns it into a response.
The shape is that of the route's API (`error_shapes.py`).
"""

from collections.abc import Iterable
from functools import partial

from ichat.error_shapes import Members, error_body, error_event
from ichat.program import as_typed_here
from ichat.texts import probably_meant, shortened, some_of

EXIT_USAGE = 64
"""A wrong command line or configuration (EX_USAGE of sysexits.h): nothing was started."""
EXIT_UNAVAILABLE = 69
"""Something that is needed is not there, such as the engine's package (EX_UNAVAILABLE)."""
EXIT_SOFTWARE = 70
"""The engine could not start or died, or iChat has a bug (EX_SOFTWARE)."""
EXIT_INTERRUPTED = 130
"""Ctrl-C, as shells count it: 128 and the number of the signal."""


WHY_CHARACTERS_MAX = 500
"""The limit of the reason that a worker gives for declining a request."""
DECLINED = {
    b"engine_dead": "has lost its engine",
    b"draining": "is shutting down",
    b"model_not_ready": "is not ready",
}
"""The codes of a worker's 503 that mean that its engine has not seen the request, each with the reason."""
DECLINED_RETRY_S = 5
"""The Retry-After of a request, in seconds, that its worker declined and no other worker can process."""


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""The code of a request that is too long for its model: OpenAI's."""


class Exit(Exception):
    """Ends the process: a sentence for standard error and an exit code."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(as_typed_here(sentence))
        self.code = code


def kind_of(status: int) -> str:
    """Return the type of most errors of a status."""
    return "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"


class ApiError(Exception):
    """A failure with everything its response needs.

    ``kind`` is its type, if that does not follow from the status. ``retry_after_s`` becomes ``Retry-After``, ``allow``
    the methods of ``Allow``. ``retry=False`` becomes ``x-should-retry: false``, which openai-python obeys, for statuses
    that it would otherwise retry in vain. ``limit`` is the setting that refuses it, if a code can have several reasons.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        kind: str = "",
        param: str | None = None,
        retry_after_s: int | None = None,
        retry: bool | None = None,
        allow: str = "",
        limit: str = "",
    ) -> None:
        message = as_typed_here(message)
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.kind = kind or kind_of(status)
        self.param, self.allow, self.limit = param, allow, limit
        self.retry_after_s, self.retry = retry_after_s, retry

    def __repr__(self) -> str:
        return f"<ApiError {self.status} {self.code}: {self.message}>"

    def _members(self) -> Members:
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}

    def body(self, path: bytes = b"", request_id: bytes = b"") -> bytes:
        """Return the JSON body in the shape of the route `path`: OpenAI's for most."""
        return error_body(self.status, self._members(), path, request_id)

    def event(self, path: bytes) -> bytes:
        """Return the event that ends a stream of the route `path`, in the form that the route's clients know."""
        return error_event(self.status, self._members(), path)

    def why(self) -> bytes:
        """Return the message's text after its subject, fit for a header; empty if there is none."""
        text = self.message.partition(": ")[2].removesuffix(".")[:WHY_CHARACTERS_MAX]
        return "".join(character if " " <= character <= "~" else "?" for character in text).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of this failure."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        if self.retry is not None:
            headers.append((b"x-should-retry", b"true" if self.retry else b"false"))
        if self.allow:
            headers.append((b"allow", self.allow.encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


# Errors that are always the same.

client_left = partial(ApiError, 499, "client_left", "The client left in the middle of its request.")
"""The client disconnected before its whole request had arrived: only the log shows this failure."""
request_timeout = partial(ApiError, 408, "request_timeout", "The request did not arrive in time.")
"""408: the request did not arrive in time."""
internal_error = partial(ApiError, 500, "internal_error", "Internal error; the log has the details.")
"""500: a bug; its traceback is in the log and nowhere else."""
engine_aborted = partial(ApiError, 502, "engine_aborted", "The engine has aborted this request by itself.")
"""502: the engine itself aborted the request, as it does when its process gets a signal to end."""
too_many_connections = partial(
    ApiError, 503, "overloaded", "Too many open connections.", retry_after_s=1, limit="limits.connections_max"
)
"""503: `limits.connections_max` are open."""
too_many_control_requests = partial(
    ApiError, 503, "overloaded", "Too many requests to the control plane.", retry_after_s=1
)
"""503: the control plane is busy with its maximum of requests."""
request_cancelled = partial(ApiError, 503, "request_cancelled", "An operator has cancelled this request.", retry=False)
"""503: an operator has cancelled the request."""
draining = partial(ApiError, 503, "draining", "This server is shutting down.", retry_after_s=5)
"""503: this process is shutting down."""
loop_detected = partial(
    ApiError,
    508,
    "loop_detected",
    "This request has come through too many gateways: one of them seems to be its own worker or external route.",
    retry=False,
)
"""508: the request has passed through several gateways, so it seems to circulate."""


# Errors about something, by their statuses.


bad_request = partial(ApiError, 400, "bad_request")
"""400: the request cannot be understood."""
invalid_api_key = partial(ApiError, 401, "invalid_api_key")
"""401: keys are configured, and the request has no key, or an unknown key."""
forbidden = partial(ApiError, 403, "forbidden")
"""403: the client, or its address, is known and not allowed to do this."""
unsupported_by_model = partial(ApiError, 400, "unsupported_by_model", param="model")
"""400: the route and the model are there, but the model does something else."""


def not_found(path: str, hint: str = "") -> ApiError:
    """404: no such route; `hint` is a sentence about what may have been meant."""
    return ApiError(404, "not_found", f"There is no route {path}. {hint}".rstrip())


def method_not_allowed(method: str, path: str, allow: str) -> ApiError:
    """405: the route exists, but only for the methods of `allow` (RFC 9110, section 15.5.6)."""
    return ApiError(405, "method_not_allowed", f"{path} does not take {method}, only {allow}.", allow=allow)


def model_not_found(model: str, known: Iterable[str]) -> ApiError:
    """404: no worker and no external route has this model; the message lists the models, or the first of many."""
    names = list(known)
    near = probably_meant(model, names)
    hint = f" Did you mean `{shortened(near)}`?" if near is not None else ""
    there = some_of(names, "GET /v1/models lists all") or "none yet"
    message = f"The model `{shortened(model)}` does not exist.{hint} Models here: {there}."
    return ApiError(404, "model_not_found", message, param="model")


def model_not_ready(model: str, why: str, retry_after_s: int, limit: str = "") -> ApiError:
    """503: the model is known but nothing can serve it at the moment; `limit` is the setting that says so."""
    message = f"The model `{model}` is not ready: {why}."
    return ApiError(503, "model_not_ready", message, retry_after_s=retry_after_s, limit=limit)


def declined(model: str, why: str) -> ApiError:
    """503: no other worker can process a declined request; the cause of an engine's death is for operators only."""
    dead = DECLINED[b"engine_dead"]
    return model_not_ready(model, f"its worker {dead if why.startswith(dead) else why}", DECLINED_RETRY_S)


def engine_busy(who: str, count: int) -> ApiError:
    """409: the engine must be idle for this operation, and has `count` requests."""
    requests = "1 request" if count == 1 else f"{count} requests"
    message = f"{who} works on {requests}, and sleeps only when it is idle: ask again when they have ended."
    return ApiError(409, "conflict", message, retry=False)


def engine_dead(model: str, why: str, retry_after_s: int) -> ApiError:
    """503: the engine had died before the request arrived, and has not worked on it."""
    return ApiError(503, "engine_dead", f"The engine of `{model}` has died: {why}.", retry_after_s=retry_after_s)


def context_length_exceeded(model: str) -> ApiError:
    """400: the request is too long for the model, as its engine says."""
    return ApiError(400, CONTEXT_LENGTH_EXCEEDED, f"The request is too long for the model `{model}`.")


def rate_limited(message: str, limit: str, retry_after_s: int) -> ApiError:
    """429: more than a limit allows; `limit` is its name in the configuration."""
    return ApiError(429, "rate_limited", f"{message[:-1]} ({limit}).", retry_after_s=retry_after_s, limit=limit)


def insufficient_quota(message: str, limit: str, retry_after_s: int) -> ApiError:
    """429: a limit for a day or a month is used up; `limit` is its name in the configuration."""
    return ApiError(
        429,
        "insufficient_quota",
        f"{message[:-1]} ({limit}).",
        kind="insufficient_quota",
        retry_after_s=retry_after_s,
        retry=False,
        limit=limit,
    )


def request_too_large(bytes_max: int) -> ApiError:
    """413: the body is longer than `limits.body_bytes_max`."""
    return ApiError(413, "request_too_large", f"The request body is larger than {bytes_max} bytes.")


def head_too_large(bytes_max: int) -> ApiError:
    """431: the head is longer than `limits.head_bytes_max`, or its part for the owner than an ask may be."""
    return ApiError(431, "head_too_large", f"The request head is larger than {bytes_max} bytes.")


def too_many_connections_of(address: str, connections_max: int) -> ApiError:
    """429: an address has `limits.connections_per_address_max` connections."""
    limit = "limits.connections_per_address_max"
    sentence = f"{address} may have {connections_max} connections at once, unless it is in security.trusted_proxies."
    return rate_limited(sentence, limit, 1)


def too_many_workers(workers_max: int) -> ApiError:
    """429: a worker that is new, while the table is full."""
    return ApiError(
        429,
        "overloaded",
        f"There are {workers_max} workers already: raise limits.workers_max, or wait: workers are forgotten"
        " after an hour without heartbeats.",
        retry_after_s=60,
    )


def out_of_resources(why: str) -> ApiError:
    """503: this machine has no more of something that a connection needs."""
    return ApiError(503, "overloaded", f"The gateway cannot connect: {why}.", retry_after_s=1)


def queue_full(model: str, waiting: int, retry_after_s: int) -> ApiError:
    """429: every endpoint of the model is full, and so is its queue (`routing.queue_max`)."""
    message = f"The model `{model}` is overloaded: {waiting} of its requests wait already."
    return ApiError(429, "overloaded", message, retry_after_s=retry_after_s, limit="routing.queue_max")


def background_full(responses_max: int) -> ApiError:
    """429: as many responses are being made in the background as the worker keeps (`--responses-max`)."""
    sentence = f"{responses_max} responses are being made in the background already (--responses-max): cancel some."
    return ApiError(429, "overloaded", sentence, retry_after_s=5)


def response_not_found(response_id: str, why: str, param: str | None = None) -> ApiError:
    """404: no worker has the response of this id."""
    return ApiError(404, "response_not_found", f"The response `{response_id}` is not here: {why}.", param=param)


def registration_not_found(worker_id: str) -> ApiError:
    """404: a short heartbeat of a worker that has not sent this process the whole of it."""
    message = f"This registration of worker {worker_id} is not known here: send the whole heartbeat."
    return ApiError(404, "registration_not_found", message)


def launch_ended(worker_id: str, launch: int) -> ApiError:
    """410: a request of a worker with the key of a launch that has ended: the worker ends."""
    message = f"Launch {launch} of worker {worker_id} has ended, or another launch has replaced it: its key is dead."
    return ApiError(410, "launch_ended", message, retry=False)


def start_not_found(worker_id: str) -> ApiError:
    """404: a report of a start of a worker that has sent this process no heartbeat."""
    message = f"This start of worker {worker_id} is not known here: send a heartbeat first."
    return ApiError(404, "registration_not_found", message)


def queue_timeout(model: str, waited_s: float, retry_after_s: int, limit: str) -> ApiError:
    """503: no endpoint of the model had room in time; `limit` is the setting that limits the wait."""
    message = f"The model `{model}` is overloaded: the request waited {waited_s:g} s in its queue."
    return ApiError(503, "overloaded", message, retry_after_s=retry_after_s, limit=limit)


def upstream_unreachable(name: str, why: str) -> ApiError:
    """502: no connection to the upstream, so it has not seen the request."""
    return ApiError(502, "upstream_unreachable", f"{name} cannot be reached: {why}.")


def upstream_failed(name: str, why: str, *, retry: bool | None = None) -> ApiError:
    """502: the upstream accepted the request and sent no usable, or no whole, response."""
    return ApiError(502, "upstream_failed", f"{name} failed: {why}.", retry=retry)


def upstream_timeout(name: str, wait_s: float) -> ApiError:
    """504: the upstream sent nothing in time."""
    return ApiError(504, "upstream_timeout", f"{name} sent nothing for {wait_s:g} s.")


def owner_away() -> ApiError:
    """Return the error for a request that no process of the gateway can decide on now."""
    return ApiError(503, "owner_away", "The gateway is starting again: send the request again.", retry_after_s=1)


def engine_failed(why: str) -> ApiError:
    """500: the engine failed with this request."""
    return ApiError(500, "engine_failed", f"The engine failed: {why}.")


def length_required(path: str) -> ApiError:
    """411: a body in chunks, but the length must be known before it is read."""
    return ApiError(411, "length_required", f"{path} takes a body with a Content-Length only.")


def not_json(path: str) -> ApiError:
    """415: a body that is not said to be JSON."""
    message = f"{path} takes JSON: send it with the header `Content-Type: application/json`."
    return ApiError(415, "unsupported_media_type", message)


def coded_body(coding: str) -> ApiError:
    """415: a compressed body, which the gateway and an upstream would read differently."""
    message = f"The body is sent with `Content-Encoding: {coding}`, which is not supported: send it as it is."
    return ApiError(415, "unsupported_content_encoding", message)
