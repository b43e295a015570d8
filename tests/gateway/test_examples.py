"""What is in examples/ asks for nothing that is not there."""

import json
import re
import types

import pytest
import trio
import yaml
from support.exposition import PROCESS, Shown, exposing, heartbeat, shown
from support.peers import SSE_END, SSE_HEAD, event
from support.programs import LIMIT_S, ROOT

from ichat.cli.commands import COMMANDS
from ichat.roles.worker_server import metrics_of

DASHBOARD = json.loads((ROOT / "examples/grafana-dashboard.json").read_text())
ALERTS = yaml.safe_load((ROOT / "examples/prometheus-alerts.yml").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]

OF_TARGETS = {"instance", "job"}
"""Labels that Prometheus adds."""
WORDS = {"and", "or", "unless", "bool", "by", "on", "without", "ignoring", "offset", "inf", "nan"}

ENGINES = {
    "vllm": [
        ("num_requests_running", "gauge"), ("num_requests_waiting", "gauge"), ("kv_cache_usage_perc", "gauge"),
        ("generation_tokens_total", "counter"), ("prompt_tokens_total", "counter"),
        ("time_to_first_token_seconds", "histogram"), ("inter_token_latency_seconds", "histogram"),
    ],
    "sglang": [
        ("num_running_reqs", "gauge"), ("num_queue_reqs", "gauge"), ("token_usage", "gauge"),
        ("generation_tokens_total", "counter"), ("prompt_tokens_total", "counter"),
        ("time_to_first_token_seconds", "histogram"), ("inter_token_latency_seconds", "histogram"),
    ],
}  # fmt: skip
"""What engines have of what the examples may ask for."""
GPU = {
    "index": 0, "uuid": "GPU-1", "name": "H100", "memory_total_bytes": 2, "memory_used_bytes": 2, "use": 0.5,
    "held_bytes": 1,
}  # fmt: skip
ON_DEMAND = """[[managed_workers]]
model_name = "cold"
model_path = "/cold"
load = "on_demand"
"""
PROCESSES = ("open_fds", "max_fds", "resident_memory_bytes", "cpu_seconds_total")
"""What prometheus_client says of its process, a worker's as well as the gateway's."""


def exposition_of(engine):
    lines = []
    for name, kind in ENGINES[engine]:
        full = f"{engine}:{name}"
        lines.append(f"# TYPE {full} {kind}")
        suffixes = ("_count", "_sum") if kind == "histogram" else ("",)
        lines += [f'{full}{suffix}{{model_name="m"}} 1.0' for suffix in suffixes]
        if kind == "histogram":
            lines.append(f'{full}_bucket{{model_name="m",le="+Inf"}} 1.0')
    return "\n".join(lines) + "\n"


@pytest.fixture
async def real(serve, gateway_to, connect):
    """Return what a gateway shows that has had requests, and has workers with both engines."""

    async def stream(socket_stream, head, body):
        await socket_stream.send_all(SSE_HEAD + event(0) + SSE_END)

    _, port = await serve(stream)
    gateway = await gateway_to({"route": port}, ON_DEMAND)
    ours = metrics_of(types.SimpleNamespace(in_flight=1, load_s=2.0, aborts=3, info=None)).decode()
    processes = "".join(PROCESS.replace("open_fds", name) for name in PROCESSES)
    for engine in ENGINES:
        _, port = await serve(exposing(exposition_of(engine) + ours + processes))
        await heartbeat(
            connect, gateway, port, worker_id=engine, machine={"id": engine, "name": "gpu-box", "gpus": [GPU]}
        )
    assert (await (await connect(gateway)).ask(model="route"))[0] == 200
    assert (await (await connect(gateway)).ask(model="nobody's"))[0] == 404
    with trio.fail_after(LIMIT_S):
        while True:
            now = await shown(connect, gateway)
            if not any(now.get("ichat_worker_scrape_failed", worker=engine) for engine in ENGINES):
                return now
            await trio.sleep(0.05)


class Expression:
    """What a PromQL expression asks for: names and the labels it matches; the labels it groups by."""

    def __init__(self, text):
        text = text.replace("$__rate_interval", "5m")
        self.asked = {}
        self.groups = set()
        self.names = set()
        text = re.sub(r"\b(?:by|on)\s*\(([^)]*)\)", self._group, text)
        text = re.sub(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}", self._select, text)
        text = re.sub(r'\[[^\]]*\]|"[^"]*"', "", text)
        for found in re.finditer(r"(?<![\w.])([a-zA-Z_:][\w:]*)(\s*\()?", text):
            if not found[2] and found[1] not in WORDS:
                self.names.add(found[1])

    def _group(self, found):
        self.groups |= {label.strip() for label in found[1].split(",")}
        return ""

    def _select(self, found):
        labels = re.findall(r'\s*(\w+)\s*(?:=~|!~|!=|=)\s*"(?:[^"\\]|\\.)*"\s*,?', found[2])
        assert labels, found[0]
        self.asked.setdefault(found[1], set()).update(labels)
        return found[1]

    def check(self, real: Shown):
        """Return what is asked for that is not there."""
        assert self.names
        assert self.names >= self.asked.keys()
        for name in self.names:
            known = real.labels(name)
            assert known, f"nothing is called {name}"
            there = {label for labels in known for label in labels} | OF_TARGETS
            assert self.asked.get(name, set()) | self.groups <= there, (name, there)
            if name.endswith("_bucket"):
                assert "le" in self.groups

    def keeps(self, real):
        """Return the labels that its result has."""
        kept = self.groups - {"le"}
        return kept or set.intersection(
            *({label for labels in real.labels(name) for label in labels} for name in self.names)
        )


def test_an_expression_is_understood():
    """Names, matched labels and groups are told apart; what is wrong is found."""
    real = Shown('# TYPE a gauge\na{x="1",le="2"} 1\n# TYPE b gauge\nb 1\n')
    good = Expression('sum by (x) (rate(a{x=~"1|b",le!=""}[$__rate_interval])) / 0.5e3 > bool 1')
    assert (good.names, good.asked, good.groups) == ({"a"}, {"a": {"x", "le"}}, {"x"})
    good.check(real)
    for wrong in ("c", "rate(a[5m]) + c", 'a{z="1"}', "sum by (z) (a)", "sum by (x) (a) / sum by (x) (b)"):
        with pytest.raises(AssertionError):
            Expression(wrong).check(real)


async def test_every_metric_and_label_of_the_examples_is_shown(real):
    """Every metric in their expressions is shown by a gateway, with every label that they use."""
    for panel in PANELS:
        for target in panel["targets"]:
            expression = Expression(target["expr"])
            expression.check(real)
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert used <= expression.keeps(real) | OF_TARGETS, target
    for rule in RULES:
        expression = Expression(rule["expr"])
        expression.check(real)
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert used <= expression.keeps(real) | OF_TARGETS, rule["alert"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
            assert any(label in labels for labels in real.labels(name))


def test_the_dashboard_can_be_imported():
    """It names no data source of its own, and its panels have their own places and ids."""
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "model", "worker"}
    assert "id" not in DASHBOARD
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        used = {name for target in panel["targets"] for name in re.findall(r"\$(\w+)", target["expr"])}
        assert used <= variables | {"__rate_interval"}


def test_each_alert_says_what_to_do():
    """A rule has what Prometheus wants, and a summary of more than its name."""
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[sm]", rule.get("for", "0s"))
        assert rule["labels"]["severity"] in ("critical", "warning")
        summary = rule["annotations"]["summary"]
        assert re.match(r".{40,}\.$", summary), rule["alert"]
        assert set(re.findall(r"ichat\.pyz (\w+)", summary)) <= COMMANDS.keys()
