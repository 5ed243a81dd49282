"""The models of many keys, the rows for them, and what the right answers are. Imported by every process of a case.

A thousand models of 10 MB would be 10 GB of files. There are 50 files with numbers of their own; the file of a key is a hard
link to one of them, and the key's number, taken from the name of its file, is put in front of what was loaded. So each model
gives answers that no other gives, and all files together fit into the page cache: a load costs every contender the same few
milliseconds of copying, and never waits for a disk.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from workload import Stopwatch, outcome

Row = tuple[str, int]  # its key, and what the model is asked

FILES = 50  # with numbers of their own
VALUES = 2_500_000  # of a model
MODEL_BYTES = VALUES * np.dtype(np.float32).itemsize
EXPONENT = 1.0  # of the Zipf distribution of keys
STEPS = (1, 7_919, 15_485_863)  # a row's number times these, in a circle, is where its model is read

LOADED = "PENSTOCK_BENCHMARK_LOADED"  # an environment variable: the file to which every load adds a line


def make_inputs(folder: str, models: int) -> dict[str, Any]:
    """The file of each key, in this folder."""
    random = np.random.default_rng(11)
    with Stopwatch() as watch:
        for number in range(models):
            path = model_path(folder, key_of(number))
            if number < FILES:
                np.save(path, random.integers(1, 1_000_000, VALUES).astype(np.float32))
            else:
                os.link(model_path(folder, key_of(number % FILES)), path)
    return outcome(watch, models, f"{min(models, FILES) * MODEL_BYTES:,} bytes")


def key_of(number: int) -> str:
    return f"{number:04}"


def model_path(folder: str, key: str) -> str:
    return f"{folder}/{key}.npy"


def key_numbers(rows: int, models: int) -> np.ndarray[Any, Any]:
    """The number of each row's key: the n-th has 1 / n of the rows of the first, in a random order that is always the same.
    A shorter job has the first rows of a longer one."""
    weights = 1.0 / np.arange(1, models + 1) ** EXPONENT
    cumulated = np.cumsum(weights / weights.sum())
    return np.minimum(np.searchsorted(cumulated, np.random.default_rng(12).random(rows)), models - 1)


def make_rows(rows: int, models: int) -> list[Row]:
    return [(key_of(number), row) for row, number in enumerate(key_numbers(rows, models).tolist())]


class Model:
    """What is loaded: 10 MB of this process's own memory."""

    def __init__(self, path: str) -> None:
        _note_load()
        self.values = np.load(path)
        self.values[0] = int(Path(path).stem)

    def answers(self, questions: Iterable[int]) -> list[int]:
        value, first = self.values.item, self.values.item(0)
        return [int(row + first + sum(value(_position(row * step)) for step in STEPS)) for row in questions]


def _position(number: int) -> int:
    return 1 + number % (VALUES - 1)


def _note_load() -> None:
    """A line with this process, the time, and the memory that is its own before the load. Written at once, so that those of
    several processes do not mix."""
    path = os.environ.get(LOADED)
    if path:
        line = f"{os.getpid()} {time.time()} {own_bytes(Path('/proc/self'))}\n"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)


def own_bytes(folder: Path) -> int:
    """A process's memory that is neither of files nor shared (RssAnon), from its /proc folder; 0 if it has ended."""
    try:
        match = re.search(r"^RssAnon:\s+(\d+) kB", (folder / "status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


class Tally:
    """Adds up answers, in any order."""

    def __init__(self) -> None:
        self.rows = 0
        self.total = 0

    def add(self, answers: Iterable[Row]) -> None:
        for key, answer in answers:
            self.rows += 1
            self.total += (int(key) + 1) * answer

    def merge(self, rows: int, total: int) -> None:
        self.rows += rows
        self.total += total

    def checked(self, folder: str, rows: int, models: int) -> str:
        """The checksum, and whether it is the right one for these rows."""
        is_right = (self.rows, self.total) == (rows, right_total(folder, rows, models))
        return f"{self.total} {'right' if is_right else 'WRONG'}"


def right_total(folder: str, rows: int, models: int) -> int:
    """The checksum, from the files and without any model."""
    keys, questions = key_numbers(rows, models), np.arange(rows)
    answers = questions + keys
    for number in range(min(FILES, models)):
        values = np.load(model_path(folder, key_of(number)), mmap_mode="r")
        mine = np.flatnonzero(keys % FILES == number)
        for step in STEPS:
            answers[mine] += values[1 + questions[mine] * step % (VALUES - 1)].astype(np.int64)
    return int(((keys + 1) * answers).sum())
