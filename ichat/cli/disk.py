"""`models --disk` and `remove MODEL`: the models of hubs on this machine's disk, and the workers that use them."""

import argparse
import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ichat.cli.client import EXIT_REFUSED, Api, RequestRefused, Unreachable
from ichat.cli.json_values import objects_of
from ichat.cli.screen import Screen, size
from ichat.config.hubs import HUBS, is_hub_name
from ichat.errors import EXIT_USAGE, Exit

if TYPE_CHECKING:
    from ichat.downloads.inventory import StoredModel
    from ichat.downloads.place import ModelPlace


def add_disk_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags of `models`."""
    usage.add_argument("--disk", action="store_true", help="the models of hubs on this machine's disk instead")
    _add_cache_flag(usage)


def add_remove_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags of `remove`."""
    usage.add_argument("model", metavar="MODEL", help="its name, as `models --disk` has it")
    usage.add_argument("--hub", choices=HUBS, help="the hub; needed if the models of both have this name")
    _add_cache_flag(usage)


def _add_cache_flag(usage: argparse.ArgumentParser) -> None:
    usage.add_argument("--cache", metavar="DIRECTORY", help="the directory with models; else those of the hubs")


def show_disk(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Show the models on the disk, the largest first."""
    from ichat.downloads.inventory import stored_models
    from ichat.downloads.place import cache_of

    users = _users(api, args.config, must_know=False)
    found = stored_models((hub, args.cache or cache_of(hub, os.environ)) for hub in HUBS)
    if args.json:
        screen.line(json.dumps({"data": [_described(one, users(one.place)) for one in found]}, ensure_ascii=False))
        return 0
    rows = [
        (one.place.name, one.place.hub, size(one.size_bytes), _state_of(one), ", ".join(users(one.place)) or None)
        for one in found
    ]
    screen.table(("model", "hub", "size", "state", "used by"), rows)
    return 0


def remove(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Remove a model from the disk. Raises Exit 64 if it is not there, and 1 if it is in use, or may be."""
    from ichat.downloads.inventory import remove_model, stored_model

    place = _stored_place(args)
    if used := _users(api, args.config, must_know=True)(place):
        whose = f"worker {used[0]}" if len(used) == 1 else f"workers {', '.join(used)}"
        raise Exit(EXIT_REFUSED, f"{args.model} is the model of {whose}: stop and remove that first.")
    freed = stored_model(place).size_bytes
    try:
        why = remove_model(place)
    except OSError as error:
        why = f"{place.name} cannot be removed: {error.strerror or error} ({error.filename})."
    if why:
        raise Exit(EXIT_REFUSED, why)
    screen.line(json.dumps({"model": place.name, "freed_bytes": freed}) if args.json else f"freed {size(freed)}")
    return 0


def _stored_place(args: argparse.Namespace) -> "ModelPlace":
    """Return the place of the model that the flags name. Raises Exit 64."""
    from ichat.downloads.inventory import is_stored
    from ichat.downloads.place import place_of

    hubs = [args.hub] if args.hub else HUBS
    places = [place_of(hub, args.model, os.environ, args.cache) for hub in hubs if is_hub_name(args.model)]
    found = list(filter(is_stored, places))
    if not found:
        raise Exit(EXIT_USAGE, f"There is no model {args.model} on this disk: `ichat.pyz models --disk` lists them.")
    if len(found) > 1:
        raise Exit(EXIT_USAGE, f"Both hubs have a model {args.model} on this disk: name the hub by --hub.")
    return found[0]


def _users(api: Api, config: str | None, *, must_know: bool) -> "Callable[[ModelPlace], Sequence[str]]":
    """Return a function for the workers that use a model: those of the gateway here, and those of a configuration.

    With `must_know`, raises Exit 1 if a gateway is there and does not list its workers; else it has none then.
    """
    from ichat.config import load as configuration
    from ichat.downloads.inventory import does_name, is_used_by

    tables = []
    if config is not None:
        with contextlib.suppress(Exit):
            tables = configuration.load(pathlib.Path(config)).managed_workers
    workers = []
    if api.place.is_here:
        try:
            workers = objects_of(api.call("GET", "/v1/admin/workers", params={"full": "1"}).value.get("data"))
        except (RequestRefused, Unreachable) as error:
            is_there = isinstance(error, RequestRefused) or error.timed_out
            if must_know and is_there:
                raise Exit(EXIT_REFUSED, f"It is not known which workers have the model: {error}") from error

    def users(place: "ModelPlace") -> Sequence[str]:
        running = [str(one.get("worker_id")) for one in workers if does_name(place, str(one.get("model_path") or ""))]
        configured = [f"{one.model_name} (configured)" for one in tables if is_used_by(place, one)]
        return running or configured

    return users


def _state_of(model: "StoredModel") -> str:
    if model.download is not None:
        return f"downloading {model.download.words()}".rstrip()
    return "whole" if model.is_whole else "not whole"


def _described(model: "StoredModel", users: Sequence[str]) -> dict[str, object]:
    return {
        "model": model.place.name,
        "hub": model.place.hub,
        "directory": model.place.directory,
        "size_bytes": model.size_bytes,
        "state": _state_of(model),
        "used_by": list(users),
    }
