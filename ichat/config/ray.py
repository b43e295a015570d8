"""`[ray]`: a Ray cluster for managed workers, and the keys of these workers (`on`, `labels`)."""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

import attrs
from attrs import field, frozen

from ichat.config import checks
from ichat.config.strict import Between, checked

PENDING_S_MAX = 840
"""The longest wait of a launch for its place: Ray itself gives up a job that has waited for 900 s."""
_PORTS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_NAME = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?" + _LABEL.pattern)

Label = str | list[str]
"""The value that a node must have for a label, or its possible values."""


def _is_dashboard(value: str) -> None:
    is_head = value.startswith("ray://") or (value and "://" not in value)
    if is_head:
        raise ValueError(f"{value!r} is not Ray's dashboard: give http://HOST:8265")
    checks.is_http(value)


def ports_in(value: str) -> tuple[int, int]:
    """Return the first and the last port of a range. Raises ValueError for another text."""
    found = _PORTS.fullmatch(value)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < first <= last < 65536:
        raise ValueError('must be a range of ports, such as "20000-20999"')
    return first, last


def _are_ports(value: str) -> None:
    ports_in(value)


def _is_pending_s(value: float) -> None:
    if value > PENDING_S_MAX:
        what = f"Ray gives up a job that has waited for 900 s: pending_s may be at most {PENDING_S_MAX}"
        raise ValueError(f"{what}, not {value:g}")
    Between(1, PENDING_S_MAX)(value)


def _is_runtime_env(value: Mapping[str, Any]) -> None:
    if "working_dir" in value:
        raise ValueError("the gateway sets working_dir itself: leave it out")
    if "env_vars" in value:
        raise ValueError(
            "put variables into env of the worker, and leave env_vars out: all readers of Ray's dashboard see them"
        )
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError("must hold texts, numbers, lists and tables alone, as JSON does") from None


def are_labels(values: Mapping[str, Label]) -> None:
    """Raise ValueError unless these are labels of Ray's nodes."""
    for name, value in values.items():
        if not _LABEL_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a label of Ray's, such as zone or ray.io/accelerator-type")
        if not value:
            raise ValueError(f"{name} must name a value")
        for one in [value] if isinstance(value, str) else value:
            if not _LABEL.fullmatch(one):
                what = "at most 63 letters, digits, dots, dashes and underscores, with a letter or digit at both ends"
                raise ValueError(f'"{one}" is no label of Ray\'s: {what}')


def label_of(value: Any, _: Any) -> Label:
    """Return the value of a label in parsed TOML. Raises ValueError for anything else."""
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in values):
        raise ValueError('must be a text, or an array of texts, such as ["H100", "H200"]')
    return cast("Label", value)


def is_place(value: str) -> None:
    """Raise ValueError unless workers can be started there."""
    if value not in ("here", "ray"):
        raise ValueError(f'"{value}" is no place for a worker: these are here and ray. Choose a node by labels')


@frozen
class RayEngine:
    """`[ray.engines.NAME]`: an engine on the nodes."""

    python: str | None = checked(checks.not_empty, None)
    """The interpreter on the nodes that has the engine; None: the interpreter of `[engines.NAME]`."""


@frozen
class RaySettings:
    """`[ray]`: a Ray cluster for the managed workers with `on = "ray"`."""

    address: str | None = checked(_is_dashboard, None, {"pattern": "^https?://"}, reload="later")
    """The URL of Ray's dashboard; None: there is no cluster."""
    token_env: str | None = checked(checks.is_variable, None, reload="later")
    """A variable of the gateway's environment that has Ray's token."""
    gateway_address: str | None = checked(checks.is_http, None)
    """The URL by which the nodes reach the gateway; None: the address from which the gateway reaches Ray."""
    python: str = checked(checks.not_empty, "python3")
    """The interpreter on the nodes that runs iChat itself, 3.10 or newer."""
    pending_s: float = checked(_is_pending_s, 600.0, {"minimum": 1, "maximum": PENDING_S_MAX})
    """Seconds for which a launch may wait for a place on a node."""
    ports: str | None = checked(_are_ports, None, {"pattern": f"^{_PORTS.pattern}$"})
    """The range of ports on which workers listen on their nodes; None: any free port."""
    cpus: float = checked(Between(0, 10_000), 1.0)
    """CPUs that Ray books for a worker."""
    runtime_env: dict[str, Any] = checked(_is_runtime_env, attrs.Factory(dict[str, Any]))
    """Ray's runtime environment of the workers' jobs: pip, uv, conda or image_uri, passed on as it is."""
    engines: dict[str, RayEngine] = field(factory=dict[str, RayEngine])
    """The engines on the nodes, by their names."""
