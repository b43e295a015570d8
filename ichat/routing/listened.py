"""What others can listen to. Purely synchronous."""

from collections.abc import Callable


class Listened:
    """Has functions called after its changes."""

    def __init__(self) -> None:
        self._listeners: dict[Callable[[], None], None] = {}

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Have a function called after every change of a worker, or of where requests can go."""
        self._listeners[listener] = None

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Have it called no longer."""
        del self._listeners[listener]

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()
