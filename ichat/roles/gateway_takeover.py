"""The parts of a gateway during a takeover: how they become quiet, and how both processes use them."""

import contextlib
import functools
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, cast

import attrs
import cattrs
import trio
from cattrs.errors import BaseValidationError

from ichat import __version__, errors
from ichat.config.own_secret import directory_for
from ichat.config.schema import Config
from ichat.errors import EXIT_UNAVAILABLE, EXIT_USAGE, Exit
from ichat.fleet.packed_args import ArgsPacker
from ichat.fleet.saved_records import record_of, restore_record
from ichat.http.heads import RequestHead
from ichat.http.leaving import Retirement
from ichat.http.listeners import address_name, adopt_listeners, close_all
from ichat.http.request import Request
from ichat.http.server import Client
from ichat.relays.forwarding import InnerSocket, NewOwner
from ichat.relays.relay_at_owner import RelayAtOwner
from ichat.roles.gateway_components import Components, import_parts
from ichat.routing.endpoint import Endpoint
from ichat.security.auth import Caller
from ichat.service_manager import Notifier
from ichat.supervisor.starts import Starts
from ichat.supervisor.state import HandedWorkers, SavedManagedWorker, StateDirectory, leave_lock
from ichat.takeover.getting import Received, Takeover, ask_for_gateway
from ichat.takeover.giving import CannotFreezeError, Handed
from ichat.takeover.snapshot import (
    Snapshot,
    endpoint_of,
    life_of,
    names_of_external,
    quota_of,
    restore_endpoint,
    restore_quota,
    states_in,
)
from ichat.takeover.under_way import RequestsHere

log = logging.getLogger(__name__)

LAST_CALLS_S = 0.5
"""How long calls that have waited for the takeover have to get their answers."""


class GatewayGiver:
    """A gateway that can be handed over; see `takeover.giving.Giver`."""

    def __init__(
        self, components: Components, state: StateDirectory, listeners: list[socket.socket], notifier: Notifier
    ) -> None:
        self.components = components
        self.requests = RequestsHere(components.data.handler, components.others.saved)
        self.state = state
        self.relays = [] if components.data.relays is None else [components.data.relays]
        """Those of this process, and those that an old process has left to end here."""
        self._listeners = listeners
        self.notifier = notifier
        self.is_starting = True
        """Whether it has not begun to serve, so that it does not know its workers yet."""
        self.deciding = trio.CancelScope()
        """Of the tasks that only the process that decides has."""
        self._holding = trio.CancelScope()
        self._is_frozen = False
        self._nursery: trio.Nursery | None = None

    def __repr__(self) -> str:
        return f"<GatewayGiver{', frozen' if self._is_frozen else ''}>"

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Keep the tasks of a freeze; cancelled with the gateway."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    def note_open(self) -> None:
        """Note that this process answers requests from now on."""
        self.is_starting = False
        relays = self.components.data.relays
        self.state.starts.note_open(None if relays is None else relays.lost_at)

    def _all_relays(self) -> list[RelayAtOwner]:
        return [relay for relays in self.relays for relay in relays.relays.values()]

    def busy(self, new_pid: int) -> str:
        """Return in a sentence why that process cannot get this gateway now; "" if it can."""
        if os.getpid() == 1:
            return (
                "The running gateway is process 1 of a container, which ends with that process: stop the container,"
                " and start another."
            )
        if self.is_starting:
            return "The running gateway is starting: try again later."
        if not self.notifier.would_follow(new_pid):
            return "The running gateway is a service of systemd, and this process is not part of it: restart it."
        if not self.state.is_kept or not os.path.exists(os.path.join(self.state.path, "lock")):
            return "The running gateway keeps no state: stop it, and start this program."
        if self.components.reloader.is_changing:
            return "The configuration or a key of the running gateway is being changed: try again later."
        return self.components.control.supervisor.change_under_way()

    async def freeze(self) -> Handed:
        """Become quiet: requests, heartbeats and calls wait, and all files are written. Raises CannotFreezeError."""
        control, data = self.components.control, self.components.data
        assert self._nursery is not None
        self._is_frozen = True
        self.requests.hold()
        self.components.calls.gate.close()
        data.door.use_answers(self._answer_later, data.handler.authenticate)
        self._holding = await self._nursery.start(self._hold_configuration)
        for relay in self._all_relays():
            relay.pause()
        await self.components.calls.wait_quiet()
        if why := control.supervisor.change_under_way():
            raise CannotFreezeError(why)
        try:
            await control.supervisor.freeze()
            await control.ledger.freeze()
            await data.access.flush()
        except OSError as error:
            raise CannotFreezeError(f"The running gateway cannot write its state: {error}.") from error
        more = [*control.kept.messages()]
        return Handed(self._snapshot().to_json(), self._about(), [self.state.lock, *self._descriptors()], more)

    async def _hold_configuration(self, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        """Let nothing change the configuration, the keys or the orders until cancelled."""
        with trio.CancelScope() as scope:
            async with self.components.reloader.lock, self.components.control.orders.lock:
                task_status.started(scope)
                await trio.sleep_forever()

    def thaw(self) -> None:
        """Go on."""
        self._is_frozen = False
        self._holding.cancel()
        self.components.control.ledger.gate.open()
        self.requests.give_back()
        self.components.control.supervisor.thaw()
        for relay in self._all_relays():
            relay.go_on(trio.current_time())
        data = self.components.data
        data.door.use_answers(data.handler.answer, data.handler.authenticate)
        self.components.calls.gate.open()

    def let_go(self) -> None:
        """Stop reading the outputs of workers."""
        self.components.control.log_store.detach_all()

    def hold_on(self) -> None:
        """Read on."""
        assert self._nursery is not None
        self._nursery.start_soon(self.components.control.supervisor.read_on)

    def follow(self) -> None:
        """Have the new process decide: waiting and further requests are forwarded to it."""
        leave_lock(self.state.lock)
        self.state.starts.hand_over()
        self.deciding.deadline = trio.current_time() + LAST_CALLS_S
        for relays in self.relays:
            relays.hand_over()
        data = self.components.data
        inner = InnerSocket(data.context.pool, self.state.inner_socket, NewOwner(data.context.timeouts))

        async def forward(request: Request, client: Client, _caller: Caller) -> None:
            """Have the new process answer a request. Raises ApiError if nothing has been sent."""
            await inner.forward(request, client)

        data.door.use_answers(forward, _admit_all)
        self.components.calls.is_handed_over = True
        self.components.calls.gate.open()
        self.components.control.supervisor.hand_over()
        self.components.control.fleet.table.trust_all()  # this process hears no more heartbeats

    def retirement(self) -> Retirement:
        """Return how this process ends its connections."""
        requests = self.components.data.handler.in_flight
        overdue = functools.partial(requests.end_all, errors.draining)
        return Retirement(total_s=self.components.data.context.timeouts.takeover_s, overdue=overdue)

    # Requests.

    async def _answer_later(self, request: Request, client: Client, caller: Caller) -> None:
        """Answer a request when it is known which process does so. Raises ApiError if nothing has been sent."""
        await self.components.calls.gate.wait_open()
        await self.components.data.door.answer(request, client, caller)

    # The snapshot.

    def _snapshot(self) -> Snapshot:
        control, now = self.components.control, trio.current_time()
        table, workers = control.fleet.table, control.supervisor.workers.values()
        lives = [life_of(one.id, one.life.wanted, one.life.actual, one.life.failed_change, now) for one in workers]
        return Snapshot(
            [record_of(worker, now) for worker in table],
            [endpoint_of(name, endpoint, now) for name, endpoint in _endpoints(self.components).items()],
            [quota_of(quota, now) for quota in control.quotas],
            lives,
            [attrs.asdict(one.saved()) for one in workers],
            self.requests.save(),
        )

    def _about(self) -> Mapping[str, Any]:
        settings = self.components.data.context.settings
        return {
            "address": address_name(settings.host, settings.port),
            "version": __version__,
            "listeners": len(self._descriptors()),
            "has_relays": bool(self.relays),
            "notifier": self.notifier.variables(),
        }

    def _descriptors(self) -> list[int]:
        return [listener.fileno() for listener in self._listeners]


def _admit_all(_head: RequestHead, _peer: str) -> Any:
    """Identify no client: the new process does."""


def _endpoints(components: Components) -> dict[str, Endpoint]:
    """Return all endpoints, by names that both processes give them."""
    fleet = components.control.fleet
    of_workers = {f"worker {worker.id}": fleet.table.endpoint_of(worker) for worker in fleet.table}
    found = {name: endpoint for name, endpoint in of_workers.items() if endpoint is not None}
    return {**found, **names_of_external(fleet.directory.external)}


class HandedGateway:
    """Everything that this process has got of the old process."""

    def __init__(self, received: Received, config: Config) -> None:
        """Raises ValueError for a snapshot of another form."""
        self._snapshot = Snapshot.from_json(received.snapshot)
        self._about, self._more = received.about, received.more
        self.lock, *rest = received.descriptors
        settings = config.server_settings
        count = received.about.get("listeners")
        listeners = adopt_listeners(rest[: count if isinstance(count, int) else 0])
        self.listeners: list[socket.socket] = []
        """Those of the configured address; empty if the old process has listened elsewhere."""
        if received.about.get("address") == address_name(settings.host, settings.port):
            self.listeners = listeners
        else:
            close_all(listeners)

    def __repr__(self) -> str:
        return f"<HandedGateway {len(self._snapshot.workers)} workers>"

    @property
    def has_relays(self) -> bool:
        """Whether the old process leaves relays."""
        return self._about.get("has_relays") is True

    def notifier_or(self, own: Notifier) -> Notifier:
        """Return the service manager of the old process, which follows this process; if it has none, `own`."""
        variables = cast("dict[str, str]", self._about.get("notifier", {}))
        return Notifier.taken_from({**variables}) if variables else own

    async def begin(
        self, components: Components, takeover: Takeover, signals: AsyncIterator[int], starts: Starts
    ) -> list[socket.socket]:
        """Restore everything in the parts of this gateway, and return the listeners when this process decides.

        Raises Exit 69 if it never will. `signals` end the takeover.
        """
        self.put_into(components)
        await takeover.begin(signals)
        starts.begin_by_takeover(takeover.old_pid, str(self._about.get("version", "")), takeover.frozen_ns)
        log.info("this process has the gateway now; process %d ends its connections", takeover.old_pid)
        return self.listeners

    def put_into(self, components: Components) -> None:
        """Restore everything that the old process knew in the parts of this gateway; none of them runs yet."""
        control, now = components.control, trio.current_time()
        for saved in self._snapshot.quotas:
            quota = next((one for one in control.quotas if one.name == saved.name), None)
            if quota is not None:
                restore_quota(saved, quota, now)
        for message, descriptors in self._more:
            with contextlib.suppress(ValueError):
                control.kept.receive(message, descriptors)
        packer = ArgsPacker()
        for record in self._snapshot.workers:
            if not record.managed:
                restore_record(record, control.fleet.table, packer)
        started = [*self._started()]
        states = {life.worker_id: states_in(life, now) for life in self._snapshot.lives}
        restore = functools.partial(self._restore, components, packer)
        control.supervisor.expect(HandedWorkers(started, states, restore))
        self._put_endpoints(components)
        components.others.restore(self._snapshot.requests)

    def _started(self) -> Iterator[SavedManagedWorker]:
        for one in self._snapshot.started:
            with contextlib.suppress(BaseValidationError):
                yield cattrs.structure(one, SavedManagedWorker)

    def _restore(self, components: Components, packer: ArgsPacker) -> None:
        """Complete the records of managed workers."""
        failed = {life.worker_id: life.failed_change for life in self._snapshot.lives}
        for record in self._snapshot.workers:
            if record.managed:
                restore_record(record, components.control.fleet.table, packer)
        for worker in components.control.supervisor.workers.values():
            worker.life.note_failed_change(failed.get(worker.id, ""))
        self._put_endpoints(components)

    def _put_endpoints(self, components: Components) -> None:
        now, endpoints = trio.current_time(), _endpoints(components)
        for saved in self._snapshot.endpoints:
            if (endpoint := endpoints.get(saved.id)) is not None:
                restore_endpoint(saved, endpoint, now)


def handed_by(takeover: Takeover | None, config: Config) -> HandedGateway | None:
    """Return the gateway that was handed over, if any was. Raises Exit 69."""
    if takeover is None or takeover.received is None:
        return None
    try:
        return HandedGateway(takeover.received, config)
    except ValueError as error:
        raise Exit(EXIT_UNAVAILABLE, str(error)) from error


async def ask(config: Config) -> Takeover | None:
    """Ask the running gateway to hand over; None if there is none. Raises Exit: 64, 69."""
    directory = directory_for(config.server_settings)
    if directory is None:
        raise Exit(EXIT_USAGE, "A takeover finds the gateway by server_settings.state_directory, or by the port.")
    import_parts()  # now, while nothing waits for this process
    return await ask_for_gateway(directory, __version__)
