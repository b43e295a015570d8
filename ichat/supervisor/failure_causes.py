"""Why a worker ended, in a few words, from later knowledge: its last lines, its exit code, the kernel."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Sequence

from ichat.errors import EXIT_SOFTWARE, EXIT_UNAVAILABLE, EXIT_USAGE
from ichat.supervisor.last_words import EXCEPTION, LINES_MAX, are_errors, plain

CAUSE_CHARS_MAX = 300

_ILLEGAL = (
    "the processor lacks an instruction that the engine was built for (SIGILL), or may not use it: install a build for"
    " this processor, or use another machine"
)
_OOM = "the kernel ended it since the machine ran out of memory (OOM killer)"
_KILLED_BY_OTHERS = "it was killed from outside (SIGKILL)"
_NO_OOM = f"{_KILLED_BY_OTHERS}; the kernel's log shows no lack of memory"
_GUESS = "perhaps: "
"""Before a cause that nothing proves."""
_SIGNALS = {int(number): number.name for number in signal.Signals}
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_BY_CODE = {
    0: "",
    -signal.SIGTERM: "",
    -signal.SIGINT: "",
    -signal.SIGILL: _ILLEGAL,
    128 + signal.SIGILL: _ILLEGAL,
}
"""Exit codes that say everything: after a good or a requested end, no written line is the reason."""

_HUB = r"(?:huggingface|hf\.co|hf-mirror|modelscope)"
_ROOTS = (
    # The memory of the GPUs: what says which setting is to blame, before what only says that it is full.
    (
        r"Free memory on device (?:\S+ )?\(([\d.]+)/([\d.]+) GiB\) on startup is less than",
        "only {0} of {1} GiB of a GPU are free: end what else uses it, or lower gpu_memory_utilization",
    ),
    (
        r"Available memory on node \S+ \(([\d.]+)/([\d.]+) GiB\) on [\w ]+ is less than",
        "only {0} of {1} GiB of the machine's memory are free: lower gpu_memory_utilization or VLLM_CPU_KVCACHE_SPACE",
    ),
    (
        r"out of memory occurred when warming up sampler",
        "CUDA out of memory while warming up: lower max_num_seqs or gpu_memory_utilization",
    ),
    (
        r"Capture [\w ]*graph failed: .{0,500}out of memory",
        "CUDA out of memory while capturing CUDA graphs: lower mem_fraction_static or cuda_graph_max_bs",
    ),
    (
        r"No available memory for the cache blocks|Not enough memory\. Please try to increase --mem-fraction-static",
        "the model leaves no memory for the KV cache: raise gpu_memory_utilization, or use more GPUs",
    ),
    (
        r"max seq len \((\d+)\).{0,500} KV cache is needed.{0,500}estimated maximum model length is (\d+)",
        "the KV cache is too small for max_model_len {0}: lower it to {1}, or raise gpu_memory_utilization",
    ),
    (
        r"max seq len \((\d+)\).{0,500} (?:KV cache is needed|is larger than the maximum number of tokens that can be)",
        "the KV cache is too small for max_model_len {0}: lower it, raise gpu_memory_utilization, or use more GPUs",
    ),
    (
        r"Error in memory profiling\. Initial free memory",
        "something else freed memory of the GPU while vLLM measured it: let nothing else start or end meanwhile",
    ),
    (
        r"(?:CUDA|HIP) out of memory|CUDA error: out of memory|\bOutOfMemoryError\b|CUBLAS_STATUS_ALLOC_FAILED",
        "CUDA out of memory: lower gpu_memory_utilization or max_model_len, or use more GPUs",
    ),
    # The memory of the machine.
    (
        r"/shm/.{0,500}No space left|insufficient shared memory|unable to (?:mmap|\w+ shared).{0,99}No space|Bus error",
        "the shared memory (/dev/shm) is too small: make it larger (in Docker: --shm-size or --ipc=host)",
    ),
    (
        r"DefaultCPUAllocator: |\bMemoryError\b|std::bad_alloc|Cannot allocate memory|Not enough host memory",
        "the machine has too little memory for it",
    ),
    (r"No space left on device|Disk quota exceeded", "no space is left on a disk that it writes to"),
    (r"Fatal Python error: Illegal instruction|\bSIGILL\b", _ILLEGAL),
    # The GPUs.
    (
        r"World size \((\d+)\) is larger than the number of available GPUs \((\d+)\)",
        "it needs {0} GPUs and may use {1}: give it more gpu_ids, or lower tensor_parallel_size",
    ),
    (
        r"CUDA error: invalid device ordinal|number of required GPUs exceeds the total number",
        "it needs more GPUs than it may use: give it more gpu_ids, or lower tensor_parallel_size",
    ),
    (
        (
            r"NVIDIA driver on your system is too old|CUDA driver version is insufficient|PTX was compiled with an uns"
            r"|forward compatibility was attempted|unsupported display driver / cuda driver combination"
        ),
        "the NVIDIA driver is too old for this engine's CUDA: update it, or install an engine for an older CUDA",
    ),
    (
        r"Driver/library version mismatch|NVMLError_LibRmVersionMismatch",
        "the NVIDIA driver was updated and not loaded again: restart the machine",
    ),
    (
        r"no kernel image is available for execution",
        "this engine was not built for GPUs of this kind: they are too old for it, or it is too old for them",
    ),
    (
        (
            r"Found no NVIDIA driver on your system|No CUDA GPUs are available|no CUDA-capable device is detected"
            r"|Failed to infer device type|No accelerator \([^)\n]*\)[\w ]* is available|Torch not compiled with CUDA"
        ),
        "no GPU can be used: see nvidia-smi, gpu_ids, and whether the engine was built for CUDA",
    ),
    (r"Bfloat16 is only supported on GPUs", 'this GPU is too old for bfloat16: set dtype = "float16"'),
    (r"uncorrectable ECC error", "a GPU reports a memory fault (ECC): take it out of use"),
    (
        r"device-side assert triggered",
        "an assertion failed on the GPU: a wrong input or a bug of the engine; the first of its lines says where",
    ),
    (
        r"illegal memory access was encountered",
        "an illegal memory access on the GPU: a bug of the engine, or of a kernel that it uses",
    ),
    # The model.
    (
        r"GatedRepoError|access(?:ing)? (?:a )?gated repo|is a gated repository|Access to model \S+ is restricted",
        "the model is gated: accept its terms on the hub, and put HF_TOKEN into env",
    ),
    (r"Invalid user token|Invalid credentials in Authorization header", "the hub refuses the token: see HF_TOKEN"),
    (
        r"(?<!\S)(\S{1,300}) is not a local folder (?:and is not a valid model|or a valid repository)",
        "the model {0} is no directory here and the hub has none of this name: see model_path (if private: HF_TOKEN)",
    ),
    (
        r"Repo id must (?:be in the form|use alphanumeric).{0,500}: '([^'\n]+)'",
        "the model {0} is no directory here, and no name on the hub: see model_path",
    ),
    (
        r"RepositoryNotFoundError|Repository Not Found for url",
        "the hub has no model of this name: see model_path, and HF_TOKEN if it is private",
    ),
    (r"RevisionNotFoundError|is not a valid git identifier", "the model has no such revision: see revision"),
    (
        rf"429 (?:Client Error|Too Many Requests)[^\n]{0, 500}{_HUB}",
        "the model hub allows no more downloads for now (429)",
    ),
    (
        rf"CERTIFICATE_VERIFY_FAILED[^\n]{0, 500}{_HUB}|{_HUB}[^\n]{0, 500}CERTIFICATE_VERIFY_FAILED",
        "the model hub's certificate is not believed: see SSL_CERT_FILE and REQUESTS_CA_BUNDLE",
    ),
    (
        (
            r"We couldn't connect to 'http|LocalEntryNotFoundError|OfflineModeIsEnabled|outgoing traffic has been dis"
            rf"|(?:Max retries exceeded|Failed to resolve|Cannot reach|timed out).{{0,500}}{_HUB}"
            rf"|{_HUB}.{{0,500}}(?:Max retries exceeded|Failed to resolve|timed out)"
        ),
        "the model is not here and its hub cannot be reached: see the network and HF_ENDPOINT, or download it before",
    ),
    (
        r"contains custom code which must be executed|requires you to execute the \w+ file in that repo",
        "the model brings code of its own: set trust_remote_code = true if you trust it",
    ),
    (
        r"has model type `([^`\n]+)` but Transformers does not recognize",
        "the engine's Transformers does not know the model type {0}: a newer engine may",
    ),
    (
        r"Model architectures \[([^\]\n]{1,200})\] are not supported",
        "the engine does not support {0}: another backend, or a newer version, may",
    ),
    (
        r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len \(\w+=(\d+)",
        "max_model_len {0} is more than the model's {1}",
    ),
    (
        r"context_length \((\d+)\) is greater than the derived context_length \((\d+)\).{0,500}To allow overriding",
        "context_length {0} is more than the model's {1}",
    ),
    (
        r"attention heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)",
        "the model's {0} attention heads cannot be shared equally by {1} GPUs: see tensor_parallel_size",
    ),
    (
        (
            r"specified in the model config \((\S+)\) does not match the quantization method specified in the"
            r" `quantization` argument \((\S+)\)"
        ),
        "the model is quantized with {0}, not with {1}: leave quantization out",
    ),
    (
        r"quantization method (\S+) is not supported for the current GPU",
        "this GPU is too old for the quantization {0}",
    ),
    (r"Cannot find the config file for (\w+)", "the model has no files for the quantization {0}"),
    (r"Unknown quantization method: ([^\s.]+)", "the engine does not know the quantization {0}"),
    (
        r"SafetensorError|Error while deserializing header|PytorchStreamReader failed",
        "a file of the model's weights is damaged or incomplete: download it again",
    ),
    (r"Cannot find any (?:\w+ )?model weights with [`'](\S+?)[`']", "there are no weights in {0}"),
    (
        r"Can't load tokenizer for '([^'\n]+)'|Tokenizer class (\S+) does not exist",
        "the model's tokenizer cannot be loaded: its files are missing, or the engine does not know it",
    ),
    (
        r"supplied chat template (?:string )?\(([^)\n]+)\) (?:looks|appears)|Chat template (\S+) is not a built-in",
        "the chat template {0}{1} cannot be read",
    ),
    (
        r"(?<!\S)(\S{1,300}) does not appear to have a file named ([^\s,]+?)\.?(?=[\s,]|$)",
        "the model {0} has no file {1}",
    ),
    # What else the engine needs.
    (r"(?:Failed to find C compiler|Python\.h: No such file)", "it compiles code: install gcc and Python's headers"),
    (r"nvcc: not found|Could not find nvcc", "it compiles CUDA code: install nvcc, or set CUDA_HOME"),
    (r"Too many open files(?!`)", "it may not open so many files: raise the limit (ulimit -n, LimitNOFILE)"),
    (r"can't start new thread|pthread_create failed", "it may not start so many threads: raise TasksMax or pids.max"),
)
"""Patterns in a worker's lines, and their meanings; of several the first here is the root of the others."""

_VAGUE = (
    (
        r"port: (\d+).{0,500} (?:EADDRINUSE|address already in use)",
        "the port {0} is in use: another engine may have been given the same",
    ),
    (
        r"EADDRINUSE|[Aa]ddress already in use(?!\. Retrying)|\b[Pp]ort\b.{0,20} is already in use",
        "a port that it needs is in use: another engine may have been given the same",
    ),
    (r"PermissionError: \[Errno 13\] Permission denied: '?([^'\n]{1,200})", "it has no permission for {0}"),
    (r"Permission denied \(os error 13\)", "it has no permission for a file"),
    (
        r"ModuleNotFoundError: No module named '([^'\n]+)'",
        "the engine's environment has no Python module {0}: install it there",
    ),
    (
        r"ImportError: ([^\s:]+): cannot open shared object file",
        "the library {0} is missing, or is for another version of CUDA",
    ),
    (r"undefined symbol: \S+", "the engine's packages do not fit together: install its environment anew"),
    (
        r"Watchdog caught collective operation timeout",
        "the GPUs waited for each other in vain (NCCL): one of them, or its process, hangs or has died",
    ),
    (
        r"NCCL error(?: in)?: (?:[^\n,]*:\d+, )?([^\n(,]{3,80}?)(?=[ ,]*(?:\(|,|\n|$))",
        "the GPUs cannot talk to each other (NCCL: {0}): NCCL_DEBUG=INFO in env says more",
    ),
    (r"CUDA error: ([^\n]{3,120}?)(?=\.?(?:\n|$))", "CUDA error: {0}"),
    (
        r"Fatal Python error: Segmentation fault|\bSIGSEGV\b",
        "a process of the engine crashed (SIGSEGV), by a bug of it or of a library: see below `Fatal Python error`",
    ),
    (
        r"Temporary failure in name resolution|Name or service not known",
        "a host's name cannot be resolved: see the network and DNS",
    ),
)
"""Patterns that may also follow from a cause without a line, such as a process that the kernel ended."""

_CONSEQUENCE = re.compile(
    r"root cause|See stack trace|Engine ?[Cc]ore\b.* (?:failed|died|encountered)|died unexpectedly|EngineDead"
    r"|error messages above|initialization failed|EOFError|BrokenPipe|ConnectionReset|Cancelled|KeyboardInterrupt"
)
_SENTENCE = re.compile(r"(?:[A-Z]|vLLM|ichat\.pyz|/)\S* \S")
_NO_SENTENCE = re.compile(
    r"[A-Z]+ +\d|(?:DEBUG|INFO|WARNING|ERROR)\b|.*(?:Warning: |Error: |Exception)|Traceback |File "
)
_VALIDATION = re.compile(r"\d+ validation errors? for \w+; (?:Value error, )?| \[type=\w+, input_value=.*")


def describe_exit(code: int | None) -> str:
    """Return how a process ended, in words after its name. A negative code is a signal's number, None is unknown."""
    if code is None:
        return "ended"
    if code < 0:
        return f"was ended by signal {_SIGNALS.get(-code, -code)}"
    return f"ended with exit code {code}"


def cause_of(lines: Sequence[str], code: int | None, *, oom_killed: bool | None, told: str = "") -> str:
    """Return in a few words why a worker ended, and what to do if that is certain; "" if it is not known.

    `lines` are those that its end was about (`last_words.lines_of_end`), oldest first; the cause stands above what
    follows from it. A guess begins with `perhaps: `: it is based on a line that is not marked as an error, or on lines
    about an end by a signal. Lines say nothing of a SIGKILL, since it is sent from outside.

    `oom_killed` means that the kernel has ended some process for want of memory meanwhile, here or nearby; None: it is
    not known. `told` is the reason that the worker itself gave: if the code is unknown, no exception of an earlier
    request replaces it.
    """
    if code in _BY_CODE:
        return _BY_CODE[code]
    if code in _KILLED:
        return _OOM if oom_killed else _KILLED_BY_OTHERS if oom_killed is None else _NO_OOM
    return _cause_in(lines, code, told, is_oom=bool(oom_killed))


def _cause_in(lines: Sequence[str], code: int | None, told: str, *, is_oom: bool) -> str:
    tail = [plain(line) for line in lines[-LINES_MAX:]]
    sentence = _sentence(tail) if code in (EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_SOFTWARE) else told
    if sentence and code == EXIT_UNAVAILABLE:
        return _short(sentence)
    marked = list(zip(tail, are_errors(tail), strict=True))
    errors = [line for line, is_error in marked if is_error]
    if sentence and code == EXIT_USAGE:
        certain, unsure = sentence, ""
    else:
        certain, unsure = "\n".join(errors), "\n".join(line for line, is_error in marked if is_error is None)
    is_signal = code is not None and code < 0
    cause = _first(_ROOTS, certain) or (_OOM if is_oom else "") or _first(_VAGUE, certain)
    if cause and is_signal and cause != _OOM:
        cause = _GUESS + cause
    cause = cause or _guess(_ROOTS, unsure)
    if cause or (sentence and not _CONSEQUENCE.search(sentence)):
        return _short(cause or sentence)
    return _short(("" if is_signal else _exception(errors)) or _guess(_VAGUE, unsure) or sentence)


def oom_kills(root: str = "/") -> int | None:
    """Return how many processes the kernel has ended for want of memory so far; None if that is not known.

    It is the count of this process's own control group, where its children are as well, else that of the whole machine.
    Compare two readings. `root` is where /proc and /sys are.
    """
    for path, name in [*_own_groups(root), (os.path.join(root, "proc/vmstat"), "oom_kill")]:
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii", errors="replace") as file:
            for line in file:
                key, _, count = line.partition(" ")
                if key == name:
                    return int(count)
    return None


def _own_groups(root: str) -> Iterator[tuple[str, str]]:
    """Yield the files with the count, of this control group and those above: a container has only the mount's own."""
    try:
        with open(os.path.join(root, "proc/self/cgroup"), encoding="utf-8", errors="replace") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return
    for number, controllers, path in (group for group in groups if len(group) == 3):
        if number == "0" and not controllers:
            mount, name = "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            mount, name = "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for length in range(len(parts), -1, -1):
            yield os.path.join(root, mount, *parts[:length], name), "oom_kill"


def _first(causes: Sequence[tuple[str, str]], text: str) -> str:
    for pattern, cause in causes:
        found = re.search(pattern, text)
        if found:
            return cause.format(*found.groups(""))
    return ""


def _guess(causes: Sequence[tuple[str, str]], text: str) -> str:
    cause = _first(causes, text)
    return _GUESS + cause if cause else ""


def _sentence(lines: Sequence[str]) -> str:
    """Return the sentence that iChat's command line ends with; interpreters that end may still write after it."""
    for index in range(len(lines) - 1, -1, -1):
        if _SENTENCE.match(lines[index]) and not _NO_SENTENCE.match(lines[index]):
            more = lines[index + 1 :]
            count = next((number for number, line in enumerate(more) if not line.startswith("  ")), len(more))
            return "; ".join(line.strip() for line in lines[index : index + 1 + count]).replace(":; ", ": ")
    return ""


def _exception(lines: Sequence[str]) -> str:
    """Return the last exception that is not about what happened to another process."""
    for line in reversed(lines):
        found = EXCEPTION.search(line)
        if found and not _CONSEQUENCE.search(found[0]):
            return f"{found[1]}: {found[2]}"
    return ""


def _short(text: str) -> str:
    text = " ".join(_VALIDATION.sub("", text).split()).removesuffix(".")
    return text if len(text) <= CAUSE_CHARS_MAX else text[: CAUSE_CHARS_MAX - 2].rstrip() + " …"
