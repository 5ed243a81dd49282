"""Digests of models and inputs for the manifest, made by a thread beside the work."""

from __future__ import annotations

import queue
import threading

from penstock.errors import PenstockError
from penstock.io.digests import sha256_of
from penstock.io.files import InputFile, list_files
from penstock.journal.journal import Journal
from penstock.options import RunOptions

MOST_BYTES = 1 << 30  # of all inputs together, unless the user wants digests of more; and of models, where there are many
MANY_FILES = 100


class Digests:
    """Used in a `with` block around the work. The thread reads files; the journal is written by whoever calls store()."""

    def __init__(self, journal: Journal, options: RunOptions) -> None:
        self._journal = journal
        models, inputs = _missing(journal, "model"), _missing(journal, "input")
        self._wanted = models if options.input_digests or len(models) < MANY_FILES or _is_little(models) else []
        if options.input_digests or (options.input_digests is None and _is_little(inputs)):
            self._wanted += inputs
        # From the thread to whoever calls store(), the only one that uses the journal.
        self._found: queue.SimpleQueue[tuple[str, str, InputFile, str]] = queue.SimpleQueue()
        self._stopped = False  # written by __exit__(), looked at by the thread between two files: no lock
        self._thread = threading.Thread(target=self._read, name="penstock-digests", daemon=True)

    def __enter__(self) -> Digests:
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        self._stopped = exc is not None
        if self._wanted:
            self._thread.join(0.1 if self._stopped else None)

    def store(self) -> None:
        """Put into the journal what the thread has found since the last time."""
        found = [self._found.get() for _ in range(self._found.qsize())]
        if found:
            self._journal.put_files(found)

    def finish(self) -> None:
        """Wait for the rest, and store it."""
        if self._wanted:
            self._thread.join()
        self.store()

    def _read(self) -> None:
        for role, owner, file in self._wanted:
            if self._stopped:
                return
            try:
                digest = sha256_of(file.path)
                [now] = list_files(file.path)
            except (PenstockError, ValueError):
                continue  # whoever reads it for the run will say so
            if (now.size, now.modified) == (file.size, file.modified):  # else it is the digest of something else
                self._found.put((role, owner, file, digest))


def _is_little(files: list[tuple[str, str, InputFile]]) -> bool:
    return sum(file.size for _, _, file in files) <= MOST_BYTES


def _missing(journal: Journal, role: str) -> list[tuple[str, str, InputFile]]:
    found = journal.files(role).items()
    return [(role, owner, file) for owner, files in found for file, digest in files.values() if digest is None]
