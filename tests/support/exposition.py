"""What the gateway's metrics show, and workers that have some to show."""

import json
from types import SimpleNamespace

import trio
from prometheus_client.parser import text_string_to_metric_families
from support.peers import JSON_POST, plain

from ichat.config.schema import Routing
from ichat.fleet.fleet import Fleet
from ichat.observability.counts import LoadCounts
from ichat.observability.exposition import read_steps, written
from ichat.observability.metrics import Metrics
from ichat.routing.balancer import Balancer

PROCESS = "# HELP process_open_fds Open.\n# TYPE process_open_fds gauge\nprocess_open_fds 12.0\n"


class Shown:
    """An exposition, as prometheus_client reads it; the same family or sample twice is an error."""

    def __init__(self, text):
        self.text = text
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names)), "a family begins twice"
        self.families = list(text_string_to_metric_families(text))
        self.samples = {}
        for family in self.families:
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.samples, key
                self.samples[key] = sample.value

    def get(self, name, **labels):
        return self.samples.get((name, frozenset(labels.items())))

    def labels(self, name):
        return [dict(labels) for known, labels in self.samples if known == name]


def own(metrics):
    """Return what the gateway's own metrics show."""
    return Shown("".join(written(metrics.families())))


def read(text, labels):
    """Return the families of an exposition, with these labels on each sample."""
    families = {}
    for _ in read_steps(text, labels, families):
        pass
    return families


async def shown(connect, port):
    status, headers, body = await (await connect(port)).get(b"/metrics")
    assert (status, headers[b"content-type"].split(b";")[0]) == (200, b"text/plain")
    return Shown(body.decode())


def exposing(text):
    """Make a worker's reply that has these metrics."""

    async def reply(stream, head, body):
        if head.target == b"/metrics":
            await stream.send_all(plain(text.encode()))
        else:
            await stream.send_all(b"HTTP/1.1 404 no\r\ncontent-length: 0\r\n\r\n")

    return reply


async def heartbeat(connect, port, worker_port, **more):
    """Register a worker as a worker does."""
    body = {"worker_id": "w", "model_name": "m", "host": "127.0.0.1", "port": worker_port, **more}
    data = json.dumps(body).encode()
    client = await connect(port)
    await client.send(JSON_POST % (b"/v1/workers/heartbeat", len(data), data))
    status, _, body = await client.response()
    assert status == 200, body


def known(*names, clock=trio.current_time, machine=None, has_others=None, loads=None, **more):
    """Make a fleet that has these models, and metrics of it, reports on machines, and the counts of loads."""
    fleet = Fleet(dict.fromkeys(names, ()), clock, 10)
    balancer = Balancer(fleet.directory.availability, clock, Routing(policy="least_loaded", queue_max=1))
    monitor, loads = SimpleNamespace(report=machine, has_others=has_others), loads or LoadCounts()
    return fleet, Metrics(fleet.table, fleet.directory, balancer, monitor, loads, **more)
