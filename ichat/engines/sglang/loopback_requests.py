"""A library of HTTP requests that reaches one application only, without a connection."""

import asyncio
import concurrent.futures
import json
from typing import Any

from ichat.engines import Application, Message, Scope


class LoopbackResponse:
    """A response, as far as `requests.Response` is asked for here."""

    def __init__(self, status_code: int, content: bytes, failure: type[Exception]) -> None:
        self._failure = failure
        self.status_code = status_code
        self.content = content

    @property
    def text(self) -> str:
        """The body as text."""
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """Give the body's value. Raises ValueError."""
        return json.loads(self.content)

    def raise_for_status(self) -> None:
        """Raise the real module's HTTPError for a status of 400 or more."""
        if self.status_code >= 400:
            raise self._failure(f"{self.status_code}: {self.text[:300]}")


class LoopbackRequests:
    """Stands where the module `requests` is expected: `get` and `post` call an ASGI application on its loop.

    They block, so they are for other threads than the loop's. Whatever else is asked for is the real module's.
    """

    def __init__(self, app: Application, loop: asyncio.AbstractEventLoop, real: Any) -> None:
        """`real` is the module in whose place this stands, and whose exceptions are raised."""
        self._real = real
        self._app = app
        self._loop = loop
        self._asking: set[concurrent.futures.Future[LoopbackResponse]] = set()
        self._given_up = False

    def give_up(self) -> None:
        """Let those who wait for an answer fail, now and later."""
        self._given_up = True
        for asking in list(self._asking):
            asking.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get(
        self, url: str, *, headers: dict[str, str] | None = None, timeout: float = 5, **_: object
    ) -> LoopbackResponse:
        """Ask for a path, which is what follows the host in the URL."""
        return self._ask("GET", url, b"", headers, timeout)

    def post(
        self, url: str, *, json: Any = None, headers: dict[str, str] | None = None, timeout: float = 600, **_: object
    ) -> LoopbackResponse:
        """Send a value as JSON."""
        return self._ask("POST", url, _dump(json), headers, timeout)

    def _ask(
        self, method: str, url: str, body: bytes, headers: dict[str, str] | None, limit_s: float
    ) -> LoopbackResponse:
        path = "/" + url.split("://", 1)[-1].partition("/")[2]
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")]
            + [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "client": None,
            "server": None,
            "state": {},
        }
        if self._given_up:
            raise self._real.ConnectionError("the engine is not there any more")
        asking = asyncio.run_coroutine_threadsafe(self._call(scope, body), self._loop)
        self._asking.add(asking)
        try:
            return asking.result(limit_s)
        except TimeoutError as error:
            asking.cancel()
            raise self._real.Timeout(f"no answer within {limit_s:g} s") from error
        finally:
            self._asking.discard(asking)

    async def _call(self, scope: Scope, body: bytes) -> LoopbackResponse:
        asked = [{"type": "http.request", "body": body, "more_body": False}]
        status = 0
        content = b""

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status, content
            status = message.get("status", status)
            content += message.get("body", b"")

        await self._app(scope, receive, send)
        return LoopbackResponse(status, content, self._real.HTTPError)


def _dump(value: Any) -> bytes:
    return b"" if value is None else json.dumps(value).encode()
