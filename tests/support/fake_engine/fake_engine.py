"""A fast engine for tests of everything around an engine: a small ASGI application, told by its routes what to do.

It is found like any engine from elsewhere: by an entry point. With `--children 1` it starts a process that would run for ever.
"""

import argparse
import asyncio
import contextvars
import fcntl
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time

from ichat.engines.adapter import ProtocolAdapter
from ichat.engines.children import ProcessFamily, adopt_children, children
from ichat.engines.engine import EngineInfo, Progress
from ichat.engines.flag_list import flags_of
from ichat.errors import EXIT_USAGE, Exit
from ichat.protocol.engine_memory import EngineMemory
from ichat.protocol.messages import Group, ModelCard

MARK = contextvars.ContextVar("mark")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Exit(EXIT_USAGE, message)


class Fake:
    name = "fake"

    def __init__(self):
        self.adapter = ProtocolAdapter()
        self.running = 0
        self.aborted = 0
        self.done = 0
        self.flooded = 0
        self.dead = None
        self.args = None
        self.kin = ProcessFamily()
        self.go_on = threading.Event()
        self.hanging = False
        self.asleep = False
        self.changes = []
        """What was asked of it: `sleep` or `wake`."""
        self.holds = False
        """Whether it neither falls asleep nor wakes up."""
        self.change_failure = None
        """The exception that a change raises at its end."""
        self.worked_asleep = 0
        self.slots = None
        self.timed = []
        """Of each request of known speed: when it arrived, and when each of its tokens was sent."""

    def check(self):
        pass

    def flags(self):
        return flags_of(self.parser(), without=["fail"])

    def parser(self):
        parser = Parser(prog="fake")
        parser.add_argument("--model", required=True)
        parser.add_argument("--served-model-name", nargs="+")
        parser.add_argument("--host")
        parser.add_argument("--port")
        parser.add_argument("--load-s", type=float, default=0.0)
        parser.add_argument("--fail", action="store_true")
        parser.add_argument("--warns", help="of this, while it loads")
        parser.add_argument("--dies-loading", action="store_true")
        parser.add_argument("--children", type=int, default=0)
        parser.add_argument("--needs-children", action="store_true", help="it dies with any of them")
        parser.add_argument("--leftovers", type=int, default=0, help="processes without a parent")
        parser.add_argument("--stands-still", action="store_true", help="its count of steps does")
        parser.add_argument("--memory", type=json.loads, help="the figures of its memory, as JSON")
        parser.add_argument("--sleeps", action="store_true")
        parser.add_argument(
            "--alone", help="begins the names of files in which engines of a worker note that they run at once"
        )
        parser.add_argument("--first-s", type=float, help="until the first token; it answers as engines do then")
        parser.add_argument("--gap-s", type=float, default=0.0, help="between two tokens")
        parser.add_argument("--slots", type=int, default=1000, help="requests that it works on at a time")
        parser.add_argument("--policy", choices=["fair", "greedy"], default="fair")
        parser.add_argument("--group")
        parser.add_argument("--rank", type=int, default=0)
        return parser

    def parse(self, argv):
        parser = self.parser()
        self.args = args = parser.parse_args(list(argv))
        group = Group(args.group, args.rank, 2) if args.group else None
        names = args.served_model_name or [args.model]
        changed = [name for name, value in vars(args).items() if value != parser.get_default(name)]
        return EngineInfo(
            args.model,
            names,
            vars(args),
            {"fake": "1"},
            changed,
            group=group,
            why_no_sleep="" if args.sleeps else "it is a fake",
        )

    def run(self, *, phase, serve):
        args = self.args
        phase("loading")
        if args.warns:
            print(f"WARNING 11-21 21:05:02 [fake.py:1] {args.warns}", flush=True)
        if args.alone:
            own_id = next((word.partition("=")[2] for word in sys.argv if word.startswith("--worker-id=")), "")
            self.locked = lock_or_note(f"{args.alone}.{own_id}")
        self.go_on.wait(args.load_s)
        if args.fail:
            raise RuntimeError("no such weights")
        if args.dies_loading:
            self.dead = "killed while it loaded"
            self.go_on.wait(3600)
            raise RuntimeError("it noticed by itself")
        if args.children:
            adopt_children()
            context = multiprocessing.get_context("spawn")
            for _ in range(args.children):
                context.Process(target=time.sleep, args=(3600,), daemon=True, name="fake-child").start()
            self.kin = ProcessFamily(children() if args.needs_children else ())
        for _ in range(args.leftovers):
            subprocess.run("sleep 3600 &", shell=True, check=True)
        asyncio.run(serve(None if args.rank else self.app))

    async def sleep(self):
        self.asleep = True
        await self.change("sleep")

    async def wake(self):
        await self.change("wake")
        self.asleep = False

    async def change(self, name):
        self.changes.append(name)
        await asyncio.sleep(0)
        while self.holds:
            await asyncio.sleep(0.005)
        if self.change_failure is not None:
            raise self.change_failure

    def why_dead(self):
        return self.dead or self.kin.first_dead()

    def models(self):
        if self.hanging:
            print("hanging", flush=True)
            time.sleep(3600)
        names = self.args.served_model_name or [self.args.model]
        return [
            ModelCard(names[0], self.args.model, None, 4096),
            *(ModelCard(name, self.args.model) for name in names[1:]),
        ]

    def memory(self):
        return EngineMemory(**self.args.memory) if self.args is not None and self.args.memory else None

    def progress(self):
        if self.args is None:
            return Progress()
        return Progress(running=self.running, steps=0 if self.args.stands_still else None, tokens_out=self.done)

    async def app(self, scope, receive, send):
        message = await receive()
        body = json.loads(message["body"] or b"{}")
        self.worked_asleep += self.asleep and scope["method"] == "POST"
        if scope["path"] == "/afterwards":
            await self.plain(send, {"context": MARK.get(None)})
            MARK.set("set by another request")
            await asyncio.sleep(3600)
        self.running += 1
        gone = asyncio.ensure_future(self.listen(receive))
        work = asyncio.ensure_future(self.answer(scope, body, send))
        try:
            await asyncio.wait([gone, work], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                self.done += 1
                work.result()
            else:
                self.aborted += 1
        finally:
            work.cancel()
            gone.cancel()
            self.running -= 1

    async def listen(self, receive):
        waiters = [asyncio.ensure_future(receive()) for _ in range(2)]  # engines do wait twice
        for waiter in waiters:
            assert (await waiter)["type"] == "http.disconnect"

    async def answer(self, scope, body, send):
        path = scope["path"]
        if path == "/counts":
            await self.plain(send, {"running": self.running - 1, "aborted": self.aborted})
        elif path == "/timed":
            await self.plain(send, {"requests": self.timed})
        elif path == "/scope":
            headers = [[name.decode(), value.decode()] for name, value in scope["headers"]]
            keys = ("type", "http_version", "method", "path", "root_path")
            query = scope["query_string"].decode()
            await self.plain(
                send, {**{key: scope[key] for key in keys}, "query": query, "headers": headers, "asgi": scope["asgi"]}
            )
        elif path == "/raise":
            raise RuntimeError("the engine has a bug")
        elif path == "/nothing":
            return
        elif path == "/short":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
            await send({"type": "http.response.body", "body": b"half"})
        elif path == "/break":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise RuntimeError("the engine has a bug")
        elif path == "/empty":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})
        elif path == "/wait":
            await asyncio.sleep(3600)
        elif path == "/metrics":
            await self.metrics(dict(scope["headers"]), send)
        elif path == "/die":
            if body.get("stream"):
                await self.begin(send, {"n": 0})
            self.dead = "killed by a test"
            if not body.get("tells"):
                await asyncio.sleep(3600)
            for event in ({"error": {"message": "It is dead.", "code": 500}}, {"choices": [], "usage": {}}, "[DONE]"):
                data = event if isinstance(event, str) else json.dumps(event)
                await send({"type": "http.response.body", "body": b"data: %b\n\n" % data.encode(), "more_body": True})
            await send({"type": "http.response.body"})
        elif path == "/block":
            print("blocking", flush=True)
            self.go_on.wait(3600)
        elif path == "/hang":
            self.hanging = True
            await self.plain(send, {})
        elif path == "/print":
            await self.plain(send, await asyncio.to_thread(print_much, body["lines"], body.get("text", "line")))
        elif path == "/large":
            data = bytes(body["bytes"])
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(data))]}
            )
            await send({"type": "http.response.body", "body": data})
        elif path == "/flood":
            await self.flood(body, send)
        elif self.args.first_s is not None:
            await self.tokens(body, send)
        elif body.get("stream"):
            await self.stream(body, send)
        else:
            await asyncio.sleep(body.get("wait_s", 0))
            while not os.path.exists(body.get("until_there", "/")):  # noqa: ASYNC240 - a file that the test makes
                await asyncio.sleep(0.02)
            content = body.get("say", "hello") * body.get("times", 1)
            answer = {"choices": [{"message": {"content": content}}], "model": body.get("model")}
            await self.plain(send, {**answer, "digest": digest_of(body)} if body.get("digest") else answer)

    async def plain(self, send, value):
        data = json.dumps(value).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def metrics(self, headers, send):
        """Answer like prometheus_client's application: in the form that is asked for."""
        is_open = b"openmetrics" in headers.get(b"accept", b"")
        kind = b"application/openmetrics-text; version=1.0.0" if is_open else b"text/plain; version=0.0.4"
        data = b"fake_done %d\n%b" % (self.done, b"# EOF\n" if is_open else b"")
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(data))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def begin(self, send, *events):
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in events:
            data = b"data: %b\n\n" % json.dumps(event).encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def stream(self, body, send):
        await self.begin(send)
        for number in range(body.get("events", 3)):
            event = {"choices": [{"index": 0, "delta": {"content": f"{number} "}}], "seed": body.get("seed")}
            if body.get("pad"):
                event["pad"] = "." * body["pad"]
            await send(
                {"type": "http.response.body", "body": b"data: %b\n\n" % json.dumps(event).encode(), "more_body": True}
            )
            await asyncio.sleep(body.get("gap_s", 0))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body"})

    async def tokens(self, body, send):
        """Answer at a known speed with as many tokens as the request allows. A word of a prompt is a token."""
        words = sum(len(message["content"].split()) for message in body["messages"])
        usage = {"prompt_tokens": words, "completion_tokens": body["max_tokens"]}
        if not body.get("stream"):
            await self.plain(send, {"choices": [{"message": {"content": "a"}}], "usage": usage})
            return
        if self.slots is None:
            self.slots = asyncio.Semaphore(self.args.slots)
        arrived_at, sent_at = time.monotonic(), []
        self.timed.append([arrived_at, sent_at])
        async with self.slots:
            await asyncio.sleep(self.args.first_s)
            await self.begin(send)
            for number in range(body["max_tokens"]):
                if number:
                    await asyncio.sleep(self.args.gap_s)
                sent_at.append(time.monotonic())
                reason = "length" if number == body["max_tokens"] - 1 else None
                choice = {"index": 0, "delta": {"content": f"{number} "}, "finish_reason": reason}
                event = {"id": "chatcmpl-fake", "choices": [choice]}
                await send({"type": "http.response.body", "body": sse(event), "more_body": True})
        await send({"type": "http.response.body", "body": sse({"choices": [], "usage": usage}), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def flood(self, body, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(body["chunks"]):
            await send({"type": "http.response.body", "body": (b"%08d" % number) * 8192, "more_body": True})
            self.flooded = number
        await send({"type": "http.response.body"})


def lock_or_note(path):
    """Lock a file until this process ends; if another process has it, write that into the file."""
    file = open(path, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.write(f"process {os.getpid()} began beside another\n")
        file.flush()
    return file


def sse(event):
    return b"data: %b\n\n" % json.dumps(event).encode()


def digest_of(body):
    """Tell one request's body from every other."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def print_much(lines, text):
    """Print so many lines here and as many in another process, at the same time; give the seconds that each took."""
    program = (
        "import sys\n"
        f"for n in range({lines}): sys.stdout.write(f'child {text} {{n}}\\n')\n"
        "sys.stdout.write('child took its time\\n')"  # print writes a line and its end apart
    )
    with subprocess.Popen([sys.executable, "-c", program]) as child:
        began = time.monotonic()
        for number in range(lines):
            sys.stdout.write(f"own {text} {number}\n")
        took = time.monotonic() - began
        assert child.wait() == 0
    return {"own_s": took, "all_s": time.monotonic() - began}
