"""JSON Lines: one JSON value on each line. Files are cut and read as lines of text."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from penstock.blocks import Block, rows_of
from penstock.errors import InputError, OutputError
from penstock.io.files import checked_path
from penstock.io.lines import LineRange, LineRun, TextSource, blocks_of, line_runs
from penstock.io.parts import FileSink, FileWriter, WriteFiles
from penstock.io.records import as_lists, plain
from penstock.io.sink import Part
from penstock.io.source import ReadFiles

PARSED_GROWTH = 4  # parsed JSON takes about this many times the bytes of its text


class JsonlSource(TextSource):
    """The values of JSON Lines files."""

    def read(self, split: tuple[LineRange, ...]) -> Iterator[Block]:
        runs = (run for piece in split for run in line_runs(piece))
        return blocks_of((_parse_json(run), PARSED_GROWTH * len(run.data)) for run in runs)


def _parse_json(run: LineRun) -> list[Any]:
    values = []
    for number, line in enumerate(run.lines()):
        if not line or line.isspace():
            continue
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError) as exc:
            start = line if len(line) <= 60 else f"{line[:60]}..."
            raise InputError(
                f"{run.path}, in the line at byte {run.offset_of(number)}: not JSON ({exc}): {start!r}; "
                "expected one JSON value on each line; correct the line, or read with ReadFromText and parse in a step"
            ) from exc
    return values


class JsonlWriter(FileWriter[Any]):
    """Writes one part: each row as JSON, on a line of its own."""

    def add(self, block: Block) -> None:
        rows = rows_of(block)
        try:
            data = "\n".join(map(_to_json, rows)).encode()
        except UnicodeEncodeError:
            data = "\n".join(_to_json(row, _encode_ascii) for row in rows).encode()
        self.file.write(data + b"\n")
        self.rows_written += data.count(b"\n") + 1


def _refuse(value: Any) -> Any:
    raise TypeError(f"a value of type {type(value).__name__}")


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_refuse).encode
_encode_ascii = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_refuse).encode


def _to_json(row: Any, encode: Callable[[Any], str] = _encode) -> str:
    try:
        value = plain(row, as_lists)
        try:
            return encode(value)
        except ValueError:  # a number that JSON has no word for; looked for only when there is one
            return encode(_without_nan(value))
    except (TypeError, ValueError, RecursionError) as exc:
        raise OutputError(
            f"WriteToJsonl: a row of type {type(row).__name__} is not JSON: {exc}; expected dicts, lists, text, "
            "numbers, None, arrays, NamedTuples or dataclasses: put a ps.Map before it that makes such a row, or use "
            "WriteToParquet, whose columns take bytes, times and decimals, too"
        ) from exc


def _without_nan(value: Any) -> Any:
    """The value with null where a number is NaN or infinite: no line may be one that other readers refuse, and the failures
    of a run are often rows with just such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    if isinstance(value, dict):
        return {
            str(key) if isinstance(key, float) and not math.isfinite(key) else key: _without_nan(item)
            for key, item in value.items()
        }
    return value


class JsonlSink(FileSink[Any]):
    """JSON Lines files."""

    suffix = ".jsonl"

    def open(self, part: Part) -> JsonlWriter:
        return JsonlWriter(self.places(part))


class ReadFromJsonl(ReadFiles[Any]):
    """One row for each line: the JSON value it holds. Blank lines are skipped. Files are found as by ReadFromText."""

    def __init__(self, pattern: str | os.PathLike[str]) -> None:
        super().__init__(JsonlSource(checked_path(pattern, "ReadFromJsonl")))


class WriteToJsonl(WriteFiles[Any]):
    """Each row as one JSON value on a line of `path`/part-00000.jsonl and so on, in order.

    NamedTuples (such as PredictionResult) and dataclasses become objects; arrays and tensors become lists. NaN and
    infinities, which JSON does not have, become null. `overwrite` as in WriteToText.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        super().__init__(JsonlSink(checked_path(path, "WriteToJsonl"), overwrite))
