"""`gateway --check`: the configuration, and the obstacles to starting its workers on this machine.

No engine is imported. The obstacles are those that `doctor`, a launch and each start find.
"""

import shlex
from collections.abc import Sequence

import trio

from ichat.config.own_secret import directory_for
from ichat.config.schema import Config
from ichat.doctor.examination import EXIT_PROBLEMS
from ichat.doctor.findings import Finding
from ichat.doctor.gateway import read_gateway_facts
from ichat.doctor.machine import read_memory
from ichat.doctor.workers import WorkerCheckFacts, find_in_workers, read_worker_facts
from ichat.errors import Exit
from ichat.preflight.facts import VISIBLE, gpus_for
from ichat.preflight.learnt_file import read_learnt

CHECK_S = 12.0
"""How long the examination of the workers' needs may last, in seconds."""


def verdict_on(config: Config, path: str) -> Exit:
    """Return the end of the command: 0 where no mistake is known, 1 where a worker could not start here."""
    workers, findings = trio.run(_examine, config)
    doctor = f"`./ichat.pyz doctor -c {shlex.quote(path)}`"
    problems = [f"  {one.name}: {one.sentence}" for one in findings if one.level == "error"]
    backends = dict.fromkeys(one.worker.backend for one in workers if one.has_unchecked_flags)
    unchecked = f"the arguments for {' and '.join(backends)} were not checked: {doctor} does." if backends else ""
    silent = [one.worker_id for one in workers if one.facts is None or one.facts.python == "silent"]
    if silent:
        unchecked = f"what {' and '.join(silent)} needs was not known within {CHECK_S:g} s: {doctor} says more."
    if problems:
        head = f"{path} is well formed, but these workers could not start on this machine now:"
        return Exit(EXIT_PROBLEMS, "\n".join([head, *problems, *([f"  Also, {unchecked}"] if unchecked else [])]))
    return Exit(0, f"{path} is well formed; {unchecked}" if unchecked else f"{path} is right.")


async def _examine(config: Config) -> tuple[Sequence[WorkerCheckFacts], Sequence[Finding]]:
    if not config.managed_workers:
        return (), ()
    facts = await read_worker_facts(config, trio.current_time() + CHECK_S)
    gpus, gateway = await gpus_for(VISIBLE), await trio.to_thread.run_sync(read_gateway_facts, config)
    running = {one.worker_id for one in gateway.processes}
    learnt, _ = await trio.to_thread.run_sync(read_learnt, directory_for(config.server_settings))
    workers = [one.beside(gpus, running, learnt) for one in facts]
    total, limit = read_memory()
    return workers, find_in_workers(workers, limit or total)
