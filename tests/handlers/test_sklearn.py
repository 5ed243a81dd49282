"""The scikit-learn handlers, with real small models: rows, tables, files, trust, and what goes wrong."""

from __future__ import annotations

import copy
import importlib.metadata
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import skops.io
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neighbors import KernelDensity
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

import penstock as ps
from penstock.errors import BadRowsError, InputError, MissingPackageError, RowError, StepError, UsageError
from penstock.handlers.sklearn import ModelFileType, SklearnModelHandlerNumpy, SklearnModelHandlerPandas
from penstock.testing.handlers import check_handler

FEATURES = ["a", "b", "c"]
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 3))
Y = (X @ [1.0, -2.0, 0.5] > 0).astype(int)
ROWS = [dict(zip(FEATURES, map(float, row), strict=True)) for row in X]
TABLE_ROUNDED = [{name: float(np.round(value)) for name, value in row.items()} for row in ROWS]
TABLE = pa.table({name: X[:, at] for at, name in enumerate(FEATURES)})


class RunsCode:
    """Unpickling this makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def absolute(values: Any) -> Any:
    return np.abs(values)


def predict_proba(model: Any, data: Any, inference_args: Any) -> Any:
    return model.predict_proba(data)


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Any], str]:
    def to_file(model: Any) -> str:
        path = tmp_path / "model.skops"
        skops.io.dump(model, path)
        return str(path)

    return to_file


@pytest.fixture(scope="module")
def classifier() -> Any:
    return make_pipeline(StandardScaler(), LogisticRegression()).fit(X, Y)


@pytest.fixture
def uri(save: Callable[[Any], str], classifier: Any) -> str:
    return save(classifier)


def answers_of(handler: Any, examples: Any, **arguments: Any) -> list[Any]:
    return rows_of(handler.run_inference(examples, handler.load_model(), **arguments))


def rows_of(answers: Any) -> list[Any]:
    if isinstance(answers, dict):
        return [dict(zip(answers, row, strict=True)) for row in zip(*answers.values(), strict=True)]
    return list(answers)


# Rows.


def test_arrays(uri: str, classifier: Any) -> None:
    handler = SklearnModelHandlerNumpy(uri)
    examples = list(X)
    answers = handler.run_inference(examples, handler.load_model())
    assert isinstance(answers, np.ndarray)
    assert answers.tolist() == classifier.predict(X).tolist()
    assert handler.wraps_answers
    assert handler.model_id() == uri
    check_handler(handler, list(X[:7]))


def test_a_regression(save: Callable[[Any], str]) -> None:
    handler = SklearnModelHandlerNumpy(save(LinearRegression().fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])))
    assert answers_of(handler, [np.array([10.0]), np.array([-1.0])]) == pytest.approx([21.0, -1.0])


@pytest.mark.parametrize("handler_class", [SklearnModelHandlerNumpy, SklearnModelHandlerPandas])
def test_dicts_and_tables_give_the_same(handler_class: Any, uri: str, classifier: Any) -> None:
    handler = handler_class(uri, columns=FEATURES)
    shuffled = [{"id": "x", "c": row["c"], "a": row["a"], "b": row["b"]} for row in ROWS]
    assert answers_of(handler, shuffled) == classifier.predict(X).tolist()
    assert handler.takes_columns()
    check_handler(handler, shuffled[:7])
    check_handler(handler_class(uri), ROWS[:7])


def frame_model() -> Any:
    """Numbers and words together: what needs a frame."""
    frame = pd.DataFrame({"size": [1.0, 2.0, 3.0, 4.0], "colour": ["red", "blue", "red", "blue"]})
    columns = ColumnTransformer([("number", StandardScaler(), ["size"]), ("word", OneHotEncoder(), ["colour"])])
    return make_pipeline(columns, LinearRegression()).fit(frame, [1.0, 20.0, 3.0, 40.0]), frame


def test_frames_series_and_dicts(save: Callable[[Any], str]) -> None:
    model, frame = frame_model()
    handler = SklearnModelHandlerPandas(save(model))
    expected = pytest.approx(model.predict(frame))
    assert answers_of(handler, [frame.iloc[[at]] for at in range(4)]) == expected
    assert answers_of(handler, [frame.iloc[at] for at in range(4)]) == expected
    assert answers_of(handler, frame.to_dict("records")) == expected
    assert handler.run_inference_columns(pa.Table.from_pandas(frame), handler.load_model()) == expected
    check_handler(handler, [frame.iloc[[at]] for at in range(4)])
    check_handler(handler, frame.to_dict("records"))


def test_own_inference_fn(uri: str, classifier: Any) -> None:
    handler = SklearnModelHandlerNumpy(uri, inference_fn=predict_proba)
    np.testing.assert_allclose(answers_of(handler, list(X)), classifier.predict_proba(X))
    check_handler(handler, ROWS[:5])


def test_inference_args_reach_predict(save: Callable[[Any], str]) -> None:
    from sklearn.gaussian_process import GaussianProcessRegressor

    handler = SklearnModelHandlerNumpy(save(GaussianProcessRegressor().fit(X, Y)), trusted=True)
    answers = answers_of(handler, list(X[:4]), inference_args={"return_std": True})
    assert [len(answer) for answer in answers] == [2] * 4
    np.testing.assert_allclose([answer[0] for answer in answers], answers_of(handler, list(X[:4])))
    check_handler(handler, ROWS[:5], inference_args={"return_std": True})


def test_a_dict_of_answers_becomes_one_dict_per_row(uri: str) -> None:
    def both(model: Any, data: Any, inference_args: Any) -> Any:
        return {"label": model.predict(data), "proba": model.predict_proba(data)}

    handler = SklearnModelHandlerNumpy(uri, inference_fn=both)
    answers = handler.run_inference(list(X), handler.load_model())
    assert {name: part.shape for name, part in answers.items()} == {"label": (40,), "proba": (40, 2)}
    row = rows_of(answers)[5]
    assert row["label"] == row["proba"].argmax()
    check_handler(handler, ROWS[:5])


def test_a_dict_of_more_than_arrays_becomes_one_dict_per_row(uri: str) -> None:
    def nested(model: Any, data: Any, inference_args: Any) -> Any:
        return {"label": model.predict(data), "more": {"words": ["x"] * len(data), "proba": model.predict_proba(data)}}

    handler = SklearnModelHandlerNumpy(uri, inference_fn=nested)
    row = answers_of(handler, list(X))[5]
    assert (row["more"]["words"], row["more"]["proba"].argmax()) == ("x", row["label"])
    check_handler(handler, ROWS[:5])


# Tables.


def test_a_table_becomes_a_matrix(uri: str, classifier: Any) -> None:
    handler = SklearnModelHandlerNumpy(uri)
    answers = handler.run_inference_columns(TABLE, handler.load_model())
    assert isinstance(answers, np.ndarray)
    assert answers.tolist() == classifier.predict(X).tolist()


def test_a_matrix_of_answers_stays_one(uri: str, classifier: Any) -> None:
    handler = SklearnModelHandlerNumpy(uri, inference_fn=predict_proba)
    answers = handler.run_inference_columns(TABLE, handler.load_model())
    np.testing.assert_allclose(answers, classifier.predict_proba(X))


@pytest.mark.parametrize("rows_first", [True, False])
def test_every_kind_of_number_and_missing_ones(uri: str, rows_first: bool) -> None:
    def seen(model: Any, data: Any, inference_args: Any) -> Any:
        return np.nan_to_num(data, nan=-1.0)

    table = pa.table(
        {
            "int": pa.array([1, None, 3]),
            "bool": pa.array([True, False, None]),
            "float": pa.array([1.5, None, 2.5], pa.float32()),
            "decimal": pa.array([1, 2, None], pa.decimal128(5, 1)),
            "empty": pa.nulls(3),
        }
    )
    chunked = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    handler = SklearnModelHandlerNumpy(uri, inference_fn=seen)
    if rows_first:
        answers = np.array(answers_of(handler, table.to_pylist()))
    else:
        answers = handler.run_inference_columns(chunked, handler.load_model())
    assert answers.tolist() == [[1, 1, 1.5, 1, -1], [-1, 0, -1, 2, -1], [3, -1, 2.5, -1, -1]]


def test_words_as_answers(save: Callable[[Any], str]) -> None:
    forest = RandomForestClassifier(n_estimators=3, random_state=0).fit(X, np.where(Y, "yes", "no"))
    handler = SklearnModelHandlerNumpy(save(forest), trusted=True)  # skops does not vouch for trees
    assert pa.array(handler.run_inference_columns(TABLE, handler.load_model())).to_pylist() == forest.predict(X).tolist()
    check_handler(handler, ROWS[:5])


# Settings.


def test_settings_are_kept(uri: str) -> None:
    handler = SklearnModelHandlerNumpy(uri, max_batch_duration_secs=0.5)
    assert handler.batch_elements_kwargs() == {"max_batch_size": 8192, "max_batch_duration_secs": 0.5}
    assert SklearnModelHandlerPandas(uri, max_batch_size=10).batch_elements_kwargs() == {"max_batch_size": 10}
    assert SklearnModelHandlerNumpy(uri, min_batch_size=9000).batch_elements_kwargs()["max_batch_size"] == 9000
    assert handler.get_metrics_namespace() == "Penstock_Sklearn"
    assert handler.get_num_bytes(list(X)) == X.nbytes
    assert handler.get_num_bytes(ROWS) == X.nbytes
    assert SklearnModelHandlerPandas(uri).get_num_bytes(ROWS) == X.nbytes
    assert not handler.share_model_across_processes()
    shared = SklearnModelHandlerNumpy(uri, model_copies=3)
    assert (shared.share_model_across_processes(), shared.model_copies()) == (True, 3)


# Files and trust.


@pytest.mark.parametrize(
    ("file_type", "dump"),
    [
        (ModelFileType.PICKLE, lambda model, path: path.write_bytes(pickle.dumps(model))),
        (ModelFileType.JOBLIB, joblib.dump),
    ],
)
def test_pickle_and_joblib_need_trust(file_type: ModelFileType, dump: Any, tmp_path: Path, classifier: Any) -> None:
    path, trace = tmp_path / "model", tmp_path / "ran"
    dump(RunsCode(trace), path)
    with pytest.raises(UsageError, match=r"can run any code that is in it; pass trusted=True .* skops.io.dump"):
        SklearnModelHandlerNumpy(str(path), file_type)
    assert not trace.exists()
    dump(classifier, path)
    check_handler(SklearnModelHandlerNumpy(str(path), file_type, trusted=True), list(X[:5]))


def test_skops_types_that_are_not_known_need_trust(save: Callable[[Any], str]) -> None:
    model = make_pipeline(FunctionTransformer(absolute), LogisticRegression()).fit(X, Y)
    path = save(model)
    with pytest.raises(UsageError, match=r"not know to be safe: .*absolute; look at them, and trust them alone with "):
        SklearnModelHandlerNumpy(path).load_model()
    assert answers_of(SklearnModelHandlerNumpy(path, trusted=True), list(X)) == model.predict(X).tolist()


def test_an_old_skops_whose_list_of_types_has_holes(save: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch) -> None:
    handler, version = SklearnModelHandlerNumpy(save(LogisticRegression().fit(X, Y))), importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.11.0" if name == "skops" else version(name))
    with pytest.raises(MissingPackageError, match=r"skops 0.11.0 is installed, but 0.12 or later .*penstock\[sklearn\]"):
        handler.load_model()


LOADS_SKOPS = """
import importlib, sys
from penstock.handlers.sklearn import SklearnModelHandlerNumpy
model = SklearnModelHandlerNumpy(sys.argv[1]).load_model()
print(type(model).__name__, [name for name in ("torch", "dask") if name in sys.modules])
print(importlib.import_module("sklearn.externals.array_api_compat.torch").__name__)
"""


def test_loading_a_skops_file_imports_no_other_framework(save: Callable[[Any], str]) -> None:
    """torch is installed here, and skops looks at all modules of scikit-learn."""
    path = save(LinearRegression().fit(np.eye(3), [1, 2, 3]))
    done = subprocess.run([sys.executable, "-c", LOADS_SKOPS, path], capture_output=True, text=True, check=False)
    assert done.stdout == "LinearRegression []\nsklearn.externals.array_api_compat.torch\n", done.stderr


def test_types_of_a_skops_file_can_be_trusted_alone(save: Callable[[Any], str]) -> None:
    path = save(make_pipeline(SimpleImputer(), LogisticRegression()).fit(X, Y))
    with pytest.raises(UsageError, match=r"safe: numpy.dtype; look .* trust them alone with trusted=\['numpy.dtype'\]"):
        SklearnModelHandlerNumpy(path).load_model()
    check_handler(SklearnModelHandlerNumpy(path, trusted=["numpy.dtype"]), ROWS[:5])
    with pytest.raises(UsageError, match="safe: numpy.dtype;"):
        SklearnModelHandlerNumpy(path, trusted=["numpy.other"]).load_model()
    with pytest.raises(UsageError, match="is a pickle file"):
        SklearnModelHandlerNumpy(path, ModelFileType.PICKLE, trusted=["numpy.dtype"])
    with pytest.raises(UsageError, match="trusted='numpy.dtype': expected True, False, or a list of types"):
        SklearnModelHandlerNumpy(path, trusted="numpy.dtype")


# Methods.


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("predict_proba", LogisticRegression()),
        ("decision_function", LogisticRegression()),
        ("transform", StandardScaler()),
        ("transform", OneHotEncoder(handle_unknown="ignore")),  # a sparse matrix
        ("score_samples", KernelDensity()),
    ],
)
def test_other_methods(method: str, model: Any, save: Callable[[Any], str]) -> None:
    rounded = np.round(X)
    model.fit(rounded, Y)
    handler = SklearnModelHandlerNumpy(save(model), trusted=True, method=method, columns=FEATURES)
    expected = getattr(model, method)(rounded)
    expected = expected.toarray() if hasattr(expected, "toarray") else expected
    np.testing.assert_allclose(answers_of(handler, [{"id": 1, **row} for row in TABLE_ROUNDED]), expected)
    check_handler(handler, TABLE_ROUNDED[:7])
    assert handler.is_native()


def test_a_method_that_is_not_there(uri: str) -> None:
    handler = SklearnModelHandlerNumpy(uri, method="score_samples")
    with pytest.raises(UsageError, match=r"the Pipeline in .* no such method; it has predict, predict_proba, decision_func"):
        handler.load_model()
    with pytest.raises(UsageError, match="method='predict_proba' and inference_fn= both say what is called"):
        SklearnModelHandlerNumpy(uri, method="predict_proba", inference_fn=predict_proba)
    with pytest.raises(UsageError, match="method='': expected the name of a method"):
        SklearnModelHandlerNumpy(uri, method="")


@pytest.mark.parametrize("file_type", list(ModelFileType))
def test_missing_and_wrong_files(file_type: ModelFileType, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'/nowhere/model' does not exist"):
        SklearnModelHandlerNumpy("/nowhere/model", file_type, trusted=True).load_model()
    junk = tmp_path / "junk"
    junk.write_bytes(b"this is not a model")
    with pytest.raises(InputError, match=f"could not be loaded as a {file_type.value} file"):
        SklearnModelHandlerNumpy(str(junk), file_type, trusted=True).load_model()


def test_a_model_in_the_place_of_its_path_and_a_name_that_says_another_type(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"SklearnModelHandlerNumpy\(a LinearRegression\): expected the path of a saved model"
    ):
        SklearnModelHandlerNumpy(LinearRegression())  # type: ignore[arg-type]
    (tmp_path / "model.pkl").write_bytes(b"a pickle")
    with pytest.raises(InputError, match=r"give model_file_type=ModelFileType.PICKLE"):
        SklearnModelHandlerNumpy(str(tmp_path / "model.pkl")).load_model()


def test_a_file_type_must_be_one(uri: str) -> None:
    with pytest.raises(UsageError, match=r"model_file_type='pickle': expected one of ModelFileType.SKOPS"):
        SklearnModelHandlerNumpy(uri, "pickle")  # type: ignore[arg-type]


def test_a_missing_framework_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['sklearn'] = None\nimport penstock.handlers.sklearn"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "scikit-learn is not installed; run: pip install 'penstock[sklearn]'" in result.stderr


def test_the_numpy_handler_needs_no_pandas() -> None:
    code = (
        "import sys; sys.modules['pandas'] = None\nimport penstock.handlers.sklearn as s; print(s.ModelFileType.SKOPS.value)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "skops\n")


@pytest.mark.parametrize("handler_class", [SklearnModelHandlerNumpy, SklearnModelHandlerPandas])
def test_a_copy_can_be_for_another_file(handler_class: Any, tmp_path: Path) -> None:
    uris = [str(tmp_path / f"{factor}.pickle") for factor in (1, 2)]
    for factor, uri in enumerate(uris, start=1):
        Path(uri).write_bytes(pickle.dumps(LinearRegression().fit(TABLE.to_pandas(), X[:, 0] * factor)))
    handler = handler_class(uris[0], ModelFileType.PICKLE, trusted=True)
    changed = copy.copy(handler)
    changed.update_model_path(uris[1])
    for each, uri, factor in [(changed, uris[1], 2), (handler, uris[0], 1)]:
        assert answers_of(each, ROWS) == pytest.approx(X[:, 0] * factor)
        assert (each.model_id(), list(each.model_files())) == (uri, [uri])


# Rows that do not fit.

ONE_ROW = pd.DataFrame([ROWS[0]])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([X[0], X[1, :2]], r"1-D arrays of one length, or dicts, but saw the shapes \(2,\), \(3,\)"),
        ([X[:2]], r"saw the shapes \(2, 3\)"),
        ([[1, [2, 3]]], r"saw the shapes of a list that is no array$"),
        ([("a", X[0])], r"of a tuple that is no array; rows that are \(key, example\) need a KeyedModelHandler"),
        ([ROWS[0], {"a": 1.0}], r"must have the keys \['a', 'b', 'c'\], but saw \['a'\]"),
        ([{"a": 1.0}, ROWS[0]], r"must have the keys \['a'\], but saw \['a', 'b', 'c'\]"),
        ([ROWS[0], X[0]], "must all be dicts, but saw ndarray"),
        ([ROWS[0] | {"b": "blue"}], r"column 'b' is 'blue' \(str\) in this row, but the model takes numbers; leave"),
        ([ROWS[0], ROWS[1] | {"b": "blue"}], "column 'b' is 'blue'"),
        ([{"a": True}, {"a": 2}], "the values of one column must have one type"),
    ],
)
def test_rows_that_the_numpy_handler_refuses(rows: list[Any], message: str, uri: str) -> None:
    with pytest.raises(RowError, match=message):
        answers_of(SklearnModelHandlerNumpy(uri), rows)


def bad_rows(handler: Any, rows: Any, model: Any = None) -> dict[int, str]:
    """The rows that the handler blames, each with its message. Where it has answers to the others, they are those that it
    gives for them alone."""
    run = handler.run_inference_columns if isinstance(rows, pa.Table) else handler.run_inference
    model = model or handler.load_model()
    with pytest.raises(BadRowsError) as raised:
        run(rows, model)
    if raised.value.values is not None:
        good = [at for at in range(len(rows)) if at not in raised.value.errors]
        alone = run(rows.take(good) if isinstance(rows, pa.Table) else [rows[at] for at in good], model)
        assert [raised.value.values[at] for at in good] == list(alone)
    return {at: f"{type(error).__name__}: {error}" for at, error in raised.value.errors.items()}


@pytest.mark.parametrize("value", ["blue", b"x", [1.0], {"x": 1}, object()])
def test_rows_without_numbers_are_named(value: Any, uri: str) -> None:
    rows = [row | {"b": value} if at in (3, 17) else row for at, row in enumerate(ROWS)]
    seen = bad_rows(SklearnModelHandlerNumpy(uri), rows)
    assert {at: message.startswith("RowError: column 'b' is ") for at, message in seen.items()} == {3: True, 17: True}
    assert bad_rows(SklearnModelHandlerNumpy(uri, columns=FEATURES), rows).keys() == {3, 17}


@pytest.mark.parametrize("handler_class", [SklearnModelHandlerNumpy, SklearnModelHandlerPandas])
def test_rows_that_lack_a_key_are_named(handler_class: Any, uri: str) -> None:
    seen = bad_rows(handler_class(uri, columns=FEATURES), [ROWS[0], {"a": 1.0}, ROWS[1], 5])
    assert seen.keys() == {1, 3}
    assert "must have the keys ['a', 'b', 'c'], but saw ['a']" in seen[1]


def test_rows_whose_nan_or_infinity_the_model_refuses_are_named(uri: str) -> None:
    data = X.copy()
    data[4, 1] = data[9, 0] = data[9, 2] = np.nan
    data[20, 2] = np.inf
    handler = SklearnModelHandlerNumpy(uri)
    for rows in (list(data), pa.table({name: data[:, at] for at, name in enumerate(FEATURES)})):
        seen = bad_rows(handler, rows)
        assert seen.keys() == {4, 9, 20}
        assert seen[4].startswith("ValueError: Input X contains NaN")
        assert seen[20].startswith("ValueError: Input X contains infinity")
    with pytest.raises(BadRowsError) as raised:
        handler.run_inference(list(data), handler.load_model())
    assert raised.value.values is not None, "the good ones need no second call"
    assert bad_rows(handler, list(data[[4, 9]])).keys() == {0, 1}, "all of them are bad"
    with pytest.raises(ValueError, match="contains NaN"):
        answers_of(handler, [data[4]])


def test_rows_whose_nan_the_model_takes_are_not_blamed(save: Callable[[Any], str]) -> None:
    """Of one column it takes NaN, of the others not."""
    mended = ColumnTransformer([("mended", SimpleImputer(), [0]), ("as it is", "passthrough", [1, 2])])
    model = make_pipeline(mended, LogisticRegression()).fit(X, Y)
    data = X.copy()
    data[:30, 0] = np.nan
    handler = SklearnModelHandlerNumpy(save(model), trusted=True)
    assert answers_of(handler, list(data)) == model.predict(data).tolist()
    data[7, 1] = data[35, 2] = np.nan
    assert bad_rows(handler, list(data)).keys() == {7, 35}


def test_no_row_is_blamed_for_its_nan_where_something_else_is_wrong(uri: str) -> None:
    with pytest.raises(ValueError, match="2 features"):
        answers_of(SklearnModelHandlerNumpy(uri), [np.array([1.0, 2.0]), np.array([1.0, np.nan])])

    def refuses(model: Any, data: Any, inference_args: Any) -> Any:
        if len(data) > 1:
            raise ValueError("too many rows, or NaN")
        return [0]

    with pytest.raises(ValueError, match="too many"):
        answers_of(SklearnModelHandlerNumpy(uri, inference_fn=refuses), [X[0] * np.nan, *X[1:]])


def test_rows_that_are_not_safe_to_run_again_do_not(uri: str) -> None:
    class Once(SklearnModelHandlerNumpy):
        retry_safe = False

    with pytest.raises(ValueError, match="contains NaN"):
        answers_of(Once(uri), [X[0] * np.nan, *X[1:]])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ONE_ROW, pd.DataFrame(ROWS)], "all be pandas DataFrames of one row.*but saw a frame of 40 rows"),
        ([ONE_ROW, ROWS[0]], "but saw dict"),
        ([5], "but saw int"),
        ([ONE_ROW, ONE_ROW[["a", "b"]]], "must have the same columns"),
        ([ONE_ROW.iloc[0], ONE_ROW.iloc[0].rename({"a": "z"})], "must have the same columns"),
    ],
)
def test_rows_that_the_pandas_handler_refuses(rows: list[Any], message: str, uri: str) -> None:
    with pytest.raises(RowError, match=message):
        answers_of(SklearnModelHandlerPandas(uri), rows)


@pytest.mark.parametrize("handler_class", [SklearnModelHandlerNumpy, SklearnModelHandlerPandas])
def test_columns_that_are_not_there(handler_class: Any, uri: str) -> None:
    handler = handler_class(uri, columns=["a", "nope"])
    with pytest.raises(UsageError, match=r"columns \['nope'\] are missing: the table has \['a', 'b', 'c'\]"):
        handler.run_inference_columns(TABLE, handler.load_model())
    with pytest.raises(RowError, match="nope"):
        answers_of(handler, ROWS)


def run_over_table(tmp_path: Path, handler: Any, table: pa.Table, workers: int, **handling: Any) -> Any:
    pq.write_table(table, tmp_path / "rows.parquet")
    pipeline = ps.Pipeline(workers=workers)
    rows = pipeline | ps.ReadFromParquet(str(tmp_path / "rows.parquet"))
    good, failures = rows | "Score" >> ps.RunInference(handler).with_exception_handling(**handling)
    good | ps.WriteToJsonl(tmp_path / "good")
    failures | ps.WriteToJsonl(tmp_path / "bad")
    return pipeline.run()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("handling", [{}, {"use_subprocess": True}])
def test_a_column_that_a_table_lacks_is_no_row_s_failure(
    workers: int, handling: dict[str, Any], uri: str, tmp_path: Path
) -> None:
    handler = SklearnModelHandlerNumpy(uri, columns=["a", "nope"])
    with pytest.raises(UsageError, match=r"'Score': columns \['nope'\] are missing: the table has \['a', 'b', 'c'\]"):
        run_over_table(tmp_path, handler, TABLE, workers, **handling)


def test_a_column_of_text_is_no_row_s_failure(uri: str, tmp_path: Path) -> None:
    named = TABLE.append_column("name", pa.array(["x"] * TABLE.num_rows))
    with pytest.raises(UsageError, match="column 'name' holds string, but the model takes numbers"):
        run_over_table(tmp_path, SklearnModelHandlerNumpy(uri), named, 0)
    result = run_over_table(tmp_path, SklearnModelHandlerNumpy(uri, columns=FEATURES), named, 0)
    assert (result.counts["Score"].rows_out, result.counts["Score"].rows_failed) == (40, 0)


def test_numbers_that_are_encoded_are_numbers_in_rows(uri: str, tmp_path: Path) -> None:
    encoded = TABLE.set_column(0, "a", pa.array([1, 2] * 20).dictionary_encode())
    assert run_over_table(tmp_path, SklearnModelHandlerNumpy(uri), encoded, 0).counts["Score"].rows_failed == 0


def test_a_key_that_one_row_lacks_is_its_failure(uri: str) -> None:
    pipeline = ps.Pipeline(workers=0)
    rows = pipeline | ps.Create([ROWS[0], {"a": 1.0}, ROWS[1]])
    _, failures = rows | ps.RunInference(SklearnModelHandlerNumpy(uri, columns=FEATURES)).with_exception_handling()
    assert [row for row, _ in failures.failed_inferences.collect()] == [{"a": 1.0}]


@pytest.mark.parametrize("handling", [{}, {"use_subprocess": True}])
def test_a_usage_error_of_a_handler_ends_the_run(handling: dict[str, Any]) -> None:
    class Refuses(ps.ModelHandler[int, int, None]):
        def load_model(self) -> None:
            return None

        def run_inference(self, batch: Any, model: None, inference_args: Any = None) -> list[int]:
            raise UsageError("the settings are wrong")

    pipeline = ps.Pipeline(workers=0)
    good, _ = pipeline | ps.Create(range(9)) | ps.RunInference(Refuses()).with_exception_handling(**handling)
    with pytest.raises(UsageError, match="the settings are wrong"):
        good.collect()


def test_frames_without_a_column(uri: str) -> None:
    with pytest.raises(RowError, match=r"columns \['nope'\] are missing"):
        answers_of(SklearnModelHandlerPandas(uri, columns=["nope"]), [ONE_ROW])


# Answers, in a pipeline.


def label_and_proba(model: Any, data: Any, inference_args: Any) -> Any:
    return {"label": model.predict(data), "proba": model.predict_proba(data)}


def test_rows_are_answered_by_numpy_s_values(uri: str, classifier: Any) -> None:
    results = (ps.Pipeline(workers=0) | ps.Create(ROWS) | ps.RunInference(SklearnModelHandlerNumpy(uri))).collect()
    assert [type(result.inference) for result in results] == [np.int64] * 40
    assert [result.inference for result in results] == classifier.predict(X).tolist()
    assert [result.example for result in results] == ROWS
    assert {result.model_id for result in results} == {uri}
    handler = SklearnModelHandlerNumpy(uri, inference_fn=label_and_proba)
    results = (ps.Pipeline(workers=0) | ps.Create(ROWS) | ps.RunInference(handler)).collect()
    assert [result.inference["proba"].shape for result in results] == [(2,)] * 40


def test_answers_are_columns_of_the_names_that_are_given(uri: str, classifier: Any, tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "rows.parquet")
    handler = SklearnModelHandlerNumpy(uri, columns=FEATURES, inference_fn=label_and_proba, output_prefix="my_")
    with ps.Pipeline(workers=0) as pipeline:
        rows = pipeline | ps.ReadFromParquet(tmp_path / "rows.parquet")
        rows | ps.RunInference(handler) | ps.WriteToParquet(tmp_path / "out")
    made = pq.read_table(tmp_path / "out")
    assert made.column_names == [*FEATURES, "my_label", "my_proba", "my_model_id"]
    assert made["my_label"].to_pylist() == classifier.predict(X).tolist()
    np.testing.assert_allclose(made["my_proba"].to_pylist(), classifier.predict_proba(X))


def test_rows_with_nan_cost_no_search(uri: str, tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def predict(model: Any, data: Any, inference_args: Any) -> Any:
        with calls.open("a") as file:
            file.write(f"{len(data)} ")
        return model.predict(data)

    rows = [row | {"a": float("nan")} if at % 100 == 7 else row for at, row in enumerate(ROWS * 50)]
    handler = SklearnModelHandlerNumpy(uri, inference_fn=predict, max_batch_size=2000)
    good, failures = ps.Pipeline(workers=0) | ps.Create(rows) | ps.RunInference(handler).with_exception_handling()
    assert len(good.collect()) == 1980
    assert calls.read_text().split() == ["2000", "1", "1980"]
    assert len(failures.failed_inferences.collect()) == 20


def test_steps_that_share_a_model_take_the_same_columns(uri: str) -> None:
    pipeline = ps.Pipeline(workers=0)
    rows = pipeline | ps.Create(ROWS)
    for name, columns in [("one", FEATURES), ("other", FEATURES[::-1])]:
        handler = SklearnModelHandlerNumpy(uri, columns=columns, output_column=name)
        rows = rows | name >> ps.RunInference(handler, model_identifier="m")
    with pytest.raises(UsageError, match="steps 'one' and 'other' have the model_identifier 'm', but their handlers differ"):
        rows.collect()


def test_an_error_of_a_row_names_the_file_of_the_model(tmp_path: Path) -> None:
    path = str(tmp_path / "model.skops")
    skops.io.dump(LinearRegression().fit(np.eye(3), [1, 2, 3]), path)
    rows = ps.Pipeline(workers=0) | ps.Create([np.ones(4)]) | ps.RunInference(SklearnModelHandlerNumpy(path))
    with pytest.raises(StepError, match="X has 4 features, but LinearRegression is expecting 3") as caught:
        rows.collect()
    assert str(caught.value).splitlines()[-1] == f"  model: {path}"


def test_a_model_that_changes_its_input_in_place_answers_the_rows_beside_nan(tmp_path: Path) -> None:
    scaled = make_pipeline(StandardScaler(copy=False), LinearRegression()).fit(X.copy(), X[:, 0])
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps(scaled))
    handler = SklearnModelHandlerNumpy(str(path), ModelFileType.PICKLE, trusted=True)
    rows = [X[0], np.full(X.shape[1], np.nan), X[1]]
    good, bad = ps.Pipeline(workers=0) | ps.Create(rows) | ps.RunInference(handler).with_exception_handling()
    np.testing.assert_allclose([result.inference for result in good.collect()], X[:2, 0])
    assert len(bad.failed_inferences.collect()) == 1
