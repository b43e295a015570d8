"""The command line of `convert`: which file, whose file, and where the result goes."""

import os
import stat

import pytest
from support.converting import check

from ichat.convert.command import run
from ichat.convert.yaml_text import TEXT_BYTES_MAX
from ichat.errors import Exit

LITELLM = "model_list: [{model_name: m, litellm_params: {model: openai/x, api_key: os.environ/K}}]\n"
SECRET = LITELLM.replace("os.environ/K", "sk-of-mine")
SWAP = "models: {m: {cmd: 's --port ${PORT}'}}\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal_of(*argv):
    with pytest.raises(Exit) as raised:
        run(argv)
    assert raised.value.code == 64
    sentence = str(raised.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return sentence


@pytest.mark.parametrize(("text", "title"), [(LITELLM, "LiteLLM"), (SWAP, "llama-swap")])
def test_a_file_is_recognised_by_its_keys(place, capsys, text, title):
    """The configuration goes to standard output, and what to do next to standard error."""
    (place / "config.yaml").write_text(text)
    assert run(["config.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"# Converted from {title}'s configuration, config.yaml.")
    check(out)
    assert err.splitlines()[-1] == "Check the result: ./ichat.pyz gateway -c ichat.toml --check"
    assert os.listdir(place) == ["config.yaml"]


BOTH = f"{LITELLM}macros: {{a: b}}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "config.yaml is empty: name the configuration of LiteLLM or llama-swap."),
        (" \n\t\n", "config.yaml is empty"),
        ("# nothing\n", "has comments only"),
        ("---\n", "has comments only"),
        ("just words", "has no keys at its top"),
        ("- a\n- b\n", "has no keys at its top"),
        ("[server_settings]\nport = 1\n", "is TOML already: `./ichat.pyz gateway -c config.yaml` reads it."),
        ("services: {a: {image: b}}\nvolumes: {}\n", "no key of LiteLLM's or llama-swap's, but services, volumes"),
        ("models: {a: b}\n", "no key of LiteLLM's or llama-swap's, but models"),
        (BOTH, "keys of LiteLLM's (model_list) and llama-swap's (macros): say --from litellm or --from llama-swap."),
        ("a: &a [*a]\n", "an anchor inside itself"),
        ("a: 'no end\n", "is not valid YAML"),
        (f"a: {'x' * TEXT_BYTES_MAX}", f"is larger than {TEXT_BYTES_MAX} bytes"),
        ("models: {a: {cmd: s}, a: {cmd: t}}", "'a' is there twice in the same table"),
    ],
)
def test_another_file_is_one_sentence(place, text, words):
    """It says what the file is, or how to go on; nothing is written."""
    (place / "config.yaml").write_text(text)
    assert words in refusal_of("config.yaml", "-o", "ichat.toml")
    assert os.listdir(place) == ["config.yaml"]


def test_a_file_that_cannot_be_read_is_one_sentence(place):
    """Missing, a directory, or no text."""
    (place / "binary").write_bytes(b"\xff\xfe\x00")
    assert refusal_of("nowhere.yaml") == "nowhere.yaml cannot be read: No such file or directory."
    assert refusal_of(str(place)) == f"{place} cannot be read: Is a directory."
    assert "binary cannot be read: 'utf-8' codec" in refusal_of("binary")


def test_the_program_can_be_named(place, capsys):
    """Keys of the other program are named then; a byte order mark is no key."""
    (place / "config.yaml").write_bytes(b"\xef\xbb\xbf" + BOTH.encode())
    run(["config.yaml", "--from", "litellm"])
    assert "# - macros: has no counterpart" in capsys.readouterr().out
    run(["config.yaml", "--from", "llama-swap"])
    assert "# - model_list: has no counterpart" in capsys.readouterr().out
    with pytest.raises(Exit, match="invalid choice: 'ollama'"):
        run(["config.yaml", "--from", "ollama"])


def test_no_file_is_replaced_unasked(place):
    """With --force it is; a link to nowhere counts as a file."""
    (place / "config.yaml").write_text(LITELLM)
    run(["config.yaml", "-o", "new.toml"])
    first = (place / "new.toml").read_text()
    check(first)
    assert stat.S_IMODE((place / "new.toml").stat().st_mode) & 0o044 == 0o044 & ~umask()
    (place / "config.yaml").write_text(SWAP)
    again = refusal_of("config.yaml", "-o", "new.toml")
    assert again == "new.toml is there already: name another file, or add --force to replace it."
    (place / "link.toml").symlink_to("nowhere")
    assert "link.toml is there already" in refusal_of("config.yaml", "-o", "link.toml")
    assert (place / "new.toml").read_text() == first
    (place / "new.toml.new").write_text("another file")
    run(["config.yaml", "-o", "new.toml", "--force"])
    assert "llama-swap" in (place / "new.toml").read_text()
    assert (place / "new.toml.new").read_text() == "another file"
    (place / "directory").mkdir()
    refused = refusal_of("config.yaml", "-o", "directory", "--force")
    assert refused == "directory cannot be written: Is a directory."
    assert sorted(os.listdir(place)) == ["config.yaml", "directory", "link.toml", "new.toml", "new.toml.new"]
    assert (
        refusal_of("config.yaml", "-o", "no/such.toml") == "no/such.toml cannot be written: No such file or directory."
    )


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("text", [SECRET, LITELLM.replace("}}", ", extra_headers: {api-key: k}}}")])
def test_a_result_with_a_key_is_for_its_user_alone(place, capsys, text):
    """A key that stood in the other file stands in this one, also in another header: no other user reads it."""
    (place / "config.yaml").write_text(text)
    run(["config.yaml", "-o", "new.toml"])
    assert stat.S_IMODE((place / "new.toml").stat().st_mode) == 0o600
    assert "keep it to yourself" in capsys.readouterr().err
    run(["config.yaml", "-o", "new.toml", "--force"])
    assert stat.S_IMODE((place / "new.toml").stat().st_mode) == 0o600
