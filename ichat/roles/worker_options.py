"""The worker's command line: its own flags; everything else is the engine's."""

import argparse
import math
from collections.abc import Sequence

import attrs

from ichat import errors
from ichat.config.checks import are_media_domains
from ichat.config.command_line import CommandLineParser
from ichat.config.schema import Limits, Timeouts
from ichat.engines.adapter import AdapterSettings
from ichat.engines.reasoning import FIELDS
from ichat.errors import EXIT_USAGE, Exit
from ichat.protocol.messages import parse_heartbeat
from ichat.roles.heartbeat_sender import is_address

PREFIX_REPORTS = ("auto", "true", "false")
RENAMED = {"--gateway": "--gateway-address"}
"""Old names of flags: as unknown flags they would be passed to the engine."""


@attrs.frozen
class Options:
    """The worker's own flags and their values."""

    backend: str
    gateway_address: str | None
    served_model_name: list[str]
    heartbeat_interval: float
    worker_id: str
    host: str | None
    """None: this machine's address on the way to the gateway, without a gateway 127.0.0.1."""
    port: int | None
    """None: the worker listens on `unix_socket` only."""
    advertise_host: str | None
    unix_socket: str | None
    max_in_flight: int
    gateway_ca: str | None
    orphan_after_s: float
    log_streaming: bool
    head_bytes_max: int
    body_bytes_max: int
    connections_max: int
    client_stall_s: float
    drain_s: float
    stop_s: float
    responses_max: int
    responses_bytes_max: int
    reasoning_field: str
    prefix_reports: str
    media_domains: list[str]
    explain_args: bool
    list_flags: bool


def parser() -> CommandLineParser:
    """Return the parser of the worker's own flags."""
    usage = CommandLineParser(
        prog="ichat.pyz worker",
        description="Load one model with one engine, in this process, and serve the OpenAI routes.",
        epilog="Every other flag is the engine's own, for example --model. The engine lists its flags with --help=all.",
        allow_abbrev=False,
    )
    add = usage.add_argument
    limits = Limits()
    add("--backend", "-be", default="vllm", metavar="NAME", help="the engine: vllm, sglang or another (vllm)")
    add(
        "--gateway-address", "-ga", metavar="URL",
        help="register with this gateway, for example http://gw:4000; from another machine with ICHAT_JOIN_TOKEN set",
    )  # fmt: skip
    add(
        "--served-model-name", "--model-name", "-n", nargs="+", default=[], metavar="NAME",
        help="the names that requests use; the model's path otherwise",
    )  # fmt: skip
    add("--heartbeat-interval", "--hi", type=float, default=30.0, metavar="S", help="seconds between heartbeats (30)")
    add("--worker-id", default="", metavar="ID", help="made from host and process if it is not given")
    add(
        "--host", metavar="HOST",
        help="where to listen (this machine's address on the way to the gateway, or 127.0.0.1; 0.0.0.0: all)",
    )  # fmt: skip
    add(
        "--port", type=_port, default=8000, metavar="PORT",
        help="where to listen (8000; 0 for any free port; none: on --unix-socket only)",
    )  # fmt: skip
    add(
        "--advertise-host",
        metavar="HOST",
        help="how the gateway reaches this worker, if that is not clear",
    )
    add("--unix-socket", metavar="PATH", help="listen there as well; a gateway uses it for workers that it starts")
    add(
        "--max-in-flight", type=int, default=0, metavar="N",
        help="requests that the gateway may send at the same time (as its configuration says)",
    )  # fmt: skip
    add("--gateway-ca", metavar="FILE", help="authorities to trust for a gateway with https (those of the system)")
    add(
        "--orphan-after-s", type=float, default=0.0, metavar="S",
        help="shut down when the gateway has accepted no heartbeat for so long (0: never)",
    )  # fmt: skip
    add(
        "--log-streaming", "--ls", type=_truth, nargs="?", const=True, default=True, metavar="BOOL",
        help="keep the last lines of the output, for /logs/stream (true)",
    )  # fmt: skip
    add("--no-log-streaming", dest="log_streaming", action="store_false", help="keep none of them")
    for name, default, help_ in (
        ("--head-bytes-max", limits.head_bytes_max, "the largest head of a request"),
        ("--body-bytes-max", limits.body_bytes_max, "the largest body of a request"),
        ("--connections-max", limits.connections_max, "open connections"),
    ):
        add(name, type=int, default=default, metavar="N", help=f"{help_} ({default})")
    _add_adapter_settings(usage)
    stall_s = Timeouts().client_stall_s
    add(
        "--client-stall-s", type=float, default=stall_s, metavar="S",
        help=f"how long a client may read nothing before it counts as disconnected ({stall_s:g})",
    )  # fmt: skip
    add("--drain-s", type=float, default=30.0, metavar="S", help="how long exchanges may take to end at shutdown (30)")
    add("--stop-s", type=float, default=10.0, metavar="S", help="how long the engine may take to end after that (10)")
    add("--explain-args", action="store_true", help="print what the engine would get, and why, then exit")
    add("--list-flags", action="store_true", help="print the engine's flags as JSON, then exit")
    return usage


def _add_adapter_settings(usage: CommandLineParser) -> None:
    """Add the flags that say how requests and responses are treated."""
    add, defaults = usage.add_argument, AdapterSettings()
    add(
        "--responses-max", type=int, default=defaults.responses_max, metavar="N",
        help=f"responses of /v1/responses to keep, the oldest go first; 0: none ({defaults.responses_max})",
    )  # fmt: skip
    add(
        "--responses-bytes-max", type=int, default=defaults.responses_bytes_max, metavar="N",
        help=f"bytes that the requests of these responses may have in all ({defaults.responses_bytes_max})",
    )  # fmt: skip
    add(
        "--reasoning-field", choices=FIELDS, default="engine",
        help="the name of a model's thoughts in chats (engine: the engine's own)",
    )  # fmt: skip
    add(
        "--prefix-reports", choices=PREFIX_REPORTS, default="auto",
        help="tell the gateway which beginnings of prompts the engine's cache has lost (auto: where the engine can)",
    )  # fmt: skip
    add(
        "--media-domains", nargs="+", default=[], metavar="DOMAIN",
        help="domains from which requests may have the engine fetch pictures, sounds and videos (none)",
    )  # fmt: skip


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


def read_command_line(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Split a command line into the worker's options and the engine's arguments.

    Flags are matched by their exact names, with `_` for `-` allowed, so no flag of the engine's is matched by mistake.
    The engine gets the model's names as well. Raises Exit 64.
    """
    usage = parser()
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
    options = Options(**vars(usage.parse_args(ours)))
    if options.port is None and options.unix_socket is None:
        raise Exit(EXIT_USAGE, f"{usage.prog}: --port none needs --unix-socket: nobody could reach the worker")
    if not 0 <= options.orphan_after_s < math.inf:
        raise Exit(EXIT_USAGE, f"{usage.prog}: --orphan-after-s must be 0 or more, not {options.orphan_after_s}")
    if options.responses_max < 0 or options.responses_bytes_max < 0:
        raise Exit(EXIT_USAGE, f"{usage.prog}: --responses-max and --responses-bytes-max must be 0 or more")
    try:
        are_media_domains(options.media_domains)
    except ValueError as error:
        raise Exit(EXIT_USAGE, f"{usage.prog}: --media-domains {error}") from error
    _check_heartbeat(options, usage.prog)
    if options.gateway_address is not None and not is_address(options.gateway_address):
        raise Exit(
            EXIT_USAGE,
            f"{usage.prog}: --gateway-address must be like http://gw:4000, not {options.gateway_address!r}",
        )
    if options.prefix_reports == "true" and options.gateway_address is None:
        raise Exit(EXIT_USAGE, f"{usage.prog}: --prefix-reports true needs --gateway-address")
    if options.served_model_name:
        theirs += ["--served-model-name", *options.served_model_name]
    return options, theirs


def _check_heartbeat(options: Options, prog: str) -> None:
    """Check the values that the gateway would otherwise refuse in every heartbeat. Raises Exit 64."""
    try:
        parse_heartbeat({
            "worker_id": options.worker_id or "w",
            "model_name": options.served_model_name[0] if options.served_model_name else "m",
            "model_names": options.served_model_name,
            "host": options.advertise_host or "h",
            "port": 1,
            "heartbeat_interval": options.heartbeat_interval,
            "max_in_flight": options.max_in_flight,
        })  # fmt: skip
    except errors.ApiError as error:
        raise Exit(EXIT_USAGE, f"{prog}: {error.message}") from error
