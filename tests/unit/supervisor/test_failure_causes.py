"""Why a worker died: from lines that the engines really write, its exit code, and the kernel's counts."""

import signal

import pytest

from ichat.placement.learnt import MemoryLack
from ichat.supervisor.failure_causes import CAUSE_CHARS_MAX, cause_of, describe_exit, memory_lack_in, oom_kills

OOM = "the kernel ended it since the machine ran out of memory (OOM killer)"
CORE = "(EngineCore_DP0 pid=59619) ERROR 10-15 08:32:29 [core.py:708] "
INIT = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
ENDING = [
    CORE + "RuntimeError: cancelled",
    "(APIServer pid=1) RuntimeError: " + INIT,
    "2026-11-21 21:05:02,135 INFO    ichat.roles.worker: the engine ended: shutting down",
    "The engine failed while loading /m: " + INIT,
    "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked",
    "  warnings.warn('resource_tracker: There appear to be %d '",
]
REFUSED = "vLLM refuses these arguments: 1 validation error for VllmConfig; Value error, "
PYDANTIC = (
    " [type=value_error, input_value=ArgsKwargs((), {'model_co... 'shutdown_timeout': 0}), input_type=ArgsKwargs]"
)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB",
            "CUDA out of memory: lower gpu_memory_utilization or max_model_len, or use more GPUs",
        ),
        (
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering",
            "CUDA out of memory while warming up: lower max_num_seqs",
        ),
        (
            "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 20.00 MiB.",
            "CUDA out of memory while capturing CUDA graphs",
        ),
        (
            "ValueError: Free memory on device cuda:1 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization",
            "only 19.77 of 22.05 GiB of a GPU are free",
        ),
        (
            "ValueError: Free memory on device (19.77/22.05 GiB) on startup is less than desired GPU memory utilization (0.9,",
            "only 19.77 of 22.05 GiB of a GPU are free",
        ),
        (
            "ValueError: Available memory on node 0 (21.77/23.54 GiB) on kv cache allocation is less than requested memory",
            "only 21.77 of 23.54 GiB of the machine's memory are free",
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing",
            "the model leaves no memory for the KV cache",
        ),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: 0.5",
            "the model leaves no memory for the KV cache",
        ),
        (
            ("ValueError: To serve at least one request with the model's max seq len (40960), (5.62 GiB KV cache is needed, which"
            " is larger than the available KV cache memory (2.10 GiB). Based on the available memory, the estimated maximum"
            " model length is 15296. Try increasing `gpu_memory_utilization`"),
            "the KV cache is too small for max_model_len 40960: lower it to 15296,",
        ),
        (
            "ValueError: To serve at least one request with the models's max seq len (40960), (5.62 GiB KV cache is needed,",
            "the KV cache is too small for max_model_len 40960: lower it, raise",
        ),
        (
            "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV",
            "the KV cache is too small for max_model_len 32768: lower it, raise",
        ),
        (
            "OSError: org/nix is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'",
            "the model org/nix is no directory here and the hub has none",
        ),
        (
            ("huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name':"
            " '/models/llama/x'. Use `repo_type` argument if needed."),
            "the model /models/llama/x is no directory here",
        ),
        ("Repository Not Found for url: https://huggingface.co/api/models/org/nix.", "the hub has no model of this name"),
        (
            "Cannot access gated repo for url https://huggingface.co/meta-llama/Llama-2-7b/resolve/main/config.json.",
            "the model is gated: accept its terms on the hub, and put HF_TOKEN into env",
        ),
        ("OSError: You are trying to access a gated repo.", "the model is gated"),
        (
            "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached",
            "the model is not here and its hub cannot be reached",
        ),
        (
            "HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /api/models/x",
            "the model is not here and its hub cannot be reached",
        ),
        (
            "HTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api/models/org/m",
            "the model hub allows no more downloads for now (429)",
        ),
        (
            ("HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /api/models/org/m (Caused by"
             " SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed'"),
            "the model hub's certificate is not believed",
        ),
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed (_ssl.c:1016) while fetching https://hf.co/org/m",
            "the model hub's certificate is not believed",
        ),
        ("OSError: [Errno 28] No space left on device: '/cache/x'", "no space is left on a disk"),
        ("Error while creating shared memory segment /dev/shm/nccl-x (size 9637888), error: No space left on device (28)",
         "the shared memory (/dev/shm) is too small"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that", "the shared memory"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:72] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
         "the machine has too little memory"),
        ("MemoryError", "the machine has too little memory"),
        ("OSError: [Errno 12] Cannot allocate memory", "the machine has too little memory"),
        (("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name:"
         " EADDRINUSE, message: address already in use"), "the port 29500 is in use"),
        ("OSError: [Errno 98] Address already in use", "a port that it needs is in use"),
        ("ValueError: Port is already in use. dist_init_port=29500 port_base=29501", "a port that it needs is in use"),
        ("ValueError: Model architectures ['FooForCausalLM'] are not supported for now. Supported architectures: dict_keys([",
         "the engine does not support 'FooForCausalLM'"),
        ("ValueError: The checkpoint you are trying to load has model type `foo` but Transformers does not recognize this",
         "the engine's Transformers does not know the model type foo"),
        ("ModuleNotFoundError: No module named 'flash_attn'", "has no Python module flash_attn"),
        ("ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
         "the library libcudart.so.12 is missing"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 12040).", "the NVIDIA driver is too old"),
        ("torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device", "not built for GPUs"),
        ("RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", "no GPU can be used"),
        ("RuntimeError: No CUDA GPUs are available", "no GPU can be used"),
        ("RuntimeError: No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) or platform plugin is available.", "no GPU can be used"),
        ("ValueError: World size (8) is larger than the number of available GPUs (2) in this node. If this is",
         "it needs 8 GPUs and may use 2"),
        ("torch.AcceleratorError: CUDA error: invalid device ordinal", "it needs more GPUs than it may use"),
        ("CUDA error: an illegal memory access was encountered", "an illegal memory access on the GPU"),
        ("CUDA error: device-side assert triggered", "an assertion failed on the GPU"),
        ("torch.AcceleratorError: CUDA error: unspecified launch failure", "CUDA error: unspecified launch failure"),
        ("RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
         "(NCCL: unhandled system error)"),
        (("torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, unhandled"
         " cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5"), "(NCCL: unhandled cuda error)"),
        ("PermissionError: [Errno 13] Permission denied: '/root/.cache'", "it has no permission for /root/.cache"),
        ("OSError: Can't load tokenizer for '/m'. If you were trying to load it from", "the model's tokenizer cannot be loaded"),
        ("The supplied chat template string (/x.jinja) appears path-like, but doesn't exist!", "the chat template /x.jinja"),
        ("RuntimeError: Chat template nix is not a built-in template name or a valid chat template file path.",
         "the chat template nix"),
        (("ValueError: Quantization method specified in the model config (gptq) does not match the quantization method specified"
         " in the `quantization` argument (awq)."), "the model is quantized with gptq, not with awq"),
        ("The quantization method fp8 is not supported for the current GPU. Minimum capability: 89.", "too old for the quant"),
        ("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer", "damaged or incomplete"),
        ("RuntimeError: Cannot find any model weights with `/m`", "there are no weights in /m"),
        ("OSError: /m does not appear to have a file named config.json. Checkout", "the model /m has no file config.json"),
        ("The repository /m contains custom code which must be executed to correctly load", "set trust_remote_code = true"),
        ("RuntimeError: Failed to find C compiler. Please specify via CC environment variable", "install gcc"),
    ],
)  # fmt: skip
def test_the_root_cause_is_found_in_engines_output(line, cause):
    """The root is found above what follows from it, whatever stands before it on its line, coloured or not."""
    for shown in (CORE + line, f"\x1b[0;36m(Worker_TP0)\x1b[0;0m {line}", f"[2026-01-01 18:18:34 TP0] {line}"):
        assert cause in cause_of(["loading", shown, *ENDING], 70, oom_killed=False)
    assert cause in cause_of([line], None, oom_killed=False)


def test_the_root_comes_before_what_follows_from_it():
    """Several causes in one log: memory, then NCCL, then the hub's words in an argument list."""
    lines = [
        "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB",
        "ModuleNotFoundError: No module named 'x'",
    ]
    assert cause_of(lines, 70, oom_killed=False).startswith("CUDA out of memory")


@pytest.mark.parametrize(
    "line",
    [
        "INFO non-default args: {'trust_remote_code': True, 'model': 'huggingface/x'} trust_remote_code=True",
        (
            "WARNING Found ulimit of 20000 and failed to automatically increase. This can cause fd limit errors like `OSError:"
            " [Errno 24] Too many open files`. Consider increasing with ulimit -n"
        ),
        "WARNING Address already in use. Retrying with a new port.",
        "INFO Free memory on device (21.5/23.5 GiB) on startup. Desired GPU memory utilization is (0.9, 21.1 GiB).",
        "WARNING Failed to import from vllm._C: ImportError('libcuda.so.1: cannot open shared object file')",
    ],
)
def test_output_of_healthy_engines_is_no_cause(line):
    """What is said in passing does not explain a death."""
    assert cause_of([line], 70, oom_killed=False) == ""
    assert cause_of([line], -signal.SIGABRT, oom_killed=False) == ""


def test_the_last_sentence():
    """Where nothing is recognised it is iChat's own, whatever an interpreter that ends still writes after it."""
    sentence = "The engine died: EngineCore (pid 7) ended with exit code 1"
    assert cause_of(["x", sentence + ".", *ENDING[-2:]], 70, oom_killed=False) == sentence
    sentence = "/usr/bin/python3 has attrs 20.1, and iChat needs 24.1 or newer: run the worker with another"
    assert cause_of([sentence], 69, oom_killed=False) == sentence
    assert cause_of(["ModuleNotFoundError: No module named 'x'", "ichat.pyz worker: --port must be a number"], 64,
                    oom_killed=False) == "ichat.pyz worker: --port must be a number"  # fmt: skip
    lines = ["vLLM refuses these arguments:", "  --a is unknown", "  --b is unknown", "[rank0] bye"]
    assert cause_of(lines, 64, oom_killed=False) == "vLLM refuses these arguments: --a is unknown; --b is unknown"
    assert cause_of([REFUSED + "Unterminated string" + PYDANTIC], 64, oom_killed=False) == (
        "vLLM refuses these arguments: Unterminated string"
    )
    heads = "Total number of attention heads (4) must be divisible by tensor parallel size (3)."
    assert cause_of([REFUSED + heads + PYDANTIC], 64, oom_killed=False).startswith("the model's 4 attention heads")


def test_the_last_exception_where_the_sentence_says_nothing():
    """An unknown error of the engine is its own word; what only tells of another process is not taken."""
    lines = [CORE + "ValueError: no such thing.", CORE + "RuntimeError: Worker failed; see root cause", *ENDING[1:]]
    assert cause_of(lines, 70, oom_killed=False) == "ValueError: no such thing"
    assert cause_of(ENDING[1:], 70, oom_killed=False).startswith("The engine failed while loading /m: Engine core")
    assert cause_of(["Traceback", "torch._dynamo.exc.BackendError: no"], 1, oom_killed=False) == "BackendError: no"
    assert cause_of(["ValueError: of an hour ago"], -signal.SIGSEGV, oom_killed=False) == ""
    assert cause_of([], 1, oom_killed=False) == ""


def test_the_oom_killer():
    """It explains a SIGKILL, and a death without a root cause; not one whose cause stands in the lines."""
    full = ["torch.OutOfMemoryError: CUDA out of memory."]
    assert cause_of(full, -signal.SIGKILL, oom_killed=True) == OOM
    assert cause_of([], 137, oom_killed=True) == OOM
    assert cause_of(ENDING, 70, oom_killed=True) == OOM
    assert cause_of(["NCCL error: remote process exited", *ENDING], 70, oom_killed=True) == OOM
    assert cause_of(full, 70, oom_killed=True).startswith("CUDA out of memory")


@pytest.mark.parametrize("code", [-signal.SIGKILL, 137])
def test_a_killed_worker_has_no_line_as_its_cause(code):
    """No line is the reason of a SIGKILL; of the kernel's memory only what it tells is said."""
    lines = [CORE + "torch.OutOfMemoryError: CUDA out of memory."]
    no_lack = "it was killed from outside (SIGKILL); the kernel's log shows no lack of memory"
    assert cause_of(lines, code, oom_killed=False) == no_lack
    assert cause_of(lines, code, oom_killed=None) == "it was killed from outside (SIGKILL)"


def test_a_guess_is_marked():
    """What a line says that is of no error, and what any line says of a death by a signal, is no knowledge."""
    error = CORE + "torch.OutOfMemoryError: CUDA out of memory."
    assert cause_of(["CUDA out of memory, it seems", *ENDING], 70, oom_killed=False).startswith("perhaps: CUDA out of")
    assert cause_of([error, *ENDING], 70, oom_killed=False).startswith("CUDA out of memory")
    assert cause_of([error], -signal.SIGABRT, oom_killed=False).startswith("perhaps: CUDA out of memory")
    assert cause_of([], -signal.SIGABRT, oom_killed=True) == OOM


DUMP = [
    "Fatal Python error: Illegal instruction",
    "Thread 0x00007f5b3c7fe6c0 (most recent call first):",
    '  File "/v/lib/python3.11/site-packages/vllm/_custom_ops.py", line 3413 in cpu_attention_with_kv_cache',
    CORE
    + "ERROR [multiproc_executor.py:284] Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down",
]


def test_a_crash_of_a_process():
    """An illegal instruction says what to do, whichever process it ends; a segmentation fault is told where nothing else is."""
    for lines, code in (([*DUMP, *ENDING], 70), ([], -signal.SIGILL), ([], 132), (["child ended with SIGILL"], 70)):
        cause = cause_of(lines, code, oom_killed=False)
        assert cause.startswith("the processor lacks an instruction that the engine was built for"), lines
        assert "install a build for this processor" in cause
    crash = ["Fatal Python error: Segmentation fault", *DUMP[1:], *ENDING]
    assert "crashed (SIGSEGV)" in cause_of(crash, 70, oom_killed=False)
    assert cause_of(["torch.OutOfMemoryError: CUDA out of memory.", *crash], 70, oom_killed=False).startswith(
        "CUDA out"
    )
    assert cause_of(["CUDA error: an illegal instruction was encountered"], 70, oom_killed=False).startswith(
        "CUDA error"
    )


@pytest.mark.parametrize("code", [0, -signal.SIGTERM, -signal.SIGINT])
def test_a_worker_that_was_asked_to_end_has_no_cause(code):
    """Whatever it has written, and whoever was killed meanwhile."""
    assert cause_of(["CUDA out of memory. Tried to allocate"], code, oom_killed=True) == ""


def test_a_cause_is_short():
    """However long the lines are, and however many."""
    lines = ["x" * 10**6, *["noise"] * 10000, "The engine failed while loading: " + "why " * 1000]
    cause = cause_of(lines, 70, oom_killed=False)
    assert len(cause) <= CAUSE_CHARS_MAX
    assert cause.startswith("The engine failed while loading: why why")
    assert cause.endswith(" …")


def test_how_it_ended():
    """To be put after a worker's name."""
    assert describe_exit(70) == "ended with exit code 70"
    assert describe_exit(-9) == "was ended by signal SIGKILL"
    assert describe_exit(-63) == "was ended by signal 63"
    assert describe_exit(None) == "ended"


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, None),
        ({"proc/vmstat": "nr_free_pages 1\noom_kill 7\n"}, 7),
        ({"proc/vmstat": "nr_free_pages 1\n"}, None),
        ({"proc/vmstat": "oom_kill 7\n", "proc/self/cgroup": "0::/a/b\n",
          "sys/fs/cgroup/a/b/memory.events": "low 0\noom 9\noom_kill 3\noom_group_kill 1\n"}, 3),
        ({"proc/vmstat": "oom_kill 7\n", "proc/self/cgroup": "0::/a/b\n",
          "sys/fs/cgroup/a/memory.events": "oom_kill 4\n"}, 4),
        ({"proc/vmstat": "oom_kill 7\n", "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "oom_kill 2\n"}, 2),
        ({"proc/vmstat": "oom_kill 7\n", "proc/self/cgroup": "5:cpu:/\n4:memory:/docker/x\n0::/\n",
          "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"}, 5),
        ({"proc/vmstat": "oom_kill 7\n", "proc/self/cgroup": "0::/../../x\n", "sys/fs/cgroup/memory.events": "oom_kill x\n"}, 7),
    ],
)  # fmt: skip
def test_oom_kills(tmp_path, files, count):
    """The own control group's count before the machine's; a container sees its group at the mount's root."""
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert oom_kills(str(tmp_path)) == count


def test_oom_kills_of_this_machine():
    """Linux tells it in one way or another."""
    assert isinstance(oom_kills(), int)


@pytest.mark.parametrize("code", [None, 70])
def test_an_exception_of_an_earlier_request_is_not_the_cause(code):
    """Nor where only the worker itself can say why it ended, since nobody knows its exit code."""
    why = "The engine died: its process VLLM::EngineCore (pid 7) ended with SIGKILL"
    lines = [
        "ERROR [serving.py:500] vllm.exceptions.VLLMValidationError: Failed to transform regex",
        f"ERROR: {why}",
        why,
    ]
    assert cause_of(lines, code, oom_killed=False, told=why) == why


NEEDED = (
    "To serve at least one request with the model's max seq len (32768), (4.00 GiB KV cache is needed, which is larger"
    " than the available KV cache memory (1.50 GiB). Based on the available memory, the estimated maximum model length"
    " is 12288. Try increasing `gpu_memory_utilization`"
)


@pytest.mark.parametrize(
    ("line", "code", "lack"),
    [
        (CORE + "ValueError: " + NEEDED, 1, MemoryLack(3 * 1024**3 // 2)),
        ("vLLM refuses these arguments: " + NEEDED, 64, MemoryLack(3 * 1024**3 // 2)),
        (CORE + "ValueError: No available memory for the cache blocks. Try increasing", 1, MemoryLack(0)),
        (CORE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", 70, MemoryLack()),
        (CORE + "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", 70, MemoryLack()),
        (CORE + "ValueError: Free memory on device (19.77/22.05 GiB) on startup is less than desired GPU", 1, None),
        ("CUDA out of memory in an earlier request", 70, None),
        (CORE + "torch.OutOfMemoryError: CUDA out of memory.", -9, None),
        (CORE + "torch.OutOfMemoryError: CUDA out of memory.", 0, None),
        (CORE + "MemoryError", 70, None),
    ],
)
def test_a_lack_of_gpu_memory_is_found_in_engines_output(line, code, lack):
    """Not where other processes hold the memory, where the machine's is full, or where it is a guess."""
    assert memory_lack_in([line], code) == lack
