"""Which modules a sentence encoder has, by the files of its model, where they are all known here: such an encoder runs
without sentence-transformers, whose import takes longer than loading most models.

Nothing here imports torch or transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeAlias

from penstock.handlers.huggingface_files import ModelFiles

# Encoders, and two decoders, whose hidden states are what sentence-transformers takes, with nothing set but use_cache.
_TRANSFORMERS = frozenset(
    {"albert", "bert", "camembert", "distilbert", "electra", "modernbert", "mpnet", "roberta", "xlm-roberta"}
    | {"qwen2", "qwen3"}
)
_POOLING = {  # in the order in which their vectors are put together, by the names that older files have
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = {f"torch.nn.modules.activation.{name}": name for name in ("GELU", "ReLU", "Sigmoid", "SiLU", "Tanh")} | {
    "torch.nn.modules.linear.Identity": "Identity"
}
_TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
_PLAIN_SETTINGS: dict[str, Sequence[Any]] = {  # of the transformer, and what is known here
    "max_seq_length": range(1, 10**9),
    "transformer_task": ("feature-extraction",),
    "modality_config": (_TEXT,),
    "module_output_name": ("token_embeddings",),
}
_PLAIN_MODEL = {"__version__", "prompts", "default_prompt_name", "similarity_fn_name", "model_type"}


@dataclass(frozen=True)
class DenseLayout:
    """A linear layer over the vectors."""

    weights: str  # a file of safetensors
    features: tuple[int, int]  # that go in and come out
    bias: bool
    activation: str  # a class of torch.nn


@dataclass(frozen=True)
class NormalizeLayout:
    """Vectors get the length 1."""


Head: TypeAlias = DenseLayout | NormalizeLayout


@dataclass(frozen=True)
class EncoderLayout:
    """The modules of an encoder, in order."""

    transformer: ModelFiles
    pooling: tuple[str, ...]  # several are put one behind the other
    heads: tuple[Head, ...]
    max_length: int | None  # tokens, by the settings of the transformer


def layout_of(files: ModelFiles, settings: Mapping[str, Any]) -> EncoderLayout | None:
    """The modules of the encoder in these files, None where any is not known here. `settings`: those of its transformer."""
    listed = files.json("modules.json")
    if listed is None or not all(str(module["type"]).startswith("sentence_transformers.") for module in listed):
        return None
    kinds = [str(module["type"]).split(".")[-1] for module in listed]
    if kinds[:2] != ["Transformer", "Pooling"] or any(module.get("kwargs") for module in listed):
        return None
    if any(".." in (path := PurePath(module["path"])).parts or path.is_absolute() for module in listed):
        return None  # the library refuses it
    parts = [files.below(module["path"]) for module in listed]
    pooling = _pooling_of(parts[1].json("config.json") or {})
    heads = [_head_of(kind, part) for kind, part in zip(kinds[2:], parts[2:], strict=True)]
    if pooling is None or None in heads or not (_is_plain(files, settings) and _is_plain_transformer(parts[0])):
        return None
    known = tuple(head for head in heads if head is not None)
    return EncoderLayout(parts[0], pooling, known, settings.get("max_seq_length"))


def _is_plain(files: ModelFiles, settings: Mapping[str, Any]) -> bool:
    saved = files.json("config_sentence_transformers.json") or {}
    given = {name: value for name, value in settings.items() if value not in (None, False, {})}
    return {name for name, value in saved.items() if value not in (None, False, {})} <= _PLAIN_MODEL and all(
        value in _PLAIN_SETTINGS.get(name, ()) for name, value in given.items()
    )


def _is_plain_transformer(files: ModelFiles) -> bool:
    config = files.json("config.json") or {}
    odd = ("auto_map", "quantization_config", "is_decoder", "add_cross_attention", "is_encoder_decoder")
    return (
        config.get("model_type") in _TRANSFORMERS
        and not any(config.get(name) for name in odd)
        and files.path("adapter_config.json") is None
    )


def _pooling_of(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    known = {*_POOLING, "pooling_mode", "include_prompt", "word_embedding_dimension", "embedding_dimension"}
    if not config.keys() <= known or not config.get("include_prompt", True):
        return None
    if config.keys().isdisjoint({"word_embedding_dimension", "embedding_dimension"}):
        return None  # such as where the file is missing
    told = config.get("pooling_mode") or [mode for name, mode in _POOLING.items() if config.get(name)] or "mean"
    modes = (told,) if isinstance(told, str) else tuple(told)
    return modes if set(modes) <= set(_POOLING.values()) else None


def _head_of(kind: str, files: ModelFiles) -> Head | None:
    config = files.json("config.json") or {}
    names = {config.get("module_input_name"), config.get("module_output_name")}
    if not names <= {None, "sentence_embedding"}:
        return None
    if kind == "Normalize":
        return NormalizeLayout()
    if kind != "Dense" or config.get("use_residual"):
        return None
    weights = files.path("model.safetensors")
    activation = _ACTIVATIONS.get(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if weights is None or activation is None:
        return None
    return DenseLayout(weights, (config["in_features"], config["out_features"]), config.get("bias", True), activation)
