"""Hugging Face transformers' own server as an engine of iChat.

This is what iChat asks of an engine (`Engine` in `ichat.engines.engine`). What knows transformers is in `server.py`,
which is imported only by `Transformers.parse`.
"""

import argparse
import asyncio
import importlib.metadata
import json
import pathlib
import platform
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import ichat
from ichat.engines.engine import (
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    BodyTransform,
    EngineInfo,
    Exit,
    FlagOutcome,
    ModelCard,
    Progress,
    ProtocolAdapter,
    Request,
    Serve,
    members_of,
    model_not_found,
    spliced,
    value_of,
)

if TYPE_CHECKING:
    from ichat_transformers.server import Server

TESTED = "5.19"


class OurFlags(argparse.ArgumentParser):
    """The flags that a worker passes to every engine; all others are those of `transformers serve`."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("--model", default="")
        self.add_argument("--served-model-name", nargs="+", default=[])
        self.add_argument("--host")
        self.add_argument("--port")

    def error(self, message: str) -> NoReturn:
        """Raise Exit 64."""
        raise _usage(message)


class OneModel(ProtocolAdapter):
    """Makes requests fit the server; its errors need no change of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Sequence[str] = ()

    async def request(self, request: Request) -> BodyTransform | None:
        """Rename the model, which may have several names, and the number of tokens to what the server knows."""
        if request.method == b"POST" and request.body[:64].lstrip().startswith(b"{"):
            members = await members_of(request.body)
            names = {member.name for member in members}
            spans: list[tuple[int, int, bytes]] = []
            for member in members:
                if member.name == "model":
                    name = value_of(request.body, member)
                    if name not in self.names:
                        raise model_not_found(str(name), self.names)
                    spans.append((member.value_start, member.end, json.dumps(self.names[0]).encode()))
                elif member.name == "max_completion_tokens" and "max_tokens" not in names:
                    spans.append((member.start, member.value_start, b'"max_tokens": '))
            request.body = spliced(request.body, spans)
        return await super().request(request)


class Transformers:
    """One model in the server of transformers."""

    name = "transformers"

    def __init__(self) -> None:
        self.adapter = OneModel()
        self._server: Server | None = None

    def check(self) -> None:
        """Look for the packages that transformers declares for its server, without importing them."""
        try:
            needs = importlib.metadata.requires("transformers") or []
        except importlib.metadata.PackageNotFoundError:
            needs = ["transformers; extra == 'serving'"]
        names = [re.split(r"[^\w.-]", line)[0] for line in needs if re.search("extra == .serving.", line)]
        missing = [name for name in names if not any(importlib.metadata.distributions(name=name))]
        if missing:
            raise Exit(
                EXIT_UNAVAILABLE,
                f"{', '.join(missing)} is not installed for {sys.executable}, which the engine needs: install"
                " transformers[serving] there, or run the worker with an interpreter that has it.",
            )

    def parse(self, argv: Sequence[str]) -> EngineInfo:
        """Read the options with the server's own parser, and make the server, which checks their values."""
        ours, theirs = OurFlags().parse_known_args(list(argv))
        try:
            from ichat_transformers.server import REFUSED, Server, read_options
        except ImportError as error:
            raise Exit(
                EXIT_UNAVAILABLE,
                f"transformers under {sys.executable} cannot be used ({error}); this engine was written for"
                f" transformers {TESTED}.",
            ) from error
        try:
            options = read_options(theirs)
            if not ours.model:
                raise _usage("--model is missing")
            if ours.model.startswith(("/", "./", "../", "~")) and not pathlib.Path(ours.model).expanduser().exists():
                raise _usage(f"the model {ours.model} does not exist")
            names = ours.served_model_name or [ours.model]
            self._server = Server(ours.model, names, options)
        except REFUSED as error:
            raise _usage(error.format_message()) from error
        except KeyError as error:  # of the levels of the log
            raise _usage(f"{error} is no value that it knows") from error
        except (ValueError, TypeError) as error:
            raise _usage(str(error)) from error
        self.adapter.names = names
        return EngineInfo(
            model_path=ours.model,
            model_names=names,
            args=json.loads(json.dumps({**options, "model": ours.model, "served_model_name": names}, default=str)),
            versions={
                "ichat": ichat.__version__,
                "transformers": importlib.metadata.version("transformers"),
                "torch": importlib.metadata.version("torch"),
                "python": platform.python_version(),
            },
            flag_outcomes=_outcomes(ours, theirs),
        )

    def run(self, *, phase: Callable[[str], None], serve: Serve) -> None:
        """Load the model and serve it."""
        assert self._server is not None
        self._server.load(phase)
        asyncio.run(self._server.serve(serve))

    def why_dead(self) -> str | None:
        """Return why a thread of the server has ended, or None."""
        return self._server.why_dead() if self._server else None

    def progress(self) -> Progress:
        """Return the calls of the model's `generate`, or the scheduler's requests."""
        return self._server.progress() if self._server else Progress()

    def models(self) -> Sequence[ModelCard]:
        """Return the one model, under each of its names."""
        return self._server.models() if self._server else []


def _outcomes(ours: argparse.Namespace, theirs: Sequence[str]) -> list[FlagOutcome]:
    """Return what becomes of each argument; the server's own parser gets the others unchanged."""
    outcomes = [FlagOutcome(["--model", ours.model], [ours.model], "transformers serve takes the model without a flag")]
    if ours.served_model_name:
        names = ["--served-model-name", *ours.served_model_name]
        outcomes.append(FlagOutcome(names, [], "transformers serve has no names for its model; this engine gives them"))
    for word in theirs:
        if word.startswith("-"):
            outcomes.append(FlagOutcome([word], [word]))
        else:
            words = [*outcomes.pop().given, word]
            outcomes.append(FlagOutcome(words, words))
    return outcomes


def _usage(message: str) -> Exit:
    return Exit(EXIT_USAGE, f"transformers serve refuses these arguments: {' '.join(message.split())}")
