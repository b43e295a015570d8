"""Where a request would go now, and why: `explain`. Nothing is sent to any worker."""

import argparse
import functools
import json
import sys
from collections.abc import Mapping
from typing import Any

from ichat.cli.client import Api, JsonReply
from ichat.cli.json_values import Json, object_of, objects_of, parse_object
from ichat.cli.screen import Screen, duration, one_line
from ichat.config.package_data import read_toml
from ichat.errors import EXIT_USAGE, Exit

ROUTE = "/v1/admin/route"


@functools.cache
def _words() -> Mapping[str, Any]:
    """Return the table `explain.toml`."""
    return read_toml("ichat.cli", "explain.toml")


def add_explain_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags of `explain`."""
    usage.add_argument("model", metavar="MODEL", help="its name, as `models` has it")
    usage.add_argument("prompt", metavar="PROMPT", nargs="?", help="of a chat; - is standard input; none: any prompt")
    usage.add_argument("--file", metavar="BODY", help="the body just as the client sends it; - is standard input")
    usage.add_argument("--session", metavar="S", help="the session that the request names")
    usage.add_argument("--path", metavar="PATH", help="its route, for example /v1/messages; else by the body's keys")


def ask(api: Api, args: argparse.Namespace) -> JsonReply:
    """Ask where a request would go. Raises Exit 64 for a prompt and a file, or a file that is no such request."""
    if args.file is not None and args.prompt is not None:
        raise Exit(EXIT_USAGE, "Give a PROMPT or --file BODY, not both.")
    params = {name: value for name in ("session", "path") if (value := getattr(args, name))}
    return api.call("POST", ROUTE, params=params, body=_body_of(args))


def _body_of(args: argparse.Namespace) -> bytes:
    """Return the request's body: that of the file, byte for byte, or a chat as OpenAI's client writes it."""
    if args.file is None:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        said = {"messages": [{"role": "user", "content": prompt}]} if prompt is not None else {}
        text = json.dumps({"model": args.model, **said}, ensure_ascii=False, separators=(",", ":"))
        return text.encode(errors="replace")
    try:
        if args.file == "-":
            body = sys.stdin.buffer.read()
        else:
            with open(args.file, "rb") as file:
                body = file.read()
    except OSError as error:
        raise Exit(EXIT_USAGE, f"{args.file} cannot be read: {error.strerror}.") from error
    model = parse_object(body.decode(errors="replace")).get("model")
    if model != args.model:
        raise Exit(EXIT_USAGE, f"The body in {args.file} is for the model {model!r}, not {args.model!r}.")
    return body


def show_route(screen: Screen, view: Json) -> None:
    """Show where the request goes, then every candidate in a line, the chosen candidate marked, and the reason.

    The plan of a name that stands for models is shown before the candidates.
    """
    screen.line(verdict_of(view), "bold")
    if view.get("alias"):
        _show_plan(screen, view)
    rows: list[list[object]] = []
    for one in objects_of(view.get("candidates")):
        remark = one.get("why_not") or ("has too much to do" if one.get("overloaded") else None)
        circuit = object_of(one.get("circuit")).get("state")
        busy = f"{one.get('in_flight')}/{one.get('in_flight_max')}"
        chosen = "yes" if one.get("chosen") else None
        has = one.get("matched") if view.get("prefix") else None
        rows.append([chosen, one.get("worker_id"), one.get("state"), one.get("load"), busy, has, circuit, remark])
    columns = ("chosen", "worker", "state", "load", "in flight", "has bytes", "circuit", "remark")
    screen.table(columns, rows, ("circuit", "in flight"))
    screen.line(sentence_of(view))
    if load := object_of(view.get("load")):
        screen.line(sentence_of_load(load))
    if scale := object_of(view.get("scale")):
        screen.line(sentence_of_scale(scale))


def _show_plan(screen: Screen, view: Json) -> None:
    rows: list[list[object]] = []
    for one in objects_of(view.get("plan")):
        share, worker, goes_on = one.get("share"), one.get("worker"), one.get("goes_on")
        rows.append([
            one.get("place"), one.get("model"), None if share is None else f"{share:.4g}",
            worker or one.get("rule"), f"goes on ({goes_on})" if goes_on else None, one.get("reason"),
        ])  # fmt: skip
    screen.table(("asked", "model", "share", "leads to", "then", "remark"), rows, ())
    screen.line(one_line(f"{view.get('alias')} is {view.get('model')} for this request:"))


def verdict_of(view: Json) -> str:
    """Return where the request goes in a single line, with the reason in few words."""
    rule, chosen, prefix = str(view.get("rule")), view.get("chosen"), object_of(view.get("prefix"))
    if chosen is None:
        return one_line(f"→ no worker now: it {_words()['ends'].get(rule, 'is refused (503)')}")
    words = str(_words()["rules"].get(rule, {"short": rule})["short"])
    if rule == "prefix":
        words += f", {_grouped(prefix.get('matched'))} of {_grouped(prefix.get('length'))} bytes"
    return one_line(f"→ {chosen} ({words})")


def _grouped(number: object) -> str:
    """Return a whole number with its thousands apart."""
    return f"{number:,}".replace(",", " ") if isinstance(number, int) else "?"


def sentence_of(view: Json) -> str:
    """Return in a sentence where the request goes, and by which rule."""
    rule, chosen, prefix = str(view.get("rule")), view.get("chosen"), object_of(view.get("prefix"))
    if chosen is None:
        return one_line(f"It {_words()['ends'].get(rule, 'is refused (503)')}: {view.get('reason')}.")
    numbers = {name: prefix.get(name) for name in ("length", "matched", "deepest")}
    known = _words()["rules"].get(rule)
    why = f"the rule is {rule}" if known is None else str(known["sentence"]).format(**numbers)
    if rule == "least_loaded" and prefix:
        why += ", and no cache should have the prompt's beginning"
    return one_line(f"It goes to {chosen}: {why}.")


def sentence_of_load(load: Json) -> str:
    """Return a sentence or two: the workers that loading a model evicts, its waits, and its duration."""
    evicts = ", and ".join(map(_eviction, objects_of(load.get("evicts"))))
    waits = " and ".join(map(_obstacle, objects_of(load.get("waits_for"))))
    parts = [f"would {evicts}" if evicts else "", f"would wait for {waits}" if waits else ""]
    does = ", and ".join(filter(None, parts)) or "evicts no other worker"
    expected_s = load.get("expected_s")
    takes = f" That takes about {duration(expected_s)}." if expected_s is not None else ""
    return one_line(f"Loading it {does}.{takes}")


def sentence_of_scale(scale: Json) -> str:
    """Return the number of copies in sentences, with the load, and how that number last changed."""
    counts = ", ".join(f"{scale.get(name)} {name}" for name in ("ready", "starting", "draining") if scale.get(name))
    load, busy_s, changed = scale.get("load"), scale.get("busy_s"), scale.get("changed")
    told = "not known now" if load is None else f"{load:.1f} of {scale.get('ready')} copies"
    busy = f", busy for {duration(busy_s)}" if busy_s is not None else ""
    last = f" It last went {changed} {duration(scale.get('changed_s'))} ago ({scale.get('changed_reason')})."
    bounds = f"{scale.get('min')} to {scale.get('max')}"
    words = f"Its copies: {counts or 'none'}, of {bounds}; the load is {told}{busy} ({scale.get('reason')})."
    return one_line(words + (last if changed else ""))


def _eviction(one: Json) -> str:
    action = "put worker {} to sleep" if one.get("kind") == "sleep" else "stop worker {}"
    idle_s = one.get("idle_s")
    when = f", which has been idle for {duration(idle_s)}" if idle_s is not None else " once its requests have ended"
    return action.format(one.get("worker_id")) + when


def _obstacle(one: Json) -> str:
    return f"worker {one.get('worker_id')}, which {one.get('why')}"
