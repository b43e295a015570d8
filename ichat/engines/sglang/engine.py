"""SGLang inside the worker: its own `launch_server`, called on the engine's thread, without uvicorn.

SGLang starts its processes, makes its FastAPI application and passes it to uvicorn, all in a single function that
changes from release to release. So the function stays whole, and five things in its modules are replaced. The server
of the application here replaces `uvicorn`. Calls of the application replace `requests`: SGLang warms itself up through
its own port. `kill_process_tree` is replaced because it kills the worker, and `signal` because only the main thread
may set handlers. The fifth is the health server of a follower.
"""

# SGLang is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import argparse
import asyncio
import contextlib
import functools
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ichat.config.package_data import read_toml
from ichat.engines.children import ProcessFamily, adopt_children, children, wait_for_end
from ichat.engines.engine import Application, EngineInfo, Progress, Serve, cards_of, progress_of
from ichat.engines.engine_arguments import check_installed, unusable
from ichat.engines.flag_list import EngineFlag
from ichat.engines.flags import FlagOutcome
from ichat.engines.kept_flags import keep_own
from ichat.engines.kv_events import WHY, KvEvents, wanted_events
from ichat.engines.load_phases import load_lines
from ichat.engines.responses import bound_responses
from ichat.engines.sglang.adapter import SGLangAdapter
from ichat.engines.sglang.arguments import (
    Parser,
    changed_args,
    check_args,
    engine_info,
    list_flags,
    make_server_args,
    marked_flags,
    obstacle_to_events,
    read_args,
    resolved_args,
    usage_error,
    why_too_dear,
    words_of,
)
from ichat.engines.sglang.calls import ABORT_POLL_S, abort_at_once, note_usage, tag_requests
from ichat.engines.sglang.encoders import inspect_encoder
from ichat.engines.sglang.flags import table
from ichat.engines.sglang.loopback_requests import LoopbackRequests
from ichat.engines.sglang.memory import read_memory
from ichat.engines.sglang.scheduler_process import launch_options
from ichat.engines.translation import translate
from ichat.engines.versions import check_version
from ichat.protocol.engine_memory import EngineMemory
from ichat.protocol.messages import ModelCard

OLDEST = (0, 5, 5)
NEWEST = (0, 5, 23)
"""The oldest and the newest version that this was tested with."""
WARM_UP_POLL_S = 0.05
UNLOAD_S = 5.0
"""The limit for the schedulers to release their resources."""


_METRICS: Mapping[str, str] = read_toml("ichat.engines.sglang", "names.toml")["figures"]
"""The metric that has each figure of `Progress`."""


class _Died(Exception):
    """A part of SGLang wanted to end the whole process."""


class _Served(Exception):
    """A follower has ended its work."""


class SGLang:
    """A model in SGLang's schedulers and tokenizer manager.

    Created in the main thread: SGLang's children report a failure by SIGQUIT, and its default is a core dump.
    """

    name = "sglang"
    load_lines = load_lines("SGLang")

    def __init__(self) -> None:
        self.adapter = SGLangAdapter(self._names)
        self._args: Any = None
        self._info: EngineInfo | None = None
        self._serve: Serve
        self._manager: Any = None
        self._family = ProcessFamily()
        self._dead: str | None = None
        self._has_begun = False
        self._events: KvEvents | None = None
        self._memory: EngineMemory | None = None
        self._warm = threading.Event()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, self._child_failed)

    def check(self) -> None:
        """Look for the package without importing it."""
        check_installed("SGLang", "sglang")

    def parse(self, argv: Sequence[str]) -> EngineInfo:
        """See `Engine.parse`."""
        os.environ.setdefault("SGLANG_REQUEST_STATE_WAIT_TIMEOUT", ABORT_POLL_S)
        try:
            import sglang
            from sglang.srt.server_args import ServerArgs
        except ImportError as error:
            raise unusable("SGLang", error) from error
        check_version("SGLang", sglang.__version__, OLDEST, NEWEST)
        adopt_children()
        parser = Parser(prog="ichat.pyz worker --backend sglang")
        ServerArgs.add_cli_args(parser)
        keep_own("sglang", lambda: marked_flags(parser))
        outcomes = translate(argv, parser, table())
        if not any("--enable-metrics" in outcome.passed for outcome in outcomes):
            outcomes.append(FlagOutcome([], ["--enable-metrics"], "the worker reports its metrics to the gateway"))
        self._remember_responses(outcomes, parser)
        words = words_of(outcomes)
        given = None if "--config" in words else read_args(words, parser)
        outcomes += self.adapter.guard_media(given)
        self._args = make_server_args(words_of(outcomes))
        encoder = inspect_encoder(self._args.model_path, self._args.revision, words)
        if encoder is not None and encoder.flag_outcomes:
            outcomes += encoder.flag_outcomes
            self._args = make_server_args(words_of(outcomes))
        self.adapter.only_reranks = encoder is not None and encoder.is_cross_encoder
        self.adapter.apply_sigmoid = encoder is not None and encoder.wants_sigmoid
        self.adapter.can_rerank = self.adapter.only_reranks or not resolved_args(self._args).get("is_embedding")
        check_args(self._args, parser)
        if getattr(self._args, "disaggregation_mode", "null") != "null" and not self._args.skip_server_warmup:
            outcomes.append(
                FlagOutcome([], ["--skip-server-warmup"], "SGLang would warm up through a port that is not open yet")
            )
            self._args = make_server_args(words_of(outcomes))
        self._listen(outcomes)
        changed = changed_args(given or self._args, resolved_args(self._args), parser)
        self._info = engine_info(self._args, outcomes, changed, sglang.__version__, self._events)
        return self._info

    def _listen(self, outcomes: list[FlagOutcome]) -> None:
        """Let SGLang publish events about its cache, if they are wanted and possible."""
        args = resolved_args(self._args)
        self._events = wanted_events(self.adapter.settings, obstacle_to_events(args), why_too_dear(args))
        if self._events is not None:
            outcomes.append(FlagOutcome([], self._events.flag(), WHY))
            self._args = make_server_args(words_of(outcomes))

    def _remember_responses(self, outcomes: list[FlagOutcome], parser: argparse.ArgumentParser) -> None:
        """Let SGLang store responses, if wanted and possible; releases without the flag always do."""
        words = {word.partition("=")[0] for outcome in outcomes for word in outcome.passed}
        flag = "--enable-response-store"
        is_known = any(flag in action.option_strings for action in parser._actions)
        if self.adapter.settings.responses_max and is_known and not words & {flag, "--disaggregation-mode", "--config"}:
            outcomes.append(FlagOutcome([], [flag], "responses can be retrieved and continued (--responses-max)"))

    def flags(self) -> Sequence[EngineFlag]:
        """See `Describer.flags`."""
        return list_flags()

    def run(self, *, phase: Callable[[str], None], serve: Serve) -> None:
        """See `Engine.run`."""
        from sglang.srt.entrypoints import engine, http_server

        self._serve = serve
        http_server.uvicorn = types.SimpleNamespace(
            Config=_Config, Server=functools.partial(_Server, self._lead), run=self._lead
        )
        engine.signal = types.SimpleNamespace(**{**vars(signal), "signal": _keep})
        engine.launch_dummy_health_check_server = self._follow
        self._spare_this_process()
        if getattr(self._args, "use_ray", False):
            from sglang.srt.ray.http_server import launch_server
        else:
            launch_server = http_server.launch_server
        try:
            launch_server(self._args, launch_callback=self._warm.set, **launch_options(launch_server))
        except _Served:
            pass
        except (ValueError, TypeError, AssertionError) as error:
            if self._has_begun or children() or getattr(self._args, "use_ray", False):
                raise
            raise usage_error(str(error)) from error

    def _lead(self, app: Application, **_: object) -> None:
        """Serve the application on a loop of this thread, once it is warmed up."""
        import uvloop

        uvloop.run(self._serve_when_warm(app))

    async def _serve_when_warm(self, app: Any) -> None:
        from sglang.srt.entrypoints import http_server

        self._has_begun = True
        requests = http_server.requests
        http_server.requests = inside = LoopbackRequests(app, asyncio.get_running_loop(), requests)
        self._family = ProcessFamily(children("sglang::"))
        threading.excepthook = self._thread_failed
        async with app.router.lifespan_context(app):
            manager = http_server._global_state.tokenizer_manager
            abort_at_once(manager)
            self.adapter.reports_usage = note_usage(manager)
            self.adapter.memory.watch(manager)
            bound_responses(app, self.adapter)
            manager.auto_create_handle_loop()
            while not self._warm.is_set():
                why = self.why_dead()
                if why is not None:
                    inside.close()  # otherwise the thread of the warm-up would be waited for
                    raise RuntimeError(why)
                await asyncio.sleep(WARM_UP_POLL_S)  # noqa: ASYNC110
            self._memory = await read_memory(manager)
            self._manager = manager
            self.adapter.set_routes(generates=manager.is_generation)
            if self._events is not None:
                tag_requests(manager, self._events)
                self._events.open()
            await self._serve(app)
            if self._events is not None:
                self._events.close()
            if self._dead is None:
                self._unload()

    def _unload(self) -> None:
        """Let the schedulers release the device, if this version can."""
        manager = self._manager
        with contextlib.suppress(AttributeError, ImportError):
            manager._subprocess_watchdog.stop()
        with contextlib.suppress(AttributeError, ImportError):
            from sglang.srt.managers.io_struct import ShutdownReq

            manager._dispatch_to_scheduler(ShutdownReq())
            wait_for_end([child for child in self._family if "detokenizer" not in child.title], UNLOAD_S)

    def _follow(self, *_: object) -> None:
        """Work for the leader of the group until the end; replaces SGLang's server for health checks."""
        self._family = ProcessFamily(children())
        asyncio.run(self._serve(None))  # type: ignore[arg-type]
        raise _Served

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        """Called when a thread of SGLang fails; before the engine is warm, that is the warm-up."""
        threading.__excepthook__(failure)
        if not self._warm.is_set():
            self._dead = self._dead or f"its warm-up failed: {failure.exc_value!r}"

    def _child_failed(self, *_: object) -> None:
        self._dead = self._dead or self._family.first_dead() or "one of its processes failed; the log has the cause"

    def _spare_this_process(self) -> None:
        """Let the worker shut down in order when SGLang would kill the whole process tree."""
        from sglang.srt import utils

        kill = utils.kill_process_tree

        def spare(pid: int | None, include_parent: bool = True, *args: Any, **more: Any) -> None:  # noqa: FBT001, FBT002
            if not include_parent or pid != os.getpid():
                kill(pid, include_parent, *args, **more)
                return
            self._dead = self._dead or "a part of it could not go on; the log has the cause"
            raise _Died(self._dead)

        for name, module in list(sys.modules.items()):
            if name.startswith("sglang.") and getattr(module, "kill_process_tree", None) is kill:
                module.kill_process_tree = spare  # type: ignore[attr-defined]

    async def sleep(self) -> None:
        """See `Sleeper.sleep`. SGLang releases its memory only when its scheduler is idle; see `Memory`."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput())

    async def wake(self) -> None:
        """See `Sleeper.wake`."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput())

    def why_dead(self) -> str | None:
        """See `Engine.why_dead`."""
        return self._dead or self._family.first_dead()

    def progress(self) -> Progress:
        """Return SGLang's own metrics, which its schedulers write into files."""
        if self._manager is None:
            return Progress()
        return progress_of(_metrics(), _METRICS)

    def memory(self) -> EngineMemory | None:
        """See `Measured.memory`."""
        return self._memory

    def models(self) -> Sequence[ModelCard]:
        """Return the model under each of its names, and its adapters."""
        if self._info is None:
            return []
        longest = self._manager.model_config.context_len if self._manager is not None else None
        return cards_of(self._info, longest, self._adapters())

    def _adapters(self) -> dict[str, str]:
        """Return the adapters' names and paths; unloaded adapters are loaded again when they are requested."""
        registry = getattr(self._manager, "lora_registry", None)
        loaded = registry.get_all_adapters().values() if registry is not None else ()
        put_aside = (getattr(self._manager, "lora_ref_cache", None) or {}).values()
        return {adapter.lora_name: adapter.lora_path for adapter in [*put_aside, *loaded]}

    def _names(self) -> tuple[list[str], list[str]]:
        """Return the names of the model and those of its adapters. Called for every request."""
        return (self._info.model_names if self._info else []), list(self._adapters())


class _Config:
    """Replaces `uvicorn.Config`."""

    def __init__(self, app: Application, **_: object) -> None:
        self.app = app


class _Server:
    """Replaces `uvicorn.Server`."""

    should_exit = False

    def __init__(self, run: Callable[[Application], None], config: _Config) -> None:
        self._config = config
        self._run = run

    def run(self) -> None:
        """Serve until the end."""
        self._run(self._config.app)


def _keep(*_: object) -> None:
    """Replaces `signal.signal`: only the main thread may set a handler, and it has done so."""


def _metrics() -> Iterable[Any]:
    """Return the metrics that SGLang's processes report."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    return MultiProcessCollector(CollectorRegistry()).collect() if os.environ.get("PROMETHEUS_MULTIPROC_DIR") else ()
