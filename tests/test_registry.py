"""The registry, without any event loop and with a clock of the test's."""

import collections

import pytest

from ichat.beat import Beat, read_beat
from ichat.config import ExternalRoute
from ichat.errors import ApiError
from ichat.registry import Registry


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry(clock):
    return Registry([ExternalRoute("far", "http://there:8080/base/v1")], clock)


def beat(worker_id="w", model="m", state="ready", **more):
    return Beat(
        worker_id=worker_id, model_name=model, host="127.0.0.1", port=1, state=state, heartbeat_interval=10, **more
    )


def refusal(registry, model):
    with pytest.raises(ApiError) as caught:
        registry.pick(model)
    return caught.value.status, caught.value.code


def test_the_first_beat_registers(registry):
    """The first beat is the registration, later ones update."""
    assert registry.beat(beat())
    assert not registry.beat(beat())
    assert registry.pick("m").worker.id == "w"


def test_only_ready_workers_get_requests(registry):
    """A known model without a ready worker is 503 with the reason, an unknown one 404 with the names there are."""
    registry.beat(beat(state="loading", phase="loading weights"))
    assert refusal(registry, "m") == (503, "model_not_ready")
    with pytest.raises(ApiError, match=r"worker w is loading \(loading weights\)"):
        registry.pick("m")
    with pytest.raises(ApiError, match="Models here: far") as caught:
        registry.pick("other")
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    assert registry.models() == {"far": "external"}


def test_silence_makes_unhealthy_by_the_clock_alone(registry, clock):
    """Three missed beats take a worker out; the next one brings it back."""
    registry.beat(beat())
    clock.now += 30
    assert registry.pick("m")
    clock.now += 0.1
    assert refusal(registry, "m") == (503, "model_not_ready")
    assert registry.get("w").state(clock.now) == "unhealthy"
    registry.beat(beat())
    assert registry.pick("m")


def test_the_least_loaded_gets_it(registry):
    """Requests under way count from the moment of the choice until their release."""
    for name in "abc":
        registry.beat(beat(name))
    targets = [registry.pick("m") for _ in range(9)]
    assert collections.Counter(target.worker.id for target in targets) == {"a": 3, "b": 3, "c": 3}
    for target in targets:
        if target.worker.id == "b":
            target.release()
    assert {registry.pick("m").worker.id for _ in range(3)} == {"b"}


def test_a_good_bye_removes(registry):
    """A worker that says good-bye is gone; one that is managed here stays in the list."""
    registry.beat(beat())
    registry.beat(beat(state="gone"))
    assert registry.get("w") is None
    registry.expect("mine", ["m"])
    registry.beat(beat("mine"))
    registry.beat(beat("mine", state="gone"))
    assert refusal(registry, "m") == (503, "model_not_ready")


def test_a_managed_worker_is_known_before_its_first_beat(registry, clock):
    """Its model is not unknown but not ready; a failure is the reason that clients read."""
    worker = registry.expect("mine", ["m"])
    with pytest.raises(ApiError, match="worker mine is starting"):
        registry.pick("m")
    worker.failure = "ended with exit code 64"
    with pytest.raises(ApiError, match="worker mine ended with exit code 64"):
        registry.pick("m")
    assert registry.describe(worker)["state"] == "failed"


def test_a_worker_that_is_silent_for_long_is_forgotten(registry, clock):
    """The table does not grow for ever; what is managed here stays."""
    registry.beat(beat("old"))
    registry.expect("mine", ["m"])
    clock.now += 3601
    registry.beat(beat("new"))
    assert [worker.id for worker in registry] == ["mine", "new"]


def test_what_cannot_be_reached_waits_for_its_next_beat(registry):
    """A connection that failed takes a worker out; a beat brings it back."""
    registry.beat(beat())
    registry.get("w").unreachable = True
    with pytest.raises(ApiError, match="worker w cannot be reached"):
        registry.pick("m")
    registry.beat(beat())
    assert registry.pick("m")


def test_every_name_of_a_worker_routes(registry):
    """A worker may serve under several names."""
    registry.beat(beat(model_names=["m", "alias"]))
    assert registry.pick("alias").worker.id == "w"
    assert set(registry.models()) == {"m", "alias", "far"}


def test_an_external_route_keeps_its_base(registry):
    """The upstream's base stands where the gateway has /v1."""
    target = registry.pick("far")
    assert (target.upstream.host, target.upstream.port) == ("there", 8080)
    assert target.path(b"/v1/chat/completions?x=1") == b"/base/v1/chat/completions?x=1"
    assert target.upstream.authority == b"there:8080"


@pytest.mark.parametrize(
    "body",
    [
        None, [], 3, "x", {}, {"worker_id": "w"},
        {"worker_id": "", "model_name": "m", "host": "h", "port": 1},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 0},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 99999},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "state": "dancing"},
        {"worker_id": "w\r\nset-cookie: evil=1", "model_name": "m", "host": "h", "port": 1},
        {"worker_id": "\ud800", "model_name": "m", "host": "h", "port": 1},
        {"worker_id": None, "model_name": "m", "host": "h", "port": 1},
        {"worker_id": "w", "model_name": "m\n", "host": "h", "port": 1},
        {"worker_id": "w", "model_name": "\ud800", "host": "h", "port": 1},
        {"worker_id": "w", "model_name": "m", "host": "h h", "port": 1},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1.0},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "model_names": "abc"},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "heartbeat_interval": float("nan")},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "heartbeat_interval": float("inf")},
        {"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "heartbeat_interval": 0},
    ],
)  # fmt: skip
def test_what_is_not_a_beat_is_refused(body):
    """A body that is not a beat is 400, with what is wrong with it."""
    with pytest.raises(ApiError) as caught:
        read_beat(body)
    assert caught.value.status == 400


def test_a_beat_from_elsewhere_needs_little():
    """Four keys are enough, and keys of newer versions are ignored."""
    found = read_beat({"worker_id": "w", "model_name": "m", "host": "h", "port": 1, "colour": "blue"})
    assert found.state == "ready"
