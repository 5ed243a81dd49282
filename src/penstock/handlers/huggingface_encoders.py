"""A handler for sentence encoders.

texts -> token ids, beside the data -> one batch, padded to its longest text (or to a bucket) -> device -> one array
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from penstock.answers import own_answers
from penstock.errors import UsageError
from penstock.handlers.catalog import SENTENCES, check_needs, check_versions
from penstock.handlers.huggingface_encoder_layout import EncoderLayout, layout_of
from penstock.handlers.huggingface_files import ModelFiles, check_place, loading, reading
from penstock.handlers.huggingface_models import (
    HuggingFaceModelHandler,
    InferenceArgs,
    dtype_on,
    key_of,
    small_files_of,
    tokenizer_of,
)
from penstock.handlers.huggingface_tokens import (
    TextTokenizer,
    Whole,
    collated,
    example_of,
    is_tokens,
    length_of,
    text_of,
)
from penstock.handlers.prepared_rows import prepared, raise_bad_rows
from penstock.inference.handler_settings import HandlerSettings

if TYPE_CHECKING:
    import torch


_ENCODING = threading.Lock()  # encode() changes the model's tokenizer
_SIMPLE = {"normalize_embeddings", "prompt", "prompt_name", "show_progress_bar"}  # arguments of encode()
# Arguments of SentenceTransformer() that change neither what a text is tokenised to, by a tokenizer that was given them, nor
# what comes out.
_NEUTRAL = {"revision", "token", "cache_folder", "local_files_only", "trust_remote_code"} | {
    *("prompts", "default_prompt_name", "similarity_fn_name")
}
_SETTINGS = {"max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name"}
_SETTINGS_FILES = [
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]


@dataclass(frozen=True)
class EncoderTool:
    """How texts are prepared for an encoder, by the files of the model."""

    tokenizer: TextTokenizer | None = None  # None: texts have no tokens, or nobody knows them
    takes_tokens: bool = False  # whether token ids are all that the model needs
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pools_prompts: bool = True  # False: the model must be told which tokens are the prompt
    layout: EncoderLayout | None = None  # None: only sentence-transformers knows the modules

    def prompt(self, options: Mapping[str, Any]) -> str:
        """What encode(**options) puts before every text."""
        if options.get("prompt") is not None:
            return str(options["prompt"])
        name = options.get("prompt_name")
        if name is not None and name not in self.prompts:
            raise UsageError(f"prompt_name={name!r}: the model has the prompts {sorted(self.prompts)}; give one, or prompt=")
        name = name or self.default_prompt
        return self.prompts.get(name) or "" if name else ""


class SentenceTransformerModelHandler(HuggingFaceModelHandler):
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
        **settings: Unpack[HandlerSettings],
    ) -> None:
        """Describe SentenceTransformer(model_name, **load_args).encode(texts, **encode_kwargs).

        model_name: a folder, or a name in the Hugging Face cache or hub.
        device: "CPU" (also when None), "GPU" (the CPU where there is none) or any torch device.
        max_seq_length: texts are cut after so many tokens; None: what the model says.
        inference_args of RunInference are more encode_kwargs.
        columns: the column of texts, where rows have columns.
        """
        super().__init__(model_name, device, settings)
        if not self._model:
            raise UsageError("model_name is empty; expected a folder or a name in the Hugging Face cache or hub")
        if max_seq_length is not None and max_seq_length < 1:
            raise UsageError(f"max_seq_length={max_seq_length}: expected at least 1 token")
        if len(self.input_columns() or ()) > 1:
            raise UsageError(f"columns={list(self.input_columns() or ())}: expected one column, which has the texts")
        self._max_seq_length = max_seq_length
        self._encode_kwargs = {"normalize_embeddings": normalize_embeddings, **(encode_kwargs or {})}
        self._load_args = dict(load_args or {})

    # Beside the data.

    def prepare_key(self) -> str | None:
        return key_of(small_files_of(self._model), self._max_seq_length, self._load_args)

    def load_prepare(self) -> EncoderTool:
        """The tokenizer and the prompts, from the small files of the model."""
        check_place(self._model)
        with reading(f"the tokenizer of {self._model!r}"):
            return self._tool(self._files())

    def prepare(self, examples: Sequence[str], tool: EncoderTool, inference_args: InferenceArgs = None) -> list[Any]:
        options = {**self._encode_kwargs, **(inference_args or {})}
        prompt = tool.prompt(options)
        texts, errors = prepared(examples, text_of)
        if tool.tokenizer is None:
            return raise_bad_rows(errors, [Whole(text, 1) for text in texts])
        rows, more = tool.tokenizer.tokenise([prompt + (text or "") for text in texts])
        if not (tool.takes_tokens and self._is_simple(options) and (tool.pools_prompts or not prompt)):
            rows = [Whole(text, length_of(row)) for text, row in zip(texts, rows, strict=True)]
        return raise_bad_rows({**more, **errors}, rows)

    def changes_rows(self) -> bool:
        return False

    def _takes(self) -> str:
        return "texts"

    def _files(self) -> ModelFiles:
        names = {
            "revision": "revision",
            "token": "token",
            "local_files_only": "local_files_only",
            "cache_folder": "cache_dir",
        }
        hub = {own: self._load_args[name] for name, own in names.items() if name in self._load_args}
        if folder := os.environ.get("SENTENCE_TRANSFORMERS_HOME"):
            hub.setdefault("cache_dir", folder)
        if os.path.isdir(self._model) or "/" in self._model:
            return ModelFiles(self._model, hub)
        from huggingface_hub.errors import RepositoryNotFoundError

        files = ModelFiles(f"sentence-transformers/{self._model}", hub)  # where names without an owner are looked for
        with contextlib.suppress(RepositoryNotFoundError):
            if files.path("config.json") is not None:
                return files
        return ModelFiles(self._model, hub)

    def _tool(self, files: ModelFiles) -> EncoderTool:
        listed = files.json("modules.json")
        modules = listed or [{"path": "", "type": "sentence_transformers.models.Transformer"}]
        saved = (files.json("config_sentence_transformers.json") if listed else None) or {}
        given = self._load_args.get("prompts") or {}
        prompts = {"query": "", "document": "", **dict.fromkeys(given, ""), **saved.get("prompts", {})}
        prompts |= {name: prompt for name, prompt in given.items() if prompt is not None}
        default = self._load_args.get("default_prompt_name") or saved.get("default_prompt_name")
        first = modules[0]["type"].split(".")
        if first[-1] != "Transformer":
            return EncoderTool(prompts=prompts, default_prompt=default)  # static embeddings and bags of words: no padding
        inner = files.below(modules[0]["path"])
        settings: dict[str, Any] = next(filter(None, map(inner.json, _SETTINGS_FILES)), {})
        tokenizer = self._tokenizer(inner, settings)
        own = [module["type"].startswith("sentence_transformers.") for module in modules]
        pools = [files.below(module["path"]).json("config.json") or {} for module in modules[1:]]
        return EncoderTool(
            tokenizer,
            layout=layout_of(files, settings) if default in (None, *prompts) else None,  # the library says what is wrong
            takes_tokens=all(own)
            and self._has_neutral_load_args()
            and _takes_plain_texts(settings)
            and (tokenizer.loaded.fast is not None or not settings.get("do_lower_case"))
            and saved.get("model_type", "SentenceTransformer") == "SentenceTransformer"
            and (listed is not None or not (inner.json("tokenizer_config.json") or {}).get("chat_template")),
            prompts=prompts,
            default_prompt=default,
            pools_prompts=all(pool.get("include_prompt", True) for pool in pools)
            and "instructor" not in self._model.lower(),
        )

    def _tokenizer(self, files: ModelFiles, settings: Mapping[str, Any]) -> TextTokenizer:
        """The tokenizer of the first module, cut where that cuts."""
        given = {name: self._load_args[name] for name in ("trust_remote_code",) if name in self._load_args}
        for options in (settings, self._load_args):
            given |= (
                options.get("tokenizer_args") or options.get("tokenizer_kwargs") or options.get("processor_kwargs") or {}
            )
        loaded = tokenizer_of(files, given, plainly=not given)
        limit = self._max_seq_length or given.get("model_max_length") or settings.get("max_seq_length")
        known = [each for each in (loaded.max_length, loaded.positions) if each is not None and each > 0]
        return TextTokenizer(loaded, limit or min(known, default=None), bool(settings.get("do_lower_case")))

    def _has_neutral_load_args(self) -> bool:
        kept = {name for name in self._load_args if name != "model_kwargs" and self._load_args[name] not in (None, False)}
        return kept <= _NEUTRAL and "attn_implementation" not in (self._load_args.get("model_kwargs") or {})

    def _is_simple(self, options: Mapping[str, Any]) -> bool:
        """Whether encode() gives one vector of floats for each text, and nothing else was asked of it."""
        return options.keys() <= _SIMPLE

    # Beside the device.

    def load_model(self) -> Any:
        """The encoder, on its device: the SentenceTransformer, or what gives the same vectors for token ids and needs no
        sentence-transformers."""
        check_versions("huggingface")
        check_needs("huggingface", [SENTENCES])  # which arguments of a later call may need
        check_place(self._model)
        tool = self.load_prepare() if self._is_simple(self._encode_kwargs) and self._runs_models_here() else EncoderTool()
        if tool.layout is None or tool.tokenizer is None or not (tool.takes_tokens and tool.pools_prompts):
            return self._sentence_transformer()
        from penstock.handlers.huggingface_encoder_models import load_encoder
        from penstock.handlers.pytorch_loading import usable_device

        device = usable_device(self._device)
        dtype = (self._load_args.get("model_kwargs") or {}).get("dtype", dtype_on(device))
        self._check_length(tool.tokenizer.loaded.positions)
        with loading(f"the sentence encoder {self._model!r}"):
            model = load_encoder(tool.layout, device, dtype, self._max_seq_length, self._sentence_transformer)
        self._check_tokens(model, tool)
        return model

    def _runs_models_here(self) -> bool:
        """Whether the arguments leave the model as it is, and nothing but this class sees it."""
        given = (self._load_args.get("model_kwargs") or {}).keys()
        own, here = type(self), SentenceTransformerModelHandler
        sees = own.load_model is here.load_model and own.run_inference is here.run_inference
        return sees and given <= {"dtype"} and not self._load_args.get("trust_remote_code")

    def _sentence_transformer(self) -> Any:
        from sentence_transformers import SentenceTransformer

        from penstock.handlers.pytorch_loading import usable_device

        device = usable_device(self._device)
        options = {"device": str(device), "local_files_only": os.path.isdir(self._model), **self._load_args}
        if options.get("backend", "torch") == "torch":
            options["model_kwargs"] = {"dtype": dtype_on(device), **options.get("model_kwargs", {})}
        with loading(f"the sentence encoder {self._model!r}"):
            model = SentenceTransformer(self._model, **options)
        if self._max_seq_length is not None:
            self._check_length(getattr(getattr(model[0], "config", None), "max_position_embeddings", None))
            model.max_seq_length = self._max_seq_length
        self._check_tokens(model, self.load_prepare())
        return model.eval()

    def _check_length(self, positions: int | None) -> None:
        if positions is not None and self._max_seq_length is not None and self._max_seq_length > positions:
            raise UsageError(f"max_seq_length={self._max_seq_length}, but {self._model!r} takes {positions} tokens at most")

    def _check_tokens(self, model: Any, tool: EncoderTool) -> None:
        if tool.takes_tokens and tool.tokenizer is not None:
            tool.tokenizer.check(model.tokenizer, self._model, 'load_args={"processor_kwargs": {"use_fast": True}}')

    def prepares_ahead(self) -> bool:
        return self.new_shapes_cost() and self._has_neutral_load_args() and self._is_simple(self._encode_kwargs)

    def run_inference(self, batch: Sequence[Any], model: Any, inference_args: InferenceArgs = None) -> Any:
        from penstock.handlers.pytorch_linear import quicken

        options = {**self._encode_kwargs, **(inference_args or {})}
        quicken(model)
        if is_tokens(batch[0]):
            return self._run(batch, model, options)
        with _ENCODING if self.prepares_ahead() else contextlib.nullcontext():
            return self._encode(batch, model, options)

    def _run(self, batch: Sequence[Any], model: Any, options: Mapping[str, Any]) -> Any:
        """What encode() does for texts, for their tokens."""
        import torch

        from penstock.handlers.pytorch_running import attention_without_plans, run_on

        length = self._padded([length_of(row) for row in batch], model.max_seq_length)
        features = {name: torch.from_numpy(each) for name, each in collated(batch, model.tokenizer, length).items()}

        def run(moved: dict[str, torch.Tensor]) -> Any:
            with attention_without_plans(model.device):
                vectors = model(moved)["sentence_embedding"].float()
            vectors = vectors[:, : model.truncate_dim]
            return torch.nn.functional.normalize(vectors, dim=1) if options["normalize_embeddings"] else vectors

        return run_on(model.device, features, run, lambda vectors: vectors.cpu().numpy())

    def _encode(self, batch: Sequence[Any], model: Any, options: Mapping[str, Any]) -> Any:
        texts = [example_of(row) for row in batch]
        options = {"batch_size": len(texts), "show_progress_bar": False, "convert_to_numpy": True, **options}
        lengths = [length_of(row) for row in batch]
        if max(lengths) > 1 and (self._length_buckets or self.new_shapes_cost()):
            length = self._padded(lengths, model.max_seq_length)
            options = {"processing_kwargs": {"text": {"padding": "max_length", "max_length": length}}, **options}
        vectors = model.encode(texts, **options)
        return own_answers(vectors) if isinstance(vectors, list) else vectors  # views of a batch would be pickled with it


def _takes_plain_texts(settings: Mapping[str, Any]) -> bool:
    """Whether sentence-transformers passes texts to the tokenizer as they are, and nothing else to the model."""
    used = {name for name, value in settings.items() if value not in (None, False, {}) and not name.startswith("model_")}
    modalities = settings.get("modality_config") or {"text": {}}
    task = settings.get("transformer_task", "feature-extraction")
    return (
        used - {"config_args", "config_kwargs"} <= _SETTINGS and set(modalities) == {"text"} and task == "feature-extraction"
    )
