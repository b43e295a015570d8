"""How records name clients and paths."""

from ichat.observability.access_log import SHOWN_CHARACTERS_MAX
from ichat.security.addresses import address_in
from ichat.security.auth import Caller


def client_address(caller: Caller, peer: str) -> str:
    """Return the connection's address and port, or the address for which a trusted proxy asks."""
    return peer if address_in(peer) == caller.address else caller.address


def shown_path(path: bytes) -> str:
    """Return a path as records have it."""
    return path.decode("latin-1")[:SHOWN_CHARACTERS_MAX]
