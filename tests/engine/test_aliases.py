"""One name for two models, each on a real engine: shares, sessions, and what happens when one of them is killed."""

import json
import math
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support.programs import Program
from support.real_engines import ENGINES, LOAD_S, PYZ, free_port, interpreters, worker_table

DRAWS, SHARE = 2000, 0.8
DEVIATIONS = 4
"""A right share is further from the middle once in 16 000 runs."""
CLIENTS = 8
ALIASES = f"""
[[models]]
name = "mixed"
targets = [{{ model = "vllm", weight = {SHARE} }}, {{ model = "sglang", weight = {1 - SHARE:.1f} }}]
[[models]]
name = "safe"
targets = [{{ model = "vllm" }}]
fallbacks = ["sglang"]
"""


class Pair:
    """A gateway with a model on each engine, and the names above."""

    def __init__(self, directory):
        lines = ["[server_settings]", f"port = {free_port()}", f'state_directory = "{directory}/state"', ALIASES]
        lines += interpreters()
        for engine in ENGINES:
            lines += worker_table(engine, "chat", engine, max_model_len=256, enforce_eager=True)
        (directory / "ichat.toml").write_text("\n".join(lines))
        command = [sys.executable, PYZ, "gateway", "-c", directory / "ichat.toml"]
        self.program = Program(command, directory / "gateway.log", {"PYTHONPATH": ""}).wait_for_port()
        for engine in ENGINES:
            self.program.wait_until_ready(f"{engine}-0", LOAD_S)

    def ask(self, name, session="", tokens=1):
        """Return the status of a request for one of the names, the model that answered, and the error's code."""
        body = json.dumps({"model": name, "prompt": "Once", "max_tokens": tokens, "temperature": 0}).encode()
        headers = {"content-type": "application/json", **({"x-session-id": session} if session else {})}
        request = urllib.request.Request(f"http://127.0.0.1:{self.program.port}/v1/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=LOAD_S) as answer:
                return answer.status, answer.headers["x-ichat-model"], json.load(answer)["choices"] and ""
        except urllib.error.HTTPError as error:
            return error.code, error.headers["x-ichat-model"], json.load(error)["error"]["code"]


@pytest.fixture(scope="module", name="pair")
def pair_fixture(tmp_path_factory):
    pair = Pair(tmp_path_factory.mktemp("aliases"))
    yield pair
    pair.program.end()


def test_shares_are_as_configured(pair):
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda _: pair.ask("mixed"), range(DRAWS)))
    assert {status for status, _, _ in answers} == {200}
    counts = Counter(model for _, model, _ in answers)
    assert counts.keys() == {"vllm", "sglang"}
    assert abs(counts["vllm"] - DRAWS * SHARE) <= DEVIATIONS * math.sqrt(DRAWS * SHARE * (1 - SHARE))


def test_a_session_keeps_its_side(pair):
    sides = {number: {pair.ask("mixed", f"s{number}")[1] for _ in range(3)} for number in range(30)}
    assert all(len(models) == 1 for models in sides.values()), sides
    assert set().union(*sides.values()) == {"vllm", "sglang"}


def test_a_killed_target_costs_nothing_that_was_not_sent(pair):
    """Who has sent nothing is answered by the other model; only what the dead engine was working on is lost."""
    worker = psutil.Process(pair.program.get("/v1/admin/workers/vllm-0")[1]["pid"])
    killed, answers = threading.Event(), []

    def client(_):
        after = 0
        while after < 20:
            is_after = killed.is_set()
            answers.append((is_after, *pair.ask("safe", tokens=16)))
            after += is_after

    with ThreadPoolExecutor(CLIENTS) as clients:
        asking = [clients.submit(client, number) for number in range(CLIENTS)]
        pair.program.until(lambda: len(answers) > 5 * CLIENTS)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        killed.set()
        for one in asking:
            one.result()
    lost = [one for one in answers if one[1] != 200]
    assert {one[3] for one in lost} <= {"upstream_failed"}, lost
    assert len(lost) <= CLIENTS
    assert not any(is_after for is_after, *_ in lost), lost
    assert "vllm" in {model for is_after, _, model, _ in answers if not is_after}
    assert "sglang" in {model for is_after, _, model, _ in answers if is_after}
    pair.program.wait_until_ready("vllm-0", LOAD_S)
    assert pair.ask("safe")[:2] == (200, "vllm")
