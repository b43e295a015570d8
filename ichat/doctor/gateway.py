"""The gateway: its port, its state, the workers that it knows, and the processes that an earlier gateway has left."""

import contextlib
import os
import pathlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import psutil

from ichat.cli.client import Api, RequestRefused
from ichat.cli.json_values import Json, object_of, objects_of
from ichat.cli.troubles import BAD, config_sentence
from ichat.cli.views import reasons_of
from ichat.config.own_secret import directory_for
from ichat.config.process_marks import relays_of
from ichat.config.schema import Config
from ichat.doctor.findings import Finding
from ichat.doctor.machine import text_of
from ichat.downloads.model_lock import holder_of, program_of
from ichat.errors import Exit
from ichat.preflight.facts import Holder, PortState, port_holders, read_port
from ichat.preflight.obstacles import problems_of_port
from ichat.supervisor.orphans import marked_by
from ichat.supervisor.state import WORKERS_FILE, kept_in, read_saved


@attrs.frozen
class LeftProcess:
    """A process that belongs to a worker."""

    pid: int
    program: str
    worker_id: str


@attrs.frozen
class OtherGateway:
    """A gateway that has the port and another state directory."""

    pid: int
    user: str
    directory: str = ""
    """Its STATE_DIRECTORY; empty if that cannot be seen, or is not set."""


@attrs.frozen
class GatewayFacts:
    """The facts about the gateway with this configuration."""

    port: PortState = "free"
    holders: Sequence[Holder] = ()
    other: OtherGateway | None = None
    directory: str | None = None
    pid: int | None = None
    """Its process; None: none runs."""
    relays: Sequence[int] = ()
    """The relays of this gateway, or of an earlier gateway with its state directory."""
    processes: Sequence[LeftProcess] = ()
    """The processes of its workers, or of the workers of an earlier gateway."""
    kept: frozenset[str] = frozenset()
    """Workers that are meant to outlive their gateway."""

    @property
    def workers_by_pid(self) -> Mapping[int, str]:
        """The ids of the workers by their processes."""
        return {one.pid: one.worker_id for one in self.processes}


@attrs.frozen
class WorkerReport:
    """A running gateway's report on its workers and its configuration file, or the reason why there is none."""

    workers: Sequence[Json] = ()
    config: Json = attrs.field(factory=dict[str, object])
    """How the configuration file compares with the configuration in force; empty: not reported (an older gateway)."""
    refusal: str = ""
    needs_key: bool = False
    relays: Sequence[int] | None = None
    """The processes of its relays; None: not reported."""


def read_gateway_facts(config: Config) -> GatewayFacts:
    """Look for a gateway and its workers. It reads all processes, so it belongs in a thread."""
    settings, directory = config.server_settings, directory_for(config.server_settings)
    port = read_port(settings.host, settings.port)
    holders = port_holders(settings.port) if port == "taken" else []
    other = next(filter(None, (_gateway_at(one.pid) for one in holders)), None)
    facts = GatewayFacts(port, holders, other, directory)
    if directory is None:
        return facts
    path = os.path.abspath(directory)
    processes: list[LeftProcess] = []
    for process, mark in marked_by(f"{path}:"):
        processes.append(LeftProcess(process.pid, program_of(process.pid), mark.removeprefix(f"{path}:")))
    try:
        saved, _ = read_saved(pathlib.Path(path, WORKERS_FILE))
        kept = kept_in(saved)
    except OSError:
        kept = frozenset[str]()
    return attrs.evolve(
        facts, pid=_holder_of(os.path.join(path, "lock")), relays=relays_of(path), processes=processes, kept=kept
    )


def read_report(make_api: Callable[[], Api]) -> WorkerReport:
    """Ask a running gateway for its workers and its file; it waits for the network, so it belongs in a thread."""
    try:
        api = make_api()
        workers = objects_of(api.get("/v1/admin/workers").value.get("data"))
        gateway = object_of(api.get("/v1/admin/cluster/status").value.get("gateway"))
        relays = [pid for one in objects_of(gateway.get("relays")) if isinstance(pid := one.get("pid"), int)]
        file = object_of(api.get("/v1/admin/config").value.get("file"))
        return WorkerReport(workers, file, relays=relays if "relays" in gateway else None)
    except RequestRefused as refusal:
        return WorkerReport(refusal=str(refusal), needs_key=refusal.status in (401, 403))
    except Exit as error:
        return WorkerReport(refusal=str(error))


def find_in_gateway(config: Config, facts: GatewayFacts, report: WorkerReport | None) -> list[Finding]:
    """Return the findings about the gateway and its workers; `report` is None if no gateway was asked."""
    port, settings = _check_port(config, facts), config.server_settings
    if facts.pid is None and {one.pid for one in facts.holders}.intersection(facts.relays):
        sentence = f"Port {settings.port} of {settings.host} is held by relays of this gateway."
        port = [Finding("ok", "port", sentence)]
    return [*port, *_check_relays(facts, report), *_check_left(facts), *_check_report(report)]


def _check_port(config: Config, facts: GatewayFacts) -> Iterator[Finding]:
    settings = config.server_settings
    if settings.port == 0 and facts.pid is not None:
        yield Finding("ok", "gateway", f"The gateway runs (process {facts.pid}), on a port that the system chose.")
    elif facts.port == "free" and facts.pid is not None:
        sentence = f"A gateway (process {facts.pid}) uses {facts.directory} and listens elsewhere than on this port."
        yield Finding("warning", "gateway", f"{sentence[:-1]}: give each gateway a state_directory of its own.")
    elif facts.port == "free":
        yield Finding("ok", "port", f"Port {settings.port} of {settings.host} is free; no gateway runs there.")
    elif facts.port == "taken" and facts.pid is not None:
        yield Finding("ok", "gateway", f"The gateway runs (process {facts.pid}) and listens on port {settings.port}.")
    elif facts.other is not None:
        yield _found_other(settings.port, facts.other)
    else:
        command = f"ps -fp {facts.holders[0].pid}" if facts.holders else f"sudo ss -ltnp sport = :{settings.port}"
        for sentence in problems_of_port(settings.host, settings.port, facts.port, facts.holders):
            yield Finding("error", "port", sentence, command if facts.port == "taken" else "")


def _found_other(port: int, other: OtherGateway) -> Finding:
    """Most often it is the intended gateway, and the doctor runs as another user or without its environment."""
    sentence = (
        f"A gateway of {other.user} (process {other.pid}) listens on port {port} and has another state directory: if"
        " you mean this gateway, be that user and in its environment; else choose another port."
    )
    environment = f"env STATE_DIRECTORY={shlex.quote(other.directory)} " if other.directory else ""
    command = f"sudo -u {shlex.quote(other.user)} {environment}./ichat.pyz doctor -c FILE"
    return Finding("warning", "gateway", sentence, command)


def _gateway_at(pid: int) -> OtherGateway | None:
    """Return the gateway that a process runs; None: the process is no gateway of iChat."""
    try:
        process = psutil.Process(pid)
        words, user, directory = process.cmdline(), process.username(), ""
    except psutil.Error:
        return None
    if "gateway" not in words or not any("ichat" in os.path.basename(word) for word in words[:4]):
        return None
    with contextlib.suppress(psutil.Error, OSError):
        directory = process.environ().get("STATE_DIRECTORY", "").partition(":")[0]
    return OtherGateway(pid, user, directory)


def _check_relays(facts: GatewayFacts, report: WorkerReport | None) -> Iterator[Finding]:
    """Yield the finding about relays that their gateway has left, or does not know."""
    known, found = None if report is None else report.relays, set(facts.relays)
    if not found or facts.directory is None:
        return
    if facts.pid is not None and (known is None or not found.issuperset(known)):
        return  # a container, for example, has other numbers for the same processes
    strange = sorted(found.difference(known or ()))
    pids = " ".join(map(str, strange))
    if facts.pid is None:
        sentence = (
            f"The gateway is gone, and its relays (processes {pids}) wait for its next start: start it, or end them."
        )
        yield Finding("warning", "relays", sentence, f"./ichat.pyz sweep {shlex.quote(facts.directory)}")
    elif strange:
        yield Finding(
            "warning", "relays", f"The gateway does not know its relays (processes {pids}): end them.", f"kill {pids}"
        )
    else:
        yield Finding("ok", "relays", f"The gateway has {len(facts.relays)} relays.")


def _check_left(facts: GatewayFacts) -> Iterator[Finding]:
    if facts.pid is not None or facts.directory is None:
        return
    by_worker: dict[str, list[LeftProcess]] = {}
    for process in facts.processes:
        by_worker.setdefault(process.worker_id, []).append(process)
    for worker_id, processes in by_worker.items():
        pids = " ".join(str(one.pid) for one in processes)
        if worker_id in facts.kept:
            yield Finding("ok", worker_id, "It runs without a gateway, as configured; the next gateway adopts it.")
        else:
            what = f"process {pids}" if len(processes) == 1 else f"processes {pids}"
            sentence = f"Its gateway is gone, and {what} of it still runs: the next gateway ends that, or you do."
            yield Finding("warning", worker_id, sentence, f"kill {pids}")


def _check_report(report: WorkerReport | None) -> Iterator[Finding]:
    if report is None:
        return
    if report.refusal:
        command = "export ICHAT_ADMIN_KEY=…" if report.needs_key else ""
        sentence = f"The gateway could not be asked about its workers: {report.refusal.rstrip('.')}."
        yield Finding("warning" if report.needs_key else "error", "gateway", sentence, command)
    for worker in report.workers:
        yield _check_reported(worker)


def find_in_file(report: WorkerReport, *, is_listed: bool = False) -> list[Finding]:
    """Return a running gateway's findings about its configuration file, if the file is not in force.

    `is_listed` leaves out the mistakes: they are findings of their own.
    """
    trouble, is_refused = config_sentence(report.config), report.config.get("state") == "refused"
    if is_listed:
        trouble = config_sentence({**report.config, "errors": []})
    command = "" if is_refused else "./ichat.pyz reload"
    sentence = trouble if trouble.endswith("?") else f"{trouble}."
    return [Finding("error" if is_refused else "warning", "configuration", sentence, command)] if trouble else []


def _check_reported(worker: Json) -> Finding:
    worker_id, state, age = str(worker.get("worker_id")), str(worker.get("state")), worker.get("heartbeat_age_s")
    why = ": ".join(reasons_of(worker))
    heard = (
        f"its last heartbeat arrived {age:.1f} s ago" if isinstance(age, int | float) else "it sent no heartbeat yet"
    )
    if state in BAD:
        said = f" ({why})" if why else ""
        show = f"./ichat.pyz {'logs' if worker.get('managed') else 'workers'} {shlex.quote(worker_id)}"
        return Finding("error", worker_id, f"It is {state}{said}; {heard}.", show)
    return Finding("ok", worker_id, f"It is {state}; {heard}.")


def _holder_of(lock: str) -> int | None:
    """Return the process that holds a lock, by /proc/locks: to try the lock could keep a gateway from starting."""
    try:
        inode = os.stat(lock).st_ino
    except OSError:
        return None
    holder = holder_of(inode)
    own = text_of(lock).partition("\n")[0]  # it counts as this container does; a lock may be another process's by now
    return int(own) if holder is not None and own.isdecimal() else holder or None
