"""Sentence encoders whose modules are all known, without sentence-transformers.

token ids -> the transformer, by transformers -> pooling -> Dense, Normalize -> a vector for each text
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional

from penstock.handlers.huggingface_encoder_layout import DenseLayout, EncoderLayout, Head
from penstock.handlers.pytorch_linear import quicken


def load_encoder(
    layout: EncoderLayout, device: torch.device, dtype: Any, max_length: int | None, whole: Callable[[], Any]
) -> TextEncoder:
    """The encoder on its device, in evaluation mode. max_length: None is what its files say. whole: loads it by
    sentence-transformers."""
    files = layout.transformer
    options = {"local_files_only": os.path.isdir(files.place), "trust_remote_code": False, **files.hub}
    if files.subfolder:
        options["subfolder"] = files.subfolder
    config = transformers.AutoConfig.from_pretrained(files.place, **options)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # of decoders, which would keep what only the next token needs
    transformer = transformers.AutoModel.from_pretrained(files.place, config=config, dtype=dtype, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(files.place, **options)
    known = tokenizer.model_max_length, getattr(config, "max_position_embeddings", -1)
    tokenizer.model_max_length = max_length or layout.max_length or min(each for each in known if each != -1)
    heads = [_head(head) for head in layout.heads]
    modules = _Modules(transformer, layout.pooling, [head.to(transformer.dtype) for head in heads])
    return TextEncoder(modules.to(device).eval(), tokenizer, whole)


class TextEncoder(torch.nn.Module):  # type: ignore[misc]
    """What SentenceTransformer is for texts that were tokenised."""

    truncate_dim = None

    def __init__(self, modules: torch.nn.Module, tokenizer: Any, whole: Callable[[], Any]) -> None:
        super().__init__()
        self.inner = modules  # replaced at once, never changed
        self.tokenizer = tokenizer
        self._whole = whole
        self._lock = threading.Lock()  # held while the SentenceTransformer is loaded
        self._is_whole = False

    @property
    def device(self) -> torch.device:
        return next(self.inner.parameters()).device

    @property
    def max_seq_length(self) -> int:
        return int(self.tokenizer.model_max_length)

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = self.inner(features)
        return made

    def encode(self, texts: Sequence[str], **options: Any) -> Any:
        """What SentenceTransformer.encode() gives. It is imported and loaded when this is first called, in place of the
        modules here."""
        with self._lock:
            if not self._is_whole:
                self.inner = self._whole()
                quicken(self.inner)
                self._is_whole = True
        return self.inner.encode(texts, **options)


class _Modules(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, transformer: Any, pooling: Sequence[str], heads: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.transformer = transformer
        self.heads = torch.nn.Sequential(*heads)
        self._pooling = pooling
        taken = inspect.signature(transformer.forward).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
        self._taken = None if takes_all else set(taken)

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given = {name: each for name, each in features.items() if self._taken is None or name in self._taken}
        tokens = self.transformer(**given, return_dict=True).last_hidden_state
        mask = features.get("attention_mask")
        if mask is None:
            mask = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
        pooled = torch.cat([_POOLINGS[mode](tokens, mask) for mode in self._pooling], dim=-1)
        return {"sentence_embedding": self.heads(pooled)}


# Each takes the hidden states, rows x tokens x features, and which tokens are the texts' own: 1, and 0 for padding on
# either side. Sums of half precision are made in float32.


def _first(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _at(tokens, mask.to(torch.int32).argmax(dim=1))


def _last(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Zeros for a text without tokens."""
    places = mask.shape[1] - 1 - mask.to(torch.int32).flip(1).argmax(dim=1)
    return _at(tokens, places) * _at(mask, places).unsqueeze(-1).to(tokens.dtype)


def _at(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return tokens[torch.arange(len(tokens), device=tokens.device), places]


def _most(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return tokens.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(dim=1)


def _mean(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    summed, count = _sums(tokens, mask)
    return (summed / count).to(tokens.dtype)


def _mean_by_root(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    summed, count = _sums(tokens, mask)
    return (summed / count.sqrt()).to(tokens.dtype)


def _weighted_mean(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Of which the first token has the weight 1, the second 2, and so on."""
    weights = (mask.cumsum(dim=1) * mask).unsqueeze(-1).to(_accumulated(tokens))
    return ((tokens * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)).to(tokens.dtype)


def _sums(tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    own = mask.unsqueeze(-1).to(tokens.dtype)
    kind = _accumulated(tokens)
    return (tokens * own).sum(dim=1, dtype=kind), own.sum(dim=1, dtype=kind).clamp(min=1e-9)


def _accumulated(tokens: torch.Tensor) -> torch.dtype:
    return torch.float32 if tokens.dtype in (torch.float16, torch.bfloat16) else tokens.dtype


_POOLINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": _first,
    "max": _most,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}


class _Normalize(torch.nn.Module):  # type: ignore[misc]
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return functional.normalize(vectors, dim=-1)


def _head(head: Head) -> torch.nn.Module:
    if not isinstance(head, DenseLayout):
        return _Normalize()
    linear = torch.nn.Linear(*head.features, bias=head.bias)
    linear.load_state_dict({name.removeprefix("linear."): each for name, each in load_file(head.weights).items()})
    activation: torch.nn.Module = getattr(torch.nn, head.activation)()
    return torch.nn.Sequential(linear, activation)
