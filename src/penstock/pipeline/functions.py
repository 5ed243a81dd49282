"""The functions that transforms are given: their names, and what they can be called with."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any


def describe_function(fn: Callable[..., Any]) -> str:
    """A function's name for labels; a lambda is named by where it stands."""
    if isinstance(fn, functools.partial):
        return describe_function(fn.func)
    name = getattr(fn, "__name__", type(fn).__name__)
    code = getattr(fn, "__code__", None)
    if name == "<lambda>" and code is not None:
        return f"lambda at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    return str(name)


def takes(fn: Any, *args: Any) -> bool:
    """Whether it can be called with these; so it seems of functions in C, which do not say what they take."""
    try:
        inspect.signature(fn).bind(*args)
    except TypeError:
        return False
    except ValueError:
        return callable(fn)
    return True
