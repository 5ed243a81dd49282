"""Corners where rows, files or processes once went wrong, on every way of running where that matters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest

import penstock as ps
from penstock.blocks import byte_size, size_of
from penstock.errors import AccountingError, OutputError, StepError, UsageError
from penstock.io.jsonl import JsonlSink, JsonlWriter
from penstock.io.parquet_writing import ParquetSink, ParquetWriter
from penstock.observe.result import StepCount
from penstock.run.accounting import check_counts
from penstock.transport.interpreters import describe_exit


class Buffers(ps.DoFn):
    def start_bundle(self):
        self.rows = []

    def process(self, element):
        self.rows.append(element)

    def finish_bundle(self):
        return self.rows


def test_one_dofn_object_in_two_steps_is_two_copies(pipeline):
    p = pipeline()
    rows = p | ps.Create(range(6))
    shared = Buffers()
    a, b = rows | "a" >> ps.ParDo(shared), rows | "b" >> ps.ParDo(shared)
    both = (rows | ps.Map(abs), rows | ps.Map(abs)) | ps.Flatten() | "c" >> ps.ParDo(shared)
    assert sorted(((a, b) | ps.Flatten()).collect()) == sorted([*range(6)] * 2)
    assert sorted(both.collect()) == sorted([*range(6)] * 2)


def test_a_retry_sees_the_rows_as_they_were(pipeline, tmp_path):
    def bump(row):
        row["n"] += 1
        return row

    def fails_once(row):
        if not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise RuntimeError("once")
        return row

    rows = pipeline(bundle_attempts=3) | ps.Create([{"n": 0}]) | ps.Reshuffle() | ps.Map(bump) | ps.Map(fails_once)
    assert rows.collect() == [{"n": 1}]


def test_columns_of_all_rows_make_the_table(pipeline):
    rows = pipeline() | ps.Create([{"a": 1}, {"a": 2, "b": 3}])
    made = rows | ps.MapBatches(lambda table: table, format="arrow")
    assert made.collect()[-1] == {"a": 2, "b": 3}


def test_a_frame_is_not_rows():
    with pytest.raises(UsageError, match="to_dict"):
        ps.Create(pd.DataFrame({"a": [1]}))
    assert (ps.Pipeline() | ps.Create(np.arange(3))).collect() == [0, 1, 2]


def test_a_filter_without_a_truth_value_names_its_row(pipeline):
    rows = pipeline() | ps.Create([np.array([1, 2])]) | "f" >> ps.Filter(lambda a: a > 0)
    with pytest.raises(StepError, match="step 'f': ValueError"):
        rows.collect()


@pytest.mark.parametrize("step", [ps.Map, ps.FlatMap, ps.Filter, ps.ParDo])
def test_sys_exit_in_a_step_names_it(pipeline, step):
    rows = pipeline() | ps.Create([1]) | "s" >> step(lambda x: sys.exit(3))
    with pytest.raises(StepError, match="step 's': SystemExit: 3\n  row: 1"):
        rows.collect()


def test_a_row_is_blamed_on_its_own_step_when_models_are_shared(pipeline):
    p = pipeline()
    rows = p | ps.Create([1, 2])
    good = rows | "good" >> ps.RunInference(Inverts(), model_identifier="m")
    bad = good | ps.Map(lambda x: 0) | "bad" >> ps.RunInference(Inverts(), model_identifier="m")
    with pytest.raises(StepError, match="step 'bad': ZeroDivisionError"):
        bad.collect()


class Inverts(ps.ModelHandler):
    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        return [1 / row for row in batch]


def test_blocks_of_a_source_may_be_tuples(pipeline):
    class Pairs(ps.Source):
        def splits(self, goal):
            return [0, 1]

        def read(self, split):
            yield (split, split + 10)

    assert (pipeline() | ps.Read(Pairs()) | ps.Map(str)).collect() == ["0", "10", "1", "11"]

    class Wrong(Pairs):
        def read(self, split):
            yield 5

    with pytest.raises(StepError, match="yielded int; expected a list of rows"):
        (pipeline() | ps.Read(Wrong())).collect()


def test_a_source_without_splits(pipeline, tmp_path):
    p = pipeline()
    p | ps.Create([]) | "nothing" >> ps.Map(str) | ps.WriteToText(str(tmp_path / "out"))
    assert p.run().rows_out("nothing") == 0


@pytest.mark.parametrize("broken", ["first teardown", "second setup"])
def test_every_step_that_was_set_up_is_torn_down(broken, tmp_path):
    class First(ps.DoFn):
        def process(self, element):
            return [element]

        def teardown(self):
            (tmp_path / "first").touch()
            if broken == "first teardown":
                raise RuntimeError("too late")

    class Second(First):
        def setup(self):
            if broken == "second setup":
                raise RuntimeError("too early")

        def teardown(self):
            (tmp_path / "second").touch()

    rows = ps.Pipeline(workers=0) | ps.Create([1]) | ps.ParDo(First()) | ps.ParDo(Second())
    if broken == "second setup":
        with pytest.raises(StepError, match="too early"):
            rows.collect()
    else:
        assert rows.collect() == [1]
    assert (tmp_path / "first").exists()
    assert (tmp_path / "second").exists() == (broken == "first teardown")


# Sinks.


class Renames(ps.Sink):
    """Its publish() does what the test says, at one of its parts."""

    def __init__(self, folder, at, act):
        self.folder, self.at, self.act = folder, at, act

    def open(self, part):
        return Parts(part.name)

    def publish(self, token):
        (self.folder / token).touch()
        if len(list(self.folder.iterdir())) == self.at:
            self.act()

    def finish(self, run, published):
        (self.folder.parent / f"finished-{published}").touch()


class Parts(ps.Writer):
    def __init__(self, name):
        self.name = name

    def write(self, block):
        pass

    def close(self):
        return self.name


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def fail():
    raise OSError(5, "Input/output error")


def test_ctrl_c_while_publishing_waits_for_the_end(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    p = ps.Pipeline(workers=0)
    p | ps.Create(range(8000)) | ps.Write(Renames(out, 2, interrupt))
    with pytest.raises(KeyboardInterrupt):
        p.run()
    assert len(list(out.iterdir())) == 8
    assert (tmp_path / "finished-True").exists()


class Interrupted(Renames):
    """A sink whose clean-up is interrupted, again and again."""

    def finish(self, run, published):
        interrupt()
        interrupt()
        super().finish(run, published)


def test_ctrl_c_again_does_not_interrupt_the_clean_up(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    p = ps.Pipeline(workers=0)
    p | ps.Create(range(8000)) | ps.Map(lambda row: interrupt()) | ps.Write(Interrupted(out, 0, interrupt))
    with pytest.raises(KeyboardInterrupt):
        p.run()
    assert (tmp_path / "finished-False").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_trouble_while_publishing_keeps_what_is_aside(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    p = ps.Pipeline(workers=0)
    p | ps.Create(range(8000)) | ps.Write(Renames(out, 3, fail))
    with pytest.raises(OutputError, match="2 of 8 finished parts were published"):
        p.run()
    assert not list(tmp_path.glob("finished*"))


def test_a_finish_that_fails_hides_no_earlier_error(tmp_path):
    class Untidy(Renames):
        def finish(self, run, published):
            raise OSError("no tidying")

    p = ps.Pipeline(workers=0)
    p | ps.Create([0]) | "inv" >> ps.Map(lambda x: 1 / x) | ps.Write(Untidy(tmp_path, 1, fail))
    with pytest.raises(StepError, match="step 'inv'") as caught:
        p.run()
    assert "no tidying" in caught.value.__notes__[-1]


def test_two_runs_into_one_folder_do_not_replace_each_other(tmp_path):
    slow = ps.Pipeline(workers=0)
    slow | ps.Create(["slow"]) | ps.Map(lambda x: x) | ps.WriteToText(str(tmp_path / "out"))
    sink = next(node for node in slow.graph().nodes if hasattr(node.transform, "sink")).transform.sink
    sink.prepare("other")
    with ps.Pipeline(workers=0) as p:
        p | ps.Create(["quick"]) | ps.WriteToText(str(tmp_path / "out"))
    writer = sink.open(ps.Part(run="other", name="00000", attempt=1))
    writer.write(["slow"])
    with pytest.raises(OutputError, match="written by another run"):
        sink.publish(writer.close())
    assert (tmp_path / "out" / "part-00000.txt").read_text() == "quick\n"


# Sizes, counts and ends.


@dataclass
class Plain:
    data: bytes


@dataclass(slots=True)
class Slotted:
    data: bytes


def test_the_size_of_objects_is_that_of_what_they_hold():
    assert size_of(Plain(b"x" * 10_000)) > 10_000
    assert size_of(Slotted(b"x" * 10_000)) > 10_000
    assert byte_size([Plain(b"x" * 10_000)] * 10) > 100_000


def test_rows_that_go_missing_between_steps_are_noticed():
    p = ps.Pipeline()
    p | ps.Create([1]) | "a" >> ps.Map(str) | ps.Reshuffle() | "b" >> ps.Map(str)
    graph = p.graph()
    check_counts(graph, {"Create": StepCount(0, 5), "a": StepCount(5, 5), "b": StepCount(5, 5)})
    with pytest.raises(AccountingError, match="step 'b' was given 5 rows and took 4"):
        check_counts(graph, {"Create": StepCount(0, 5), "a": StepCount(5, 5), "b": StepCount(4, 4)})
    with pytest.raises(AccountingError, match="step 'a' took 5 rows and gave 6"):
        check_counts(graph, {"Create": StepCount(0, 5), "a": StepCount(5, 6), "b": StepCount(6, 6)})


def test_rows_that_go_missing_in_a_partition_or_behind_one_of_its_outputs_are_noticed():
    p = ps.Pipeline()
    parts = p | ps.Create([1]) | "cut" >> ps.Partition(lambda row, n: 0, 2)
    for part, name in zip(parts, "ab", strict=True):
        part | name >> ps.Map(str)
    cut = parts[0].producer.label
    counts = {
        "Create": StepCount(0, 5),
        cut: StepCount(5, 5, tags={"0": 3, "1": 2}),
        "a": StepCount(3, 3),
        "b": StepCount(2, 2),
    }
    check_counts(p.graph(), counts)
    with pytest.raises(AccountingError, match="took 5 rows and gave 4; it must give one for each"):
        check_counts(p.graph(), counts | {cut: StepCount(5, 4, tags={"0": 2, "1": 2}), "a": StepCount(2, 2)})
    with pytest.raises(AccountingError, match="step 'b' was given 2 rows and took 1"):
        check_counts(p.graph(), counts | {"b": StepCount(1, 1)})


def test_a_run_counts_the_rows_of_every_output(pipeline):
    p = pipeline()
    parts = p | ps.Create(range(10)) | ps.Partition(lambda row, n: row % 5 == 0, 2)
    good, failed = parts[0] | "divide" >> ps.Map(lambda row: 1 / (row - 1)).with_exception_handling()
    _ = parts[1] | ps.Reshuffle() | ps.Map(str), failed | ps.Map(str), good | ps.Map(str)
    result = p.run()
    assert result.counts[parts[0].producer.label].tags == {"0": 8, "1": 2}
    assert sorted(result.counts["divide"].tags.values()) == [1, 7]


class Loses(JsonlWriter):
    """A writer that leaves out the first row of each block."""

    def add(self, block):
        if len(block) > 1:
            super().add(block[1:])


class LosesColumns(ParquetWriter):
    def add(self, block):
        if len(block) > 1:
            super().add(block[1:])


class Tells(JsonlWriter):
    """A writer that says that its part is empty."""

    def close(self):
        super().close()


class LosingSink(JsonlSink):
    writer = Loses

    def open(self, part):
        return self.writer(self.places(part))


class TellingSink(LosingSink):
    writer = Tells


class LosingParquetSink(ParquetSink):
    def open(self, part):
        return LosesColumns(self.places(part), None, "zstd")


class UnpublishedSink(JsonlSink):
    """A sink that leaves one of its parts aside."""

    def publish(self, token):
        if "part-00000" not in token.final:
            super().publish(token)


@pytest.mark.parametrize("journaled", [False, True])
@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (
            lambda path: LosingSink(path, False),
            r"sink 'out' was given \d+ rows, and its part has \d+; the defect is in the writer",
        ),
        (lambda path: LosingParquetSink(path, False, None, "zstd"), r"sink 'out' was given \d+ rows, and its part has \d+"),
        (lambda path: TellingSink(path, False), r"sink 'out' was given \d+ rows, and its part has 0"),
        (lambda path: UnpublishedSink(path, False), r"1 of \d+ published parts are missing, such as part-00000"),
    ],
)
def test_rows_that_go_missing_on_their_way_into_parts_are_noticed(pipeline, tmp_path, sink, message, journaled):
    p = pipeline(**({"run_dir": tmp_path / "run"} if journaled else {}))
    p | ps.Create([{"n": n} for n in range(20)]) | ps.Map(dict) | "out" >> ps.Write(sink(f"{tmp_path}/out"))
    with pytest.raises(ps.PenstockError, match=message):
        p.run()


def test_the_manifest_says_how_many_rows_are_in_each_part(tmp_path):
    with ps.Pipeline(workers=0, run_dir=tmp_path / "run") as p:
        p | ps.Create(range(20)) | ps.Filter(lambda row: row > 4) | ps.WriteToJsonl(tmp_path / "out")
    [output] = json.loads((tmp_path / "run" / "manifest.json").read_text())["outputs"]
    assert sum(part["rows"] for part in output["parts"]) == 15


def test_signals_without_a_name():
    assert describe_exit(-35) == "signal 35"


# The process around a run.

SCRIPT = """
import sys
import penstock as ps
rows = ps.Pipeline(workers=1) | ps.Create(range(5)) | ps.Map(lambda x: print("row", x) or x)
assert rows.collect() == list(range(5))
open("done", "w").close()
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
@pytest.mark.timeout(60)
def test_closed_streams(tmp_path, closed):
    (tmp_path / "script.py").write_text(SCRIPT)
    subprocess.run(f"{sys.executable} script.py {closed}", shell=True, cwd=tmp_path, timeout=50, capture_output=True)
    assert (tmp_path / "done").exists()


def test_modules_in_the_working_directory_do_not_disturb_workers(tmp_path):
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "json.py").write_text("raise RuntimeError('not yours')")
    (tmp_path / "script.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "../script.py"], cwd=tmp_path / "cwd", timeout=50, check=True, capture_output=True)
    assert (tmp_path / "cwd" / "done").exists()


def test_many_open_files_in_the_users_process():
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)] if _may_open(2000) else []
    try:
        assert (ps.Pipeline(workers=1) | ps.Create(range(5))).collect() == list(range(5))
    finally:
        for file in files:
            os.close(file)


def _may_open(files):
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= files


@pytest.mark.timeout(60)
def test_large_messages_both_ways_do_not_block_each_other():
    rows = [bytes(15_000) for _ in range(200)]
    p = ps.Pipeline(workers=1, threads_per_worker=20)
    assert len((p | ps.Create(rows) | ps.Map(lambda row: row)).collect()) == 200


def test_failed_runs_leave_no_threads(pipeline):
    before = threading.active_count()
    for _ in range(3):
        rows = pipeline() | ps.Create(range(100)) | ps.RunInference(Inverts(max_batch_duration_secs=0.05))
        with pytest.raises(StepError):
            rows.collect()
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.daemon:
            thread.join(2)
    assert threading.active_count() <= before


MODULE_THAT_RUNS = """
import penstock as ps

class Handler(ps.ModelHandler):
    def load_model(self):
        return 1

    def run_inference(self, batch, model, inference_args=None):
        return batch

rows = ps.Pipeline(workers=1) | ps.Create([1]) | ps.RunInference(Handler(large_model={large}))
print(rows.collect())
"""


@pytest.mark.parametrize("large", [False, True])
def test_a_module_that_runs_a_pipeline_when_it_is_imported_starts_no_endless_row_of_processes(tmp_path, large):
    (tmp_path / "running.py").write_text(MODULE_THAT_RUNS.format(large=large))
    command = [sys.executable, "-c", "import running"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "a module runs a pipeline when it is imported" in done.stderr


def test_what_one_branch_changes_the_others_do_not_see(pipeline):
    def change(row):
        row["n"] += 1
        row["seen"].append(row["n"])
        return row

    rows = pipeline() | ps.Create(range(5)) | ps.Map(lambda n: {"n": n, "seen": []})
    branches = [rows | f"branch {at}" >> ps.Map(change) for at in range(3)]
    changed, plain = [{"n": n + 1, "seen": [n + 1]} for n in range(5)], [{"n": n, "seen": []} for n in range(5)]
    assert ((*branches, rows) | ps.Flatten()).collect() == changed * 3 + plain


def test_what_is_written_is_what_was_made_whatever_another_branch_does_with_it(pipeline, tmp_path):
    p = pipeline()
    rows = p | ps.Create([1, 2]) | ps.Map(lambda n: {"n": n})
    rows | ps.Map(lambda row: row.update(n=0) or row) | ps.WriteToParquet(tmp_path / "changed")
    rows | ps.WriteToParquet(tmp_path / "out")
    p.run()
    read = ps.Pipeline(workers=0) | ps.ReadFromParquet(f"{tmp_path}/out/*.parquet")
    assert sorted(row["n"] for row in read.collect()) == [1, 2]


def fork_and_return(row, log):
    if os.fork() == 0:
        return row
    os.wait()
    with open(log, "a") as file:
        file.write(f"{row}\n")
    return row


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("settings", [{}, {"use_subprocess": True}, {"timeout": 30}], ids=["plain", "subprocess", "timeout"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["Map", "FlatMap", "ParDo", "MapBatches", "RunInference"])
def test_a_process_that_a_step_forks_and_that_returns_runs_nothing_more(tmp_path, workers, kind, settings):
    log = str(tmp_path / "log")
    step = {
        "Map": lambda: ps.Map(fork_and_return, log),
        "FlatMap": lambda: ps.FlatMap(lambda row: [fork_and_return(row, log)]),
        "ParDo": lambda: ps.ParDo(lambda row: [fork_and_return(row, log)]),
        "MapBatches": lambda: ps.MapBatches(lambda rows: [fork_and_return(rows[0], log)], batch_size=1),
        "RunInference": lambda: ps.RunInference(Forks(log)),
    }[kind]()
    rows = ps.Pipeline(workers=workers) | ps.Create(range(6))
    if settings and kind != "MapBatches":  # which has none
        rows, _ = rows | step.with_exception_handling(**settings)
    else:
        rows = rows | step
    assert rows.collect() == list(range(6))
    with open(log) as file:
        logged = sorted(file.read().split())
    assert logged == (sorted(set(logged)) if kind == "RunInference" else list("012345"))  # there, one row of each batch


class Forks(ps.ModelHandler):
    def __init__(self, log):
        super().__init__(min_batch_size=6, max_batch_size=6)
        self.log = log

    def load_model(self):
        return None

    def run_inference(self, batch, model, inference_args=None):
        fork_and_return(batch[0], self.log)
        return batch


SPAWNS = """
import multiprocessing
import penstock as ps

SCALE = 10

class Scaled:
    def __init__(self, n):
        self.n = n * SCALE

def scaled(n):
    return Scaled(n)

def work(queue):
    queue.put([row.n for row in (ps.Pipeline(workers=1) | ps.Create([1, 2]) | ps.Map(scaled)).collect()])

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=[queue])
    process.start()
    process.join()
    print(queue.get() if process.exitcode == 0 else "failed")
"""


def test_functions_of_a_script_travel_from_a_process_that_it_spawned(tmp_path):
    (tmp_path / "job.py").write_text(SPAWNS)
    ran = subprocess.run([sys.executable, tmp_path / "job.py"], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout == "[10, 20]\n", ran.stderr


ARGUMENTS = """\
import json, sys
import penstock as ps

class Flags(ps.ModelHandler):
    def load_model(self):
        return sys.argv[1:]

    def run_inference(self, batch, model, inference_args=None):
        return [[row, model] for row in batch]

got = {}
for place, workers, settings in [("here", 0, {}), ("worker", 2, {}), ("host", 2, {"large_model": True})]:
    p = ps.Pipeline(workers=workers)
    rows = p | ps.Create([1, 2]) | ps.Map(lambda row: sys.argv[1:])
    got[place] = (rows | ps.RunInference(Flags(**settings))).collect()
print(json.dumps(got))
"""


def test_a_script_has_its_arguments_in_all_its_processes(tmp_path):
    (tmp_path / "job.py").write_text(ARGUMENTS)
    command = [sys.executable, tmp_path / "job.py", "--scale", "3"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    flags = ["--scale", "3"]
    assert json.loads(ran.stdout) == dict.fromkeys(("here", "worker", "host"), [[flags, flags]] * 2)
