"""Images for pipelines, decoded beside the data: the pipeline's own image processor does the rest beside the model."""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Sequence
from typing import Any

from penstock.errors import MissingPackageError
from penstock.handlers.huggingface_tokens import no_text, prepared, raise_bad_rows
from penstock.rows import shorten


def check_pillow() -> None:
    if importlib.util.find_spec("PIL") is None:
        raise MissingPackageError("pillow", "huggingface")


def decoded_images(examples: Sequence[Any]) -> list[Any]:
    """PIL images, upright and in RGB, of examples that are paths of files or the bytes of one. Others are left as they are:
    images, arrays, URLs."""
    images, errors = prepared(examples, _decoded)
    return raise_bad_rows(errors, images)


def _decoded(example: Any) -> Any:
    from PIL import Image, ImageOps, UnidentifiedImageError

    if isinstance(example, (bytes, bytearray, memoryview)):
        source: Any = io.BytesIO(example)
    elif isinstance(example, os.PathLike) or (isinstance(example, str) and "://" not in example[:16]):
        source = example
    elif example is None or not (isinstance(example, (str, Image.Image)) or hasattr(example, "shape")):
        raise no_text(example, "an image, its bytes, or the path of its file")
    else:
        return example
    try:
        with Image.open(source) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except FileNotFoundError:
        raise
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as exc:
        raise ValueError(f"the image {shorten(example, 80)} cannot be decoded: {type(exc).__name__}: {exc}") from exc
