"""A launch of a worker on Ray: submitted, pending, claimed by its guard, and ended, as the launched process of a run.

Nothing is ended or started because something is not known: while Ray does not answer, the launch stays as it was.

new ──► sent ──► pending ──► claimed ──► over
        └ Ray's answer was lost: the job is asked for by its id, and never submitted again
"""

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import psutil
import trio

from ichat.config.schema import ManagedWorkerConfig
from ichat.errors import ApiError
from ichat.fleet.order_store import OrderStore
from ichat.fleet.orders import OrderPlace, RemoteOrder
from ichat.fleet.worker_facts import WorkerEnd
from ichat.listeners import Listeners, wait_any
from ichat.protocol.orders import LaunchEnd
from ichat.ray.api import SUBMIT_S, RayApi, RayRefused, RayUnknown, job_log
from ichat.ray.values import RayJob, RaySubmission
from ichat.supervisor.launcher import Order
from ichat.supervisor.ray_jobs import STOP_MORE_S

log = logging.getLogger(__name__)

POLL_S, HEARD_POLL_S, ENDING_POLL_S = 2.0, 30.0, 0.5
"""How often Ray is asked about a job: usually, while its worker is heard, and at its end."""
CODE_MORE_S = 60.0
"""How much longer than the longest wait for a place an order's code can be used."""
REPORT_S = 15.0
"""How long a guard may need beyond the end of its worker: it reports the end to the gateway."""
LAST_LINES = 50
"""The lines of a job's output that are read if its guard has not reported its end."""
_NOWHERE = OrderPlace(senders=[], ends_with_parent=True)
"""The place of an order until its job runs on a node."""
_BEGINS = "Its guard begins on a node of Ray."
_NOT_SENT = "The gateway asks Ray for a place."


class RayCluster(Protocol):
    """The launcher of a launch, as the launch sees it."""

    @property
    def api(self) -> RayApi:
        """Asks the cluster."""
        ...

    @property
    def orders(self) -> OrderStore:
        """The orders, which guards fetch."""
        ...

    async def prepare(self, order: Order) -> None:
        """Upload the program that the job runs. Raises RayUnknown, RayRefused."""
        ...

    def submission(self, order: Order, code: str) -> RaySubmission:
        """Return the job of an order with this code, after `prepare`."""
        ...

    def table_of(self, order: Order) -> ManagedWorkerConfig:
        """Return the worker's table for its node."""
        ...

    async def place_of(self, order: Order, node_id: str) -> OrderPlace | None:
        """Return the place of an order on a node; None: the node is not known yet. Raises RayUnknown, RayRefused."""
        ...

    async def why_pending(self, spec: ManagedWorkerConfig, job: RayJob) -> str:
        """Return why a pending job has no place, in a sentence. Raises RayUnknown, RayRefused."""
        ...

    async def tidy(self, worker_id: str, job_id: str) -> None:
        """Note the end of a launch, and have Ray forget earlier launches of this worker."""
        ...


class RayLaunch:
    """A launch of a worker."""

    pid = 0

    def __init__(self, order: Order, job_id: str, cluster: RayCluster, remote: RemoteOrder | None = None) -> None:
        """`remote` is the order of an adopted launch; None: the job is not submitted yet."""
        self.spec = order.spec
        self.identity = job_id
        self.is_adopted = remote is not None
        self.waits_for = _NOT_SENT if remote is None or not remote.fetched_at else ""
        self.is_unanswered = False
        self.reported_end: WorkerEnd | None = None
        self.returncode: int | None = None
        self.had_no_place = False
        self.node_id = ""
        self._order = order
        self._cluster = cluster
        self._remote = remote
        self._is_taken = False
        """Whether Ray is known to have the job."""
        self._said = ""
        """The newest error about a worker that Ray does not know, or is silent about."""
        self._sent_at = trio.current_time()
        ray = order.config.ray
        waited_s = 0.0 if remote is None else max(0.0, time.time() - remote.made_at)
        self._pending_until = trio.current_time() + max(0.0, ray.pending_s - waited_s)
        self._unknown_since = ""
        """Since when Ray has not answered, as a time of day; empty: it answers."""
        self._poll_s = POLL_S
        self._news: Listeners[[]] = Listeners()
        """Called when the order was fetched, or its end was reported."""
        self._changed: Listeners[[]] = Listeners()
        """Called at each change of `waits_for`."""
        cluster.orders.changed.add(self._hear_of_orders)
        cluster.orders.reported.add(self._hear_of_end)

    def __repr__(self) -> str:
        return f"<RayLaunch {self.identity}>"

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self.reported_end is not None

    async def wait_change(self) -> None:
        """Wait for the next change of `waits_for`."""
        await self._changed.wait()

    async def lower_priority(self) -> None:
        """Do nothing: it is no process of this machine."""
        await trio.lowlevel.checkpoint()

    async def sweep(self, family: Sequence[psutil.Process]) -> list[psutil.Process]:
        """Return nothing: the guard has cleared up."""
        del family
        await trio.lowlevel.checkpoint()
        return []

    def close(self) -> None:
        """Hear of its order no more."""
        self._cluster.orders.changed.remove(self._hear_of_orders)
        self._cluster.orders.reported.remove(self._hear_of_end)

    # From the submission to the end.

    async def wait(self) -> None:
        """Submit it, if it was not submitted yet, and wait until it has ended."""
        while not self.has_ended:
            await self._step()
            await self._wait_to_ask()

    async def _wait_to_ask(self) -> None:
        """Wait until the next question to Ray: at once after news, and seldom while the worker is heard."""
        heard_until = trio.current_time() + HEARD_POLL_S
        while not self.has_ended:
            with trio.move_on_after(self._poll_s) as waited:
                await self._news.wait()
            is_heard = self._is_claimed and self._cluster.orders.is_heard(self._order.worker_id)
            is_due = not is_heard or self._poll_s == ENDING_POLL_S or trio.current_time() >= heard_until
            if is_due or not waited.cancelled_caught:
                break

    async def _step(self) -> None:
        """Go on, as far as Ray answers."""
        try:
            await (self._submit() if self._remote is None else self._look(self._remote))
        except (RayUnknown, RayRefused) as error:
            await self._note_silence(str(error))
        else:
            if self._unknown_since:
                log.info("Ray at %s answers again", self._cluster.api.address)
            self._unknown_since = ""

    async def _note_silence(self, why: str) -> None:
        """Note that Ray does not answer: the launch goes on, unless its worker has said good-bye.

        The guard of such a worker would have reported the end by now.
        """
        address, orders, worker_id = self._cluster.api.address, self._cluster.orders, self._order.worker_id
        if not self._unknown_since:
            self._unknown_since = time.strftime("%H:%M:%S")
            log.error("Ray at %s does not answer about worker %s: %s", address, worker_id, why)
        if self.waits_for:
            words = f"does not answer ({why}) since {self._unknown_since}: its workers go on; launches wait."
            self._tell(f"Ray at {address} {words}", is_unanswered=True)
        elif self._is_claimed and orders.has_left(worker_id, REPORT_S):
            cause = "Its guard has not reported how it ended, and Ray does not answer."
            await self._finish(WorkerEnd("has said good-bye", time.time(), cause=cause))
        elif not orders.is_heard(worker_id):
            self._say(f"worker {worker_id} is silent, too: it is launched again once Ray answers about it")

    def _say(self, words: str) -> None:
        """Log an error, once."""
        if words != self._said:
            log.error("%s", words)
        self._said = words

    async def _submit(self) -> None:
        order, cluster = self._order, self._cluster
        try:
            await cluster.prepare(order)
            valid_s = order.config.ray.pending_s + CODE_MORE_S
            table = cluster.table_of(order)
            self._remote, code = await cluster.orders.make_managed(order.worker_id, table, valid_s, _NOWHERE)
            self._sent_at = trio.current_time()
            self._pending_until = self._sent_at + order.config.ray.pending_s
            log.info("worker %s is launched on Ray: %s", order.worker_id, self.identity)
            await cluster.api.submit(cluster.submission(order, code))
            self._is_taken = True
        except RayRefused as refused:
            advice = ": correct ray.token_env" if refused.is_about_token else ""
            await self._finish(
                WorkerEnd("cannot be started", time.time(), cause=f"Ray refuses it ({refused}){advice}.")
            )
        except (ApiError, OSError) as error:
            why = error.message if isinstance(error, ApiError) else f"{error.strerror or error}."
            await self._finish(WorkerEnd("cannot be started", time.time(), cause=why))

    async def _look(self, remote: RemoteOrder) -> None:
        """Ask Ray for the job, and note its state."""
        job = await self._cluster.api.job(self.identity)
        if self.has_ended:
            return
        if job is None:
            await self._note_absence()
            return
        self._is_taken, self.node_id = True, job.node_id
        if job.is_over:
            await self._finish(await self._end_by(job))
        elif job.status == "RUNNING":
            await self._admit(remote, job.node_id)
            self._tell("" if self._is_claimed else _BEGINS)
        elif trio.current_time() < self._pending_until:
            self._tell(await self._cluster.why_pending(self.spec, job))
        else:
            self.had_no_place = True
            seconds = f"{self._order.config.ray.pending_s:g} s"
            end = WorkerEnd(f"had no place on Ray within {seconds}", time.time(), cause=self.waits_for)
            await self._finish(end)

    async def _note_absence(self) -> None:
        """Note that Ray has no such job: the launch has ended, unless it is new, or its worker is heard.

        Another cluster may be at Ray's address now: it knows nothing of a worker that serves.
        """
        if not self._is_taken and trio.current_time() < self._sent_at + SUBMIT_S:
            return
        if self._is_claimed and self._cluster.orders.is_heard(self._order.worker_id):
            self._say(f"Ray has no job of worker {self._order.worker_id} any more: it serves until it ends")
            return
        cause = "Ray has no such job any more: the cluster was started anew, or the job was deleted."
        await self._finish(WorkerEnd("was lost by Ray", time.time(), cause=cause))

    async def _admit(self, remote: RemoteOrder, node_id: str) -> None:
        """Let the job's node fetch the order, and no other machine."""
        if self._is_claimed or self._newest(remote).place.senders:
            return
        place = await self._cluster.place_of(self._order, node_id)
        if place is not None:
            try:
                await self._cluster.orders.set_place(remote.launch, place)
            except ApiError as error:
                log.error("the node of worker %s gets no order: %s", self._order.worker_id, error.message)

    @property
    def _is_claimed(self) -> bool:
        """Whether a guard has the order."""
        return self._remote is not None and bool(self._newest(self._remote).fetched_at)

    def _newest(self, remote: RemoteOrder) -> RemoteOrder:
        return self._cluster.orders.orders.by_launch.get(remote.launch, remote)

    def _tell(self, why: str, *, is_unanswered: bool = False) -> None:
        if (self.waits_for, self.is_unanswered) != (why, is_unanswered):
            self.waits_for, self.is_unanswered = why, is_unanswered
            self._changed()

    def _hear_of_orders(self) -> None:
        if self.waits_for and self._is_claimed:
            self._tell("")
            self._news()

    def _hear_of_end(self, report: LaunchEnd) -> None:
        if self._remote is None or report.launch != self._remote.launch or self.has_ended:
            return
        self.returncode = report.exit_code
        self.reported_end = WorkerEnd(
            report.why, time.time(), exit_code=report.exit_code, signal=report.signal, oom_killed=report.oom_killed,
            cause=report.cause, last_lines=report.last_lines,
        )  # fmt: skip
        self._tell("")
        self._news()

    async def _end_by(self, job: RayJob) -> WorkerEnd:
        """Return how a job has ended, without a report of its guard."""
        lines: Sequence[str] = ()
        try:
            if job.node_id:
                lines = await self._cluster.api.last_lines(job.node_id, job_log(job.id), LAST_LINES)
        except (RayUnknown, RayRefused) as error:
            log.info("the last lines of %s cannot be read: %s", job.id, error)
        code = job.exit_code
        why = f"has ended with exit code {code}" if code is not None and code >= 0 else "was ended on its node"
        cause = lines[-1].strip() if lines and code else job.message if job.status != "SUCCEEDED" else ""
        return WorkerEnd(why, time.time(), exit_code=code if code and code > 0 else None, cause=cause, last_lines=lines)

    async def _finish(self, end: WorkerEnd) -> None:
        """Note the end: its code and its key are dead from now on."""
        if self._remote is not None:
            try:
                await self._cluster.orders.finish(self._remote.launch, end.why)
            except ApiError as error:
                log.error("the end of the order of worker %s is not kept: %s", self._order.worker_id, error.message)
        if self.reported_end is None:
            self.returncode, self.reported_end = end.exit_code, end
        self._tell("")
        self._news()

    # The end by the gateway.

    async def end(self, stop_s: float, hurry: trio.Event) -> None:
        """Have its worker end, and Ray stop the rest after `stop_s`; without a guard the launch just counts no more.

        Each wait is bounded: where Ray does not answer, the worker's key is dead at the end.
        """
        if not self.has_ended and self._remote is not None and self._is_claimed:
            self._poll_s = ENDING_POLL_S
            try:
                await self._cluster.orders.ask_to_end(self._remote)
            except ApiError as error:
                log.error("worker %s cannot be asked to end: %s", self._order.worker_id, error.message)
            await self._wait_for_end(stop_s + REPORT_S, hurry)
            if not self.has_ended:
                await self._stop(stop_s, hurry)
        if not self.has_ended:
            await self._finish(WorkerEnd("was ended", time.time()))
        await self._cluster.tidy(self._order.worker_id, self.identity)
        log.info("worker %s on Ray has ended", self._order.worker_id)

    async def _wait_for_end(self, within_s: float, hurry: trio.Event) -> None:
        with trio.move_on_after(within_s):
            await wait_any(self.wait, hurry.wait)

    async def _stop(self, stop_s: float, hurry: trio.Event) -> None:
        """Have Ray end all processes of the job."""
        log.warning("worker %s did not end by itself: Ray ends its job", self._order.worker_id)
        try:
            await self._cluster.api.stop(self.identity)
        except (RayUnknown, RayRefused) as error:
            log.error("Ray did not stop the job of worker %s: %s", self._order.worker_id, error)
        await self._wait_for_end(0.0 if hurry.is_set() else stop_s + STOP_MORE_S + REPORT_S, hurry)
        if not self.has_ended:
            log.error("worker %s is not known to have ended; its key is dead", self._order.worker_id)
