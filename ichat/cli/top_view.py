"""What `top` shows: its panes as lines of text. Nothing here waits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ichat.cli.json_values import Json, list_of, objects_of
from ichat.cli.relay_views import summary_of
from ichat.cli.screen import NONE, cut, duration, one_line, percent, size, width_of
from ichat.cli.top_state import TopState
from ichat.cli.troubles import config_sentence
from ichat.cli.views import failure_of, load_in_words, phase_of, rest_of

GAP = " "
NAME_WIDTH = 28
"""Longer cells are cut, except in the last column."""
HELP = (
    "m models   w workers   g machines and GPUs   r requests in flight",
    "s sorts by the next column, i inverts the order",
    "/ shows only rows with the text that follows, Enter ends it, Esc removes it",
    "arrows, j and k, space and b scroll",
    "? shows and hides this, q or Ctrl-C quits",
)
PANES = {"m": "models", "w": "workers", "g": "GPUs", "r": "requests"}
"""The panes by their keys."""
_ROW_STYLES = {
    **dict.fromkeys(("failed", "broken", "unhealthy", "wedged", "restarting"), "red"),
    **dict.fromkeys(("starting", "loading", "waking", "pending", "draining", "ending", "stale"), "yellow"),
    **dict.fromkeys(("cold", "asleep", "stopped", "gone"), "dim"),
}
"""How rows look that have a cell with this state."""


class Column(NamedTuple):
    """A column of a pane."""

    title: str
    value: Callable[[Json], object]
    """The value by which rows are sorted."""
    show: Callable[[object], str] = one_line
    is_right: bool = False


@dataclass
class Choice:
    """The operator's choice of rows, order and pane."""

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
    has_unicode: bool = True
    """Whether the terminal shows more than ASCII."""

    def press(self, key: str) -> None:
        """Carry out a key's action; unknown keys do nothing."""
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
    """Return why a worker is down, or the progress of its load."""
    if row.get("failure") or row.get("lost"):
        return failure_of(row)
    if _ROW_STYLES.get(str(row.get("state"))) != "yellow":
        return None
    return load_in_words(row) or ", ".join(filter(None, (phase_of(row), rest_of(row))))


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
    """Return a row for each machine, and a row for each GPU."""
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
    """Return the sort key of a value: unknown values are last."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return (2, 0.0, "") if value is None or value == "" else (1, 0.0, str(value))


def frame(state: TopState, choice: Choice, width: int, height: int, note: str = "") -> list[tuple[str, str]]:
    """Return the lines of the screen with their styles: never more than `height`, none wider than `width`."""
    trouble = config_sentence(state.config)
    lines = [(trouble, "red")] if trouble else []
    lines += [(line, "bold" if number == 0 else "") for number, line in enumerate(_head(state))]
    columns, rows = pane_of(state, choice.pane)
    column = columns[choice.sort % len(columns)]
    rows.sort(key=lambda row: _order(column.value(row)), reverse=choice.is_inverted)
    if choice.filter:
        sought = choice.filter.lower()
        texts = zip(rows, cells_of(columns, rows), strict=True)
        rows = [row for row, cells in texts if any(sought in cell.lower() for cell in cells)]
    room = max(1, height - len(lines) - 2)
    choice.offset = max(0, min(choice.offset, len(rows) - room))
    if choice.has_help:
        lines += [("", ""), *((line, "") for line in HELP)]
    else:
        shown = cells_of(columns, rows[choice.offset : choice.offset + room])
        lines += _table(columns, shown, choice, width)
    lines = [(cut(line, width), style) for line, style in lines[: height - 1]]
    foot = (
        f"/{choice.filter}" + ("_" if choice.is_typing else "")
        if choice.filter or choice.is_typing
        else hint_of(choice.pane)
    )
    lines += [("", "")] * (height - 1 - len(lines))
    return [*lines, (cut(one_line(note) or foot, width), "yellow" if note else "dim")]


def hint_of(pane: str) -> str:
    """Return the meaning of the keys; the pane that is shown stands in brackets."""
    panes = " ".join(f"[{key} {name}]" if key == pane else f"{key} {name}" for key, name in PANES.items())
    return f"{panes}  s sort  i invert  / filter  ? help  q quit"


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
    models = ", ".join(f"{one_line(name)} {_served_by(model)}" for name, model in sorted(state.models.items()))
    return [
        f"iChat {one_line(gateway.get('version', ''))}  up {duration(gateway.get('uptime_s'))}  workers: {told}",
        f"req/s {_number(requests)}  errors/s {_number(errors)}  {load}",
        f"{tokens}  {ttft}",
        f"models: {models or 'none yet'}",
        *([f"relays: {relays}"] if (relays := summary_of(gateway)) else []),
    ]


def _served_by(model: Json) -> str:
    if model.get("loaded") is False:
        return "(cold)"
    count = model.get("workers")
    return f"({count} ready)" if count else "(not ready)"


def _table(
    columns: Sequence[Column], shown: Sequence[Sequence[str]], choice: Choice, width: int
) -> list[tuple[str, str]]:
    """Return the head of a table and its rows; columns that do not fit are left out."""
    sorted_by = choice.sort % len(columns)
    mark = ("▴" if choice.is_inverted else "▾") if choice.has_unicode else (" ^" if choice.is_inverted else " v")
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

    return [(line(heads), "reverse"), *((line(row), _style_of(row)) for row in shown)]


def _style_of(row: Sequence[str]) -> str:
    return next((_ROW_STYLES[cell] for cell in row if cell in _ROW_STYLES), "")


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
