"""Files by path: which ones an input names, how they are opened, and how they are put together in splits."""

from __future__ import annotations

import functools
import glob
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.errors import InputError, MissingInputError, UsageError

PieceT = TypeVar("PieceT")

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


def without_secrets(text: str) -> str:
    """A URL without its password, and without a signature at its end; any other path as it is."""
    if "://" not in text:
        return text
    return re.sub(r"\?[^/?]*=.*$", "?...", re.sub(r"://[^/@\s]*@", "://", text))


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


def place_of(path: str) -> str:
    """One name for a file, however it was spelled, without secrets."""
    if "://" not in path:
        return _local_place(path)
    fs, inner = store_of(path, InputError)
    return _local_place(inner) if is_local(fs) else without_secrets(fs.unstrip_protocol(inner))


def _local_place(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(real_folder(folder), name)


@functools.lru_cache(1024)
def real_folder(folder: str) -> str:
    """A folder without links on the way to it. Remembered: clear the cache before a new look."""
    return os.path.realpath(folder)


def list_files(pattern: str) -> list[InputFile]:
    """The files that a path, a folder or a glob names, sorted by path. Raises MissingInputError when there are none.

    A folder means every file below it. Names that start with "." or "_" are left out there, and in a glob too unless it
    spells the "." or "_" out.
    """
    fs, root = store_of(pattern, InputError)
    try:
        found = _find(fs, root, pattern)
    except OSError as exc:
        raise InputError(f"{pattern}: cannot be listed: {exc}; check the path and the right to read it") from exc
    return [_input_file(fs, path, found[path]) for path in sorted(found)]


def look_again(file: InputFile) -> InputFile | None:
    """A local file as it is now, None if it is gone; one of another store as it was, since to ask for it takes time."""
    if "://" in file.path:
        return file
    fs, inner = store_of(file.path, InputError)
    try:
        return _input_file(fs, inner, fs.info(inner))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _find(fs: Any, root: str, pattern: str) -> dict[str, Any]:
    if fs.isdir(root):
        strictly = {"on_error": "raise"} if is_local(fs) else {}  # else folders that cannot be read count as empty
        found = _visible(_resolved(fs, fs.find(root, detail=True, **strictly)), root)
        advice = "the folder has no files (names that start with '.' or '_' do not count)"
    elif fs.exists(root):
        found, advice = {root: fs.info(root)}, ""
    elif glob.has_magic(root):
        found = _matching(fs, root)
        advice = "no file matches; check the folder, and that the wildcards stand for files, not folders"
    else:
        found, advice = {}, "there is no such file or folder; check the path"
    if not found:
        raise MissingInputError(f"{pattern}: {advice}")
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
    if info.get("islink") and is_local(fs):
        info = {**info, "mtime": os.stat(inner).st_mtime}  # of the file, not of the link
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
