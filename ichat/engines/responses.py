"""The memory of an engine for the Responses API, within bounds.

Both engines keep a response (`store`), its messages and its events in dictionaries by its id, and remove nothing.
Here each of these dictionaries reports its new items, so that the oldest responses are removed. The engine's
application gets the route `DELETE /v1/responses/{id}`, which neither engine has.
"""

# What engines bring along is not there where types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

import json
from typing import Any

from ichat.engines.adapter import ProtocolAdapter
from ichat.engines.asgi import call_under_way
from ichat.errors import ApiError

_STORES = ("response_store", "msg_store", "event_store")
"""The engines' names of these dictionaries; the first has the responses themselves."""


class ResponseStore:
    """The responses that an engine remembers. Used on the engine's loop, except `is_full`."""

    def __init__(self, serving: Any, responses_max: int, bytes_max: int) -> None:
        """`serving` is the engine's object for the Responses API.

        At most `responses_max` are kept; their requests have at most `bytes_max` in all.
        """
        self._serving = serving
        self._responses_max = responses_max
        self._bytes_max = bytes_max
        self._sizes: dict[str, int] = {}
        """Bytes of the request of each response, oldest first."""
        serving.background_tasks = _Tasks(serving.background_tasks)
        self._stores = [_Store(self, serving, name) for name in _STORES if hasattr(serving, name)]

    def __repr__(self) -> str:
        return f"<ResponseStore {len(self._sizes)} of {self._responses_max}>"

    def __len__(self) -> int:
        return len(self._sizes)

    def is_full(self) -> bool:
        """Return whether the responses that are being made in the background fill the store."""
        return len(self._serving.background_tasks) >= self._responses_max

    def note(self, store: "_Store", response_id: str) -> None:
        """Called when the engine stores something of a response: forget the oldest if there are too many."""
        if response_id not in self._sizes:
            if store is self._stores[0] and len(self._stores) > 1 and response_id not in self._stores[1]:
                dict.pop(store, response_id, None)  # its messages were forgotten before it ended
                return
            call = call_under_way()
            self._sizes[response_id] = call.bytes_in if call is not None else 0
        total = sum(self._sizes.values()) if len(self._sizes) > 1 else 0
        for oldest in list(self._sizes):
            if len(self._sizes) <= self._responses_max and total <= self._bytes_max:
                break
            if oldest != response_id and oldest not in self._serving.background_tasks:
                total -= self._sizes[oldest]
                self.forget(oldest)

    def forget(self, response_id: str) -> bool:
        """Forget a response; return whether it was known."""
        for store in self._stores:
            dict.pop(store, response_id, None)
        return self._sizes.pop(response_id, None) is not None

    async def delete(self, response_id: str) -> bool:
        """Forget a response, and stop it if it is being made; return whether it was known."""
        if response_id in self._serving.background_tasks:
            await self._serving.cancel_responses(response_id)
        return self.forget(response_id)


class _Store(dict[str, Any]):
    """A dictionary of the engine that reports its new items."""

    def __init__(self, of: ResponseStore, serving: Any, name: str) -> None:
        super().__init__(getattr(serving, name))
        self._of = of
        setattr(serving, name, self)

    def __setitem__(self, response_id: str, value: Any) -> None:
        super().__setitem__(response_id, value)
        self._of.note(self, response_id)


class _Tasks(dict[str, Any]):
    """The engine's dictionary of its background tasks, each by the id of its response.

    Each task is noted at the call that it is for.
    """

    def __setitem__(self, response_id: str, task: Any) -> None:
        super().__setitem__(response_id, task)
        call = call_under_way()
        if call is not None:
            call.note_background(task)


def bound_responses(app: Any, adapter: ProtocolAdapter) -> None:
    """Bound the responses that a FastAPI application remembers, and let it delete them; see `ResponseStore`.

    Does nothing if no responses are kept, or this version of the engine has no Responses API.
    """
    from starlette.requests import Request
    from starlette.responses import Response

    serving = getattr(app.state, "openai_serving_responses", None)
    if (
        not adapter.settings.responses_max
        or serving is None
        or not all(hasattr(serving, name) for name in (_STORES[0], "background_tasks"))
    ):
        return
    store = ResponseStore(serving, adapter.settings.responses_max, adapter.settings.responses_bytes_max)
    adapter.responses = store

    async def delete(request: Request) -> Response:
        response_id = request.path_params["response_id"]
        if await store.delete(response_id):
            answer = {"id": response_id, "object": "response", "deleted": True}
            return Response(json.dumps(answer), media_type="application/json")
        error = ApiError(404, "response_not_found", f"Response with id '{response_id}' not found.", param="response_id")
        return Response(error.body(), error.status, media_type="application/json")

    app.router.add_route("/v1/responses/{response_id}", delete, methods=["DELETE"])
