"""The command line of a managed worker: what is added so that its engine can sleep."""

import pytest

from ichat.config import load as configuration
from ichat.supervisor.launch import command_of

SLEEPS = 'load = "on_demand"\nwhen_idle = "sleep"\n'
SGLANG = ["--enable-memory-saver", "--enable-weights-cpu-backup"]


@pytest.mark.parametrize(
    ("more", "added"),
    [
        (SLEEPS, ["--enable-sleep-mode"]),
        (SLEEPS + 'backend = "sglang"', SGLANG),
        (SLEEPS + 'backend = "of-another-package"', []),
        ("", []),
        ('load = "on_demand"', []),
        (SLEEPS + "gpu_ids = []", []),
        (SLEEPS + 'backend = "sglang"\ndevice = "cpu"', []),
        (SLEEPS + "enable_sleep_mode = true", ["--enable-sleep-mode"]),
        (SLEEPS + "enable_sleep_mode = false", ["--no-enable-sleep-mode"]),
        (SLEEPS + '"enable-memory-saver" = true\nbackend = "sglang"', SGLANG),
        (SLEEPS + 'enable_sleep_mode = false\nbackend = "sglang"', ["--no-enable-sleep-mode"]),
        (
            SLEEPS + 'enable_weights_cpu_backup = false\nbackend = "sglang"',
            ["--no-enable-weights-cpu-backup", SGLANG[0]],
        ),
    ],
)
def test_an_engine_that_is_to_sleep_gets_its_flags(more, added):
    """Once, where the machine has GPUs for it, and what the operator says goes first."""
    config = configuration.parse(f'[[managed_workers]]\nmodel_name = "m"\nmodel_path = "/m"\n{more}', "x.toml")

    def flags(*, has_gpus):
        words = command_of(config, config.managed_workers[0], "w", "/s", "/c", has_gpus=has_gpus)
        return [word for word in words if "enable" in word]

    assert flags(has_gpus=True) == added
    given = [word for word in added if word[2:].replace("-", "_") in more.replace("-", "_") or word.startswith("--no-")]
    assert flags(has_gpus=False) == given
