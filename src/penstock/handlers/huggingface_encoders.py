"""A handler for sentence encoders.

texts -> one tokenised batch, padded to its longest text (or to a bucket) -> device -> one PredictionResult per row
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Unpack

import torch
import transformers
from transformers.utils import cached_file

from penstock.errors import MissingPackageError, UsageError
from penstock.handlers.huggingface_models import (
    BatchSettings,
    InferenceArgs,
    TextModelHandler,
    check_place,
    dtype_on,
    loading,
    rows_for_texts,
    tokenizer_from,
)
from penstock.handlers.huggingface_tokens import TokenCounter, max_length_of, no_text, padded_length, texts_of
from penstock.handlers.pytorch_loading import usable_device
from penstock.handlers.pytorch_running import Move, run_on
from penstock.rows import PredictionResult

_TOKENIZING = threading.Lock()  # tokenizers are changed by their calls
_SIMPLE = {"normalize_embeddings", "prompt", "prompt_name"}  # arguments of encode()


class SentenceTransformerModelHandler(TextModelHandler):
    """Examples are texts; answers are their vectors, as numpy arrays."""

    def __init__(
        self,
        model_name: str | PathLike[str],
        *,
        device: str | torch.device | None = None,
        normalize_embeddings: bool = False,
        max_seq_length: int | None = None,
        encode_kwargs: Mapping[str, Any] | None = None,
        load_args: Mapping[str, Any] | None = None,
        large_model: bool = False,
        model_copies: int | None = None,
        **batching: Unpack[BatchSettings],
    ) -> None:
        """Describe SentenceTransformer(model_name, **load_args).encode(texts, **encode_kwargs).

        model_name: a folder, or a name in the Hugging Face cache or hub.
        device: "CPU" (also when None), "GPU" (the CPU where there is none) or any torch device.
        max_seq_length: texts are cut after so many tokens; None: what the model says.
        inference_args of RunInference are more encode_kwargs.
        """
        super().__init__(model_name, device, large_model, model_copies, batching)
        if not self._model:
            raise UsageError("model_name is empty; expected a folder or a name in the Hugging Face cache or hub")
        if max_seq_length is not None and max_seq_length < 1:
            raise UsageError(f"max_seq_length={max_seq_length}: expected at least 1 token")
        self._max_seq_length = max_seq_length
        self._encode_kwargs = {"normalize_embeddings": normalize_embeddings, **(encode_kwargs or {})}
        self._load_args = dict(load_args or {})

    def load_model(self) -> Any:
        """The SentenceTransformer, on its device."""
        try:
            from sentence_transformers import SentenceTransformer
        except ModuleNotFoundError as exc:
            raise MissingPackageError("sentence-transformers", "huggingface") from exc
        check_place(self._model)
        device = usable_device(self._device)
        options = {"device": str(device), "local_files_only": os.path.isdir(self._model), **self._load_args}
        if options.get("backend", "torch") == "torch":
            options["model_kwargs"] = {"dtype": dtype_on(device), **options.get("model_kwargs", {})}
        with loading(f"the sentence encoder {self._model!r}"):
            model = SentenceTransformer(self._model, **options)
        if self._max_seq_length is not None:
            positions = getattr(getattr(model[0], "config", None), "max_position_embeddings", None)
            if positions is not None and self._max_seq_length > positions:
                raise UsageError(
                    f"max_seq_length={self._max_seq_length}, but {self._model!r} takes {positions} tokens at most"
                )
            model.max_seq_length = self._max_seq_length
        return model.eval()

    def prepares_ahead(self) -> bool:
        return self.new_shapes_cost() and self._is_simple(self._encode_kwargs)

    def check_columns(self, schema: Any) -> None:
        raise rows_for_texts(schema.names)

    def run_inference(
        self, batch: Sequence[str], model: Any, inference_args: InferenceArgs = None
    ) -> list[PredictionResult]:
        texts = texts_of(batch, no_text)
        options = {**self._encode_kwargs, **(inference_args or {})}
        if not self.prepares_ahead():
            vectors = self._encode(texts, model, options)
        elif self._is_simple(options) and model.truncate_dim is None:
            vectors = self._encode_ahead(texts, model, options)
        else:
            with _TOKENIZING:
                vectors = self._encode(texts, model, options)
        return [PredictionResult(row, _own(vector), self._model) for row, vector in zip(batch, vectors, strict=True)]

    def _encode(self, texts: list[Any], model: Any, options: Mapping[str, Any]) -> Any:
        options = {"batch_size": len(texts), "show_progress_bar": False, "convert_to_numpy": True, **options}
        if self._length_buckets:
            prompt = _prompt_of(options, model.prompts, model.default_prompt_name)
            longest = model.preprocess(texts, prompt=prompt)["input_ids"].shape[1]
            bucket = padded_length(longest, self._length_buckets, model.max_seq_length)
            options = {"processing_kwargs": {"text": {"padding": "max_length", "max_length": bucket}}, **options}
        elif padding := self._padding(model.max_seq_length):
            options = {"processing_kwargs": {"text": padding}, **options}
        return model.encode(texts, **options)

    def _encode_ahead(self, texts: list[Any], model: Any, options: Mapping[str, Any]) -> Any:
        """What encode() does for a batch, but that texts are tokenised while the device is at work on another one."""
        prompt = _prompt_of(options, model.prompts, model.default_prompt_name) or None
        with _TOKENIZING:
            features = model.preprocess(
                texts, prompt=prompt, processing_kwargs={"text": self._padding(model.max_seq_length)}
            )

        def run(move: Move) -> Any:
            moved = {name: move(each) if isinstance(each, torch.Tensor) else each for name, each in features.items()}
            vectors = model(moved)["sentence_embedding"].float()
            return torch.nn.functional.normalize(vectors, dim=1) if options["normalize_embeddings"] else vectors

        return run_on(model.device, run, lambda vectors: vectors.cpu().numpy())

    def _is_simple(self, options: Mapping[str, Any]) -> bool:
        """Whether encode() gives one vector of floats for each text, and nothing else was asked of it."""
        return not self._length_buckets and not self._load_args and options.keys() <= _SIMPLE

    def _counter_key(self) -> str:
        prompts = self._encode_kwargs.get("prompt"), self._encode_kwargs.get("prompt_name")
        return repr((self._model, self._max_seq_length, prompts, sorted(self._load_args.items(), key=str)))

    def _make_counter(self) -> TokenCounter | None:
        check_place(self._model)
        modules = self._read_json("modules.json") or [{"path": "", "type": "Transformer"}]
        if not modules[0]["type"].endswith("Transformer"):
            return None  # static embeddings and bags of words have no padding
        settings = self._read_json(os.path.join(modules[0]["path"], "sentence_bert_config.json")) or {}
        options = {**self._hub_args(), **self._load_args.get("processor_kwargs", {})}
        with loading(f"the tokenizer of {self._model!r}"):
            config = transformers.AutoConfig.from_pretrained(self._model, subfolder=modules[0]["path"], **self._hub_args())
            tokenizer = tokenizer_from(self._model, subfolder=modules[0]["path"], **options)
        limit = self._max_seq_length or settings.get("max_seq_length")
        return TokenCounter(tokenizer, limit or max_length_of(tokenizer, config), self._prompt())

    def _prompt(self) -> str:
        saved = self._read_json("config_sentence_transformers.json") or {}
        prompts = {**saved.get("prompts", {}), **self._load_args.get("prompts", {})}
        default = self._load_args.get("default_prompt_name") or saved.get("default_prompt_name")
        return _prompt_of(self._encode_kwargs, prompts, default)

    def _read_json(self, name: str) -> Any:
        """A small file of the model, or None where it has none."""
        quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        with loading(f"{name} of {self._model!r}"):
            path = cached_file(self._model, name, **quiet, **self._hub_args())
            if path is None:
                return None
            with open(path, encoding="utf-8") as file:
                return json.load(file)

    def _hub_args(self) -> dict[str, Any]:
        names = ("revision", "token", "trust_remote_code")
        return {name: self._load_args[name] for name in names if name in self._load_args}


def _prompt_of(options: Mapping[str, Any], prompts: Mapping[str, str], default: str | None) -> str:
    """What encode(**options) puts before every text."""
    if options.get("prompt") is not None:
        return str(options["prompt"])
    name = options.get("prompt_name") or default
    return (prompts.get(name) or "") if name else ""


def _own(vector: Any) -> Any:
    """The vector with memory of its own: a view would be pickled, and kept alive, with its whole batch."""
    if isinstance(vector, torch.Tensor):
        return vector.detach().cpu().clone()
    if isinstance(vector, Mapping):
        return {name: _own(part) for name, part in vector.items()}
    return vector.copy() if hasattr(vector, "copy") else vector
