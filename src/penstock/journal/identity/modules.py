"""Modules: whose they are, and those of the user's as files, since one process may have loaded what the next has not."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from itertools import accumulate
from typing import Literal, TypeAlias

from penstock.journal.identity.bytecode import Import

Contents: TypeAlias = tuple[str, list[Import]]  # of a file: a digest, and what it imports
Origin: TypeAlias = Literal["user", "library", "known"]

DIGEST_BYTES = 8
SCRIPTS = ("__main__", "__mp_main__")  # the user's script; the second in a process that multiprocessing spawned
_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")


def origin_of(module: object) -> Origin:
    """Whose a module is, by its name and its file: the user's, an installed package's, or Python's and our own.

    What is Python's or ours is known by its name alone, so that a patch release changes nothing.
    """
    name = module if isinstance(module, str) else ""
    return "user" if name in SCRIPTS else _origin(name, getattr(sys.modules.get(name), "__file__", None))


def _origin(name: str, file: str | None) -> Origin:
    file = file or ""
    top = name.partition(".")[0]
    is_elsewhere = file.endswith(".py") and not file.startswith(_STANDARD_LIBRARY)  # named alike, beside a script
    if top == "penstock" or (top in sys.stdlib_module_names and not is_elsewhere):
        return "known"
    return "library" if "site-packages" in file or "dist-packages" in file else "user"


def imported(each: Import, package: str) -> list[str]:
    """The names of the modules that an import may load: in `from a import b`, b may be one."""
    module = each.module
    if each.level:
        try:
            module = importlib.util.resolve_name("." * each.level + module, package)
        except ImportError:
            return []
    if each.names is None:
        return list(accumulate(module.split("."), lambda start, part: f"{start}.{part}"))
    return [module, *(f"{module}.{name}" for name in each.names)]


def file_of(name: str) -> str | None:
    """The file of a module, if it is the user's; the same before and after it is loaded. Nothing is imported for it."""
    if name in SCRIPTS:
        return None
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
        for part in rest:
            if spec is None or not spec.submodule_search_locations or _origin(top, spec.origin) != "user":
                return None
            spec = PathFinder.find_spec(f"{spec.name}.{part}", list(spec.submodule_search_locations))
    except Exception:  # whatever is in the way of an import: it is not ours to tell
        spec = None
    file = spec.origin if spec is not None and spec.has_location else getattr(sys.modules.get(name), "__file__", None)
    return file if file and _origin(name, file) == "user" else None


def contents_of(file: str) -> Contents:
    """What is in the file of a module, but for comments, layout and docstrings."""
    try:
        stat = os.stat(file)
        return _contents(file, stat.st_mtime_ns, stat.st_size)
    except OSError:
        return "", []


@functools.lru_cache(maxsize=1000)
def _contents(file: str, *stamps: int) -> Contents:
    with open(file, "rb") as opened:
        data = opened.read()
    imports: list[Import] = []
    try:
        tree = ast.parse(data)
        for node in ast.walk(tree):
            match node:
                case ast.Import():
                    imports += [Import(alias.name, None, 0) for alias in node.names]
                case ast.ImportFrom():
                    imports.append(Import(node.module or "", tuple(alias.name for alias in node.names), node.level))
                case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    if ast.get_docstring(node, clean=False) is not None:
                        del node.body[0]
        data = ast.dump(tree).encode("utf-8", "surrogatepass")
    except (SyntaxError, ValueError, RecursionError):  # not written in Python
        pass
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest(), imports
