"""Texts as token ids: made beside the data, put together to one padded batch beside the model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from penstock.errors import InputError
from penstock.handlers.huggingface_tokenizers import LoadedTokenizer
from penstock.rows import shorten

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Text: TypeAlias = str | tuple[str, str]

_AT_ONCE = 256  # texts; a tokenised text holds about 100 bytes for each token, also for those cut off
_CHARACTERS_PER_TOKEN = 8  # more than nearly all texts have
_PROBES = ("Él está aquí, DON'T you? [MASK]<mask> 日本語 \ufb01 e\u0301 #re-do\t🙂 </s>", "a b c " * 100, "")


class Tokens(NamedTuple):
    """A text, or two, as the model takes it. Rows of plain texts are their ids alone."""

    ids: Array
    types: Array | None = None  # which of two texts each token belongs to; None: all to the first
    special: Array | None = None  # 1 for tokens that are of no text
    offsets: Array | None = None  # where each token begins and ends in the text
    text: str | None = None


class Whole(NamedTuple):
    """An example as it came, for models that tokenise by themselves, with the number of its tokens."""

    example: Any
    length: int


def is_tokens(row: Any) -> bool:
    """Whether a prepared row was tokenised; else it is for a model that does so by itself."""
    return isinstance(row, (np.ndarray, Tokens))


def length_of(row: Any) -> int:
    """The tokens of a prepared row; 1 where nobody has counted them."""
    if isinstance(row, Whole):
        return row.length
    return len(ids_of(row)) if is_tokens(row) else 1


def ids_of(row: Any) -> Array:
    """The token ids of a row that was tokenised."""
    ids: Array = row.ids if isinstance(row, Tokens) else row
    return ids


def example_of(row: Any) -> Any:
    """What the user's row was, of a prepared row that keeps it whole; any other as it is."""
    return row.example if isinstance(row, Whole) else row


class TextTokenizer:
    """Tokenises as the model's own tokenizer does, special tokens included, cut at `max_length`. Its tokenizers are never
    changed after they are made, so many threads may use it at once; a slow one works for one thread at a time."""

    def __init__(self, loaded: LoadedTokenizer, max_length: int | None, lower_case: bool = False) -> None:
        self.loaded, self.max_length = loaded, max_length
        self._lock = threading.Lock()  # held while a fast tokenizer is copied, or the slow one is called
        self._by_length: dict[int | None, Tokenizer] = {}  # guarded by the lock
        fast = loaded.fast
        if fast is not None and lower_case:
            fast.normalizer = normalizers.Sequence(
                [normalizers.Lowercase(), *([fast.normalizer] if fast.normalizer else [])]
            )
        self._cuts = fast is not None and loaded.side == "right" and _splits_at_spaces(fast)
        if fast is not None:
            fast.no_padding()
            self._by_length[max_length] = _cutting(fast, max_length, loaded.side)

    def tokenise(
        self, texts: Sequence[Text], max_length: int | None = None, offsets: bool = False
    ) -> tuple[list[Any], dict[int, Exception]]:
        """A row for each text, anything where that cannot be tokenised; and the errors by position. A `max_length` that is
        given is for this call alone, if it is less than the model's."""
        limits = [limit for limit in (self.max_length, max_length) if limit is not None]
        limit = min(limits, default=None)
        rows: list[Any] = []
        errors: dict[int, Exception] = {}
        for start in range(0, len(texts), _AT_ONCE):
            piece = texts[start : start + _AT_ONCE]
            try:
                rows += self._rows(piece, limit, offsets)
            except (TypeError, ValueError):  # a text that is not valid Unicode, such as half a character
                for at, text in enumerate(piece, start):
                    try:
                        rows += self._rows([text], limit, offsets)
                    except (TypeError, ValueError) as exc:
                        errors[at] = ValueError(f"the text {shorten(text)} cannot be tokenised: {exc}")
                        rows.append(None)
        return rows, errors

    def check(self, own: Any, model: str, instead: str) -> None:
        """InputError unless the tokenizer that the model was loaded with gives the same ids."""
        if self.loaded.slow is not None:
            return  # of the same class, from the same files
        limit = self.max_length
        theirs = own(list(_PROBES), truncation=limit is not None, max_length=limit)["input_ids"]
        rows, _ = self.tokenise(_PROBES)
        if theirs != [ids_of(row).tolist() for row in rows] or (limit is not None and own.model_max_length != limit):
            raise InputError(
                f"the tokenizer.json of {model!r} and the tokenizer that transformers makes of it do not agree, so texts "
                f"would be tokenised in another way than the model expects; give {instead} to leave it to transformers, and "
                "please report the model's name as a defect of Penstock"
            )

    def _rows(self, texts: Sequence[Text], limit: int | None, offsets: bool) -> list[Any]:
        if self.loaded.fast is None:
            return self._slow_rows(texts, limit)
        tokenizer = self._cutting_at(limit)
        encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
        made = encode([self._beginning(text, limit) for text in texts])
        short = [at for at, text in enumerate(texts) if self._was_cut(text, limit) and len(made[at]) < (limit or 0)]
        for at, whole in zip(short, encode([texts[at] for at in short]) if short else (), strict=True):
            made[at] = whole
        return [_row(encoding, text, offsets) for encoding, text in zip(made, texts, strict=True)]

    def _cutting_at(self, limit: int | None) -> Tokenizer:
        assert self.loaded.fast is not None
        with self._lock:
            if limit not in self._by_length:
                copy = Tokenizer.from_str(self.loaded.fast.to_str())
                copy.encode_special_tokens = self.loaded.fast.encode_special_tokens
                self._by_length[limit] = _cutting(copy, limit, self.loaded.side)
            return self._by_length[limit]

    def _was_cut(self, text: Text, limit: int | None) -> bool:
        return self._cuts and limit is not None and isinstance(text, str) and len(text) > limit * _CHARACTERS_PER_TOKEN

    def _beginning(self, text: Text, limit: int | None) -> Text:
        """The beginning of a long text, up to a space: where it has as many tokens as the model takes, it has the same."""
        if not self._was_cut(text, limit):
            return text
        assert isinstance(text, str)
        assert limit is not None
        return text[: text.rfind(" ", 0, limit * _CHARACTERS_PER_TOKEN) + 1]

    def _slow_rows(self, texts: Sequence[Text], limit: int | None) -> list[Any]:
        options = {"truncation": limit is not None, "max_length": limit}
        rows = []
        for text in texts:
            with self._lock:
                made = self.loaded.slow(*((text,) if isinstance(text, str) else text), **options)
            rows.append(_plainest(np.array(made["input_ids"], np.int32), made.get("token_type_ids") or ()))
        return rows


def _cutting(tokenizer: Tokenizer, limit: int | None, side: str) -> Tokenizer:
    if limit is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(limit, direction=side)
    return tokenizer


def _splits_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether what stands before a space is tokenised alike whatever stands after it."""
    spaced = any(" " in token.content for token in tokenizer.get_added_tokens_decoder().values())
    parts = tokenizer.normalizer, tokenizer.pre_tokenizer
    return not spaced and (type(parts[0]), type(parts[1])) == (normalizers.BertNormalizer, pre_tokenizers.BertPreTokenizer)


def _row(encoding: Any, text: Text, offsets: bool) -> Any:
    ids = np.array(encoding.ids, np.int32)
    if not offsets:
        return _plainest(ids, encoding.type_ids)
    types = np.array(encoding.type_ids, np.int32) if any(encoding.type_ids) else None
    special = np.array(encoding.special_tokens_mask, np.int32)
    return Tokens(ids, types, special, np.array(encoding.offsets, np.int32).reshape(-1, 2), str(text))


def _plainest(ids: Array, types: Sequence[int]) -> Any:
    return Tokens(ids, np.array(types, np.int32)) if any(types) else ids


def text_of(example: Any) -> str:
    """The example, if it is a text."""
    if not isinstance(example, str):
        raise no_text(example)
    return example


def no_text(example: Any) -> TypeError:
    """The error of an example that is no text."""
    if example is None:
        return TypeError("expected text, but the row is null; leave such rows out before the model")
    return TypeError(
        f"expected text, but the row is a {type(example).__name__}: {shorten(example)}; name the column that has it "
        "with columns=, or take it out of the row with with_preprocess_fn()"
    )


def collated(rows: Sequence[Any], tokenizer: Any, length: int) -> dict[str, Array]:
    """Rows of tokens as the inputs of the model whose own tokenizer this is: an array for each, padded to `length`."""
    ids = [ids_of(row) for row in rows]
    left = tokenizer.padding_side == "left"
    made = {"input_ids": padded(ids, length, tokenizer.pad_token_id or 0, left)}
    filled = _filled([len(each) for each in ids], length, left)
    if "token_type_ids" in tokenizer.model_input_names:
        types = [row.types if isinstance(row, Tokens) else None for row in rows]
        made["token_type_ids"] = np.where(filled, 0, np.int64(tokenizer.pad_token_type_id))
        if any(each is not None for each in types):
            known = [np.zeros_like(own) if each is None else each for each, own in zip(types, ids, strict=True)]
            made["token_type_ids"][filled] = np.concatenate(known)
    if "attention_mask" in tokenizer.model_input_names:
        made["attention_mask"] = filled.astype(np.int64)
    return made


def padded(rows: Sequence[Array], length: int, fill: int, left: bool) -> Array:
    """Rows as one array of this length. Without a loop: a GPU waits for nobody."""
    made = np.full((len(rows), length), fill, np.int64)
    made[_filled([len(row) for row in rows], length, left)] = np.concatenate(rows)
    return made


def _filled(lengths: Sequence[int], length: int, left: bool) -> Array:
    """Where rows of these lengths have tokens, when they are padded to this one."""
    places, each = np.arange(length), np.array(lengths).reshape(-1, 1)
    return places >= length - each if left else places < each
