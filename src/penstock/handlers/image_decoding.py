"""Images as arrays: read, decode, turn upright, resize, cut. Pillow is imported where that is done."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import RowError, UsageError
from penstock.handlers.catalog import PILLOW, check_needs
from penstock.handlers.prepared_rows import prepared, raise_bad_rows
from penstock.io.files import open_cause, store_of, without_secrets
from penstock.rows import safe_str

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

CHANNELS = {"RGB": 3, "L": 1, "RGBA": 4}  # by mode
ORIENTATION = 0x0112  # the tag of EXIF
RESAMPLINGS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
DEEP = ("I", "F")  # how the modes of more than 8 bits a channel begin
Size = tuple[int, int]  # height, width


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageDecoding:
    """What becomes of an image before the model. Checked when made; see PytorchImageModelHandler for its settings."""

    size: int | Size | None = None
    crop: str | int | Size | None = None
    mode: str | None = "RGB"
    resample: str = "bilinear"
    transform: Callable[[Image], Any] | None = None

    def __post_init__(self) -> None:
        for name, given in [("size", self.size), ("crop", None if self.crop == "center" else self.crop)]:
            if given is not None and not _is_size(given):
                expected = "a whole number of pixels, or (height, width)" + ', or "center"' * (name == "crop")
                raise UsageError(f"{name}={given!r}: expected {expected}")
        if self.crop is not None and self.size is None:
            raise UsageError(f"crop={self.crop!r} cuts the middle out of resized images; give their size=, too")
        if self.crop is not None and any(cut > side for cut, side in zip(self.cut(), _pair(self.size), strict=True)):
            raise UsageError(f"crop={self.crop!r} is larger than size={self.size!r}, which images are resized to before")
        if self.mode not in (*CHANNELS, None):
            raise UsageError(f"mode={self.mode!r}: expected one of {', '.join(map(repr, CHANNELS))}, or None")
        if self.mode is None and self.transform is None:
            raise UsageError("mode=None leaves images as they are; give a transform= that makes arrays of them, too")
        if self.resample not in RESAMPLINGS:
            raise UsageError(f"resample={self.resample!r}: expected one of {', '.join(map(repr, RESAMPLINGS))}")
        if self.transform is not None and not callable(self.transform):
            raise UsageError(f"transform={self.transform!r}: expected a function of a PIL image")

    def cut(self) -> Size:
        """The size of what is cut out of the middle."""
        return _pair(self.size if self.crop == "center" else self.crop)

    def decode_all(self, examples: Sequence[Any]) -> list[Any]:
        """One array for each example; BadRowsError for those that are no images, with the arrays of the others."""
        made, errors = prepared(examples, self.decode)
        return raise_bad_rows(errors, made)

    def decode(self, example: Any) -> Any:
        """The array of one image, uint8 [height, width, channels], or what transform() makes of the image."""
        image = self.upright(example)
        if self.transform is None:
            return _array(image)
        made = self.transform(image)
        if not hasattr(made, "shape") or not hasattr(made, "dtype"):
            raise RowError(f"transform= returned {type(made).__name__} for {_named(example)}; expected an array or a tensor")
        return made

    def upright(self, example: Any) -> Image:
        """The image, decoded, upright, in the right mode and size."""
        from PIL import ImageOps

        image = _opened(example)
        try:
            image.load()
            if image.getexif().get(ORIENTATION, 1) != 1:  # where there is none, it would be copied
                image = ImageOps.exif_transpose(image)
            return self._resized(image if self.mode is None else _converted(image, self.mode))
        except RowError:
            raise
        except Exception as exc:
            raise RowError(f"{_named(example)} cannot be decoded: {type(exc).__name__}: {safe_str(exc)}") from exc

    def _resized(self, image: Image) -> Image:
        if self.size is None:
            return image
        height, width = self._target(image.height, image.width)
        if (height, width) != (image.height, image.width):
            from PIL.Image import Resampling

            image = image.resize((width, height), Resampling[self.resample.upper()])
        if self.crop is None:
            return image
        cut_height, cut_width = self.cut()
        top, left = round((height - cut_height) / 2), round((width - cut_width) / 2)
        return image.crop((left, top, left + cut_width, top + cut_height))

    def _target(self, height: int, width: int) -> Size:
        """What an image of this size is resized to, before its middle is cut out: sides keep their ratio, and cover `size`,
        unless that is both sides and nothing is cut to it."""
        if isinstance(self.size, tuple) and self.crop != "center":
            return self.size
        least_height, least_width = _pair(self.size)
        if height * least_width <= width * least_height:  # the height needs more of it
            return least_height, max(least_width, int(width * least_height / height))
        return max(least_height, int(height * least_width / width)), least_width


def import_pillow() -> Any:
    """The package PIL, or MissingPackageError."""
    check_needs("images", [PILLOW])
    import PIL.Image

    return PIL


def _opened(example: Any) -> Image:
    """The image behind a path, bytes, a PIL image, or a dict of bytes and path as the Hugging Face datasets have."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(example, Image.Image):
        return example
    content = _content(example)
    try:
        return Image.open(io.BytesIO(content))
    except UnidentifiedImageError as exc:
        raise RowError(
            f"{_named(example)} is not an image that Pillow can read: {len(content)} bytes that begin with {content[:8]!r}"
        ) from exc
    except Exception as exc:
        raise RowError(f"{_named(example)} cannot be decoded: {type(exc).__name__}: {safe_str(exc)}") from exc


def _content(example: Any) -> bytes:
    if isinstance(example, Mapping):
        given = example.get("bytes")
        example = example.get("path") if given is None else given
    if isinstance(example, (bytes, bytearray, memoryview)):
        return bytes(example)
    if isinstance(example, (str, os.PathLike)):
        return _read(os.fspath(example))
    if example is None:
        raise RowError("the image is null; expected a path, bytes or a PIL image")
    raise RowError(f"an image must be a path, bytes or a PIL image, but saw {type(example).__name__}")


def _read(path: str) -> bytes:
    """The bytes of a file. Errors other than these three may pass, and stay what they are."""
    shown = repr(without_secrets(path))
    try:
        filesystem, inner_path = store_of(path, UsageError)
        content: bytes = filesystem.cat_file(inner_path)
        return content
    except FileNotFoundError as exc:
        raise RowError(f"image {shown} does not exist, where it is read") from open_cause(exc)
    except IsADirectoryError as exc:
        raise RowError(f"image {shown} is a directory") from open_cause(exc)
    except PermissionError as exc:
        raise RowError(f"image {shown} may not be read by this user") from open_cause(exc)
    except UsageError as exc:
        raise RowError(f"image {exc}") from exc.__cause__


def _converted(image: Image, mode: str) -> Image:
    if image.mode.startswith(DEEP):
        raise RowError(
            f"an image of mode {image.mode!r} has more than 8 bits a channel, which mode={mode!r} would cut off; convert it "
            "in a step before, or give mode=None with a transform="
        )
    return image if image.mode == mode else image.convert(mode)


def _array(image: Image) -> np.ndarray[Any, Any]:
    import numpy as np

    array = np.array(image)
    return array[:, :, None] if array.ndim == 2 else array


def _named(example: Any) -> str:
    """An example for messages."""
    if isinstance(example, Mapping):
        path = example.get("path")
        return _named(example.get("bytes") if path is None else path)
    if isinstance(example, (str, os.PathLike)):
        return f"image {without_secrets(os.fspath(example))!r}"
    return "the image"


def _is_size(given: object) -> bool:
    sides = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given,)
    return all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides)


def _pair(size: Any) -> Size:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
