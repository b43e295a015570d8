"""Heads of requests for models that are refused before a body is read. Pure functions."""

from ichat import errors
from ichat.errors import ApiError
from ichat.http.heads import RequestHead

_JUDGED = frozenset((b"content-encoding", b"sec-fetch-dest", b"sec-fetch-mode"))
_MODES = frozenset((b"cors", b"same-origin", b"no-cors"))
"""Modes in which scripts send requests (`Sec-Fetch-Mode`, the Fetch Standard)."""
_ELSEWHERE = frozenset((b"cross-site", b"same-site"))
"""Origins that are not the gateway's own (`Sec-Fetch-Site`); another port of its host is `same-site`."""


def check_head(head: RequestHead) -> None:
    """Raise ApiError for a request that no upstream may get: 403 for a browser's own request, 415 for a coded body."""
    if head.by_name.keys().isdisjoint(_JUDGED):
        return
    for name, value in head.headers:
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            raise errors.coded_body(value.decode("latin-1")[:40])
        if name == b"sec-fetch-dest" and value != b"empty":
            raise _refused(f"is a browser's own, for a `{value.decode('latin-1')[:40]}`")
        if name == b"sec-fetch-mode":
            _check_mode(value, head.by_name.get(b"sec-fetch-site", b""))


def _check_mode(mode: bytes, site: bytes) -> None:
    """Raise ApiError for a mode that no script uses, or in which a script of another origin cannot read the answer."""
    if mode not in _MODES:
        raise _refused(f"is a browser's own, of the mode `{mode.decode('latin-1')[:40]}`")
    if mode == b"no-cors" and site in _ELSEWHERE:
        raise _refused("is of a page of another origin that cannot read it (`no-cors`)")


def _refused(why: str) -> ApiError:
    return errors.forbidden(f"Programs, and pages that may read the answer, send requests for models: this one {why}.")
