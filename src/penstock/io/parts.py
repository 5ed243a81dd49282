"""Part files that appear whole or not at all: what every file sink shares.

A part is written to out/.penstock-<run>/00012-1.jsonl, aside, and published by one rename to out/part-00012.jsonl.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, TypeVar

from penstock.blocks import Block, row_count
from penstock.errors import OutputError
from penstock.io.files import is_local, short_name, store_of
from penstock.io.sink import Part, Sink, Writer

T = TypeVar("T")


class FileSink(Sink[T]):
    """Part files in one folder, one for each split. A format gives the suffix and, in open(), its writer.

    prepare(), publish() and finish() are called on one object, in the user's process; open() on copies of it.
    """

    suffix = ""

    def __init__(self, path: str, overwrite: bool) -> None:
        self.path = path
        self.overwrite = overwrite
        self._old: set[str] = set()  # names of earlier parts that this run has not replaced

    def prepare(self, run: str) -> None:
        fs, folder = store_of(self.path, OutputError)
        try:
            old = self._parts_in(fs, folder)
            if not old or self.overwrite:
                self._claim(fs, run)
        except OSError as exc:
            raise OutputError(
                f"{self.path}: cannot be written: {exc.strerror or exc}; choose a folder that can be written to"
            ) from exc
        if old and not self.overwrite:
            raise OutputError(
                f"{self.path}: {len(old)} part file(s) are there already, such as {min(old)}; "
                "pass overwrite=True or choose another folder"
            )
        self._old = old

    def publish(self, token: tuple[str, str]) -> None:
        fs, aside = store_of(token[0], OutputError)
        final = store_of(token[1], OutputError)[1]
        name = short_name(final)
        fs.invalidate_cache()  # the part was written by another process
        if fs.exists(aside):
            _move(fs, aside, final, replace=self.overwrite)
        elif name in self._old or not fs.exists(final):
            raise OutputError(f"{token[0]}: the finished part is gone; leave the folder alone and run again")
        self._old.discard(name)

    def finish(self, run: str, published: bool) -> None:
        """Remove the folder aside, and after a run that succeeded the earlier parts that it did not replace."""
        fs, folder = store_of(self.path, OutputError)
        for name in self._old if published else ():
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(f"{folder}/{name}")
        self._old = set()
        aside = store_of(self._aside(run), OutputError)[1]
        if fs.exists(aside):
            fs.rm(aside, recursive=True)

    def aside(self, run: str) -> Sequence[str]:
        fs, inner = store_of(self._aside(run), OutputError)
        return (inner,) if is_local(fs) else ()

    def describe(self) -> str:
        return self.path

    def places(self, part: Part) -> tuple[str, str]:
        """Where an attempt at a part is written, and where it is published."""
        aside = f"{self._aside(part.run)}/{part.name}-{part.attempt}{self.suffix}"
        return aside, f"{self.path}/part-{part.name}{self.suffix}"

    def _aside(self, run: str) -> str:
        return f"{self.path}/.penstock-{run}"

    def _parts_in(self, fs: Any, folder: str) -> set[str]:
        fs.invalidate_cache()
        if not fs.exists(folder):
            return set()
        if not fs.isdir(folder):
            raise OutputError(f"{self.path}: is a file; expected a folder, or a name that is free for one")
        names = map(short_name, fs.ls(folder, detail=False))
        return {name for name in names if name.startswith("part-") and name.endswith(self.suffix)}

    def _claim(self, fs: Any, run: str) -> None:
        """Make the folder aside and a file in it: the proof that this can be written, and that no other step does."""
        aside = store_of(self._aside(run), OutputError)[1]
        claim = f"{aside}/.claim{self.suffix}"
        if fs.exists(claim):
            raise OutputError(f"{self.path}: two steps write {self.suffix} files there; give each its own folder")
        fs.makedirs(aside, exist_ok=True)
        fs.pipe_file(claim, b"")


class FileWriter(Writer[T]):
    """One part file aside. It is made with the first rows, so that a part without rows leaves nothing."""

    def __init__(self, places: tuple[str, str]) -> None:
        self.places = places
        self._file: Any = None

    def write(self, block: Block) -> None:
        if row_count(block):
            self.add(block)

    def add(self, block: Block) -> None:
        """Write or keep the rows of a block; there is at least one."""
        raise NotImplementedError

    def end(self) -> None:
        """Write what was kept. Called once, after the last rows, when the file is complete but for that."""

    @property
    def file(self) -> Any:
        """The file aside, opened when it is first asked for."""
        if self._file is None:
            fs, inner = store_of(self.places[0], OutputError)
            self._file = fs.open(inner, "wb")
        return self._file

    def close(self) -> tuple[str, str] | None:
        self.end()
        if self._file is None:
            return None
        if is_local(store_of(self.places[0], OutputError)[0]):
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        return self.places

    def abort(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.close()
        fs, inner = store_of(self.places[0], OutputError)
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(inner)


def _move(fs: Any, aside: str, final: str, *, replace: bool) -> None:
    if not replace and fs.exists(final) and not (is_local(fs) and os.path.samefile(aside, final)):
        raise OutputError(f"{final}: was written by another run meanwhile; choose a folder of its own for each run")
    if not is_local(fs):
        fs.mv(aside, final)
        return
    os.replace(aside, final)
    folder = os.open(os.path.dirname(final), os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot sync a folder; the rename stands
            os.fsync(folder)
    finally:
        os.close(folder)
