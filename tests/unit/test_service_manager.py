"""Messages to a service notifier, and the variables by which it is known."""

import os
import socket
import subprocess
import sys

import pytest

from ichat.service_manager import Notifier


@pytest.fixture
def heard(tmp_path):
    """Return the socket of a service notifier."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"{tmp_path}/notify")
        sock.setblocking(False)
        yield sock


def messages_in(sock):
    """Return the messages that have arrived."""
    found = []
    while True:
        try:
            found.append(sock.recv(4096).decode())
        except BlockingIOError:
            return found


def test_variables_of_the_service_manager_are_removed():
    """No child has them; variables for another process have no effect."""
    own = str(os.getpid())
    environment = {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "30000000", "LISTEN_PID": own, "LISTEN_FDS": "2", "A": "b"}
    notifier = Notifier.taken_from(environment)
    assert environment == {"A": "b"}
    assert (notifier.watchdog_s, list(notifier.descriptors)) == (30.0, [3, 4])
    assert notifier.variables() == {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "30000000"}
    other = Notifier.taken_from({"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "LISTEN_PID": "1", "LISTEN_FDS": "2"})
    assert (other.watchdog_s, list(other.descriptors), other.variables()) == (0, [], {})
    damaged = Notifier.taken_from({"WATCHDOG_USEC": "soon", "LISTEN_PID": own, "LISTEN_FDS": "-1"})
    assert (damaged.watchdog_s, list(damaged.descriptors)) == (0, [])


def test_a_reload_is_reported_only_while_requests_are_accepted(heard):
    """A message in any other state would say that the gateway accepts requests."""
    notifier = Notifier(heard.getsockname())
    with notifier.reloading():
        pass
    notifier.ready()
    with notifier.reloading():
        begun = messages_in(heard)
    notifier.stopping(within_s=1.5)
    with notifier.reloading():
        pass
    assert begun[0] == "READY=1"
    assert begun[1].startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert messages_in(heard) == ["READY=1", "STOPPING=1\nEXTEND_TIMEOUT_USEC=1500000"]


def test_another_process_is_followed(heard):
    """From then on this process reports nothing of its own reloads."""
    notifier = Notifier(heard.getsockname())
    notifier.ready()
    assert notifier.follow(7)
    with notifier.reloading():
        pass
    assert messages_in(heard) == ["READY=1", "MAINPID=7"]


@pytest.mark.parametrize("address", ["", "relative", "/none/at/all", "@ichat-none"])
def test_messages_to_no_service_manager_are_lost(address):
    """They raise nothing and wait for nothing."""
    assert not Notifier(address).send("READY=1")


def test_a_service_manager_that_reads_nothing_holds_nothing_up(heard):
    """The sender returns at once when its queue is full."""
    notifier = Notifier(heard.getsockname())
    assert False in [notifier.send("WATCHDOG=1") for _ in range(5000)]


def test_an_abstract_address_begins_with_an_at_sign():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(b"\0ichat-test-%d" % os.getpid())
        assert Notifier(f"@ichat-test-{os.getpid()}").send("READY=1")
        assert sock.recv(100) == b"READY=1"


def test_a_process_of_another_control_group_is_not_followed():
    """A service manager keeps only a main process of the service's own group; without one, any process may follow."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert Notifier("/n").would_follow(child.pid)
    child.communicate(b"\n")  # a process that has ended has no group
    assert not Notifier("/n").would_follow(child.pid)
    assert Notifier().would_follow(child.pid)
