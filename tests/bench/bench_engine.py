"""An engine that does nothing but answer, and the same ASGI application for any other server.

The worker finds it by its entry point (`worker --backend bench`, with this directory on the PYTHONPATH); uvicorn takes
it as `bench_engine:app`. Like engines do, it listens for the client's leaving while it answers.
"""

import asyncio
import json

from answers import COMPLETION, DONE, EVENT, PLAIN_TYPE, STREAM_TYPE

try:
    from uvloop import run
except ImportError:
    from asyncio import run

PLAIN_HEADERS = [(b"content-type", PLAIN_TYPE), (b"content-length", b"%d" % len(COMPLETION))]
STREAM_HEADERS = [(b"content-type", STREAM_TYPE)]


async def app(scope, receive, send):
    """Answer one request, unless its client leaves first."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    work = asyncio.ensure_future(answer(json.loads(body or b"{}"), send))
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        work.cancel()
        gone.cancel()


async def answer(wanted, send):
    if not wanted.get("stream"):
        await send({"type": "http.response.start", "status": 200, "headers": PLAIN_HEADERS})
        await send({"type": "http.response.body", "body": COMPLETION})
        return
    gap_s = wanted.get("gap_s", 0)
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    for _ in range(wanted.get("events", 1)):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.sleep(gap_s)
    await send({"type": "http.response.body", "body": DONE, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


class Bench:
    """The application above as an engine."""

    name = "bench"

    def __init__(self):
        from ichat.engines.adapter import ProtocolAdapter

        self.adapter = ProtocolAdapter()

    def check(self):
        pass

    def parse(self, argv):
        from ichat.engines.engine import EngineInfo

        return EngineInfo("bench", ["tiny"], {}, {})

    def run(self, *, phase, serve):
        run(serve(app))

    def models(self):
        return []

    def why_dead(self):
        return None

    def progress(self):
        from ichat.engines.engine import Progress

        return Progress()
