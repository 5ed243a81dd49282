"""Inputs that change: while they are read, between two processes, and when the user accepts it."""

from __future__ import annotations

import json
import os
import shutil
import threading

import pytest
from fsspec.implementations.local import LocalFileSystem

import penstock as ps
from penstock.errors import EngineError, InputError, MissingInputError, OutputError, RunChangedError, StepError
from penstock.io.files import list_files
from penstock.io.lines import TextSource
from penstock.journal.run_dir import RunDir
from penstock.testing import check_source

LINES = 4000  # of a file: several splits


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    for part in range(2):
        write(tmp_path, part)
    return tmp_path


def write(folder, part, lines=LINES, *, bad=None):
    rows = ["{bad" if n == bad else json.dumps({"id": f"{part}-{n}"}) for n in range(lines)]
    (folder / "in" / f"{part}.jsonl").write_text("\n".join(rows) + "\n")


def copied(folder, function=lambda row: row, **options):
    p = ps.Pipeline(run_dir=folder / "run", workers=0, **options)
    p | ps.ReadFromJsonl(folder / "in") | ps.Map(function) | ps.WriteToJsonl(folder / "out")
    return p.run()


def ids(folder, name="out"):
    paths = sorted((folder / name).glob("*.jsonl"))
    return [json.loads(line)["id"] for path in paths for line in path.read_text().splitlines()]


def swap(folder, part):
    """Another file in the place of an input, which keeps its date for when it is put back."""
    path = folder / "in" / f"{part}.jsonl"
    path.rename(folder / "kept")
    path.write_text('{"id": "other"}\n')


def put_back(folder, part):
    (folder / "kept").rename(folder / "in" / f"{part}.jsonl")


# While they are read.


@pytest.mark.parametrize("when", ["0-10", "1-10"], ids=["before it is read", "while it is read"])
def test_a_file_that_was_replaced_for_a_time_is_read_again(folder, when):
    def change(row):
        if row["id"] == when and not (folder / "swapped").exists():
            (folder / "swapped").touch()
            swap(folder, 1)
        return row

    with pytest.raises(RunChangedError, match=r"(?s)changed while the run in .*in/1\.jsonl had a size .*restore"):
        copied(folder, change)
    assert "other" not in ids(folder)
    put_back(folder, 1)
    copied(folder, change)
    assert ids(folder) == ids(folder, "in")


def test_a_file_that_was_only_touched_while_it_was_read_is_the_same(folder):
    def touch(row):
        if row["id"] == "0-10":
            for thread in threading.enumerate():
                if thread.name == "penstock-digests":
                    thread.join()
        if row["id"] == "1-10":
            os.utime(folder / "in" / "1.jsonl", (1, 1))
        return row

    copied(folder, touch)
    assert ids(folder) == ids(folder, "in")


# Accepted.


def test_a_line_is_corrected_and_the_run_goes_on(folder):
    write(folder, 1, bad=100)
    with pytest.raises(InputError) as caught:
        copied(folder)
    assert "if you change the inputs before that, with --accept-change inputs" in caught.value.__notes__[-1]
    assert ids(folder) == [f"0-{n}" for n in range(LINES)], "nothing of the second file is done"
    write(folder, 1, lines=LINES + 7)
    with pytest.raises(RunChangedError, match=r"(?s)in/1\.jsonl had a size .*others are read as they are now"):
        copied(folder)
    copied(folder, accept_changes=("inputs",))
    assert ids(folder) == ids(folder, "in")
    assert copied(folder).was_finished


def test_what_was_accepted_of_a_finished_run_is_remembered(folder):
    copied(folder)
    before = ids(folder)
    write(folder, 1, lines=LINES + 7)
    with pytest.raises(RunChangedError, match=r"in/1\.jsonl had a size"):
        copied(folder)
    assert copied(folder, accept_changes=("inputs",)).was_finished
    assert copied(folder).was_finished
    assert ids(folder) == before
    write(folder, 1, lines=LINES + 70)  # another change is another one
    with pytest.raises(RunChangedError, match=r"in/1\.jsonl had a size"):
        copied(folder)


def test_parts_of_an_interrupted_run_are_not_to_be_overwritten_by_one_without_its_folder(folder):
    write(folder, 1, bad=100)
    with pytest.raises(InputError):
        copied(folder)
    p = ps.Pipeline()
    p | ps.ReadFromJsonl(folder / "in") | ps.WriteToJsonl(folder / "out")
    with pytest.raises(OutputError, match=r"are there already.* of a run that was interrupted, resume it"):
        p.run()


def test_a_file_of_which_a_part_is_done_cannot_be_another_one(folder):
    write(folder, 0, bad=LINES - 1)
    with pytest.raises(InputError):
        copied(folder)
    before = ids(folder)
    assert 0 < len(before) < LINES
    write(folder, 0)
    with pytest.raises(RunChangedError, match=r"in/0\.jsonl has changed, .*after a part of it was done.*start over"):
        copied(folder, accept_changes=("inputs",))
    assert ids(folder) == before
    copied(folder, fresh=True)
    assert ids(folder) == ids(folder, "in")


def test_a_bad_file_that_came_later_and_went_again_leaves_no_trace(folder):
    copied(folder)
    write(folder, 2, lines=3, bad=1)
    with pytest.raises(InputError, match=r"2\.jsonl"):
        copied(folder)
    (folder / "in" / "2.jsonl").unlink()
    with pytest.raises(RunChangedError, match=r"2\.jsonl is gone"):
        copied(folder)
    assert not copied(folder, accept_changes=("inputs",)).was_finished
    assert copied(folder).was_finished
    assert ids(folder) == ids(folder, "in")
    write(folder, 2, lines=3)
    copied(folder)
    assert ids(folder) == ids(folder, "in"), "nothing of it was done, so it is new when it comes back"


def test_what_is_left_of_a_file_that_is_gone_is_dropped(folder):
    def stop(row):
        return {"id": row["id"], "n": 1 // (row["id"] != "0-2500" or (folder / "in" / "2.jsonl").exists())}

    with pytest.raises(StepError):
        copied(folder, stop)
    done = ids(folder)
    assert done
    assert set(done) < {f"0-{n}" for n in range(LINES)}
    (folder / "in" / "0.jsonl").unlink()
    write(folder, 2)
    result = copied(folder, stop, accept_changes=("inputs",))
    assert ids(folder) == [*done, *(f"{part}-{n}" for part in (1, 2) for n in range(LINES))]
    assert result.rows_out("Map(stop)") == len(ids(folder))
    assert copied(folder, stop).was_finished


def test_small_files_that_share_a_split_are_cut_anew_together(tmp_path):
    (tmp_path / "in").mkdir()
    for part in range(6):
        write(tmp_path, part, lines=3)
    with pytest.raises(StepError):
        copied(tmp_path, lambda row: 1 // 0)
    (tmp_path / "in" / "1.jsonl").unlink()
    write(tmp_path, 4, lines=5)
    copied(tmp_path, accept_changes=("inputs", "code"))
    assert ids(tmp_path) == ids(tmp_path, "in")


# What is not gone, what is not theirs.


def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(folder, monkeypatch):
    copied(folder)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalFileSystem, "ls", refuse)
    with pytest.raises(InputError, match="cannot be listed") as caught:
        list_files(str(folder / "in"))
    assert not isinstance(caught.value, MissingInputError)
    with pytest.raises(InputError, match="cannot be listed"):
        copied(folder, accept_changes=("inputs",))


def test_the_date_of_a_link_is_that_of_its_file(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    [before] = list_files(str(tmp_path / "link"))
    os.utime(tmp_path / "file", (1, 1))
    [after] = list_files(str(tmp_path / "link"))
    assert before.modified != after.modified == "1.0"


@pytest.mark.parametrize("journaled", [False, True])
def test_what_is_read_is_not_replaced(tmp_path, journaled):
    p = ps.Pipeline(workers=0)
    p | ps.Create(["a", "b"]) | ps.WriteToText(tmp_path / "data")
    p.run()
    (tmp_path / "other name").symlink_to("data")
    p = ps.Pipeline(workers=0, run_dir=tmp_path / "run" if journaled else None)
    p | ps.ReadFromText(tmp_path / "data") | ps.Map(str.upper) | ps.WriteToText(tmp_path / "other name", overwrite=True)
    with pytest.raises(OutputError, match=r"would replace 1 file\(s\) that this pipeline reads, such as .*write to another"):
        p.run()
    assert [path.read_text() for path in (tmp_path / "data").iterdir()] == ["a\nb\n"]


def test_a_finished_run_whose_model_is_gone_says_so(tmp_path):
    class Length(ps.ModelHandler):
        def model_files(self):
            return [str(tmp_path / "model")]

        def load_model(self):
            return len

        def run_inference(self, batch, model, inference_args=None):
            return [model(row) for row in batch]

    def run(**options):
        p = ps.Pipeline(run_dir=tmp_path / "run", workers=0, **options)
        p | ps.Create(["abc"]) | ps.RunInference(Length()) | ps.Map(repr) | ps.WriteToText(tmp_path / "out")
        return p.run()

    (tmp_path / "model").write_text("weights")
    run()
    (tmp_path / "model").unlink()
    with pytest.raises(RunChangedError, match=r"models: .*model is gone"):
        run()
    assert run(accept_changes=("models",)).was_finished


# The folder.


def test_a_half_made_journal_is_removed(folder):
    copied(folder)
    (folder / "run" / "journal.db.new").write_text("half")
    (folder / "run" / "journal.db.new-journal").write_text("half")
    assert copied(folder).was_finished
    assert sorted(os.listdir(folder / "run")) == ["journal.db", "lock", "manifest.json"]


def test_a_folder_whose_name_is_no_text(folder):
    name = os.fsdecode(b"run-\xff")
    with RunDir(str(folder / name)) as held:
        assert held.journal() is None
    p = ps.Pipeline(run_dir=folder / name, workers=0)
    p | ps.Create([1]) | ps.Map(str) | ps.WriteToText(folder / "out")
    p.run()
    assert sorted(os.listdir(folder / name)) == ["journal.db", "lock", "manifest.json"]


def test_a_fresh_start_after_a_damaged_journal_removes_nothing(folder):
    def stop(row):
        return {"id": row["id"], "n": 1 // (row["id"] != "1-1000")}

    p = ps.Pipeline(run_dir=folder / "run", workers=0)
    p | ps.ReadFromJsonl(folder / "in") | ps.Map(stop) | ps.WriteToJsonl(folder / "out", overwrite=True)
    (folder / "out").mkdir()
    (folder / "out" / "part-00000.jsonl").write_text('{"id": "old"}\n')
    with pytest.raises(StepError):
        p.run()
    [aside] = (folder / "out").glob(".penstock-*")
    held_back = sorted(os.listdir(aside))
    assert held_back
    (folder / "run" / "journal.db").write_bytes(b"no journal" * 1000)
    p = ps.Pipeline(run_dir=folder / "run", workers=0, fresh=True)
    p | ps.ReadFromJsonl(folder / "in") | ps.Map(lambda row: row) | ps.WriteToJsonl(folder / "out", overwrite=True)
    with pytest.raises(EngineError, match=r"is damaged.*folders named \.penstock-\* in its output"):
        p.run()
    assert sorted(os.listdir(aside)) == held_back
    assert ids(folder) == ["old"]


def test_splits_of_a_run_with_a_journal_are_small(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"n": range(100_000)}), tmp_path / "rows.parquet")

    def splits(**options):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        p = ps.Pipeline(workers=2, **options)
        p | ps.ReadFromParquet(tmp_path / "rows.parquet") | ps.Map(lambda row: row) | ps.WriteToParquet(tmp_path / "out")
        return p.run().splits

    assert splits() == 16
    assert splits(run_dir=tmp_path / "run") == 128


def test_paths_that_a_source_does_not_have_are_found(tmp_path):
    class Wrong(TextSource):
        def paths_of(self, split):
            return {"elsewhere"}

    (tmp_path / "a").write_text("x\n")
    with pytest.raises(AssertionError, match="paths_of"):
        check_source(Wrong(str(tmp_path / "a")))
