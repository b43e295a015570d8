"""The facts about workers that a gateway saves for the next gateway."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import trio

from ichat.config.schema import ManagedWorkerConfig
from ichat.fleet.fleet import Fleet
from ichat.listeners import Gate, Listeners
from ichat.protocol.messages import saved_form
from ichat.supervisor.copies import ReplicaNumbers
from ichat.supervisor.managed_worker import ManagedWorker
from ichat.supervisor.state import SavedRemoteWorker, SavedState, SavedStoppedWorker, StateDirectory

log = logging.getLogger(__name__)

REMEMBER_S = 1.0
"""How often heartbeats that change the saved state are written; managed workers are written at once."""
REMEMBER_SHARE = 0.05
"""The most of the time that is spent on writing heartbeats."""


class WorkerMemory:
    """Saves the known workers in the state directory."""

    def __init__(
        self,
        state: StateDirectory,
        fleet: Fleet,
        workers: Mapping[str, ManagedWorker],
        token: Callable[[], str],
        numbers: ReplicaNumbers,
        *,
        stopped: Callable[[], list[SavedStoppedWorker]],
        remember_s: float = REMEMBER_S,
    ) -> None:
        """`workers` are those of this gateway; `token` returns a digest of the workers' token, `numbers` are saved.

        `stopped` returns the workers that operators have stopped.
        """
        self._state = state
        self._fleet = fleet
        self._workers = workers
        self._token = token
        self._numbers = numbers
        self._stopped = stopped
        self.gate = Gate()
        """While it is closed, nothing is saved but by `save`."""
        self._remember_s = remember_s
        self.changed: Listeners[[]] = Listeners()
        """Called when there may be something to save."""
        self._urgent: Listeners[[]] = Listeners()
        """Called when that must be saved at once."""
        self._is_urgent = False
        self._written_version = -1
        self.has_failed = False
        """Whether the state could not be written the last time."""
        self._saving = trio.Lock()
        self._launches = 0
        """The number of the newest launch."""

    def __repr__(self) -> str:
        return f"<WorkerMemory {self._state.path}>"

    def restore(self, known: SavedState) -> None:
        """Go on with the numbers of launches after those of an earlier gateway, and with its numbers of copies."""
        self._numbers.restore(known.replicas)
        self._launches = max(self._launches, known.launches, *(one.launch for one in known.started))

    def next_launch(self) -> int:
        """Return the number of a new launch, higher than all before it; `save` before anything is started."""
        self._launches += 1
        return self._launches

    def objections_to(self, spec: ManagedWorkerConfig) -> Sequence[str]:
        """Return why a worker must not be started on another machine now: no later gateway would know its launch."""
        if not self.has_failed or spec.on == "here":
            return ()
        why = "The next gateway would not know a worker on another machine"
        return [f"{why}: {self._state.path} cannot be written. Make that directory writable, or free space there."]

    def save_soon(self) -> None:
        """Save at once, in a task."""
        self._is_urgent = True
        self.changed()
        self._urgent()

    async def save_forever(self) -> None:
        """Save changes: at once for managed workers, at most every `remember_s` for others.

        Thousands are saved less often, since saving them needs time.
        """
        while True:
            while not self._is_urgent and self._fleet.table.version == self._written_version:
                await self.changed.wait()
            await self.gate.wait_open()
            began_at = time.perf_counter()
            await self.save()
            took_s = time.perf_counter() - began_at
            with trio.move_on_after(max(self._remember_s, took_s / REMEMBER_SHARE)):
                if self.has_failed:
                    await trio.sleep_forever()
                while not self._is_urgent:
                    await self._urgent.wait()

    async def save(self) -> None:
        """Save the state for the next gateway; see `has_failed`. Once begun, it is not cancelled."""
        async with self._saving:
            with trio.CancelScope(shield=True):
                await self._save()

    async def _save(self) -> None:
        self._is_urgent, self._written_version = False, self._fleet.table.version
        now, heartbeats, token = time.time(), self._fleet.registry.snapshot(), self._token()
        workers, launches = [(one.saved(), one.has_launch) for one in self._workers.values()], self._launches
        started = [saved for saved, has_launch in workers if saved.is_launched or has_launch]
        load_seconds, load_phases = self._fleet.managed.times.saved()
        replicas, stopped = self._numbers.saved(), self._stopped()

        def save() -> None:
            heard = [
                SavedRemoteWorker(saved_form(heartbeat, None if args is None else args.unpack()), now - age_s, token)
                for heartbeat, age_s, args in heartbeats
            ]
            self._state.save(
                SavedState(
                    started=started,
                    heard=heard,
                    load_seconds=load_seconds,
                    load_phases=load_phases,
                    launches=launches,
                    replicas=replicas,
                    stopped=stopped,
                )
            )

        try:
            await trio.to_thread.run_sync(save)
        except Exception as error:  # no worker may be affected by any error here
            if not self.has_failed:
                log.error("%s cannot be written: %s; the next gateway will not know", self._state.path, error)
            self.has_failed = True
            self.save_soon()
        else:
            self.has_failed = False
