"""Penstock: ML inference over batch data as one transform in a pipeline."""

from penstock.engines import LocalEngine
from penstock.errors import BadRowsError, EngineError, PenstockError, RowError, UsageError
from penstock.failures import Failure
from penstock.inference.handler import ModelHandler
from penstock.inference.keyed import KeyedModelHandler, KeyModelMapping, MaybeKeyedModelHandler
from penstock.inference.transform import RunInference
from penstock.io.csv import ReadFromCsv, WriteToCsv
from penstock.io.file_pattern import FilePattern, WatchFilePattern
from penstock.io.files import InputFile
from penstock.io.jsonl import ReadFromJsonl, WriteToJsonl
from penstock.io.lines import ReadFromText, WriteToText
from penstock.io.memory import Create
from penstock.io.model_versions import KeyModelPathMapping, ModelMetadata, ModelSource, WatchModels
from penstock.io.parquet import ReadFromParquet, WriteToParquet
from penstock.io.sink import Part, Sink, Write, Writer
from penstock.io.source import Read, Source, SplitGoal
from penstock.io.sql import WriteToSql
from penstock.observe.result import RunResult
from penstock.options import RunOptions
from penstock.pipeline.graph import PCollection, PTransform
from penstock.pipeline.pipeline import Engine, Pipeline
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
    "PredictionResult",
    "Read",
    "ReadFromCsv",
    "ReadFromJsonl",
    "ReadFromParquet",
    "ReadFromText",
    "Reshuffle",
    "Retry",
    "RowError",
    "RunInference",
    "RunOptions",
    "RunResult",
    "Sink",
    "Source",
    "SplitGoal",
    "TaggedOutput",
    "UsageError",
    "WatchFilePattern",
    "WatchModels",
    "Write",
    "WriteToCsv",
    "WriteToJsonl",
    "WriteToParquet",
    "WriteToSql",
    "WriteToText",
    "Writer",
    "__version__",
]
