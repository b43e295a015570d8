"""Talking to a model: a single answer to a prompt, or a conversation."""

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from ichat.cli.client import EXIT_REFUSED, Api, Event, RequestRefused
from ichat.cli.json_values import Json, object_of, objects_of, parse_object
from ichat.cli.screen import Screen, Spinner, clean, note, one_line
from ichat.config.command_line import guess
from ichat.errors import EXIT_USAGE, Exit

SILENCE_S = 600.0
"""The longest silence of a model, in seconds."""
PROMPT = "> "
MORE = "… "
RATED_TOKENS_MIN, RATED_S_MIN = 20, 0.1
"""Tokens per second are shown from this many tokens and seconds on: for less they mean nothing."""
HELP = (
    "/clear          forget the conversation",
    "/model [NAME]   show the model that answers, or have another model go on",
    "/system [TEXT]  show the system prompt, or set another",
    "/bye, /exit     end, as Ctrl-D does",
    "Ctrl-C stops an answer; a \\ at the end of a line goes on in the next line",
)
COMMANDS = ("/help", "/clear", "/model", "/system", "/bye", "/exit", "/quit")


def add_chat_flags(usage: argparse.ArgumentParser) -> None:
    """Add the flags of `chat`."""
    usage.add_argument(
        "model", metavar="MODEL", nargs="?", help="its name, as `models` has it; left out: the only model there is"
    )
    add_answer_flags(usage)


def add_answer_flags(usage: argparse.ArgumentParser) -> None:
    """Add the prompt, and the flags that determine the answer."""
    usage.add_argument(
        "prompt", metavar="PROMPT", nargs="*", default=[], help="ask this only; a word - is standard input"
    )
    usage.add_argument("--system", metavar="TEXT", help="the system prompt")
    usage.add_argument("--max-tokens", type=int, metavar="N", help="the longest answer")
    usage.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token")


def run_chat(api: Api, screen: Screen, args: argparse.Namespace) -> int:
    """Talk to a model."""
    return Chat(api, screen, args).run()


class BrokenOff(Exit):
    """An answer ended early; its received part stays."""

    def __init__(self, sentence: str) -> None:
        super().__init__(EXIT_REFUSED, sentence)


class Reply:
    """An answer, shown as it arrives."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._wait: Spinner | None = None
        """Shows the reason for the wait."""
        self._asked_at = time.monotonic()
        self._first_at: float | None = None
        self._last_at = 0.0
        self._pieces = 0
        self._usage: Json = {}
        self._finish = ""
        self._is_thinking = False
        self._line_open = False
        self.text = ""
        self.is_done = False

    def __repr__(self) -> str:
        return f"<Reply of {self._pieces} pieces{', done' if self.is_done else ''}>"

    def add(self, event: Event) -> None:
        """Process an event, and show its new text. Raises BrokenOff for an error."""
        if event.data == "[DONE]":
            self.is_done = True
            return
        chunk = parse_object(event.data)
        if "error" in chunk:
            error = object_of(chunk["error"])
            raise BrokenOff(one_line(error.get("message") or chunk["error"]))
        self._usage = object_of(chunk.get("usage")) or self._usage
        for choice in objects_of(chunk.get("choices"))[:1]:
            delta = object_of(choice.get("delta"))
            self._finish = str(choice.get("finish_reason") or self._finish)
            self._piece(delta.get("reasoning") or delta.get("reasoning_content"), thought=True)
            self._piece(delta.get("content"), thought=False)

    def show_wait(self, comment: str) -> None:
        """Show the gateway's comment on a terminal while the answer waits, until the answer begins."""
        if self._first_at is not None or not comment.strip() or not sys.stderr.isatty():
            return
        if self._wait is None:
            self._wait = Spinner().__enter__()
        self._wait.show(comment)

    def end_wait(self) -> None:
        """Remove the comment that was shown while the answer waited."""
        if self._wait is not None:
            self._wait.__exit__(None, None, None)
            self._wait = None

    def _piece(self, text: Any, *, thought: bool) -> None:
        if not isinstance(text, str) or not text:
            return
        self.end_wait()
        self._last_at = time.monotonic()
        self._first_at = self._first_at or self._last_at
        self._pieces += 1
        if self._is_thinking and not thought:
            self._end_line()
        self._is_thinking = thought
        if not thought:
            self.text += text
        shown = clean(text)
        if not thought or self._screen.is_terminal:
            self._screen.write(shown, "dim" if thought else "")
            self._line_open = not shown.endswith("\n") if shown else self._line_open

    def _end_line(self) -> None:
        if self._line_open:
            self._screen.line("")
        self._line_open = False

    def end(self) -> None:
        """Show how fast it was, on standard error."""
        self._end_line()
        if self._first_at is None:
            return
        exact = self._usage.get("completion_tokens")
        tokens = exact if isinstance(exact, int) else self._pieces
        spent_s = self._last_at - self._first_at
        words = [f"{'' if isinstance(exact, int) else 'about '}{tokens} tokens"]
        if tokens >= RATED_TOKENS_MIN and spent_s >= RATED_S_MIN:
            words.append(f"{(tokens - 1) / spent_s:.1f} tokens/s")
        words.append(f"the first after {self._first_at - self._asked_at:.2f} s")
        if self._finish not in ("", "stop"):
            words.append(f"ended by {one_line(self._finish)}")
        note(f"[{', '.join(words)}]", "dim")


class Chat:
    """A conversation with a model."""

    def __init__(self, api: Api, screen: Screen, args: argparse.Namespace) -> None:
        self._api = api
        self._screen = screen
        self._args = args
        self._messages: list[Json] = [{"role": "system", "content": args.system}] if args.system else []

    def __repr__(self) -> str:
        return f"<Chat with {self._args.model}, {len(self._messages)} messages>"

    def run(self) -> int:
        """Ask once if a prompt is given or standard input is no terminal; else converse."""
        self._screen.prepare()
        if self._args.model is None:
            self._args.model = _only_model(self._api)
        words = self._args.prompt
        if not words and sys.stdin.isatty():
            if self._args.json:
                raise Exit(EXIT_USAGE, "--json needs a prompt as an argument or on standard input.")
            return self._converse()
        prompt = "\n".join(sys.stdin.read() if word == "-" else word for word in _joined(words or ["-"]))
        if not prompt.strip():
            raise Exit(EXIT_USAGE, "The prompt is empty.")
        self._ask(prompt)
        return 0

    def _converse(self) -> int:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]
        note(f"{one_line(self._args.model)}: /help lists commands, Ctrl-C stops an answer, Ctrl-D ends.", "dim")
        while True:
            try:
                prompt = self._read_prompt()
            except EOFError:
                self._screen.line("")
                return 0
            except KeyboardInterrupt:
                self._screen.line("")
                note("Ctrl-D ends.", "dim")
                continue
            if not prompt.strip():
                continue
            try:
                if re.match(r"/\w*(\s|$)", prompt) or prompt.strip() in ("exit", "quit", "bye", "help"):
                    if not self._obey(*prompt.strip().partition(" ")[::2]):
                        return 0
                else:
                    self._ask(prompt)
            except KeyboardInterrupt:
                note("[stopped]", "dim")
            except Exit as error:
                if isinstance(error, RequestRefused) and error.status in (401, 403, 404):
                    raise
                note(str(error), "red")

    def _obey(self, command: str, rest: str) -> bool:
        """Carry out a command; return whether the conversation goes on."""
        first, rest = self._messages[:1], rest.strip()
        told = first if first and first[0]["role"] == "system" else []
        match command:
            case "/bye" | "/exit" | "/quit":
                return False
            case "/clear":
                self._messages = told
                note("Forgotten.", "dim")
            case "/model" if rest:
                names = _models(self._api)
                if rest in names:
                    self._args.model = rest
                note(f"{one_line(rest)} goes on." if rest in names else _no_model(rest, names), "dim")
            case "/model":
                note(f"{one_line(self._args.model)}; here: {', '.join(_models(self._api)) or 'none'}", "dim")
            case "/system" if rest:
                self._messages = [{"role": "system", "content": rest}, *self._messages[len(told) :]]
                note("Each conversation begins with this from now on.", "dim")
            case "/system":
                note(clean(told[0]["content"]) if told else "A conversation begins with nothing.", "dim")
            case "/help":
                for line in HELP:
                    note(line, "dim")
            case "exit" | "quit" | "bye" | "help":
                note(f"/{command} is a command here; with a blank before it, it is a prompt.", "dim")
            case _:
                note(f"There is no {command}{guess(command, COMMANDS)}; /help lists what there is.", "dim")
        return True

    def _read_prompt(self) -> str:
        lines: list[str] = []
        while not lines or lines[-1].endswith("\\"):
            prompt = MORE if lines else PROMPT
            if not self._screen.is_terminal:
                sys.stderr.write(prompt)
                sys.stderr.flush()
                prompt = ""
            lines.append(input(prompt))
        return "\n".join(line.removesuffix("\\") for line in lines)

    def _ask(self, prompt: str) -> None:
        """Show the answer to a prompt. Both stay in the conversation, even if the answer was stopped."""
        args = self._args
        messages = [*self._messages, {"role": "user", "content": prompt}]
        body: Json = {"model": args.model, "messages": messages, "stream": True}
        body["stream_options"] = {"include_usage": True}
        options = {"max_tokens": args.max_tokens, "temperature": args.temperature}
        body |= {name: value for name, value in options.items() if value is not None}
        reply = Reply(self._screen)
        try:
            self._receive(reply, body)
        finally:
            reply.end_wait()
            if not args.json:
                reply.end()
            if reply.text:
                self._messages = [*messages, {"role": "assistant", "content": reply.text}]

    def _receive(self, reply: Reply, body: Json) -> None:
        path, shown = "/v1/chat/completions", None if self._args.json else reply.show_wait
        with self._api.events("POST", path, silence_s=SILENCE_S, body=body, on_comment=shown) as events:
            for event in events:
                if not self._args.json:
                    reply.add(event)
                elif event.data != "[DONE]":
                    self._screen.line(event.data)
                    _raise_error(event)
                else:
                    reply.is_done = True
        if not reply.is_done:
            raise BrokenOff("The answer broke off.")


def _models(api: Api) -> list[str]:
    return [one_line(one.get("id")) for one in objects_of(api.get("/v1/models").value.get("data"))]


def _only_model(api: Api) -> str:
    """Return the name of the only model that can be asked for. Raises Exit 64 if there is none, or more."""
    names = _models(api)
    if len(names) == 1:
        return names[0]
    if names:
        raise Exit(EXIT_USAGE, f"ichat.pyz chat: name one of the models here: {', '.join(names)}.")
    raise Exit(EXIT_USAGE, "No model can be asked for yet: `ichat.pyz run MODEL` launches one.")


def _no_model(name: str, names: Sequence[str]) -> str:
    return f"There is no model {one_line(name)}{guess(name, names)}; here: {', '.join(names) or 'none'}."


def _joined(words: list[str]) -> list[str]:
    """Join the words of a prompt by blanks; standard input stands on lines of its own."""
    parts: list[str] = []
    for word in words:
        if parts and word != "-" and parts[-1] != "-":
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    return parts


def _raise_error(event: Event) -> None:
    error = parse_object(event.data).get("error")
    if error is not None:
        raise BrokenOff(one_line(object_of(error).get("message") or error))
