"""Models that change while a pipeline runs: every answer is that of the model that it names, and no row is lost.

The rows go on until the last model has answered, and each model is put there when the one before it has: nothing waits for
a time to pass.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import queue
import signal
import threading
import time
import weakref
from collections import Counter
from itertools import pairwise

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import GraphError, ModelLoadError, StepError, UsageError
from penstock.handlers.huggingface import HuggingFacePipelineModelHandler
from penstock.inference import refresher
from penstock.inference.refresh import Refresh, Refreshing
from penstock.models.version_files import VersionFiles
from penstock.models.versions import ORIGINAL, Version, Wanted

PLACES = {
    "here": ({"workers": 0}, {}, {}),
    "threads": ({"workers": 0, "threads_per_worker": 3}, {}, {}),
    "workers": ({"workers": 2}, {}, {}),
    "host": ({"workers": 1, "threads_per_worker": 2}, {"large_model": True}, {}),
    "copies": ({"workers": 2}, {"model_copies": 2}, {}),
    "timeout": ({"workers": 1}, {}, {"timeout": 60}),
}
MOST = 400_000  # rows of a split, if what is waited for never comes
INTERVAL = 0.05


@pytest.fixture(params=PLACES)
def place(request):
    return PLACES[request.param]


@pytest.fixture(params=["threads", "workers", "timeout"])
def some_place(request):
    return PLACES[request.param]


@pytest.fixture(params=["threads", "workers", "host"])
def each_kind(request):
    return PLACES[request.param]


class Marks(logging.Handler):
    """Leaves a mark for each text that is logged."""

    def __init__(self, folder, *texts):
        super().__init__()
        self.folder, self.texts = str(folder), texts

    def emit(self, record):
        for text in self.texts:
            if text in record.getMessage():
                touch(self.folder, text)


@pytest.fixture
def marks(tmp_path, caplog):
    caplog.set_level("INFO")
    handler = Marks(tmp_path, "was promoted", "was rolled back", "are not seen while this lasts", "can be read again")
    logging.getLogger("penstock").addHandler(handler)
    yield
    logging.getLogger("penstock").removeHandler(handler)


class Rows(ps.Source):
    """Numbers, until a file says that it is enough."""

    def __init__(self, folder, splits=2):
        self.enough = os.path.join(folder, "enough")
        self.parts = splits

    def splits(self, goal):
        return list(range(self.parts))

    def read(self, split):
        at = 0
        while not os.path.exists(self.enough) and at < MOST:
            yield list(range(at, at + 8))
            at += 8


class Add(ps.ModelHandler):
    """A model that is a number in a file, and what else that file says of it."""

    wraps_answers = True

    def __init__(self, path, **settings):
        super().__init__(max_batch_size=8, **settings)
        self.path = path

    def update_model_path(self, model_path):
        self.path = model_path

    def model_id(self):
        return self.path

    def model_files(self):
        return [self.path]

    def load_model(self):
        folder = os.path.dirname(self.path)
        touch(folder, f"{os.path.basename(self.path)}.loading")
        with open(self.path) as file:
            model = json.load(file)
        if model.get("load kills") and touch(folder, f"killed-{model['load kills']}", once=True):
            os.kill(os.getpid(), signal.SIGKILL)
        return model

    def run_inference(self, batch, model, inference_args=None):
        folder = os.path.dirname(self.path)
        touch(folder, f"called-{model['add']}")
        if model.get("raises"):
            raise ValueError("of another shape")
        if model.get("kills"):
            os.kill(os.getpid(), signal.SIGKILL)
        return [row + model["add"] for row in batch]


class Tokens(Add):
    """Rows are prepared with what the file says; a model takes those that were prepared for it."""

    def prepare_key(self):
        return str(self.load_prepare())

    def load_prepare(self):
        with open(self.path) as file:
            return json.load(file)["tokens"]

    def prepare(self, examples, tool, inference_args=None):
        return [(example, tool) for example in examples]

    def run_inference(self, batch, model, inference_args=None):
        assert {tokens for _, tokens in batch} == {model["tokens"]}
        return super().run_inference([row for row, _ in batch], model)


def touch(folder, name, once=False):
    """Leave a mark. once: whether it was not there."""
    try:
        os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def put(folder, name, **model):
    new = os.path.join(folder, f".{name}.{os.getpid()}")
    with open(new, "w") as file:
        json.dump({"add": 1000, **model}, file)
    os.replace(new, os.path.join(folder, name))


class Then:
    """Behind the model: when the first thing has happened, the next one is done. The last is that it is enough.

    What happens: an answer of a model, by its name; or a mark that something else has left. What is done: a model is put
    there, or a function is called."""

    def __init__(self, folder, *script):
        self.folder = str(folder)
        self.script = script  # what has to happen, and the model to be put then, or None

    def __call__(self, answer):
        done = self.__dict__.setdefault("_done", 0)
        if done < len(self.script):
            event, model = self.script[done]
            is_here = os.path.basename(answer.model_id) == event if ".json" in event[-7:] else self._is_marked(event)
            if is_here or self._is_marked(f"done-{done}"):
                self._done += 1
                if touch(self.folder, f"done-{done}") and model is not None:
                    model() if callable(model) else put(self.folder, model[0], **model[1])
                if done == len(self.script) - 1:
                    touch(self.folder, "enough")
        return answer

    def _is_marked(self, name):
        return os.path.exists(os.path.join(self.folder, name))


def watch(p, folder, pattern="m*.json"):
    return p | "watch" >> ps.WatchFilePattern(os.path.join(str(folder), pattern), interval=INTERVAL)


def run(folder, place, *script, kind=Add, splits=2, first=None, **refresh):
    """All answers, and the pipeline's result."""
    options, settings, handling = place
    put(str(folder), "m1.json", **{"add": 1000, "tokens": 1, **(first or {})})
    with ps.Pipeline(**options) as p:
        rows = p | ps.Read(Rows(str(folder), splits))
        handler = kind(str(folder / "m1.json"), **settings)
        step = "score" >> ps.RunInference(handler, model_metadata_pcoll=watch(p, folder), **refresh)
        answers = (rows | step.with_exception_handling(**handling))[0] if handling else rows | step
        made = (answers | ps.Map(Then(folder, *script))).collect()
    assert p.result.counts["score"].rows_failed == 0
    return made, p.result


def check(folder, answers):
    """Every answer is that of the model that it names, for its row, in order; all of them are there."""
    numbers = {}
    for answer in answers:
        name = answer.model_id.partition("#")[0]
        if name not in numbers:
            with open(name) as file:
                numbers[name] = json.load(file)["add"]
        if "#" not in answer.model_id:
            assert answer.inference == answer.example + numbers[name]
    rows = [answer.example for answer in answers]
    starts = [at for at, row in enumerate(rows) if row == 0]
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        assert rows[start:stop] == list(range(stop - start))
    return Counter(os.path.basename(answer.model_id) for answer in answers)


# Changes.


def test_every_answer_is_that_of_the_model_that_it_names(tmp_path, place):
    script = [(f"m{n}.json", (f"m{n + 1}.json", {"add": 1000 * (n + 1)})) for n in range(1, 4)]
    answers, result = run(tmp_path, place, *script, ("m4.json", None))
    assert set(check(tmp_path, answers)) == {"m1.json", "m2.json", "m3.json", "m4.json"}
    assert result.metrics.counter("model_refreshes") == 3
    assert sum(result.metrics.answered.values()) == len(answers)


class MakesResults(Add):
    """Marks its answers by itself: with nothing, its file, the file that it was made with, or a name of its own."""

    wraps_answers = False

    def __init__(self, path, **settings):
        super().__init__(path, **settings)
        self.first = path

    def run_inference(self, batch, model, inference_args=None):
        answers = super().run_inference(batch, model)
        marks = [None, self.path, self.first, "half of it"]
        return [ps.PredictionResult(row, answer, marks[row % 4]) for row, answer in zip(batch, answers, strict=True)]


def test_answers_that_a_handler_marks_by_itself_name_the_version_that_gave_them(tmp_path, some_place):
    script = [("m1.json", ("m2.json", {"add": 2000})), ("m2.json", ("m2.json", {"add": 3000})), ("called-3000", None)]
    answers, _ = run(tmp_path, some_place, *script, kind=MakesResults)
    names = {1000: "m1.json", 2000: "m2.json", 3000: "m2.json#2"}
    for answer in answers:
        name = names[answer.inference - answer.example]
        own = answer.example % 4 == 3
        assert answer.model_id == ("half of it" if own else str(tmp_path / name)), answer
    assert {answer.inference - answer.example for answer in answers} == set(names)


class LoadsLong(Add):
    """The load of m2 ends when m3 is there."""

    def load_model(self):
        model = super().load_model()
        began = time.monotonic()
        while self.path.endswith("m2.json") and not os.path.exists(os.path.join(os.path.dirname(self.path), "m3.json")):
            assert time.monotonic() - began < 20
            threading.Event().wait(0.02)
        return model


def test_a_model_that_comes_while_the_one_before_it_is_loaded(tmp_path, each_kind):
    script = [("m1.json", ("m2.json", {"add": 2000})), ("m2.json.loading", ("m3.json", {"add": 3000})), ("m3.json", None)]
    answers, result = run(tmp_path, each_kind, *script, kind=LoadsLong)
    assert {"m1.json", "m3.json"} <= set(check(tmp_path, answers)) <= {"m1.json", "m2.json", "m3.json"}
    assert result.metrics.counter("model_refreshes_refused") == 0


class Plain(Add):
    """Leaves no marks beside its file."""

    def load_model(self):
        with open(self.path) as file:
            return json.load(file)

    def run_inference(self, batch, model, inference_args=None):
        return [row + model["add"] for row in batch]


def test_a_watched_folder_that_vanishes_and_comes_back(tmp_path, each_kind, marks):
    options, settings, _ = each_kind
    new, away = str(tmp_path / "new"), str(tmp_path / "away")
    os.mkdir(new)
    put(str(tmp_path), "m1.json")
    script = [
        ("m1.json", lambda: put(new, "m2.json", add=2000)),
        ("m2.json", lambda: os.rename(new, away)),
        ("are not seen while this lasts", lambda: os.rename(away, new)),
        ("can be read again", lambda: put(new, "m3.json", add=3000)),
        ("m3.json", None),
    ]
    with ps.Pipeline(**options) as p:
        inference = ps.RunInference(Plain(str(tmp_path / "m1.json"), **settings), model_metadata_pcoll=watch(p, new))
        answers = (p | ps.Read(Rows(str(tmp_path))) | inference | ps.Map(Then(tmp_path, *script))).collect()
    assert set(check(tmp_path, answers)) == {"m1.json", "m2.json", "m3.json"}
    assert p.result.metrics.counter("model_refreshes") == 2


def write_slowly(path):
    """For several looks, there is a part of a model."""

    def write():
        with open(path, "w") as file:
            for part in ["{", *[" "] * 30, '"add": 2000', "}"]:
                file.write(part)
                file.flush()
                threading.Event().wait(0.02)

    threading.Thread(target=write).start()


def test_a_file_that_is_written_while_it_is_looked_at_is_taken_when_it_is_whole(tmp_path):
    def write():
        write_slowly(str(tmp_path / "m2.json"))

    answers, result = run(tmp_path, PLACES["workers"], ("m1.json", write), ("m2.json", None))
    assert set(check(tmp_path, answers)) == {"m1.json", "m2.json"}
    assert result.metrics.counter("model_refreshes_refused") == 0  # nobody has tried a part of it


def test_files_whose_times_go_backwards_are_new_all_the_same(tmp_path):
    def older(number):
        def put_older():
            path = tmp_path / f"m{number}.json"
            put(str(tmp_path), path.name, add=1000 * number)
            os.utime(path, (1_000_000 - number, 1_000_000 - number))

        return put_older

    script = [("m1.json", older(2)), ("m2.json", older(3)), ("m3.json", None)]
    answers, _ = run(tmp_path, PLACES["workers"], *script)
    assert set(check(tmp_path, answers)) == {"m1.json", "m2.json", "m3.json"}


def test_a_link_that_is_moved_while_the_pipeline_runs_changes_the_model_and_changes_it_back(tmp_path):
    current = str(tmp_path / "current.json")

    def to(number):
        def move():
            put(str(tmp_path), f"v{number}.json", add=1000 * number)
            os.symlink(f"v{number}.json", f"{current}.new")
            os.replace(f"{current}.new", current)

        return move

    to(1)()
    script = [("current.json", to(2)), ("current.json#2", to(1)), ("current.json#3", None)]
    with ps.Pipeline(workers=2) as p:
        new = watch(p, tmp_path, "current.json")
        rows = p | ps.Read(Rows(str(tmp_path))) | ps.RunInference(Add(current), model_metadata_pcoll=new)
        answers = (rows | ps.Map(Then(tmp_path, *script))).collect()
    given = {(os.path.basename(answer.model_id), answer.inference - answer.example) for answer in answers}
    assert {("current.json", 1000), ("current.json#2", 2000), ("current.json#3", 1000)} <= given
    assert len(dict(given)) == len(given), "of one name, all answers are those of one model"


class LoadsLate(Add):
    """The second process to load the first model does that when another has its place."""

    def load_model(self):
        folder = os.path.dirname(self.path)
        began = time.monotonic()
        if not touch(folder, "is loaded", once=True) and touch(folder, "is second", once=True):
            while not os.path.exists(os.path.join(folder, "done-0")):
                assert time.monotonic() - began < 20
                threading.Event().wait(0.02)
        return super().load_model()


def test_a_worker_that_loads_late_what_was_replaced_does_not_call_it_by_the_name_of_what_was_there(tmp_path):
    def put_another():
        put(str(tmp_path), "m1.json", add=2000)

    script = [("m1.json", put_another), ("m1.json#2", None)]
    answers, _ = run(tmp_path, PLACES["workers"], *script, kind=LoadsLate)
    given = {(os.path.basename(answer.model_id), answer.inference - answer.example) for answer in answers}
    assert {("m1.json", 1000), ("m1.json#2", 2000)} <= given
    assert len(dict(given)) == len(given), "of one name, all answers are those of one model"


class Stored(Add):
    """A model in a store of fsspec's."""

    def load_model(self):
        return json.loads(fsspec.open(self.path).open().read())

    def run_inference(self, batch, model, inference_args=None):
        return [row + model["add"] for row in batch]


def test_models_in_a_store_change_while_the_pipeline_runs(tmp_path):
    store = fsspec.filesystem("memory")
    folder = f"/{tmp_path.name}"

    def upload(name, add):
        return lambda: fsspec.filesystem("memory").pipe(f"{folder}/{name}", json.dumps({"add": add}).encode())

    upload("m1.json", 1000)()
    script = [("m1.json", upload("m2.json", 2000)), ("m2.json", upload("m2.json", 3000)), ("m2.json#2", None)]
    try:
        with ps.Pipeline(workers=0) as p:
            new = p | ps.WatchFilePattern(f"memory:/{folder}/m*.json", interval=INTERVAL)
            rows = p | ps.Read(Rows(str(tmp_path)))
            inference = ps.RunInference(Stored(f"memory:/{folder}/m1.json"), model_metadata_pcoll=new)
            answers = (rows | inference | ps.Map(Then(tmp_path, *script))).collect()
    finally:
        store.rm(folder, recursive=True)
    url = f"memory:/{folder}"
    given = {(answer.model_id, answer.inference - answer.example) for answer in answers}
    assert given == {(f"{url}/m1.json", 1000), (f"{url}/m2.json", 2000), (f"{url}/m2.json#2", 3000)}


def test_the_newest_that_is_there_is_used_from_the_start(tmp_path):
    put(str(tmp_path), "m1.json", add=1)
    put(str(tmp_path), "m2.json", add=2)
    os.utime(tmp_path / "m1.json", (1, 1))
    os.utime(tmp_path / "m2.json", (2, 2))
    handler = Add(str(tmp_path / "m1.json"))
    with ps.Pipeline() as p:
        made = p | ps.Create([5]) | ps.RunInference(handler, watch_model_pattern=str(tmp_path / "m*.json"), interval=0.3)
        assert made.collect() == [ps.PredictionResult(5, 7, str(tmp_path / "m2.json"))]


def test_a_clock_that_is_set_back_does_not_stop_the_looks(tmp_path, monkeypatch):
    right = time.time
    monkeypatch.setattr(time, "time", right)  # afterwards it is that again

    def set_back():
        time.time = lambda: right() - 3600
        put(str(tmp_path), "m2.json", add=2000)

    answers, _ = run(tmp_path, PLACES["here"], ("m1.json", set_back), ("m2.json", None))
    assert set(check(tmp_path, answers)) == {"m1.json", "m2.json"}


def test_a_model_that_was_saved_just_before_the_run_is_used_from_its_start(tmp_path):
    for n in (1, 2):
        (tmp_path / f"m{n}.json").write_text(json.dumps({"add": n}))
    os.utime(tmp_path / "m1.json", (1, 1))
    with ps.Pipeline(workers=0) as p:
        handler = Add(str(tmp_path / "m1.json"))
        made = p | ps.Create([5]) | ps.RunInference(handler, watch_model_pattern=str(tmp_path / "m*.json"), interval=0.3)
        assert made.collect() == [ps.PredictionResult(5, 7, str(tmp_path / "m2.json"))]


def test_a_model_that_is_the_handlers_own_is_no_new_one(tmp_path):
    put(str(tmp_path), "m1.json", add=1)
    with ps.Pipeline(workers=0) as p:
        handler = Add(str(tmp_path / "m1.json"))
        made = p | ps.Create([5]) | ps.RunInference(handler, watch_model_pattern=str(tmp_path / "*.json"), interval=0.3)
        assert made.collect() == [ps.PredictionResult(5, 6, str(tmp_path / "m1.json"))]
    assert p.result.metrics.counter("model_refreshes") == 0


def test_versions_may_come_from_any_branch_of_the_pipeline(tmp_path):
    for n in (1, 2):
        put(str(tmp_path), f"m{n}.json", add=n)
    with ps.Pipeline(workers=0) as p:
        names = p | ps.Create(["m1", "m2"])
        metadata = names | ps.Map(lambda name: ps.ModelMetadata(str(tmp_path / f"{name}.json"), name))
        made = p | "rows" >> ps.Create([5]) | ps.RunInference(Add("none"), model_metadata_pcoll=metadata)
        assert [answer.inference for answer in made.collect()] == [7]


class Silent:
    """At its second look it gives no answer until the file is there."""

    def __init__(self, enough):
        self.enough, self.looks = enough, 0

    def look(self):
        self.looks += 1
        began = time.monotonic()
        while self.looks > 1 and not os.path.exists(self.enough):
            assert time.monotonic() - began < 20, "another step waits for this look"
            threading.Event().wait(0.05)
        return []

    def describe(self):
        return "a store that does not answer"


def test_a_store_that_does_not_answer_holds_up_no_other_step(tmp_path):
    put(str(tmp_path), "m1.json")
    with ps.Pipeline(workers=0) as p:
        silent = p | ps.WatchModels(Silent(str(tmp_path / "enough")), interval=INTERVAL)
        rows = p | ps.Read(Rows(str(tmp_path)))
        first = ps.RunInference(Add(str(tmp_path / "m1.json")), model_metadata_pcoll=silent)
        second = "score" >> ps.RunInference(Add(str(tmp_path / "m1.json")), model_metadata_pcoll=watch(p, tmp_path))
        rows = rows | first | ps.Map(lambda answer: answer.example)
        script = [("m1.json", ("m2.json", {"add": 2000})), ("m2.json", None)]
        answers = (rows | second | ps.Map(Then(tmp_path, *script))).collect()
    assert set(check(tmp_path, answers)) == {"m1.json", "m2.json"}


def test_a_branch_runs_again_over_what_is_new(tmp_path):
    put(str(tmp_path), "m1.json", add=1)
    script = Then(tmp_path, ("m1.json", ("m2.json", {"add": 2})), ("m2.json", None))
    with ps.Pipeline(workers=0) as p:
        found = watch(p, tmp_path, "*.json") | ps.Filter(lambda each: not each.model_id.endswith("m0.json"))
        rows = p | ps.Read(Rows(str(tmp_path)))
        made = rows | ps.RunInference(Add(str(tmp_path / "m1.json")), model_metadata_pcoll=found) | ps.Map(script)
        assert set(check(tmp_path, made.collect())) == {"m1.json", "m2.json"}


def test_a_file_that_is_replaced_gives_answers_of_another_name(tmp_path):
    script = [("m1.json", ("m1.json", {"add": 2000})), ("called-2000", None)]
    answers, result = run(tmp_path, PLACES["threads"], *script)
    found = {(answer.model_id.partition("#")[2], answer.inference - answer.example) for answer in answers}
    assert found == {("", 1000), ("2", 2000)}
    assert result.metrics.counter("model_refreshes") == 1


def test_a_pipeline_that_is_run_twice_looks_anew(tmp_path):
    put(str(tmp_path), "m1.json", add=1)
    os.utime(tmp_path / "m1.json", (1, 1))
    p = ps.Pipeline(workers=0)
    made = p | ps.Create([5]) | ps.RunInference(Add("none"), watch_model_pattern=str(tmp_path / "*.json"), interval=0.3)
    assert [made.collect()[0].inference for _ in range(2)] == [6, 6]


ALIVE: list[weakref.ref] = []


class Model(dict):
    """One that can be seen to go."""


class Held(Add):
    def load_model(self):
        model = Model(super().load_model())
        ALIVE.append(weakref.ref(model))
        return model


def alive():
    return sum(model() is not None for model in ALIVE)


class Counts(Then):
    def __call__(self, answer):
        super().__call__(answer)
        return answer, alive()


def test_the_old_model_is_freed_when_its_last_batch_is_done(tmp_path):
    ALIVE.clear()
    put(str(tmp_path), "m1.json")
    script = [*((f"m{n}.json", (f"m{n + 1}.json", {})) for n in range(1, 8)), ("m8.json", None)]
    with ps.Pipeline(workers=0) as p:
        rows = p | ps.Read(Rows(str(tmp_path)))
        inference = ps.RunInference(Held(str(tmp_path / "m1.json")), model_metadata_pcoll=watch(p, tmp_path))
        made = (rows | inference | ps.Map(Counts(tmp_path, *script))).collect()
    assert len(ALIVE) == 8
    assert max(count for _, count in made) <= 3, "in service, new, and one that is on its way out"
    gc.collect()
    assert alive() <= 1


def test_without_room_for_both_the_old_model_goes_first(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(refresher, "available_bytes", lambda: 0)
    answers, result = run(
        tmp_path, PLACES["threads"], ("m1.json", ("m2.json", {"add": 2000})), ("m2.json", None), first={"pad": "x" * 10_000}
    )
    assert set(check(tmp_path, answers)) == {"m1.json", "m2.json"}
    assert result.metrics.counter("model_refreshes") == 1
    assert "after the old one had gone: it takes about" in caplog.text, "a warning: rows have waited"


class OneAtATime(Held):
    """There is memory for one, which only a load can tell; there is not enough for m3."""

    def load_model(self):
        if alive() == 0 and self.path.endswith("m3.json"):
            touch(os.path.dirname(self.path), "m3 alone")
        if alive() or self.path.endswith("m3.json"):
            raise MemoryError("no room")
        return super().load_model()


def test_a_model_that_runs_out_of_memory_beside_the_old_one_is_loaded_when_that_has_gone(tmp_path, caplog):
    ALIVE.clear()
    script = [("m1.json", ("m2.json", {"add": 2000})), ("m2.json", ("m3.json", {"add": 3000})), ("m3 alone", None)]
    answers, result = run(tmp_path, PLACES["threads"], *script, kind=OneAtATime)
    assert set(check(tmp_path, answers)) == {"m1.json", "m2.json"}
    assert result.metrics.counter("model_refreshes") == result.metrics.counter("model_refreshes_refused") == 1
    assert "m2.json is in service: loaded in" in caplog.text
    assert "after the old one had gone: beside it, memory ran out: step 'score': OneAtATime.load_model()" in caplog.text
    assert "m3.json was refused: step 'score': OneAtATime.load_model() raised MemoryError: no room" in caplog.text


TORCH = """
class cuda:
    is_available = is_initialized = staticmethod(lambda: True)
    mem_get_info = staticmethod(lambda: ({free}, 1250))  # 0.8 of it is for models
    memory_reserved = staticmethod(lambda: {kept})
    device_count = memory_allocated = staticmethod(lambda: 0)
"""


class OnDevice(Add):
    """Takes 500 bytes there, and far more in RAM."""

    def accelerator(self):
        return "gpu"

    def model_bytes(self, model):
        return 500

    def load_model(self):
        return {**super().load_model(), "more": "x" * 4_000_000}


@pytest.mark.parametrize(
    ("free", "kept", "copies", "told"),
    [
        (1250, 0, 1, "while the old one answered"),
        (0, 1250, 1, "while the old one answered"),
        (500, 0, 1, "after the old one had gone: it takes about 500 bytes, and 400 bytes of the GPU are free"),
        (1000, 0, 2, "had gone: it takes about 500 bytes, in each of 2 processes, and 800 bytes of the GPU are free"),
    ],
    ids=["enough", "kept by torch", "too little", "too little for both copies"],
)
def test_a_model_on_a_gpu_is_compared_with_the_memory_of_the_gpu(tmp_path, monkeypatch, caplog, free, kept, copies, told):
    (tmp_path / "path" / "torch").mkdir(parents=True)
    (tmp_path / "path" / "torch" / "__init__.py").write_text(TORCH.format(free=free, kept=kept))
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    caplog.set_level("INFO")
    place = {"workers": 1}, {"large_model": True, "model_copies": copies}, {}
    answers, _ = run(tmp_path, place, ("m1.json", ("m2.json", {"add": 2000})), ("m2.json", None), kind=OnDevice)
    assert set(check(tmp_path, answers)) == {"m1.json", "m2.json"}
    assert told in caplog.text


def test_answers_of_another_width_go_to_the_same_file(tmp_path):
    class Vectors(Add):
        wraps_answers = False

        def run_inference(self, batch, model, inference_args=None):
            return np.ones((len(batch), model["add"]), dtype="float32")

    class Wide(Then):
        def __call__(self, row):
            wide = len(row["inference"])
            super().__call__(ps.PredictionResult(None, None, f"m{wide - 2}.json"))
            return row

    put(str(tmp_path), "m1.json", add=3)
    with ps.Pipeline(workers=0) as p:
        rows = p | ps.Read(Rows(str(tmp_path))) | ps.Map(lambda row: {"row": row})
        handler = Vectors(str(tmp_path / "m1.json"), columns="row", output_column="inference")
        inference = ps.RunInference(handler, model_metadata_pcoll=watch(p, tmp_path))
        script = [("m1.json", ("m2.json", {"add": 4})), ("m2.json", None)]
        rows | inference | ps.Map(Wide(tmp_path, *script)) | ps.WriteToParquet(str(tmp_path / "out"))
    table = pq.read_table(tmp_path / "out")
    ids = {3: "m1.json", 4: "m2.json"}
    for row in table.to_pylist():
        assert os.path.basename(row["inference_model_id"]) == ids[len(row["inference"])]


# Models that are no good.


def test_a_model_that_cannot_be_loaded_leaves_the_old_one_in_service(tmp_path, some_place, caplog):
    bad = ("m2.json", {"add": None, "load kills": None})
    script = [("m1.json", bad), ("called-None", ("m3.json", {"add": 3000})), ("m3.json", None)]
    answers, result = run(tmp_path, some_place, *script, kind=NoneFails)
    assert set(check(tmp_path, answers)) == {"m1.json", "m3.json"}
    assert result.metrics.counter("model_refreshes_refused") == 1
    assert "m2.json was refused: step 'score': NoneFails.load_model() raised TypeError: no number" in caplog.text


class NoneFails(Add):
    def load_model(self):
        model = super().load_model()
        if model["add"] is None:
            touch(os.path.dirname(self.path), "called-None")
            raise TypeError("no number")
        return model


def test_a_model_that_fails_its_check_is_refused(tmp_path, some_place, caplog):
    folder = str(tmp_path)

    def good(model, rows):
        touch(folder, f"checked-{model['add']}")
        return [row + model["add"] for row in rows] != [-1999]

    script = [("m1.json", ("m2.json", {"add": -2000})), ("checked--2000", ("m3.json", {"add": 3000})), ("m3.json", None)]
    answers, result = run(tmp_path, some_place, *script, validate=good, golden_rows=[1])
    assert set(check(tmp_path, answers)) == {"m1.json", "m3.json"}
    assert result.metrics.counter("model_refreshes_refused") == 1
    assert "m2.json was refused: validate= returned False" in caplog.text


def test_a_model_that_fails_for_all_its_first_rows_is_refused(tmp_path, some_place, caplog):
    bad = {"add": 2000, "raises": True}
    script = [("m1.json", ("m2.json", bad)), ("called-2000", ("m3.json", {"add": 3000})), ("m3.json", None)]
    answers, result = run(tmp_path, some_place, *script)
    assert set(check(tmp_path, answers)) == {"m1.json", "m3.json"}
    assert result.metrics.counter("model_refreshes_refused") == 1
    assert "rows of its first batch: ValueError: of another shape" in caplog.text


def test_a_model_that_takes_too_long_to_load_is_refused(tmp_path, some_place, caplog):
    options, *rest = some_place
    script = [("m1.json", ("m2.json", {"add": None})), ("called-None", ("m3.json", {"add": 3000})), ("m3.json", None)]
    answers, result = run(tmp_path, ({**options, "load_timeout": 3}, *rest), *script, kind=NeverLoads)
    assert set(check(tmp_path, answers)) == {"m1.json", "m3.json"}
    assert result.metrics.counter("model_refreshes_refused") == 1
    assert "m2.json was refused: it took longer than the 3 s that loading may take (load_timeout)" in caplog.text


class NeverLoads(Add):
    def load_model(self):
        model = super().load_model()
        began = time.monotonic()
        while model["add"] is None and not os.path.exists(os.path.join(os.path.dirname(self.path), "enough")):
            if time.monotonic() - began > 4:  # it is refused by now, and the next one may come
                touch(os.path.dirname(self.path), "called-None")
            threading.Event().wait(0.1)
        return model


@pytest.mark.parametrize("how", ["kills", "load kills"])
def test_a_model_that_kills_its_process_is_refused(tmp_path, how, caplog):
    bad = {"add": 2000, how: True}
    mark = "called-2000" if how == "kills" else "m2.json.loading"
    script = [("m1.json", ("m2.json", bad)), (mark, ("m3.json", {"add": 3000})), ("m3.json", None)]
    answers, result = run(tmp_path, PLACES["copies"], *script, kind=LoadKills)
    assert set(check(tmp_path, answers)) == {"m1.json", "m3.json"}
    assert result.metrics.counter("model_restarts") >= 1


class LoadKills(Add):
    def load_model(self):
        with open(self.path) as file:
            if json.load(file).get("load kills"):
                touch(os.path.dirname(self.path), "m2.json.loading")
                os.kill(os.getpid(), signal.SIGKILL)
        return super().load_model()


def test_a_host_that_is_killed_begins_again_with_the_newest_model(tmp_path):
    first = {"load kills": "once"}
    script = [("m1.json", ("m2.json", {"add": 2000, **first})), ("m2.json", None)]
    answers, _ = run(tmp_path, PLACES["host"], *script)
    assert set(check(tmp_path, answers)) == {"m1.json", "m2.json"}


class LoadKillsBroker(Add):
    """The first load of m2, in a process of a host, ends the broker that this is of."""

    def load_model(self):
        model = super().load_model()
        if self.path.endswith("m2.json") and touch(os.path.dirname(self.path), "killed", once=True):
            os.kill(os.getppid(), signal.SIGKILL)
            threading.Event().wait(20)  # it goes with its broker
        return model


def test_a_host_whose_broker_is_killed_while_the_model_changes_begins_again_with_the_new_one(tmp_path):
    script = [("m1.json", ("m2.json", {"add": 2000})), ("m2.json", None)]
    answers, result = run(tmp_path, PLACES["host"], *script, kind=LoadKillsBroker)
    assert set(check(tmp_path, answers)) == {"m1.json", "m2.json"}
    assert (tmp_path / "killed").exists()
    assert result.metrics.counter("model_refreshes") == 1


def test_where_no_version_can_be_loaded_the_error_is_that_of_the_handlers_own_model(tmp_path):
    (tmp_path / "m2.json").write_text("{")
    os.utime(tmp_path / "m2.json", (2, 2))
    with ps.Pipeline(workers=0) as p:
        inference = ps.RunInference(
            Add(str(tmp_path / "none.json")), watch_model_pattern=str(tmp_path / "*.json"), interval=0.3
        )
        made = p | ps.Create([1]) | inference
        with pytest.raises(ModelLoadError, match="FileNotFoundError"):
            made.collect()
    assert os.path.exists(tmp_path / "m2.json.loading"), "it was tried"


class Dies(NoneFails):
    """Once, when there is a mark that says so; what follows leaves another."""

    def run_inference(self, batch, model, inference_args=None):
        folder = os.path.dirname(self.path)
        if os.path.exists(os.path.join(folder, "die")) and touch(folder, "died", once=True):
            os.kill(os.getpid(), signal.SIGKILL)
        if os.path.exists(os.path.join(folder, "died")):
            touch(folder, "again")
        return super().run_inference(batch, model)


def test_what_was_refused_is_never_taken_for_the_model_whose_place_it_has(tmp_path):
    folder = str(tmp_path)

    def good(model, rows):
        if model["add"] < 0:
            touch(folder, "die")
        return model["add"] > 0

    script = [("m1.json", ("m1.json", {"add": -5})), ("again", None)]
    with pytest.raises(ModelLoadError, match="was replaced during the run"):
        run(tmp_path, PLACES["timeout"], *script, kind=Dies, validate=good)


def test_after_models_that_are_no_good_a_process_begins_with_the_last_that_was(tmp_path):
    class Marks(Dies):
        def load_model(self):
            with open(self.path) as file:
                if json.load(file)["add"] is None:
                    touch(os.path.dirname(self.path), f"refused-{os.path.basename(self.path)[:-5]}")
            return super().load_model()

    events = ["m1.json", *(f"refused-m{n}" for n in range(2, 6))]
    script = [(event, (f"m{n}.json", {"add": None})) for n, event in enumerate(events[:-1], 2)]
    script += [(events[-1], ("die", {})), ("again", None)]
    answers, _ = run(tmp_path, PLACES["timeout"], *script, kind=Marks)
    assert set(check(tmp_path, answers)) == {"m1.json"}


def test_a_model_of_a_key_that_was_refused_is_not_tried_whenever_that_key_comes_back(tmp_path):
    class Logs(NoneFails):
        def load_model(self):
            with open(f"{self.path}.loads", "a") as file:
                file.write("x")
            return super().load_model()

    for name, add in [("a.json", 1000), ("b.json", 1000), ("bad.json", None)]:
        put(str(tmp_path), name, add=add)
    handlers = [ps.KeyModelMapping([key], Logs(str(tmp_path / f"{key}.json"))) for key in "ab"]
    with ps.Pipeline(workers=0) as p:
        versions = p | "versions" >> ps.Create([ps.KeyModelPathMapping(["a"], str(tmp_path / "bad.json"))])
        rows = p | ps.Create([(key, row) for row in range(3) for key in "ab" for _ in range(20_000)])
        handler = ps.KeyedModelHandler(handlers, max_models_per_worker_hint=1)
        made = (rows | ps.RunInference(handler, model_metadata_pcoll=versions)).collect()
    assert {os.path.basename(answer.model_id) for _, answer in made} == {"a.json", "b.json"}
    assert len((tmp_path / "a.json.loads").read_text()) > 1
    assert len((tmp_path / "bad.json.loads").read_text()) == 1


def test_the_deadline_of_a_batch_is_not_that_of_the_load_of_the_model_before(tmp_path):
    class Slow(Add):
        def load_model(self):
            if self.path.endswith("m1.json"):
                time.sleep(1.5)  # a slow model
            return super().load_model()

    put(str(tmp_path), "m1.json", add=1000)
    put(str(tmp_path), "m2.json", add=2000, raises=True)
    os.utime(tmp_path / "m2.json", (2, 2))
    with ps.Pipeline(workers=1) as p:
        inference = ps.RunInference(
            Slow(str(tmp_path / "m1.json")), watch_model_pattern=str(tmp_path / "m2.json"), interval=0.3
        )
        good, _ = p | ps.Create(list(range(20))) | inference.with_exception_handling(timeout=0.5)
        assert [answer.inference for answer in good.collect()] == list(range(1000, 1020))
    assert p.result.metrics.counter("model_restarts") == 0


def test_rows_that_may_be_passed_to_a_model_once_are(tmp_path, caplog):
    class Once(Add):
        retry_safe = False

        def run_inference(self, batch, model, inference_args=None):
            with open(os.path.join(os.path.dirname(self.path), "seen"), "a") as file:
                file.write("".join(f"{row}\n" for row in batch))
            return super().run_inference(batch, model)

    put(str(tmp_path), "m1.json")
    script = [("m1.json", ("m2.json", {"add": 2000, "raises": True})), ("called-2000", ("m3.json", {"add": 3000}))]
    with ps.Pipeline(workers=0) as p:
        inference = ps.RunInference(Once(str(tmp_path / "m1.json")), model_metadata_pcoll=watch(p, tmp_path))
        good, bad = p | ps.Read(Rows(str(tmp_path), 1)) | inference.with_exception_handling()
        good = good | ps.Map(Then(tmp_path, *script, ("m3.json", None))) | ps.Map(lambda answer: answer.example)
        made = ([good, bad.failed_inferences | ps.Map(lambda failed: failed[0])] | ps.Flatten()).collect()
    seen = [int(row) for row in (tmp_path / "seen").read_text().split()]
    assert len(set(seen)) == len(seen)
    assert sorted(seen) == sorted(made)
    assert "m2.json was refused" in caplog.text


# Who is told.


class Told:
    """A model that is told what is wanted."""

    def __init__(self, name, then=lambda: None):
        self.name = name
        self.told = queue.Queue()
        self.then = then

    def follow(self, wanted):
        self.told.put(wanted)
        self.then()

    def tidy(self): ...


@pytest.fixture
def follower(tmp_path):
    """A thread that follows what is wanted, and what says it."""
    files = VersionFiles(str(tmp_path / "private" / "run"), "key")
    follower = refresher.Refresher(Refreshing(files.folder, "key", Refresh()))
    yield files, follower
    follower.close()


def test_what_is_said_while_a_model_is_loaded_reaches_all_of_them(follower):
    files, follower = follower
    older, newer = (Wanted((Version(n, f"m{n}", f"m{n}"), ORIGINAL)) for n in (1, 2))
    first = Told("a", lambda: files.publish({"a": newer, "b": newer}) if first.told.qsize() == 1 else None)
    files.publish({"a": older, "b": older})
    for model in (first, Told("b")):
        follower.follow(model)
    assert [first.told.get(timeout=60) for _ in range(2)] == [older, newer]


def test_a_model_that_is_loaded_during_a_canary_is_told_of_it(follower):
    files, follower = follower
    wanted = Wanted((ORIGINAL,), Version(1, "m1", "m1"), 0.1)
    files.publish({"a": wanted})
    assert follower.wanted("a") == wanted  # as whoever loads it asks
    model = Told("a")
    follower.follow(model)
    assert model.told.get(timeout=60) == wanted


# Canaries.


def test_a_canary_is_promoted_when_it_has_answered_its_rows(tmp_path, some_place):
    script = [("m1.json", ("m2.json", {"add": 2000})), ("m2.json", None)]
    answers, _ = run(tmp_path, some_place, *script, canary=0.25, canary_rows=64)
    found = check(tmp_path, answers)
    assert set(found) == {"m1.json", "m2.json"}
    assert found["m2.json"] <= 0.6 * len(answers), "a share of the rows, and some until it was decided"


def test_a_canary_that_fails_is_rolled_back_and_costs_no_row(tmp_path, some_place, caplog):
    bad = {"add": 2000, "raises": True}
    script = [("m1.json", ("m2.json", bad)), ("called-2000", ("m3.json", {"add": 3000})), ("m3.json", None)]
    answers, _ = run(tmp_path, some_place, *script, canary=0.25, canary_rows=64)
    assert set(check(tmp_path, answers)) == {"m1.json", "m3.json"}


def test_answers_that_differ_too_much_roll_a_canary_back(tmp_path, caplog):
    def near(old, new):
        return abs(old - new) < 5000

    script = [("m1.json", ("m2.json", {"add": 9000})), ("rolled back", None)]
    folder = tmp_path

    class Waits(Add):
        """Ends when the canary has been decided on: it is called no more."""

        calls = 0

        def run_inference(self, batch, model, inference_args=None):
            if os.path.exists(folder / "called-9000"):
                type(self).calls += 1
                if type(self).calls > 200 and model["add"] == 1000:
                    touch(str(folder), "rolled back")
            return super().run_inference(batch, model)

    answers, _ = run(tmp_path, PLACES["here"], *script, kind=Waits, canary=0.25, canary_rows=640, compare=near)
    assert set(check(tmp_path, answers)) == {"m1.json"}, "what is answered otherwise is answered by the old model"


# Rows that are prepared.


@pytest.mark.parametrize("place", ["threads", "workers", "copies"])
def test_rows_are_prepared_for_the_model_that_answers_them(tmp_path, place):
    script = [
        ("m1.json", ("m2.json", {"add": 2000, "tokens": 2})),
        ("m2.json", ("m3.json", {"add": 3000, "tokens": 2})),
        ("m3.json", ("m4.json", {"add": 4000, "tokens": 1})),
    ]
    answers, result = run(tmp_path, PLACES[place], *script, ("m4.json", None), kind=Tokens)
    assert set(check(tmp_path, answers)) == {"m1.json", "m2.json", "m3.json", "m4.json"}
    assert result.metrics.counter("model_refreshes_refused") == 0


def test_where_preparing_has_a_deadline_a_model_with_another_tokenizer_is_refused(tmp_path, caplog):
    script = [
        ("m1.json", ("m2.json", {"add": 2000, "tokens": 2})),
        ("key-2", ("m3.json", {"add": 3000, "tokens": 1})),
        ("m3.json", None),
    ]
    answers, _ = run(tmp_path, PLACES["timeout"], *script, kind=Replaced)
    assert set(check(tmp_path, answers)) == {"m1.json", "m3.json"}
    assert "its rows are prepared differently (prepare_key())" in caplog.text


class Replaced(Tokens):
    def prepare_key(self):
        key = super().prepare_key()
        touch(os.path.dirname(self.path), f"key-{key}")
        return key


@pytest.mark.parametrize(("place", "text"), [("threads", ""), ("timeout", "its rows are prepared differently")])
def test_a_tokenizer_that_is_replaced_in_its_place_prepares_no_rows_of_the_old_model(tmp_path, place, text, caplog):
    script = [("m1.json", ("m1.json", {"add": 2000, "tokens": 2})), ("key-2", ("m3.json", {"add": 3000, "tokens": 1}))]
    answers, _ = run(tmp_path, PLACES[place], *script, ("m3.json", None), kind=Replaced)
    found = {(os.path.basename(answer.model_id), answer.inference - answer.example) for answer in answers}
    assert {("m1.json", 1000), ("m3.json", 3000)} <= found <= {("m1.json", 1000), ("m1.json#2", 2000), ("m3.json", 3000)}
    assert text in caplog.text
    assert "AssertionError" not in caplog.text


class Restless(Tokens):
    """Says in every process something else."""

    def prepare_key(self):
        return str(os.getpid())


def test_a_key_of_preparing_that_never_fits_is_an_error(tmp_path):
    put(str(tmp_path), "m1.json", tokens=1)
    with ps.Pipeline(workers=1) as p:
        handler = Restless(str(tmp_path / "m1.json"), large_model=True)
        made = p | ps.Create([1]) | ps.RunInference(handler, model_metadata_pcoll=watch(p, tmp_path))
        with pytest.raises(StepError, match=r"prepare_key\(\) must give the same text in every process"):
            made.collect()


# A model for each key.


@pytest.mark.parametrize("place", ["here", "workers", "copies"])
def test_the_models_of_keys_change_one_by_one(tmp_path, place):
    options, settings, _ = PLACES[place]
    for name in ("a1.json", "b1.json"):
        put(str(tmp_path), name, add=1000)
    handlers = [ps.KeyModelMapping([key], Add(str(tmp_path / f"{key}1.json"), **settings)) for key in "ab"]

    def of_key(found):
        name = os.path.basename(found.model_id)
        return [ps.KeyModelPathMapping([name[0]], found.model_id)]

    script = [
        ("a1.json", ("a2.json", {"add": 2000})),
        ("a2.json", ("b2.json", {"add": 2000})),
        ("b2.json", ("a3.json", {"add": 3000})),
        ("a3.json", None),
    ]
    seen = Then(tmp_path, *script)
    with ps.Pipeline(**options) as p:
        new = watch(p, tmp_path, "[ab]*.json") | ps.Map(of_key)
        rows = p | ps.Read(Rows(str(tmp_path))) | ps.Map(lambda row: ("ab"[row % 2], row))
        inference = ps.RunInference(ps.KeyedModelHandler(handlers), model_metadata_pcoll=new)
        made = (rows | inference | ps.Map(lambda pair: (pair[0], seen(pair[1])))).collect()
    assert set(check(tmp_path, [answer for _, answer in made])) >= {"a1.json", "b1.json", "a2.json", "b2.json", "a3.json"}
    assert all(os.path.basename(answer.model_id)[0] == key for key, answer in made)


def test_the_old_models_of_keys_are_freed_when_their_last_batch_is_done(tmp_path):
    ALIVE.clear()
    for key in "ab":
        put(str(tmp_path), f"{key}1.json")
    handlers = [ps.KeyModelMapping([key], Held(str(tmp_path / f"{key}1.json"))) for key in "ab"]
    names = [f"{key}{n}.json" for n in range(1, 6) for key in "ab"]
    script = [*((name, (following, {})) for name, following in pairwise(names[1:])), (names[-1], None)]
    seen = Counts(tmp_path, *script)
    options, _, _ = PLACES["threads"]
    with ps.Pipeline(**options) as p:
        new = watch(p, tmp_path, "[ab]*.json")
        new |= ps.Map(lambda found: ps.KeyModelPathMapping([os.path.basename(found.model_id)[0]], found.model_id))
        rows = p | ps.Read(Rows(str(tmp_path))) | ps.Map(lambda row: ("ab"[row % 2], row))
        inference = ps.RunInference(ps.KeyedModelHandler(handlers), model_metadata_pcoll=new)
        made = (rows | inference | ps.Map(lambda pair: seen(pair[1]))).collect()
    assert len(ALIVE) == 10
    assert max(count for _, count in made) <= 4, "two in service, a new one, and one that is on its way out"
    gc.collect()
    assert alive() <= 2


def test_the_files_of_keys_are_watched(tmp_path):
    for key in "ab":
        put(str(tmp_path), f"{key}.json", add=1000)

    class Ends(Then):
        def __call__(self, answer):
            super().__call__(answer)
            if answer.model_id.endswith("b.json#2"):
                touch(self.folder, "enough")
            return answer

    script = Ends(tmp_path, ("a.json", ("b.json", {"add": 2000})), ("never", None))
    with ps.Pipeline(workers=0) as p:
        rows = p | ps.Read(Rows(str(tmp_path))) | ps.Map(lambda row: ("ab"[row % 2], row))
        handler = ps.KeyedModelHandler.from_pattern(str(tmp_path / "{key}.json"), Add("none"))
        inference = ps.RunInference(handler, model_metadata_pcoll=watch(p, tmp_path, "{key}.json"))
        made = (rows | inference | ps.Map(lambda pair: (pair[0], script(pair[1])))).collect()
    found = {(key, answer.inference - answer.example) for key, answer in made}
    assert found == {("a", 1000), ("b", 1000), ("b", 2000)} or found == {("a", 1000), ("b", 2000)}
    assert p.result.metrics.counter("model_refreshes") == 1


# With a journal.


def test_the_manifest_tells_which_model_answered_which_splits_and_a_resumed_run_begins_with_the_newest(tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    put(str(models), "m1.json", add=1000)
    os.utime(models / "m1.json", (1, 1))

    def fail_at(row):
        if row == 5999 and not os.path.exists(tmp_path / "mended"):
            raise ValueError("not yet")
        return row

    def attempt():
        with ps.Pipeline(workers=0, run_dir=str(tmp_path / "run")) as p:
            handler = Add(str(models / "m1.json"))
            answers = (
                p
                | ps.ReadFromText(str(tmp_path / "rows-*.txt"))
                | ps.Map(int)
                | ps.Map(fail_at)
                | "score" >> ps.RunInference(handler, watch_model_pattern=str(models / "*.json"), interval=0.3)
            )
            answers | ps.Map(lambda a: {"row": a.example, "is": a.inference}) | ps.WriteToJsonl(str(tmp_path / "out"))
        return p.result

    for part in range(2):
        (tmp_path / f"rows-{part}.txt").write_text("".join(f"{row}\n" for row in range(3000 * part, 3000 * part + 3000)))
    with pytest.raises(StepError, match="not yet"):
        attempt()
    put(str(models), "m2.json", add=2000)
    os.utime(models / "m2.json", (2, 2))
    put(str(models), "m1.json", add=-1)  # it is declared to change
    os.utime(models / "m1.json", (1, 1))
    touch(str(tmp_path), "mended")
    attempt()
    files = sorted((tmp_path / "out").glob("*.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(6000))
    added = [row["is"] - row["row"] for row in rows]
    before = added.count(1000)
    assert 0 < before < 6000
    assert added == [1000] * before + [2000] * (6000 - before)
    told = json.loads((tmp_path / "run" / "manifest.json").read_text())["model_versions"]
    first, second = told["answered"]
    assert [(os.path.basename(each["model_id"]), each["rows"]) for each in (first, second)] == [
        ("m1.json", before),
        ("m2.json", 6000 - before),
    ]
    splits = [split for _, split in [*first["splits"], *second["splits"]]]
    assert splits == list(range(len(splits)))
    assert first["splits"]
    assert second["splits"]
    assert [(event["what"], os.path.basename(event["model_id"])) for event in told["events"]] == [("in service", "m2.json")]


def test_the_manifest_and_the_counters_tell_of_canaries(tmp_path, each_kind, marks):
    options, settings, _ = each_kind
    put(str(tmp_path), "m1.json")
    script = [
        ("m1.json", ("m2.json", {"add": 2000})),
        ("was promoted", ("m3.json", {"add": 3000, "raises": True})),
        ("was rolled back", None),
    ]
    with ps.Pipeline(run_dir=str(tmp_path / "run"), **options) as p:
        inference = ps.RunInference(
            Add(str(tmp_path / "m1.json"), **settings),
            model_metadata_pcoll=watch(p, tmp_path),
            canary=0.5,
            canary_rows=16,
        )
        answers = p | ps.Read(Rows(str(tmp_path))) | "score" >> inference | ps.Map(Then(tmp_path, *script))
        answers | ps.Map(lambda a: {"row": a.example, "is": a.inference}) | ps.WriteToJsonl(str(tmp_path / "out"))
    events = json.loads((tmp_path / "run" / "manifest.json").read_text())["model_versions"]["events"]
    told = {(event["what"], os.path.basename(event["model_id"])) for event in events}
    assert told == {("promoted", "m2.json"), ("in service", "m2.json"), ("rolled back", "m3.json")}
    names = ["model_refreshes", "model_refreshes_refused", "canaries_promoted", "canaries_rolled_back"]
    assert [p.result.metrics.counter(name) for name in names] == [1, 0, 1, 1]
    assert all(" rows failed" in event["why"] for event in events if event["what"] != "in service")


# What cannot be.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"watch_model_pattern": ""}, "expected the pattern of model files"),
        ({"watch_model_pattern": "a", "model_metadata_pcoll": 1}, "not both"),
        ({"model_metadata_pcoll": ["m"]}, "expected a PCollection of ModelMetadata"),
        ({"validate": print}, "validate=...) is for a model that changes"),
        ({"canary": 0.1}, "canary=...) is for a model that changes"),
        ({"watch_model_pattern": "a", "canary": 1.5}, "canary=1.5: expected the share of rows"),
        ({"watch_model_pattern": "a", "canary": True}, "canary=True: expected the share of rows"),
        ({"watch_model_pattern": "a", "canary": 0.1, "canary_rows": 0}, "canary_rows=0: expected a whole number"),
        ({"watch_model_pattern": "a", "canary": 0.1, "max_error_rate": -1}, "max_error_rate=-1: expected the share"),
        ({"interval": 1}, "interval= is for watch_model_pattern="),
        ({"watch_model_pattern": "a", "interval": 0}, "interval=0: expected seconds, more than 0"),
        ({"watch_model_pattern": "a", "compare": print}, "compare= is for a canary"),
        ({"watch_model_pattern": "a", "golden_rows": [1]}, "golden_rows= are for validate="),
        ({"watch_model_pattern": "a", "validate": 1}, "validate="),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(settings, message):
    with pytest.raises(UsageError) as error:
        ps.RunInference(Add("m"), **settings)
    assert message in str(error.value)


def test_a_handler_that_cannot_be_told_another_path_is_refused_at_once():
    class Fixed(ps.ModelHandler): ...

    with pytest.raises(UsageError, match=r"Fixed cannot load a model from another path.*update_model_path"):
        ps.RunInference(Fixed(), watch_model_pattern="models/*")


@pytest.mark.parametrize("is_branch", [False, True])
def test_urls_for_a_handler_that_loads_folders_are_refused_when_the_pipeline_is_built(is_branch):
    handler = HuggingFacePipelineModelHandler("text-classification", model="folder")
    p = ps.Pipeline()
    rows = p | ps.Create(["text"])
    new = {"watch_model_pattern": "memory://models/*"}
    if is_branch:
        new = {"model_metadata_pcoll": p | ps.WatchFilePattern("memory://models/*")}
    with pytest.raises(UsageError, match=r"no URLs: .*'memory://models/\*'; watch a folder that is mounted"):
        rows | ps.RunInference(handler, **new)
    rows | "local" >> ps.RunInference(handler, watch_model_pattern="file:///models/*")


def test_what_watches_is_for_models_only(tmp_path):
    with ps.Pipeline() as p:
        watched = p | ps.WatchFilePattern(str(tmp_path / "*")) | ps.Map(print)
        with pytest.raises(GraphError, match=r"RunInference\(\.\.\., model_metadata_pcoll=\.\.\.\)"):
            watched.collect()


def test_a_deterministic_run_has_one_model(tmp_path):
    with ps.Pipeline(deterministic=True) as p:
        made = (
            p | ps.Create([1]) | "score" >> ps.RunInference(Add("m"), watch_model_pattern=str(tmp_path / "*"), interval=0.3)
        )
        with pytest.raises(UsageError, match=r"deterministic=True.*'score'"):
            made.collect()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("m2.json", "gave a str; expected ModelMetadata"),
        (ps.KeyModelPathMapping(["k"], "m2"), "has one model: its versions are ModelMetadata"),
    ],
)
def test_rows_that_are_no_versions_end_the_run(tmp_path, row, message):
    put(str(tmp_path), "m1.json")
    with ps.Pipeline(workers=0) as p:
        versions = p | ps.Create([row])
        made = p | "rows" >> ps.Create([1])
        made = made | ps.RunInference(Add(str(tmp_path / "m1.json")), model_metadata_pcoll=versions)
        with pytest.raises(UsageError) as error:
            made.collect()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["a"], "share their model with ['b']: name all of these keys"),
        (["c"], "of which one has no model: the handler has models for 'a', 'b'"),
    ],
)
def test_versions_for_keys_that_cannot_have_them_end_the_run(keys, message):
    handler = ps.KeyedModelHandler([ps.KeyModelMapping(["a", "b"], Add("m1"))], default=Add("m1"))
    with ps.Pipeline(workers=0) as p:
        versions = p | ps.Create([ps.KeyModelPathMapping(keys, "m2")])
        made = p | "rows" >> ps.Create([("a", 1)]) | ps.RunInference(handler, model_metadata_pcoll=versions)
        with pytest.raises(UsageError) as error:
            made.collect()
    assert message in str(error.value)


def test_an_error_in_the_branch_of_versions_ends_a_run_that_is_under_way(tmp_path):
    put(str(tmp_path), "m1.json")

    def broken(found):
        if found.model_id.endswith("m2.json"):
            raise ValueError("in the branch")
        return found

    with ps.Pipeline(workers=0, threads_per_worker=2) as p:
        found = watch(p, tmp_path) | ps.Map(broken)
        rows = p | ps.Read(Rows(str(tmp_path)))
        inference = ps.RunInference(Add(str(tmp_path / "m1.json")), model_metadata_pcoll=found)
        made = rows | inference | ps.Map(Then(tmp_path, ("m1.json", ("m2.json", {})), ("never", None)))
        with pytest.raises(StepError, match="in the branch"):
            made.collect()


def test_versions_of_another_pipeline_are_refused_at_once():
    with ps.Pipeline() as other, ps.Pipeline() as p:
        versions = other | ps.Create([ps.ModelMetadata("m2")])
        rows = p | ps.Create([1])
        with pytest.raises(GraphError, match="belongs to another pipeline"):
            rows | ps.RunInference(Add("m"), model_metadata_pcoll=versions)


def test_answers_are_compared_only_where_rows_may_be_passed_twice():
    class Once(Add):
        retry_safe = False

    with pytest.raises(UsageError, match="leave compare= out"):
        ps.RunInference(Once("m"), watch_model_pattern="m*", canary=0.1, compare=max)


def test_explain_says_that_the_model_may_change(tmp_path):
    p = ps.Pipeline()
    inference = ps.RunInference(Add("m"), watch_model_pattern="m*", validate=max, canary=0.05, canary_rows=500)
    p | ps.Create([1]) | inference | ps.Map(print)
    text = p.explain()
    assert "the model may change during the run, after a check, after 500 rows of a canary of 0.05" in text
