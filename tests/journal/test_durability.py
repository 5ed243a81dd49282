"""What must be on the disk before what: a power cut between any two steps of a run with a journal loses nothing."""

from __future__ import annotations

import os
import sys

import pytest

import penstock as ps
from penstock.journal.journal import Journal

FULL = 2  # SQLite's number for: each commit is synced


class Recorder:
    """The durable steps of a run, in their order, each with what it was done to."""

    def __init__(self, monkeypatch):
        self.steps = []
        self.parts = {}  # of each split: the tokens of its parts
        for name in ("fsync", "replace", "rename"):
            monkeypatch.setattr(os, name, getattr(self, name)(getattr(os, name)))
        for name in ("_fill", "prepare", "done"):
            monkeypatch.setattr(Journal, name, getattr(self, name.strip("_"))(getattr(Journal, name)))

    def at(self, *step):
        assert self.steps.count(step) == 1, f"{step} is there {self.steps.count(step)} times"
        return self.steps.index(step)

    def first(self, *step, after):
        """Where a step is first done after another; beyond the end if it is not."""
        return next((at for at, each in enumerate(self.steps) if at > after and each == step), len(self.steps))

    def fsync(self, sync):
        def recorded(descriptor):
            sync(descriptor)
            file = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            path = os.readlink(f"/proc/self/fd/{file}")
            self.steps.append(("sync", path) if os.path.isdir(path) else ("sync", path, os.fstat(file).st_size))

        return recorded

    def replace(self, move):
        def recorded(old, new, **options):
            move(old, new, **options)
            self.steps.append(("rename", os.fspath(old), os.fspath(new)))

        return recorded

    rename = replace

    def fill(self, fill):
        def recorded(journal, *arguments):
            assert synced_by(journal) == FULL
            fill(journal, *arguments)

        return recorded

    def prepare(self, prepare):
        def recorded(journal, splits):
            splits = list(splits)
            self.parts |= {split: [part.token for part in parts] for split, _, parts in splits}
            self.steps += [("prepare", split) for split, _, _ in splits]
            assert synced_by(journal) == FULL
            prepare(journal, splits)
            self.steps += [("prepared", split) for split, _, _ in splits]

        return recorded

    def done(self, done):
        def recorded(journal, splits):
            splits = list(splits)
            self.steps += [("done", split) for split in splits]
            assert synced_by(journal) == FULL
            done(journal, splits)

        return recorded


def synced_by(journal):
    return journal.database.query("PRAGMA synchronous")[0][0]


@pytest.mark.skipif(sys.platform != "linux", reason="the name of an open file is Linux's")
@pytest.mark.parametrize("write", [ps.WriteToJsonl, ps.WriteToParquet])
def test_each_step_is_on_the_disk_before_the_next(tmp_path, monkeypatch, write):
    (tmp_path / "in.txt").write_text("".join(f"{n}\n" for n in range(4000)))
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    recorder = Recorder(monkeypatch)
    p = ps.Pipeline(run_dir=run, workers=0)
    p | ps.ReadFromText(tmp_path / "in.txt") | ps.Map(lambda line: {"line": line}) | write(out)
    p.run()

    made = recorder.at("rename", f"{run}/journal.db.new", f"{run}/journal.db")
    assert recorder.first("sync", run, after=made) < recorder.at("prepare", min(recorder.parts)), "the journal has its name"
    assert len(recorder.parts) > 1
    for split, [part] in recorder.parts.items():
        written = recorder.at("sync", part.aside, part.bytes)
        prepare, prepared = recorder.at("prepare", split), recorder.at("prepared", split)
        moved, done = recorder.at("rename", part.aside, part.final), recorder.at("done", split)
        assert written < recorder.first("sync", os.path.dirname(part.aside), after=written) < prepare
        assert prepared < moved < recorder.first("sync", out, after=moved) < done
    parts = [part for [part] in recorder.parts.values()]
    assert {part.final for part in parts} == {f"{out}/{name}" for name in os.listdir(out)}
    assert all(os.path.getsize(part.final) == part.bytes for part in parts), "nothing was written after the sync"
