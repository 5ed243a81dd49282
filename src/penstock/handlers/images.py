"""A handler for PyTorch models of images.

paths or bytes -> Pillow, beside the data -> uint8 arrays -> one tensor -> device -> scaled floats -> model -> CPU -> answers

Neither torch nor Pillow is imported here: workers that only decode need no torch, and the model's process no Pillow.
"""

from __future__ import annotations

import functools
import importlib.util
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Unpack

from penstock.errors import MissingPackageError, RowError, UsageError
from penstock.handlers.catalog import check_versions
from penstock.handlers.column_types import fits
from penstock.handlers.image_decoding import CHANNELS, ImageDecoding, import_pillow
from penstock.handlers.number_columns import check_names
from penstock.handlers.pytorch_loading import usable_device
from penstock.handlers.pytorch_models import (
    InferenceArgs,
    PytorchHandler,
    PytorchSettings,
    answers_of,
    float_dtype_of,
    run_model,
)
from penstock.handlers.row_shapes import naming_rows

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from PIL.Image import Image

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "PytorchImageModelHandler"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_PLAIN: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # models that take no other layout

T = TypeVar("T")
ImageExample: TypeAlias = "str | bytes | Image | Mapping[str, Any]"


class PytorchImageModelHandler(PytorchHandler["ImageExample"]):
    """Examples are images: paths or URLs, the bytes of files, PIL images, or dicts of `bytes` and `path` as Hugging Face's
    datasets have. They are decoded beside the data; the model gets one tensor [rows, channels, height, width] of its own
    floats, and answers with a tensor or a dict of tensors, rows first. An image that cannot be decoded is its row's failure.

    columns="image": the column that holds them: paths, bytes, or structs of both.
    """

    wraps_answers = True

    def __init__(
        self,
        *,
        size: int | Sequence[int] | None = None,
        crop: str | int | Sequence[int] | None = None,
        mode: str | None = "RGB",
        resample: str = "bilinear",
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        transform: Callable[[Image], Any] | None = None,
        **settings: Unpack[PytorchSettings],
    ) -> None:
        """Describe a model as PytorchModelHandlerTensor does, and what becomes of an image before it: first it is turned as
        its EXIF data say.

        size: of the short side in pixels, the other one in proportion; or (height, width), whatever the image's ratio. None
            keeps each image as large as it is; all of a batch must then be of one size.
        crop: cut the middle out of the resized image: so many pixels, or (height, width). "center": cover all of `size`, and
            cut off what is over it.
        mode: "RGB", "L" (grey) or "RGBA", of 8 bits a channel; transparency is dropped where the mode has none.
        resample: how Pillow resizes: "bilinear", "bicubic", "lanczos", "box", "hamming" or "nearest".
        mean, std: for each channel, or one for all: the model gets (value / 255 - mean) / std. None: value / 255, which is
            0 to 1. Many models want IMAGENET_MEAN and IMAGENET_STD; look at how yours was trained.
        transform: a function of the resized PIL image that gives an array or tensor, [channels, height, width] in most
            cases. The model gets these as they are, stacked: nothing is scaled, so there may be no mean and std. mode=None
            gives it images in the mode that they have.
        """
        super().__init__(settings)
        if importlib.util.find_spec("PIL") is None:
            raise MissingPackageError("pillow", "images")
        names = self.input_columns()
        if names is not None and len(names) > 1:
            raise UsageError(f'columns={list(names)}: expected the one column that holds the images, as in columns="image"')
        self._decoding = ImageDecoding(
            size=_as_size(size), crop=_as_size(crop), mode=mode, resample=resample, transform=transform
        )
        if transform is not None and (mean is not None or std is not None):
            raise UsageError("mean= and std= are not applied to what transform= gives; leave them out, or do it there")
        self._mean = _per_channel("mean", mean, mode)
        self._std = _per_channel("std", std, mode)
        if self._std is not None and 0.0 in self._std:
            raise UsageError(f"std={std!r}: expected numbers other than 0, by which values are divided")

    def load_model(self) -> torch.nn.Module:
        check_versions("images")
        return super().load_model()

    def load_prepare(self) -> ImageDecoding:
        import_pillow()
        return self._decoding

    def prepare(self, examples: Sequence[Any], tool: ImageDecoding, inference_args: InferenceArgs = None) -> list[Any]:
        return tool.decode_all(examples)

    def examples_of(self, table: pa.Table) -> Sequence[Any]:
        values: list[Any] = table.column(0).to_pylist()
        return values

    def check_columns(self, schema: pa.Schema) -> None:
        names = self.input_columns()
        if names is None:
            raise UsageError(
                f"the rows are dicts with {list(schema.names)}, but the model takes images; name the column of their paths "
                'or bytes with columns="..."'
            )
        check_names(names, schema.names)
        kind = schema.field(schema.names.index(names[0])).type
        if not fits(kind, "images"):
            raise UsageError(f"column {names[0]!r} holds {kind}; expected paths or bytes of images, or structs of both")

    def run_inference(self, batch: Sequence[Any], model: torch.nn.Module, inference_args: InferenceArgs = None) -> Any:
        called, dtype = self._calling(model), float_dtype_of(model)

        def call(images: torch.Tensor, **arguments: Any) -> Any:
            def answer(layout: torch.memory_format) -> Any:
                floats = self._floats(images, dtype, layout)
                with naming_rows(floats):
                    return called(floats, **arguments)

            return _in_its_layout(answer, model, images)

        return run_model(
            call, _stacked(batch), usable_device(self._device), inference_args, lambda output: answers_of(output, len(batch))
        )

    def _floats(self, images: torch.Tensor, dtype: torch.dtype, layout: torch.memory_format) -> torch.Tensor:
        """What the model takes, of uint8 [rows, height, width, channels] or what a transform gave; done on the device."""
        import torch

        if self._decoding.transform is not None:
            floats = images.to(dtype) if images.is_floating_point() else images
            return floats.contiguous(memory_format=layout) if floats.dim() == 4 else floats
        floats = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=layout).div_(255)
        if self._mean is not None:
            floats.sub_(_per_channel_on(floats.device, self._mean))
        if self._std is not None:
            floats.div_(_per_channel_on(floats.device, self._std))
        return floats.to(dtype)

    def changes_rows(self) -> bool:
        """Only where a function of the user's might."""
        return self._decoding.transform is not None


def _in_its_layout(answer: Callable[[torch.memory_format], T], model: torch.nn.Module, images: torch.Tensor) -> T:
    """The answer to images whose channels are side by side in memory, for which convolutions on a CPU take two thirds of the
    time; of a model that cannot take these, for it looks at their memory with view(), the answer to plain ones."""
    import torch

    if images.device.type == "cpu" and model not in _PLAIN:
        try:
            return answer(torch.channels_last)
        except RuntimeError as exc:
            if "stride" not in str(exc):
                raise
        _PLAIN.add(model)
    return answer(torch.contiguous_format)


def _stacked(arrays: Sequence[Any]) -> torch.Tensor:
    import numpy as np
    import torch

    shapes = sorted({str(tuple(array.shape)) for array in arrays})
    if len(shapes) > 1:
        raise RowError(
            f"the images of one batch must have one shape, but saw {', '.join(shapes[:5])}; give size=(height, width), or "
            'size=... with crop="center", or max_batch_size=1'
        )
    if all(isinstance(array, np.ndarray) for array in arrays):
        return torch.from_numpy(np.stack(arrays))
    return torch.stack([torch.as_tensor(array) for array in arrays])


@functools.lru_cache(64)
def _per_channel_on(device: torch.device, numbers: tuple[float, ...]) -> torch.Tensor:
    """Numbers to apply to images. Kept: making them for each batch would wait for what the device is at."""
    import torch

    return torch.tensor(numbers, device=device).view(-1, 1, 1)


def _as_size(size: Any) -> Any:
    return tuple(size) if isinstance(size, list) else size


def _per_channel(name: str, given: Any, mode: str | None) -> tuple[float, ...] | None:
    if given is None:
        return None
    channels = CHANNELS.get(mode or "", 0)
    numbers = tuple(given) if isinstance(given, Sequence) else (given,) * channels
    if len(numbers) != channels or not all(isinstance(number, (int, float)) for number in numbers):
        raise UsageError(f"{name}={given!r}: expected a number, or {channels} of them for the channels of mode={mode!r}")
    return tuple(float(number) for number in numbers)
