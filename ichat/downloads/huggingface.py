"""Downloads by `huggingface_hub`, the library that engines have, into its own cache.

The library begins a file anew in each process. Large files are therefore fetched here with its own functions, into a
file that the next process continues; the library then gives them their places in the cache.
"""

import contextlib
import hashlib
import importlib
import os
import pathlib
import urllib.parse
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, BinaryIO

from ichat.downloads.hub_client import (
    FILES_AT_ONCE,
    DownloadFailed,
    HubFile,
    HubIndex,
    HubRefusal,
    HubWait,
    causes_of,
    failure_of,
    failure_on_disk,
    response_of,
)  # fmt: skip
from ichat.downloads.model_lock import LockHolder, locked, pause
from ichat.downloads.place import ModelPlace
from ichat.preflight.hub import HubFacts

RESUMED_BYTES_MIN = 4 * 1024 * 1024
"""Smaller files are fetched by the library itself, from their beginning."""
RESUMED_BYTES_MAX = 50_000_000_000
"""The hub serves larger files only by the library's own protocol (xet)."""
ANSWER_S = 20.0
TRIES_MAX = 5
"""Attempts at a file without a new byte."""
PAUSE_S = 1.0
LOCK_POLL_S = 0.5
_HASH_BYTES = 4 * 1024 * 1024
_SHA256_LENGTH = 64


class HuggingFace:
    """The library `huggingface_hub`, for the download of a single model."""

    def __init__(self, place: ModelPlace, facts: HubFacts) -> None:
        """Import the library. Raises ImportError."""
        self.waits_for = ""
        self._hub: Any = importlib.import_module("huggingface_hub")
        self._http_get: Any = importlib.import_module("huggingface_hub.file_download").http_get
        self._headers: Any = importlib.import_module("huggingface_hub.utils").build_hf_headers
        self._failures = _failures_of(importlib.import_module("huggingface_hub.errors"))
        self._place = place
        self._facts = facts
        self._token: str | bool = facts.token or False

    def __repr__(self) -> str:
        return f"<HuggingFace {self._place.name}>"

    def index(self, revision: str) -> HubIndex:
        """Return the model's files. Raises DownloadFailed and HubWait."""
        api = self._hub.HfApi(endpoint=self._facts.hub, token=self._token)
        try:
            info = api.model_info(self._place.name, revision=revision, files_metadata=True, timeout=ANSWER_S)
        except self._failures as error:
            raise self._failure(error, revision) from error
        if not info.sha or not info.siblings:
            raise DownloadFailed(f"{self._facts.place} lists no files of {self._place.name}: see HF_ENDPOINT.")
        files = [
            HubFile(one.rfilename, one.size or 0, (one.lfs.sha256 if one.lfs else one.blob_id) or "")
            for one in info.siblings
        ]
        return HubIndex(info.sha, files)

    def fetch(self, index: HubIndex) -> str:
        """Download the files of an index that are not here, and return the directory. Raises DownloadFailed."""
        directory = pathlib.Path(self._place.directory, "snapshots", index.version)
        missing = [one for one in index.files if not (directory / one.path).exists()]
        threads = ThreadPoolExecutor(FILES_AT_ONCE)
        results = [threads.submit(self._fetch, index, one) for one in sorted(missing, key=lambda one: one.size)]
        try:
            for result in as_completed(results):
                result.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        return str(directory)

    def arrived_bytes(self, index: HubIndex) -> int:
        """Return how much of these files is here; files under way count as well."""
        directory = pathlib.Path(self._place.directory, "snapshots", index.version)
        blobs = dict[str, int]()
        with contextlib.suppress(OSError), os.scandir(os.path.join(self._place.directory, "blobs")) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status, digest = entry.stat(), entry.name.partition(".")[0]
                    blobs[digest] = max(blobs.get(digest, 0), min(status.st_size, status.st_blocks * 512))
        arrived = 0
        for one in index.files:
            is_here = one.digest not in blobs and (directory / one.path).exists()
            arrived += one.size if is_here else min(blobs.get(one.digest, 0), one.size)
        return arrived

    def _fetch(self, index: HubIndex, file: HubFile) -> None:
        tries, before = TRIES_MAX, -1
        while True:
            try:
                if file.digest and RESUMED_BYTES_MIN <= file.size < RESUMED_BYTES_MAX:
                    self._fetch_blob(index, file)
                self._hub.hf_hub_download(
                    self._place.name, file.path, revision=index.version, cache_dir=self._place.cache,
                    endpoint=self._facts.hub, token=self._token, etag_timeout=ANSWER_S,
                )  # fmt: skip
                return
            except self._failures as error:
                arrived = self._part(file).stat().st_size if self._part(file).exists() else 0
                tries = TRIES_MAX if arrived > before else tries - 1
                before = max(before, arrived)
                failure = self._failure(error, index.version)
                if tries <= 0 or not _is_passing(error):
                    raise failure from error
            pause(PAUSE_S)

    def _part(self, file: HubFile) -> pathlib.Path:
        return pathlib.Path(self._place.directory, "blobs", f"{file.digest}.incomplete")

    def _fetch_blob(self, index: HubIndex, file: HubFile) -> None:
        """Download a file's content, from where an earlier download ended."""
        part = self._part(file)
        blob = part.with_suffix("")
        part.parent.mkdir(parents=True, exist_ok=True)
        with self._locked(file):
            for left in part.parent.glob(f"{file.digest}.*.incomplete"):
                left.unlink(missing_ok=True)  # of a process that has ended, which nothing continues
            if blob.exists():
                return
            url, headers = self._source(index, file)
            with open(part, "r+b" if part.exists() else "w+b") as output:
                begun = output.seek(0, os.SEEK_END)
                if begun > file.size:
                    begun = output.seek(0)
                    output.truncate()
                self._http_get(url, output, resume_size=begun, headers=headers, expected_size=file.size)
                output.flush()
                if begun and not _is_content(output, file):
                    part.unlink()
                    raise ConnectionError("the part that an earlier download left is not the beginning of this file")
            part.replace(blob)

    def _source(self, index: HubIndex, file: HubFile) -> tuple[str, dict[str, str]]:
        """Return the address of a file's content, and the headers for it: the token is for the hub alone."""
        url: str = self._hub.hf_hub_url(self._place.name, file.path, revision=index.version, endpoint=self._facts.hub)
        found = self._hub.get_hf_file_metadata(url, token=self._token, timeout=ANSWER_S, endpoint=self._facts.hub)
        location: str = found.location or url
        is_hub = urllib.parse.urlsplit(location).netloc == urllib.parse.urlsplit(url).netloc
        return location, self._headers(token=self._token if is_hub else False)

    @contextlib.contextmanager
    def _locked(self, file: HubFile) -> Generator[None]:
        """Hold the library's own lock of a file in the context, so that other programs do not fetch it meanwhile."""
        path = pathlib.Path(self._place.locks, f"{file.digest}.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with locked(path) as holder:
                if holder is None:
                    self.waits_for = ""
                    yield
                    return
            self.waits_for = _words_of(holder, path)
            pause(LOCK_POLL_S)

    def _failure(self, error: BaseException, revision: str) -> DownloadFailed | HubWait:
        causes = causes_of(error)
        if (of_disk := failure_on_disk(causes, self._place.name, self._place.cache)) is not None:
            return of_disk
        response, names = response_of(causes), {type(one).__name__ for one in causes}
        status, headers = (0, {}) if response is None else (response.status_code, dict(response.headers))
        return failure_of(HubRefusal(status, names, headers, _reason_of(causes)), self._facts, revision)


def _words_of(holder: LockHolder, path: pathlib.Path) -> str:
    return f"waiting for {holder.words} with the lock {path}; end it if it hangs"


def _reason_of(causes: Sequence[BaseException]) -> str:
    """Return the reason of a failure in the system's words, else in those of the library."""
    found = next((one.strerror for one in causes if isinstance(one, OSError) and one.strerror), None)
    return found or " ".join(str(causes[0]).split())[:200] or type(causes[0]).__name__


def _is_passing(error: BaseException) -> bool:
    """Return whether another attempt may succeed: the hub has not refused, and the disk neither."""
    causes = causes_of(error)
    response = response_of(causes)
    return failure_on_disk(causes, "", "") is None and (response is None or response.status_code >= 500)


def _failures_of(errors: Any) -> tuple[type[Exception], ...]:
    """Return the errors that the library raises: its own, those of its HTTP client, and those of the system."""
    bases: tuple[type[Exception], ...] = errors.HfHubHTTPError.__mro__
    return (*(one for one in bases if one.__name__ in ("HTTPError", "RequestException")), OSError, ValueError)


def _is_content(file: BinaryIO, wanted: HubFile) -> bool:
    """Return whether a file that was continued has the wanted content, as far as its digest says."""
    if len(wanted.digest) != _SHA256_LENGTH:
        return True
    digest = hashlib.sha256()
    file.seek(0)
    while part := file.read(_HASH_BYTES):
        digest.update(part)
    return digest.hexdigest() == wanted.digest
