"""What `top` shows: the state as the event stream tells it, and its panes as lines of text. Nothing here waits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ichat.cli.client import Json, list_of, object_of, objects_of
from ichat.cli.screen import NONE, cut, duration, one_line, percent, size, width_of

GAP = " "
NAME_WIDTH = 28
"""A cell that is longer is cut, but for the last column."""
HELP = (
    "m models   w workers   g machines and GPUs   r requests in flight",
    "s sorts by the next column, i inverts the order",
    "/ shows only rows with the text that follows, Enter ends it, Esc takes it back",
    "arrows, j and k, space and b scroll",
    "? shows and hides this, q or Ctrl-C quits",
)
HINT = "q quit  m w g r panes  s sort  i invert  / filter  ? help"
_HEAD_LINES = 4
_BAD = frozenset(("failed", "broken", "unhealthy", "wedged", "restarting"))


class Column(NamedTuple):
    """One column of a pane."""

    title: str
    value: Callable[[Json], object]
    """What rows are sorted by."""
    show: Callable[[object], str] = one_line
    is_right: bool = False


@dataclass
class TopState:
    """What is known of the gateway."""

    gateway: Json = field(default_factory=dict[str, object])
    workers: dict[str, Json] = field(default_factory=dict[str, Json])
    models: dict[str, Json] = field(default_factory=dict[str, Json])
    machines: dict[str, Json] = field(default_factory=dict[str, Json])
    requests: Sequence[Json] = ()
    requests_total: int = 0
    sample: Json = field(default_factory=dict[str, object])
    sample_s: float = 5.0
    has_state: bool = False

    def update(self, name: str, data: Json) -> None:
        """Change what an event changes; events of other names change nothing."""
        match name:
            case "state":
                self._begin(data)
            case "workers":
                _merge(self.workers, data.get("changed"), data.get("gone"), "worker_id")
            case "models" | "machines":
                _merge(self.models if name == "models" else self.machines, data.get(name), data.get("gone"), "id")
            case "sample":
                self.sample = data
            case "requests":
                self.requests, total = objects_of(data.get("requests")), data.get("total")
                self.requests_total = total if isinstance(total, int) else len(self.requests)
            case _:
                pass

    def _begin(self, data: Json) -> None:
        self.gateway, self.has_state = object_of(data.get("gateway")), True
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


@dataclass
class Choice:
    """What the operator has chosen to see."""

    pane: str = "w"
    sort: int = 0
    """The column by which rows are sorted."""
    is_inverted: bool = False
    filter: str = ""
    is_typing: bool = False
    """Whether keys go to the filter."""
    has_help: bool = False
    offset: int = 0
    """Rows that are scrolled away."""
    is_over: bool = False

    def press(self, key: str) -> None:
        """Do what a key says; others do nothing."""
        if self.is_typing:
            self._type(key)
            return
        match key:
            case "q" | "\x03" | "\x04":
                self.is_over = True
            case "m" | "w" | "g" | "r":
                self.pane, self.sort, self.is_inverted, self.offset = key, 0, False, 0
            case "s":
                self.sort, self.offset = self.sort + 1, 0
            case "i":
                self.is_inverted = not self.is_inverted
            case "/":
                self.is_typing, self.filter, self.offset = True, "", 0
            case "?" | "h":
                self.has_help = not self.has_help
            case "\x1b":
                self.filter, self.has_help = "", False
            case _:
                steps = {"\x1b[A": -1, "k": -1, "\x1b[B": 1, "j": 1, " ": 10, "\x1b[6~": 10, "b": -10, "\x1b[5~": -10}
                self.offset = max(0, self.offset + steps.get(key, 0))

    def _type(self, key: str) -> None:
        if key in ("\r", "\n"):
            self.is_typing = False
        elif key in ("\x1b", "\x03"):
            self.is_typing, self.filter = False, ""
        elif key in ("\x7f", "\x08"):
            self.filter = self.filter[:-1]
        elif key.isprintable():
            self.filter += key


def _field(name: str) -> Callable[[Json], object]:
    return lambda row: row.get(name)


def _number(value: object) -> str:
    if not isinstance(value, int | float):
        return NONE
    return f"{value:.1f}" if isinstance(value, float) and abs(value) < 100 else f"{value:.0f}"


def _ms(value: object) -> str:
    if not isinstance(value, int | float):
        return NONE
    return f"{value:.0f}ms" if value < 10_000 else duration(value / 1000)


def _loaded(row: Json) -> object:
    loaded = row.get("loaded")
    return None if loaded is None else "yes" if loaded else "no"


def _why(row: Json) -> object:
    return row.get("failure") or row.get("cause")


def _model_columns(state: TopState) -> list[Column]:
    def of_model(name: str) -> Callable[[Json], object]:
        return lambda row: state.rate(name, str(row.get("id")))

    def ttft_ms(row: Json) -> object:
        return state.ttft_ms(str(row.get("id")))

    return [
        Column("model", _field("id")),
        Column("workers", _field("workers"), _number, is_right=True),
        Column("flight", _field("in_flight"), _number, is_right=True),
        Column("queued", _field("queued"), _number, is_right=True),
        Column("req/s", of_model("requests"), _number, is_right=True),
        Column("tok/s", of_model("output_tokens"), _number, is_right=True),
        Column("ttft", ttft_ms, _ms, is_right=True),
        Column("waited", _field("waiting_s"), duration, is_right=True),
        Column("loaded", _loaded),
    ]


_WORKERS = [
    Column("worker", _field("worker_id")),
    Column("model", _field("model_name")),
    Column("state", _field("state")),
    Column("flight", _field("in_flight"), _number, is_right=True),
    Column("run", _field("running"), _number, is_right=True),
    Column("wait", _field("waiting"), _number, is_right=True),
    Column("kv", _field("kv_use"), percent, is_right=True),
    Column("hits", _field("prefix_hit_rate"), percent, is_right=True),
    Column("starts", _field("restarts"), _number, is_right=True),
    Column("machine", _field("machine")),
    Column("why", _why),
]
_GPUS = [
    Column("machine", _field("machine")),
    Column("gpu", _field("index"), _number, is_right=True),
    Column("name", _field("name")),
    Column("use", _field("use"), percent, is_right=True),
    Column("used", _field("used"), size, is_right=True),
    Column("of", _field("total"), size, is_right=True),
    Column("workers", _field("workers")),
]
_REQUESTS = [
    Column("age", _field("age_s"), duration, is_right=True),
    Column("phase", _field("phase")),
    Column("model", _field("model")),
    Column("worker", _field("worker")),
    Column("key", _field("key")),
    Column("client", _field("client")),
    Column("out", _field("tokens_out_estimate"), _number, is_right=True),
    Column("id", _field("id")),
]


def _gpu_rows(machines: Iterable[Json]) -> list[Json]:
    """Return a row for each machine, and one for each GPU."""
    rows: list[Json] = []
    for machine in machines:
        total, free = machine.get("memory_total_bytes"), machine.get("memory_available_bytes")
        is_known = isinstance(total, int) and isinstance(free, int)
        used = total - free if isinstance(total, int) and isinstance(free, int) else None
        workers = " ".join(map(str, list_of(machine.get("workers"))))
        rows.append({
            "machine": machine.get("name"), "name": f"{machine.get('cpus') or '?'} CPUs", "use": machine.get("cpu_use"),
            "used": used, "total": total if is_known else None, "workers": workers,
        })  # fmt: skip
        rows += [_gpu_row(machine, gpu) for gpu in objects_of(machine.get("gpus"))]
    return rows


def _gpu_row(machine: Json, gpu: Json) -> Json:
    return {
        "machine": machine.get("name"),
        "index": gpu.get("index"),
        "name": gpu.get("failure") or gpu.get("name"),
        "use": gpu.get("use"),
        "used": gpu.get("memory_used_bytes"),
        "total": gpu.get("memory_total_bytes"),
        "workers": " ".join(str(one.get("worker_id")) for one in objects_of(gpu.get("held_by"))),
    }


def pane_of(state: TopState, pane: str) -> tuple[list[Column], list[Json]]:
    """Return the columns and rows of a pane."""
    if pane == "m":
        return _model_columns(state), list(state.models.values())
    if pane == "g":
        return _GPUS, _gpu_rows(state.machines.values())
    if pane == "r":
        return _REQUESTS, list(state.requests)
    return _WORKERS, list(state.workers.values())


def cells_of(columns: Sequence[Column], rows: Iterable[Json]) -> list[list[str]]:
    """Return the rows as clean texts."""
    return [[_text(column, row) for column in columns] for row in rows]


def _text(column: Column, row: Json) -> str:
    value = column.value(row)
    return NONE if value is None or value == "" else one_line(column.show(value)) or NONE


def _order(value: object) -> tuple[int, float, str]:
    """Return by what a value is sorted: what is not known comes last."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return (2, 0.0, "") if value is None or value == "" else (1, 0.0, str(value))


def frame(state: TopState, choice: Choice, width: int, height: int, note: str = "") -> list[tuple[str, str]]:
    """Return the lines of the screen with their styles: never more than `height`, none wider than `width`."""
    lines = [(line, "bold" if number == 0 else "") for number, line in enumerate(_head(state))]
    columns, rows = pane_of(state, choice.pane)
    column = columns[choice.sort % len(columns)]
    rows.sort(key=lambda row: _order(column.value(row)), reverse=choice.is_inverted)
    if choice.filter:
        sought = choice.filter.lower()
        texts = zip(rows, cells_of(columns, rows), strict=True)
        rows = [row for row, cells in texts if any(sought in cell.lower() for cell in cells)]
    room = max(1, height - _HEAD_LINES - 1)
    choice.offset = max(0, min(choice.offset, len(rows) - room))
    if choice.has_help:
        lines += [("", ""), *((line, "") for line in HELP)]
    else:
        shown = cells_of(columns, rows[choice.offset : choice.offset + room])
        lines += _table(columns, shown, choice, width)
    lines = [(cut(line, width), style) for line, style in lines[: height - 1]]
    foot = f"/{choice.filter}" + ("_" if choice.is_typing else "") if choice.filter or choice.is_typing else HINT
    lines += [("", "")] * (height - 1 - len(lines))
    return [*lines, (cut(one_line(note) or foot, width), "yellow" if note else "dim")]


def _head(state: TopState) -> list[str]:
    states: dict[str, int] = {}
    for worker in state.workers.values():
        name = one_line(worker.get("state"))
        states[name] = states.get(name, 0) + 1
    told = ", ".join(f"{count} {name}" for name, count in sorted(states.items())) or "none"
    sample, gateway = state.sample, state.gateway
    requests, errors, queued = state.rate("requests"), state.rate("errors"), sample.get("queued")
    load = f"in flight {_number(sample.get('in_flight'))}  queued {_number(queued)}  kv {percent(sample.get('kv_use'))}"
    tokens = f"tok/s in {_number(state.rate('input_tokens'))} out {_number(state.rate('output_tokens'))}"
    ttft = f"ttft p50 {_ms(sample.get('ttft_p50_ms'))} p95 {_ms(sample.get('ttft_p95_ms'))}"
    return [
        f"iChat {one_line(gateway.get('version', ''))}  up {duration(gateway.get('uptime_s'))}  workers: {told}",
        f"req/s {_number(requests)}  errors/s {_number(errors)}  {load}",
        f"{tokens}  {ttft}",
    ]


def _table(
    columns: Sequence[Column], shown: Sequence[Sequence[str]], choice: Choice, width: int
) -> list[tuple[str, str]]:
    """Return the head of a table and its rows; columns that do not fit are left out."""
    sorted_by = choice.sort % len(columns)
    mark = "^" if choice.is_inverted else "v"
    heads = [f"{one.title}{mark}" if index == sorted_by else one.title for index, one in enumerate(columns)]
    widths = [max(map(width_of, column)) for column in zip(heads, *shown, strict=True)]
    while (
        len(widths) > 1
        and sum(min(one, NAME_WIDTH) + len(GAP) for one in widths[:-1]) + len(heads[len(widths) - 1]) > width
    ):
        widths.pop()
    widths = [min(one, NAME_WIDTH) for one in widths[:-1]] + widths[-1:]

    def line(row: Sequence[str]) -> str:
        parts = [
            _padded(cut(cell, size_), size_, is_right=column.is_right)
            for cell, size_, column in zip(row, widths, columns, strict=False)
        ]
        return GAP.join(parts).rstrip()

    return [(line(heads), "reverse"), *((line(row), "red" if _BAD.intersection(row) else "") for row in shown)]


def _padded(text: str, width: int, *, is_right: bool) -> str:
    blanks = " " * (width - width_of(text))
    return blanks + text if is_right else text + blanks


STYLES: Mapping[str, str] = {
    "bold": "\x1b[1m",
    "dim": "\x1b[2m",
    "reverse": "\x1b[7m",
    "red": "\x1b[31m",
    "yellow": "\x1b[33m",
}
"""The sequences by which each style begins; every terminal knows them."""
