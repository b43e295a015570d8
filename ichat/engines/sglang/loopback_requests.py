"""A stand-in for the library `requests` that calls an ASGI application without a connection."""

import asyncio
import concurrent.futures
from typing import Any

import httpx

from ichat.engines.engine import Application


class LoopbackResponse:
    """A response of httpx that raises the exceptions of `requests`."""

    def __init__(self, response: httpx.Response, failure: type[Exception]) -> None:
        self._response = response
        self._failure = failure

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)

    def raise_for_status(self) -> None:
        """Raise the real module's HTTPError for a status of 400 or more."""
        if self._response.status_code >= 400:
            raise self._failure(f"{self._response.status_code}: {self._response.text[:300]}")


class LoopbackRequests:
    """Replaces the module `requests`: `get` and `post` call an ASGI application on its loop.

    They block, so other threads than the loop's must call them. All other attributes are the real module's.
    """

    def __init__(self, app: Application, loop: asyncio.AbstractEventLoop, real: Any) -> None:
        """`real` is the module that is replaced; its exceptions are raised."""
        self._real = real
        self._app: Any = app
        self._loop = loop
        self._calls: set[concurrent.futures.Future[httpx.Response]] = set()
        self._is_closed = False

    def close(self) -> None:
        """Let all calls fail, now and later."""
        self._is_closed = True
        for call in list(self._calls):
            call.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get(self, url: str, *, timeout: float = 5, **more: Any) -> LoopbackResponse:
        """Send a GET request; of the URL, only the path matters."""
        return self._call("GET", url, timeout, **more)

    def post(self, url: str, *, timeout: float = 600, **more: Any) -> LoopbackResponse:
        """Send a POST request with a value as JSON."""
        return self._call("POST", url, timeout, **more)

    def _call(
        self,
        method: str,
        url: str,
        limit_s: float,
        *,
        json: Any = None,
        headers: dict[str, str] | None = None,
        **_: object,
    ) -> LoopbackResponse:
        if self._is_closed:
            raise self._real.ConnectionError("the engine has ended")

        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self._app), timeout=None) as client:  # noqa: S113
                return await client.request(method, url, json=json, headers=headers)

        call = asyncio.run_coroutine_threadsafe(send(), self._loop)
        self._calls.add(call)
        try:
            return LoopbackResponse(call.result(limit_s), self._real.HTTPError)
        except concurrent.futures.TimeoutError as error:  # Python's own only from 3.11 on
            call.cancel()
            raise self._real.Timeout(f"no answer within {limit_s:g} s") from error
        finally:
            self._calls.discard(call)
