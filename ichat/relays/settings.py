"""All that a relay knows of the configuration. It has no key, no token, and nothing of workers."""

import math
import os
import ssl
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import cattrs
import trio
from cattrs.errors import BaseValidationError

from ichat.config.aliases import aliases_of
from ichat.config.checks import RELAYS_MAX, Relays
from ichat.config.schema import Config, Limits, Timeouts
from ichat.errors import Exit
from ichat.http.tls import server_context
from ichat.relays.link import whole
from ichat.relays.relay_talk import RelayTalk
from ichat.relays.values import Frame, Note, TalkError

_SHARE, _MORE = 1.25, 8
"""Of a bound on connections that all relays have in common: connections are not spread quite evenly."""


@attrs.frozen
class RelaySettings:
    """The settings of all relays."""

    limits: Limits
    timeouts: Timeouts
    log_level: str = "info"
    cors_origins: list[str] = attrs.field(factory=list[str])
    session_header: str = ""
    shadows_max: int = 0
    overhead_header: bool = True
    sends_prefixes: bool = True
    """Whether the owner may choose endpoints by the prefixes of requests."""
    sends_prompt_bytes: bool = True
    """Whether the owner may choose models by the lengths of prompts."""
    tls_certificate: str | None = None
    tls_key: str | None = None

    @classmethod
    def of(cls, config: Config, count: int) -> "RelaySettings":
        """Return the settings of each of `count` relays."""
        settings, limits = config.server_settings, config.limits
        return cls(
            attrs.evolve(
                limits,
                connections_max=math.ceil(limits.connections_max / max(1, count)),
                connections_per_address_max=_share(limits.connections_per_address_max, count),
            ),
            config.timeouts,
            settings.log_level,
            settings.cors_origins,
            config.routing.session_header.lower(),
            config.routing.shadows_max,
            settings.overhead_header,
            config.routing.policy == "prefix_aware",
            any(one.longer is not None for one in aliases_of(config)),
            None if settings.tls_certificate is None else os.path.abspath(settings.tls_certificate),
            None if settings.tls_key is None else os.path.abspath(settings.tls_key),
        )

    def content(self) -> dict[str, Any]:
        """Return them as a frame has them."""
        return attrs.asdict(self)

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> "RelaySettings":
        """Return the settings in a frame; unknown fields are ignored. Raises TalkError."""
        try:
            return cattrs.structure(content, cls)
        except (BaseValidationError, ValueError, TypeError) as error:
            raise TalkError(f"The settings of a relay are damaged: {error}.") from error


def count_of(relays: Relays) -> int:
    """Return how many relays the configuration wants."""
    return relays if relays != "cores" else min(RELAYS_MAX, len(os.sched_getaffinity(0)))


def _share(bound: int, count: int) -> int:
    return min(bound, math.ceil(bound / max(1, count) * _SHARE) + _MORE)


class OfferedSettings:
    """The newest settings that are prepared and not in force yet, with the certificate that they name."""

    def __init__(self, talk: RelayTalk, send: Callable[[Frame], None]) -> None:
        """`send` sends a frame to the owner, in the order of frames."""
        self._talk = talk
        self._send = send
        self._prepared: tuple[RelaySettings, ssl.SSLContext | None] | None = None

    def __repr__(self) -> str:
        return f"<OfferedSettings{' prepared' if self._prepared else ''}>"

    def offer(self, frame: Note, nursery: trio.Nursery) -> None:
        """Prepare the settings in a frame. Raises TalkError."""
        settings = RelaySettings.read(frame.content.get("settings", {}))
        nursery.start_soon(self._prepare, self._talk.owner_term, whole(frame, "version"), settings)

    async def _prepare(self, term: int, version: int, settings: RelaySettings) -> None:
        tls, answer = None, Note("prepared", 0, {"version": version})
        try:
            if settings.tls_certificate is not None and settings.tls_key is not None:
                tls = await trio.to_thread.run_sync(server_context, settings.tls_certificate, settings.tls_key)
        except Exit as exit_:
            answer = Note("cannot", 0, {"version": version, "why": str(exit_)})
        if self._talk.owner_term != term:
            return  # the owner has gone
        if answer.kind == "prepared":
            self._prepared = settings, tls
        self._send(answer)

    def forget(self) -> None:
        """Drop them."""
        self._prepared = None

    def commit(self) -> tuple[RelaySettings, ssl.SSLContext | None]:
        """Return them: they are in force now."""
        assert self._prepared is not None, "the order of frames was checked"
        prepared, self._prepared = self._prepared, None
        return prepared
