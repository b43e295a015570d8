"""A model whose answers a test writes: an OpenAI-compatible server of few words, for an external route."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LIMIT_S = 30


class ScriptedModel:
    """Answers each request by the script of its model: a list of events for a stream, a dict for a plain answer.

    An event `"wait"` holds the stream until `go_on` is set. A dict with `status` is an error.
    """

    def __init__(self):
        self.scripts = {}
        self.asked = []
        """The bodies of the requests for answers, in order."""
        self.keys = []
        """Their keys."""
        self.go_on = threading.Event()
        self.ended = threading.Event()
        """Set when a client has gone before the stream's end."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self._plain(200, {"object": "list", "data": []})

            def do_POST(self):
                owner.asked.append(body := json.loads(self.rfile.read(int(self.headers["content-length"]))))
                script = owner.scripts[body["model"]]
                if callable(script):
                    script = script(body)
                if isinstance(script, dict):
                    self._plain(script.pop("status", 200), script)
                else:
                    self._stream(script)

            def _plain(self, status, value):
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _stream(self, events):
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                self.close_connection = True
                try:
                    for event in events:
                        if event == "wait":
                            owner.go_on.wait(LIMIT_S)
                            continue
                        data = event if isinstance(event, str) else json.dumps(event)
                        self.wfile.write(f"data: {data}\n\n".encode())
                        self.wfile.flush()
                except OSError:
                    owner.ended.set()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self):
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(LIMIT_S)

    def routes(self, *names):
        """Return the configuration that leads to these models."""
        base = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        return "".join(f'[[external_routes]]\nmodel_name = "{name}"\napi_base = "{base}"\n' for name in names)


def said(*pieces, finish="stop", usage=True, **delta):
    """Return a stream that says these pieces, and before them what `delta` has."""
    deltas = [{"role": "assistant", "content": ""}, *([delta] if delta else []), *({"content": one} for one in pieces)]
    events = [{"choices": [{"index": 0, "delta": one, "finish_reason": None}]} for one in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if usage:
        count = {"prompt_tokens": 12, "completion_tokens": len(pieces), "total_tokens": 12 + len(pieces)}
        events.append({"choices": [], "usage": count})
    return [*events, "[DONE]"]
