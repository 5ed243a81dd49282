"""The files in which the processes of a run tell one another of versions of models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from penstock.models.version_files import Status, VersionFiles, exchange, wanted_files
from penstock.models.versions import ORIGINAL, Trial, Version, Wanted, wanted_of


def test_what_is_wanted_is_read_as_it_was_written(tmp_path):
    files = VersionFiles(str(tmp_path / "private" / "run"), "step 's'")
    assert files.mark() is None
    assert files.wanted() == {}
    wanted = {"": Wanted((Version(2, "p", "id", "s"), ORIGINAL), Version(3, "q", None, ""), 0.25)}
    files.publish(wanted)
    first = files.mark()
    assert files.wanted() == wanted
    assert wanted_of(files.wanted(), "another") == Wanted()
    files.publish({})
    assert files.mark() != first
    assert os.listdir(files.folder) == [f"{os.path.basename(files.stem)}.versions"], "nothing half-written is left"


def test_stamps_of_a_machine_s_own_files_are_not_for_other_machines(tmp_path):
    files = VersionFiles(str(tmp_path / "here"), "key")
    assert files.own() == {}
    files.publish_own({"/models/a.pt": "stamp"})
    files.publish({})
    assert files.own() == {"/models/a.pt": "stamp"}
    assert len(wanted_files(str(tmp_path / "here"))) == 1


def test_reports_of_processes_are_read_as_they_were_written(tmp_path):
    files = VersionFiles(str(tmp_path / "private" / "run"), "step 's'")
    files.publish({})
    status = Status({"": {2: "how"}}, {"k": {1: "why"}}, {"": {3: Trial(10, 1)}})
    files.report(status)
    assert files.reports() == {str(os.getpid()): status}
    VersionFiles(str(tmp_path / "gone" / "run"), "s").report(status)  # the run is over: nobody reads it


def test_threads_that_write_at_once_do_not_get_in_each_others_way(tmp_path):
    told = [{"model.versions": json.dumps({"n": "x" * 10_000 * n}).encode()} for n in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda at: exchange(str(tmp_path), told[at % 4]), range(400)))
    assert os.listdir(tmp_path) == ["model.versions"]
    assert (tmp_path / "model.versions").read_bytes() in {each["model.versions"] for each in told}


def test_who_died_at_work_on_a_version_is_seen(tmp_path):
    files = VersionFiles(str(tmp_path / "private" / "run"), "step 's'")
    files.publish({})
    version = Version(4, "p")
    with files.at_work(version, "load", 3):
        assert files.deaths(version, "load") == [], "this process lives"
    script = (
        "import os, sys; from penstock.models.version_files import *; from penstock.models.versions import *\n"
        "with VersionFiles(*eval(sys.argv[1])).at_work(Version(4), 'load', 7): os._exit(9)"
    )
    told = json.dumps([files.folder, files.key])
    assert subprocess.run([sys.executable, "-c", script, told], check=False).returncode == 9
    assert files.deaths(version, "load") == [7]
    assert files.deaths(version, "trial") == []
    assert files.deaths(Version(5), "load") == []
