"""Digests of what is in files.

SHA-256 names what comes from elsewhere: models, inputs, scripts. What a run writes has the 128 bits of XXH3: they find
damage as well, and take no time that one could measure (SHA-256 took some 3% of a job that only reads and writes).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from penstock.errors import InputError
from penstock.io.files import open_cause, store_of, without_secrets


def sha256_of(path: str | os.PathLike[str]) -> str:
    """The SHA-256 digest of a file's bytes, as they are stored, in hex. Reads all of it, a piece at a time."""
    import hashlib

    return _digest_of(path, hashlib.sha256)


def xxh128_of(path: str | os.PathLike[str]) -> str:
    """The XXH3 digest of a file's bytes, as xxh128sum prints it."""
    return _digest_of(path, new_xxh128)


def new_xxh128() -> Any:
    """A digest to be updated, as hashlib's."""
    import xxhash

    return xxhash.xxh3_128()


def _digest_of(path: str | os.PathLike[str], kind: Callable[[], Any]) -> str:
    import hashlib

    fs, inner = store_of(os.fspath(path), InputError)
    try:
        with fs.open(inner, "rb") as file:
            return str(hashlib.file_digest(file, kind).hexdigest())
    except OSError as exc:
        told = without_secrets(f"{os.fspath(path)}: cannot be read: {exc}")
        raise InputError(f"{told}; check the path and the right to read it") from open_cause(exc)
