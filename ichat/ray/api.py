"""A client of Ray's dashboard: a connection for each request, and a bound on each wait and each answer.

It raises `RayUnknown` where it is not known what Ray has done, and `RayRefused` where Ray has refused.
"""

import hashlib
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import trio

from ichat.http import client
from ichat.http.pool import Upstream
from ichat.http.tls import client_context
from ichat.protocol.json_text import parsed, to_json
from ichat.ray import values
from ichat.ray.sentences import refusal_in, shortened_reason
from ichat.ray.values import RayHardware, RayJob, RayNode, RayRoom, RaySubmission, RayVersion

ASK_S = 5.0
"""The limit on an answer, in seconds: a dashboard without its head never answers."""
SUBMIT_S = 60.0
"""The limit on a submission and on an upload, in seconds."""
ANSWER_BYTES_MAX = 4 << 20
LIST_BYTES_MAX = 64 << 20
"""The bound on an answer about all jobs or all nodes: a failed job has up to 20 000 characters of its log."""
NODES_MAX = 10_000
"""The most nodes that Ray lists."""
_THREAD_BYTES = 256 << 10
"""A longer text of JSON is parsed in a thread."""
_TAKEN = "already exists"
_JSON = (b"content-type", b"application/json")

_Read = TypeVar("_Read")


class RayUnknown(Exception):
    """Ray did not answer, or its answer says nothing of the request: whether it was carried out is not known."""


class RayRefused(Exception):
    """Ray has refused a request, for the reason in its words; repeating it does not help."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status

    @property
    def is_about_token(self) -> bool:
        """Whether Ray wants a token, or another token."""
        return self.status in (401, 403)


@attrs.frozen
class _Answer:
    """An answer with its whole body."""

    status: int
    text: bytes


class RayApi:
    """Asks the dashboard at an address."""

    def __init__(self, address: str, token: str = "", *, ask_s: float = ASK_S) -> None:
        """`token` is Ray's own, for a cluster with RAY_AUTH_MODE=token. Raises ValueError for a wrong address."""
        url = urllib.parse.urlsplit(address)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{address} is no address of Ray's dashboard: give http://HOST:8265")
        tls = client_context(None) if url.scheme == "https" else None
        self.address = address
        self._upstream = Upstream("Ray", url.hostname, url.port or (443 if tls else 80), tls)
        self._prefix = url.path.rstrip("/")
        self._headers = [(b"accept", b"*/*"), (b"user-agent", b"ichat")]  # Ray refuses each POST of a browser
        if token:
            self._headers.append((b"authorization", b"Bearer " + token.encode()))
        self._ask_s = ask_s

    def __repr__(self) -> str:
        return f"<RayApi at {self.address}>"

    async def version(self) -> RayVersion:
        """Return which Ray answers, and which start of it. Raises RayUnknown, RayRefused."""
        return await self._get("/api/version", values.read_version)

    async def upload(self, package: bytes) -> str:
        """Have Ray keep a package, a zip, for the next ten minutes or while a job uses it; return its URI.

        It is sent only if Ray does not have it. Raises RayUnknown, RayRefused.
        """
        name = f"_ray_pkg_{hashlib.sha256(package).hexdigest()[:32]}.zip"
        path = f"/api/packages/gcs/{name}"
        answer = await self._ask("GET", path)
        if answer.status == 404:
            answer = await self._ask("PUT", path, package, within_s=SUBMIT_S)
        _check(answer)
        return f"gcs://{name}"

    async def submit(self, job: RaySubmission) -> None:
        """Submit a job; if Ray has a job with this id, it was submitted before. Raises RayUnknown, RayRefused.

        It is shielded, for SUBMIT_S at most: a lost connection does not keep Ray from running it.
        """
        body = to_json(job.describe()).encode()
        answer = await self._ask("POST", "/api/jobs/", body, within_s=SUBMIT_S, shield=True)
        try:
            _check(answer)
        except RayRefused as refused:
            if _TAKEN not in str(refused):
                raise

    async def job(self, job_id: str) -> RayJob | None:
        """Return a job; None: Ray has no such job. Raises RayUnknown, RayRefused."""
        answer = await self._ask("GET", _path_of(job_id))
        return None if _is_absent(answer) else await _read(answer, values.read_job)

    async def jobs(self) -> list[RayJob]:
        """Return everybody's submitted jobs. It is for a start: the answer may have megabytes.

        Raises RayUnknown, RayRefused.
        """
        return await self._get("/api/jobs/", values.read_jobs, bytes_max=LIST_BYTES_MAX)

    async def stop(self, job_id: str) -> None:
        """Have Ray send SIGTERM to all processes of a job, and SIGKILL later; without effect on a pending job.

        A job that Ray does not have is no error. Raises RayUnknown, RayRefused.
        """
        _check_present(await self._ask("POST", f"{_path_of(job_id)}/stop"))

    async def delete(self, job_id: str) -> None:
        """Have Ray forget a job that is over; a job that Ray does not have is no error.

        Raises RayUnknown, and RayRefused for a job that is not over.
        """
        _check_present(await self._ask("DELETE", _path_of(job_id)))

    async def nodes(self) -> list[RayNode]:
        """Return the living and dead nodes of the cluster. Raises RayUnknown, RayRefused."""
        path = f"/api/v0/nodes?detail=1&limit={NODES_MAX}"
        return await self._get(path, values.read_nodes, bytes_max=LIST_BYTES_MAX)

    async def hardware(self) -> Mapping[str, RayHardware]:
        """Return the hardware of living nodes, by their ids. Raises RayUnknown, RayRefused."""
        return await self._get("/nodes?view=summary", values.read_hardware, bytes_max=LIST_BYTES_MAX)

    async def free(self) -> RayRoom:
        """Return free resources and demand, some seconds old. Raises RayUnknown, RayRefused."""
        return await self._get("/api/cluster_status", values.read_room, bytes_max=LIST_BYTES_MAX)

    async def last_lines(self, node_id: str, file: str, count: int) -> Sequence[str]:
        """Return the last lines of a file in a node's log directory. Raises RayUnknown, RayRefused.

        The output of a job is in `job-driver-ID.log` on the node of its entrypoint.
        """
        query = urllib.parse.urlencode({"node_id": node_id, "filename": file, "lines": count})
        answer = await self._ask("GET", f"/api/v0/logs/file?{query}")
        _check(answer)
        return answer.text.decode(errors="replace").splitlines()[-count:]

    async def log_files(self, node_id: str, pattern: str) -> Sequence[str]:
        """Return the names that fit the pattern in a node's log directory. Raises RayUnknown, RayRefused."""
        query = urllib.parse.urlencode({"node_id": node_id, "glob": pattern})
        return await self._get(f"/api/v0/logs?{query}", values.read_files)

    async def _get(self, path: str, read: Callable[[object], _Read], *, bytes_max: int = ANSWER_BYTES_MAX) -> _Read:
        return await _read(await self._ask("GET", path, bytes_max=bytes_max), read)

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        within_s: float = 0.0,
        bytes_max: int = ANSWER_BYTES_MAX,
        shield: bool = False,
    ) -> _Answer:
        """Return the answer to a request. Raises RayUnknown without any, or with more than `bytes_max`."""
        headers = [*self._headers, _JSON] if body else self._headers
        began = trio.current_time()
        try:
            with trio.fail_after(within_s or self._ask_s, shield=shield):
                target = self._prefix + path
                async with await client.request(
                    self._upstream, target, headers, method=method, body=body, connect_s=self._ask_s
                ) as response:
                    pieces, size = list[bytes](), 0
                    async for piece in response:
                        pieces.append(piece)
                        size += len(piece)
                        if size > bytes_max:
                            raise RayUnknown(f"its answer to {path} has more than {bytes_max >> 20} MiB")
                    return _Answer(response.status, b"".join(pieces))
        except trio.TooSlowError as error:
            raise RayUnknown(f"no answer within {trio.current_time() - began:.0f} s") from error
        except client.FAILURES as error:
            raise RayUnknown(client.reason_of_failure(error)) from error


def job_log(job_id: str) -> str:
    """Return the name of the file with a job's output."""
    return f"job-driver-{job_id}.log"


def _path_of(job_id: str) -> str:
    return f"/api/jobs/{urllib.parse.quote(job_id, safe='')}"


def _is_absent(answer: _Answer) -> bool:
    """Return whether Ray says that it has no such job; a proxy's 404 says nothing of jobs."""
    return answer.status == 404 and b"does not exist" in answer.text


def _check_present(answer: _Answer) -> None:
    if not _is_absent(answer):
        _check(answer)


def _check(answer: _Answer) -> None:
    """Raise RayRefused if an answer refuses a request, and RayUnknown if it says nothing of it."""
    if 200 <= answer.status < 300:
        return
    text = answer.text.decode(errors="replace")
    if answer.status >= 500 and (reason := refusal_in(text)):
        raise RayRefused(answer.status, reason)
    reason = f"{answer.status} {shortened_reason(text)}".rstrip()
    if answer.status in (408, 429) or not 400 <= answer.status < 500:
        raise RayUnknown(f"it answers {reason}")
    raise RayRefused(answer.status, reason)


async def _read(answer: _Answer, read: Callable[[object], _Read]) -> _Read:
    """Return the value in an answer. Raises RayUnknown, RayRefused."""
    _check(answer)

    def read_text() -> _Read:
        value: Any = parsed(answer.text)
        return read(value)

    try:
        if len(answer.text) > _THREAD_BYTES:
            return await trio.to_thread.run_sync(read_text)
        return read_text()
    except (ValueError, TypeError, RecursionError) as error:
        raise RayUnknown(f"its answer is not that of Ray's dashboard ({shortened_reason(str(error))})") from error
