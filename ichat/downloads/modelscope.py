"""Downloads by `modelscope`, into a directory with the model's files, as older releases of it have them."""

import contextlib
import importlib
import os
from typing import Any

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
from ichat.downloads.place import UNDER_WAY, ModelPlace
from ichat.preflight.hub import HubFacts

_ERRORS = {"NotExistError": 404, "AuthenticationError": 401, "PermissionDeniedError": 403}
"""The library's errors without a status."""


class ModelScope:
    """The library `modelscope`, for the download of a single model."""

    def __init__(self, place: ModelPlace, facts: HubFacts, revision: str) -> None:
        """Import the library. Raises ImportError."""
        self.waits_for = ""
        self._library: Any = importlib.import_module("modelscope")
        self._api: Any = importlib.import_module("modelscope.hub.api").HubApi()
        self._failures = _failures_of(importlib.import_module("modelscope.hub.errors"))
        self._place = place
        self._facts = facts
        self._directory = place.directory_of(revision)

    def __repr__(self) -> str:
        return f"<ModelScope {self._place.name}>"

    def index(self, revision: str) -> HubIndex:
        """Return the model's files. Raises DownloadFailed and HubWait."""
        try:
            listed = self._api.get_model_files(self._place.name, revision=revision, recursive=True)
        except self._failures as error:
            raise self._failure(error, revision) from error
        files = [HubFile(one["Path"], int(one.get("Size") or 0)) for one in listed if one.get("Type") != "tree"]
        if not files:
            raise DownloadFailed(f"{self._facts.place} lists no files of {self._place.name}: see MODELSCOPE_ENDPOINT.")
        return HubIndex(revision, files)

    def fetch(self, index: HubIndex) -> str:
        """Download the files of an index that are not here, and return the directory. Raises DownloadFailed."""
        try:
            self._library.snapshot_download(
                self._place.name,
                revision=index.version,
                local_dir=self._directory,
                allow_patterns=[one.path for one in index.files],
                max_workers=FILES_AT_ONCE,
            )
        except self._failures as error:
            raise self._failure(error, index.version) from error
        return self._directory

    def arrived_bytes(self, index: HubIndex) -> int:
        """Return how much of these files is here; files under way count as well."""
        arrived = 0
        for one in index.files:
            for directory in (self._directory, os.path.join(self._directory, UNDER_WAY)):
                with contextlib.suppress(OSError):
                    status = os.stat(os.path.join(directory, one.path))
                    arrived += min(status.st_size, status.st_blocks * 512, one.size)
                    break
        return arrived

    def _failure(self, error: BaseException, revision: str) -> DownloadFailed | HubWait:
        causes = causes_of(error)
        if (of_disk := failure_on_disk(causes, self._place.name, self._place.cache)) is not None:
            return of_disk
        response, names = response_of(causes), [type(one).__name__ for one in causes]
        status = next((_ERRORS[name] for name in names if name in _ERRORS), 0)
        headers = {} if response is None else dict(response.headers)
        status = status if response is None else response.status_code
        return failure_of(HubRefusal(status, names, headers, " ".join(str(error).split())[:200]), self._facts, revision)


def _failures_of(errors: Any) -> tuple[type[Exception], ...]:
    """Return the errors that the library raises: its own, those of its HTTP client, and those of the system."""
    found: list[object] = [*vars(errors).values()]
    own = [one for one in found if isinstance(one, type) and issubclass(one, Exception)]
    return (*own, OSError, ValueError, RuntimeError)
