"""How much of its prompts an engine had in its prefix cache lately, from the two counts in its worker's heartbeats."""

WINDOW_S = 150.0
"""The rate covers the time since a mark of this age, or up to twice this age."""


class PrefixHits:
    """The rate of a start of an engine."""

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
