"""The house rules that no linter knows."""

import ast
import collections
import functools
import graphlib
import inspect
import pathlib
import re
import tokenize
import tomllib
import typing
import unicodedata

import attrs
import pytest
from support import measures

from ichat.__main__ import NEEDED
from ichat.config.schema import Config
from ichat.fleet.worker_record import WorkerRecord
from ichat.relays.values import Frame
from ichat.supervisor.managed_worker import ManagedWorker

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = sorted((ROOT / "ichat").rglob("*.py"))
FUNCTION_LINES_MAX = 80
MODULE_LINES_MAX = 400
VAGUE_NAMES = {"look", "take", "tell", "gone", "leave"}
"""Each of them has stood for three different things; a public function says which."""
DIALECT = re.compile(r'"""(?:Give(?! up)|Say)\b.*')


LAYERS = [
    ["texts", "error_shapes", "listeners", "service_manager", "program"],
    ["errors"],
    ["config"],
    ["protocol"],
    ["http"],
    ["security", "routing", "hardware", "console", "placement", "ray"],
    ["fleet", "engines"],
    ["observability", "preflight"],
    ["downloads"],
    ["proxy", "supervisor"],
    ["relays", "cli"],
    ["admin", "doctor", "takeover", "convert"],
    ["roles"],
    ["__main__"],
]
"""A package imports only packages of earlier lines. Within a package, no two modules import each other."""
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}

BROAD_EXCEPT = {  # where everything may be caught: the error edge, the engine's thread and calls, the command line
    "ichat/http/front_door.py",
    "ichat/http/hub.py",
    "ichat/http/pool.py",
    "ichat/http/body_mover.py",
    "ichat/engines/asgi.py",
    "ichat/engines/thread.py",
    "ichat/__main__.py",
    "ichat/observability/logs/worker_log.py",
    "ichat/proxy/copies.py",
    "ichat/relays/relay_exchange.py",
    "ichat/relays/timers.py",
    "ichat/relays/wire.py",
    "ichat/supervisor/loader.py",
    "ichat/supervisor/scaler.py",
    "ichat/supervisor/managed_worker.py",
    "ichat/supervisor/memory.py",
    "ichat/supervisor/memory_learner.py",
}


def module_of(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def room_of(path):
    return path.relative_to(ROOT / "ichat").with_suffix("").parts[0]


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


def functions_of(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def imports_of(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def every_source(rule):
    """Make one test of a rule for a source: it tells of every source that breaks the rule."""

    def test():
        broken = []
        for path in SOURCES:
            try:
                rule(path)
            except AssertionError as error:
                error.add_note(f"in {path.relative_to(ROOT)}")
                broken.append(error)
        if broken:
            raise ExceptionGroup(rule.__doc__, broken)

    return test


@every_source
def test_packages_import_only_lower_ones(source):
    """A package knows nothing of those above it, nor of those beside it."""
    room = room_of(source)
    for name in imports_of(tree_of(source)):
        _, _, rest = name.partition("ichat.")
        other = rest.split(".")[0]
        if name.startswith("ichat.") and other in LAYER and other != room:
            assert LAYER[other] < LAYER[room], f"{source.relative_to(ROOT)} imports {name}"


def test_modules_do_not_import_each_other_in_a_circle():
    """What is imported at the beginning of modules has an order."""
    known = {module_of(path) for path in SOURCES}
    graph = {
        module_of(path): known.intersection(imports_of(tree_of(path))) - {module_of(path), "ichat"} for path in SOURCES
    }
    assert list(graphlib.TopologicalSorter(graph).static_order())


@every_source
def test_an_init_is_a_docstring(source):
    """Importing a part of a package does not import the whole; the root has the version besides."""
    if source.name == "__init__.py" and source.parent.name != "ichat":
        assert [type(node) for node in tree_of(source).body] == [ast.Expr]


@every_source
def test_roles_do_not_know_each_other(source):
    """Neither role imports the other."""
    if source.parent.name == "roles" and source.stem in ("gateway", "worker"):
        other = {"gateway": "worker", "worker": "gateway"}[source.stem]
        assert f"ichat.roles.{other}" not in set(imports_of(tree_of(source)))


def test_the_least_versions_are_those_of_the_project():
    """What a worker asks of its environment is what pyproject.toml asks."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    least = dict(dependency.split(">=") for dependency in dependencies)
    for name, version in NEEDED.items():
        parts = [int(part) for part in least[name].split(".")]
        assert [*parts, 0][:2] == list(version), name


@every_source
def test_sizes(source):
    """What grows past these bounds usually holds two nouns."""
    assert len(source.read_text().splitlines()) <= MODULE_LINES_MAX
    for node in functions_of(tree_of(source)):
        assert node.end_lineno - node.lineno < FUNCTION_LINES_MAX, node.name


def test_public_class_names_are_unique():
    """One noun stands for one concept."""
    places = collections.defaultdict(list)
    for path in SOURCES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and node.name[0] != "_":
                places[node.name].append(module_of(path))
    assert not {name: found for name, found in places.items() if len(found) > 1}


@every_source
def test_public_functions_have_precise_names(source):
    """What a function does is in its name."""
    assert not VAGUE_NAMES.intersection(node.name for node in functions_of(tree_of(source)))


@every_source
def test_docstrings_begin_as_everywhere(source):
    """What a function returns begins with "Return", not with words of our own."""
    assert not DIALECT.findall(source.read_text())


def test_docstrings_of_tests_begin_so_too():
    """Tests, their programs and the build script use the same words."""
    paths = [ROOT / "build", *(ROOT / "tests").rglob("*.py")]
    assert not {path.name: found for path in paths if (found := DIALECT.findall(path.read_text()))}


PATCHED_MAX = 15
"""How often tests still replace a module's constant that is no time; a change may lower it."""
SLEEP_MAX_S = 0.05


def fixed_in(node, *, is_virtual=False):
    """Yield the constant sleeps of a test outside virtual time, and the module's constants that it replaces."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        is_virtual = is_virtual or any(one.arg == "autojump_clock" for one in node.args.args)
    if isinstance(node, ast.Call):
        name, values = ast.unparse(node.func), [one.value for one in node.args if isinstance(one, ast.Constant)]
        if name.endswith(".setattr"):
            constants = (str(one).rpartition(".")[2] for one in values)
            yield from ((name, one) for one in constants if re.fullmatch(r"_?[A-Z][A-Z0-9_]*", one))
        if name in ("trio.sleep", "time.sleep", "asyncio.sleep") and not is_virtual:
            yield from ((name, one) for one in values if one > SLEEP_MAX_S)
    for inner in ast.iter_child_nodes(node):
        yield from fixed_in(inner, is_virtual=is_virtual)


def test_tests_wait_for_conditions():
    """No test sleeps for a fixed time on the real clock or replaces a constant in seconds: times are arguments."""
    patched, sleeps = [], []
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if "soak" in path.parts or ("autojump_clock" in text and "autouse=True" in text):
            continue
        for name, found in fixed_in(ast.parse(text)):
            (patched if name.endswith(".setattr") else sleeps).append((path.name, found))
    assert sleeps == []
    assert [found for found in patched if found[1].endswith("_S")] == []
    assert len(patched) <= PATCHED_MAX, patched


def test_names_of_tests_say_their_rules():
    """Each name is there once, and begins with the thing that the rule is about, so that a failure reads as a sentence."""
    names = collections.Counter(
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )
    assert [name for name, count in names.items() if count > 1] == []
    assert [name for name in names if re.match(r"test_(what|who|whoever|whatever|nobody|it|those|such)_", name)] == []


@every_source
def test_banned_words(source):
    """No blocking sleep, no asyncio outside the engines, no async generator, nothing left to do later."""
    text = source.read_text()
    tree = tree_of(source)
    assert "time.sleep" not in text
    if "engines" not in source.parts:
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


def test_an_engine_of_another_package_needs_one_module():
    """The example imports `ichat.engines.engine` and no other module of the project."""
    for path in sorted((ROOT / "examples").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {name for name in names if name.split(".")[0] == "ichat"} <= {"ichat", "ichat.engines.engine"}, path
            if isinstance(node, ast.ImportFrom) and node.module == "ichat":
                assert {alias.name for alias in node.names} == {"__version__"}, path


@every_source
def test_every_public_thing_is_described(source):
    """A reader learns from the docstring what a public thing takes, returns and raises."""
    tree = tree_of(source)
    assert ast.get_docstring(tree), "module"
    for node in tree.body:
        public = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_"
        if public:
            assert ast.get_docstring(node), node.name


def test_no_figure_grows():
    """Branches, sizes and habits of language only fall; where they have fallen, so do the ceilings."""
    ceilings = tomllib.loads((ROOT / "tests/ceilings.toml").read_text())
    found = measures.totals(measures.measure())
    assert found.keys() - {"lines"} == ceilings.keys()
    assert {name: found[name] for name, most in ceilings.items() if found[name] > most} == {}


@every_source
def test_the_data_plane_knows_the_fleet_by_a_view(source):
    """Code that answers requests reads the fleet by the views of it, so that a copy of the fleet would do."""
    if room_of(source) == "proxy":
        parts = {"fleet", "managed_records", "model_directory", "probes", "registry", "worker_table"}
        assert not {f"ichat.fleet.{one}" for one in parts} & set(imports_of(tree_of(source)))


FRAMES = {kind.__name__ for kind in Frame.__args__}


def raw_times_in(node, *, is_in_frame=False):
    """Yield the reads of Trio's clock that are arguments of a frame, and are not converted by `ns_of`."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "ns_of":
            return
        is_in_frame = is_in_frame or name in FRAMES
    is_clock = isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node).endswith(("current_time", ".now"))
    if is_in_frame and is_clock:
        yield ast.unparse(node)
    for inner in ast.iter_child_nodes(node):
        yield from raw_times_in(inner, is_in_frame=is_in_frame)


PROCESSES_OF_RELAYS = {
    "owner", "owner_desk", "relay_at_owner", "request_at_relay", "settings_in_force", "timers",
    "frame_desk", "relay_process", "relay_exchange", "adopting", "forwarding", "found_relays", "ownerless",
    "settings", "copies_at_relay", "figures", "earlier_requests",
    "relay_places",
}  # fmt: skip
"""The modules of `relays/` that run; all others are pure."""


@every_source
def test_frames_have_no_time_of_trio(source):
    """Trio's clock begins at another number in each process; `TrioClock.ns_of` converts it."""
    assert list(raw_times_in(tree_of(source))) == []
    if room_of(source) == "relays" and source.stem not in PROCESSES_OF_RELAYS:
        assert "trio" not in set(imports_of(tree_of(source)))


def test_raw_times_in_frames_are_found():
    """The rule sees through nested calls and knows the conversion."""
    raw = "relay.send(SentOutcome(1, 2, 3, outcome, ended_at=int(trio.current_time() * 1e9)))"
    assert list(raw_times_in(ast.parse(raw))) == ["trio.current_time"]
    assert list(raw_times_in(ast.parse("SentAsk(1, hub.now, 'id', 'm', b'/')"))) == ["hub.now"]
    assert list(raw_times_in(ast.parse("SentAsk(1, clock.ns_of(trio.current_time()), 'id', 'm', b'/')"))) == []


def writes_of(tree):
    """Yield each assignment to an attribute as the object and the attribute's name."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        is_write = isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in targets if is_write else ():
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute):
                    yield ast.unparse(one.value), one.attr


@every_source
def test_a_changing_value_is_read_from_its_owner(source):
    """A constructor gets the object that has the value, not a function that reads it, such as `lambda: auth.proof`."""
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Lambda) and not node.args.args:
            assert not isinstance(node.body, ast.Attribute), f"line {node.lineno}: {ast.unparse(node)}"


REPLACE_EVENTS = {"ichat.listeners"}
"""The modules that may replace an event by a new event: all others wait by this."""


@every_source
def test_an_event_is_set_once(source):
    """A `trio.Event` is for something that happens once; for changes, a task waits by `Listeners.wait`."""
    if module_of(source) in REPLACE_EVENTS:
        return
    for node in ast.walk(ast.Module([one for one in functions_of(tree_of(source)) if one.name != "__init__"], [])):
        if isinstance(node, ast.Assign | ast.AnnAssign) and "trio.Event()" in ast.unparse(node):
            assert not list(writes_of(ast.Module([node], []))), f"line {node.lineno}"


WRITERS = {
    **dict.fromkeys(("endpoint", "route", "holder"), ("routing.endpoint",)),
    "circuit": ("routing.circuit_breaker",),
    "weights": ("fleet.weights",),
    "life": ("supervisor.worker_life",),
    "watched": ("supervisor.watched_worker",),
    "progress": ("supervisor.run_progress", "proxy.exchange", "relays.relay_request"),
    **dict.fromkeys(("exchange", "desk", "asker", "leg", "keepalive"), ()),
    "client": ("http.server", "http.front_door", "engines.kept"),
    **dict.fromkeys(
        (
            "auth", "fleet", "table", "directory", "managed", "registry", "probes", "balancer", "door", "reloader", "key_store", "in_force", "history", "events",
            "streams", "metrics", "ledger", "quotas", "supervisor", "log_store", "overview", "heartbeats", "late_usage",
            "loader", "loads", "index", "worker_log",
        ),
        (),
    ),
}  # fmt: skip
"""By the names of variables: the modules or packages that may set an attribute of such an object; no others do."""
OF_A_WORKER = {"worker", "entry", "record", "known", "other", "new", "old", "silent", "gone"}
"""The names of variables with a worker's record or a managed worker."""
WRITERS_OF_WORKERS = {
    "fleet.worker_record": WorkerRecord,
    "fleet.managed_records": WorkerRecord,
    "fleet.probes": WorkerRecord,
    "fleet.registry": WorkerRecord,
    "fleet.saved_records": WorkerRecord,
    "fleet.load_times": WorkerRecord,
    "fleet.worker_table": WorkerRecord,
    "supervisor.managed_worker": ManagedWorker,
}
"""The modules that may set an attribute of a worker's record, or of a managed worker."""


@functools.cache
def attributes_of(owner):
    """Return the names of a class' attributes: its fields, and what its methods set."""
    fields = {field.name for field in attrs.fields(owner)} if attrs.has(owner) else set()
    tree = ast.parse(inspect.getsource(owner))
    return fields | {name for variable, name in writes_of(tree) if variable == "self"}


@every_source
def test_state_has_one_writer(source):
    """Code that wants an object to change calls one of its methods, so that listeners hear of every change."""
    module = module_of(source).removeprefix("ichat.")
    names = {name for owner in set(WRITERS_OF_WORKERS.values()) for name in attributes_of(owner)}
    for owner, name in writes_of(tree_of(source)):
        variable = owner.rpartition(".")[2].removeprefix("_")
        if variable in WRITERS:
            assert module in WRITERS[variable] or room_of(source) in WRITERS[variable], f"{owner}.{name}"
        elif variable in OF_A_WORKER and name in names:
            assert module in WRITERS_OF_WORKERS, f"{owner}.{name}"
            assert name in attributes_of(WRITERS_OF_WORKERS[module]), f"{owner}.{name}"


# Docstrings: a thing that was moved or renamed keeps no old name in them.

FOREIGN = {"vllm", "sglang"}
"""Packages of other projects that packages of ours are named after."""
SETTINGS = {name: typing.get_args(kind) or (kind,) for name, kind in typing.get_type_hints(Config).items()}
"""The classes of each section of the configuration."""
_DOTTED = re.compile(r"`((?:\w+\.)+\w+)(?:\(\))?`")


def bound_in(node):
    """Return the names that the statements of a module or a class bind, and in a class those that its methods set."""
    found = set()
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(inner.name)
            if isinstance(node, ast.ClassDef):
                found |= {name for variable, name in writes_of(inner) if variable == "self"}
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            found.add(inner.id)
        elif isinstance(inner, ast.alias):
            found.add((inner.asname or inner.name).partition(".")[0])
        else:
            found |= bound_in(inner)
    return found


@functools.cache
def names_of_ours():
    """Return the names in each module and package by its last name, and in each class with the names of its bases."""
    rooms, classes = collections.defaultdict(set), collections.defaultdict(set)
    bases = collections.defaultdict(set)
    for path in SOURCES:
        *_, parent, name = ("", *module_of(path).split("."))
        rooms[parent].add(name)
        rooms[name] |= bound_in(tree_of(path))
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                classes[node.name] |= bound_in(node)
                bases[node.name] |= {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
    return rooms, classes, bases


def has_member(owner, name):
    """Return whether a class of ours has this attribute, by itself or by a base; a foreign base may have any."""
    _, classes, bases = names_of_ours()
    if owner not in classes:
        return owner not in ("object", "Protocol", "Generic", "NamedTuple")
    return name in classes[owner] or any(has_member(base, name) for base in bases[owner])


def is_known(dotted):
    """Return whether a name with dots is a file, setting, module, class or attribute of ours, or not ours at all."""
    rooms, classes, _ = names_of_ours()
    *_, owner, name = ("", *dotted.split("."))
    if name == "json":  # a file of the state directory
        return True
    if name in ("py", "toml"):
        return dotted == "ichat.toml" or any(ROOT.joinpath("ichat").rglob(dotted))
    if owner in classes:
        return has_member(owner, name)
    if owner in SETTINGS and any(name in attributes_of(kind) for kind in SETTINGS[owner] if attrs.has(kind)):
        return True
    if owner in rooms and owner not in FOREIGN:
        return name in rooms[owner]
    return not re.fullmatch(r"[A-Z]\w*[a-z]\w*", owner)


@every_source
def test_names_in_docstrings_exist(source):
    """In backquotes, `module.name`, `Class.method`, `section.setting` and `file.py` are names of today."""
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for dotted in _DOTTED.findall(node.value.value):
                assert is_known(dotted), f"line {node.lineno}: {dotted}"


def test_names_that_are_gone_are_found():
    """The rule knows members of bases, settings and files; it leaves other projects' names alone."""
    known = ("WorkerTable.get", "ichat.fleet.registry", "logs.format", "start.py", "trio.Process")
    assert [name for name in known if not is_known(name)] == []
    gone = ("Registry.forgotten_method", "orphans.stamp_of", "NoClassOfOurs.method", "logs.no_setting", "no_module.py")
    assert [name for name in gone if is_known(name)] == []


# Prose: every Markdown file that a person has written.

DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *(path for room in ("docs", "examples", "ichat", "tests") for path in sorted((ROOT / room).rglob("*.md"))),
]
DOCUMENTS.remove(ROOT / "ichat/engines/FLAGS.md")  # it is generated
COLUMNS_MAX = 100
WORDS_MAX = 30
HABITS_MAX = 0.1
"""The most habits of CONTRIBUTING.md in each sentence of a document; without *one*, which is a number, too."""
_CODE = re.compile(r"^```.*?^```$|(?:(?<=\n\n) {4}[^\n]*\n(?:(?: {4}[^\n]*)?\n)*)", re.MULTILINE | re.DOTALL)
_LEAD = re.compile(r"^ *(?:[-*] |\d+\. )?(?:\*\*[^*]+\*\* ?)?")
_UNBREAKABLE = re.compile(r"`[^`]*`|\]\([^)]*\)")
_SENTENCE_END = re.compile(r"[.!?][)\"”*]* +(?=[`*\[(\"“]*[A-Z0-9`])|[。！？](?![」”）*]|$)")
_BANNED = re.compile(r"\b(?:nobody|somebody|anybody|everybody|whoever|beats?)\b", re.IGNORECASE)


def paragraphs_of(path):
    """Return the prose of a Markdown file as lists of lines: paragraphs, list items and headings."""
    text = re.sub(r"<!--.*?-->", "", _CODE.sub("\n", path.read_text(encoding="utf-8")))
    found = []
    is_new = True
    for line in text.splitlines():
        if line.startswith("|") or not line.strip():
            is_new = True
            continue
        if is_new or re.match(r" *(?:[-*] |\d+\. |#)", line):
            found.append([])
        found[-1].append(line)
        is_new = line.startswith("#")
    return found


def columns_of(text):
    """Return how wide a text is on a terminal, where Chinese characters take two columns."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


@pytest.fixture(params=DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def document(request):
    return request.param


def test_prose_has_short_lines(document):
    """Prose can be read in a terminal and in a diff; a line of one word, such as a link, may be longer."""
    lines = [line for paragraph in paragraphs_of(document) for line in paragraph]
    assert [line for line in lines if columns_of(line) > COLUMNS_MAX and " " in line.strip(" -*")] == []


def test_each_sentence_begins_a_line(document):
    """A diff shows which sentence has changed. A lead in bold type may stand before its sentence."""
    lines = [_UNBREAKABLE.sub("X", _LEAD.sub("", line)) for paragraph in paragraphs_of(document) for line in paragraph]
    assert [line for line in lines if _SENTENCE_END.search(line)] == []


def test_sentences_are_short(document):
    """A colleague reads a sentence once; its subject is a thing or a role, such as the worker or the client."""
    for paragraph in paragraphs_of(document):
        text = _UNBREAKABLE.sub("X", " ".join([_LEAD.sub("", paragraph[0]), *(line.strip() for line in paragraph[1:])]))
        assert [sentence for sentence in _SENTENCE_END.split(text) if len(sentence.split()) > WORDS_MAX] == []
        assert not _BANNED.search(text), text


def test_documents_have_few_habits(document):
    """The habits that CONTRIBUTING.md lists are correct English now and then; together they are a dialect."""
    texts = [_UNBREAKABLE.sub("X", " ".join(paragraph)) for paragraph in paragraphs_of(document)]
    sentences = sum(len(_SENTENCE_END.split(text)) for text in texts)
    found = measures.habits_in(texts)
    del found["one for the noun"]
    assert found.total() <= HABITS_MAX * sentences, found


def test_links_lead_somewhere(document):
    """A link within the repository names a file that is there, and a heading of it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        name, _, heading = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in slugs, target


def test_every_file_named_in_prose_exists(document):
    """A module that was renamed keeps no old name in a document; packages are named without their `ichat/`."""
    names = re.findall(r"`([\w/]+\.(?:py|md|toml|example))`", document.read_text(encoding="utf-8"))
    places = (ROOT, ROOT / "ichat", document.parent)
    examples = {"ichat.toml"}
    assert [name for name in names if name not in examples and not any((one / name).exists() for one in places)] == []


def test_the_architecture_has_the_packages_in_their_order():
    """The table of packages is the order in which they may import each other."""
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## Packages\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    assert [re.findall(r"`(\w+)`", row) for row in rows] == LAYERS
