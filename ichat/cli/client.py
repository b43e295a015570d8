"""The operator's connection to a running gateway: its answers, its refusals."""

import argparse
import contextlib
import json
import os
import re
import select
import urllib.parse
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from ichat.cli.gateway_address import GatewayAddress, find_gateway
from ichat.cli.json_values import Json
from ichat.cli.screen import lines, one_line
from ichat.config.own_secret import find_secret
from ichat.errors import EXIT_UNAVAILABLE, EXIT_USAGE, Exit
from ichat.http.sse import CONTENT_TYPE, Event, EventDecoder

if TYPE_CHECKING:
    import http.client

EXIT_REFUSED = 1
"""The gateway, or the server that answered through it, did not carry out the request."""
CONNECT_S = 5.0
ANSWER_S = 30.0
"""The longest wait for the gateway's answer, in seconds, unless a command says otherwise."""
EVENT_BYTES_MAX = 64 * 1024 * 1024
_OPERATORS = ("/v1/admin/", "/v1/logs/", "/v1/models", "/metrics")
"""The paths to which an operator's key applies."""
PIECE_BYTES = 64 * 1024
"""The most bytes of an answer that are read at once."""


class Waits(NamedTuple):
    """How long a command waits before it asks again, in seconds."""

    poll_s: float = 0.5
    """Between two requests for the state of a worker that changes."""
    again_s: Sequence[float] = (0.25, 0.5, 1.0, 2.0)
    """Before each further connection to a log without new lines; the last for all later connections."""


WAITS = Waits()
Texts = Mapping[str, str] | None
Body = Json | bytes | None


class RequestRefused(Exit):
    """The gateway said no."""

    def __init__(self, status: int, code: str, sentence: str) -> None:
        super().__init__(EXIT_REFUSED, sentence)
        self.status = status
        self.kind = code
        """OpenAI's `code`, for example `model_not_found`."""
        self.text = sentence
        """The same, divided into lines as by the gateway."""


class Unreachable(Exit):
    """There is no gateway, or it went away."""

    def __init__(self, sentence: str, *, timed_out: bool = False) -> None:
        super().__init__(EXIT_UNAVAILABLE, sentence)
        self.timed_out = timed_out


class JsonReply(NamedTuple):
    """A JSON object, and exactly the text that it was read from."""

    value: Json
    text: str


def open_api(
    args: argparse.Namespace,
    variables: Iterable[str] = ("ICHAT_ADMIN_KEY", "ICHAT_API_KEY"),
    waits: Waits = WAITS,
) -> "Api":
    """Return the gateway's API with the key of the flags, else of the first variable with a key. Raises Exit 64."""
    keys = [args.api_key, *map(os.environ.get, variables)]
    return Api(find_gateway(args), next(filter(None, keys), None), waits)


class Answer(NamedTuple):
    """A whole answer from the gateway's address."""

    status: int
    content_type: str
    body: bytes


class Api:
    """The gateway's API. Every call raises RequestRefused or Unreachable, each with a sentence and its exit code.

    Each request has a connection of its own, so several threads may call at the same time.
    """

    def __init__(self, place: GatewayAddress, key: str | None, waits: Waits = WAITS) -> None:
        if key is not None and not re.fullmatch(r"[!-~]+", key):
            raise Exit(EXIT_USAGE, "The API key must be printable ASCII characters without blanks.")
        self.place = place
        self.waits = waits
        self.headers: Mapping[str, str] = {"authorization": f"Bearer {key}"} if key else {}
        """They identify the caller in requests to models."""
        found = None if key else find_secret(place.url, place.state_directory)
        self.own_secret = found[0] if found else ""
        """The secret of a gateway of this user, used in place of an operator's key; "" if a key was given."""
        self._url = urllib.parse.urlsplit(found[1] if found and place.tls is None else place.url)
        try:
            (self._url.hostname or "").encode("idna")
        except UnicodeError as error:
            raise Exit(EXIT_USAGE, f"The gateway's address {place.url!r} cannot be used: {error}.") from error

    def __repr__(self) -> str:
        return f"<Api {self.place.url}>"

    def get(self, path: str) -> JsonReply:
        """Ask for something."""
        return self.call("GET", path)

    def call(
        self, method: str, path: str, *, params: Texts = None, body: Body = None, answer_s: float = ANSWER_S
    ) -> JsonReply:
        """Make a request and return its answer, which must be a JSON object; a body in bytes is sent unchanged."""
        with self._asked(method, path, params=params, body=body, headers={}, silence_s=answer_s) as response:
            answer = self._whole(response)
        self._check(path, answer)
        return JsonReply(self._object(answer), answer.body.decode(errors="replace"))

    @contextlib.contextmanager
    def events(
        self,
        method: str,
        path: str,
        *,
        silence_s: float,
        params: Texts = None,
        body: Body = None,
        headers: Texts = None,
        on_comment: Callable[[str], None] | None = None,
    ) -> Generator[Iterator[Event]]:
        """Make a request that is answered by a stream of events; leaving ends it. Long silence is Unreachable.

        `on_comment` is called with the text of each comment in the stream.
        """
        more = {"accept": CONTENT_TYPE, **(headers or {})}
        with self._asked(method, path, params=params, body=body, headers=more, silence_s=silence_s) as response:
            if response.status != 200:
                self._check(path, self._whole(response))
            content_type = response.headers.get("content-type", "")
            if response.status != 200 or not content_type.startswith(CONTENT_TYPE):
                raise self._is_no_gateway(response.status, content_type)
            yield read_events(self._pieces(response), on_comment)

    @contextlib.contextmanager
    def _asked(
        self, method: str, path: str, *, params: Texts, body: Body, headers: Mapping[str, str], silence_s: float
    ) -> Generator["http.client.HTTPResponse"]:
        """Make a request, and yield its answer after the head has arrived; leaving closes the connection."""
        import http.client

        target = self._url.path + path + (f"?{urllib.parse.urlencode(params)}" if params else "")
        headers = {**self.headers, "connection": "close", "accept-encoding": "identity", **headers}
        if self.own_secret and path.startswith(_OPERATORS):
            headers["authorization"] = f"Bearer {self.own_secret}"
        if body is not None:
            headers["content-type"] = "application/json"
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        host, port, tls = self._url.hostname or "", self._url.port, self.place.tls
        if tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=tls)
        with contextlib.closing(connection):
            try:
                connection.connect()
            except OSError as error:
                raise self._not_reached(error) from error
            try:
                connection.sock.settimeout(silence_s)
                connection.request(method, target, data, headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise self._broken(error) from error
            with response:
                yield response

    def _whole(self, response: "http.client.HTTPResponse") -> Answer:
        body = b"".join(self._pieces(response))
        return Answer(response.status, response.headers.get("content-type", ""), body)

    def _pieces(self, response: "http.client.HTTPResponse") -> Iterator[bytes]:
        """Yield the body as it arrives."""
        import http.client

        while True:
            try:
                piece = response.read1(PIECE_BYTES)
                if not piece and response.length:
                    raise http.client.IncompleteRead(b"", response.length)
            except (OSError, http.client.HTTPException) as error:
                raise self._broken(error) from error
            if not piece:
                return
            yield piece

    def _check(self, path: str, answer: Answer) -> None:
        if 200 <= answer.status < 300:
            return
        body = self._object(answer)
        inner = body.get("error")
        error = cast("Json", inner) if isinstance(inner, dict) else body
        said = error.get("message") or error.get("detail")
        parts = str(said or f"Refused with status {answer.status}.").split("\n  ")  # mistakes of a file are a list
        sentence = "\n  ".join(map(one_line, parts))
        if answer.status == 401 and not self.headers:
            is_admin = path.startswith(("/v1/admin/", "/v1/logs/"))
            sentence += f" Set {'ICHAT_ADMIN_KEY' if is_admin else 'ICHAT_API_KEY'}, or give --api-key."
        refusal = RequestRefused(answer.status, str(error.get("code") or ""), sentence)
        refusal.text = lines(said or sentence)
        raise refusal

    def _object(self, answer: Answer) -> Json:
        try:
            value = json.loads(answer.body)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise self._is_no_gateway(answer.status, answer.content_type)
        return cast("Json", value)

    def _is_no_gateway(self, status: int, content_type: str) -> Unreachable:
        what = f"status {status}, {content_type or 'no content'}"
        return Unreachable(f"What answers at {self.place.url} is not iChat's gateway ({one_line(what)}).")

    def _not_reached(self, error: OSError) -> Unreachable:
        if isinstance(error, TimeoutError):
            return Unreachable(f"The gateway at {self.place.url} cannot be reached: no answer within {CONNECT_S:g} s.")
        return Unreachable(f"The gateway at {self.place.url} cannot be reached: {_why(error)}.")

    def _broken(self, error: Exception) -> Unreachable:
        if isinstance(error, TimeoutError):
            return Unreachable(f"The gateway at {self.place.url} did not answer in time.", timed_out=True)
        return Unreachable(f"The connection to the gateway at {self.place.url} broke: {_why(error)}.")


def _why(error: Exception) -> str:
    """Return the message of a connection's error, without numbers for programmers."""
    why = re.sub(r"\[Errno -?\d+\] |\s*\(_ssl\.c:\d+\)|\.$", "", one_line(error)) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in why:
        why = re.sub(r"^\[.*?\] ", "", why) + "; --ca-certificates names a file of trusted authorities"
    return why


def read_events(chunks: Iterable[bytes], on_comment: Callable[[str], None] | None = None) -> Iterator[Event]:
    """Read server-sent events, however they are cut into chunks; `on_comment` gets the comments between them."""
    decoder, last_id = EventDecoder(EVENT_BYTES_MAX), ""
    decoder.on_comment = on_comment
    for chunk in chunks:
        for event in decoder.feed(chunk):
            if event is None:
                raise Exit(EXIT_REFUSED, f"An event is longer than {EVENT_BYTES_MAX} bytes.")
            last_id = last_id if event.id is None else event.id
            yield event._replace(id=last_id)


def worker_path(worker_id: str) -> str:
    """Return the path of a worker in the admin API."""
    return f"/v1/admin/workers/{urllib.parse.quote(worker_id, safe='')}"


def pause(seconds: float) -> None:
    """Wait; Ctrl-C ends that at once."""
    select.select([], [], [], seconds)
