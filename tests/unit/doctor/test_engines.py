"""Findings about engines: a planted interpreter and processor in, levels and sentences out."""

import attrs
import pytest

from ichat.config import load as configuration
from ichat.doctor.engines import EngineFacts, ProcessorFacts, find_in_engines, read_engine_facts
from ichat.doctor.findings import Finding

ENGINE = EngineFacts("vllm", "/python", "0.32.0", has_torch=True)
ON_GPUS = attrs.evolve(ENGINE, cuda=(12, 8))
GPUS = ProcessorFacts(2, "550.1", (12, 4), frozenset({"avx2"}))
WORDS = "ImportError: libcudart.so.13: cannot open shared object file"


def found_in(engine, processor):
    return [(one.level, one.sentence, one.command) for one in find_in_engines([engine], processor)]


@pytest.mark.parametrize(
    ("flags", "level", "word"),
    [
        ({"sse4"}, "error", "AVX2"),
        ({"avx2"}, "warning", "AVX512"),
        ({"avx2", "avx512f"}, "ok", "tested"),
        (set(), "ok", ""),
    ],
)
def test_a_processor_without_avx_is_named(flags, level, word):
    """An engine for processors needs AVX2, and wants AVX512; another architecture has neither."""
    [found] = find_in_engines([ENGINE], ProcessorFacts(None, flags=frozenset(flags)))
    assert found.level == level
    assert word in found.sentence


@pytest.mark.parametrize(
    ("changes", "level", "words", "command"),
    [
        ({}, "ok", "vLLM 0.32.0 of /python is tested, built for CUDA 12.8.", ""),
        ({"state": "silent"}, "warning", "/python has not imported PyTorch within 6.5 s", 'time /python -c "import'),
        ({"state": "broken", "words": WORDS}, "error", f"/python cannot import what vLLM needs ({WORDS})",
         "./build engine vllm"),
        ({"version": "0.99.0"}, "error", "vLLM 0.99.0 is not a version that this worker knows (0.12 to 0.32)",
         "./build engine vllm"),
        ({"backend": "sglang", "version": "0.1.0"}, "error", "SGLang 0.1.0 is not a version", "./build engine sglang"),
        ({"backend": "own", "version": "9"}, "ok", "own 9 of /python is tested", ""),
        ({"backend": "own", "state": "broken", "words": "x"}, "error", "/python cannot import what own needs (x)", ""),
        ({"cuda": (13, 0)}, "error",
         "vLLM of /python is built for CUDA 13.0, and the driver 550.1 runs CUDA 12.4 at most", "nvidia-smi"),
        ({"cuda": (13, 0), "is_on_cpu": True}, "ok", "built for CUDA 13.0", ""),
        ({"cuda": None}, "warning", "vLLM of /python is built without CUDA, and leaves this machine's GPUs unused",
         "./build engine vllm"),
        ({"cuda": None, "is_for_other_gpus": True}, "ok", "is tested.", ""),
        ({"cuda": None, "has_torch": False}, "ok", "is tested.", ""),
    ],
)  # fmt: skip
def test_an_engine_beside_gpus_has_one_finding(changes, level, words, command):
    """Its import, its version and its build are examined; an engine of another package has no tested versions."""
    [found] = found_in(attrs.evolve(ON_GPUS, **changes), GPUS)
    assert found[0] == level
    assert words in found[1]
    assert found[2].startswith(command)
    assert bool(found[2]) == bool(command)


def test_an_engine_for_gpus_needs_one():
    """Also where no driver answers; a worker that is configured for processors needs none."""
    for processor in (ProcessorFacts(0), ProcessorFacts(None)):
        [found] = found_in(ON_GPUS, processor)
        assert found[:2] == ("warning", "vLLM of /python is built for CUDA 12.8, and no GPU answers on this machine.")
        [found] = found_in(attrs.evolve(ON_GPUS, is_on_cpu=True), processor)
        assert found[0] == "ok"


def test_an_engine_that_is_not_installed_is_preflights_matter():
    """Without a version there is nothing to say, and without a managed worker no engine is needed."""
    assert find_in_engines([EngineFacts("vllm", "/no/python")], GPUS) == []
    assert find_in_engines([], GPUS) == [Finding("ok", "engines", "No managed worker needs an engine on this machine.")]


async def test_an_engine_is_known_by_its_packages(tmp_path):
    """Version and CUDA are read once for all workers of an interpreter, which cannot be executed here."""
    library = tmp_path / "lib/python3.11/site-packages"
    (library / "vllm-0.32.0.dist-info").mkdir(parents=True)
    (library / "torch").mkdir()
    (library / "torch/version.py").write_text("cuda: Optional[str] = '12.8'\n")
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.touch()
    worker = f'[[managed_workers]]\nmodel_name = "m"\nmodel_path = "/m"\npython = "{python}"\n'
    config = configuration.parse(worker + worker + "gpu_ids = []", "x.toml")
    assert await read_engine_facts(config, float("inf")) == [
        EngineFacts("vllm", str(python), "0.32.0", (12, 8), has_torch=True)
    ]


async def test_an_interpreter_without_time_is_silent():
    worker = '[[managed_workers]]\nmodel_name = "m"\nmodel_path = "/m"\npython = "/p"\n'
    config = configuration.parse(worker, "x.toml")
    assert await read_engine_facts(config, float("-inf")) == [EngineFacts("vllm", "/p", state="silent")]
