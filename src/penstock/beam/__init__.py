"""For pipelines of Apache Beam: RunInference and handlers under the names that Beam has for them."""

from apache_beam.ml.inference.base import RateLimitExceeded, RemoteModelHandler

from penstock.beam.handlers import BeamBase as ModelHandler
from penstock.beam.handlers import KeyedModelHandler, KeyModelMapping, MaybeKeyedModelHandler, from_beam
from penstock.beam.transform import RunInference, RunInferenceDLQ
from penstock.inference.handler import ExampleT, ModelT, PredictionT
from penstock.io.model_versions import KeyModelPathMapping, ModelMetadata
from penstock.rows import PredictionResult

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
    "from_beam",
]
