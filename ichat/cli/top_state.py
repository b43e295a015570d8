"""The gateway's state by its event stream, for `top`. Nothing here waits."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ichat.cli.json_values import Json, list_of, object_of, objects_of


@dataclass
class TopState:
    """The known state of the gateway."""

    gateway: Json = field(default_factory=dict[str, object])
    config: Json = field(default_factory=dict[str, object])
    """How the configuration file compares with the configuration in force."""
    workers: dict[str, Json] = field(default_factory=dict[str, Json])
    models: dict[str, Json] = field(default_factory=dict[str, Json])
    machines: dict[str, Json] = field(default_factory=dict[str, Json])
    requests: Sequence[Json] = ()
    sample: Json = field(default_factory=dict[str, object])
    sample_s: float = 5.0
    has_state: bool = False

    def update(self, name: str, data: Json) -> None:
        """Apply an event to the state; events of unknown names change nothing."""
        match name:
            case "state":
                self._begin(data)
            case "workers":
                _merge(self.workers, data.get("changed"), data.get("gone"), "worker_id")
            case "models" | "machines":
                _merge(self.models if name == "models" else self.machines, data.get(name), data.get("gone"), "id")
            case "config":
                self.config = data
            case "gateway":
                self.gateway = data
            case "sample":
                self.sample = data
            case "requests":
                self.requests = objects_of(data.get("requests"))
            case _:
                pass

    def _begin(self, data: Json) -> None:
        self.gateway, self.config, self.has_state = object_of(data.get("gateway")), object_of(data.get("config")), True
        self.workers = {str(one.get("worker_id")): one for one in objects_of(data.get("workers"))}
        self.models = {str(one.get("id")): one for one in objects_of(data.get("models"))}
        self.machines = {str(one.get("id")): one for one in objects_of(data.get("machines"))}
        history = object_of(data.get("history"))
        interval_s = history.get("sample_s")
        self.sample_s = interval_s if isinstance(interval_s, int | float) and interval_s > 0 else 5.0
        columns, models = object_of(history.get("columns")), object_of(history.get("models"))
        if list_of(columns.get("at")):
            self.sample = _last_of(columns) | {
                "models": {name: _last_of(object_of(one)) for name, one in models.items()}
            }

    def rate(self, name: str, of_model: str = "") -> float | None:
        """Return how often something happened in a second, by the newest sample; None: not known."""
        value = (self._of_model(of_model) if of_model else self.sample).get(name)
        return value / self.sample_s if isinstance(value, int | float) else None

    def ttft_ms(self, of_model: str) -> object:
        """Return the median time to the first byte of a model's responses, by the newest sample."""
        return self._of_model(of_model).get("ttft_p50_ms")

    def _of_model(self, name: str) -> Json:
        return object_of(object_of(self.sample.get("models")).get(name))


def _merge(known: dict[str, Json], changed: object, gone: object, key: str) -> None:
    for one in objects_of(changed):
        known[str(one.get(key))] = one
    for one_id in list_of(gone):
        known.pop(str(one_id), None)


def _last_of(columns: Json) -> Json:
    return {name: values[-1] for name, column in columns.items() if (values := list_of(column))}
