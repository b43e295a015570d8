"""When SGLang may let go of its memory, without an engine: what is refused, by whom, and what stays possible."""

import asyncio
from types import SimpleNamespace

import pytest

from ichat.engines.sglang.memory import Memory, memory_in, read_memory
from ichat.errors import ApiError
from ichat.http.request import Request
from ichat.protocol.engine_memory import EngineMemory

RELEASE, RESUME, CHAT = "/release_memory_occupation", "/resume_memory_occupation", "/v1/chat/completions"


def asked(path, method=b"POST"):
    return Request(method, path.encode(), path.encode(), b"1.1", [], b"", b"r", keep_alive=True)


@pytest.mark.parametrize(
    ("others", "busy"),
    [
        ([], 0),
        ([asked(CHAT)], 1),
        ([asked("/generate"), asked("/v1/embeddings"), asked(RELEASE)], 3),
        ([asked("/health_generate", b"GET")], 1),
        ([asked("/metrics", b"GET"), asked("/v1/tokenize"), asked("/update_weights_from_disk")], 0),
    ],
    ids=["idle", "one", "several", "a health check that generates", "nothing for the scheduler"],
)
@pytest.mark.parametrize("method", [b"POST", b"GET"])
def test_a_release_is_refused_while_the_scheduler_works(others, busy, method):
    """409 says how many requests there are; what the scheduler has nothing to do with does not count."""
    memory, request = Memory(lambda: (["m"], [])), asked(RELEASE, method)
    if not busy:
        memory.admit(request, others)
        return
    with pytest.raises(ApiError, match=rf"answers {busy} requests?, and") as caught:
        memory.admit(request, others)
    assert (caught.value.status, caught.value.code) == (409, "conflict")
    memory.admit(asked(CHAT), others)


def test_no_work_begins_beside_a_release_or_after_it():
    """503 from the moment on when a release was let in; work goes on where it failed, or after a resume."""
    memory, release = Memory(lambda: (["m"], [])), asked(RELEASE)
    memory.admit(release, [])
    for path, method in ((CHAT, b"POST"), ("/generate", b"PUT"), ("/health_generate", b"GET")):
        with pytest.raises(ApiError, match="`m` is not ready: SGLang has let go of its memory") as caught:
            memory.admit(asked(path, method), [release])
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "model_not_ready", 5)
    for path, method in (("/metrics", b"GET"), (RESUME, b"POST"), ("/v1/tokenize", b"POST")):
        memory.admit(asked(path, method), [release])
    memory.admit(asked(CHAT), [])  # it has ended and nothing is gone
    memory.admit(asked(CHAT), [asked(RELEASE)])  # which was let in before work was, and so has an answer already
    memory.released.add("weights")
    with pytest.raises(ApiError, match="POST /resume_memory_occupation"):
        memory.admit(asked(CHAT), [])


class Manager:
    """What SGLang's tokenizer manager has of this; its scheduler dies as the real one does."""

    def __init__(self, busy_for=0):
        self.busy_for = busy_for
        self.gone = []

    async def flush_cache(self):
        await asyncio.sleep(0)
        self.busy_for -= 1
        return SimpleNamespace(success=self.busy_for < 0)

    async def release_memory_occupation(self, asked, request):
        await asyncio.sleep(0)
        assert self.busy_for < 0
        self.gone += asked.tags or ["kv_cache", "weights", "cuda_graph"]

    async def resume_memory_occupation(self, asked, request):
        await asyncio.sleep(0)
        for tag in asked.tags or ["kv_cache", "weights", "cuda_graph"]:
            self.gone.remove(tag)


def calls(manager, *asked, **times):
    """Make the calls, all at once, and give for each what it was refused with; with that what is gone."""
    memory = Memory(lambda: (["m"], []), **times)

    async def make(name, tags):
        try:
            await getattr(manager, name)(SimpleNamespace(tags=tags), None)
        except ApiError as error:
            return str(error)

    async def make_all():
        memory.watch(manager)
        return await asyncio.gather(*(make(f"{name}_memory_occupation", tags) for name, tags in asked))

    refused = asyncio.run(make_all())
    assert memory.released == set(manager.gone)
    return refused, sorted(manager.gone)


def test_a_release_waits_until_the_scheduler_is_at_rest():
    """What a client has just left may still be worked on; for how long that is waited has a bound."""
    assert calls(Manager(busy_for=2), ("release", None)) == ([None], ["cuda_graph", "kv_cache", "weights"])
    [refused], gone = calls(Manager(busy_for=10**9), ("release", None), idle_s=0.0)
    assert ("was not idle within 0 s" in refused, gone) == (True, [])


def test_only_what_is_there_is_let_go_of_and_only_what_is_gone_is_taken_back():
    """Also where two ask at once: the second of them is refused, and the scheduler hears nothing of it."""
    (first, second, third, fourth, fifth), gone = calls(
        Manager(), ("release", ["weights"]), ("release", None), ("resume", ["kv_cache"]),
        ("resume", ["weights", "weights"]), ("release", ["kv_cache"]),
    )  # fmt: skip
    assert (first, fifth, gone) == (None, None, ["kv_cache", "weights"])
    assert "let go of `weights` already" in second
    assert "SGLang has `kv_cache`" in third
    assert "SGLang has `weights`" in fourth
    refused, gone = calls(Manager(), ("release", None), ("resume", None), ("resume", None))
    assert (refused[:2], "SGLang has `" in refused[2], gone) == ([None, None], True, [])


GIB = 1024**3


@pytest.mark.parametrize(
    ("told", "memory"),
    [
        (
            {"weight": 15.27, "kvcache": 40.5, "token_capacity": 7, "graph": {"decode": 0.5, "prefill": 0.25}},
            EngineMemory(
                tokens=7, cache_bytes=int(40.5 * GIB), weights_bytes=int(15.27 * GIB), graphs_bytes=3 * GIB // 4
            ),
        ),
        ({"weight": 1, "graph": 0.5}, EngineMemory(weights_bytes=GIB, graphs_bytes=GIB // 2)),
        ({"weight": 0, "kvcache": -1, "token_capacity": None, "graph": {"decode": "x"}}, EngineMemory()),
        ({"weight": float("nan"), "token_capacity": float("inf")}, EngineMemory()),
    ],
    ids=["newest", "older", "nothing", "no numbers"],
)
def test_memory_of_sglang_is_unknown_rather_than_zero(told, memory):
    """The scheduler's figures are in GiB; a figure that is missing, 0 or no number is not known."""
    assert memory_in(told) == memory


def test_a_scheduler_that_does_not_report_its_memory_delays_nothing():
    """It may be silent, of a release without the question, or fail: the memory is not known then."""

    async def answer(*states):
        return list(states)

    async def fail():
        raise KeyError("memory_usage")

    async def ask(how, within_s=60.0):
        manager = SimpleNamespace() if how is None else SimpleNamespace(get_internal_state=how)
        return await read_memory(manager, within_s)

    async def silent():
        await asyncio.Event().wait()

    told = {"memory_usage": {"token_capacity": 5}}
    assert asyncio.run(ask(lambda: answer(told, {}))) == EngineMemory(tokens=5)
    for how in (None, fail, answer, lambda: answer({}), lambda: answer({"memory_usage": 1})):
        assert asyncio.run(ask(how)) is None
    assert asyncio.run(ask(silent, 0)) is None
