"""A handler for transformers pipelines.

texts -> token ids, beside the data -> one batch, padded to its longest text (or to a bucket) -> the pipeline -> answers
other rows -> pipeline(rows) -> answers
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from penstock.errors import PredictionCountError, UsageError
from penstock.handlers.catalog import check_versions
from penstock.handlers.huggingface_files import ModelFiles, check_place, loading, reading
from penstock.handlers.huggingface_models import (
    HuggingFaceModelHandler,
    InferenceArgs,
    dtype_on,
    key_of,
    small_files_of,
    tokenizer_of,
)
from penstock.handlers.huggingface_tasks import (
    ALIASES,
    IMAGE_TASKS,
    KNOWN_TASKS,
    PADDING_TASKS,
    TEXT_TASKS,
    TOKEN_TASKS,
    run_images,
    run_tokens,
)
from penstock.handlers.huggingface_tokenizers import NO_MAXIMUM, LoadedTokenizer, load_by_transformers
from penstock.handlers.huggingface_tokens import (
    Text,
    TextTokenizer,
    Whole,
    example_of,
    ids_of,
    is_tokens,
    length_of,
    no_text,
)
from penstock.handlers.image_decoding import ImageDecoding, import_pillow
from penstock.handlers.prepared_rows import prepared, raise_bad_rows
from penstock.inference.handler_settings import HandlerSettings
from penstock.rows import shorten

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

PipelineInferenceFn: TypeAlias = Callable[[Sequence[Any], Any, Mapping[str, Any]], Iterable[Any]]


def default_pipeline_inference_fn(batch: Sequence[Any], pipeline: Any, inference_args: Mapping[str, Any]) -> Iterable[Any]:
    """pipeline(rows, **inference_args), all rows in one forward pass."""
    answers = pipeline(list(batch), **{"batch_size": len(batch), **inference_args})
    if len(batch) == 1 and (pipeline.task == "fill-mask" or not isinstance(answers, list)):
        return [answers]  # some pipelines take a list of one row for the row
    return answers  # type: ignore[no-any-return]


class HuggingFacePipelineModelHandler(HuggingFaceModelHandler):
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
        **settings: Unpack[HandlerSettings],
    ) -> None:
        """Describe transformers.pipeline(task, model, **load_pipeline_args).

        model: a folder, or a name in the Hugging Face cache or hub. Code that comes with a model does not run, unless
            load_pipeline_args has trust_remote_code=True.
        device: "CPU" (also when None), "GPU" (the CPU where there is none) or any torch device.
        dtype: what the weights become; None: float32 on a CPU, elsewhere what they were saved in.
        inference_fn(batch, pipeline, inference_args): gives one answer per row; it pads and batches by itself.
        length_buckets: texts are padded to the next bucket; for the tasks text-classification, feature-extraction
            and fill-mask.
        columns: the column of texts or images, where rows have columns; two for pairs of texts (text-classification).
        """
        super().__init__(model, device, settings)
        self._load_args = dict(load_pipeline_args or {})
        self._dtype = dtype
        self._inference_fn = inference_fn
        self._given_task = task
        self._task = _known_task(task, self._load_args)
        if not (task or self._model):
            raise UsageError("got neither task nor model; expected a task such as 'text-classification', a model, or both")
        if device is not None and not self._load_args.keys().isdisjoint({"device", "device_map"}):
            raise UsageError("load_pipeline_args has a device or a device_map, and device is given too; leave one out")
        if self._length_buckets and self._task not in PADDING_TASKS:
            raise UsageError(
                f"length_buckets: pipelines for task={task!r} cannot pad to a length; leave length_buckets out, or use one "
                f"of the tasks {', '.join(PADDING_TASKS)}"
            )
        most = 2 if self._task == "text-classification" else 1
        if self._takes() is not None and len(self.input_columns() or ()) > most:
            raise UsageError(
                f"columns={list(self.input_columns() or ())}: task={task!r} takes one column of {self._takes()}"
                f"{', or two for pairs of texts' if most == 2 else ''}"
            )

    # Beside the data.

    def prepares(self) -> bool:
        return self._counts_tokens() or (self._task in IMAGE_TASKS and self._inference_fn is None)

    def measures_length(self) -> bool:
        return self._batch_length_fn is not None or self._counts_tokens()

    def prepare_key(self) -> str | None:
        return key_of(self._task, small_files_of(self._model), self._load_args)

    def load_prepare(self) -> TextTokenizer | None:
        """The tokenizer, for texts."""
        if not self._counts_tokens():
            import_pillow()
            return None
        check_place(self._model)
        with reading(f"the tokenizer of model={self._model!r}"):
            loaded = self._loaded_tokenizer()
        return TextTokenizer(loaded, loaded.longest())

    def prepare(
        self, examples: Sequence[Any], tool: TextTokenizer | None, inference_args: InferenceArgs = None
    ) -> list[Any]:
        if tool is None:
            images, errors = prepared(examples, _image_of)
            return raise_bad_rows(errors, images)
        tokens = self._takes_tokens(tool, inference_args or {})
        texts, errors = prepared(examples, self._text_of if self._inference_fn is None else _any_text)
        settings = self._tokenizer_settings(inference_args or {})
        made = [text if text is not None else "" for text in texts]
        offsets = tokens and self._task == "token-classification"
        rows, more = tool.tokenise(made, settings.get("max_length"), offsets)
        if tokens and self._task == "fill-mask":
            more |= _without_mask(rows, texts, tool.loaded.mask_id)
        if not tokens:
            rows = [Whole(example, length_of(row)) for example, row in zip(examples, rows, strict=True)]
        return raise_bad_rows({**more, **errors}, rows)

    def changes_rows(self) -> bool:
        return self._inference_fn is not None or self._task not in TOKEN_TASKS

    def _counts_tokens(self) -> bool:
        return self._task in TEXT_TASKS and bool(self._tokenizer_place())

    def _takes_tokens(self, tool: TextTokenizer, inference_args: Mapping[str, Any]) -> bool:
        """Whether rows are tokenised here: else the pipeline does that."""
        task = TOKEN_TASKS.get(self._task)
        if task is None or self._inference_fn is not None or not task.knows(self._load_args, inference_args):
            return False
        needed = {"token-classification": tool.loaded.fast, "fill-mask": tool.loaded.mask_id}
        return needed.get(self._task, True) is not None

    def _tokenizer_settings(self, inference_args: Mapping[str, Any]) -> Mapping[str, Any]:
        task = TOKEN_TASKS.get(self._task)
        return {**task.settings(self._load_args), **task.settings(inference_args)} if task is not None else {}

    def _tokenizer_place(self) -> Any:
        return self._load_args.get("tokenizer") or self._model

    def _loaded_tokenizer(self) -> LoadedTokenizer:
        place = self._tokenizer_place()
        hub: dict[str, Any] = {name: self._load_args[name] for name in ("revision", "token") if name in self._load_args}
        trust = {"trust_remote_code": bool(self._load_args.get("trust_remote_code"))}
        if place == self._model:
            plainly = not trust["trust_remote_code"] and not self._load_args.get("use_fast")
            return tokenizer_of(ModelFiles(self._model, hub), trust, plainly)
        import transformers

        if isinstance(place, (str, PathLike)):
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(place), **hub, **trust)
        else:
            tokenizer = copy.deepcopy(place)
        config = transformers.AutoConfig.from_pretrained(self._model, **hub, **trust) if self._model else None
        return load_by_transformers(tokenizer, config)

    def _text_of(self, example: Any) -> Text:
        """What the task's pipeline reads of an example."""
        if isinstance(example, str):
            return example
        if self._task == "text-classification":
            text = _pair_of(example)
        else:
            text = _words_of(example) if self._task not in ("feature-extraction", "fill-mask") else None
        if text is None:
            raise no_text(example)
        return text

    # Columns.

    def _takes(self) -> str | None:
        if self._inference_fn is not None:
            return None
        if self._task in IMAGE_TASKS:
            return "images"
        if self._task in TEXT_TASKS:
            return "texts or chats" if self._task == "text-generation" else "texts"
        return None

    def check_columns(self, schema: pa.Schema) -> None:
        has_texts = self._columns is None and self._task == "text-classification" and "text" in schema.names
        if not has_texts:  # else rows are what the pipeline takes: {"text": ..., "text_pair": ...}
            super().check_columns(schema)

    def examples_of(self, table: pa.Table) -> Sequence[Any]:
        if self._task == "text-classification" and table.num_columns == 2 and self._inference_fn is None:
            return list(zip(*(column.to_pylist() for column in table.columns), strict=True))
        return super().examples_of(table)

    # Beside the device.

    def load_model(self) -> Any:
        """The pipeline, on its device; texts longer than the model takes are cut."""
        check_versions("huggingface")
        import transformers

        from penstock.handlers.pytorch_loading import usable_device

        check_place(self._model)
        device = usable_device(self._device)
        options: dict[str, Any] = {"trust_remote_code": False, "dtype": self._dtype or dtype_on(device)}
        if "device_map" not in self._load_args:
            options["device"] = device
        options |= self._load_args | _truncation(self._task, self._load_args)
        with loading(f"a pipeline for task={self._given_task!r} with model={self._model!r}"):
            pipeline = transformers.pipeline(self._given_task or None, model=self._model or None, **options)
        _check_weights(pipeline, self._model)
        if pipeline.task in TEXT_TASKS:
            _set_maximum(pipeline)
        if getattr(pipeline, "tokenizer", None) is not None and pipeline.tokenizer.pad_token_id is None:
            pipeline.tokenizer.pad_token = pipeline.tokenizer.eos_token  # batches need one; masked, so any token will do
        tool = self.load_prepare() if self._counts_tokens() and self._task in TOKEN_TASKS else None
        if tool is not None and self._takes_tokens(tool, {}):
            tool.check(pipeline.tokenizer, self._model, 'load_pipeline_args={"use_fast": True}')
        return pipeline

    def run_inference(self, batch: Sequence[Any], model: Any, inference_args: InferenceArgs = None) -> Any:
        from penstock.handlers.pytorch_linear import quicken

        args = inference_args or {}
        quicken(model.model)
        if self._task in TOKEN_TASKS and is_tokens(batch[0]):
            length = self._padded([length_of(row) for row in batch], model.tokenizer.model_max_length)
            return run_tokens(model, self._task, batch, length, args)
        examples = [example_of(row) for row in batch]
        if self._inference_fn is not None:
            answers = list(self._inference_fn(examples, model, args))
        else:
            answers = self._answers(examples, [length_of(row) for row in batch], model, args)
        if len(answers) != len(batch):
            raise PredictionCountError(
                f"the pipeline gave {len(answers)} answers for {len(batch)} rows, but there must be one per row, in order; "
                "check that each row is one input of the task"
            )
        return answers

    def _answers(self, examples: list[Any], lengths: list[int], model: Any, args: Mapping[str, Any]) -> Any:
        """What the pipeline makes of examples by itself."""
        if (arrays := run_images(model, self._task, examples, args)) is not None:
            return arrays
        if self._task == "text-classification":
            examples = [_as_dict(example) for example in examples]
        if self._task == "feature-extraction":  # one by one: what it says of padding would be taken for the text's
            return list(default_pipeline_inference_fn(examples, model, {**args, "batch_size": 1}))
        if self._task in PADDING_TASKS and max(lengths) > 1 and (self._length_buckets or self.new_shapes_cost()):
            length = self._padded(lengths, model.tokenizer.model_max_length)
            padding = {"padding": "max_length", "max_length": length, "truncation": True}
            args = TOKEN_TASKS[self._task].with_settings(args, padding)
        return list(default_pipeline_inference_fn(examples, model, args))

    def model_id(self) -> str:
        return self._model or self._given_task


def _known_task(task: str, load_args: Mapping[str, Any]) -> str:
    """The task by its main name: "sentiment-analysis" is "text-classification". A model's own code may bring others."""
    if not task or load_args.get("trust_remote_code") or "pipeline_class" in load_args:
        return task
    name = ALIASES.get(task, task)
    if name in KNOWN_TASKS:
        return name
    from transformers.pipelines import check_task

    try:
        return str(check_task(task)[0])
    except KeyError as exc:
        raise UsageError(f"task={task!r}: {exc.args[0]}") from exc


def _image_of(example: Any) -> Any:
    """The image, upright and in RGB; arrays and URLs are left to the pipeline."""
    is_url = isinstance(example, str) and example.startswith(("http://", "https://", "data:"))
    return example if is_url or hasattr(example, "shape") else ImageDecoding().upright(example)


def _pair_of(example: Any) -> Text | None:
    """A text, or two of them, from {"text": ..., "text_pair": ...} or a tuple of two."""
    if isinstance(example, Mapping):
        example = (example.get("text"), example.get("text_pair"))
        if example[1] is None:
            example = (example[0], "")
    if isinstance(example, tuple) and len(example) == 2 and all(isinstance(text, str) for text in example):
        return (example[0], example[1]) if example[1] else str(example[0])
    return None


def _as_dict(example: Any) -> Any:
    return {"text": example[0], "text_pair": example[1]} if isinstance(example, tuple) else example


def _words_of(example: Any) -> Text | None:
    """The words of a text, or the messages of a chat."""
    if isinstance(example, (list, tuple)) and example:
        parts: list[Any] = [part.get("content") if isinstance(part, Mapping) else part for part in example]
        if all(isinstance(part, str) for part in parts):
            return " ".join(parts)
    return None


def _any_text(example: Any) -> Text:
    """What can be counted of an example for the user's own function; nothing, where that is no text."""
    return example if isinstance(example, str) else _pair_of(example) or _words_of(example) or ""


def _without_mask(rows: Sequence[Any], texts: Sequence[Any], mask: int | None) -> dict[int, Exception]:
    return {
        at: ValueError(f"there is no mask token in the text that the model would see: {shorten(texts[at])}")
        for at, row in enumerate(rows)
        if row is not None and mask not in ids_of(row)
    }


def _truncation(task: str, load_args: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that cut long texts. Token classification and zero-shot classification do so by themselves."""
    if task == "text-generation" and "truncation" not in load_args:
        return {"truncation": True}
    if task in PADDING_TASKS and "truncation" not in load_args:
        return TOKEN_TASKS[task].with_settings(load_args, {"truncation": True})
    return {}


def _set_maximum(pipeline: Any) -> None:
    """Let the tokenizer cut at what the model takes, where it has no maximum of its own."""
    maximum = getattr(pipeline.model.config, "max_position_embeddings", None)
    if pipeline.tokenizer.model_max_length >= NO_MAXIMUM and maximum:
        pipeline.tokenizer.model_max_length = maximum


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
