"""Warnings of what was built and never used: a sink that is applied to no rows, a pipeline that is not run. Nothing is
written then, and nothing fails."""

from __future__ import annotations

import atexit
import dis
import os
import sys
import warnings
import weakref
from types import CodeType, FrameType

_never_run: dict[object, str] = {}  # pipelines with sinks, by the mark of each: the name of a sink


class Unapplied:
    """Held by a transform that writes, and by its copies under other names.

    Where a statement is nothing but such a transform, the last of them dies in that very statement. Only that is warned
    of: one that is kept in a variable or in another object may be meant for later."""

    def __init__(self, name: str | None = None) -> None:
        """Without a name, as in a copy for another process, it warns of nothing."""
        self._warning = None if name is None else weakref.finalize(self, _warn_if_dropped, name, _maker(sys._getframe(1)))
        if self._warning is not None:
            self._warning.atexit = False

    def applied(self) -> None:
        if self._warning is not None:
            self._warning.detach()

    def __reduce__(self) -> tuple[type[Unapplied], tuple[()]]:
        return Unapplied, ()


def _maker(frame: FrameType | None) -> CodeType | None:
    """The code that makes the transform: the innermost that is no constructor's."""
    while frame is not None and frame.f_code.co_name == "__init__":
        frame = frame.f_back
    return None if frame is None else frame.f_code


def _warn_if_dropped(name: str, maker: CodeType | None) -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == weakref.__file__:
        frame = frame.f_back
    if frame is None or frame.f_code is not maker:
        return
    if dis.opname[maker.co_code[frame.f_lasti]] == "POP_TOP":  # the end of a statement that is only an expression
        text = f"{name}(...) is applied to no rows, so nothing is written: write rows | {name}(...)"
        warnings.warn_explicit(text, UserWarning, maker.co_filename, frame.f_lineno)


def has_sink(mark: object, sink: str) -> None:
    """A sink was added to the pipeline of this mark. What a module builds while it is imported does not count, for a worker
    imports it too; nor does what a test builds."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return
        frame = frame.f_back
    if "PYTEST_CURRENT_TEST" not in os.environ:
        _never_run.setdefault(mark, sink)


def is_used(mark: object) -> None:
    """The pipeline of this mark was run or explained, or an error ended its building."""
    _never_run.pop(mark, None)


@atexit.register
def _warn_of_pipelines() -> None:
    if not _never_run or hasattr(sys, "last_value") or sys.stderr is None:  # the error that ended the script says enough
        return
    sink = next(iter(_never_run.values()))
    sys.stderr.write(
        f"penstock: warning: {len(_never_run)} pipeline(s) were built and never run, so that {sink!r} wrote nothing: "
        "build them in `with ps.Pipeline() as p:`, or call p.run()\n"
    )
