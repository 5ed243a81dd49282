"""Values on their way into SQL databases: each as its SQL type, or refused with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import OutputError
from penstock.rows import PredictionResult
from sql_databases import TestDatabase, database, postgres, server, sqlite, write_all, write_part

__all__ = ["database", "postgres", "server", "sqlite"]  # fixtures

NOON = datetime(2024, 2, 29, 12, 30, 0, 5)
ZONE = timezone(timedelta(hours=2))
NUMBER = UUID("12345678-1234-5678-1234-567812345678")

# name, value, type in Postgres, type in SQLite, what Postgres gives back, what SQLite gives back
VALUES: list[tuple[str, Any, str, str, Any, Any]] = [
    ("flag", True, "BOOLEAN", "BOOLEAN", True, 1),
    ("whole", -(2**63), "BIGINT", "BIGINT", -(2**63), -(2**63)),
    ("real", 0.1, "DOUBLE PRECISION", "DOUBLE", 0.1, 0.1),
    ("tiny", 5e-324, "DOUBLE PRECISION", "DOUBLE", 5e-324, 5e-324),
    ("text", 'ä\t"q"\\N\n\\.\r\n\\', "TEXT", "TEXT", 'ä\t"q"\\N\n\\.\r\n\\', 'ä\t"q"\\N\n\\.\r\n\\'),
    ("empty", "", "TEXT", "TEXT", "", ""),
    ("bytes", b"\x00\xff\\", "BYTEA", "BLOB", b"\x00\xff\\", b"\x00\xff\\"),
    ("date", date(1, 1, 1), "DATE", "DATE", date(1, 1, 1), "0001-01-01"),
    ("time", time(1, 2, 3, 4), "TIME", "TIME", time(1, 2, 3, 4), "01:02:03.000004"),
    ("stamp", NOON, "TIMESTAMP", "DATETIME", NOON, "2024-02-29 12:30:00.000005"),
    (
        "zoned",
        NOON.replace(tzinfo=ZONE),
        "TIMESTAMP",
        "DATETIME",
        NOON.replace(tzinfo=ZONE),
        "2024-02-29 10:30:00.000005Z",
    ),
    ("exact", Decimal("1.50"), "NUMERIC", "NUMERIC", Decimal("1.50"), 1.5),
    ("uuid", NUMBER, "UUID", "TEXT", NUMBER, str(NUMBER)),
    ("object", {"a": [1, None, "ä"]}, "JSONB", "JSON", {"a": [1, None, "ä"]}, '{"a":[1,None,"ä"]}'.replace("None", "null")),
    ("array", np.arange(4.0).reshape(2, 2), "JSONB", "JSON", [[0.0, 1.0], [2.0, 3.0]], "[[0.0,1.0],[2.0,3.0]]"),
    ("number", np.float32(0.5), "DOUBLE PRECISION", "DOUBLE", 0.5, 0.5),
    ("moment", np.datetime64("2024-02-29T12:30:00.000005000"), "TIMESTAMP", "DATETIME", NOON, "2024-02-29 12:30:00.000005"),
    ("nothing", None, "TEXT", "TEXT", None, None),
]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_every_type_of_value(database: TestDatabase) -> None:
    row = {name: value for name, value, *_ in VALUES}
    nothing = dict.fromkeys(row)
    write_all(ps.WriteToSql(database.url, "answers"), [row, nothing])
    types = {name: in_pg if database.is_postgres else in_lite for name, _, in_pg, in_lite, _, _ in VALUES}
    assert database.types() == types
    first, second = database.rows()
    for (name, _, _, _, pg, lite), value in zip(VALUES, first, strict=True):
        assert value == (pg if database.is_postgres else lite), name
    assert set(second) == {None}


def test_floats_that_are_no_numbers(database: TestDatabase) -> None:
    write_all(ps.WriteToSql(database.url, "answers"), [{"x": float("inf")}, {"x": float("-inf")}, {"x": float("nan")}])
    inf, negative, nan = (x for (x,) in database.rows())
    assert (inf, negative) == (float("inf"), float("-inf"))
    assert nan != nan if database.is_postgres else nan is None, "SQLite keeps NaN as NULL"


ARROW: list[tuple[pa.Array, Any]] = [
    (pa.array([7], pa.uint8()), 7),
    (pa.array([0.5], pa.float16()), 0.5),
    (pa.array(["a"], pa.string_view()), "a"),
    (pa.array(["a"]).dictionary_encode(), "a"),
    (pa.array([b"ab"], pa.binary(2)), b"ab"),
    (pa.array([date(2024, 1, 1)], pa.date64()), "2024-01-01"),
    (pa.array([5], pa.time32("s")), "00:00:05.000000"),
    (pa.array([1_000], pa.timestamp("ns")), "1970-01-01 00:00:00.000001"),
    (pa.array([0], pa.timestamp("s", "Europe/Berlin")), "1970-01-01 00:00:00.000000Z"),
    (pa.array([Decimal("1.25")], pa.decimal128(10, 2)), 1.25),
    (pa.array([[1, 2]], pa.list_(pa.int64())), "[1,2]"),
    (pa.array([[1, 2]], pa.list_(pa.float32(), 2)), "[1.0,2.0]"),
    (pa.array([[0.5, 2]], pa.list_(pa.float16(), 2)), "[0.5,2.0]"),
    (pa.array([[True, None]], pa.list_(pa.bool_(), 2)), "[true,null]"),
    (pa.array([[[1], [2]]], pa.list_(pa.list_(pa.uint8(), 1), 2)), "[[1],[2]]"),
    (pa.array([None], pa.list_(pa.float32(), 2)), None),
    (pa.array([{"a": 1}]), '{"a":1}'),
    (pa.array([{"v": [1, 2]}], pa.struct({"v": pa.list_(pa.float32(), 2)})), '{"v":[1.0,2.0]}'),
    (pa.array([None]), None),
]


@pytest.mark.parametrize(("column", "expected"), ARROW, ids=lambda value: str(getattr(value, "type", "")))
def test_columns_of_arrow_types(sqlite: TestDatabase, column: pa.Array, expected: Any) -> None:
    write_all(ps.WriteToSql(sqlite.url, "answers"), pa.table({"x": column}))
    assert sqlite.rows() == [(expected,)]


@dataclass
class Label:
    name: str
    score: Any


def test_rows_of_many_kinds(database: TestDatabase) -> None:
    write_all(ps.WriteToSql(database.url, "labels"), [Label("a", np.float32(0.5)), Label("b", 2)])
    assert database.rows(table="labels") == [("a", 0.5), ("b", 2.0)]
    write_all(ps.WriteToSql(database.url, "answers"), [PredictionResult("ä", np.array([1.5, 2.0]), "m")])
    assert database.rows() == [("ä", [1.5, 2.0] if database.is_postgres else "[1.5,2.0]", "m")]


def test_tensors(sqlite: TestDatabase) -> None:
    torch = pytest.importorskip("torch")
    row = {"score": torch.tensor(0.5, requires_grad=True), "vector": torch.tensor([1.5, 2.0], dtype=torch.bfloat16)}
    write_all(ps.WriteToSql(sqlite.url, "answers"), [row])
    assert sqlite.rows() == [(0.5, "[1.5,2.0]")]


def test_numbers_widen_within_a_part(database: TestDatabase) -> None:
    sink = ps.WriteToSql(database.url, "answers").sink
    sink.prepare("run")
    blocks = [[{"x": None, "y": 1}], [{"x": 1, "y": 1}], [{"x": 0.5, "y": Decimal("0.1")}, {"x": 1}]]
    sink.publish(write_part(sink, "00000", *blocks))
    assert database.rows() == [(None, 1), (1, 1), (0.5, Decimal("0.1") if database.is_postgres else 0.1), (1, None)]


def test_columns_that_rows_do_not_have(database: TestDatabase) -> None:
    database.run("CREATE TABLE answers (id bigint, a text, b text DEFAULT 'default')")
    write_all(ps.WriteToSql(database.url, "answers"), [{"id": 1}, {"a": "x", "id": 2}], [{"id": 3, "b": None}])
    assert database.rows() == [(1, None, "default"), (2, "x", "default"), (3, None, None)]


def test_columns_that_the_table_does_not_have(database: TestDatabase) -> None:
    message = r"rows have the column 'c', which the table does not have \('a'\); drop it in a step before, or add it"
    write = ps.WriteToSql(database.url, "answers")
    with pytest.raises(OutputError, match=message):
        write_all(write, [{"a": 1}], [{"a": 1, "c": 1}])  # the table is made of the first part
    assert database.rows() == [(1,)]
    write.sink.prepare("second")
    with pytest.raises(OutputError, match=message):
        write.sink.open(ps.Part(run="second", name="00000", attempt=1)).write([{"a": 1, "c": 1}])


def test_names_of_every_kind(database: TestDatabase) -> None:
    names = ['a"b', "100 %", "%s", "select", "ä ö", "?", ":x", "A", "a", "a.b", "{0}"]
    if not database.is_postgres:
        names.remove("A")  # SQLite does not tell it from a
    rows = [{name: i for i, name in enumerate(names)}]
    for table, keys in (('my "table" %', None), ("select", names[:2])):
        write_all(ps.WriteToSql(database.url, table, upsert_by=keys), rows, rows)
        quoted = '"' + table.replace('"', '""') + '"'
        seen = database.run(f"SELECT * FROM {quoted}".replace("%", "%%" if database.is_postgres else "%"))
        assert seen == [tuple(range(len(names)))] * (1 if keys else 2)


def test_a_schema_of_postgres(postgres: TestDatabase) -> None:
    postgres.run('CREATE SCHEMA "My Schema"')
    write = ps.WriteToSql(postgres.url, "answers", schema="My Schema", upsert_by=["id"])
    write_all(write, [{"id": 1}], [{"id": 1}, {"id": 2}])
    assert postgres.run('SELECT id FROM "My Schema".answers') == [(1,), (2,)]
    assert postgres.run('SELECT target FROM "My Schema".penstock_commits') == [("My Schema.answers",)] * 2
    assert write.sink.describe().startswith("table My Schema.answers in postgresql://postgres:***@/")
    assert not postgres.has("answers")


def test_values_become_the_types_of_the_table(postgres: TestDatabase) -> None:
    postgres.run(
        "CREATE TABLE answers (id serial, at timestamptz, vector real[], names text[], raw json, number text, uuid uuid)"
    )
    row = {"at": NOON, "vector": np.array([0.5, 1.5]), "names": ['a "b" \\ {', None, "ä,"], "raw": "[1]", "number": 7}
    write_all(ps.WriteToSql(postgres.url, "answers"), [{**row, "uuid": str(NUMBER)}])
    (seen,) = postgres.rows()
    assert seen == (1, NOON.replace(tzinfo=UTC), [0.5, 1.5], ['a "b" \\ {', None, "ä,"], [1], "7", NUMBER)


REFUSED: list[tuple[Any, str]] = [
    ([{"x": 1}, {"x": "a"}], "column 'x' holds int and text, expected values of one type"),
    ([{"x": True}, {"x": 1}], "holds bool and int"),
    ([{"x": NOON}, {"x": NOON.replace(tzinfo=UTC)}], "holds datetime and datetime with zone"),
    ([{"x": 2**63}], "cannot be written as int"),
    ([{"x": "\ud800"}], "cannot be written as text .*surrogates not allowed"),
    ([{"x": [float("nan")]}], "cannot be written as json"),
    ([{"x": [{1, 2}]}], r"cannot be written as json \(a set inside\)"),
    ([{"x": timedelta(1)}], "holds a timedelta, which has no SQL type: put a ps.Map before it"),
    ([{"x": time(1, 2, tzinfo=UTC)}], "a time of day with a zone, which has no SQL type"),
    ([{"x": np.datetime64(5, "ns")}], "holds a datetime64, which has no SQL type"),
    ([{"x": np.timedelta64(5, "s")}], "holds a timedelta64, which has no SQL type"),
    ([{"x": np.longdouble("0.1")}], "holds a longdouble, which has no SQL type"),
    ([{"x": pd.Timestamp(5)}], "000000005.*, and databases hold microseconds"),
    (
        pa.table({"x": pa.array([5], pa.timestamp("ns"))}),
        r"holds timestamp\[ns\] that cannot be written as datetime .*lose data",
    ),
    ([{"x": {1: 2, "1": 3}}], r"two keys of a dict are the same text \(1, '1'\)"),
    ([{1: 2}], "columns are named by str, got 1"),
    ([3], "WriteToSql expects rows with named fields"),
    (pa.table({"x": pa.array([2**63], pa.uint64())}), "holds uint64 that cannot be written as int"),
    (pa.table({"x": pa.array([1], pa.duration("s"))}), "which has no SQL type"),
    (pa.table([[1], [2]], names=["x", "x"]), "two columns have one name"),
]


@pytest.mark.parametrize(("rows", "message"), REFUSED)
def test_values_that_no_database_holds(sqlite: TestDatabase, rows: Any, message: str) -> None:
    with pytest.raises(OutputError, match=message):
        write_all(ps.WriteToSql(sqlite.url, "answers"), rows)


def test_decimals_are_exact_or_refused(database: TestDatabase) -> None:
    exact = [Decimal("1.10"), Decimal(2**62 + 1), Decimal("0.1234567890123456789")]
    database.run("CREATE TABLE answers (x text)")
    write_all(ps.WriteToSql(database.url, "answers"), [{"x": value} for value in exact])
    assert [Decimal(x) for (x,) in database.rows()] == exact
    write = ps.WriteToSql(database.url, "made")
    if database.is_postgres:
        write_all(write, [{"x": value} for value in exact])
        assert [x for (x,) in database.rows(table="made")] == exact
        return
    write_all(write, [{"x": value} for value in exact[:2]])
    assert database.rows(table="made") == [(1.1,), (2**62 + 1,)]
    with pytest.raises(
        OutputError, match="'x' holds 0.1234567890123456789, which SQLite cannot hold as a number: make the col"
    ):
        write_all(ps.WriteToSql(database.url, "made"), [{"x": exact[2]}], run="second")


def test_values_that_the_database_refuses(database: TestDatabase) -> None:
    database.run("CREATE TABLE answers (id bigint NOT NULL UNIQUE CHECK (id < 100), text text)")
    write = ps.WriteToSql(database.url, "answers")
    cases: list[tuple[Any, str]] = [
        ([{"id": 1}, {"id": None}], "(?i:not.null constraint)"),
        ([{"id": 1}, {"id": 1}], "(?is:unique constraint.*); upsert_by=.* updates the row that is there"),
        ([{"id": 1}, {"id": 100}], "(?i:check constraint)"),
    ]
    if database.is_postgres:
        cases.append(([{"id": "one"}], 'invalid input syntax for type bigint: "one"'))
        cases.append(([{"id": 1, "text": "\x00"}], "invalid byte sequence"))
    for run, (rows, message) in enumerate(cases):
        where = rf"copying part 00000 \({len(rows)} rows\) into table answers in \w+://.*: the database says: .*"
        with pytest.raises(OutputError, match=where + message):
            write_all(write, rows, run=str(run))
        assert database.rows() == [], "all of a part or nothing"
        assert database.rows(table="penstock_commits") == []


@pytest.mark.parametrize("journaled", [False, True])
def test_parts_of_different_types_are_refused(sqlite: TestDatabase, tmp_path: Path, journaled: bool) -> None:
    """Before anything is published; or, split by split, before the first that does not fit."""
    options: dict[str, Any] = {"run_dir": tmp_path / "run"} if journaled else {}
    for _ in range(2):  # once more it is resumed, and refused again
        p = ps.Pipeline(workers=0, **options)
        p | ps.Create([{"a": 1}] * 5000 + [{"a": "x"}] * 5000) | ps.WriteToSql(sqlite.url, "answers")
        with pytest.raises(OutputError, match="column 'a' holds int and text, expected values of one type: put a ps.Map"):
            p.run()
    assert {type(a) for (a,) in sqlite.rows()} == ({int} if journaled else set())


def test_text_among_the_numbers_of_a_table_is_refused(sqlite: TestDatabase) -> None:
    sqlite.run("CREATE TABLE answers (a INTEGER, b REAL, c)")
    write = ps.WriteToSql(sqlite.url, "answers")
    for late in ({"a": "x"}, {"b": b"1"}, {"a": "1_0"}, {"b": "nan"}):
        with pytest.raises(OutputError, match=r"column '[ab]' holds .*, and the table has numbers there: put a ps\.Map"):
            write_all(write, [late], run=str(late))
    assert sqlite.rows() == []
    write_all(write, [{"a": "7", "b": " -1.5e1", "c": "x"}, {"a": None, "b": "0.5", "c": "y"}])
    assert sqlite.rows() == [(7, -15.0, "x"), (None, 0.5, "y")]


def test_a_table_of_ones_own_takes_parts_of_different_types(sqlite: TestDatabase) -> None:
    sqlite.run("CREATE TABLE answers (a TEXT)")
    p = ps.Pipeline(workers=0)
    p | ps.Create([{"a": 1}] * 5000 + [{"a": "x"}] * 5000) | ps.WriteToSql(sqlite.url, "answers")
    p.run()
    assert sorted(set(sqlite.rows())) == [("1",), ("x",)]
