"""The components of a gateway, made and not started."""

import ast
import contextlib
import inspect
import pathlib

import trio

import ichat
from ichat.config import load as configuration
from ichat.observability.tracing import open_tracing
from ichat.protocol.messages import Heartbeat
from ichat.roles.gateway import LogSources
from ichat.roles.gateway_components import build
from ichat.routing.prefix_chain import PrefixChain
from ichat.supervisor.state import open_state
from ichat.supervisor.supervisor import Supervisor

SOURCES = pathlib.Path(ichat.__file__).parent.rglob("*.py")


OWNED = {
    "FinishedRequests": "Gateway", "ModelDirectory": "Fleet", "Registry": "Fleet", "SupervisorContext": "Supervisor",
    "WorkerTable": "Fleet",
}  # fmt: skip
"""Classes that get another configuration from the component that owns them."""


def reconfigurable_classes():
    """Return the names of the classes with `reconfigure(config: Config)`, but for protocols."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ClassDef) and not any(ast.unparse(base) == "Protocol" for base in node.bases):
                methods = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "reconfigure"]
                if node.name not in OWNED and any(ast.unparse(one.args) == "self, config: Config" for one in methods):
                    yield node.name


async def test_a_reload_forgets_no_component(tmp_path):
    """Every class that can go on with another configuration is in the list of those that a reload tells."""
    config = configuration.parse(
        f'[server_settings]\nport = 4000\nrelays = 1\nstate_directory = "{tmp_path}"\n', "test.toml"
    )
    with open_state(config.server_settings, None) as state, contextlib.closing(open_tracing()) as tracing:
        components = build(config, None, state, tracing)
        assert sorted(type(one).__name__ for one in components.reconfiguration.components) == sorted(
            reconfigurable_classes()
        )
        components.control.log_store.close()


async def test_handlers_get_what_they_name(tmp_path):
    """Each part of the gateway that a handler of the control plane names by its class is there."""
    config = configuration.parse(f'[server_settings]\nport = 0\nstate_directory = "{tmp_path}"\n', "test.toml")
    with open_state(config.server_settings, None) as state, contextlib.closing(open_tracing()) as tracing:
        components = build(config, None, state, tracing)
        app = components.serve_control.args[0]
        handlers = app.view_functions.values()
        named = {one.annotation for handler in handlers for one in inspect.signature(handler).parameters.values()}
        assert Supervisor in named
        assert named - {str} <= app.config["PARTS"].keys()
        components.control.log_store.close()


async def test_log_sources_are_the_same_while_workers_are(tmp_path):
    """A heartbeat that changes nothing makes no other mapping; a worker that moves, comes or has a pipe does."""
    config = configuration.parse(f'[server_settings]\nport = 0\nstate_directory = "{tmp_path}"\n', "test.toml")
    with open_state(config.server_settings, None) as state, contextlib.closing(open_tracing()) as tracing:
        components = build(config, None, state, tracing)
        fleet = components.control.fleet
        sources = LogSources(fleet.table, components.control.auth)
        fleet.registry.record_heartbeat(Heartbeat("w", "m", "h", 1))
        first = sources()
        fleet.registry.record_heartbeat(Heartbeat("w", "m", "h", 1, phase="well"))
        assert sources() is first
        fleet.registry.record_heartbeat(Heartbeat("w", "m", "h", 2))
        assert (first["w"].port, sources()["w"].port) == (1, 2)
        mine = fleet.managed.expect("mine", ["m"])
        fleet.registry.record_heartbeat(Heartbeat("mine", "m", "h", 3))
        assert set(sources()) == {"w", "mine"}
        fleet.managed.set_piped(mine, is_piped=True)
        assert set(sources()) == {"w"}
        components.control.log_store.close()


async def test_a_reload_leaves_no_replaced_route_in_the_index_of_prefixes(tmp_path, autojump_clock):
    """A route that is changed or removed is forgotten with what it was believed to have; one that stays is known on."""
    server = f'[server_settings]\nport = 0\nstate_directory = "{tmp_path}"\n[routing]\nprefix_ttl_s = 10\n'
    route = '[[external_routes]]\nmodel_name = "{}"\napi_base = "http://{}/v1"\n'
    before, after = (
        configuration.parse(server + "".join(route.format(*one) for one in routes), "test.toml")
        for routes in (
            (("stays", "a"), ("changes", "b"), ("goes", "c")),
            (("stays", "a"), ("changes", "d")),
        )
    )
    with open_state(before.server_settings, None) as state, contextlib.closing(open_tracing()) as tracing:
        components = build(before, None, state, tracing)
        context, index = components.data.context, components.data.context.balancer.prefixes
        for endpoints in context.directory.external.values():
            chain = PrefixChain(256, [endpoints[0].id.ljust(8)[:8]])
            index.record(chain, index.match(chain), endpoints[0])
        components.reconfiguration.check(after)(before)
        await trio.sleep(10)
        index.match(chain)
        assert list(index._numbers) == [context.directory.external["stays"][0].holder]
        components.control.log_store.close()
