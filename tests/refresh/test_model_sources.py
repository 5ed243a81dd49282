"""Where new versions of models come from: files and folders that a pattern names."""

from __future__ import annotations

import logging
import math
import os
import pickle
import time
from pathlib import Path

import fsspec
import pytest

import penstock as ps
from penstock.io.file_pattern import FilePattern, WatchFilePattern, stamp_of
from penstock.io.model_stamps import puts_whole
from penstock.io.model_versions import KeyModelPathMapping, ModelMetadata, ModelSource, WatchModels

LONG_AGO = 1_000_000_000.0


def names(source: ModelSource, later: float = 0.0) -> list[str]:
    """What a look tells, some seconds from now."""
    assert isinstance(source, FilePattern)
    found = source.look_at(time.time() + later)
    return [os.path.basename(each.model_id) for each in found]


def old(path: Path, content: str = "model", modified: float = LONG_AGO) -> Path:
    """A file that was written, by its own account, long ago, and renamed. It is whole while it is the last that came."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(".on its way")
    new.write_text(content)
    os.utime(new, (modified, modified))
    os.rename(new, path)
    return path


def rename(source: Path, target: Path) -> None:
    """Times have steps of some milliseconds: it is renamed again until they tell that this was after it was written."""
    os.rename(source, target)
    written = max(path.stat().st_mtime_ns for path in (target, *target.glob("*")))
    while target.stat().st_ctime_ns <= written:
        os.rename(target, source)
        os.rename(source, target)


def test_a_pattern_names_the_newest_file(tmp_path):
    old(tmp_path / "v1.pt", modified=LONG_AGO)
    old(tmp_path / "v2.pt", modified=LONG_AGO + 5)
    old(tmp_path / "v3.txt", modified=LONG_AGO + 9)
    source = FilePattern(tmp_path / "*.pt")
    assert isinstance(source, ModelSource)
    assert source.look() == [ModelMetadata(str(tmp_path / "v2.pt"), "v2.pt")]
    assert source.look() == []
    old(tmp_path / "v0.pt", modified=LONG_AGO - 1000)
    assert names(source) == ["v0.pt"]


def test_a_half_written_file_is_left_until_it_is_whole(tmp_path):
    old(tmp_path / "v1.pt")
    source = FilePattern(tmp_path / "*.pt")
    with open(tmp_path / "v2.pt", "w") as out:
        for _ in range(3):
            out.write("part of a model")
            out.flush()
            assert names(source) in ([], ["v1.pt"])
    assert names(source) == ["v2.pt"]
    assert names(source) == []


@pytest.mark.parametrize("how", ["mode", "owner", "link", "link for a moment"])
def test_a_half_written_file_whose_mode_owner_or_names_change_is_left_until_it_is_whole(tmp_path, how):
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "v1.pt"
    other = path.with_name("link") if how == "link" else tmp_path / "link"

    def change() -> None:
        if how == "mode":
            path.chmod(0o600)
        elif how == "owner":
            os.chown(path, os.getuid(), os.getgid())
        else:
            other.unlink(missing_ok=True)
            os.link(path, other)
            if how == "link for a moment":
                other.unlink()

    source = FilePattern(tmp_path / "models" / "*.pt")
    with open(path, "w") as out:
        for _ in range(3):
            out.write("part of a model")
            out.flush()
            while path.stat().st_ctime_ns <= path.stat().st_mtime_ns:
                change()
            assert names(source) == []
    assert names(source) == ["v1.pt"]


def test_a_file_that_was_seen_while_it_was_written_is_not_whole_when_it_is_renamed_in_its_place(tmp_path):
    source = FilePattern(tmp_path / "*.pt")
    with open(tmp_path / "v1.pt", "w") as out:
        out.write("part of")
        out.flush()
        assert names(source) == []
        out.write("a model")
        out.flush()
        os.rename(tmp_path / "v1.pt", tmp_path / "away")
        rename(tmp_path / "away", tmp_path / "v1.pt")
        assert names(source) == []
    assert names(source) == ["v1.pt"]


def test_a_half_written_file_at_the_first_look_is_not_the_newest(tmp_path):
    old(tmp_path / "one" / "v1.pt")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "v2.pt").write_text("half")
    source = FilePattern(tmp_path / "*" / "*.pt")
    assert names(source) == ["v1.pt"]
    assert names(source) == ["v2.pt"]


def test_the_first_look_waits_for_a_file_that_was_just_written_and_says_so(tmp_path, caplog):
    (tmp_path / "v1.pt").write_text("model")
    assert FilePattern(tmp_path / "*.pt", interval=1.5).look() == [ModelMetadata(str(tmp_path / "v1.pt"), "v1.pt")]
    assert ["it may not be complete" in told for told in warnings(caplog)] == [True]


def test_the_first_look_does_not_take_a_file_that_is_written_again_within_the_interval(tmp_path, monkeypatch):
    old(tmp_path / "old" / "v1.pt")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "v2.pt").write_text("half")

    def write_more(seconds: float) -> None:
        with open(tmp_path / "new" / "v2.pt", "a") as out:
            out.write(" a model")

    monkeypatch.setattr(time, "sleep", write_more)  # what happens while it waits
    source = FilePattern(tmp_path / "*" / "*.pt")
    assert [each.model_id for each in source.look()] == [str(tmp_path / "old" / "v1.pt")]
    assert names(source) == ["v2.pt"]


def test_a_file_that_was_not_touched_for_long_is_whole(tmp_path):
    (tmp_path / "v1.pt").write_text("model")
    assert names(FilePattern(tmp_path / "*.pt")) == []
    assert names(FilePattern(tmp_path / "*.pt"), later=11) == ["v1.pt"]
    assert names(FilePattern(tmp_path / "*.pt", interval=30), later=11) == []


def test_a_renamed_file_is_whole_at_once(tmp_path):
    source = FilePattern(tmp_path / "*.pt")
    assert names(source) == []
    (tmp_path / "v1.part").write_text("model")
    rename(tmp_path / "v1.part", tmp_path / "v1.pt")
    assert names(source) == ["v1.pt"]


def test_a_file_that_is_replaced_is_new_even_with_the_same_size_and_time(tmp_path):
    path = old(tmp_path / "model.pt", "one")
    source = FilePattern(path)
    before = stamp_of(str(path))
    assert names(source) == ["model.pt"]
    os.replace(old(tmp_path / "next", "two"), path)
    assert stamp_of(str(path)) != before
    assert names(source) == ["model.pt"]
    assert names(source) == []


def test_a_link_that_is_moved_is_a_change_and_so_is_its_way_back(tmp_path):
    old(tmp_path / "v1", "one")
    old(tmp_path / "v2", "two")
    link = tmp_path / "current"
    source = FilePattern(link)
    for target in ("v1", "v2", "v1"):
        os.symlink(target, tmp_path / "swap")
        os.replace(tmp_path / "swap", link)
        assert source.look_at(time.time() + 11) == [ModelMetadata(str(link), "current")]
        assert source.look_at(time.time() + 11) == []


def test_mode_and_owner_are_no_change(tmp_path):
    path = old(tmp_path / "model.pt")
    source = FilePattern(path)
    assert names(source) == ["model.pt"]
    path.chmod(0o600)
    os.link(path, tmp_path / "another")
    assert names(source) == []


def test_empty_files_and_what_is_no_file_are_not_taken(tmp_path):
    (tmp_path / "empty.pt").touch()
    (tmp_path / "folder.pt").mkdir()
    os.mkfifo(tmp_path / "pipe.pt")
    source = FilePattern(tmp_path / "*.pt")
    assert names(source, later=11) == []
    assert names(source, later=22) == []


def test_hidden_names_count_only_where_they_are_spelled_out(tmp_path):
    old(tmp_path / "a.pt")
    old(tmp_path / ".b.pt", modified=LONG_AGO + 1)
    old(tmp_path / "_c.pt", modified=LONG_AGO + 2)
    assert names(FilePattern(tmp_path / "*.pt"), later=11) == ["a.pt"]
    assert names(FilePattern(tmp_path / "_*.pt"), later=11) == ["_c.pt"]


def test_a_name_with_wildcards_in_it_is_a_name_first(tmp_path):
    old(tmp_path / "model[1].pt")
    old(tmp_path / "model1.pt", modified=LONG_AGO + 1)
    assert names(FilePattern(tmp_path / "model[1].pt"), later=11) == ["model[1].pt"]


def test_two_stars_go_through_folders(tmp_path):
    old(tmp_path / "model.pt")
    old(tmp_path / "2026" / "11" / "deep.pt", modified=LONG_AGO + 1)
    assert names(FilePattern(tmp_path / "**" / "*.pt")) == ["deep.pt"]


def test_a_folder_is_one_model(tmp_path):
    source = FilePattern(tmp_path / "v*")
    for name in ("v1", "v2"):
        old(tmp_path / name / "config.json")
        old(tmp_path / name / "weights" / "part-1.bin", modified=LONG_AGO + 5)
    assert names(source) == []
    assert names(source) == ["v2"]
    old(tmp_path / "v1" / "weights" / "part-1.bin", "changed", modified=LONG_AGO - 5)
    assert names(source) == []
    assert names(source) == ["v1"]
    os.remove(tmp_path / "v1" / "config.json")
    assert [names(source), names(source)] == [[], ["v1"]]


def test_a_folder_that_is_still_filled_is_not_taken(tmp_path):
    source = FilePattern(tmp_path / "v*")
    for number in range(3):
        old(tmp_path / "v1" / f"part-{number}.bin")
        assert names(source) == []
    old(tmp_path / "v1" / ".part-3.bin.partial")  # a copy on its way
    assert names(source) == []
    assert names(source) == ["v1"]


def test_a_folder_that_was_renamed_or_not_touched_for_long_is_whole(tmp_path):
    source = FilePattern(tmp_path / "v*")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "weights.bin").write_text("model")
    rename(tmp_path / "new", tmp_path / "v1")
    assert names(source) == ["v1"]
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2" / "weights.bin").write_text("model")
    assert names(source) == []
    assert names(FilePattern(tmp_path / "v2"), later=11) == ["v2"]


def test_a_folder_in_which_a_file_is_written_again_after_it_was_renamed(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "weights.bin").write_text("model")
    rename(tmp_path / "new", tmp_path / "v1")
    renamed = (tmp_path / "v1").stat().st_ctime_ns
    weights = tmp_path / "v1" / "weights.bin"
    while weights.stat().st_mtime_ns < renamed:  # within one step of the clock
        weights.write_text("half of the next")
    source = FilePattern(tmp_path / "v1")
    assert [names(source), names(source)] == [[], ["v1"]]


def test_a_folder_may_hold_links_also_to_itself(tmp_path):
    old(tmp_path / "blobs" / "one", "weights")
    (tmp_path / "v1").mkdir()
    os.symlink("../blobs/one", tmp_path / "v1" / "weights.bin")
    os.symlink(".", tmp_path / "v1" / "self")
    source = FilePattern(tmp_path / "v1")
    assert names(source, later=11) == ["v1"]
    old(tmp_path / "blobs" / "one", "other weights")
    assert names(source, later=11) == ["v1"]


def test_byte_code_beside_a_model_is_no_change(tmp_path):
    old(tmp_path / "v1" / "model.py")
    before = stamp_of(str(tmp_path / "v1"))
    old(tmp_path / "v1" / "__pycache__" / "model.cpython-311.pyc")
    assert stamp_of(str(tmp_path / "v1")) == before


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found


def test_a_folder_that_vanishes_and_comes_back(tmp_path, caplog):
    old(tmp_path / "models" / "v1.pt")
    source = FilePattern(tmp_path / "models" / "*.pt")
    assert names(source) == ["v1.pt"]
    os.rename(tmp_path / "models", tmp_path / "away")
    assert [names(source), names(source)] == [[], []]
    (began,) = warnings(caplog)
    assert "FileNotFoundError" in began
    assert str(tmp_path / "models") in began
    os.rename(tmp_path / "away", tmp_path / "models")
    assert [names(source), names(source)] == [[], []]
    (over,) = warnings(caplog)
    assert "can be read again" in over
    old(tmp_path / "models" / "v2.pt")
    assert names(source) == ["v2.pt"]
    assert warnings(caplog) == []


def test_a_folder_may_be_made_after_the_first_look(tmp_path, caplog):
    source = FilePattern(tmp_path / "models" / "{key}.pt")
    assert source.look() == []
    old(tmp_path / "models" / "a.pt")
    path = str(tmp_path / "models" / "a.pt")
    assert source.look() == [KeyModelPathMapping(["a"], path, path)]
    assert len(warnings(caplog)) == 2


def test_one_entry_that_cannot_be_read_does_not_hide_the_others(tmp_path, caplog):
    os.symlink("loop.pt", tmp_path / "loop.pt")
    os.symlink("nowhere", tmp_path / "dangling.pt")
    old(tmp_path / "v1.pt")
    source = FilePattern(tmp_path / "*.pt")
    assert [names(source), names(source)] == [["v1.pt"], []]
    (began,) = warnings(caplog)
    assert "and 1 more" in began
    os.remove(tmp_path / "loop.pt")
    os.remove(tmp_path / "dangling.pt")
    assert names(source) == []
    assert len(warnings(caplog)) == 1


def test_a_model_of_each_key(tmp_path):
    for key in ("a", "b", "_c"):
        old(tmp_path / f"{key}.pt")
    old(tmp_path / ".pt")
    source = FilePattern(tmp_path / "{key}.pt")
    assert [each.keys for each in source.look_at(time.time() + 11)] == [["_c"], ["a"], ["b"]]
    assert source.look() == []
    old(tmp_path / "b.pt", "changed")
    path = str(tmp_path / "b.pt")
    assert source.look() == [KeyModelPathMapping(["b"], path, path)]


def test_wildcards_beside_a_key_name_versions_of_its_model(tmp_path):
    for key in ("a", "b"):
        for number in (1, 2):
            old(tmp_path / key / f"v{number}[x].pt", modified=LONG_AGO + number)
    source = FilePattern(tmp_path / "{key}" / "v?[[]x].pt")
    assert [(each.keys, os.path.basename(each.update_path)) for each in source.look_at(time.time() + 11)] == [
        (["a"], "v2[x].pt"),
        (["b"], "v2[x].pt"),
    ]


def test_ten_thousand_keys(tmp_path):
    for number in range(10_000):
        (tmp_path / f"{number}.pt").write_bytes(b"model")
    source = FilePattern(tmp_path / "{key}.pt")
    assert len(source.look_at(time.time() + 60)) == 10_000
    old(tmp_path / "77.pt", "changed")
    assert [each.keys for each in source.look_at(time.time() + 60)] == [["77"]]


# Other stores.


@pytest.fixture
def store():
    """In memory, without what other tests have left there: it is one for the whole process."""
    memory = fsspec.filesystem("memory")
    _clear(memory)
    yield memory
    _clear(memory)


def _clear(memory):
    for path in ("/models", "/more"):
        if memory.exists(path):
            memory.rm(path, recursive=True)


def test_objects_of_a_store_are_whole_and_folders_need_two_looks(store, caplog):
    source = FilePattern("memory://models/*")
    assert source.look() == []
    assert len(warnings(caplog)) == 1
    store.pipe("/models/v1.pt", b"model")
    assert source.look() == [ModelMetadata("memory://models/v1.pt", "v1.pt")]
    assert len(warnings(caplog)) == 1
    store.pipe("/models/v2/config.json", b"{}")
    assert source.look() == []
    store.pipe("/models/v2/weights.bin", b"model")
    assert source.look() == []
    assert source.look() == [ModelMetadata("memory://models/v2", "v2")]
    store.pipe("/models/v1.pt", b"other")
    assert source.look() == [ModelMetadata("memory://models/v1.pt", "v1.pt")]
    assert source.look() == []


class SharedDisk(fsspec.get_filesystem_class("memory")):
    protocol = ("sftp", "ssh")


def test_only_some_stores_put_files_whole(store):
    assert puts_whole(store)
    assert puts_whole(fsspec.filesystem("simplecache", fs=store))
    for shared in (SharedDisk(), fsspec.filesystem("file")):
        assert not puts_whole(shared)
        assert not puts_whole(fsspec.filesystem("simplecache", fs=shared))


def test_a_model_is_reached_in_the_way_of_its_pattern(store):
    store.pipe("/models/a.pt", b"model")
    assert [each.model_id for each in FilePattern("simplecache::memory://models/*.pt").look()] == [
        "simplecache::memory://models/a.pt"
    ]


def test_keys_in_a_store(store):
    store.pipe({"/models/a.pt": b"model", "/models/b.pt": b"model", "/models/empty.pt": b""})
    source = FilePattern("memory://models/{key}.pt")
    assert {each.keys[0]: each.update_path for each in source.look()} == {
        "a": "memory://models/a.pt",
        "b": "memory://models/b.pt",
    }
    assert source.look() == []


class Unreachable(fsspec.get_filesystem_class("memory")):
    protocol = "unreachable"
    is_down = False

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.rpartition("@")[2])

    def info(self, path, **kwargs):
        if type(self).is_down:
            raise RuntimeError(f"no answer from unreachable://user:secret@host{path}")
        return super().info(path, **kwargs)


def test_a_store_that_cannot_be_reached_for_a_while(store, caplog, monkeypatch):
    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    store.pipe("/more/v1.pt", b"model")
    url = "unreachable://user:secret@more/v1.pt"
    source = FilePattern(url)
    assert source.look() == [ModelMetadata(url, "v1.pt")]
    assert stamp_of(url) != ""
    monkeypatch.setattr(Unreachable, "is_down", True)
    store.pipe("/more/v1.pt", b"next model")
    assert [source.look(), source.look(), stamp_of(url)] == [[], [], ""]
    (began,) = warnings(caplog)
    assert "no answer" in began
    monkeypatch.setattr(Unreachable, "is_down", False)
    assert source.look() == [ModelMetadata(url, "v1.pt")]
    (over,) = warnings(caplog)
    assert "secret" not in began + over + source.describe()


class Bucket(fsspec.get_filesystem_class("memory")):
    """Remembers what it was asked, as stores do, and has times of whole days, as text."""

    protocol = "bucket"
    remembered: dict[str, dict[str, object]] = {}

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("bucket://"))

    def invalidate_cache(self, path=None):
        self.remembered.clear()

    def info(self, path, **kwargs):
        path = self._strip_protocol(path)
        if path not in self.remembered:
            found = {"name": path, "type": "file", "size": self.size(path), "LastModified": "2026-11-16T00:00:00Z"}
            self.remembered[path] = {**found, "ETag": self.cat_file(path).hex()}
        return self.remembered[path]

    def size(self, path):
        return super().info(path)["size"]


def test_an_object_of_the_same_size_and_time_is_told_by_its_tag(store):
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    source = FilePattern("bucket://more/v1.pt")
    for content in (b"one", b"two"):
        store.pipe("/more/v1.pt", content)
        assert [each.model_name for each in source.look()] == ["v1.pt"]
        assert source.look() == []


def test_a_store_without_its_package_will_never_work():
    with pytest.raises(ps.UsageError, match="fsspec package is installed"):
        FilePattern("nosuchstore://models/*.pt").look()


def test_a_file_url_is_a_local_path(tmp_path):
    old(tmp_path / "a.pt")
    assert FilePattern(f"file://{tmp_path}/*.pt").look() == [ModelMetadata(str(tmp_path / "a.pt"), "a.pt")]


# Stamps, and the transform.


def test_a_stamp_is_empty_where_there_is_no_model(tmp_path):
    for path in ("", str(tmp_path / "none"), "models:/iris/1", "org/model", "nosuchstore://x", "memory://none/x.pt"):
        assert stamp_of(path) == ""


def test_a_stamp_changes_with_its_model(tmp_path, store):
    local, url = tmp_path / "a.pt", "memory://models/a.pt"
    stamps = set()
    for content in ("one", "longer"):
        old(local, content)
        store.pipe("/models/a.pt", content.encode())
        stamps |= {stamp_of(str(local)), stamp_of(url), stamp_of("memory://models"), stamp_of(str(tmp_path))}
        assert stamp_of(str(local)) == stamp_of(f"file://{local}")
    assert len(stamps) == 8
    assert max(map(len, stamps)) <= 32


def test_watch_file_pattern_has_the_arguments_of_beam(tmp_path):
    watch = WatchFilePattern(file_pattern=str(tmp_path / "*.pt"), interval=2, stop_timestamp=5)
    assert isinstance(watch, WatchModels)
    assert (watch.interval, watch.stop_timestamp) == (2.0, 5.0)
    (tmp_path / "a.pt").write_text("model")
    assert names(watch.source, later=1.5) == []
    assert names(WatchFilePattern(tmp_path / "*.pt", interval=2).source, later=3) == ["a.pt"]
    assert watch.source.describe() == str(tmp_path / "*.pt")


def test_an_interval_that_is_shorter_than_looks_can_follow_counts_as_the_shortest(tmp_path):
    watch = WatchFilePattern(tmp_path / "*.pt", interval=0.01)
    assert watch.interval == 0.2
    (tmp_path / "a.pt").write_text("model")
    assert names(watch.source, later=0.1) == []
    assert names(watch.source, later=0.1) == ["a.pt"]


@pytest.mark.parametrize("interval", [0, -1, math.inf, math.nan, True, "10"])
def test_an_interval_is_a_number_of_seconds(interval):
    with pytest.raises(ps.UsageError, match="interval="):
        WatchFilePattern("models/*.pt", interval=interval)


@pytest.mark.parametrize("pattern", ["", 5, None, "models/{key}/{key}.pt"])
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(ps.UsageError, match="FilePattern"):
        FilePattern(pattern)


def test_a_pattern_is_relative_to_where_it_was_made(tmp_path, monkeypatch):
    old(tmp_path / "a.pt")
    monkeypatch.chdir(tmp_path)
    source = FilePattern("*.pt")
    monkeypatch.chdir("/")
    copied = pickle.loads(pickle.dumps(source))
    assert source.look() == copied.look() == [ModelMetadata(str(tmp_path / "a.pt"), "a.pt")]
