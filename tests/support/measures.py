"""How large, how branched and how plain the code is: figures that may only fall.

    python tests/support/measures.py [ROOT]    print the figures, and the worst ten of each

`tests/ceilings.toml` has the highest value of each figure, and `tests/test_tidy.py` compares them.
"""

import ast
import collections
import io
import pathlib
import re
import sys
import tokenize

ROOT = pathlib.Path(__file__).parent.parent.parent
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case, ast.comprehension)
BRANCHES_MANY, BRANCHES_MAX = 10, 15
CLASS_LINES_MAX = 300
METHODS_MAX = 30
PUBLIC_METHODS_MAX = 25
ATTRIBUTES_MAX = 25
MODULE_LINES_MAX = 390
SLIVER_LINES_MAX = 75
WORST = 10

HABITS = {
    "one for the noun": r"\bones?\b(?! of\b)(?!-)",
    "what as subject or object": r"\bwhat (?:is|are|was|were|it|has|had|they|comes?|goes|an?|the)\b",
    "take for accept": r"\btak(?:e|es|en|ing)\b|\btook\b",
    "a clause about the sentence": r", which (?:is|was|has|may|would|can)\b",
    "come for arrive": r"\bcom(?:e|es|ing)\b|\bcame\b",
    "who for programs": r"\bwho(?:se|m)?\b",
    "tell for report": r"\btell(?:s|ing)?\b|\btold\b",
    "so many for a constant": r"\bso (?:many|long|often|much|few|late|large)\b",
    "nobody, whoever": r"\b(?:nobody|somebody|anybody|whoever|whatever|whichever)\b",
    "is to be": r"\b(?:is|are|was|were|has|have|had) to be\b",
}
"""Patterns of sentences that CONTRIBUTING.md asks to avoid. Some matches are plain English: the number counts."""

_SENTENCE = re.compile(r"\w+[,:;]? +\w+[,:;]? +\w+")
"""At least three words: other texts are names, paths and keys."""
_SCRIPT_CODE = re.compile(r"\$\{(?:[^{}]|\{[^{}]*\})*\}")
_SCRIPT_TEXTS = re.compile(r"""/\*(.*?)\*/|(?<![:"'])//([^\n]*)|"([^"\n]*)"|'([^'\n]*)'|`([^`]*)`""", re.DOTALL)
_CARD = re.compile(r"<!-- habits -->.*?<!-- /habits -->", re.DOTALL)
_BLOCKS = re.compile(r"^```.*?^```$|(?<=\n\n) {4}[^\n]*\n(?:(?: {4}[^\n]*)?\n)*", re.MULTILINE | re.DOTALL)
_SPANS = re.compile(r"`[^`]*`|\]\([^)]*\)")


def sources(root: pathlib.Path) -> dict[pathlib.Path, str]:
    """Return the text of each module of iChat, by its path below `root`."""
    return {path.relative_to(root): path.read_text() for path in sorted((root / "ichat").rglob("*.py"))}


def branches_of(function: ast.AST) -> int:
    """Return how many ways lead through a function: conditional expressions and comprehensions count."""
    nodes = [node for node in ast.walk(function) if isinstance(node, BRANCHES)]
    return 1 + len(nodes) + sum(len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))


def attributes_of(owner: ast.ClassDef) -> set[str]:
    """Return the names of a class' attributes: its fields, and those that its methods set; `_x` is the field `x`."""
    fields = {
        node.target.id for node in owner.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    stored = (node for node in ast.walk(owner) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    own = {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}
    return {name.lstrip("_") for name in fields | own}


def _imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _prose_of(text: str, tree: ast.AST) -> list[str]:
    """Return the docstrings, the texts below attributes, and the comments of a module."""
    prose = [
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return prose + [token.string for token in tokens if token.type == tokenize.COMMENT]


def _messages_of(tree: ast.AST) -> list[str]:
    """Return the sentences of a module's string literals: log lines, help texts, errors and answers."""
    described = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in described)
    return [node.value for node in found if isinstance(node.value, str) and _SENTENCE.search(node.value)]


def _prose_of_toml(text: str) -> list[str]:
    """Return the comments and the sentences of a TOML file."""
    return [line for line in text.splitlines() if _SENTENCE.search(line)]


def _prose_of_script(text: str) -> list[str]:
    """Return the comments and the sentences of a script's texts, without the code in templates."""
    plain = _SCRIPT_CODE.sub(" ", text)
    found = ("".join(parts) for parts in _SCRIPT_TEXTS.findall(plain))
    return [part for part in found if _SENTENCE.search(part)]


def _prose_of_markdown(text: str) -> list[str]:
    """Return the prose of a document, without code, targets of links, and the card of habits itself."""
    for pattern in (_CARD, _BLOCKS, _SPANS):
        text = pattern.sub(" ", text)
    return [text]


TRANSLATIONS = "texts.zh.js"
"""Its keys are sentences of other files."""


def _others(root: pathlib.Path) -> dict[str, collections.Counter[str]]:
    """Return the habits in files that are no modules, by the kind of file."""
    kinds = {
        "habits_in_settings": (["ichat.toml.example", "ichat/**/*.toml"], _prose_of_toml),
        "habits_in_console": (["ichat/console/**/*.js"], _prose_of_script),
        "habits_in_documents": (
            ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md"],
            _prose_of_markdown,
        ),
    }
    found = {
        kind: habits_in([
            part
            for pattern in patterns
            for path in sorted(root.glob(pattern))
            if "vendor" not in path.parts and path.name != TRANSLATIONS
            for part in prose_of(path.read_text(encoding="utf-8"))
        ])
        for kind, (patterns, prose_of) in kinds.items()
    }  # fmt: skip
    del found["habits_in_documents"]["one for the noun"]  # there it is a number
    return found


def habits_in(texts: list[str]) -> collections.Counter[str]:
    """Return how often each habit is in texts."""
    whole = " ".join(texts).lower()
    return collections.Counter({habit: len(re.findall(pattern, whole)) for habit, pattern in HABITS.items()})


def measure(root: pathlib.Path = ROOT) -> dict[str, collections.Counter[str]]:
    """Return each figure as the things that it counts: a name leads to the size of that thing."""
    texts = sources(root)
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in trees}
    importers: collections.Counter[pathlib.Path] = collections.Counter()
    branches: collections.Counter[str] = collections.Counter()
    classes: collections.Counter[str] = collections.Counter()
    methods: collections.Counter[str] = collections.Counter()
    public_methods: collections.Counter[str] = collections.Counter()
    attributes: collections.Counter[str] = collections.Counter()
    for path, tree in trees.items():
        importers.update({modules[name] for name in _imported(tree) if name in modules} - {path})
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                branches[f"{path}:{node.name}"] = branches_of(node)
            elif isinstance(node, ast.ClassDef):
                classes[f"{path}:{node.name}"] = (node.end_lineno or 0) - node.lineno + 1
                names = [one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
                methods[f"{path}:{node.name}"] = len(names)
                public_methods[f"{path}:{node.name}"] = sum(not name.startswith("_") for name in names)
                attributes[f"{path}:{node.name}"] = len(attributes_of(node))
    large_chains = {name: size for name, size in _with_bases(trees).items() if size > CLASS_LINES_MAX >= classes[name]}
    slivers = {path for path, number in lines.items() if number <= SLIVER_LINES_MAX and importers[path] == 1}
    prose = [part for path, tree in trees.items() for part in _prose_of(texts[path], tree)]
    return {
        "lines": collections.Counter({str(path): number for path, number in lines.items()}),
        "large_modules": _over(MODULE_LINES_MAX, {str(path): number for path, number in lines.items()}),
        "slivers": collections.Counter({str(path): lines[path] for path in slivers if path.name != "__init__.py"}),
        "branched_functions": _over(BRANCHES_MANY, branches),
        "very_branched_functions": _over(BRANCHES_MAX, branches),
        "large_classes": _over(CLASS_LINES_MAX, classes),
        "large_chains": collections.Counter(large_chains),
        "classes_of_many_methods": _over(METHODS_MAX, methods),
        "classes_of_many_public_methods": _over(PUBLIC_METHODS_MAX, public_methods),
        "classes_of_many_attributes": _over(ATTRIBUTES_MAX, attributes),
        "habits": habits_in(prose),
        "habits_in_messages": habits_in([part for tree in trees.values() for part in _messages_of(tree)]),
        **_others(root),
    }


def _with_bases(trees: dict[pathlib.Path, ast.Module]) -> dict[str, int]:
    """Return the lines of each class and of its bases in iChat: a chain of classes is as large as a single class."""
    found = {
        node.name: (f"{path}:{node.name}", node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def lines_of(name: str) -> int:
        if name not in found:
            return 0
        node = found[name][1]
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        return (node.end_lineno or 0) - node.lineno + 1 + sum(lines_of(base) for base in bases if base != name)

    return {path: lines_of(name) for name, (path, _) in found.items()}


def _over(most: int, sizes: dict[str, int]) -> collections.Counter[str]:
    return collections.Counter({name: size for name, size in sizes.items() if size > most})


def totals(found: dict[str, collections.Counter[str]]) -> dict[str, int]:
    """Return the figures: lines and habits are sums, the others numbers of things."""
    return {
        name: things.total() if name.startswith(("lines", "habits")) else len(things) for name, things in found.items()
    }


def main() -> None:
    found = measure(pathlib.Path(sys.argv[1]) if sys.argv[1:] else ROOT)
    for name, total in totals(found).items():
        print(f"{name}: {total}")
        for thing, size in found[name].most_common(WORST):
            print(f"    {size:6} {thing}")


if __name__ == "__main__":
    main()
