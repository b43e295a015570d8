"""The phases of a load, by the lines that the engines really write."""

import re

import pytest

from ichat.engines.load_phases import LoadLines, LoadTracker, load_lines, mark
from ichat.protocol.field_checks import PHASES_MAX

VLLM, SGLANG = load_lines("vLLM"), load_lines("SGLang")
VLLM_CPU = """
13.8 (MainProcess pid=10048) INFO 11-24 04:06:18 [model.py:733] Resolved architecture: Qwen2ForCausalLM
13.8 (MainProcess pid=10048) INFO 11-24 04:06:18 [model.py:2152] Using max model len 2048
19.9 (EngineCore pid=10120) INFO 11-24 04:06:24 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model
27.2 (Worker pid=10137) INFO 11-24 04:06:32 [cpu_model_runner.py:68] Starting to load model .build/tiny/chat...
27.3 (Worker pid=10137) INFO 11-24 04:06:32 [base_loader.py:82] Initializing model took 0.113409 seconds
27.3 Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]
27.4 Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 180.65it/s]
27.4 (Worker pid=10137) INFO 11-24 04:06:32 [default_loader.py:501] Loading weights took 0.01 seconds
28.0 (Worker pid=10137) INFO 11-24 04:06:32 [cpu_model_runner.py:87] Warming up model for the compilation...
53.3 (Worker pid=10137) INFO 11-24 04:06:58 [monitor.py:91] [backbone] Initial profiling/warmup run took 0.02 s
53.8 (Worker pid=10137) INFO 11-24 04:06:58 [cpu_model_runner.py:91] Warming up done.
53.8 (EngineCore pid=10120) INFO 11-24 04:06:58 [kv_cache_utils.py:2327] CPU KV cache size: 2,097,152 tokens, Maximum
55.8 (EngineCore pid=10120) INFO 11-24 04:07:00 [core.py:402] init engine (profile, create kv cache, warmup model) took
56.5 (EngineCore pid=10120) WARNING 11-24 04:07:01 [vllm.py:1727] Inductor compilation was disabled by user settings
"""
VLLM_GPU = """
20.0 (APIServer pid=7) INFO 11-24 04:06:18 [model.py:2152] Using max model len 40960
30.0 (Worker_TP0 pid=9) INFO 11-24 04:06:32 [gpu_model_runner.py:5040] Starting to load model Qwen/Qwen3-32B...
31.0 Loading safetensors checkpoint shards:  18% Completed | 3/17 [00:05<00:25,  1.80s/it]
40.0 (Worker_TP1 pid=9) INFO 11-24 04:06:42 [gpu_model_runner.py:5150] Model loading took 30.59 GiB memory and 9.1 seconds
40.1 (Worker_TP0 pid=9) INFO 11-24 04:06:42 [gpu_model_runner.py:5040] Starting to load model Qwen/Qwen3-32B...
42.0 (Worker_TP0 pid=9) INFO 11-24 04:06:44 [backends.py:1105] Using cache directory: /c/torch_compile_cache/a/rank_0_0/backbone for vLLM's torch.compile
50.0 (Worker_TP0 pid=9) INFO 11-24 04:06:52 [backends.py:1167] Dynamo bytecode transform time: 7.90 s
80.0 (Worker_TP0 pid=9) INFO 11-24 04:07:22 [gpu_worker.py:760] Available KV cache memory: 35.1 GiB
80.5 (EngineCore pid=8) INFO 11-24 04:07:22 [kv_cache_utils.py:2327] GPU KV cache size: 287,552 tokens, Maximum
81.0 Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  42%|####2     | 28/67 [00:02<00:03, 12.4it/s]
90.0 (Worker_TP0 pid=9) INFO 11-24 04:07:32 [gpu_model_runner.py:6582] Graph capturing finished in 9 secs, took 1.02 GiB
90.2 (EngineCore pid=8) INFO 11-24 04:07:32 [core.py:402] init engine (profile, create kv cache, warmup model) took 50.12 s
"""
SGLANG_CPU = """
14.7 [2026-11-24 04:07:19] server_args={'model_path': '.build/tiny/chat', 'tokenizer_path': '.build/tiny/chat'
26.7 [2026-11-24 04:07:31] Init parallel begin.
26.9 [2026-11-24 04:07:31] Memory baseline taken. mem usage=0.00 GB
28.3 [2026-11-24 04:07:33] Load weight begin. avail mem=18.42 GB
28.3 Multi-thread loading shards: 100% Completed | 1/1 [00:00<00:00, 290.63it/s]
28.4 [2026-11-24 04:07:33] Load weight end. elapsed=0.04 s, type=Qwen2ForCausalLM, avail mem=18.42 GB, mem usage=0.00 GB
29.0 [2026-11-24 04:07:33] KV Cache is allocated. dtype: torch.float16, #tokens: 16384, K size: 0.00 GB, V size: 0.00 GB
29.0 [2026-11-24 04:07:33] max_total_num_tokens=16384, chunked_prefill_size=4096, max_prefill_tokens=16384
29.1 [2026-11-24 04:07:33] Engine startup timings (s): load_weight=0.04, kv_cache_allocation=0.60, scheduler_e2e=2.29
30.1 [2026-11-24 04:07:35] Prefill batch, #new-seq: 1, #new-token: 13, #cached-token: 0, token usage: 0.00
"""
SGLANG_GPU = """
14.7 [2026-11-24 04:07:19] server_args=ServerArgs(model_path='Qwen/Qwen3-32B', tokenizer_path='Qwen/Qwen3-32B'
20.0 [2026-11-24 04:07:31 TP0] Init torch distributed begin.
28.0 [2026-11-24 04:07:33 TP0] Load weight begin. avail mem=78.42 GB
30.0 Loading safetensors checkpoint shards:  18% Completed | 3/17 [00:05<00:25,  1.80s/it]
40.0 [2026-11-24 04:07:45 TP0] Load weight end. elapsed=12.0 s, type=Qwen3ForCausalLM, avail mem=48.42 GB, mem usage=30
41.0 [2026-11-24 04:07:46 TP0] Memory pool end. avail mem=8.40 GB
42.0 [2026-11-24 04:07:47 TP0] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=8.3
44.0 Capturing batches (bs=120 avail_mem=7.96 GB):  30%|###       | 7/23 [00:02<00:05,  3.1it/s]
50.0 [2026-11-24 04:07:55 TP0] Capture target decode CUDA graph end. bs=[1, 2], elapsed=8.0 s, mem usage=0.4 GB
51.0 [2026-11-24 04:07:56 TP0] max_total_num_tokens=287552, chunked_prefill_size=8192, max_prefill_tokens=16384
"""


class Source:
    """The lines of an engine, which come one after the other."""

    def __init__(self, text):
        rows = [row.split(" ", 1) for row in text.strip().splitlines()]
        self.rows = [(1000 + float(at), line) for at, line in rows]
        self.now = 1000.0

    def read(self):
        found = [row for row in self.rows if row[0] <= self.now]
        self.rows = self.rows[len(found) :]
        return found

    def clock(self):
        return self.now


def phases_of(engine, text, end=100.0):
    source = Source(text)
    tracker = LoadTracker(engine, source.read, source.clock)
    tracker.enter(tracker.importing)
    source.now = 1006.5
    tracker.enter(tracker.reading)
    source.now = 1000 + end
    tracker.end("ready")
    assert sum(phase.seconds for phase in tracker.phases()) == pytest.approx(end), "nothing of the load is missing"
    return [(phase.name, phase.seconds, phase.detail) for phase in tracker.phases()]


@pytest.mark.parametrize(
    ("engine", "text", "phases"),
    [
        (VLLM, VLLM_CPU, [
            ("importing vLLM", 6.5, ""), ("reading the configuration", 7.3, ""), ("starting its processes", 13.4, ""),
            ("loading weights", 0.8, "1 of 1 shards"), ("compiling", 25.3, ""), ("sizing the KV cache", 2.5, ""),
            ("warming up", 44.2, ""),
        ]),
        (VLLM, VLLM_GPU, [
            ("importing vLLM", 6.5, ""), ("reading the configuration", 13.5, ""), ("starting its processes", 10.0, ""),
            ("loading weights", 10.0, "3 of 17 shards"), ("profiling", 2.0, ""), ("compiling", 38.0, ""),
            ("sizing the KV cache", 1.0, ""), ("capturing graphs", 9.0, "28 of 67"), ("warming up", 10.0, ""),
        ]),
        (SGLANG, SGLANG_CPU, [
            ("importing SGLang", 6.5, ""), ("reading the configuration", 8.2, ""), ("starting its processes", 13.6, ""),
            ("loading weights", 0.1, "1 of 1 shards"), ("sizing the KV cache", 0.6, ""), ("warming up", 71.0, ""),
        ]),
        (SGLANG, SGLANG_GPU, [
            ("importing SGLang", 6.5, ""), ("reading the configuration", 8.2, ""), ("starting its processes", 13.3, ""),
            ("loading weights", 12.0, "3 of 17 shards"), ("sizing the KV cache", 2.0, ""),
            ("capturing graphs", 9.0, "7 of 23"), ("warming up", 49.0, ""),
        ]),
    ],
    ids=["vllm on a CPU", "vllm on GPUs", "sglang on a CPU", "sglang on a GPU"],
)  # fmt: skip
def test_the_lines_of_an_engine_are_its_phases(engine, text, phases):
    """Each phase begins with the engine's own line, and has the time at which that was read."""
    assert phases_of(engine, text) == phases


@pytest.mark.parametrize("engine", [VLLM, SGLANG])
def test_lines_that_are_not_known_change_nothing(engine):
    """An engine of another version is being configured for longer; that is all."""
    names = [name for name, _, _ in phases_of(engine, "20 A line of another version\n30 7/9 [ of something")]
    assert names == [f"importing {engine.title}", "reading the configuration"]


def test_phases_only_go_forward():
    """What a second process writes of an earlier phase, or a draft model's load, does not begin it again."""
    text = SGLANG_GPU + "60 [2026-11-24 04:08:33 TP0] Load weight begin. avail mem=7.42 GB\n"
    assert [name for name, _, _ in phases_of(SGLANG, text)][-2:] == ["capturing graphs", "warming up"]


def test_without_lines_only_what_the_thread_does_is_known():
    """Where nobody reads the engine's lines, no phase is claimed that they would have to end."""
    tracker = LoadTracker(VLLM)
    assert tracker.phases() == [], "a worker tells of itself before its engine does anything"
    assert (tracker.phase, tracker.importing, tracker.reading) == ("starting", "importing vLLM", "")
    tracker.enter("loading m")
    tracker.catch_up()
    tracker.end("ready")
    tracker.enter("loading again")
    assert [phase.name for phase in tracker.phases()] == ["loading m"]
    assert tracker.phase == "ready"


def test_phases_are_few_and_short_however_many_an_engine_has():
    """Otherwise the gateway would refuse the heartbeat."""
    source = Source("")
    tracker = LoadTracker(LoadLines("x", [mark("y", "z")]), source.read, source.clock)
    for number in range(PHASES_MAX + 10):
        tracker.enter(f"{number}" * 100)
    assert len(tracker.phases()) == PHASES_MAX
    assert max(len(phase.name) for phase in tracker.phases()) == 64


def test_marks_are_in_the_order_of_their_phases_and_none_is_empty():
    """A pattern that fits every line would end all phases before it at once."""
    for engine in (VLLM, SGLANG):
        names = [one.phase for one in engine.marks]
        assert len(names) == len(set(names))
        assert not [one for one in engine.marks if one.begins.search("") or not isinstance(one.begins, re.Pattern)]
