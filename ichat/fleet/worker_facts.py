"""Facts in a worker's record: its end, its registration, and the hits in its engine's prefix cache."""

from collections.abc import Sequence

import attrs

WINDOW_S = 150.0
"""The rate covers the time since a mark of this age, or up to twice this age."""


@attrs.frozen
class WorkerEnd:
    """How a worker's process ended, and why."""

    why: str
    """In a few words, for use after the worker's name."""
    at: float
    """In seconds since 1970."""
    exit_code: int | None = None
    signal: str | None = None
    oom_killed: bool = False
    """Whether the kernel ended it, or a process of it, since there was no memory left."""
    cause: str = ""
    """In a sentence, if it is known."""
    last_lines: Sequence[str] = ()

    def __str__(self) -> str:
        """Return all of this as a part of a sentence."""
        return f"{self.why}: {self.cause.removesuffix('.')}" if self.cause else self.why


@attrs.frozen(eq=False)
class Registration:
    """The registration in a worker's newest whole heartbeat, and the sender and rules of the last check of its host."""

    digest: bytes | None
    """The digest of all its members, as it was received; None where there can be none."""
    name: str
    """The worker's own digest of it; empty if it gave none."""
    interval_s: float
    """The worker's own interval, in seconds."""
    host: str
    """The worker's host by its own account."""
    checked_for: object
    """The rules and the sender for which the host was last checked."""
    checked_at: float
    """The time of that check, in seconds of Trio's clock."""


class PrefixHits:
    """The rate at which an engine had its prompts in its prefix cache, by the two counts in its worker's heartbeats."""

    __slots__ = ("_marked_at", "_newest", "_older", "_recent")

    def __init__(self) -> None:
        self._older = self._recent = self._newest = (0.0, 0.0)
        """Tokens of prompts, and how many of them were cached, by when: two marks, and now."""
        self._marked_at: float | None = None
        """When the newer mark was set."""

    def __repr__(self) -> str:
        return f"<PrefixHits {self.rate()}>"

    def record(self, prompt_tokens: float | None, cached_tokens: float | None, now: float) -> None:
        """Record the counts of a heartbeat since the engine's start."""
        if prompt_tokens is None or cached_tokens is None:
            return
        counts = (prompt_tokens, cached_tokens)
        if self._marked_at is None or prompt_tokens < self._newest[0]:
            self._older = self._recent = counts
            self._marked_at = now
        elif now - self._marked_at >= WINDOW_S:
            self._older, self._recent, self._marked_at = self._recent, counts, now
        self._newest = counts

    def rate(self) -> float | None:
        """Return the cached share of the prompts' tokens, 0 to 1; None if there were none."""
        prompts = self._newest[0] - self._older[0]
        if prompts <= 0:
            return None
        return round(min(1.0, max(0.0, (self._newest[1] - self._older[1]) / prompts)), 3)
