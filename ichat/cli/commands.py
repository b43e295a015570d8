"""The operator's terminal: commands to a running gateway. Nothing heavy is imported before a command needs it."""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ichat.cli import chat as terminal_chat
from ichat.cli import explain as terminal_explain
from ichat.cli import keys as terminal_keys
from ichat.cli import launch as terminal_launch
from ichat.cli import logs as terminal_logs
from ichat.cli import models as terminal_models
from ichat.cli import run as terminal_run
from ichat.cli import top as terminal_top
from ichat.cli import usage as terminal_usage
from ichat.cli import views as terminal_views
from ichat.cli.client import EXIT_REFUSED, Api, Json, RequestRefused, objects_of, open_api, worker_path
from ichat.cli.gateway_address import add_flags, config_for
from ichat.cli.screen import Screen, give_up_stdout, note, prepare_streams, raise_interrupts
from ichat.cli.troubles import troubles_of
from ichat.config.command_line import CommandLineParser
from ichat.config.own_secret import console_link
from ichat.errors import EXIT_INTERRUPTED, Exit

if TYPE_CHECKING:
    from ichat.cli.client import JsonReply

RELOAD_S = 300.0
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
    """Return a line for each of these commands, which have their form and their help."""
    return "".join(f"       {f'ichat.pyz {form}'.ljust(_HELP_COLUMNS)}{text}\n" for form, text in commands)


def run(argv: Sequence[str]) -> int:
    """Run the command of COMMANDS that the first word names, and return the exit code.

    Raises Exit: 64 for a wrong command line, 69 if there is no gateway, 1 if it refuses.
    """
    name, words = ALIASES.get(argv[0], argv[0]), list(argv[1:])
    command, usage, engine_words = COMMANDS[name], parser_of(name), list[str]()
    wants_help = bool({"-h", "--help"} & set(words))
    if name == "keys" and wants_help and words[0] in (*terminal_keys.ACTIONS, *terminal_keys.SYNONYMS):
        usage = _parser_of_action(terminal_keys.SYNONYMS.get(words[0], words[0]))
        words = ["--help"]
    elif name == "launch" and not wants_help:
        words, engine_words = terminal_launch.split(usage, words)
    elif name == "run":
        words, engine_words = terminal_run.split_engine_words(words)
    args = usage.parse_intermixed_args(words)
    args.engine = terminal_launch.engine_arguments(engine_words)
    args.config = config_for(args)
    is_client = name == "chat" or getattr(args, "own", False)
    api = open_api(args, ["ICHAT_API_KEY"] if is_client else ["ICHAT_ADMIN_KEY", "ICHAT_API_KEY"])
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
    terminal_keys.add_action_flags(usage, action)
    add_flags(usage)
    return usage


def _show(screen: Screen, args: argparse.Namespace, answer: "JsonReply", show: Callable[[Screen, Json], None]) -> None:
    if args.json:
        screen.line(answer.text.rstrip("\n"))
    else:
        show(screen, answer.value)


def _workers(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    if args.worker_id is not None:
        return _worker(api, screen, args)
    _show(screen, args, api.get("/v1/admin/workers"), terminal_views.show_workers)
    return 0


def _worker(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    show = functools.partial(terminal_views.show_worker, all_args=args.all)
    _show(screen, args, api.get(worker_path(args.worker_id)), show)
    return 0


def _logs(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    logs = terminal_logs.LogCommand(api, screen, args)
    return logs.follow() if args.follow else logs.show()


def _launch(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    return terminal_launch.launch(api, screen, args, args.engine)


def _status(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Show problems first, and then the gateway as a whole."""
    status = api.get("/v1/admin/cluster/status")
    if not args.json:
        workers = objects_of(api.get("/v1/admin/workers").value.get("data"))
        terminal_views.show_troubles(screen, troubles_of(status.value, workers))
    _show(screen, args, status, terminal_views.show_status)
    return 0


def _models(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    _show(screen, args, api.get("/v1/models"), terminal_views.show_models)
    return 0


def _explain(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    _show(screen, args, terminal_explain.ask(api, args), terminal_explain.show_route)
    return 0


def _usage(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    show = functools.partial(terminal_usage.show, as_csv=args.csv)
    _show(screen, args, terminal_usage.ask(api, args), show)
    return 0


def _chat(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    return terminal_chat.Chat(api, screen, args).run()


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
    _show(screen, args, answer, terminal_views.show_plan)
    changes = [step for step in objects_of(answer.value.get("plan")) if step.get("action") not in ("keep", "later")]
    return EXIT_REFUSED if changes and not args.dry_run and answer.value.get("applied") is False else 0


def _no_flags(usage: argparse.ArgumentParser) -> None:
    """Add nothing."""


def _maybe_id(usage: argparse.ArgumentParser) -> None:
    usage.add_argument("worker_id", metavar="ID", nargs="?", help="only this one, with everything known of it")
    _all(usage)


def _id(usage: argparse.ArgumentParser) -> None:
    usage.add_argument("worker_id", metavar="ID")


def _all(usage: argparse.ArgumentParser) -> None:
    usage.add_argument("--all", action="store_true", help="of one worker: also what is as its engine has it by default")


def _id_and_all(usage: argparse.ArgumentParser) -> None:
    _id(usage)
    _all(usage)


def _stop_flags(usage: argparse.ArgumentParser) -> None:
    _id(usage)
    terminal_models.add_drain_flag(usage)


def _reload_flags(usage: argparse.ArgumentParser) -> None:
    usage.add_argument("--dry-run", action="store_true", help="only show what would be done")
    usage.add_argument("--restart-failed", action="store_true", help="start failed workers anew, changed or not")


COMMANDS = {
    "run": Command(
        "run MODEL [PROMPT]",
        "launch a model if need be, and talk to it",
        terminal_run.add_run_flags,
        terminal_run.run_model,
    ),
    "workers": Command("workers [ID]", "every worker: its state, its load, why it failed", _maybe_id, _workers),
    "worker-show": Command("worker-show ID [--all]", "everything known of a worker", _id_and_all, _worker),
    "logs": Command("logs [-f] [--tail N] ID", "a worker's output", terminal_logs.add_log_flags, _logs),
    "launch": Command("launch MODEL_PATH [FLAGS]", "start a worker", terminal_launch.add_launch_flags, _launch),
    "stop": Command("stop ID [--drain-s S]", "end a worker of the gateway's", _stop_flags, terminal_launch.stop),
    "load": Command(
        "load MODEL", "load a model, and show what it evicts", terminal_models.add_model_flags, terminal_models.load
    ),
    "unload": Command(
        "unload MODEL [--drain-s S]", "end its process", terminal_models.add_unload_flags, terminal_models.unload
    ),
    "sleep": Command("sleep MODEL", "free its GPU memory", terminal_models.add_model_flags, terminal_models.sleep),
    "wake": Command("wake MODEL", "take it again", terminal_models.add_model_flags, terminal_models.wake),
    "status": Command("status", "what is wrong, and the gateway as a whole", _no_flags, _status),
    "models": Command("models", "what can be asked for now", _no_flags, _models),
    "top": Command("top [--once]", "all of it, live", terminal_top.add_top_flags, terminal_top.run_top),
    "usage": Command(
        "usage [--by key,model,day]", "who used what, and what it cost", terminal_usage.add_usage_flags, _usage
    ),
    "explain": Command(
        "explain MODEL [PROMPT]", "where a request would go", terminal_explain.add_explain_flags, _explain
    ),
    "console": Command("console", "the link to the gateway's page for operators", _no_flags, _console),
    "chat": Command("chat [MODEL [PROMPT]]", "talk to a model", terminal_chat.add_chat_flags, _chat),
    "keys": Command(
        "keys [make|rotate|withdraw NAME]",
        "clients' keys; make, rotate or withdraw one",
        terminal_keys.add_key_flags,
        terminal_keys.run_keys,
    ),
    "reload": Command("reload [--dry-run]", "read the configuration again", _reload_flags, _reload),
}
"""By their names, in the order in which help lists them."""

ALIASES = {"ps": "workers", "list": "models", "ls": "models", "rm": "stop"}
"""Commands as other programs call them."""
STRANGERS = {
    "serve": "run or worker",
    "start": "run or launch",
    "pull": "run",
    "show": "worker-show",
    "create": "launch or keys make",
    "delete": "stop or keys withdraw",
    "version": "--version",
}
"""Words of other programs, and the commands here that do the same."""

HELP = help_of((one.form, one.help) for one in COMMANDS.values()) + (
    f"       aliases: {', '.join(f'{alias} = {name}' for alias, name in ALIASES.items())}\n"
)
"""A line for each command, for the help of the whole program."""
