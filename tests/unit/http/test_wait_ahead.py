"""A task that waits for something else is woken by its client's next request, unless the hub begins that request."""

import socket
from types import SimpleNamespace

import pytest
import trio
import trio.lowlevel
from support.peers import until

from ichat.config.schema import Limits, Timeouts
from ichat.http.hub import READABLE, Hub
from ichat.http.request_ids import RequestIds
from ichat.http.server import Client, next_request

POST = b"POST /v1/%b HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = b"POST /v1/c HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"


class Site:
    """A client that has sent a request, and the task that waits after its response."""

    def __init__(self, ours, theirs):
        self.theirs, self.hub, self.scope = theirs, Hub(), trio.CancelScope()
        self.door = SimpleNamespace(
            role=b"gateway", hub=self.hub, limits=Limits(), timeouts=Timeouts(), ids=RequestIds(), draining=False,
            ends_connection=None,
        )  # fmt: skip
        self.client = Client(self.door, ours, "peer")
        self.reader = self.client.reader
        self.taken, self.paths, self.ends = [], [], []
        """The requests that the hub has begun, the paths that the task has read, and what ended its waits."""

    async def read(self):
        """Read a request as the task of the connection does."""
        head = await self.reader.read_head()
        if head is None:
            return None
        request = self.reader.take_request(head) or await self.reader.read_body(head)
        return request.path

    def arrived(self):
        """Begin the request that has arrived, if that needs no task."""
        found = next_request(self.client)
        if found is not None:
            self.taken.append(found[0].path)
            self.reader.wait_ahead(self.task, self.arrived)
        return found is not None

    async def wait(self, task_status):
        """Wait, and read the next request."""
        self.task = trio.lowlevel.current_task()
        assert self.reader.wait_ahead(self.task, self.arrived)
        task_status.started()
        with self.scope:
            await trio.lowlevel.wait_task_rescheduled(self.abandon)
        self.paths.append(await self.read())

    def abandon(self, _raise_cancel):
        self.reader.end_wait_ahead()
        self.ends.append("cancelled")
        return trio.lowlevel.Abort.SUCCEEDED


@pytest.fixture
async def site(nursery):
    """Return a site whose task waits."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    site = Site(ours, theirs)
    nursery.start_soon(site.hub.run_forever)
    site.hub.watch(ours.fileno(), READABLE, site.client.on_events)
    with ours, theirs:
        theirs.sendall(POST % b"first")
        assert await site.read() == b"/v1/first"
        await nursery.start(site.wait)
        yield site
        site.hub.forget(ours.fileno())


async def test_a_plain_request_begins_without_the_task(site):
    """So does the one after it, and the task sleeps on."""
    for path in (b"a", b"b"):
        site.theirs.sendall(POST % path)
        await until(lambda path=path: site.taken[-1:] == [b"/v1/" + path])
    assert site.paths == []
    assert site.client.request.path == b"/v1/b"


@pytest.mark.parametrize(("data", "path"), [
    (CHUNKED, b"/v1/c"), ((POST % b"a") * 2, b"/v1/a"), ((POST % b"a")[:-1], b"/v1/a"), ((POST % b"a")[:9], b"/v1/a"),
])  # fmt: skip
async def test_any_other_request_wakes_the_task(site, data, path):
    """One in pieces, two at once, and a body in chunks: the task reads all bytes."""
    site.theirs.sendall(data)
    await trio.sleep(0.01)
    if data in POST % b"a":
        site.theirs.sendall((POST % b"a")[len(data) :])
    await until(lambda: site.paths)
    assert (site.paths, site.taken) == ([path], [])


@pytest.mark.parametrize("change", [{"draining": True}, {"ends_connection": bool}])
async def test_no_request_begins_without_the_task_while_connections_end(site, change):
    """The task decides about its connection then."""
    vars(site.door).update(change)
    site.theirs.sendall(POST % b"a")
    await until(lambda: site.paths)
    assert (site.paths, site.taken) == ([b"/v1/a"], [])


async def test_a_client_that_leaves_or_is_silent_for_too_long_ends_the_wait(site):
    """The task is woken at the deadline, and finds no request."""
    site.reader.expire()
    await until(lambda: site.paths)
    assert (site.paths, site.taken) == ([None], [])


async def test_a_cancelled_wait_is_over(site):
    """The hub begins no request then: the task reads it, if it reads on."""
    site.scope.cancel()
    await until(lambda: site.ends)
    site.theirs.sendall(POST % b"a")
    await until(lambda: site.paths)
    assert (site.ends, site.paths, site.taken) == (["cancelled"], [b"/v1/a"], [])


async def test_a_task_does_not_wait_for_a_request_that_may_have_arrived(site):
    """Bytes that were read before, or may wait in the socket, are no event of the hub."""
    site.reader.end_wait_ahead()
    site.reader.unread(b"POST")
    assert not site.reader.wait_ahead(site.task, site.arrived)
