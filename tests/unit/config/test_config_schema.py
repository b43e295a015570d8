"""The schema of the configuration takes what the gateway takes, and refuses what a schema can refuse."""

import pathlib
import tomllib

import attrs
import jsonschema
import pytest

from ichat.admin.config_schema import config_schema
from ichat.config import load as configuration
from ichat.config.schema import SECTIONS, Config
from ichat.errors import Exit

EXAMPLE = pathlib.Path(__file__).parents[3] / "ichat.toml.example"
WORKER = '[[managed_workers]]\nmodel_name = "m"\nmodel_path = "p"\n'
HASH = "sha256:" + "0" * 64


@pytest.fixture(scope="module")
def checker():
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_example_is_right(checker):
    """Every key of the file that explains all of them."""
    assert list(checker.iter_errors(tomllib.loads(EXAMPLE.read_text()))) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        WORKER,
        WORKER + 'max_model_len = 4096\ncompilation_config = { level = 3 }\nstop = ["a"]\nseed = 1\n',
        '[engines.sglang]\npython = "python3"\n[prices."org/m"]\ninput = 0.5\n',
        f'[[security.keys]]\nname = "a"\nkey_hash = "{HASH}"\nbudget_per_month = 5\n[prices.m]\ninput = 1\n',
        '[[models]]\nname = "a"\ntargets = [{ model = "b", weight = 1 }]\nset = { temperature = 0 }\n',
        "[timeouts]\nqueue_s = 3\n",
    ],
)
def test_the_schema_accepts_what_the_gateway_accepts(checker, text):
    """Whole numbers where fractions may stand, and any argument of an engine, too."""
    configuration.parse(text, "test.toml")
    assert list(checker.iter_errors(tomllib.loads(text))) == []


@pytest.mark.parametrize(
    "text",
    [
        "[server_setings]\nport = 1\n",
        "[server_settings]\nprot = 1\n",
        '[server_settings]\nport = "1"\n',
        "[server_settings]\nport = 70000\n",
        '[server_settings]\nlog_level = "loud"\n',
        '[routing]\npolicy = "best"\n',
        "[timeouts]\nqueue_s = 0\n",
        '[[managed_workers]]\nmodel_name = "m"\n',
        WORKER + 'load = "later"\n',
        '[[security.keys]]\nname = "a b"\nkey_env = "A"\n',
        '[[security.keys]]\nname = "a"\nkey_hash = "md5:1"\n',
        '[[external_routes]]\nmodel_name = "m"\napi_base = "host/v1"\n',
        "[engines.vllm]\npath = 1\n",
        '[engines.vllm]\ndevices = "1ST"\n',
        '[health]\npath = "/a b"\n',
        WORKER + "responses_max = -1\n",
        "[security]\nkeys = 5\n",
    ],
)
def test_the_schema_and_the_gateway_refuse_the_same_mistakes(checker, text):
    """The gateway refuses it with a sentence, and an editor underlines it."""
    with pytest.raises(Exit):
        configuration.parse(text, "test.toml")
    assert list(checker.iter_errors(tomllib.loads(text)))


def described(schema, path=""):
    """Yield the path of each key of the schema, with whether it has a description."""
    for inner in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            yield from described(inner, path)
    for name, one in schema.get("properties", {}).items():
        yield f"{path}.{name}", bool(one.get("description"))
        yield from described(one, f"{path}.{name}")


def test_every_key_is_there_and_described():
    """An editor shows what each key means."""
    found = list(described(config_schema()))
    assert {path.rpartition(".")[2] for path, _ in found} >= {
        field.name for one in SECTIONS for field in attrs.fields(one)
    }
    assert [path for path, is_described in found if not is_described] == []
    assert len(attrs.fields(Config)) == len(config_schema()["properties"])
