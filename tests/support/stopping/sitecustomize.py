"""Stops this process at a step of a takeover, as `ICHAT_STOPS_AT` says: "new 3" is before its third message as the new
process, "old 1" before its first to a new process, and "adopting" before it meets the first relay.

An audit hook of Python sees each message before it is sent.
"""

import collections
import os
import signal
import socket
import struct
import sys

_STEP = os.environ.pop("ICHAT_STOPS_AT", "")
_sent = collections.Counter()


def _role_of(sock):
    """Return as which process a message is sent; "" if it is none of a takeover."""
    if sock.family != socket.AF_UNIX:
        return ""
    names = {"new": sock.getpeername(), "old": sock.getsockname()}
    return next((role for role, name in names.items() if "/takeover" in str(name)), "")


def _stop(event, arguments):
    global _STEP
    found = ""
    if event == "socket.sendmsg" and (role := _role_of(arguments[0])):
        other, _, _ = struct.unpack("3i", arguments[0].getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        _sent[role, other] += 1
        found = f"{role} {_sent[role, other]}"
    elif event == "socket.connect" and "/relays/" in str(arguments[1]):
        found = "adopting"
    if found and found == _STEP:
        _STEP = ""
        os.kill(os.getpid(), signal.SIGSTOP)


if _STEP:
    sys.addaudithook(_stop)
