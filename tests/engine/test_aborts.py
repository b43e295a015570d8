"""An engine whose own process gets SIGTERM, as service managers send it to all processes of a service at once.

What it was working on is not whole. No response may look as if it were: neither a stream nor a plain one.
"""

import contextlib
import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.programs import LIMIT_S
from support.real_engines import ENGINES, MESSAGES

TOKENS = {"vllm": 1900, "sglang": 1500}
"""Of a response that takes seconds."""
LONG = {"ignore_eos": True, "temperature": 0.0}
ROUTES = {
    "/v1/chat/completions": {"messages": MESSAGES, **LONG},
    "/v1/completions": {"prompt": "x", **LONG},
    "/v1/responses": {"input": "Tell me a story.", **LONG},
    "/v1/messages": {"messages": MESSAGES, "temperature": 0.0},  # at random it may end at any token
}
ENDS = re.compile(r'\[DONE\]|"finish_reason": ?"|response\.(completed|incomplete)"|message_stop|"stop_reason": ?"')
"""What a whole response has at its end."""


@pytest.fixture(params=ENGINES)
def slow(request, deploy, tmp_path):
    """A chat model without compiled graphs, so that its long responses take seconds."""
    with deploy(request.param, "chat", directory=tmp_path, max_model_len=2048, enforce_eager=True) as deployment:
        yield deployment.wait()


class Asking:
    """Clients of long responses: each asks again after a whole response, until the engine is about to get its signal."""

    def __init__(self, place):
        self._place = place
        self.is_over = False
        self.begun, self.answers = set(), []

    def ask(self, number, path, stream):
        """Keep the status of the last response and what arrived of it, until its end or that of the connection."""
        limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
        body = {"model": "tiny", "stream": stream, limit: TOKENS[self._place.engine], **ROUTES[path]}
        while True:
            status, text = 0, []
            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                with httpx.stream("POST", f"{self._place.url}{path}", json=body, timeout=LIMIT_S) as response:
                    status = response.status_code
                    if stream and status == 200:
                        self.begun.add(number)
                    for piece in response.iter_text():  # what arrived before the connection broke is kept
                        text += [piece]
            if self.is_over or status != 200:
                break
            self.begun.discard(number)
        self.answers.append((path, stream, status, "".join(text)))


def test_no_response_of_a_terminated_engine_looks_whole(slow):
    """Streams end with an error event and without their usual end, plain responses are 502 or 500."""
    place, asking = slow, Asking(slow)
    restarts, scheduler = place.worker()["restarts"], place.scheduler()
    jobs = [(path, stream) for path in ROUTES for stream in (True, True, False)]
    with ThreadPoolExecutor(len(jobs)) as clients:
        for number, (path, stream) in enumerate(jobs):
            clients.submit(asking.ask, number, path, stream)
        try:
            place.program.until(lambda: len(asking.begun) == sum(stream for _, stream in jobs))
        finally:
            asking.is_over = True
            scheduler.terminate()
    answers = asking.answers
    assert len(answers) == len(jobs)
    for path, stream, status, text in answers:
        shown = (path, stream, status, text[-600:])
        assert not ENDS.search(text), shown
        assert "engine_aborted" in text or place.engine == "sglang", shown  # its schedulers just end
        if stream:
            assert status == 200, shown
            last = [line for line in text.split("\n") if line.startswith("data: ")][-1]
            error = json.loads(last.removeprefix("data: "))
            assert "error" in error.get("type", "") or "error" in error, shown
        else:
            assert status in (500, 502), shown
            assert json.loads(text)["error"]["code"] in ("engine_aborted", "engine_failed", "upstream_failed"), shown
    place.program.until(lambda: place.worker()["restarts"] == restarts + 1)
