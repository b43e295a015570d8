"""The house rules that no linter knows."""

import ast
import pathlib
import re
import tokenize
import tomllib

import pytest

from ichat.__main__ import NEEDED

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = sorted((ROOT / "ichat").rglob("*.py"))
FUNCTION_LINES_MAX = 80
MODULE_LINES_MAX = 520

# What may import what: a module imports only modules of lower levels, or of its own where that is listed twice.
LEVELS = [
    {"ichat", "ichat.errors", "ichat.config.strict", "ichat.admin.json_schema"},
    {
        "ichat.supervisor.processes",
        "ichat.config.command_line",
        "ichat.observability.access_log",
        "ichat.http.json_body",
        "ichat.http.framing",
        "ichat.http.hub",
    }
    | {
        "ichat.supervisor.failure_causes",
        "ichat.hardware.gpus",
        "ichat.observability.logs.lines",
        "ichat.cli.screen",
        "ichat.observability.tracing",
    }
    | {"ichat.security.keys", "ichat.proxy.token_usage"},
    {"ichat.http.multipart", "ichat.http.heads", "ichat.http.listeners", "ichat.http.tls", "ichat.proxy.drop_params"}
    | {
        "ichat.observability.logs.files",
        "ichat.hardware.host",
        "ichat.supervisor.orphans",
        "ichat.observability.logs.follower",
    },
    {
        "ichat.config.schema",
        "ichat.observability.logs.capture",
        "ichat.hardware.machines",
        "ichat.proxy.engine_control",
    },
    {
        "ichat.security.redact",
        "ichat.supervisor.preflight",
        "ichat.supervisor.state",
        "ichat.supervisor.launch",
        "ichat.observability.logs.store",
    }
    | {"ichat.security.auth", "ichat.security.rate_limits", "ichat.routing.circuit_breaker"},
    {"ichat.engines.flags", "ichat.supervisor.reload_plan", "ichat.cli.client"},
    {"ichat.cli.views", "ichat.cli.logs", "ichat.cli.chat"},
    {"ichat.cli.launch"},
    {"ichat.cli.commands"},
    {"ichat.protocol", "ichat.security.cors", "ichat.http.request", "ichat.http.pool"},
    {"ichat.http.server"},
    {"ichat.observability.logs.endpoint", "ichat.http.keepalive"},
    {"ichat.engines.reasoning"},
    {"ichat.engines.adapter", "ichat.engines.ray_check", "ichat.engines.versions", "ichat.engines.vllm.flags"},
    {"ichat.engines.sglang.flags", "ichat.engines.sglang.encoders"},
    {"ichat.proxy.external_routes", "ichat.http.relay", "ichat.engines"},
    {"ichat.routing.balancer"},
    {"ichat.routing.worker_record"},
    {
        "ichat.routing.registry",
        "ichat.engines.asgi",
        "ichat.engines.children",
        "ichat.engines.sglang.loopback_requests",
    },
    {"ichat.engines.sglang.memory"},
    {"ichat.engines.responses"},
    {"ichat.proxy.context"},
    {
        "ichat.proxy.exchange",
        "ichat.supervisor.managed_worker",
        "ichat.supervisor.recall",
        "ichat.admin.schemas",
        "ichat.roles.heartbeat_sender",
        "ichat.engines.sglang.adapter",
    },
    {
        "ichat.proxy.health_checks",
        "ichat.observability.metrics",
        "ichat.observability.scrape",
        "ichat.roles.worker_options",
    },
    {
        "ichat.engines.thread",
        "ichat.engines.vllm",
        "ichat.engines.sglang",
        "ichat.supervisor.supervisor",
        "ichat.admin.openapi",
    },
    {"ichat.admin.reload"},
    {"ichat.admin.routes"},
    {"ichat.admin.app"},
    {"ichat.roles.gateway", "ichat.roles.worker", "ichat.roles", "ichat.http"},
    {"ichat.__main__"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}

BROAD_EXCEPT = {  # where everything may be caught: the error edge, the engine's thread and calls, the command line
    "ichat/http/hub.py",
    "ichat/http/pool.py",
    "ichat/http/relay.py",
    "ichat/http/server.py",
    "ichat/engines/asgi.py",
    "ichat/engines/thread.py",
    "ichat/__main__.py",
    "ichat/observability/logs/store.py",
    "ichat/supervisor/managed_worker.py",
    "ichat/supervisor/supervisor.py",
}


def module_of(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imports_of(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.fixture(params=SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def source(request):
    return request.param


def test_imports_go_down_only(source):
    """A module knows nothing of those above it."""
    level = LEVEL[module_of(source)]
    for name in imports_of(ast.parse(source.read_text())):
        if name in LEVEL and name != "ichat":
            assert LEVEL[name] < level, f"{module_of(source)} imports {name}"


def test_roles_do_not_know_each_other(source):
    """Neither role imports the other."""
    if source.parent.name == "roles" and source.stem in ("gateway", "worker"):
        other = {"gateway": "worker", "worker": "gateway"}[source.stem]
        assert f"ichat.roles.{other}" not in set(imports_of(ast.parse(source.read_text())))


def test_the_least_versions_are_those_of_the_project():
    """What a worker asks of its environment is what pyproject.toml asks."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    least = dict(dependency.split(">=") for dependency in dependencies)
    for name, version in NEEDED.items():
        parts = [int(part) for part in least[name].split(".")]
        assert [*parts, 0][:2] == list(version), name


def test_sizes(source):
    """What grows past these bounds usually holds two nouns."""
    text = source.read_text()
    assert len(text.splitlines()) <= MODULE_LINES_MAX
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "make_app":
            assert node.end_lineno - node.lineno < FUNCTION_LINES_MAX, node.name


def test_banned_words(source):
    """No blocking sleep, no asyncio outside the engines, no async generator, nothing left to do later."""
    text = source.read_text()
    tree = ast.parse(text)
    assert "time.sleep" not in text
    if source.parent.name != "engines":
        assert "asyncio" not in set(imports_of(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef):
            assert not any(isinstance(inner, ast.Yield) for inner in ast.walk(node)), node.name
        if isinstance(node, ast.ExceptHandler) and str(source.relative_to(ROOT)) not in BROAD_EXCEPT:
            assert not (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
        if isinstance(node, ast.ClassDef):
            assert not re.search(r"(Manager|Handler|Service|Helper|Util|Base|Impl)$", node.name), node.name
    with source.open("rb") as file:
        comments = [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    assert not [comment for comment in comments if re.search(r"TODO|FIXME|XXX", comment)]


def test_every_public_thing_is_described(source):
    """A reader learns from the docstring what a public thing takes, gives and raises."""
    tree = ast.parse(source.read_text())
    assert ast.get_docstring(tree), "module"
    for node in tree.body:
        public = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_"
        if public:
            assert ast.get_docstring(node), node.name
