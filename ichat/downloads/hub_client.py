"""The parts of a hub's library that a download needs, and the sentences for its refusals."""

import errno
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import attrs

from ichat.downloads.place import WEIGHTS
from ichat.preflight.hub import HubFacts, problems_of_hub

FILES_AT_ONCE = 4
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a disk without room: all of it, a quota, or the largest file that the process may write."""
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_GIB = 1024**3
_CAUSES_MAX = 100
_UNUSED = ("original/*", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.tflite", "*.mlmodel", "onnx/*", "openvino/*")
"""Files that no engine reads: the model in the formats of other programs."""


class DownloadFailed(Exception):
    """A download has failed; the text is a sentence that says what to do."""


class HubWait(Exception):
    """The hub asks for a pause before the next request."""

    def __init__(self, seconds: float, sentence: str) -> None:
        """`sentence` is for a pause that is too long."""
        super().__init__(sentence)
        self.seconds = seconds


@attrs.frozen
class HubFile:
    """A file of a model on its hub."""

    path: str
    size: int
    digest: str = ""
    """The name of its content: for a large file its SHA-256."""


@attrs.frozen
class HubIndex:
    """The files of a version of a model."""

    version: str
    """The version's full name: with Hugging Face, the commit."""
    files: Sequence[HubFile]


class HubClient(Protocol):
    """A hub's library, for the download of a single model."""

    waits_for: str
    """What keeps the download from going on, in a few words; empty: nothing."""

    def index(self, revision: str) -> HubIndex:
        """Return the model's files. Raises DownloadFailed and HubWait."""
        ...

    def fetch(self, index: HubIndex) -> str:
        """Download the files of an index that are not here, and return the model's directory.

        It goes on where an earlier download ended. Raises DownloadFailed and OSError.
        """
        ...

    def arrived_bytes(self, index: HubIndex) -> int:
        """Return how much of these files is here; files under way count as well. May block."""
        ...


def wanted(index: HubIndex, *, wants_all: bool) -> HubIndex:
    """Return the files that engines read: not the weights in a second format, or in those of other programs."""
    if wants_all:
        return index
    paths = [one.path for one in index.files]
    has_safetensors = any(path.endswith(".safetensors") and "/" not in path for path in paths)
    seconds = [f"*{suffix}" for suffix in WEIGHTS if suffix != ".safetensors"] if has_safetensors else []
    unused = [*_UNUSED, *seconds]
    files = [one for one in index.files if not any(fnmatch.fnmatchcase(one.path, pattern) for pattern in unused)]
    return attrs.evolve(index, files=files)


def lack_of_room(name: str, cache: str, missing_bytes: int, free_bytes: int) -> str:
    """Return why the rest of a model does not fit on the disk, in a sentence; "" if it does."""
    if missing_bytes <= free_bytes:
        return ""
    missing, free = missing_bytes / _GIB, max(0, free_bytes) / _GIB
    return (
        f"{name} needs {missing:.2f} GiB more in {cache}, and that disk has {free:.2f} GiB free: make room"
        " (`ichat.pyz models --disk` lists the models there), or name another directory (--cache, HF_HOME)."
    )


def sentence_of_disk(error: OSError, name: str, cache: str) -> str:
    """Return the sentence for a disk that refuses a file; "" for another error."""
    if error.errno in DISK_FULL:
        return (
            f"The disk of {cache} is full ({error.strerror}): make room and ask again: the download of {name} goes on"
            " from there."
        )
    if error.errno in _NOT_WRITABLE:
        return f"{cache} cannot be written ({error.strerror}): see its rights, or name another directory."
    return ""


@attrs.frozen
class HubRefusal:
    """A hub's answer that is no success."""

    status: int
    """The HTTP status; 0: there was no answer."""
    names: Collection[str] = ()
    """The names of the errors that the hub's library has raised for it."""
    headers: Mapping[str, str] = attrs.field(factory=dict[str, str])
    why: str = ""
    """The reason in the library's words, or the system's."""


def response_of(causes: Sequence[BaseException]) -> Any:
    """Return the hub's response that an error of its library has, or an error behind it; None: there was none."""
    return next((found for one in causes if (found := getattr(one, "response", None)) is not None), None)


def failure_on_disk(causes: Sequence[BaseException], name: str, cache: str) -> DownloadFailed | None:
    """Return the failure of the disk among the errors that have led to a failure; None: it was not the disk."""
    sentences = (sentence_of_disk(one, name, cache) for one in causes if isinstance(one, OSError))
    found = next(filter(None, sentences), "")
    return DownloadFailed(found) if found else None


def failure_of(refusal: HubRefusal, facts: HubFacts, revision: str) -> DownloadFailed | HubWait:
    """Return the failure for a hub's refusal, with its sentence."""
    name, place = facts.name, facts.place
    if refusal.status == 429:
        seconds = _retry_after(refusal.headers)
        when = f"after {seconds:g} s" if seconds is not None else "later"
        more = "" if facts.token else ", or log in: it grants more requests then (HF_TOKEN)"
        sentence = f"{place} grants no more requests now (429): try again {when}{more}."
        return DownloadFailed(sentence) if seconds is None else HubWait(seconds, sentence)
    if "RevisionNotFoundError" in refusal.names:
        return DownloadFailed(f"{name} on {place} has no revision {revision}: correct the revision.")
    if "GatedRepoError" in refusal.names or refusal.status == 403:
        return DownloadFailed(_known(facts, "gated"))
    if "RepositoryNotFoundError" in refusal.names or refusal.status == 404:
        return DownloadFailed(_known(facts, "absent"))
    if refusal.status == 401:
        return DownloadFailed(_known(facts, "gated"))
    if refusal.status:
        return DownloadFailed(f"{place} answers {refusal.status} for {name}: try again later, or see HF_ENDPOINT.")
    return DownloadFailed(_known(attrs.evolve(facts, why=refusal.why), "unreachable"))


def _known(facts: HubFacts, answer: str) -> str:
    (sentence,) = problems_of_hub(attrs.evolve(facts, is_cached=False, is_offline=False, answer=answer))
    return sentence


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of Retry-After; None: there is none, or it is a date."""
    given = next((value for name, value in headers.items() if name.lower() == "retry-after"), "")
    return float(given) if given.isascii() and given.isdecimal() else None


def causes_of(error: BaseException) -> Sequence[BaseException]:
    """Return an error and the errors that have led to it, also those of single files."""
    found, left = list[BaseException](), [error]
    while left and len(found) < _CAUSES_MAX:
        one = left.pop(0)
        if one in found:
            continue
        found.append(one)
        files: Mapping[str, BaseException] = getattr(one, "failed_files", None) or {}
        known = (one.__cause__ or one.__context__, getattr(one, "last_error", None), *files.values())
        left += [cause for cause in known if isinstance(cause, BaseException)]
    return found
