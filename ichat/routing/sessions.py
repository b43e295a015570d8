"""Which of several endpoints a session belongs to. Purely synchronous.

Endpoints have points on a circle, and so has a session. The session goes to the endpoint with the point that follows
one of the session's points most closely. So only the sessions of a new or removed endpoint move, and the endpoint
is found without looking at all of them.
"""

import bisect
import functools
import hashlib
import struct
from collections.abc import Callable, Iterable

from ichat.routing.endpoint import Endpoint

_POINTS = struct.Struct(">8Q")
"""With eight points each, sessions are spread well over two endpoints as over thousands."""
_CIRCLE = 2**64
_STEPS_MAX = 32
"""At most this many points that follow a session's are looked at for an endpoint that is free."""


@functools.lru_cache(maxsize=16384)
def _points_of(endpoint_id: bytes) -> tuple[int, ...]:
    return _POINTS.unpack(hashlib.blake2b(endpoint_id, digest_size=_POINTS.size).digest())


def _points_of_session(session: bytes) -> tuple[int, ...]:
    return _POINTS.unpack(hashlib.blake2b(session, digest_size=_POINTS.size, person=b"session").digest())


def home_of(session: bytes, endpoints: Iterable[Endpoint]) -> Endpoint:
    """Return the endpoint of a session among these, which are not empty; all of them are looked at."""
    starts = sorted(_points_of_session(session))

    def distance(endpoint: Endpoint) -> int:
        points = _points_of(endpoint.id)
        return min((point - starts[bisect.bisect_right(starts, point) - 1]) % _CIRCLE for point in points)

    return min(endpoints, key=distance)


class HashRing:
    """The points of many endpoints in their order."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._owners = {point: endpoint for endpoint in endpoints for point in _points_of(endpoint.id)}
        self._points = sorted(self._owners)

    def __repr__(self) -> str:
        return f"<HashRing of {len(self._points)} points>"

    def add(self, endpoint: Endpoint) -> None:
        """Add an endpoint."""
        for point in _points_of(endpoint.id):
            if point not in self._owners:
                bisect.insort(self._points, point)
            self._owners[point] = endpoint

    def remove(self, endpoint: Endpoint) -> None:
        """Remove an endpoint, if it is there."""
        for point in _points_of(endpoint.id):
            if self._owners.get(point) is endpoint:
                del self._owners[point]
                del self._points[bisect.bisect_left(self._points, point)]

    def home_of(self, session: bytes, is_free: Callable[[Endpoint], bool]) -> Endpoint | None:
        """Return the endpoint of a session, of those that are free; None if there are hardly any of these."""
        points, owners, count = self._points, self._owners, len(self._points)
        nearest, found = _CIRCLE, None
        for start in _points_of_session(session):
            first = bisect.bisect_left(points, start)
            for step in range(min(_STEPS_MAX, count)):
                point = points[(first + step) % count]
                distance = (point - start) % _CIRCLE
                if distance >= nearest:
                    break
                if is_free(owners[point]):
                    nearest, found = distance, owners[point]
                    break
            else:
                return None
        return found
