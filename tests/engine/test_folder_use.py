"""The folder of a run whose processes come and go: it is there while one of them is, and no longer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

import penstock as ps
from penstock.models.folder_use import FolderUse, remove_unused
from penstock.models.host_address import run_folder


@pytest.fixture
def parent(tmp_path):
    (tmp_path / "private").mkdir(mode=0o700)
    return tmp_path / "private"


def used(folder):
    use = FolderUse(str(folder))
    (folder / "model.versions").touch()
    return use


def killed(folder):
    """What a process leaves behind that used a folder until it was killed."""
    script = (
        "import os, signal, sys; from penstock.models.folder_use import FolderUse; use = FolderUse(sys.argv[1]); "
        "open(sys.argv[1] + '/model.versions', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert sorted(os.listdir(folder)) == ["model.versions", "users"]


def test_whoever_leaves_last_removes_it(parent):
    folder = parent / "run"
    first, second = used(folder), used(folder)
    first.leave()
    assert sorted(os.listdir(folder)) == ["model.versions", "users"]
    second.leave()
    assert not folder.exists()
    second.leave()  # once more does no harm


def test_what_a_killed_process_leaves_is_removed_when_another_run_starts(parent):
    killed(parent / "run")
    other = used(parent / "other")
    assert os.listdir(parent) == ["other"]
    other.leave()


def test_a_process_that_is_killed_removes_nothing_of_others(parent):
    use = used(parent / "run")
    killed(parent / "run")
    remove_unused(str(parent))
    assert (parent / "run" / "model.versions").exists()
    use.leave()
    assert not (parent / "run").exists()


def test_a_folder_in_which_a_host_lives_is_kept(parent):
    killed(parent / "run")
    with socket.socket(socket.AF_UNIX) as host:
        host.bind(str(parent / "run" / "model.sock"))
        host.listen()
        remove_unused(str(parent))
        assert (parent / "run" / "model.versions").exists()
    remove_unused(str(parent))
    assert not (parent / "run").exists()


def test_folders_of_another_kind_are_left_alone(parent):
    (parent / "other").mkdir()
    (parent / "other" / "model.sock").touch()
    (parent / "link").symlink_to(parent / "other")
    (parent / "file").touch()
    remove_unused(str(parent))
    assert sorted(os.listdir(parent)) == ["file", "link", "other"]
    remove_unused(str(parent / "nothing"))  # there is none


def test_a_run_of_the_local_engine_removes_what_is_left():
    folder = run_folder("0-left-by-a-test")
    script = (
        "import os, signal, sys; from penstock.models.folder_use import FolderUse; use = FolderUse(sys.argv[1]); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", script, folder], check=False)
    assert os.path.exists(folder)
    with ps.Pipeline(workers=1) as p:
        p | ps.Create([1]) | ps.Map(str)
    assert not os.path.exists(folder)
