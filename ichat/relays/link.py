"""The rules of a connection between an owner and a relay that both sides have in common. No I/O."""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

from ichat.relays.layouts import LAYOUTS
from ichat.relays.values import NOTHING, Frame, Note, SentStep, TalkError

PROTOCOL = 1
_PLAIN = frozenset(("ask", "outcome"))
"""The frames of a relay that each request has."""
_STEPS = frozenset(("step",))
_ONCE = frozenset(("accept", "retire", "retiring"))
"""The frames about a relay's life, each of which is sent once."""
RequestT = TypeVar("RequestT", bound=Any)


def hello(term: int, settings: int = 0, about: Mapping[str, Any] = NOTHING) -> Note:
    """Return the first frame of a side.

    `term` is the number of the owner's start: a relay sends that of its last owner, the version of its settings, and
    facts `about` itself.
    """
    content = {"protocol": PROTOCOL, "knows": sorted(LAYOUTS), "term": term, "settings": settings}
    return Note("hello", 0, {**about, **content})


def whole(note: Note, name: str) -> int:
    """Return a whole number from 0 on of a frame's JSON. Raises TalkError."""
    value = note.content.get(name)
    if type(value) is not int or value < 0:
        raise TalkError(f"The field `{name}` of a frame `{note.kind}` is {value!r}, not a whole number.")
    return value


def request_in(requests: dict[int, RequestT], number: int, *phases: str) -> RequestT:
    """Return a request that is in one of these phases. Raises TalkError."""
    request = requests.get(number)
    if request is None or request.phase not in phases:
        state = "unknown" if request is None else request.phase
        raise TalkError(f"The request {number} is {state}, not {' or '.join(phases)}.")
    return request


class Link:
    """Checks whether a frame may be sent in a direction at all.

    `hello` is the first in each, nothing follows `bye` or `end`, settings are prepared before they are in force, and a
    relay that retires does not accept again.
    """

    def __init__(self, *, is_owner: bool, settings: int = 0) -> None:
        self._is_owner = is_owner
        self._greeted: set[bool] = set()
        self._knows: set[str] | None = None
        self.settings: int = settings
        """The version in force."""
        self.offered: int = settings
        """The version that was offered last, or is in force."""
        self._is_prepared = False
        self._said: set[str] = set()
        """Those of `_ONCE` that were sent."""
        self.is_over = False
        self.plainly_received: frozenset[str] = frozenset()
        self.plainly_sent: frozenset[str] = frozenset()
        """The kinds of frames that need no `check`, from the greetings on; a step does if its settings differ."""

    def __repr__(self) -> str:
        return f"<Link{', over' if self.is_over else ''}>"

    def check(self, frame: Frame, *, is_sent: bool) -> None:
        """Note a frame. Raises TalkError if it cannot be sent, or received, now."""
        kind = frame.kind
        by_owner = is_sent == self._is_owner
        layout = LAYOUTS.get(kind)
        if layout is None or not (layout.from_owner if by_owner else layout.from_relay):
            raise TalkError(f"No {'owner' if by_owner else 'relay'} sends a frame `{kind}`.")
        if self.is_over:
            raise TalkError(f"A frame `{kind}` was sent after the owner's last.")
        if (kind == "hello") == (is_sent in self._greeted):
            raise TalkError(f"A frame `{kind}` is at a wrong place: `hello` is the first, and sent once.")
        if is_sent and self._knows is not None and kind not in self._knows:
            raise TalkError(f"The other side does not know the frame `{kind}`.")
        if isinstance(frame, Note):
            self._note(frame, is_sent=is_sent)
        elif isinstance(frame, SentStep) and frame.settings != self.settings:
            raise TalkError(f"A step needs the settings {frame.settings}, and {self.settings} are in force.")

    def _note(self, frame: Note, *, is_sent: bool) -> None:
        kind = frame.kind
        if kind == "hello":
            self._greeted.add(is_sent)
            if not is_sent:
                self._greet(frame)
            if len(self._greeted) == 2 and self._knows is not None and self._knows >= _PLAIN:
                plain = (_PLAIN, _STEPS) if self._is_owner else (_STEPS, _PLAIN)
                self.plainly_received, self.plainly_sent = plain
        elif kind in ("settings", "prepared", "cannot", "commit", "forget"):
            self._change_settings(kind, whole(frame, "version"))
        elif kind in _ONCE:
            self._note_once(kind)
        self.is_over = kind in ("bye", "end")
        if self.is_over:
            self.plainly_received = self.plainly_sent = frozenset()

    def _note_once(self, kind: str) -> None:
        if kind in self._said or (kind == "accept" and "retire" in self._said):
            raise TalkError(f"`{kind}` cannot follow now.")
        self._said.add(kind)

    def _greet(self, frame: Note) -> None:
        protocol, knows = whole(frame, "protocol"), frame.content.get("knows")
        if protocol not in (PROTOCOL, PROTOCOL - 1):
            raise TalkError(f"The other side speaks protocol {protocol}, not {PROTOCOL}.")
        if not isinstance(knows, list):
            raise TalkError("The other side does not say which frames it knows.")
        self._knows = {str(name) for name in cast("list[Any]", knows)}
        if self._is_owner:
            self.settings = whole(frame, "settings")
            self.offered = self.settings

    def _change_settings(self, kind: str, version: int) -> None:
        is_offered = self.offered != self.settings
        may = version > self.settings and not is_offered if kind == "settings" else is_offered
        if not may or (kind != "settings" and version != self.offered) or (kind == "commit" and not self._is_prepared):
            raise TalkError(f"`{kind}` cannot follow now for the settings {version}.")
        if kind == "settings":
            self.offered = version
        elif kind == "commit":
            self.settings = version
        elif kind == "forget":
            self.offered = self.settings
        self._is_prepared = kind == "prepared"
