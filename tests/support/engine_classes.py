"""Run by an engine's own interpreter: prints the fields of its request classes and the headers that it reads, as JSON.

No model is loaded. A class counts that a route takes, or that stands in a module called `protocol` and is a request by
its name: some routes read their body themselves.
"""

import ast
import importlib
import json
import pathlib
import pkgutil
import re
import sys

ENTRYPOINTS = {"vllm": "vllm.entrypoints", "sglang": "sglang.srt.entrypoints"}
MENTIONS = re.compile(r"""headers|["']x-[a-z]""", re.IGNORECASE)
"""What the source of a module has that reads headers."""
HEADER = re.compile(r"x-[a-z0-9]+(-[a-z0-9]+)*", re.IGNORECASE)


def modules_of(package):
    """Return the modules of a package that say what requests are, those that can be imported."""
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if found.name.rpartition(".")[2].startswith(("protocol", "api_router", "http_server")):
            try:
                yield importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                if error.name.startswith(("vllm", "sglang")):
                    raise
                print(f"{found.name} needs {error.name}", file=sys.stderr)


def fields_of(module):
    """Return the fields of a module's request classes, and those that its routes take, each with where it is."""
    import fastapi
    import pydantic

    for thing in list(vars(module).values()):
        if isinstance(thing, type) and issubclass(thing, pydantic.BaseModel) and "Request" in thing.__name__:
            yield from ((name, thing.__name__) for name in names_of(thing))
        if isinstance(thing, fastapi.APIRouter | fastapi.FastAPI):
            for route in thing.routes:
                if isinstance(route, fastapi.routing.APIRoute) and route.path.startswith("/v1/"):
                    for parameter in route.dependant.body_params:
                        classes = list(classes_in(parameter.field_info.annotation))
                        for one in classes:
                            yield from ((name, one.__name__) for name in names_of(one))
                        if not classes:
                            yield parameter.alias, route.path
                    yield from ((f"header:{one.alias}", route.path) for one in route.dependant.header_params)


def names_of(model):
    for name, field in model.model_fields.items():
        yield field.alias or name
        if field.validation_alias is not None:
            yield str(field.validation_alias)


def classes_in(annotation):
    import typing

    import pydantic

    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [found for inner in typing.get_args(annotation) for found in classes_in(inner)]


def headers_in(root):
    """Return what looks like the name of a header in an engine's sources: every `x-…`, and whatever is asked of headers."""
    for path in root.rglob("*.py"):
        text = path.read_text()
        if MENTIONS.search(text) and "benchmarks" not in path.relative_to(root).parts:
            tree = ast.parse(text)
            named = {
                target.id: node.value.value
                for node in tree.body
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for node in ast.walk(tree):
                for name in asked_of_headers(node, named):
                    yield name.lower(), str(path.relative_to(root))


def asked_of_headers(node, named):
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and HEADER.fullmatch(node.value):
        yield node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        if "headers" in ast.unparse(node.func.value):
            asked = node.args[0]
            if isinstance(asked, ast.Constant):
                yield str(asked.value)
            elif isinstance(asked, ast.Name) and asked.id in named:
                yield str(named[asked.id])


def main(engine):
    package = importlib.import_module(ENTRYPOINTS[engine])
    fields, headers = {}, {}
    for module in modules_of(package):
        for name, where in fields_of(module):
            fields.setdefault(name, where)
    root = pathlib.Path(package.__path__[0]).parent
    for name, where in headers_in(root):
        headers.setdefault(name, where)
    print(json.dumps({"fields": fields, "headers": headers}))


main(sys.argv[1])
