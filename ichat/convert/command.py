"""`ichat.pyz convert FILE`: writes the configuration of LiteLLM or llama-swap as iChat's TOML.

A comment stands wherever a setting means something else or has no counterpart. The result is always a configuration
that iChat accepts: a table that it would refuse becomes a comment.
"""

import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

from ichat.cli.gateway_address import USUAL_FILE
from ichat.cli.screen import note, prepare_streams
from ichat.config.command_line import CommandLineParser
from ichat.config.own_secret import private
from ichat.config.package_data import parse_toml
from ichat.convert import litellm, llama_swap
from ichat.convert.document import Document
from ichat.convert.yaml_text import TEXT_BYTES_MAX, read_yaml
from ichat.errors import EXIT_USAGE, Exit

KEYS_NAMED_MAX = 5


class _Product(NamedTuple):
    """A program with a configuration that is read."""

    title: str
    keys: Collection[str]
    """The keys by which a file is recognised."""
    convert: Callable[[Mapping[str, Any], Document], None]
    listens: str
    """Where it listens if nothing else is said: no setting of its file says that."""


PRODUCTS = {
    "litellm": _Product("LiteLLM", litellm.KEYS | litellm.OWN_KEYS, litellm.convert, "port 4000"),
    "llama-swap": _Product("llama-swap", llama_swap.KEYS, llama_swap.convert, "port 8080"),
}


def parser() -> CommandLineParser:
    """Return the parser of the command."""
    usage = CommandLineParser(
        prog="ichat.pyz convert",
        description="Write the configuration of LiteLLM or llama-swap (YAML) as iChat's TOML, with a comment at every"
        " setting that means something else here or has no counterpart.",
        allow_abbrev=False,
    )
    usage.add_argument("file", metavar="FILE", help="such as config.yaml")
    usage.add_argument(
        "--output", "-o", metavar="FILE", help=f"the new file, such as {USUAL_FILE}; else standard output"
    )
    usage.add_argument("--force", action="store_true", help="replace the new file if it is there already")
    usage.add_argument(
        "--from", dest="product", choices=PRODUCTS, help="the program of the file, if the keys do not say"
    )
    return usage


def run(argv: Sequence[str]) -> int:
    """Convert a file as the command line says. Raises Exit 64 with a sentence."""
    args = parser().parse_args(list(argv))
    prepare_streams()
    document = convert(_read(args.file), args.file, args.product)
    text = document.text()
    if args.output is None:
        sys.stdout.write(text)
    else:
        _write(args.output, text, is_secret=document.has_secrets, replaces=args.force)
    tables = sum(not table.refusal for table in document.tables)
    note(f"{args.file}: tables: {tables}; comments on settings that differ: {document.notes_count}.")
    if document.has_secrets:
        note("The result has keys or variables of the file in it: keep it to yourself.")
    note(f"Check the result: ./ichat.pyz gateway -c {shlex.quote(args.output or USUAL_FILE)} --check")
    return 0


def convert(text: str, source: str, product: str | None = None) -> Document:
    """Return the configuration in a text, which messages call `source`, as iChat's. Raises Exit 64."""
    given = _tables_in(text, source)
    program = PRODUCTS[product or _recognise(given.keys() | _signs_in(given), source)]
    document = Document(
        f"Converted from {program.title}'s configuration, {os.path.basename(source)}. {program.title} listens on"
        f" {program.listens} of every address, and iChat on 127.0.0.1:4000 unless [server_settings] says otherwise."
    )
    program.convert(given, document)
    document.judge()
    return document


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(TEXT_BYTES_MAX + 1)
        if len(data) > TEXT_BYTES_MAX:
            raise Exit(EXIT_USAGE, f"{path} is larger than {TEXT_BYTES_MAX} bytes: no configuration is.")
        return data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Exit(EXIT_USAGE, f"{path} cannot be read: {reason}.") from error


def _tables_in(text: str, source: str) -> Mapping[str, Any]:
    if not text.strip():
        raise Exit(EXIT_USAGE, f"{source} is empty: name the configuration of LiteLLM or llama-swap.")
    if _is_toml(text):
        raise Exit(EXIT_USAGE, f"{source} is TOML already: `./ichat.pyz gateway -c {shlex.quote(source)}` reads it.")
    value: Any = read_yaml(text, source)
    if value is None:
        raise Exit(EXIT_USAGE, f"{source} has comments only: name the configuration of LiteLLM or llama-swap.")
    if not isinstance(value, dict):
        raise Exit(EXIT_USAGE, f"{source} has no keys at its top: it is neither LiteLLM's nor llama-swap's.")
    return cast("dict[str, Any]", value)


def _is_toml(text: str) -> bool:
    try:
        return bool(parse_toml(text))
    except (ValueError, RecursionError):
        return False


def _signs_in(given: Mapping[str, Any]) -> set[str]:
    """Return a key of llama-swap's if the models of a file have commands: `models` alone could be another's."""
    models = given.get("models")
    values = cast("dict[str, Any]", models).values() if isinstance(models, dict) else ()
    return {"macros"} if any(isinstance(one, dict) and "cmd" in one for one in values) else set()


def _recognise(keys: Collection[str], source: str) -> str:
    found = {name: sorted(set(keys) & set(product.keys)) for name, product in PRODUCTS.items()}
    names = [name for name, signs in found.items() if signs]
    if len(names) == 1:
        return names[0]
    choice = " or ".join(f"--from {name}" for name in PRODUCTS)
    if names:
        both = " and ".join(f"{PRODUCTS[name].title}'s ({', '.join(found[name][:KEYS_NAMED_MAX])})" for name in names)
        raise Exit(EXIT_USAGE, f"{source} has keys of {both}: say {choice}.")
    named = ", ".join(sorted(keys)[:KEYS_NAMED_MAX])
    raise Exit(EXIT_USAGE, f"{source} has no key of LiteLLM's or llama-swap's, but {named}: if it is, say {choice}.")


def _write(path: str, text: str, *, is_secret: bool, replaces: bool) -> None:
    """Write a new file as a whole; only this user may read it if it has secrets. Raises Exit 64."""
    written = f"{path}.{os.urandom(4).hex()}" if replaces else path
    try:
        with open(written, "x", encoding="utf-8", opener=private if is_secret else None) as file:
            try:
                file.write(text)
                file.flush()
                os.replace(written, path)
            except OSError:
                os.unlink(written)
                raise
    except FileExistsError as error:
        raise Exit(EXIT_USAGE, f"{path} is there already: name another file, or add --force to replace it.") from error
    except OSError as error:
        raise Exit(EXIT_USAGE, f"{path} cannot be written: {error.strerror}.") from error
