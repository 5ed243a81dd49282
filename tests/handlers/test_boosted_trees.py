"""The handlers for XGBoost and LightGBM, with real small models: arrays, frames, sparse rows, columns, files, trust."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse
import xgboost

import penstock as ps
from penstock.errors import BadRowsError, InputError, UsageError
from penstock.handlers.lightgbm import (
    LightGBMModelHandlerNumpy,
    LightGBMModelHandlerPandas,
    LightGBMModelHandlerSciPy,
)
from penstock.handlers.xgboost import (
    XGBoostModelHandlerDatatable,
    XGBoostModelHandlerNumpy,
    XGBoostModelHandlerPandas,
    XGBoostModelHandlerSciPy,
)
from penstock.testing import check_handler

NAMES = ["a", "b", "c"]
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(60, 3))
X[::7, 1] = np.nan
Y = (np.nan_to_num(X) @ [1.0, -2.0, 0.5] > 0).astype(int)
FRAME = pd.DataFrame(X, columns=NAMES)
ROWS = [{name: None if np.isnan(row[name]) else row[name] for name in NAMES} for row in FRAME.to_dict("records")]
SPARSE = scipy.sparse.csr_matrix(np.where(np.abs(np.nan_to_num(X)) > 0.7, np.nan_to_num(X), 0.0))
LISTS = [
    {"positions": SPARSE[at].indices.tolist(), "values": SPARSE[at].data.tolist(), "id": at} for at in range(SPARSE.shape[0])
]
SMALL = {"n_estimators": 5, "max_depth": 3, "n_jobs": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def xgb(folder: Path) -> tuple[str, Any]:
    model = xgboost.XGBClassifier(**SMALL).fit(X, Y)
    model.save_model(folder / "model.json")
    return str(folder / "model.json"), model


@pytest.fixture(scope="module")
def lgb(folder: Path) -> tuple[str, Any]:
    model = lightgbm.LGBMClassifier(**SMALL, min_child_samples=3, verbose=-1).fit(X, Y)
    model.booster_.save_model(folder / "model.txt")
    return str(folder / "model.txt"), model.booster_


def answers_of(handler: Any, examples: Any) -> Any:
    return np.asarray(handler.run_inference(examples, handler.load_model()))


# Rows and columns.


def test_xgboost_arrays(xgb: tuple[str, Any]) -> None:
    path, model = xgb
    handler = XGBoostModelHandlerNumpy(xgboost.XGBClassifier, path)
    assert answers_of(handler, list(X)).tolist() == model.predict(X).tolist()
    assert answers_of(handler, [row.reshape(1, 3) for row in X]).tolist() == model.predict(X).tolist()  # as Beam's
    assert (handler.model_id(), list(handler.model_files())) == (path, [path])
    assert handler.get_num_bytes(list(X)) == X.nbytes
    check_handler(handler, list(X[:9]))
    check_handler(handler, X[:9].tolist())
    check_handler(handler, ROWS[:9])


def test_xgboost_boosters_give_probabilities(xgb: tuple[str, Any], folder: Path) -> None:
    path, model = xgb
    handler = XGBoostModelHandlerNumpy(xgboost.Booster, path)
    np.testing.assert_allclose(answers_of(handler, list(X)), model.predict_proba(X)[:, 1], rtol=1e-6)
    check_handler(handler, ROWS[:9])
    check_handler(handler, list(X[:9]), inference_args={"pred_contribs": True})
    model.save_model(folder / "model.ubj")
    binary = XGBoostModelHandlerNumpy(xgboost.Booster, str(folder / "model.ubj"))
    assert answers_of(binary, list(X)).tolist() == answers_of(handler, list(X)).tolist()


def test_xgboost_own_inference_fn(xgb: tuple[str, Any]) -> None:
    def both(batch: Any, model: Any, inference_args: Any) -> Any:
        return {"label": model.predict(batch), "proba": model.predict_proba(batch)}

    handler = XGBoostModelHandlerNumpy(xgboost.XGBClassifier, xgb[0], both)
    assert {name: part.shape for name, part in handler.run_inference(list(X), handler.load_model()).items()} == {
        "label": (60,),
        "proba": (60, 2),
    }
    check_handler(handler, ROWS[:9])
    assert not handler.is_native()


@pytest.mark.parametrize("model_class", [xgboost.XGBClassifier, xgboost.Booster])
def test_xgboost_frames_and_categories(model_class: Any, folder: Path) -> None:
    colours = pd.Categorical(["red", "blue", "green"] * 20, categories=["red", "green", "blue"])
    frame = FRAME.assign(colour=colours)
    model = xgboost.XGBClassifier(**SMALL, enable_categorical=True).fit(frame, (colours == "red").astype(int))
    model.save_model(folder / "colours.json")
    handler = XGBoostModelHandlerPandas(model_class, str(folder / "colours.json"))
    labels = answers_of(handler, [frame.iloc[[at]] for at in range(9)]) > 0.5
    assert labels.tolist() == [True, False, False] * 3
    table = pa.Table.from_pandas(frame.assign(colour=frame["colour"].astype(str)))
    encoded = table.set_column(3, "colour", table["colour"].dictionary_encode())  # numbered in another order than trained
    for batch in (encoded.slice(0, 30), encoded.slice(1, 30)):
        seen = handler.run_inference_columns(batch, handler.load_model()) > 0.5
        assert seen.tolist() == [colour == "red" for colour in batch["colour"].to_pylist()]


def test_frames(xgb: tuple[str, Any], lgb: tuple[str, Any]) -> None:
    frames = [FRAME.iloc[[at]] for at in range(9)]
    check_handler(XGBoostModelHandlerPandas(xgboost.XGBClassifier, xgb[0]), frames)
    check_handler(XGBoostModelHandlerPandas(xgboost.Booster, xgb[0], columns=NAMES), ROWS[:9])
    handler = LightGBMModelHandlerPandas(lgb[0])
    assert answers_of(handler, frames).tolist() == lgb[1].predict(X[:9]).tolist()
    check_handler(handler, frames)
    check_handler(handler, ROWS[:9])
    assert handler.get_num_bytes(frames) == X[:9].nbytes


def test_lightgbm_arrays(lgb: tuple[str, Any]) -> None:
    path, booster = lgb
    handler = LightGBMModelHandlerNumpy(path)
    assert answers_of(handler, list(X)).tolist() == booster.predict(X).tolist()
    assert handler.is_native()
    assert handler.is_thread_safe(handler.load_model())
    check_handler(handler, list(X[:9]))
    check_handler(LightGBMModelHandlerNumpy(path, columns=NAMES), [{"id": 1, **row} for row in ROWS[:9]])
    check_handler(handler, list(X[:9]), inference_args={"pred_leaf": True})


@pytest.mark.parametrize("framework", ["xgboost", "lightgbm"])
def test_sparse_rows_and_lists(framework: str, xgb: tuple[str, Any], lgb: tuple[str, Any]) -> None:
    def handler(**settings: Any) -> Any:
        if framework == "xgboost":
            return XGBoostModelHandlerSciPy(xgboost.XGBClassifier, xgb[0], **settings)
        return LightGBMModelHandlerSciPy(lgb[0], **settings)

    expected = (xgb if framework == "xgboost" else lgb)[1].predict(SPARSE).tolist()
    rows = [SPARSE[at] for at in range(SPARSE.shape[0])]
    assert answers_of(handler(), rows).tolist() == expected
    check_handler(handler(), rows[:9])
    lists = handler(columns=["positions", "values"])
    assert answers_of(lists, LISTS).tolist() == expected
    check_handler(lists, LISTS[:9])
    assert lists.get_num_bytes(LISTS) == handler().get_num_bytes(rows) > SPARSE.data.nbytes
    with pytest.raises(UsageError, match=r"name the two columns of lists, as in columns=\[\"positions\", \"values\"\]"):
        handler(columns=NAMES).check_columns(pa.Table.from_pylist(ROWS).schema)
    with pytest.raises(BadRowsError, match=r"lists of one length in each row, but saw \[0\] and None"):
        answers_of(lists, [LISTS[0], {"positions": [0], "values": None}])


BAD_ROWS: list[tuple[Any, str]] = [
    (scipy.sparse.csr_matrix([[1.0, 0.0, 0.0, 5.0]]), r"takes sparse SciPy matrices .* \(1, 3\), but the row is \(1, 4\)"),
    (scipy.sparse.csr_matrix(np.eye(2, 3)), r"but the row is \(2, 3\)"),
    (None, "but the row is NoneType"),
]
BAD_LISTS: list[tuple[Any, str]] = [
    ({"positions": [1, 7], "values": [1.0, 2.0]}, "takes 3 features, but the row has the position 7; pos"),
    ({"positions": [2**40], "values": [1.0]}, "has the position 1099511627776"),
    ({"positions": [-1], "values": [1.0]}, "positions, which are whole numbers from 0, but saw -1"),
    ({"positions": [1.5], "values": [1.0]}, "but saw 1.5"),
    ({"positions": [1, None], "values": [1.0, 2.0]}, "but saw None"),
    ({"positions": [0, 1], "values": [1.0]}, "lists of one length in each row"),
    ({"positions": [0]}, r"must have the keys \['positions', 'values'\]"),
    (None, "must all be dicts, but saw NoneType"),
]


@pytest.mark.parametrize("framework", ["xgboost", "lightgbm"])
@pytest.mark.parametrize("at", [0, 2])
def test_sparse_rows_that_do_not_fit_fail_alone(framework: str, at: int, xgb: tuple[str, Any], lgb: tuple[str, Any]) -> None:
    for columns, good, bad in ((None, [SPARSE[0]] * 3, BAD_ROWS), (["positions", "values"], LISTS[:3], BAD_LISTS)):
        if framework == "xgboost":
            handler: Any = XGBoostModelHandlerSciPy(xgboost.XGBClassifier, xgb[0], columns=columns)
        else:
            handler = LightGBMModelHandlerSciPy(lgb[0], columns=columns)
        for row, told in bad:
            with pytest.raises(BadRowsError, match=told) as caught:
                answers_of(handler, [*good[:at], row, *good[at:]])
            assert list(caught.value.errors) == [at]


class DatatableRow:
    """A row with the face of datatable.Frame, for machines on which the package cannot be installed."""

    def __init__(self, row: Any) -> None:
        self.names, self._row = tuple(NAMES), row

    def to_numpy(self) -> Any:
        row = self._row.reshape(1, -1)
        return np.ma.masked_array(row, np.isnan(row)) if np.isnan(row).any() else row


def test_xgboost_datatable(xgb: tuple[str, Any]) -> None:
    handler = XGBoostModelHandlerDatatable(xgboost.XGBClassifier, xgb[0])
    assert answers_of(handler, [DatatableRow(row) for row in X]).tolist() == xgb[1].predict(X).tolist()
    check_handler(handler, ROWS[:9])


def test_xgboost_datatable_with_the_package(xgb: tuple[str, Any]) -> None:
    datatable = pytest.importorskip("datatable", reason="it has wheels for Python up to 3.12, on Linux x86_64")
    frame = datatable.Frame(X, names=NAMES)
    frames = [frame[at, :] for at in range(len(X))]
    handler = XGBoostModelHandlerDatatable(xgboost.XGBClassifier, xgb[0])
    assert answers_of(handler, frames).tolist() == xgb[1].predict(X).tolist()
    check_handler(handler, frames[:9])
    assert handler.get_num_bytes(frames) == X.nbytes
    rows = ps.Pipeline(workers=1) | ps.Create(frames[:9])
    answers = (
        rows | ps.RunInference(XGBoostModelHandlerDatatable(xgboost.XGBClassifier, xgb[0], large_model=True))
    ).collect()
    assert [answer.inference for answer in answers] == xgb[1].predict(X[:9]).tolist()


@pytest.mark.parametrize(("settings", "place"), [({"workers": 0}, {}), ({"workers": 1}, {"large_model": True})])
def test_a_whole_job(settings: Any, place: Any, xgb: tuple[str, Any], lgb: tuple[str, Any], tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(60), **{name: X[:, at] for at, name in enumerate(NAMES)}}), tmp_path / "in.parquet")
    first = XGBoostModelHandlerNumpy(xgboost.XGBClassifier, xgb[0], columns=NAMES, output_column="label", **place)
    second = LightGBMModelHandlerPandas(lgb[0], columns=NAMES, output_column="chance", **place)
    with ps.Pipeline(**settings) as p:
        labels = p | ps.ReadFromParquet(str(tmp_path / "in.parquet")) | "Label" >> ps.RunInference(first)
        labels | "Chance" >> ps.RunInference(second) | ps.WriteToParquet(str(tmp_path / "out"))
    table = pq.read_table(tmp_path / "out").sort_by("id")
    assert table["label"].to_pylist() == xgb[1].predict(X).tolist()
    assert table["chance"].to_pylist() == lgb[1].predict(X).tolist()
    assert set(table["chance_model_id"].to_pylist()) == {lgb[0]}


# What does not fit.


def test_features_are_matched_by_name(folder: Path) -> None:
    """LightGBM itself would answer for columns in another order, wrongly."""
    booster = lightgbm.LGBMClassifier(**SMALL, verbose=-1).fit(FRAME, Y).booster_.save_model(folder / "named.txt")
    xgb = xgboost.XGBClassifier(**SMALL).fit(FRAME, Y)
    xgb.save_model(folder / "named.json")
    saved: Any = (xgboost.XGBClassifier, str(folder / "named.json"))
    turned = FRAME[["b", "a", "c"]]
    made: list[tuple[Any, list[float]]] = [
        (lambda **more: LightGBMModelHandlerNumpy(str(folder / "named.txt"), **more), booster.predict(FRAME).tolist()),
        (lambda **more: LightGBMModelHandlerPandas(str(folder / "named.txt"), **more), booster.predict(FRAME).tolist()),
        (lambda **more: XGBoostModelHandlerNumpy(*saved, **more), xgb.predict(X).tolist()),
        (lambda **more: XGBoostModelHandlerPandas(*saved, **more), xgb.predict(X).tolist()),
    ]
    table, records = pa.Table.from_pandas(turned), [{name: row[name] for name in turned} for row in ROWS]
    for make, expected in made:
        for handler in (make(), make(columns=["c", "b", "a"])):
            model = handler.load_model()
            assert handler.run_inference_columns(table, model).tolist() == expected
            assert handler.run_inference(records, model).tolist() == expected
        check_handler(make(), records[:9])
        named = r"takes the features \['a', 'b', 'c'\], but saw"
        with pytest.raises(UsageError, match=named + r" \['b', 'a'\]; \['c'\] are missing"):
            make().run_inference_columns(table.drop_columns("c"), model)
        with pytest.raises(UsageError, match=named + r" \['b', 'a', 'c', 'id'\]; give columns=\['a', 'b', 'c'\]"):
            make().run_inference_columns(table.append_column("id", pa.array(range(60))), model)
    frames = LightGBMModelHandlerPandas(str(folder / "named.txt"))
    assert answers_of(frames, [turned.iloc[[at]] for at in range(60)]).tolist() == made[1][1]


def test_another_number_of_features(xgb: tuple[str, Any], lgb: tuple[str, Any]) -> None:
    for handler in (XGBoostModelHandlerNumpy(xgboost.XGBClassifier, xgb[0]), LightGBMModelHandlerNumpy(lgb[0])):
        with pytest.raises(BadRowsError, match=r"takes 3 features, but saw 2 features"):
            answers_of(handler, [row[:2] for row in X])
        with pytest.raises(UsageError, match=r"takes 3 features, but saw \['a', 'b'\]; name the features"):
            answers_of(handler, [{"a": 1.0, "b": 2.0}])


def test_infinity_is_found_where_a_booster_refuses_it(xgb: tuple[str, Any]) -> None:
    handler = XGBoostModelHandlerNumpy(xgboost.Booster, xgb[0])
    rows = X.copy()
    rows[5, 2] = np.inf
    with pytest.raises(BadRowsError) as caught:
        answers_of(handler, list(rows))
    assert list(caught.value.errors) == [5]


# Files and trust.


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


HANDLERS = [lambda path, **more: XGBoostModelHandlerNumpy(xgboost.XGBClassifier, path, **more), LightGBMModelHandlerNumpy]


@pytest.mark.parametrize("make", HANDLERS, ids=["xgboost", "lightgbm"])
def test_wrong_files(make: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'/nowhere/model' does not exist"):
        make("/nowhere/model").load_model()
    for content, told in [(b"", "is empty; expected a"), (b"junk", r"could not be loaded: [\s\S]* expected a .*save_model")]:
        (tmp_path / "junk").write_bytes(content)
        with pytest.raises(InputError, match=told) as caught:
            make(str(tmp_path / "junk")).load_model()
        assert "Stack trace" not in str(caught.value)
    (tmp_path / "pickle").write_bytes(pickle.dumps(RunsCode(tmp_path / "ran")))
    with pytest.raises(UsageError, match=r"is a pickle, and loading it can run any code"):
        make(str(tmp_path / "pickle")).load_model()
    assert not (tmp_path / "ran").exists()
    (tmp_path / "pickle").write_bytes(pickle.dumps({"no": "model"}))
    with pytest.raises(InputError, match="holds a pickled dict; expected a"):
        make(str(tmp_path / "pickle"), trusted=True).load_model()


def test_a_file_of_another_class(xgb: tuple[str, Any]) -> None:
    with pytest.raises(InputError, match=r"Expecting: regressor, got: classifier; expected a model for XGBRegressor"):
        XGBoostModelHandlerNumpy(xgboost.XGBRegressor, xgb[0]).load_model()
    with pytest.raises(UsageError, match="model_class='XGBClassifier': expected a class"):
        XGBoostModelHandlerNumpy("XGBClassifier", xgb[0])  # type: ignore[arg-type]


def test_trusted_pickles(xgb: tuple[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps(xgb[1]))
    handler = XGBoostModelHandlerNumpy(xgboost.XGBClassifier, str(path), trusted=True)
    assert answers_of(handler, list(X)).tolist() == xgb[1].predict(X).tolist()
    model = lightgbm.LGBMClassifier(**SMALL, verbose=-1).fit(X, Y)
    path.write_bytes(pickle.dumps(model))
    other = LightGBMModelHandlerNumpy(str(path), trusted=True)
    assert answers_of(other, list(X)).tolist() == model.predict(X).tolist()


@pytest.mark.parametrize("make", HANDLERS, ids=["xgboost", "lightgbm"])
def test_a_copy_can_be_for_another_file(make: Any, xgb: tuple[str, Any], lgb: tuple[str, Any]) -> None:
    handler = make("elsewhere")
    changed = copy.copy(handler)
    path = lgb[0] if make is LightGBMModelHandlerNumpy else xgb[0]
    changed.update_model_path(path)
    assert (handler.model_id(), changed.model_id(), list(changed.model_files())) == ("elsewhere", path, [path])
    check_handler(changed, list(X[:9]))


@pytest.mark.parametrize("package", ["xgboost", "lightgbm"])
def test_a_missing_framework_says_how_to_install_it(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None\nimport penstock.handlers.{package}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"{package} is not installed; run: pip install 'penstock[{package}]'" in result.stderr


def test_describing_a_model_imports_nothing_heavy() -> None:
    code = "import sys, penstock.handlers.lightgbm; print('lightgbm' in sys.modules, 'pandas' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "False False\n", result.stderr
