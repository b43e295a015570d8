"""The two sides of a takeover: when the old process stops deciding, and when the new process begins. No I/O.

    new                      old
    hello    ──────────────►           the old process answers `welcome`, or `refuse` with a sentence
    freeze   ──────────────►           it decides nothing more, and sends the `snapshot` with its descriptors
    ready    ──────────────►           the new process has built everything
             ◄──────────────  go       from now on the new process decides

Until `go` the old process can go on, and does so only when the new process has ended: it kills a new process that is
silent. The new process begins without `go` only if the old process has ended. Both know an end by the other's pidfd,
and never guess it from a silence. A new process that gives up closes its side for reading first, so that either `go`
has arrived, or cannot be sent any more.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

PROTOCOL = 1
GREETED_S = 30.0
"""How long the old process waits for `freeze` after its `welcome`."""
FREEZE_S = 5.0
"""How long the old process may need to become quiet; then it goes on."""
SILENT_S = 5.0
"""How long the new process may need from the snapshot to `ready`; then it is killed."""
ANSWER_S = 10.0
"""How long the new process waits for each answer."""


class Message(NamedTuple):
    """A message between the two processes."""

    kind: str
    content: Mapping[str, Any]


class Act(NamedTuple):
    """Something that a side must do now."""

    kind: Literal[
        "send", "freeze", "thaw", "kill", "drop", "go", "stop",  # the old side
        "build", "own", "start", "end", "close_reading",  # the new side; it sends too
    ]  # fmt: skip
    message: Message | None = None
    """Of `send`; of `build`, the snapshot."""
    why: str = ""
    """Of `end`, in a sentence."""


def send(kind: str, **content: Any) -> Act:
    """Return the act of sending a message."""
    return Act("send", Message(kind, content))


class OldSide:
    """The process that has the gateway.

    `alone`: it knows of no new process. `greeted`: a new process has connected. `freezing`, `frozen`: it becomes quiet,
    is quiet. `killing`: it waits for the end of the new process. `gone`: the new process decides.
    """

    def __init__(self, directory: str) -> None:
        """`directory` is its state directory."""
        self._directory = directory
        self.state: Literal["alone", "greeted", "freezing", "frozen", "killing", "gone"] = "alone"
        self.deadline = math.inf
        """When `tick` must be called."""
        self._is_stopping = False

    def __repr__(self) -> str:
        return f"<OldSide {self.state}>"

    @property
    def may_decide(self) -> bool:
        """Whether it has the gateway: it may start to freeze, but is not quiet yet."""
        return self.state in ("alone", "greeted", "freezing")

    def refusal(self, hello: Mapping[str, Any], busy: str) -> str:
        """Return why a new process is refused: a sentence, or "" if it is not. `busy` is a reason of the gateway."""
        if hello.get("protocol") != PROTOCOL:
            return (
                f"The running gateway hands over by protocol {PROTOCOL}, this program by {hello.get('protocol')!r}:"
                " stop the gateway, and start this program."
            )
        if hello.get("directory") != self._directory:
            return f"The running gateway has the state directory {self._directory}, not {hello.get('directory')}."
        if self.state != "alone":
            return "Another takeover of this gateway is under way."
        return "The running gateway stops." if self._is_stopping else busy

    def greet(self, pid: int, term: int, now: float) -> list[Act]:
        """Welcome a new process that was not refused."""
        self._be("greeted", now + GREETED_S)
        return [send("welcome", protocol=PROTOCOL, pid=pid, term=term)]

    def receive(self, kind: str, now: float) -> list[Act]:
        """Handle a message of the new process, and return what to do."""
        if kind == "freeze" and self.state == "greeted":
            self._be("freezing", now + FREEZE_S)
            return [Act("freeze")]
        if kind == "ready" and self.state == "frozen":
            return [Act("go")]
        return self._kill(now) if self.state == "frozen" else self._refuse("A message was out of turn.")

    def froze(self, snapshot: Mapping[str, Any], now: float) -> list[Act]:
        """Note that this process is quiet; this is its snapshot."""
        if self.state != "freezing":
            return []
        self._be("frozen", now + SILENT_S)
        return [Act("send", Message("snapshot", snapshot))]

    def failed_to_freeze(self, why: str, now: float) -> list[Act]:
        """Note that this process cannot become quiet."""
        del now
        return self._refuse(why) if self.state == "freezing" else []

    def went(self) -> None:
        """Note that `go` was sent: the new process has it, or will have it."""
        self._be("gone", math.inf)

    def lost(self, now: float) -> list[Act]:
        """Note that the connection has ended, or `go` could not be sent; that does not say that the process has."""
        if self.state == "greeted":
            return self._refuse("")
        if self.state == "freezing":
            return self._refuse("")
        return self._kill(now) if self.state == "frozen" else []

    def new_ended(self, now: float) -> list[Act]:
        """Note that the new process has ended."""
        del now
        if self.state in ("alone", "gone"):
            return []
        acts = [Act("drop")] if self.state == "greeted" else [Act("thaw"), Act("drop")]
        self._be("alone", math.inf)
        return [*acts, *([Act("stop")] if self._is_stopping else [])]

    def tick(self, now: float) -> list[Act]:
        """Return what to do at the deadline."""
        if now < self.deadline:
            return []
        if self.state == "freezing":
            return self._refuse(f"The running gateway could not become quiet within {FREEZE_S:g} s: try again.")
        return self._kill(now) if self.state == "frozen" else self._refuse("The takeover lasted too long.")

    def stop(self, now: float) -> list[Act]:
        """Note a signal that ends this gateway: it thaws first."""
        self._is_stopping = True
        if self.state == "frozen":
            return self._kill(now)
        if self.state in ("killing", "gone"):
            return []
        acts = [] if self.state == "alone" else self._refuse("The running gateway stops.")
        return [*acts, Act("stop")]

    def _refuse(self, why: str) -> list[Act]:
        """Go on, as the new process cannot have begun: it has no snapshot."""
        acts = [Act("thaw")] if self.state == "freezing" else []
        if self.state in ("alone", "gone"):
            return []
        self._be("alone", math.inf)
        return [*acts, *([send("refuse", why=why)] if why else []), Act("drop")]

    def _kill(self, now: float) -> list[Act]:
        del now
        self._be("killing", math.inf)
        return [Act("kill")]

    def _be(self, state: Literal["alone", "greeted", "freezing", "frozen", "killing", "gone"], until: float) -> None:
        self.state, self.deadline = state, until


class NewSide:
    """The process that gets the gateway.

    `greeting`, `freezing`: it waits for the answers to `hello`, `freeze`. `building`: it has the snapshot. `ready`: it
    waits for `go`. `closing`: it gives up, unless `go` has arrived. `owner`: it decides. `starting`: there is no old
    process any more, and it has nothing of it. `ended`: it ends.
    """

    def __init__(self) -> None:
        self.state: Literal["greeting", "freezing", "building", "ready", "closing", "owner", "starting", "ended"] = (
            "greeting"
        )
        self.deadline = math.inf
        """When `tick` must be called."""
        self._is_old_gone = False
        self._why = ""

    def __repr__(self) -> str:
        return f"<NewSide {self.state}>"

    @property
    def may_decide(self) -> bool:
        """Whether it has the gateway."""
        return self.state == "owner"

    def begin(self, hello: Mapping[str, Any], now: float) -> list[Act]:
        """Greet the old process."""
        self.deadline = now + ANSWER_S
        return [Act("send", Message("hello", hello))]

    def receive(self, message: Message, now: float) -> list[Act]:
        """Handle a message of the old process, and return what to do."""
        kind = message.kind
        if kind == "refuse" and self.state in ("greeting", "freezing"):
            return self._end(str(message.content.get("why", "")))
        if kind == "welcome" and self.state == "greeting":
            self.state, self.deadline = "freezing", now + ANSWER_S
            return [send("freeze")]
        if kind == "snapshot" and self.state == "freezing":
            self.state, self.deadline = "building", math.inf
            return [Act("build", message)]
        if kind == "go" and self.state in ("ready", "closing"):
            return self._own()
        return [] if self.state in ("owner", "ended", "starting") else self._give_up("The old process is out of turn.")

    def built(self, now: float) -> list[Act]:
        """Note that everything is ready."""
        if self.state != "building":
            return []
        if self._is_old_gone:
            return self._own()
        self.state, self.deadline = "ready", now + ANSWER_S
        return [send("ready")]

    def old_ended(self, now: float) -> list[Act]:
        """Note that the old process has ended; all that it sent before was received before this."""
        del now
        self._is_old_gone = True
        if self.state in ("greeting", "freezing"):
            self.state, self.deadline = "starting", math.inf
            return [Act("start")]
        return self._own() if self.state in ("ready", "closing") else []

    def tick(self, now: float) -> list[Act]:
        """Return what to do at the deadline; all that had arrived was received before."""
        if now < self.deadline:
            return []
        return self._give_up(f"The running gateway did not answer within {ANSWER_S:g} s; it goes on.")

    def stop(self) -> list[Act]:
        """Note a signal that ends this process, before `go`."""
        return self._give_up("Stopped before the takeover; the running gateway goes on.")

    def closed(self) -> list[Act]:
        """Note that nothing more can arrive, and that `go` has not."""
        return self._end(self._why) if self.state == "closing" else []

    def _give_up(self, why: str) -> list[Act]:
        """End, unless `go` is on its way already."""
        if self.state == "ready":
            self.state, self.deadline, self._why = "closing", math.inf, why
            return [Act("close_reading")]
        return self._end(why) if self.state in ("greeting", "freezing", "building") else []

    def _end(self, why: str) -> list[Act]:
        self.state, self.deadline = "ended", math.inf
        return [Act("end", None, why)]

    def _own(self) -> list[Act]:
        self.state, self.deadline = "owner", math.inf
        return [Act("own")]
