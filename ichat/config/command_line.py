"""Command lines: an error is one sentence and an exit code."""

import argparse
from typing import NoReturn

from ichat.errors import EXIT_USAGE, Exit


class CommandLineParser(argparse.ArgumentParser):
    """A parser that raises Exit 64 with one sentence, where argparse would print its usage and end the process."""

    def error(self, message: str) -> NoReturn:
        raise Exit(EXIT_USAGE, f"{self.prog}: {message}")
