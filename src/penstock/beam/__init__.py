"""For pipelines of Apache Beam: RunInference and handlers under the names that Beam has for them."""

import importlib
import typing

from penstock.beam.model_handler import ModelHandler
from penstock.inference.handler import ExampleT, ModelT, PredictionT
from penstock.io.model_versions import KeyModelPathMapping, ModelMetadata
from penstock.rows import PredictionResult

# What needs Beam is imported when it is asked for: the process of a model, which has no use for it, then starts in half
# the time, also if its handler derives from the ModelHandler above.
if typing.TYPE_CHECKING:
    from apache_beam.ml.inference.base import RateLimitExceeded, RemoteModelHandler

    from penstock.beam.handlers import KeyedModelHandler, KeyModelMapping, MaybeKeyedModelHandler, from_beam
    from penstock.beam.transform import RunInference, RunInferenceDLQ
    from penstock.beam.watching import WatchFilePattern

__all__ = [
    "ExampleT",
    "KeyModelMapping",
    "KeyModelPathMapping",
    "KeyedModelHandler",
    "MaybeKeyedModelHandler",
    "ModelHandler",
    "ModelMetadata",
    "ModelT",
    "PredictionResult",
    "PredictionT",
    "RateLimitExceeded",
    "RemoteModelHandler",
    "RunInference",
    "RunInferenceDLQ",
    "WatchFilePattern",
    "from_beam",
]

_LATER = {
    **dict.fromkeys(["RateLimitExceeded", "RemoteModelHandler"], "apache_beam.ml.inference.base"),
    **dict.fromkeys(
        ["KeyModelMapping", "KeyedModelHandler", "MaybeKeyedModelHandler", "from_beam"], "penstock.beam.handlers"
    ),
    **dict.fromkeys(["RunInference", "RunInferenceDLQ"], "penstock.beam.transform"),
    "WatchFilePattern": "penstock.beam.watching",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
