"""Break everything at once for a while, and say what was not right.

    python tests/soak/chaos.py [--minutes 10] [--seed N] [--backend fake|vllm|sglang] [--relays N] [--pyz]
        [--report FILE]

A real gateway with managed and self-registered workers is under mixed load while its workers are killed, stopped, cut
off and reconfigured (`chaos_faults.py`). Every response must be right, or a clear error, or visibly incomplete, and
come within a bound (`chaos_load.py`). When load and faults have stopped everything must be as it was: workers ready,
nothing in flight, descriptors and threads back, memory level, counters equal to what the clients have sent; and when
the gateway has ended, nothing of it is left. Exit code 1 where anything was not so; each such thing is told with the
seed and its time. The same seed makes the same questions and faults; what meets what is up to the machine.
"""

import argparse
import collections
import contextlib
import json
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

import attrs
import trio

sys.path[:0] = [str(pathlib.Path(__file__).parents[above]) for above in (1, 2)]

from chaos_faults import Faults, deck  # noqa: E402
from chaos_load import MAY_FAIL, Clients, FakeAnswers, Ledger, RealAnswers, Wrong, judge  # noqa: E402
from chaos_site import Site, weigh  # noqa: E402
from chaos_wire import Connection, written  # noqa: E402
from support.programs import alive  # noqa: E402

CLIENTS = {"fake": 32, "real": 6}
PAUSE_S = {"fake": 0.1, "real": 1.0}
"""On average, between two requests of one client."""
FAULT_EVERY_S = {"fake": 1.6, "real": 25.0}
PROGRESS_S = 30.0
SAMPLE_S = 5.0
IDLE_S = 60.0
"""How long after the last request everything may take to be given back: idle connections and threads end by themselves."""
END_S = 90.0
DESCRIPTORS_MAX = 12
"""More of them than before the first request: connections to the control plane that are kept."""
THREADS_MAX = 4
GROWTH_MB_MAX = 60.0
"""From the first quarter of a run to its end, when logs, pools and the allocator have grown to their size."""
SLOPE_MB_PER_HOUR_MAX = 60.0
SLOPE_NEEDS_S = 240.0
"""The second half of a run must be so long for its slope to say anything."""
BUGS = ("Traceback (most recent call last)", "a bug ", "Task exception was never retrieved", "Exception ignored in")
"""What a gateway's log must not have."""


@attrs.define
class Weights:
    """The gateway's memory over time, and what it held before the first request."""

    descriptors: int = 0
    threads: int = 0
    calm: tuple = ()
    """The process id of the worker that nobody touches, and its descriptors and threads then."""
    samples: list = attrs.field(factory=list)

    def growth_mb(self):
        """Return how much more memory there is at the end than after the first quarter."""
        quarter = self.samples[len(self.samples) // 4 :][:3]
        return _median(mb for _, mb in self.samples[-3:]) - _median(mb for _, mb in quarter)

    def slope_mb_per_hour(self):
        """Fit a line to the second half, by least squares."""
        points = self.samples[len(self.samples) // 2 :]
        x = [at for at, _ in points]
        y = [mb for _, mb in points]
        middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
        square = sum((one - middle_x) ** 2 for one in x)
        return 3600 * sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / (square or 1)

    def half_s(self):
        return self.samples[-1][0] - self.samples[len(self.samples) // 2][0]


def _median(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


class Chaos:
    """One run."""

    def __init__(self, options, directory):
        self.options = options
        self.site = Site(directory, options.backend, is_pyz=options.pyz, relays=options.relays)
        self.ledger = Ledger(options.seed)
        self.weights = Weights()
        self.recovered_s = 0.0
        self.counts = None
        """Requests to models that clients know to have arrived, and those that the gateway counted."""
        self._size = "fake" if options.backend == "fake" else "real"

    async def run(self):
        """Start, break, look, end."""
        site, ledger = self.site, self.ledger
        try:
            async with trio.open_nursery() as links:
                wrong = await site.start(links)
                if wrong:
                    ledger.wrong(f"before anything was done: {wrong}")
                    return
                print(f"ready: gateway {site.program.process.pid} on port {site.port}, in {site.directory}", flush=True)
                ledger.began = trio.current_time()
                _, self.weights.descriptors, self.weights.threads = site.weigh()
                calm = await self._calm_pid()
                self.weights.calm = (calm, *weigh(calm)[1:])
                await self._break()
                await self._recover(calm)
                if not ledger.violations or site.program.process.poll() is None:
                    await self._compare_counts()
                    await self._look_at_rest()
                    await self._end()
                links.cancel_scope.cancel()
        finally:
            site.end_hard()

    async def _calm_pid(self):
        found = await self.site.managed("calm")
        return found[0]["pid"] if found else 0

    async def _break(self):
        """Load and faults, until the time is over; no request is cut by that."""
        until = trio.current_time() + self.options.minutes * 60
        clients = Clients(self.site, self.ledger, pause_s=PAUSE_S[self._size], until=until)
        async with trio.open_nursery() as watching:
            watching.start_soon(self._watch_forever)
            async with trio.open_nursery() as nursery:
                for number in range(CLIENTS[self._size]):
                    nursery.start_soon(clients.ask_on, number)
                nursery.start_soon(self._fault_on, until)
            watching.cancel_scope.cancel()

    async def _fault_on(self, until):
        """Begin one fault after the other; those that last overlap."""
        faults = Faults(self.site, self.ledger, until)
        kinds = list(faults.KINDS) if self._size == "fake" else list(faults.REAL)
        span_s = self.options.minutes * 60
        count = (
            max(len(kinds), int(span_s / FAULT_EVERY_S[self._size])) if self._size == "fake" else int(span_s / 25) + 1
        )
        rng = random.Random(f"{self.options.seed}/times")
        times = sorted(rng.random() * 0.95 * span_s for _ in range(count))
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number, (at, kind) in enumerate(zip(times, deck(self.options.seed, kinds, count), strict=True)):
                await trio.sleep_until(began + at)
                nursery.start_soon(faults.do, kind, number)

    async def _watch_forever(self):
        shown = trio.current_time()
        every_s = min(SAMPLE_S, self.options.minutes * 60 / 20)
        while True:
            if self.site.program.process.poll() is not None:
                self.ledger.wrong(f"the gateway ended with {self.site.program.process.returncode}")
                return
            now = trio.current_time()
            self.weights.samples.append((now - self.ledger.began, self.site.weigh()[0]))
            if now - shown >= PROGRESS_S:
                shown = now
                self._progress(now - self.ledger.began)
            await trio.sleep(every_s)

    def _progress(self, at):
        ledger = self.ledger
        mb, descriptors, threads = self.site.weigh()
        counts = collections.Counter()
        for (_, outcome), count in ledger.outcomes.items():
            counts["right" if outcome == "right" else "other"] += count
        print(
            f"{at:6.0f} s: {sum(counts.values())} done ({counts['right']} right), {ledger.open} open, "
            f"{sum(ledger.faults.values())} faults, {mb:.0f} MB, {descriptors} descriptors, {threads} threads, "
            f"{len(ledger.violations)} violations",
            flush=True,
        )

    async def _recover(self, calm):
        """Put the configuration back, and see everything well again, and the untouched worker untouched."""
        site, ledger = self.site, self.ledger
        site.path.write_text(site.text(site.base))
        deadline = trio.current_time() + 30
        while True:
            status, answer = await site.ask("POST", "/v1/admin/config/reload")
            if status == 200 or trio.current_time() > deadline:
                break
            await trio.sleep(0.5)
        if status != 200:
            ledger.wrong(f"the first configuration is not taken back: {status} {answer}")
        for one in await site.workers():
            if one["model_name"] == "guest" and one["managed"]:
                await site.ask("DELETE", f"/v1/admin/workers/{one['worker_id']}?drain_s=0")
        began = trio.current_time()
        wrong = await site.wait_until_well(site.ready_s)
        if wrong:
            ledger.wrong(wrong)
        self.recovered_s = trio.current_time() - began
        if await self._calm_pid() != calm:
            ledger.wrong("the worker that nobody touched is another process than before")
        if (relays := site.find_relays()) != site.relays:
            ledger.wrong(f"the relays are {relays}, and were {site.relays} before the first request")
        answers = FakeAnswers() if site.backend == "fake" else RealAnswers()
        for model in sorted({one.model for one in site.base} | ({"far"} if site.fars else set())):
            question = answers.plain(random.Random(0), model)
            async with await Connection.open(site.port) as connection:
                await connection.send(written("POST", question.path, question.body, ["x-request-id: last-" + model]))
                reply = await connection.reply()
            try:
                judge(reply, question.whole, set() if not wrong else MAY_FAIL[model])
            except Wrong as error:
                ledger.wrong(f"{model}, when all was well again: {error}")

    async def _look_at_rest(self):
        """Nothing is in flight, and everything that was taken for requests is given back."""
        site, ledger, state = self.site, self.ledger, []
        with trio.move_on_after(IDLE_S):
            while True:
                state = await self._held()
                if not state:
                    break
                await trio.sleep(0.5)
        for sentence in state:
            ledger.wrong(f"at rest, after {IDLE_S:g} s: {sentence}")
        weights = self.weights
        weights.samples.append((trio.current_time() - ledger.began, site.weigh()[0]))
        if weights.growth_mb() > GROWTH_MB_MAX:
            ledger.wrong(f"the gateway has grown by {weights.growth_mb():.1f} MB, more than {GROWTH_MB_MAX:g}")
        if weights.half_s() >= SLOPE_NEEDS_S and weights.slope_mb_per_hour() > SLOPE_MB_PER_HOUR_MAX:
            ledger.wrong(f"memory grows by {weights.slope_mb_per_hour():.1f} MB an hour")

    async def _held(self):
        """Return what is still held, each in words."""
        site, weights, found = self.site, self.weights, []
        for name in ("ichat_requests_in_flight", "ichat_requests_queued"):
            value = await site.metric(name)
            if value:
                found.append(f"{name} is {value:g}")
        for one in await site.workers():
            if one["in_flight"]:
                found.append(f"{one['worker_id']} has {one['in_flight']} requests in flight")
            engine = await site.metric("ichat_worker_in_flight", one["port"])
            if engine:
                found.append(f"the engine of {one['worker_id']} still answers {engine:g} requests")
        zombies = site.zombies()
        if zombies:
            found.append(f"children of the gateway that nobody has waited for: {zombies}")
        calm, *before = weights.calm
        for whose, then, now in (
            ("the gateway", (weights.descriptors, weights.threads), site.weigh()[1:]),
            ("the worker that nobody touched", before, weigh(calm)[1:]),
        ):
            if now[0] > then[0] + DESCRIPTORS_MAX:
                found.append(f"{whose} has {now[0]} descriptors, and {then[0]} before the first request")
            if now[1] > then[1] + THREADS_MAX:
                found.append(f"{whose} has {now[1]} threads, and {then[1]} before the first request")
        return found

    async def _compare_counts(self):
        """Compare what clients know with the access log line by line, and its requests to models with the counter.

        Of a request that its client left before it was answered only the gateway knows whether it had it whole, so
        the log decides; it must have it once at most.
        """
        ledger = self.ledger
        await trio.sleep(1.5)
        counted = await self.site.metric("ichat_requests_total")
        lines = [json.loads(line) for line in (self.site.directory / "access.log").read_text().splitlines()]
        logged = collections.defaultdict(list)
        for line in lines:
            if "lines_dropped" in line:
                ledger.wrong(f"the access log has lost lines: {line}")
            if "duration_ms" in line:  # others were refused before they were requests
                logged[line["id"]].append(line)
        to_models = sum(id_.startswith("last-") for id_ in logged)
        for id_, sent in ledger.sent.items():
            found = logged.get(id_, [])
            if len(found) > 1 or (sent.counted == "yes" and not found) or (sent.counted == "no" and found):
                ledger.wrong(f"{id_} was sent once ({sent}), and the access log has {found}")
            elif found and sent.status and found[0]["status"] not in (sent.status, 499):
                ledger.wrong(f"{id_}: the client got {sent.status}, the access log has {found[0]}")
            elif found and sent.status and found[0]["status"] == 499 and not sent.has_left:
                ledger.count("gateway", "499 though the client had everything")
            to_models += bool(found) and sent.counted != "apart"
        self.counts = (to_models, counted)
        if to_models != counted:
            ledger.wrong(f"ichat_requests_total is {counted:g}, and {to_models} requests reached a model's route")

    async def _end(self):
        """SIGTERM while streams are under way: those that can end do, the others are cut where everybody sees it."""
        site, ledger = self.site, self.ledger
        answers = FakeAnswers() if site.backend == "fake" else RealAnswers()
        outcomes = []

        async def ask(events, gap_s, may_be):
            question = answers.stream(random.Random(events), "calm", events, gap_s)
            async with await Connection.open(site.port) as connection:
                await connection.send(written("POST", question.path, question.body))
                try:
                    outcomes.append(judge(await connection.reply(), question.whole, may_be))
                except Wrong as wrong:
                    ledger.wrong(f"while the gateway ended: {wrong}")

        family = site.program.descendants()
        with trio.move_on_after(END_S) as scope:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(ask, 30, 0.05, set())
                nursery.start_soon(ask, 100, 0.5, {500, 502, 503})
                while await site.metric("ichat_requests_in_flight") < (4 if site.backend == "fake" else 1):
                    await trio.sleep(0.05)
                site.program.process.send_signal(signal.SIGTERM)
                while site.program.process.poll() is None:
                    await trio.sleep(0.1)
        if scope.cancelled_caught:
            ledger.wrong(f"the gateway did not end within {END_S:g} s")
        elif site.program.process.returncode:
            ledger.wrong(f"the gateway ended with {site.program.process.returncode}")
        for far in site.fars:
            for one in await far.end():
                ledger.wrong(f"left of {far.id}: process {one}")
        left = site.leftovers() + [f"process {one}" for one in alive(family)]
        for one in left:
            ledger.wrong(f"left behind by the gateway: {one}")
        for line in site.program.text().splitlines():
            if any(bug in line for bug in BUGS):
                ledger.wrong(f"in the gateway's log: {line}")

    def summary(self):
        """Write the tables."""
        ledger, weights, options = self.ledger, self.weights, self.options
        kinds = sorted({kind for kind, _ in ledger.outcomes})
        lines = [
            "",
            f"seed {ledger.seed}, {options.minutes:g} minutes, backend {options.backend}, {options.relays} relays",
            "",
            "requests:",
        ]
        for kind in kinds:
            found = sorted((count, outcome) for (one, outcome), count in ledger.outcomes.items() if one == kind)
            lines.append(f"  {kind:14} " + ", ".join(f"{outcome} {count}" for count, outcome in reversed(found)))
        lines += ["", "faults:", *(f"  {kind:28} {count}" for kind, count in sorted(ledger.faults.items()))]
        if len(weights.samples) > 4:
            first, last = weights.samples[0][1], weights.samples[-1][1]
            memory = f"memory: {first:.1f} MB at first, {last:.1f} MB at the end, {weights.growth_mb():+.1f} MB since"
            slope = "too short a run for a slope"
            if weights.half_s() >= SLOPE_NEEDS_S:
                slope = f"{weights.slope_mb_per_hour():+.1f} MB an hour over the last {weights.half_s():.0f} s"
            lines += ["", f"{memory} the first quarter, {slope}"]
        return "\n".join([*lines, *self._rest(), "", f"{len(ledger.violations)} violations", *ledger.violations])

    def _rest(self):
        if self.counts is None:
            return []
        to_models, counted = self.counts
        arrived = f"{to_models} by clients and access log, {counted:g} by the counter"
        return [
            f"well again {self.recovered_s:.1f} s after the last fault",
            f"requests to models: {arrived}; {len(self.ledger.sent)} requests were begun in all",
        ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--backend", choices=("fake", "vllm", "sglang"), default="fake")
    parser.add_argument("--relays", type=int, default=0, help="how many relays the gateway has")
    parser.add_argument("--pyz", action="store_true", help="run ichat.pyz, not the sources")
    parser.add_argument("--report", type=pathlib.Path, help="write the summary there as well, as JSON")
    parser.add_argument("--keep", action="store_true", help="keep the directory with logs and state")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = tempfile.mkdtemp(prefix="chaos-")
        if not options.keep:
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        chaos = None

        async def run():
            nonlocal chaos
            chaos = Chaos(options, pathlib.Path(directory))
            await chaos.run()

        trio.run(run)
        print(chaos.summary(), flush=True)
        if options.report:
            options.report.write_text(json.dumps(_report(chaos), indent=1))
    sys.exit(bool(chaos.ledger.violations))


def _report(chaos):
    ledger = chaos.ledger
    outcomes = collections.defaultdict(dict)
    for (kind, outcome), count in ledger.outcomes.items():
        outcomes[kind][outcome] = count
    return {
        "seed": ledger.seed, "outcomes": outcomes, "faults": ledger.faults, "violations": ledger.violations,
        "memory": chaos.weights.samples,
    }  # fmt: skip


if __name__ == "__main__":
    main()
