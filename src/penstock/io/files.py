"""Files by path: which ones an input names, how they are opened, and part files that appear whole or not at all.

A part is written to out/.penstock-<run>/00012-1.jsonl, aside, and published by one rename to out/part-00012.jsonl.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.blocks import Block, row_count
from penstock.errors import InputError, OutputError, UsageError
from penstock.io.sink import Part, Sink, Writer

T = TypeVar("T")
PieceT = TypeVar("PieceT")

LEAVES = frozenset([str, int, float, bool, type(None)])
COMPRESSIONS: dict[str, Any] = {".gz": "gzip", ".zst": "zstd"}  # by the end of the name


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of an input, as its store describes it."""

    path: str
    size: int
    modified: str
    compression: str | None


def checked_path(path: str | os.PathLike[str], step: str) -> str:
    """The path as text, absolute if it is local. Raises UsageError for what is not a path."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        raise UsageError(f"{step}({path!r}): expected a path, such as 'data/part-*.jsonl' or 's3://bucket/folder'")
    return text.rstrip("/") if "://" in text else os.path.abspath(os.path.expanduser(text))


def short_name(path: str) -> str:
    """The last part of a path, for labels."""
    return path.rsplit("/", 1)[-1]


def store_of(path: str, error: type[UsageError]) -> tuple[Any, str]:
    """The fsspec file system that a path belongs to, and the path inside it."""
    from fsspec.core import url_to_fs

    try:
        fs, inner = url_to_fs(path)
    except (ImportError, ValueError) as exc:
        raise error(f"{path}: {exc}; expected a local path, or a URL whose fsspec package is installed") from exc
    return fs, inner


def is_local(fs: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(fs, LocalFileSystem)


def list_files(pattern: str) -> list[InputFile]:
    """The files that a path, a folder or a glob names, sorted by path. Raises InputError when there are none.

    A folder means every file below it. Names that start with "." or "_" are left out there, and in a glob too unless it
    spells the "." or "_" out.
    """
    fs, root = store_of(pattern, InputError)
    try:
        found = _find(fs, root, pattern)
    except OSError as exc:
        raise InputError(f"{pattern}: cannot be listed: {exc}; check the path and the right to read it") from exc
    return [_input_file(fs, path, found[path]) for path in sorted(found)]


def _find(fs: Any, root: str, pattern: str) -> dict[str, Any]:
    if fs.isdir(root):
        found = _visible(_resolved(fs, fs.find(root, detail=True)), root)
        advice = "the folder has no files (names that start with '.' or '_' do not count)"
    elif fs.exists(root):
        found, advice = {root: fs.info(root)}, ""
    elif glob.has_magic(root):
        found = _matching(fs, root)
        advice = "no file matches; check the folder, and that the wildcards stand for files, not folders"
    else:
        found, advice = {}, "there is no such file or folder; check the path"
    if not found:
        raise InputError(f"{pattern}: {advice}")
    return found


def _matching(fs: Any, pattern: str) -> dict[str, Any]:
    found = _resolved(fs, fs.glob(pattern, detail=True))
    base = re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0]
    spelled_out = any(name.startswith((".", "_")) for name in pattern[len(base) :].split("/"))
    return found if spelled_out else _visible(found, base)


def _resolved(fs: Any, found: dict[str, Any]) -> dict[str, Any]:
    """All but folders; of a link, what it leads to."""
    infos = {path: fs.info(path) if info.get("islink") else info for path, info in found.items()}
    return {path: info for path, info in infos.items() if info["type"] != "directory"}


def _visible(found: dict[str, Any], base: str) -> dict[str, Any]:
    def hidden(path: str) -> bool:
        return any(name.startswith((".", "_")) for name in path[len(base) :].split("/"))

    return {path: info for path, info in found.items() if not hidden(path)}


def _input_file(fs: Any, inner: str, info: dict[str, Any]) -> InputFile:
    path = inner if is_local(fs) else fs.unstrip_protocol(inner)
    if info["type"] != "file" or not isinstance(info.get("size"), int):
        raise InputError(f"{path}: expected a regular file of known size; copy it to one and read that")
    stamps = (info.get(key) for key in ("mtime", "LastModified", "last_modified", "updated", "etag", "ETag", "created"))
    modified = str(next(filter(None, stamps), ""))
    return InputFile(path, info["size"], modified, compression_of(path))


def compression_of(path: str) -> str | None:
    return COMPRESSIONS.get(os.path.splitext(path)[1])


def open_input(path: str) -> Any:
    """The bytes of a file as a binary file object, decompressed if its name ends in .gz or .zst."""
    fs, inner = store_of(path, InputError)
    raw = fs.open(inner, "rb")
    if compression_of(path) is None:
        return raw
    import pyarrow as pa

    return pa.CompressedInputStream(raw, COMPRESSIONS[os.path.splitext(path)[1]])


def is_bad_data(exc: OSError) -> bool:
    """Whether Arrow raised this for what the bytes hold: an error of the system has a number, Arrow's own have none."""
    return type(exc) is OSError and exc.errno is None


def pack(pieces: Iterable[tuple[PieceT, int]], target: int) -> list[tuple[PieceT, ...]]:
    """Neighbours put together while their sizes add up to at most `target`. Order is kept, and nothing is cut."""
    packed: list[tuple[PieceT, ...]] = []
    open_pieces: list[PieceT] = []
    filled = 0
    for piece, size in pieces:
        if open_pieces and filled + size > target:
            packed.append(tuple(open_pieces))
            open_pieces, filled = [], 0
        open_pieces.append(piece)
        filled += size
    return [*packed, tuple(open_pieces)] if open_pieces else packed


def plain(value: Any, of_array: Callable[[Any], Any]) -> Any:
    """A value as dicts, lists and leaves: NamedTuples and dataclasses become dicts, arrays what `of_array` returns.

    Leaves of other types are returned as they are, for the format to take or to refuse.
    """
    kind = type(value)
    if kind in LEAVES:
        return value
    if kind is list or kind is tuple:
        return [plain(item, of_array) for item in value]
    fields = fields_of(value)
    if fields is not None:
        return {key: plain(item, of_array) for key, item in fields.items()}
    return of_array(value) if hasattr(value, "tolist") else value


def fields_of(row: Any) -> dict[Any, Any] | None:
    """The named fields of a dict, a NamedTuple (such as PredictionResult) or a dataclass; None for anything else."""
    if isinstance(row, dict):
        return row
    if isinstance(row, tuple) and hasattr(row, "_asdict"):
        return dict(row._asdict())
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    return None


def named_fields(row: Any, step: str) -> dict[Any, Any]:
    """fields_of(row) for the steps that need at least one."""
    fields = fields_of(row)
    if fields:
        return fields
    raise OutputError(
        f"{step} expects rows with named fields (dict, NamedTuple, dataclass), "
        f"got {type(row).__name__ if fields is None else row}: put ps.Map(lambda x: {{'value': x}}) before it"
    )


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
            _move(fs, aside, final)
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


def _move(fs: Any, aside: str, final: str) -> None:
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
