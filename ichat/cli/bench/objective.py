"""Objectives of a benchmark: `ttft=1s,gap=60ms`."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ichat.cli.bench.samples import BenchRequest

NAMES = {"ttft": "first_s", "gap": "token_s", "e2e": "whole_s"}
"""Objectives, and the figure of a request that each of them limits."""
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0}
_TERM = re.compile(r"(?P<name>[a-z0-9]+)=(?P<number>\d+(\.\d+)?)(?P<unit>ms|s|m)")
FORM = "ttft=1s,gap=60ms,e2e=30s"

Objective = Mapping[str, float]
"""The most seconds for each of some `NAMES`."""


def objective_in(text: str) -> Objective:
    """Return the objective that a text describes. Raises ValueError with a sentence."""
    found = dict[str, float]()
    for term in text.replace(" ", "").split(","):
        match = _TERM.fullmatch(term)
        if match is None or match["name"] not in NAMES:
            raise ValueError(f"{term!r} is no objective; write for example {FORM}, with ms, s or m")
        if match["name"] in found:
            raise ValueError(f"{match['name']} is there twice")
        found[match["name"]] = float(match["number"]) * _UNITS[match["unit"]]
    return found


def is_met(request: "BenchRequest", objective: Objective) -> bool:
    """Return whether a request has a whole answer within the objective.

    `gap` limits the average time between its tokens; an answer of a single token has none, and meets it.
    """
    values = ((getattr(request, NAMES[name]), limit_s) for name, limit_s in objective.items())
    return request.is_well and all(value is None or value <= limit_s for value, limit_s in values)
