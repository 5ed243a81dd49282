"""The models that a pattern names, as they lie in their store."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from penstock.errors import InputError, PenstockError, UsageError
from penstock.io.files import checked_path, store_of
from penstock.io.model_stamps import local_state, stored_state
from penstock.io.new_models import ModelState
from penstock.rows import safe_str

KEY = "{key}"
_PARTS = re.compile(r"(\*\*/|\*\*|\*|\?|\[!?\]?[^\]/]*\]|\{key\})")
_MEANINGS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]", KEY: "(?P<key>[^/]+)"}


class Listing(NamedTuple):
    """What a pattern names now, by path, and what was wrong when it was looked at: empty, if nothing."""

    models: dict[str, ModelState]
    trouble: str


class ModelPattern:
    """A path or URL, with wildcards or without, that names files or folders; with "{key}" in it, those of many keys.

    Names that start with "." or "_" are left out, unless the pattern spells that out; a key may start with "_".
    """

    def __init__(self, pattern: str | os.PathLike[str], step: str) -> None:
        text = checked_path(pattern, step)
        self.text = text.partition("://")[2] if text.startswith(("file://", "local://")) else text
        if self.text.count(KEY) > 1:
            raise UsageError(f"{step}({pattern!r}): expected {KEY} at most once, as in 'models/{KEY}.pt'")
        self.has_key = KEY in self.text
        self._named = re.compile("".join(_meaning(part) for part in _PARTS.split(self.text)), re.DOTALL)

    @property
    def is_local(self) -> bool:
        """Whether it names files of this machine, and not of an object store."""
        return "://" not in self.text

    def key_of(self, path: str) -> str | None:
        """The key that a path of this pattern is for; None without {key}."""
        found = self._named.fullmatch(path) if self.has_key else None
        return None if found is None else found["key"]


def _meaning(part: str) -> str:
    if part.startswith("[") and len(part) > 2:
        inside = part[1:-1].replace("\\", r"\\").replace("[", r"\[").replace("^", r"\^")
        return f"[^/{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
    return _MEANINGS.get(part) or re.escape(part)


def list_models(pattern: ModelPattern) -> Listing:
    """What the pattern names now. What cannot be reached or read is trouble, and no error. Raises UsageError for a URL that
    no installed package can read."""
    try:
        return _local_listing(pattern) if pattern.is_local else _stored_listing(pattern)
    except PenstockError:
        raise
    except Exception as exc:  # stores have errors of their own
        return Listing({}, _told(exc))


def _local_listing(pattern: ModelPattern) -> Listing:
    return _listing(
        ((path, partial(local_state, path)) for path in _local_paths(pattern)),
        lambda: os.scandir(_base(_globbed(pattern.text))).close(),
    )


def _local_paths(pattern: ModelPattern) -> list[str]:
    if not pattern.has_key and os.path.lexists(pattern.text):
        return [pattern.text]
    wanted = _globbed(pattern.text)
    return _visible(glob.glob(wanted, recursive=True, include_hidden=True), wanted, pattern) if _is_glob(wanted) else []


def _stored_listing(pattern: ModelPattern) -> Listing:
    fs, root = store_of(pattern.text, InputError)
    fs.invalidate_cache()
    found = _stored_infos(fs, root, pattern)
    full = _full_paths(pattern.text, root, fs)
    return _listing(
        ((full(inner), partial(stored_state, fs, inner, info)) for inner, info in found.items()),
        lambda: fs.ls(_base(_globbed(root)), detail=False),
    )


def _stored_infos(fs: Any, root: str, pattern: ModelPattern) -> dict[str, Any]:
    if not pattern.has_key:
        try:
            return {root: fs.info(root)}
        except FileNotFoundError:
            if not _is_glob(root):
                return {}
    wanted = _globbed(root)
    found = fs.glob(wanted, detail=True)
    return {inner: found[inner] for inner in _visible(found, wanted, pattern)}


def _listing(models: Iterable[tuple[str, Callable[[], ModelState | None]]], look: Callable[[], object]) -> Listing:
    """The state of each model that has one. Where nothing is found, look() raises if the folder cannot be listed."""
    states: dict[str, ModelState] = {}
    troubles: list[str] = []
    for path, state_of in models:
        try:
            state = state_of()
        except FileNotFoundError:  # it has gone since it was listed
            continue
        except Exception as exc:
            troubles.append(_told(exc))
            continue
        if state is not None:
            states[path] = state
    if not states and not troubles:
        try:
            look()
        except Exception as exc:
            troubles.append(_told(exc))
    more = f" (and {len(troubles) - 1:,} more)" if len(troubles) > 1 else ""
    return Listing(states, troubles[0] + more if troubles else "")


def _told(exc: Exception) -> str:
    return f"{type(exc).__name__}: {safe_str(exc)}"


def _globbed(text: str) -> str:
    return text.replace(KEY, "*")


def _is_glob(text: str) -> bool:
    return re.search(r"[*?[]", text) is not None


def _base(wanted: str) -> str:
    """The folder in front of all wildcards."""
    return re.split(r"[*?\[]", wanted, maxsplit=1)[0].rpartition("/")[0] or "/"


def _visible(paths: Iterable[str], wanted: str, pattern: ModelPattern) -> list[str]:
    start = len(_base(wanted))
    hidden = (".",) if pattern.has_key else (".", "_")
    if any(name.startswith(hidden) for name in wanted[start:].split("/")):
        return list(paths)
    return [path for path in paths if not any(name.startswith(hidden) for name in path[start:].split("/"))]


def _full_paths(text: str, root: str, fs: Any) -> Callable[[str], str]:
    """Makes a URL of a path inside a store, spelled like the pattern: with all that is needed to reach it again."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(reversed(text), reversed(root), strict=False)))
    outside, inside = text[: len(text) - same], root[: len(root) - same]

    def full(inner: str) -> str:
        return outside + inner.removeprefix(inside) if inner.startswith(inside) else str(fs.unstrip_protocol(inner))

    return full
