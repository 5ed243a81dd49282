"""The user's functions over the rows of a step: an error ends the run or, where errors are handled, costs its row."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from penstock.errors import UsageError
from penstock.failures import RAISED, Failure, Handling
from penstock.inference.path import RowPath, name_of
from penstock.row_copies import own_rows, told_once
from penstock.rows import forget_variables, let_through, map_rows

logger = logging.getLogger(__name__)


def warn_of_functions(path: RowPath, handling: Handling) -> None:
    """Log that functions around the model are not guarded, where the user asks that the model be."""
    if handling.isolated and (path.functions_before or path.functions_after):
        asked = "use_subprocess=True" if handling.timeout is None else f"timeout={handling.timeout:g}"
        logger.warning(
            "with_exception_handling(%s) is for the model and prepare(): pre- and postprocess functions run in the worker, "
            "and one that hangs or crashes is not stopped; make it a step of its own, "
            "ps.Map(function).with_exception_handling(%s)",
            asked,
            asked,
        )


class Guard:
    """Of one step, under its name."""

    def __init__(self, step: str, handling: Handling | None, model_id: str | None) -> None:
        self.step = step
        self.handling = handling
        self.model_id = model_id  # of rows that never come to an outcome

    def each(self, function: Callable[[Any], Any], rows: list[Any], what: str) -> tuple[list[Any], dict[int, Failure]]:
        """function(row) for every row, None where it failed, and the failures by position. Where errors are handled, the
        rows stay as they are."""
        handling, name = self.handling, name_of(function, self.step, what)
        if handling is None:
            return map_rows(function, rows, name), {}
        failed: dict[int, Failure] = {}

        def forgive(at: int, exc: BaseException) -> bool:
            if handling.handles(exc):
                failed[at] = self.failure(exc).because(told_once([rows[at]]))
            return at in failed

        return map_rows(function, own_rows(rows), name, forgive), failed

    def all_or_each(
        self, function: Callable[[list[Any]], list[Any]], rows: list[Any]
    ) -> tuple[list[Any], dict[int, Failure]]:
        """function(rows); where errors are handled and it fails, of each row alone, None where that failed, and the failures
        by position."""
        try:
            return function(rows), {}
        except BaseException as exc:
            let_through(exc)
            if self.handling is None:
                raise
            forget_variables(exc)  # each row says why it fails
        made: list[Any] = []
        failed: dict[int, Failure] = {}
        for at, row in enumerate(rows):
            try:
                made += function([row])
            except BaseException as exc:
                let_through(exc)
                if isinstance(exc, UsageError) or not self.handling.handles(exc.__cause__ or exc):
                    raise
                failed[at] = self.failure(exc.__cause__ or exc)
                made.append(None)
        return made, failed

    def failure(self, exc: BaseException, kind: str = RAISED) -> Failure:
        return Failure.of(exc, self.step, kind=kind, model_id=self.model_id)
