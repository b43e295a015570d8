"""Prompts of a known number of tokens, of which no two begin alike.

A prompt is a list of common words in a random order. All prompts of a run have the same words, so they have the same
number of tokens in every tokenizer that splits at blanks. Their order differs from the first word on, so a prefix
cache has no more of them than the model's chat template and `START`.
"""

import json
import random
from collections.abc import Callable

from ichat.cli.bench.figures import BenchPlan
from ichat.cli.client import Api, RequestRefused
from ichat.cli.json_values import Json, object_of
from ichat.cli.screen import note
from ichat.errors import EXIT_USAGE, Exit

PATH = "/v1/chat/completions"
FULL_LENGTH: Json = {"ignore_eos": True, "temperature": 0}
"""Has vLLM and SGLang answer with exactly as many tokens as are allowed; other servers may refuse it."""

START = "Words:"
"""Every prompt begins so: the words then all have a blank before them, and always the same tokens."""
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law
"""
WORDS = tuple(_TEXT.split())
FIRST_PROBE = len(WORDS)
"""Words of the first prompt by which the server's tokens are counted; the second has twice as many."""

Count = Callable[[int], int | None]
"""Returns the tokens of a prompt with this number of words, by the server's count; None: it counts none."""


class Prompts:
    """Makes the prompts of a run."""

    def __init__(self, words: int, shared_words: int = 0, seed: int | None = None) -> None:
        """The first `shared_words` of the words stand in the same order in all prompts; without a seed it is random."""
        self._random = random.Random(seed)
        found = [WORDS[number % len(WORDS)] for number in range(words)]
        self._random.shuffle(found)
        self._shared, self._words = found[:shared_words], found[shared_words:]

    def __repr__(self) -> str:
        return f"<Prompts of {len(self._shared) + len(self._words)} words>"

    def next(self) -> str:
        """Return another prompt."""
        self._random.shuffle(self._words)
        return " ".join([START, *self._shared, *self._words])


def words_for(tokens: int, count: Count) -> tuple[int, float] | None:
    """Return the words of a prompt that has this many tokens, and the tokens of a word; None if they are not counted.

    The server counts three prompts: two of them show the tokens of a word and of all that surrounds the prompt, and
    the third is the result, once corrected. Raises ValueError if all that surrounds a prompt has more tokens.
    """
    first, second = count(FIRST_PROBE), count(2 * FIRST_PROBE)
    if first is None or second is None or second <= first:
        return None
    per_word = (second - first) / FIRST_PROBE
    around = first - per_word * FIRST_PROBE
    words = round((tokens - around) / per_word)
    if words < 1:
        raise ValueError(f"a prompt of a single word has {around + per_word:.0f} tokens with the model's chat template")
    found = count(words)
    return (words if found is None else max(1, words + round((tokens - found) / per_word))), per_word


def bodies_for(api: Api, plan: BenchPlan) -> Callable[[], bytes]:
    """Return a function that returns the body of another request each time. Raises Exit.

    The server is asked some questions before. They show whether the model answers at all, load a model on demand, and
    show which fields the server accepts and how it counts tokens.
    """
    more = _accepted_fields(api, plan)
    prompts = _fitted(api, plan, more)
    fields: Json = {"model": plan.model, "max_tokens": plan.output_tokens, "stream": True, **more}

    def next_body() -> bytes:
        asks = {"stream_options": {"include_usage": True}, "messages": _messages(prompts.next())}
        return json.dumps({**fields, **asks}).encode()

    return next_body


def _accepted_fields(api: Api, plan: BenchPlan) -> Json:
    """Return the fields that make answers as long as they may be, if the server accepts them. Raises Exit."""
    try:
        _ask_once(api, plan, "Hello", FULL_LENGTH)
    except RequestRefused as refusal:
        if refusal.status not in (400, 422):
            raise
        _ask_once(api, plan, "Hello", {})
        note("The server accepts no `ignore_eos`: answers may be shorter than --output.")
        return {}
    return FULL_LENGTH


def _fitted(api: Api, plan: BenchPlan, more: Json) -> Prompts:
    """Return prompts with as many tokens as the plan says, by the server's count. Raises Exit."""

    def count(words: int) -> int | None:
        answer = _ask_once(api, plan, Prompts(words).next(), more)
        found = object_of(answer.get("usage")).get("prompt_tokens")
        return found if isinstance(found, int) else None

    try:
        fitted = words_for(plan.input_tokens, count)
    except ValueError as error:
        raise Exit(EXIT_USAGE, f"ichat.pyz bench: --input {plan.input_tokens} is too few: {error}.") from error
    words, per_word = (plan.input_tokens, 1.0) if fitted is None else fitted
    return Prompts(words, min(words, round(plan.shared_prefix / per_word)))


def _ask_once(api: Api, plan: BenchPlan, prompt: str, more: Json) -> Json:
    """Return the answer of a single token to a prompt. Raises Exit."""
    body: Json = {"model": plan.model, "messages": _messages(prompt), "max_tokens": 1, **more}
    return api.call("POST", PATH, body=body, answer_s=plan.timeout_s).value


def _messages(prompt: str) -> list[Json]:
    return [{"role": "user", "content": prompt}]
