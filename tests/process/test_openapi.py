"""What /openapi.json says is what the gateway does: its routes, and the JSON that it takes and gives."""

import json
import re
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace

import attrs
import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from support.programs import LIMIT_S, Program, ichat

from ichat.admin.app import make_app
from ichat.admin.open_routes import OpenRoutes
from ichat.admin.openapi import document
from ichat.admin.schemas import schema_of
from ichat.config.load import read_worker
from ichat.config.ray import RaySettings
from ichat.config.schema import DRAIN_S_MAX, Config, ManagedWorkerConfig, ServerSettings
from ichat.engines.engine import Progress
from ichat.errors import ApiError
from ichat.hardware.gpus import Gpu, GpuProcess
from ichat.hardware.host import CpuMeter, read_resources
from ichat.http.request import Request
from ichat.observability import request_record
from ichat.protocol.messages import Group, Heartbeat, ModelCard, parse_heartbeat
from ichat.proxy.planes import is_control
from ichat.security.rules import ROUTES

WORKER = {"model_name": "m", "model_path": "p"}
BEAT = {"worker_id": "w", "model_name": "m", "host": "127.0.0.1", "port": 1}


@pytest.fixture(scope="module")
def said():
    return document()


def is_right(said, name, value):
    """Check a value against the schema of this name."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": said["components"]}
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    problems = [
        f"{error.json_path}: {error.message}"
        for error in jsonschema.Draft202012Validator(schema, format_checker=checker).iter_errors(value)
    ]
    assert not problems, f"{name}: {problems}"
    return value


def refused(said, name, value):
    with pytest.raises(AssertionError):
        is_right(said, name, value)


# The document.


def test_the_document_is_valid_openapi(said):
    """It is valid OpenAPI 3.1, and JSON."""
    assert list(OpenAPIV31SpecValidator(said).iter_errors()) == []
    assert json.loads(json.dumps(said)) == said


def test_every_reference_leads_somewhere_and_every_component_is_used(said):
    """Only what an event holds is referred to in words."""
    used = set(re.findall(r'"#/components/([^"]+)"', json.dumps(said)))
    kinds = {kind: found for kind, found in said["components"].items() if kind != "securitySchemes"}
    there = {f"{kind}/{name}" for kind, found in kinds.items() for name in found}
    assert there - used == {"schemas/LogLine", "schemas/LogGap", "schemas/EventState", "schemas/Lanes"}
    assert used <= there


def methods_of(said, *, control):
    controlled = {path: is_control(path.partition("{")[0].encode()) for path in said["paths"]}
    return {
        (path, method)
        for path, item in said["paths"].items()
        for method in item.keys() - {"parameters"}
        if controlled[path] is control
    }


def test_the_control_plane_has_these_routes_and_no_others(said):
    """Each route of the application stands in it with its methods, and is one that the front door sends there."""
    rules = make_app({}).url_map.iter_rules()
    there = {
        (re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule), method.lower())
        for rule in rules
        if rule.endpoint != "static"
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }
    there |= {  # the front door answers these itself
        (re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", path), method.lower())
        for (method, path), rule in ROUTES.items()
        if rule == "open"
    }
    assert methods_of(said, control=True) == there


def test_the_data_plane_has_these_routes_and_no_others(said):
    """Each route that is known to be routed by model stands in it, and takes POST alone; so do those of responses."""
    response = "/v1/responses/{response_id}"
    of_responses = {(response, "get"), (response, "delete"), (f"{response}/cancel", "post")}
    assert methods_of(said, control=False) == {(path.decode(), "post") for path in request_record.ROUTES} | of_responses


def test_every_route_says_what_key_it_takes(said):
    """What an operation asks for is what the control plane checks; the data plane takes a client's key."""
    rules = {
        (method.lower(), re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", path)): rule for (method, path), rule in ROUTES.items()
    }
    keys = {"data": ["client"], "models": ["client", "admin"], "join": ["worker"], "open": [], "order": []}
    for path, item in said["paths"].items():
        for method in item.keys() - {"parameters"}:
            wanted = keys.get(rules.get((method, path), "data"), ["admin"])
            assert [list(one) for one in item[method]["security"]] == [[], *([key] for key in wanted)]
            assert all(key in said["components"]["securitySchemes"] for key in wanted)


def test_every_failure_has_a_description(said):
    """Every operation says of any failure what its body is, and of those to expect why they come."""
    for item in said["paths"].values():
        for operation in item.values():
            if isinstance(operation, dict):
                assert {"4XX", "5XX"} < operation["responses"].keys()
                assert any(status.startswith(("2", "3")) for status in operation["responses"])


def test_every_operation_has_an_id_of_its_own_and_a_summary(said):
    """A handler of the control plane without a docstring would have none."""
    operations = [one for item in said["paths"].values() for name, one in item.items() if name != "parameters"]
    ids = [one["operationId"] for one in operations]
    assert len(set(ids)) == len(ids)
    assert [one["operationId"] for one in operations if not one["summary"]] == []


def test_the_document_is_served():
    """GET /openapi.json gives the document."""
    asked = Request(b"GET", b"/openapi.json", b"/openapi.json", b"1.1", [], b"", b"id", keep_alive=True)
    status, headers, body = OpenRoutes(SimpleNamespace(settings=ServerSettings()), document)(asked)
    assert (status, headers) == (200, [(b"content-type", b"application/json")])
    assert json.loads(body) == document()


# What requests bring.


def test_the_keys_of_a_launch_are_those_of_the_class(said):
    """A key of a managed worker is in the schema of a launch, with its default, and no other key is."""
    launch = said["components"]["schemas"]["Launch"]
    fields = attrs.fields_dict(ManagedWorkerConfig)
    assert launch["properties"].keys() == fields.keys()
    assert set(launch["required"]) == {name for name, field in fields.items() if field.default is attrs.NOTHING}
    plain = ManagedWorkerConfig(**WORKER)
    for name, schema in launch["properties"].items():
        if name not in launch["required"]:
            assert schema.get("default") == attrs.asdict(plain)[name], name


def bounds_of(said, name):
    """Return each number with a bound: its key, a value at the bound, and one just beyond."""
    for key, schema in said["components"]["schemas"][name]["properties"].items():
        beyond = 1 if "integer" in schema.get("type", ()) else 0.001
        for bound, step in (("minimum", -beyond), ("maximum", beyond)):
            if bound in schema:
                yield key, schema[bound], schema[bound] + step


@pytest.mark.parametrize("name", ["Launch", "Heartbeat"])
def test_a_bound_is_where_the_gateway_has_it(said, name):
    """What is at a bound is taken, what is beyond it is not."""
    worker = {**WORKER, "load": "on_demand", "gpus": 1}  # idle_s and the like are for such workers alone
    read, whole = (read_worker, worker) if name == "Launch" else (parse_heartbeat, BEAT)
    on_ray = Config(ray=RaySettings(address="http://head:8265"))
    rest = (on_ray,) if name == "Launch" else ()
    alone = {"replicas": WORKER, "memory_gib": {**WORKER, "gpus": 1, "on": "ray"}}  # of workers of another kind
    bounds = list(bounds_of(said, name))
    assert len(bounds) >= 6
    for key, at, beyond in bounds:
        read(is_right(said, name, {**alone.get(key, whole), key: at}), *rest)
        refused(said, name, {**whole, key: beyond})
        with pytest.raises(ApiError, match=key):
            read({**whole, key: beyond}, *rest)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "gpu_ids": None,
            "max_model_len": 8192,
            "enable_prefix_caching": True,
            "dtype": None,
            "list": [1, "a", {"b": 2}],
        },
        {"backend_args": {"compilation_config": {"level": 3}, "seed": None}, "env": {"A": "b"}, "port": None},
        {"on_gateway_exit": "stop", "python": "/usr/bin/python3", "gpu_ids": [0, 1]},
        {"load": "on_demand", "idle_s": 60, "when_idle": "sleep", "min_loaded_s": 0},
    ],
)
def test_the_schema_accepts_what_may_be_launched(said, more):
    """What the gateway takes, the schema takes."""
    read_worker(is_right(said, "Launch", {**WORKER, **more}), Config())


@pytest.mark.parametrize(
    "more",
    [
        {"model_name": ""},
        {"model_path": ""},
        {"model_name": None},
        {"model_name": "m" * 257},
        {"gpu_ids": "0"},
        {"gpu_ids": [0.5]},
        {"port": "1"},
        {"on_gateway_exit": "never"},
        {"env": {"A": None}},
        {"env": {"A": 1}},
        {"share_gpus": "yes"},
        {"load": "never"},
        {"load": "on_demand", "when_idle": "rest"},
        {"list": [None]},
        {"backend": ""},
    ],
)
def test_the_schema_refuses_what_may_not_be_launched(said, more):
    """What the gateway refuses for its type or bound, the schema refuses."""
    refused(said, "Launch", {**WORKER, **more})
    with pytest.raises(ApiError):
        read_worker({**WORKER, **more}, Config())


def test_a_beat_is_right(said):
    """The shortest beat and the fullest one are what the schema says, and what no beat may be is not."""
    is_right(said, "Heartbeat", BEAT)
    full = Heartbeat(
        **BEAT,
        model_names=["m"],
        models=[ModelCard("m", "p", None, 4096)],
        group=Group("g", 0, 2),
        progress={"running": 1.0},
        backend_args={"max_model_len": 4096},
        changed_args=["max_model_len"],
    )
    parse_heartbeat(is_right(said, "Heartbeat", attrs.asdict(full)))
    parse_heartbeat(is_right(said, "Heartbeat", {**BEAT, "models": [{"id": "m", "new": 1}], "new": 1}))
    wrong = (
        {"worker_id": "a b"},
        {"port": -1},
        {"state": "wedged"},
        {"progress": {"running": -1}},
        {"group": {"id": "g"}},
        {"model_names": ["m" * 257]},
        {"failure": "x" * 2001},
        {"backend_args": []},
        {"changed_args": ["x"] * 257},
    )
    for more in wrong:
        refused(said, "Heartbeat", {**BEAT, **more})
        with pytest.raises(ApiError):
            parse_heartbeat({**BEAT, **more})


def test_a_drain_lasts_at_most_as_long_as_it_says(said):
    """The bound of `drain_s` is the route's."""
    [drain_s] = said["paths"]["/v1/admin/workers/{worker_id}"]["delete"]["parameters"]
    assert drain_s["schema"]["maximum"] == DRAIN_S_MAX


def test_progress_is_what_engines_tell(said):
    """Each number of an engine's progress is explained, and no other."""
    assert said["components"]["schemas"]["Progress"]["properties"].keys() == attrs.fields_dict(Progress).keys()


def test_a_type_without_a_schema_is_a_bug():
    """A class that gets a field of a new kind is not described wrongly."""
    with pytest.raises(TypeError, match="bytes"):
        schema_of(bytes)


def test_gpus_are_as_it_says(said):
    """A GPU that answers and one that does not, with a process of a worker's and a stranger."""
    process = GpuProcess(1, 3, "python"), GpuProcess(2**22 + 5)
    gpus = [Gpu(0, "GPU-1", "H100", 3, 2, 1, 0.5, process), Gpu(1, failure="is lost")]
    found = attrs.asdict(read_resources(CpuMeter(), gpus, {1: "w"}))
    for gpu in found["gpus"]:
        is_right(said, "Gpu", gpu)
    assert found["gpus"][0]["held_by"][0]["worker_id"] == "w"


# A gateway that runs.


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A gateway with a worker that is ready, one that has failed, and two that were started elsewhere."""
    directory = tmp_path_factory.mktemp("openapi")
    config = directory / "ichat.toml"
    config.write_text(f"""
[server_settings]
port = 0
state_directory = {json.dumps(str(directory / "state"))}
watch_config = false
[restart]
attempts_max = 1
[[managed_workers]]
model_name = "well"
model_path = "w"
backend = "fake"
heartbeat_interval = 20
python = {json.dumps(sys.executable)}
[[managed_workers]]
model_name = "ill"
model_path = "i"
backend = "fake"
python = {json.dumps(sys.executable)}
fail = true
[[external_routes]]
model_name = "elsewhere"
api_base = "http://127.0.0.1:9/v1"
""")
    program = Program(ichat("gateway", "-c", config), directory / "gateway.log")
    program.config = config
    try:
        program.wait_for_port(LIMIT_S).wait_until_ready("well-0", LIMIT_S)
        program.until(lambda: program.state("ill-0") == "failed", LIMIT_S)
        long = {"heartbeat_interval": 3600}
        for worker in ("a", "b"):
            group = {"id": "g", "rank": int(worker == "b"), "size": 2}
            heartbeat = {
                **BEAT,
                **long,
                "worker_id": worker,
                "group": group,
                "start_id": "1",
                "models": [{"id": "far"}],
            }
            assert program.ask("/v1/workers/heartbeat", heartbeat)[0] == 200
        yield program
        assert program.stop() == 0
    finally:
        program.end()


def asked(program, method, path, body=None):
    """Return status, headers and text."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {program.own_secret()}"}
    request = urllib.request.Request(f"http://127.0.0.1:{program.port}{path}", body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def answered(said, program, method, path, body=None, template=None):
    """Ask, and check the answer against what its operation says of that status; give status and value."""
    data = None if body is None else json.dumps(body).encode()
    status, headers, text = asked(program, method, path, data)
    operation = said["paths"][template or path.partition("?")[0]][method.lower()]
    answers = operation["responses"]
    answer = answers.get(str(status)) or answers[f"{status // 100}XX"]
    if "$ref" in answer:
        answer = said["components"]["responses"][answer["$ref"].rpartition("/")[2]]
    kind = headers["content-type"].partition(";")[0]
    reference = answer["content"][kind]["schema"]["$ref"]
    if status >= 400:
        assert headers["x-ichat-error"] == "gateway"
    return status, is_right(said, reference.rpartition("/")[2], json.loads(text))


def test_workers_are_as_it_says(said, program):
    """Workers that are ready, failed, and registered; each key that it has is seen at one of them."""
    status, found = answered(said, program, "GET", "/v1/admin/workers")
    assert status == 200
    for summary in found["data"]:
        is_right(said, "WorkerSummary", summary)
    assert answered(said, program, "GET", "/v1/admin/workers?state=well")[0] == 400
    page = answered(said, program, "GET", "/v1/admin/workers?limit=1&after=a")[1]
    assert ([one["worker_id"] for one in page["data"]], page["has_more"], page["last_id"]) == (["b"], True, "b")
    found = answered(said, program, "GET", "/v1/admin/workers?full=1")[1]
    workers = {worker["worker_id"]: worker for worker in found["data"]}
    assert {name: worker["state"] for name, worker in workers.items()} == {
        "well-0": "ready", "ill-0": "failed", "a": "ready", "b": "ready",
    }  # fmt: skip
    seen = {key for worker in workers.values() for key in worker}
    assert seen == set(said["components"]["schemas"]["Worker"]["properties"])
    assert workers["ill-0"]["exit_code"] == 70
    for name in workers:
        one = answered(said, program, "GET", f"/v1/admin/workers/{name}", template="/v1/admin/workers/{worker_id}")
        assert one[0] == 200
    heartbeat = {
        **BEAT,
        "worker_id": "a",
        "start_id": "2",
        "group": {"id": "g", "rank": 0, "size": 2},
        "models": [{"id": "far"}],
    }
    assert answered(said, program, "POST", "/v1/workers/heartbeat", {**heartbeat, "heartbeat_interval": 3600})[0] == 200
    heartbeat = {**BEAT, "worker_id": "b", "start_id": "1", "heartbeat_interval": 3600}
    lost = answered(said, program, "POST", "/register", heartbeat)[1]["lost"]
    assert [one["worker_id"] for one in lost] == ["a"]
    report = {"worker_id": "b", "start_id": "1", "have": ["0123456789abcdef"]}
    assert answered(said, program, "POST", "/v1/workers/prefixes", report)[0] == 200
    worker = answered(said, program, "GET", "/v1/admin/workers/b", template="/v1/admin/workers/{worker_id}")[1]
    assert worker["state"] == "broken"


@pytest.mark.parametrize(
    "path",
    [
        "/health", "/v1/models", "/v1/admin/cluster/status", "/v1/admin/cluster/version", "/v1/admin/config",
        "/v1/admin/engines",
    ],
)  # fmt: skip
def test_answers_are_as_it_says(said, program, path):
    """What operators and clients may ask at any time."""
    status, value = answered(said, program, "GET", path)
    assert status == 200
    if path == "/v1/admin/cluster/status":
        assert {model["id"] for model in value["models"]} >= {"well", "ill", "elsewhere"}
        [machine] = [one for one in value["machines"] if one["has_gateway"]]
        assert "well-0" in machine["workers"]
    if path == "/v1/admin/cluster/version":
        assert "ichat" in next(one for one in value["workers"] if one["worker_id"] == "well-0")["versions"]
    if path == "/v1/models":
        assert {model["id"] for model in value["data"]} >= {"well", "elsewhere"}


def test_failures_are_as_it_says(said, program):
    """Each failure has the shape of an error, and a status that its operation has."""
    one, models = "/v1/admin/workers/{worker_id}", "/v1/models/{name}"
    heartbeat, launch = "/v1/workers/heartbeat", "/v1/admin/workers/launch"
    assert answered(said, program, "GET", "/v1/models/well", template=models)[0] == 200
    assert answered(said, program, "GET", "/v1/models/no/such", template=models)[0] == 404
    assert answered(said, program, "GET", "/v1/admin/workers/nobody", template=one)[0] == 404
    assert answered(said, program, "DELETE", "/v1/admin/workers/a", template=one)[0] == 409
    assert answered(said, program, "DELETE", "/v1/admin/workers/well-0?drain_s=x", template=one)[0] == 400
    assert answered(said, program, "POST", heartbeat, {"worker_id": 1})[0] == 400
    assert answered(said, program, "POST", "/v1/workers/prefixes", {"worker_id": "a", "start_id": "?"})[0] == 404
    assert answered(said, program, "POST", launch, {"model_name": "x"})[0] == 400
    assert answered(said, program, "POST", "/v1/admin/config/reload?dry_run=perhaps")[0] == 400
    assert answered(said, program, "POST", "/v1/chat/completions", {"model": "nobody"})[0] == 404
    assert answered(said, program, "POST", "/v1/chat/completions", {"model": "ill"})[0] == 503
    assert answered(said, program, "POST", "/rerank", {})[0] == 400
    logs = "/v1/logs/stream/{worker_id}"
    assert answered(said, program, "GET", "/v1/logs/stream/nobody", template=logs)[0] == 404
    assert answered(said, program, "GET", "/v1/logs/stream/well-0?tail=x", template=logs)[0] == 400


def test_a_launch_and_a_stop_are_as_it_says(said, program):
    """A worker that is launched by what the schema takes, and stopped again."""
    table = {**WORKER, "model_name": "more", "backend": "fake", "python": sys.executable, "load_s": 60.0}
    is_right(said, "Launch", table)
    status, tried = answered(said, program, "POST", "/v1/admin/workers/launch?dry_run=1", table)
    assert (status, tried["objections"]) == (200, [])
    status, launched = answered(said, program, "POST", "/v1/admin/workers/launch", table)
    assert status == 202
    one = "/v1/admin/workers/{worker_id}"
    path = f"/v1/admin/workers/{launched['worker_id']}"
    assert answered(said, program, "GET", path, template=one)[1]["origin"] == "api"
    assert answered(said, program, "DELETE", f"{path}?drain_s=0", template=one)[0] == 200
    assert answered(said, program, "GET", path, template=one)[0] == 404


def test_a_reload_is_as_it_says(said, program):
    """The plan of a file that has changed, and a file that is wrong."""
    before = program.config.read_text()
    reload = "/v1/admin/config/reload?dry_run=true"
    program.config.write_text(before + "\n[timeouts]\nqueue_s = 7\n")
    status, value = answered(said, program, "POST", reload)
    assert (status, value["applied"]) == (200, False)
    assert {step["what"] for step in value["plan"]} >= {"timeouts.queue_s", "worker well-0"}
    program.config.write_text("wrong")
    assert answered(said, program, "POST", reload)[0] == 400
    program.config.write_text(before)


def test_the_lines_of_a_worker_are_as_it_says(said, program):
    """Each event of a log stream holds what the schema of a line says; so does that of a gap."""
    status, headers, text = asked(program, "GET", "/v1/logs/stream/ill-0?follow=false")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    events = [block.split("\n") for block in text.strip("\n").split("\n\n") if not block.startswith(":")]
    assert events
    for event in events:
        values = dict(line.split(": ", 1) for line in event)
        is_right(said, "LogGap" if values.get("event") == "gap" else "LogLine", json.loads(values["data"]))
    assert any("no such weights" in line for event in events for line in event)


def test_the_pages_of_a_log_are_as_it_says(said, program):
    """A text is found in the files; a page before a time, and the whole file, have the same line."""
    template = "/v1/logs/pages/{worker_id}"
    path = "/v1/logs/pages/ill-0"
    status, page = answered(said, program, "GET", f"{path}?text=NO%20SUCH%20weights", template=template)
    assert status == 200
    assert page["lines"]
    assert all("no such weights" in line["line"] for line in page["lines"])
    at, position = page["lines"][0]["time"], page["lines"][0]["position"]
    before = answered(said, program, "GET", f"{path}?before={at}", template=template)[1]["lines"]
    after = answered(said, program, "GET", f"{path}?after={position}", template=template)[1]["lines"]
    assert page["lines"][0] in before
    assert page["lines"][0] == after[0]
    assert answered(said, program, "GET", f"{path}?before=1.2.3", template=template)[0] == 404
    assert answered(said, program, "GET", f"{path}?before=x", template=template)[0] == 400
    assert answered(said, program, "GET", "/v1/logs/pages/nobody", template=template)[0] == 404
    status, headers, text = asked(program, "GET", "/v1/logs/files/ill-0")
    assert (status, headers["content-disposition"]) == (200, 'attachment; filename="ill-0.log"')
    assert f"{at} {page['lines'][0]['line']}\n" in text
    files = "/v1/logs/files/{worker_id}"
    assert answered(said, program, "GET", "/v1/logs/files/ill-0?previous=1", template=files)[0] == 404


def test_the_gateways_own_lines_are_as_it_says(said, program):
    """What the gateway logs is in its stream, without the run of a process before."""
    status, headers, text = asked(program, "GET", "/v1/logs/gateway?follow=false")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    lines = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    for line in lines:
        is_right(said, "LogLine", line)
    assert any("ERROR" in one["line"] and "ill-0" in one["line"] for one in lines)
    template = "/v1/logs/gateway"
    assert answered(said, program, "GET", "/v1/logs/gateway?previous=1&follow=0", template=template)[0] == 404
