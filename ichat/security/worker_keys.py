"""Keys that count for a single launch of a single worker, in place of the workers' token."""

from typing import Protocol

import attrs


@attrs.frozen
class WorkerKey:
    """The owner of such a key."""

    worker_id: str
    launch: int
    """A later launch of the worker has a higher number, and ends the key."""
    is_ended: bool = False
    """Whether the launch has ended, or another launch has replaced it."""
    is_asked_to_end: bool = False
    """Whether the worker must end now."""


class KnowsWorkerKeys(Protocol):
    """Knows the workers that have keys of their own."""

    def key_of(self, digest: bytes) -> WorkerKey | None:
        """Return the owner of the key with this digest; None if it is no worker's."""
        ...
