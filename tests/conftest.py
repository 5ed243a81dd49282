"""What the tests share: the ways of running one pipeline, which must not differ but for speed."""

from __future__ import annotations

import atexit
import faulthandler
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

import penstock as ps

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's client is imported: no test looks anything up there
os.environ["PENSTOCK_CACHE"] = tempfile.mkdtemp(prefix="penstock-cache-")  # no test changes the user's own
atexit.register(shutil.rmtree, os.environ["PENSTOCK_CACHE"], ignore_errors=True)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a script starts in the background
faulthandler.enable()

# The same examples each time, and no limit of time. `--hypothesis-profile=search` looks for new ones (make search).
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile("same")

WAYS: dict[str, dict[str, Any]] = {
    "in-process": {"workers": 0},
    "threads": {"workers": 0, "threads_per_worker": 3},
    "workers": {"workers": 2},
    "worker-threads": {"workers": 1, "threads_per_worker": 3},
}

LAST = ("io", "pure")  # folders of short files


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Short files come last: when two processes share the suite, the one that is done first finds more to do."""
    items.sort(key=lambda item: LAST.index(folder) if (folder := item.path.parent.name) in LAST else -1)


@pytest.fixture(params=WAYS)
def pipeline(request: pytest.FixtureRequest) -> Callable[..., ps.Pipeline]:
    """Makes pipelines that run in one of the ways there are."""
    options = WAYS[request.param]
    return lambda **more: ps.Pipeline(**{**options, **more})


@pytest.fixture
def descendants() -> Callable[[], set[int]]:
    """The processes that this test run has started and that are still there."""
    before = _descendants(os.getpid())
    return lambda: _descendants(os.getpid()) - before


def _descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else []:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    parents[int(name)] = int(stat.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found: set[int] = set()
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found
