"""The tests themselves: they use what users can use, and those of tests/pure start no process."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("*.py"))
# What others gave a name that begins so, and a user may use: notebooks, the standard library, named tuples, torch.
OTHERS = {"_repr_html_", "_exit", "_replace", "_asdict", "_fields", "_get_current_function_mode"}
OWN = {"self", "cls", "super", "sys"}  # a test may have private names of its own
ACTS = {"subprocess", "multiprocessing", "socket"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OTHERS


def private_names(tree: ast.AST) -> list[str]:
    """Those that are asked of another object, imported from penstock, or replaced in it."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_own(node.value):
            found.append(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if called in ("getattr", "setattr", "delattr", "hasattr"):
                found += [each.value.rpartition(".")[2] for each in node.args[:2] if is_text(each)]
    return [name for name in found if is_private(name)]


def is_own(value: ast.expr) -> bool:
    value = value.func if isinstance(value, ast.Call) else value
    return isinstance(value, ast.Name) and value.id in OWN


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize(
    "code",
    [
        "p._nodes",
        "session.models()._front.rows",
        "from penstock.cli import _flags",
        "monkeypatch.setattr(Address, '_started', f)",
        "monkeypatch.setattr('penstock.cli._flags', f)",
    ],
)
def test_a_private_name_is_found(code: str) -> None:
    assert private_names(ast.parse(code))


def test_no_test_reaches_for_a_private_name() -> None:
    """One that has to asks for a public one."""
    assert len(FILES) > 100
    found = {str(path.relative_to(TESTS)): private_names(ast.parse(path.read_text())) for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


def test_pure_tests_start_no_process() -> None:
    wrong = []
    for path in sorted((TESTS / "pure").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = node.module if isinstance(node, ast.ImportFrom) else None
                names = {(module or alias.name).partition(".")[0] for alias in node.names}
                wrong += [f"{path.name}: imports {name}" for name in names & ACTS]
            elif isinstance(node, ast.FunctionDef) and "pipeline" in {each.arg for each in node.args.args}:
                wrong.append(f"{path.name}: {node.name} runs with worker processes, too")
    assert wrong == []


def names_of_the_clone(tree: ast.AST) -> list[int]:
    """The lines with a bare "penstock/", which is in every path of a clone that has that name."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in inside]
    return [node.lineno for node in texts if node.value in ("penstock" + "/", "/penstock" + "/")]


def test_no_test_depends_on_the_name_of_the_clone() -> None:
    """Paths of the library's own begin with the folder of penstock.__file__."""
    assert names_of_the_clone(ast.parse("assert 'penstock/' not in traceback"))
    found = {str(path.relative_to(TESTS)): names_of_the_clone(ast.parse(path.read_text())) for path in FILES}
    assert {path: lines for path, lines in found.items() if lines} == {}
