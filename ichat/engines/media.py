"""Pictures, sounds and videos in requests: engines fetch none of them, but from the domains that the operator allows.

An engine fetches the URLs in a prompt as itself: from its own machine, its network, or the service where a
cloud keeps credentials. So a URL is refused here, in the forms that the routes of all engines have, before the engine
gets the request. Where an engine has a setting of its own for this, that is a second wall, which holds for redirects.
"""

import functools
import json
import os
import re
import urllib.parse
from collections.abc import Collection, Iterator
from typing import cast

import trio

from ichat.config.checks import MEDIA_FILES
from ichat.engines.flags import FlagOutcome
from ichat.errors import ApiError, bad_request
from ichat.http.json_body import PARSED_BYTES_MAX, Body
from ichat.http.request import Request

NOWHERE = "none.invalid"
"""A domain that cannot exist (RFC 2606): for engines an empty list of domains means all of them."""
_MEDIA = frozenset(
    f"{kind}{ending}" for kind in ("image", "video", "audio") for ending in ("", "s", "_url", "_data")
) | {"input_image", "input_video", "input_audio", "file_url"}
"""The members with strings that are fetched, at any depth below them."""
_NOT_FETCHED = frozenset(("tools", "functions", "response_format", "metadata", "arguments", "chat_template_kwargs"))
"""The members with strings that are only data, regardless of their content."""
_NAMES = re.compile(rb'"(?:image|video|audio|input_|file_url|source)')
"""How the name of every such member begins, unless it is written with escapes."""
_ESCAPED = re.compile(rb"\\u00(?:2[fF]|[567])")
"""A letter, an underscore or a slash, which hardly any program escapes so."""
_SCHEME = re.compile(r"[\0-\x20]*(https?:|[a-z][a-z0-9+.-]*:[/\\]|[/\\]{2})", re.IGNORECASE)
_FILE = re.compile(r"[\0-\x20]*file:", re.IGNORECASE)
_PLAIN_URL = re.compile(r"https?://([A-Za-z0-9_.-]+)(?::[0-9]{1,5})?(?:[/?#][!-\[\]-~]*)?")
"""A URL in which every parser finds the same host: without user, backslash, blank or control character."""
_PATH_CHARACTERS_MAX = 4096


class _Pairs(list[tuple[str, object]]):
    """The members of a JSON object, also those of equal names."""


async def check_media(request: Request, domains: Collection[str], *, guards_files: bool) -> None:
    """Raise ApiError 400 for a request that has the engine fetch something from elsewhere than these domains.

    With `guards_files`, files of this machine are refused as well, unless `MEDIA_FILES` is among the domains: the
    engine reads any of them. Waits for nothing while the body has at most 64 KiB.
    """
    if request.method != b"POST" or not _may_name_media(request.body, has_slash=not guards_files):
        return
    body = without_data(request.body)
    check = functools.partial(_check, body, frozenset(domains), guards_files=guards_files)
    if len(body) <= PARSED_BYTES_MAX:
        check()
    else:
        await trio.to_thread.run_sync(check)


def _may_name_media(body: Body, *, has_slash: bool) -> bool:
    """Return whether a body may be JSON that names media; engines also read UTF-16 and UTF-32.

    `has_slash` says that the media's names must have a slash; most prompts have none.
    """
    if ord("\\") in body and _ESCAPED.search(body):
        return True
    if has_slash and ord("/") not in body:
        return False
    return _NAMES.search(body) is not None or 0 in body[:4] or body[:1] in (b"\xff", b"\xfe")


def without_data(body: Body) -> Body:
    """Return JSON with every long `data:` URL shortened: most of the bytes of a request with pictures are such."""
    pieces: list[Body] = []
    at = kept = 0
    while (start := body.find(b'"data:', at)) >= 0:
        end = body.find(b'"', start + 6)
        if end < 0:
            break
        at = end
        if (start and body[start - 1] == ord("\\")) or body.find(b"\\", start, end) >= 0:
            continue  # it does not begin a string, or does not end there
        pieces.append(body[kept : start + 6])
        kept, at = end, end + 1
    return b"".join((*pieces, body[kept:])) if pieces else body


def _check(body: Body, domains: frozenset[str], *, guards_files: bool) -> None:
    try:  # numbers stay as they are written: a number that is too long must not end the check
        parsed = json.loads(body, object_pairs_hook=_Pairs, parse_int=_no_media, parse_float=_no_media)
        for name, url in _media_in(parsed):
            _check_url(name, url, domains, guards_files=guards_files)
    except RecursionError:
        raise bad_request("The request body is nested too deep.") from None
    except ValueError:
        return  # a form, or bytes that no engine reads as JSON


def _no_media(_: str) -> None:
    """Return the placeholder for a number."""


def _media_in(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Return each string that an engine may fetch, with the name of its member."""
    if isinstance(value, str):
        if name:
            yield name, value
    elif isinstance(value, _Pairs):
        is_call = ("type", "tool_use") in value
        for key, inner in value:
            if key == "source" and isinstance(inner, _Pairs):
                yield from (("source", url) for one, url in inner if one == "url" and isinstance(url, str))
            elif key not in _NOT_FETCHED and not (is_call and key == "input"):
                yield from _media_in(inner, name or (key if key in _MEDIA else ""))
    elif isinstance(value, list):
        for inner in cast("list[object]", value):
            yield from _media_in(inner, name)


def _check_url(name: str, url: str, domains: frozenset[str], *, guards_files: bool) -> None:
    if url[:5].lower() == "data:":
        return
    if guards_files and MEDIA_FILES not in domains and _is_file(url):
        raise _refused(f"`{name}` names a file, and this worker opens none for a request", "file:", name)
    if _FILE.match(url) or not _SCHEME.match(url):
        return
    found = _PLAIN_URL.fullmatch(url)
    host = found[1].lower().rstrip(".") if found is not None else ""
    if not host or host not in domains:
        where = f"from {host}" if host else "from such a URL"
        raise _refused(f"`{name}` would be fetched {where}, which this worker does not do", host or "its domain", name)


def _is_file(text: str) -> bool:
    """Return whether a text leads to a file of this machine in the ways in which SGLang reads files."""
    if _FILE.match(text):
        return True
    if len(text) > _PATH_CHARACTERS_MAX or "\0" in text:
        return False
    try:
        return os.path.exists(text) or os.path.exists(urllib.parse.unquote(urllib.parse.urlsplit(text).path) or "\0")
    except (ValueError, OSError):
        return False


def _refused(what: str, entry: str, name: str) -> ApiError:
    return bad_request(
        f"{what}: send it as a `data:` URL. An operator allows {entry} by the worker's media_domains, or"
        " --media-domains if it was started by hand.",
        param=name,
    )


def media_flag(domains: Collection[str]) -> FlagOutcome:
    """Return the flag with which an engine, if it has such a flag, fetches from these domains alone."""
    allowed = sorted(set(domains) - {MEDIA_FILES}) or [NOWHERE]
    return FlagOutcome([], ["--allowed-media-domains", *allowed], "requests have it fetch from nowhere else")
