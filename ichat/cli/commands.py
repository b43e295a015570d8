"""The operator's terminal: commands to a running gateway. Nothing heavy is imported before a command needs it."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ichat.cli import chat, copies, disk, explain, keys, logs, models, stop, top, views
from ichat.cli import launch as launches
from ichat.cli import run as runs
from ichat.cli import usage as costs
from ichat.cli.bench.command import add_bench_flags, run_bench
from ichat.cli.client import EXIT_REFUSED, WAITS, Api, JsonReply, RequestRefused, Waits, open_api, worker_path
from ichat.cli.gateway_address import add_flags, config_for
from ichat.cli.json_values import Json, objects_of
from ichat.cli.requests import add_requests_flags, run_requests
from ichat.cli.screen import Screen, give_up_stdout, note, prepare_streams, raise_interrupts
from ichat.cli.troubles import troubles_of
from ichat.config.command_line import CommandLineParser
from ichat.config.own_secret import console_link
from ichat.errors import EXIT_INTERRUPTED, Exit
from ichat.program import as_typed_here

RELOAD_S = 300.0
HEALTH_S = 5.0
"""The longest wait for the answer of `health`: a container's runtime asks again, and kills what waits."""
_HELP_COLUMNS = 37
"""Where the texts of `help_of` begin."""

Run = Callable[[Api, Screen, argparse.Namespace], int]


class Command(NamedTuple):
    """A command."""

    form: str
    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Run


def help_of(commands: Iterable[tuple[str, str]]) -> str:
    """Return a line for each of these commands, which have their form and their help; two for a long form."""
    forms = [(as_typed_here(f"ichat.pyz {form}"), text) for form, text in commands]
    return "".join(_help_line(form, text) for form, text in forms)


def _help_line(form: str, text: str) -> str:
    indent = " " * 7
    if len(form) < _HELP_COLUMNS:
        return f"{indent}{form.ljust(_HELP_COLUMNS)}{text}\n"
    return f"{indent}{form}\n{indent}{' ' * _HELP_COLUMNS}{text}\n"


def run(argv: Sequence[str], waits: Waits = WAITS) -> int:
    """Run the command of COMMANDS that the first word names, and return the exit code.

    Raises Exit: 64 for a wrong command line, 69 if there is no gateway, 1 if it refuses.
    """
    name, words = ALIASES.get(argv[0], argv[0]), list(argv[1:])
    command, usage, engine_words = COMMANDS[name], parser_of(name), list[str]()
    wants_help = bool({"-h", "--help"} & set(words))
    if name == "keys" and wants_help and words[0] in (*keys.ACTIONS, *keys.SYNONYMS):
        usage = _parser_of_action(keys.SYNONYMS.get(words[0], words[0]))
        words = ["--help"]
    elif name in ("launch", "order") and not wants_help:
        words, engine_words = launches.split(usage, words)
    elif name == "run":
        words, engine_words = runs.split_engine_words(words)
    args = usage.parse_intermixed_args(words)
    args.engine = launches.engine_arguments(engine_words)
    args.config = config_for(args)
    is_client = name in ("chat", "bench") or getattr(args, "own", False)
    api = open_api(args, ["ICHAT_API_KEY"] if is_client else ["ICHAT_ADMIN_KEY", "ICHAT_API_KEY"], waits)
    prepare_streams()
    try:
        raise_interrupts()
        code = command.run(api, Screen(is_wide=args.wide), args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        give_up_stdout()
        return EXIT_REFUSED
    return code


def parser_of(name: str) -> CommandLineParser:
    """Return the parser of a command of COMMANDS."""
    command = COMMANDS[name]
    usage = CommandLineParser(prog=f"ichat.pyz {name}", description=command.help, allow_abbrev=False)
    command.add_flags(usage)
    add_flags(usage)
    return usage


def _parser_of_action(action: str) -> CommandLineParser:
    """Return the parser that has the help of an action on keys."""
    usage = CommandLineParser(prog=f"ichat.pyz keys {action}", allow_abbrev=False)
    keys.add_action_flags(usage, action)
    add_flags(usage)
    return usage


def _shown(
    ask: Callable[[Api, argparse.Namespace], JsonReply], show: Callable[[Screen, Json, argparse.Namespace], None]
) -> Run:
    """Return a command that asks the gateway once and shows the answer; with `--json`, as the gateway wrote it."""

    def run_it(api: Api, screen: Screen, args: argparse.Namespace) -> int:
        answer = ask(api, args)
        if args.json:
            screen.line(answer.text.rstrip("\n"))
        else:
            show(screen, answer.value, args)
        return 0

    return run_it


def _got(path: str, show: Callable[[Screen, Json], None]) -> Run:
    """Return a command that shows the answer of a route."""
    return _shown(lambda api, _args: api.get(path), lambda screen, value, _args: show(screen, value))


_all_workers = _got("/v1/admin/workers", views.show_workers)
_worker = _shown(
    lambda api, args: api.get(worker_path(args.worker_id)),
    lambda screen, value, args: views.show_worker(screen, value, all_args=args.all),
)


_names = _got("/v1/models", views.show_models)
_health = _shown(
    lambda api, _args: api.call("GET", "/health", answer_s=HEALTH_S),
    lambda screen, value, _args: screen.line(str(value.get("status"))),
)


def _workers(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    return (_all_workers if args.worker_id is None else _worker)(api, screen, args)


def _models(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    return disk.show_disk(api, screen, args) if args.disk else _names(api, screen, args)


def _status(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Show problems first, and then the gateway as a whole."""

    def show(screen: Screen, status: Json) -> None:
        views.show_troubles(screen, troubles_of(status, objects_of(api.get("/v1/admin/workers").value.get("data"))))
        views.show_status(screen, status)

    return _got("/v1/admin/cluster/status", show)(api, screen, args)


def _console(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Print the console's link, with the secret of the gateway's own user if it opens the console."""
    secret = api.own_secret
    try:
        api.get("/v1/admin/cluster/version")
    except RequestRefused as refusal:
        if refusal.status not in (401, 403):
            raise
        secret = ""
        note("This link asks for the operators' key." if api.own_secret else str(refusal))
    link = console_link(api.place.url, secret)
    screen.line(json.dumps({"url": link}) if args.json else link)
    return 0


def _reload(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Show the plan, or all mistakes of the file; a plan that should have been carried out and was not is a refusal."""
    flags = {"dry_run": args.dry_run, "restart_failed": args.restart_failed}
    params = {name: "1" for name, is_set in flags.items() if is_set}
    try:
        answer = api.call("POST", "/v1/admin/config/reload", params=params or None, answer_s=RELOAD_S)
    except RequestRefused as refusal:
        raise Exit(refusal.code, refusal.text) from refusal
    _shown(lambda _api, _args: answer, lambda screen, value, _args: views.show_plan(screen, value))(api, screen, args)
    changes = [step for step in objects_of(answer.value.get("plan")) if step.get("action") not in ("keep", "later")]
    return EXIT_REFUSED if changes and not args.dry_run and answer.value.get("applied") is False else 0


def _no_flags(usage: argparse.ArgumentParser) -> None:
    """Add nothing."""


def _worker_flags(usage: argparse.ArgumentParser, nargs: str | None = None) -> None:
    usage.add_argument("worker_id", metavar="ID", nargs=nargs, help="only this worker, with everything known of it")
    usage.add_argument("--all", action="store_true", help="with a worker id: also show arguments at their defaults")


def _stop_flags(usage: argparse.ArgumentParser) -> None:
    usage.add_argument("worker_id", metavar="ID")
    models.add_drain_flag(usage)


def _reload_flags(usage: argparse.ArgumentParser) -> None:
    usage.add_argument("--dry-run", action="store_true", help="only show what would be done")
    usage.add_argument("--restart-failed", action="store_true", help="start failed workers anew, changed or not")


_TABLE = (
    Command("run MODEL [PROMPT]", "launch a model if need be, and talk to it", runs.add_run_flags, runs.run_model),
    Command(
        "workers [ID]", "every worker: its state, its load, why it failed", partial(_worker_flags, nargs="?"), _workers
    ),
    Command("worker-show ID [--all]", "everything known of a worker", _worker_flags, _worker),
    Command("logs [-f] [--grep TEXT] ID", "a worker's output, or the gateway's", logs.add_log_flags, logs.run_logs),
    Command("launch MODEL_PATH [FLAGS]", "start a worker", launches.add_launch_flags, launches.launch),
    Command("order MODEL_PATH [FLAGS]", "start a worker on another machine", launches.add_order_flags, launches.order),
    Command("orders", "the workers ordered for other machines", _no_flags, _got(launches.ORDERS, launches.show_orders)),
    Command("stop ID [--drain-s S]", "end a worker of the gateway's", _stop_flags, stop.stop),
    Command("start ID", "start a stopped or failed worker", stop.add_command_flags, stop.command("start")),
    Command("restart ID [--drain-s S]", "end its process, start another", _stop_flags, stop.command("restart")),
    Command("drain ID", "send a worker no new requests", stop.add_command_flags, stop.command("drain")),
    Command("resume ID", "send it requests again", stop.add_command_flags, stop.command("resume")),
    Command("load MODEL", "load a model, and show the evicted workers", models.add_model_flags, models.load),
    Command("unload MODEL [--drain-s S]", "end its process", models.add_unload_flags, models.unload),
    Command("sleep MODEL", "free its GPU memory", models.add_model_flags, models.sleep),
    Command("wake MODEL", "allocate it again", models.add_model_flags, models.wake),
    Command("scale MODEL MIN [MAX]", "change the number of its copies", copies.add_scale_flags, copies.scale),
    Command("status", "problems, and the gateway as a whole", _no_flags, _status),
    Command("health", "whether the gateway answers, as its exit code", _no_flags, _health),
    Command("models [--disk]", "what can be asked for now, or is on this disk", disk.add_disk_flags, _models),
    Command("remove MODEL", "remove a model of a hub from this disk", disk.add_remove_flags, disk.remove),
    Command("top [--once]", "all of it, live", top.add_top_flags, top.run_top),
    Command(
        "requests [ID] [--done]",
        "requests in flight or ended; the timeline of a request",
        add_requests_flags,
        run_requests,
    ),
    Command(
        "usage [--by key,model,day]",
        "requests, tokens and their price, by key, model or time",
        costs.add_usage_flags,
        _shown(costs.ask, lambda screen, value, args: costs.show(screen, value, as_csv=args.csv)),
    ),
    Command(
        "explain MODEL [PROMPT]",
        "where a request would go",
        explain.add_explain_flags,
        _shown(explain.ask, lambda screen, value, _args: explain.show_route(screen, value)),
    ),
    Command("console", "the link to the gateway's page for operators", _no_flags, _console),
    Command("chat [MODEL [PROMPT]]", "talk to a model", chat.add_chat_flags, chat.run_chat),
    Command("bench MODEL [--rate R]", "measure a model under load", add_bench_flags, run_bench),
    Command(
        "keys [make|rotate|withdraw NAME]",
        "clients' keys; make, rotate or withdraw a key",
        keys.add_key_flags,
        keys.run_keys,
    ),
    Command("reload [--dry-run]", "read the configuration again", _reload_flags, _reload),
)
COMMANDS = {command.form.partition(" ")[0]: command for command in _TABLE}
"""By their names, in the order in which help lists them."""

ALIASES = {"ps": "workers", "list": "models", "ls": "models", "rm": "stop"}
"""Commands as other programs call them."""
STRANGERS = {
    "serve": "run or worker",
    "show": "worker-show",
    "create": "launch or keys make",
    "delete": "stop or keys withdraw",
}
"""Words of other programs, and the commands here that do the same."""

HELP = help_of((one.form, one.help) for one in COMMANDS.values()) + (
    f"       aliases: {', '.join(f'{alias} = {name}' for alias, name in ALIASES.items())}\n"
)
"""A line for each command, for the help of the whole program."""
