"""The models that change while a pipeline runs, and what they note of each batch. Imported by every process of a case."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple, TextIO

import torch
from keyed_inputs import own_bytes
from torch import nn

NOTES = "PENSTOCK_BENCHMARK_NOTES"  # an environment variable: the folder in which every process writes what it noted

WIDTH, DEPTH, FEATURES = 2_048, 12, 256  # of the Network: 12 layers of 2,048 x 2,048 take 201 MB
NETWORK_BYTES = 4 * WIDTH * WIDTH * DEPTH

VALUES = 12_500_000  # of a Table: 50 MB
TABLE_BYTES = 4 * VALUES
STEP, PRIME = 7_919, 1_000_003  # a row's number times this is where its table is read; values are below this
MEMORY_EVERY = 0.05  # seconds between two looks of a Table at the memory of its process


class Batch(NamedTuple):
    """A batch that was answered."""

    process: int
    began: float  # as of time.monotonic(), which all processes of a machine share
    ended: float
    rows: int
    version: int
    own_bytes: int  # of its process, neither of files nor shared; 0: nobody looked
    alive: int  # Tables in its process; 0 the same


class Notes:
    """What one process notes of its batches: a file of lines, each written at once."""

    _files: dict[int, TextIO] = {}  # by process: a fork has its own

    @classmethod
    def add(cls, began: float, rows: int, version: int, held: int = 0, alive: int = 0) -> None:
        process = os.getpid()
        if process not in cls._files:
            cls._files[process] = open(Path(os.environ[NOTES], f"{process}.batches"), "a", buffering=1)  # noqa: SIM115
        cls._files[process].write(f"{process} {began} {time.monotonic()} {rows} {version} {held} {alive}\n")

    @staticmethod
    def read(folder: str) -> Iterator[Batch]:
        """The batches of all processes so far."""
        for path in Path(folder).glob("*.batches"):
            for line in path.read_text().splitlines():
                process, began, ended, *counts = line.split()
                yield Batch(int(process), float(began), float(ended), *map(int, counts))


class Network(nn.Module):
    """Some layers; a batch of a few rows takes tens of milliseconds. The answer to a row ends with the number of the
    version, which is a weight among others."""

    version: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(FEATURES if not at else WIDTH, WIDTH) for at in range(DEPTH + 1)]
        self.layers = nn.Sequential(*[each for layer in layers for each in (layer, nn.ReLU())])
        self.register_buffer("version", torch.zeros(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        began = time.monotonic()
        answers = torch.cat([self.layers(rows)[:, :7], self.version.expand(len(rows), 1)], 1)
        Notes.add(began, len(rows), int(self.version))
        return answers


class Table(nn.Module):
    """A table in which every row looks something up. Where, and what is there, differ by row and version: answers of a model
    that is half of one version and half of another are wrong."""

    values: torch.Tensor
    version: torch.Tensor
    alive: ClassVar[weakref.WeakSet[Table]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self.alive.add(self)
        self.register_buffer("values", torch.empty(VALUES, dtype=torch.int32))
        self.register_buffer("version", torch.zeros(1, dtype=torch.int64))
        self._looked = 0.0
        self._is_known = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        began, version = time.monotonic(), int(self.version)
        answers = self.values[rows * STEP % VALUES]
        if began - self._looked > MEMORY_EVERY:
            self._looked = began
            Notes.add(began, len(rows), version, own_bytes(Path("/proc/self")), len(self.alive))
        if not self._is_known:
            self._is_known = True
            mark_of(os.environ[NOTES], version).touch()
        return answers


def mark_of(notes: str, version: int) -> Path:
    """A file that is there when a Table of this version has answered a batch."""
    return Path(notes, f"{version}.answered")


def save_network(path: str, version: int, weights: dict[str, torch.Tensor]) -> None:
    torch.save({**weights, "version": torch.tensor([float(version)])}, path)


def save_table(path: str, version: int) -> None:
    """Put in place by a rename, as those should who publish models."""
    values = (torch.arange(VALUES, dtype=torch.int32) + version) % PRIME
    torch.save({"values": values, "version": torch.tensor([version])}, f"{path}.new")
    os.replace(f"{path}.new", path)


def right_values(rows: torch.Tensor, version: int) -> torch.Tensor:
    """What a Table of this version answers, without any table."""
    return (rows * STEP % VALUES + version) % PRIME
