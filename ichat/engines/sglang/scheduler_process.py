"""The code that runs in a process of SGLang's scheduler before SGLang itself.

PyTorch's store, by which ranks find each other, listens on all addresses of the machine for any value of its host, and
has no authentication. Where that host is this machine's loopback, the store gets a socket that listens there alone.
"""

# SGLang and PyTorch are not there where types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportAttributeAccessIssue=false

import functools
import importlib
import inspect
import socket
from collections.abc import Callable, Mapping
from typing import Any

from ichat.security.addresses import is_loopback

PARAMETER = "run_scheduler_process_func"


def launch_options(launch_server: Callable[..., object]) -> Mapping[str, object]:
    """Return the arguments with which this release's server has its schedulers begin here; none if it cannot."""
    return {PARAMETER: run} if PARAMETER in inspect.signature(launch_server).parameters else {}


def run(*args: Any, **named: Any) -> None:
    """Run a scheduler, as SGLang's own function does."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # its package has a function of this name
    if hasattr(rendezvous, "TCPStore"):
        rendezvous.TCPStore = functools.partial(_open_store, rendezvous.TCPStore)
    run_scheduler_process(*args, **named)


def _open_store(make: Callable[..., object], /, host_name: str, port: int, *args: Any, **named: Any) -> object:
    """Return a store that listens on loopback only, if it listens and its host is loopback."""
    listening = _listen(host_name, port) if named.get("is_master") and host_name and is_loopback(host_name) else None
    if listening is None:
        return make(host_name, port, *args, **named)
    with listening:
        store = make(host_name, port, *args, **named, master_listen_fd=listening.fileno())
        listening.detach()  # it is the store's now
    return store


def _listen(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens there; None if another socket does, which the store may share."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        return None
