"""Code by files: the script, the modules of the user's that it imports, and functions that stand in no file.

A file counts by its syntax tree without docstrings and positions, so comments and layout leave no trace. Nothing is imported
to look at it: one process may have loaded what the next has not.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import linecache
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from itertools import accumulate
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import penstock

DIGEST_BYTES = 8
SCRIPTS = ("__main__", "__mp_main__")  # the user's script; the second in a process that multiprocessing spawned
_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_OURS = os.path.join(os.path.dirname(penstock.__file__), "")
_DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
_FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda


class _Source(NamedTuple):
    """What a text in Python holds."""

    digest: str
    imports: list[ast.Import | ast.ImportFrom]
    functions: dict[int, list[ast.AST]]  # by the line that they begin in


def digest_of(*parts: Any) -> str:
    return hashlib.blake2b(ascii(parts).encode(), digest_size=DIGEST_BYTES).hexdigest()


def script() -> str | None:
    """The user's script; None in notebooks, under pytest and in other tools, which are not the user's."""
    tools = {sysconfig.get_path("scripts"), os.path.dirname(sys.executable)}
    for file in (getattr(sys.modules.get("__main__"), "__file__", None), *sys.argv[:1]):  # the second of `penstock run`
        path = os.path.abspath(file or "")
        if os.path.isfile(path) and os.path.dirname(path) not in tools and not _is_installed("__main__", path):
            return path
    return None


def is_users(module: object) -> bool:
    """Whether a module is the user's, by its name: not Python's, not ours, not in site-packages."""
    name = module if isinstance(module, str) else ""
    return name in SCRIPTS or not _is_installed(name, getattr(sys.modules.get(name), "__file__", None))


def _is_installed(name: str, file: str | None) -> bool:
    file = file or ""
    top = name.partition(".")[0]
    is_elsewhere = file.endswith(".py") and not file.startswith(_STANDARD_LIBRARY)  # named alike, beside a script
    if top == "penstock" or (top in sys.stdlib_module_names and not is_elsewhere):
        return True
    return file.startswith((_STANDARD_LIBRARY, _OURS)) or "site-packages" in file or "dist-packages" in file


def files_of(modules: Iterable[str]) -> dict[str, str]:
    """The digests of the script, of these modules, and of all that they import, where they are the user's; by file."""
    found: dict[str, str] = {}
    waiting = deque(["__main__", *sorted(modules)])
    names, paths = set(SCRIPTS[1:]), set()
    while waiting:
        name = waiting.popleft()
        if name in names:
            continue
        names.add(name)
        file = script() if name in SCRIPTS else _file_of(name)
        if file is None or (path := os.path.realpath(file)) in paths:
            continue
        paths.add(path)
        source = _source(_read(file))
        is_package = os.path.basename(file) == "__init__.py"
        shown = "/".join(file.split(os.sep)[-(name.count(".") + 1 + is_package) :])  # the same wherever the folder is
        found[shown] = found.get(shown, "") + source.digest
        package = name if is_package else name.rpartition(".")[0]
        if name in SCRIPTS:
            package = getattr(sys.modules.get(name), "__package__", None) or ""
        waiting += imported(source.imports, package)
    return found


def imported(imports: Iterable[ast.Import | ast.ImportFrom], package: str) -> Iterator[str]:
    """The names of the modules that imports may load: in `from a import b`, b may be one."""
    for each in imports:
        if isinstance(each, ast.Import):
            for alias in each.names:
                yield from accumulate(alias.name.split("."), lambda start, part: f"{start}.{part}")
            continue
        try:
            module = importlib.util.resolve_name("." * each.level + (each.module or ""), package)
        except ImportError:
            continue
        yield from accumulate(module.split("."), lambda start, part: f"{start}.{part}")
        yield from (f"{module}.{alias.name}" for alias in each.names)


def _file_of(name: str) -> str | None:
    """The file of a module, if it is the user's; the same before and after it is loaded. Nothing is imported for it."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
        for part in rest:
            if spec is None or not spec.submodule_search_locations or _is_installed(top, spec.origin):
                return None
            spec = PathFinder.find_spec(f"{spec.name}.{part}", list(spec.submodule_search_locations))
    except Exception:  # whatever is in the way of an import: it is not ours to tell
        spec = None
    file = spec.origin if spec is not None and spec.has_location else getattr(sys.modules.get(name), "__file__", None)
    return file if file and not _is_installed(name, file) else None


def _read(file: str) -> bytes:
    """A file, or what a notebook has kept of a cell under that name; empty if there is neither."""
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except OSError:
        return "".join(linecache.getlines(file)).encode("utf-8", "surrogatepass")


@functools.lru_cache(maxsize=1000)
def _source(data: bytes) -> _Source:
    imports: list[ast.Import | ast.ImportFrom] = []
    functions: dict[int, list[ast.AST]] = {}
    try:
        tree = ast.parse(data)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imports.append(node)
            if isinstance(node, _FUNCTIONS):
                first = min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))
                functions.setdefault(first, []).append(node)
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                del node.body[0]
        return _Source(digest_of(_plain(tree)), imports, functions)
    except (SyntaxError, ValueError, RecursionError):  # not written in Python
        return _Source(digest_of(data), [], {})


def _plain(node: Any) -> Any:
    """A syntax tree as tuples, without positions, and without what is empty: that differs between versions of Python."""
    if isinstance(node, list):
        return [_plain(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, _plain(value)) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return type(node).__name__, *fields


# Functions.


def stands_in_file(function: FunctionType) -> bool:
    return os.path.isfile(function.__code__.co_filename)


def function_source(function: FunctionType) -> tuple[str, list[str]]:
    """The digest of a function's own source, else of its code, and the modules that it imports in its body."""
    code = function.__code__
    nodes = _source(_read(code.co_filename)).functions.get(code.co_firstlineno)
    if not nodes:
        return digest_of(_instructions(code)), []
    if len(nodes) > 1:  # lambdas in one line
        spans = set(code.co_positions())
        nodes = [node for node in nodes if isinstance(node, ast.Lambda) and _span(node.body) in spans] or nodes
    imports = [each for node in nodes for each in ast.walk(node) if isinstance(each, (ast.Import, ast.ImportFrom))]
    package = str(function.__globals__.get("__package__") or "")
    return digest_of(_plain(nodes)), list(imported(imports, package))


def _span(node: ast.expr) -> tuple[int, int | None, int, int | None]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _instructions(code: CodeType) -> Any:
    constants = [_instructions(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    constants = [sorted(map(ascii, each)) if isinstance(each, frozenset) else each for each in constants]
    return code.co_code, code.co_names, code.co_varnames, constants


def names_in(code: CodeType) -> set[str]:
    """The globals and attributes that a function names, and those inside it."""
    inner = [names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)
