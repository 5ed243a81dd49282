"""What the Hugging Face handlers share: settings, devices, columns, lengths of prepared rows.

Nothing here imports torch or transformers: it runs where rows are prepared.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.blocks import size_of
from penstock.errors import UsageError
from penstock.handlers.catalog import check_versions
from penstock.handlers.column_types import fits
from penstock.handlers.huggingface_files import ModelFiles, loading
from penstock.handlers.huggingface_tokenizers import LoadedTokenizer, load_by_transformers, load_tokenizer
from penstock.handlers.huggingface_tokens import length_of
from penstock.handlers.pytorch_loading import device_name
from penstock.handlers.pytorch_running import on_gpu, take_device_seconds
from penstock.inference.handler import ModelHandler
from penstock.inference.handler_checks import checked_path
from penstock.inference.handler_settings import HandlerSettings
from penstock.rows import PredictionResult

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

InferenceArgs: TypeAlias = Mapping[str, Any] | None

_PARTS = ("tokenizer", "config", "feature_extractor", "image_processor", "processor")  # arguments that may name a folder
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot"}
_PLAIN = (str, int, float, bool, type(None))


class HuggingFaceModelHandler(ModelHandler[Any, PredictionResult, Any]):
    """What handlers of Hugging Face's models have in common: the model's name or folder, its device, and how it is loaded.
    Made in the user's process; the model is loaded in the process that calls it."""

    wraps_answers = True
    reads_urls = False

    _load_args: dict[str, Any]

    def __init__(
        self,
        model: str | PathLike[str],
        device: str | torch.device | None,
        settings: HandlerSettings,
    ) -> None:
        super().__init__(**settings)
        self._model = os.fspath(model)
        self._device = device_name(None if device is None else str(device))

    def accelerator(self) -> str | None:
        return {"cuda": "gpu"}.get(self._device, self._device if self._device.startswith("cuda") else None)

    def measures_length(self) -> bool:
        return True

    def get_lengths(self, batch: Sequence[Any]) -> Sequence[int]:
        """Tokens of prepared rows by the model's own tokenizer, or what the user's batch_length_fn says of examples."""
        return super().get_lengths(batch) if self._batch_length_fn is not None else [length_of(row) for row in batch]

    def device_seconds(self) -> float | None:
        return take_device_seconds()

    def new_shapes_cost(self) -> bool:
        return on_gpu(self._device)

    def _padded(self, lengths: Sequence[int], max_length: int | None) -> int:
        """What a batch of these lengths is padded to: no more than the model takes."""
        longest = max(lengths)
        return max(longest, min(self.padded_length(longest), max_length or sys.maxsize))

    def after_out_of_memory(self) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    # Columns.

    def examples_of(self, table: pa.Table) -> Sequence[Any]:
        if table.num_columns == 1:
            values: list[Any] = table.column(0).to_pylist()
            return values
        return super().examples_of(table)

    def _takes(self) -> str | None:
        """What an example is, in a word, where that is known: "texts" or "images"."""
        raise NotImplementedError

    def check_columns(self, schema: pa.Schema) -> None:
        takes, columns = self._takes(), self.input_columns()
        if columns is not None:
            _check_columns(schema, columns, takes)
        elif takes is not None:
            fitting = [field.name for field in schema if fits(field.type, takes)]
            name = fitting[0] if fitting else "image" if takes == "images" else "text"
            raise UsageError(
                f"the rows are dicts with {schema.names}, but the model takes {takes}; name the column that holds them: "
                f"columns={name!r}"
            )

    # The model.

    def model_id(self) -> str:
        return self._model

    def model_files(self) -> Sequence[str]:
        """The model's folder, and that of its tokenizer if it has one of its own; what comes from the hub is no file."""
        places = self._model, self._load_args.get("tokenizer")
        folders = (place for place in places if isinstance(place, (str, PathLike)))
        return [path for path in dict.fromkeys(str(folder) for folder in folders) if os.path.isdir(path)]

    def update_model_path(self, model_path: str) -> None:
        """Another folder, or another name in the cache or hub. Its tokenizer and other parts come from there, too, unless
        the arguments of the load name another place for them."""
        place, first = checked_path(model_path), self._model
        own = {name: place for name in _PARTS if first and _is_place(self._load_args.get(name), first)}
        self._model, self._load_args = place, {**self._load_args, **own}

    def get_num_bytes(self, batch: Sequence[Any]) -> int:
        return sum(map(size_of, batch))

    def get_metrics_namespace(self) -> str:
        return "Penstock_HuggingFace"


def tokenizer_of(files: ModelFiles, options: Mapping[str, Any], plainly: bool) -> LoadedTokenizer:
    """The tokenizer in these files: by itself where `plainly`, and where that gives what transformers gives."""
    loaded = load_tokenizer(files) if plainly else None
    if loaded is not None:
        return loaded
    check_versions("huggingface")
    import transformers

    options = {"trust_remote_code": False, **files.hub, **options}
    folder = {"subfolder": files.subfolder} if files.subfolder else {}
    with loading(f"the tokenizer of {files.place!r}"):
        hub = {name: options[name] for name in (*files.hub, "trust_remote_code")}
        config = transformers.AutoConfig.from_pretrained(files.place, **folder, **hub)
        return load_by_transformers(transformers.AutoTokenizer.from_pretrained(files.place, **folder, **options), config)


def _is_place(given: Any, place: str) -> bool:
    return isinstance(given, (str, PathLike)) and os.fspath(given) == place


def key_of(*settings: Any) -> str | None:
    """Text that is equal for equal settings; None where that cannot be said."""
    return repr(settings) if _is_plain(settings) else None


def small_files_of(model: Any) -> Any:
    """What tells the tokenizers of models apart: the contents of all files in a folder but the weights. Of anything else,
    itself."""
    if not isinstance(model, (str, PathLike)) or not os.path.isdir(model):
        return model
    folder = Path(model)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in WEIGHTS)
    facts = tuple((str(path), (found := path.stat()).st_size, found.st_mtime_ns, found.st_ino) for path in files)
    return _digest_of(str(folder), facts)


@functools.lru_cache(maxsize=256)
def _digest_of(folder: str, facts: tuple[tuple[str, int, int, int], ...]) -> str:
    """Of these files; `facts` change when they do."""
    digest = hashlib.sha256()
    for path, size, *_ in facts:
        digest.update(f"{os.path.relpath(path, folder)} {size}\n".encode())
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else type(value) in _PLAIN


def dtype_on(device: torch.device) -> Any:
    """float32 on a CPU, where half precision is slow or not there; elsewhere what the model was saved in."""
    import torch

    return torch.float32 if device.type == "cpu" else "auto"


def _check_columns(schema: pa.Schema, columns: Sequence[str], takes: str | None) -> None:
    missing = [name for name in columns if name not in schema.names]
    if missing:
        raise UsageError(f"columns {missing} are missing: the table has {schema.names}; check columns=")
    for name in columns if takes is not None else ():
        kind = schema.field(schema.names.index(name)).type
        if not fits(kind, str(takes)):
            raise UsageError(f"column {name!r} holds {kind}, but the model takes {takes}; name another one with columns=")
