"""Workers' reports on their engines' caches: over the gateway's port, and over the control plane's socket.

A report is applied in short steps, so that thousands of digests hold up no stream.
"""

import json
from collections.abc import Iterator, Sequence

import trio

from ichat import errors
from ichat.fleet.heartbeats import HeartbeatReceiver
from ichat.fleet.worker_table import WorkerTable
from ichat.listeners import Listeners
from ichat.protocol.prefixes import REPORTED_MAX, parse_report
from ichat.routing.endpoint import Endpoint
from ichat.routing.prefix_index import PrefixIndex
from ichat.security.auth import Caller

REPORT_BYTES_MAX = 2 * REPORTED_MAX * 20 + 4096
"""The largest body of a report: each digest stands between quotes, with a comma and a space."""
AT_ONCE = 512
"""How many digests are applied in a step, in less than half a millisecond."""
_ANSWER = b'{"status": "ok"}'


class PrefixReportReceiver:
    """Checks reports, and applies them to the index."""

    def __init__(self, heartbeats: HeartbeatReceiver, table: WorkerTable, index: PrefixIndex) -> None:
        """`heartbeats` knows which caller may speak for which worker."""
        self._heartbeats = heartbeats
        self._table = table
        self._index = index
        self.evicted: Listeners[[str, int]] = Listeners()
        """Called with a model and the number of its prefixes that were believed to be cached, and are not."""

    def __repr__(self) -> str:
        return f"<PrefixReportReceiver {self._index!r}>"

    async def receive(self, body: bytes | bytearray, caller: Caller) -> bytes:
        """Apply the report in the body of a request, and return the response's. Raises ApiError."""
        if len(body) > REPORT_BYTES_MAX:
            raise errors.request_too_large(REPORT_BYTES_MAX)
        try:
            sent = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise errors.bad_request(f"The body is not JSON: {error}.") from error
        report = parse_report(sent)
        worker = await self._heartbeats.check_sender(report.worker_id, report.start_id, caller)
        endpoint = self._table.endpoint_of(worker)
        if endpoint is None:
            raise errors.start_not_found(report.worker_id)
        if report.cleared:
            endpoint.forget_prefixes()
        gone = await self._apply(endpoint, report.have, report.gone)
        if gone and worker.names:
            self.evicted(worker.names[0], gone)
        return _ANSWER

    async def _apply(self, endpoint: Endpoint, have: Sequence[str], gone: Sequence[str]) -> int:
        """Record a cache's new and removed digests; return how many removed digests were believed to be there.

        It ends early if the worker is started again meanwhile, or reports that everything is gone.
        """
        holder, count = endpoint.holder, 0
        for digests in _in_steps(have):
            self._index.add(digests, endpoint)
            await trio.lowlevel.checkpoint()
            if endpoint.holder is not holder:
                return 0
        for digests in _in_steps(gone):
            count += self._index.discard(digests, endpoint)
            await trio.lowlevel.checkpoint()
            if endpoint.holder is not holder:
                break
        return count


def _in_steps(digests: Sequence[str]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(digests), AT_ONCE):
        yield [bytes.fromhex(digest) for digest in digests[start : start + AT_ONCE]]
