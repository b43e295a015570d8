"""Comments in a stream that waits: that it is alive, and how far the load of its model has got."""

from functools import partial

import trio

from ichat.http.body_mover import COMMENT_BYTES_MAX
from ichat.http.keepalive import KeepAlive
from ichat.protocol.load_story import story_of
from ichat.proxy.context import GatewayContext
from ichat.proxy.progress import RequestProgress
from ichat.proxy.refusals import WaitBound
from ichat.routing.availability import Loadable

_COMMENT_BYTES_MAX = COMMENT_BYTES_MAX - 16
"""For the words of a comment, in a chunk."""
_NAME_BYTES_MAX = 72
"""Bytes of a model's name in a comment, at most."""


def make_keepalive(context: GatewayContext, progress: RequestProgress, interval_s: float) -> KeepAlive | None:
    """Return the sender of comments; None for a client that can get no chunks. An error then ends the stream."""
    request = progress.request
    if request.version != b"1.1":
        return None
    return KeepAlive(context.pool.hub, progress.client, request.id, interval_s)


def begin_load(context: GatewayContext, progress: RequestProgress, load: Loadable) -> float:
    """Return how long a request may wait for this load; a stream gets comments about that, at once and then again."""
    timeouts = context.timeouts
    bound = WaitBound("load_wait_s", timeouts.load_wait_s)
    if load.is_coming:
        bound = WaitBound("restart_wait_s", timeouts.restart_wait_s)
    progress.load_bound = bound
    interval_s = timeouts.load_comment_s
    if progress.is_stream and interval_s:
        keepalive = progress.keepalive = progress.keepalive or make_keepalive(context, progress, interval_s)
        if keepalive is not None:
            text = partial(_load_comment_of, context, progress)
            keepalive.announce(text, min(interval_s, keepalive.interval_s or interval_s))
    return max(0.0, bound.seconds - progress.queued_s)


def end_load(context: GatewayContext, progress: RequestProgress) -> None:
    """Go on with the comments of every stream, if there are any."""
    keepalive, interval_s = progress.keepalive, context.timeouts.sse_keepalive_s
    if keepalive is None:
        return
    keepalive.text, keepalive.interval_s = None, interval_s
    if interval_s:
        keepalive.start()
        return
    keepalive.stop()
    if not keepalive.has_begun:
        progress.keepalive = None


def _load_comment_of(context: GatewayContext, progress: RequestProgress) -> bytes:
    directory, model, now = context.directory, progress.model, trio.current_time()
    found, story = directory.availability(model), directory.story(model, now)
    words = found.words(now) if isinstance(found, Loadable) else ""
    return load_comment(model, words if story is None else story_of(story))


def load_comment(model: str, words: str) -> bytes:
    """Return the comment for a stream that waits for a model: the worker's current work, and its expected duration.

    It has at most `body_mover.COMMENT_BYTES_MAX` with what stands around it.
    """
    head = f"loading {_cut(model, _NAME_BYTES_MAX)}"
    left = _COMMENT_BYTES_MAX - len(f"{head}: ".encode())
    words = _cut("".join(character if character.isprintable() else "?" for character in words), left)
    return f"{head}{f': {words}' if words else ''}".encode()


def _cut(text: str, bytes_max: int) -> str:
    return text.encode()[: max(0, bytes_max)].decode(errors="ignore")
