"""Command lines: an error is a sentence and an exit code."""

import argparse
from collections.abc import Iterable
from typing import NoReturn

from ichat.errors import EXIT_USAGE, Exit
from ichat.program import as_typed_here


class CommandLineParser(argparse.ArgumentParser):
    """A parser that raises Exit 64 with a sentence, where argparse would print its usage and end the process."""

    def format_help(self) -> str:
        """Return the help."""
        return as_typed_here(super().format_help())

    def error(self, message: str) -> NoReturn:
        flag = message.removeprefix("unrecognized arguments: ").partition(" ")[0].partition("=")[0]
        meant = guess(flag, self._option_string_actions) if flag.startswith("--") else ""
        raise Exit(EXIT_USAGE, f"{self.prog}: {message}{meant}")


def guess(word: str, known: Iterable[str]) -> str:
    """Return the words that may have been meant, for a sentence: ` (did you mean worker or workers?)`, or nothing."""
    import difflib

    names = list(known)
    near = [name for name in names if len(word) > 1 and name.startswith(word)]
    near = list(dict.fromkeys([*near, *difflib.get_close_matches(word, names, 2, 0.6)]))[:2]
    return f" (did you mean {' or '.join(near)}?)" if near else ""
