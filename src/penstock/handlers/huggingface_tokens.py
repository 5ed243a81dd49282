"""Counting the tokens of texts before a model sees them, and the lengths that batches of texts are padded to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from penstock.rows import shorten

Text: TypeAlias = str | tuple[str, str]

_COUNTED_AT_ONCE = 256  # texts; a tokenised text holds about 100 bytes for each token, also for those cut off
_CHARACTERS_PER_TOKEN = 8  # more than nearly all texts have
NO_MAXIMUM = 10**9  # tokenizers that know no maximum say 10**30


class TokenCounter:
    """Counts tokens as the model will see them: special ones included, cut at the model's maximum.

    Never changed after it is made, so many threads may count at once. A slow tokenizer counts for one thread at a time.
    """

    def __init__(self, tokenizer: Any, max_length: int | None, prompt: str = "") -> None:
        """Take over the tokenizer: nothing else may use it. The model puts `prompt` before every text."""
        self._tokenizer, self._max_length, self._prompt = tokenizer, max_length, prompt
        self._lock = threading.Lock()
        self._fast = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._fast is not None:
            self._fast.no_padding()
            if max_length is None:
                self._fast.no_truncation()
            else:
                self._fast.enable_truncation(max_length)

    def count(self, texts: Sequence[Text]) -> list[int]:
        counts: list[int] = []
        for start in range(0, len(texts), _COUNTED_AT_ONCE):
            piece = list(texts[start : start + _COUNTED_AT_ONCE])
            if self._prompt:
                piece = [self._prompt + text if isinstance(text, str) else text for text in piece]
            try:
                counts += self._count(piece)
            except (TypeError, ValueError):  # a text that is not valid Unicode, such as half a character
                counts += map(self._count_one, piece)
        return counts

    def _count(self, texts: list[Text]) -> list[int]:
        """The counts. The beginning of a long text is enough, where it has as many tokens as the model takes."""
        if self._max_length is None:
            return self._encode(texts)
        cut = self._max_length * _CHARACTERS_PER_TOKEN
        counts = self._encode([text[:cut] if isinstance(text, str) else text for text in texts])
        longer = [at for at, text in enumerate(texts) if len(text) > cut and counts[at] < self._max_length]
        for at, count in zip(longer, self._encode([texts[at] for at in longer]) if longer else [], strict=True):
            counts[at] = count
        return counts

    def _encode(self, texts: list[Text]) -> list[int]:
        if self._fast is not None:
            return [len(encoding) for encoding in self._fast.encode_batch_fast(texts)]
        with self._lock:
            options = {"truncation": self._max_length is not None, "max_length": self._max_length}
            return [len(row) for row in self._tokenizer(texts, **options)["input_ids"]]

    def _count_one(self, text: Text) -> int:
        try:
            return self._count([text])[0]
        except (TypeError, ValueError) as exc:
            raise ValueError(f"the text {shorten(text)} cannot be tokenised: {exc}") from exc


_counters: dict[str, TokenCounter | None] = {}
_counters_lock = threading.Lock()


def shared_counter(key: str, make: Callable[[], TokenCounter | None]) -> TokenCounter | None:
    """The counter of this key, made once for each process, whichever thread comes first."""
    with _counters_lock:
        if key not in _counters:
            _counters[key] = make()
        return _counters[key]


def max_length_of(tokenizer: Any, config: Any) -> int | None:
    """The most tokens that the model takes, or None where neither the tokenizer nor the model has a maximum."""
    if tokenizer.model_max_length < NO_MAXIMUM:
        return int(tokenizer.model_max_length)
    return getattr(config, "max_position_embeddings", None)


def texts_of(batch: Sequence[Any], text_of: Callable[[Any], Text | None]) -> list[Text]:
    texts: list[Text] = []
    for at, row in enumerate(batch):
        text = row if isinstance(row, str) else text_of(row)
        if text is None:
            raise TypeError(
                f"row {at} of {len(batch)} is a {type(row).__name__}, not text: {shorten(row)}; "
                "take the text out of it with with_preprocess_fn()"
            )
        texts.append(text)
    return texts


def no_text(row: Any) -> None:
    return None


def text_of_row(row: Any) -> Text | None:
    """What a pipeline reads of a row that is not a str: a pair of texts, the words of a text, or the messages of a chat."""
    if isinstance(row, Mapping) and isinstance(row.get("text"), str):
        pair = row.get("text_pair")
        return (row["text"], pair) if isinstance(pair, str) else str(row["text"])
    if isinstance(row, (list, tuple)) and row:
        parts: list[Any] = [part.get("content") if isinstance(part, Mapping) else part for part in row]
        if all(isinstance(part, str) for part in parts):
            return " ".join(parts)
    return None


def padded_length(longest: int, buckets: Sequence[int], max_length: int | None) -> int:
    """The length to pad to: the least bucket that holds the longest row, but never more than the model takes."""
    bucket = min((bucket for bucket in buckets if bucket >= longest), default=longest)
    return bucket if max_length is None else min(bucket, max_length)
