"""The configuration in force, and how its file stands to it. The reloader changes both; operators see them."""

from collections.abc import Iterator, Sequence
from typing import Literal

import attrs
import trio
from prometheus_client import Metric

from ichat.config.schema import Config
from ichat.observability.prometheus_families import family

ERRORS_MAX = 100
"""The most mistakes of a file that are listed."""


class ConfigInForce:
    """Holds the configuration that is in force."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.lock = trio.Lock()
        """Held during a change of the configuration, or of the keys that were made over the API."""

    def __repr__(self) -> str:
        return f"<ConfigInForce{', changing' if self.lock.statistics().locked else ''}>"

    def replace(self, config: Config) -> None:
        """Go on with another configuration; the caller holds the lock."""
        self.config = config


@attrs.frozen
class ConfigState:
    """How the configuration file stands to the configuration in force."""

    state: Literal["ok", "changed", "refused"]
    """`ok`: the file is in force. `changed`: the gateway has not read the file since it changed, or the file is
    gone. `refused`: the file has mistakes; the configuration of before stays in force."""
    since: float
    """When that began, in seconds since 1970."""
    in_force_since: float
    """When the configuration in force was loaded, in seconds since 1970."""
    path: str | None
    """The file; None: the configuration is from none."""
    errors: Sequence[str] = ()
    """The mistakes of a refused file, each in a sentence."""

    def families(self) -> Iterator[Metric]:
        """Return the metrics of whether the file is refused."""
        is_refused = self.state == "refused"
        yield family("ichat_config_refused", is_refused)
        yield family("ichat_config_refused_since_seconds", self.since if is_refused else 0.0)
        yield family("ichat_config_in_force_since_seconds", self.in_force_since)


def mistakes_in(text: str) -> list[str]:
    """Return the mistakes that a message about a file lists, or else the message itself."""
    first, *others = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    left = len(others) - ERRORS_MAX
    return [*others[:ERRORS_MAX], *([f"and {left} more"] if left > 0 else [])] or [first]
