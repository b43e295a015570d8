"""The pyz as a stranger gets it: under every Python, byte for byte the same, quick to say what it is."""

import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from support.programs import LIMIT_S

ROOT = pathlib.Path(__file__).parents[2]
PYZ = ROOT / "ichat.pyz"
PYTHONS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ichat"]["pythons"]


def run(*command, code=0, **env):
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, **env},
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout if code == 0 else done.stderr


def interpreter(version):
    """Find a working interpreter of a version: this one, on the PATH, or kept by pyenv."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    candidates = [sys.executable, *(f"{place}/python{version}" for place in os.environ["PATH"].split(os.pathsep))]
    candidates += sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python{version}")))
    for candidate in candidates:
        if os.path.exists(candidate):
            done = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False)
            if done.stdout.startswith(f"Python {version}."):
                return candidate
    pytest.skip(f"there is no Python {version} on this machine")


@pytest.mark.parametrize("version", PYTHONS)
def test_starts_under_every_python(version, tmp_path):
    """Help, version and the whole gateway's imports work, from a fresh extraction."""
    python = interpreter(version)
    env = {"SHIV_ROOT": str(tmp_path / "shiv"), "PYTHONPATH": ""}
    assert run(python, PYZ, "--version", **env) == "ichat 0.1.0\n"
    assert "gateway -c FILE" in run(python, PYZ, "--help", **env)
    assert "--gateway-address" in run(python, PYZ, "worker", "--help", **env)
    config = tmp_path / "ichat.toml"
    config.write_text("[server_settings]\nport = 0\n")
    run(python, PYZ, "gateway", "-c", config, "--check", **env)


def test_holds_nothing_that_is_bound_to_one_python():
    """Everything in it is pure Python or abi3."""
    names = zipfile.ZipFile(PYZ).namelist()
    compiled = [name for name in names if name.endswith((".so", ".pyd"))]
    assert all(".abi3." in name for name in compiled), compiled
    assert not [name for name in names if name.endswith(".pyc")]
    assert "site-packages/ichat/__main__.py" in names


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository to copy")
def test_two_builds_are_the_same(tmp_path):
    """The same sources, at another place and another time, with other permissions, make the same bytes."""
    for name in ("ichat", "build", "pyproject.toml", "ichat.toml.example"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    (tmp_path / "ichat/__init__.py").chmod(0o600)
    os.utime(tmp_path / "ichat/__init__.py", (0, 0))
    (tmp_path / ".build").mkdir()
    for name in ("tools", "npm"):
        (tmp_path / ".build" / name).symlink_to(ROOT / ".build" / name)
    run(sys.executable, tmp_path / "build", TMPDIR=str(tmp_path))
    assert (tmp_path / "ichat.pyz").read_bytes() == PYZ.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 64, "usage: ichat.pyz"),
        (["serve"], 64, "there is no command 'serve'"),
        (["gateway"], 64, "the following arguments are required: --config/-c"),
        (["gateway", "-c", "/none.toml"], 64, "/none.toml cannot be read: No such file or directory"),
        (["worker", "--backend", "none", "--model", "x"], 64, "There is no engine 'none'"),
        (["worker", "--port", "x"], 64, "argument --port: must be from 0 to 65535, or none, not 'x'"),
        (["worker", "--model", "x"], 69, "vLLM is not installed for "),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, code, said):
    """A wrong command line ends at once with its exit code, and never with a traceback."""
    text = run(sys.executable, PYZ, *arguments, code=code)
    assert said in text
    assert "Traceback" not in text


def test_every_problem_of_a_configuration_before_anything_starts(tmp_path):
    """The command line shows all of them, with their paths."""
    config = tmp_path / "ichat.toml"
    config.write_text('[server_settings]\nport = "x"\nhots = 1\n')
    text = run(sys.executable, PYZ, "gateway", "-c", config, code=64)
    assert "server_settings.port" in text
    assert "server_settings.hots" in text


def test_the_example_passes_the_check():
    """The check says so and starts nothing."""
    done = subprocess.run(
        [sys.executable, PYZ, "gateway", "-c", ROOT / "ichat.toml.example", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, f"{ROOT / 'ichat.toml.example'} is right.\n")
