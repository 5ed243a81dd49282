"""Handlers for Hugging Face models: transformers pipelines and sentence-transformers encoders.

Both count the tokens of texts before the model sees them, so that rows of like length share a batch.
"""

from penstock.errors import MissingPackageError

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as exc:
    raise MissingPackageError(exc.name or "transformers", "huggingface") from exc

from penstock.handlers.huggingface_encoders import SentenceTransformerModelHandler
from penstock.handlers.huggingface_pipelines import HuggingFacePipelineModelHandler, default_pipeline_inference_fn

__all__ = ["HuggingFacePipelineModelHandler", "SentenceTransformerModelHandler", "default_pipeline_inference_fn"]
