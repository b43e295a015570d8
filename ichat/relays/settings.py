"""All that a relay knows of the configuration. It has no key, no token, and nothing of workers."""

import math
import os
from collections.abc import Mapping
from typing import Any

import attrs
import cattrs
from cattrs.errors import BaseValidationError

from ichat.config.aliases import aliases_of
from ichat.config.checks import RELAYS_MAX
from ichat.config.schema import Config, Limits, Relays, Timeouts
from ichat.relays.values import TalkError

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
