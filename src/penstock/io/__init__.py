"""Sources and sinks: rows from and to memory, files and databases. Beam's spelling works too: `ps.io.ReadFromText`."""

import importlib
from typing import Any

# What users find here, imported when it is asked for.
_PLACES = {
    "Read": "source",
    "ReadFromCsv": "csv",
    "ReadFromJsonl": "jsonl",
    "ReadFromParquet": "parquet",
    "ReadFromText": "lines",
    "Write": "sink",
    "WriteToCsv": "csv",
    "WriteToJsonl": "jsonl",
    "WriteToParquet": "parquet",
    "WriteToSql": "sql",
    "WriteToText": "lines",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_PLACES)}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
