"""What is measured against what: each subject starts its processes and says which ratios matter."""

import os
import shutil
import sys

import attrs
from figures import Ratio, Scenario
from processes import HERE, ROOT, Failed, Process, free_port

PYZ = ROOT / "ichat.pyz"
START_S = 60.0
LOAD_MODEL_S = 600.0
LAST_CPU = str(max(os.sched_getaffinity(0)))
"""Engines compute there, so that the rest is left to what is compared."""
MESSAGES = [{"role": "user", "content": "Tell me about the sea and the wind. " * 8}]
ASK = {"model": "tiny", "messages": MESSAGES, "max_tokens": 64, "temperature": 0}

SCENARIOS = [
    Scenario("plain", 32, 8000, ASK),
    Scenario("burst", 64, 1280, {**ASK, "stream": True, "events": 100, "gap_s": 0}, 100, "chunk"),
    Scenario("paced", 128, 256, {**ASK, "stream": True, "events": 50, "gap_s": 0.02}, 50, "chunk"),
]
FEW = {**ASK, "max_tokens": 8, "ignore_eos": True}
"""So few tokens that the request itself is a good part of the work."""
STREAM = {**FEW, "max_tokens": 32, "stream": True, "stream_options": {"include_usage": True}}
ENGINE_SCENARIOS = [Scenario("plain", 32, 320, FEW), Scenario("streamed", 32, 96, STREAM, 0, "token")]
GATEWAY = """\
[server_settings]
port = {port}

[[external_routes]]
model_name = "tiny"
api_base = "http://127.0.0.1:{upstream}/v1"
"""
NGINX = """\
daemon off;
worker_processes 1;
{user}pid nginx.pid;
error_log error.log;
events {{ worker_connections 4096; }}
http {{
    access_log access.log;
    client_body_temp_path bodies;
    proxy_temp_path proxied;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    upstream there {{
        server 127.0.0.1:{upstream};
        keepalive 512;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://there;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""


@attrs.frozen
class Subject:
    """Processes that are measured side by side."""

    title: str
    processes: list[Process]
    scenarios: list[Scenario]
    ratios: list[Ratio]


def gateway(started, args, directory):
    """The gateway before a fast upstream; nginx as a yardstick, where it is installed, and no gateway at all."""
    upstream, port = free_port(), free_port()
    direct = Process("direct", [sys.executable, HERE / "upstream.py", upstream], upstream, directory, counts="nothing")
    started.append(direct)
    direct.wait_until_ready(ASK, START_S)
    config = directory / "ichat.toml"
    config.write_text(GATEWAY.format(port=port, upstream=upstream))
    started.append(Process("iChat", [args.python, PYZ, "gateway", "-c", config], port, directory))
    if nginx := shutil.which("nginx"):
        port = free_port()
        user = "user root;\n" if os.geteuid() == 0 else ""
        config = directory / "nginx.conf"
        config.write_text(NGINX.format(port=port, upstream=upstream, user=user))
        started.append(Process("nginx", [nginx, "-p", directory, "-e", "error.log", "-c", config], port, directory))
    ratios = [Ratio("cpu_us", "iChat", "nginx"), Ratio("p50_ms", "iChat", "direct"), Ratio("p50_ms", "nginx", "direct")]
    for process in started:
        process.wait_until_ready(ASK, START_S)
    return Subject("before a fast upstream; CPU of all processes of each", started, SCENARIOS, ratios)


def worker(started, args, directory):
    """The worker with an engine that costs little, and the engine's application in uvicorn."""
    port = free_port()
    engine = {"PYTHONPATH": str(HERE)}
    command = [args.python, PYZ, "worker", "--backend", "bench", "--served-model-name", "tiny", "--port", port]
    started.append(Process("iChat", command, port, directory, env=engine))
    port = free_port()
    command = [
        args.python,
        "-m",
        "uvicorn",
        "bench_engine:app",
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--no-access-log",
    ]
    command += ["--loop", "uvloop", "--http", "httptools", "--lifespan", "off", "--log-level", "warning"]
    started.append(Process("uvicorn", command, port, directory, env=engine))
    for process in started:
        process.wait_until_ready(ASK, START_S)
    ratios = [Ratio(figure, "iChat", "uvicorn") for figure in ("cpu_us", "rate", "p50_ms")]
    return Subject("with an engine that only answers; CPU of all processes of each", started, SCENARIOS, ratios)


def vllm(started, args, directory):
    """The worker with vLLM, and vLLM's own server."""
    own = ["-m", "vllm.entrypoints.launchers.api_server.entry", "--disable-uvicorn-access-log", "--model"]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": LAST_CPU}
    return engine(started, args, directory, "vLLM", own, ["--max-model-len", "2048", "--enforce-eager"], env)


def sglang(started, args, directory):
    """The worker with SGLang, and SGLang's own server."""
    own = ["-m", "sglang.launch_server", "--log-level-http", "warning", "--model-path"]
    env = {
        "PYTHONPATH": str(ROOT / "tests/support/sglang_on_cpu"),
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": LAST_CPU,
    }
    same = ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    same += ["--device", "cpu", "--disable-overlap-schedule", "--mem-fraction-static", "0.1"]
    same += ["--max-total-tokens", "16384", "--disable-cuda-graph", "--sleep-on-idle", "--enable-metrics"]
    return engine(started, args, directory, "SGLang", own, same, env)


def engine(started, args, directory, name, own, same, env):
    """The worker with an engine, and the engine's own server: both loaded, and asked in turn."""
    backend = name.lower()
    python = args.engine_python or ROOT / f".engines/{backend}/bin/python"
    if not python.exists() or not args.model.exists():
        raise Failed(f"{backend} needs {python} and {args.model}: ./build bench {backend} makes them")
    commands = {
        "iChat": [python, PYZ, "worker", "--backend", backend, "--model", args.model],
        name: [python, *own, args.model],
    }
    for title, command in commands.items():
        port = free_port()
        command = [*command, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", port, *same]
        started.append(Process(title, command, port, directory, counts="alone", env=env))
        started[-1].wait_until_ready(ASK, LOAD_MODEL_S)  # one after the other: a load takes all CPUs
    ratios = [Ratio(figure, "iChat", name) for figure in ("cpu_us", "tree_us", "rate", "p50_ms")]
    title = "on the tiny model; CPU of the process that answers, then of all processes"
    return Subject(title, started, ENGINE_SCENARIOS, ratios)


SUBJECTS = {"gateway": gateway, "worker": worker, "vllm": vllm, "sglang": sglang}
