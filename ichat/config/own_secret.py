"""The secret by which a gateway recognizes its own user: its place, and how programs of that user find it.

`secret` in the state directory has it, for the gateway's user alone, and stays from start to start. While the
gateway runs, `lock` there has its process and the addresses at which it listens, each on a line. A directory that is
not the port's usual directory is named by `PORT.at` beside the usual directories.
"""

import contextlib
import ipaddress
import os
import re
import secrets
import urllib.parse
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it is heavy, and commands begin quickly
    from ichat.config.schema import ServerSettings

GATEWAY = "http://127.0.0.1:4000"
"""The address of a gateway that is not configured."""
LOCK_FILE = "lock"
SECRET_FILE = "secret"  # noqa: S105
SYSTEM_DIRECTORY = "/var/lib/ichat"
"""The state directory of a gateway that runs as the example's service."""
_BYTES_MAX = 65_536
_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")


def private(path: str, flags: int) -> int:
    """Open a file that is for this user alone if it is new; an `opener` of `open`. Raises OSError."""
    return os.open(path, flags, 0o600)


def configured_directory(settings: "ServerSettings") -> str | None:
    """Return the state directory that the configuration or the service manager names."""
    if settings.state_directory is not None:
        return os.path.abspath(settings.state_directory)
    return os.environ.get("STATE_DIRECTORY", "").partition(":")[0] or None


def directory_for(settings: "ServerSettings") -> str | None:
    """Return the state directory that a gateway with these settings uses; None: it makes a temporary directory."""
    configured = configured_directory(settings)
    return configured if configured is not None or settings.port == 0 else usual_directory(settings.port)


def usual_directory(port: int) -> str:
    """Return the state directory of this user's gateway on this port, if none is configured."""
    return os.path.join(state_base(), str(port))


def state_base() -> str:
    """Return the directory in which this user's gateways keep their state, and all programs of iChat engines' flags."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(home, "ichat")


def keep_secret(directory: str) -> str:
    """Return the secret in a state directory of this user. Raises OSError.

    Another secret is made if there is none, or if others could have read it.
    """
    path = os.path.join(directory, SECRET_FILE)
    found = _read_own(path).strip()
    if _SECRET.fullmatch(found) and not os.stat(path).st_mode & 0o077:
        return found
    made = secrets.token_urlsafe(32)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path + ".new")
    with open(path + ".new", "x", opener=private) as file:
        file.write(made + "\n")
    os.replace(path + ".new", path)
    return made


@contextlib.contextmanager
def announced(directory: str, addresses: Sequence[tuple[str, int]]) -> Generator[None]:
    """Write this gateway's addresses into the state directory, and beside the usual directories, during the context.

    `addresses` are IP addresses with their ports. Errors while writing are ignored: then the secret is found by
    `--config` alone.
    """
    lines = [str(os.getpid()), *(f"{address} {port}" for address, port in addresses)]
    with contextlib.suppress(OSError), open(os.path.join(directory, LOCK_FILE), "r+") as file:  # it is locked
        file.truncate()
        file.write("\n".join(lines) + "\n")
    port = addresses[0][1]
    pointer = usual_directory(port) + ".at"
    is_elsewhere = os.path.abspath(directory) != usual_directory(port)
    if is_elsewhere:
        with contextlib.suppress(OSError):
            os.makedirs(state_base(), mode=0o700, exist_ok=True)
            with open(pointer, "w", opener=private) as file:
                file.write(directory + "\n")
    try:
        yield
    finally:
        # another process may have got the gateway, and announces it in the same way
        is_own = _read_own(os.path.join(directory, LOCK_FILE)).partition("\n")[0] == lines[0]
        if is_elsewhere and is_own and _read_own(pointer).strip() == directory:
            with contextlib.suppress(OSError):
                os.unlink(pointer)


def find_secret(url: str, directory: str | None = None) -> tuple[str, str] | None:
    """Return the secret of the gateway that runs at a URL of this machine, and the URL to send it to.

    It is this user's gateway, or root may read it; `directory` is its state directory, if known. The URL has
    an address at which the gateway itself listens: at another loopback address another user's process may. None where
    there is no such gateway.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return None
    wanted, usual = parts.hostname or "", usual_directory(port)
    for place in filter(None, (directory, usual, _read_own(usual + ".at").strip(), SYSTEM_DIRECTORY)):
        found = _secret_in(place)
        for address, its_port in _addresses_in(place) if found else ():
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
            if its_port == port and (wanted == host or (wanted == "localhost" and _is_loopback(host))):
                shown = f"[{host}]" if ":" in host else host
                return found, url if wanted == host else parts._replace(netloc=f"{shown}:{port}").geturl()
    return None


def local_url(host: str, port: int, *, has_tls: bool) -> str:
    """Return the URL by which its own machine reaches a gateway that listens on `host`."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{'https' if has_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def is_running(directory: str | None) -> bool:
    """Return whether a gateway runs with a state directory, as far as this user sees it."""
    return directory is not None and bool(_addresses_in(directory))


def console_link(url: str, secret: str) -> str:
    """Return the link that opens the console of the gateway at a URL; with a secret, as the gateway's own user."""
    return f"{url}/console/" + (f"#key={secret}" if secret else "")


def _secret_in(directory: str) -> str:
    """Return the secret of a state directory that its owner alone may change; "" if there is none for this user."""
    try:
        mode, owner = os.stat(directory).st_mode, os.stat(directory).st_uid
    except OSError:
        return ""
    found = _read_own(os.path.join(directory, SECRET_FILE), owner).strip()
    return found if not mode & 0o022 and _SECRET.fullmatch(found) else ""


def _addresses_in(directory: str) -> list[tuple[str, int]]:
    """Return the addresses of the gateway that runs with a state directory; none if its user has no such process."""
    pid, *lines = _read_own(os.path.join(directory, LOCK_FILE), None).splitlines() or [""]
    try:
        is_there = pid.isdecimal() and os.stat(f"/proc/{pid}").st_uid == os.stat(directory).st_uid
    except OSError:
        is_there = False
    if not is_there:
        return []
    pairs = [line.split(" ") for line in lines]
    return [(pair[0], int(pair[1])) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()]


def _read_own(path: str, owner: int | None = -1) -> str:
    """Return the text of a file of this user, or of `owner`, or, with None, of any user; "" if there is none."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), encoding="utf-8") as file:
            is_right = owner is None or os.fstat(file.fileno()).st_uid == (os.geteuid() if owner == -1 else owner)
            return file.read(_BYTES_MAX) if is_right else ""
    except (OSError, UnicodeError):
        return ""


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
