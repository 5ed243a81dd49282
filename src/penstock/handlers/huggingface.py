"""Handlers for Hugging Face models: transformers pipelines and sentence-transformers encoders.

Both tokenise texts beside the data, once, without torch: rows of like length share a batch, and the process that holds the
model only pads, moves and runs.
"""

import importlib.util

from penstock.errors import MissingPackageError

try:
    from penstock.handlers.huggingface_encoders import SentenceTransformerModelHandler
    from penstock.handlers.huggingface_pipelines import HuggingFacePipelineModelHandler, default_pipeline_inference_fn
except ModuleNotFoundError as exc:
    raise MissingPackageError(exc.name or "transformers", "huggingface") from exc

# Found, not imported: describing a model and preparing rows need neither, and their imports take seconds.
for _package in ("torch", "transformers"):
    if importlib.util.find_spec(_package) is None:
        raise MissingPackageError(_package, "huggingface")

__all__ = ["HuggingFacePipelineModelHandler", "SentenceTransformerModelHandler", "default_pipeline_inference_fn"]
