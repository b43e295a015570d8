"""The objects of the control plane as JSON schemas, for `openapi.py`.

A class describes its objects: fields and types give the schema, the docstrings of fields and class the
descriptions. `openapi.toml` describes the objects that have no class.
"""

import ast
import functools
import inspect
import itertools
import re
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import attrs

from ichat.admin import views
from ichat.admin.config_state import ConfigState
from ichat.admin.key_views import KeyLimits, KeyList, KeyUsage, KeyView, NewKey, WithdrawnKey
from ichat.config.package_data import read_toml
from ichat.config.replicas import Replicas, Scale
from ichat.config.schema import ManagedWorkerConfig
from ichat.engines.engine import EngineFlag, Progress
from ichat.fleet.explain import RouteView
from ichat.fleet.views import WorkerSummary, WorkerView
from ichat.fleet.worker_record import State
from ichat.hardware.host import GpuStatus
from ichat.hardware.machines import MachineView
from ichat.observability.fleet_metrics import STATES
from ichat.observability.logs.pages import LogPage, PageLine
from ichat.protocol.messages import (
    Group,
    Heartbeat,
    HeartbeatResponse,
    Machine,
    MachineGpu,
    ModelCard,
    PeerLoss,
    ShortHeartbeat,
)
from ichat.protocol.model_entry import ModelEntry
from ichat.protocol.orders import LaunchEnd, OrderRequest, WorkerOrder
from ichat.protocol.prefixes import PrefixReport
from ichat.proxy.finished_requests import FinishedRequest, FinishedRequestsView
from ichat.proxy.requests_in_flight import RequestsView, RequestView
from ichat.routing.circuit_breaker import CircuitView
from ichat.supervisor.reload_plan import ReloadStep

Schema = dict[str, Any]
PARTS: Mapping[str, Any] = read_toml("ichat.admin", "openapi.toml")
"""The parts of the document that no class and no handler describes."""

_SAME_NAMES: Sequence[type[Any]] = (
    ModelEntry, Group, Machine, MachineGpu, ConfigState, WorkerSummary, EngineFlag, KeyLimits, KeyUsage, NewKey,
    WithdrawnKey, views.Launched, views.LaunchCheck, views.Stopped, views.ModelChange, views.ReplicasChange,
    views.RequestCancelled, views.Version, views.Welcome, FinishedRequest, LogPage, PageLine, views.NewOrder,
    views.WorkerCommanded,
    WorkerOrder,
)  # fmt: skip
COMPONENTS: Mapping[Any, str] = {
    **{one: one.__name__ for one in _SAME_NAMES},
    State: "State",
    ModelCard: "Model",
    PeerLoss: "Lost",
    MachineView: "Machine",
    GpuStatus: "Gpu",
    CircuitView: "Circuit",
    WorkerView: "Worker",
    ReloadStep: "Step",
    KeyView: "Key",
    KeyList: "Keys",
    RequestView: "RequestInFlight",
    RequestsView: "RequestsInFlight",
    FinishedRequestsView: "FinishedRequests",
    HeartbeatResponse: "HeartbeatAnswer",
    RouteView: "Route",
    views.OrderList: "Orders",
    views.OrderView: "Order",
    views.EngineList: "Engines",
    views.EngineFlagList: "EngineFlags",
    views.ConfigView: "Config",
    views.ClusterStatus: "Status",
    views.ReloadResult: "Reload",
    views.GatewayHealth: "Health",
}
"""The components to which other schemas refer; any other class stands where it is used."""
_TAKEN = "Taken"
"""The prefix of components in requests: there, keys may be missing that responses always have."""
_PLAIN: Mapping[Any, Schema] = {
    Any: {},
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
}


def schemas() -> dict[str, Schema]:
    """Return the schema of each component by its name, for `ref`."""
    number: Schema = {"type": ["number", "null"], "minimum": 0, "maximum": 1e15}
    scalars = ["string", "number", "boolean", "array", "object"]
    step = properties_of(ReloadStep)
    return {
        **{name: view(one) for one, name in COMPONENTS.items() if one not in (State, MachineGpu)},
        **{name: object_of(**given) for name, given in PARTS["objects"].items()},
        "State": {**PARTS["state"], "enum": list(STATES)},
        "ModelEntry": _model_entry(),
        "Models": list_of(ref("ModelEntry")),
        "Progress": {
            "type": "object",
            "properties": {name: {**found, **number} for name, found in properties_of(Progress).items()},
            "additionalProperties": number,
            "description": "Null: not known.",
        },
        **{_TAKEN + COMPONENTS[one]: taken(one) for one in (ModelCard, Group, Machine, MachineGpu)},
        "Machine": _machine(),
        "Heartbeat": taken(Heartbeat),
        "ShortHeartbeat": taken(ShortHeartbeat),
        "PrefixReport": taken(PrefixReport),
        "OrderRequest": taken(OrderRequest),
        "LaunchEnd": taken(LaunchEnd),
        "Worker": _worker(),
        "WorkerSummary": _worker_summary(),
        "EngineValue": {"type": scalars, "items": {"type": scalars}},
        "Launch": _launch(),
        "Step": object_of({**step, "action": {"type": "string", **step["action"]}}),
    }


def _worker() -> Schema:
    """Return the schema of `fleet.views.describe`: a view, the heartbeat, and the settings of a managed worker."""
    managed = PARTS["properties"]["managed"]
    ours = properties_of(WorkerView, without=("worker_id", "model_name"))
    return object_of(
        {**properties_of(Heartbeat, without=("loaded", "machine", "registration")), **managed, **ours},
        "A worker as the gateway knows it. Keys of its heartbeats are there from the first heartbeat on. Only a worker"
        f" that the gateway started has {', '.join(managed)}; its `backend` and `model_path` are there from the"
        " beginning. How it last ended (`cause` to `last_lines`) stays after it was started again.",
        required=["worker_id", "model_name", *ours],
    )


def _model_entry() -> Schema:
    """Return what `entry_of` gives, with `loaded` for some models only."""
    schema = view(ModelEntry)
    schema["properties"]["loaded"]["type"] = "boolean"
    schema["required"].remove("loaded")
    return schema


def _worker_summary() -> Schema:
    """Return the schema of `WorkerSummary`, with the numbers of a heartbeat."""
    schema = view(WorkerSummary)
    progress = schema["properties"]["progress"]
    schema["properties"]["progress"] = {**or_null(ref("Progress")), "description": progress["description"]}
    return schema


def _machine() -> Schema:
    """Return what `MachineView.describe` gives."""
    gpu = object_of({**properties_of(MachineGpu, without=("held_bytes",)), **PARTS["properties"]["gpu"]})
    seen = properties_of(MachineView, without=("machine", "gpus"))
    gpus = {**or_null({"type": "array", "items": gpu}), "description": docs_of(MachineView)["gpus"]}
    return object_of(
        {**properties_of(Machine, without=("gpus",)), **seen, "gpus": gpus},
        "A machine as the workers and the gateway on it report it; null: not known.",
    )


def _launch() -> Schema:
    """Return the schema for `read_worker`: the keys of the file, where null means left out."""
    schema, value = taken(ManagedWorkerConfig), or_null(ref("EngineValue"))
    properties = schema["properties"]
    properties["backend_args"]["additionalProperties"] = value
    left_out = {name: or_null(one) for name, one in properties.items() if name not in schema["required"]}
    return {
        **schema,
        "properties": {**properties, **left_out},
        "additionalProperties": value,
        "description": "The keys of `[[managed_workers]]`; null is a key that is left out. Every other key is an"
        " argument of the engine, named like vLLM's flag with _ for -. A key that looks like a misspelt key of these"
        " is refused.",
    }


def ref(name: str) -> Schema:
    """Return a reference to the schema of this name."""
    return {"$ref": f"#/components/schemas/{name}"}


def schema_of(kind: Any, prefix: str = "") -> Schema:
    """Return a type as a schema; a component is a reference to its name, after this prefix."""
    if kind in COMPONENTS:
        return ref(prefix + COMPONENTS[kind])
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if attrs.has(kind):
        return view(kind)
    of_origin = _BY_ORIGIN.get(get_origin(kind))
    if of_origin is None:
        raise TypeError(f"{kind} has no schema")
    return of_origin(get_args(kind), prefix)


def _union(kinds: Sequence[Any], prefix: str) -> Schema:
    joined = _any_of([schema_of(one, prefix) for one in kinds if one is not type(None)])
    return or_null(joined) if type(None) in kinds else joined


def _mapping(kinds: Sequence[Any], prefix: str) -> Schema:
    names = {} if kinds[0] is str else {"propertyNames": schema_of(kinds[0], prefix)}
    return {"type": "object", **names, "additionalProperties": schema_of(kinds[1], prefix)}


def _list(kinds: Sequence[Any], prefix: str) -> Schema:
    return {"type": "array", "items": schema_of(kinds[0], prefix)}


_BY_ORIGIN: Mapping[Any, Callable[[Sequence[Any], str], Schema]] = {
    Annotated: lambda kinds, prefix: schema_of(kinds[0], prefix) | kinds[1].schema,
    Literal: lambda words, _: {"const": words[0]} if len(words) == 1 else {"enum": list(words)},
    Union: _union,
    types.UnionType: _union,
    dict: _mapping,
    Mapping: _mapping,
    list: _list,
    Sequence: _list,
    tuple: lambda kinds, prefix: _list(kinds, prefix) | {"minItems": len(kinds), "maxItems": len(kinds)},
}
"""The schemas of types with arguments, by the types' origins."""


def _any_of(schemas: Sequence[Schema]) -> Schema:
    """Return the schema of what fits one of these; plain types become a list of types."""
    if len(schemas) == 1:
        return schemas[0]
    if all(schema.keys() == {"type"} for schema in schemas):
        return {"type": [schema["type"] for schema in schemas]}
    return {"anyOf": list(schemas)}


def or_null(schema: Schema) -> Schema:
    """Return the schema that allows null as well."""
    kinds = schema.get("type")
    if kinds is None:
        return {"anyOf": [schema, {"type": "null"}]}
    both = [kinds, "null"] if isinstance(kinds, str) else [kind for kind in kinds if kind != "null"] + ["null"]
    words: Schema = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, "type": both, **words}


def properties_of(owner: type[Any], prefix: str = "", without: Collection[str] = ()) -> dict[str, Schema]:
    """Return the schemas of the fields of an attrs class, each with its docstring as the description."""
    docs, found = docs_of(owner), dict[str, Schema]()
    for one in attrs.fields(owner):
        if one.name not in without:
            bounds = bounds_of(one)
            schema = bounds if "$ref" in bounds else {**schema_of(one.type, prefix), **bounds}
            found[one.name] = schema | ({"description": docs[one.name]} if one.name in docs else {})
    return found


def bounds_of(field: "attrs.Attribute[Any]") -> Schema:
    """Return the bounds of a field in JSON schema: its own, or else those of its check."""
    given = field.metadata.get("schema")
    return dict(getattr(field.metadata.get("check"), "schema", {}) if given is None else given)


def docs_of(owner: type[Any]) -> Mapping[str, str]:
    """Return the docstrings below the fields of a class and of those it inherits from, by the fields' names."""
    found: dict[str, str] = {}
    for one in reversed(owner.__mro__[:-1]):
        found |= _docs_of_module(one.__module__).get(one.__name__, {})
    return found


@functools.cache
def _docs_of_module(name: str) -> Mapping[str, Mapping[str, str]]:
    tree = ast.parse(inspect.getsource(sys.modules[name]))
    return {
        node.name: {
            field.target.id: _description(doc.value.value)
            for field, doc in itertools.pairwise(node.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _description(docstring: str) -> str:
    """Return a docstring as a description: in a single line, and for readers of JSON."""
    return re.sub(r"\bNone\b", "null", " ".join(docstring.split()))


def object_of(properties: Mapping[str, Schema], description: str = "", required: Sequence[str] | None = None) -> Schema:
    """Return an object in a response: these keys and no others, all of them always there unless `required` says."""
    found: Schema = {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }
    return {**found, "description": description} if description else found


def view(owner: type[Any]) -> Schema:
    """Return an attrs class as a response has it."""
    return object_of(properties_of(owner), _description(owner.__doc__ or ""))


def taken(owner: type[Any]) -> Schema:
    """Return an attrs class as a request may have it: only fields without a default are required."""
    properties = properties_of(owner, _TAKEN)
    required: list[str] = []
    for one in attrs.fields(owner):
        if one.default is attrs.NOTHING:
            required.append(one.name)
        elif one.default is not None:
            properties[one.name]["default"] = _default_of(one)
    description = _description(owner.__doc__ or "")
    return {"type": "object", "properties": properties, "required": required, "description": description}


def _default_of(field: "attrs.Attribute[Any]") -> Any:
    factory = getattr(field.default, "factory", None)
    default = factory() if factory is not None else field.default
    return attrs.asdict(default) if isinstance(default, Replicas | Scale) else default


def list_of(schema: Schema) -> Schema:
    """Return a list in the form of OpenAI's API."""
    return object_of({"object": {"const": "list"}, "data": {"type": "array", "items": schema}})
