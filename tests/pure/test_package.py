"""The package as a whole: which layer may know which, and what has one name."""

from __future__ import annotations

import ast
import collections
import functools
import inspect
import re
from pathlib import Path

import penstock
from penstock import errors

SOURCE = Path(penstock.__file__).parent

BASE = {"arrow_columns", "display", "failures", "row_copies", "answers", "forks", "rows", "blocks", "tables", "errors"}

# A layer may import itself and what stands to the right of it here. Lower layers know nothing of higher ones.
# A folder inside a folder is a layer, too.
LAYERS = {
    "cli": {
        "handlers",
        "journal",
        "io",
        "observe",
        "pipeline",
        "options",
        "transport",
        "rows",
        "blocks",
        "errors",
        "version",
    },
    "beam": {"inference", "io", "models", "observe", "blocks", "failures", "rows", "errors"},
    "engines": {"engines.local"},
    "engines.ray": {
        *("engines.local", "journal", "run", "steps", "inference", "io", "models", "observe", "pipeline", "options"),
        *("remote", "transport", "blocks", "errors", "version"),
    },
    "engines.local": {
        *("journal", "run", "inference", "models", "observe", "pipeline", "options", "transport"),
    },
    "journal": {
        *(
            "journal.identity",
            "remote",
            "run",
            "steps",
            "inference",
            "io",
            "models",
            "observe",
            "pipeline",
            "options",
            "transport",
        ),
        *("version", *BASE),
    },
    "journal.identity": {"run", "steps", "inference", "io", "pipeline", *BASE},
    "run": {
        "steps",
        "inference",
        "io",
        "models",
        "batching",
        "observe",
        "pipeline",
        "options",
        "transport",
        "seeding",
        *BASE,
    },
    "steps": {"inference", "io", "batching", "observe", "pipeline", "transport", "retry", *BASE},
    "testing": {"inference", "io", "observe", "pipeline", "rows", "blocks", "errors"},
    "handlers": {"remote", "arrow_columns", "answers", "inference", "io", "transport", "rows", "blocks", "errors"},
    "inference": {
        "remote",
        "io",
        "models",
        "batching",
        "observe",
        "pipeline",
        "transport",
        "seeding",
        "retry",
        "version",
        *BASE,
    },
    "remote": {"errors"},
    "io": {"pipeline", *BASE},
    "pipeline": {"batching", "display", "options", "retry", "failures", "rows", "errors"},
    "models": {"batching", "observe", "transport", *BASE},
    "window": {"pipeline", "errors"},
    "batching": {"errors"},
    "observe": {"display", "errors"},
    "options": {"errors"},
    "transport": {"rows", "blocks", "errors"},
    "blocks": {"rows", "tables", "errors"},
    "answers": {"row_copies", "rows", "tables"},
    "tables": set(),
    "arrow_columns": set(),
    "seeding": set(),
    "retry": {"errors"},
    "failures": {"display", "rows", "errors"},
    "display": set(),
    "row_copies": {"rows", "blocks"},
    "rows": {"forks", "errors"},
    "forks": set(),
    "errors": set(),
    "version": set(),
}

# What decides, and does nothing: values and the time go in, values come out.
PURE = [
    "batching/*.py",
    *(f"models/{name}.py" for name in ("front", "dispatch", "hunt", "host_batches", "measures", "commands")),
    *(f"models/{name}.py" for name in ("budget", "evictions", "fronts", "residency", "uses", "keyed_models")),
    *(f"models/{name}.py" for name in ("outcome", "place", "reruns", "room", "versions")),
    "io/new_models.py",
    *(f"run/{name}.py" for name in ("plan", "schedule", "locality", "thresholds", "throttling", "accounting", "outcomes")),
    "run/short_jobs.py",
    "steps/stage.py",
    "observe/pace.py",
    *(f"remote/{name}.py" for name in ("budget", "contents", "pace", "openai_format", "json_schema", "kserve")),
]
ACTING = {
    "os",
    "io",
    "time",
    "socket",
    "threading",
    "subprocess",
    "queue",
    "selectors",
    "signal",
    "random",
    "shutil",
    "tempfile",
}


def layer_of(module: str) -> str:
    """The layer of a module below penstock, such as "engines.local" for engines.local.worker."""
    parts = module.split(".")
    inner = ".".join(parts[:2])
    return inner if inner in LAYERS else parts[0]


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def runtime_imports(path):
    """The parts of penstock that a file imports, except for type checking only."""
    found, waiting = [], [tree_of(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found += [name.removeprefix("penstock.") for name in names if name.startswith("penstock.")]
        waiting += [
            each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt | ast.excepthandler | ast.match_case)
        ]
    return found


def drawn_tree(text):
    """The errors that a drawing of branches names, each with the one that it hangs on."""
    above, found = [], {}
    for bars, name in re.findall(r"^((?:[|' ]  ?|[|']- )*)(\w+Error)\b", text, re.M):
        depth = len(bars) // 3
        found[name] = above[depth - 1] if depth else "Exception"
        above[depth:] = [name]
    return found


def test_the_drawn_tree_of_errors_is_the_tree():
    for path in SOURCE.rglob("*.py"):  # an error may stand anywhere
        tree = tree_of(path)
        names = [each.name for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]
        if path.name != "errors.py":
            assert [name for name in names if name.endswith("Error")] == [], f"{path.name}: errors stand in errors.py"
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert drawn_tree(errors.__doc__) == {each.__name__: each.__bases__[0].__name__ for each in classes}


def test_imports_go_down_only():
    wrong = []
    for path in SOURCE.rglob("*.py"):
        layer = layer_of(".".join(path.relative_to(SOURCE).with_suffix("").parts))
        if layer != "__init__":
            wrong += [
                f"{path.relative_to(SOURCE)}: {layer} -> {used}"
                for used in map(layer_of, runtime_imports(path))
                if used not in {layer, *LAYERS[layer]}
            ]
    assert wrong == []


def test_every_folder_is_a_layer():
    folders = {".".join(path.parent.relative_to(SOURCE).parts) for path in SOURCE.rglob("__init__.py")} - {""}
    files = {path.stem for path in SOURCE.glob("*.py")} - {"__init__"}
    assert folders | files == set(LAYERS)


def test_only_the_table_of_engines_knows_the_local_engine():
    outside = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "engines"]
    named = [path.name for path in outside if "engines.local" in map(layer_of, runtime_imports(path))]
    assert named == []


def test_nothing_knows_the_beam_layer():
    outside = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "beam"]
    assert [path.name for path in outside if "beam" in map(layer_of, runtime_imports(path))] == []


def test_an_inference_knows_no_transform():
    """Other engines run it from a spec; only this file makes a step of a pipeline of it."""
    inside = [path for path in (SOURCE / "inference").glob("*.py") if path.name != "transform.py"]
    assert len(inside) > 10
    assert [path.name for path in inside if "inference.transform" in path.read_text()] == []


def test_what_decides_imports_nothing_that_acts():
    modules = sorted(path for pattern in PURE for path in SOURCE.glob(pattern))
    assert len(modules) >= len(PURE)
    wrong = []
    for path in modules:
        for node in ast.walk(tree_of(path)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            wrong += [f"{path.relative_to(SOURCE)}: {name}" for name in names if name.split(".")[0] in ACTING]
    assert wrong == []


def test_what_says_that_it_is_pure_is_in_the_list():
    assert len(set(PURE)) == len(PURE)
    listed = {path for pattern in PURE for path in SOURCE.glob(pattern)}
    told = {path for path in SOURCE.rglob("*.py") if re.search(r"\bPure[.:,]", ast.get_docstring(tree_of(path)) or "")}
    assert told - listed == set()


def test_settings_of_handlers_are_the_arguments_of_a_handler():
    """They are written twice, for types and for help(): in one order, with the same types."""
    arguments = {
        name: each.annotation
        for name, each in inspect.signature(penstock.ModelHandler.__init__).parameters.items()
        if name not in ("self", "unknown")
    }
    settings = {name: each.__forward_arg__ for name, each in penstock.HandlerSettings.__annotations__.items()}
    assert {name: kind.replace("[Any]", "[ExampleT]") for name, kind in settings.items()} == {
        name: kind.replace("[Any]", "[ExampleT]") for name, kind in arguments.items()
    }


def test_no_class_has_more_than_25_methods():
    """But for the contract of a handler, and what derives from it."""
    many = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
                is_handler = any(re.match(r"(\w+\.)*ModelHandler\b", ast.unparse(base)) for base in node.bases)
                if methods > 25 and node.name != "ModelHandler" and not is_handler:
                    many[node.name] = methods
    assert many == {}


def test_files_and_functions_stay_small():
    large = []
    for path in SOURCE.rglob("*.py"):
        lines = len(path.read_text().splitlines())
        large += [(path.relative_to(SOURCE).as_posix(), lines)] if lines > 400 else []
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno + 1 > 60:
                large.append((f"{path.relative_to(SOURCE).as_posix()}: {node.name}", node.end_lineno - node.lineno + 1))
    assert large == []


def test_no_two_classes_have_one_name():
    """But for those that penstock.beam offers under the names of Apache Beam."""
    homes = collections.defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        if path.parent.name != "beam":
            for node in tree_of(path).body:
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(path.relative_to(SOURCE).as_posix())
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_no_name_in_the_code_is_one_that_the_glossary_refuses():
    """Single words of its last column which mean nothing else: the others have a meaning of their own in Python."""
    refused = {"parcel", "parcels", "executor", "executors", "replica", "replicas", "shard", "shards"}
    glossary = (SOURCE.parents[1] / "docs" / "design.md").read_text().partition("## Glossary")[2].partition("## Layers")[0]
    assert refused <= {word + "s" * plural for word in re.findall(r"\w+", glossary) for plural in (False, True)}
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            for name in (getattr(node, field, None) for field in ("name", "id", "attr", "arg")):
                words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name) if isinstance(name, str) else []
                if refused & {word.lower() for word in words} and not re.match(r"(Thread|Process)PoolExecutor$", name):
                    found.add(f"{path.relative_to(SOURCE).as_posix()}: {name}")
    assert found == set()
