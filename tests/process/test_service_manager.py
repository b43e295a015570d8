"""A real gateway below a service manager: what it reports, and the sockets that it gets."""

import http.client
import signal
import socket
import subprocess
import sys

import psutil
import pytest
from support.deployments import free_port
from support.programs import LIMIT_S, ichat

WITH_SOCKETS = """
import os, socket, sys
port, *command = sys.argv[1:]
for descriptor, number in (3, int(port)), (4, 0):
    sock = socket.create_server(("127.0.0.1", number))
    os.dup2(sock.fileno(), descriptor + 100)
os.dup2(103, 3)
os.dup2(104, 4)
os.closerange(5, 110)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="2")
os.execv(command[0], command)
"""
"""Opens the wanted port and another, and becomes a program that has both."""


class Listening:
    """The service manager's side of the messages."""

    def __init__(self, path):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(str(path))
        self.sock.settimeout(LIMIT_S)

    def until(self, wanted):
        """Return the messages up to the first that begins so."""
        found = []
        while not (found and found[-1].startswith(wanted)):
            found.append(self.sock.recv(4096).decode())
        return found


@pytest.fixture
def manager(tmp_path):
    listening = Listening(tmp_path / "notify")
    yield listening
    listening.sock.close()


def status_of(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    connection.request("GET", "/health")
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.fixture
def configuration(tmp_path):
    """Write a configuration: `path, port = configuration("relays = 2")`."""

    def write(settings=""):
        path, port = tmp_path / "ichat.toml", free_port()
        path.write_text(
            f'[server_settings]\nport = {port}\nstate_directory = "{tmp_path}/state"\nwatch_config = false\n{settings}'
            "\n[timeouts]\ndrain_s = 7\nstop_s = 6\n"
        )
        return path, port

    return write


@pytest.mark.parametrize("relays", [0, 2])
def test_a_gateway_reports_each_state_to_its_service_manager(start, manager, configuration, relays):
    """Ready when requests are answered, alive twice in the watchdog's time, reloading, stopping; children know none."""
    path, port = configuration(f"relays = {relays}")
    program = start(ichat("gateway", "-c", path), NOTIFY_SOCKET=manager.sock.getsockname(), WATCHDOG_USEC="1000000")
    begun = manager.until("READY=1")
    assert status_of(port) == 200
    assert set(begun) == {"WATCHDOG=1", "READY=1"}
    assert manager.until("WATCHDOG=1")
    for process in program.descendants():
        assert {"NOTIFY_SOCKET", "WATCHDOG_USEC"}.isdisjoint(process.environ())
    program.process.send_signal(signal.SIGHUP)
    assert manager.until("RELOADING=1")[-1].partition("\n")[2].startswith("MONOTONIC_USEC=")
    assert set(manager.until("READY=1")) <= {"WATCHDOG=1", "READY=1"}
    program.process.send_signal(signal.SIGTERM)
    [extended] = {line for line in manager.until("STOPPING=1")[-1].splitlines() if line.startswith("EXTEND")}
    assert extended == "EXTEND_TIMEOUT_USEC=43000000"
    assert program.process.wait(LIMIT_S) == 0


def test_a_refused_reload_ends_for_the_service_manager(start, manager, configuration):
    """systemd would wait for its end otherwise, and the service stays ready."""
    path, _ = configuration()
    program = start(ichat("gateway", "-c", path), NOTIFY_SOCKET=manager.sock.getsockname())
    manager.until("READY=1")
    path.write_text("nonsense")
    program.process.send_signal(signal.SIGHUP)
    assert manager.until("RELOADING=1")
    assert manager.until("READY=1")
    assert program.stop() == 0


def test_the_service_manager_follows_a_takeover(start, manager, configuration):
    """It learns its new main process, which reports ready and stopping, though somebody has started it by hand."""
    path, _ = configuration()
    old = start(ichat("gateway", "-c", path), NOTIFY_SOCKET=manager.sock.getsockname(), WATCHDOG_USEC="1000000")
    manager.until("READY=1")
    new = start(ichat("gateway", "-c", path, "--takeover"))
    assert manager.until("MAINPID=")[-1] == f"MAINPID={new.process.pid}"
    assert manager.until("READY=1")
    assert old.process.wait(LIMIT_S) == 0
    found = subprocess.run(ichat("doctor", "-c", path), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert f"The gateway runs (process {new.process.pid})" in found.stdout
    new.process.send_signal(signal.SIGTERM)
    assert manager.until("STOPPING=1")
    assert new.process.wait(LIMIT_S) == 0


def test_sockets_of_the_service_manager_are_used_where_they_are_configured(start, configuration):
    """A connection that came before the gateway is answered; a socket with another address is closed."""
    path, port = configuration()
    program = start([sys.executable, "-c", WITH_SOCKETS, port, *ichat("gateway", "-c", path)])
    program.until(lambda: is_listening(port))
    assert status_of(port) == 200
    program.wait_for_port()
    assert program.port == port
    assert "is not used" in program.text()
    connections = program.family.net_connections("tcp")
    assert [one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN] == [port]
    assert program.stop() == 0


def is_listening(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
