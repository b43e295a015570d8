"""Another configuration while the gateway runs: read, compared, shown, and applied, or refused as a whole."""

import logging
import os
import pathlib
import signal
from collections.abc import Callable
from typing import Never, Protocol

import attrs
import trio

from ichat.admin.views import ReloadResult
from ichat.config import load as configuration
from ichat.config.schema import Config
from ichat.errors import ApiError, Exit
from ichat.supervisor.reload_plan import step_of, steps_of_settings, summary
from ichat.supervisor.supervisor import Supervisor

log = logging.getLogger(__name__)

WATCH_S = 1.0
"""How often the file is checked; it is read once it has not changed for this time."""

RETRY_S = 5.0
"""How long after a refusal the file is tried again: what it names may be there by then."""

Fingerprint = tuple[int, int, int]


class Reconfigurable(Protocol):
    """A component that holds a part of the configuration."""

    def reconfigure(self, config: Config) -> None:
        """Go on with another configuration, which is known to be right; counts and connections are kept."""
        ...


@attrs.frozen
class ConfigFile:
    """The file that a configuration is from."""

    path: pathlib.Path
    seen: Fingerprint | None
    """What its fingerprint was before it was read."""


def fingerprint(path: pathlib.Path) -> Fingerprint | None:
    """Return what tells one content of a file from the next; None if it is missing or still empty."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size) if status.st_size else None


def _read(path: pathlib.Path) -> tuple[Fingerprint | None, Config]:
    """Return the configuration in a file, and what the file's fingerprint was before. Raises Exit 64."""
    return fingerprint(path), configuration.load(path)


ApplyConfig = Callable[[Config], None]
"""Puts a configuration in force, in place of this one."""


class Reloader:
    """Holds the configuration that is in force."""

    def __init__(
        self,
        config: Config,
        file: ConfigFile | None,
        supervisor: Supervisor,
        check: Callable[[Config], ApplyConfig],
        *,
        watch_s: float = WATCH_S,
        retry_s: float = RETRY_S,
    ) -> None:
        """`file` is None for a configuration that is from no file.

        `check` makes everything that a configuration needs, raises Exit where that cannot be, and returns what puts it
        in force.
        """
        self.config = config
        self._path = file.path if file else None
        self._seen = file.seen if file else None
        self._refusal = ""
        """Why the file was refused last: the same reason is logged once."""
        self._supervisor = supervisor
        self._check = check
        self._watch_s = watch_s
        self._retry_s = retry_s
        self.lock = trio.Lock()
        """Held while what is in force changes: the configuration, or the keys that were made over the API."""
        self.when_applied: Callable[[str], None] | None = None
        """Called with the summary of each reload that has changed the configuration in force."""

    def __repr__(self) -> str:
        return f"<Reloader {self._path}>"

    @property
    def path(self) -> pathlib.Path | None:
        """The file that the configuration is from; None: it is from no file."""
        return self._path

    async def has_file_changed(self) -> bool:
        """Return whether the file is another one than that which was read last, or is gone."""
        return self._path is not None and self._seen != await trio.to_thread.run_sync(fingerprint, self._path)

    async def reload(self, *, dry_run: bool, why: str) -> ReloadResult:
        """Read the file and apply what has changed; return what that was.

        Workers are started and stopped afterwards, which is not waited for. Raises ApiError: 400 for a file that is
        wrong, 409 where there is none.
        """
        if self._path is None:
            raise ApiError(409, "no_file", "This gateway was not started from a file: there is nothing to read again.")
        async with self.lock:
            try:
                seen, new = await trio.to_thread.run_sync(_read, self._path)
                apply = await trio.to_thread.run_sync(self._check, new)
            except Exit as exit_:
                raise ApiError(400, "bad_configuration", f"{exit_} Nothing was changed.") from exit_
            changes = self._supervisor.changes(new)
            steps = [*map(step_of, changes), *steps_of_settings(self.config, new)]
            if not dry_run:
                log.info("reloading %s (%s): %s", self._path, why, summary(steps))
                for step in steps:
                    if step.action != "keep":
                        log.info("  %s %s: %s", step.action, step.what, step.why)
                self._supervisor.apply(new, changes)
                apply(self.config)
                self.config, self._seen = new, seen
                if self.when_applied is not None:
                    self.when_applied(summary(steps))
            return ReloadResult(applied=not dry_run, summary=summary(steps), plan=steps)

    async def watch_forever(self) -> Never:
        """Reload the file whenever it has changed and is whole again (`server_settings.watch_config`)."""
        loaded, before = self._seen, None
        while True:
            await trio.sleep(self._watch_s)
            now = None if self._path is None else await trio.to_thread.run_sync(fingerprint, self._path)
            if now is not None and now == before and now != loaded:
                watches = self.config.server_settings.watch_config
                if not watches or await self._reload_quietly("the file has changed"):
                    loaded = now
                else:
                    await trio.sleep(self._retry_s)
            before = now

    async def obey_signals_forever(self) -> None:
        """Reload the file at each SIGHUP."""
        with trio.open_signal_receiver(signal.SIGHUP) as signals:
            async for _ in signals:
                self._refusal = ""
                await self._reload_quietly("SIGHUP")

    async def _reload_quietly(self, why: str) -> bool:
        """Return whether the file was applied; a refusal is logged unless its reason was logged before."""
        try:
            await self.reload(dry_run=False, why=why)
        except ApiError as error:
            if error.message != self._refusal:
                log.error("the configuration stays as it is: %s", error.message)
            self._refusal = error.message
            return False
        self._refusal = ""
        return True
