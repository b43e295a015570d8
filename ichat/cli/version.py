"""`ichat.pyz version`: the version, and with `--deps` the packages that this program uses."""

import importlib.metadata
import platform
import re
from collections.abc import Iterable, Sequence

import ichat
from ichat.config.command_line import CommandLineParser
from ichat.console.files import read_file
from ichat.program import is_installed, package_directory

_NAME = re.compile(r"[\w.-]+")


def parser() -> CommandLineParser:
    """Return the parser of the command."""
    usage = CommandLineParser(prog="ichat.pyz version", description="Print the version.")
    usage.add_argument("--deps", action="store_true", help="and the packages that this program uses, with theirs")
    return usage


def run(argv: Sequence[str]) -> int:
    """Print the version, and the packages if they are wanted. Raises Exit 64."""
    wants_packages = parser().parse_args(list(argv)).deps
    print(f"ichat {ichat.__version__}")
    if wants_packages:
        print(f"Python {platform.python_version()}")
        for name, version in [*packages(), *console_packages()]:
            print(f"{name} {version}")
    return 0


def packages() -> list[tuple[str, str]]:
    """Return the name and version of each package of Python that this program uses.

    Those are all packages in the pyz. Elsewhere they are the requirements of the installed package, and theirs; a
    checkout has the requirements in its pyproject.toml alone, so there the list is empty.
    """
    if not is_installed():
        return _sorted(importlib.metadata.distributions(path=[package_directory()]))
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = _requirements(importlib.metadata.distribution("ichat"))
    while waiting:
        name = waiting.pop()
        if name not in found:
            try:
                found[name] = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:  # another platform or Python needs it
                continue
            waiting += _requirements(found[name])
    return _sorted(found.values())


def console_packages() -> list[tuple[str, str]]:
    """Return the name and version of each package of the console, as the file with their licences has them."""
    file = read_file("vendor/LICENSES.txt")
    text = file.content.decode() if file is not None else ""
    heads = [part.strip().partition("\n")[0].split(" ") for part in re.split(r"^-{80}$", text, flags=re.MULTILINE)]
    return sorted((f"console/{name}", version) for name, version in (head for head in heads if len(head) == 2))


def _requirements(distribution: importlib.metadata.Distribution) -> list[str]:
    """Return the names of a package's requirements, without those of its extras, each as a key."""
    lines = [line for line in distribution.requires or () if "extra ==" not in line]
    return [_key(found[0]) for line in lines if (found := _NAME.match(line))]


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _sorted(distributions: Iterable[importlib.metadata.Distribution]) -> list[tuple[str, str]]:
    return sorted({(_key(one.metadata["Name"]), one.version) for one in distributions})
