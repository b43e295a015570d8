"""A cluster in the words of the event stream: what a page shows of GPUs, queues and failures that no test machine has."""

import json
import time

GIB = 1024**3

STREAM = """
(events) => {
  const real = window.fetch.bind(window);
  const encoder = new TextEncoder();
  window.tell = (name, data) => {
    for (const control of window.told) control.enqueue(encoder.encode(`event: ${name}\\ndata: ${JSON.stringify(data)}\\n\\n`));
  };
  window.told = new Set();
  window.eventStreams = [];
  window.fetch = (address, options) => {
    const url = new URL(address, location.href);
    if (url.pathname !== "/v1/admin/events") return real(address, options);
    window.eventStreams.push(url.search);
    let own;
    const body = new ReadableStream({
      start(control) {
        own = control;
        window.told.add(control);
        for (const [name, data] of events) {
          control.enqueue(encoder.encode(`event: ${name}\\ndata: ${JSON.stringify(data)}\\n\\n`));
        }
      },
      cancel() { window.told.delete(own); },
    });
    options?.signal?.addEventListener("abort", () => {
      window.told.delete(own);
      own.error(new DOMException("aborted", "AbortError"));
    });
    return Promise.resolve(new Response(body, { headers: { "content-type": "text/event-stream" } }));
  };
}
"""
"""Runs before the page's own scripts: the event stream has these events, and those that `tell` adds."""

PAGES = (
    "overview", "workers", "workers/llama-70b-0", "workers/llama-70b-0?tab=log", "workers/llama-70b-0?tab=arguments",
    "workers/gemma-27b-0", "models", "machines", "requests", "requests/req-0001", "log", "playground", "launch",
    "config", "keys", "usage", "nothing/of/the/kind",
)  # fmt: skip
"""Every page, as addresses in the console of a busy cluster."""


def told(page, *events):
    """Have a page's event stream consist of these events, rather than of the gateway's."""
    page.add_init_script(f"({STREAM})({json.dumps(events)})")
    return page


def worker(name, state="ready", **more):
    """Return a summary of a worker, as the gateway gives it."""
    model = name.rpartition("-")[0]
    return {
        "worker_id": name, "model_name": model, "model_names": [model], "state": state,
        "status": "healthy" if state in ("ready", "cold", "asleep") else "unhealthy", "managed": True, "machine": "gpu-1",
        "in_flight": 0, "circuit": {"state": "closed", "failures": 0, "retry_in_s": None}, "restarts": 0, "failure": None,
        "cause": None, "retry_in_s": None, "on_demand": False, "ready_in_s": None, "lost": [], "heartbeat_age_s": 1.2,
        "backend": "vllm", "host": "10.0.0.4", "port": 8001, "pid": 4711, "phase": state, "progress": {},
        "kv_use": None, "prefix_hit_rate": None, "running": None, "waiting": None, **more,
    }  # fmt: skip


def model(name, workers=1, **more):
    return {
        "id": name, "workers": workers, "in_flight": 0, "circuits_open": 0, "queued": 0, "waiting_s": None, "loaded": None,
        **more,
    }  # fmt: skip


def gpu(index, used, held, **more):
    return {
        "index": index, "uuid": f"GPU-{index}", "name": "NVIDIA H200", "memory_total_bytes": 141 * GIB,
        "memory_used_bytes": used * GIB, "use": 0.83, "failure": None,
        "held_by": [{"worker_id": name, "memory_bytes": size * GIB} for name, size in held.items()], **more,
    }  # fmt: skip


def machine(name, workers=(), gpus=(), **more):
    return {
        "id": f"boot-{name}", "name": name, "cpus": 96, "cpu_use": 0.31, "memory_total_bytes": 1024 * GIB,
        "memory_available_bytes": 700 * GIB, "has_gateway": False, "workers": list(workers),
        "gpus": None if gpus is None else list(gpus), "ray": None, **more,
    }  # fmt: skip


def wave(count, low, high, period):
    """Return values that go up and down."""
    return [
        round(low + (high - low) * (1 - abs((at % period) / period * 2 - 1)) + (at * 7 % 5) / 5, 2)
        for at in range(count)
    ]


def history(count=720, models=(), workers=()):
    """Return an hour of samples, as columns."""
    now = round(time.time())
    empty = [None] * (count // 4)
    rest = count - len(empty)
    columns = {
        "at": [now - 5 * (count - at) for at in range(count)],
        "requests": wave(count, 10, 90, 97), "errors": [float(at % 60 == 0) for at in range(count)],
        "input_tokens": wave(count, 4000, 30000, 131), "output_tokens": wave(count, 2000, 22000, 97),
        "in_flight": wave(count, 3, 40, 97), "queued": wave(count, 0, 6, 61),
        "ttft_p50_ms": empty + wave(rest, 80, 240, 97), "ttft_p95_ms": empty + wave(rest, 200, 900, 97),
        "kv_use": [value / 100 for value in wave(count, 20, 90, 97)],
    }  # fmt: skip
    of_model = {name: columns[name] for name in ("requests", "output_tokens", "ttft_p50_ms", "in_flight", "queued")}
    of_worker = {name: columns[name] for name in ("kv_use", "in_flight")}
    return {
        "sample_s": 5, "columns": columns, "models": dict.fromkeys(models, of_model),
        "workers": dict.fromkeys(workers, of_worker),
    }  # fmt: skip


def request(number, phase="streaming", **more):
    return {
        "id": f"req-{number:04}", "own_id": f"req-{number:04}", "key": "team-a", "client": "10.0.7.3", "model": "llama-70b", "alias": "", "worker":
        "llama-70b-0", "route": "/v1/chat/completions", "phase": phase, "age_s": 2.5 * number, "queued_s": 0,
        "is_stream": True, "bytes_in": 2200, "bytes_out": 18000, **more,
    }  # fmt: skip


def finished(number, **more):
    """Return a request that has ended, with a second in each phase."""
    return {
        "id": f"mine-{number:04}", "own_id": f"req-{number:04}", "key": "team-a", "client": "10.0.7.3:5000", "method": "POST",
        "path": "/v1/chat/completions", "route": "/v1/chat/completions", "model": "llama-70b", "alias": "", "passed": [],
        "worker": "llama-70b-0", "status": 200, "error": "", "phase": "", "started_at": 1e9 + number,
        "ended_at": 1e9 + number + 5, "duration_s": 5.0,
        "phases": {"queued_s": 1.0, "overhead_s": 1.0, "head_s": 1.0, "first_s": 1.0, "body_s": 1.0},
        "tokens": {"input": 80, "output": 41, "cached": 20, "is_estimate": False}, "bytes_in": 2200, "bytes_out": 18000,
        "chunks": 41, "trace_id": "", **more,
    }  # fmt: skip


def busy_cluster():
    """Return the `state` of two machines with eight GPUs, where some things are wrong."""
    workers = [
        worker("llama-70b-0", in_flight=31, kv_use=0.72, prefix_hit_rate=0.61, running=28, waiting=3),
        worker("llama-70b-1", in_flight=29, kv_use=0.97, prefix_hit_rate=0.55, running=29, waiting=7, machine="gpu-2"),
        worker("qwen3-8b-0", in_flight=4, kv_use=0.12, prefix_hit_rate=0.2, backend="sglang"),
        worker("mistral-24b-0", "cold", on_demand=True),
        worker("vision-7b-0", "loading", phase="loading weights 64 %", on_demand=True, ready_in_s=21.5),
        worker("gemma-27b-0", "failed", restarts=5, failure="ended with exit code 1, five times in a row",
               cause="CUDA out of memory: it tried to allocate 2.4 GiB, and GPU 3 has 1.1 GiB free."),
        worker("embed-0", "restarting", restarts=2, retry_in_s=7.4, failure="was ended by signal SIGKILL",
               cause="The kernel ended it because memory had run out."),
        worker("rerank-0", circuit={"state": "open", "failures": 5, "retry_in_s": 4}),
    ]  # fmt: skip
    models = [
        model("llama-70b", 2, in_flight=60, queued=9, waiting_s=6.2), model("qwen3-8b", in_flight=4),
        model("mistral-24b", 0, loaded=False), model("vision-7b", 0, loaded=False, queued=2, waiting_s=3.0),
        model("gemma-27b", 0), model("embed", 0), model("rerank"),
    ]  # fmt: skip
    machines = [
        machine("gateway-1", cpus=8, has_gateway=True, gpus=None, memory_total_bytes=16 * GIB, memory_available_bytes=9 * GIB),
        machine("gpu-1", ["llama-70b-0", "qwen3-8b-0", "gemma-27b-0"], [
            gpu(0, 128, {"llama-70b-0": 127}), gpu(1, 128, {"llama-70b-0": 127}),
            gpu(2, 52, {"qwen3-8b-0": 38}, use=0.2), gpu(3, 140, {}, use=1.0)]),
        machine("gpu-2", ["llama-70b-1"], [
            gpu(0, 128, {"llama-70b-1": 127}), gpu(1, 128, {"llama-70b-1": 127}),
            gpu(2, 0, {}, use=0.0), gpu(3, 0, {}, use=None, failure="GPU is lost", memory_used_bytes=None)]),
    ]  # fmt: skip
    names = [one["id"] for one in models]
    return {
        "gateway": {"id": "1", "version": "0.1.0", "pid": 1, "uptime_s": 93784.0}, "workers": workers, "models": models,
        "machines": machines, "usage_storage": "ok",
        "aliases": [
            {"name": "gpt-4o", "targets": [{"model": "llama-70b", "weight": 9}, {"model": "qwen3-8b", "weight": 1}],
             "fallbacks": ["mistral-24b"], "longer": "llama-70b", "shadow": None},
            {"name": "small", "targets": [{"model": "qwen3-8b", "weight": 1}], "fallbacks": [], "longer": None,
             "shadow": {"model": "gemma-27b", "share": 0.1}},
        ],
        "history": history(models=names, workers=[one["worker_id"] for one in workers]),
    }  # fmt: skip


def lane(model, worker, key="", name="", tokens=100, **more):
    """Return a lane of an event `lanes`."""
    return {
        "key": key, "name": name or model, "model": model, "worker": worker, "in_flight": 2, "ended": 1,
        "tokens": tokens, **more,
    }  # fmt: skip


def lanes(*found, seconds=1.0, left_out=0):
    """Return the data of an event `lanes`."""
    return {"seconds": seconds, "lanes": list(found), "left_out": left_out}


def busy_lanes():
    """Return lanes that fit the busy cluster."""
    return lanes(
        lane("llama-70b", "llama-70b-0", "team-a", "gpt-4o", 2100, in_flight=20),
        lane("llama-70b", "llama-70b-1", "team-a", "gpt-4o", 1500, in_flight=18),
        lane("llama-70b", "llama-70b-1", "batch", "", 900, in_flight=11),
        lane("qwen3-8b", "qwen3-8b-0", "team-a", "gpt-4o", 240, in_flight=2),
        lane("qwen3-8b", "qwen3-8b-0", "ide", "small", 400, in_flight=2),
        lane("rerank", "rerank-0", "search", "", 0, in_flight=0, ended=12),
    )


def large_cluster(workers, models):
    """Return the `state` of a cluster with this many workers and models, and lanes to most of them."""
    names = [f"model-{number}" for number in range(models)]
    states = ["ready"] * 17 + ["loading", "cold", "failed"]
    found = [
        worker(f"{names[number % models]}-{number // models}", states[number % 20], in_flight=number % 7 if number % 20 < 17 else 0,
               machine=f"gpu-{number // 8}", failure="ended with exit code 1" if number % 20 == 19 else None)
        for number in range(workers)
    ]  # fmt: skip
    machines = [
        machine(f"gpu-{at}", [one["worker_id"] for one in held],
                [gpu(index, 100, {one["worker_id"]: 90}, use=(index * 37 % 100) / 100) for index, one in enumerate(held)])
        for at, held in ((at // 8, found[at : at + 8]) for at in range(0, workers, 8))
    ]  # fmt: skip
    state = {
        **busy_cluster(), "workers": found, "machines": machines,
        "models": [model(name, workers // models, in_flight=at % 9, queued=40 if at == 3 else 0) for at, name in enumerate(names)],
        "aliases": [{"name": f"name-{at}", "targets": [{"model": names[at], "weight": 1}], "fallbacks": [], "longer": None, "shadow": None}
                    for at in range(min(models, 8))],
    }  # fmt: skip
    sent = [
        lane(one["model_name"], one["worker_id"], f"team-{at % 5}", f"name-{at % models}" if at % models < 8 else "", 40 + at % 90)
        for at, one in enumerate(found) if one["state"] == "ready"
    ]  # fmt: skip
    return state, lanes(*sent)


def busy_requests():
    """Return requests in each phase."""
    return {
        "total": 6,
        "requests": [
            request(30, "queued", worker=""), request(22, "waiting", worker="llama-70b-1"), request(9, alias="gpt-4o"),
            request(5, "queued", model="vision-7b", worker=""), request(4, "first_token", key="", worker="qwen3-8b-0"),
            request(1, "plain", is_stream=False),
        ],
    }  # fmt: skip
