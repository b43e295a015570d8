"""A proxy before the dashboard of Ray that acts at a moment of a request: before Ray has it, before its answer, or after it.

`RayDoor` knows requests by their kind, such as `submit` or `job`, and counts them from the moment at which an act is
set. It accepts one request on each connection, as iChat's client of Ray sends them.
"""

import contextlib
import re
import socket
import threading
import urllib.parse

KINDS = {
    "POST /api/jobs/": "submit",
    "GET /api/jobs/": "jobs",
    "GET /api/jobs/ID": "job",
    "POST /api/jobs/ID/stop": "stop",
    "DELETE /api/jobs/ID": "delete",
    "GET /api/v0/nodes": "nodes",
    "GET /api/cluster_status": "free",
}
LIMIT_S = 120


class RayDoor:
    """Listens on a port of 127.0.0.1; `address` is that of the dashboard, and `url` its own."""

    def __init__(self, address):
        self._to = urllib.parse.urlsplit(address)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.seen = []
        """The moments since the newest act was set."""
        self._moment, self._act = "", None
        self._counts = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def at(self, moment, act):
        """Call `act` at a moment, once. "" is no moment.

        `submit 1 asked` is before the first submission reaches Ray: it never does. At `submit 1 begun` Ray has it, and
        is not waited for; at `submit 1 sent` Ray's answer is here; at `submit 1 answered` the gateway has the answer.
        """
        with self._lock:
            self._moment, self._act, self._counts, self.seen = moment, act, {}, []

    def close(self):
        self._server.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client):
        client.settimeout(LIMIT_S)
        with contextlib.suppress(OSError), client:
            data = _read_request(client)
            if not data:
                return
            kind = kind_of(data)
            with self._lock:
                number = self._counts[kind] = self._counts.get(kind, 0) + 1
            if self._reach(f"{kind} {number} asked"):
                return
            with socket.create_connection((self._to.hostname, self._to.port), LIMIT_S) as ray:
                ray.sendall(data)
                if self._reach(f"{kind} {number} begun"):
                    return
                answer = b""
                while not _is_whole(answer) and (more := ray.recv(65536)):
                    answer += more
            self._reach(f"{kind} {number} sent")
            client.sendall(answer)
            client.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                client.recv(1)
            self._reach(f"{kind} {number} answered")

    def _reach(self, moment):
        """Note a moment; return whether the act was due."""
        with self._lock:
            self.seen.append(moment)
            is_due = moment == self._moment
            act = self._act
            if is_due:
                self._moment, self._act = "", None
        if is_due:
            act()
        return is_due


def kind_of(request):
    """Return the kind of a request."""
    method, target = request.split(b" ", 2)[:2]
    path = re.sub(r"^/api/jobs/[^/?]+", "/api/jobs/ID", target.decode().partition("?")[0])
    return KINDS.get(f"{method.decode()} {path}", path)


def _read_request(sock):
    data = b""
    while b"\r\n\r\n" not in data or len(data.partition(b"\r\n\r\n")[2]) < _length_in(data):
        if not (more := sock.recv(65536)):
            return b""
        data += more
    return data


def _length_in(data):
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", data.partition(b"\r\n\r\n")[0])
    return int(found[1]) if found else 0


def _is_whole(answer):
    head, is_there, body = answer.partition(b"\r\n\r\n")
    if not is_there:
        return False
    if b"chunked" in head.lower():
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= _length_in(answer)
