"""`place --dry-run`: the places of a configuration's workers, and the reasons of those that have none."""

import json
import sys

import attrs
import pytest

from ichat.cli import place
from ichat.config.load import load
from ichat.errors import Exit
from ichat.placement.learnt import LearntMemories
from ichat.preflight.learnt_file import write_learnt
from ichat.protocol.messages import MachineGpu
from ichat.supervisor.memory_learner import LoadReport, read_load
from tests.support.nvml import Nvml
from tests.unit.cli.test_estimate import SHAPE

GIB = 1024**3


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Three GPUs of 80 GiB; on the last, a process that is no worker holds 30 GiB."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nothing = {("nvmlDeviceGetComputeRunningProcesses", number): list for number in (0, 1)}
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(buses=(1, 2, 3), instead=nothing))


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "Llama-70B"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SHAPE))
    return directory


@pytest.fixture
def file(tmp_path, model):
    def write(*tables):
        head = f'[[managed_workers]]\nmodel_name = "m"\nmodel_path = "{model}"\nmax_model_len = 8192\n'
        path = tmp_path / "ichat.toml"
        path.write_text("".join(f"{head}{table}\n" for table in tables))
        return path

    return write


def rows_of(capsys, *words, code=0):
    assert place.run(["--dry-run", "--json", *map(str, words)]) == code
    return json.loads(capsys.readouterr().out)["workers"]


def refusal(*words):
    with pytest.raises(Exit) as refused:
        place.run(list(map(str, words)))
    return refused.value.code, str(refused.value)


def test_workers_of_a_file_are_placed_together(file, capsys):
    """In their order, beside the workers that name their GPUs, wherever these stand in the file."""
    path = file("gpus = 0.5\ngpu_memory_gib = 30", "gpus = 0.25\ngpu_memory_gib = 1", "gpus = 0", "gpu_ids = [0]")
    rows = rows_of(capsys, "-c", path)
    assert [(row["worker_id"], row["gpus"], row["gpu_ids"], row["share"]) for row in rows] == [
        ("m-0", 0.5, [1], 0.47), ("m-1", 0.25, [1], 0.23), ("m-2", 0, [], None),
    ]  # fmt: skip
    assert rows[0]["claim_bytes"] == 38 * 1024**3
    assert place.run(["--dry-run", "-c", str(path)]) == 0
    assert "m-0     0.5   GPU 1          NVIDIA H100  38.0" in capsys.readouterr().out


def test_every_gpu_has_its_reason(file, capsys):
    """A worker without a place has the sentence, and the command ends with 1."""
    [first, _, third] = rows_of(capsys, "-c", file("gpus = 1\ngpu_memory_gib = 9\nreplicas = 3"), code=1)
    assert (first["gpu_ids"], third["gpu_ids"]) == ([0], None)
    path = file("gpus = 1\ngpu_memory_gib = 9", "gpus = 2")
    [first, second] = rows_of(capsys, "-c", path, code=1)
    assert (first["gpu_ids"], first["why"]) == ([0], None)
    assert second["why"] == (
        "Llama-70B needs 2 GPUs of the same kind, which this machine has not free: free is GPU 1 (NVIDIA H100); GPU 0 is"
        " worker m-0's; other processes hold 30.0 GiB of GPU 2. It gets a place once worker m-0 ends."
    )


def test_a_model_is_placed_by_its_estimate(model, capsys, monkeypatch):
    """The fewest GPUs that hold it, unless a number is given; only GPUs that are this user's to use."""
    [row] = rows_of(capsys, model, "--max-model-len", "8192")
    assert (row["gpus"], row["gpu_ids"], row["tensor_parallel_size"]) == ("auto", [0, 1], 2)
    [row] = rows_of(capsys, model, "--gpus", "1", "--max-model-len", "8192", code=1)
    assert row["why"].endswith("2 such GPUs would do.")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    [row] = rows_of(capsys, model, "--gpus", "0.5", "--gpu-memory-gib", "4")
    assert row["gpu_ids"] == [1]
    [row] = rows_of(capsys, model, "--max-model-len", "8192", code=1)
    assert "GPU 0 is not for this gateway (CUDA_VISIBLE_DEVICES=1)" in row["why"]


def test_a_learnt_figure_places_the_next_load(file, model, tmp_path, capsys):
    """The gateway has learnt it from a worker with the same table; the engine there has the same version."""
    library = tmp_path / "engine" / "lib" / "python3.12" / "site-packages"
    (library / "vllm-0.32.0.dist-info").mkdir(parents=True)
    python = tmp_path / "engine" / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    server = f'python = "{python}"\n[server_settings]\nstate_directory = "{state}"'
    path = file("gpus = 2\n" + server)
    [row] = rows_of(capsys, "-c", path)
    assert row["gpu_ids"] == [0, 1]
    config = load(path)
    spec = attrs.evolve(config.managed_workers[0], gpu_ids=[0, 1])
    gpus = [MachineGpu(0, name="NVIDIA H100", memory_total_bytes=80 * GIB)]
    known = read_load(config, LoadReport(spec, gpus, "0.32.0+cu129")).known
    memories = LearntMemories()
    memories.add(attrs.evolve(known, beside_bytes=79 * GIB))
    write_learnt(str(state), memories)
    [row] = rows_of(capsys, "-c", path, code=1)
    assert "GPU 0 gives 76.0 of its 80.0 GiB, and the model needs 77.9, as learnt from an earlier load" in row["why"]
    path = file("gpus = 1\n" + server)
    [row] = rows_of(capsys, "-c", path, code=1)
    assert "learnt" not in row["why"]


def test_a_wrong_command_line_of_place_is_refused(model, file, tmp_path):
    """With what to do instead."""
    assert refusal(model) == (64, "ichat.pyz place only shows places: give --dry-run.")
    assert refusal("--dry-run", "-c", file(), model) == (64, "ichat.pyz place: give either -c FILE, or MODEL_PATH.")
    assert "gpus: gpus and gpu_ids exclude each other" in refusal("--dry-run", model, "--gpu-ids", "0")[1]
    assert "1.5 is neither" in refusal("--dry-run", model, "--gpus", "1.5")[1]
    assert "cannot be read" in refusal("--dry-run", "-c", tmp_path / "absent.toml")[1]
