"""Handlers for Hugging Face models: transformers pipelines and sentence-transformers encoders.

texts -> one tokenised batch, padded to its longest row (or to a bucket) -> device -> one PredictionResult per row

Both count the tokens of texts before the model sees them, so that rows of like length share a batch.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias, TypedDict, Unpack

from penstock.blocks import size_of
from penstock.errors import InputError, MissingPackageError, PredictionCountError, UsageError

try:
    import transformers
except ModuleNotFoundError as exc:
    raise MissingPackageError("transformers", "huggingface") from exc
try:
    import torch
except ModuleNotFoundError as exc:
    raise MissingPackageError("torch", "huggingface") from exc

from transformers.pipelines import check_task
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from penstock.handlers.huggingface_tokens import (
    NO_MAXIMUM,
    Text,
    TokenCounter,
    max_length_of,
    no_text,
    padded_length,
    shared_counter,
    text_of_row,
    texts_of,
)
from penstock.handlers.pytorch_loading import device_name, usable_device
from penstock.handlers.pytorch_running import Move, run_on
from penstock.inference.handler import ModelHandler
from penstock.rows import PredictionResult

InferenceArgs: TypeAlias = Mapping[str, Any] | None
PipelineInferenceFn: TypeAlias = Callable[[Sequence[Any], Any, Mapping[str, Any]], Iterable[Any]]

TEXT_TASKS = frozenset(
    {"feature-extraction", "fill-mask", "text-classification", "text-generation", "token-classification"}
    | {"zero-shot-classification"}
)
# Where a pipeline takes its tokenizer's settings: by themselves, or under a name. Other tasks take no padding.
_TOKENIZER_ARGS = {"text-classification": None, "feature-extraction": "tokenize_kwargs", "fill-mask": "tokenizer_kwargs"}


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


# What both handlers share.


class _TextModelHandler(ModelHandler[Any, PredictionResult, Any]):
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
def _loading(what: str) -> Iterator[None]:
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


def _check_place(model: str) -> None:
    if (os.path.isabs(model) or model.startswith((".", "~"))) and not os.path.isdir(model):
        raise InputError(
            f"model folder {model!r} does not exist; expected a folder with a config.json that the process that loads "
            "the model can read: check the spelling, or give an absolute path"
        )


def _dtype(device: torch.device) -> Any:
    """float32 on a CPU, where half precision is slow or not there; elsewhere what the model was saved in."""
    return torch.float32 if device.type == "cpu" else "auto"


# Pipelines.


def default_pipeline_inference_fn(batch: Sequence[Any], pipeline: Any, inference_args: Mapping[str, Any]) -> Iterable[Any]:
    """pipeline(rows, **inference_args), all rows in one forward pass."""
    answers = pipeline(list(batch), **{"batch_size": len(batch), **inference_args})
    if len(batch) == 1 and (pipeline.task == "fill-mask" or not isinstance(answers, list)):
        return [answers]  # some pipelines take a list of one row for the row
    return answers  # type: ignore[no-any-return]


class HuggingFacePipelineModelHandler(_TextModelHandler):
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
        _check_place(self._model)
        device = usable_device(self._device)
        options: dict[str, Any] = {"trust_remote_code": False, "dtype": self._dtype or _dtype(device)}
        if "device_map" not in self._load_args:
            options["device"] = device
        options |= self._load_args | _truncation(self._task, self._load_args)
        with _loading(f"a pipeline for task={self._given_task!r} with model={self._model!r}"):
            pipeline = transformers.pipeline(self._given_task or None, model=self._model or None, **options)
        _check_weights(pipeline, self._model)
        if pipeline.task in TEXT_TASKS and (limit := max_length_of(pipeline.tokenizer, pipeline.model.config)):
            pipeline.tokenizer.model_max_length = limit
        if getattr(pipeline, "tokenizer", None) is not None and pipeline.tokenizer.pad_token_id is None:
            pipeline.tokenizer.pad_token = pipeline.tokenizer.eos_token  # batches need one; masked, so any token will do
        return pipeline

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
        with _loading(f"the tokenizer of model={self._model!r}"):
            _check_place(self._model)
            tokenizer = copy.deepcopy(place) if not isinstance(place, str) else _tokenizer(place, **hub)
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


def _tokenizer(place: str, **options: Any) -> Any:
    return transformers.AutoTokenizer.from_pretrained(place, **{"trust_remote_code": False, **options})


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


# Sentence encoders.

_TOKENIZING = threading.Lock()  # tokenizers are changed by their calls
_SIMPLE = {"normalize_embeddings", "prompt", "prompt_name"}  # arguments of encode()


class SentenceTransformerModelHandler(_TextModelHandler):
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
        _check_place(self._model)
        device = usable_device(self._device)
        options = {"device": str(device), "local_files_only": os.path.isdir(self._model), **self._load_args}
        if options.get("backend", "torch") == "torch":
            options["model_kwargs"] = {"dtype": _dtype(device), **options.get("model_kwargs", {})}
        with _loading(f"the sentence encoder {self._model!r}"):
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
        _check_place(self._model)
        modules = self._read_json("modules.json") or [{"path": "", "type": "Transformer"}]
        if not modules[0]["type"].endswith("Transformer"):
            return None  # static embeddings and bags of words have no padding
        settings = self._read_json(os.path.join(modules[0]["path"], "sentence_bert_config.json")) or {}
        options = {**self._hub_args(), **self._load_args.get("processor_kwargs", {})}
        with _loading(f"the tokenizer of {self._model!r}"):
            config = transformers.AutoConfig.from_pretrained(self._model, subfolder=modules[0]["path"], **self._hub_args())
            tokenizer = _tokenizer(self._model, subfolder=modules[0]["path"], **options)
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
        with _loading(f"{name} of {self._model!r}"):
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
