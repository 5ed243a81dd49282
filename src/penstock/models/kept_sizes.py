"""Sizes of batches that searches on devices have found, kept for the next run: a file in the run's own folder, where it has
one, and one in the user's cache.

What is kept only says where a search begins, so nothing is lost with the file: one that is broken, or cannot be written, is
ignored. Of two processes that write at the same time, one wins; readers see a whole file always.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.models.front import Search

logger = logging.getLogger(__name__)

FILE = "batch_sizes.json"
MOST = 1000  # entries; the oldest go


class KeptSize:
    """What the searches for a model's copies have found: read when a copy is there, written whenever it has changed. Of
    copies with one key, on devices of one kind, the first says what is kept."""

    def __init__(self, run_dir: str = "") -> None:
        self._folders = [*([Path(run_dir)] if run_dir else []), cache()]  # the first that knows is believed
        self._keys: dict[int, str] = {}  # of the copies that are there
        self._known: dict[str, int | None] = {}  # what the file says, by key

    def open(self, key: str | None, search: Search, copy: int = 0) -> None:
        """A model copy is there, whose search has this key: it begins at what is kept. None: nothing is."""
        if key is None:
            return
        if key not in self._keys.values():
            self._known[key] = next((size for folder in self._folders if (size := read(folder).get(key)) is not None), None)
        self._keys[copy] = key
        if (known := self._known[key]) is not None:
            search.begin_at(known, copy)

    def keep(self, search: Search) -> bool:
        """Write what was found, if it is news; whether it was."""
        news = {}
        for key, copy in {key: copy for copy, key in sorted(self._keys.items(), reverse=True)}.items():
            found = search.found(copy)
            if found is not None and found != self._known[key]:
                news[key] = found
        for key, found in news.items():
            for folder in self._folders:
                write(folder, key, found)
        self._known |= news
        return bool(news)


def cache() -> Path:
    """Of Penstock's cache."""
    if own := os.environ.get("PENSTOCK_CACHE"):
        return Path(own)
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "penstock"
    return Path("~/.cache/penstock").expanduser()


def read(folder: Path) -> dict[str, int]:
    """All that is kept there, the oldest first."""
    try:
        entries = json.loads((folder / FILE).read_text())
        return {key: size for key, size in entries.items() if type(size) is int and size >= 1}
    except FileNotFoundError:
        return {}
    except Exception as exc:  # whatever is wrong with it
        logger.debug("kept batch sizes are not read: %s: %s", type(exc).__name__, exc)
        return {}


def write(folder: Path, key: str, size: int) -> None:
    """Keep it as the newest."""
    try:
        entries = {**{other: kept for other, kept in read(folder).items() if other != key}, key: size}
        newest = dict(list(entries.items())[-MOST:])
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=FILE, delete=False) as file:
            try:
                json.dump(newest, file, indent=1)
                file.flush()
                os.replace(file.name, folder / FILE)
            except BaseException:
                os.unlink(file.name)
                raise
    except Exception as exc:  # no room, no rights, no home
        logger.debug("a batch size is not kept: %s: %s", type(exc).__name__, exc)
