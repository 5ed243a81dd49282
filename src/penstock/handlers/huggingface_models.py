"""What the Hugging Face handlers share: settings, devices, tokens counted before the model sees them, loading."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias, TypedDict

import torch
import transformers
from transformers.utils import logging as transformers_logging

from penstock.blocks import size_of
from penstock.errors import InputError, UsageError
from penstock.handlers.huggingface_tokens import Text, TokenCounter, shared_counter, texts_of
from penstock.handlers.pytorch_loading import device_name
from penstock.inference.handler import ModelHandler
from penstock.rows import PredictionResult

InferenceArgs: TypeAlias = Mapping[str, Any] | None


class BatchSettings(TypedDict, total=False):
    """The settings of ModelHandler, for both handlers."""

    min_batch_size: int | None
    max_batch_size: int | None
    max_batch_duration_secs: float | None
    max_batch_weight: int | None
    element_size_fn: Callable[[Any], int] | None
    batch_length_fn: Callable[[Any], int] | None
    max_padded_cost: int | None
    lookahead_rows: int | None
    lookahead_bytes: int | None
    batch_size_buckets: Sequence[int]
    length_buckets: Sequence[int]
    env_vars: Mapping[str, str] | None


class TextModelHandler(ModelHandler[Any, PredictionResult, Any]):
    _load_args: dict[str, Any]

    def __init__(
        self,
        model: str | PathLike[str],
        device: str | torch.device | None,
        large_model: bool,
        model_copies: int | None,
        batching: BatchSettings,
    ) -> None:
        super().__init__(**batching, large_model=large_model, model_copies=model_copies)
        self._model = os.fspath(model)
        self._device = device_name(None if device is None else str(device))

    def accelerator(self) -> str | None:
        return {"cuda": "gpu"}.get(self._device, self._device if self._device.startswith("cuda") else None)

    def _make_counter(self) -> TokenCounter | None:
        """Load the tokenizer; None where all rows cost the same."""
        raise NotImplementedError

    def _counter_key(self) -> str:
        raise NotImplementedError

    def _token_lengths(self, batch: Sequence[Any]) -> list[int]:
        texts = texts_of(batch, self._text_of)
        counter = shared_counter(self._counter_key(), self._make_counter)
        return [1] * len(texts) if counter is None else counter.count(texts)

    def _text_of(self, row: Any) -> Text | None:
        return None

    def measures_length(self) -> bool:
        return True

    def new_shapes_cost(self) -> bool:
        return self._device.startswith("cuda") and torch.cuda.is_available()

    def _padding(self, max_length: int | None) -> dict[str, Any]:
        """How a tokenizer pads to the longest row: on a GPU, where that is no more than the model takes, rounded up."""
        multiple = self.padded_length(1)
        return {"padding": True, "pad_to_multiple_of": multiple} if multiple > 1 and not (max_length or 0) % multiple else {}

    def get_lengths(self, batch: Sequence[Any]) -> Sequence[int]:
        """Tokens by the model's own tokenizer, or what the user's batch_length_fn says."""
        return super().get_lengths(batch) if self._batch_length_fn is not None else self._token_lengths(batch)

    def after_out_of_memory(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def model_id(self) -> str:
        return self._model

    def model_files(self) -> Sequence[str]:
        """The model's folder, and that of its tokenizer if it has one of its own; what comes from the hub is no file."""
        places = self._model, self._load_args.get("tokenizer")
        folders = (place for place in places if isinstance(place, (str, PathLike)))
        return [path for path in dict.fromkeys(str(folder) for folder in folders) if os.path.isdir(path)]

    def get_num_bytes(self, batch: Sequence[Any]) -> int:
        return sum(map(size_of, batch))

    def get_metrics_namespace(self) -> str:
        return "Penstock_HuggingFace"


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Loading without progress bars; errors of either library become InputError."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as exc:
        raise InputError(
            f"{what} could not be loaded: {type(exc).__name__}: {exc}\n  expected a folder that the process that loads the "
            "model can read, or a name in the Hugging Face cache or hub; check the spelling, and that it fits its task"
        ) from exc
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


def rows_for_texts(columns: Sequence[str]) -> UsageError:
    """What is wrong with a table for a model of texts: its rows are dicts."""
    return UsageError(
        f"the rows are dicts with {list(columns)}, but the model takes texts; take the text out of them with "
        ".with_preprocess_fn(lambda row: row[...]), or with a ps.Map before the model"
    )


def check_place(model: str) -> None:
    if (os.path.isabs(model) or model.startswith((".", "~"))) and not os.path.isdir(model):
        raise InputError(
            f"model folder {model!r} does not exist; expected a folder with a config.json that the process that loads "
            "the model can read: check the spelling, or give an absolute path"
        )


def dtype_on(device: torch.device) -> Any:
    """float32 on a CPU, where half precision is slow or not there; elsewhere what the model was saved in."""
    return torch.float32 if device.type == "cpu" else "auto"


def tokenizer_from(place: str, **options: Any) -> Any:
    return transformers.AutoTokenizer.from_pretrained(place, **{"trust_remote_code": False, **options})
