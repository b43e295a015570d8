"""What the gateway counts, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from ichat.balance import Balancer
from ichat.exchange import Exchange
from ichat.registry import Registry


class Metrics:
    """What the gateway counts."""

    def __init__(self, registry: Registry, balancer: Balancer) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "ichat_requests", "Requests to models, by how they ended (status 499: the client left).",
            ("model", "status"), registry=self.registry,
        )  # fmt: skip
        self._children: dict[tuple[str, int], Counter] = {}
        self._in_flight = Gauge("ichat_requests_in_flight", "Requests to models under way.", registry=self.registry)
        queued = Gauge("ichat_requests_queued", "Requests that wait for room at a worker.", registry=self.registry)
        queued.set_function(lambda: float(balancer.waiting))
        workers = Gauge("ichat_workers", "Workers in the state `ready`.", registry=self.registry)
        workers.set_function(lambda: float(sum(registry.state(worker) == "ready" for worker in registry)))
        restarts = Gauge(
            "ichat_worker_restarts", "Times that managed workers were started again.", registry=self.registry
        )
        restarts.set_function(lambda: float(sum(worker.restarts for worker in registry)))

    def began(self) -> None:
        """Count a request to a model as under way."""
        self._in_flight.inc()

    def ended(self, exchange: Exchange) -> None:
        """Count a request to a model that has ended, in whatever way."""
        self._in_flight.dec()
        model = "" if exchange.error == "model_not_found" else exchange.model
        counter = self._children.get((model, exchange.status))
        if counter is None:
            counter = self._children[model, exchange.status] = self._requests.labels(model, str(exchange.status))
        counter.inc()
