"""Measure how well gateways use the engines' prefix caches, in one run with real engines on the CPU.

Workers with small caches start once, then each gateway or router in turn before them: iChat with each policy, and
sglang-router and vllm-router where they are installed. The engines' own counters are the judge. `ideal` is what one
infinite cache would find, and `gained` the share of what round robin misses of it.

conversations   64 that grow over 6 turns, and single requests among them
hot             one long prefix for all requests
none            long prompts without a common prefix
short           prompts shorter than any prefix that counts
restart         conversations, while a worker is killed and comes back; the hit rate is that after its return

Ends with 1 where a request to iChat failed that had begun after the worker's death, or without one.
"""

import argparse
import json
import pathlib
import sys
import time

import attrs
from load import share
from prefix_figures import Count, Row, ideal_hit, spread_of, table, together
from prefix_load import Play
from prefix_subjects import BLOCK, POLICIES, Fleet, Tokens, routers
from processes import ROOT, Failed, processes
from prompts import SCENARIOS

CLIENTS = 8
DEATH_TURN = 2
RETURN_TURN = 4
"""In `restart`, a worker dies in the middle of one turn, and is back before the other."""
REASONS_MAX = 3
SEED = 1000


def read_command_line(words):
    parser = argparse.ArgumentParser(
        prog="./build bench prefix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="how often everything is measured (1)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="how many workers there are (2)")
    parser.add_argument("--backend", choices=("vllm", "sglang", "both"), default="vllm", help="of the workers (vllm)")
    parser.add_argument("--scenarios", choices=SCENARIOS, default=list(SCENARIOS), help="only these", **several)
    parser.add_argument("--policies", choices=POLICIES, default=list(POLICIES), help="only these of ours", **several)
    parser.add_argument("--peers", type=pathlib.Path, metavar="DIR", help="a venv with sglang-router and vllm-router")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all figures of all rounds there")
    parser.add_argument("--clients", type=int, default=CLIENTS, metavar="N", help=f"requests at a time ({CLIENTS})")
    parser.add_argument("--python", type=pathlib.Path, default=pathlib.Path(sys.executable), help="runs the gateway")
    parser.add_argument(
        "--model", type=pathlib.Path, default=ROOT / ".build/tiny/chat", metavar="DIRECTORY", help="what engines load"
    )
    args = parser.parse_args(words)
    if min(args.rounds, args.workers, args.clients) < 1:
        parser.error("--rounds, --workers and --clients must be at least 1")
    return args


@attrs.frozen
class Seen:
    """What a play has shown at the engines: their counts, of the requests from `start` on."""

    by_worker: list[Count]
    start: int = 0
    turns: list[tuple[int, list[Count]]] = attrs.field(factory=list)
    """Of each turn, where turns are counted one by one: how many requests had ended, and the counts by worker."""
    died_at: float = 0.0


@attrs.define
class Bench:
    """One run: its workers, its routers, and the rows of its table."""

    args: argparse.Namespace
    directory: pathlib.Path
    rows: list[Row] = attrs.field(factory=list)
    fleet: Fleet = attrs.field(init=False)
    tokens: Tokens = attrs.field(init=False)

    def run(self, fleet):
        self.fleet = fleet
        subjects = routers(fleet, self.args)
        with Tokens(fleet.backends[0], self.args.model) as self.tokens:
            for number in range(self.args.rounds):
                for scenario in self.args.scenarios:
                    for router in subjects[:: -1 if number % 2 else 1]:
                        self.measure(scenario, router, number)

    def show(self):
        """Show what was measured, of a run that was cut short as well."""
        for scenario in dict.fromkeys(row.scenario for row in self.rows):
            print("\n".join(table(scenario, self.rows)), flush=True)
        if self.args.json:
            self.args.json.write_text(json.dumps([attrs.asdict(row) for row in self.rows], indent=1) + "\n")

    def measure(self, scenario, router, number):
        """Play one scenario before one router. A router that does not start is named and skipped."""
        with processes() as started:
            try:
                router.start(started, self.directory, f"{router.name} {scenario} {number}")
                router.wait_for(self.args.workers)
            except Failed as error:
                if router.is_ours:
                    raise
                print(f"• {router.name} is skipped: {error}", file=sys.stderr, flush=True)
                return
            earlier = router.own_counters()
            play = Play(router.port, self.args.clients)
            opened = SCENARIOS[scenario](f"{router.name} {number}", SEED + number)
            seen = self.with_a_death(play, opened, router) if scenario == "restart" else self.whole(play, opened)
            own = {name: value - earlier.get(name, 0) for name, value in router.own_counters().items()}
        self.rows.append(self.row(scenario, router.name, play, seen, own))
        print(f"• {self.rows[-1].line()}", file=sys.stderr, flush=True)

    def whole(self, play, opened):
        """Let all conversations go on to their end."""
        before = self.fleet.counts()
        play.all_turns(opened)
        return Seen(since(before, self.fleet.counts()))

    def with_a_death(self, play, opened, router):
        """Let them go on turn by turn: a worker dies in the middle of one, and is back before another."""
        victim = self.args.workers - 1
        counts, died_at, start = self.fleet.counts(), 0.0, 0
        after_return, turns = counts, []

        def called(ended):
            nonlocal died_at
            if ended == half and not died_at:
                died_at = time.perf_counter()
                self.fleet.kill(victim)

        while opened:
            if len(turns) == RETURN_TURN:
                self.fleet.wait(victim)
                router.wait_for(self.args.workers)
                counts = after_return = self.fleet.counts()
                start = len(play.asked)
            half = len(opened) // 2 if len(turns) == DEATH_TURN else None
            opened = play.one_turn(opened, called)
            now = self.fleet.counts(without=victim if DEATH_TURN <= len(turns) < RETURN_TURN else None)
            turns.append((len(play.asked), since(counts, now)))
            counts = now
            if half is not None:
                self.fleet.start(victim)
        return Seen(since(after_return, counts), start, turns, died_at)

    def row(self, scenario, name, play, seen, own):
        """Make the row of a play. The ideal of each engine has its blocks, and the weight of its tokens."""
        prompts = self.tokens.of([one.messages for one in play.asked])
        whole = together(seen.by_worker)
        ideal = sum(
            count.prompt * ideal_hit(prompts, BLOCK[backend], seen.start)
            for count, backend in zip(seen.by_worker, self.fleet.backends, strict=True)
        ) / max(whole.prompt, 1)
        block, begins = max(BLOCK[one] for one in self.fleet.backends), [0, *(end for end, _ in seen.turns)]
        ttft = [one.ttft_s for one in play.asked if one.ttft_s]
        failures = [one for one in play.asked if one.failure]
        lost = [one for one in failures if one.began < seen.died_at]
        return Row(
            scenario=scenario,
            subject=name,
            hit=whole.hit,
            ideal=ideal,
            spread=spread_of(seen.by_worker),
            ttft50_ms=share(ttft, 0.5),
            ttft99_ms=share(ttft, 0.99),
            rate=len(play.asked) / play.seconds,
            requests=len(play.asked),
            failures=len(failures) - len(lost),
            lost=len(lost),
            by_worker=seen.by_worker,
            own=own,
            turns=[
                (counts, ideal_hit(prompts[:end], block, begin))
                for (end, counts), begin in zip(seen.turns, begins, strict=False)
            ],
            reasons=list(dict.fromkeys(one.failure for one in failures))[:REASONS_MAX],
        )


def since(before, after):
    """Return what each worker has counted between two pictures."""
    return [now.since(then) for now, then in zip(after, before, strict=True)]


def run(args, directory):
    """Run the benchmark and show its tables. Gives the number of requests that failed."""
    bench = Bench(args, directory)
    try:
        with processes() as started:
            bench.run(Fleet(started, args, directory))
    finally:
        bench.show()
    return sum(row.failures for row in bench.rows if row.subject.startswith("iChat"))
