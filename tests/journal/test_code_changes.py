"""What of a pipeline's code is compared: the script, its arguments, the modules that it imports, cells of notebooks."""

from __future__ import annotations

import importlib
import linecache
import os
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from sklearn.linear_model import LinearRegression

import penstock as ps
from penstock.cli import own_flags
from penstock.handlers.sklearn import ModelFileType, SklearnModelHandlerNumpy
from penstock.io.source import FileSource
from penstock.journal.identity import changes, describe_run
from penstock.journal.identity.run import OWN_FLAGS, OWN_SWITCHES
from penstock.run.plan import make_plan


def described(p):
    graph = p.graph()
    return describe_run(graph, make_plan(graph))


def using(fn):
    """What a run that maps rows with this function is."""
    p = ps.Pipeline()
    p | ps.Create([1]) | "use" >> ps.Map(fn)
    return described(p)


def texts(*pipelines):
    """What differs between two pipelines."""
    return [change.text for change in changes(*map(described, pipelines))]


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
    assert texts(asking("a"), asking("b")) == ["handler of step 'ask': prompt has changed"]


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
        assert texts(reading(cls(1)), reading(cls(2))) == ["step 'read': _n has changed"]
    one, other = Files(1), Files(1).among([])  # what it found out
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
    "a name": ("from helpers_m import g\ndef fn(row):\n    return g(row)", "helpers_m.py"),
    "a module": ("import helpers_m\ndef fn(row):\n    return helpers_m.g(row)", "helpers_m.py"),
    "in a function": ("def fn(row):\n    import helpers_m\n    return helpers_m.g(row)", "helpers_m.py"),
    "a name in a function": ("def fn(row):\n    from helpers_m import g\n    return g(row)", "helpers_m.py"),
    "in a method": ("class T:\n    def load(self):\n        import helpers_m\ndef fn(row):\n    return T()", "helpers_m.py"),
    "by another": ("import other_m\ndef fn(row):\n    return other_m.g(row)", "helpers_m.py"),
    "of a package": ("from package_m import g\ndef fn(row):\n    return g(row)", "package_m/part.py"),
    "a part of a package": ("from package_m import part\ndef fn(row):\n    return part.g(row)", "package_m/part.py"),
    "by its full name": ("import package_m.part as p\ndef fn(row):\n    return p.g(row)", "package_m/part.py"),
    "the package itself": ("import package_m.part\ndef fn(row):\n    return row", "package_m/__init__.py"),
}


@pytest.mark.parametrize("form", IMPORTS)
def test_modules_that_are_imported_count_as_files(files, form):
    source, file = IMPORTS[form]

    def found(helper):
        files(
            work_m=source,
            helpers_m=helper,
            other_m="try:\n    from helpers_m import *\nexcept ImportError:\n    pass",
            **{"package_m/__init__": f"{helper}from .part import g", "package_m/part": helper},
        )
        return using(importlib.import_module("work_m").fn)

    before = found(HELPER.format(1))
    assert {"work_m.py", file} <= before.files.keys()
    for name in ("helpers_m", "other_m", "package_m.part"):
        importlib.import_module(name)
    assert using(sys.modules["work_m"].fn) == before, "whether it is loaded does not matter"
    assert found('"""About it."""\n\n# A comment\n' + HELPER.format(1)) == before
    changed = [change.text for change in changes(before, found(HELPER.format(2)))]
    assert f"{file} was changed" in changed
    assert "work_m.py was changed" not in changed


def test_nothing_is_imported_to_look_at_it(files):
    files(
        work_m="def fn(row):\n    import helpers_m, bad_m, package_m.part, package_m.none, none_m, json, numpy, penstock",
        helpers_m="raise SystemExit",
        bad_m="this is no Python",
        **{"package_m/__init__": "raise SystemExit", "package_m/part": ""},
    )
    found = using(importlib.import_module("work_m").fn)
    assert not {"helpers_m", "bad_m", "package_m", "package_m.part"} & sys.modules.keys()
    assert found.files.keys() == {"work_m.py", "helpers_m.py", "bad_m.py", "package_m/__init__.py", "package_m/part.py"}


def test_imports_relative_to_a_package(files):
    def found(n):
        work = "def fn(row):\n    from . import part\n    from ..package_m.part import g\n    return g(row)"
        files(**{"package_m/__init__": "", "package_m/part": HELPER.format(n), "package_m/work": work})
        return using(importlib.import_module("package_m.work").fn)

    assert changes(found(1), found(1)) == []
    assert [change.text for change in changes(found(1), found(2))] == ["package_m/part.py was changed"]


def test_packages_that_are_installed_are_not_looked_at(files, tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    files(
        work_m="import installed_m\ndef fn(row): pass", **{"site-packages/installed_m": "import helpers_m", "helpers_m": ""}
    )
    work = importlib.import_module("work_m")
    assert using(work.fn).files.keys() == {"work_m.py"}
    assert using(work.installed_m.helpers_m.__loader__.get_data).files == {}


def test_a_module_of_the_user_that_is_named_like_one_of_python_s(files, monkeypatch):
    monkeypatch.delitem(sys.modules, "profile", raising=False)
    files(work_m="import profile\ndef fn(row):\n    return profile.g(row)", profile=HELPER.format(1))
    assert using(importlib.import_module("work_m").fn).files.keys() == {"work_m.py", "profile.py"}
    sys.modules.pop("profile", None)


def test_classes_of_steps_lead_to_their_modules(files):
    """A handler, a DoFn or a source of the user's counts with the file that it is defined in."""

    def found(n):
        files(
            base_m=f"import penstock as ps\nclass Base(ps.ModelHandler):\n    def load_model(self): return {n}\n",
            handler_m="from base_m import Base\nclass Own(Base):\n    def run_inference(self, b, m, a=None): return b\n",
            dofn_m="import penstock as ps\nclass Own(ps.DoFn):\n    def process(self, element): return [element]\n",
        )
        p = ps.Pipeline()
        rows = p | ps.Create([1]) | ps.ParDo(importlib.import_module("dofn_m").Own())
        rows | ps.RunInference(importlib.import_module("handler_m").Own())
        return described(p)

    assert found(1).files.keys() == {"base_m.py", "handler_m.py", "dofn_m.py"}
    assert [change.text for change in changes(found(1), found(2))] == ["base_m.py was changed"]


# Notebooks, where there is no file.


def cell(source, keep=True):
    """What is defined after a cell was run, as a notebook does it."""
    source, name = textwrap.dedent(source), "<cell 1>"
    space: dict[str, Any] = {"__name__": "__main__"}
    linecache.cache.pop(name, None)
    if keep:
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), space)
    return space


CELL = """
    LIMIT = 3
    def helper(row):
        return row + LIMIT
    class Tok:
        size = 1
        def clean(self, row):
            return helper(row)
    def fn(row):
        return Tok().clean(row)
"""


@pytest.mark.parametrize("keep", [True, False], ids=["with its source", "without"])
def test_functions_of_cells_count_with_what_they_name(keep):
    before = using(cell(CELL, keep=keep)["fn"])
    assert changes(before, using(cell(CELL, keep=keep)["fn"])) == []
    assert changes(before, using(cell(f"# A comment\n{textwrap.dedent(CELL)}", keep=keep)["fn"])) == []
    for one, other in (
        ("row + LIMIT", "row - LIMIT"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("return helper(row)", "return row"),
        ("= 1", "= 2"),
    ):
        found = changes(before, using(cell(CELL.replace(one, other), keep=keep)["fn"]))
        assert [change.text for change in found] == ["step 'use': its function has changed"]


def test_modules_that_cells_use_count_as_files(files):
    def found(n, source):
        files(helpers_m=HELPER.format(n))
        return using(cell(source)["fn"])

    for source in ("import helpers_m\ndef fn(row): return helpers_m.g(row)", "def fn(row):\n    import helpers_m"):
        assert changes(found(1, source), found(1, source)) == []
        assert "helpers_m.py was changed" in [change.text for change in changes(found(1, source), found(2, source))]


# Scripts, and their arguments.

SCRIPT = """
import sys
import penstock as ps

def fail(row):
    import helpers_s
    return helpers_s.checked(row)

def unused():
    return 1

p = ps.Pipeline(workers=0)
p | ps.Create([1, 2, 3]) | ps.Map(fail) | ps.Map(str) | ps.WriteToText(sys.argv[1])
"""
FAILS = "def checked(row):\n    return 1 / 0\n"


@pytest.fixture
def script(tmp_path):
    """Runs a script that fails when it is run for the first time, and then with what has changed."""

    def run(*flags, source=SCRIPT, helper=FAILS, arguments=(), folder=tmp_path):
        (tmp_path / "script.py").write_text(source)
        (tmp_path / "helpers_s.py").write_text(helper)
        command = [sys.executable, "-B", "-m", "penstock.cli", "run", "--run-dir", tmp_path / "run", *flags]
        command += [tmp_path / "script.py", tmp_path / "out", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)

    assert "ZeroDivisionError" in run().stderr
    return run


def test_what_is_changed_is_named_by_its_file(script, tmp_path):
    changed = SCRIPT.replace("helpers_s.checked(row)", "row")
    told = script(source=changed)
    assert told.returncode == 2
    assert "  code: script.py was changed\n  code: step 'Map(fail)': its function has changed\n" in told.stderr
    told = script(helper="def checked(row):\n    return row\n").stderr
    assert "  code: helpers_s.py was changed\nrestore" in told
    told = script(source=SCRIPT.replace("return 1", "return 2")).stderr
    assert "  code: script.py was changed\nrestore" in told, "also where no step uses it"
    done = script("--accept-change", "code", source=changed)
    assert done.returncode == 0, done.stderr
    assert sorted("".join(path.read_text() for path in (tmp_path / "out").iterdir()).split()) == ["1", "2", "3"]


def test_comments_and_the_folder_and_flags_are_no_change(script, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    source = "# A comment\n" + SCRIPT.replace("def fail(row):", 'def fail(row):\n    """About it."""\n\n')
    told = script("--workers", "1", source=source, helper=f"# Another\n{FAILS}", folder=tmp_path / "elsewhere").stderr
    assert "ZeroDivisionError" in told


def test_other_arguments_are_another_run(script):
    told = script(arguments=["--limit", "hunter2"])
    assert told.returncode == 2
    assert "  arguments: the script's arguments are others\n" in told.stderr
    assert "(--accept-change arguments)" in told.stderr
    assert "hunter2" not in told.stderr
    assert "ZeroDivisionError" in script("--accept-change", "arguments", arguments=["--limit", "3"]).stderr
    assert "ZeroDivisionError" in script(arguments=["--limit", "3"]).stderr, "what was accepted is what counts now"
    assert "arguments are others" in script().stderr
    assert "ZeroDivisionError" in script(arguments=["--limit", "3", "--", "--workers", "2", "--fresh"]).stderr


def test_a_script_that_goes_to_another_folder_counts(tmp_path):
    (tmp_path / "out").mkdir()
    source = "import os\nimport penstock as ps\nos.chdir('out')\np = ps.Pipeline(run_dir='../run', workers=0)\n"
    source += "p | ps.Create([1, 2]) | ps.Map(str) | ps.WriteToText('.')\n"

    def run(source):
        (tmp_path / "script.py").write_text(source)
        command = [sys.executable, "-m", "penstock.cli", "run", "script.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False).stderr

    assert "changed" not in run(source)
    assert "changed" not in run(source)
    assert "  code: script.py was changed\n" in run(f"{source}LIMIT = 3\n")


def test_flags_of_the_command_line_are_no_arguments():
    actions = own_flags()
    assert {flag for flag, action in actions.items() if action.nargs is None} == OWN_FLAGS
    assert {flag for flag, action in actions.items() if action.nargs == 0} == OWN_SWITCHES


def test_there_are_no_arguments_where_there_is_no_script(monkeypatch):
    before = using(str)
    assert before.arguments is None
    monkeypatch.setattr(sys, "argv", [sys.argv[0], "other"])
    assert using(str) == before


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
    assert texts(using("m.pkl"), using("other.pkl")) == ["handler of step 's': model_uri has changed"]
