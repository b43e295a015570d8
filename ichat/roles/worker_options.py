"""The worker's command line: its own flags; everything else is the engine's."""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from ichat import errors
from ichat.config.checks import are_media_domains
from ichat.config.command_line import CommandLineParser
from ichat.config.schema import EngineValue, Limits, ManagedWorkerConfig, Timeouts
from ichat.engines.adapter import AdapterSettings
from ichat.engines.flag_check import engine_name, refusals_of
from ichat.engines.flags import CommandLine, refusal_of_variable, split_flags
from ichat.engines.kept_flags import Interpreter, read_kept
from ichat.engines.reasoning import FIELDS
from ichat.engines.translation import refusal_of
from ichat.errors import EXIT_USAGE, Exit
from ichat.preflight.facts import ENGINES, Facts, read_model
from ichat.preflight.obstacles import problems_of_model
from ichat.protocol.messages import parse_heartbeat
from ichat.protocol.orders import are_ports
from ichat.roles.heartbeat_sender import is_address

_MODEL = ("--model", "--model-path")
_OTHER = ("--config", "-h", "--help")
"""The engine's flags that may say the model, or that want none."""
PREFIX_REPORTS = ("auto", "true", "false")
RENAMED = {"--gateway": "--gateway-address"}
"""Old names of flags: as unknown flags they would be passed to the engine."""


def _port(word: str) -> int | None:
    if word == "none":
        return None
    if not word.isdecimal() or int(word) > 65535:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, or none, not {word!r}")
    return int(word)


def _truth(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, not {word!r}")
    return word.lower() == "true"


_LIMITS, _TIMEOUTS, _ADAPTER = Limits(), Timeouts(), AdapterSettings()
_BY_TYPE: Mapping[Any, Mapping[str, Any]] = {
    int: {"type": int, "metavar": "N"},
    float: {"type": float, "metavar": "S"},
    bool: {"action": "store_true"},
}
"""What argparse needs to know of flags of these types."""


def _flag(default: Any, meaning: str, *others: str, **how: Any) -> Any:
    """Declare a flag by its default, its help and its other names; `how` is for argparse, in place of `_BY_TYPE`."""
    return attrs.field(default=default, metadata={"others": others, "how": {"help": meaning, **how}})


@attrs.frozen
class Options:
    """The worker's own flags and their values: `worker_id` is that of `--worker-id`."""

    backend: str = _flag("vllm", "the engine: vllm, sglang or another (vllm)", "-be", metavar="NAME")
    gateway_address: str | None = _flag(
        None, "register with this gateway, for example http://gw:4000; from another machine with ICHAT_JOIN_TOKEN set",
        "-ga", metavar="URL",
    )  # fmt: skip
    served_model_name: list[str] = _flag(
        (), "the names that requests use; the model's path otherwise", "--model-name", "-n", nargs="+", metavar="NAME"
    )
    heartbeat_interval: float = _flag(30.0, "seconds between heartbeats (30)", "--hi")
    worker_id: str = _flag("", "made from host and process if it is not given", metavar="ID")
    host: str | None = _flag(
        None, "where to listen (this machine's address on the way to the gateway, or 127.0.0.1; 0.0.0.0: all)",
        metavar="HOST",
    )  # fmt: skip
    """None: this machine's address on the way to the gateway, without a gateway 127.0.0.1."""
    port: int | None = _flag(
        8000, "where to listen (8000; 0 for any free port; none: on --unix-socket only)", type=_port, metavar="PORT"
    )
    """None: the worker listens on `unix_socket` only."""
    ports: str = _flag("", "where to listen instead of --port: the first free port of a range, such as 20000-20999")
    advertise_host: str | None = _flag(
        None, "how the gateway reaches this worker, if that is not clear", metavar="HOST"
    )
    unix_socket: str | None = _flag(
        None, "listen there as well; a gateway uses it for workers that it starts", metavar="PATH"
    )
    max_in_flight: int = _flag(0, "requests that the gateway may send at the same time (as its configuration says)")
    gateway_ca: str | None = _flag(
        None, "authorities to trust for a gateway with https (those of the system)", metavar="FILE"
    )
    orphan_after_s: float = _flag(0.0, "shut down when the gateway has accepted no heartbeat for this time (0: never)")
    log_streaming: bool = _flag(
        True, "keep the last lines of the output, for /logs/stream (true)",
        "--ls", action="store", type=_truth, nargs="?", const=True, metavar="BOOL",
    )  # fmt: skip
    head_bytes_max: int = _flag(_LIMITS.head_bytes_max, "the largest head of a request (%(default)s)")
    body_bytes_max: int = _flag(_LIMITS.body_bytes_max, "the largest body of a request (%(default)s)")
    connections_max: int = _flag(_LIMITS.connections_max, "open connections (%(default)s)")
    responses_max: int = _flag(
        _ADAPTER.responses_max, "responses of /v1/responses to keep, the oldest go first; 0: none (%(default)s)"
    )
    responses_bytes_max: int = _flag(
        _ADAPTER.responses_bytes_max, "bytes that the requests of these responses may have in all (%(default)s)"
    )
    reasoning_field: str = _flag(
        "engine", "the name of a model's thoughts in chats (engine: the engine's own)", choices=FIELDS
    )
    prefix_reports: str = _flag(
        "auto", "report the beginnings of prompts that the engine's cache has lost (auto: if the engine can)",
        choices=PREFIX_REPORTS,
    )  # fmt: skip
    media_domains: list[str] = _flag(
        (), "domains from which requests may have the engine fetch pictures, sounds and videos (none)",
        nargs="+", metavar="DOMAIN",
    )  # fmt: skip
    client_stall_s: float = _flag(
        _TIMEOUTS.client_stall_s,
        f"how long a client may read nothing before it counts as disconnected ({_TIMEOUTS.client_stall_s:g})",
    )
    log_format: str = _flag(
        "text", "how the worker's own lines look: json, an object each, or text (%(default)s)", choices=("text", "json")
    )
    drain_s: float = _flag(30.0, "the time in which exchanges may end at shutdown (30)")
    stop_s: float = _flag(10.0, "the time in which the engine may end after that (10)")
    order: str = _flag(
        "", "start the worker that a gateway has ordered (`ichat.pyz order`), which brings all other flags; with"
        " --gateway-address alone", metavar="CODE",
    )  # fmt: skip
    explain_args: bool = _flag(False, "print the engine's arguments, and why, then exit")
    list_flags: bool = _flag(False, "print the engine's flags as JSON, then exit")


def parser() -> CommandLineParser:
    """Return the parser of the worker's own flags."""
    usage = CommandLineParser(
        prog="ichat.pyz worker",
        description="Load a model with an engine, in this process, and serve the OpenAI routes.",
        epilog="Every other flag is the engine's own, for example --model. The engine lists its flags with --help=all.",
        allow_abbrev=False,
    )
    for one in attrs.fields(Options):
        how: dict[str, Any] = {**one.metadata["how"]}
        if "type" not in how:
            how = {**_BY_TYPE.get(one.type, {}), **how}
        default: Any = list(one.default) if one.default == () else one.default
        usage.add_argument(f"--{one.name.replace('_', '-')}", *one.metadata["others"], default=default, **how)
        if one.name == "log_streaming":
            usage.add_argument("--no-log-streaming", dest=one.name, action="store_false", help="keep none of them")
    return usage


def read_command_line(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Split a command line into the worker's options and the engine's arguments.

    Flags are matched by their exact names, with `_` for `-` allowed, so no flag of the engine's is matched by mistake.
    The engine gets the model's names as well. Raises Exit 64.
    """
    usage = parser()
    ours, theirs = _split(usage, argv)
    options = Options(**vars(usage.parse_args(ours)))
    for mistake in _mistakes_in(options):
        raise Exit(EXIT_USAGE, f"{usage.prog}: {mistake}")
    if options.served_model_name:
        theirs += ["--served-model-name", *options.served_model_name]
    return options, theirs


def _split(usage: CommandLineParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of the worker's own flags, and all others. Raises Exit 64 for a flag's old name."""
    actions = {option: action for action in usage._actions for option in action.option_strings}
    ours: list[str] = []
    theirs: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name in RENAMED:
            raise Exit(EXIT_USAGE, f"{usage.prog}: {name} is now {RENAMED[name]}.")
        action = actions.get(name)
        if action is None or (name in ("-h", "--help") and equals):
            theirs.append(word)
            continue
        ours.append(name + equals + value)
        if not equals and action.nargs != 0:
            while rest and not (rest[0].startswith("-") and len(rest[0]) > 1 and not rest[0][1].isdigit()):
                ours.append(rest.pop(0))
                if action.nargs in (None, "?"):
                    break
    return ours, theirs


def _mistakes_in(options: Options) -> Iterator[str]:
    """Yield the mistakes that argparse accepts, each in a sentence."""
    if options.port is None and options.unix_socket is None:
        yield "--port none needs --unix-socket: no gateway could reach the worker"
    try:
        are_ports(options.ports)
    except ValueError as error:
        yield f"--ports {error}"
    if not 0 <= options.orphan_after_s < math.inf:
        yield f"--orphan-after-s must be 0 or more, not {options.orphan_after_s}"
    if options.responses_max < 0 or options.responses_bytes_max < 0:
        yield "--responses-max and --responses-bytes-max must be 0 or more"
    try:
        are_media_domains(options.media_domains)
    except ValueError as error:
        yield f"--media-domains {error}"
    try:
        parse_heartbeat(_values_in_heartbeats(options))
    except errors.ApiError as error:
        yield error.message
    if options.gateway_address is not None and not is_address(options.gateway_address):
        yield f"--gateway-address must be like http://gw:4000, not {options.gateway_address!r}"
    if options.prefix_reports == "true" and options.gateway_address is None:
        yield "--prefix-reports true needs --gateway-address"


def _values_in_heartbeats(options: Options) -> Mapping[str, Any]:
    """Return a heartbeat with the values that the gateway would otherwise refuse in each of the worker's."""
    return {
        "worker_id": options.worker_id or "w",
        "model_name": options.served_model_name[0] if options.served_model_name else "m",
        "model_names": options.served_model_name,
        "host": options.advertise_host or "h",
        "port": 1,
        "heartbeat_interval": options.heartbeat_interval,
        "max_in_flight": options.max_in_flight,
    }


# The engine's arguments.


def check_command_line(backend: str, argv: Sequence[str]) -> None:
    """Raise Exit 64 with every mistake in an engine's arguments that shows without its import, which lasts long.

    The engine's flags are known once a worker of this interpreter, the gateway or the doctor has asked for them. An
    unknown flag is no mistake until then: the engine itself reads its arguments after that.
    """
    strays, given = split_flags(argv)
    line = CommandLine({}, [flag for _, flag in given])
    if line.has(*_OTHER) or strays:
        return
    mistakes = list(_mistakes_of_model(backend, line)) if backend in ENGINES else []
    kept = read_kept(Interpreter.of(sys.executable, backend, os.environ))
    if kept is not None:
        mistakes += refusals_of(backend, argv, kept.flags)
    if backend in ENGINES and (refusal := refusal_of_variable(os.environ)):
        mistakes.append(refusal)
    if mistakes:
        raise refusal_of(engine_name(backend), mistakes)


def _mistakes_of_model(backend: str, line: CommandLine) -> Sequence[str]:
    path = line.value(*_MODEL)
    if path is None:
        return [] if line.has(*_MODEL) else ["--model is missing: give a directory, or a name on the model hub"]
    arguments: dict[str, EngineValue] = {
        flag.name.removeprefix("--").replace("-", "_"): flag.values[0] if flag.values else True for flag in line.flags
    }
    worker = ManagedWorkerConfig(model_name="m", model_path=path, backend=backend, backend_args=arguments)
    state, hint = read_model(worker)
    facts = Facts(model=state, model_hint=hint, directory=os.getcwd())
    return [sentence.rstrip(".") for sentence in problems_of_model(path, facts, "--model")]
