"""What SGLang's schedulers listen on: this machine's loopback, where their ranks meet there."""

import socket

import pytest
from support.deployments import free_port

from ichat.engines.sglang.scheduler_process import _open_store, launch_options, run


def opened(host, port, *, is_master=True):
    """Return what the store is made with, and the address on which it listens."""
    made = []

    def make(*args, **named):
        made.append((args, named))
        return "store"

    assert _open_store(make, host, port, is_master=is_master, timeout=5) == "store"
    [(args, named)] = made
    assert args == (host, port)
    fd = named.pop("master_listen_fd", None)
    assert named == {"is_master": is_master, "timeout": 5}
    if fd is None:
        return None
    with socket.socket(fileno=fd) as listening:
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return listening.getsockname()[0]


def test_a_store_on_loopback_listens_there_alone():
    """One for other machines, and one that only asks, are made as they were."""
    assert opened("127.0.0.1", 0) == "127.0.0.1"
    assert opened("10.0.0.7", 29500) is None
    assert opened("", 29500) is None
    assert opened("127.0.0.1", 29500, is_master=False) is None
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert opened(*other.getsockname()) is None


def test_a_store_that_cannot_be_made_leaves_no_socket():
    """The port is free again."""
    port = free_port()

    def fail(*_, **__):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        _open_store(fail, "127.0.0.1", port, is_master=True)
    socket.create_server(("127.0.0.1", port)).close()


def test_only_known_releases_are_patched():
    """Others run their schedulers as they do."""
    assert launch_options(lambda _args, run_scheduler_process_func=None: None) == {"run_scheduler_process_func": run}
    assert launch_options(lambda _args, launch_callback=None: None) == {}
