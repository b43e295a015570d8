"""What the clients of `./build bench prefix` ask: conversations that grow, prompts that share much, and none that do.

Prompts differ from one salt to another in their first words, so no subject finds what another has left in a cache.
"""

import random

import attrs

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system"
).split()
NOISE_MAX = 90
"""Requests among the conversations that share nothing: a fifth of all."""


@attrs.define
class Conversation:
    """One client's messages, up to its next question. A conversation of one turn is a single request."""

    messages: list[dict]
    turns: int
    rng: random.Random
    turn: int = 0

    def has_next(self):
        return self.turn + 1 < self.turns

    def go_on(self, answer):
        """Take the answer, and ask the next question."""
        self.messages = [
            *self.messages,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"turn {self.turn} {text(self.rng, 20)}"},
        ]
        self.turn += 1


def text(rng, count):
    return " ".join(rng.choice(WORDS) for _ in range(count))


def conversation(system, user, turns=1):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return Conversation(messages, turns, random.Random(user))


def conversations(salt, seed, *, count=64, turns=6):
    """64 conversations of 6 turns over 4 system prompts, all open at once, and single requests among them.

    Between two turns of one come turns of all the others. Two caches of 700 blocks of 32 tokens hold all of it where
    each conversation stays with one worker, and half of it otherwise.
    """
    rng = random.Random(seed)
    systems = [f"{salt} system {number}. {text(rng, 120)}" for number in range(4)]
    found = [conversation(systems[n % 4], f"conversation {n} {text(rng, 80)}", turns) for n in range(count)]
    found += [conversation(f"{salt} noise {n} {text(rng, 150)}", "go") for n in range(NOISE_MAX)]
    rng.shuffle(found)
    return found


def hot(salt, seed):
    """One long prefix for all requests."""
    rng = random.Random(seed)
    system = f"{salt} hot. {text(rng, 400)}"
    return [conversation(system, f"{n} {text(rng, 15)}") for n in range(240)]


def none(salt, seed):
    """Long prompts that have nothing in common."""
    rng = random.Random(seed)
    return [conversation(f"{salt} {n} {text(rng, 180)}", "go") for n in range(240)]


def short(salt, seed):
    """Many prompts of fewer than 256 bytes."""
    rng = random.Random(seed)
    return [Conversation([{"role": "user", "content": f"{salt} {n} {text(rng, 12)}"}], 1, rng) for n in range(480)]


def restart(salt, seed):
    """Conversations that are open while a worker dies and comes back."""
    return conversations(f"{salt} restart", seed, count=48, turns=7)


SCENARIOS = {"conversations": conversations, "hot": hot, "none": none, "short": short, "restart": restart}
