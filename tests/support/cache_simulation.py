"""Simulated workers, each with a cache of blocks as engines have it, behind the real balancer, in virtual time."""

import collections
import heapq
import random

import attrs

from ichat.config.schema import Routing
from ichat.http.pool import Upstream
from ichat.routing.availability import Ready
from ichat.routing.balancer import Balancer
from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_chain import chain_of, sums_of
from ichat.routing.request import Lease, RoutingRequest

BLOCK_BYTES = 128
"""A block of 32 tokens of four bytes."""
PREFILL_S = 0.004
"""A worker computes a block of a prompt in this time, one after the other."""
DECODE_S = 0.25
"""A response takes so long alone; each other one in progress at the worker makes it a sixth longer."""
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand"
    " part place case week company system"
).split()


def text(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words))


def said(role, content):
    return f'{{"role": "{role}", "content": "{content}"}}'.encode()


def conversation(rng, system, turns, user_words=20, first_words=80, answer_words=12):
    """Return the prompts of a conversation's turns: each has all that was said before."""
    messages, prompts = [said("system", system)], []
    for turn in range(turns):
        messages.append(said("user", text(rng, first_words if not turn else user_words)))
        prompts.append(b", ".join(messages))
        messages.append(said("assistant", text(rng, answer_words)))
    return prompts


class BlockCache:
    """The blocks that fit, the least recently used ones evicted; a block counts only behind all those before it."""

    def __init__(self, blocks_max):
        self._blocks_max = blocks_max
        self._blocks = collections.OrderedDict()

    def clear(self):
        self._blocks.clear()

    def serve(self, prompt):
        """Return how many blocks of a prompt were there, and how many it has; all of them are there afterwards."""
        keys, key = [], 0
        for at in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
            key = hash((key, prompt[at : at + BLOCK_BYTES]))
            keys.append(key)
        hits = 0
        while hits < len(keys) and keys[hits] in self._blocks:
            hits += 1
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)
        return hits, len(keys)


@attrs.define
class Outcome:
    """What became of the requests."""

    hits: int = 0
    ideal_hits: int = 0
    """What one infinite cache would have had."""
    blocks: int = 0
    counts: collections.Counter = attrs.Factory(collections.Counter)
    """Requests by endpoint."""
    first_tokens_s: list = attrs.Factory(list)
    """How long each request had to wait until its prompt was computed."""
    seconds: float = 0.0
    in_flight_most: int = 0
    """The most requests that one endpoint had at a time."""

    @property
    def hit(self):
        return self.hits / max(1, self.blocks)

    @property
    def ideal(self):
        return self.ideal_hits / max(1, self.blocks)

    @property
    def spread(self):
        """The requests of the busiest endpoint, by those of the idlest."""
        return max(self.counts.values()) / max(1, min(self.counts.values()))

    def first_token_s(self, share):
        return sorted(self.first_tokens_s)[int(share * (len(self.first_tokens_s) - 1))]

    def gained(self, base):
        """Return which share is gained of what another run misses and one infinite cache would not."""
        return (self.hit - base.hit) / (self.ideal - base.hit)


class Simulation:
    """Workers, clients that send the next prompt when the last one is answered, and a clock."""

    def __init__(self, policy="prefix_aware", workers=16, blocks=700, in_flight_max=4096, seed=1, speeds=None):
        """`policy` is a name of the configuration, or a policy; `speeds` are of the workers, 1 if not given."""
        self.rng = random.Random(seed)
        random.seed(seed)
        self.now = 1000.0
        self.endpoints = []
        self._caches, self._busy_until, self._speeds = {}, {}, {}
        for number in range(workers):
            bound = in_flight_max[number] if isinstance(in_flight_max, list) else in_flight_max
            self.add_worker(blocks, bound, speeds[number] if speeds else 1.0)
        self.found = Ready(list(self.endpoints))
        is_name = isinstance(policy, str)
        settings = Routing(policy=policy if is_name else "prefix_aware", queue_max=100_000)
        self.balancer = Balancer(lambda model: self.found, lambda: self.now, settings)
        if not is_name:
            self.balancer._policy = policy
        self._infinite = BlockCache(10**9)
        self._events, self._sequence = [], 0
        self.outcome = Outcome()

    def add_worker(self, blocks=700, in_flight_max=4096, speed=1.0):
        """Return a further endpoint; it gets requests when it is among those found."""
        name = f"w{len(self.endpoints)}"
        endpoint = Endpoint(Upstream(name, name, 1), name.encode(), in_flight_max)
        self.endpoints.append(endpoint)
        self._caches[endpoint] = BlockCache(blocks)
        self._busy_until[endpoint], self._speeds[endpoint] = 0.0, speed
        return endpoint

    def set_ready(self, endpoints):
        """Let these endpoints be all that are found."""
        self.found = Ready(list(endpoints))
        self.balancer.dispatch_waiting()

    def restart(self, endpoint):
        """Let a worker begin anew, with an empty cache."""
        self._caches[endpoint].clear()
        endpoint.begin()
        endpoint.ready_since = self.now

    def at(self, seconds, what):
        """Call something so many seconds after the beginning."""
        self._push(1000.0 + seconds, what)

    def _push(self, when, what):
        self._sequence += 1
        heapq.heappush(self._events, (when, self._sequence, what))

    def run(self, conversations, at_once=8, pause_s=0.0, seconds=1e9):
        """Send the prompts of conversations, so many of them at a time, and return the outcome.

        A conversation that goes on stands at the end of the line, so turns of different ones mix.
        """
        line = collections.deque((list(prompts), 0) for prompts in conversations)
        free = at_once

        def begin():
            nonlocal free
            while free and line:
                free -= 1
                self._ask(*line.popleft(), answered)

        def answered(prompts, turn):
            nonlocal free
            free += 1
            if turn + 1 < len(prompts):
                if pause_s:
                    self._push(self.now + pause_s, lambda: (line.append((prompts, turn + 1)), begin()))
                else:
                    line.append((prompts, turn + 1))
            begin()

        begin()
        while self._events and self._events[0][0] <= 1000.0 + seconds:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        self.outcome.seconds = self.now - 1000.0
        for endpoint in self.found.endpoints:
            self.outcome.counts[endpoint] += 0
        return self.outcome

    def _ask(self, prompts, turn, answered):
        body = b'{"messages": [%b], "model": "m", "stream": true}' % prompts[turn]
        chain = chain_of(sums_of(b"/v1/chat/completions", body, ("messages", "model", "stream")), "m")
        request, asked_at = RoutingRequest("m", prefix=chain), self.now
        lease = self.balancer.lease(request)
        if isinstance(lease, Lease):
            self._serve(lease, prompts, turn, asked_at, answered)
        else:
            waiter = self.balancer.wait(
                request,
                lambda: self._push(self.now, lambda: self._serve(waiter.lease, prompts, turn, asked_at, answered)),
            )

    def _serve(self, lease, prompts, turn, asked_at, answered):
        endpoint, outcome = lease.endpoint, self.outcome
        hits, blocks = self._caches[endpoint].serve(prompts[turn])
        outcome.hits += hits
        outcome.blocks += blocks
        outcome.ideal_hits += self._infinite.serve(prompts[turn])[0]
        outcome.counts[endpoint] += 1
        outcome.in_flight_most = max(outcome.in_flight_most, endpoint.in_flight)
        speed = self._speeds[endpoint]
        begins = max(self.now, self._busy_until[endpoint])
        first_token_at = self._busy_until[endpoint] = begins + (blocks - hits) * PREFILL_S / speed
        outcome.first_tokens_s.append(first_token_at - asked_at)
        decode_s = DECODE_S / speed * (1 + endpoint.in_flight / 6) * self.rng.uniform(0.8, 1.2)

        def end():
            lease.release()
            answered(prompts, turn)

        self._push(first_token_at + decode_s, end)
