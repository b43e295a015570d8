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
MESSAGES = [{"role": "user", "content": "Tell me about the sea and the wind. " * 8}]
ASK = {"model": "tiny", "messages": MESSAGES, "max_tokens": 64, "temperature": 0}

SCENARIOS = [
    Scenario("plain", 32, 8000, ASK),
    Scenario("burst", 64, 1280, {**ASK, "stream": True, "events": 100, "gap_s": 0}, 100, "chunk"),
    Scenario("paced", 128, 256, {**ASK, "stream": True, "events": 50, "gap_s": 0.02}, 50, "chunk"),
]
TOKENS = {**ASK, "ignore_eos": True}
VLLM_SCENARIOS = [
    Scenario("streamed", 32, 192, {**TOKENS, "stream": True, "stream_options": {"include_usage": True}}, 0, "token"),
    Scenario("plain", 32, 192, TOKENS, 0, "token"),
]
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
    """The worker with vLLM, and vLLM's own server: both loaded at once, asked in turn."""
    if not args.engine_python.exists() or not args.model.exists():
        raise Failed(f"vllm needs {args.engine_python} and {args.model}: ./build bench vllm makes them")
    same = ["--model", args.model, "--served-model-name", "tiny", "--max-model-len", "2048", "--enforce-eager"]
    same += ["--host", "127.0.0.1", "--port"]
    commands = {
        "iChat": [args.engine_python, PYZ, "worker", *same],
        "vLLM": [
            args.engine_python, "-m", "vllm.entrypoints.launchers.api_server.entry",
            "--disable-uvicorn-access-log", *same,
        ],
    }  # fmt: skip
    last_cpu = str(
        max(os.sched_getaffinity(0))
    )  # the engine computes there, so that the rest is left to what is compared
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": last_cpu}
    for name, command in commands.items():
        port = free_port()
        started.append(Process(name, [*command, port], port, directory, counts="alone", env=env))
    for process in started:
        process.wait_until_ready(ASK, LOAD_MODEL_S)
    ratios = [Ratio(figure, "iChat", "vLLM") for figure in ("cpu_us", "rate", "p50_ms")]
    title = "on the tiny model; CPU of the process that answers, without that of vLLM's engine core"
    return Subject(title, started, VLLM_SCENARIOS, ratios)


SUBJECTS = {"gateway": gateway, "worker": worker, "vllm": vllm}
