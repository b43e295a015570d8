"""An upstream in threads: it counts its requests, and answers streams for as long as it is told to."""

import contextlib
import json
import socket
import threading

ROUTE = """
[[external_routes]]
model_name = "m"
api_base = "http://127.0.0.1:{port}/v1"
{more}
"""
GAP_S = 0.05


class CountingUpstream:
    """Serves plain responses and streams, and knows how many requests it had at once."""

    def __init__(self):
        self.now = self.most = self.served = 0
        self.ends = threading.Event()
        """Streams end when it is set."""
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        threading.Thread(target=self._accept, daemon=True).start()

    def route(self, more=""):
        """Return the table of the route to it."""
        return ROUTE.format(port=self._listener.getsockname()[1], more=more)

    def close(self):
        self.ends.set()
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock):
        with contextlib.suppress(OSError), sock, sock.makefile("rb") as file:
            while line := file.readline():
                length = 0
                while line.strip():
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                    line = file.readline()
                content = file.read(length)
                if not content or len(content) < length:
                    return  # the gateway was killed in between
                body = json.loads(content)
                with self._lock:
                    self.now += 1
                    self.most = max(self.most, self.now)
                end = b""
                try:
                    end = self._answer(sock, body)
                finally:
                    with self._lock:
                        self.now -= 1
                        self.served += 1
                sock.sendall(end)  # after that, another request may arrive at once

    def _answer(self, sock, body):
        """Send a response but for its last bytes, and return these."""
        if not body.get("stream"):
            data = json.dumps({"model": "m", "usage": {"prompt_tokens": 3, "completion_tokens": 4}}).encode()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            return head % len(data) + data
        sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        while not self.ends.wait(GAP_S):
            self._send_event(sock, {"choices": [{"delta": {"content": "x"}}]})
        usage = {"prompt_tokens": 5, "completion_tokens": 6}
        self._send_event(sock, {"choices": [], "usage": usage})
        data = b"data: [DONE]\n\n"
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)

    def _send_event(self, sock, event):
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        sock.sendall(b"%x\r\n%b\r\n" % (len(data), data))
