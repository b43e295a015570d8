"""The requests of a benchmark, as their client has seen them."""

import attrs


@attrs.define(eq=False)
class BenchRequest:
    """A request of a benchmark. Times are seconds of the clock of its run; None: that did not happen."""

    planned_at: float
    """When it should have been sent: all durations begin here, so a delay of this client is in them."""
    sent_at: float | None = None
    pieces_at: list[float] = attrs.field(factory=list[float])
    """When each piece of the answer with text arrived."""
    ended_at: float | None = None
    input_tokens: int | None = None
    """As the server counted; None: it did not."""
    output_tokens: int | None = None
    cached_tokens: int = 0
    """How many of the prompt's were in the engine's prefix cache, by the server's own account."""
    error: str = ""
    """The code of its error; empty: none."""

    @property
    def is_well(self) -> bool:
        """Whether it has a whole answer."""
        return self.ended_at is not None and not self.error

    @property
    def tokens_out(self) -> int:
        """The tokens of its answer: the server's count, else the number of pieces."""
        return len(self.pieces_at) if self.output_tokens is None else self.output_tokens

    @property
    def late_s(self) -> float | None:
        """By how many seconds it was sent later than planned."""
        return None if self.sent_at is None else self.sent_at - self.planned_at

    @property
    def first_s(self) -> float | None:
        """Seconds to the first token."""
        return self.pieces_at[0] - self.planned_at if self.pieces_at else None

    @property
    def token_s(self) -> float | None:
        """Seconds for each token after the first, on average; None for an answer of a single piece."""
        if len(self.pieces_at) < 2 or self.tokens_out < 2:
            return None
        return (self.pieces_at[-1] - self.pieces_at[0]) / (self.tokens_out - 1)

    @property
    def whole_s(self) -> float | None:
        """Seconds to the end."""
        return None if self.ended_at is None else self.ended_at - self.planned_at


@attrs.frozen
class WorkerSample:
    """A worker's load at a moment, by its own account. None: not known."""

    at: float
    worker_id: str
    kv_use: float | None
    """Share of the engine's KV cache in use, 0 to 1."""
    running: float | None
    waiting: float | None
    """Requests in the engine's queue."""
