"""A handler for transformers pipelines.

rows -> pipeline(rows), padded to the longest text (or to a bucket) -> device -> one PredictionResult per row
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias, Unpack

import torch
import transformers
from transformers.pipelines import check_task

from penstock.errors import PredictionCountError, UsageError
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
from penstock.handlers.huggingface_tokens import (
    NO_MAXIMUM,
    Text,
    TokenCounter,
    max_length_of,
    padded_length,
    text_of_row,
    texts_of,
)
from penstock.handlers.pytorch_loading import usable_device
from penstock.rows import PredictionResult

PipelineInferenceFn: TypeAlias = Callable[[Sequence[Any], Any, Mapping[str, Any]], Iterable[Any]]

TEXT_TASKS = frozenset(
    {"feature-extraction", "fill-mask", "text-classification", "text-generation", "token-classification"}
    | {"zero-shot-classification"}
)
# Where a pipeline takes its tokenizer's settings: by themselves, or under a name. Other tasks take no padding.
_TOKENIZER_ARGS = {"text-classification": None, "feature-extraction": "tokenize_kwargs", "fill-mask": "tokenizer_kwargs"}


def default_pipeline_inference_fn(batch: Sequence[Any], pipeline: Any, inference_args: Mapping[str, Any]) -> Iterable[Any]:
    """pipeline(rows, **inference_args), all rows in one forward pass."""
    answers = pipeline(list(batch), **{"batch_size": len(batch), **inference_args})
    if len(batch) == 1 and (pipeline.task == "fill-mask" or not isinstance(answers, list)):
        return [answers]  # some pipelines take a list of one row for the row
    return answers  # type: ignore[no-any-return]


class HuggingFacePipelineModelHandler(TextModelHandler):
    """Examples are what the task's pipeline takes; text tasks take str. Answers are what it gives for one input."""

    def __init__(
        self,
        task: str = "",
        model: str | PathLike[str] = "",
        *,
        device: str | torch.device | None = None,
        inference_fn: PipelineInferenceFn | None = None,
        load_pipeline_args: Mapping[str, Any] | None = None,
        dtype: Any = None,
        large_model: bool = False,
        model_copies: int | None = None,
        **batching: Unpack[BatchSettings],
    ) -> None:
        """Describe transformers.pipeline(task, model, **load_pipeline_args).

        model: a folder, or a name in the Hugging Face cache or hub. Code that comes with a model does not run, unless
            load_pipeline_args has trust_remote_code=True.
        device: "CPU" (also when None), "GPU" (the CPU where there is none) or any torch device.
        dtype: what the weights become; None: float32 on a CPU, elsewhere what they were saved in.
        inference_fn(batch, pipeline, inference_args): gives one answer per row; it pads and batches by itself.
        length_buckets: texts are padded to the next bucket; for the tasks text-classification, feature-extraction
            and fill-mask.
        """
        super().__init__(model, device, large_model, model_copies, batching)
        self._load_args = dict(load_pipeline_args or {})
        self._dtype = dtype
        self._inference_fn = inference_fn
        self._given_task = task
        self._task = _known_task(task, self._load_args)
        if not (task or self._model):
            raise UsageError("got neither task nor model; expected a task such as 'text-classification', a model, or both")
        if device is not None and not self._load_args.keys().isdisjoint({"device", "device_map"}):
            raise UsageError("load_pipeline_args has a device or a device_map, and device is given too; leave one out")
        if self._length_buckets and self._task not in _TOKENIZER_ARGS:
            raise UsageError(
                f"length_buckets: pipelines for task={task!r} cannot pad to a length; leave length_buckets out, or use one "
                f"of the tasks {', '.join(_TOKENIZER_ARGS)}"
            )

    def load_model(self) -> Any:
        """The pipeline, on its device; texts longer than the model takes are cut."""
        check_place(self._model)
        device = usable_device(self._device)
        options: dict[str, Any] = {"trust_remote_code": False, "dtype": self._dtype or dtype_on(device)}
        if "device_map" not in self._load_args:
            options["device"] = device
        options |= self._load_args | _truncation(self._task, self._load_args)
        with loading(f"a pipeline for task={self._given_task!r} with model={self._model!r}"):
            pipeline = transformers.pipeline(self._given_task or None, model=self._model or None, **options)
        _check_weights(pipeline, self._model)
        if pipeline.task in TEXT_TASKS and (limit := max_length_of(pipeline.tokenizer, pipeline.model.config)):
            pipeline.tokenizer.model_max_length = limit
        if getattr(pipeline, "tokenizer", None) is not None and pipeline.tokenizer.pad_token_id is None:
            pipeline.tokenizer.pad_token = pipeline.tokenizer.eos_token  # batches need one; masked, so any token will do
        return pipeline

    def check_columns(self, schema: Any) -> None:
        if self._inference_fn is None and self._task in TEXT_TASKS and "text" not in schema.names:
            raise rows_for_texts(schema.names)

    def run_inference(
        self, batch: Sequence[Any], model: Any, inference_args: InferenceArgs = None
    ) -> list[PredictionResult]:
        if self._inference_fn is not None:
            answers = list(self._inference_fn(batch, model, inference_args or {}))
        else:
            answers = self._answers(batch, model, inference_args or {})
        if len(answers) != len(batch):
            raise PredictionCountError(
                f"the pipeline gave {len(answers)} answers for {len(batch)} rows, but there must be one per row, in order; "
                "check that each row is one input of the task"
            )
        return [PredictionResult(row, answer, self.model_id()) for row, answer in zip(batch, answers, strict=True)]

    def _answers(self, batch: Sequence[Any], model: Any, inference_args: Mapping[str, Any]) -> list[Any]:
        if self._task in TEXT_TASKS:
            texts_of(batch, text_of_row)  # the pipeline's own errors do not say which row
        lengths = self._token_lengths(batch) if self._length_buckets or self._task == "feature-extraction" else []
        if self._length_buckets:
            bucket = padded_length(max(lengths), self._length_buckets, model.tokenizer.model_max_length)
            padding = {"padding": "max_length", "max_length": bucket, "truncation": True}
            inference_args = _with_tokenizer_args(self._task, inference_args, padding)
        elif self._task in _TOKENIZER_ARGS and (padding := self._padding(model.tokenizer.model_max_length)):
            inference_args = _with_tokenizer_args(self._task, inference_args, {**padding, "truncation": True})
        answers = list(default_pipeline_inference_fn(batch, model, inference_args))
        if self._task == "feature-extraction":
            limit = _tokenizer_args(self._task, inference_args).get("max_length") or NO_MAXIMUM
            left = model.tokenizer.padding_side == "left"
            return [_unpadded(answer, min(length, limit), left) for answer, length in zip(answers, lengths, strict=True)]
        return answers

    def measures_length(self) -> bool:
        return self._batch_length_fn is not None or (self._task in TEXT_TASKS and bool(self._tokenizer_place()))

    def _text_of(self, row: Any) -> Text | None:
        return text_of_row(row)

    def _tokenizer_place(self) -> Any:
        return self._load_args.get("tokenizer") or self._model

    def _counter_key(self) -> str:
        return repr((self._tokenizer_place(), self._model, sorted(self._load_args.items(), key=str)))

    def _make_counter(self) -> TokenCounter:
        place = self._tokenizer_place()
        hub = {name: self._load_args[name] for name in ("revision", "token", "trust_remote_code") if name in self._load_args}
        with loading(f"the tokenizer of model={self._model!r}"):
            check_place(self._model)
            tokenizer = copy.deepcopy(place) if not isinstance(place, str) else tokenizer_from(place, **hub)
            config = transformers.AutoConfig.from_pretrained(self._model, **hub) if self._model else None
        limits = [max_length_of(tokenizer, config), _tokenizer_args(self._task, self._load_args).get("max_length")]
        return TokenCounter(tokenizer, min((limit for limit in limits if limit), default=None))

    def model_id(self) -> str:
        return self._model or self._given_task


def _known_task(task: str, load_args: Mapping[str, Any]) -> str:
    """The task by its main name: "sentiment-analysis" is "text-classification". A model's own code may bring others."""
    if not task or load_args.get("trust_remote_code") or "pipeline_class" in load_args:
        return task
    try:
        return str(check_task(task)[0])
    except KeyError as exc:
        raise UsageError(f"task={task!r}: {exc.args[0]}") from exc


def _truncation(task: str, load_args: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that cut long texts. Token classification and zero-shot classification do so by themselves."""
    if task == "text-generation" and "truncation" not in load_args:
        return {"truncation": True}
    if task in _TOKENIZER_ARGS and "truncation" not in load_args:
        return _with_tokenizer_args(task, load_args, {"truncation": True})
    return {}


def _tokenizer_args(task: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a pipeline passes on to its tokenizer, of the arguments that it was given."""
    if task not in _TOKENIZER_ARGS:
        return {}
    name = _TOKENIZER_ARGS[task]
    return args if name is None else args.get(name) or {}


def _with_tokenizer_args(task: str, args: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with these defaults for the tokenizer."""
    name = _TOKENIZER_ARGS[task]
    own = {**defaults, **_tokenizer_args(task, args)}
    return own if name is None else {**args, name: own}


def _unpadded(answer: Any, length: int, left: bool) -> Any:
    """A text's features without those of the padding, which depends on the other rows of its batch."""
    if isinstance(answer, torch.Tensor):
        return (answer[:, -length:] if left else answer[:, :length]).clone()
    return [row[-length:] if left else row[:length] for row in answer]


def _check_weights(pipeline: Any, model_name: str) -> None:
    """Refuse a model whose last layers are not in its files: transformers fills them with random numbers and only warns."""
    model = pipeline.model
    if getattr(model, "is_quantized", False) or model.base_model is model:
        return
    weights = dict(model.named_parameters())
    loaded = {name for name, weight in weights.items() if getattr(weight, "_is_hf_initialized", False)}
    missing = [name for name in weights if name not in loaded and not name.startswith(f"{model.base_model_prefix}.")]
    if loaded and missing:
        raise UsageError(
            f"the model {model_name!r} was saved as {model.config.architectures} and has no weights for "
            f"{', '.join(missing[:4])}, which task={pipeline.task!r} needs; its answers would be random: give the model's "
            "own task, or a model trained for this one"
        )
