"""The deciding process of a gateway with relays, in the process of a test or a measurement, with sockets for relays.

All that decides is real: keys, limits, the choice of a worker, the ledger, the access log. Relays are only their frames.
"""

import contextlib
import pathlib
import socket
import time

import trio

from ichat.config import load as configuration
from ichat.http.listeners import open_unix_listener
from ichat.observability.prometheus_families import Histogram
from ichat.observability.tracing import open_tracing
from ichat.relays.earlier_requests import EarlierPlaces
from ichat.relays.link import hello
from ichat.relays.owner_desk import OwnerDesk
from ichat.relays.owner_talk import OwnerTalk
from ichat.relays.timers import Timers
from ichat.relays.values import Note, TrioClock
from ichat.relays.wire import FrameWire
from ichat.roles.gateway_components import build
from ichat.supervisor.state import open_state

ASKS_MAX = 10_000
TOML = """
[server_settings]
port = 4000
relays = 1
state_directory = "{directory}/state"
watch_config = false
[logs]
access_log = "{directory}/access"
"""


class RelayThere:
    """A relay of which there is only the socket: what an owner knows of it, and does with its frames."""

    def __init__(self, owner, sock):
        self.talk = OwnerTalk(ASKS_MAX)
        self.asks = 0
        """How many were received."""
        self.end_reasons = []
        self.desk = owner.desk_of(self)
        self.wire = FrameWire(owner.components.data.hub, sock, self._receive, self._ended)
        self.send(hello(1))

    def send(self, frame):
        if self.wire.is_open and not self.talk.is_over:
            self.talk.sends(frame)
            self.wire.send(frame)

    @property
    def is_hung(self):
        """Whether an owner kills it, since it does not read."""
        self.talk.unread_bytes = self.wire.unread_bytes
        return self.talk.is_hung

    def kill(self, why):
        self.wire.close(why)

    def _receive(self, frame):
        has_effect = self.talk.receives(frame)
        if frame.kind == "ready":
            self.talk.open()
        elif has_effect and frame.kind not in ("hello", "report", "pulse", "prepared", "cannot", "drained"):
            self.asks += frame.kind == "ask"
            self.desk.receives(frame)

    def _ended(self, why):
        self.end_reasons.append(why)
        self.desk.end()

    def settle(self):
        """Have the relay forget what has arrived."""
        self.send(Note("settled", 0, {"seq": self.talk.received}))


class Owner:
    """The components of a gateway, of which those run that decide."""

    def __init__(self, components, timers, inner):
        self.components = components
        self.inner = inner
        """The path of its socket for requests that relays forward."""
        self._timers = timers
        self._places = EarlierPlaces(components.data.context, components.control.fleet.table)
        self._clock = TrioClock.read(trio.current_time(), time.monotonic_ns())

    def desk_of(self, relay):
        data, decisions = self.components.data, Histogram(())
        return OwnerDesk(relay, data.handler, self._timers, self._clock, self._places, decisions=decisions)

    def connect(self):
        """Return a relay, and the other end of its socket for frames."""
        ours, theirs = socket.socketpair()
        return RelayThere(self, ours), theirs

    def in_flight(self):
        """Return the number of requests that it knows, and the places that are taken at external routes."""
        endpoints = [one for route in self.components.control.fleet.directory.external.values() for one in route]
        return self.components.data.handler.in_flight.view().total, sum(one.in_flight for one in endpoints)


@contextlib.asynccontextmanager
async def owner_of(directory, more):
    """Run an owner with this configuration beside that of `TOML`; its files are in the directory."""
    config = configuration.parse(TOML.format(directory=directory) + more, "test.toml")
    timers = Timers()
    with (
        open_state(config.server_settings, config.logs.directory) as state,
        contextlib.closing(open_tracing()) as tracing,
    ):
        components = build(config, None, state, tracing)
        inner = str(pathlib.Path(directory, "inner"))
        async with trio.open_nursery() as nursery:
            control, data = components.control, components.data
            nursery.start_soon(data.access.run_forever)
            nursery.start_soon(data.hub.run_forever)
            await nursery.start(data.context.pool.run_forever)
            await nursery.start(control.ledger.run)
            nursery.start_soon(timers.run_forever)
            nursery.start_soon(data.door.serve_forever, [open_unix_listener(inner)])
            try:
                yield Owner(components, timers, inner)
            finally:
                nursery.cancel_scope.cancel()
                control.log_store.close()
