"""Penstock's handlers, which note when each batch is answered; all else is theirs."""

from __future__ import annotations

from gpu_progress import Noting

from penstock.handlers.huggingface import SentenceTransformerModelHandler
from penstock.handlers.images import PytorchImageModelHandler


class NotingEncoderHandler(Noting, SentenceTransformerModelHandler):
    pass


class NotingImageHandler(Noting, PytorchImageModelHandler):
    pass
