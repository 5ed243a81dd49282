"""The search for a size on a device, on simulated devices; and what it found, kept for the next run."""

from __future__ import annotations

import functools
import importlib
import json
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

import penstock as ps
from penstock.batching.batcher import Batcher
from penstock.batching.device_sizes import DeviceSizeFinder, TimedBatch
from penstock.batching.entry import Entry
from penstock.batching.full_batches import DEVICE_COST, DEVICE_ROWS, MOST_COST, Aiming
from penstock.batching.limits import FIXED_ROWS, BatchLimits
from penstock.batching.sizes import device_ladder
from penstock.inference.search_key import search_key
from penstock.models import kept_sizes

ON_DEVICE = BatchLimits(new_shapes_cost=True)
SEEDS = 5
SETTLED = 8  # batches
SWEEP = [1 << power for power in (15, 17, 18, 20)]


class Device:
    """Seconds for a batch: so many, and so many for each padded unit; more where rows are long or a shape is new."""

    def __init__(self, fixed, per_second, *, seed=0, noise=0.1, long=0.1, new=0.0, most=None):
        self.fixed, self.unit, self.long, self.new, self.most = fixed, 1 / per_second, long, new, most
        self._noise, self._random, self._shapes = noise, random.Random(seed), set()

    def costs(self, rows, length):
        """Where the shape is known."""
        return self.fixed + self.unit * rows * length * (1 + self.long * length / 512)

    def runs(self, rows, length):
        """Once."""
        first = self.new if (rows, length) not in self._shapes else 0.0
        self._shapes.add((rows, length))
        return first + self.costs(rows, length) * self._random.uniform(1 - self._noise, 1 + self._noise)


@functools.cache
def texts(seed, count=60_000):
    """Lengths as texts have them, of 77 tokens in the mean."""
    draw = random.Random(seed)
    return [min(512, max(8, round(draw.lognormvariate(4.0, 0.85)))) for _ in range(count)]


def batches(limits, lengths, aim, *, block=8192):
    """The lengths of the rows of each batch, cut for what aim() says, where rows come block by block."""
    batcher, at = Batcher(limits), 0
    while True:
        batcher.set_aim(wanted := aim())
        spans = batcher.take(0.0, flush=at >= len(lengths))
        if spans is not None:
            yield wanted, [length for span in spans for length in span.entry.lengths[span.start : span.stop]]
        elif at >= len(lengths):
            return
        else:
            part = lengths[at : at + block]
            batcher.add(Entry("rows", len(part), lengths=part), 0.0)
            at += block


def searched(device, lengths, behind=0):
    """The sizes that were aimed at, one for each batch, and the search. `behind`: so many batches were cut before the
    first of them is known."""
    aiming, aims, waiting = Aiming(ON_DEVICE, by_length=True), [], []
    for aim, taken in batches(ON_DEVICE, lengths, aiming.aim):
        aims.append(aim.cost)
        waiting.append((aim, taken))
        if len(waiting) > behind:
            learn(aiming, device, *waiting.pop(0))
    return aims, aiming


def learn(aiming, device, aim, taken):
    rows, length = len(taken), ON_DEVICE.padded_length(max(taken))
    if device.most is not None and rows * length > device.most:
        aiming.out_of_memory(rows, taken)
    else:
        aiming.ran(aim, rows, taken, 100.0, device.runs(rows, length))  # how long it took in all says nothing


@functools.cache
def shapes(seed, size):
    """Of the batches of this size."""
    limits = BatchLimits(new_shapes_cost=True, max_padded_cost=size)
    aiming, made = Aiming(limits, by_length=True), []
    for aim, taken in batches(limits, texts(seed), aiming.aim):
        made.append((len(taken), limits.padded_length(max(taken))))
        aiming.ran(aim, len(taken), taken, 1.0)
    return made


def seconds_with(device, seed, size):
    """That all batches of this size take."""
    made = shapes(seed, size)
    return sum(device.costs(*shape) for shape in made) + device.new * len(set(made))


DEVICES = {
    "flat": {"fixed": 0.0005, "per_second": 1.84e6},
    "flat, long rows are slow": {"fixed": 0.0005, "per_second": 1.84e6, "long": 0.5},
    "large fixed cost": {"fixed": 0.020, "per_second": 1.6e6},
    "small": {"fixed": 0.003, "per_second": 2e5},
    "slow": {"fixed": 0.003, "per_second": 5e4},
    "new shapes": {"fixed": 0.012, "per_second": 2.5e6, "new": 0.04},
    "little memory": {"fixed": 0.020, "per_second": 1.6e6, "most": 300_000},
}


@pytest.mark.parametrize("kind", DEVICES)
def test_after_few_batches_the_size_is_near_the_best(kind):
    for seed in range(SEEDS):
        device = Device(**DEVICES[kind], seed=seed)
        aims, aiming = searched(device, texts(seed), behind=seed % 3)
        sweep = [size for size in SWEEP if size <= (device.most or MOST_COST)]
        best = min(seconds_with(device, seed, size) for size in sweep)
        settled = Counter(aims[SETTLED:]).most_common(1)[0][0]
        assert seconds_with(device, seed, settled) <= best / 0.9, (aims, aiming.explain())


def searched_rows(seconds, limits=ON_DEVICE, batches=SETTLED):
    aiming = Aiming(limits, by_length=False)
    for _ in range(batches):
        aim = aiming.aim()
        aiming.ran(aim, aim.rows, None, 100.0, seconds(aim.rows))
    return aiming


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(("fixed", "per_second"), [(0.003, 15_000), (0.0001, 15_000), (0.02, 50_000), (0.001, 100)])
def test_rows_without_lengths(fixed, per_second, noise):
    for seed in range(SEEDS):
        draw = random.Random(seed)
        settled = searched_rows(lambda rows: (fixed + rows / per_second) * draw.uniform(1 - noise, 1 + noise)).aim().rows  # noqa: B023
        rates = {rows: rows / (fixed + rows / per_second) for rows in (settled, *(1 << power for power in range(14)))}
        longest = per_second * (1 - fixed)
        assert rates[settled] >= 0.9 * max(rate for rows, rate in rates.items() if rows <= longest), settled


def test_it_begins_where_a_device_is_filled_and_goes_below_only_if_that_takes_too_long():
    assert Aiming(ON_DEVICE, by_length=False).aim().rows == DEVICE_ROWS
    assert Aiming(ON_DEVICE, by_length=True).aim().cost == DEVICE_COST
    assert searched_rows(lambda rows: rows * 1e-4).aim().rows == DEVICE_ROWS
    assert searched_rows(lambda rows: rows * 0.1).aim().rows <= 10
    assert searched_rows(lambda rows: rows, BatchLimits(new_shapes_cost=True, min_size=200)).aim().rows >= 200


def test_only_buckets_are_aimed_at():
    limits = BatchLimits(new_shapes_cost=True, size_buckets=(16, 64, 256, 1024))
    assert searched_rows(lambda rows: 0.01 + rows * 1e-4, limits).aim().rows == 1024


def test_a_size_that_does_not_fit_ends_its_trial():
    aiming = Aiming(ON_DEVICE, by_length=False)
    for _ in range(40):
        aim = aiming.aim()
        if aim.rows > 100:
            aiming.out_of_memory(aim.rows, None)
        else:
            aiming.ran(aim, aim.rows, None, 100.0, 0.01 + aim.rows * 1e-4)
    assert 70 <= aiming.aim().rows <= 100


def test_batches_without_a_device_time_are_not_compared_with_others():
    aiming = searched_rows(lambda rows: rows * 1e-4)
    for _ in range(100):
        aim = aiming.aim()
        aiming.ran(aim, aim.rows, None, 100.0)
    assert aiming.aim().rows == DEVICE_ROWS


def test_what_was_found_is_said():
    assert "too few batches" in Aiming(ON_DEVICE, by_length=True).explain()
    said = searched_rows(lambda rows: 0.002 + rows * 1e-4).explain()
    assert re.fullmatch(r"rows (\d+): a batch takes 2(\.\d+)? ms and \S+ us for each, \d\.\d% fixed", said), said


def test_a_search_begins_at_what_the_last_run_found():
    for seconds, said in [
        (lambda rows: 0.01 + rows * 1e-4, ""),
        (lambda rows: rows * 0.01, "; the last run had found 2048"),
    ]:
        aiming = Aiming(ON_DEVICE, by_length=False)
        aiming.begin_at(2048)
        assert aiming.aim().rows == 2048
        for _ in range(2 * SETTLED):
            aim = aiming.aim()
            aiming.ran(aim, aim.rows, None, 100.0, seconds(aim.rows))
        aiming.begin_at(10)  # too late
        assert aiming.aim().rows > 10
        assert aiming.explain().endswith(said or "fixed")


# What is kept.


class Pretend(ps.ModelHandler):
    """Is on a device that exists in its words only."""

    def __init__(self, fixed, unit=1e-4, **settings):
        super().__init__(**settings)
        self.fixed, self.unit = fixed, unit

    def load_model(self):
        return threading.local()

    def run_inference(self, batch, model, inference_args=None):
        TOLD.seconds = self.fixed + len(batch) * self.unit
        return [len(batch)] * len(batch)

    def new_shapes_cost(self):
        return True

    def model_id(self):
        return "pretend"

    def device_seconds(self):
        seconds, TOLD.seconds = getattr(TOLD, "seconds", None), None
        return seconds


TOLD = threading.local()
ROWS = 30_000


def run_pretend(pipeline, handler):
    p = pipeline()
    sizes = (p | ps.Create(range(ROWS)) | "m" >> ps.RunInference(handler)).collect()
    (note,) = [note for key, note in p.result.metrics.notes.items() if key.name == "batch_size_found"]
    return sizes, note


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / kept_sizes.FILE


@pytest.mark.parametrize("settings", [{}, {"large_model": True}], ids=["here", "host"])
def test_the_next_run_begins_where_the_last_one_ended(cache, settings):
    def pipeline():
        return ps.Pipeline(workers=0)

    sizes, note = run_pretend(pipeline, Pretend(0.01, **settings))
    assert sizes[0] == DEVICE_ROWS
    (kept,) = json.loads(cache.read_text()).values()
    assert kept > 8 * DEVICE_ROWS
    assert re.match(rf"rows {kept}: a batch takes (9\.9\d|10) ms and 100 us for each", note)
    sizes, note = run_pretend(pipeline, Pretend(0.01, **settings))
    assert sizes[0] == kept
    assert "last run" not in note
    sizes, _ = run_pretend(pipeline, Pretend(0.0, **settings))
    assert sizes[0] == DEVICE_ROWS, "other settings, another search"
    assert len(json.loads(cache.read_text())) == 2


@pytest.mark.parametrize("settings", [{}, {"large_model": True}], ids=["here", "host"])
def test_a_run_that_is_resumed_begins_where_its_folder_says(cache, tmp_path, settings):
    def run():
        p = ps.Pipeline(workers=0, run_dir=tmp_path / "run")
        sizes = p | ps.ReadFromText(tmp_path / "*.txt") | "m" >> ps.RunInference(Pretend(0.01, **settings))
        sizes | ps.Map(str) | ps.WriteToText(tmp_path / "out")
        p.run()
        return [int(line) for path in sorted((tmp_path / "out").iterdir()) for line in path.read_text().splitlines()]

    (tmp_path / "1.txt").write_text("x\n" * ROWS)
    assert run()[0] == DEVICE_ROWS
    (kept,) = kept_sizes.read(tmp_path / "run").values()
    assert kept > 8 * DEVICE_ROWS
    cache.unlink()
    (tmp_path / "2.txt").write_text("x\n" * ROWS)
    assert run()[ROWS] == kept


def test_one_that_differs_says_so(cache):
    handler = Pretend(0.0, 0.005)
    run_pretend(lambda: ps.Pipeline(workers=0), handler)
    (key,) = kept_sizes.read(kept_sizes.cache())
    kept_sizes.write(kept_sizes.cache(), key, 1024)
    sizes, note = run_pretend(lambda: ps.Pipeline(workers=0), handler)
    assert sizes[0] == 1024
    assert note.endswith("; the last run had found 1024")
    assert note.startswith(f"rows {kept_sizes.read(kept_sizes.cache())[key]}: ")
    assert kept_sizes.read(kept_sizes.cache())[key] <= 200


def test_fixed_batches_do_not_look(cache):
    for _ in range(2):
        p = ps.Pipeline(workers=0, deterministic=True)
        sizes = (p | ps.Create(range(ROWS)) | ps.RunInference(Pretend(0.01))).collect()
        assert sizes[0] == FIXED_ROWS
    assert not cache.exists()


@pytest.mark.parametrize("broken", ["", "[1, 2]", '{"a": ', "\x00\xff", '{"a": "many", "b": -1, "c": true}'])
def test_a_broken_file_is_ignored_and_replaced(cache, broken):
    cache.parent.mkdir()
    cache.write_text(broken)
    assert kept_sizes.read(kept_sizes.cache()) == {}
    kept_sizes.write(kept_sizes.cache(), "key", 5)
    assert kept_sizes.read(kept_sizes.cache()) == {"key": 5}
    assert [file.name for file in cache.parent.iterdir()] == [cache.name]


def test_a_folder_that_cannot_be_is_ignored(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "cache"))
    kept_sizes.write(kept_sizes.cache(), "key", 5)
    assert kept_sizes.read(kept_sizes.cache()) == {}


class Searches:
    """Of two copies: where each began, and what it has found."""

    def __init__(self, *found):
        self.begun, self.sizes = {}, found

    def begin_at(self, size, copy=0):
        self.begun[copy] = size

    def found(self, copy=0):
        return self.sizes[copy]


@pytest.mark.usefixtures("cache")
def test_copies_on_devices_of_two_kinds_keep_a_size_each():
    kept, searches = kept_sizes.KeptSize(), Searches(100, 700)
    kept.open("one kind", searches, 0)
    kept.open("another", searches, 1)
    assert kept.keep(searches)
    assert not kept.keep(searches)
    assert kept_sizes.read(kept_sizes.cache()) == {"one kind": 100, "another": 700}
    kept = kept_sizes.KeptSize()
    kept.open("another", searches, 0)
    kept.open("one kind", searches, 1)
    assert searches.begun == {0: 700, 1: 100}


@pytest.mark.usefixtures("cache")
def test_copies_on_devices_of_one_kind_keep_what_the_first_has_found():
    kept, searches = kept_sizes.KeptSize(), Searches(None, 700)
    kept.open("one kind", searches, 1)
    kept.open("one kind", searches, 0)
    assert not kept.keep(searches)
    searches.sizes = 100, 700
    assert kept.keep(searches)
    assert not kept.keep(searches)
    assert kept_sizes.read(kept_sizes.cache()) == {"one kind": 100}


def test_only_so_many_are_kept(cache):
    cache.parent.mkdir()
    cache.write_text(json.dumps({f"old {number}": 1 for number in range(kept_sizes.MOST)}))
    kept_sizes.write(kept_sizes.cache(), "old 1", 2)
    kept_sizes.write(kept_sizes.cache(), "new", 3)
    kept = kept_sizes.read(kept_sizes.cache())
    assert len(kept) == kept_sizes.MOST
    assert "old 0" not in kept
    assert list(kept.items())[-2:] == [("old 1", 2), ("new", 3)]


def test_writers_do_not_tear_the_file(cache):
    code = (
        "import sys; from penstock.models.kept_sizes import cache, write\n"
        "for n in range(200): write(cache(), sys.argv[1] + str(n), n + 1)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "abc"]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        if cache.exists():
            assert all(size >= 1 for size in json.loads(cache.read_text()).values())
            reads += 1
    assert reads
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert [file.name for file in cache.parent.iterdir()] == [cache.name]


def test_where_the_folder_is(monkeypatch):
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(kept_sizes.cache()) == "/caches/penstock"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kept_sizes.cache() == Path.home() / ".cache" / "penstock"


def test_keys_are_the_same_in_every_process():
    code = "from test_device_sizes import Pretend, search_key; print(search_key(Pretend({})))"
    made = [
        subprocess.run(
            [sys.executable, "-c", code.format(how)], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout
        for how in ("0.5", "0.5", "0.5, batch_length_fn=len", "0.7")
    ]
    assert made[0] == made[1]
    assert len(set(made)) == 3
    assert search_key(ps.ModelHandler()) is None


class OnGpu(Pretend):
    def accelerator(self):
        return "gpu"


def test_keys_differ_by_gpu_as_its_driver_names_it(tmp_path, monkeypatch):
    """Where torch is not what the model runs on."""
    monkeypatch.setattr(importlib.import_module("penstock.inference.search_key"), "GPUS", tmp_path)
    for name in ("jax._src.xla_bridge", "torch"):  # which know the GPUs of this machine
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert search_key(OnGpu(0.5)) is None
    keys = set()
    for name in ("NVIDIA H200", "NVIDIA L4"):
        (tmp_path / "0000:01:00.0").mkdir(exist_ok=True)
        (tmp_path / "0000:01:00.0" / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 40\n")
        keys.add(search_key(OnGpu(0.5)))
    assert None not in keys
    assert len(keys) == 2


@pytest.mark.parametrize("library", ["jax", "onnxruntime"])
def test_keys_differ_by_version_of_what_runs_the_model(library, monkeypatch):
    module = pytest.importorskip(library)
    before = search_key(Pretend(0.5))
    monkeypatch.setattr(module, "__version__", "0.0.1")
    assert search_key(Pretend(0.5)) not in (None, before)


def test_settings_that_cannot_be_named_cost_nothing():
    handler = Pretend(0.5)
    handler.itself = [handler.__dict__]
    assert search_key(handler) is None


def told(finder, count, amount, seconds):
    """So many batches of one size."""
    for _ in range(count):
        finder.observe(TimedBatch(amount, amount, 64, seconds), full=True)


def settled():
    """A finder at 1024 rows, on a device that takes 1 ms for a batch and 0.1 ms for a row."""
    finder = DeviceSizeFinder(device_ladder(1, 1 << 14), 1024, 64)
    for amount in [1024, 512, 2048] * 8:
        told(finder, 1, amount, 1e-3 + amount * 1e-4)
    return finder


def test_a_few_strange_batches_do_not_move_what_was_found():
    finder = settled()
    before = finder.found
    for amount in (32, 64, 128, 48):  # the rest of the rows, on a device that others use
        told(finder, 1, max(amount, before // 4), 0.5)
    assert finder.found == before


def test_a_device_that_has_become_another_moves_it():
    finder = settled()
    before = finder.found
    for amount in [before, before // 2, before * 2] * 20:
        told(finder, 1, amount, 0.1 + amount * 1e-5)
    assert finder.found > before
