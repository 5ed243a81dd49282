"""Whether several threads may call one scikit-learn model at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

PACKAGES = {"builtins", "collections", "numpy", "scipy", "sklearn"}


def is_thread_safe(model: Any) -> bool:
    """Whether predict() is. It changes no estimator of scikit-learn's; what else may be in a model is not known. Those that
    share their work out by joblib set aside the warning filters of the whole process meanwhile, also with n_jobs=1."""
    return all(_is_known(part) and not _uses_joblib(part) for part in _parts(model))


def _is_known(part: Any) -> bool:
    named = part if isinstance(part, type) or hasattr(part, "__code__") else type(part)
    return str(named.__module__).partition(".")[0] in PACKAGES


def _uses_joblib(part: Any) -> bool:
    """Linear models have n_jobs for fit() alone."""
    return hasattr(part, "n_jobs") and not type(part).__module__.startswith("sklearn.linear_model.")


def _parts(model: Any) -> Iterator[Any]:
    """All objects in a model, but for texts and numbers."""
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        part = waiting.pop()
        if isinstance(part, (str, bytes, int, float)) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += _inside(part)


def _inside(part: Any) -> Iterable[Any]:
    if isinstance(part, Mapping):
        return [*part.keys(), *part.values()]
    if isinstance(part, (list, tuple, set, frozenset)):
        return part
    if getattr(getattr(part, "dtype", None), "hasobject", False):
        return part.ravel().tolist()  # type: ignore[no-any-return]
    return () if isinstance(part, type) else getattr(part, "__dict__", {}).values()
