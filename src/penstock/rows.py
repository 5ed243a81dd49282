"""Rows: one function over many of them, with errors that name the row, and the row that a model's answer is."""

from __future__ import annotations

import inspect
import numbers
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import length_hint
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

from penstock.errors import StepError
from penstock.forks import RowsToMap, end_if_forked, this_process

Items = TypeVar("Items", bound=Sequence[Any])

MOST_TOLD = 256  # places that errors came from, whose text is kept
SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR  # flags of code
SIGNALS = (KeyboardInterrupt, GeneratorExit)  # no errors: they end what runs. SIGTERM is one of the first


def let_through(exc: BaseException) -> None:
    """Called first with whatever the user's code has raised: all but a signal is its error, also what is no Exception, such
    as SystemExit, asyncio.CancelledError and the panics of Rust libraries."""
    if isinstance(exc, SIGNALS):
        raise exc


class PredictionResult(NamedTuple):
    """One answer with the example it answers and the model that gave it."""

    example: Any
    inference: Any
    model_id: str | None = None


def map_rows(
    function: Callable[[Any], Any], rows: list[Any], step: str, forgive: Callable[[int, BaseException], bool] | None = None
) -> list[Any]:
    """[function(row) for row in rows]; each row is passed exactly once.

    An error ends it, unless `forgive`, told the row's position and the error, says to go on: that row is then None."""
    if forgive is not None:
        return _map_forgiving(function, rows, step, forgive)
    rest, began = iter(rows), this_process()
    try:
        with RowsToMap(rest):
            done = [function(row) for row in rest]  # map() calls functions of Python from C, which takes a tenth longer
        end_if_forked(began, step)
    except BaseException as exc:
        end_if_forked(began, step)
        let_through(exc)
        raise row_error(step, rows[len(rows) - length_hint(rest) - 1], exc) from exc
    return done


def _map_forgiving(
    function: Callable[[Any], Any], rows: list[Any], step: str, forgive: Callable[[int, BaseException], bool]
) -> list[Any]:
    done: list[Any] = []
    rest, began = iter(rows), this_process()
    while True:
        try:
            with RowsToMap(rest):
                done.extend(map(function, rest))  # on an error, what was done before it stays in the list
            end_if_forked(began, step)
            if len(done) >= len(rows):
                return done
            raise StopIteration("raised by the step's function")  # which map() has taken for its own end
        except BaseException as exc:
            end_if_forked(began, step)
            let_through(exc)
            if not forgive(len(done), exc):
                raise row_error(step, rows[len(done)], exc) from exc
            done.append(None)


def many(made: Any, giver: str, one: str = "for one row, return [row]") -> Any:
    """What a user's function returned where many rows are expected. Raises TypeError for what can be iterated over and is
    no collection of rows: its letters, keys, fields or columns would become rows."""
    if type(made) in (list, tuple):
        return made
    is_record = isinstance(made, tuple) and (hasattr(made, "_fields") or hasattr(made, "n_fields"))
    if isinstance(made, (str, bytes, bytearray, Mapping)) or is_record:
        raise TypeError(f"{giver} returned a {type(made).__name__}; expected an iterable of rows: {one}")
    if hasattr(made, "columns"):
        records = "table.to_pylist()" if hasattr(made, "to_pylist") else "frame.to_dict('records')"
        raise TypeError(
            f"{giver} returned a {type(made).__name__}; expected an iterable of rows: return {records}, "
            "or take columns to columns with ps.MapBatches"
        )
    if not hasattr(made, "__iter__") and not hasattr(made, "__getitem__"):
        kind = "None" if made is None else type(made).__name__
        raise TypeError(f"{giver} returned {kind}; expected an iterable of rows: {one}")
    return made


def rows_made(items: Any, giver: str) -> Iterator[Any]:
    """What a method of a DoFn returned, one by one."""
    return iter(many(items, giver, "yield each row, or return [row]"))


def without(items: Items, failed: Collection[int]) -> Items | list[Any]:
    """Items but for those at these positions; if all stay, themselves. Few fail of many: what is between them is copied
    whole."""
    if not failed:
        return items
    kept: list[Any] = []
    start = 0
    for at in sorted(failed):
        kept += items[start:at]
        start = at + 1
    return [*kept, *items[start:]]


def weigh_rows(function: Callable[[Any], Any], rows: list[Any], step: str) -> list[int]:
    """The weights of rows, each a number of at least 0."""
    step = f"{step} (element_size_fn)"
    weights = map_rows(function, rows, step)
    for row, weight in zip(rows, weights, strict=True):
        if not isinstance(weight, numbers.Real) or not float(weight) >= 0:
            raise row_error(step, row, TypeError(f"returned {weight!r}; expected a number of at least 0"))
    return weights


def measured(measure: Callable[[list[Any]], Any], rows: list[Any], step: str) -> list[int]:
    """The lengths of rows, from a function of many of them; an error names the row that is to blame."""
    step = f"{step} (length)"
    try:
        lengths = list(measure(rows))
    except BaseException as whole:
        let_through(whole)
        for row in rows:
            try:
                measure([row])
            except BaseException as exc:
                let_through(exc)
                raise row_error(step, row, exc) from exc
        raise row_error(step, rows[0], whole) from whole
    if len(lengths) != len(rows):
        raise StepError(f"step {step!r}: got {len(lengths)} lengths for {len(rows)} rows; expected one for each")
    if all(type(length) is int for length in lengths) and min(lengths, default=0) >= 0:
        return lengths
    for row, length in zip(rows, lengths, strict=True):
        if not isinstance(length, numbers.Integral) or length < 0:
            raise row_error(step, row, TypeError(f"the length is {length!r}; expected a whole number of at least 0"))
    return lengths


def row_error(step: str, row: Any, exc: BaseException, attempts: int = 1, model: str | None = None) -> StepError:
    """The error of one row in one step, to be raised `from exc`. model: that was asked."""
    lines = [f"step {step!r}: {type(exc).__name__}: {safe_str(exc)}{after(attempts)}", f"row: {shorten(row)}"]
    return StepError("\n  ".join([*lines, *([] if model is None else [f"model: {model}"])]))


def after(attempts: int) -> str:
    """For the message of an error that did not pass."""
    return f" (after {attempts} attempts)" if attempts > 1 else ""


def shorten(row: Any, limit: int = 200) -> str:
    """A row for an error message: its repr, cut to a readable length."""
    try:
        text = repr(row)
    except Exception as exc:
        text = f"<{type(row).__name__} whose repr raises {type(exc).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def original_traceback(exc: BaseException) -> str:
    """The traceback of the error behind an error of Penstock's, from where the user's own code begins."""
    return user_traceback(exc.__cause__ or exc)


def has_user_frames(exc: BaseException) -> bool:
    """Whether code that is not Penstock's was running when it was raised."""
    return _foreign(exc.__traceback__) is not None


def cut_own_frames(exc: BaseException) -> None:
    """Take Penstock's frames out of the tracebacks of an error and of those behind it. All others stay, in order."""
    for error in _with_causes(exc):
        error.with_traceback(_foreign(error.__traceback__))  # no attribute is set: a class of errors may be frozen


def forget_variables(exc: BaseException) -> None:
    """Clear the variables of all calls that are over and that an error, or one behind it, came through. Its traceback can
    still be reported.

    A traceback holds these calls, and the calls around them, and they often hold the error: without this, whole batches
    would live on until a garbage collection. So whoever catches errors must not keep one in a variable when it returns."""
    met: set[FrameType] = set()
    for error in _with_causes(exc):
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):  # from the innermost call outwards
            _clear(frame, met)


def _clear(frame: FrameType | None, met: set[FrameType]) -> None:
    """A call, and those around it as far as they are over. met: those that were looked at."""
    while frame is not None and frame not in met:
        met.add(frame)
        if not frame.f_code.co_flags & SUSPENDABLE:  # a generator may go on
            try:
                frame.clear()
            except RuntimeError:  # it is not over
                return
        frame = frame.f_back


def _with_causes(exc: BaseException) -> Iterator[BaseException]:
    """An error and those behind it, or in it, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [exc]
    while waiting:
        error = waiting.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            waiting += [error.__cause__, error.__context__]
            waiting += error.exceptions if isinstance(error, BaseExceptionGroup) else ()
            yield error


def _foreign(frames: TracebackType | None) -> TracebackType | None:
    kept = []
    while frames is not None:
        if not _is_own(frames):
            kept.append(frames)
        frames = frames.tb_next
    made: TracebackType | None = None
    for each in reversed(kept):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made


def _is_own(frames: TracebackType) -> bool:
    return str(frames.tb_frame.f_globals.get("__name__", "")).startswith("penstock.")


def user_traceback(exc: BaseException) -> str:
    """The traceback of an error that a user's code raised, from where that code begins."""
    frames = exc.__traceback__
    while frames is not None and _is_own(frames):
        frames = frames.tb_next
    if frames is not None:
        _forget_earlier_calls(exc)
    frames = frames or exc.__traceback__
    try:
        if frames is None or not _is_plain(exc):
            return "".join(traceback.format_exception(type(exc), exc, frames)).rstrip()
        last = "".join(traceback.format_exception_only(type(exc), exc))
        return f"Traceback (most recent call last):\n{_told_frames(frames)}{last}".rstrip()
    except Exception:  # there is no end to what an error's class may do
        return f"{type(exc).__name__}: {safe_str(exc)}"


_CONTEXT: Any = BaseException.__dict__["__context__"]


def _forget_earlier_calls(exc: BaseException) -> None:
    """Rows of a batch that failed are called for again while Penstock handles its error: that is not how this one arose."""
    error: BaseException | None = exc
    while error is not None:
        before = error.__context__
        if before is not error.__cause__ and before is not None and before.__traceback__ and _is_own(before.__traceback__):
            _CONTEXT.__set__(error, None)  # Penstock has caught it, and not the user's code. Its class may be frozen
            before = None
        error = before


def _is_plain(exc: BaseException) -> bool:
    """Whether the error is told by its frames and its message alone."""
    alone = exc.__cause__ is None and (exc.__context__ is None or exc.__suppress_context__)
    return alone and not isinstance(exc, (BaseExceptionGroup, NameError, ImportError, SyntaxError))


_told: dict[tuple[tuple[int, int], ...], tuple[list[CodeType], str]] = {}


def _told_frames(frames: TracebackType) -> str:
    """The frames as text. Many rows fail in one place, and telling it costs more than finding the row."""
    codes: list[CodeType] = []
    places: list[tuple[int, int]] = []
    at: TracebackType | None = frames
    while at is not None:
        codes.append(at.tb_frame.f_code)
        places.append((id(codes[-1]), at.tb_lasti))
        at = at.tb_next
    found = _told.get(tuple(places))
    if found is None:
        if len(_told) >= MOST_TOLD:
            _told.clear()
        found = _told[tuple(places)] = codes, "".join(traceback.format_tb(frames))  # the codes stay, and so their ids
    return found[1]


def safe_str(exc: BaseException) -> str:
    """An error's message, also when making it raises."""
    try:
        return str(exc)
    except Exception:
        return "(its message cannot be shown)"
