"""The command `bench`: its flags, its run and its output. Modules that measure are imported for a run only."""

import argparse
import json
import math
import os
from typing import TYPE_CHECKING

from ichat.cli.bench.objective import FORM
from ichat.cli.client import EXIT_REFUSED, Api
from ichat.cli.screen import Screen
from ichat.errors import EXIT_INTERRUPTED, EXIT_USAGE, Exit

if TYPE_CHECKING:
    from ichat.cli.bench.figures import BenchPlan

CONCURRENCY = 8
"""How many requests are under way if neither loop is asked for."""
SECONDS = 30.0
"""For how long requests are sent if neither a number nor a time is asked for."""
INPUT_TOKENS, OUTPUT_TOKENS = 512, 128
TIMEOUT_S = 600.0
CONCURRENCY_MAX = 4096
REQUESTS_MAX = 1_000_000
"""All requests of a run are kept in memory."""
RATE_MAX = 10_000.0
SECONDS_MAX = 7 * 86400.0
TOKENS_MAX = 10_000_000


def add_bench_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags of `bench`."""
    usage.add_argument("model", metavar="MODEL", help="its name, as `models` has it")
    loop = usage.add_mutually_exclusive_group()
    loop.add_argument(
        "--concurrency", metavar="N", type=_whole_to(CONCURRENCY_MAX),
        help=f"a closed loop: N requests under way, each followed by another; {CONCURRENCY}",
    )  # fmt: skip
    loop.add_argument(
        "--rate", metavar="R", type=_number_to(RATE_MAX),
        help="an open loop: R requests a second, at random moments, also while answers are slow",
    )  # fmt: skip
    usage.add_argument("--requests", metavar="N", type=_whole_to(REQUESTS_MAX), help="the most requests")
    usage.add_argument(
        "--seconds", metavar="S", type=_number_to(SECONDS_MAX),
        help=f"how long requests are sent; {SECONDS:g} without --requests",
    )  # fmt: skip
    usage.add_argument(
        "--input", metavar="N", type=_whole_to(TOKENS_MAX), default=INPUT_TOKENS,
        help=f"tokens of a prompt; {INPUT_TOKENS}",
    )  # fmt: skip
    usage.add_argument(
        "--output", metavar="N", type=_whole_to(TOKENS_MAX), default=OUTPUT_TOKENS,
        help=f"tokens of an answer; {OUTPUT_TOKENS}",
    )  # fmt: skip
    usage.add_argument(
        "--shared-prefix", metavar="N", type=_whole_to(TOKENS_MAX, least=0), default=0,
        help="tokens at the beginning that all prompts share; 0: prefix caches do not help",
    )  # fmt: skip
    usage.add_argument("--slo", metavar="GOALS", default="", help=f"count the requests within these limits: {FORM}")
    usage.add_argument(
        "--timeout", metavar="S", type=_number_to(SECONDS_MAX), default=TIMEOUT_S,
        help=f"the longest time of a request; {TIMEOUT_S:g}",
    )  # fmt: skip
    usage.add_argument("--save", metavar="FILE", help="write the JSON into this file, too")


def _whole_to(most: int, least: int = 1) -> "argparse._ActionType":
    def whole(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {text!r}")
        return int(text)

    return whole


def _number_to(most: float) -> "argparse._ActionType":
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value <= most:
            raise argparse.ArgumentTypeError(f"must be a number above 0 and up to {most:g}, not {text!r}")
        return value

    return number


def run_bench(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Measure a model, and show the figures, also if Ctrl-C ends it early. Raises Exit."""
    from ichat.cli.bench import run
    from ichat.cli.bench.show import show_figures
    from ichat.cli.client import open_api

    plan = _plan_of(args)
    if args.save:
        _check_file(args.save)
    figures, is_cut_short = run.measure(api, open_api(args), plan)
    text = json.dumps(run.as_json(figures))
    if args.save:
        with open(args.save, "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
    if args.json:
        screen.line(text)
    else:
        show_figures(screen, figures)
    if is_cut_short:
        return EXIT_INTERRUPTED
    return 0 if figures.requests else EXIT_REFUSED


def _plan_of(args: argparse.Namespace) -> "BenchPlan":
    """Return the plan of the flags. Raises Exit 64."""
    from ichat.cli.bench.figures import BenchPlan
    from ichat.cli.bench.objective import Objective, objective_in

    objective: Objective = {}
    try:
        if args.slo:
            objective = objective_in(args.slo)
    except ValueError as error:
        raise Exit(EXIT_USAGE, f"ichat.pyz bench: --slo: {error}.") from error
    if args.shared_prefix > args.input:
        raise Exit(EXIT_USAGE, "ichat.pyz bench: --shared-prefix must not be larger than --input.")
    is_bounded = args.seconds is not None or args.requests is not None
    return BenchPlan(
        model=args.model,
        concurrency=args.concurrency or (None if args.rate else CONCURRENCY),
        rate=args.rate,
        requests_max=args.requests,
        seconds_max=args.seconds if is_bounded else SECONDS,
        input_tokens=args.input,
        output_tokens=args.output,
        shared_prefix=args.shared_prefix,
        objective=objective,
        timeout_s=args.timeout,
    )


def _check_file(path: str) -> None:
    """Raise Exit 64 if a file cannot be written; a file that is there stays as it is."""
    was_there = os.path.exists(path)
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise Exit(EXIT_USAGE, f"{path} cannot be written: {error.strerror}.") from error
    if not was_there:
        os.unlink(path)
