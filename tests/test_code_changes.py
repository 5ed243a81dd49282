"""What of a pipeline's code is looked at: data, imports, modules, where errors are caught; and how a script was started."""

from __future__ import annotations

import importlib
import os
import pickle
import runpy
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from sklearn.linear_model import LinearRegression

import penstock as ps
from penstock.handlers.sklearn import ModelFileType, SklearnModelHandlerNumpy
from penstock.io.source import FileSource
from penstock.journal.identity import changes, describe_run
from penstock.journal.identity.values import digests
from penstock.pipeline.pipeline import Graph
from penstock.run.plan import make_plan


def cell(source):
    """The digests of the function `fn` of a source."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent(source), space)
    return digests("fn", space["fn"])


def texts(*pipelines):
    """What differs between two pipelines."""
    graphs = [Graph(p._nodes) for p in pipelines]
    return [change.text for change in changes(*(describe_run(graph, make_plan(graph)) for graph in graphs))]


# Data of Python's own types, and of types derived from them.

DATA = {
    "a namespace of arguments": ("import argparse", "argparse.Namespace(k={})"),
    "a namespace": ("import types", "types.SimpleNamespace(k=[{}])"),
    "a namespace of the user's": ("import argparse\nclass Args(argparse.Namespace): pass", "Args(k={})"),
    "a view of a dict": ("import types", "types.MappingProxyType({{'k': {}}})"),
    "a chain of dicts": ("import collections", "collections.ChainMap({{}}, {{'k': {}}})"),
    "a dict's stand-in": ("import collections", "collections.UserDict(k={})"),
    "a template": ("import string", "string.Template('{} $x')"),
    "an id": ("import uuid", "uuid.UUID(int={})"),
    "a network": ("import ipaddress", "ipaddress.ip_network('10.0.{}.0/24')"),
    "settings": ("import configparser\nC = configparser.ConfigParser()\nC.read_string('[a]\\nk=%({})s')", "C"),
    "a section": ("import configparser\nC = configparser.ConfigParser()\nC.read_string('[a]\\nk={}')", "C['a']"),
    "a text of the user's": ("class Prompt(str): pass", "Prompt('{}')"),
    "a number of the user's": ("class W(int): pass", "W({})"),
    "a float of the user's": ("class W(float): pass", "W({})"),
    "bytes of the user's": ("class B(bytes): pass", "B(b'{}')"),
    "an attribute of a text": ("class P(str): pass\np = P('a')\np.k = {}", "p"),
    "an attribute of a dict": ("class D(dict): pass\nd = D()\nd.k = {}", "d"),
    "a decimal of the user's": ("import decimal\nclass M(decimal.Decimal):\n    def k(self): return {}", "M(1)"),
    "a metaclass": ("class M(type):\n    def k(cls): return {}\nclass T(metaclass=M): pass", "T"),
    "a method with arguments": ("import functools\nclass T:\n    k = functools.partialmethod(print, {})", "T"),
}
PLACES = {
    "a global": "VALUE = {value}\ndef fn(row): return VALUE",
    "a closure": "def made(value): return lambda row: value\nfn = made({value})",
    "a default": "def fn(row, value={value}): return value",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", DATA)
def test_data_counts_by_value(kind, place):
    first, value = DATA[kind]

    def made(k):
        return cell(f"{first.format(k)}\n{PLACES[place].format(value=value.format(k))}")

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_settings_of_a_step_count_by_value():
    class Prompt(str):
        pass

    class Asks(ps.ModelHandler):
        def __init__(self, prompt):
            super().__init__()
            self.prompt = prompt

    def asking(prompt):
        p = ps.Pipeline()
        p | ps.Create([1]) | "ask" >> ps.RunInference(Asks(Prompt(prompt)))
        return p

    assert texts(asking("a"), asking("a")) == []
    assert texts(asking("a"), asking("b")) == ["handler of step 'ask': prompt is another"]


def test_private_settings_of_sources_and_sinks_of_the_user():
    class Own(ps.Source):
        def __init__(self, n):
            self._n = n

    class Files(FileSource):
        def __init__(self, n):
            super().__init__("/in/*.txt")
            self._n = n

    def reading(source):
        p = ps.Pipeline()
        p | "read" >> ps.Read(source) | ps.Map(str)
        return p

    for cls in (Own, Files):
        assert texts(reading(cls(1)), reading(cls(1))) == []
        assert texts(reading(cls(1)), reading(cls(2))) == ["step 'read': _n is another"]
    one, other = Files(1), Files(1)
    other._files = []  # what it found out
    assert texts(reading(one), reading(other)) == []


# Modules.


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Writes modules, each time as a new process would find them: none is loaded."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(sys.modules)

    def write(**sources):
        for name, source in sources.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(source))
            os.utime(path, ns=(0, write.time))
            write.time += 1
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        importlib.invalidate_caches()

    write.time = 0
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield write
    write()
    sys.modules.update(before)


HELPER = "def g(row):\n    return row + {}\n"
IMPORTS = {
    "a name": "def fn(row):\n    from helpers_m import g\n    return g(row)",
    "a module": "def fn(row):\n    import helpers_m\n    return helpers_m.g(row)",
    "by another": "def fn(row):\n    import other_m\n    return other_m.g(row)",
    "of a package": "def fn(row):\n    from package_m import g\n    return g(row)",
    "a part of a package": "def fn(row):\n    from package_m import part\n    return part.g(row)",
    "by its full name": "def fn(row):\n    import package_m.part as p\n    return p.g(row)",
    "in a function inside": "def fn(row):\n    def inner():\n        import helpers_m\n    return inner()",
    "in a helper's helper": "import third_m\ndef fn(row):\n    return third_m.go(row)",
    "in a method": "class T:\n    def load(self):\n        import helpers_m\ndef fn(row):\n    return T()",
    "held in a variable": "import helpers_m\ndef fn(row):\n    h = helpers_m\n    return h.g(row)",
    "by getattr": "import helpers_m\ndef fn(row):\n    return getattr(helpers_m, 'g')(row)",
    "in a closure": "import helpers_m\ndef made(m): return lambda row: m.g(row)\nfn = made(helpers_m)",
    "as a default": "import helpers_m\ndef fn(row, m=helpers_m): return m.g(row)",
    "in a dict": "import helpers_m\nD = {'m': helpers_m}\ndef fn(row): return D['m'].g(row)",
}


@pytest.mark.parametrize("form", IMPORTS)
def test_modules_that_functions_import_or_hold_count_as_files(files, form):
    def written(helper):
        files(
            helpers_m=helper,
            other_m="try:\n    from helpers_m import *\nexcept ImportError:\n    pass",
            third_m="def go(row):\n    return step(row)\ndef step(row):\n    from helpers_m import g\n    return g(row)",
            **{"package_m/__init__": "from .part import g", "package_m/part": helper},
        )

    written(HELPER.format(1))
    before = cell(IMPORTS[form])
    for name in ("helpers_m", "other_m", "package_m.part"):
        importlib.import_module(name)
    assert cell(IMPORTS[form]) == before
    written('"""About it."""\n\n# A comment\n' + HELPER.format(1))
    assert cell(IMPORTS[form]) == before
    written(HELPER.format(2))
    assert cell(IMPORTS[form]) != before


def test_nothing_is_imported_to_look_at_it(files):
    files(
        helpers_m="raise SystemExit",
        bad_m="this is no Python",
        **{"package_m/__init__": "raise SystemExit", "package_m/part": ""},
    )
    source = "def fn(row):\n    import {}\n"
    for name in ("helpers_m", "bad_m", "package_m.part", "package_m.none", "none_m"):
        found = cell(source.format(name))
        assert not {"helpers_m", "bad_m", "package_m", "package_m.part"} & sys.modules.keys()
        assert ("none" in name) is (f"fn: {name}" not in found)
    for name in ("json.decoder", "numpy.linalg", "penstock.errors"):
        assert cell(source.format(name)).keys() == {"fn"}


def test_imports_relative_to_a_package(files):
    def found(n):
        work = "def fn(row):\n    from . import part\n    from ..package_m.part import g\n    return g(row)"
        files(**{"package_m/__init__": "", "package_m/part": HELPER.format(n), "package_m/work": work})
        return digests("fn", importlib.import_module("package_m.work").fn)

    assert found(1) == found(1)
    assert found(1)["fn: package_m.part"] != found(2)["fn: package_m.part"]
    assert found(1)["fn: package_m.part"].startswith("module:")


def test_a_module_is_told_by_its_name(files):
    def using(n):
        files(helpers_m=HELPER.format(n))
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(IMPORTS["a name"], space)
        p = ps.Pipeline()
        p | ps.Create([1]) | "use" >> ps.Map(space["fn"])
        graph = Graph(p._nodes)
        return describe_run(graph, make_plan(graph))

    [change] = changes(using(1), using(2))
    assert change.text == "step 'use': the module helpers_m, which its function uses, was changed"


@pytest.mark.parametrize(
    "source", ["import profile\ndef fn(row):\n    return profile.g(row)", "import profile\nfn = profile.g"]
)
def test_a_module_of_the_user_that_is_named_like_one_of_python_s(files, monkeypatch, source):
    monkeypatch.delitem(sys.modules, "profile", raising=False)
    found = []
    for n in (1, 2):
        files(profile=HELPER.format(n))
        sys.modules.pop("profile", None)
        found.append(cell(source))
    sys.modules.pop("profile", None)
    assert found[0] != found[1]


# Where errors are caught.


@pytest.mark.parametrize("block", ["try:", "with contextlib.suppress(Exception):"])
def test_a_statement_that_moves_into_a_block(block):
    end = "    except Exception:\n        return None\n" if block == "try:" else ""
    outside = f"def fn(row):\n    a = int(row)\n    {block}\n        return go(a)\n{end}"
    inside = f"def fn(row):\n    {block}\n        a = int(row)\n        return go(a)\n{end}"
    start = "import contextlib\ndef go(row): return row\n"
    assert cell(start + outside) == cell(
        start + outside.replace("a = int(row)", "# before\n    a = int(\n        row\n    )")
    )
    assert cell(start + outside) != cell(start + inside)


def test_a_statement_that_moves_out_of_a_block():
    start = "def go(row): return row\ndef fn(row):\n    try:\n        a = int(row)\n"
    within = "        b = go(a)\n    except ValueError:\n        return None\n    return b\n"
    after = "    except ValueError:\n        return None\n    b = go(a)\n    return b\n"
    assert cell(start + within) != cell(start + after)


# How a script is started.

SCRIPT = """
import dataclasses, enum
from pathlib import Path

HERE = Path(__file__).parent

@dataclasses.dataclass
class Point:
    x: int = 1

class Mode(enum.Enum):
    FAST = 1

def fn(row):
    return Point(), repr(Point(2)), Mode.FAST, HERE

POINT = Point(3)
"""


def test_scripts_that_are_run_and_imported(files, tmp_path):
    files(script_m=SCRIPT)
    path = str(tmp_path / "script_m.py")
    spaces = [
        runpy.run_path(path, run_name="__main__"),
        runpy.run_path(path),
        vars(importlib.import_module("script_m")),
    ]
    first, second, third = (digests("fn", space["fn"]) for space in spaces)
    assert first == second == third


def test_a_script_has_one_path_wherever_it_is_started_from(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "p.py").write_text("import penstock as ps\nprint(__file__)\nps.Pipeline(workers=0)\n1 / 0\n")

    def shown(folder, *command):
        done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
        assert done.stderr.startswith("Traceback (most recent call last):\n  File")
        assert done.stderr.count("  File ") == 1
        return done.stdout, done.stderr

    command = ("-m", "penstock.cli", "run")
    first = shown(tmp_path, *command, "sub/p.py")
    assert first[0] == f"{tmp_path}/sub/p.py\n"
    assert first == shown(tmp_path / "sub", *command, "p.py") == shown(tmp_path / "sub", "p.py")


def test_files_of_a_model_have_one_path(tmp_path, monkeypatch):
    (tmp_path / "m.pkl").write_bytes(pickle.dumps(LinearRegression()))
    (tmp_path / "other.pkl").write_bytes(pickle.dumps(LinearRegression()))
    monkeypatch.chdir(tmp_path)

    def using(path):
        p = ps.Pipeline()
        p | ps.Create([1]) | "s" >> ps.RunInference(SklearnModelHandlerNumpy(path, ModelFileType.PICKLE, trusted=True))
        return p

    assert texts(using("m.pkl"), using(str(tmp_path / "m.pkl"))) == []
    assert texts(using("m.pkl"), using(tmp_path / "m.pkl")) == []
    assert texts(using("m.pkl"), using("other.pkl")) == ["handler of step 's': model_uri is another"]
