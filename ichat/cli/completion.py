"""Completion in bash, zsh and fish: the possible next words of a command line, from the parsers that read it.

The shell asks with each TAB, so a newer executable needs no other script. A running gateway is asked for the names that
it knows, with a short bound: without a gateway there are none to show.
"""

import argparse
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ichat.cli.client import Api, objects_of
from ichat.cli.gateway_address import find_gateway
from ichat.config.command_line import CommandLineParser
from ichat.errors import Exit

GATEWAY_S = 1.5
"""The longest time to ask a running gateway for names, in seconds: a person waits."""
NAMES_MAX = 1000
_ON_A_KEY = {"change", "rotate", "withdraw", "delete"}
"""The actions of `keys` on an existing key."""
FILES = ":files"
"""Makes the shell go on with the names of files."""
_PLACE = ("--gateway", "-g", "--config", "-c", "--api-key", "--ca-certificates")
"""Flags that say which gateway to ask."""
_FILES = {"FILE", "PATH", "MODEL_PATH"}
"""The placeholders for a file in the help of a flag."""
_USUAL = re.compile(r"[!-~]+")

_BASH = r"""# Completion of ichat.pyz for bash: eval "$(./ichat.pyz completion bash)"
_ichat_pyz() {
    local line=${COMP_LINE:0:COMP_POINT} word before="" candidate rest
    local -a words
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    word=${words[${#words[@]}-1]}
    # readline replaces what follows the last of these characters
    [[ $word == *[:=]* ]] && before=${word%"${word##*[:=]}"}
    COMPREPLY=()
    while IFS=$'\t' read -r candidate rest; do
        if [[ $candidate == :files ]]; then
            compopt -o default
            COMPREPLY=()
            return
        fi
        COMPREPLY+=("$(printf %q "${candidate#"$before"}")")
    done < <("${words[0]/#\~/$HOME}" completion words -- "${words[@]:1}" 2>/dev/null)
}
complete -F _ichat_pyz ichat.pyz
"""
_ZSH = r"""#compdef ichat.pyz
# Completion of ichat.pyz for zsh: source <(./ichat.pyz completion zsh)
_ichat_pyz() {
    local line
    local -a found
    local -a given=("${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}")
    for line in "${(@f)$("${~words[1]}" completion words -- "${given[@]}" 2>/dev/null)}"; do
        [[ -n $line ]] || continue
        if [[ $line == :files ]]; then
            compset -P '--*='
            _files
            return
        fi
        found+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
    done
    _describe 'ichat.pyz' found
}
if [[ ${funcstack[1]-} == _ichat.pyz ]]; then
    _ichat_pyz "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
    compdef _ichat_pyz ichat.pyz
fi
"""
_FISH = r"""# Completion of ichat.pyz for fish: ./ichat.pyz completion fish | source
function __ichat_pyz
    set -l words (commandline -opc)
    set -l found ($words[1] completion words -- $words[2..-1] (commandline -ct) 2>/dev/null)
    if test "$found[1]" = :files
        __fish_complete_path (string replace -r -- '^--[a-z-]+=' '' (commandline -ct))
    else if set -q found[1]
        printf '%s\n' $found
    end
end
complete -c ichat.pyz -f -a '(__ichat_pyz)'
"""
SCRIPTS: Mapping[str, str] = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


class CompletedCommand(NamedTuple):
    """A command, as completion knows it."""

    help: str
    parser: Callable[[], argparse.ArgumentParser]


class Suggestion(NamedTuple):
    """A word that may stand here."""

    word: str
    help: str = ""


def parser_of_completion() -> CommandLineParser:
    """Return the parser of `completion`."""
    usage = CommandLineParser(
        prog="ichat.pyz completion",
        description='Print what makes a shell complete command lines: eval "$(./ichat.pyz completion bash)"',
    )
    usage.add_argument("shell", metavar="SHELL", choices=tuple(SCRIPTS), help=", ".join(SCRIPTS))
    return usage


def run_completion(argv: Sequence[str], programs: Mapping[str, CompletedCommand]) -> int:
    """Print a shell's script, or the possible next words for it. Raises Exit 64."""
    if list(argv[:2]) != ["words", "--"]:
        print(SCRIPTS[parser_of_completion().parse_args(list(argv)).shell], end="")
        return 0
    signal.signal(signal.SIGALRM, _give_up)
    for one in candidates(argv[2:], programs, _ask_gateway):
        sys.stdout.write(f"{one.word}\t{' '.join(one.help.split())}\n" if one.word != FILES else f"{FILES}\n")
    return 0


def _give_up(*_: object) -> None:
    os._exit(0)


Ask = Callable[[str, Sequence[str]], Sequence[str]]
"""Returns names of a kind (`ID`, `MODEL`, `ANY_KEY`, or `KEY` for keys that can be withdrawn) that the gateway of a
command line knows."""


def candidates(words: Sequence[str], programs: Mapping[str, CompletedCommand], ask: Ask) -> Sequence[Suggestion]:
    """Return the completions of the last of these words; the other words precede it on the command line."""
    before, word = list(words[:-1]), words[-1] if words else ""
    if not before:
        return _fitting(word, (Suggestion(name, one.help) for name, one in programs.items()))
    program = programs.get(before[0])
    if program is None:
        return []
    return _fitting(word, _of_program(program.parser(), before, word, ask))


def _fitting(word: str, found: Iterator[Suggestion]) -> Sequence[Suggestion]:
    return [one for one in found if one.word == FILES or one.word.startswith(word)]


def _of_program(parser: argparse.ArgumentParser, before: Sequence[str], word: str, ask: Ask) -> Iterator[Suggestion]:
    flags = {name: action for action in parser._actions for name in action.option_strings}
    plain: list[str] = []
    awaited: argparse.Action | None = None
    for one in before[1:]:
        if awaited is not None:
            awaited = None
        elif one.startswith("-") and one != "-":
            found = flags.get(one)
            awaited = found if found is not None and found.nargs != 0 else None
        else:
            plain.append(one)
    name, equals, _ = word.partition("=")
    if awaited is not None:
        yield from _values(awaited, before, plain, ask)
    elif equals and name in flags:
        for one in _values(flags[name], before, plain, ask):
            yield one if one.word == FILES else Suggestion(f"{name}={one.word}", one.help)
    elif word.startswith("-"):
        yield from _flags(parser, before)
    else:
        positions = [action for action in parser._actions if not action.option_strings]
        if len(plain) < len(positions):
            yield from _values(positions[len(plain)], before, plain, ask)
        elif not positions and not word:
            yield from _flags(parser, before)


def _flags(parser: argparse.ArgumentParser, before: Sequence[str]) -> Iterator[Suggestion]:
    """Yield the flags that have not been given, each by its longest name."""
    for action in parser._actions:
        if action.option_strings and not set(action.option_strings) & set(before):
            yield Suggestion(max(action.option_strings, key=len), (action.help or "").replace("%%", "%"))


def _values(action: argparse.Action, before: Sequence[str], plain: Sequence[str], ask: Ask) -> Iterator[Suggestion]:
    """Yield the possible values of a flag or a position."""
    kind = str(action.metavar or "")
    if action.choices is not None:
        yield from (Suggestion(str(one)) for one in action.choices)
    elif kind in _FILES:
        yield Suggestion(FILES)
    elif kind in ("ID", "MODEL"):
        yield from map(Suggestion, ask(kind, before))
    elif before[0] == "keys" and kind == "NAME" and {*plain[:1]} & _ON_A_KEY:
        yield from map(Suggestion, ask("KEY", before))
    elif before[0] == "usage" and kind == "NAME":
        yield from map(Suggestion, ask("ANY_KEY", before))


def _ask_gateway(kind: str, words: Sequence[str]) -> Sequence[str]:
    """Return the names that the gateway of a command line knows; none if it does not answer in time."""
    given = dict(zip(words, [*words[1:], ""], strict=True))
    given |= {name: value for name, equals, value in (one.partition("=") for one in words) if equals}
    place = {name: os.path.expanduser(given[name]) if name in given else None for name in _PLACE}
    args = argparse.Namespace(
        gateway=place["--gateway"] or place["-g"],
        config=place["--config"] or place["-c"],
        ca_certificates=place["--ca-certificates"],
    )
    variables = ["ICHAT_API_KEY"] if words[0] == "chat" else ["ICHAT_ADMIN_KEY", "ICHAT_API_KEY"]
    keys = [place["--api-key"], *map(os.environ.get, variables)]
    found: list[object] = []
    signal.setitimer(signal.ITIMER_REAL, GATEWAY_S)
    with contextlib.suppress(Exit):
        api = Api(find_gateway(args), next(filter(None, keys), None))
        if kind == "ID":
            found = [one.get("worker_id") for one in objects_of(api.get("/v1/admin/workers").value.get("data"))]
        elif kind == "MODEL":
            found = [one.get("id") for one in objects_of(api.get("/v1/models").value.get("data"))]
        else:
            keys_there = objects_of(api.get("/v1/admin/keys").value.get("keys"))
            found = [one.get("name") for one in keys_there if kind == "ANY_KEY" or one.get("source") == "api"]
    signal.setitimer(signal.ITIMER_REAL, 0)
    names = [one for one in found if isinstance(one, str) and _USUAL.fullmatch(one) and not one.startswith((":", "-"))]
    return sorted(names)[:NAMES_MAX]
