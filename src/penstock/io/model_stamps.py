"""Models as they lie in their store, local or not: when they change, and whether they are still being written."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import stat
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from penstock.errors import InputError
from penstock.io.files import is_local, store_of
from penstock.io.new_models import ModelState

NANO = 1e-9
SAME_MOMENT = 10_000_000  # nanoseconds: the largest step of the clock that files get their times from
NO_PART_OF_MODELS = "__pycache__"  # to load a model with code of its own writes it
# Stores in which a file can be seen while it is being written. Others put objects whole.
SHARED_DISKS = {"arrow_hdfs", "dbfs", "ftp", "hdfs", "sftp", "smb", "ssh", "webdav", "webhdfs"}
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_TAGS = ("ETag", "etag", "generation", "md5", "oid", "blob_id")


def stamp_of(path: str) -> str:
    """A short text that changes when the model at a path changes: a file or a folder, local or a URL. Empty where there is
    none, such as for a name in a registry, or where it cannot be reached. Reads no contents. Never raises."""
    try:
        if "://" not in path:
            state = local_state(path)
        else:
            fs, inner = store_of(path, InputError)
            fs.invalidate_cache()
            state = local_state(inner) if is_local(fs) else stored_state(fs, inner, fs.info(inner))
    except Exception:  # stores have errors of their own
        return ""
    return "" if state is None else state.stamp


def local_state(path: str) -> ModelState | None:
    """A local file or folder, behind whatever links; None for what is neither. Raises OSError for what cannot be read."""
    own = _readable(path)
    if stat.S_ISREG(own.st_mode):
        finished = own.st_nlink == 1 and _was_renamed(path, own, written=own.st_mtime_ns)
        times = own.st_mtime_ns * NANO, own.st_ctime_ns * NANO
        return ModelState(_digest([_facts("", own)]), own.st_size, *times, finished, own.st_ino)
    return _local_folder(path, own) if stat.S_ISDIR(own.st_mode) else None


def _local_folder(path: str, own: os.stat_result) -> ModelState:
    inside = list(_below(path, {(own.st_dev, own.st_ino)}))
    files = sorted((name, each) for name, each in inside if stat.S_ISREG(each.st_mode))
    written = max(each.st_mtime_ns for each in (own, *(each for _, each in inside)))
    touched = max(each.st_ctime_ns for each in (own, *(each for _, each in inside)))
    modified = max((each.st_mtime_ns for _, each in files), default=0)
    return ModelState(
        stamp=_digest(_facts(os.path.relpath(name, path), each) for name, each in files),
        size=sum(each.st_size for _, each in files),
        modified=modified * NANO,
        touched=touched * NANO,
        finished=_was_renamed(path, own, written),
        inode=own.st_ino,
    )


def _was_renamed(path: str, own: os.stat_result, written: int) -> bool:
    """Whether the last that happened to it is that it came into its folder, after all of it was written: that changes the
    folder in the same moment. Another mode or owner does not, and may come while it is written."""
    if own.st_ctime_ns <= written:
        return False
    place = os.path.realpath(path) if os.path.islink(path) else path
    try:
        changed = os.stat(os.path.dirname(place) or ".").st_mtime_ns
    except OSError:
        return False
    return changed > written and abs(changed - own.st_ctime_ns) <= SAME_MOMENT


def _below(folder: str, above: set[tuple[int, int]]) -> Iterator[tuple[str, os.stat_result]]:
    """Every file and folder in a folder, hidden ones too: something may be on its way there."""
    for name in os.listdir(folder):
        if name == NO_PART_OF_MODELS:
            continue
        path = os.path.join(folder, name)
        found = _readable(path)
        yield path, found
        place = (found.st_dev, found.st_ino)
        if stat.S_ISDIR(found.st_mode) and place not in above:
            yield from _below(path, above | {place})


def _readable(path: str) -> os.stat_result:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path):
            raise OSError(f"{path}: a link that leads nowhere") from None
        raise
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return found


def _facts(name: str, found: os.stat_result) -> tuple[object, ...]:
    return name, found.st_size, found.st_mtime_ns, found.st_ino


def stored_state(fs: Any, inner: str, info: dict[str, Any]) -> ModelState | None:
    """A file or folder of another store than the local disk; None for what is neither."""
    if info["type"] == "file":
        return _stored(fs, [("", info)], puts_whole(fs))
    if info["type"] == "directory":  # its objects come one by one
        found = fs.find(inner, detail=True)
        return _stored(fs, sorted((name, each) for name, each in found.items() if _counts(name, inner)), finished=False)
    return None


def _counts(name: str, folder: str) -> bool:
    return NO_PART_OF_MODELS not in name[len(folder) :].split("/")


def _stored(fs: Any, files: list[tuple[str, dict[str, Any]]], finished: bool) -> ModelState:
    times = [_modified(info) for _, info in files]
    sizes = [info["size"] for _, info in files if isinstance(info.get("size"), int)]
    facts = [(name, info.get("size"), time, _tag(info)) for (name, info), time in zip(files, times, strict=True)]
    return ModelState(
        stamp=_digest(facts),
        size=sum(sizes) if len(sizes) == len(files) else None,
        modified=max((time for time in times if time is not None), default=0.0),
        touched=math.inf if None in times else max((time for time in times if time is not None), default=math.inf),
        finished=finished,
    )


def puts_whole(fs: Any) -> bool:
    """Whether a file of a store can be seen only when all of it is there."""
    inner = getattr(fs, "fs", None)  # of one that wraps another
    return not any(is_local(each) or _protocols(each) & SHARED_DISKS for each in (fs, inner))


def _protocols(fs: Any) -> set[str]:
    told = getattr(fs, "protocol", ())
    return {told} if isinstance(told, str) else set(told)


def _modified(info: dict[str, Any]) -> float | None:
    for name in _TIMES:
        told = info.get(name)
        if isinstance(told, str):
            try:
                told = datetime.fromisoformat(told)
            except ValueError:
                continue
        if isinstance(told, datetime):
            return (told if told.tzinfo is not None else told.replace(tzinfo=UTC)).timestamp()
        if isinstance(told, (int, float)):
            return float(told)
    return None


def _tag(info: dict[str, Any]) -> str:
    return str(next((info[name] for name in _TAGS if info.get(name)), ""))


def _digest(facts: Iterable[tuple[object, ...]]) -> str:
    return hashlib.blake2b(repr(list(facts)).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
