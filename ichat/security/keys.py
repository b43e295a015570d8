"""Keys: made at random, known by their hashes, and handed to a worker so that no other process sees them.

A key has 256 random bits, so a plain SHA-256 of it discloses nothing. Unlike a password, it needs no salt or slowness.
"""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping, MutableMapping

from ichat.config.ray import RaySettings
from ichat.errors import EXIT_USAGE, Exit, forbidden

PREFIX = "sk-ichat-"
TOKEN_VARIABLE = "ICHAT_JOIN_TOKEN"  # noqa: S105
"""Holds the token of a worker that was started by hand."""
TOKEN_FD_VARIABLE = "ICHAT_JOIN_TOKEN_FD"  # noqa: S105
"""Names the descriptor of a pipe that has the token of a worker that a gateway started."""
CHARACTERS_MIN = 16
"""A key shorter than this could be guessed."""
_TOKEN_BYTES_MAX = 4096
_KEY = re.compile(rf"[!-~]{{{CHARACTERS_MIN},1024}}")


_KEY_VARIABLE = re.compile(r"ICHAT_\w*(?:KEY|TOKEN)\w*")
"""Variables of iChat's own that have keys, whether or not a configuration names them: the commands read some."""
_read: set[str] = set()
"""The variables of this process' environment that keys were read from, by any configuration."""


def new_key() -> str:
    """Return a new key."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: bytes) -> bytes:
    """Return the 32 bytes by which a key is known."""
    return hashlib.sha256(key).digest()


def hash_of(key: str) -> str:
    """Return a key's hash as the configuration has it: ``sha256:`` and 64 hexadecimal digits."""
    return f"sha256:{digest_of(key.encode()).hex()}"


def proof_of(token: bytes) -> bytes:
    """Return a proof of knowledge of the token, which cannot be used in its place (RFC 2104)."""
    return hmac.new(token, b"ichat gateway", hashlib.sha256).hexdigest().encode()


def bearer_of(value: bytes) -> bytes:
    """Return the key in an `Authorization` (RFC 6750), or the whole value if it is of another kind."""
    scheme, _, given = value.partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else value


class Seal:
    """Signs texts that this process sends to itself: no other process can sign them."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def __repr__(self) -> str:
        return "<Seal>"

    def sign(self, text: bytes) -> bytes:
        """Return a text after its signature."""
        return b"%b %b" % (hmac.new(self._secret, text, hashlib.sha256).hexdigest().encode(), text)

    def verified(self, signed: str) -> str:
        """Return a text without its signature. Raises ApiError 403 for another's."""
        _, _, text = signed.partition(" ")
        if not hmac.compare_digest(self.sign(text.encode("latin-1", "replace")), signed.encode("latin-1", "replace")):
            raise forbidden("This gateway has not signed the sender of this request.")
        return text


def read_key(variable: str) -> str:
    """Return the value of an environment variable, "" if there is none, and remember that it holds a key."""
    _read.add(variable)
    return os.environ.get(variable, "")


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for another program: without the variables that hold keys, or have held a key."""
    return {
        name: value for name, value in environment.items() if name not in _read and not _KEY_VARIABLE.fullmatch(name)
    }


def key_in(variable: str, where: str) -> str:
    """Return a key of the environment; `where` is what messages call the place that names it. Raises Exit 64."""
    key = read_key(variable)
    if not _KEY.fullmatch(key):
        raise Exit(
            EXIT_USAGE,
            f"{where}: the environment has no usable key in {variable}: it must be at least {CHARACTERS_MIN} printable"
            " characters without blanks (`./ichat.pyz key` makes a key). A gateway that runs has the environment of its"
            " start: a later variable needs a restart.",
        )
    return key


def ray_token(settings: RaySettings) -> str:
    """Return the token of `[ray]`, "" if the cluster needs none. Raises Exit 64 where the environment has none."""
    if settings.token_env is None:
        return ""
    token = read_key(settings.token_env)
    if not token.isascii() or not token.isprintable() or token != token.strip() or not token:
        raise Exit(EXIT_USAGE, f"ray.token_env: the environment has no usable token in {settings.token_env}.")
    return token


def digest_in(hash_: str | None, variable: str | None, where: str) -> bytes | None:
    """Return the digest of a key that is given by its hash or by a variable; None if by neither. Raises Exit 64."""
    if hash_ is not None:
        return bytes.fromhex(hash_.partition(":")[2])
    return None if variable is None else digest_of(key_in(variable, where).encode())


def hand_over(token: str) -> int:
    """Put a token into a pipe, for a child to read once; return the descriptor of its other end."""
    theirs, ours = os.pipe()
    try:
        os.write(ours, token.encode())
    finally:
        os.close(ours)
    return theirs


def take_token(environment: MutableMapping[str, str]) -> str:
    """Return this worker's token: from the pipe of the gateway that started it, else from its environment; else "".

    The environment has it no longer afterwards, so that the engine's processes do not inherit it. Raises Exit 64.
    """
    descriptor = environment.pop(TOKEN_FD_VARIABLE, None)
    given = environment.pop(TOKEN_VARIABLE, "")
    if descriptor is not None:
        with contextlib.suppress(OSError, ValueError):
            fd = int(descriptor)
            try:
                return os.read(fd, _TOKEN_BYTES_MAX).decode()
            finally:
                os.close(fd)
    if given and not _KEY.fullmatch(given):
        raise Exit(
            EXIT_USAGE,
            f"{TOKEN_VARIABLE} must be at least {CHARACTERS_MIN} printable characters without blanks, and the same as"
            " the gateway's security.join_token_env.",
        )
    return given
