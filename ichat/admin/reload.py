"""Another configuration while the gateway runs: read, compared, shown, and applied, or refused as a whole."""

import contextlib
import logging
import os
import pathlib
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Literal, NoReturn, Protocol

import attrs
import trio
from prometheus_client import Metric

from ichat.admin.config_state import ConfigInForce, ConfigState, mistakes_in
from ichat.admin.setting_changes import steps_of_settings
from ichat.admin.views import ReloadResult
from ichat.config import load as configuration
from ichat.config.schema import Config
from ichat.errors import ApiError, Exit
from ichat.listeners import Listeners
from ichat.supervisor.reload_plan import step_of, summary
from ichat.supervisor.supervisor import Supervisor

log = logging.getLogger(__name__)

WATCH_S = 1.0
"""How often the file is checked; it is read once it has not changed for this time."""

RETRY_S = 5.0
"""Seconds after a refusal until the file is tried again: the files that it names may exist by then."""

Fingerprint = tuple[int, int, int]


class Reconfigurable(Protocol):
    """A component that holds a part of the configuration."""

    def reconfigure(self, config: Config) -> None:
        """Go on with another configuration, already checked; counts and connections are kept."""
        ...


@attrs.frozen
class ConfigFile:
    """The file that a configuration is from."""

    path: pathlib.Path
    seen: Fingerprint | None
    """Its fingerprint before it was read."""
    log_format: str | None = None
    """The value of `logs.format` that the command line sets in its place."""

    def load(self) -> Config:
        """Read the configuration. Raises Exit 64 if it is missing or wrong."""
        return self.with_flags(configuration.load(self.path))

    def with_flags(self, config: Config) -> Config:
        """Return a configuration with the values that the command line sets."""
        if self.log_format is None:
            return config
        return attrs.evolve(config, logs=attrs.evolve(config.logs, format=self.log_format))


def fingerprint(path: pathlib.Path) -> Fingerprint | None:
    """Return a value that changes with the content of a file; None if it is missing or still empty."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size) if status.st_size else None


ApplyConfig = Callable[[Config], None]
"""Puts a configuration in force, in place of the given configuration."""


class Reloader:
    """Puts another configuration in force."""

    def __init__(
        self,
        in_force: ConfigInForce,
        file: ConfigFile | None,
        supervisor: Supervisor,
        check: Callable[[Config], ApplyConfig],
        *,
        prepare: Callable[[Config], Awaitable[None]] | None = None,
        watch_s: float = WATCH_S,
        retry_s: float = RETRY_S,
    ) -> None:
        """`file` is None for a configuration that is from no file.

        `check` makes everything that a configuration needs, raises Exit if that is impossible, and returns the function
        that puts it in force. `prepare` has other processes prepare it, and raises Exit if one of them cannot; the
        function that puts it in force follows then.
        """
        self._prepare = prepare
        self._in_force = in_force
        self._file = file
        self._path = file.path if file else None
        self._seen = file.seen if file else None
        self._refusal = ""
        """Why the file was refused last: the same reason is logged once."""
        now = time.time()
        self.state = ConfigState("ok", now, now, str(self._path) if self._path is not None else None)
        """Whether the file is in force."""
        self._judged: Fingerprint | None = None
        """The file that was refused last."""
        self.state_changed: Listeners[[ConfigState]] = Listeners()
        """Called with each new state."""
        self._supervisor = supervisor
        self._check = check
        self._watch_s = watch_s
        self._retry_s = retry_s
        self.applied: Listeners[[str]] = Listeners()
        """Called with the summary of each reload that has changed the configuration in force."""

    def __repr__(self) -> str:
        return f"<Reloader {self._path}>"

    @property
    def config(self) -> Config:
        """The configuration that is in force."""
        return self._in_force.config

    @property
    def path(self) -> pathlib.Path | None:
        """The file that the configuration is from; None: it is from no file."""
        return self._path

    def families(self) -> Iterator[Metric]:
        """Return the state's families for Prometheus."""
        return self.state.families()

    async def read_state(self) -> ConfigState:
        """Look at the file, and return whether it is in force."""
        await self._look_at_file()
        return self.state

    async def _look_at_file(self) -> Fingerprint | None:
        """Return the file's fingerprint now, and note it; None if it is missing or empty, or there is none."""
        if self._path is None:
            return None
        loaded = self._seen
        now = await trio.to_thread.run_sync(fingerprint, self._path)
        is_judged = self.state.state == "refused" and now == self._judged
        if loaded == self._seen and not is_judged and not self._in_force.lock.statistics().locked:
            self._note("ok" if now == loaded else "changed")
        return now

    def _note(self, state: Literal["ok", "changed", "refused"], errors: Sequence[str] = ()) -> None:
        """Record a state of the file, and call the listeners if it has changed."""
        before = self.state
        if (state, errors) != (before.state, before.errors):
            since = before.since if state == before.state else time.time()
            self.state = attrs.evolve(before, state=state, since=since, errors=errors)
            self.state_changed(self.state)

    async def reload(self, *, dry_run: bool, why: str, restart_failed: bool = False) -> ReloadResult:
        """Read the file and apply its changes; return them.

        With `restart_failed`, workers that have failed are started anew, changed or not. Workers are started and
        stopped afterwards, without waiting. Raises ApiError: 400 for a file that is wrong, 409 if there is
        none.
        """
        if self._path is None or self._file is None:
            raise ApiError(409, "no_file", "This gateway was not started from a file: there is nothing to read again.")
        async with self._in_force.lock:
            seen = await trio.to_thread.run_sync(fingerprint, self._path)  # before it is read
            try:
                new = await trio.to_thread.run_sync(self._file.load)
                apply = await trio.to_thread.run_sync(self._check, new)
                if self._prepare is not None and not dry_run:
                    await self._prepare(new)
            except Exit as exit_:
                self._judged = seen
                self._note("refused", mistakes_in(str(exit_)))
                apart = "\n" if "\n" in str(exit_) else " "
                raise ApiError(400, "bad_configuration", f"{exit_}{apart}Nothing was changed.") from exit_
            changes = self._supervisor.changes(new, restart_failed=restart_failed)
            steps = [*map(step_of, changes), *steps_of_settings(self.config, new)]
            if dry_run:
                self._note("ok" if seen == self._seen else "changed")
            else:
                log.info("reloading %s (%s): %s", self._path, why, summary(steps))
                for step in steps:
                    if step.action != "keep":
                        log.info("  %s %s: %s", step.action, step.what, step.why)
                self._supervisor.apply(new, changes)
                apply(self.config)
                self._in_force.replace(new)
                self._seen = seen
                self.state = attrs.evolve(self.state, state="changed", in_force_since=time.time(), errors=())
                self._note("ok")
                self.applied(summary(steps))
            return ReloadResult(applied=not dry_run, summary=summary(steps), plan=steps)

    async def watch_forever(self) -> NoReturn:
        """Reload the file whenever it has changed and is whole again (`server_settings.watch_config`)."""
        loaded, before = self._seen, None
        while True:
            await trio.sleep(self._watch_s)
            now = await self._look_at_file()
            if now is not None and now == before and now != loaded:
                watches = self.config.server_settings.watch_config
                if not watches or await self._reload_quietly("the file has changed"):
                    loaded = now
                else:
                    await trio.sleep(self._retry_s)
            before = now

    async def obey_signals_forever(
        self, during: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    ) -> None:
        """Reload the file at each SIGHUP. Each reload is done in a context of `during`."""
        with trio.open_signal_receiver(signal.SIGHUP) as signals:
            async for _ in signals:
                self._refusal = ""
                with during():
                    await self._reload_quietly("SIGHUP")

    async def _reload_quietly(self, why: str) -> bool:
        """Return whether the file was applied; a refusal is logged unless its reason was logged before."""
        try:
            await self.reload(dry_run=False, why=why)
        except ApiError as error:
            if error.code == "draining":
                log.info("the file was not applied: %s", error.message)
            elif error.message != self._refusal:
                log.error("the configuration stays as it is: %s", error.message)
            self._refusal = error.message
            return False
        self._refusal = ""
        return True
