"""A client that vanishes, in every phase of its request: from its socket to the abort in a real engine.

Twenty clients leave at once, every other one by a reset. What counts is the engine's own word for how many requests it
has, and the gateway's: both are again what they were. Where the environment has ICHAT_WRITE_TABLES=1, that must be so
within a second, and what is measured becomes the table in docs/performance.md.
"""

import asyncio
import contextlib
import contextvars
import itertools
import json
import os
import re
import socket
import struct
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import psutil
import pytest
from support.leaving_site import LONG, TOKENS
from support.programs import LIMIT_S, ROOT
from support.real_engines import ENGINES, LOAD_S, send

from ichat.engines.asgi import Call
from ichat.engines.sglang.calls import abort_at_once
from ichat.http.request import Request

TRIES = 20
WITHIN_S = 1.0
WRITES = os.environ.get("ICHAT_WRITE_TABLES") == "1"
CALM_S = 0.5
"""How long the counts must stay what they were before they are believed."""
KINDS = ("stream", "plain")
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
ROWS = {
    "queued": "in the model's queue",
    "connecting": "while a connection to the upstream is made",
    "waiting": "sent, the worker has not answered",
    "first_token": "the stream has its head, no token yet",
    "streaming": "in the middle of the stream",
    "plain": "in the middle of a plain answer's generation",
}
CELLS = {(row, kind) for row in ("queued", "connecting", "waiting") for kind in KINDS}
CELLS |= {("first_token", "stream"), ("streaming", "stream"), ("plain", "plain")}
DOCUMENT = ROOT / "docs/performance.md"
MARKED = re.compile(r"(?<=<!-- cancellation -->\n).*?(?=<!-- /cancellation -->)", re.DOTALL)
FIGURES = {}
"""By row, engine and kind: the seconds from the first leaving until all was as before."""
EARLY = "as waiting"
"""What a cell says where the head comes with the first token, so that there is no such phase."""

both_kinds = pytest.mark.parametrize("stream", [True, False], ids=KINDS)


class Watch:
    """What is counted before clients leave, and how long it takes until it is so again."""

    def __init__(self, place):
        self.place = place
        place.program.until(lambda: place.connecting() == 0)
        self.counts = self._counts()
        self.aborts = place.metric("ichat_engine_aborts_total")
        self.cancelled = place.cancelled()

    def _counts(self):
        return self.place.running(), self.place.at_gateway()

    def settle(self, since):
        """Return the seconds until the counts were as before and stayed so; `since` is a time of the place's clock."""
        settled = None
        while settled is None or self.place.now() - settled < CALM_S:
            # or less: what holds a place may come to its end, too
            as_before = all(now <= before for now, before in zip(self._counts(), self.counts, strict=True))
            now = self.place.now()
            assert now - since < LIMIT_S, self._counts()
            if not as_before:
                settled = None
            elif settled is None:
                settled = now
        return settled - since

    def check(self, phase, aborts):
        """The gateway counts each in its phase; the worker an abort for each that the engine had got, and no other."""
        place, expected = self.place, self.cancelled + Counter({phase: TRIES})
        place.program.until(lambda: place.cancelled()[phase] >= expected[phase])
        assert place.cancelled() == expected
        place.program.until(lambda: place.metric("ichat_engine_aborts_total") - self.aborts in aborts)


def leave(place, clients):
    """Close all of them, every other one with a reset, and give the time before the first."""
    began = place.now()
    for number, sock in enumerate(clients):
        if number % 2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    return began


def take_until(sock, end):
    data = b""
    while end not in data:
        more = sock.recv(65536)
        assert more, data
        data += more
    return data


def record(place, row, seconds, *, stream, note=""):
    FIGURES[row, place.engine, "stream" if stream else "plain"] = seconds, note
    assert seconds < WITHIN_S or not WRITES


@contextlib.contextmanager
def stopped(place, process):
    """Keep a process from running; give a function that lets it go on and gives the time."""

    def go_on():
        now = place.now()
        process.resume()
        return now

    process.suspend()
    try:
        yield go_on
    finally:
        process.resume()


@pytest.fixture
def place(one_place):
    """A place where nothing is under way any more."""
    one_place.program.until(lambda: (one_place.running(), one_place.at_gateway(), one_place.at_worker()) == (0, 0, 0))
    return one_place


@both_kinds
def test_in_the_queue(place, stream):
    """Nothing of a request that leaves the queue reaches the engine, and its place is free."""
    with place.ask(model="single", stream=True, n=8) as holder:
        take_until(holder, b"data: ")
        place.program.until(lambda: place.running() == 8)
        with stopped(place, place.scheduler()):  # or its place would be free too soon
            watch = Watch(place)
            clients = [place.ask(model="single", stream=stream) for _ in range(TRIES)]
            place.program.until(lambda: place.at_gateway("queued") == TRIES)
        seconds = watch.settle(leave(place, clients))
        watch.check("queued", [0])
        assert place.at_gateway("queued") == 0
    record(place, "queued", seconds, stream=stream)


@both_kinds
def test_while_connecting(place, stream):
    """The attempts to connect end with their clients: an upstream that accepts afterwards finds none of them."""
    watch = Watch(place)
    clients = [place.ask(model="shut", stream=stream) for _ in range(TRIES)]
    place.program.until(lambda: place.connecting() == TRIES)
    seconds = watch.settle(leave(place, clients))
    watch.check("connecting", [0])
    assert place.connecting() == 0
    record(place, "connecting", seconds, stream=stream)


def test_cancelled_connections_never_reach_the_upstream(place):
    """The upstream that accepted nothing gets the next request, and before it nothing of those that were left."""
    known = {filler.getsockname() for filler in place.fillers}
    place.shut.settimeout(LIMIT_S)
    with place.ask(model="shut", stream=False) as client:
        peer = next(iter(known))
        while peer in known:
            accepted, peer = place.shut.accept()
            with accepted:
                if peer not in known:
                    accepted.settimeout(LIMIT_S)
                    assert json.loads(take_until(accepted, b"}").partition(b"\r\n\r\n")[2])["model"] == "tiny"
                    accepted.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        assert b" 200 " in take_until(client, b"{}")


@both_kinds
def test_before_the_worker_answers(place, stream):
    """The worker is stopped: the gateway lets go at once, and the worker as soon as it runs again."""
    watch = Watch(place)
    with stopped(place, psutil.Process(place.worker()["pid"])) as go_on:
        clients = [place.ask(stream=stream) for _ in range(TRIES)]
        place.wait_for(TRIES)
        leave(place, clients)
        place.program.until(lambda: place.at_gateway() == 0)
        seconds = watch.settle(go_on())
    watch.check("waiting", range(TRIES + 1))  # not all of them may have reached the engine
    record(place, "waiting", seconds, stream=stream)


def test_before_the_first_token(place):
    """The engine's scheduler is stopped: what it finds when it runs again it does not begin."""
    watch = Watch(place)
    head_is_early = place.engine != "sglang"
    with stopped(place, place.scheduler()) as go_on:
        clients = [place.ask(stream=True) for _ in range(TRIES)]
        if head_is_early:
            for sock in clients:
                assert take_until(sock, b"\r\n\r\n").endswith(b"\r\n\r\n")
        else:
            place.program.until(lambda: place.at_worker() == TRIES)
            place.wait_for(TRIES)
        leave(place, clients)
        place.program.until(lambda: place.at_gateway() == 0)
        place.program.until(lambda: place.metric("ichat_engine_aborts_total") - watch.aborts == TRIES)
        seconds = watch.settle(go_on())
    watch.check("first_token" if head_is_early else "waiting", [TRIES])
    record(place, "first_token", seconds, stream=True, note="" if head_is_early else EARLY)


def test_in_the_middle_of_the_stream(place):
    """Streams end in the engine long before they would."""
    watch = Watch(place)
    clients = [place.ask(stream=True) for _ in range(TRIES)]
    for sock in clients:
        take_until(sock, b"data: ")
    place.program.until(lambda: place.running() >= TRIES / 2)  # each has begun; the engine counts by and by
    seconds = watch.settle(leave(place, clients))
    watch.check("streaming", [TRIES])
    record(place, "streaming", seconds, stream=True)


def test_in_the_middle_of_a_plain_request(place):
    """So do requests of which the client would see nothing before their end."""
    watch = Watch(place)
    clients = [place.ask(stream=False) for _ in range(TRIES)]
    place.program.until(lambda: place.running() >= TRIES / 2)  # each has begun; the engine counts by and by
    seconds = watch.settle(leave(place, clients))
    watch.check("waiting", [TRIES])
    record(place, "plain", seconds, stream=False)


def most_running(place, answer, parts):
    """Wait until the engine works on so many parts at once, or the answer is there; return the most that were seen."""
    seen = []
    place.program.until(lambda: seen.append(place.running()) or seen[-1] == parts or answer.done())
    return max(seen)


@both_kinds
def test_every_prompt_and_choice_of_the_request_alone_is_aborted(place, stream):
    """A request of many parts is aborted whole; one that stays has its answer whole."""
    aborts = place.metric("ichat_engine_aborts_total")
    parts = 4 + 2 * 3 * 2
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as held:
        for _ in range(3):  # again, where the engine had done it all before the test looked
            with stopped(place, place.scheduler()):
                body = {"model": "tiny", **LONG, "max_tokens": TOKENS[place.engine], "n": 4}
                staying = pool.submit(httpx.post, f"{place.url}/v1/completions", json=body, timeout=LOAD_S)
                asked = {"stream": stream, "prompt": ["x", "y", "z"], "n": 2}
                clients = [held.enter_context(place.ask(**asked)) for _ in range(2)]
                place.program.until(lambda: place.at_worker() == 3)
            if (most := most_running(place, staying, parts)) == parts:
                break
            place.program.until(lambda: place.running() == 0)
        assert most == parts
        leave(place, clients)
        place.program.until(lambda: place.running() <= 4)  # fewer if what stays has come to its end
        assert staying.result().json()["usage"]["completion_tokens"] == 4 * TOKENS[place.engine]
    place.program.until(lambda: place.metric("ichat_engine_aborts_total") - aborts == 2)


def test_ids_that_begin_alike(place):
    """SGLang's own route takes ids from clients: one that leaves does not end another whose id begins with its own."""
    if place.engine != "sglang":
        pytest.skip("vLLM takes no ids that could begin alike")
    ask = {"text": "x", "sampling_params": {"max_new_tokens": TOKENS["sglang"], "ignore_eos": True}}
    with ThreadPoolExecutor(1) as pool:
        with stopped(place, place.scheduler()):
            body = {**ask, "rid": "story-10"}
            staying = pool.submit(httpx.post, f"{place.worker_url}/generate", json=body, timeout=LOAD_S)
            leaving = send(place.worker()["port"], {**ask, "rid": "story-1"}, "/generate")
            place.program.until(lambda: place.at_worker() == 2)
        place.program.until(lambda: place.running() == 2)
        leaving.close()
        assert staying.result().json()["meta_info"]["completion_tokens"] == TOKENS["sglang"]


class Forgetful:
    """What SGLang's tokenizer manager is to those who ask it for something: it aborts all ids that begin alike."""

    def __init__(self):
        self.rid_to_state = {}
        self.aborted = []

    def _wait_one_response(self, asked):
        assert asked.rid in self.rid_to_state

    def abort_request(self, rid="", *, abort_all=False):
        self.aborted += [known for known in self.rid_to_state if abort_all or known.startswith(rid)]


def test_parts_that_begin_after_the_client_left_are_aborted_at_once():
    """A request may still be prepared when its client leaves: each part is aborted as it begins, and nobody else's."""
    manager = Forgetful()
    abort_at_once(manager)

    def begin(rid):
        asked = manager.rid_to_state[rid] = SimpleNamespace(rid=rid)
        manager._wait_one_response(asked)

    async def app(_, receive, __):
        begin("a_1")
        begin("b")
        while (await receive())["type"] != "http.disconnect":
            pass
        await asyncio.create_task(asyncio.to_thread(begin, "a_2"))  # a task of its own
        manager.abort_request("c")
        manager.abort_request("a_2")

    async def leave_it():
        request = Request(b"POST", b"/", b"/", b"1.1", [], b"{}", b"id", keep_alive=False)
        call = Call(request, None, "", keep_alive=False, stall_s=5, ended=lambda: None)
        begin("b-of-another")
        begin("c-of-another")
        call.start(app, set(), contextvars.copy_context())
        await asyncio.sleep(0.01)
        assert manager.aborted == []
        call.hang_up()
        await call.task
        manager.abort_request("b-of")
        manager.abort_request(abort_all=True)

    asyncio.run(leave_it())
    assert manager.aborted == ["a_1", "a_2", "a_2", *manager.rid_to_state]


def columns():
    return list(itertools.product(ENGINES, KINDS))


def test_the_table():
    """The table in the document has the rows and the columns that are measured here, and all twenty in each cell."""
    text = DOCUMENT.read_text()
    [marked] = MARKED.findall(text)
    titles = [f"{TITLES[engine]}, {kind}" for engine, kind in columns()]
    if WRITES:
        lines = [_line("the client leaves", *titles), "|---" * (1 + len(titles)) + "|"]
        lines += [_line(title, *(_cell(row, *column) for column in columns())) for row, title in ROWS.items()]
        marked = re.sub(r"(?m)(^\|.*\n)+", "\n".join(lines) + "\n", marked, count=1)
        DOCUMENT.write_text(MARKED.sub(lambda _: marked, text))
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"(?m)^\|.*", marked))
    assert header == ["the client leaves", *titles]
    assert [row[0] for row in rows] == list(ROWS.values())
    for row, found in zip(ROWS, rows, strict=True):
        for (engine, kind), cell in zip(columns(), found[1:], strict=True):
            form = rf"{TRIES}/{TRIES}, worst 0\.\d\d s" if (row, kind) in CELLS else "–"
            note = rf" \({EARLY}\)" if (row, engine, kind) == ("first_token", "sglang", "stream") else ""
            assert re.fullmatch(form + note, cell), (row, engine, kind)


def _line(*cells):
    return f"| {' | '.join(cells)} |"


def _cell(row, engine, kind):
    if (row, kind) not in CELLS:
        return "–"
    seconds, note = FIGURES[row, engine, kind]
    return f"{TRIES}/{TRIES}, worst {seconds:.2f} s" + (f" ({note})" if note else "")
