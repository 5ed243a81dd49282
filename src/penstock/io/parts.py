"""Part files that appear whole or not at all: what every file sink shares.

A part is written to out/.penstock-<run>/00012-1.jsonl, aside, and published by one rename to out/part-00012.jsonl.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from penstock.blocks import Block, row_count
from penstock.errors import OutputError
from penstock.io.digests import new_xxh128, xxh128_of
from penstock.io.files import is_local, open_cause, short_name, store_of, without_secrets
from penstock.io.folders import make_folder, missing_folders, sync_folder
from penstock.io.sink import APPLIED_TWICE, Part, Write, Writer
from penstock.io.stored_sink import StoredSink

T = TypeVar("T")

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
OWN_NAME = re.compile(r"part(-(\d{5,}|[a-z]\d{6,}))+")  # part_name() makes what follows "part-"


class Places(NamedTuple):
    """Where an attempt at a part is written, and where it is published."""

    aside: str
    final: str
    journaled: bool


class FilePart(NamedTuple):
    """A finished part, aside: what publish() is given."""

    aside: str
    final: str
    bytes: int
    xxh128: str | None  # of parts of a journaled run
    schema: Any = None  # of formats that have one: in bytes, or the names of the columns
    again: bool = False  # it takes the place of an earlier form of itself, which may have been published


class FileSink(StoredSink[T]):
    """Part files in one folder, one for each split. A format gives the suffix and, in open(), its writer.

    All but open() is called on one object, in the user's process; open() on copies of it.
    """

    suffix = ""

    def __init__(self, path: str, overwrite: bool) -> None:
        self.path = path
        self.overwrite = overwrite
        self._old: set[str] = set()  # names of earlier parts that this run has not replaced
        self._made: list[str] = []  # folders that this run has made, the innermost first
        self._own: set[tuple[str, int]] = set()  # what earlier runs of the same journal have written: names and bytes

    def prepare(self, run: str) -> dict[str, int]:
        with self._writable() as (fs, folder):
            self._old = set(found := self._parts_in(fs, folder))
            if strangers := [name for name in self._old if not OWN_NAME.fullmatch(name.removesuffix(self.suffix))]:
                raise OutputError(
                    f"{self.describe()}: {min(strangers)} is there, which was not written by Penstock (whose names are "
                    f"part-00000{self.suffix} and so on) and is not removed; move it, or choose another folder"
                )
            if self.overwrite or found.items() <= self._own:
                self.begin(fs, folder, run)
                return found
        raise OutputError(
            f"{self.describe()}: {len(self._old)} part file(s) are there already, such as {min(self._old)}; "
            "pass overwrite=True or choose another folder; or, if they are of a run that was interrupted, resume it with "
            "its run_dir (--run-dir), which keeps them"
        )

    def resume(self, run: str, note: Any, published: Sequence[Mapping[str, Any]]) -> None:
        with self._writable() as (fs, folder):
            there = self._parts_in(fs, folder).items()  # others may have written under an old name since
            self._old = {name for name, size in note.items() if (name, size) in there} - dict(self._sizes(published)).keys()
            self.begin(fs, folder, run)

    def start_over(self, parts: Sequence[Mapping[str, Any]]) -> None:
        self._own = set(self._sizes(parts))

    def publish(self, token: FilePart) -> None:
        fs, aside = store_of(token.aside, OutputError)
        final = store_of(token.final, OutputError)[1]
        fs.invalidate_cache()  # the part was written by another process
        if fs.exists(aside):
            _move(fs, aside, final, replace=self._may_replace(fs, token))
        elif not self._is_there(fs, token):
            raise OutputError(
                f"{without_secrets(token.aside)}: the finished part is gone; leave the folder alone and run again"
            )
        self._old.discard(short_name(final))

    def details(self, token: FilePart) -> dict[str, Any]:
        return {"path": without_secrets(token.final), "bytes": token.bytes, "xxh128": token.xxh128}

    def missing(self, published: Sequence[Mapping[str, Any]], prepared: Sequence[FilePart] = ()) -> list[str]:
        with self._writable() as (fs, folder):
            gone = sorted(name for name, _ in set(self._sizes(published)) - self._parts_in(fs, folder).items())
            return gone + [without_secrets(token.aside) for token in prepared if not self._can_publish(fs, token)]

    def replaced(self) -> list[str]:
        return [f"{self.path}/{name}" for name in self._old]

    def clean(self, run: str, keep: Collection[FilePart] = ()) -> None:
        fs, aside = self._store_aside(run)
        fs.invalidate_cache()
        if not fs.exists(aside):
            return
        kept = {short_name(token.aside) for token in keep}
        names = [short_name(path) for path in fs.ls(aside, detail=False)]
        for name in names:
            if name.endswith(self.suffix) and name not in kept:
                with contextlib.suppress(FileNotFoundError):
                    fs.rm_file(f"{aside}/{name}")
        with contextlib.suppress(OSError):  # another sink has parts there
            fs.rmdir(aside)

    def finish(self, run: str, published: bool) -> None:
        """Remove the folder aside, and after a run that succeeded the earlier parts that it did not replace."""
        fs, folder = self._store()
        for name in self._old if published else ():
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(f"{folder}/{name}")
        self._old = set()
        aside = self._store_aside(run)[1]
        if fs.exists(aside):
            fs.rm(aside, recursive=True)
        for made in () if published else self._made:
            with contextlib.suppress(OSError):  # somebody has put something there
                os.rmdir(made)

    def aside(self, run: str) -> Sequence[str]:
        fs, inner = self._store_aside(run)
        return (inner,) if is_local(fs) else ()

    def describe(self) -> str:
        return without_secrets(self.path)

    def places(self, part: Part) -> Places:
        """Where a part is written aside, by this attempt alone, and where it is published."""
        aside = f"{self._aside(part.run)}/{part.name}-{part.attempt}{self.suffix}"
        return Places(aside, f"{self.path}/part-{part.name}{self.suffix}", part.journaled)

    def _aside(self, run: str) -> str:
        return f"{self.path}/{_aside_name(run)}"

    def _store(self) -> tuple[Any, str]:
        try:
            return store_of(self.path, OutputError)
        except FileNotFoundError as exc:  # what is behind "::" is opened
            raise OutputError(
                f"{self.describe()}: there is no {without_secrets(str(exc.filename))}; write to a folder of a plain store"
            ) from open_cause(exc)

    def _store_aside(self, run: str) -> tuple[Any, str]:
        """The folder aside in its store: below the output's, whatever the path means there, since it is to be removed.
        Whoever can write there can put a link in its place: what that leads to is not cleaned, and not written to."""
        fs, folder = self._store()
        aside = f"{folder}/{_aside_name(run)}"
        if is_local(fs) and os.path.islink(aside):
            raise OutputError(f"{aside}: is a link; expected the folder of the run's unpublished parts: remove it")
        return fs, aside

    def _parts_in(self, fs: Any, folder: str) -> dict[str, int]:
        """The part files there, with their bytes."""
        fs.invalidate_cache()
        if not fs.exists(folder):
            return {}
        if not fs.isdir(folder):
            raise OutputError(f"{self.describe()}: is a file; expected a folder, or a name that is free for one")
        sizes = {short_name(info["name"]): info["size"] for info in fs.ls(folder, detail=True)}
        return {name: size for name, size in sizes.items() if name.startswith("part-") and name.endswith(self.suffix)}

    def _sizes(self, parts: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
        """Those of these parts that are in this sink's folder: their names and bytes."""
        here = without_secrets(self.path)
        own = [part for part in parts if part.get("path", "").rpartition("/")[0] == here]
        return [(short_name(part["path"]), part["bytes"]) for part in own if part["path"].endswith(self.suffix)]

    def _may_replace(self, fs: Any, token: FilePart) -> bool:
        return self.overwrite or token.again or short_name(token.final) in self._old or self._is_there(fs, token)

    def _can_publish(self, fs: Any, token: FilePart) -> bool:
        return fs.exists(store_of(token.aside, OutputError)[1]) or self._is_there(fs, token)

    def _is_there(self, fs: Any, token: FilePart) -> bool:
        """Whether the part has been published: not only a file of that name."""
        final = store_of(token.final, OutputError)[1]
        if not fs.exists(final) or fs.size(final) != token.bytes:
            return False
        if token.xxh128 is None:
            return short_name(final) not in self._old
        return xxh128_of(token.final) == token.xxh128

    @contextlib.contextmanager
    def _writable(self) -> Iterator[tuple[Any, str]]:
        fs, folder = self._store()
        try:
            yield fs, folder
        except OSError as exc:
            raise OutputError(
                f"{self.describe()}: cannot be written: {exc.strerror or without_secrets(str(exc))}; choose a folder "
                "that can be written to"
            ) from open_cause(exc)

    def begin(self, fs: Any, folder: str, run: str) -> None:
        """By prepare() and resume(). Make the folder aside and a file in it: the proof that this can be written, and that no
        other step does."""
        aside = self._store_aside(run)[1]
        if store_of(self._aside(run), OutputError)[1] != aside:  # what is joined to "zip://a::b.zip" changes b.zip
            raise OutputError(f"{self.describe()}: files cannot be put there by name; write to a folder of a plain store")
        claim = f"{aside}/.claim{self.suffix}"
        if fs.exists(claim):
            raise OutputError(
                f"{self.describe()}: two steps write {self.suffix} files there; give each its own folder. {APPLIED_TWICE}"
            )
        if is_local(fs):
            self._made = missing_folders(folder)
            make_folder(aside, 0o700)  # a link that others put there would be written through
        else:
            fs.makedirs(aside, exist_ok=True)
        fs.pipe_file(claim, b"")


class WriteFiles(Write[T]):
    """Write every row to part files."""

    def default_label(self) -> str:
        return f"{type(self).__name__}({short_name(self.sink.describe())})"


class FileWriter(Writer[T]):
    """One part file aside. It is made with the first rows, so that a part without rows leaves nothing."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.rows_written: int = 0  # each format counts what it has written
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
            fs, inner = store_of(self.places.aside, OutputError)
            self._file = fs.open(inner, "wb")
            if self.places.journaled:
                self._file = _Digested(self._file)
        return self._file

    def write_text(self, data: bytes) -> None:
        """Write UTF-8. Readers drop a U+FEFF that a file begins with, as a byte order mark: one that is text follows one."""
        is_mark = self._file is None and data.startswith(BYTE_ORDER_MARK)
        self.file.write(BYTE_ORDER_MARK + data if is_mark else data)

    def close(self) -> FilePart | None:
        self.end()
        file = self._file
        if file is None:
            return None
        size = file.tell()
        fs, inner = store_of(self.places.aside, OutputError)
        if is_local(fs):
            file.flush()
            os.fsync(file.fileno())
        file.close()
        if is_local(fs) and self.places.journaled:
            sync_folder(os.path.dirname(inner))
        digest = file.xxh128.hexdigest() if isinstance(file, _Digested) else None
        return FilePart(self.places.aside, self.places.final, size, digest)

    def abort(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.close()
        fs, inner = store_of(self.places.aside, OutputError)
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(inner)


class _Digested:
    """A file being written, and the digest of its bytes."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.xxh128 = new_xxh128()

    def write(self, data: Any) -> Any:
        self.xxh128.update(data)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _aside_name(run: str) -> str:
    return f".penstock-{run}"


def _move(fs: Any, aside: str, final: str, *, replace: bool) -> None:
    if not replace and fs.exists(final) and not (is_local(fs) and os.path.samefile(aside, final)):
        raise OutputError(f"{final}: was written by another run meanwhile; choose a folder of its own for each run")
    if not is_local(fs):
        fs.mv(aside, final)
        return
    os.replace(aside, final)
    sync_folder(os.path.dirname(final))
