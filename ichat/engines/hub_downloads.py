"""How much of a model a hub has sent while the model is loaded, by the files in the cache of `huggingface_hub`."""

import contextlib
import itertools
import os
import pathlib
import re
from collections.abc import Mapping

COMING_S = 10.0
"""A file that has not grown for this many seconds was left by a download that broke off."""
FILES_MAX = 4096
GIB = 1024**3
_NAME = re.compile(r"[\w.-]{1,100}(?:/[\w.-]{1,100})?")


def hub_cache(environment: Mapping[str, str]) -> pathlib.Path:
    """Return the directory in which `huggingface_hub` keeps models, by the same variables."""
    home = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = environment.get("HF_HOME") or os.path.join(home, "huggingface")
    return pathlib.Path(environment.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def downloaded(model: str, cache: pathlib.Path, now: float) -> str:
    """Return in words how much of a hub's model is there while its download runs, otherwise "". May block.

    `now` is in seconds since 1970.
    """
    if not _NAME.fullmatch(model) or os.path.exists(model):
        return ""
    size, is_coming = 0, False
    blobs = cache / f"models--{model.replace('/', '--')}" / "blobs"
    with contextlib.suppress(OSError), os.scandir(blobs) as entries:
        for entry in itertools.islice(entries, FILES_MAX):
            with contextlib.suppress(OSError):  # it has just got its name
                found = entry.stat()
                size += min(found.st_size, found.st_blocks * 512)
                is_coming = is_coming or (entry.name.endswith(".incomplete") and now - found.st_mtime < COMING_S)
    return f"({size / GIB:.2f} GiB downloaded)" if is_coming else ""
