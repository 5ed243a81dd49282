"""Files by path: which ones an input names, how they are opened, and how they are put together in splits."""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import inspect
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from penstock.errors import InputError, MissingInputError, PenstockError, UsageError
from penstock.rows import safe_str

PieceT = TypeVar("PieceT")

_USER = re.compile(r"://[^/\s'\"]*@")
# The query of a web address; of another URL, where "?" may be a wildcard, only what looks like one. It ends with the
# text, or at a space, or at the quote behind a URL.
_QUERY = re.compile(r"""(https?://[^?\s]*)?\?(?(1)|(?=[^/?\s]*=))(?:[^\s'"]|['"](?![\s,;:)\]>]|$))*""")

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
    """The last part of a path, for labels. Never a secret."""
    return without_secrets(path).rsplit("/", 1)[-1]


def without_secrets(text: str) -> str:
    """A path, or a text that names some, with every URL in it without user, password and query. Anything else as it is."""
    if "://" not in text:
        return text
    return _QUERY.sub(r"\1?...", _USER.sub("://", text))


@contextlib.contextmanager
def hiding_secrets(paths: Iterable[str]) -> Iterator[None]:
    """Errors of Penstock that leave this block do not tell the secrets of these paths."""
    try:
        yield
    except PenstockError as exc:
        text = str(exc)
        for path in paths:
            text = text.replace(path, without_secrets(path))
        if text != str(exc):
            exc.args = (text,)
            raise exc from None  # what led to it names the path as well
        raise


def open_cause(exc: BaseException) -> BaseException | None:
    """An error as the cause of another, unless it would show a secret of a URL."""
    text = safe_str(exc)
    return exc if without_secrets(text) == text else None


def store_of(path: str, error: type[UsageError]) -> tuple[Any, str]:
    """The fsspec file system that a path belongs to, and the path inside it.

    "::" joins URLs only behind a protocol that wraps another one ("simplecache::s3://bucket/rows"). Anywhere else, and in
    every local path, it is part of a name: fsspec's own parser would drop all that follows it.
    """
    from fsspec.core import split_protocol, url_to_fs
    from fsspec.registry import filesystem, get_filesystem_class

    try:
        if "://" not in path:
            fs = filesystem("file")
        elif _is_chained(path):
            return cast("tuple[Any, str]", url_to_fs(path))
        else:
            protocol = split_protocol(path)[0]
            fs = filesystem(protocol, **get_filesystem_class(protocol)._get_kwargs_from_urls(path))
    except (ImportError, ValueError) as exc:
        told = without_secrets(f"{path}: {exc}")
        raise error(f"{told}; expected a local path, or a URL whose fsspec package is installed") from open_cause(exc)
    return fs, fs._strip_protocol(path)


def _is_chained(url: str) -> bool:
    """Whether its first protocol is one that wraps another."""
    from fsspec.registry import get_filesystem_class

    first, joined, _ = url.partition("::")
    if not joined:
        return False
    store = get_filesystem_class(first.partition("://")[0])
    return any("target_protocol" in inspect.signature(each.__init__).parameters for each in store.__mro__)


def is_local(fs: Any) -> bool:
    """Whether a filesystem of fsspec's is this machine's own."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(fs, LocalFileSystem)


def place_of(path: str) -> str:
    """One name for a file, however it was spelled and whatever links lead to it, without secrets."""
    if "://" not in path:
        return _local_place(path)
    fs, inner = store_of(path, InputError)
    return _local_place(inner) if is_local(fs) else without_secrets(fs.unstrip_protocol(inner))


def _local_place(path: str) -> str:
    if os.path.islink(path):
        return os.path.realpath(path)
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
    try:
        fs, root = store_of(pattern, InputError)
        found = _find(fs, root, pattern)
    except OSError as exc:
        told = without_secrets(f"{pattern}: cannot be listed: {exc}")
        raise InputError(f"{told}; check the path and the right to read it") from open_cause(exc)
    return [_input_file(fs, path, found[path]) for path in sorted(found)]


def exists(path: str) -> bool:
    """Whether there is such a file or folder. Where that cannot be seen, as without the right to, it counts as there."""
    try:
        if "://" in path:
            fs, inner = store_of(path, InputError)
            fs.info(inner)  # exists() takes every error for a no
        else:
            os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as exc:
        return exc.errno != errno.ENAMETOOLONG
    except ValueError:  # no name of a file
        return False
    except Exception:  # of a store
        return True
    return True


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
        raise MissingInputError(f"{without_secrets(pattern)}: {advice}")
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
        raise InputError(f"{without_secrets(path)}: expected a regular file of known size; copy it to one and read that")
    if info.get("islink") and is_local(fs):
        info = {**info, "mtime": os.stat(inner).st_mtime}  # of the file, not of the link
    stamps = (info.get(key) for key in ("mtime", "LastModified", "last_modified", "updated", "etag", "ETag", "created"))
    modified = str(next(filter(None, stamps), ""))
    return InputFile(path, info["size"], modified, compression_of(path))


def compression_of(path: str) -> str | None:
    """How a file is compressed, by the end of its name; None: it is not."""
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
