"""Values on their way into Parquet: each as it is, or refused with its column and what to do."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from penstock.errors import OutputError
from penstock.failures import Failure
from penstock.io.parquet_writing import GROUP_ROWS
from test_parquet import written

NOON = datetime(2024, 2, 29, 12, 30, 0, 5)

# What the first row group holds, and what comes after it.
LATER: list[tuple[Any, Any]] = [
    (1, 0.75),
    (1, np.float32(0.75)),
    ([1], [0.75]),
    (np.ones(1, int), np.array([0.75])),
    ({"a": 1}, {"a": 0.75}),
    ({"a": 1}, {"a": 1, "b": 2}),
    ([{"a": 1}], [{"b": 1}]),
    (Decimal("1.1"), Decimal("1.15")),
    (np.float32(1), 0.1),
    (date(2024, 2, 29), NOON),
    (NOON, NOON.replace(tzinfo=UTC)),
    (np.datetime64("2024-02-29T12:30", "s"), NOON),
    ("text", b"bytes"),
    (1, True),
    (True, 1),
    ("1", 1),
    (None, 1),
]


@pytest.mark.parametrize(("first", "later"), LATER, ids=map(str, range(len(LATER))))
def test_a_later_value_is_written_as_it_is_or_refused(tmp_path: Path, first: Any, later: Any) -> None:
    group = pa.table({"x": pa.array([first] * GROUP_ROWS)})
    with pytest.raises(OutputError, match=r"column 'x'.*; make the values alike in a step before, or pass schema="):
        written(tmp_path / "rows", group, [{"x": later}])
    with pytest.raises(OutputError, match=r"column 'x' holds .*, expected .*; make the values alike"):
        written(tmp_path / "table", group, pa.table({"x": pa.array([later])}))


GIVEN: list[tuple[pa.DataType, Any]] = [
    (pa.int64(), 1.75),
    (pa.int64(), np.float64(1.75)),
    (pa.int8(), 300),
    (pa.list_(pa.int64()), [1.75]),
    (pa.struct({"a": pa.int64()}), {"a": 1, "b": 2}),
    (pa.map_(pa.string(), pa.int64()), {"a": 1.75}),
    (pa.decimal128(5, 1), Decimal("1.25")),
    (pa.float32(), 1e300),
    (pa.float32(), 2**24 + 1),
    (pa.date32(), NOON),
    (pa.timestamp("s"), NOON),
    (pa.timestamp("us"), NOON.replace(tzinfo=UTC)),
    (pa.timestamp("us", "UTC"), NOON),
    (pa.time32("s"), time(1, 2, 3, 4)),
    (pa.string(), b"bytes"),
    (pa.binary(), "text"),
    (pa.bool_(), 2),
]


@pytest.mark.parametrize(("kind", "value"), GIVEN, ids=map(str, range(len(GIVEN))))
def test_a_value_that_the_schema_cannot_hold_is_refused(tmp_path: Path, kind: pa.DataType, value: Any) -> None:
    schema = pa.schema({"id": pa.int64(), "x": kind})
    with pytest.raises(OutputError, match=r"column 'x'.*; make the values alike in a step before, or pass schema="):
        written(tmp_path / "rows", [{"id": 1, "x": value}], schema=schema)
    table = pa.table({"id": [1], "x": pa.array([value])})
    with pytest.raises(OutputError, match=r"column 'x' holds .*, expected .*; make the values alike"):
        written(tmp_path / "table", table, schema=schema)


# This version cannot read back a null among fixed-size lists that it has written itself.
READS_NO_NULL = pytest.mark.xfail(pa.__version__ == "25.0.1", reason="pyarrow 25.0.1", strict=True)
HELD: list[Any] = [
    (pa.float64(), 1, 1.0),
    (pa.float32(), 0.1, np.float32(0.1)),  # the one way in which values are rounded
    pytest.param(pa.list_(pa.float32(), 1), [0.1], [np.float32(0.1)], marks=READS_NO_NULL),
    (pa.int64(), 2.0, 2),
    (pa.uint64(), 2**63, 2**63),
    (pa.decimal128(6, 2), 12, Decimal("12.00")),
    (pa.decimal128(6, 3), Decimal("1.25"), Decimal("1.250")),
    (pa.timestamp("ns"), NOON, pd.Timestamp(NOON)),
    (pa.struct({"a": pa.int64(), "b": pa.string()}), {"a": 1}, {"a": 1, "b": None}),
    (pa.map_(pa.string(), pa.int64()), {"a": 1}, [("a", 1)]),
    (pa.dictionary(pa.int32(), pa.string()), "a", "a"),
    (pa.large_string(), np.str_("a"), "a"),
]


@pytest.mark.parametrize(("kind", "value", "expected"), HELD, ids=map(str, range(len(HELD))))
def test_a_value_that_the_schema_can_hold_is_written(tmp_path: Path, kind: pa.DataType, value: Any, expected: Any) -> None:
    out = written(tmp_path, [{"x": value}, {"x": None}], schema=pa.schema({"x": kind}))
    assert out["x"].to_pylist() == [expected, None]


MIXED: list[list[Any]] = [
    [date(2024, 2, 29), NOON],
    [NOON, NOON.replace(tzinfo=UTC)],
    [{"at": date(2024, 2, 29)}, {"at": NOON}],
    [["text"], [b"bytes"]],
    ["text", b"bytes"],
    [0.5, True],
    [np.bool_(True), 1],
    [time(1, 2, tzinfo=UTC)],
    [pd.Timestamp("2024-02-29T12:30:00.000000005")],
    [2**63],
]


@pytest.mark.parametrize("values", MIXED, ids=map(str, range(len(MIXED))))
def test_values_that_no_one_type_holds_are_refused(tmp_path: Path, values: list[Any]) -> None:
    with pytest.raises(OutputError, match=r"column 'x': .*; make the values alike in a step before, or pass schema="):
        written(tmp_path / "a", [{"x": value} for value in values])
    if len(values) > 1:
        with pytest.raises(OutputError, match=r"make the values alike in a step before, or pass schema="):
            written(tmp_path / "b", *([{"x": value}] for value in values))


def test_values_of_numpy_are_written(tmp_path: Path) -> None:
    moment = np.datetime64("2024-02-29T12:30:00.000000005")
    row = {"text": np.str_("a"), "bytes": np.bytes_(b"b"), "flag": np.bool_(True), "at": np.array([moment])}
    out = written(tmp_path, [row])
    assert out.to_pylist() == [{"text": "a", "bytes": b"b", "flag": True, "at": [pd.Timestamp(moment)]}]


def test_rows_that_failed_are_written_with_what_arrow_makes_of_them(tmp_path: Path) -> None:
    """Many with one message, whose rows are alike, and some that are not."""
    alike = [{"b": at, "a": at / 2, "n": None, "l": [at, None], "t": "x", "z": b"y"} for at in range(100)]
    mixed = [*alike, {"b": 1, "other": date(2024, 2, 29)}]
    for rows in (alike, mixed):
        ids = [None if at % 3 else "m" for at in range(len(rows))]
        failures = [Failure("s", "raised", "ValueError", "no", "why" * 99, model_id=model_id) for model_id in ids]
        out = written(tmp_path, list(zip(rows, failures, strict=True)))
        assert out.schema.field("row").type == pa.array(rows).type
        assert out["row"].to_pylist() == pa.array(rows).to_pylist()
        assert out["traceback"].to_pylist() == ["why" * 99] * len(rows)
        assert out["model_id"].to_pylist() == ids
        assert {out.schema.field(name).type for name in ("message", "traceback", "model_id")} == {pa.string()}
