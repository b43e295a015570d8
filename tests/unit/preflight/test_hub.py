"""What is said about a model on the hub."""

import socket
import struct
import threading

import pytest

from ichat.preflight.hub import BREAKS_MAX, HUB_S, HubFacts, ask_hub, problems_of_hub


def facts_of(place):
    return HubFacts("org/m", "/cache", is_cached=False, is_offline=False, answer="silent", hub=place)


async def test_a_hub_that_is_slow_is_not_called_unreachable():
    """A hub that accepts and does not answer, and one where nothing listens: the sentences differ."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        slow = await ask_hub(facts_of(f"http://127.0.0.1:{port}"), {}, limit_s=0.05)
    closed = await ask_hub(facts_of("http://127.0.0.1:9"), {}, limit_s=60)
    assert f"did not answer within {HUB_S:g} s: try again" in next(problems_of_hub(slow))
    assert "http://127.0.0.1:9 cannot be reached (Connection refused): " in next(problems_of_hub(closed))


@pytest.mark.parametrize("breaks", [1, BREAKS_MAX])
async def test_a_connection_that_breaks_is_made_again(breaks):
    """A hub, or a proxy before it, may reset a connection: only as many resets as are tried make it unreachable."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            for number in range(min(breaks + 1, BREAKS_MAX)):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    if number < breaks:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    else:
                        connection.sendall(b"HTTP/1.0 404 Not Found\r\n\r\n")

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        facts = await ask_hub(facts_of(f"http://127.0.0.1:{listener.getsockname()[1]}"), {}, limit_s=60)
        server.join()
    assert facts.answer == ("absent" if breaks < BREAKS_MAX else "unreachable")
