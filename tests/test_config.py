"""The configuration: everything wrong with it is said at once, and nothing is guessed."""

import pathlib
import re

import attrs
import pytest

from ichat import config as configuration
from ichat.errors import EXIT_USAGE, Exit

EXAMPLE = pathlib.Path(__file__).parent.parent / "ichat.toml.example"


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
    assert configuration.engine_flags(config.managed_workers[0].backend_args) == [
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


def test_what_a_route_may_not_have():
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


def test_the_example_is_accepted_and_complete():
    """The example loads, and every key that there is stands in it with an explanation; defaults are as it says."""
    text = EXAMPLE.read_text()
    config = configuration.load(EXAMPLE)
    for name in ("server_settings", "routing", "limits", "timeouts", "logs", "litellm_settings"):
        section = getattr(config, name)
        assert section == type(section)(), "the example shows the defaults"
        for attribute in attrs.fields(type(section)):
            assert re.search(rf"^#?{attribute.name} = ", text, re.MULTILINE), attribute.name
    for section in (configuration.ManagedWorker, configuration.ExternalRoute, configuration.EngineSettings):
        for attribute in attrs.fields(section):
            assert f"{attribute.name} = " in text or f".{attribute.name}]" in text, attribute.name


def test_the_readmes_configuration_is_accepted():
    """What the README shows can be copied as it stands."""
    texts = re.findall(r"```toml\n(.*?)```", (EXAMPLE.parent / "README.md").read_text(), re.DOTALL)
    config = configuration.parse("\n".join(texts), "README.md")
    assert config.managed_workers
    assert config.external_routes


def test_a_file_that_cannot_be_read(tmp_path):
    """It is a sentence with the path and the reason."""
    with pytest.raises(Exit, match=r"none\.toml cannot be read: No such file"):
        configuration.load(tmp_path / "none.toml")
