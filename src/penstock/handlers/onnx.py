"""Handlers for ONNX models, by ONNX Runtime: of arrays, and of texts with their tokenizer."""

from penstock.handlers.catalog import check_installed
from penstock.handlers.onnx_models import OnnxModelHandlerNumpy
from penstock.handlers.onnx_text import OnnxTextModelHandler

# Found, not imported: describing a model and preparing rows need none of it.
check_installed("onnx")

__all__ = ["OnnxModelHandlerNumpy", "OnnxTextModelHandler"]
