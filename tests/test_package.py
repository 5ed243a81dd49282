"""The package as a whole: its public face, what importing it costs, and which layer may know which."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import penstock
import penstock.testing

SOURCE = Path(penstock.__file__).parent

# A layer may import itself and what stands to the right of it here. Lower layers know nothing of higher ones.
LAYERS = {
    "cli": {
        *("engines", "inference", "io", "observe", "pipeline", "options", "transport", "rows", "blocks", "errors"),
        "version",
    },
    "engines": {
        *("inference", "io", "models", "batching", "observe", "pipeline", "options", "transport"),
        *("seeding", "retry", "failures", "row_copies", "forks", "rows", "blocks", "crashes", "errors", "version"),
    },
    "testing": {"inference", "io", "pipeline", "rows", "blocks", "errors"},
    "handlers": {"inference", "rows", "blocks", "errors"},
    "inference": {
        *("models", "batching", "observe", "pipeline"),
        *("transport", "seeding", "retry", "failures", "row_copies", "forks", "rows", "blocks", "errors"),
    },
    "io": {"pipeline", "failures", "rows", "blocks", "crashes", "errors"},
    "pipeline": {"batching", "options", "retry", "failures", "errors"},
    "models": {"failures", "batching", "transport", "rows", "blocks", "errors"},
    "batching": {"errors"},
    "observe": {"errors"},
    "options": {"errors"},
    "transport": {"rows", "blocks", "errors"},
    "blocks": {"rows", "errors"},
    "seeding": set(),
    "retry": {"errors"},
    "failures": {"rows", "errors"},
    "row_copies": {"blocks"},
    "rows": {"forks", "errors"},
    "forks": set(),
    "crashes": set(),
    "errors": set(),
    "version": set(),
}


def runtime_imports(path):
    """The parts of penstock that a file imports, except for type checking only."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.startswith("penstock."):
                yield name.split(".")[1]


def test_imports_go_down_only():
    wrong = []
    for path in SOURCE.rglob("*.py"):
        layer = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if layer != "__init__":
            wrong += [
                f"{path.name}: {layer} -> {used}" for used in runtime_imports(path) if used not in {layer, *LAYERS[layer]}
            ]
    assert wrong == []
    assert {path.name.removesuffix(".py") for path in SOURCE.iterdir()} - {"__init__", "__pycache__", "py.typed"} == set(
        LAYERS
    )


def test_all_is_sorted_and_complete():
    for module in (penstock, penstock.testing):
        public = {name for name, value in vars(module).items() if not name.startswith("_") and not is_module(value)}
        assert list(module.__all__) == sorted(module.__all__)
        assert set(module.__all__) - {"__version__"} == public


def is_module(value):
    return type(value).__name__ == "module"


def test_importing_penstock_imports_no_framework():
    script = "import sys, penstock; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    heavy = {
        "torch",
        "sklearn",
        "numpy",
        "pandas",
        "pyarrow",
        "fsspec",
        "ray",
        "apache_beam",
        "transformers",
        "sqlalchemy",
        "psycopg",
        "multiprocessing",
    }
    assert "penstock" in loaded
    assert heavy & set(loaded) == set()
