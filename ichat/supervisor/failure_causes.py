"""Why a worker ended, in a few words, from later knowledge: its last lines, its exit code, the kernel."""

import contextlib
import functools
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ichat.config.package_data import read_toml
from ichat.errors import EXIT_SOFTWARE, EXIT_UNAVAILABLE, EXIT_USAGE
from ichat.placement.learnt import MemoryLack
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

_CONSEQUENCE = re.compile(
    r"root cause|See stack trace|Engine ?[Cc]ore\b.* (?:failed|died|encountered)|died unexpectedly|EngineDead"
    r"|error messages above|initialization failed|EOFError|BrokenPipe|ConnectionReset|Cancelled|KeyboardInterrupt"
)
_SENTENCE = re.compile(r"(?:[A-Z]|vLLM|ichat\.pyz|/)\S* \S")
_NO_SENTENCE = re.compile(
    r"[A-Z]+ +\d|(?:DEBUG|INFO|WARNING|ERROR)\b|.*(?:Warning: |Error: |Exception)|Traceback |File "
)
_CACHE_LEFT = re.compile(r"available KV cache\s+memory \(([\d.]{1,12}) GiB\)")
_NO_CACHE_LEFT = "No available memory for the cache blocks"
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


def memory_lack_in(lines: Sequence[str], code: int | None) -> MemoryLack | None:
    """Return the lack of GPU memory by which a worker ended; None: there was another cause, or it is not certain.

    `lines` are as for `cause_of`.
    """
    if code in _BY_CODE or code in _KILLED:
        return None
    tail = [plain(line) for line in lines[-LINES_MAX:]]
    certain = (_sentence(tail) if code == EXIT_USAGE else "") or "\n".join(_by_certainty(tail)[0])
    root = next((one for one in _causes()["roots"] if one.pattern.search(certain)), None)
    if root is None or not root.lacks_gpu_memory:
        return None
    left = _CACHE_LEFT.search(certain)
    if left is not None:
        with contextlib.suppress(ValueError):
            return MemoryLack(int(float(left[1]) * 1024**3))
    return MemoryLack(0 if _NO_CACHE_LEFT in certain else None)


def _cause_in(lines: Sequence[str], code: int | None, told: str, *, is_oom: bool) -> str:
    tail = [plain(line) for line in lines[-LINES_MAX:]]
    sentence = _sentence(tail) if code in (EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_SOFTWARE) else told
    if sentence and code == EXIT_UNAVAILABLE:
        return _short(sentence)
    errors, others = _by_certainty(tail)
    if sentence and code == EXIT_USAGE:
        certain, unsure = sentence, ""
    else:
        certain, unsure = "\n".join(errors), "\n".join(others)
    is_signal = code is not None and code < 0
    cause = _first("roots", certain) or (_OOM if is_oom else "") or _first("vague", certain)
    if cause and is_signal and cause != _OOM:
        cause = _GUESS + cause
    cause = cause or _guess("roots", unsure)
    if cause or (sentence and not _CONSEQUENCE.search(sentence)):
        return _short(cause or sentence)
    return _short(("" if is_signal else _exception(errors)) or _guess("vague", unsure) or sentence)


def _by_certainty(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the lines that are errors, and the lines that may be errors."""
    marked = list(zip(lines, are_errors(lines), strict=True))
    return [line for line, is_error in marked if is_error], [line for line, is_error in marked if is_error is None]


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


class _Cause(NamedTuple):
    pattern: re.Pattern[str]
    text: str
    lacks_gpu_memory: bool


@functools.cache
def _causes() -> Mapping[str, Sequence[_Cause]]:
    """Return the patterns and sentences of `failure_causes.toml`, by their kind: `roots` or `vague`."""
    data = read_toml("ichat.supervisor", "failure_causes.toml")
    found: dict[str, list[_Cause]] = {"roots": [], "vague": []}
    for kind, causes in found.items():
        for one in data[kind]:
            pattern = re.compile("|".join(one["patterns"]).replace("{hub}", data["hub"]))
            causes.append(_Cause(pattern, one["cause"], one.get("lacks_gpu_memory", False)))
    return found


def _first(kind: str, text: str) -> str:
    for cause in _causes()[kind]:
        found = cause.pattern.search(text)
        if found:
            return cause.text.format(*found.groups(""), illegal=_ILLEGAL)
    return ""


def _guess(kind: str, text: str) -> str:
    cause = _first(kind, text)
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
