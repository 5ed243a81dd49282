"""Whether files are what they were: their sizes and dates, and digests of what is in them."""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

from penstock.errors import InputError
from penstock.io.files import list_files, store_of

CHUNK_BYTES = 4 << 20


class FileStamp(NamedTuple):
    """A file as its store describes it: the same stamp and size mean, in all likelihood, the same content."""

    path: str
    size: int
    stamp: str


def files_below(path: str | os.PathLike[str]) -> list[FileStamp]:
    """The file that a local path or a URL names, or all files below it if it is a folder, sorted by path.

    As for inputs, names in a folder that start with "." or "_" do not count. InputError when there is nothing.
    """
    return [FileStamp(file.path, file.size, file.modified) for file in list_files(os.fspath(path))]


def sha256_of(path: str | os.PathLike[str]) -> str:
    """The SHA-256 digest of a file's bytes, as they are stored, in hex. Reads all of it, a few megabytes at a time."""
    fs, inner = store_of(os.fspath(path), InputError)
    digest = hashlib.sha256()
    try:
        with fs.open(inner, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError as exc:
        raise InputError(f"{os.fspath(path)}: cannot be read: {exc}; check the path and the right to read it") from exc
    return digest.hexdigest()
