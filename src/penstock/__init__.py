"""Penstock: ML inference over batch data as one transform in a pipeline."""

import importlib
import typing

from penstock.errors import BadRowsError, EngineError, PenstockError, RowError, UsageError
from penstock.failures import Failure
from penstock.io.memory import Create
from penstock.io.sink import Part, Sink, Write, Writer
from penstock.io.source import Read, Source, SplitGoal
from penstock.observe.result import RunResult
from penstock.options import RunOptions
from penstock.pipeline.beam_options import PipelineOptions
from penstock.pipeline.graph import PCollection, PTransform
from penstock.pipeline.pipeline import Engine, Pipeline
from penstock.pipeline.shared_objects import Shared
from penstock.pipeline.transforms import (
    BatchElements,
    DoFn,
    Filter,
    FlatMap,
    Flatten,
    GroupIntoBatches,
    Map,
    MapBatches,
    ParDo,
    Partition,
    Reshuffle,
    TaggedOutput,
)
from penstock.retry import Retry
from penstock.rows import PredictionResult
from penstock.version import __version__
from penstock.window import WindowInto

# What a pipeline is made of is here at once; what only some need, when it is asked for. Every worker imports this file.
if typing.TYPE_CHECKING:
    from penstock.engines import LocalEngine
    from penstock.inference.handler import ModelHandler
    from penstock.inference.handler_settings import HandlerSettings
    from penstock.inference.keyed import KeyedModelHandler, KeyModelMapping, MaybeKeyedModelHandler
    from penstock.inference.remote_handler import RateLimitExceeded, RemoteModelHandler
    from penstock.inference.transform import RunInference
    from penstock.io.csv import ReadFromCsv, WriteToCsv
    from penstock.io.file_pattern import FilePattern, WatchFilePattern
    from penstock.io.files import InputFile
    from penstock.io.jsonl import ReadFromJsonl, WriteToJsonl
    from penstock.io.lines import ReadFromText, WriteToText
    from penstock.io.model_versions import KeyModelPathMapping, ModelMetadata, ModelSource, WatchModels
    from penstock.io.parquet import ReadFromParquet, WriteToParquet
    from penstock.io.sql import WriteToSql

_LATER = {
    "LocalEngine": "penstock.engines",
    "ModelHandler": "penstock.inference.handler",
    "HandlerSettings": "penstock.inference.handler_settings",
    "KeyModelMapping": "penstock.inference.keyed",
    "KeyedModelHandler": "penstock.inference.keyed",
    "MaybeKeyedModelHandler": "penstock.inference.keyed",
    "RateLimitExceeded": "penstock.inference.remote_handler",
    "RemoteModelHandler": "penstock.inference.remote_handler",
    "RunInference": "penstock.inference.transform",
    "ReadFromCsv": "penstock.io.csv",
    "WriteToCsv": "penstock.io.csv",
    "FilePattern": "penstock.io.file_pattern",
    "WatchFilePattern": "penstock.io.file_pattern",
    "InputFile": "penstock.io.files",
    "ReadFromJsonl": "penstock.io.jsonl",
    "WriteToJsonl": "penstock.io.jsonl",
    "ReadFromText": "penstock.io.lines",
    "WriteToText": "penstock.io.lines",
    "KeyModelPathMapping": "penstock.io.model_versions",
    "ModelMetadata": "penstock.io.model_versions",
    "ModelSource": "penstock.io.model_versions",
    "WatchModels": "penstock.io.model_versions",
    "ReadFromParquet": "penstock.io.parquet",
    "WriteToParquet": "penstock.io.parquet",
    "WriteToSql": "penstock.io.sql",
}

__all__ = [
    "BadRowsError",
    "BatchElements",
    "Create",
    "DoFn",
    "Engine",
    "EngineError",
    "Failure",
    "FilePattern",
    "Filter",
    "FlatMap",
    "Flatten",
    "GroupIntoBatches",
    "HandlerSettings",
    "InputFile",
    "KeyModelMapping",
    "KeyModelPathMapping",
    "KeyedModelHandler",
    "LocalEngine",
    "Map",
    "MapBatches",
    "MaybeKeyedModelHandler",
    "ModelHandler",
    "ModelMetadata",
    "ModelSource",
    "PCollection",
    "PTransform",
    "ParDo",
    "Part",
    "Partition",
    "PenstockError",
    "Pipeline",
    "PipelineOptions",
    "PredictionResult",
    "RateLimitExceeded",
    "Read",
    "ReadFromCsv",
    "ReadFromJsonl",
    "ReadFromParquet",
    "ReadFromText",
    "RemoteModelHandler",
    "Reshuffle",
    "Retry",
    "RowError",
    "RunInference",
    "RunOptions",
    "RunResult",
    "Shared",
    "Sink",
    "Source",
    "SplitGoal",
    "TaggedOutput",
    "UsageError",
    "WatchFilePattern",
    "WatchModels",
    "WindowInto",
    "Write",
    "WriteToCsv",
    "WriteToJsonl",
    "WriteToParquet",
    "WriteToSql",
    "WriteToText",
    "Writer",
    "__version__",
]


def __getattr__(name: str) -> typing.Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_where_handlers_are(name)}")
    found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return found


def _where_handlers_are(name: str) -> str:
    """For those who look for the handler of a framework here: they are in modules of their own, which import it."""
    if "ModelHandler" not in name:
        return ""
    from penstock.handlers.catalog import FAMILIES

    modules = [family.module for family in FAMILIES if name in family.handlers]
    return f"; from {modules[0]} import {name}" if modules else "; `penstock handlers` lists those of frameworks"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
