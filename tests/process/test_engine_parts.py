"""The small parts that engines are made of here, each by itself and without an engine."""

import asyncio
import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError

import psutil
import pytest
from support.programs import LIMIT_S

from ichat.engines.children import Child, ProcessFamily, children, first_dead, wait_for_end
from ichat.engines.ray_check import check_ray
from ichat.engines.sglang.adapter import SGLangAdapter
from ichat.engines.sglang.encoders import inspect_encoder
from ichat.engines.sglang.loopback_requests import LoopbackRequests
from ichat.engines.versions import ANY_VERSION, check_version
from ichat.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ApiError, Exit
from ichat.http.request import Request

# Versions.


@pytest.mark.parametrize(
    ("found", "oldest", "newest"),
    [
        ("0.20.3", (0, 13), (0, 32)),
        ("0.13.0", (0, 13), (0, 32)),
        ("0.13", (0, 13), (0, 32)),
        ("0.32.7", (0, 13), (0, 32)),
        ("0.5.5", (0, 5, 5), (0, 5, 23)),
        ("0.5.23", (0, 5, 5), (0, 5, 23)),
        ("0.32.0+cpu", (0, 13), (0, 32)),
        ("0.32.0+cu129.gabcdef1", (0, 13), (0, 32)),
        ("0.5.23.post1", (0, 5, 5), (0, 5, 23)),
        ("0.5.5.post2+cpu", (0, 5, 5), (0, 5, 23)),
    ],
)
def test_a_version_that_is_known(found, oldest, newest):
    """Both bounds are included, as far as they go, and what is put behind a version makes no difference."""
    check_version("vLLM", found, oldest, newest)


@pytest.mark.parametrize(
    ("found", "oldest", "newest", "known"),
    [
        ("0.12.9", (0, 13), (0, 32), "0.13 to 0.32"),
        ("0.33.0", (0, 13), (0, 32), "0.13 to 0.32"),
        ("0.33.0rc1", (0, 13), (0, 32), "0.13 to 0.32"),
        ("1.0", (0, 13), (0, 32), "0.13 to 0.32"),
        ("0.12.9+cpu0.20", (0, 13), (0, 32), "0.13 to 0.32"),
        ("0.5.4.post3", (0, 5, 5), (0, 5, 23), "0.5.5 to 0.5.23"),
        ("0.5.24", (0, 5, 5), (0, 5, 23), "0.5.5 to 0.5.23"),
        ("0.5+cpu7", (0, 5, 5), (0, 5, 23), "0.5.5 to 0.5.23"),
        ("dev", (0, 13), (0, 32), "0.13 to 0.32"),
    ],
)
def test_a_version_that_is_not_known(found, oldest, newest, known, monkeypatch):
    """Exit 69 names the version and what would be known; only a variable that is set to 1 lets it through."""
    for value in (None, "0", ""):
        monkeypatch.delenv(ANY_VERSION, raising=False)
        if value is not None:
            monkeypatch.setenv(ANY_VERSION, value)
        with pytest.raises(Exit) as caught:
            check_version("vLLM", found, oldest, newest)
        assert caught.value.code == EXIT_UNAVAILABLE
        assert str(caught.value).startswith(f"vLLM {found} is not a version that this worker knows ({known})")
        assert f"{ANY_VERSION}=1" in str(caught.value)
    monkeypatch.setenv(ANY_VERSION, "1")
    check_version("vLLM", found, oldest, newest)


# Encoders.

WHOLE = ["--disable-radix-cache", "--chunked-prefill-size", "-1"]
CROSS = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


@pytest.fixture
def model(tmp_path):
    """Write a model's files: `directory = model(config, pooling)`."""

    def write(config=None, pooling=None):
        if config is not None:
            (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        if pooling is not None:
            (tmp_path / "1_Pooling").mkdir()
            (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        return str(tmp_path)

    return write


def passed(encoder):
    return [word for step in encoder.flag_outcomes for word in step.passed]


CLS = {"word_embedding_dimension": 8, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}


@pytest.mark.parametrize("architecture", ["BertModel", "RobertaModel", "XLMRobertaModel"])
@pytest.mark.parametrize("pooling", [CLS, None])
@pytest.mark.parametrize(
    ("given", "added"),
    [
        (["--model-path", "m"], WHOLE),
        (["--disable-radix-cache"], WHOLE[1:]),
        (["--chunked-prefill-size", "128"], WHOLE[:1]),
        (["--disable-radix-cache", "--chunked-prefill-size", "-1"], []),
    ],
)
def test_an_encoder_gets_the_flags_that_it_needs(model, architecture, pooling, given, added):
    """Both are added with their reason, unless they are given; without cross-encoder there is nothing to rerank."""
    encoder = inspect_encoder(model({"architectures": [architecture]}, pooling), None, given)
    assert passed(encoder) == added
    assert all(step.why and not step.given for step in encoder.flag_outcomes)
    assert (encoder.is_cross_encoder, encoder.wants_sigmoid) == (False, False)


@pytest.mark.parametrize(
    ("modes", "words"),
    [
        (["mean_tokens"], "mean_tokens"),
        (["cls_token", "max_tokens"], "cls_token and max_tokens"),
        (["lasttoken"], "lasttoken"),
    ],
)
def test_an_encoder_that_sglang_would_pool_wrongly(model, modes, words):
    """Exit 64 before anything loads, and the sentence names the engine that pools rightly."""
    pooling = {"pooling_mode_cls_token": False} | {f"pooling_mode_{mode}": True for mode in modes}
    with pytest.raises(Exit, match=f"wants {words}, and so give wrong vectors.*--backend vllm") as caught:
        inspect_encoder(model({"architectures": ["BertModel"]}, pooling), None, [])
    assert caught.value.code == EXIT_USAGE


@pytest.mark.parametrize(
    ("more", "wants_sigmoid"),
    [
        ({}, True),
        ({"id2label": {"0": "no", "1": "yes"}}, False),
        ({"problem_type": "regression"}, False),
        ({"problem_type": "single_label_classification"}, True),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        (
            {
                "problem_type": "regression",
                "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
            },
            True,
        ),
        ({"sentence_transformers": {"version": "5"}, "problem_type": "regression"}, False),
    ],
)
def test_whether_a_cross_encoders_scores_want_a_sigmoid(model, more, wants_sigmoid):
    """As vLLM decides it, except where SGLang itself heeds the model's own function."""
    encoder = inspect_encoder(model({**CROSS, **more}, {"pooling_mode_mean_tokens": True}), None, [])
    assert (encoder.is_cross_encoder, encoder.wants_sigmoid) == (True, wants_sigmoid)
    assert passed(encoder) == WHOLE


@pytest.mark.parametrize(
    "config",
    [None, [], {}, {"architectures": None}, {"architectures": []}, {"architectures": ["Qwen2ForCausalLM"]}],
)
def test_an_unknown_encoder_adds_and_refuses_nothing(model, config):
    """Nothing is known, and so nothing is added or refused."""
    assert inspect_encoder(model(config, {"pooling_mode_mean_tokens": True}), None, []) is None


def test_a_configuration_that_cannot_be_read(model):
    """What cannot be told is not taken for an answer."""
    with pytest.raises(Exit, match=r"config\.json of the model .* cannot be read") as caught:
        inspect_encoder(model("no JSON", {}), None, [])
    assert caught.value.code == EXIT_UNAVAILABLE


# SGLang's requests and responses, by what is known of its model.


def request_of(path, body, query=b""):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = [(b"content-type", b"application/json")]
    return Request(b"POST", path + query, path, b"1.1", headers, body, b"req-1", keep_alive=True)


def wire(**settings):
    made = SGLangAdapter(lambda: (["own", "alias"], ["lora"]))
    for name, value in settings.items():
        setattr(made, name, value)
    return made


VECTORS_ONLY = [
    (b"/rerank", {"query": "q", "documents": ["a"]}),
    (b"/v1/rerank", {"query": "q", "documents": ["a"]}),
    (b"/v2/rerank", {"query": "q", "documents": ["a"]}),
    (b"/score", {"text_1": "a", "text_2": "b"}),
    (b"/v1/score", {"queries": "a", "documents": ["b"]}),
]


@pytest.mark.parametrize(("path", "body"), VECTORS_ONLY)
async def test_a_model_that_gives_vectors_is_not_asked_for_scores(path, body):
    """SGLang would end of it, so the request is refused; a model that can is asked."""
    with pytest.raises(ApiError) as caught:
        await wire(can_rerank=False).request(request_of(path, {**body, "model": "alias"}))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "bad_request", "model")
    assert await wire().request(request_of(path, body)) is not None


@pytest.mark.parametrize("path", [b"/score", b"/v1/score"])
async def test_sglangs_own_score_needs_no_reranker(path):
    """Its labels are read from any model, so that request gets through as it is."""
    body = b'{"query": "q", "items": ["a"], "label_token_ids": [1, 2], "model": "alias"}'
    request = request_of(path, body)
    assert await wire(can_rerank=False).request(request) is None
    assert (request.path, bytes(request.body)) == (b"/v1/score", body)


async def test_scores_are_brought_between_0_and_1_where_the_model_wants_it():
    """The sigmoid is in rerank and score alike, keeps the order, and does not overflow; without it scores stay."""
    raw = [2.0, -1e9, 0.0, 1e9]
    answer = json.dumps([{"score": score, "index": index} for index, score in enumerate(raw)]).encode()
    seen = {}
    for apply_sigmoid in (True, False):
        rerank = await wire(apply_sigmoid=apply_sigmoid).request(
            request_of(b"/rerank", {"query": "q", "documents": [*"abcd"]})
        )
        results = json.loads(rerank(200, answer)[1])["results"]
        assert [one["index"] for one in results] == [3, 0, 2, 1]
        score = await wire(apply_sigmoid=apply_sigmoid).request(
            request_of(b"/score", {"text_1": "q", "text_2": [*"abcd"]})
        )
        seen[apply_sigmoid] = [one["score"] for one in json.loads(score(200, answer)[1])["data"]]
        assert sorted(one["relevance_score"] for one in results) == sorted(seen[apply_sigmoid])
    assert seen[True] == pytest.approx([0.880797, 0.0, 0.5, 1.0], abs=1e-6)
    assert seen[False] == raw


async def named(answer, model="alias"):
    rewrite = await wire().request(request_of(b"/v1/embeddings", {"model": model, "input": ["a", "b"]}))
    return rewrite(200, answer)


@pytest.mark.parametrize(("model", "space"), [("alias", ""), ('na"me\\é', ""), ("alias", " ")])
async def test_embeddings_bear_the_models_name(model, space):
    """Of SGLang's answer only the path is replaced; vectors stay digit for digit, whatever stands before it."""
    made = SGLangAdapter(lambda: ([model], []))
    rewrite = await made.request(request_of(b"/v1/embeddings", {"model": model, "input": "a"}))
    start = '{"object":"list","data":[{"object":"embedding","embedding":[-0.10,1e-05,1.0E+2],"note":"\\"model\\":","of":{"model":"x"}}],'
    end = ',"usage":{"prompt_tokens":3,"total_tokens":3}}'
    answer = start + f'"model":{space}"/models/with \\" é"' + end
    status, new = rewrite(200, answer.encode())
    assert status == 200
    assert new.decode().startswith(start + '"model":')
    assert new.decode().endswith(end)
    assert json.loads(new) == {**json.loads(answer), "model": model}


@pytest.mark.parametrize(
    "answer",
    [b"[]", b"{}", b"no JSON", b"", b'{"model":null,"data":[]}', b'{"data":[{"embedding":[1.0]}]}'],
)
async def test_embeddings_of_an_unknown_form_pass(answer):
    """Where no path stands there is nothing to replace."""
    assert await named(answer) == (200, answer)


@pytest.mark.parametrize(
    ("path", "theirs"),
    [
        (b"/v1/load_lora_adapter", b"/load_lora_adapter"),
        (b"/v1/unload_lora_adapter", b"/unload_lora_adapter"),
        (b"/load_lora_adapter", b"/load_lora_adapter"),
    ],
)
async def test_adapters_are_loaded_by_vllms_route(path, theirs):
    """SGLang has it under another path; query and body stay."""
    body = b'{"lora_name": "l", "lora_path": "/l"}'
    request = request_of(path, body, b"?a=1")
    assert await wire().request(request) is None
    assert (request.path, request.target, bytes(request.body)) == (theirs, theirs + b"?a=1", body)


# Calls into an application on another thread's loop.


class App:
    """An ASGI application that answers with what it was asked, or not at all."""

    def __init__(self):
        self.waiting = threading.Event()
        self.cancelled = threading.Event()

    async def __call__(self, scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            assert (scope["type"], message["type"]) == ("http", "http.request")
            body, more = body + message["body"], message["more_body"]
        if scope["path"] == "/wait":
            try:
                self.waiting.set()
                await receive()  # a client that stays is not heard of any more
            finally:
                self.cancelled.set()
        if scope["path"] == "/raise":
            raise RuntimeError("a bug")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        seen = {"method": scope["method"], "path": scope["path"], "body": body.decode(), "headers": headers}
        data = json.dumps(seen).encode()
        await send({"type": "http.response.start", "status": int(headers.get("status", 200)), "headers": []})
        await send({"type": "http.response.body", "body": data[:5], "more_body": True})
        await send({"type": "http.response.body", "body": data[5:]})


@pytest.fixture
def app():
    return App()


class Requests:
    """Stands in for the module `requests`, as far as its exceptions go."""

    class ConnectionError(OSError):  # noqa: A001
        pass

    class Timeout(OSError):
        pass

    class HTTPError(OSError):
        pass


@pytest.fixture
def inside(app):
    """Return the stand-in for `requests`, with its loop on another thread."""
    loop = asyncio.new_event_loop()
    made = LoopbackRequests(app, loop, Requests())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield made

    async def end():
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(end(), loop).result(LIMIT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(LIMIT_S)
    loop.close()


def test_an_application_is_asked_without_a_connection(inside):
    """Method, path, headers and JSON arrive, and the pieces of the answer are one."""
    got = inside.get("http://0.0.0.0:30000/model_info", headers={"X-A": "1"}, timeout=LIMIT_S, verify=True)
    assert got.status_code == 200
    assert got.json()["method"] == "GET"
    assert (got.json()["path"], got.json()["body"], got.json()["headers"]["x-a"]) == ("/model_info", "", "1")
    posted = inside.post("https://h/generate", json={"text": ["a", "é"]}, headers={"Authorization": "Bearer k"})
    assert posted.json()["method"] == "POST"
    assert json.loads(posted.json()["body"]) == {"text": ["a", "é"]}
    assert (
        posted.json()["headers"] | {"authorization": "Bearer k", "content-type": "application/json"}
        == posted.json()["headers"]
    )
    assert json.loads(posted.text) == posted.json()
    posted.raise_for_status()


@pytest.mark.parametrize(("status", "fails"), [(200, False), (302, False), (400, True), (404, True), (503, True)])
def test_a_status_is_raised_as_requests_does(inside, status, fails):
    """From 400 on, as an OSError with the body's words."""
    answer = inside.get("http://h/x", headers={"status": str(status)})
    assert answer.status_code == status
    if fails:
        with pytest.raises(Requests.HTTPError, match=rf'^{status}: .*"path": "/x"'):
            answer.raise_for_status()
    else:
        answer.raise_for_status()


def test_an_application_that_fails_fails_its_caller(inside):
    """The exception is the caller's, and the next call is answered."""
    with pytest.raises(RuntimeError, match="a bug"):
        inside.get("http://h/raise")
    assert inside.get("http://h/x").status_code == 200


def test_a_call_waits_for_so_long_only(inside, app):
    """`timeout` is heeded, and the call is not left behind."""
    began = time.monotonic()
    while not app.waiting.is_set():  # a call may be given up before the application has heard of it
        with pytest.raises(Requests.Timeout, match=r"no answer within 0\.05 s"):
            inside.get("http://h/wait", timeout=0.05)
        assert time.monotonic() - began < LIMIT_S
    assert app.cancelled.wait(LIMIT_S)


def test_other_attributes_are_the_real_modules(inside):
    """Code that catches its exceptions goes on working."""
    assert inside.Timeout is Requests.Timeout
    with pytest.raises(AttributeError):
        _ = inside.nothing


def test_every_waiting_caller_fails_when_the_engine_is_given_up(inside, app):
    """Every waiting caller fails, its call ends, and whoever comes later does not begin to wait."""
    failures = []

    def ask():
        try:
            inside.post("http://h/wait", json={}, timeout=LIMIT_S)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LIMIT_S
    while len(inside._calls) < 2 or not app.waiting.is_set():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    inside.close()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert [type(failure) for failure in failures] == [CancelledError] * 2
    assert app.cancelled.wait(LIMIT_S)
    for path in ("/wait", "/x"):
        with pytest.raises(Requests.ConnectionError, match="the engine has ended"):
            inside.get("http://h" + path, timeout=LIMIT_S)


# Processes.


@pytest.fixture
def spawn():
    """Start processes of multiprocessing's that are gone when the test ends."""
    made = []

    def start(target, *args):
        process = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
        process.start()
        made.append(process)
        return process

    yield start
    for process in made:
        process.kill()
        process.join(LIMIT_S)
        process.close()


def test_a_child_that_ends_is_found_with_how_it_ended(spawn):
    """All are named while they live; of the first that is dead, its title, its id, and its exit code or its signal."""
    code, killed, staying = (spawn(time.sleep, 3600), spawn(time.sleep, 3600), spawn(time.sleep, 3600))
    ending = spawn(sys.exit, 7)
    ending.join(LIMIT_S)
    mine = {child.process.pid: child for child in children()}
    assert mine.keys() >= {code.pid, killed.pid, staying.pid}
    assert ending.pid not in mine
    living = [mine[process.pid] for process in (staying, killed, code)]
    assert [child.title for child in living] == [process.name for process in (staying, killed, code)]
    assert first_dead(living) is None
    assert first_dead([]) is None
    assert (
        first_dead([*living, Child(ending, "the end")])
        == f"its process the end (pid {ending.pid}) ended with exit code 7"
    )
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(LIMIT_S)
    assert first_dead(living) == f"its process {killed.name} (pid {killed.pid}) ended with SIGKILL"
    os.kill(code.pid, signal.SIGTERM)
    code.join(LIMIT_S)
    assert first_dead([mine[code.pid]]) == f"its process {code.name} (pid {code.pid}) ended with SIGTERM"
    assert first_dead([mine[staying.pid]]) is None


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_a_family_knows_at_once_which_of_it_has_ended(spawn, monkeypatch, has_pidfds):
    """With pidfds or without them; who has ended before is known as well, and where nobody belongs to it nobody is missed."""
    if not has_pidfds:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    living, killed = spawn(time.sleep, 3600), spawn(time.sleep, 3600)
    grandchild = Child(psutil.Process(killed.pid), "grandchild")
    family = ProcessFamily([Child(living, "living"), grandchild])
    assert family.first_dead() is None
    os.kill(killed.pid, signal.SIGKILL)
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    for one in (family, ProcessFamily([Child(living, "living"), grandchild])):
        assert one.first_dead() == one.first_dead() == f"its process grandchild (pid {killed.pid}) ended"
    killed.join(LIMIT_S)
    assert ProcessFamily([grandchild]).first_dead() is not None
    assert ProcessFamily().first_dead() is None


def refuse(_pid):
    raise OSError(errno.ENOSYS, "no such system call")


def test_the_end_of_children_is_waited_for_with_a_bound(spawn):
    """Those that end are gone afterwards; one that stays costs the bound and no more."""
    brief = [spawn(time.sleep, 0.1) for _ in range(2)]
    wait_for_end([Child(process, "") for process in brief], LIMIT_S)
    assert [process.exitcode for process in brief] == [0, 0]
    staying = [Child(spawn(time.sleep, 3600), "") for _ in range(2)]
    began = time.monotonic()
    wait_for_end(staying, 0.1)
    assert 0.1 <= time.monotonic() - began < LIMIT_S
    assert first_dead(staying) is None


NESTED = """
import subprocess, sys, time
subprocess.Popen(sys.argv[1:])
time.sleep(600)
"""


def test_a_process_of_another_kind_is_found_by_what_it_calls_itself(tmp_path):
    """Of one that was not started from here only that it has ended is known, and that is noticed."""
    (tmp_path / "nested.py").write_text(NESTED)
    name = tmp_path / "KIN::worker"
    name.symlink_to("/bin/sleep")
    with subprocess.Popen([sys.executable, tmp_path / "nested.py", name, "600"]) as parent:
        try:
            deadline = time.monotonic() + LIMIT_S
            while not (found := children(f"{tmp_path}/KIN::")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert [child.title for child in found] == [str(name)]
            assert not children("OTHER::")
            assert first_dead(found) is None
            pid = found[0].process.pid
            os.kill(pid, signal.SIGKILL)
            while first_dead(found) is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert first_dead(found) == f"its process {name} (pid {pid}) ended"
        finally:
            for process in [*psutil.Process(parent.pid).children(), parent]:
                process.kill()


# A Ray cluster, with a stand-in for Ray: the look is another process's, which finds the stand-in by the same path.

CLUSTER = """
def init(*, address, **more):
    assert address == "auto"
    {init}
def cluster_resources():
    return {resources}
def shutdown():
    pass
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Put a stand-in for Ray where it would be found."""

    def put(init="pass", resources="{}"):
        (tmp_path / "ray.py").write_text(CLUSTER.format(init=init, resources=resources))
        monkeypatch.syspath_prepend(str(tmp_path))

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    yield put
    assert "ray" not in sys.modules, "the worker connects to nothing"
    assert not [child for child in children() if child.process.name == "ray-look"]


def refused(gpus, **within):
    with pytest.raises(Exit) as caught:
        check_ray(gpus, **within)
    assert caught.value.code == EXIT_UNAVAILABLE
    return str(caught.value)


def test_ray_that_is_not_installed(monkeypatch):
    """The sentence says for which interpreter, and what to type."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sentence = refused(1)
    assert sentence.startswith(f"Ray is not installed for {sys.executable}: ")
    assert "pip install ray" in sentence


@pytest.mark.parametrize(
    ("init", "reason"),
    [
        (
            'raise ConnectionError("Could not find any\\nrunning Ray instance.")',
            "(Could not find any running Ray instance.)",
        ),
        ('raise RuntimeError("Version mismatch: " + 999 * "x")', "(Version mismatch: xxx"),
        ('raise ValueError("Invalid address format: x")', "(Invalid address format: x)"),
        ("raise TimeoutError", "(TimeoutError)"),
        ("import os; os._exit(1)", "(Ray ended the process that looked for it; "),
    ],
)
def test_no_cluster_to_be_reached(cluster, init, reason):
    """One line with Ray's reason, however Ray says it, and what to type."""
    cluster(init)
    sentence = refused(1)
    assert reason in sentence
    assert len(sentence) < 500
    assert "\n" not in sentence
    assert "`ray start --head`" in sentence


def test_a_cluster_that_does_not_answer(cluster):
    """Ray goes on trying for long; the worker does not wait for that, and nothing of the look is left."""
    cluster("import time; time.sleep(3600)")
    assert "(no answer within 0.5 s)" in refused(1, within_s=0.5)


@pytest.mark.parametrize(("resources", "found"), [("{'GPU': 2.0, 'CPU': 8.0}", 2), ("{'CPU': 8.0}", 0)])
def test_a_cluster_with_too_few_gpus(cluster, resources, found):
    """Both numbers are in the sentence, and what to change."""
    cluster(resources=resources)
    sentence = refused(4)
    assert f"has {found} GPUs, and the model is spread over 4" in sentence
    assert "--tensor-parallel-size" in sentence


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_cluster_with_enough_gpus(cluster, gpus):
    """There is nothing to say."""
    cluster(resources="{'GPU': 4.0}")
    check_ray(gpus)
