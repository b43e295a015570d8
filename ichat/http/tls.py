"""TLS on either side: a bridge between an encrypted connection and a plain socket of this process.

The front door, the hub and the relays know plain sockets only. Two tasks of a bridge move the bytes between an
encrypted connection and such a socket. So connections behave alike with and without TLS, at the price of another copy.
"""

import contextlib
import math
import socket
import ssl
import struct

import attrs
import trio

from ichat.errors import EXIT_USAGE, Exit

RECV_BYTES = 65536
CLOSE_S = 1.0
"""How long announcing the end of a connection may last."""
RESET = struct.pack("ii", 1, 0)
"""Makes `close` reset the connection (socket(7), SO_LINGER)."""
_ENDED = (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError)
"""Raised by the streams when a connection has ended on either side."""


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """Return the context of a front door for two PEM files. Raises Exit 64 if they are not usable."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    for path in (certificate, key):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise Exit(EXIT_USAGE, f"server_settings: {path} cannot be read: {error.strerror}.") from error
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        why = "a key without a password is needed" if isinstance(error, ValueError) else str(error)
        raise Exit(EXIT_USAGE, f"The certificate {certificate} and the key {key} cannot be used: {why}.") from error
    return context


def client_context(ca_certificates: str | None) -> ssl.SSLContext:
    """Return the context for upstreams, which verifies certificates by the system's or the given authorities.

    Raises Exit 64 if the given authorities are not usable.
    """
    try:
        context = ssl.create_default_context(cafile=ca_certificates)
    except (ssl.SSLError, OSError) as error:
        raise Exit(EXIT_USAGE, f"The certificates {ca_certificates} cannot be used: {error}.") from error
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_password() -> str:
    raise ValueError


@attrs.define(eq=False)
class Bridge:
    """An encrypted connection, and the plain socket through which it is used."""

    plain: socket.socket
    """The user's end: closing it closes the connection."""
    _encrypted: "trio.SSLStream[trio.SocketStream]"
    _inner: trio.SocketStream
    _tolerant: bool
    truncated: bool = False
    """Whether the connection ended unannounced, as an attacker on the way could make it."""
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _left: trio.Event = attrs.field(factory=trio.Event)

    async def run(self) -> None:
        """Move bytes until the plain socket is closed, or the time of `leave` is over; call `aclose` afterwards."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._move_in)
                    is_whole = await self._move_out()
                    with trio.move_on_after(math.inf if is_whole else CLOSE_S):
                        await self._left.wait()  # the user may want the peer's further bytes
                    nursery.cancel_scope.cancel()
        finally:
            self._inner.socket.close()

    async def aclose(self) -> None:
        """Close the connection in good order if that is still possible; the caller bounds the time."""
        with contextlib.suppress(*_ENDED):
            await self._encrypted.aclose()

    def abort(self) -> None:
        """Reset the connection, so that the peer sees an error."""
        sock = self._encrypted.transport_stream.socket
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        sock.close()

    def finish(self, wait_s: float = CLOSE_S) -> None:
        """Called when the plain socket is closed: bytes written to it may still be sent for `wait_s` seconds."""
        self._scope.deadline = trio.current_time() + wait_s
        self._left.set()

    async def _move_in(self) -> None:
        """Move bytes from the network to the plain socket."""
        try:
            while data := await self._encrypted.receive_some(RECV_BYTES):
                await self._inner.send_all(data)
        except _ENDED:
            self.truncated = not self._tolerant
        with contextlib.suppress(*_ENDED):
            await self._inner.send_eof()

    async def _move_out(self) -> bool:
        """Move bytes from the plain socket to the network; return whether all could be sent."""
        try:
            while data := await self._inner.receive_some(RECV_BYTES):
                await self._encrypted.send_all(data)
        except _ENDED:
            self.truncated = not self._tolerant
            return False
        return True


async def make_bridge(
    sock: socket.socket, context: ssl.SSLContext, *, server_hostname: str | None, tolerant: bool
) -> Bridge:
    """Return a bridge after the handshake on a connected socket, as its client if there is a hostname to verify.

    `tolerant` accepts an unannounced end. Raises OSError if the handshake fails; the caller bounds its time. The socket
    is closed unless that succeeds.
    """
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
    encrypted = trio.SSLStream(
        stream,
        context,
        server_hostname=server_hostname,
        server_side=server_hostname is None,
    )
    try:
        await encrypted.do_handshake()
    except trio.BrokenResourceError as error:
        await trio.aclose_forcefully(stream)
        raise OSError(_reason(error)) from error
    except trio.Cancelled:
        sock.close()
        raise
    inner, plain = socket.socketpair()
    inner.setblocking(False)
    plain.setblocking(False)
    return Bridge(plain, encrypted, trio.SocketStream(trio.socket.from_stdlib_socket(inner)), tolerant)


def _reason(error: BaseException) -> str:
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({cause.verify_message})"
    if isinstance(cause, ssl.SSLError):
        return f"no TLS handshake ({cause.reason or cause})"
    return "it ended the connection during the TLS handshake"
