"""The command line: argv -> role -> trio.run -> exit code.

Heavy imports wait until the role is known, so that `--help` and `--version` answer at once.
"""

import contextlib
import importlib
import os
import re
import sys
from typing import TYPE_CHECKING, NamedTuple

from ichat import __version__
from ichat.errors import EXIT_INTERRUPTED, EXIT_SOFTWARE, EXIT_UNAVAILABLE, EXIT_USAGE, Exit
from ichat.program import as_typed_here, is_installed

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from ichat.config.command_line import CommandLineParser
    from ichat.observability.logs.pipes import TeeStream

NEEDED = {"trio": (0, 31), "h11": (0, 16), "attrs": (24, 1), "cattrs": (25, 1), "httpx": (0, 28), "psutil": (6, 0)}
"""The least versions of packages that a worker may use from its engine's environment; as in pyproject.toml."""

LAUNCHER_GRACE_S = 8.0
"""Seconds after its launcher's end until a worker that has not ended by itself is killed with its children."""
KILL_S = 1.0
PR_SET_NO_NEW_PRIVS = 38
GARBAGE_OBJECTS = 10_000
"""How many new objects make this process look for cycles. A request leaves none, but 32 at once are 1 000 objects."""
GARBAGE_ROUNDS = 50
"""Young-generation collections per collection of the middle generation.

With 2 000 streams the middle generation is 100 000 objects: in a burst of 2 000 clients it delayed all others by 40 ms.
"""
LAST_WORDS_S = 2.0
"""The longest wait for the rest of the log to be written at the gateway's end, in seconds."""


class Role(NamedTuple):
    """A command that needs no gateway."""

    form: str
    help: str
    run: "Callable[[list[str]], int]"
    parser: "Callable[[], CommandLineParser]"


def main() -> None:
    """Run the command line of this process and end it."""
    argv = sys.argv[1:]
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    try:
        code = _run(argv)
    except Exit as exit_:
        if str(exit_):
            print(str(exit_), file=sys.stderr)
        code = exit_.code
    except BrokenPipeError:
        code = 1
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _run(argv: list[str]) -> int:
    command = argv[0] if argv else ""
    if command == "help" and argv[1:]:
        return _run([argv[1], "--help"])
    if command in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0
    if command in ("-V", "--version"):
        print(f"ichat {__version__}")
        return 0
    if command in ROLES:
        return ROLES[command].run(argv[1:])
    if command in PARTS:
        return PARTS[command](argv[1:])
    from ichat.cli import commands as terminal

    if command in terminal.COMMANDS or command in terminal.ALIASES:
        return terminal.run(argv)
    if not command:
        print(_help(), end="", file=sys.stderr)
        raise Exit(EXIT_USAGE, "")
    from ichat.config.command_line import guess

    names = [*ROLES, *terminal.COMMANDS, *terminal.ALIASES]
    meant = f" (did you mean {stranger}?)" if (stranger := terminal.STRANGERS.get(command)) else guess(command, names)
    raise Exit(
        EXIT_USAGE, f"ichat.pyz: there is no command {command!r}{meant}.\n`ichat.pyz --help` lists all commands."
    )


def _help() -> str:
    from ichat.cli import commands as terminal

    roles = terminal.help_of((one.form, one.help) for one in ROLES.values()).lstrip()
    return as_typed_here(
        f"usage: {roles}\ncommands to a running gateway:\n{terminal.HELP}\n"
        "       ichat.pyz COMMAND --help             the flags of each\n       ichat.pyz --version\n"
    )


def _gateway(argv: list[str]) -> int:
    """Run a gateway. Its log goes through a thread, so that a stopped terminal does not stop the gateway."""
    import faulthandler
    import gc
    import signal

    gc.set_threshold(GARBAGE_OBJECTS, GARBAGE_ROUNDS)
    signal.signal(signal.SIGHUP, _ignore)  # until the reloader handles it
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable()  # a watchdog's SIGABRT shows where the process hung
    from functools import partial

    from ichat.service_manager import Notifier

    notifier = Notifier.taken_from(os.environ)
    from ichat.roles import gateway

    config, file = gateway.read_command_line(argv)
    takes_over = gateway.asks_for_takeover(argv)
    import trio

    from ichat.observability.logs.pipes import Tee, TeeStream

    tee = Tee(sys.stderr.fileno(), config.logs.echo_bytes_max)
    _prepare(config.server_settings.log_level, TeeStream(tee), config.logs.format)
    try:
        trio.run(partial(gateway.run, config, file, notifier=notifier, takes_over=takes_over))
    finally:
        tee.close(LAST_WORDS_S)
    return 0


def _key(argv: list[str]) -> int:
    """Make a key and print it; it is stored nowhere."""
    from ichat.config.checks import KEY_NAME
    from ichat.security.keys import hash_of, new_key

    name, key = _key_parser().parse_args(argv).name, new_key()
    if not KEY_NAME.fullmatch(name):
        raise Exit(EXIT_USAGE, "ichat.pyz key: NAME must be 1 to 128 letters, digits or any of . _ : @ -")
    print(f"{key}\n")
    print("# The key is stored nowhere: give it to its owner now. The gateway knows it by its hash:\n")
    print(f'[[security.keys]]\nname = "{name}"\nkey_hash = "{hash_of(key)}"\n')
    print(f'# or, for the operators\' key:\n\n[security]\nadmin_key_hash = "{hash_of(key)}"')
    return 0


def _key_parser() -> "CommandLineParser":
    from ichat.config.command_line import CommandLineParser

    usage = CommandLineParser(prog="ichat.pyz key", description="Make a key, and print the configuration for it.")
    usage.add_argument("name", metavar="NAME", nargs="?", default="someone", help="the key's name in logs and limits")
    return usage


def _complete() -> None:
    """Write the words that a shell asks for with a TAB, and end the process."""
    from ichat.cli import commands as terminal
    from ichat.cli.completion import complete

    def parser_of(name: str) -> "CommandLineParser":
        return ROLES[name].parser() if name in ROLES else terminal.parser_of(terminal.ALIASES.get(name, name))

    helps = {name: one.help for name, one in (ROLES | terminal.COMMANDS).items()}
    complete(helps | {alias: f"the same as {name}" for alias, name in terminal.ALIASES.items()}, parser_of)


def _parser_in(module: str) -> "CommandLineParser":
    """Return the parser of a module that is imported only now."""
    return importlib.import_module(f"ichat.{module}").parser()


def _command_in(module: str, form: str, description: str) -> Role:
    """Return the command that is in a module, with `run` and `parser`; it is imported for a call."""

    def run(argv: list[str]) -> int:
        return importlib.import_module(f"ichat.{module}").run(argv)

    return Role(form, description, run, lambda: _parser_in(module))


def _ignore(*_: object) -> None:
    """Do nothing at a signal; unlike SIG_IGN, no child inherits that."""


def _relay(argv: list[str]) -> int:
    """Run a process that moves bytes for a gateway, which starts it: standard input is a socket to the gateway."""
    import gc
    import signal
    import socket

    gc.set_threshold(GARBAGE_OBJECTS, GARBAGE_ROUNDS)
    signal.signal(signal.SIGHUP, _ignore)
    from ichat.config.command_line import CommandLineParser

    usage = CommandLineParser(prog="ichat.pyz relay", description="Move bytes for a gateway, which starts this itself.")
    for flag in ("--state", "--number", "--log-format", "--log-level"):
        usage.add_argument(flag, required=True)
    options = usage.parse_args(argv)
    try:
        descriptors = socket.socket(fileno=os.dup(0))
    except OSError as error:
        raise Exit(EXIT_USAGE, "ichat.pyz relay: only a gateway starts this (server_settings.relays).") from error
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    import trio

    from ichat.relays import relay_process

    _prepare(options.log_level, sys.stderr, options.log_format, f"relay {options.number}: ")
    _give_up_rights()
    trio.run(relay_process.run, descriptors, int(options.number), options.state)
    return 0


def _download(argv: list[str]) -> int:
    """Run the process of a download, which `pull` or a gateway starts."""
    _engine_first()
    return importlib.import_module("ichat.downloads.process").run(argv)


def _give_up_rights() -> None:
    """Dump no memory, and gain no rights by another program. Workers may, and so may their gateway."""
    import ctypes
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _worker(argv: list[str]) -> int:
    """Run a worker. It ends by `os._exit`, since an engine's clean-up at the interpreter's end needs seconds."""
    import gc

    gc.set_threshold(GARBAGE_OBJECTS)  # an engine may set its own
    if "--order" in {word.partition("=")[0] for word in argv}:
        from ichat.roles import guard

        return guard.main(argv, _prepare)
    if not {"-h", "--help"}.intersection(argv):
        _engine_first()
    from ichat.roles import worker
    from ichat.security.keys import take_token

    token = take_token(os.environ)
    options, engine_argv = worker.read_command_line(argv)
    import trio

    from ichat.supervisor.processes import end_without_launcher, kill_own_children, launcher_pipe

    pipe = launcher_pipe()
    if pipe is not None:
        end_without_launcher(pipe, LAUNCHER_GRACE_S, KILL_S, EXIT_SOFTWARE)
    capture = None
    if options.log_streaming and not (options.explain_args or options.list_flags):
        from ichat.observability.logs.capture import Capture
        from ichat.observability.logs.lines import LineBuffer

        capture = Capture(LineBuffer())
    _prepare("info", sys.stderr, options.log_format)
    code = EXIT_SOFTWARE
    try:
        if options.explain_args:
            print(worker.explain_args(options, engine_argv))
        elif options.list_flags:
            print(worker.list_flags(options))
        else:
            trio.run(worker.run, options, engine_argv, capture, token)
        code = 0
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Exit as exit_:
        code = exit_.code
        with contextlib.suppress(OSError):  # the reader may be gone
            print(str(exit_), end="\n" if str(exit_) else "", file=sys.stderr)
    except BaseException:  # noqa: ASYNC103
        import traceback

        with contextlib.suppress(OSError):
            traceback.print_exc()
    kill_own_children(5.0)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if capture is not None:
        capture.close()
    os._exit(code)


def _engine_first() -> None:
    """Prefer the engine's own packages to the bundle's: move the bundle to the end of the path.

    Raises Exit 69 if any of them is too old.
    """
    bundle = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if is_installed() or os.path.basename(bundle) != "site-packages" or bundle not in sys.path:
        return
    sys.path.remove(bundle)
    sys.path.append(bundle)
    from importlib.metadata import version

    for name, least in NEEDED.items():
        found = tuple(int(part) for part in re.findall(r"\d+", version(name))[:2])
        if found < least:
            wanted = ".".join(map(str, least))
            raise Exit(
                EXIT_UNAVAILABLE,
                f"{sys.executable} has {name} {version(name)}, and iChat needs {wanted} or newer: run the worker with"
                " the interpreter of an engine's own environment (`./build engine NAME` makes it).",
            )


def _prepare(log_level: str, stream: "TextIO | TeeStream", form: str, prefix: str = "") -> None:
    """Write the log to a stream from now on. Each message begins with the prefix."""
    import logging
    import resource

    from ichat.observability.logs.log_format import formatter_of

    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter_of(form, sys.stderr.fileno()))

    def begin_with_prefix(record: logging.LogRecord) -> bool:
        record.msg = f"{prefix}{record.msg}"
        return True

    def name_commands(record: logging.LogRecord) -> bool:
        record.msg = as_typed_here(str(record.msg))
        return True

    if is_installed():
        handler.addFilter(name_commands)
    if prefix:
        handler.addFilter(begin_with_prefix)
    logging.basicConfig(level=log_level.upper(), handlers=[handler])
    ours = logging.getLogger("ichat")  # apart, since engines configure the root as they like
    ours.addHandler(handler)
    ours.setLevel(log_level.upper())
    ours.propagate = False
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").propagate = False  # it writes its lines itself: here they would appear twice
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


ROLES = {
    "gateway": Role(
        "gateway [-c FILE]", "a single OpenAI-compatible entry to many models", _gateway,
        lambda: _parser_in("roles.gateway"),
    ),
    "keep": _command_in("roles.keep", "keep gateway [-c FILE]", "the same in a container: started again after a crash"),
    "worker": Role(
        "worker [FLAGS]", "a model, served with vLLM or SGLang in this process", _worker,
        lambda: _parser_in("roles.worker_options"),
    ),
    "key": Role("key [NAME]", "make a key, and the configuration table for it", _key, _key_parser),
    "doctor": _command_in("doctor.examination", "doctor [-c FILE]", "report problems here, and their remedies"),
    "estimate": _command_in("cli.estimate", "estimate MODEL_PATH [FLAGS]", "the GPU memory that a model needs"),
    "pull": _command_in("cli.pull", "pull MODEL", "download a model from a hub, with its progress"),
    "place": _command_in("cli.place", "place --dry-run [-c FILE | MODEL_PATH]", "the GPUs that workers would get here"),
    "convert": _command_in("convert.command", "convert FILE [-o FILE]", "LiteLLM's or llama-swap's YAML as our TOML"),
    "sweep": _command_in("cli.sweep", "sweep [DIR | -c FILE]", "end the processes that a gateway has left"),
    "version": _command_in("cli.version", "version [--deps]", "the version, and the packages inside"),
    "config": _command_in("admin.config_schema", "config schema", "the configuration as JSON schema, for editors"),
    "completion": _command_in(
        "cli.completion", "completion SHELL", "what makes bash, zsh or fish complete these lines"
    ),
}  # fmt: skip
"""The commands that need no gateway."""
PARTS = {"relay": _relay, "download": _download}
"""The commands that other processes of iChat start themselves."""


if __name__ == "__main__":
    main()
