"""Which requests the engine works on, and which it may get: decided in Trio, and on the engine's loop."""

import threading

from ichat import errors
from ichat.engines.adapter import ProtocolAdapter
from ichat.http.request import Request

RETRY_AFTER_S = 5


class Admission:
    """The requests that the engine works on. Its methods may be called in any thread."""

    def __init__(self, adapter: ProtocolAdapter) -> None:
        self._adapter = adapter
        self._under_way: set[Request] = set()
        self._lock = threading.Lock()
        self.closed = ""
        """The engine's state while it is given no work, such as `asleep`; empty while it is given work."""

    def __repr__(self) -> str:
        return f"<Admission {self.closed or 'open'}, {len(self)} under way>"

    def __len__(self) -> int:
        """Return how many requests the engine works on."""
        return len(self._under_way)

    def admit(self, request: Request, model: str) -> None:
        """Note that the engine works on this request, for the model of this name. Raises ApiError if it must not."""
        with self._lock:
            if self.closed and _is_work(request):
                raise errors.model_not_ready(model, f"its engine is {self.closed}", RETRY_AFTER_S)
            self._adapter.admit(request, self._under_way)
            self._under_way.add(request)

    def discard(self, request: Request) -> None:
        """Note that the engine does not work on this request any more."""
        with self._lock:
            self._under_way.discard(request)

    def close(self, why: str) -> int:
        """Admit no more work unless there is some under way; return how many requests that are. See `closed`."""
        with self._lock:
            busy = sum(map(_is_work, self._under_way))
            self.closed = self.closed if busy else why
            return busy


def _is_work(request: Request) -> bool:
    """Return whether the engine must be awake for a request."""
    return request.method not in (b"GET", b"HEAD") or request.path == b"/health_generate"
