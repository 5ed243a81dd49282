"""What was built and never used: a sink that no rows were piped into, a pipeline that was not run. Nothing is written then,
and no error is raised: so it is said."""

from __future__ import annotations

import atexit
import dis
import os
import sys
import warnings
import weakref
from types import CodeType

from penstock.transport.packing import is_loading

_POP_TOP = dis.opmap["POP_TOP"]
_never_run: dict[object, str] = {}  # pipelines with sinks, by a mark of each: the sinks' steps


class Unapplied:
    """Held by a transform that writes, and by its copies. Where a statement is nothing but such a transform, the last of
    them dies in that statement: only that is warned of, not what is kept in a variable or in another object."""

    def __init__(self, name: str) -> None:
        self._warning = weakref.finalize(self, _warn_if_dropped, name, _user_code())
        self._warning.atexit = False

    def applied(self) -> None:
        self._warning.detach()


def _user_code() -> CodeType | None:
    """The code that makes the transform: the first that is not in a constructor."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__init__":
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_code


def _warn_if_dropped(name: str, code: CodeType | None) -> None:
    frame = sys._getframe(1)
    while frame.f_code.co_filename == weakref.__file__ and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code is code and frame.f_code.co_code[frame.f_lasti] == _POP_TOP:
        text = f"{name} is applied to no rows, so nothing is written: write rows | {name}(...)"
        warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


def not_run_yet(mark: object, sink: str) -> None:
    """A sink was added to the pipeline of this mark. In a process that only imports the script of another, it is no news."""
    if not is_loading():
        _never_run.setdefault(mark, sink)


def was_used(mark: object) -> None:
    """The pipeline was run, or explained, or was not built to its end."""
    _never_run.pop(mark, None)


@atexit.register
def _warn_of_pipelines() -> None:
    if _never_run and not hasattr(sys, "last_value"):  # else an error has ended the script, and it says so itself
        sys.stderr.write(
            f"penstock: warning: {len(_never_run)} pipeline(s) with sinks never ran, so nothing was written, for instance by "
            f"{next(iter(_never_run.values()))!r}: build them in a `with` block, or call run(){os.linesep}"
        )
