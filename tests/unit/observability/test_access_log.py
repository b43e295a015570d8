"""The access log: bounded, in the background, and nobody waits for it."""

import json
import os

import pytest
import trio
from support.programs import LIMIT_S

from ichat.errors import Exit
from ichat.observability.access_log import AccessLog, is_routine, short_line
from ichat.observability.request_record import OTHER, RequestRecord, UsedTokens


async def test_a_file_is_appended_to(tmp_path, nursery):
    """Lines of an earlier run stay; each new one is a JSON object with the time and the facts, nothing lost at the end."""
    path = tmp_path / "access.log"
    path.write_text("before\n")
    access = AccessLog(str(path), 10)
    nursery.start_soon(access.run_forever)
    access.add({"path": '/v1/"\n', "status": 200, "first_byte_ms": None})
    await trio.testing.wait_all_tasks_blocked()
    nursery.cancel_scope.cancel()
    with trio.fail_after(LIMIT_S, shield=True):
        while path.read_text() == "before\n":
            await trio.sleep(0.01)
    before, line = path.read_text().splitlines()
    assert before == "before"
    facts = json.loads(line)
    assert facts.pop("time").endswith("Z")
    assert facts == {"path": '/v1/"\n', "status": 200, "first_byte_ms": None}


async def test_the_line_of_a_request(tmp_path):
    """It is one line of JSON whatever the client chose; what is not known is null, and times are rounded."""
    access = AccessLog(str(tmp_path / "access.log"), 2)
    odd = 'a "quoted"\\\n\udc80é'
    record = RequestRecord(
        id=odd, client="1.2.3.4:5", method="POST", path="/v1/completions", route="r", key_name=odd, model=odd * 100,
        status=200, error="", phase="", started_at=10.0, ended_at=10.1234567, queued_s=0.0, bytes_in=7, bytes_out=8,
        usage=None, trace_id="ab",
    )  # fmt: skip
    access.ended(record)
    record.worker, record.answered_at, record.overhead_s = "w", 10.02, 0.000456
    record.usage = UsedTokens(7, 2, 3)
    access.ended(record)
    access.ended(record)
    with trio.move_on_after(0):
        await access.run_forever()
    text = (tmp_path / "access.log").read_text()
    first, second, dropped = map(json.loads, text.splitlines())
    assert first.pop("time") <= second.pop("time")
    assert first == {
        "id": odd, "client": "1.2.3.4:5", "method": "POST", "path": "/v1/completions", "key": odd,
        "model": (odd * 100)[:256], "worker": "", "status": 200, "error": "", "bytes_in": 7, "bytes_out": 8,
        "duration_ms": 123.46, "first_byte_ms": None, "queue_ms": 0, "overhead_ms": None, "prefix_matched": None,
        "prefix_length": None, "tokens": None, "tokens_in": None, "tokens_out": None, "tokens_cached": None, "phase": "",
        "trace": "ab",
    }  # fmt: skip
    used = {"tokens": 9, "tokens_in": 7, "tokens_out": 2, "tokens_cached": 3}
    assert second == first | {"worker": "w", "first_byte_ms": 20, "overhead_ms": 0.46, **used}
    assert dropped["lines_dropped"] == 1


async def test_lost_lines_are_counted(tmp_path, nursery):
    """A reader that stands still costs lines, which are counted, and neither memory nor requests."""
    read, write = os.pipe()
    access = AccessLog("-", 100, stdout=write)
    nursery.start_soon(access.run_forever)
    for _ in range(30):
        for number in range(200):
            access.add({"number": number, "padding": "x" * 1000})
        await trio.sleep(0.01)
    assert repr(access) == "<AccessLog 100 lines wait>"
    text = ""
    with trio.fail_after(LIMIT_S):
        while "lines_dropped" not in text:
            text += (await trio.to_thread.run_sync(os.read, read, 65536, abandon_on_cancel=True)).decode()
    dropped = [json.loads(line) for line in text.splitlines() if line.endswith("}") and "lines_dropped" in line]
    assert dropped[0]["lines_dropped"] >= 100
    os.set_blocking(read, False)
    nursery.cancel_scope.cancel()
    os.close(read)


def test_a_file_that_cannot_be_opened(tmp_path):
    """It is found at the start, with the path, the reason and the key to change."""
    with pytest.raises(Exit, match=r"cannot be opened: No such file or directory; see logs\.access_log") as caught:
        AccessLog(str(tmp_path / "none/access.log"), 10)
    assert caught.value.code == 69


def record_of(**more):
    return RequestRecord(**({
        "id": "i", "client": "c", "method": "POST", "path": "/v1/chat/completions", "route": "/v1/chat/completions",
        "key_name": "", "model": "tiny", "status": 200, "error": "", "phase": "", "started_at": 10.0, "ended_at": 10.31,
        "queued_s": 0.0, "bytes_in": 7, "bytes_out": 8, "usage": None, "trace_id": "",
    } | more))  # fmt: skip


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"usage": UsedTokens(7, 48), "key_name": "team-a"}, "200 tiny 48 tok 0.3 s team-a"),
        ({"usage": UsedTokens(7, 0)}, "200 tiny 7 tok in 0.3 s"),
        ({"alias": "gpt"}, "200 gpt -> tiny 0.3 s"),
        ({"status": 503, "error": "model_not_ready"}, "503 tiny model_not_ready 0.3 s"),
        ({"status": 499, "error": "client_left", "phase": "streaming"}, "499 tiny client_left streaming 0.3 s"),
        ({"model": "a\x1b[2J\n\u202eb"}, "200 a\\x1b[2J\\n\\u202eb 0.3 s"),
        ({"model": "", "path": "/v1/admin/workers/launch", "route": OTHER}, "200 POST /v1/admin/workers/launch 0.3 s"),
    ],
)
def test_the_short_line_of_a_request(more, line):
    """A person reads what came of it, of which model, how much, how long, and whose; nothing is done by the terminal."""
    assert short_line(record_of(**more)) == line


def test_successful_reads_of_the_control_plane_are_routine():
    """Reads of the control plane and heartbeats that go well are; what is refused, and what changes anything, is not."""
    watching = record_of(method="GET", path="/v1/admin/workers", route=OTHER, model="")
    assert is_routine(watching)
    watching.status = 499
    assert is_routine(watching)
    watching.status = 401
    assert not is_routine(watching)
    assert is_routine(record_of(path="/v1/workers/heartbeat", route=OTHER, model=""))
    assert not is_routine(record_of(path="/v1/admin/workers/launch", route=OTHER, model=""))
    assert not is_routine(record_of(method="GET", path="/v1/responses/{id}", route="/v1/responses/{id}", model=""))
    assert not is_routine(record_of())


@pytest.mark.parametrize(("form", "is_json"), [("auto", True), ("json", True), ("text", False)])
async def test_the_form_of_the_lines(tmp_path, form, is_json):
    """A file has JSON unless short lines are asked for; these leave out what is routine, and say what was lost."""
    access = AccessLog(str(tmp_path / "access.log"), 2, form)
    access.ended(record_of(method="GET", path="/v1/admin/workers", route=OTHER, model=""))
    access.add({"id": "i", "method": "GET", "path": "/x\x1b", "status": 400, "error": "bad_request"})
    access.ended(record_of())
    access.ended(record_of())
    with trio.move_on_after(0):
        await access.run_forever()
    lines = (tmp_path / "access.log").read_text().splitlines()
    if is_json:
        assert [json.loads(line).get("status") for line in lines] == [200, 400, None]
    else:
        assert [line.partition(" ")[2] for line in lines[:2]] == ["400 GET /x\\x1b bad_request", "200 tiny 0.3 s"]
        assert lines[2] == "[1 lines of requests are missing here]"
