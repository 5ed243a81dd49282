"""For pipelines of Apache Beam: RunInference and handlers under the names that Beam has for them."""

from penstock.beam.handlers import from_beam
from penstock.beam.transform import RunInference, RunInferenceDLQ
from penstock.inference.handler import ModelHandler
from penstock.inference.keyed import KeyedModelHandler, KeyModelMapping, MaybeKeyedModelHandler
from penstock.io.model_versions import KeyModelPathMapping, ModelMetadata
from penstock.rows import PredictionResult

__all__ = [
    "KeyModelMapping",
    "KeyModelPathMapping",
    "KeyedModelHandler",
    "MaybeKeyedModelHandler",
    "ModelHandler",
    "ModelMetadata",
    "PredictionResult",
    "RunInference",
    "RunInferenceDLQ",
    "from_beam",
]
