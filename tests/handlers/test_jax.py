"""The JAX handler, with real small models: parameters from files, few shapes, rows and columns, what does not fit."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

import penstock as ps
from penstock.errors import BadRowsError, InputError, PredictionCountError, RowError, UsageError
from penstock.handlers.jax import JaxModelHandler
from penstock.testing import check_handler

X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
WEIGHTS = {"layer.weight": np.array([[1.0], [-2.0], [0.5]], np.float32), "layer.bias": np.array([3.0], np.float32)}
EXPECTED = X @ WEIGHTS["layer.weight"] + 3
ROWS = [{"id": at, **dict(zip("abc", map(float, row), strict=True))} for at, row in enumerate(X)]


def linear(params: Any, x: Any, scale: float = 1.0) -> Any:
    return scale * (x @ params["layer.weight"] + params["layer.bias"])


def nested(params: Any, x: Any) -> Any:
    return x @ params["layer"]["weight"] + params["layer"]["bias"]


class Pair(NamedTuple):
    total: Any
    rows: Any


def named(params: Any, inputs: Any) -> Any:
    rows = params["layer.weight"][inputs["n"]] + inputs["vector"]
    return Pair(rows.sum(axis=1), rows)


def of_tuples(params: Any, x: Any) -> Any:
    return x.sum(axis=1), x * 2


def summed(params: Any, x: Any) -> Any:
    return x.sum()


@pytest.fixture
def weights(tmp_path: Path) -> str:
    save_file(WEIGHTS, tmp_path / "weights.safetensors")
    return str(tmp_path / "weights.safetensors")


def answers_of(handler: Any, examples: Any, **arguments: Any) -> Any:
    return handler.run_inference(examples, handler.load_model(), **arguments)


def test_arrays_and_columns(weights: str) -> None:
    handler = JaxModelHandler(linear, weights)
    answers = answers_of(handler, list(X))
    assert isinstance(answers, np.ndarray)
    np.testing.assert_allclose(answers, EXPECTED, rtol=1e-5)
    check_handler(handler, list(X))
    check_handler(JaxModelHandler(linear, weights, columns=["a", "b", "c"]), ROWS)
    check_handler(JaxModelHandler(linear, weights, columns="x"), [{"x": row.tolist()} for row in X])
    scaled = answers_of(handler, list(X), inference_args={"scale": 2.0})
    np.testing.assert_allclose(scaled, 2 * EXPECTED, rtol=1e-5)


def test_few_shapes_are_compiled(weights: str) -> None:
    seen: list[Any] = []

    def traced(params: Any, x: Any) -> Any:
        seen.append(x.shape)  # Python runs when a shape is compiled, and never again
        return linear(params, x)

    handler = JaxModelHandler(traced, weights)
    model = handler.load_model()
    for rows in [*range(1, 21), 20, 9]:
        assert handler.run_inference(list(X[:rows]), model).shape == (rows, 1)
    assert seen == [(8, 3), (16, 3), (32, 3)]
    seen.clear()
    bucketed = JaxModelHandler(traced, weights, batch_size_buckets=[4, 20])
    model = bucketed.load_model()
    for rows in range(1, 21):
        assert bucketed.run_inference(list(X[:rows]), model).shape == (rows, 1)
    assert seen == [(4, 3), (20, 3)]


def test_named_inputs_and_outputs(weights: str) -> None:
    rows = [{"n": at % 3, "vector": [float(at)]} for at in range(7)]
    handler = JaxModelHandler(named, weights, named_inputs=True, columns=["n", "vector"])
    answers = answers_of(handler, rows)
    assert {name: part.shape for name, part in answers.items()} == {"total": (7,), "rows": (7, 1)}
    assert answers["total"][4] == -2.0 + 4.0
    check_handler(handler, rows)
    arrays = [{"n": np.int64(row["n"]), "vector": np.array(row["vector"], np.float32)} for row in rows]
    check_handler(JaxModelHandler(named, weights), arrays)


def test_tuples(weights: str) -> None:
    handler = JaxModelHandler(of_tuples, weights, columns=["a", "b", "c"])
    total, twice = answers_of(handler, ROWS)[5]
    assert total == pytest.approx(X[5].sum(), rel=1e-5)
    np.testing.assert_allclose(twice, 2 * X[5])
    check_handler(handler, ROWS)
    in_tuples = JaxModelHandler(lambda params, x: (x.sum(axis=1), (x, 2 * x)), weights)
    for total, (once, twice) in answers_of(in_tuples, list(X[:2])):  # as many rows as outputs
        assert (total, *twice) == pytest.approx((once.sum(), *(2 * once)), rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("bfloat16", "float"), ("float8_e4m3fn", "float"), ("float8_e5m2", "float"), ("int4", "int8")]
)
def test_types_that_arrow_has_not_become_wider_ones(dtype: str, kind: str, weights: str, tmp_path: Path) -> None:
    """Which have the same values, in columns and in rows."""

    def narrowed(params: Any, x: Any) -> Any:
        return {"all": (2 * x).astype(dtype), "first": (2 * x[:, 0]).astype(dtype)}

    expected = [{"all": [2 * at, -2 * at], "first": 2 * at} for at in range(3)]
    pq.write_table(pa.table({"x": [[at, -at] for at in range(3)]}), tmp_path / "in.parquet")
    with ps.Pipeline(workers=0) as p:
        handler = JaxModelHandler(narrowed, weights, columns="x", output_column="y")
        rows = p | ps.ReadFromParquet(str(tmp_path / "in.parquet")) | ps.RunInference(handler)
        rows | ps.WriteToParquet(str(tmp_path / "columns"))
    with ps.Pipeline(workers=0) as p:
        arrays = p | ps.Create([np.array([at, -at], np.float32) for at in range(3)])
        answers = arrays | ps.RunInference(JaxModelHandler(narrowed, weights))
        answers | ps.Map(lambda answer: {"y": answer.inference}) | ps.WriteToParquet(str(tmp_path / "rows"))
    for name in ("columns", "rows"):
        column = pq.read_table(tmp_path / name)["y"]
        assert (column.to_pylist(), str(column.type.field("first").type)) == (expected, kind)


# Files.


def test_nested_parameters_and_orbax(weights: str, tmp_path: Path) -> None:
    check_handler(JaxModelHandler(nested, weights, separator="."), list(X))
    params = {"layer": {"weight": jnp.asarray(WEIGHTS["layer.weight"]), "bias": jnp.asarray(WEIGHTS["layer.bias"])}}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save((tmp_path / "checkpoint").absolute(), params)
    handler = JaxModelHandler(nested, str(tmp_path / "checkpoint"))
    np.testing.assert_allclose(answers_of(handler, list(X)), EXPECTED, rtol=1e-5)
    check_handler(handler, list(X))


def test_own_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", **WEIGHTS)
    handler = JaxModelHandler(linear, str(tmp_path / "weights.npz"), load_params=lambda path: dict(np.load(path)))
    np.testing.assert_allclose(answers_of(handler, list(X)), EXPECTED, rtol=1e-5)


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'/nowhere/weights.safetensors' does not exist"):
        JaxModelHandler(linear, "/nowhere/weights.safetensors").load_model()
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(InputError, match=r"junk' could not be read: .*; expected a .safetensors file, or a folder"):
        JaxModelHandler(linear, str(tmp_path / "junk")).load_model()
    with pytest.raises(InputError, match=r"could not be read: [\s\S]*; expected a folder that Orbax"):
        JaxModelHandler(linear, str(tmp_path)).load_model()


def test_a_copy_can_be_for_another_file(weights: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other.safetensors")
    save_file({name: 2 * array for name, array in WEIGHTS.items()}, other)
    handler = JaxModelHandler(linear, weights)
    changed = copy.copy(handler)
    changed.update_model_path(other)
    for each, path, factor in [(handler, weights, 1), (changed, other, 2)]:
        np.testing.assert_allclose(answers_of(each, list(X)), factor * EXPECTED, rtol=1e-5)
        assert (each.model_id(), list(each.model_files())) == (path, [path])


# What does not fit.


def test_whole_numbers_that_jax_would_cut(weights: str) -> None:
    def same(params: Any, x: Any) -> Any:
        return x

    rows = [{"n": 1}, {"n": 2**40}, {"n": 3}]
    handler = JaxModelHandler(same, weights, columns="n")
    with pytest.raises(
        BadRowsError, match="not within -2147483648 and 2147483647, which JAX holds; set .*JAX_ENABLE_X64"
    ) as caught:
        answers_of(handler, rows)
    assert list(caught.value.errors) == [1]


def test_with_64_bits(weights: str) -> None:
    """In a process of its own: the variable is read when JAX is imported."""
    handler = JaxModelHandler(
        lambda params, x: x + 1, weights, columns="n", output_column="m", env_vars={"JAX_ENABLE_X64": "1"}, large_model=True
    )
    rows = ps.Pipeline(workers=1) | ps.Create([{"n": 2**40}, {"n": 3}])
    assert sorted(row["m"] for row in (rows | ps.RunInference(handler)).collect()) == [4, 2**40 + 1]


def test_rows_of_several_shapes(weights: str) -> None:
    with pytest.raises(RowError, match=r"one shape and type, but saw float32\[2\], float32\[3\]"):
        answers_of(JaxModelHandler(linear, weights), [X[0], X[1, :2]])


def test_rows_of_a_shape_that_the_function_does_not_take(weights: str) -> None:
    with pytest.raises(TypeError, match=r"dot_general[\s\S]*Each row is float32 of shape \[2\]: check that the model takes"):
        answers_of(JaxModelHandler(linear, weights), [X[0, :2]])


def test_an_output_without_rows(weights: str) -> None:
    with pytest.raises(PredictionCountError, match=r"0 answers .* for 32 rows \(20, and copies"):
        answers_of(JaxModelHandler(summed, weights), list(X))


def test_a_tpu_is_neither_the_cpu_nor_a_gpu(weights: str) -> None:
    """One process alone can have it; whether it is there, JAX says."""
    there = {name: JaxModelHandler(linear, weights, device=name) for name in (None, "cpu", "gpu:1", "tpu", "tpu:1")}
    shared = {name: handler.share_model_across_processes() for name, handler in there.items()}
    assert shared == {None: False, "cpu": False, "gpu:1": False, "tpu": True, "tpu:1": True}
    rows = ps.Pipeline(workers=1) | ps.Create(list(X)) | ps.RunInference(there["tpu"])
    with pytest.raises(UsageError, match="device='tpu' is not here: JAX sees"):
        rows.collect()


def test_devices(weights: str) -> None:
    assert JaxModelHandler(linear, weights, device="cpu").load_model().device == jax.devices("cpu")[0]
    assert [JaxModelHandler(linear, weights, device=each).accelerator() for each in (None, "gpu", "gpu:1", "tpu")] == [
        None,
        "gpu",
        "cuda:1",
        None,
    ]
    with pytest.raises(UsageError, match=r"device='tpu' is not here: JAX sees \['(cpu|cuda):0'\]"):
        JaxModelHandler(linear, weights, device="tpu").load_model()
    with pytest.raises(UsageError, match=r"device='quantum' is not here: JAX sees \['(cpu|cuda):0'\]"):
        JaxModelHandler(linear, weights, device="quantum").load_model()


@pytest.mark.parametrize(("workers", "place"), [(0, {}), (1, {"large_model": True})])
def test_a_whole_job(workers: int, place: Any, weights: str, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "in.parquet")
    handler = JaxModelHandler(linear, weights, columns=["a", "b", "c"], output_column="y", **place)
    with ps.Pipeline(workers=workers) as p:
        rows = p | ps.ReadFromParquet(str(tmp_path / "in.parquet"))
        rows | ps.RunInference(handler) | ps.WriteToParquet(str(tmp_path / "out"))
    table = pq.read_table(tmp_path / "out").sort_by("id")
    np.testing.assert_allclose(table["y"].to_pylist(), EXPECTED, rtol=1e-5)
    assert set(table["y_model_id"].to_pylist()) == {weights}


def platforms(params: Any, x: Any) -> Any:
    return x[:, 0] * 0 + (jax.config.jax_platforms == "cpu")


@pytest.mark.parametrize(("workers", "place", "only"), [(0, {}, 0), (1, {}, 1), (1, {"large_model": True}, 1)])
def test_jax_starts_on_the_cpu_alone_in_processes_of_the_run(workers: int, place: Any, only: int, weights: str) -> None:
    """Elsewhere a worker would take the memory of each GPU. The user's own process may use one."""
    assert not jax.config.jax_platforms
    p = ps.Pipeline(workers=workers)
    got = (p | ps.Create(list(X)) | ps.RunInference(JaxModelHandler(platforms, weights, **place))).collect()
    assert {float(each.inference) for each in got} == {only}
    assert not jax.config.jax_platforms


def test_a_missing_framework_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['jax'] = None\nimport penstock.handlers.jax"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "jax is not installed; run: pip install 'penstock[jax]'" in result.stderr
