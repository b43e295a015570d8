"""The clients of a run of chaos: what they ask, and whether what they got is right.

What the fake engine answers follows from the request, so a response is compared with all of what it must be. Of real
engines, whose text depends on what else they compute, the length that was asked for is compared. Everything else must
be a clear error, or visibly incomplete.
"""

import collections
import hashlib
import json
import random
import re

import attrs
import trio
from chaos_site import BODY_BYTES_MAX, HEAD_S
from chaos_wire import BRISK, Connection, Pace, Reply, written

LIMIT_S = 120.0
"""By when any request has come to an end: the sum of the timeouts that it may meet, and a machine that stands still."""
VIOLATIONS_MAX = 200
CODES = {
    400: {"bad_request"},
    404: {"model_not_found", "not_found"},
    405: {"method_not_allowed"},
    408: {"request_timeout"},
    413: {"request_too_large"},
    429: {"rate_limited", "overloaded"},
    431: {"head_too_large"},
    500: {"engine_failed"},
    502: {"upstream_unreachable", "upstream_failed"},
    503: {"model_not_ready", "draining", "overloaded"},
    504: {"upstream_timeout"},
}
"""Every error that a client may see here; `internal_error` is a bug and never among them."""
FAULTY = {429, 500, 502, 503, 504}
"""What a request may be answered with whose worker is being broken; so many of them wait for its restart."""
COMMENTS = re.compile(rb"(: [^\n]*\n\n)+")
"""What a stream says while it waits for a worker, before everything else."""
MAY_FAIL = {
    "calm": set(),
    "twin": FAULTY,
    "embed": FAULTY,
    "narrow": FAULTY,
    "far": FAULTY | {404},  # a worker that said good-bye is not known any more
    "guest": FAULTY | {404},
    "extra": FAULTY | {404},
    "broken": FAULTY | {404},
}
ERROR_EVENT = b'data: {"error": '


class Wrong(Exception):
    """A response that must not be."""


@attrs.frozen
class Sent:
    """What the client knows of one request, to be compared with what the gateway has written down of it."""

    counted: str
    """`yes`: the gateway has seen it whole; `no`: it cannot have; `maybe`: the client left before it could know."""
    status: int = 0
    """Of the response; 0 where the client saw none."""
    has_left: bool = False
    """Whether the client left without waiting for the end."""


@attrs.define
class Ledger:
    """All that happened."""

    seed: int
    began: float = attrs.field(factory=trio.current_time)
    outcomes: collections.Counter = attrs.field(factory=collections.Counter)
    faults: collections.Counter = attrs.field(factory=collections.Counter)
    sent: dict = attrs.field(factory=dict)
    violations: list = attrs.field(factory=list)
    open: int = 0

    def wrong(self, text):
        """Note a violation, and say so at once."""
        sentence = f"VIOLATION seed={self.seed} t={trio.current_time() - self.began:.1f} s: {text}"
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(sentence)
            print(sentence, flush=True)

    def count(self, kind, outcome):
        self.outcomes[kind, outcome] += 1


def error_of(status, body):
    """Return the code of an error in OpenAI's form. Raises Wrong where it is none, or one that must not be."""
    try:
        error = json.loads(body)["error"]
        message, kind, code = error["message"], error["type"], error["code"]
        is_whole = set(error) == {"message", "type", "param", "code"} and message and isinstance(message, str)
    except (ValueError, KeyError, TypeError):
        raise Wrong(f"{status} without an error of OpenAI's form: {body[:300]!r}") from None
    expected = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    if not is_whole or (status and kind != expected):
        raise Wrong(f"{status} with an odd error: {body[:300]!r}")
    if code not in (CODES.get(status, ()) if status else set().union(*CODES.values())):
        raise Wrong(f"{status} with the code {code!r}: {message}")
    return code


def judge_error(reply, may_be):
    """Return the outcome of a response that is an error. Raises Wrong."""
    if reply.end != "whole":
        raise Wrong(f"an error of which only a part came: {reply}")
    code = error_of(reply.status, reply.body)
    if reply.status not in may_be:
        raise Wrong(f"{reply.status} {code} where only {sorted(may_be) or 'success'} may be: {reply.body[:300]!r}")
    if b"x-ichat-error" not in reply.headers and reply.status not in (500, 502):
        raise Wrong(f"{reply.status} {code} does not say who made it: {reply.headers}")
    if reply.status in (429, 503) and b"retry-after" not in reply.headers:
        raise Wrong(f"{reply.status} {code} does not say when to come back: {reply.headers}")
    return f"{reply.status} {code}"


def judge(reply, whole, may_be):
    """Return the outcome of one response: `right`, an error's, or `broken off`. Raises Wrong.

    `whole` says whether a body is all of the right one, or, where its second argument is set, the beginning of it.
    """
    if reply.end == "nothing":
        raise Wrong("the connection ended without a byte of response")
    if reply.status != 200:
        return judge_error(reply, may_be)
    comments = COMMENTS.match(reply.body)
    if comments and reply.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        reply = attrs.evolve(reply, body=reply.body[comments.end() :])
    if reply.end == "whole" and whole(reply.body, False):
        return "right"
    if not may_be:
        raise Wrong(f"not whole, though nothing was done to its worker: {_shown(reply)}")
    if reply.end in ("broken", "left"):
        before = reply.body.partition(ERROR_EVENT)[0]
        if not (whole(before, True) or whole(before.removesuffix(b"\n\n"), True)):
            raise Wrong(f"broken off, and wrong before that: {_shown(reply)}")
        return "broken off"
    before, mark, event = reply.body.partition(ERROR_EVENT)
    is_stream = reply.headers.get(b"content-type", b"").startswith(b"text/event-stream")
    if not mark or not is_stream or b"[DONE]" in reply.body:
        raise Wrong(f"looks whole and is not right: {_shown(reply)}")
    if not (whole(before, True) or whole(before.removesuffix(b"\n\n"), True)):
        raise Wrong(f"ended by an error, and wrong before that: {_shown(reply)}")
    code = error_of(0, b'{"error": ' + event.removesuffix(b"\n\n"))
    return f"cut by {code}"


def _shown(reply):
    body = reply.body
    return f"{reply.status} {reply.end}, {len(body)} bytes: {body[:120]!r} … {body[-200:]!r}"


@attrs.frozen
class Question:
    """A request that deserves an answer: its JSON, and what tells whether a body is the right one."""

    path: str
    body: dict
    whole: object


class FakeAnswers:
    """Questions to the fake engine."""

    def plain(self, rng, model, size=0):
        """A whole response; `size` is that of the request, in bytes."""
        body = {"model": model, "digest": True, "say": f"{rng.random()} ", "times": rng.randrange(1, 50)}
        body |= {"wait_s": rng.choice([0, 0, 0.05, 0.3]), "messages": [{"role": "user", "content": "x" * size}]}
        return Question("/v1/chat/completions", body, _exactly(_answer_to, body))

    def large_answer(self, rng, model):
        body = {"model": model, "digest": True, "say": f"{rng.random():.6f}", "times": rng.randrange(20_000, 200_000)}
        return Question("/v1/chat/completions", body, _exactly(_answer_to, body))

    def embeddings(self, rng, model):
        body = {"model": model, "digest": True, "input": [f"{rng.random()}"] * rng.randrange(1, 9)}
        return Question("/v1/embeddings", body, _exactly(_answer_to, body))

    def stream(self, rng, model, events=None, gap_s=None, pad=0):
        events = events or rng.randrange(1, 30)
        body = {"model": model, "stream": True, "events": events, "seed": rng.randrange(1 << 30)}
        body |= {"gap_s": rng.choice([0, 0.01, 0.05]) if gap_s is None else gap_s, "pad": pad}
        return Question("/v1/chat/completions", body, _exactly(_events_of, body))


def _answer_to(body):
    """Write what the fake engine answers to this."""
    content = body.get("say", "hello") * body.get("times", 1)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    answer = {"choices": [{"message": {"content": content}}], "model": body["model"], "digest": digest}
    return json.dumps(answer).encode()


def _events_of(body):
    pad = {"pad": "." * body["pad"]} if body["pad"] else {}
    events = [
        {"choices": [{"index": 0, "delta": {"content": f"{number} "}}], "seed": body["seed"], **pad}
        for number in range(body["events"])
    ]
    return b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


def _exactly(expect, body):
    """Compare with what is expected for a body, which is made when it is needed."""
    return lambda data, is_part: expect(body).startswith(data) if is_part else expect(body) == data


class RealAnswers:
    """Questions to a real engine: as many tokens as were asked for are right."""

    def plain(self, rng, model, size=0):
        body = self._body(rng, model, 16)
        body["messages"].append({"role": "user", "content": "word " * min(size // 5, 100)})
        body |= {"x_ignored": "x" * size}

        def whole(data, is_part):
            if is_part:
                return True
            return _tokens_of(data) == body["max_tokens"]

        return Question("/v1/chat/completions", body, whole)

    large_answer = embeddings = plain

    def stream(self, rng, model, events=None, gap_s=None, pad=0):
        body = self._body(rng, model, 100 if events and events > 50 else 20)
        body |= {"stream": True, "stream_options": {"include_usage": True}}

        def whole(data, is_part):
            if is_part:
                return b"[DONE]" not in data
            events = re.findall(rb"(?m)^data: (.*)$", data)
            if data.count(b"[DONE]") != 1 or events[-1:] != [b"[DONE]"]:
                return False
            return len(events) > 1 and _tokens_of(events[-2]) == body["max_tokens"]

        return Question("/v1/chat/completions", body, whole)

    def _body(self, rng, model, tokens):
        messages = [{"role": "user", "content": f"Tell me {rng.random()}."}]
        return {"model": model, "messages": messages, "max_tokens": rng.randrange(1, tokens), "ignore_eos": True}


def _tokens_of(data):
    """Return how many tokens an answer, or the last event of a stream, says that it has; None where it says nothing."""
    try:
        return json.loads(data)["usage"]["completion_tokens"]
    except (ValueError, KeyError, TypeError):
        return None


# Requests that cannot be right: what is sent, the answer to it, and whether the gateway has a request then.
BAD = {
    "no JSON": (written("POST", "/v1/completions", b"{"), "400 bad_request", "yes"),
    "an array": (written("POST", "/v1/completions", b"[]"), "400 bad_request", "yes"),
    "no model": (written("POST", "/v1/completions", {"prompt": "x"}), "400 bad_request", "yes"),
    "a number as model": (written("POST", "/v1/completions", {"model": 1}), "400 bad_request", "yes"),
    "no such model": (written("POST", "/v1/completions", {"model": "nobody"}), "404 model_not_found", "yes"),
    "no body": (written("POST", "/v1/embeddings", b""), "400 bad_request", "yes"),
    "dots": (written("POST", "/v1/x/../y", {"model": "calm"}), "400 bad_request", "yes"),
    "wrong method": (written("GET", "/v1/chat/completions"), "405 method_not_allowed", "apart"),
    "no such route": (written("POST", "/nowhere", {"model": "calm"}), "404 not_found", "apart"),
    "no such worker": (written("DELETE", "/v1/admin/workers/nobody"), "404 not_found", "apart"),
    "two lengths": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        "400 bad_request",
        "no",
    ),
    "too large": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (BODY_BYTES_MAX + 1),
        "413 request_too_large",
        "no",
    ),
    "large head": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-much: %b\r\ncontent-length: 2\r\n\r\n{}"
        % (b"x" * 70_000),
        "431 head_too_large",
        "no",
    ),
    "no HTTP": (b"HELO there\r\n\r\n", "400 bad_request", "no"),
    "HTTP/2": (
        b"POST /v1/completions HTTP/2.0\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}",
        "400 bad_request",
        "no",
    ),
    "no path": (
        b"POST http://x/v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}",
        "400 bad_request",
        "no",
    ),
}
CONTROL = ("/health", "/metrics", "/v1/models", "/v1/models/calm", "/v1/admin/workers", "/v1/admin/cluster/status")


class Clients:
    """Clients that ask without end, each one thing after the other."""

    def __init__(self, site, ledger, *, pause_s, until):
        """`until` is the time (Trio's clock) at which the load stops; nothing that lasts begins shortly before it."""
        self._site = site
        self._ledger = ledger
        self._pause_s = pause_s
        self._until = until
        self._answers = FakeAnswers() if site.backend == "fake" else RealAnswers()
        self._models = (
            ["calm", "twin", "narrow", "far", "guest", "extra"] if site.backend == "fake" else ["calm", "twin"]
        )
        self._weights = [4, 6, 4, 5, 1, 1][: len(self._models)]
        self._acts = {
            "plain": (self._plain, 20), "stream": (self._stream, 20), "long stream": (self._long_stream, 4),
            "large body": (self._large_body, 4), "large answer": (self._large_answer, 3),
            "embeddings": (self._embeddings, 6), "bad": (self._bad, 12), "control": (self._control, 4),
            "slow reader": (self._slow_reader, 3), "left": (self._leave, 14), "half sent": (self._half, 5),
            "pipelined": (self._pipelined, 4), "HTTP/1.0": (self._old, 4), "kept": (self._kept, 6),
            "expect": (self._expect, 2), "hogs": (self._hogs, 2),
        }  # fmt: skip

    async def ask_on(self, number):
        """Be one client, until the load stops."""
        kinds, weights = list(self._acts), [weight for _, weight in self._acts.values()]
        asked = 0
        while trio.current_time() < self._until:
            asked += 1
            rng = random.Random(f"{self._ledger.seed}/{number}/{asked}")
            kind = rng.choices(kinds, weights)[0]
            await self._act(kind, rng, f"c{number}-{asked}")
            await trio.sleep(rng.expovariate(1 / self._pause_s))

    async def _act(self, kind, rng, id_):
        ledger = self._ledger
        ledger.open += 1
        try:
            with trio.move_on_after(LIMIT_S) as scope:
                ledger.count(kind, await self._acts[kind][0](rng, id_))
            if scope.cancelled_caught:
                ledger.wrong(f"{kind} {id_}: no end within {LIMIT_S:g} s")
        except Wrong as wrong:
            ledger.wrong(f"{kind} {id_}: {wrong}")
        except OSError as error:
            ledger.wrong(f"{kind} {id_}: the gateway lets nobody in: {error}")
        finally:
            ledger.open -= 1

    def _left_s(self):
        return self._until - trio.current_time()

    def _model(self, rng):
        return rng.choices(self._models, self._weights)[0]

    def _written(self, question, id_, rng, version="1.1"):
        headers = [f"x-request-id: {id_}"]
        if rng.random() < 0.2:
            headers.append(f"x-session-id: {rng.randrange(50)}")
        return written("POST", question.path, question.body, headers, version)

    async def _ask(self, connection, question, rng, id_, pace=BRISK, version="1.1"):
        """Ask one question and judge its answer."""
        await connection.send(self._written(question, id_, rng, version))
        reply = await connection.reply(pace)
        return self._judged(question, reply, id_)

    def _judged(self, question, reply, id_):
        self._ledger.sent[id_] = Sent("yes" if reply.status else "maybe", reply.status)
        if reply.status and reply.id != id_:
            raise Wrong(f"the answer is that of the request {reply.id}: {_shown(reply)}")
        try:
            return judge(reply, question.whole, MAY_FAIL[question.body["model"]])
        except Wrong as wrong:
            raise Wrong(f"{question.body['model']}: {wrong}") from None

    async def _alone(self, question, rng, id_, pace=BRISK, **options):
        async with await Connection.open(self._site.port, **options) as connection:
            return await self._ask(connection, question, rng, id_, pace)

    async def _plain(self, rng, id_):
        return await self._alone(self._answers.plain(rng, self._model(rng)), rng, id_)

    async def _stream(self, rng, id_):
        return await self._alone(self._answers.stream(rng, self._model(rng)), rng, id_)

    async def _long_stream(self, rng, id_):
        events = max(1, min(200, int(self._left_s() / 0.1)))
        return await self._alone(self._answers.stream(rng, self._model(rng), events, 0.1), rng, id_)

    async def _large_body(self, rng, id_):
        size = rng.randrange(100_000, BODY_BYTES_MAX - 10_000)
        return await self._alone(self._answers.plain(rng, self._model(rng), size), rng, id_)

    async def _large_answer(self, rng, id_):
        return await self._alone(self._answers.large_answer(rng, self._model(rng)), rng, id_)

    async def _embeddings(self, rng, id_):
        model = "embed" if self._site.backend == "fake" else self._model(rng)
        return await self._alone(self._answers.embeddings(rng, model), rng, id_)

    async def _slow_reader(self, rng, id_):
        """Reads less than the worker writes: nothing is lost for that."""
        question = self._answers.stream(rng, self._model(rng), 150, 0, pad=10_000)
        return await self._alone(question, rng, id_, Pace(40_000, 0.05), receive_bytes=16_384)

    async def _kept(self, rng, id_):
        """Several requests on one connection, and on the next if the gateway ends that."""
        outcome = ""
        connection = await Connection.open(self._site.port)
        try:
            for number in range(rng.randrange(2, 8)):
                if connection.is_over:
                    await connection.stream.aclose()
                    connection = await Connection.open(self._site.port)
                make = rng.choice([self._answers.plain, self._answers.stream])
                outcome = await self._ask(connection, make(rng, self._model(rng)), rng, f"{id_}-{number}")
                if outcome.startswith(("broken", "cut")):
                    break
                await trio.sleep(rng.random() * 0.2)
        finally:
            await connection.stream.aclose()
        return outcome

    async def _pipelined(self, rng, id_):
        """Two requests in one piece, answered in their order."""
        questions = [self._answers.plain(rng, self._model(rng)), self._answers.stream(rng, self._model(rng))]
        ids = [f"{id_}-{number}" for number in range(2)]
        async with await Connection.open(self._site.port) as connection:
            await connection.send(
                b"".join(self._written(one, own, rng) for one, own in zip(questions, ids, strict=True))
            )
            outcome = self._judged(questions[0], await connection.reply(), ids[0])
            if outcome == "broken off":
                return outcome
            if connection.is_over:
                self._ledger.sent[ids[1]] = Sent("maybe")
                return outcome
            return self._judged(questions[1], await connection.reply(), ids[1])

    async def _old(self, rng, id_):
        """HTTP/1.0, as nginx speaks it by default."""
        question = rng.choice([self._answers.plain, self._answers.stream])(rng, self._model(rng))
        async with await Connection.open(self._site.port) as connection:
            return await self._ask(connection, question, rng, id_, version="1.0")

    async def _expect(self, rng, id_):
        """Sends the body only when it is asked for."""
        question = self._answers.plain(rng, self._model(rng), 50_000)
        data = written("POST", question.path, question.body, [f"x-request-id: {id_}", "expect: 100-continue"])
        head, _, body = data.partition(b"\r\n\r\n")
        async with await Connection.open(self._site.port) as connection:
            await connection.send(head + b"\r\n\r\n")
            if not (await connection.stream.receive_some(1000)).startswith(b"HTTP/1.1 100"):
                raise Wrong("nobody asked for the body")
            await connection.send(body)
            return self._judged(question, await connection.reply(), id_)

    async def _hogs(self, rng, id_):
        """More at once than `narrow` has room for: some wait, some are refused."""
        outcomes = []

        async def ask(number):
            own = random.Random(f"{id_}-{number}")
            question = self._answers.plain(own, "narrow" if self._site.backend == "fake" else "twin")
            outcomes.append(await self._alone(question, own, f"{id_}-{number}"))

        async def guarded(number):
            try:
                await ask(number)
            except Wrong as wrong:
                self._ledger.wrong(f"hogs {id_}-{number}: {wrong}")

        async with trio.open_nursery() as nursery:
            for number in range(rng.randrange(4, 14)):
                nursery.start_soon(guarded, number)
        return max(outcomes, default="")

    async def _bad(self, rng, id_):
        name = rng.choice(list(BAD))
        data, expected, counted = BAD[name]
        data = data.replace(b"\r\nhost: localhost", b"\r\nhost: localhost\r\nx-request-id: " + id_.encode(), 1)
        async with await Connection.open(self._site.port) as connection:
            await connection.send(data)
            reply = await connection.reply(method=data.split(b" ")[0] if counted == "apart" else b"POST")
        self._ledger.sent[id_] = Sent(counted, reply.status)
        status = int(expected.split()[0])
        if reply.end != "whole" or judge_error(reply, {status}) != expected:
            raise Wrong(f"{name}: expected {expected}, got {_shown(reply)}")
        return expected

    async def _control(self, rng, id_):
        """What operators and monitoring look at is there at any time."""
        path = rng.choice(CONTROL)
        async with await Connection.open(self._site.port) as connection:
            await connection.send(written("GET", path, headers=[f"x-request-id: {id_}"]))
            reply = await connection.reply(method=b"GET")
        self._ledger.sent[id_] = Sent("apart", reply.status)
        if (reply.status, reply.end) != (200, "whole"):
            raise Wrong(f"{path}: {_shown(reply)}")
        return "right"

    async def _leave(self, rng, id_):
        """Go away in any phase, politely or not."""
        model = rng.choice(["narrow", self._model(rng)]) if self._site.backend == "fake" else self._model(rng)
        phase = rng.choice(["before the body", "in the body", "at once", "soon", "in the stream", "unread"])
        question = self._answers.stream(rng, model, 300, 0.02, pad=rng.choice([0, 0, 20_000]))
        data = self._written(question, id_, rng)
        head = data.index(b"\r\n\r\n") + 4
        counted, reply = "maybe", Reply()
        connection = await Connection.open(self._site.port)
        try:
            if phase in ("before the body", "in the body"):
                counted = "no"
                await connection.send(data[: head + (len(data) - head) // 2 * (phase == "in the body")])
            else:
                await connection.send(data)
            if phase in ("soon", "unread"):
                await trio.sleep(rng.random() * 2)
            elif phase == "in the stream":
                reply = await connection.reply(Pace(stop_after=rng.randrange(1, 5000)))
                counted = "yes" if reply.status else "maybe"
        finally:
            if rng.random() < 0.5:
                connection.reset()
            else:
                await connection.stream.aclose()
        self._ledger.sent[id_] = Sent(counted, reply.status, has_left=True)
        if reply.status and reply.end != "left":
            judge(reply, question.whole, MAY_FAIL[model])
        return phase

    async def _half(self, rng, id_):
        """Send half of a request, and wait: for its end where there is time for it."""
        data = self._written(self._answers.plain(rng, "calm"), id_, rng)
        waits = self._left_s() > HEAD_S + 10 and rng.random() < 0.3
        self._ledger.sent[id_] = Sent("no")
        connection = await Connection.open(self._site.port)
        try:
            await connection.send(data[: rng.randrange(1, len(data) - 1)])
            if not waits:
                await trio.sleep(rng.random() * min(3, max(0.1, self._left_s())))
                return "left"
            reply = await connection.reply()
        finally:
            await connection.stream.aclose()
        if judge_error(reply, {408}) != "408 request_timeout":
            raise Wrong(f"half of a request: {_shown(reply)}")
        return "408 request_timeout"
