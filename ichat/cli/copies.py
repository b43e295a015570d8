"""The copies of models from the command line: how many there are, and `scale`, which changes that."""

import argparse
import re
import urllib.parse
from collections.abc import Sequence

from ichat.cli.client import Api
from ichat.cli.json_values import Json, list_of, object_of
from ichat.cli.screen import Screen, one_line

_REPLICAS = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def copy_of(worker: Json) -> str | None:
    """Return the number of a copy among the wanted copies of its table: `2/3`; None: it is no copy."""
    return f"{worker['copy']}/{worker.get('copies')}" if worker.get("copy") else None


def copies_of(model: Json) -> str | None:
    """Return the copies of a model: `ready 2, starting 1, wanted 3`; None: it has none."""
    counts = object_of(model.get("copies"))
    return ", ".join(f"{name} {counts.get(name)}" for name in ("ready", "starting", "wanted")) if counts else None


def read_replicas(text: str) -> int | Json:
    """Return the number of copies in a flag, `3` or `1-4`. Raises ArgumentTypeError."""
    found = _REPLICAS.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be like 3 or 1-4, not {text!r}")
    return int(found[1]) if found[2] is None else {"min": int(found[1]), "max": int(found[2])}


def add_scale_flags(usage: argparse.ArgumentParser) -> None:
    """Add the arguments of `scale`."""
    usage.add_argument("model", metavar="MODEL", help="its name, as `models` has it")
    usage.add_argument("min", metavar="MIN", type=int, help="the fewest copies; 0 with MAX 1: loaded on demand")
    usage.add_argument("max", metavar="MAX", type=int, nargs="?", help="the most copies; left out: MIN")


def scale(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Change the number of a model's copies, and show the workers that start and end for that."""
    body = {"min": args.min, **({} if args.max is None else {"max": args.max})}
    path = f"/v1/admin/models/{urllib.parse.quote(args.model)}/replicas"
    answer = api.call("POST", path, body=body)
    if args.json:
        screen.line(answer.text.rstrip("\n"))
        return 0
    started, ending = (_ids(answer.value, name) for name in ("started", "ending"))
    words = [f"{verb} {', '.join(ids)}" for verb, ids in (("starts", started), ("ends", ending)) if ids]
    screen.line(f"{one_line(args.model)}: {'; '.join(words) or 'no worker starts or ends'}")
    return 0


def _ids(answer: Json, name: str) -> Sequence[str]:
    return [*map(one_line, list_of(answer.get(name)))]
