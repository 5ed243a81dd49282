"""The TensorFlow handlers, with real small models. They run in an environment of their own: make test-tensorflow."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from model_changes import check_change
from penstock.errors import BadRowsError, InputError, UsageError
from penstock.testing import check_handler

tf = pytest.importorskip("tensorflow", reason="make test-tensorflow has an environment with it")

from penstock.handlers.tensorflow import ModelType, TFModelHandlerNumpy, TFModelHandlerTensor  # noqa: E402

X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
WEIGHTS = np.array([[1.0], [-2.0], [0.5]], np.float32)
EXPECTED = X @ WEIGHTS + 3
ROWS = [{"id": at, **dict(zip("abc", map(float, row), strict=True))} for at, row in enumerate(X)]
PACKAGES = Path(__file__).resolve().parents[1] / "project" / "tensorflow_packages.json"
PAIRS = [{"n": at % 8, "vector": [at / 2, 1.0]} for at in range(7)]


def linear(factor: float = 1.0) -> Any:
    model = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(1)])
    model.set_weights([factor * WEIGHTS, np.array([3.0 * factor], np.float32)])
    return model


def pair() -> Any:
    n, vector = tf.keras.Input((), dtype="int64", name="n"), tf.keras.Input((2,), name="vector")
    rows = tf.keras.layers.Embedding(8, 2)(n) + vector
    return tf.keras.Model({"n": n, "vector": vector}, {"rows": rows, "total": tf.keras.ops.sum(rows, axis=1)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    linear().save(folder / "model.keras")
    linear().export(folder / "saved", verbose=False)
    linear().save_weights(folder / "model.weights.h5")
    return folder


def answers_of(handler: Any, examples: Any, **arguments: Any) -> Any:
    return handler.run_inference(examples, handler.load_model(), **arguments)


# Files.


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("model.keras", {}),
        ("saved", {"trusted": True}),
        ("model.weights.h5", {"model_type": ModelType.SAVED_WEIGHTS, "create_model_fn": linear}),
    ],
)
def test_all_kinds_of_files(name: str, settings: Any, folder: Path) -> None:
    path = str(folder / name)
    handler = TFModelHandlerNumpy(path, **settings)
    np.testing.assert_allclose(answers_of(handler, list(X)), EXPECTED, rtol=1e-4)
    assert (handler.model_id(), list(handler.model_files())) == (path, [path])
    check_handler(handler, list(X), tolerance=1e-4)
    check_handler(TFModelHandlerNumpy(path, columns=["a", "b", "c"], **settings), ROWS, tolerance=1e-4)
    tensors = TFModelHandlerTensor(path, **settings)
    check_handler(tensors, list(tf.unstack(tf.constant(X))), tolerance=1e-4)


def test_custom_weights(folder: Path, tmp_path: Path) -> None:
    linear(2.0).save_weights(tmp_path / "more.weights.h5")
    handler = TFModelHandlerNumpy(str(folder / "model.keras"), custom_weights=str(tmp_path / "more.weights.h5"))
    np.testing.assert_allclose(answers_of(handler, list(X)), 2 * EXPECTED, rtol=1e-4)
    assert len(handler.model_files()) == 2


def test_files_that_can_run_code_need_trust(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"SavedModel, .* can run code that is in it; pass trusted=True"):
        TFModelHandlerNumpy(str(folder / "saved"))
    with pytest.raises(UsageError, match="safe_mode=False runs code from the file"):
        TFModelHandlerNumpy("model.keras", load_model_args={"safe_mode": False})
    with pytest.raises(UsageError, match="safe_mode=False runs code from the file"):
        TFModelHandlerNumpy("model.keras", load_model_args={"safe_mode": 0})
    model = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Lambda(lambda x: 2 * x)])
    model.save(tmp_path / "lambda.keras")
    with pytest.raises(UsageError, match="lambda.keras' can run code .* a Lambda layer, a lambda function; pass trusted=Tr"):
        TFModelHandlerNumpy(str(tmp_path / "lambda.keras")).load_model()
    trusted = TFModelHandlerNumpy(str(tmp_path / "lambda.keras"), trusted=True)
    np.testing.assert_allclose(answers_of(trusted, list(X)), 2 * X)


@pytest.mark.parametrize("link", [False, True])
def test_a_saved_model_by_the_name_of_a_keras_file_needs_trust(link: bool, folder: Path, tmp_path: Path) -> None:
    named = tmp_path / "model.keras"
    if link:
        named.symlink_to(folder / "saved")
    else:
        shutil.copytree(folder / "saved", named)
    with pytest.raises(UsageError, match="to load a SavedModel, .* can run code that is in it; pass trusted=True"):
        TFModelHandlerNumpy(str(named)).load_model()
    changed = TFModelHandlerNumpy(str(folder / "model.keras"))
    changed.update_model_path(str(named))
    with pytest.raises(UsageError, match="to load a SavedModel"):
        changed.load_model()
    np.testing.assert_allclose(answers_of(TFModelHandlerNumpy(str(named), trusted=True), list(X)), EXPECTED, rtol=1e-4)


def test_keras_files_at_urls(folder: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe("/urls/model.keras", (folder / "model.keras").read_bytes())
    fs.put(str(folder / "saved"), "/urls/saved.keras", recursive=True)
    handler = TFModelHandlerNumpy("memory://urls/model.keras")
    np.testing.assert_allclose(answers_of(handler, list(X)), EXPECTED, rtol=1e-4)
    with pytest.raises(InputError, match=r"saved.keras.* is a directory"):
        TFModelHandlerNumpy("memory://urls/saved.keras").load_model()


def test_keras_2_does_not_load_files_without_trust(folder: Path) -> None:
    """With TF_USE_LEGACY_KERAS tf.keras is Keras 2, which loads an .h5 file by the name of a .keras file."""
    code = (
        "import sys, penstock.handlers.tensorflow as t; t.TFModelHandlerNumpy(sys.argv[1]).load_model();"
        "print('tf_keras' in sys.modules)"
    )
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1"}
    command = [sys.executable, "-c", code, str(folder / "model.keras")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.stdout == "False\n", result.stderr


def test_parts_of_other_models_that_run_code_need_trust(folder: Path, tmp_path: Path) -> None:
    """What Keras' safe mode has let through: functions of its API, and the class of a layer in place of a function."""
    loaded = {"module": "keras.saving", "class_name": "function", "config": "load_model", "registered_name": "load_model"}
    layer = {"module": "keras.layers", "class_name": "function", "config": "TFSMLayer", "registered_name": "TFSMLayer"}
    for activation, named in [(loaded, "keras.saving.load_model"), (layer, "TFSMLayer"), ("keras.layers.Lambda", "Lambda")]:
        with zipfile.ZipFile(folder / "model.keras") as old, zipfile.ZipFile(tmp_path / "model.keras", "w") as new:
            for name in old.namelist():
                content = old.read(name)
                if name == "config.json":
                    config = json.loads(content)
                    config["config"]["layers"][1]["config"]["activation"] = activation
                    content = json.dumps(config).encode()
                new.writestr(name, content)
        with pytest.raises(UsageError, match=f"model.keras' can run code when it is loaded or called: it holds .*{named}"):
            TFModelHandlerNumpy(str(tmp_path / "model.keras")).load_model()


@tf.keras.utils.register_keras_serializable("tests")
class Doubled(tf.keras.layers.Layer):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        return 2 * x


def test_layers_that_the_user_registered_need_no_trust(tmp_path: Path) -> None:
    layers = [tf.keras.layers.Input((3,)), Doubled(), tf.keras.layers.Activation("relu")]
    layers += [tf.keras.layers.Dropout(0.5), tf.keras.layers.LayerNormalization(name="Lambda")]
    model = tf.keras.Sequential(layers)
    model.compile("adam", loss=tf.keras.losses.MeanSquaredError(), metrics=["accuracy"])
    model.save(tmp_path / "own.keras")
    handler = TFModelHandlerNumpy(str(tmp_path / "own.keras"))
    np.testing.assert_allclose(answers_of(handler, list(X)), model(X), rtol=1e-4)


WEIGHTS_OF: Any = {"model_type": ModelType.SAVED_WEIGHTS, "create_model_fn": linear}


@pytest.mark.parametrize(
    ("path", "settings", "told"),
    [
        ("w.h5", {**WEIGHTS_OF, "custom_weights": "more.h5"}, "custom_weights=: for a whole model, but ModelType.SAVED_W"),
        ("w.h5", {**WEIGHTS_OF, "load_model_args": {"compile": True}}, "load_model_args=: for a whole model"),
        ("w.h5", {**WEIGHTS_OF, "signature": "other"}, "signature=: for a whole model"),
        ("m.keras", {"signature": "other"}, "signature='other' is for a SavedModel; a Keras file has none"),
    ],
)
def test_arguments_that_would_be_ignored(path: str, settings: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        TFModelHandlerNumpy(path, **settings)


def test_arguments_that_do_not_go_with_what_is_there(folder: Path) -> None:
    linear().save(folder / "model.h5")
    with pytest.raises(UsageError, match="signature='other' is for a SavedModel"):
        TFModelHandlerNumpy(str(folder / "model.h5"), signature="other", trusted=True).load_model()
    with pytest.raises(UsageError, match="custom_weights= are for Keras files"):
        TFModelHandlerNumpy(
            str(folder / "saved"), custom_weights=str(folder / "model.weights.h5"), trusted=True
        ).load_model()


def test_wrong_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'/nowhere/model.keras' does not exist"):
        TFModelHandlerNumpy("/nowhere/model.keras").load_model()
    (tmp_path / "junk.keras").write_bytes(b"junk")
    with pytest.raises(InputError, match=r"junk.keras' could not be loaded as a model"):
        TFModelHandlerNumpy(str(tmp_path / "junk.keras")).load_model()
    with pytest.raises(InputError, match="could not be loaded as weights: .* fit what create_model_fn"):
        weights = str(folder / "model.weights.h5")
        TFModelHandlerNumpy(
            weights, ModelType.SAVED_WEIGHTS, lambda: tf.keras.Sequential([tf.keras.layers.Dense(7)])
        ).load_model()
    with pytest.raises(UsageError, match="create_model_fn= and ModelType.SAVED_WEIGHTS go together"):
        TFModelHandlerNumpy("x", ModelType.SAVED_WEIGHTS)
    with pytest.raises(UsageError, match=r"no signature 'what'; it has \['serv"):
        TFModelHandlerNumpy(str(folder / "saved"), signature="what", trusted=True).load_model()


def test_a_copy_can_be_for_another_file(folder: Path, tmp_path: Path) -> None:
    linear(2.0).save(tmp_path / "other.keras")
    handler = TFModelHandlerNumpy(str(folder / "model.keras"))
    changed = copy.copy(handler)
    changed.update_model_path(str(tmp_path / "other.keras"))
    for each, factor in [(handler, 1), (changed, 2)]:
        np.testing.assert_allclose(answers_of(each, list(X)), factor * EXPECTED, rtol=1e-4)
    assert changed.model_id() == str(tmp_path / "other.keras")


# Inputs and outputs.


@pytest.mark.parametrize("kind", ["keras", "saved"])
def test_several_inputs_and_outputs(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / ("pair.keras" if kind == "keras" else "pair"))
    model = pair()
    if kind == "keras":
        model.save(path)
    else:
        model.export(path, verbose=False)
    handler = TFModelHandlerNumpy(path, columns=["vector", "n"], trusted=True)
    answers = answers_of(handler, PAIRS)
    assert {name: part.shape for name, part in answers.items()} == {"rows": (7, 2), "total": (7,)}
    check_handler(handler, PAIRS, tolerance=1e-4)
    arrays = [{"n": np.int64(row["n"]), "vector": np.array(row["vector"], np.float32)} for row in PAIRS]
    check_handler(TFModelHandlerNumpy(path, trusted=True), arrays, tolerance=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3])  # as many rows as outputs, too
def test_outputs_in_lists(rows: int, tmp_path: Path) -> None:
    inputs = tf.keras.Input((3,), name="x")
    one, two, three = (tf.keras.layers.Dense(width)(inputs) for width in (1, 2, 3))
    tf.keras.Model(inputs, [one, two]).save(tmp_path / "flat.keras")
    tf.keras.Model(inputs, [one, [two, three]]).save(tmp_path / "nested.keras")
    flat, nested = (TFModelHandlerNumpy(str(tmp_path / f"{name}.keras")) for name in ("flat", "nested"))
    batch = list(X[:rows])
    assert [[part.shape for part in answer] for answer in answers_of(flat, batch)] == [[(1,), (2,)]] * rows
    answers = answers_of(nested, batch)
    assert [(first.shape, *(part.shape for part in more)) for first, more in answers] == [((1,), (2,), (3,))] * rows
    check_handler(nested, list(X[:3]), tolerance=1e-4)
    columns = TFModelHandlerNumpy(str(tmp_path / "nested.keras"), columns="x")
    table = columns.run_inference_columns(pa.table({"x": [row.tolist() for row in batch]}), columns.load_model())
    assert [(row["0"].tolist(), list(row["1"])) for row in table] == [(one.tolist(), ["0", "1"]) for one, _ in answers]
    for call in (lambda model, batch, *_: model(tf.stack(batch)), lambda model, batch, *_: model(np.stack(batch))):
        own = TFModelHandlerNumpy(str(tmp_path / "flat.keras"), inference_fn=call)
        assert [[part.shape for part in answer] for answer in answers_of(own, batch)] == [[(1,), (2,)]] * rows


def test_own_inference_fn(folder: Path) -> None:
    def doubled(model: Any, batch: Any, inference_args: Any, model_id: Any) -> Any:
        answers = 2 * model(tf.constant(np.stack(batch))).numpy()
        return [ps.PredictionResult(row, answer, model_id) for row, answer in zip(batch, answers, strict=True)]

    handler = TFModelHandlerNumpy(str(folder / "model.keras"), inference_fn=doubled)
    check_handler(handler, list(X), tolerance=1e-4)
    np.testing.assert_allclose([answer.inference for answer in answers_of(handler, list(X))], 2 * EXPECTED, rtol=1e-4)


@pytest.mark.parametrize("kind", ["keras", "saved"])
def test_texts(kind: str, tmp_path: Path) -> None:
    text, n = tf.keras.Input((), dtype="string", name="text"), tf.keras.Input((1,), name="n")
    table = tf.keras.layers.Embedding(4, 2)
    known = tf.keras.layers.StringLookup(vocabulary=["good", "bad"])
    models = {"one": tf.keras.Model(text, table(known(text))), "two": tf.keras.Model([text, n], table(known(text)) * n)}
    for name, model in models.items():
        to = tmp_path / (f"{name}.keras" if kind == "keras" else name)
        model.save(to) if kind == "keras" else model.export(to, verbose=False)

    def handler(name: str, **settings: Any) -> Any:
        return TFModelHandlerNumpy(str(tmp_path / (f"{name}.keras" if kind == "keras" else name)), trusted=True, **settings)

    texts = ["good", "bad", "what", "good"]
    expected = table(known(tf.constant(texts))).numpy()
    np.testing.assert_allclose(answers_of(handler("one"), texts), expected)
    check_handler(handler("one"), texts)
    rows = [{"text": text, "n": 2.0} for text in texts]
    check_handler(handler("one", columns="text"), rows)
    check_handler(handler("two", columns=["text", "n"]), rows)
    pq.write_table(pa.Table.from_pylist([*rows[:2], {"text": None, "n": 2.0}, *rows[2:]]), tmp_path / "in.parquet")
    with ps.Pipeline(workers=0) as p:
        model = handler("two", columns=["text", "n"], output_column="y")
        read = p | ps.ReadFromParquet(str(tmp_path / "in.parquet"))
        good, bad = read | ps.RunInference(model).with_exception_handling()
        good | ps.WriteToParquet(str(tmp_path / "out"))
        bad.failed_inferences | ps.Map(print)
    np.testing.assert_allclose(pq.read_table(tmp_path / "out")["y"].to_pylist(), 2 * expected)
    with pytest.raises(BadRowsError, match="column 'text' is null in this row, and the model takes texts") as caught:
        answers_of(model, [rows[0], {"text": None, "n": 1.0}])
    assert list(caught.value.errors) == [1]


def test_rows_that_do_not_fit_fail_alone(folder: Path) -> None:
    handler = TFModelHandlerNumpy(str(folder / "model.keras"))
    with pytest.raises(BadRowsError) as caught:
        answers_of(handler, [X[0], X[1].astype(np.float64), X[2, :2], X[3]])
    assert list(caught.value.errors) == [1, 2]
    assert "takes float32 of shape [3] for each row of input" in str(caught.value.errors[1])


@pytest.mark.parametrize(("workers", "place"), [(0, {}), (1, {"large_model": True})])
def test_a_whole_job(workers: int, place: Any, folder: Path, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "in.parquet")
    path = str(folder / "model.keras")
    handler = TFModelHandlerNumpy(path, columns=["a", "b", "c"], output_column="y", **place)
    with ps.Pipeline(workers=workers) as p:
        rows = p | ps.ReadFromParquet(str(tmp_path / "in.parquet"))
        rows | ps.RunInference(handler) | ps.WriteToParquet(str(tmp_path / "out"))
    table = pq.read_table(tmp_path / "out").sort_by("id")
    np.testing.assert_allclose(table["y"].to_pylist(), EXPECTED, rtol=1e-4)
    assert set(table["y_model_id"].to_pylist()) == {path}


def test_rows_in_a_host(folder: Path) -> None:
    handler = TFModelHandlerNumpy(str(folder / "model.keras"), large_model=True)
    answers = (ps.Pipeline(workers=1) | ps.Create(list(X)) | ps.RunInference(handler)).collect()
    np.testing.assert_allclose([answer.inference for answer in answers], EXPECTED, rtol=1e-4)


@pytest.mark.parametrize("kind", ["keras", "saved", "weights"])
def test_a_model_that_changes_while_a_pipeline_runs(kind: str, tmp_path: Path) -> None:
    def save(path: Path, number: int) -> None:
        model = linear(number)
        {"keras": model.save, "saved": lambda to: model.export(to, verbose=False), "weights": model.save_weights}[kind](path)

    settings: Any = {"weights": {"model_type": ModelType.SAVED_WEIGHTS, "create_model_fn": linear}}.get(kind, {})
    ending = {"keras": ".keras", "weights": ".weights.h5"}.get(kind, "")
    check_change(
        save,
        lambda path, **more: TFModelHandlerNumpy(path, trusted=kind == "saved", **settings, **more),
        lambda row: X[row % len(X)],
        tmp_path,
        ending=ending,
    )


def test_what_tensorflow_needs_is_what_the_test_of_extras_says() -> None:
    """tests/project/test_extras.py resolves with it, where TensorFlow is not installed."""
    known = json.loads(PACKAGES.read_text())
    installed = metadata.distribution("tensorflow-cpu")
    needs = [need for need in installed.requires or [] if "extra ==" not in need]
    assert [installed.version, needs] == known["tensorflow"], f"write what is installed into {PACKAGES}"


def test_describing_a_model_imports_no_framework() -> None:
    code = (
        "import sys, penstock.handlers.tensorflow as t; t.TFModelHandlerNumpy('x.keras'); print('tensorflow' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "False\n", result.stderr
