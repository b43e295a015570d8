"""From nothing to a conversation: `run` uses or starts a gateway here, launches the model, and chats."""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import sys
import urllib.parse
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING

from ichat.cli.chat import Chat, add_answer_flags
from ichat.cli.client import EXIT_REFUSED, Api, JsonReply, Unreachable, open_api, pause, worker_path
from ichat.cli.json_values import Json, object_of, objects_of
from ichat.cli.launch import LAUNCH_S, add_gpu_flag, path_and_name, wait_until_ready
from ichat.cli.screen import Screen, Spinner, note, one_line
from ichat.cli.stop import in_background
from ichat.cli.views import failure_of, names_of
from ichat.config.command_line import guess
from ichat.config.interpreters import find_interpreter
from ichat.config.own_secret import GATEWAY, private, usual_directory
from ichat.errors import EXIT_UNAVAILABLE, EXIT_USAGE, Exit
from ichat.program import own_command

if TYPE_CHECKING:
    import subprocess
    from typing import TextIO

    from ichat.config.schema import Config

ENGINES = ("vllm", "sglang")
"""Searched in this order if no engine is named."""
POLL_S = 0.2
START_S = 120.0
"""The longest wait for a started gateway's first answer, in seconds: the first start of a pyz unpacks it."""
STOP_S = 60.0
"""The longest wait for the gateway to end its workers and itself, in seconds."""
TAKEN_BACK_S = 60.0
"""The longest wait for the end of a worker that was launched in vain, in seconds."""
_PR_SET_PDEATHSIG = 1


def add_run_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags of `run`."""
    usage.epilog = (
        "If no gateway runs, a gateway is started: by ichat.toml if it is here, else empty on 127.0.0.1:4000. It ends"
        " with this command unless --keep is given. The words after -- are the engine's flags: -- --max-model-len 8192."
    )
    usage.add_argument("model", metavar="MODEL", help="a model of the gateway's, a directory, or a name on the hub")
    add_answer_flags(usage)
    usage.add_argument("--backend", "-be", metavar="NAME", help="the engine; else vllm or sglang")
    usage.add_argument("--python", metavar="PATH", help="the interpreter that has the engine; else looked for")
    add_gpu_flag(usage)
    usage.add_argument("--keep", action="store_true", help="let the gateway that is started go on afterwards")


def split_engine_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Return our words, and the engine's flags behind ``--``."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def run_model(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Talk to a model, once it is served. Raises Exit if that fails; a gateway or worker started for it ends then."""
    with contextlib.ExitStack() as stack:
        try:
            api.get("/v1/models")
        except Unreachable as error:
            if not _may_start(api, args, error):
                raise
            _check_model(api, args)
            api, is_ours = stack.enter_context(_started_gateway(api, args)), not args.keep
        else:
            is_ours = False
        args.model, launched = _serve(api, args)
        if launched and is_ours:
            stack.callback(_take_back, api, launched)  # or the next gateway here would start it again
        elif launched:
            place = f" -c {args.config}" if args.config else f" -g {args.gateway}" if args.gateway else ""
            note(f"Worker {launched} goes on when this ends; `ichat.pyz stop {launched}{place}` ends it.", "dim")
        chat = open_api(args, ("ICHAT_API_KEY", "ICHAT_ADMIN_KEY"))
        return Chat(chat, screen, args).run()


def _may_start(api: Api, args: argparse.Namespace, error: Unreachable) -> bool:
    """Return whether the address of a gateway that would be started here is free."""
    is_free = isinstance(error.__cause__, ConnectionRefusedError) and api.place.is_here
    return is_free and bool(args.config or api.place.url in (GATEWAY, GATEWAY.replace("127.0.0.1", "localhost")))


def _check_model(api: Api, args: argparse.Namespace) -> None:
    """Raise Exit 64 for a model that the gateway to be started would not know, and that is neither here nor on the hub.

    The hub is asked only if it must be; a silent hub refuses nothing.
    """
    if os.path.exists(args.model) or args.backend not in (None, *ENGINES):
        return
    import trio

    from ichat.config import load as configuration
    from ichat.config.schema import Config, ManagedWorkerConfig
    from ichat.preflight.facts import Facts, is_path
    from ichat.preflight.hub import ask_hub, problems_of_hub, read_hub
    from ichat.preflight.obstacles import problems_of_model
    from ichat.supervisor.launch import environment_of

    config = configuration.load(pathlib.Path(args.config)) if args.config else Config()
    if _would_know(api, config, args.model):
        return
    if is_path(args.model):
        missing = Facts(model="missing", directory=os.getcwd())
        raise Exit(EXIT_USAGE, problems_of_model(args.model, missing, "MODEL")[0])
    backend, wanted = args.backend or ENGINES[0], args.engine
    worker = ManagedWorkerConfig(model_name="", model_path=args.model, backend=backend, backend_args=wanted)
    environment = environment_of(config, worker, "")
    hub = read_hub(worker, environment)
    answered = None if hub is None else trio.run(ask_hub, hub, environment)
    if answered is not None and answered.answer == "absent":
        raise Exit(EXIT_USAGE, problems_of_hub(answered)[0])


def _would_know(api: Api, config: "Config", model: str) -> bool:
    """Return whether a gateway that is started now would have a model of this name, as far as is known here."""
    import fnmatch

    from ichat.supervisor.state import WORKERS_FILE

    served = (*config.managed_workers, *config.registered_servers, *config.external_routes)
    names = [one.model_name for one in served] + [one.name for one in config.models]
    saved = pathlib.Path(api.place.state_directory or usual_directory(config.server_settings.port), WORKERS_FILE)
    with contextlib.suppress(OSError, ValueError):
        if json.dumps(model) in saved.read_text(encoding="utf-8"):  # the next gateway starts its worker again
            return True
    return any(fnmatch.fnmatchcase(model, name) for name in names)


@contextlib.contextmanager
def _started_gateway(api: Api, args: argparse.Namespace) -> Generator[Api]:
    """Start a gateway, and end it with its workers at the end of the context, unless it is to go on."""
    import ctypes
    import subprocess

    port = urllib.parse.urlsplit(api.place.url).port
    path = usual_directory(port or 0) + ".log"
    command = [*own_command(sys.executable), "gateway", *(["--config", args.config] if args.config else [])]
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def follow_parent() -> None:
        if not args.keep:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(EXIT_UNAVAILABLE)

    with _own_file(path) as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the conversation
            preexec_fn=follow_parent,  # noqa: PLW1509 no other thread runs yet
        )
    is_up = False
    try:
        note(f"Starting a gateway at {api.place.url}; its log is {path}.", "dim")
        api = _wait_until_up(process, path, args)
        is_up = True
        yield api
    finally:
        if args.keep and is_up:
            note(f"The gateway goes on; `kill {process.pid}` ends it.", "dim")
        else:
            _end(process)


def _own_file(path: str) -> "TextIO":
    """Open a file of this user alone, and empty it. Raises Exit 69 if that fails."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return open(path, "w", encoding="utf-8", opener=private)
    except OSError as error:
        why = error.strerror or error
        raise Exit(
            EXIT_UNAVAILABLE, f"The gateway's log {path} cannot be written: {why}; XDG_STATE_HOME names another place."
        ) from error


def _wait_until_up(process: "subprocess.Popen[bytes]", path: str, args: argparse.Namespace) -> Api:
    """Return the API of a gateway that was started, once it answers. Raises Exit with its last words if it ends."""
    with Spinner() as progress:
        while process.poll() is None and progress.elapsed_s < START_S:
            progress.show("the gateway is starting")
            try:
                open_api(args).get("/v1/models")
            except Unreachable:
                pause(POLL_S)
            else:
                return open_api(args)  # the gateway's secret may not have been there before
    with open(path, encoding="utf-8", errors="replace") as log:
        said = [one_line(line) for line in log if line.strip()][-3:]
    raise Exit(process.returncode or EXIT_UNAVAILABLE, "\n".join(["The gateway did not start:", *said]))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a gateway and its workers; Ctrl-C hurries it."""
    with Spinner() as progress, contextlib.suppress(ProcessLookupError):
        process.terminate()
        while process.poll() is None and progress.elapsed_s < STOP_S:
            progress.show("the gateway is ending")
            try:
                pause(POLL_S)
            except KeyboardInterrupt:
                process.terminate()
        process.kill()
        process.wait()


def _serve(api: Api, args: argparse.Namespace) -> tuple[str, str]:
    """Return the name of the requested model, once it is served, and the id of a worker launched for it.

    The id is "" if nothing was launched. Raises Exit.
    """
    names = [str(one.get("id")) for one in objects_of(api.get("/v1/models").value.get("data"))]
    if args.model in names:
        return args.model, ""
    path, name = path_and_name(api, args.model)
    workers = objects_of(api.call("GET", "/v1/admin/workers", params={"full": "1"}).value.get("data"))
    worker = _worker_of(workers, path, args.model)
    if worker is None:
        _check_path(api, args.model, [*names, *(one for each in workers for one in names_of(each))])
        return name, _launch(api, args, path, name)
    worker_id = str(worker.get("worker_id"))
    if worker.get("state") in ("failed", "broken", "stopped"):
        sentence = f"Worker {worker_id} of this model {failure_of(worker)}; `ichat.pyz stop {worker_id}` removes it."
        raise Exit(EXIT_REFUSED, sentence)
    ready = wait_until_ready(api, worker_id).value
    return next(iter(names_of(ready)), name), ""


def _worker_of(workers: Iterable[Json], path: str, model: str) -> Json | None:
    """Return the worker that serves, or will serve, a model requested by its name or its path."""
    found = [one for one in workers if model in names_of(one) or one.get("model_path") == path]
    return min(found, key=lambda one: one.get("state") != "ready", default=None)


def _check_path(api: Api, model: str, names: list[str]) -> None:
    """Raise Exit 64 for a text that is neither a model here, nor a path, nor like a name on the model hub."""
    if not api.place.is_here or os.path.exists(model):
        return
    if model[:1] in "/.~":
        raise Exit(EXIT_USAGE, f"ichat.pyz run: there is no {model} on this machine.")
    if model.count("/") != 1:
        raise Exit(
            EXIT_USAGE,
            f"ichat.pyz run: {one_line(model)} is no model of this gateway{guess(model, names)} and no directory;"
            " a name on the model hub is like Qwen/Qwen3-0.6B.",
        )


def _launch(api: Api, args: argparse.Namespace, path: str, name: str) -> str:
    """Launch a worker for a model, wait until it is ready, and return its id. End a worker that does not get ready.

    Raises Exit if it cannot be launched, or fails.
    """
    body: Json = {**args.engine, "model_name": name, "model_path": path, **_engine(api, args)}
    given = {key: getattr(args, key) for key in ("gpus", "gpu_memory_gib", "gpu_ids")}
    body |= {key: value for key, value in given.items() if value is not None}
    launched = in_background(api, lambda: api.call("POST", "/v1/admin/workers/launch", body=body, answer_s=LAUNCH_S))
    worker_id = ""
    try:
        worker_id = _answer(launched, f"{name}: examining the machine")
        wait_until_ready(api, worker_id, restarts=False)
    except (KeyboardInterrupt, Exit):
        with contextlib.suppress(Exit):
            _take_back(api, worker_id or _answer(launched, f"{name}: removing it again"))
        raise
    return worker_id


def _answer(launched: Callable[[], JsonReply | None], words: str) -> str:
    """Return the id of a worker that is being launched, once the gateway answers. Raises its refusal."""
    with Spinner() as progress:
        progress.show(words)
        while (answer := launched()) is None:
            pass
        return str(answer.value.get("worker_id"))


def _take_back(api: Api, worker_id: str) -> None:
    """End a worker that was launched here."""
    path = worker_path(worker_id)
    ended = in_background(api, lambda: api.call("DELETE", path, params={"drain_s": "0"}, answer_s=TAKEN_BACK_S))
    with Spinner() as progress, contextlib.suppress(Exit):
        progress.show(f"{worker_id}: ending it")
        while ended() is None and progress.elapsed_s < TAKEN_BACK_S:
            pass


def _engine(api: Api, args: argparse.Namespace) -> Json:
    """Return the engine to launch with: the named engine, else the first that is found. Raises Exit 69."""
    if args.python is not None:
        return {"backend": args.backend or ENGINES[0], "python": os.path.abspath(args.python)}
    listed = objects_of(object_of(api.get("/v1/admin/engines").value).get("engines"))
    known = {str(one.get("name")): one for one in listed}
    if args.backend is not None and args.backend not in ENGINES:
        return {"backend": args.backend}
    wanted = [args.backend] if args.backend else ENGINES
    for backend in wanted:
        if known.get(backend, {}).get("version"):
            return {"backend": backend}
    for backend in wanted if api.place.is_here else ():
        if python := find_interpreter(backend):
            return {"backend": backend, "python": python}
    raise Exit(
        EXIT_UNAVAILABLE,
        f"No {' or '.join(wanted)} was found: `./build engine {wanted[0]}` makes an environment with it, or"
        " --python names an interpreter that has it.",
    )
