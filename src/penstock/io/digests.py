"""Digests of what is in files."""

from __future__ import annotations

import hashlib
import os

from penstock.errors import InputError
from penstock.io.files import store_of


def sha256_of(path: str | os.PathLike[str]) -> str:
    """The SHA-256 digest of a file's bytes, as they are stored, in hex. Reads all of it, a piece at a time."""
    fs, inner = store_of(os.fspath(path), InputError)
    try:
        with fs.open(inner, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise InputError(f"{os.fspath(path)}: cannot be read: {exc}; check the path and the right to read it") from exc
