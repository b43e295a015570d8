"""The configuration: everything wrong with it is said at once, and nothing is guessed."""

import json
import pathlib
import re

import attrs
import pytest

from ichat.config import load as configuration
from ichat.config import schema
from ichat.config.engine_args import arguments_of
from ichat.engines.flags import engine_flags
from ichat.errors import EXIT_USAGE, ApiError, Exit

ROOT = pathlib.Path(__file__).parents[3]
EXAMPLE = ROOT / "ichat.toml.example"
NONE = schema.Config()


def problems_of(text):
    with pytest.raises(Exit) as caught:
        configuration.parse(text, "x.toml")
    assert caught.value.code == EXIT_USAGE
    return str(caught.value).splitlines()


def test_every_problem_is_reported_with_its_path():
    """One look at the message is enough to mend the whole file."""
    found = problems_of("""
        portt = 1
        [server_settings]
        port = "4000"
        hots = "x"
        log_level = "loud"
        [limits]
        connections_max = 0
        head_bytes_max = true
        [timeouts]
        drain_s = "30"
        [[managed_workers]]
        model_name = "a"
        gpu_idz = [1]
        [[managed_workers]]
        model_name = ""
        model_path = 3
        env = { A = 1 }
        [[external_routes]]
        model_name = "x"
        api_base = "ftp://x"
        [engines.vllm]
        pyton = "x"
    """)
    paths = [line.strip().split(":")[0] for line in found[1:]]
    assert found[0] == "x.toml was not accepted:"
    assert paths == [
        "engines.vllm.pyton",
        "external_routes[0].api_base",
        "limits.connections_max",
        "limits.head_bytes_max",
        "managed_workers[0].gpu_idz",
        "managed_workers[0].model_path",
        "managed_workers[1].env.A",
        "managed_workers[1].model_name",
        "managed_workers[1].model_path",
        "portt",
        "server_settings.hots",
        "server_settings.log_level",
        "server_settings.port",
        "timeouts.drain_s",
    ]
    assert "did you mean gpu_ids?" in "".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "server_settings = 3",
        "managed_workers = 3",
        "managed_workers = [3]",
        "engines = 3",
        "engines.vllm = 3",
        "a = [",
        "a = " + "[" * 5000,
        "a = " + "1" * 5000,
        "\0",
    ],
)
def test_the_wrong_shape_is_one_clear_problem(text):
    """A value where a table belongs, or no TOML at all, is a sentence and not a traceback."""
    found = problems_of(text)
    assert 1 <= len(found) <= 2


def test_a_model_has_one_meaning():
    """A name is either a worker's or an external route's."""
    found = problems_of("""
        managed_workers = [{ model_name = "a", model_path = "/a" }]
        external_routes = [{ model_name = "a", api_base = "http://x/v1" }]
    """)
    assert "managed_workers[0].model_name" in found[1]


def test_unknown_keys_of_a_worker_are_the_engines():
    """Engine arguments may stand inline or in a table of their own, and become the engine's flags."""
    config = configuration.parse(
        """
        [[managed_workers]]
        model_name = "a"
        model_path = "/a"
        max_model_len = 2048
        enforce_eager = true
        enable_prefix_caching = false
        limit_mm_per_prompt = { image = 2 }
        lora_modules = ["a=b", "c=d"]
        [managed_workers.backend_args]
        gpu_memory_utilization = 0.5
        """,
        "x.toml",
    )
    assert engine_flags(config.managed_workers[0].backend_args) == [
        "--max-model-len=2048",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--limit-mm-per-prompt",
        '{"image": 2}',
        "--lora-modules",
        "a=b",
        "c=d",
        "--gpu-memory-utilization=0.5",
    ]


def test_invalid_members_of_a_route_are_refused():
    """Headers that would break the protocol, paths that lead nowhere, a model name of two lines: each with its reason."""
    found = problems_of("""
        [[external_routes]]
        model_name = "m"
        api_base = "https://user:password@there/v1"
        upstream_model = "a\\nb"
        headers = { "X-A" = "a\\r\\nX-B: b" }
        additional_drop_params = ["a..b", "x"]
        [[external_routes]]
        model_name = "n"
        api_base = "https://there/v1?x=1"
        headers = { Content-Length = "3" }
        additional_drop_params = ["model"]
        max_in_flight = 0
    """)
    text = "\n".join(found)
    assert "password" not in text
    for path in ("[0].api_base", "[0].upstream_model", "[0].headers", "[0].additional_drop_params",
                 "[1].api_base", "[1].headers", "[1].additional_drop_params", "[1].max_in_flight"):  # fmt: skip
        assert len([line for line in found if f"external_routes{path}: " in line]) == 1, (path, text)
    assert len(found) == 9


def test_a_certificate_needs_its_key():
    """One without the other is a contradiction, found at once."""
    assert "go together" in problems_of('[server_settings]\ntls_key = "k"')[1]


def test_relays_are_a_bounded_number_or_cores():
    """Any other number, word or type is a problem of one line, and so is a port that each start chooses anew."""
    for value in (0, 1, 64, "cores"):
        config = configuration.parse(f"[server_settings]\nrelays = {json.dumps(value)}\n", "x.toml")
        assert config.server_settings.relays == value
    for value in ("-1", "65", '"all"', "true", "1.5", "[1]"):
        (found,) = problems_of(f"[server_settings]\nrelays = {value}\n")[1:]
        assert found.startswith("  server_settings.relays: must be ")
        assert '"cores"' in found
    (found,) = problems_of("[server_settings]\nport = 0\nrelays = 1\n")[1:]
    assert found.startswith("  server_settings.relays: needs a server_settings.port that is not 0")


def test_a_worker_that_is_kept_can_be_found_again():
    """It outlives its gateway only where the next one finds it, and its output needs no gateway."""
    worker = 'managed_workers = [{ model_name = "a", model_path = "/a", on_gateway_exit = "keep"%s }]\n'
    settings = "[server_settings]\nport = 0\n"
    (found,) = problems_of(worker % "" + settings)[1:]
    assert found.startswith("  managed_workers[0].on_gateway_exit: ")
    assert "state_directory" in found
    (found,) = problems_of(worker % ", log_streaming = false")[1:]
    assert found.startswith("  managed_workers[0].on_gateway_exit: ")
    assert "log_streaming" in found
    for text in (worker % "", worker % "" + settings + "state_directory = '/x'"):
        assert configuration.parse(text, "x.toml").managed_workers[0].on_gateway_exit == "keep"


def test_invalid_bounds_of_logs_and_restarts_are_refused():
    """Each new bound is checked, and a path is one."""
    found = problems_of("""
        [server_settings]
        state_directory = ""
        watch_config = "yes"
        [logs]
        line_bytes_max = 65537
        ring_bytes_max = 65535
        directory = "a\\u0000b"
        files_max = 0
        echo = 1
        [restart]
        attempts_max = 0
        first_s = 0
        [timeouts]
        stuck_s = -1
        load_s = 0
        [[managed_workers]]
        model_name = "a"
        model_path = "/a"
        on_gateway_exit = "stay"
        share_gpus = 1
        gpu_ids = {}
        orphan_after_s = 3
    """)
    assert [line.strip().split(":")[0] for line in found[1:]] == [
        "logs.directory",
        "logs.echo",
        "logs.files_max",
        "logs.line_bytes_max",
        "logs.ring_bytes_max",
        "managed_workers[0].gpu_ids",
        "managed_workers[0].on_gateway_exit",
        "managed_workers[0].share_gpus",
        "restart.attempts_max",
        "restart.first_s",
        "server_settings.state_directory",
        "server_settings.watch_config",
        "timeouts.load_s",
        "timeouts.stuck_s",
    ]
    found = problems_of('managed_workers = [{ model_name = "a", model_path = "/a", orphan_after_s = 3 }]')
    assert "backend_args.orphan_after_s: is iChat's" in found[1]


def test_no_flag_of_an_engine_looks_like_a_typing_error():
    """Every flag that the documents name can stand inline, unless iChat has the same."""
    ours = {attribute.name for attribute in attrs.fields(schema.ManagedWorkerConfig)}
    text = (ROOT / "ichat/engines/FLAGS.md").read_text()
    flags = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z0-9-]+)", text)} - ours
    assert len(flags) > 300
    flags -= configuration._NOT_THE_ENGINES
    worker = configuration.read_worker({"model_name": "a", "model_path": "/a"} | dict.fromkeys(flags, 1), NONE)
    assert set(worker.backend_args) == flags


def refusal(table, config=NONE):
    with pytest.raises(ApiError) as caught:
        configuration.read_worker(table, config)
    assert (caught.value.status, caught.value.code) == (400, "bad_request")
    return caught.value.message


def test_a_worker_of_the_api_has_the_keys_of_the_file():
    """The same table, as JSON: engine arguments inline or apart, null for what is left out."""
    table = {
        "model_name": "a", "model_path": "/a", "backend": "sglang", "gpu_ids": [0], "host": "0.0.0.0", "port": 9000,
        "heartbeat_interval": 3, "max_in_flight": None, "python": None, "on_gateway_exit": None, "tensor_parallel_size": 2,
        "seed": None, "hf_overrides": {"x": None}, "backend_args": {"dtype": "half", "seed": None},
    }  # fmt: skip
    given = dict(table)
    worker = configuration.read_worker(table, NONE)
    assert worker == schema.ManagedWorkerConfig(
        model_name="a", model_path="/a", backend="sglang", gpu_ids=[0], host="0.0.0.0", port=9000,
        backend_args={"tensor_parallel_size": 2, "hf_overrides": {"x": None}, "dtype": "half"},
    )  # fmt: skip
    assert table == given
    assert configuration.read_worker(attrs.asdict(worker), NONE) == worker


def test_every_problem_of_the_apis_worker_is_said_at_once():
    """In one sentence, each with its path; what may be secret is not repeated."""
    message = refusal({"model_nam": "a", "port": "1", "gpu_ids": "01", "env": {"TOKEN": 12345}, "x": [1, None]})
    for path in ("model_name: is missing", "model_path: is missing", "port: must be a whole", "gpu_ids: must be an array",
                 "env.TOKEN: must be a string", "did you mean model_name?", "backend_args.x: must not hold a null"):  # fmt: skip
        assert message.count(path) == 1, (path, message)
    assert "12345" not in message
    assert "\n" not in message
    assert "hunter2" not in refusal({"model_name": "a", "model_path": "/a", "env": "hunter2"})


@pytest.mark.parametrize("body", [None, 3, "x", [], [{}], {}, {"model_name": 10**400, "model_path": []}])
def test_json_that_is_no_worker_is_refused(body):
    """Any JSON is answered with a sentence."""
    assert refusal(body)


def test_numbers_beyond_reason_are_refused():
    """Not even what no float can hold is more than a wrong value."""
    message = refusal({"model_name": "a", "model_path": "/a", "port": 10**400, "heartbeat_interval": 10**400})
    assert "port: " in message
    assert "heartbeat_interval: " in message


def test_a_worker_of_the_api_contradicts_nothing():
    """What the file may not say, the API may not either."""
    config = configuration.parse('external_routes = [{ model_name = "a", api_base = "http://x/v1" }]', "x.toml")
    worker = {"model_name": "a", "model_path": "/a"}
    assert "is also an external route" in refusal(worker, config)
    assert "backend_args.worker_id: is iChat's" in refusal(worker | {"worker_id": "x"})
    port_0 = configuration.parse("[server_settings]\nport = 0", "x.toml")
    message = refusal(worker | {"on_gateway_exit": "keep", "log_streaming": False}, port_0)
    assert message.count("on_gateway_exit: ") == 2


def test_when_to_unload_is_only_said_of_workers_on_demand():
    """A key that would mean nothing is a problem in one sentence; one that says the default is none."""
    worker = 'managed_workers = [{ model_name = "a", model_path = "/a", %s }]\n'
    found = problems_of(worker % 'idle_s = 5, when_idle = "sleep", min_loaded_s = 0')[1:]
    assert [line.strip().split(":")[0] for line in found] == [
        "managed_workers[0].idle_s", "managed_workers[0].min_loaded_s", "managed_workers[0].when_idle",
    ]  # fmt: skip
    assert all('load = "on_demand"' in line for line in found)
    keys = 'load = "on_demand", idle_s = 5, when_idle = "sleep", min_loaded_s = 0'
    (found,) = configuration.parse(worker % keys, "x.toml").managed_workers
    assert (found.load, found.idle_s, found.when_idle, found.min_loaded_s) == ("on_demand", 5.0, "sleep", 0.0)
    assert configuration.parse(worker % "idle_s = 0, min_loaded_s = 30", "x.toml").managed_workers[0].load == "start"
    found = problems_of(worker % 'load = "later", when_idle = "rest", idle_s = -1, min_loaded_s = true')[1:]
    assert len(found) == 4
    assert "idle_s: is for workers" in refusal({"model_name": "a", "model_path": "/a", "idle_s": 5})


def test_a_swap_set_has_workers_on_demand():
    """A member that is none, a name twice, or the same set twice would never do what its author meant."""
    workers = """
        managed_workers = [
            { model_name = "a", model_path = "/a", load = "on_demand" },
            { model_name = "b", model_path = "/b", load = "on_demand" },
            { model_name = "c", model_path = "/c" },
        ]
    """
    config = configuration.parse(workers + 'swap_sets = [{ members = ["a", "b"] }]', "x.toml")
    assert config.swap_sets == [schema.SwapSetConfig(["a", "b"], 1)]
    found = problems_of(workers + 'swap_sets = [{ members = ["a", "b"] }, { members = ["c", "d"] }]')[1:]
    assert [line.strip() for line in found] == [
        f"swap_sets[1].members: no managed worker of '{name}' has load = \"on_demand\"" for name in "cd"
    ]
    found = problems_of(workers + 'swap_sets = [{ members = ["a", "b"] }, { members = ["b", "a"], loaded_max = 2 }]')[
        1:
    ]
    assert found == ["  swap_sets[1].members: another set has the same members"]
    sets = '{ members = [] }, { members = ["a", "a"] }, { members = ["a"], loaded_max = 0 }, { members = ["a\\n"] }, {}'
    found = problems_of(f"{workers}swap_sets = [{sets}]")[1:]
    assert [line.strip().split(":")[0] for line in found] == [
        "swap_sets[0].members", "swap_sets[1].members", "swap_sets[2].loaded_max", "swap_sets[3].members",
        "swap_sets[4].members",
    ]  # fmt: skip


def test_limits_for_a_day_or_a_month_need_the_ledger_and_prices():
    """Without a ledger they would begin anew with each start, and a budget without a price would never end."""
    assert configuration.parse('[limits]\ntokens_per_day = 5\nbudget_per_month = 0.5\n[prices."m"]\noutput = 1', "x")
    key = '[[security.keys]]\nname = "a"\nkey_hash = "sha256:' + 64 * "0" + '"\n'
    found = problems_of(f"usage.enabled = false\nlimits.tokens_per_day = 5\n{key}tokens_per_month = 7")[1:]
    assert [line.strip().split(": needs ")[0] for line in found] == [
        "limits.tokens_per_day", "security.keys[0].tokens_per_month",
    ]  # fmt: skip
    assert "needs a price" in problems_of("limits.budget_per_month = 5")[1]
    assert "needs a price" in problems_of('limits.budget_per_month = 5\n[prices."m"]\ncached = 1')[1]
    assert "prices: must be 1 to 256" in problems_of('[prices."a\\n"]')[1]
    assert "prices.m.input: must be from 0" in problems_of('[prices."m"]\ninput = -1')[1]


def test_the_example_is_accepted_and_complete():
    """The example loads, and every key that there is stands in it with an explanation; defaults are as it says."""
    text = EXAMPLE.read_text()
    config = configuration.load(EXAMPLE)
    tables = {"managed_workers", "swap_sets", "registered_servers", "external_routes", "engines", "models", "prices"}
    for name in {attribute.name for attribute in attrs.fields(schema.Config)} - tables:
        section = getattr(config, name)
        if name == "security":
            assert [key.name for key in section.keys] == ["team-a"]
            section = attrs.evolve(section, keys=[])
        assert section == type(section)(), "the example shows the defaults"
        for attribute in attrs.fields(type(section)):
            if attribute.name == "keys":
                continue
            is_table = f"[{name}.{attribute.name}." in text
            assert is_table or re.search(rf"^#?{attribute.name} = ", text, re.MULTILINE), attribute.name
    for section in (
        schema.Key,
        schema.ManagedWorkerConfig,
        schema.SwapSetConfig,
        schema.RegisteredServer,
        schema.ExternalRoute,
        schema.EngineSettings,
        schema.RayEngine,
        schema.Price,
        schema.AliasConfig,
        schema.TargetConfig,
        schema.ShadowConfig,
    ):
        for attribute in attrs.fields(section):
            assert f"{attribute.name} = " in text or f".{attribute.name}]" in text, attribute.name


def test_the_readmes_configuration_is_accepted():
    """The README's file can be copied unchanged."""
    [text] = re.findall(r"```toml\n(.*?)```", (EXAMPLE.parent / "README.md").read_text(), re.DOTALL)
    assert configuration.parse(text, "README.md").managed_workers


def test_a_file_that_cannot_be_read(tmp_path):
    """It is a sentence with the path and the reason."""
    with pytest.raises(Exit, match=r"none\.toml cannot be read: No such file"):
        configuration.load(tmp_path / "none.toml")


def test_the_recipes_are_accepted():
    """Each file can be copied unchanged, and names nothing that it does not have."""
    recipes = {}
    for section in (EXAMPLE.parent / "docs/recipes.md").read_text().split("\n## ")[1:]:
        title, _, rest = section.partition("\n")
        for block in re.findall(r"```toml\n(.*?)```", rest, re.DOTALL):
            recipes[title] = configuration.parse(block, title)
    on_demand = recipes["Nine models, one GPU"].managed_workers
    assert {worker.load for worker in on_demand} == {"on_demand"}
    assert len({tuple(worker.gpu_ids) for worker in on_demand}) == 1
    assert {worker.when_idle for worker in on_demand} == {"stop", "sleep"}
    for title in ("Canary", "The cloud as a spare"):
        config = recipes[title]
        served = {one.model_name for one in (*config.managed_workers, *config.external_routes)}
        [alias] = config.models
        assert alias.name == "assistant"
        assert set(alias.models) == served
    assert sum(target.weight for target in recipes["Canary"].models[0].targets) == 100
    assert recipes["Add models served elsewhere"].external_routes
    assert recipes["Let others in"].security.keys
    assert recipes["Claude Code and Codex"].models


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("[server_settings]\nport = 4711\nhots = 1\n[routing]\npolicy = 3\n", 4711),
        ("[server_setings]\n", 4000),
        ("[server_settings]\nport = 'x'\n", None),
        ("[server_settings]\nport = 4711\nhost = [\n", None),
        ("server_settings = 3\n", None),
    ],
)
def test_where_the_gateway_of_a_refused_file_is(tmp_path, text, port):
    """By those keys alone that say so: other mistakes do not matter, and wrong ones lead nowhere."""
    path = tmp_path / "ichat.toml"
    path.write_text(text)
    found = configuration.settings_of_refused(path)
    assert (found.port if found else None) == port


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("gpus = 2\ngpu_ids = [0]", "gpus: gpus and gpu_ids exclude each other: give the number, or the GPUs"),
        ("gpus = 1.5", "gpus: A worker has whole GPUs, or a share of a GPU: 1.5 is neither"),
        ("gpus = -1", 'gpus: must be "auto", a share from 0.05 to 1, or a whole number from 0 to 64, not -1'),
        ("gpus = 65", 'gpus: must be "auto", a share from 0.05 to 1, or a whole number from 0 to 64, not 65'),
        ("gpus = 0.01", 'gpus: must be "auto", a share from 0.05 to 1, or a whole number from 0 to 64, not 0.01'),
        ("gpus = true", 'gpus: must be a number of GPUs, a share of a GPU, or "auto", not true'),
        ("gpus = 'all'", 'gpus: must be a number of GPUs, a share of a GPU, or "auto", not "all"'),
        ("gpus = nan", 'gpus: must be a number of GPUs, a share of a GPU, or "auto", not NaN'),
        (
            "gpus = 2\ntensor_parallel_size = 4",
            "gpus: The engine is to use 4 GPUs and the worker gets 2: leave tensor_parallel_size out, or write gpus = 4",
        ),
        ("gpus = 1\npp-size = 2", "gpus: The engine is to use 2 GPUs and the worker gets 1: write gpus = 2"),
        (
            "gpus = 3\npipeline_parallel_size = 2",
            "gpus: the model is divided into 2 parts, so gpus must be a multiple of 2, not 3",
        ),
        (
            "gpus = 0.5\ngpu-memory-utilization = 0.3",
            "gpus: a share of a GPU sets the engine's share of its memory: leave gpu-memory-utilization out",
        ),
        ("gpus = 1\nshare_gpus = true", "share_gpus: a worker with gpus gets whole GPUs, or its share of a GPU"),
        ("gpus = 1\nenv = { CUDA_VISIBLE_DEVICES = '1' }", "gpus: gpus and CUDA_VISIBLE_DEVICES in env exclude each"),
        ("gpu_memory_gib = 30", "gpu_memory_gib: is for workers with gpus: give that too, or leave it out"),
        ("gpus = 'auto'\ngpu_memory_gib = 30", "gpu_memory_gib: is the memory on each of a number of GPUs: write"),
        ("gpus = 1\ngpu_memory_gib = 0", "gpu_memory_gib: must be from 0.01 to 1e+06, not 0"),
    ],
)
def test_wishes_for_gpus_that_contradict_are_refused(keys, problem):
    """Each with the sentence that says what to do."""
    text = f'[[managed_workers]]\nmodel_name = "m"\nmodel_path = "/m"\n{keys}\n'
    with pytest.raises(Exit) as refused:
        configuration.parse(text, "test.toml")
    assert f"  managed_workers[0].{problem}" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("keys", "gpus", "arguments"),
    [
        ("gpus = 2", 2, {"tensor_parallel_size": 2}),
        ("gpus = 1", 1, {}),
        ("gpus = 1.0", 1, {}),
        ("gpus = 0", 0, {}),
        ("gpus = 'auto'", "auto", {}),
        ("gpus = 0.25", 0.25, {"gpu_memory_utilization": 0.23}),
        ("gpus = 4\npipeline_parallel_size = 2", 4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        ("gpus = 2\ndata_parallel_size = 2", 2, {"data_parallel_size": 2}),
        ("gpus = 2\ntp = 2", 2, {"tp": 2}),
        ("gpus = 2\nbackend = 'sglang'", 2, {"tensor_parallel_size": 2}),
        ("gpus = 2\nbackend = 'fake'", 2, {}),
        ("gpus = 2\nnnodes = 2\ntp = 4", 2, {"nnodes": 2, "tp": 4}),
    ],
)
def test_arguments_follow_from_gpus(keys, gpus, arguments):
    """The number of GPUs for each layer, and vLLM's share; what the operator gives counts."""
    text = f'[[managed_workers]]\nmodel_name = "m"\nmodel_path = "/m"\n{keys}\n'
    [worker] = configuration.parse(text, "test.toml").managed_workers
    assert (worker.gpus, type(worker.gpus)) == (gpus, type(gpus))
    assert arguments_of(worker) == arguments
