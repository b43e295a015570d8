"""The gateway's memory for the workers that joined, all together and by sender. Purely synchronous.

Things that several of them share, such as the same names and arguments, are kept once and counted once.
"""

import sys
from collections.abc import Hashable, Iterable, Mapping

import attrs

from ichat.config.schema import Limits
from ichat.fleet.packed_args import PackedArgs
from ichat.protocol.messages import Heartbeat, LoadPhase, Machine, ModelCard, names_of
from ichat.routing.availability import TooMuchRegistered

NAME_BYTES = 1000
"""The size of a name in indexes, beside the name itself."""
NAME_TIMES = 7
"""How often indexes have it, in some form."""
CARD_BYTES = 200
"""The size of a model of a worker there, with its card."""
PHASE_BYTES = 200
"""The size of a phase of a load beside its texts."""
LOAD_BYTES = 4000
"""The size of a load that is under way beside its phases: those of the last load of its model."""
WORKER_BYTES = 2500
"""The size of a worker beside the texts that it sends."""


@attrs.frozen
class Registered:
    """The things that are kept of a worker."""

    sender: str
    told: Heartbeat
    """The heartbeat that was weighed."""
    shared: Mapping[Hashable, int]
    """Its names and its arguments, each with its size in bytes."""
    registration_bytes: int
    """The size of the rest of its registration."""
    machine_bytes: int
    own_bytes: int
    """All that is not shared."""


@attrs.define
class _Account:
    """The size of some workers together."""

    bytes: int = 0
    names: int = 0
    shared: dict[Hashable, int] = attrs.field(factory=dict[Hashable, int])
    """How many of them have each of the things that are kept once."""

    def add(self, one: Registered) -> None:
        self.bytes += one.own_bytes
        for thing, size in one.shared.items():
            count = self.shared.get(thing, 0)
            self.shared[thing] = count + 1
            if not count:
                self.bytes += size
                self.names += isinstance(thing, str)

    def remove(self, one: Registered) -> None:
        self.bytes -= one.own_bytes
        for thing, size in one.shared.items():
            count = self.shared[thing] - 1
            if count:
                self.shared[thing] = count
            else:
                del self.shared[thing]
                self.bytes -= size
                self.names -= isinstance(thing, str)


class Weights:
    """The sizes of the workers that joined, by their ids."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._registered: dict[str, Registered] = {}
        self._all = _Account()
        self._by_sender: dict[str, _Account] = {}

    def __repr__(self) -> str:
        return f"<Weights {self._all.bytes} bytes, {self._all.names} names, {len(self._by_sender)} senders>"

    def reconfigure(self, limits: Limits) -> None:
        """Use other limits from the next heartbeat on."""
        self._limits = limits

    def admit(self, heartbeat: Heartbeat, args: PackedArgs | None, sender: str) -> TooMuchRegistered | None:
        """Count the memory for a heartbeat from this sender, in place of its worker's last heartbeat.

        Return the limit that it would pass, if it does: then the last heartbeat counts as before. A heartbeat not
        larger than the last is always admitted.
        """
        before = self._registered.get(heartbeat.worker_id)
        one = _weighed(heartbeat, args, sender, before)
        self._replace(before, one)
        refusal = self._passed(one, before)
        if refusal is not None:
            self._replace(one, before)
        else:
            self._registered[heartbeat.worker_id] = one
        return refusal

    def forget(self, worker_id: str) -> None:
        """Count a worker no longer."""
        one = self._registered.pop(worker_id, None)
        if one is not None:
            self._replace(one, None)

    def _replace(self, before: Registered | None, one: Registered | None) -> None:
        if before is not None and one is not None and before.shared is one.shared and before.sender == one.sender:
            for account in (self._all, self._by_sender[one.sender]):
                account.bytes += one.own_bytes - before.own_bytes
            return
        if before is not None:
            account = self._by_sender[before.sender]
            self._all.remove(before)
            account.remove(before)
            if not account.shared and not account.bytes:
                del self._by_sender[before.sender]
        if one is not None:
            self._all.add(one)
            self._by_sender.setdefault(one.sender, _Account()).add(one)

    def _passed(self, one: Registered, before: Registered | None) -> TooMuchRegistered | None:
        """Return the limit that is passed now, with this worker."""
        if before is not None and _is_no_more(one, before):
            return None
        limits, account = self._limits, self._by_sender[one.sender]
        for name, found, allowed in (
            ("joined_bytes_max", self._all.bytes, limits.joined_bytes_max),
            ("joined_names_max", self._all.names, limits.joined_names_max),
            ("joined_bytes_per_address_max", account.bytes, limits.joined_bytes_per_address_max),
            ("joined_names_per_address_max", account.names, limits.joined_names_per_address_max),
        ):
            if found > allowed:
                return TooMuchRegistered(name, allowed)
        return None


def _is_no_more(one: Registered, before: Registered) -> bool:
    is_same = one.sender == before.sender and one.shared.keys() <= before.shared.keys()
    return is_same and one.own_bytes <= before.own_bytes


def _weighed(heartbeat: Heartbeat, args: PackedArgs | None, sender: str, before: Registered | None) -> Registered:
    """Return the sizes of a heartbeat; parts that are those of the heartbeat before are not weighed again."""
    status = _size_of((heartbeat.phase, heartbeat.failure, *heartbeat.progress)) + 32 * len(heartbeat.progress)
    if heartbeat.load:
        status += LOAD_BYTES + _size_of_phases(heartbeat.load)
    machine = before.machine_bytes if before is not None else 0
    if heartbeat.machine is not None:
        machine = _size_of_machine(heartbeat.machine)
    if before is not None and before.told.models is heartbeat.models and before.told.versions is heartbeat.versions:
        shared, registration = before.shared, before.registration_bytes
    else:
        found = set(names_of(heartbeat))
        shared = dict[Hashable, int]()
        shared.update((name, NAME_BYTES + NAME_TIMES * sys.getsizeof(name)) for name in found)
        registration = _size_of_registration(heartbeat, len(found))
        if args is not None:
            shared[args] = len(args.data)
    own = WORKER_BYTES + registration + status + machine
    return Registered(sender, heartbeat, shared, registration, machine, own)


def _size_of_registration(heartbeat: Heartbeat, names: int) -> int:
    one = heartbeat
    texts = (one.worker_id, one.model_name, one.host, one.backend, one.model_path, one.start_id, one.registration)
    listed = (*one.model_names, *(one.changed_args or ()), *one.versions, *one.versions.values())
    group = _size_of((one.group.id,)) if one.group is not None else 0
    cards = sum(map(_size_of_card, one.models))
    return (
        _size_of(texts)
        + _size_of(listed)
        + 16 * len(listed)
        + group
        + cards
        + CARD_BYTES * names
        + _size_of_phases(one.loaded)
    )


def _size_of_card(card: ModelCard) -> int:
    return sys.getsizeof(card.id) + sys.getsizeof(card.root) + sys.getsizeof(card.parent)


def _size_of_phases(phases: Iterable[LoadPhase]) -> int:
    return sum(PHASE_BYTES + _size_of((phase.name, phase.detail)) for phase in phases)


def _size_of_machine(machine: Machine) -> int:
    gpus = machine.gpus or ()
    return _size_of((machine.id, machine.name)) + sum(200 + _size_of((gpu.uuid, gpu.name, gpu.failure)) for gpu in gpus)


def _size_of(texts: Iterable[str]) -> int:
    return sum(map(sys.getsizeof, texts))
