"""The pyz as a stranger gets it: under every Python, byte for byte the same, quick to say what it is."""

import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import tomllib
import zipfile

import pytest
from support.programs import LIMIT_S
from support.releases import interpreter

from ichat import __main__ as main

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


@pytest.mark.parametrize("version", PYTHONS)
def test_starts_under_every_python(version, tmp_path):
    """Help, version and the whole gateway's imports work, from a fresh extraction."""
    python = interpreter(version)
    env = {"SHIV_ROOT": str(tmp_path / "shiv"), "PYTHONPATH": ""}
    assert run(python, PYZ, "--version", **env) == "ichat 0.1.0\n"
    assert "gateway [-c FILE]" in run(python, PYZ, "--help", **env)
    assert "--gateway-address" in run(python, PYZ, "worker", "--help", **env)
    config = tmp_path / "ichat.toml"
    config.write_text("[server_settings]\nport = 0\n")
    run(python, PYZ, "gateway", "-c", config, "--check", **env)


OLD = "ichat.pyz needs CPython 3.10 or newer, and {} is Python {}: run it with a newer Python, such as"


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.7", "3.8", "3.9"])
@pytest.mark.parametrize("command", [["--help"], ["worker", "--help"], ["gateway", "-c", "x"]], ids=" ".join)
def test_an_old_python_says_so_in_one_sentence(version, command):
    """Nothing that it cannot read is read before."""
    python = interpreter(version)
    said = run(python, PYZ, *command, code=69, PYTHONPATH="")
    assert said.count("\n") == 1
    assert version in said
    assert "needs CPython 3.10 or newer" in said


def run_start(program, code, path=ROOT / "ichat/start.py", **env):
    """Run the beginning of ichat/start.py's process with something in the place of shiv."""
    begin = "import runpy, sys, types, os, signal\nshiv = sys.modules['_bootstrap'] = types.ModuleType('_bootstrap')\n"
    end = f"\nrunpy.run_path({str(path)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", begin + program + end],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, **env},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout, done.stderr


def test_the_version_of_python_is_asked_before_anything_else():
    """Every interpreter older than the oldest that runs iChat is refused, whether it is on this machine or not."""
    _, said = run_start("sys.version_info = (3, 9, 18, 'final', 0)", 69)
    assert OLD.format(sys.executable, "3.9") in said


def test_another_machine_says_so_in_one_sentence(tmp_path):
    """psutil is compiled: the sentence names both machines and what to do, before anything is unpacked."""
    begin = tmp_path / "__main__.py"
    begin.write_bytes(zipfile.ZipFile(PYZ).read("__main__.py"))
    program = "os.uname = lambda: ('Linux', 'far', '6', '', 'riscv64')"
    _, said = run_start(program, 69, path=begin, SHIV_ROOT=str(tmp_path))
    assert f"was built for {os.uname().machine}, and this machine is riscv64: build it here (`./build`)" in said
    assert said.count("\n") == 1


def test_the_packages_inside_are_listed():
    """All that are pinned, in their versions, and those of the console."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {one.replace("==", " ") for one in project["dependency-groups"]["pyz"]}
    wanted |= {f"console/{name} {one['version']}" for name, one in project["tool"]["ichat"]["console"].items()}
    first, python, *lines = run(sys.executable, PYZ, "version", "--deps").splitlines()
    assert (first, python) == ("ichat 0.1.0", f"Python {sys.version.split()[0]}")
    assert set(lines) == wanted


def test_ctrl_c_before_a_command_has_begun_ends_it_quietly(tmp_path):
    """While shiv unpacks and imports, no traceback is shown."""
    interrupt = "shiv.extract_site_packages = None\nshiv.bootstrap = lambda: os.kill(os.getpid(), signal.SIGINT)"
    assert run_start(interrupt, 130, SHIV_ROOT=str(tmp_path)) == ("", "")


INTERRUPTED_IMPORT = """
import os, sys
class Finder:
    def find_spec(name, *_):
        os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Finder)
path = sys.argv[1]
code = compile(open(path).read(), path, "exec")
exec(code, {"__name__": "__main__", "__file__": path})
"""


def test_ctrl_c_is_caught_before_anything_is_imported():
    """The first module that is looked for on the disk is interrupted, and no traceback is shown."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, ROOT / "ichat/start.py"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_in_a_command_ends_it_quietly(monkeypatch, capsys):
    """What no command has caught is no error either."""

    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "_run", interrupted)
    with pytest.raises(SystemExit, match="130"):
        main.main()
    assert capsys.readouterr() == ("", "")


NO_HOME = {"HOME": "/proc/none", "XDG_CACHE_HOME": "", "SHIV_ROOT": "", "PYTHONPATH": ""}
"""A home that not even root can make."""


def test_without_a_home_it_unpacks_among_temporary_files(tmp_path):
    """As in a container whose user has none: into a directory that is this user's alone."""
    assert run(sys.executable, PYZ, "--version", **NO_HOME, TMPDIR=str(tmp_path)) == "ichat 0.1.0\n"
    (made,) = tmp_path.glob("ichat-shiv-*")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    cache = {**NO_HOME, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert run(sys.executable, PYZ, "--version", **cache, TMPDIR="/proc/none") == "ichat 0.1.0\n"
    assert list(tmp_path.glob("cache/shiv/ichat.pyz_*"))


def test_a_directory_of_others_is_not_unpacked_into(tmp_path):
    """Where everybody may write, another user could put code into it; the sentence says what to set."""
    tmp_path.chmod(0o1777)
    (tmp_path / f"ichat-shiv-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"ichat-shiv-{os.getuid()}").chmod(0o777)
    said = run(sys.executable, PYZ, "--version", code=69, **NO_HOME, TMPDIR=str(tmp_path))
    assert "set SHIV_ROOT to a directory that can" in said
    assert said.count("\n") == 1


def test_where_it_cannot_be_unpacked_it_says_so_in_one_sentence():
    """The directory that was set is named, and why it cannot be used."""
    said = run(sys.executable, PYZ, "--version", code=69, SHIV_ROOT="/proc/none")
    assert "ichat.pyz cannot unpack itself under /proc/none (No such file or directory): set SHIV_ROOT to" in said
    assert said.count("\n") == 1


def test_the_help_of_a_worker_needs_no_environment_of_an_engine(tmp_path):
    """Any interpreter prints it, even one with packages that are too old to run a worker."""
    found = tmp_path / "trio-0.22.2.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: trio\nVersion: 0.22.2\n")
    env = {"PYTHONPATH": str(tmp_path)}
    assert "has trio 0.22.2, and iChat needs" in run(sys.executable, PYZ, "worker", "--model", "x", code=69, **env)
    assert "--gateway-address" in run(sys.executable, PYZ, "worker", "--help", **env)


def test_holds_nothing_that_is_bound_to_one_python():
    """Everything in it is pure Python or abi3, and no test of a package is among it."""
    names = zipfile.ZipFile(PYZ).namelist()
    compiled = [name for name in names if name.endswith((".so", ".pyd"))]
    assert all(".abi3." in name for name in compiled), compiled
    assert not [name for name in names if name.endswith(".pyc")]
    assert not [name for name in names if "_tests/" in name]
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
        (["gateway", "-c", "/none.toml"], 64, "/none.toml cannot be read: No such file or directory"),
        (["worker", "--backend", "none", "--model", "x"], 64, "There is no engine 'none'"),
        (["worker", "--port", "x"], 64, "argument --port: must be from 0 to 65535, or none, not 'x'"),
        (["worker", "--model", "x"], 69, "vLLM is not installed for "),
    ],
)
def test_a_wrong_command_line_ends_the_pyz_with_one_sentence(arguments, code, said):
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
    """It is well formed, whether its workers could start here or not."""
    done = subprocess.run(
        [sys.executable, PYZ, "gateway", "-c", ROOT / "ichat.toml.example", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    first, *problems = done.stderr.splitlines()
    assert first.startswith(
        (f"{ROOT / 'ichat.toml.example'} is well formed", f"{ROOT / 'ichat.toml.example'} is right")
    )
    assert done.returncode == (1 if problems else 0), done.stderr
