"""The workers that the gateway starts: which there are, those of the gateway before it included."""

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import attrs
import trio

from ichat import errors
from ichat.beat import read_beat
from ichat.config import Config, ManagedWorker, read_worker
from ichat.errors import ApiError
from ichat.launch import id_for
from ichat.logbook import Logbook
from ichat.managed import Managed, Shared
from ichat.plan import Change, Running, changes_of_workers
from ichat.recall import ask_to_beat
from ichat.registry import Registry
from ichat.state import Heard, Known, Started, StateDirectory
from ichat.subreaper import Adopted, stamp_of

log = logging.getLogger(__name__)

REMEMBER_S = 1.0
"""Beats that change what is remembered are written so often at most; the workers started here are at once."""
REPLACE_POLL_S = 0.2
ADOPTED_DRAIN_S = 0.0


class Supervisor:
    """Starts workers, ends them, and remembers them for the next gateway."""

    def __init__(self, config: Config, registry: Registry, logbook: Logbook, state: StateDirectory) -> None:
        self._state = state
        self._registry = registry
        self._changed = trio.Event()
        self._written_version = -1
        self._is_failing = False
        self._nursery: trio.Nursery | None = None
        self._shared = Shared(config, registry, logbook, state, self._remember_soon)

    def __repr__(self) -> str:
        return f"<Supervisor {list(self._shared.workers.values())}>"

    def hurry(self) -> None:
        """Kill rather than wait, from now on."""
        self._shared.hurry.set()

    def stop(self) -> None:
        """Make `run` end every worker that shall not outlive the gateway, and return."""
        self._shared.is_stopping = True
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    @property
    def pids(self) -> dict[int, str]:
        """The first processes of the workers, with the workers' ids."""
        return {worker.pid: worker.id for worker in self._shared.workers.values() if worker.pid}

    async def run(self) -> None:
        """Take over what an earlier gateway left, start what is configured, and watch over all of it until stopped."""
        known = self._state.load()
        for heard in known.heard:
            with contextlib.suppress(ApiError):
                beat = read_beat(heard.beat)
                self._registry.restore(beat, max(0.0, time.time() - heard.at))
                self._shared.logbook.resume(beat.worker_id, beat.start_id, is_managed=False)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if self._shared.is_stopping:
                return
            nursery.start_soon(self._remember_forever)
            await self._take_over(known.started)
            self.apply(self._shared.config, self.changes(self._shared.config))
            nursery.start_soon(ask_to_beat, self._registry)
            await trio.sleep_forever()
        with trio.CancelScope(shield=True):
            await self._remember()

    async def _take_over(self, started: Sequence[Started]) -> None:
        """Adopt the workers that outlived a gateway on purpose; end what else is left; start what was launched."""
        leftovers: list[Started] = []
        launched: list[tuple[str, ManagedWorker]] = []
        for one in started:
            lives = one.pid > 0 and stamp_of(one.pid) == one.stamp
            try:
                spec = read_worker(one.spec, self._shared.config)
            except ApiError as error:
                log.error("worker %s is not started again: %s", one.worker_id, error)
                spec = None
            if lives and spec is not None and spec.on_gateway_exit == "keep":
                with contextlib.suppress(ProcessLookupError):
                    log.info("worker %s (process %d) has outlived its gateway: taken over", one.worker_id, one.pid)
                    self._start(one.worker_id, spec, is_launched=one.is_launched, adopted=Adopted(one.pid))
                continue
            if lives:
                leftovers.append(one)
            if one.is_launched and spec is not None:
                launched.append((one.worker_id, spec))
        async with trio.open_nursery() as nursery:
            for one in leftovers:
                nursery.start_soon(self._end_leftover, one)
        for worker_id, spec in launched:
            self._start(worker_id, spec, is_launched=True)

    async def _end_leftover(self, one: Started) -> None:
        """End a worker whose gateway died and that has not ended yet."""
        log.warning("worker %s (process %d) is still there, its gateway is not: it is ended", one.worker_id, one.pid)
        with contextlib.suppress(ProcessLookupError):
            spec = ManagedWorker(model_name=one.worker_id, model_path="")
            adopted = Adopted(one.pid)
            left = Managed(one.worker_id, spec, self._shared, is_launched=False, adopted=adopted)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(left.run)
                await left.remove(ADOPTED_DRAIN_S)

    def _start(
        self, worker_id: str, spec: ManagedWorker, *, is_launched: bool, adopted: Adopted | None = None
    ) -> Managed:
        worker = Managed(worker_id, spec, self._shared, is_launched=is_launched, adopted=adopted)
        self._shared.workers[worker_id] = worker
        self._remember_soon()
        assert self._nursery is not None
        self._nursery.start_soon(worker.run)
        return worker

    def launch(self, spec: ManagedWorker) -> Managed:
        """Start a worker that the configuration does not have. Raises ApiError where the gateway is about to end."""
        if self._nursery is None or self._shared.is_stopping:
            raise errors.draining()
        return self._start(self._new_id(spec), spec, is_launched=True)

    def get(self, worker_id: str) -> Managed | None:
        """Give the managed worker of this id."""
        return self._shared.workers.get(worker_id)

    def _new_id(self, spec: ManagedWorker) -> str:
        return id_for(spec.model_name, {*self._shared.workers, *(worker.id for worker in self._registry)})

    def changes(self, config: Config) -> list[Change]:
        """Say what taking this configuration would do to the workers."""
        workers = self._shared.workers.values()
        running = [Running(one.id, one.spec, one.is_launched, one.has_failed) for one in workers]
        changes = changes_of_workers(running, config.managed_workers, self._shared.config.engines, config.engines)
        kept = {change.worker_id for change in changes if change.action != "stop"}
        replaced = {one.replaces.id for one in workers if one.replaces and one.id in kept}
        return [change for change in changes if change.action != "stop" or change.worker_id not in replaced]

    def apply(self, config: Config, changes: Sequence[Change]) -> None:
        """Begin with what `changes` said; nothing of it is waited for. Raises ApiError where the gateway ends."""
        if self._nursery is None or self._shared.is_stopping:
            raise errors.draining()
        self._shared.config = config
        for change in changes:
            worker = self._shared.workers.get(change.worker_id)
            if change.action == "start" and change.spec is not None:
                self._start(self._new_id(change.spec), change.spec, is_launched=False)
            elif worker is None or change.action == "keep":
                continue
            elif change.action == "stop":
                self._nursery.start_soon(worker.remove, config.timeouts.drain_s)
            elif change.spec is not None and change.action == "update":
                worker.update(change.spec)
            elif change.spec is not None and change.action == "restart":
                if change.new_first and not worker.entry.is_down:
                    new = self._start(self._new_id(change.spec), change.spec, is_launched=False)
                    new.replaces = worker
                    self._nursery.start_soon(self._replace, new, worker)
                else:
                    worker.restart(change.spec)

    async def _replace(self, new: Managed, old: Managed) -> None:
        """End the old worker once the new one serves; while it does not, the old one goes on."""
        log.info("worker %s will replace worker %s once it is ready", new.id, old.id)
        while new.entry.beat is None or self._registry.state(new.entry) != "ready":
            await trio.sleep(REPLACE_POLL_S)
            if self._shared.workers.get(new.id) is not new or self._shared.workers.get(old.id) is not old:
                new.replaces = None
                return
        await old.remove(self._shared.config.timeouts.drain_s)
        new.replaces = None

    def _remember_soon(self) -> None:
        self._changed.set()

    async def _remember_forever(self) -> None:
        while True:
            if self._changed.is_set() or self._registry.version != self._written_version:
                await self._remember()
            with trio.move_on_after(REMEMBER_S):
                if self._is_failing:
                    await trio.sleep_forever()
                await self._changed.wait()

    async def _remember(self) -> None:
        """Write down what the next gateway has to know."""
        self._changed, self._written_version = trio.Event(), self._registry.version
        now = time.time()
        started = [one.started(_table_of(one.spec)) for one in self._shared.workers.values()]
        heard = [Heard(attrs.asdict(beat), now - age_s) for beat, age_s in self._registry.snapshot()]
        known = Known(started=[one for one in started if one.is_launched or one.pid], heard=heard)
        try:
            await trio.to_thread.run_sync(self._state.save, known)
        except OSError as error:
            if not self._is_failing:
                log.error("%s cannot be written: %s; the next gateway will not know", self._state.path, error.strerror)
            self._is_failing = True
            self._changed.set()
        else:
            self._is_failing = False


def _table_of(spec: ManagedWorker) -> dict[str, Any]:
    return {key: value for key, value in attrs.asdict(spec).items() if value is not None}
