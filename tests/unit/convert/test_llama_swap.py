"""llama-swap's configuration: each key of its schema and examples is carried over, or named."""

import re

import pytest
from support.converting import converted, table_of

from ichat.convert.command import convert
from ichat.errors import Exit

# The keys that llama-swap's schema and its programs have and iChat has no counterpart for.
WHOLE_FILE = """
logTimeFormat logToStdout logRequests metricsMaxInMemory captureBuffer store ui performance sendLoadingState upstream
profiles matrix no_key_of_anybody
""".split()
MODEL = """
name description metadata capabilities cmdStop unloadTimeout sendLoadingState timeouts compat healthCheckTimeout
no_key_of_anybody
""".split()
PEER = "timeouts no_key_of_anybody".split()
SELECTOR = "strategy settings name description metadata no_key_of_anybody".split()

VLLM = "vllm serve Qwen/Qwen3-8B --port ${PORT}"
DOCKER = (
    "|\n      # a comment with ${PORT}\n      docker run --rm --gpus all -p ${PORT}:8000 \\\n"
    "      docker.io/vllm/vllm-openai:v0.9\n      --model /m\n"
)
ONE = f"models: {{m: {{cmd: '{VLLM}'}}}}\n"


def named_in(text):
    return " ".join(re.findall(r"^# (.*)$", text, re.MULTILINE))


def workers_in(text):
    return table_of(text)["managed_workers"]


@pytest.mark.parametrize("key", WHOLE_FILE)
def test_settings_of_llama_swap_without_a_counterpart_are_named(key):
    """Known or not."""
    assert re.search(rf"\b{key}\b.*: ", named_in(converted(f"{ONE}{key}: {{a: 1}}\n")))


@pytest.mark.parametrize("cmd", [VLLM, "llama-server --port ${PORT}"])
def test_settings_of_a_model_without_a_counterpart_are_named(cmd):
    """For models that become workers, and for models with a server of their own."""
    more = "".join(f", {key}: hidden{n}" for n, key in enumerate(MODEL))
    text = converted(f"models: {{m: {{cmd: '{cmd}'{more}}}}}\n")
    assert [key for key in MODEL if f"models.m.{key}" not in named_in(text)] == []
    assert "hidden" not in text


def test_settings_of_peers_and_selectors_without_a_counterpart_are_named():
    """With their places."""
    peer = ", ".join(f"{key}: 1" for key in PEER)
    selector = ", ".join(f"{key}: 1" for key in SELECTOR)
    text = converted(
        f"{ONE}peers: {{p: {{proxy: 'http://h', models: [a], {peer}}}}}\nselectors: {{s: {{targets: [m], {selector}}}}}\n"
        "routing: {router: {use: matrix, settings: {matrix: {sets: {}}}}, scheduler: {use: fifo, settings: {fifo:"
        " {priority: {m: 1}}}}, x: 1}\ngroups: {g: {members: [m], swap: false, persistent: true, x: 1}}\n"
        "hooks: {on_startup: {preload: [m], x: 1}, y: 1}\n"
    )
    wanted = [*(f"peers.p.{key}" for key in PEER), *(f"selectors.s.{key}" for key in SELECTOR)]
    wanted += ["routing.router.settings.matrix", "routing.scheduler.settings.fifo.priority", "routing.x"]
    wanted += ["groups.g.persistent", "groups.g.exclusive", "groups.g.x"]
    wanted += ["hooks.on_startup.preload, m", "hooks.on_startup.x", "hooks.y"]
    assert [path for path in wanted if path not in named_in(text)] == []


@pytest.mark.parametrize(
    ("cmd", "worker"),
    [
        (VLLM, {"model_path": "Qwen/Qwen3-8B", "backend": "vllm"}),
        (
            "/opt/env/bin/vllm serve /m --max-model-len 8192 --host 0.0.0.0 -tp 2 --served-model-name x --no-enable-log",
            {
                "model_path": "/m",
                "backend": "vllm",
                "backend_args": {"max_model_len": 8192, "tensor_parallel_size": 2, "enable_log": False},
            },
        ),
        (
            "python -m vllm.entrypoints.openai.api_server --model /m --enforce-eager",
            {"model_path": "/m", "backend": "vllm", "backend_args": {"enforce_eager": True}},
        ),
        (
            "python3 -m sglang.launch_server --model-path=/m --mem-fraction-static 0.8",
            {"model_path": "/m", "backend": "sglang", "backend_args": {"mem_fraction_static": 0.8}},
        ),
        ("sh -c 'exec vllm serve /m'", {"model_path": "/m", "backend": "vllm"}),
        ("uvx vllm serve /m", {"model_path": "/m", "backend": "vllm"}),
        (DOCKER, {"model_path": "/m", "backend": "vllm"}),
    ],
)
def test_a_command_with_an_engine_becomes_a_worker(cmd, worker):
    """On demand, as llama-swap has all its models; flags that the gateway replaces are left out."""
    text = converted(f"models:\n  m:\n    cmd: {cmd}\n")
    assert workers_in(text) == [{"model_name": "m", "load": "on_demand", **worker}]
    assert ("It ran in a container" in text) == ("docker" in cmd)


@pytest.mark.parametrize(
    "cmd", ["vllm serve", "vllm serve /m -x 3", "vllm serve /m --a 1 --a 2", "vllm serve 'no end", "llama-server -m /m"]
)
def test_a_command_that_is_no_engine_is_the_users(cmd):
    """It stands in a comment: the server is started elsewhere, and is reached at its port."""
    text = converted(f'models: {{m: {{cmd: "{cmd} --port ${{PORT}}"}}}}\nstartPort: 7000\n')
    assert table_of(text) == {"registered_servers": [{"model_name": "m", "api_base": "http://localhost:7000"}]}
    assert f"Start this yourself: {cmd} --port 7000" in named_in(text)


def test_settings_of_a_worker_are_carried():
    """Idle seconds, requests at once, GPUs, and variables that hold no secret of the environment."""
    text = converted(f"""
globalTTL: 9
healthCheckTimeout: 500
unloadTimeout: 20
logLevel: warn
models:
  a: {{cmd: '{VLLM}', ttl: 60, concurrencyLimit: 4, env: ["CUDA_VISIBLE_DEVICES=0,1", "A=b=c", "T=${{env.TOKEN}}"]}}
  b: {{cmd: '{VLLM}'}}
  c: {{cmd: '{VLLM}', ttl: 0, concurrencyLimit: 0, useModelName: x}}
""")
    worker = {"model_path": "Qwen/Qwen3-8B", "backend": "vllm", "load": "on_demand"}
    assert workers_in(text) == [
        {"model_name": "a", **worker, "gpu_ids": [0, 1], "idle_s": 60, "max_in_flight": 4, "env": {"A": "b=c"}},
        {"model_name": "b", **worker, "idle_s": 9},
        {"model_name": "c", **worker},
    ]
    assert table_of(text)["timeouts"] == {"load_s": 500, "stop_s": 20}
    assert table_of(text)["server_settings"] == {"log_level": "warning"}
    assert "models.a.env.T: a worker has the gateway's environment" in named_in(text)


def test_macros_are_replaced(monkeypatch):
    """A model's own before those of the file, macros in macros, numbers as numbers, variables by their values."""
    monkeypatch.setenv("MODELS_OF_MINE", "/models")
    text = converted("""
macros: {dir: "${env.MODELS_OF_MINE}", ctx: 4096, args: "--max-model-len ${ctx}", base: "vllm serve ${dir}/${MODEL_ID}"}
models:
  a: {cmd: "${base} ${args} --port ${PORT}", concurrencyLimit: "${limit}", macros: {ctx: 16384, limit: 3}}
  b: {cmd: "${base} --seed ${unknown}"}
""")
    first, second = workers_in(text)
    assert (first["model_path"], first["backend_args"], first["max_in_flight"]) == (
        "/models/a",
        {"max_model_len": 16384},
        3,
    )
    assert "registered_servers" not in table_of(text)
    assert second["model_path"] == "/models/b"
    assert "have no value here, and stand as they were: unknown" in named_in(text)
    assert "values that these variables have now: MODELS_OF_MINE" in named_in(text)


def test_macros_outside_models_are_named_too(monkeypatch):
    """The URL of a peer has the value of a variable now, or a macro that stands as it was."""
    monkeypatch.setenv("HOST_OF_MINE", "h.test")
    text = converted("""
macros: {host: "${env.HOST_OF_MINE}"}
peers: {p: {proxy: "http://${host}:9/${unknown}", models: [c]}}
""")
    assert table_of(text)["external_routes"][0]["api_base"] == "http://h.test:9/${unknown}/v1"
    assert "- peers: these macros or variables have no value here, and stand as they were: unknown" in named_in(text)
    assert "- peers: has the values that these variables have now: HOST_OF_MINE" in named_in(text)


def test_ports_are_those_of_llama_swap():
    """The models that have ${PORT} get them in the order of their names."""
    text = converted("""
models:
  b: {cmd: "s --port ${PORT}"}
  a: {cmd: "s --port ${PORT}", proxy: "http://127.0.0.1:${PORT}"}
  c: {cmd: "s --port 9", proxy: "http://h:9"}
  d: {cmd: "s --port ${PORT}"}
""")
    servers = {one["model_name"]: one["api_base"] for one in table_of(text)["registered_servers"]}
    assert servers == {
        "a": "http://127.0.0.1:5800", "b": "http://localhost:5801", "c": "http://h:9", "d": "http://localhost:5802",
    }  # fmt: skip


def test_a_secret_of_the_environment_stays_there(monkeypatch):
    """The command that is shown has its name."""
    monkeypatch.setenv("KEY_OF_MINE", "sk-secret")
    text = converted("models: {m: {cmd: 's --api-key ${env.KEY_OF_MINE}', proxy: 'http://h:1'}}\n")
    assert "sk-secret" not in text
    assert "s --api-key ${env.KEY_OF_MINE}" in text


def test_macros_have_a_bound():
    """Ten macros that double thirty times each are a sentence, not the memory."""
    lines = "".join(f'  m{n + 1}: "{f"${{m{n}}}" * 30}"\n' for n in range(10))
    with pytest.raises(Exit, match="Its macros make more than"):
        convert(f'macros:\n  m0: "{"x" * 99}"\n{lines}models: {{a: {{cmd: "${{m10}}"}}}}\n', "c.yaml")
    with pytest.raises(Exit, match="Its macros make more than"):
        convert(f'macros: {{a: "{"x" * 99999}"}}\nmodels: {{a: {{cmd: "{"${a}" * 999}"}}}}\n', "c.yaml")
    converted('macros: {a: "${b}", b: "${a}"}\nmodels: {a: {cmd: "${a}", proxy: "http://h"}}\n')


def test_a_server_with_more_settings_is_a_route():
    """A name of its own at the server, or another path for health checks: only external routes have these."""
    text = converted("""
models:
  a: {cmd: s, proxy: "http://h:1", useModelName: org/a, checkEndpoint: /up, concurrencyLimit: 2}
  b: {cmd: s, proxy: "http://h:2/v1/", checkEndpoint: none}
  c: {cmd: s, proxy: "unix:///x"}
""")
    assert table_of(text)["external_routes"] == [
        {
            "model_name": "a",
            "api_base": "http://h:1/v1",
            "upstream_model": "org/a",
            "health_path": "/up",
            "max_in_flight": 2,
        },
        {"model_name": "b", "api_base": "http://h:2/v1"},
    ]
    assert "models.c: has no proxy that is a URL" in named_in(text)


def test_other_names_of_a_model_are_names():
    """Aliases are hidden unless llama-swap lists them; filters count for each name."""
    more = "aliases: [x, y, x], unlisted: true, filters: {stripParams: 'top_k, model, temperature', setParams: {temperature: 1},"
    more += " setParamsByID: {y: {seed: 2}, '${MODEL_ID}:hot': {temperature: 2}}}"
    text = converted(f"models: {{m: {{cmd: '{VLLM}', {more}}}}}\n")
    common = {"set": {"temperature": 1}, "drop": ["top_k"]}
    to_m = {"targets": [{"model": "m"}], "hidden": True, "drop": ["top_k"]}
    assert {one.pop("name"): one for one in table_of(text)["models"]} == {
        "m": {**common, "hidden": True},
        "x": {**to_m, **common},
        "y": {**to_m, "set": {"temperature": 1, "seed": 2}},
        "m:hot": {**to_m, "set": {"temperature": 2}},
    }
    listed = converted(f"includeAliasesInList: true\nmodels: {{m: {{cmd: '{VLLM}', aliases: [x]}}}}\n")
    assert table_of(listed)["models"] == [{"name": "x", "targets": [{"model": "m"}]}]


@pytest.mark.parametrize(
    ("groups", "sets"),
    [
        ("", [["a", "b", "c", "d"]]),
        ("groups: {g: {members: [a, b]}}", [["a", "b", "c", "d"]]),
        ("groups: {g: {members: [a, b]}, h: {members: [c, d]}}", [["a", "b", "c", "d"]]),
        ("groups: {g: {members: [a, b], exclusive: false}}", [["a", "b"], ["c", "d"]]),
        ("groups: {g: {members: [a, b], swap: false, exclusive: false}}", [["c", "d"]]),
        ("groups: {g: {members: [a, b, server], exclusive: false}, h: {members: [c, d], swap: false}}", [["a", "b"]]),
        ("routing: {router: {settings: {groups: {g: {members: [a, b], exclusive: false}}}}}", [["a", "b"], ["c", "d"]]),
        ("matrix: {vars: {}, sets: {}}", []),
    ],
)
def test_groups_become_swap_sets(groups, sets):
    """Models that llama-swap swaps for each other; without groups these are all. Servers are not ours to swap."""
    models = ", ".join(f"{name}: {{cmd: '{VLLM}'}}" for name in "abcd")
    text = converted(f"models: {{{models}, server: {{cmd: 's ${{PORT}}'}}}}\n{groups}\n")
    assert [one["members"] for one in table_of(text).get("swap_sets", [])] == sets


def test_selectors_become_names():
    """pin is the first target; the other strategies go on to the next while a target is loading or full."""
    text = converted(f"""
models: {{m: {{cmd: '{VLLM}', aliases: [n]}}, k: {{cmd: '{VLLM}'}}}}
selectors:
  first: {{strategy: pin, targets: [n, k]}}
  warm: {{strategy: warm, targets: [k, n], unlisted: true}}
  n: {{strategy: pin, targets: [k]}}
  none: {{strategy: pin, targets: []}}
""")
    names = {one.pop("name"): one for one in table_of(text)["models"]}
    assert names["first"] == {"targets": [{"model": "m"}]}
    assert names["warm"]["fallbacks"] == ["m"]
    assert {"busy", "loading"} <= set(names["warm"]["fallback_on"])
    assert names["warm"]["hidden"] is True
    assert "selectors.n, selectors.none: needs targets" in named_in(text)


def test_peers_become_routes():
    """With the peer's name before each model, and alone where the name is free."""
    text = converted(f"""
models: {{a: {{cmd: '{VLLM}'}}}}
peers:
  p: {{proxy: "http://h:1", models: [a, b], filters: {{stripParams: top_p, setParams: {{x: 1}}}}}}
  q: {{proxy: "https://q/api", models: [b, c], apiKey: "${{env.Q_KEY}}"}}
  r: {{proxy: "https://r/v1", models: [d], apiKey: sk-of-mine}}
""")
    routes = {one.pop("model_name"): one for one in table_of(text)["external_routes"]}
    assert routes == {
        "p/a": {"api_base": "http://h:1/v1", "upstream_model": "a"},
        "p/b": {"api_base": "http://h:1/v1", "upstream_model": "b"},
        "q/b": {"api_base": "https://q/api/v1", "upstream_model": "b", "api_key_env": "Q_KEY"},
        "q/c": {"api_base": "https://q/api/v1", "upstream_model": "c", "api_key_env": "Q_KEY"},
        "r/d": {"api_base": "https://r/v1", "upstream_model": "d", "headers": {"Authorization": "Bearer sk-of-mine"}},
    }
    names = {one.pop("name"): one for one in table_of(text)["models"]}
    changes = {"set": {"x": 1}, "drop": ["top_p"]}
    assert names["p/a"] == names["p/b"] == changes
    assert names["b"] == {"targets": [{"model": "p/b"}], "hidden": True, **changes}
    assert "a" not in names
    assert "The key belongs into a variable of the gateway's environment" in text


def test_keys_of_clients_are_hashes():
    """A literal key is known by its hash, a variable by its name; the same key twice is one key."""
    text = converted(f"{ONE}apiKeys: [sk-hunter2, 'sk-long-enough-to-be-a-key', '${{env.A_KEY}}', sk-hunter2]\n")
    first, second, third = table_of(text)["security"]["keys"]
    assert first.keys() == second.keys() == {"name", "key_hash"}
    assert third == {"name": "llama-swap-3", "key_env": "A_KEY"}
    assert text.count("so that it can be guessed") == 1
    assert "hunter2" not in text


@pytest.mark.parametrize(
    "yaml",
    [
        "models: 3\nmacros: {}", "models: {a: 3}\nmacros: {}", "models: {a: {cmd: 3}}", "groups: 3", "groups: {a: 3}",
        "peers: {a: 3}", "peers: {a: {proxy: 3, models: [b]}}", "selectors: {a: 3}", "hooks: 3", "apiKeys: 3",
        "logLevel: 3", "healthCheckTimeout: soon", "startPort: x", "macros: 3", "startPort: 99999",
        "models: {a: {cmd: s, aliases: 3, env: 3, filters: 3, ttl: x, concurrencyLimit: x, proxy: 3}}",
    ],
)  # fmt: skip
def test_values_of_the_wrong_type_end_nothing(yaml):
    """The result is a configuration all the same."""
    converted(yaml, "llama-swap")
