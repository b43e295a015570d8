"""Measure iChat beside what it can be compared with, in one run: CPU, rate, latency, memory, failures.

gateway   the gateway, nginx (where it is installed), and no gateway, before a fast upstream
worker    the worker and uvicorn, with the same application
vllm      the worker with vLLM, and vLLM's own server
sglang    the worker with SGLang, and SGLang's own server
prefix    how well gateways use the engines' prefix caches; it stands alone: `./build bench prefix --help`
console   the console before hundreds of workers; it stands alone: `./build bench console --help`

Every round measures each scenario on all in turn, the next round in the opposite order; a ratio is taken inside a
round, and shown is the median of the rounds, with the least and the greatest. Ends with 1 where a request failed.
"""

import argparse
import contextlib
import pathlib
import shutil
import sys
import tempfile
import time

import attrs
import console
import prefix
from figures import figures_of, table
from processes import ROOT, Failed, listen_to_signals, processes, run_load, spent
from subjects import SUBJECTS

ALONE = {"prefix": prefix, "console": console}
"""The subjects that stand alone, with flags of their own."""
LIMIT_S = 120.0
"""For one scenario on one process, once."""


def read_command_line():
    parser = argparse.ArgumentParser(
        prog="./build bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "subjects", nargs="*", metavar="SUBJECT", help="gateway, worker, vllm, sglang or all (gateway worker)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often everything is measured (3)")
    parser.add_argument("--scale", type=float, default=1.0, metavar="S", help="so many times the usual requests (1)")
    parser.add_argument(
        "--python", type=pathlib.Path, default=pathlib.Path(sys.executable), help="runs iChat and uvicorn"
    )
    parser.add_argument(
        "--engine-python",
        type=pathlib.Path,
        metavar="PYTHON",
        help="has the engine (of .engines/)",
    )
    parser.add_argument(
        "--model",
        type=pathlib.Path,
        default=ROOT / ".build/tiny/chat",
        metavar="DIRECTORY",
        help="what the engine loads",
    )
    args = parser.parse_args()
    names = list(SUBJECTS) if "all" in args.subjects else args.subjects or ["gateway", "worker"]
    for name in names:
        if name not in SUBJECTS:
            parser.error(f"there is no subject {name!r}; known: {', '.join(SUBJECTS)}, all")
    if args.rounds < 1 or args.scale <= 0:
        parser.error("--rounds must be at least 1, and --scale more than 0")
    args.subjects = list(dict.fromkeys(names))
    return args


def measure(process, scenario):
    """Load one process with one scenario."""
    before = process.cpu_ns()
    load = run_load(
        process.port,
        connections=scenario.connections,
        requests=scenario.requests,
        body=scenario.body,
        events=scenario.events,
        limit_s=LIMIT_S,
    )
    counted_ns, tree_ns = map(spent, before, process.cpu_ns())
    return figures_of(load, scenario, counted_ns, tree_ns, process.memory_mb())


def scaled(scenario, scale):
    """Make more or fewer requests: as many on every connection, and at least one."""
    waves = max(1, round(scenario.requests * scale / scenario.connections))
    return attrs.evolve(scenario, requests=waves * scenario.connections)


def compare(name, subject, args):
    """Measure all rounds of a subject and show them. Gives the number of requests that failed."""
    scenarios = [scaled(one, args.scale) for one in subject.scenarios]
    rounds = {one.name: {process.name: [] for process in subject.processes} for one in scenarios}
    for scenario in scenarios:
        for process in subject.processes:
            if not scenario.body.get("gap_s"):  # warms up nothing that the others leave cold
                measure(process, attrs.evolve(scenario, requests=scenario.connections))
    for number in range(args.rounds):
        print(f"• {name}: round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        for scenario in scenarios:
            for process in subject.processes[:: -1 if number % 2 else 1]:
                rounds[scenario.name][process.name].append(measure(process, scenario))
    print(f"\n{name}: {subject.title}; medians of {args.rounds}\n")
    for scenario in scenarios:
        print("\n".join(table(scenario, rounds[scenario.name], subject.ratios)), flush=True)
    return sum(one.failures for found in rounds.values() for all_of_one in found.values() for one in all_of_one)


def run(args, work):
    """Measure every subject that is wanted. Gives the number of requests that failed."""
    failures = 0
    for name in args.subjects:
        directory = work / name
        directory.mkdir()
        with processes() as started:
            failures += compare(name, SUBJECTS[name](started, args, directory), args)
    return failures


def main():
    alone = ALONE.get("".join(sys.argv[1:2]))
    args = alone.read_command_line(sys.argv[2:]) if alone else read_command_line()
    listen_to_signals()
    (ROOT / ".build").mkdir(exist_ok=True)
    work = pathlib.Path(tempfile.mkdtemp(prefix="bench-", dir=ROOT / ".build"))
    began = time.monotonic()
    keep = False
    try:
        failures = (alone.run if alone else run)(args, work)
        keep = failures > 0
        seconds = time.monotonic() - began
        print(f"Only the ratios may be compared with those of another run or machine ({seconds:.0f} s).")
        if failures:
            sys.exit(f"bench: {failures} requests failed; the logs are in {work}")
    except Failed as error:
        keep = True
        sys.exit(f"bench: {error}\nbench: the logs are in {work}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if not keep:
            with contextlib.suppress(OSError):
                shutil.rmtree(work)


if __name__ == "__main__":
    main()
