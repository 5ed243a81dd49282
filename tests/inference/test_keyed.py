"""A model for each key: rows reach their own, however few are in memory, in the process, in workers and in hosts."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import threading
import time
import types
import weakref
from collections import Counter

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import penstock as ps
from penstock.errors import ModelLoadError, StepError, UsageError
from penstock.handlers.model_files import open_model_file
from penstock.inference.models_by_key import WINDOW
from penstock.inference.served import host_spec
from penstock.inference.sessions import ProcessSessions
from penstock.inference.spec import InferenceSpec
from penstock.inference.stream import open_stream
from penstock.models.memory import available_bytes
from penstock.models.place import Surroundings, choose_place
from penstock.models.residency import Residency
from penstock.observe.metrics import MetricKey, Metrics, ModelUse
from penstock.observe.result import RunResult
from penstock.observe.summary import models as models_told

WAYS = {
    "here": ({"workers": 0}, {}),
    "workers": ({"workers": 2}, {}),
    "host": ({"workers": 0}, {"large_model": True}),
    "copies": ({"workers": 2}, {"model_copies": 2}),
}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


class Scale(ps.ModelHandler):
    """A model that is a number; its batches may be bounded."""

    def __init__(self, number=0, **settings):
        super().__init__(**settings)
        self.number = number

    def load_model(self):
        return {"number": self.number}

    def run_inference(self, batch, model, inference_args=None):
        return [row * 1000 + model["number"] + (inference_args or {}).get("more", 0) for row in batch]

    def model_id(self):
        return f"scale-{self.number}"


def mapped(count, settings, kind=Scale, **options):
    return ps.KeyedModelHandler([ps.KeyModelMapping([f"k{n}"], kind(n, **settings)) for n in range(count)], **options)


def rows_of(count, keys):
    return [(f"k{n * 7 % keys}", n) for n in range(count)]


def answers_of(rows, more=0):
    return [(key, row * 1000 + int(key[1:]) + more) for key, row in rows]


def run(way, rows, handler, **options):
    pipeline = ps.Pipeline(**way[0])
    made = (pipeline | ps.Create(rows) | "m" >> ps.RunInference(handler, **options)).collect()
    return made, pipeline.result.metrics


def handled(way, rows, handler, **options):
    pipeline = ps.Pipeline(**way[0])
    good, bad = pipeline | ps.Create(rows) | "m" >> ps.RunInference(handler).with_exception_handling(**options)
    kept = []
    both = (good | ps.Map(lambda row: ("good", row)), bad | ps.Map(lambda row: ("bad", row))) | ps.Flatten()
    kept = both.collect()
    return [row for kind, row in kept if kind == "good"], [row for kind, row in kept if kind == "bad"]


def test_each_row_goes_to_the_model_of_its_key(way):
    rows = rows_of(3000, 20)
    made, _ = run(way, rows, mapped(20, way[1], max_models_per_worker_hint=3))
    assert made == answers_of(rows)


def test_keys_share_a_model_and_its_batches():
    handler = ps.KeyedModelHandler(
        [ps.KeyModelMapping(["a", "b"], Scale(1, max_batch_size=100)), ps.KeyModelMapping([7], Scale(2, max_batch_size=5))]
    )
    rows = [("a", 1), ("b", 2), (7, 3)] * 20
    made, metrics = run(WAYS["here"], rows, handler)
    assert made == [("a", 1001), ("b", 2001), (7, 3002)] * 20
    (sizes,) = [d for key, d in metrics.distributions.items() if key.name == "inference_request_batch_size"]
    assert (sizes.count, sizes.max) == (1 + 4, 40)


def test_arguments_reach_every_model(way):
    rows = rows_of(100, 5)
    made, _ = run(way, rows, mapped(5, way[1]), inference_args={"more": 5})
    assert made == answers_of(rows, more=5)


def test_a_key_without_a_model_fails_its_row(way):
    rows = [("k0", 1), ("nobody", 2), ("k1", 3), ([], 4)]
    good, bad = handled(way, rows, mapped(2, way[1]))
    assert good == [("k0", 1000), ("k1", 3001)]
    assert [(row, failure.error_type) for row, failure in bad] == [(rows[1], "LookupError"), (rows[3], "LookupError")]
    assert "no model for the key 'nobody': the handler has models for 'k0', 'k1'" in bad[0][1].message
    with pytest.raises(StepError, match="no model for the key 'nobody'"):
        run(way, rows[:3], mapped(2, way[1]))


def test_a_default_takes_the_other_keys(way):
    handler = mapped(2, way[1], default=Scale(9, **way[1]))
    made, _ = run(way, [("k1", 1), ("nobody", 2), ([], 3)], handler)
    assert made == [("k1", 1001), ("nobody", 2009), ([], 3009)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ps.KeyedModelHandler([ps.KeyModelMapping(["a"], Scale()), ps.KeyModelMapping(["a"], Scale())]),
            "the key 'a' is in two mappings",
        ),
        (lambda: ps.KeyedModelHandler([]), "a list of KeyModelMapping"),
        (lambda: ps.KeyedModelHandler([ps.KeyModelMapping("abc", Scale())]), r'a list of keys, such as \["key1"'),
        (lambda: ps.KeyedModelHandler([ps.KeyModelMapping([], Scale())]), "a list of keys"),
        (lambda: ps.KeyedModelHandler([ps.KeyModelMapping(["a"], "b.pt")]), "expected a ModelHandler"),
        (lambda: ps.KeyedModelHandler(Scale(), memory_budget="1GB"), "memory_budget=...\\) is for a model for each key"),
        (lambda: mapped(1, {}, memory_budget="much"), "memory_budget='much': expected bytes, or a size such as \"8GB\""),
        (lambda: mapped(1, {}, max_models_per_worker_hint=0), "max_models_per_worker_hint=0: expected a whole number"),
        (lambda: ps.KeyedModelHandler.from_pattern("models/a.pt", Scale()), r'"models/\{key\}.pt"'),
        (lambda: ps.KeyedModelHandler.from_pattern("m/{key}", Scale()), "update_model_path"),
        (
            lambda: ps.KeyedModelHandler(
                [ps.KeyModelMapping(["a"], Scale()), ps.KeyModelMapping(["b"], Scale(output_column="x"))]
            ),
            "must agree in output_column",
        ),
    ],
)
def test_wrong_calls_say_what_to_do(make, message):
    with pytest.raises(UsageError, match=message):
        make()


# A folder of models.


class FromFile(Scale):
    def __init__(self, path="", **settings):
        super().__init__(**settings)
        self.path = path

    def update_model_path(self, model_path):
        self.path = model_path

    def load_model(self):
        with open(self.path) as file:
            return json.load(file)

    def model_files(self):
        return [self.path]

    def model_id(self):
        return self.path


@pytest.fixture
def folder(tmp_path):
    for number in range(12):
        (tmp_path / f"model-{number}.json").write_text(json.dumps({"number": number}))
    return tmp_path


def test_a_folder_of_models(way, folder):
    handler = ps.KeyedModelHandler.from_pattern(f"{folder}/model-{{key}}.json", FromFile(**way[1]), 3)
    rows = [(n % 12, n) for n in range(500)]
    made, _ = run(way, rows, handler)
    assert made == [(key, row * 1000 + key) for key, row in rows]
    assert [str(path).rpartition("/")[2] for path in handler.model_files()][:2] == ["model-0.json", "model-1.json"]
    assert len(handler.model_files()) == 12


def test_a_key_names_one_file_of_the_folder_and_no_other(folder):
    (folder / "models").mkdir()
    (folder / "models" / "a.json").write_text("{}")
    handler = ps.KeyedModelHandler.from_pattern(f"{folder}/models/{{key}}.json", FromFile())
    rows = [(key, 1) for key in ["../model-1", "..", "", None, True, "a/../a", "gone", "a\0"]]
    good, bad = handled(WAYS["here"], rows, handler)
    assert good == []
    assert [failure.error_type for _, failure in bad] == ["LookupError"] * len(rows)
    assert "there is no" in bad[6][1].message


class FromStore(FromFile):
    def load_model(self):
        with open_model_file(self.path) as file:
            return json.load(file)


ODD = ["a b", "ä漢", "%20", "x*[1]?", "{key}", "a::b", "'\"", "#1", "-", "~", "new\nline"]


@pytest.mark.parametrize("store", ["memory://of-keys", "file://{folder}", "{folder}"])
def test_models_in_any_store_and_keys_of_odd_characters(tmp_path, store):
    pattern = f"{store.replace('{folder}', str(tmp_path))}/m-{{key}}.json"
    for number, key in enumerate(ODD):
        fs, _ = fsspec.core.url_to_fs("memory://" if store.startswith("memory") else str(tmp_path))
        with fs.open(pattern.replace("{key}", key).removeprefix("file://"), "w") as file:
            json.dump({"number": number}, file)
    rows = [(key, n) for n, key in enumerate([*ODD, "gone", "x" * 300, "\udc80"])]
    expected = [(key, n * 1000 + min(n, len(ODD))) for key, n in rows]
    handler = ps.KeyedModelHandler.from_pattern(pattern, FromStore(), default=Scale(len(ODD)))
    assert run(WAYS["here"], rows, handler)[0] == expected
    good, bad = handled(WAYS["here"], rows, ps.KeyedModelHandler.from_pattern(pattern, FromStore()))
    assert good == expected[: len(ODD)]
    assert [failure.error_type for _, failure in bad] == ["LookupError"] * 3
    assert len(handler.model_files()) == (0 if store.startswith("memory") else len(ODD))


def test_keys_at_a_web_address_are_quoted_and_its_secrets_are_not_told():
    handler = ps.KeyedModelHandler.from_pattern("https://me:secret@store/{key}.json?token=secret", FromFile())
    assert handler.unkeyed.handler_of("a?b#c d").path == "https://me:secret@store/a%3Fb%23c%20d.json?token=secret"
    assert "secret" not in repr(handler)


def test_a_store_that_cannot_be_asked_sends_no_row_to_the_default(monkeypatch):
    def refuses(self, path, **options):
        raise PermissionError("no right to look")

    handler = ps.KeyedModelHandler.from_pattern("memory://of-keys/none-{key}.json", FromStore(), default=Scale(9))
    with monkeypatch.context() as patch, pytest.raises(UsageError, match=r"none-k\.json' does not exist"):
        patch.setattr(MemoryFileSystem, "info", refuses)
        run(WAYS["here"], [("k", 1)], handler)


# What is around the models.


def test_functions_of_each_model_and_of_all(way):
    handler = ps.KeyedModelHandler(
        [
            ps.KeyModelMapping(
                ["a"], Scale(1, **way[1]).with_preprocess_fn(int).with_postprocess_fn(lambda made: made + 0.5)
            ),
            ps.KeyModelMapping(["b"], Scale(2, **way[1])),
        ]
    )
    handler = handler.with_preprocess_fn(lambda pair: (pair[0].lower(), pair[1])).with_postprocess_fn(list)
    made, _ = run(way, [("A", "1"), ("B", 2), ("a", "3")], handler)
    assert made == [["a", 1001.5], ["b", 2002], ["a", 3001.5]]


def test_rows_that_functions_of_a_model_fail_for_leave_by_their_outputs():
    picky = Scale(1).with_preprocess_fn(lambda row: round(1 / row * row * row))
    picky = picky.with_postprocess_fn(lambda made: 1 // (made - 2001))
    handler = ps.KeyedModelHandler([ps.KeyModelMapping(["a"], picky), ps.KeyModelMapping(["b"], Scale(2))])
    pipeline = ps.Pipeline(workers=0)
    rows = [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("b", 2)]
    _, bad = pipeline | ps.Create(rows) | ps.RunInference(handler).with_exception_handling()
    assert [row for row, _ in bad.failed_preprocessing[0].collect()] == [("a", 0)]
    assert [row for row, _ in bad.failed_postprocessing[0].collect()] == [("a", 2001)]


class Prepares(Scale):
    """Each model prepares with a tool of its own."""

    def load_prepare(self):
        return self.number

    def prepare(self, examples, tool, inference_args=None):
        return [(example, tool) for example in examples]

    def run_inference(self, batch, model, inference_args=None):
        assert {tool for _, tool in batch} == {model["number"]}
        return [row * 1000 + model["number"] for row, _ in batch]


def test_each_model_prepares_its_rows(way):
    rows = rows_of(200, 6)
    made, _ = run(way, rows, mapped(6, way[1], Prepares, max_models_per_worker_hint=2))
    assert made == answers_of(rows)


class PreparesBadly(Prepares):
    def prepare(self, examples, tool, inference_args=None):
        if tool == 2 and 8 in examples:
            time.sleep(600)
        if tool == 3 and 9 in examples:
            os.kill(os.getpid(), signal.SIGKILL)
        if tool == 4 and 10 in examples:
            raise ValueError("not prepared")
        return super().prepare(examples, tool, inference_args)


def test_preparing_that_hangs_or_crashes_costs_its_row():
    rows = [(f"k{n % 6}", n) for n in range(30)]
    good, bad = handled(({"workers": 0}, {}), rows, mapped(6, {}, PreparesBadly), timeout=2)
    assert good == [answer for answer, row in zip(answers_of(rows), rows, strict=True) if row[1] not in (8, 9, 10)]
    kinds = [(row, failure.kind, failure.model_id) for row, failure in bad]
    assert kinds == [(("k2", 8), "timed out", None), (("k3", 9), "crashed", None), (("k4", 10), "preparing", None)]


def test_rows_of_like_length_are_batched_for_each_model():
    class Lengths(Scale):
        def run_inference(self, batch, model, inference_args=None):
            assert max(map(len, batch)) * len(batch) <= 100
            return [len(row) * 1000 + model["number"] for row in batch]

    rows = [(f"k{n % 3}", "x" * (1 + n % 50)) for n in range(600)]
    made, _ = run(WAYS["here"], rows, mapped(3, {"batch_length_fn": len, "max_padded_cost": 100}, Lengths))
    assert made == [(key, len(row) * 1000 + int(key[1:])) for key, row in rows]


def test_rows_that_are_batches_already():
    handler = ps.KeyedModelHandler([ps.KeyModelMapping([f"k{n}"], Scale(n).with_no_batching()) for n in range(3)])
    batches = [[("k0", 1), ("k1", 2), ("k0", 3)], [("k2", 4)]]
    made, metrics = run(WAYS["here"], batches, handler)
    assert made == answers_of([pair for batch in batches for pair in batch])
    (sizes,) = [d for key, d in metrics.distributions.items() if key.name == "inference_request_batch_size"]
    assert sizes.count == 3


# Columns.


class Columns(Scale):
    def takes_columns(self):
        return "numpy"

    def run_inference_columns(self, table, model, inference_args=None):
        return table["value"] * 1000 + model["number"]


@pytest.mark.parametrize("kind", [Scale, Columns])
def test_a_column_of_keys(way, kind, tmp_path):
    import pyarrow as pa

    rows = rows_of(1000, 7)
    table = pa.table({"id": range(1000), "customer": [key for key, _ in rows], "value": [value for _, value in rows]})
    pq.write_table(table, tmp_path / "in.parquet")
    settings = {**way[1], "columns": "value", "output_column": "score"}
    handler = mapped(7, settings, kind, max_models_per_worker_hint=2, key_column="customer")
    with ps.Pipeline(**way[0]) as p:
        (
            p
            | ps.ReadFromParquet(str(tmp_path / "in.parquet"))
            | ps.RunInference(handler)
            | ps.WriteToParquet(str(tmp_path / "out"))
        )
    made = pq.read_table(tmp_path / "out")
    assert made.column_names == ["id", "customer", "value", "score", "score_model_id"]
    assert made["id"].to_pylist() == list(range(1000))
    assert made["score"].to_pylist() == [answer for _, answer in answers_of(rows)]
    assert made["score_model_id"].to_pylist() == [f"scale-{key[1:]}" for key, _ in rows]


def test_records_with_keys_and_those_without():
    handler = mapped(3, {"columns": ["value"], "output_column": "score"}, Records, key_column="customer")
    rows = [{"customer": f"k{n % 4}", "value": n} for n in range(8)]
    good, bad = handled(WAYS["here"], [*rows, {"value": 1}], handler)
    expected = [(row["customer"], row["value"] * 1000 + row["value"] % 4) for row in rows if row["value"] % 4 < 3]
    assert [(row["customer"], row["score"]) for row in good] == expected
    assert [row for row, _ in bad] == [rows[3], rows[7], {"value": 1}]


class Records(Scale):
    def run_inference(self, batch, model, inference_args=None):
        return [row["value"] * 1000 + model["number"] for row in batch]


def test_a_table_without_the_column_of_keys():
    handler = mapped(2, {"columns": "value"}, Columns, key_column="customer")
    table = ps.Pipeline(workers=0) | ps.Create([{"value": 1}]) | ps.MapBatches(lambda table: table, format="arrow")
    with pytest.raises(UsageError, match=r"no column 'customer' \(key_column=\)"):
        (table | ps.RunInference(handler)).collect()


# Deterministic runs.


class Batches(Scale):
    """An answer says which batch the row was in."""

    def run_inference(self, batch, model, inference_args=None):
        return [f"{model['number']}: {batch}"] * len(batch)


def test_deterministic_runs_have_the_same_batches_everywhere():
    rows = rows_of(40_000, 11)
    made = []
    for settings, where in [({"workers": 0}, {}), ({"workers": 1}, {}), ({"workers": 1}, {"large_model": True})]:
        pipeline = ps.Pipeline(deterministic=True, seed=1, **settings)
        handler = mapped(11, {"max_batch_size": 64, **where}, Batches, max_models_per_worker_hint=2)
        made.append((pipeline | ps.Create(rows) | ps.RunInference(handler)).collect())
    assert made[0] == made[1] == made[2]
    assert [key for key, _ in made[0]] == [key for key, _ in rows]
    assert max(Counter(made[0]).values()) == 64


# Loads that fail, and models that do not fit.


class Fails(FromFile):
    """The model of a file that says so raises when it is loaded, so many times."""

    def load_model(self):
        model = super().load_model()
        if model.get("failures", 0):
            beside = f"{self.path}.{os.getpid()}"  # two workers may do this at once, and read what the other writes
            with open(beside, "w") as file:
                json.dump({**model, "failures": model["failures"] - 1}, file)
            os.replace(beside, self.path)
            raise OSError(f"cannot read {model['number']}")
        return model


def test_a_load_that_fails_is_tried_again(way, folder):
    (folder / "model-3.json").write_text(json.dumps({"number": 3, "failures": 2}))
    handler = ps.KeyedModelHandler.from_pattern(f"{folder}/model-{{key}}.json", Fails(**{**way[1], "model_copies": None}))
    made, _ = run(({"workers": 0}, {}), [(n % 12, n) for n in range(100)], handler)
    assert made == [(n % 12, n * 1000 + n % 12) for n in range(100)]


def test_a_load_that_always_fails_costs_its_rows_alone(way, folder):
    (folder / "model-3.json").write_text(json.dumps({"number": 3, "failures": 1000}))
    handler = ps.KeyedModelHandler.from_pattern(f"{folder}/model-{{key}}.json", Fails(**way[1]))
    rows = [(n % 12, n) for n in range(100)]
    good, bad = handled(way, rows, handler)
    assert good == [(key, n * 1000 + key) for key, n in rows if key != 3]
    assert [row for row, _ in bad] == [row for row in rows if row[0] == 3]
    failure = bad[0][1]
    assert (failure.kind, failure.error_type, failure.model_id) == ("loading", "OSError", f"{folder}/model-3.json")
    assert failure.message == "cannot read 3"
    with pytest.raises(ModelLoadError, match=r"step 'm'.*cannot read 3"):
        run(way, rows, handler)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_limit_of_loads_that_has_no_effect_is_told(workers, caplog):
    def told(handler, timeout=None, **options):
        caplog.clear()
        pipeline = ps.Pipeline(workers=workers, **options)
        rows = pipeline | ps.Create([("k0", 1), ("k1", 2)])
        good, _ = rows | "m" >> ps.RunInference(handler).with_exception_handling(timeout=timeout)
        assert sorted(good.collect()) == [("k0", 1000), ("k1", 2001)]
        return "step 'm': load_timeout=300 does not limit its model" in caplog.text

    assert told(mapped(2, {}), load_timeout=300)
    assert not told(mapped(2, {}))
    assert not told(mapped(2, {"large_model": True}), load_timeout=300)
    assert not told(mapped(2, {}), load_timeout=300, timeout=60)


class Weighs(Scale):
    """Model 1 is larger than the others."""

    def load_model(self):
        return {"number": self.number, "weights": bytearray((50 if self.number == 1 else 4) << 20)}

    def model_bytes(self, model):
        return len(model["weights"])


@pytest.mark.parametrize("place", [{}, {"large_model": True}], ids=["here", "host"])
def test_what_is_in_memory_at_the_end_is_told_of_each_model(place):
    _, metrics = run(WAYS["here"], [("k0", 1), ("k2", 2), ("k3", 3)], mapped(4, place, Weighs, memory_budget=10 << 20))
    uses = {key.name: use for key, use in metrics.models.items()}
    assert {name: use.bytes for name, use in uses.items()} == dict.fromkeys(["k0", "k2", "k3"], 4 << 20)
    assert sorted(use.resident for use in uses.values()) == [0, 4 << 20, 4 << 20]
    assert [(use.loads, use.unloads) for use in uses.values() if not use.resident] == [(1, 1)]


def test_a_model_larger_than_the_budget_costs_its_rows_alone(way):
    rows = rows_of(60, 4)
    handler = mapped(4, way[1], Weighs, memory_budget="40MB")
    good, bad = handled(way, rows, handler)
    assert good == [answer for answer in answers_of(rows) if answer[0] != "k1"]
    assert [row for row, _ in bad] == [row for row in rows if row[0] == "k1"]
    assert bad[0][1].kind == "out of memory"
    shared = " in each of 2 workers, 40 MB in all" if way is WAYS["workers"] else ""
    budget = "20 MB" if shared else "40 MB"
    assert f"takes 52.4 MB, and the budget is {budget}{shared} (memory_budget): " in bad[0][1].message
    with pytest.raises((ModelLoadError, StepError), match="the model of key 'k1' takes 52.4 MB"):
        run(way, rows, handler)


class Padded(FromFile):
    """As large as its file. Each load leaves a line: the bytes of all that is loaded in the process then."""

    def load_model(self):
        model = Weights(os.path.getsize(self.path))
        here = sys.__dict__.setdefault("padded_here", Counter())
        here[id(model)] += model.bytes
        weakref.finalize(model, here.pop, id(model))
        with open(os.path.join(os.path.dirname(self.path), "loads"), "a") as file:
            file.write(f"{sum(here.values())}\n")
        return model

    def model_bytes(self, model):
        return model.bytes

    def run_inference(self, batch, model, inference_args=None):
        return [model.bytes for _ in batch]


class Weights:
    def __init__(self, size):
        self.bytes = size


@pytest.mark.parametrize("place", [{}, {"large_model": True}], ids=["here", "host"])
def test_a_large_model_after_small_ones_overruns_no_budget_where_models_have_files(tmp_path, place):
    sizes = {f"{n:03}": 5000 if n % 10 == 9 else 100 for n in range(100)}
    for key, size in sizes.items():
        (tmp_path / f"{key}.bin").write_bytes(b"0" * size)
    handler = ps.KeyedModelHandler.from_pattern(f"{tmp_path}/{{key}}.bin", Padded(**place), memory_budget=8000)
    made, _ = run(({"workers": 0}, {}), [(key, 1) for key in sizes], handler)
    assert dict(made) == sizes
    totals = [int(line) for line in (tmp_path / "loads").read_text().split()]
    assert 5000 < max(totals) <= 8000


class Third(Scale):
    """Its model says that it takes a third of the memory that is free, and rather more: less than a step alone may have."""

    def load_model(self):
        return {"number": self.number}

    def model_bytes(self, model):
        return int(0.36 * available_bytes())


@pytest.mark.parametrize("steps", [1, 2])
def test_steps_without_a_budget_have_what_is_free_together(steps):
    pipeline = ps.Pipeline(workers=0)
    rows = pipeline | ps.Create([("k0", 1), ("k1", 2)])
    failed = []
    for n in range(steps):
        _, bad = rows | f"m{n}" >> ps.RunInference(mapped(1, {}, Third, default=Third(1))).with_exception_handling()
        failed.append(bad | f"of {n}" >> ps.Map(lambda row: (row[0][0], row[1].message)))
    rows | "has one" >> ps.RunInference(mapped(2, {}, memory_budget="1GB"))
    made = (failed | ps.Flatten()).collect()
    assert len(made) == (0 if steps == 1 else 4)
    assert all("(memory_budget, by default a share of what is free)" in message for _, message in made)


def explained(handler, steps=1, **settings):
    """What is said of the steps with models."""
    pipeline = ps.Pipeline(**settings)
    rows = pipeline | ps.Create([(n % 12, n) for n in range(2000)])
    for n in range(steps):
        rows | f"m{n}" >> ps.RunInference(handler) | f"text {n}" >> ps.Map(str) | f"out{n}" >> ps.WriteToText(f"out{n}")
    return [line for line in pipeline.explain().splitlines() if line.strip().startswith("m")]


def gigabytes(line):
    return float(re.search(r"at most ([\d.]+) GB at once", line)[1])


@pytest.mark.parametrize("place", [{}, {"large_model": True}], ids=["workers", "host"])
def test_explain_says_what_models_may_take_and_how_many_that_is(folder, place):
    def lines(steps, **options):
        handler = ps.KeyedModelHandler.from_pattern(f"{folder}/model-{{key}}.json", FromFile(**place), **options)
        return explained(handler, steps, workers=2)

    (alone,) = lines(1)
    assert ", all 12 of them" in alone
    shares = [gigabytes(line) for line in lines(3)]
    assert shares == pytest.approx([gigabytes(alone) / 3] * 3, rel=0.1)
    assert [gigabytes(line) for line in lines(2, memory_budget="4GB")] == [4 if place else 2] * 2
    size = sum(path.stat().st_size for path in folder.iterdir()) / 12
    budget = int(5.5 * size * (1 if place else 2))
    assert ", about 5 of them" in lines(1, memory_budget=budget)[0]
    assert ", about 3 of them" in lines(1, max_models_per_worker_hint=3)[0]


class OnGpu(FromFile):
    def accelerator(self):
        return "gpu"


def test_explain_says_that_models_on_a_gpu_have_its_memory(folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    handler = ps.KeyedModelHandler.from_pattern(f"{folder}/model-{{key}}.json", OnGpu())
    assert "at most 80% of the memory that is free on its GPU at once" in explained(handler)[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "at most 40% of the memory that is free on each GPU at once" in explained(handler, 2)[1]
    handler = ps.KeyedModelHandler.from_pattern(f"{folder}/model-{{key}}.json", OnGpu(), memory_budget="4GB")
    assert "at most 4 GB on each GPU at once, all 12 of them" in explained(handler)[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "GPU" not in explained(handler)[0]


def test_models_on_a_gpu_may_take_more_than_there_is_ram(folder):
    handler = ps.KeyedModelHandler.from_pattern(f"{folder}/model-{{key}}.json", OnGpu())
    spec, around = InferenceSpec.of(handler), Surroundings(workers=2, gpus=("0", "1"), default_budgets=2)
    place = choose_place(spec.wishes(), around)
    residency = Residency(host_spec("m", "m", spec, place, around).budget, lambda model: False, copies=place.copies)
    residency.ready(0, 10**15)
    residency.ready(1, 10**15)
    assert residency.budget.bytes == 10**15 // 2


# Many threads.

LOADED: Counter = Counter()  # models, in this process, now
MOST: list[int] = []
LOADS: Counter = Counter()
GUARD = threading.Lock()


class Counted(Scale):
    def load_model(self):
        with GUARD:
            LOADS[self.number] += 1
            LOADED[self.number] += 1
            assert LOADED[self.number] == 1, "loaded twice at a time"
            MOST.append(sum(LOADED.values()))
        return Gone(self.number)

    def run_inference(self, batch, model, inference_args=None):
        return [row * 1000 + model.number for row in batch]


class Gone:
    """A model that says when it is let go of."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        with GUARD:
            LOADED[self.number] -= 1


@pytest.fixture
def counted():
    gc.collect()  # models of the test before, which say so when they go
    LOADED.clear()
    MOST.clear()
    LOADS.clear()


def stream_of(spec, sessions, rows):
    made = []
    stream = open_stream(spec, "m", sessions)
    try:
        for at in range(0, len(rows), 64):
            made += [row for part in stream.push(rows[at : at + 64]) for row in part.block]
        made += [row for part in stream.finish() for row in part.block]
    finally:
        stream.close()
    return made


def test_64_threads_ask_for_64_models_with_room_for_two(counted):
    handler = mapped(64, {}, Counted, max_models_per_worker_hint=2)
    spec, sessions = InferenceSpec.of(handler), ProcessSessions(Metrics())
    made = {}
    rows = {n: [(f"k{(n + at) % 64}", at) for at in range(128)] for n in range(64)}

    def work(n):
        made[n] = stream_of(spec, sessions, rows[n])

    threads = [threading.Thread(target=work, args=[n]) for n in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sessions.close()
    assert made == {n: answers_of(rows[n]) for n in range(64)}
    assert max(MOST) <= 2
    assert sum(LOADS.values()) < 64 * 64


def test_keys_in_the_worst_order(counted):
    rows = rows_of(4000, 200)
    made, metrics = run(WAYS["here"], rows, mapped(200, {}, Counted, max_models_per_worker_hint=1))
    assert made == answers_of(rows)
    assert max(MOST) == 1
    assert sum(LOADS.values()) == 200
    assert {key.name: n for key, n in metrics.counters.items()}["model_loads"] == 200


BEGUN, ENDED, UNDER_WAY = [], [], []  # rows in front of a model, those behind it, and how many were between


def begin(row):
    BEGUN.append(None)
    UNDER_WAY.append(len(BEGUN) - len(ENDED))
    return row


def end(row):
    ENDED.append(None)
    return row


def test_threads_have_the_rows_that_may_wait_together():
    for noted in (BEGUN, ENDED, UNDER_WAY):
        noted.clear()
    rows = rows_of(80_000, 100)
    pipeline = ps.Pipeline(workers=0, threads_per_worker=4)
    answers = (
        pipeline | ps.Create(rows) | ps.Map(begin) | "m" >> ps.RunInference(mapped(100, {}, max_models_per_worker_hint=1))
    )
    assert (answers | ps.Map(end)).collect() == answers_of(rows)
    assert max(UNDER_WAY) <= 2 * WINDOW, "with the blocks on their way to the model and from it"
    assert pipeline.result.metrics.counter("model_loads") <= 100 * (len(rows) / WINDOW + 4)


def test_ten_thousand_keys_cost_nothing_by_themselves():
    handler = mapped(10_000, {}, Scale)
    before = threading.active_count()
    made, metrics = run(WAYS["here"], rows_of(100, 3), handler)
    assert made == answers_of(rows_of(100, 3))
    assert threading.active_count() == before
    assert {key.name: n for key, n in metrics.counters.items()}["model_loads"] == 3


class Counts(Scale):
    """Answers say what this process has: threads, descriptors, processes of its own."""

    def run_inference(self, batch, model, inference_args=None):
        return [had()] * len(batch)


def had():
    children = [
        int(pid) for task in os.listdir("/proc/self/task") for pid in read(f"/proc/self/task/{task}/children").split()
    ]
    return threading.active_count(), len(os.listdir("/proc/self/fd")), len(children)


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # of a thread that is gone
        return ""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="they are counted in /proc")
@pytest.mark.parametrize(("place", "keys"), [({}, 10_000), ({"large_model": True}, 2000)], ids=["here", "host"])
def test_thousands_of_keys_that_are_used_need_no_more_threads_descriptors_or_processes(place, keys):
    few, _ = run(WAYS["here"], rows_of(300, 3), mapped(3, place, Counts, max_models_per_worker_hint=2))
    before = had()
    many, metrics = run(WAYS["here"], rows_of(10_000, keys), mapped(10_000, place, Counts, max_models_per_worker_hint=100))
    assert {key.name: n for key, n in metrics.counters.items()}["model_loads"] == keys
    most = [max(answer[at] for _, answer in few) for at in range(3)]
    for at, slack in enumerate((1, 3, 0)):  # a load may be under way beside a call
        assert max(answer[at] for _, answer in many) <= most[at] + slack
    if not place:
        assert had() == before


def test_the_last_words_name_the_ten_models_that_took_longest_to_load():
    uses = {MetricKey("m", "", f"k{n}"): ModelUse(1000, n + 1, n, 5, seconds=n / 10) for n in range(12)}
    metrics = Metrics(models={MetricKey("other", "", "only"): ModelUse(1, 1, seconds=2.0), **uses})
    other, line = models_told(RunResult(run="r", seconds=1.0, counts={}, metrics=metrics, outputs=[], splits=1))
    assert other == "step 'other': 1 models, 1 loads in 2.0 s; most: only (1 x, 2 s)"
    told, _, most = line.partition("; most: ")
    assert told == "step 'm': 12 models, 78 loads in 6.6 s"
    assert most.split("), ") == [f"k{n} ({n + 1} x, {n / 10:.2g} s" for n in range(11, 2, -1)] + ["k2 (3 x, 0.2 s)"]


def test_a_run_ends_with_what_its_models_have_cost(capfd, tmp_path):
    with ps.Pipeline(workers=0) as p:
        rows = p | ps.Create(rows_of(100, 3)) | "m" >> ps.RunInference(mapped(3, {}, memory_budget="1GB"))
        rows | ps.Map(str) | ps.WriteToText(str(tmp_path / "out"))
    assert "penstock: step 'm': 3 models, 3 loads in " in capfd.readouterr().err


# Resuming.


def test_a_run_that_is_resumed_notices_other_models_and_no_other_budget(folder, tmp_path):
    def go(pattern="model-{key}.json", **budget):
        handler = ps.KeyedModelHandler.from_pattern(f"{folder}/{pattern}", FromFile(), **budget)
        with ps.Pipeline(workers=0, run_dir=tmp_path / "run") as p:
            rows = p | ps.Create([(n % 12, n) for n in range(100)]) | "m" >> ps.RunInference(handler)
            rows | ps.Map(str) | ps.WriteToText(str(tmp_path / "out"))
        return p.result.was_finished

    assert not go()
    assert go(memory_budget="1GB", max_models_per_worker_hint=3)
    with pytest.raises(UsageError, match="handler of step 'm': pattern has changed"):
        go("model{key}.json")
    (folder / "model-5.json").write_text(json.dumps({"number": 50}))
    with pytest.raises(UsageError, match="model-5.json"):
        go()


def test_a_run_that_is_resumed_notices_keys_that_have_another_model(tmp_path):
    def go(*pairs):
        handler = ps.KeyedModelHandler([ps.KeyModelMapping(keys, Scale(number)) for keys, number in pairs])
        with ps.Pipeline(workers=0, run_dir=tmp_path / "run") as p:
            p | ps.Create([("a", 1)]) | "m" >> ps.RunInference(handler) | ps.Map(str) | ps.WriteToText(str(tmp_path / "out"))
        return p.result.was_finished

    assert not go((["a"], 1), (["b"], 2))
    assert go((["a"], 1), (["b"], 2))
    with pytest.raises(UsageError, match="handler of step 'm': keys has changed"):
        go((["a", "c"], 1), (["b"], 2))
    with pytest.raises(UsageError, match="model of 'b'.number has changed"):
        go((["a"], 1), (["b"], 3))


# With a framework.


def test_models_of_pytorch_for_keys(tmp_path):
    torch = pytest.importorskip("torch")
    from penstock.handlers.pytorch import PytorchModelHandlerTensor

    paths = []
    for number in range(2):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, number + 1)
        paths.append(str(tmp_path / f"{number}.pt"))
        torch.save(model.state_dict(), paths[-1])
    params = {"in_features": 1, "out_features": 1, "bias": False}
    handlers = [
        PytorchModelHandlerTensor(model_class=torch.nn.Linear, model_params=params, state_dict_path=path) for path in paths
    ]
    per_key = [ps.KeyModelMapping(["key1", "key2"], handlers[0]), ps.KeyModelMapping(["foo"], handlers[1])]
    rows = [("key1", torch.tensor([1.0])), ("foo", torch.tensor([1.0])), ("key2", torch.tensor([3.0]))]
    made, _ = run(WAYS["here"], rows, ps.KeyedModelHandler(per_key, max_models_per_worker_hint=1))
    assert [(key, answer.inference.item(), answer.model_id) for key, answer in made] == [
        ("key1", 1.0, paths[0]),
        ("foo", 2.0, paths[1]),
        ("key2", 3.0, paths[0]),
    ]
    folder = ps.KeyedModelHandler.from_pattern(str(tmp_path / "{key}.pt"), handlers[0])
    made, _ = run(WAYS["here"], [(n % 2, torch.tensor([1.0])) for n in range(6)], folder)
    assert [answer.inference.item() for _, answer in made] == [1.0, 2.0] * 3


# Models that crash, and models that hang: each in a process that can be killed.


class Breaks(Scale):
    def run_inference(self, batch, model, inference_args=None):
        if model["number"] == 2 and 8 in batch:
            signal.raise_signal(signal.SIGSEGV)  # in this thread, as a crash is: a signal to the process may reach another
        if model["number"] == 3 and 15 in batch:
            time.sleep(600)
        return super().run_inference(batch, model, inference_args)


def test_a_model_that_crashes_and_one_that_hangs_cost_their_own_rows():
    rows = [(f"k{n % 6}", n) for n in range(60)]
    good, bad = handled(({"workers": 2}, {}), rows, mapped(6, {"max_batch_size": 4}, Breaks), timeout=2)
    assert good == [answer for answer, row in zip(answers_of(rows), rows, strict=True) if row[1] not in (8, 15)]
    assert [(row, failure.kind) for row, failure in bad] == [(("k2", 8), "crashed"), (("k3", 15), "timed out")]


class CrashesOnce(FromFile):
    """Model 3 ends its process, once: when it is loaded, or when it is called."""

    def __init__(self, when):
        super().__init__()
        self.when = when

    def load_model(self):
        self._crash("load", super().load_model())
        return super().load_model()

    def run_inference(self, batch, model, inference_args=None):
        self._crash("call", model)
        return super().run_inference(batch, model, inference_args)

    def _crash(self, now, model):
        mark = f"{self.path}.crashed"
        if now == self.when and model["number"] == 3 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("when", ["load", "call"])
def test_a_crash_in_a_worker_costs_loads_and_no_row(folder, when):
    handler = ps.KeyedModelHandler.from_pattern(f"{folder}/model-{{key}}.json", CrashesOnce(when), 3)
    pipeline = ps.Pipeline(workers=2, progress=False)
    made = (pipeline | ps.Create([(n % 12, n) for n in range(2000)]) | ps.RunInference(handler)).collect()
    assert made == [(n % 12, n * 1000 + n % 12) for n in range(2000)]
    assert pipeline.result.worker_deaths == 1


KEPT: list = []


class Leaks(Weighs):
    def load_model(self):
        KEPT.append(bytearray(b"x") * (16 << 20))
        return super().load_model()


def test_models_that_something_keeps_are_told_of(caplog):
    handler = mapped(20, {}, Leaks, max_models_per_worker_hint=1)
    made, _ = run(WAYS["here"], rows_of(100, 20), handler)
    KEPT.clear()
    assert made == answers_of(rows_of(100, 20))
    assert caplog.text.count("something keeps the memory of models that were unloaded") == 1
    assert "With large_model=True on their handlers, models have a process of their own" in caplog.text


class Keeps(Leaks):
    """Answers are the processes."""

    def run_inference(self, batch, model, inference_args=None):
        return [os.getpid()] * len(batch)


class EightSplits(ps.Source):
    def splits(self, goal):
        return list(range(8))

    def read(self, split):
        yield [(f"k{n % 20}", n) for n in range(split * 40, split * 40 + 40)]


def test_a_worker_that_keeps_the_memory_of_models_is_replaced_and_no_row_is_lost():
    handler = mapped(20, {}, Keeps, max_models_per_worker_hint=1)
    made = (ps.Pipeline(workers=1, progress=False) | ps.Read(EightSplits()) | ps.RunInference(handler)).collect()
    assert [key for key, _ in made] == [f"k{n % 20}" for n in range(320)]
    assert len({pid for _, pid in made}) > 1


class Node:
    """A model that refers to itself."""

    def __init__(self):
        self.itself = self


NODES: weakref.WeakSet = weakref.WeakSet()


class Cyclic(Scale):
    """Answers say how many models there are in this process."""

    def accelerator(self):
        return "gpu"

    def load_model(self):
        node = Node()
        NODES.add(node)
        return node

    def run_inference(self, batch, model, inference_args=None):
        return [len(NODES)] * len(batch)


class Cuda:
    """What is used of torch.cuda."""

    def __init__(self):
        self.emptied = 0

    def is_initialized(self):
        return True

    def empty_cache(self):
        self.emptied += 1

    def device_count(self):
        return 0


@pytest.mark.parametrize("place", [{}, {"large_model": True}], ids=["here", "host"])
def test_models_on_devices_are_gone_when_the_next_is_loaded(place, monkeypatch):
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    rows = rows_of(60, 10)
    made, _ = run(WAYS["here"], rows, mapped(10, place, Cyclic, max_models_per_worker_hint=1, memory_budget="1GB"))
    assert made == [(key, 1) for key, _ in rows]
    if not place:
        assert cuda.emptied == 9, "what torch keeps for later, others can use now"


# Handlers that misbehave.


class Odd(FromFile):
    """Of one key, something else than load_model() raises."""

    def __init__(self, what, **settings):
        self.what = what
        super().__init__(**settings)

    def update_model_path(self, model_path):
        super().update_model_path(model_path)
        if self.what == "path" and "model-3" in model_path:
            raise ValueError("not this one")

    def batch_elements_kwargs(self):
        if self.what == "limits" and "model-3" in getattr(self, "path", ""):
            raise ValueError("not this one")
        return super().batch_elements_kwargs()

    def max_concurrent_batches(self):
        return 2

    def load_model(self):
        if self.what == "load" and "model-3" in self.path:
            raise SystemExit(3)
        return super().load_model()


@pytest.mark.parametrize("what", ["path", "limits", "load"])
@pytest.mark.parametrize("place", [{}, {"large_model": True}], ids=["here", "host"])
def test_whatever_a_handler_raises_for_one_key_costs_its_rows_alone(folder, what, place):
    handler = ps.KeyedModelHandler.from_pattern(f"{folder}/model-{{key}}.json", Odd(what, **place))
    rows = [(n % 5, n) for n in range(50)]
    good, bad = handled(({"workers": 0}, {}), rows, handler)
    assert good == [(key, n * 1000 + key) for key, n in rows if key != 3]
    assert [row for row, _ in bad] == [row for row in rows if row[0] == 3]
    assert {failure.kind for _, failure in bad} == {"loading"}


def test_a_key_whose_rows_all_fail_before_the_model():
    picky = Scale(1, batch_length_fn=len).with_preprocess_fn(lambda row: row[5])
    measured = ps.KeyedModelHandler(
        [ps.KeyModelMapping(["a"], picky), ps.KeyModelMapping(["b"], Texts(2, batch_length_fn=len, max_padded_cost=8))]
    )
    rows = [("a", "x"), ("b", "xx"), ("b", "xxxx"), ("a", "y")]
    good, bad = handled(WAYS["here"], rows, measured)
    assert good == [("b", 2002), ("b", 4002)]
    assert [row for row, _ in bad] == [rows[0], rows[3]]


class Texts(Scale):
    def run_inference(self, batch, model, inference_args=None):
        return [len(row) * 1000 + model["number"] for row in batch]


def test_failures_keep_the_order_of_the_rows():
    handlers = [Scale(n).with_preprocess_fn(lambda row: 1 // 0) for n in range(2)]
    handler = ps.KeyedModelHandler([ps.KeyModelMapping([f"k{n}"], each) for n, each in enumerate(handlers)])
    rows = [(f"k{n % 2}", n) for n in range(20)]
    _, bad = ps.Pipeline(workers=0) | ps.Create(rows) | ps.RunInference(handler).with_exception_handling()
    assert [row for row, _ in bad.failed_preprocessing[0].collect()] == rows


@pytest.mark.parametrize("functions", [False, True])
def test_a_misspelt_column_of_keys_leads_no_row_to_the_default(functions):
    settings = {"columns": "value", "output_column": "score"}
    handler = mapped(2, settings, key_column="custmer", default=Scale(9, **settings))
    rows = [{"customer": "k0", "value": 1}]
    if not functions:
        with pytest.raises(UsageError, match=r"there is no column 'custmer' \(key_column=\)"):
            handled(WAYS["here"], rows, handler)
        return
    good, bad = handled(WAYS["here"], rows, handler.with_postprocess_fn(lambda row: row))
    assert good == []
    assert "the row has no column 'custmer' (key_column=)" in bad[0][1].message


def test_a_handler_whose_path_is_deep_inside_is_copied_for_each_key(folder):
    class Nested(FromFile):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.config = {"path": ""}

        def update_model_path(self, model_path):
            self.config["path"] = model_path

        def load_model(self):
            time.sleep(0.01)
            with open(self.config["path"]) as file:
                return json.load(file)

        def model_id(self):
            return self.config["path"]

        def model_files(self):
            return [self.config["path"]]

    handler = ps.KeyedModelHandler.from_pattern(f"{folder}/model-{{key}}.json", Nested(large_model=True))
    rows = [(n % 12, n) for n in range(48)]
    assert run(WAYS["host"], rows, handler)[0] == [(key, n * 1000 + key) for key, n in rows]


def test_steps_share_models_of_equal_mappings():
    pipeline = ps.Pipeline(workers=0)
    rows = pipeline | ps.Create(rows_of(50, 3))
    for label in ("one", "two"):
        rows | label >> ps.RunInference(mapped(3, {}, Counted), model_identifier="shared") | f"{label} out" >> ps.Map(str)
    with pytest.raises(UsageError, match="their handlers differ"):
        rows | "three" >> ps.RunInference(mapped(4, {}, Counted), model_identifier="shared") | "out" >> ps.Map(str)
        pipeline.run()


def test_one_handler_for_two_lists_of_keys_is_one_model(counted):
    one = Counted(1)
    handler = ps.KeyedModelHandler([ps.KeyModelMapping(["a"], one), ps.KeyModelMapping(["b"], one)])
    assert run(WAYS["here"], [("a", 1), ("b", 2)], handler)[0] == [("a", 1001), ("b", 2001)]
    assert LOADS == {1: 1}


def test_answers_of_different_types_are_one_column(tmp_path):
    class Typed(Scale):
        def run_inference(self, batch, model, inference_args=None):
            return np.array(batch, ["int64", "float32"][model["number"]])

    settings = {"columns": "value", "output_column": "score"}
    rows = [{"customer": f"k{n % 2}", "value": n} for n in range(6)]
    with ps.Pipeline(workers=0) as p:
        scored = p | ps.Create(rows) | ps.RunInference(mapped(2, settings, Typed, key_column="customer"))
        scored | ps.WriteToParquet(str(tmp_path / "out"))
    assert pq.read_table(tmp_path / "out")["score"].to_pylist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.KeyedModelHandler([ps.KeyModelMapping([["a"]], Scale())]), "a list cannot be a key"),
        (lambda: ps.MaybeKeyedModelHandler.from_pattern("{key}.pt", Scale()), "a row without a key has no model of its own"),
        (lambda: ps.KeyedModelHandler([ps.KeyModelMapping(["a", "a"], Scale())]), "in two mappings, or twice in one"),
    ],
)
def test_more_wrong_calls_say_what_to_do(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_a_number_of_numpy_is_a_whole_number(folder):
    handler = ps.KeyedModelHandler.from_pattern(f"{folder}/model-{{key}}.json", FromFile())
    assert run(WAYS["here"], [(np.int64(7), 1)], handler)[0] == [(7, 1007)]
