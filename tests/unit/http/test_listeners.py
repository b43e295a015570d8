"""Listeners on unix sockets: which sockets at their paths they replace."""

import socket

import pytest

from ichat.errors import EXIT_UNAVAILABLE, Exit
from ichat.http.listeners import open_unix_listener


def reached(listener, path):
    """Return whether a new connection to a path reaches this listener."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True


def test_the_socket_of_a_running_process_is_refused(tmp_path):
    """Two workers with the same path would take each other's requests; the socket of a process that ended is no one's."""
    path = f"{tmp_path}/socket"
    with open_unix_listener(path) as first:
        with pytest.raises(Exit, match="Address already in use") as refused:
            open_unix_listener(path)
        assert refused.value.code == EXIT_UNAVAILABLE
        assert reached(first, path)
    with open_unix_listener(path) as second:
        assert reached(second, path)


def test_a_takeover_replaces_the_socket_of_a_running_process(tmp_path):
    """The old process keeps the connections that it has; what a killed process left beside the path is no obstacle."""
    path = f"{tmp_path}/socket"
    with open_unix_listener(path) as old:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(f"{path}.new")
        with open_unix_listener(path, replaces=True) as new:
            assert reached(new, path)
            assert not reached(old, path)
