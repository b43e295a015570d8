"""SGLang inside the worker: its own `launch_server`, called on the engine's thread, with uvicorn taken out of it.

SGLang starts its processes, makes its FastAPI application and hands it to uvicorn, all in one function whose parts
change from release to release. So the function is left whole, and five things in its modules are replaced: `uvicorn`,
by what serves the application here; `requests`, by calls into the application, since SGLang warms itself up through
its own port; `kill_process_tree`, which would end the worker without a word; the health server of a follower; and
`signal`, since only the main thread may set handlers.
"""

# SGLang is not there where types are checked, so nothing about it is known to them.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import argparse
import asyncio
import contextlib
import functools
import importlib.util
import json
import logging
import os
import pathlib
import platform
import signal
import sys
import threading
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ichat
from ichat.engines import Application, EngineInfo, Progress, Serve
from ichat.engines.asgi import call_under_way
from ichat.engines.children import ProcessFamily, adopt_children, children, wait_for_end
from ichat.engines.flags import FlagOutcome
from ichat.engines.ray_check import check_ray
from ichat.engines.responses import bound_responses
from ichat.engines.sglang.adapter import SGLangAdapter
from ichat.engines.sglang.encoders import inspect_encoder
from ichat.engines.sglang.flags import TABLE
from ichat.engines.sglang.loopback_requests import LoopbackRequests
from ichat.engines.translation import translate
from ichat.engines.versions import check_version
from ichat.errors import EXIT_UNAVAILABLE, EXIT_USAGE, Exit
from ichat.protocol import Group, ModelCard
from ichat.security.redact import masked

OLDEST = (0, 5, 5)
NEWEST = (0, 5, 23)
"""The newest version that this was tested with, and the oldest."""
LOOK_S = 0.05
ABORT_POLL_S = "1"
"""How often SGLang itself looks whether the client of a request is still there, by default every 4 s."""
UNLOAD_S = 5.0
"""How long the schedulers may take to let go of what they hold."""

_OURS: Mapping[str, object] = {
    "tokenizer_worker_num": 1,
    "enable_http2": False,
    "enable_ssl_refresh": False,
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "ssl_ca_certs": None,
    "grpc_mode": False,
    "smg_grpc_mode": False,
    "grpc_port": None,
    "encoder_only": False,
    "fastapi_root_path": "",
}
"""Flags that concern SGLang's own HTTP server, which the worker replaces, with the only value that they may have."""


class _Died(Exception):
    """A part of SGLang wanted the whole process to end."""


class _Served(Exception):
    """A follower has done its work."""


class SGLang:
    """One model in SGLang's schedulers and tokenizer manager.

    Made in the main thread: SGLang's children report a failure by SIGQUIT, whose default is to dump core.
    """

    name = "sglang"

    def __init__(self) -> None:
        self.wire = SGLangAdapter(self._names)
        self._args: Any = None
        self._info: EngineInfo | None = None
        self._serve: Serve
        self._manager: Any = None
        self._family = ProcessFamily()
        self._dead: str | None = None
        self._has_begun = False
        self._warm = threading.Event()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, self._child_failed)

    def check(self) -> None:
        """Look for the package without importing it."""
        if importlib.util.find_spec("sglang") is None:
            raise Exit(
                EXIT_UNAVAILABLE,
                f"SGLang is not installed for {sys.executable}: run the worker with an interpreter that"
                " has it (PYTHON ichat.pyz worker …), or make one with `./build engine sglang`.",
            )

    def parse(self, argv: Sequence[str]) -> EngineInfo:
        """See `Engine.parse`."""
        os.environ.setdefault("SGLANG_REQUEST_STATE_WAIT_TIMEOUT", ABORT_POLL_S)
        try:
            import sglang
            from sglang.srt.server_args import ServerArgs
        except ImportError as error:
            raise Exit(EXIT_UNAVAILABLE, f"SGLang under {sys.executable} cannot be imported: {error}.") from error
        check_version("SGLang", sglang.__version__, OLDEST, NEWEST)
        adopt_children()
        parser = _Parser(prog="ichat.pyz worker --backend sglang")
        ServerArgs.add_cli_args(parser)
        steps = translate(argv, parser, TABLE)
        if not any("--enable-metrics" in step.passed for step in steps):
            steps.append(
                FlagOutcome([], ["--enable-metrics"], "its metrics are what the worker reports to the gateway")
            )
        self._remember_responses(steps, parser)
        words = _words_of(steps)
        given = None if "--config" in words else _read(words, parser)
        self._args = _record(words)
        encoder = inspect_encoder(self._args.model_path, self._args.revision, words)
        if encoder is not None and encoder.steps:
            steps += encoder.steps
            self._args = _record(_words_of(steps))
        self.wire.only_reranks = encoder is not None and encoder.is_cross_encoder
        self.wire.squashes = encoder is not None and encoder.wants_sigmoid
        self.wire.reranks = self.wire.only_reranks or not _resolved(self._args).get("is_embedding")
        _check(self._args, parser)
        if getattr(self._args, "disaggregation_mode", "null") != "null" and not self._args.skip_server_warmup:
            steps.append(
                FlagOutcome([], ["--skip-server-warmup"], "SGLang would warm up through a port that is not open yet")
            )
            self._args = _record(_words_of(steps))
        changed = _changed(given or self._args, _resolved(self._args), parser)
        self._info = _info(self._args, steps, changed, sglang.__version__)
        return self._info

    def _remember_responses(self, steps: list[FlagOutcome], parser: argparse.ArgumentParser) -> None:
        """Have SGLang keep responses, where it can and shall; releases without the flag always do."""
        words = {word.partition("=")[0] for step in steps for word in step.passed}
        flag = "--enable-response-store"
        is_known = any(flag in action.option_strings for action in parser._actions)
        if self.wire.settings.responses_max and is_known and not words & {flag, "--disaggregation-mode", "--config"}:
            steps.append(FlagOutcome([], [flag], "responses can be retrieved and continued (--responses-max)"))

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
            launch_server(self._args, launch_callback=self._warm.set)
        except _Served:
            pass
        except (ValueError, TypeError, AssertionError) as error:
            if self._has_begun or children() or getattr(self._args, "use_ray", False):
                raise
            raise _usage(str(error)) from error

    def _lead(self, app: Application, **_: object) -> None:
        """Serve the application on a loop of this thread, once it is warm."""
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve_when_warm(app))

    async def _serve_when_warm(self, app: Any) -> None:
        from sglang.srt.entrypoints import http_server

        self._has_begun = True
        requests = http_server.requests
        http_server.requests = inside = LoopbackRequests(app, asyncio.get_running_loop(), requests)
        self._family = ProcessFamily(children("sglang::"))
        threading.excepthook = self._thread_failed
        async with app.router.lifespan_context(app):
            manager = http_server._global_state.tokenizer_manager
            _abort_at_once(manager)
            self.wire.memory.watch(manager)
            settings = self.wire.settings
            self.wire.responses = bound_responses(app, settings.responses_max, settings.responses_bytes_max)
            manager.auto_create_handle_loop()
            while not self._warm.is_set():
                why = self.why_dead()
                if why is not None:
                    inside.give_up()  # the warm-up would be waited for
                    raise RuntimeError(why)
                await asyncio.sleep(LOOK_S)  # noqa: ASYNC110
            self._manager = manager
            self.wire.tell_routes(generates=manager.is_generation)
            await self._serve(app)
            if self._dead is None:
                self._unload()

    def _unload(self) -> None:
        """Have the schedulers let go of the device, where this version can tell them to."""
        manager = self._manager
        with contextlib.suppress(AttributeError, ImportError):
            manager._subprocess_watchdog.stop()
        with contextlib.suppress(AttributeError, ImportError):
            from sglang.srt.managers.io_struct import ShutdownReq

            manager._dispatch_to_scheduler(ShutdownReq())
            wait_for_end([child for child in self._family if "detokenizer" not in child.title], UNLOAD_S)

    def _follow(self, *_: object) -> None:
        """Work for the leader of the group until the end; this stands where SGLang would answer health checks."""
        self._family = ProcessFamily(children())
        asyncio.run(self._serve(None))  # type: ignore[arg-type]
        raise _Served

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        """Note what ended a thread of SGLang's; before the engine is warm it was the warm-up, for which all wait."""
        threading.__excepthook__(failure)
        if not self._warm.is_set():
            self._dead = self._dead or f"its warm-up failed: {failure.exc_value!r}"

    def _child_failed(self, *_: object) -> None:
        self._dead = self._dead or self._family.first_dead() or "one of its processes failed; the log has the cause"

    def _spare_this_process(self) -> None:
        """Where SGLang would kill the whole process tree, let the worker end in order instead."""
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

    def why_dead(self) -> str | None:
        """See `Engine.why_dead`."""
        return self._dead or self._family.first_dead()

    def progress(self) -> Progress:
        """Read SGLang's own metrics, which its schedulers leave in files."""
        if self._manager is None:
            return Progress()
        found = _metrics()
        running, waiting = found.get("sglang:num_running_reqs"), found.get("sglang:num_queue_reqs")
        steps, tokens = found.get("sglang:realtime_tokens_total"), found.get("sglang:generation_tokens_total")
        return Progress(
            running=None if running is None else int(sum(running)),
            waiting=None if waiting is None else int(sum(waiting)),
            kv_use=max(found["sglang:token_usage"]) if "sglang:token_usage" in found else None,
            steps=None if steps is None else int(sum(steps)),
            tokens_out=None if tokens is None else int(sum(tokens)),
        )

    def models(self) -> Sequence[ModelCard]:
        """Give the model by each of its names, and its adapters."""
        if self._info is None:
            return []
        path, names = self._info.model_path, self._info.model_names
        longest = self._manager.model_config.context_len if self._manager is not None else None
        return [
            *(ModelCard(name, path, None, longest) for name in names),
            *(ModelCard(name, root, names[0]) for name, root in self._adapters().items()),
        ]

    def _adapters(self) -> dict[str, str]:
        """Give the adapters' names, each with its path; those that were put aside are loaded again when asked for."""
        registry = getattr(self._manager, "lora_registry", None)
        loaded = registry.get_all_adapters().values() if registry is not None else ()
        put_aside = (getattr(self._manager, "lora_ref_cache", None) or {}).values()
        return {adapter.lora_name: adapter.lora_path for adapter in [*put_aside, *loaded]}

    def _names(self) -> tuple[list[str], list[str]]:
        """Give the names of the model and those of its adapters. Asked for with every request."""
        return (self._info.model_names if self._info else []), list(self._adapters())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise _usage(message)


class _Config:
    """What uvicorn.Config is asked for."""

    def __init__(self, app: Application, **_: object) -> None:
        self.app = app


class _Server:
    """What uvicorn.Server is asked for."""

    should_exit = False

    def __init__(self, run: Callable[[Application], None], config: _Config) -> None:
        self._config = config
        self._run = run

    def run(self) -> None:
        """Serve until the end."""
        self._run(self._config.app)


def _abort_at_once(manager: Any) -> None:
    """Have SGLang abort what a client has left at once, all of it, and nothing else.

    By itself it looks after plain requests every `ABORT_POLL_S`, forgets streams (0.5.15 to 0.5.19), and aborts each
    request whose id begins with the one that is left. So whatever it waits for is noted with its call, and an id with
    which a request of another call begins is not aborted.
    """
    wait, abort = manager._wait_one_response, manager.abort_request

    def wait_noted(asked: Any, *more: Any, **named: Any) -> Any:
        call = call_under_way()
        if call is not None:
            call.add_part(asked.rid, functools.partial(abort_alone, asked.rid, call.parts))
        return wait(asked, *more, **named)

    def abort_alone(rid: str, mine: Collection[str]) -> None:
        if not any(other.startswith(rid) and other != rid and other not in mine for other in manager.rid_to_state):
            abort(rid)

    def abort_request(rid: str = "", abort_all: bool = False) -> None:  # noqa: FBT001, FBT002
        call = call_under_way()
        if abort_all:
            abort(abort_all=True)
        else:
            abort_alone(rid, () if call is None else call.parts)

    manager._wait_one_response = wait_noted
    manager.abort_request = abort_request


def _keep(*_: object) -> None:
    """Leave a signal's handler as it is: only the main thread may set one, and it has."""


def _read(words: list[str], parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the arguments as they stand. Raises Exit 64; Exit 0 after `--help`."""
    logging.disable()  # the same warnings come again when SGLang reads them
    try:
        args = parser.parse_args(words)
    except SystemExit as exit_:
        raise Exit(int(exit_.code or 0), "") from exit_
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        raise _usage(str(error)) from error
    finally:
        logging.disable(logging.NOTSET)
    _check_given(args, parser)
    return args


def _record(words: list[str]) -> Any:
    """Make SGLang's record of its arguments, as it does itself. Raises Exit 64; Exit 0 after `--help`."""
    from sglang.srt.server_args import prepare_server_args

    with contextlib.suppress(ImportError):
        from sglang.srt.plugins import load_plugins

        load_plugins()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        record = prepare_server_args(words)
        try:
            if hasattr(record, "resolve_once"):
                record.resolve_once()
        except (RuntimeError, OSError):  # a GPU or a hub that is missing is said again by the load, of a new record
            record = prepare_server_args(words)
    except SystemExit as exit_:
        raise Exit(int(exit_.code or 0), "") from exit_
    except (argparse.ArgumentError, ValueError, TypeError, AssertionError, OSError) as error:
        raise _usage(str(error) or type(error).__name__) from error
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return record


def _check(args: Any, parser: argparse.ArgumentParser) -> None:
    """Find before the load what SGLang would find after it. Raises Exit 64, Exit 69."""
    _check_given(args, parser)
    if getattr(args, "use_ray", False):
        check_ray(args.tp_size * args.pp_size)


def _check_given(args: Any, parser: argparse.ArgumentParser) -> None:
    path = pathlib.Path(args.model_path).expanduser()
    if args.model_path.startswith(("/", "./", "../", "~")) and not path.exists():
        raise _usage(f"the model {args.model_path} does not exist")
    flags = {action.dest for action in parser._actions}
    for name, allowed in _OURS.items():
        if name in flags and getattr(args, name, allowed) != allowed:
            raise _usage(
                f"--{name.replace('_', '-')} concerns SGLang's own HTTP server, which an iChat worker replaces"
            )


def _usage(message: str) -> Exit:
    text = " ".join(message.split())
    return Exit(EXIT_USAGE, f"SGLang refuses these arguments: {text}")


def _metrics() -> dict[str, list[float]]:
    """Read the samples that SGLang's processes report, by their names."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return {}
    found: dict[str, list[float]] = {}
    for metric in MultiProcessCollector(CollectorRegistry()).collect():
        for sample in metric.samples:
            found.setdefault(sample.name, []).append(sample.value)
    return found


def _resolved(args: Any) -> Mapping[str, Any]:
    return args.resolved_dict() if hasattr(args, "resolved_dict") else vars(args)


def _words_of(steps: Sequence[FlagOutcome]) -> list[str]:
    """Give the command line that these steps make; a file of arguments is looked for by its flag as a word."""
    words: list[str] = []
    for word in (word for step in steps for word in step.passed):
        words += word.split("=", 1) if word.startswith("--config=") else [word]
    return words


def _changed(given: object, resolved: Mapping[str, Any], parser: argparse.ArgumentParser) -> list[str]:
    """Return the names of arguments that were given, or that SGLang has made something else of than its own default.

    Where that is None or `auto`, SGLang chooses, and by default takes what it has chosen.
    """
    defaults = {action.dest: action.default for action in parser._actions}
    return [
        name
        for name, default in defaults.items()
        if name in resolved and name[0] != "_"
        if getattr(given, name, default) != default or (default not in (None, "auto") and resolved[name] != default)
    ]


def _info(args: Any, steps: Sequence[FlagOutcome], changed: Sequence[str], version: str) -> EngineInfo:
    import torch

    shown = masked({name: value for name, value in _resolved(args).items() if name[0] != "_"})
    names = [word for step in steps if step.given[:1] == ["--served-model-name"] for word in step.given[1:]]
    group = Group(f"{args.dist_init_addr} {args.model_path}", args.node_rank, args.nnodes) if args.nnodes > 1 else None
    return EngineInfo(
        model_path=args.model_path,
        model_names=names or [args.served_model_name or args.model_path],
        args=json.loads(json.dumps(shown, default=str)),
        versions={
            "ichat": ichat.__version__,
            "sglang": version,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        changed_args=changed,
        steps=steps,
        group=group,
    )
