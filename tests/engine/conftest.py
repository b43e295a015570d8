"""The deployments that tests of several files share: each is loaded once, and ended when its tests have run.

pytest puts the tests that use the same deployment next to each other, over files.
A test that breaks an engine or kills a gateway has the mark `breaks`: it runs after all others of its deployment.
"""

import pathlib

import pytest
from support.leaving_site import Place
from support.real_engines import ENGINES, LOAD_S, MODELS, Deployment, Room, worker_table


@pytest.fixture(scope="session")
def room():
    """Memory for engines: `room.make(2)` ends deployments if there is not enough for two more."""
    return Room()


@pytest.fixture(scope="session")
def deploy(room, tmp_path_factory):
    """Start a deployment for as long as there is room: `with deploy("vllm", "chat", **arguments) as deployment`."""

    def begin(engine, model, *, kind=Deployment, directory=None, **arguments):
        directory = directory or tmp_path_factory.mktemp(f"{engine}-{pathlib.Path(model).name}")
        return room.keep(kind, engine, model, directory, **arguments)

    return begin


@pytest.fixture(scope="session", params=ENGINES)
def chat(request, deploy):
    """A chat model with an adapter; what the last test leaves of it is nothing."""
    with deploy(
        request.param,
        "chat",
        max_model_len=2048,
        enforce_eager=True,
        enable_lora=True,
        max_lora_rank=8,
        lora_modules=[f"pirate={MODELS / 'adapter'}"],
        on_gateway_exit="keep",
        prefix_reports="true",
        env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "ICHAT_SLEEP_ON_THE_CPU": "1"},
        **({"num_gpu_blocks_override": 128} if request.param == "vllm" else {}),  # 16384 tokens, as SGLang's cache has
    ) as deployment:
        yield deployment.wait()


@pytest.fixture(scope="session", params=ENGINES)
def site(request, deploy, tmp_path_factory):
    """`tiny` generates text, `vectors` embeds, `ranks` ranks, which the engine sees itself; with an access log."""
    directory = tmp_path_factory.mktemp(f"{request.param}-site")
    kept = {"on_gateway_exit": "keep"}
    more = [
        *worker_table(request.param, "embedding", "vectors", runner="pooling", **kept),
        *worker_table(request.param, "reranker", "ranks", **kept),
        "[logs]", f'access_log = "{directory}/access.log"',
    ]  # fmt: skip
    known = {"max_model_len": 2048, "enforce_eager": True, **kept}
    with deploy(request.param, "chat", directory=directory, more=more, **known) as deployment:
        deployment.wait()
        for name in ("vectors", "ranks"):
            deployment.program.wait_until_ready(f"{name}-0", LOAD_S)
        yield deployment


@pytest.fixture(scope="session", params=ENGINES)
def one_place(request, deploy):
    """A chat model whose clients leave; vLLM's calls tools, too, as vLLM's own server does beside it."""
    with deploy(request.param, "chat", kind=Place) as place:
        yield place.wait()


@pytest.fixture(scope="session", params=ENGINES)
def watched(request, deploy):
    """A chat model that nobody has waited for: its first test sees it load."""
    with deploy(request.param, "chat") as deployment:
        deployment.program.wait_for_port()
        yield deployment
