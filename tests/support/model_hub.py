"""A hub of models on loopback, as `huggingface_hub` and `modelscope` ask it: throttled, cut, refusing, as a test says."""

import contextlib
import hashlib
import http.server
import json
import re
import socket
import threading
import urllib.parse

import attrs

LARGE = 1024 * 1024
"""From this size on a file is one of Git LFS, as on the hub."""
PIECE = 64 * 1024


@attrs.define
class HubModel:
    """A model of the hub."""

    files: dict[str, bytes]
    sizes: dict[str, int] = attrs.field(factory=dict)
    """Sizes that the index claims in place of the true sizes."""
    refusal: int = 0
    """The status with which every request is refused; 0: none is."""
    headers: dict[str, str] = attrs.field(factory=dict)
    """Headers of the refusal."""
    refusals_left: int = -1
    """How many requests are refused; -1: every request."""

    @property
    def commit(self):
        return hashlib.sha1(b"".join(self.files.values())).hexdigest()

    def size_of(self, path):
        return self.sizes.get(path, len(self.files[path]))


class ModelHub:
    """The server; it stops at the end of its context."""

    def __init__(self):
        self.models = {}
        self.requests = []
        """Each as a method and a path."""
        self.served = {}
        """Bytes sent of each file."""
        self.ranges = []
        """The Range headers of the requests for files."""
        self.stop_at = None
        """How many bytes of a file are sent before the server waits for `go`; None: it never waits."""
        self.cuts = []
        """Offsets at which the connection breaks, each once."""
        self.go = threading.Event()
        self.is_waiting = threading.Event()
        """Set when the server has sent `stop_at` bytes."""
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.go.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self, cache):
        """Return the variables with which a process asks this hub, and keeps models in a directory."""
        return {
            "HF_ENDPOINT": self.url, "HF_HUB_CACHE": str(cache), "HF_HOME": str(cache.parent / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "MODELSCOPE_ENDPOINT": self.url,
            "MODELSCOPE_DOMAIN": self.url, "MODELSCOPE_CACHE": str(cache), "NO_PROXY": "127.0.0.1",
        }  # fmt: skip

    def _handler(hub):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                self.answer(has_body=False)

            def do_GET(self):
                self.answer(has_body=True)

            def answer(self, *, has_body):
                hub.requests.append((self.command, self.path))
                with contextlib.suppress(OSError):
                    url = urllib.parse.urlsplit(self.path)
                    query = dict(urllib.parse.parse_qsl(url.query))
                    if found := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/revision/(.+))?", url.path):
                        self.index(found[1], found[2] or "main")
                    elif found := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/tree/(.+)", url.path):
                        self.tree(found[1])
                    elif found := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/[^/]+/(.+)", url.path):
                        self.file(found[1], urllib.parse.unquote(found[2]), has_body=has_body)
                    elif found := re.fullmatch(r"/api/v1/models/([\w.-]+/[\w.-]+)/repo/files", url.path):
                        self.modelscope_index(found[1])
                    elif found := re.fullmatch(r"/api/v1/models/([\w.-]+/[\w.-]+)/repo", url.path):
                        self.file(found[1], query["FilePath"], has_body=has_body)
                    elif found := re.fullmatch(r"/models/([\w.-]+/[\w.-]+)/resolve/[^/]+/(.+)", url.path):
                        self.file(found[1], urllib.parse.unquote(found[2]), has_body=has_body)
                    else:
                        self.reply(404, {"error": "no such route"})

            def known(self, name):
                model = hub.models.get(name)
                if model is None:
                    self.reply(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
                elif model.refusal and model.refusals_left:
                    model.refusals_left -= 1
                    self.reply(model.refusal, {"error": "refused"}, model.headers)
                else:
                    return model
                return None

            def reply(self, status, value, headers=None):
                body = b"" if self.command == "HEAD" else json.dumps(value).encode()
                self.send_response(status)
                for name, text in (headers or {}).items():
                    self.send_header(name, text)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def index(self, name, revision):
                if (model := self.known(name)) is None:
                    return
                if revision not in ("main", model.commit):
                    self.reply(404, {"error": "Revision Not Found"}, {"X-Error-Code": "RevisionNotFound"})
                    return
                self.reply(200, {"id": name, "modelId": name, "sha": model.commit, "siblings": [
                    {"rfilename": path, "size": model.size_of(path), "blobId": blob_of(content), **lfs_of(model, path)}
                    for path, content in model.files.items()
                ]})  # fmt: skip

            def tree(self, name):
                if (model := self.known(name)) is not None:
                    self.reply(200, [
                        {"type": "file", "path": path, "size": model.size_of(path), "oid": blob_of(content),
                         **lfs_of(model, path)} for path, content in model.files.items()
                    ])  # fmt: skip

            def modelscope_index(self, name):
                if (model := self.known(name)) is not None:
                    self.reply(200, {"Code": 200, "Success": True, "Data": {"Files": [
                        {"Path": path, "Name": path, "Type": "blob", "Size": model.size_of(path),
                         "Sha256": hashlib.sha256(content).hexdigest(), "Revision": "master"}
                        for path, content in model.files.items()
                    ]}})  # fmt: skip

            def file(self, name, path, *, has_body):
                if (model := self.known(name)) is None:
                    return
                content = model.files.get(path)
                if content is None:
                    self.reply(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"})
                    return
                begin = 0
                if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", "")):
                    begin = int(found[1])
                    hub.ranges.append((path, begin))
                digest = hashlib.sha256(content).hexdigest() if len(content) >= LARGE else blob_of(content)
                self.send_response(206 if begin else 200)
                self.send_header("etag", f'"{digest}"')
                self.send_header("x-repo-commit", model.commit)
                self.send_header("accept-ranges", "bytes")
                if len(content) >= LARGE:
                    self.send_header("x-linked-etag", f'"{digest}"')
                    self.send_header("x-linked-size", str(len(content)))
                if begin:
                    self.send_header("content-range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
                self.send_header("content-length", str(len(content) - begin))
                self.end_headers()
                if has_body:
                    self.send(path, content, begin)

            def send(self, path, content, begin):
                for at in range(begin, len(content), PIECE):
                    if len(content) >= LARGE:
                        if hub.stop_at is not None and at >= hub.stop_at:
                            hub.is_waiting.set()
                            hub.go.wait(60)
                        if hub.cuts and at >= hub.cuts[0]:
                            hub.cuts.pop(0)
                            self.connection.shutdown(socket.SHUT_RDWR)
                            self.close_connection = True
                            return
                    self.wfile.write(content[at : at + PIECE])
                    hub.served[path] = hub.served.get(path, 0) + len(content[at : at + PIECE])

        return Handler


def has_part(cache, size):
    """Return whether a file of this size, or more, is in a directory for models, whole or under way."""
    files = (path for path in cache.rglob("*") if path.is_file() and not path.is_symlink())
    return any(min(path.stat().st_size, path.stat().st_blocks * 512) >= size for path in files)


def blob_of(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def lfs_of(model, path):
    content = model.files[path]
    if len(content) < LARGE:
        return {}
    digest = hashlib.sha256(content).hexdigest()
    return {"lfs": {"sha256": digest, "oid": digest, "size": model.size_of(path), "pointerSize": 134}}
