"""Tokenizers of models: by the tokenizers library alone where that is known to give what transformers gives, which takes
milliseconds; else by transformers, whose import takes seconds and imports torch.

transformers builds the tokenizers of the classes below from the vocabulary in tokenizer.json and the settings in
tokenizer_config.json, and takes the whole of tokenizer.json for others. The file alone will do where it says the same as
they do; what says anything else, or is not known here, goes to transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from penstock.handlers.huggingface_files import ModelFiles

NO_MAXIMUM = 10**9  # tokenizers that know no maximum say 10**30
_LARGE = 100_000  # tokens: transformers may mend what such files split texts by
_FLAGS = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
_CLASS_OF_TYPE = {
    "bert": "BertTokenizer",
    "distilbert": "BertTokenizer",
    "mpnet": "MPNetTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
}


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer, and what a model says about its inputs."""

    fast: Tokenizer | None  # None: only the other one can tokenise
    slow: Any  # transformers' own, where it was needed
    max_length: int | None  # tokens, by the tokenizer
    positions: int | None  # tokens, by the model
    side: str  # from which texts are cut
    mask_id: int | None

    def longest(self) -> int | None:
        """The most tokens that the model takes, or None where neither the tokenizer nor the model has a maximum."""
        return self.max_length or self.positions


def load_tokenizer(files: ModelFiles) -> LoadedTokenizer | None:
    """The tokenizer of tokenizer.json, if transformers would give the same."""
    path = files.path("tokenizer.json")
    settings, config = files.json("tokenizer_config.json"), files.json("config.json")
    if path is None or settings is None or config is None:
        return None
    if "added_tokens_decoder" not in settings:
        settings = {**settings, **(files.json("special_tokens_map.json") or {})}
    tokenizer = Tokenizer.from_file(path)
    side = settings.get("truncation_side") or (tokenizer.truncation or {}).get("direction") or "right"
    tokenizer.no_padding()
    tokenizer.no_truncation()
    maximum = settings.get("model_max_length", NO_MAXIMUM)
    positions = config.get("max_position_embeddings")
    known = maximum < NO_MAXIMUM or positions is not None
    if not known or files.path("added_tokens.json") or not _is_as_in_transformers(tokenizer, settings, config):
        return None
    return LoadedTokenizer(
        fast=tokenizer,
        slow=None,
        max_length=int(maximum) if maximum < NO_MAXIMUM else None,
        positions=positions,
        side=side,
        mask_id=_mask_id(tokenizer, settings),
    )


def load_by_transformers(tokenizer: Any, config: Any) -> LoadedTokenizer:
    """The same of a tokenizer of transformers, which is taken over: nobody else may use it."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    plain = tokenizer.is_fast and all(
        getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in ("__call__", "_encode_plus")
    )
    return LoadedTokenizer(
        fast=tokenizer.backend_tokenizer if plain else None,
        slow=tokenizer,
        max_length=int(tokenizer.model_max_length) if tokenizer.model_max_length < NO_MAXIMUM else None,
        positions=getattr(config, "max_position_embeddings", None),
        side=tokenizer.truncation_side,
        mask_id=tokenizer.mask_token_id,
    )


def _is_as_in_transformers(tokenizer: Tokenizer, settings: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    name = (
        settings.get("tokenizer_class") or config.get("tokenizer_class") or _CLASS_OF_TYPE.get(config.get("model_type", ""))
    )
    check = _CHECKS.get(str(name).removesuffix("Fast"))
    odd = ("auto_map", "split_special_tokens", "fast_tokenizer_files", "init_inputs")
    if check is None or settings.get("backend", "tokenizers") != "tokenizers" or any(settings.get(key) for key in odd):
        return False
    return _has_the_same_added_tokens(tokenizer, settings) and check(tokenizer, settings)


def _has_the_same_added_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> bool:
    """Whether the settings name no special token that the file does not have, nor one with other properties."""
    added = tokenizer.get_added_tokens_decoder()
    told = settings.get("added_tokens_decoder")
    if told is not None:
        theirs = {int(number): tuple(token.get(flag, False) for flag in _FLAGS) for number, token in told.items()}
        if theirs != {number: tuple(getattr(token, flag) for flag in _FLAGS) for number, token in added.items()}:
            return False
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    named = [value for key, value in settings.items() if key.endswith("_token") and isinstance(value, (str, dict))]
    contents = {token.content for token in added.values()}
    if not {_text(value) for value in [*named, *(extra.values() if isinstance(extra, dict) else extra)]} <= contents:
        return False
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    beyond = sorted(number for number, token in added.items() if tokenizer.model.token_to_id(token.content) is None)
    return beyond == list(range(size, size + len(beyond)))


def _is_word_piece(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> bool:
    model = tokenizer.model
    normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    return (
        isinstance(model, models.WordPiece)
        and (model.unk_token, model.continuing_subword_prefix, model.max_input_chars_per_word)
        == (_text(settings.get("unk_token", "[UNK]")), "##", 100)
        and _same(tokenizer.normalizer, normalizer)
        and _same(tokenizer.pre_tokenizer, pre_tokenizers.BertPreTokenizer())
    )


def _is_bert(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> bool:
    defaults = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
    return _is_word_piece(tokenizer, settings) and _has_frame(tokenizer, settings, defaults, between=1, second_type=1)


_ROBERTA = {"bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}


def _is_mpnet(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> bool:
    return _is_word_piece(tokenizer, settings) and _has_frame(tokenizer, settings, {**_ROBERTA, "unk": "[UNK]"})


def _is_roberta(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> bool:
    model = tokenizer.model
    prefix = settings.get("add_prefix_space", False)
    return (
        isinstance(model, models.BPE)
        and (model.dropout, model.continuing_subword_prefix or "", model.end_of_word_suffix or "") == (None, "", "")
        and not (model.fuse_unk or model.byte_fallback or model.ignore_merges or model.unk_token)
        and tokenizer.normalizer is None
        and settings.get("trim_offsets", True)
        and _same(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=prefix))
        and _has_frame(tokenizer, settings, _ROBERTA)
    )


def _is_xlm_roberta(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> bool:
    scheme = "always" if settings.get("add_prefix_space", True) else "never"
    pieces = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)]
    return (
        isinstance(tokenizer.model, models.Unigram)
        and 3 in tokenizer.encode("\ue000", add_special_tokens=False).ids  # the unknown token, for what is in no vocabulary
        and isinstance(tokenizer.normalizer, (normalizers.Precompiled, type(None)))
        and _same(tokenizer.pre_tokenizer, pre_tokenizers.Sequence(pieces))
        and _has_frame(tokenizer, settings, _ROBERTA)
        and _token(settings, _ROBERTA, "bos") == _token(settings, _ROBERTA, "cls")
        and _token(settings, _ROBERTA, "eos") == _token(settings, _ROBERTA, "sep")
    )


def _is_taken_whole(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> bool:
    return bool(tokenizer.get_vocab_size() <= _LARGE) and tokenizer.post_processor is not None


_CHECKS: dict[str, Callable[[Tokenizer, Mapping[str, Any]], bool]] = {
    "BertTokenizer": _is_bert,
    "DistilBertTokenizer": _is_bert,
    "MPNetTokenizer": _is_mpnet,
    "RobertaTokenizer": _is_roberta,
    "XLMRobertaTokenizer": _is_xlm_roberta,
    "PreTrainedTokenizer": _is_taken_whole,
    "TokenizersBackend": _is_taken_whole,
}


def _has_frame(
    tokenizer: Tokenizer, settings: Mapping[str, Any], defaults: Mapping[str, str], between: int = 2, second_type: int = 0
) -> bool:
    """Whether the special tokens are there, and are put around a text and around the two of a pair as the class does it."""
    if any(tokenizer.token_to_id(_token(settings, defaults, name)) is None for name in defaults):
        return False
    if not {_token(settings, defaults, name) for name in defaults} <= {
        token.content for token in tokenizer.get_added_tokens_decoder().values()
    }:
        return False
    first = [tokenizer.token_to_id(_token(settings, defaults, "cls"))]
    last = [tokenizer.token_to_id(_token(settings, defaults, "sep"))]
    text = tokenizer.encode("a", add_special_tokens=False).ids
    one, two = tokenizer.encode("a"), tokenizer.encode("a", "a")
    begin, end = first + text + last * between, text + last
    types = [0] * (len(begin)) + [second_type] * len(end)
    return one.ids == first + end and two.ids == begin + end and two.type_ids == types and not any(one.type_ids)


def _mask_id(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> int | None:
    names = [_text(settings["mask_token"])] if settings.get("mask_token") else ["[MASK]", "<mask>"]
    return next((number for number in map(tokenizer.token_to_id, names) if number is not None), None)


def _token(settings: Mapping[str, Any], defaults: Mapping[str, str], name: str) -> str:
    return _text(settings.get(f"{name}_token")) or defaults[name]


def _text(token: Any) -> str:
    """A special token as settings have it: text, or a dict with its properties."""
    return str(token["content"]) if isinstance(token, dict) else str(token or "")


def _same(part: Any, other: Any) -> bool:
    """Whether two parts of tokenizers do the same."""
    return part is not None and bool(part.__getstate__() == other.__getstate__())
