"""Digests of values and code: equal in every process, seen to change when something does, and never for nothing."""

from __future__ import annotations

import ast
import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import importlib
import inspect
import json
import logging
import operator
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import textwrap
import threading
import types
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.journal.identity import fingerprint, values
from penstock.journal.identity.values import digests

# Values.

plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(), st.dates()
)
hashable = st.recursive(plain, lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner)), max_leaves=6)
nested = st.recursive(
    hashable,
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(hashable, inner), st.tuples(inner), st.sets(hashable)),
    max_leaves=20,
)


@given(nested)
def test_a_copy_has_the_digest_of_the_value(value):
    assert fingerprint(copy.deepcopy(value)) == fingerprint(value)


@given(st.lists(hashable, unique=True), st.randoms())
def test_the_order_of_sets_and_dicts_does_not_matter(items, chance):
    shuffled = chance.sample(items, len(items))
    assert fingerprint(set(shuffled)) == fingerprint(set(items))
    assert fingerprint(dict.fromkeys(shuffled, 1)) == fingerprint(dict.fromkeys(items, 1))


@given(st.lists(st.one_of(st.integers(), st.text(), st.booleans(), st.none()), max_size=12), st.data())
def test_lists_that_differ_have_different_digests(items, data):
    other = data.draw(st.lists(st.one_of(st.integers(), st.text(), st.booleans(), st.none()), max_size=12))
    same = items == other and list(map(type, items)) == list(map(type, other))
    assert (fingerprint(items) == fingerprint(other)) is same


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0
    seen: int = dataclasses.field(default=0, compare=False)


class Pair(NamedTuple):
    left: int
    right: int


class Plain:
    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Tells(Plain):
    def __getstate__(self):
        return {"value": self.value, "noise": None}


class Cached(Plain):
    @functools.cached_property
    def double(self):
        return 2 * self.value


class Limited(collections.UserList):
    """A container with a setting of its own."""

    def __init__(self, items, limit):
        super().__init__(items)
        self.limit = limit


class LimitedSet(set):
    def __init__(self, items, limit):
        super().__init__(items)
        self.limit = limit


def enum_member(told):
    """Members of one name and value, of enums that differ in a method."""

    class Level(enum.Enum):
        HIGH = 1

        def tell(self):
            return told

    return Level.HIGH


DIFFERENT = {
    "numbers": [1, 1.0, True, 2, -1, 0.0, -0.0, float("nan"), float("inf"), 1j, 10**5000],
    "texts": ["", "a", "b", "ä", "\ud800", b"", b"a", bytearray(b"a"), ["a"], ("a",), {"a"}, frozenset(), {"a": None}],
    "nothings": [None, ..., NotImplemented, (), [], {}, set()],
    "joined": [["ab", "c"], ["a", "bc"], ["abc"], ["a", ["bc"]], [["a"], "bc"]],
    "enums": [Colour.RED, Colour.BLUE, 1],
    "dataclasses": [Point(1), Point(2), Point(1, 2)],
    "tuples": [Pair(1, 2), (1, 2), Pair(2, 1)],
    "instances": [Plain(1), Plain(2), Slotted(1), Slotted(2), Tells(1), Tells(2), Plain([1])],
    "paths": [pathlib.Path("a"), pathlib.Path("b"), "a"],
    "ranges": [range(3), range(4), range(0, 3, 2), slice(3)],
    "times": [
        datetime.date(2024, 1, 2),
        datetime.datetime(2024, 1, 2),
        datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
        datetime.time(1),
        datetime.timedelta(1),
    ],
    "arrays": [
        np.array([1, 2]),
        np.array([1, 3]),
        np.array([[1, 2]]),
        np.array([1, 2], np.int32),
        np.array([1.0, 2.0]),
        np.array(["a", None], object),
        np.array(["a", 1], object),
        np.int64(1),
        np.int32(1),
        np.dtype("int64"),
        np.array([], "U1"),
        np.array(["2024-01-01"], "datetime64[D]"),
        np.arange(12).reshape(3, 4)[:, ::2],
    ],
    "tensors": [
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0, 3.0]),
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor(1.0),
        torch.float16,
        torch.float32,
        torch.device("cpu"),
        torch.empty(2, device="meta"),
    ],
    "schemas": [
        pa.schema([("a", pa.int64())]),
        pa.schema([("a", pa.int32())]),
        pa.schema([("b", pa.int64())]),
        pa.schema([pa.field("a", pa.int64(), nullable=False)]),
        pa.schema([("a", pa.int64())], metadata={"k": "v"}),
        pa.int64(),
    ],
    "callables": [
        len,
        str.upper,
        str.lower,
        "a".upper,
        {"a": 1}.get,
        {"a": 2}.get,
        "a".__contains__,
        "b".__contains__,
        (1).__lt__,
        (2).__lt__,
        json.loads,
        json.dumps,
        functools.partial(len, "a"),
        functools.partial(len, "b"),
        operator.itemgetter("a"),
        operator.itemgetter("b"),
        np.add,
        np.mean,
        np.median,
        Plain(1).__init__,
        Plain,
        int,
    ],
    "containers": [
        {},
        collections.defaultdict(int),
        collections.defaultdict(list),
        collections.defaultdict(lambda: 1),
        collections.defaultdict(lambda: 2),
        collections.deque([1]),
        collections.deque([1], maxlen=2),
        collections.deque([1], maxlen=3),
        Limited([1], 1),
        Limited([1], 2),
        {1},
        LimitedSet([1], 1),
        LimitedSet([1], 2),
    ],
    "enums with methods": [enum_member(1), enum_member(2)],
    "others": [re.compile("a"), re.compile("a", re.I), decimal.Decimal("1"), logging.getLogger("a"), json, os],
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_values_that_differ_have_different_digests(kind):
    found = [fingerprint(value) for value in DIFFERENT[kind]]
    assert len(set(found)) == len(found)
    assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in found)
    assert [fingerprint(value) for value in DIFFERENT[kind]] == found


def test_what_lives_is_known_by_its_type_alone(tmp_path):
    for make in (threading.Lock, random.Random, object, threading.local, np.random.default_rng):
        assert fingerprint(make()) == fingerprint(make())
    with open(tmp_path / "a", "w") as one, open(tmp_path / "b", "w") as other:
        assert fingerprint(one) == fingerprint(other)
    assert fingerprint(lambda: threading.Lock()) != fingerprint(threading.Lock())


def test_what_was_worked_out_before_does_not_matter():
    fresh, used = Cached(3), Cached(3)
    assert used.double == 6
    assert fingerprint(fresh) == fingerprint(used)
    assert fingerprint(Point(1, seen=1)) == fingerprint(Point(1, seen=2))

    @functools.lru_cache
    def square(x):
        return x * x

    before = fingerprint(square)
    assert square(3) == 9
    assert fingerprint(square) == before


def test_values_that_hold_themselves():
    def made(last):
        value: Any = [1]
        value += [value, {"a": value}, last]
        return value

    assert fingerprint(made(1)) == fingerprint(made(1)) != fingerprint(made(2))


def test_values_that_raise_when_asked_are_known_by_their_type():
    class Refuses:
        def __init__(self, value):
            self.value = value

        def __getstate__(self):
            raise TypeError("no")

    assert fingerprint(Refuses(1)) == fingerprint(Refuses(2))
    assert fingerprint(collections.ChainMap({})) == fingerprint(collections.ChainMap({}))
    assert fingerprint(types.SimpleNamespace(a=1)) != fingerprint(types.SimpleNamespace(a=2))


def test_foreign_things_never_end_a_run():
    class Hostile(dict):
        def __iter__(self):
            raise RuntimeError("no")

        def __getattr__(self, name):
            raise RuntimeError("no")

    deep: Any = []
    for _ in range(5000):
        deep = [deep]

    def from_deeper(value, depth):
        return fingerprint(value) if not depth else from_deeper(value, depth - 1)

    assert fingerprint(Hostile(a=1)) == fingerprint(Hostile(a=1))
    assert fingerprint(deep) == from_deeper(deep, 300)


# Code, in a script that is changed and run in another process.

SCRIPT = '''
import enum, functools, os, re, sys
import config
from penstock.journal.identity.values import digests, fingerprint

LIMIT = 3
WORDS = {"good", "bad", "dull", "bright"}
TABLE = {"a": 1}
PATTERN = re.compile("a+")
calls = 0

def twice(step):
    @functools.wraps(step)
    def run(row):
        return step(step(row))
    return run

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

class Base:
    weight = 1.5

    def shared(self, row):
        return row * LIMIT

class Model(Base):
    """A model."""

    def __init__(self, size):
        self.size = size

    def score(self, row, scale=2):
        return self.shared(row) * scale + self.weight

    @property
    def half(self):
        return self.size / 2

    @staticmethod
    def name():
        return "model"

class Mode(enum.Enum):
    FAST = "fast"

def helper(row):
    return len(row) + LIMIT

@twice
def decorated(row):
    return row + 1

@functools.lru_cache(maxsize=None)
def remembered(row):
    return row + 5

def outer(factor):
    def scale(row, *, offset=0):
        return row * factor + offset
    return scale

def score(row, start=1):
    """What a row is worth."""
    global calls
    calls += 1
    if row in {"good", "bad", "dull", "bright"} and (row != "x"
            or row.startswith("y")):
        return [helper(word) for word in row if word not in WORDS]
    try:
        found = TABLE.get(row, config.BASE) + config.more(row)
    except KeyError:
        found = 0
    even(found), decorated(row), remembered(row), Model(2).score(row), Mode.FAST, PATTERN.match(row)
    return start + found

fn = score
scaled = outer(3)
short = lambda row: row + LIMIT
method = Model(4).score
partial = functools.partial(helper, "abc")
'''
CONFIG = "BASE = 10\nUNUSED = 1\n\ndef more(row):\n    return BASE\n"
NAMES = ("fn", "scaled", "short", "method", "partial")


def run(folder, source=SCRIPT, config=CONFIG, seed="0", tail=None):
    """What the script's digests are: of each name, all digests that it leads to."""
    folder.mkdir(exist_ok=True)
    (folder / "config.py").write_text(config)
    tail = tail or f"import json\nprint(json.dumps({{name: digests(name, globals()[name]) for name in {NAMES}}}))\n"
    (folder / "script.py").write_text(f"{source}\n{tail}")
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"}
    made = subprocess.run([sys.executable, folder / "script.py"], capture_output=True, text=True, env=env, check=False)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return run(tmp_path_factory.mktemp("original"))


@pytest.mark.parametrize("seed", ["1", "2"])
def test_every_process_finds_the_same_digests(original, tmp_path, seed):
    assert run(tmp_path / "elsewhere", seed=seed) == original


def test_every_process_finds_the_same_digests_of_values(tmp_path):
    tail = """
import json, numpy, pathlib, datetime
print(json.dumps(fingerprint([
    {"a", "b", "c", 1, None}, frozenset({("x", 1), ("y", 2)}), {word: 1 for word in WORDS}, {str, int, helper, score, fn},
    numpy.arange(3), pathlib.Path("a"), datetime.date(2024, 1, 1), Mode.FAST, Model(2), Model, len, object(), lambda: WORDS,
])))
"""
    assert len({run(tmp_path, seed=str(seed), tail=tail) for seed in range(3)}) == 1


def layouts():
    yield "comments", "# first\n\n\n" + SCRIPT.replace("\n    ", "\n    # a comment\n    ")
    yield "normalised", ast.unparse(ast.parse(SCRIPT))
    yield "docstrings", SCRIPT.replace('    """What a row is worth."""\n', "").replace("A model.", "Other words.")
    yield "more docstrings", SCRIPT.replace("def helper(row):", 'def helper(row):\n    """What it does."""')
    yield "names of variables", SCRIPT.replace("found", "sum_of_it").replace("word ", "each ").replace("(word)", "(each)")
    yield "order of sets", SCRIPT.replace('{"good", "bad", "dull", "bright"}', '{"bright", "dull", "good", "bad"}')
    yield "state", SCRIPT.replace("calls = 0", "calls = 17")
    yield "what nobody names", SCRIPT.replace("calls = 0", "calls = 0\nOTHER = os.getpid()")
    yield "type hints", SCRIPT.replace("def helper(row):", "def helper(row: list) -> int:")


@pytest.mark.parametrize(("what", "source"), list(layouts()))
def test_what_does_not_matter_is_no_change(original, tmp_path, what, source):
    assert source != SCRIPT
    assert run(tmp_path, source) == original


CHANGES = {
    "a constant": ("return start + found", "return start - found", "fn"),
    "a number": ("len(row) + LIMIT", "len(row) + LIMIT + 1", "fn: helper"),
    "a default": ("row, start=1", "row, start=2", "fn"),
    "a keyword's default": ("offset=0", "offset=1", "scaled"),
    "a closure's value": ("outer(3)", "outer(4)", "scaled"),
    "a global": ("LIMIT = 3", "LIMIT = 4", "fn: LIMIT"),
    "a global's item": ('{"a": 1}', '{"a": 2}', "fn: TABLE"),
    "a set": ('WORDS = {"good"', 'WORDS = {"fine"', "fn: WORDS"),
    "a pattern": ('"a+"', '"a*"', "fn: PATTERN"),
    "a called function": ("return n != 0 and", "return n > 0 and", "fn: odd"),
    "a decorated function": ("return row + 1", "return row + 2", "fn: decorated#2"),
    "a remembered function": ("return row + 5", "return row + 6", "fn: remembered"),
    "a decorator": ("step(step(row))", "step(row)", "fn: decorated"),
    "a class attribute": ("weight = 1.5", "weight = 2.5", "fn: Base.weight"),
    "a method": ("* scale + self.weight", "* scale - self.weight", "fn: Model.score"),
    "a property": ("self.size / 2", "self.size / 3", "fn: Model.half"),
    "a static method": ('return "model"', 'return "other"', "fn: Model.name"),
    "a base class's method": ("row * LIMIT", "row + LIMIT", "fn: Base.shared"),
    "an enum": ('"fast"', '"quick"', "fn: Mode"),
    "a condition": ('row != "x"', 'row == "x"', "fn"),
    "and for or": ("\n            or row", "\n            and row", "fn"),
    "a caught error": ("except KeyError", "except ValueError", "fn"),
    "a lambda": ("lambda row: row + LIMIT", "lambda row: row * LIMIT", "short"),
    "an instance": ("Model(4).score", "Model(5).score", "method"),
    "an argument": ('"abc"', '"abd"', "partial"),
    "a list for a generator": ("[helper(word) for word in row if word not in WORDS]", "(helper(w) for w in row)", "fn"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_matters_is_a_change(original, tmp_path, what):
    old, new, key = CHANGES[what]
    assert SCRIPT.count(old) == 1
    changed = run(tmp_path, SCRIPT.replace(old, new))
    differing = {k for name in NAMES for k, digest in original[name].items() if changed[name].get(k) != digest}
    assert key in differing


def test_functions_and_constants_of_other_modules_of_the_user(original, tmp_path):
    constant = run(tmp_path, config=CONFIG.replace("BASE = 10", "BASE = 11"))
    assert constant["fn"]["fn: config.BASE"] != original["fn"]["fn: config.BASE"]
    function = run(tmp_path, config=CONFIG.replace("return BASE", "return BASE + 1"))
    assert function["fn"]["fn: more"] != original["fn"]["fn: more"]
    assert run(tmp_path, config=CONFIG.replace("UNUSED = 1", "UNUSED = 2")) == original


def test_a_change_is_found_where_it_is(original, tmp_path):
    changed = run(tmp_path, SCRIPT.replace("LIMIT = 3", "LIMIT = 4"))
    assert {key for key, digest in original["fn"].items() if changed["fn"][key] != digest} == {"fn: LIMIT"}
    assert original["fn"]["fn: LIMIT"].startswith("value:")
    assert original["fn"]["fn"].startswith("function:")


# What functions reach through objects.

OBJECTS = """
import collections, threading
import config
from penstock.journal.identity.values import digests

class Tok:
    limit = 3

    def __init__(self, size):
        self.size = size
        self.words = ["a"]
        self.lock = threading.Lock()
        self.made_at = f"{object()!r}"
        self.me = id(self)
        self.itself = self
        self.net = None

    def clean(self, row):
        return row.strip()

class Slotted:
    __slots__ = ("size", "unset")

    def __init__(self):
        self.size = 7

class Living(threading.Thread):
    def __init__(self):
        super().__init__(name=str(id(self)))

    def ask(self, row):
        return row

class Ask:
    tok = Tok(4)

    def __getattr__(self, name):
        raise RuntimeError("no code runs")

    __getstate__ = __getattr__

class Node:
    def __init__(self, left, right):
        self.left, self.right = left, right

def plain(row):
    return row + 1

def bound(row):
    return row + 2

class Bound:
    def call(self, row):
        return bound(row)

TOK, SLOTTED, LIVING, ASK, CALL, NODE = Tok(5), Slotted(), Living(), Ask(), Bound().call, None
for _ in range(40):
    NODE = Node(NODE, NODE)
REG = {"plain": plain, "living": LIVING, "lock": threading.Lock(), "module": threading}
SET = {TOK, ASK, SLOTTED}
DEFAULTS = collections.defaultdict(list, a=[1])

def fn(row):
    TOK.clean(row), SLOTTED.size, LIVING.ask(row), ASK.tok, CALL(row), NODE.left, REG["plain"], config.OBJ.go()
    return SET, DEFAULTS
"""
OBJECTS_CONFIG = "class Thing:\n    def go(self):\n        return 1\n\nOBJ = Thing()\nOBJ.k = 4\n"
OBJECTS_CHANGES = {
    "a method": ("row.strip()", "row.upper()", {"fn: Tok.clean"}),
    "a class attribute": ("limit = 3", "limit = 4", {"fn: Tok.limit"}),
    "an attribute": ("Tok(5)", "Tok(6)", {"fn: TOK", "fn: SET"}),
    "an attribute's item": ('["a"]', '["b"]', {"fn: TOK", "fn: SET", "fn: Ask.tok", "fn: Tok.__init__"}),
    "a slot": ("size = 7", "size = 8", {"fn: SLOTTED", "fn: SET", "fn: Slotted.__init__"}),
    "an object in a class": ("Tok(4)", "Tok(3)", {"fn: Ask.tok"}),
    "a method beside another base": ("return row\n", "return row * 2\n", {"fn: Living.ask"}),
    "a function beside objects": ("row + 1", "row + 3", {"fn: plain"}),
    "a bound method": ("row + 2", "row + 3", {"fn: bound"}),
    "a dict's item": ("a=[1]", "a=[2]", {"fn: DEFAULTS"}),
    "another module's method": ("return 1", "return 2", {"fn: Thing.go"}),
    "another module's attribute": ("k = 4", "k = 5", {"fn: config.OBJ"}),
}
OBJECTS_TAIL = "import json; print(json.dumps(digests('fn', fn)))"


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    return run(tmp_path_factory.mktemp("objects"), OBJECTS, OBJECTS_CONFIG, tail=OBJECTS_TAIL)


@pytest.mark.parametrize("seed", ["1", "2"])
def test_every_process_finds_the_same_of_objects(objects, tmp_path, seed):
    assert run(tmp_path, OBJECTS, OBJECTS_CONFIG, seed, OBJECTS_TAIL) == objects


@pytest.mark.parametrize("what", OBJECTS_CHANGES)
def test_what_is_reached_through_objects_counts(objects, tmp_path, what):
    old, new, keys = OBJECTS_CHANGES[what]
    assert (OBJECTS + OBJECTS_CONFIG).count(old) == 1
    changed = run(tmp_path, OBJECTS.replace(old, new), OBJECTS_CONFIG.replace(old, new), tail=OBJECTS_TAIL)
    assert {key for key in objects.keys() | changed.keys() if objects.get(key) != changed.get(key)} == keys


# State, in a process where the code has run.

STATE = """
import functools
import {name}_other as other

COUNTS, SEEN, TABLE, LOG, NUMBER, LIMIT = {{"n": 0}}, {{0}}, {{"a": 0}}, [0], 0, 5

class Acc:
    total = first = 0
    seen = []

    def __init__(self):
        self.n = 0

    @classmethod
    def more(cls, row):
        cls.first += 1
        cls.new = {{row}}

    def count(self, row):
        self.n += 1
        self.last = row

ACC = Acc()
ACC.inner = Acc()

def counting(fn):
    calls = 0
    def run(row):
        nonlocal calls
        calls += 1
        return fn(row)
    return run

def remembering(fn):
    known = {{}}
    def run(row):
        known[row] = fn(row)
        return known[row]
    return run

def put(table, row):
    table[row] = 1

def augmented(row):
    COUNTS["n"] += 1

def renamed(row):
    seen = SEEN
    seen.add(row)

def given(row):
    put(TABLE, row)

def class_attribute(row):
    Acc.total += 1

def by_class_method(row):
    Acc.more(row)

def class_list(row):
    seen = Acc.seen
    seen.append(row)

def method(row):
    ACC.count(row)

def attribute(row):
    ACC.n += 1

def default(row, known={{}}, *, more=[]):
    known[row] = 1
    more.append(row)

def nested(row):
    ACC.inner.n = row

@counting
def nonlocals(row):
    return row

@remembering
def closure(row):
    return row

def of_module(row):
    other.NUMBER += 1

def in_module(row):
    other.TABLE[row] = 1

def by_module(row):
    return other.count(row), other.NUMBER

def no_state(row):
    table = {{}}
    table[-LIMIT] = row
"""
OTHER = """
NUMBER, TABLE = 0, {}

def count(row):
    global NUMBER
    NUMBER += 1
"""
SETS = ["class_attribute", "attribute", "nested", "nonlocals", "of_module", "by_module"]
FILLS = ["augmented", "renamed", "given", "by_class_method", "class_list", "method", "default", "closure", "in_module"]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of its own for each test."""
    name = f"state_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(STATE.format(name=name))
    (tmp_path / f"{name}_other.py").write_text(OTHER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module(name)


@pytest.mark.parametrize("form", SETS)
def test_globals_and_their_attributes_that_code_sets_are_state(module, form):
    work = getattr(module, form)
    before = digests("fn", work)
    for row in range(3):
        work(row)
    assert digests("fn", work) == before


@pytest.mark.parametrize("form", FILLS)
def test_what_code_has_filled_in_place_is_told(module, form):
    """From outside it looks as if somebody had changed a constant, and that must be told."""
    work = getattr(module, form)
    before = digests("fn", work)
    assert digests("fn", work) == before
    work(1)
    assert digests("fn", work) != before


def test_a_constant_beside_what_is_changed_is_no_state(module):
    assert "fn: LIMIT" in digests("fn", module.no_state)


def test_a_cell_that_runs_again_with_another_constant():
    def cell(source, space):
        exec(source, space)
        found = digests("fn", space["fn"])
        space["fn"](1)
        return found

    source = """
class Tok:
    size = 2
    def clean(self, row):
        self.n = row
TOK, CONF, LIMIT = Tok(), {"k": 1}, 3
def fn(row, known=[0]):
    conf = CONF
    conf[row] = TOK.clean(row), LIMIT
    known.append(row)
"""
    space: dict[str, Any] = {"__name__": "__main__"}
    before = cell(source, space)
    assert cell(source, space) == before
    space["CONF"]["k"] = 5
    assert digests("fn", space["fn"]) != before
    for old, new in (("size = 2", "size = 3"), ('"k": 1', '"k": 2'), ("}, 3", "}, 4"), ("[0]", "[1]"), ("= row", "= -row")):
        assert source.count(old) == 1
        assert cell(source.replace(old, new), space) != before
    assert cell(source, space) == before


def test_too_many_objects_are_known_by_their_classes(monkeypatch):
    monkeypatch.setattr(values, "MOST_OBJECTS", 9)
    space: dict[str, Any] = {"Plain": Plain, "__name__": "objects"}
    for count, same in ((9, False), (10, True)):
        found = []
        for last in (1, 2):
            exec(f"MANY = {{Plain(n) for n in range({count - 1})}} | {{Plain(-{last})}}\ndef fn():\n    return MANY", space)
            found.append(digests("fn", space["fn"]))
        assert "fn: Plain" in found[0]
        assert (found[0] == found[1]) is same


# Layout, over many functions.


def functions_of(source, name):
    space: dict[str, Any] = {"__name__": name}
    exec(compile(source, f"<{name}>", "exec", dont_inherit=True), space)
    found = {k: v for k, v in space.items() if inspect.isfunction(v) and v.__globals__ is space}
    classes = [v for v in space.values() if isinstance(v, type) and v.__module__ == name]
    return {**found, **{f"{c.__name__}.{k}": v for c in classes for k, v in vars(c).items() if inspect.isfunction(v)}}


@pytest.mark.parametrize("module", [statistics, textwrap, copy, json.decoder, collections], ids=lambda m: m.__name__)
def test_layout_leaves_no_trace(module):
    """The same functions, with every expression on one line: compilers note lines by different instructions."""
    source = inspect.getsource(module)
    source = source.replace("from .", "from collections." if module is collections else "from json.")
    one, other = functions_of(source, "one"), functions_of(ast.unparse(ast.parse(source)), "one")
    assert len(one) > 5
    for name in one:
        assert digests(name, one[name])[name] == digests(name, other[name])[name], name


@given(st.sampled_from(["and", "or"]), st.sampled_from(["and", "or"]), st.booleans(), st.booleans())
def test_conditions_over_several_lines(first, second, negated, in_test):
    def made(gap):
        condition = f"(a {first}{gap}{'not ' if negated else ''}b {second}{gap}c.d(a,{gap}b))"
        body = f"if {condition}:{gap and ' # yes'}\n        return 1" if in_test else f"return {condition}"
        space: dict[str, Any] = {}
        exec(f"def f(a, b, c):\n    {body}", space)
        return space["f"]

    assert fingerprint(made("\n            ")) == fingerprint(made(" "))
