"""Answers that no cluster of Ray gives on demand: silence, proxies, and texts without an end."""

import json

import pytest
import trio

from ichat.ray.api import ANSWER_BYTES_MAX, ASK_S, SUBMIT_S, RayApi, RayRefused, RayUnknown
from ichat.ray.values import RaySubmission

TRACEBACK = """Traceback (most recent call last):
  File "job_head.py", line 419, in submit_job
    resp = await job_agent_client.submit_job_internal(submit_request)
RuntimeError: Request failed with status code 500: Traceback (most recent call last):
  File "job_manager.py", line 553, in submit_job
    raise X(
{error}
.
"""
VERSION = {"ray_version": "2.60.0", "session_name": "session_1"}


@pytest.fixture
def api_of(serve):
    """Return a client of a server that answers everything alike, and that server."""

    async def make(status, body, path=""):
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (status, len(text))

        async def reply(stream, *_):
            await stream.send_all(head + text)
            return "close"

        upstream, port = await serve(reply)
        return RayApi(f"http://127.0.0.1:{port}{path}", "secret-token"), upstream

    return make


async def test_a_request_to_ray_has_the_token_and_is_no_browsers(api_of):
    """An address may have a path; Ray takes no POST of a browser."""
    api, upstream = await api_of(200, VERSION, "/ray/")
    assert (await api.version()).session == "session_1"
    head, _ = upstream.requests[0]
    assert head.target == b"/ray/api/version"
    headers = dict(head.headers)
    assert headers[b"authorization"] == b"Bearer secret-token"
    assert headers[b"user-agent"] == b"ichat"
    assert b"origin" not in headers


async def test_a_submission_to_ray_has_only_the_values_that_are_given(api_of):
    api, upstream = await api_of(200, {})
    await api.submit(RaySubmission("a", "true", {"k": "v"}, labels={"zone": "b"}, runtime_env={"pip": ["x"]}))
    _, body = upstream.requests[0]
    assert json.loads(body) == {
        "submission_id": "a", "entrypoint": "true", "metadata": {"k": "v"}, "entrypoint_num_cpus": 1.0,
        "entrypoint_label_selector": {"zone": "b"}, "runtime_env": {"pip": ["x"]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "text", "why"),
    [
        (502, b"<html><h1>502 Bad Gateway</h1></html>", "^it answers 502$"),
        (
            500,
            b"500 Internal Server Error\n\nServer got itself in trouble",
            "^it answers 500 500 Internal Server Error",
        ),
        (500, TRACEBACK.format(error="ray.exceptions.RpcError: Timed out").encode(), "^it answers 500 Timed out$"),
        (500, TRACEBACK.format(error="TimeoutError: no agent").encode(), "^it answers 500 no agent$"),
        (
            500,
            TRACEBACK.partition('Traceback (most recent call last):\n  File "job_manager')[0].encode()
            + b"500 Internal Server Error\n\nServer got itself in trouble",
            "^it answers 500 Server got itself in trouble$",
        ),
        (302, b"", "^it answers 302$"),
        (429, b"Max number of in-progress requests reached", "^it answers 429 Max"),
        (200, b"<html>log in</html>", "^its answer is not that of Ray's dashboard"),
        (200, b"[]", "^its answer is not that of Ray's dashboard"),
        (200, b'{"ray_version": 2}', "^its answer is not that of Ray's dashboard"),
        (200, b"[" * 200_000, "^its answer is not that of Ray's dashboard"),
        (200, b"x" * (ANSWER_BYTES_MAX + 1), "has more than 4 MiB$"),
    ],
)
async def test_an_answer_that_says_nothing_leaves_ray_unknown(api_of, status, text, why):
    api, _ = await api_of(status, text)
    with pytest.raises(RayUnknown, match=why):
        await api.version()


@pytest.mark.parametrize(
    ("status", "text", "why"),
    [
        (500, TRACEBACK.format(error="ValueError: No such label.").encode(), "^No such label.$"),
        (500, TRACEBACK.format(error=f"ValueError: {'x ' * 1000}").encode(), "^x x .*…$"),
        (400, b"Can only stop submission type jobs", "^400 Can only stop submission type jobs$"),
        (403, b"<html>Forbidden</html>", "^403$"),
    ],
)
async def test_a_refusal_of_ray_is_a_sentence(api_of, status, text, why):
    api, _ = await api_of(status, text)
    for ask in (api.version, lambda: api.submit(RaySubmission("a", "true")), lambda: api.stop("a")):
        with pytest.raises(RayRefused, match=why) as refused:
            await ask()
        assert len(str(refused.value)) <= 300


async def test_a_page_that_a_proxy_does_not_find_is_no_absent_job(api_of):
    """A job is replaced when Ray does not have it: another program's 404 must not look so."""
    api, _ = await api_of(404, b"404: Not Found")
    for ask in (api.job, api.stop, api.delete):
        with pytest.raises(RayRefused, match=r"^404 404: Not Found$"):
            await ask("a")


async def test_a_silent_ray_is_unknown_within_its_bound(autojump_clock):
    """A submission has more time than a question, and is not cancelled before; a connection has the time of a question."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    accepted = []

    async def accept():
        while True:
            accepted.append(await listeners[0].accept())

    api = RayApi(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        for ask, within_s in ((api.nodes, ASK_S), (lambda: api.submit(RaySubmission("a", "true")), SUBMIT_S)):
            began = trio.current_time()
            with (
                trio.move_on_after(SUBMIT_S / 2) as scope,
                pytest.raises(RayUnknown, match=r"^no answer within (5|60) s$"),
            ):
                await ask()
            assert not scope.cancelled_caught
            assert trio.current_time() - began == pytest.approx(within_s, abs=0.5)
        nursery.cancel_scope.cancel()
    for stream in [*listeners, *accepted]:
        await stream.aclose()


@pytest.mark.parametrize("address", ["ray://head:10001", "head:6379", "http://", "", "head"])
def test_an_address_that_is_no_dashboards_is_refused(address):
    with pytest.raises(ValueError, match="is no address of Ray's dashboard"):
        RayApi(address)


@pytest.mark.parametrize(
    "wrong", [{"id": "a/b"}, {"id": ""}, {"id": "a b"}, {"memory_bytes": 10**15}, {"memory_bytes": -1}]
)
def test_a_submission_that_ray_takes_wrongly_is_refused(wrong):
    """A slash leaves a job that pends for ever; a memory of 10^15 bytes overflows, and is placed."""
    with pytest.raises(ValueError, match=r"must|range"):
        RaySubmission(**{"id": "a", "entrypoint": "true", **wrong})
