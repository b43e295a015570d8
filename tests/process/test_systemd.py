"""The example units: what systemd says of them, and whether they are about the program that we have."""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from support.programs import LIMIT_S

from ichat.cli import sweep
from ichat.config.schema import ServerSettings, Timeouts
from ichat.errors import EXIT_USAGE, Exit
from ichat.roles import gateway, worker
from ichat.service_manager import Notifier
from ichat.supervisor import state

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
GATEWAY = EXAMPLES / "ichat-gateway.service"
WORKER = EXAMPLES / "ichat-worker@.service"
MARGIN_S = 15
"""For what comes after draining and stopping: the sweep, the last lines."""

units = pytest.mark.parametrize("unit", [GATEWAY, WORKER], ids=lambda unit: unit.stem)


def settings_of(unit):
    """Read the unit's settings, the last of each name; continued lines are one."""
    text = unit.read_text().replace("\\\n", " ")
    return dict(re.findall(r"^(\w+)=[ \t]*(.*)$", text, re.MULTILINE))


def arguments_of(unit, role):
    """Return what the unit's command line passes to a role of `ichat.pyz`."""
    _python, pyz, named, *arguments = shlex.split(settings_of(unit)["ExecStart"])
    assert (pathlib.PurePath(pyz).name, named) == ("ichat.pyz", role)
    return arguments


@units
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_has_nothing_to_say(unit, tmp_path):
    """Every setting is known, and every value is one."""
    program = settings_of(unit)["ExecStart"].split()[0]
    copy = tmp_path / unit.name.replace("@", "@one")
    copy.write_text(unit.read_text().replace(f"{program} ", f"{sys.executable} "))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", copy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.stdout + done.stderr, done.returncode) == ("", 0)


def test_the_gateway_takes_its_command_line(tmp_path):
    """Each flag of the unit is one of ours."""
    arguments = arguments_of(GATEWAY, "gateway")
    assert arguments[-1] == "/etc/ichat/ichat.toml"
    path = tmp_path / "ichat.toml"
    path.write_text("")
    with pytest.raises(Exit) as info:
        gateway.read_command_line([*arguments[:-1], str(path), "--check"])
    assert info.value.code == 0


def test_the_worker_takes_its_command_line():
    """Each flag of the unit is one of ours, and the variables stand where their values belong."""
    values = {"${ICHAT_GATEWAY}": "http://gw:4000", "${ICHAT_PORT}": "8001", "%H-%i": "host-qwen"}
    flags = ["--model", "m", "--max-model-len", "8192"]
    arguments = []
    for word in arguments_of(WORKER, "worker"):
        arguments += flags if word == "$ICHAT_FLAGS" else [values.get(word, word)]
    options, theirs = worker.read_command_line(arguments)
    assert (options.gateway_address, options.port, options.worker_id) == ("http://gw:4000", 8001, "host-qwen")
    assert theirs == flags


def test_there_is_time_to_end():
    """Nobody is killed who is still draining, with the settings that everybody begins with."""
    timeouts = Timeouts()
    options, _theirs = worker.read_command_line([])
    assert int(settings_of(GATEWAY)["TimeoutStopSec"]) >= timeouts.drain_s + timeouts.stop_s + MARGIN_S
    assert int(settings_of(WORKER)["TimeoutStopSec"]) >= options.drain_s + options.stop_s + MARGIN_S


@units
def test_units_have_no_setting_that_breaks_the_service(unit):
    """A wrong command line is not tried again, only the first process is told to end, and GPUs and compilers work."""
    settings = settings_of(unit)
    assert settings["RestartPreventExitStatus"] == str(EXIT_USAGE)
    assert settings["KillMode"] == ("process" if unit == GATEWAY else "mixed")
    assert not {"MemoryDenyWriteExecute", "PrivateDevices"} & set(settings)
    assert "AF_UNIX" in settings["RestrictAddressFamilies"].split()


def test_relays_outlive_a_gateway_that_crashes():
    """Nothing that they need is taken from them, the next start is soon, and only an ordered stop ends them."""
    settings = settings_of(GATEWAY)
    assert (settings["PrivateTmp"], settings["RemoveIPC"], settings["KillMode"]) == ("no", "no", "process")
    assert (settings["Restart"], settings["RestartSec"]) == ("on-failure", "200ms")
    assert settings["StartLimitIntervalSec"] == "0"
    ignored, pyz, named, *arguments = shlex.split(settings["ExecStopPost"])
    assert ignored.startswith("-")
    assert (pathlib.PurePath(pyz).name, named) == ("ichat.pyz", "sweep")
    assert vars(sweep.parser().parse_args(arguments))["config"] == arguments_of(GATEWAY, "gateway")[-1]


def test_the_gateway_reports_to_systemd_as_its_unit_expects():
    """A report of its life is due several times in the watchdog's time, and its main process alone is heard."""
    settings = settings_of(GATEWAY)
    assert (settings["Type"], settings["NotifyAccess"]) == ("notify", "main")
    notifier = Notifier.taken_from({"WATCHDOG_USEC": str(int(settings["WatchdogSec"]) * 1_000_000)})
    assert notifier.watchdog_s == 30
    assert settings["LimitCORE"] == "0"


def test_the_state_is_where_systemd_makes_it(tmp_path, monkeypatch):
    """Without a directory in the configuration, the one of the unit is used."""
    assert settings_of(GATEWAY)["StateDirectory"] == "ichat"
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "ichat"))
    with state.open_state(ServerSettings(), None) as opened:
        assert opened.path == str(tmp_path / "ichat")
