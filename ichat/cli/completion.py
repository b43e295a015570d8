"""Completion in bash, zsh and fish: argcomplete reads the parsers, and a running gateway is asked for names.

The shell asks with each TAB, so a newer executable needs no other script. The gateway has a short time to answer:
without it there are no names to show.
"""

import argparse
import contextlib
import functools
import os
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from argcomplete.completers import FilesCompleter
from argcomplete.finders import ExclusiveCompletionFinder
from argcomplete.lexers import split_line
from argcomplete.shell_integration import shellcode

from ichat.cli.client import open_api
from ichat.cli.json_values import objects_of
from ichat.config.command_line import CommandLineParser
from ichat.errors import Exit
from ichat.program import as_typed_here

GATEWAY_S = 1.5
"""The longest time to ask a running gateway for names, in seconds: a person waits."""
NAMES_MAX = 1000
SHELLS = ("bash", "zsh", "fish")
_ON_A_KEY = {"change", "rotate", "withdraw", "delete"}
"""The actions of `keys` on an existing key."""
_FILES = {"FILE", "PATH", "MODEL_PATH"}
"""The placeholders for a file in the help of a flag."""
_NAMES = {
    "ID": ("/v1/admin/workers", "data", "worker_id"),
    "MODEL": ("/v1/models", "data", "id"),
    "NAME": ("/v1/admin/keys", "keys", "name"),
}
"""The placeholders for names that the gateway knows: the route, its list, and the name's key in each of its objects."""
_USUAL = re.compile(r"[!-9;-~][!-~]*")
_TILDES = {"${script:-$1}": r'"${1/#\~/$HOME}"', "${script:-${words[1]}}": "${~words[1]}"}
"""Makes bash and zsh find `~/ichat.pyz`."""
_ZSH = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }"
"""Makes completion work in a zsh that has not set it up."""


def parser() -> CommandLineParser:
    """Return the parser of the command."""
    usage = CommandLineParser(
        prog="ichat.pyz completion",
        description='Print what makes a shell complete command lines: eval "$(./ichat.pyz completion bash)"',
    )
    usage.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    return usage


def run(argv: Sequence[str]) -> int:
    """Print a shell's script for completion. Raises Exit 64."""
    print(script_for(parser().parse_args(list(argv)).shell), end="")
    return 0


def script_for(shell: str) -> str:
    """Return what makes a shell ask this program for completions, wherever the program is."""
    name = as_typed_here("ichat.pyz")
    if shell == "fish":
        return shellcode([name], shell=shell, argcomplete_script="env (commandline -opc)[1]")
    text = shellcode([name], shell=shell, use_defaults=False)
    for usual, ours in _TILDES.items():
        text = text.replace(usual, ours)
    first, rest = text.split("\n", 1)
    return "\n".join([first, *([_ZSH] if shell == "zsh" else []), rest])


def complete(helps: Mapping[str, str], parser_of: Callable[[str], argparse.ArgumentParser]) -> None:
    """Write the possible next words of the command line that the shell hands over, and end the process.

    `helps` has the commands, and what each does.
    """
    signal.signal(signal.SIGALRM, _give_up)
    *_, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    usage: argparse.ArgumentParser = CommandLineParser(add_help=False)
    if len(words) < 2:
        _complete_by(usage.add_argument("command"), functools.partial(_same, helps))
    elif words[1] in helps:
        os.environ["_ARGCOMPLETE"] = "2"  # the command is the program now
        usage = parser_of(words[1])
        for action in usage._actions:
            if action.metavar in _FILES:
                _complete_by(action, FilesCompleter())
            elif action.metavar in _NAMES and (action.metavar != "NAME" or words[1] in ("keys", "usage")):
                _complete_by(action, functools.partial(_names, words[1], str(action.metavar)))
    has_flags_only = not any(not action.option_strings for action in usage._actions)
    finder: Any = ExclusiveCompletionFinder()
    finder(
        usage,
        always_complete_options="long" if has_flags_only else False,
        default_completer=functools.partial(_same, ()),
    )


def _complete_by(action: argparse.Action, completer: Callable[..., Iterable[str]]) -> None:
    action.completer = completer  # pyright: ignore[reportAttributeAccessIssue]


def _same(words: Iterable[str], **_: object) -> Iterable[str]:
    return words


def _give_up(*_: object) -> None:
    os._exit(0)


def _names(command: str, kind: str, *, parsed_args: argparse.Namespace, **_: object) -> Iterable[str]:
    """Return the names that the gateway of a command line knows; none if it does not answer in time."""
    action = getattr(parsed_args, "action", None)
    if command == "keys" and action not in _ON_A_KEY:
        return []
    if parsed_args.config:
        parsed_args.config = os.path.expanduser(parsed_args.config)  # the shell hands over a tilde as it stands
    path, key, name = _NAMES[kind]
    found: list[object] = []
    signal.setitimer(signal.ITIMER_REAL, GATEWAY_S)
    with contextlib.suppress(Exit):
        variables = ("ICHAT_API_KEY",) if command in ("chat", "bench") else ("ICHAT_ADMIN_KEY", "ICHAT_API_KEY")
        known = objects_of(open_api(parsed_args, variables).get(path).value.get(key))
        found = [one.get(name) for one in known if command != "keys" or one.get("source") == "api"]
    signal.setitimer(signal.ITIMER_REAL, 0)
    return sorted(one for one in found if isinstance(one, str) and _USUAL.fullmatch(one) and one[0] != "-")[:NAMES_MAX]
