"""The console's files, and the headers that they are served with.

The page names all others below `v/REVISION/`. There a browser keeps them for good: a change of any file is another
revision. At their plain paths they are asked for each time.
"""

import base64
import contextlib
import functools
import gzip
import hashlib
import os
import pathlib
import re
import time
from collections.abc import Mapping

import attrs

HERE = pathlib.Path(__file__).parent
VENDOR = "vendor"
"""The folder of third-party files, which `./build` puts into the pyz."""
_FETCHED = HERE.parents[1] / ".build/console"
"""The vendor folder in a checkout."""
_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""The content types of the files that are served; a file of any other kind is not."""
_PATH = re.compile(r"(?:[A-Za-z0-9_-]+/)*[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)+")
"""No part of a path begins with a dot, so that none leads out of the folder."""
_KEPT_MAX = 256
"""Files that are kept in memory."""
_OF_REVISION = re.compile(r"v/([0-9a-f]{16})/(.+)")
_LINK = re.compile(rb'((?:src|href)="|"\./)([A-Za-z][^"#:]*")')
_IMPORT_MAP = re.compile(rb'<script type="importmap">(.*?)</script>', re.DOTALL)


@attrs.frozen
class ConsoleFile:
    """A file as it is served."""

    content: bytes
    content_type: str
    etag: str
    is_kept: bool = False
    """Whether its path names its revision, so that it never changes there."""

    @property
    def gzipped(self) -> bytes:
        """The content in fewer bytes."""
        return _gzipped(self.content)


def read_file(path: str) -> ConsoleFile | None:
    """Return the console's file of this path, the page itself for an empty path; None if there is none.

    A path of another revision leads to the file of today.
    """
    if path in ("", "index.html"):
        return _page(revision())
    found = _OF_REVISION.fullmatch(path)
    if found is None:
        return _read_plain(path)
    file = _read_plain(found[2])
    return file if file is None or found[1] != revision() else attrs.evolve(file, is_kept=True)


def _read_plain(name: str) -> ConsoleFile | None:
    content_type = _TYPES.get(os.path.splitext(name)[1])
    if content_type is None or not _PATH.fullmatch(name):
        return None
    for folder in (HERE, _FETCHED) if name.startswith(f"{VENDOR}/") else (HERE,):
        full_path = folder / name
        with contextlib.suppress(OSError):
            found = full_path.stat()
            return _read(full_path, content_type, (found.st_mtime_ns, found.st_size))
    return None


@functools.lru_cache(maxsize=_KEPT_MAX)
def _read(path: pathlib.Path, content_type: str, _version: tuple[int, int]) -> ConsoleFile:
    """Return a file, read again when it has changed. Raises OSError."""
    content = path.read_bytes()
    return ConsoleFile(content, content_type, hashlib.sha256(content).hexdigest()[:32])


def revision() -> str:
    """Return a digest of all files, which are looked at once a second."""
    return _revision_at(int(time.monotonic()))


@functools.lru_cache(maxsize=1)
def _revision_at(_second: int) -> str:
    digest = hashlib.sha256()
    for folder in (HERE, _FETCHED / VENDOR):
        for path in sorted(folder.rglob("*")):
            name = f"{VENDOR}/{path.name}" if folder != HERE else path.relative_to(HERE).as_posix()
            file = _read_plain(name)
            if file is not None:
                digest.update(f"{name} {file.etag}\n".encode())
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=2)
def _page(of: str) -> ConsoleFile | None:
    """Return the page, with links to the files of a revision."""
    found = _read_plain("index.html")
    if found is None:
        return None
    content = _LINK.sub(rb"\1v/%b/\2" % of.encode(), found.content)
    return ConsoleFile(content, found.content_type, hashlib.sha256(content).hexdigest()[:32])


@functools.lru_cache(maxsize=_KEPT_MAX)
def _gzipped(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def security_headers() -> dict[str, str]:
    """Return the headers of all the console's responses: browsers keep scripts and requests with this gateway.

    Scripts are files of the console; the page's inline script, its import map, is named by its hash. Only the
    console's own policies of trusted types make markup. Styles are files, too.
    """
    return _headers_for(revision())


@functools.lru_cache(maxsize=2)
def _headers_for(of: str) -> dict[str, str]:
    page = _page(of)
    assert page is not None, "the console has lost its page"
    found = _IMPORT_MAP.search(page.content)
    assert found is not None, "the page has lost its import map"
    import_map = base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
    policy = (
        "default-src 'none'",
        f"script-src 'self' 'sha256-{import_map}'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
    return {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "permissions-policy": "camera=(), geolocation=(), microphone=()",
    }
