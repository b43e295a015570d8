"""What is done to a gateway and its workers in a run of chaos. Each fault has a bound, and ends what it began."""

import contextlib
import random
import signal

import trio
from chaos_load import judge_error
from chaos_site import Workers, send_signal
from chaos_wire import Connection, written

TOUCHED = ("twin", "embed", "narrow")
"""The managed models that are broken."""
BAD_FILES = (
    "not toml at all [",
    "\x00\x01\x02",
    "[server_settings]\nport = 1\n",
    "[litellm_settings]\ndrop_parms = true\n",
    '[[managed_workers]]\nmodel_name = "calm"\n',
    '[[managed_workers]]\nmodel_name = "x"\nmodel_path = "/m"\nbackend = "fake"\nheartbeat_interval = "often"\n',
    '[[external_routes]]\nmodel_name = "e"\napi_base = "ftp://nowhere"\n',
    "[timeouts]\nhead_s = -1\n",
)
BAD_LAUNCHES = (
    {},
    {"model_name": "guest"},
    {"model_name": "guest", "model_path": "/m", "backend": "nobody"},
    {"model_name": "guest", "model_path": "/m", "backend": "fake", "port": 99999},
    {"model_name": "guest", "model_path": "/m", "backend": "fake", "python": "/no/such/python"},
)


class Faults:
    """The faults of one run: `await faults.KINDS[kind](faults, rng)`."""

    def __init__(self, site, ledger, until):
        """No fault lasts beyond `until` (Trio's clock) on purpose."""
        self._site = site
        self._ledger = ledger
        self._until = until
        self._touched = TOUCHED if site.backend == "fake" else ("twin",)

    async def do(self, kind, number):
        """Do one of them; `number` makes it the same in every run with this seed. Notes what it must not meet."""
        try:
            with trio.move_on_after(180) as scope:
                await self.KINDS[kind](self, random.Random(f"{self._ledger.seed}/fault/{number}"))
                self._ledger.faults[kind] += 1
            if scope.cancelled_caught:
                self._ledger.wrong(f"the control plane did not let the fault `{kind}` end within 180 s")
        except (trio.TooSlowError, OSError, AssertionError) as error:
            self._ledger.wrong(f"during the fault `{kind}`: {error!r}")

    async def _sleep(self, sleep_s):
        await trio.sleep(max(0.1, min(sleep_s, self._until - trio.current_time())))

    async def _victim(self, rng):
        found = await self._site.managed(*self._touched)
        return rng.choice(sorted(found, key=lambda one: one["worker_id"])) if found else None

    async def kill_a_worker(self, rng):
        victim = await self._victim(rng)
        if victim:
            send_signal(victim["pid"], signal.SIGKILL)

    async def kill_an_engine_child(self, rng):
        victim = await self._victim(rng)
        children = self._site.children_of(victim["pid"]) if victim else []
        if children:
            send_signal(rng.choice(children).pid, signal.SIGKILL)

    async def end_a_worker(self, rng):
        """SIGTERM from somebody else."""
        victim = await self._victim(rng)
        if victim:
            send_signal(victim["pid"], signal.SIGTERM)

    async def engine_dies(self, rng):
        victim = await self._victim(rng)
        if victim and victim.get("port"):
            with contextlib.suppress(OSError, trio.TooSlowError):
                await self._site.ask("POST", "/die", {}, port=victim["port"], limit_s=30)

    async def stop_a_worker(self, rng):
        """SIGSTOP for a while, sometimes for so long that it is replaced."""
        victim = await self._victim(rng)
        if victim:
            send_signal(victim["pid"], signal.SIGSTOP)
            try:
                await self._sleep(rng.choice([0.2, 1, 3, 5, 25]))
            finally:
                send_signal(victim["pid"], signal.SIGCONT)

    async def flood_a_log(self, rng):
        victim = await self._victim(rng)
        if victim and victim.get("port"):
            with contextlib.suppress(OSError, trio.TooSlowError):
                body = {"lines": rng.randrange(1000, 5000), "text": "noise" * 10}
                await self._site.ask("POST", "/print", body, port=victim["port"], limit_s=60)

    async def kill_a_far_worker(self, rng):
        program = rng.choice(self._site.fars).program
        send_signal(program.process.pid, rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))

    async def stop_a_far_worker(self, rng):
        pid = rng.choice(self._site.fars).program.process.pid
        send_signal(pid, signal.SIGSTOP)
        try:
            await self._sleep(rng.choice([0.5, 2, 6]))
        finally:
            send_signal(pid, signal.SIGCONT)

    async def cut_the_heartbeats(self, rng):
        await rng.choice(self._site.fars).heartbeats.cut(min(rng.random() * 8, self._left_s()))

    async def cut_the_network(self, rng):
        far = rng.choice(self._site.fars)
        async with trio.open_nursery() as nursery:
            for link in (far.heartbeats, far.data):
                nursery.start_soon(link.cut, min(rng.random() * 6, self._left_s()))

    async def reset_connections(self, rng):
        rng.choice(self._site.fars).data.break_all()

    async def freeze_the_network(self, rng):
        await rng.choice(self._site.fars).data.freeze(min(rng.choice([1, 4, 8]), self._left_s()))

    def _left_s(self):
        return max(0.1, self._until - trio.current_time())

    async def reload(self, rng):
        """Add, change and remove workers, and change settings; told in one of three ways."""
        site = self._site
        async with site.rewriting:
            workers = list(site.base)
            if rng.random() < 0.5:
                workers.append(Workers("extra", rng.randrange(1, 3)))
            if rng.random() < 0.3:
                workers.append(Workers("broken", keys={"fail": True}))
            if rng.random() < 0.5:
                at = next(n for n, one in enumerate(workers) if one.model == "twin")
                keys = {**workers[at].keys, "load_s": round(rng.random(), 3)}
                workers[at] = Workers("twin", workers[at].count, keys)
            self._write(site.text(workers, queue_max=rng.choice([4, 6, 8])), rng)
            await self._tell(rng, {200})

    async def reload_something_bad(self, rng):
        """A file that is wrong changes nothing."""
        site = self._site
        async with site.rewriting:
            good = site.path.read_text()
            self._write(good + rng.choice(BAD_FILES), rng)
            await self._tell(rng, {400})
            await self._sleep(1)
            self._write(good, rng)

    async def empty_the_file(self, rng):
        """As an editor or a full disk does for a moment: nobody takes it for a configuration."""
        site = self._site
        async with site.rewriting:
            good = site.path.read_text()
            self._write("", rng)
            await self._sleep(3)
            self._write(good, rng)

    def _write(self, text, rng):
        """As editors do it: a new file in place of the old one, or the old one written over."""
        path = self._site.path
        if rng.random() < 0.5:
            new = path.with_suffix(".new")
            new.write_text(text)
            new.replace(path)
        else:
            path.write_text(text)

    async def _tell(self, rng, statuses):
        how = rng.choice(["signal", "api", "api", "watch"])
        if how == "signal":
            self._site.program.process.send_signal(signal.SIGHUP)
            await self._sleep(1)
        elif how == "watch":
            await self._sleep(3)
        else:
            query = rng.choice(["", "?dry_run=1"])
            status, answer = await self._site.ask("POST", f"/v1/admin/config/reload{query}")
            assert status in statuses, (status, answer)

    async def launch_and_delete(self, rng):
        """Over the API; sometimes while it still loads, sometimes by a client that does not wait for the end."""
        site = self._site
        body = {"model_name": "guest", "model_path": "/m", "backend": "fake", "gpu_ids": [], "heartbeat_interval": 1}
        body["load_s"] = rng.choice([0.0, 0.5])
        status, answer = await site.ask("POST", "/v1/admin/workers/launch", body)
        assert status == 202, (status, answer)
        await self._sleep(rng.choice([0, 0.3, 4, 8]))
        path = f"/v1/admin/workers/{answer['worker_id']}?drain_s={rng.choice([0, 1, 3])}"
        if rng.random() < 0.3:
            async with await Connection.open(site.port) as connection:
                await connection.send(written("DELETE", path))
                await trio.sleep(0.3)
            return
        status, answer = await site.ask("DELETE", path)
        assert status == 200, (status, answer)

    async def ask_the_impossible(self, rng):
        """Refused in good order."""
        site = self._site
        async with await Connection.open(site.port) as connection:
            data = rng.choice([
                written("POST", "/v1/admin/workers/launch", rng.choice(BAD_LAUNCHES)),
                written("POST", "/v1/admin/workers/launch", b"{"),
                written("DELETE", f"/v1/admin/workers/far-{rng.randrange(2)}"),
                written("DELETE", "/v1/admin/workers/nobody"),
                written("POST", "/v1/workers/heartbeat", {"worker_id": "x"}),
                written("POST", "/v1/admin/config/reload?dry_run=perhaps"),
            ])  # fmt: skip
            await connection.send(data)
            reply = await connection.reply()
        assert reply.status in (400, 404, 409), reply
        assert reply.status == 409 or judge_error(reply, {400, 404}), reply
        assert reply.status != 409 or b"code" in reply.body, reply

    async def followers_that_do_not_read(self, rng):
        site = self._site
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(rng.randrange(2, 10)):
                connection = await stack.enter_async_context(await Connection.open(site.port, receive_bytes=4096))
                worker = rng.choice(["calm-0", "twin-0", "far-0", "narrow-0"])
                await connection.send(written("GET", f"/v1/logs/stream/{worker}"))
            await self._sleep(rng.choice([2, 6, 15]))

    async def idle_connections(self, rng):
        """Many at once that ask for nothing, and go the hard way."""
        connections, many = [], rng.randrange(20, 150)
        try:
            while len(connections) < many:
                connections += [await Connection.open(self._site.port)]
            await self._sleep(rng.random() * 4)
        finally:
            for connection in connections:
                connection.reset()

    KINDS = {
        "kill -9 of a worker": kill_a_worker,
        "kill -9 of an engine's child": kill_an_engine_child,
        "SIGTERM of a worker": end_a_worker,
        "engine dies": engine_dies,
        "SIGSTOP of a worker": stop_a_worker,
        "flood of log lines": flood_a_log,
        "end of a far worker": kill_a_far_worker,
        "SIGSTOP of a far worker": stop_a_far_worker,
        "heartbeats cut": cut_the_heartbeats,
        "network cut": cut_the_network,
        "connections reset": reset_connections,
        "network frozen": freeze_the_network,
        "reload": reload,
        "bad configuration": reload_something_bad,
        "empty configuration": empty_the_file,
        "launch and delete": launch_and_delete,
        "impossible admin request": ask_the_impossible,
        "followers that do not read": followers_that_do_not_read,
        "idle connections": idle_connections,
    }  # fmt: skip
    REAL = (
        "kill -9 of a worker", "kill -9 of an engine's child", "SIGTERM of a worker", "SIGSTOP of a worker",
        "bad configuration", "impossible admin request", "followers that do not read", "idle connections",
    )  # fmt: skip
    """Those that make sense with real engines, which take minutes to load."""


def deck(seed, kinds, count):
    """Return the kinds of so many faults: each comes once before any comes twice."""
    rng, found = random.Random(f"{seed}/deck"), []
    while len(found) < count:
        found += rng.sample(kinds, len(kinds))
    return found[:count]
