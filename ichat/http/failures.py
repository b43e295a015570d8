"""Why a response does not arrive as it should: raised inside a relay, caught by the code that asked the upstream."""


class ResponseRejected(Exception):
    """The client must not get this response, for the given reason; another try would bring the same."""


class Declined(Exception):
    """The upstream says, with the reason, that it did not work on the request: another upstream may."""


class UpstreamError(Exception):
    """The upstream failed in the middle of an exchange."""

    def __init__(
        self,
        why: str,
        *,
        answered: bool,
        timed_out: bool = False,
        retry: bool | None = None,
        can_report: bool = False,
        declined: bool = False,
    ) -> None:
        super().__init__(why)
        self.answered = answered
        """Whether it had sent anything, so that it must not be asked again."""
        self.timed_out = timed_out
        self.retry = retry
        """Whether it makes sense that the client tries again; None if that is not known."""
        self.can_report = can_report
        """Whether another event can report it to the client: it has whole chunks of an event stream so far."""
        self.declined = declined
        """Whether it said that it did not work on the request."""
