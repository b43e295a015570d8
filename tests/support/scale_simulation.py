"""A model with copies in virtual time: what `scale.decide` says is done, and every step is checked."""

import itertools
import math
import random

from ichat.config.replicas import Replicas, Scale
from ichat.placement import scale
from ichat.placement.scale import CopyFacts, ScaleFacts, ScaleMemory

HOURS_S = 7200.0
SLOTS = 16


def steady(chance):
    level = chance.uniform(0.2, 5)
    return lambda now: level


def square(chance):
    low, high, period = chance.uniform(0, 1), chance.uniform(1, 6), chance.uniform(60, 3000)
    return lambda now: high if now % period < period / 2 else low


def ramp(chance):
    top, peak_at = chance.uniform(1, 6), chance.uniform(300, 6000)
    return lambda now: top * (now / peak_at if now < peak_at else max(0.0, 2 - now / peak_at))


def flood(chance):
    begins, lasts, height = chance.uniform(60, 5000), chance.uniform(5, 600), chance.uniform(2, 20)
    return lambda now: height if begins < now < begins + lasts else 0.3


def noise(chance):
    level, own = chance.uniform(0.5, 4), random.Random(chance.random())
    return lambda now: max(0.0, own.gauss(level, level / 4))


WAVES = (steady, square, ramp, flood, noise)


class Copy:
    """A copy: it loads, serves, drains, or dies and starts anew."""

    def __init__(self, number, ready_at):
        self.id, self.ready_at = f"m-{number}", ready_at
        self.is_draining, self.requests, self.failures = False, 0, 0

    def phase(self, now):
        return "draining" if self.is_draining else "ready" if now >= self.ready_at else "starting"


class Simulation:
    """Two hours of a model."""

    def __init__(self, seed, wave=None, decide=scale.decide):
        self.chance = random.Random(seed)
        self.decide = decide
        self.wave = wave or self.chance.choice(WAVES)
        self.load_at = self.wave(self.chance)
        self.bounds = Replicas(self.chance.choice([1, 1, 2]), self.chance.choice([2, 4, 8]))
        self.settings = Scale(down_s=self.chance.choice([60.0, 300.0]))
        self.load_s = self.chance.uniform(10, 180)
        self.lost = self.chance.choice([0.0, 0.0, 0.02])
        self.dying = 0.0 if self.wave is steady else self.chance.choice([0.0, 0.001])
        self.failing = 0.0 if self.wave is steady else self.chance.choice([0.0, 0.0, 0.3])
        self.numbers, self.memory = itertools.count(), ScaleMemory()
        self.copies = [Copy(next(self.numbers), 0.0) for _ in range(self.bounds.min)]
        self.changes, self.ended = [], []
        self.waiting_since, self.busy_since, self.lost_until = math.inf, math.inf, -math.inf

    def run(self, seconds=HOURS_S):
        """Live for this long. Raises AssertionError at a step that must not be."""
        now = 0.0
        while now < seconds:
            now = self.step(now)
        return self

    def facts(self, now, load, is_whole):
        ready = [one for one in self.copies if one.phase(now) == "ready"]
        share = min(1.0, load / len(ready)) if ready else 0.0
        for one in ready:
            one.requests = round(share * SLOTS)
        for one in self.copies:
            if one.is_draining:
                one.requests -= round(one.requests * self.chance.uniform(0, 1))
        waiting = math.ceil(max(0.0, load - len(ready)) * SLOTS)
        self.waiting_since = min(self.waiting_since, now) if waiting else math.inf
        copies = [
            CopyFacts(
                one.id, one.phase(now), share if one in ready and is_whole else None, one.requests, 0.0, one.failures
            )
            for one in self.copies
        ]
        waited_s = now - self.waiting_since if waiting else 0.0
        return ScaleFacts(copies, self.bounds, SLOTS, waiting, waited_s, self.load_s, is_whole=is_whole)

    def step(self, now):
        """Decide once, check it, and do it; return when to go on."""
        if self.chance.random() < self.lost:
            self.lost_until = now + self.chance.choice([5, 20, 400])
        for one in self.copies:
            if one.phase(now) == "ready" and self.chance.random() < self.dying:
                one.ready_at, one.requests = now + self.load_s, 0
        load = self.load_at(now)
        facts = self.facts(now, load, is_whole=now >= self.lost_until)
        decision, self.memory = self.decide(now, facts, self.settings, self.memory)
        self.check(now, facts, decision, load)
        if decision.direction != "stay":
            self.changes.append((now, decision.direction, decision.reason))
        for one in self.copies:
            if one.id in decision.resume:
                one.is_draining = False
            elif one.id == decision.drain:
                one.is_draining = True
        for one in [*self.copies]:
            if one.is_draining and not one.requests:
                self.copies.remove(one)
        for _ in range(decision.start):
            self.copies.append(Copy(next(self.numbers), now + self.load_s))
            if self.chance.random() < self.failing:
                self.copies[-1].ready_at, self.copies[-1].failures = math.inf, 3
        return decision.look_at

    def check(self, now, facts, decision, load):
        """Raise AssertionError for a decision that breaks a rule."""
        phases = [one.phase for one in facts.copies]
        ready, starting = phases.count("ready"), phases.count("starting")
        after = ready + starting + decision.start + len(decision.resume) - bool(decision.drain)
        assert self.bounds.min <= after <= self.bounds.max, f"{after} copies"
        assert now < decision.look_at <= now + scale.SAMPLE_S
        if not facts.is_whole:
            assert decision.direction == "stay" or decision.reason in ("failing", "below_min"), "a lost sample counts"
        if decision.direction == "up" and decision.reason != "below_min":
            assert ready + starting < self.wanted(load, ready, facts), "the copies that start suffice"
            assert decision.start + starting <= scale.AT_ONCE_MAX or not decision.start
        if decision.reason == "idle":
            last = self.changes[-1][0] if self.changes else -math.inf
            assert now - last >= self.settings.down_s, "a copy goes too soon after another change"
            assert ready - 1 >= load / self.settings.busy, "a copy goes that is needed"
        is_busy = facts.is_whole and ready and load / ready >= self.settings.busy
        self.busy_since = min(self.busy_since, now) if is_busy else math.inf
        is_short = ready + starting < self.wanted(load, ready, facts) and starting < scale.AT_ONCE_MAX
        if is_busy and is_short and not self.failing and not any(one.failures for one in self.copies):
            late_s = now - self.busy_since - self.settings.up_s - scale.SAMPLE_S
            assert decision.direction == "up" or late_s <= 0, "copies are not added in time"
        if decision.direction != "stay":
            self.busy_since = math.inf

    def wanted(self, load, ready, facts):
        """Return the number of copies that this load wants, by the rule in words."""
        load = min(load, ready) + facts.waiting / SLOTS
        wanted = max(math.ceil(load / (0.875 * self.settings.busy) - 1e-9), ready + 1)
        return min(wanted, 2 * ready, self.bounds.max)
