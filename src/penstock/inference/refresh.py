"""How a model is replaced while the pipeline runs: how a new version is checked, and on how many rows it is tried."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.errors import UsageError
from penstock.inference.handler import ModelHandler
from penstock.inference.handler_checks import check_function
from penstock.inference.models_by_key import ModelsByKey
from penstock.models.versions import TrialRule

CANARY_ROWS = 1000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Refresh:
    """What a new version must pass before it is in service."""

    validate: Callable[[Any, Any], Any] | None = None  # of the model and the golden rows; False, or an error: refused
    golden_rows: Any = None
    compare: Callable[[Any, Any], Any] | None = None  # of both answers to a row, the old one first; False: an error
    rule: TrialRule | None = None  # None: it is in service as soon as it is loaded

    @classmethod
    def of(
        cls,
        *,
        validate: Callable[[Any, Any], Any] | None = None,
        golden_rows: Any = None,
        canary: float | None = None,
        canary_rows: int | None = None,
        max_error_rate: float | None = None,
        compare: Callable[[Any, Any], Any] | None = None,
    ) -> Refresh:
        """The user's settings, checked."""
        for name, function in [("validate=", validate), ("compare=", compare)]:
            if function is not None:
                check_function(name, function)
        if golden_rows is not None and validate is None:
            raise UsageError("golden_rows= are for validate=, a function of the model and these rows, which is missing")
        if canary is None:
            given = {"canary_rows": canary_rows, "max_error_rate": max_error_rate, "compare": compare}
            if names := [name for name, value in given.items() if value is not None]:
                raise UsageError(f"{names[0]}= is for a canary: give canary=, the share of rows that a new model gets first")
            return cls(validate=validate, golden_rows=golden_rows)
        _check_share("canary", canary, "the share of rows that a new model gets first, more than 0 and less than 1")
        rate = 0.0 if max_error_rate is None else max_error_rate
        if rate != 0:
            _check_share("max_error_rate", rate, "the share of its rows that may fail, from 0 to less than 1")
        rows = CANARY_ROWS if canary_rows is None else canary_rows
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            raise UsageError(f"canary_rows={rows!r}: expected a whole number of rows, at least 1")
        rule = TrialRule(share=float(canary), rows=rows, max_error_rate=float(rate))
        return cls(validate=validate, golden_rows=golden_rows, compare=compare, rule=rule)

    def check_handler(self, handler: ModelHandler[Any, Any, Any]) -> None:
        """UsageError for one that does not allow what these settings need."""
        if self.compare is not None and not handler.retry_safe:
            raise UsageError(
                f"compare= passes rows to the old model and to the new one, and {type(handler).__name__} says that no row "
                "may be passed to run_inference() twice (retry_safe = False); leave compare= out"
            )

    def same(self, other: Refresh | None) -> bool:
        mine = self.validate, self.compare, self.rule
        return other is not None and mine == (other.validate, other.compare, other.rule) and self._same_rows(other)

    def _same_rows(self, other: Refresh) -> bool:
        try:
            return self.golden_rows is other.golden_rows or bool(self.golden_rows == other.golden_rows)
        except ValueError:  # arrays do not compare to a single truth
            return False

    def describe(self) -> str:
        told = "the model may change during the run"
        if self.validate is not None:
            told += ", after a check"
        if self.rule is not None:
            told += f", after {self.rule.rows:,} rows of a canary of {self.rule.share:.3g}"
        return told


class Refreshing(NamedTuple):
    """What a process that holds models of a step is told of how they change. It can be pickled."""

    folder: str  # of the run
    key: str  # of the session
    refresh: Refresh
    holders: int = 1  # processes on this machine that each hold a copy, and change at the same time
    on_device: int = 1  # of these, on the same GPU at most, if the model is on one
    prepares_alike: bool = False  # how rows are prepared cannot change: versions that need that are refused
    load_timeout: float | None = None  # seconds that loading a new version may take


def check_can_change(handler: ModelHandler[Any, Any, Any]) -> None:
    """UsageError for a handler that cannot be told another path."""
    kinds = handler.kinds() if isinstance(handler, ModelsByKey) else [handler]
    for kind in kinds:
        if type(kind).update_model_path is ModelHandler.update_model_path:
            raise UsageError(
                f"{type(kind).__name__} cannot load a model from another path, so its model cannot change while a pipeline "
                "runs: define update_model_path(self, model_path), which sets what load_model() loads"
            )


def check_reads(handler: ModelHandler[Any, Any, Any], source: Any) -> None:
    """UsageError for a handler that cannot load what a source of models gives."""
    if getattr(source, "is_local", True):  # or it is no pattern of files
        return
    for kind in handler.kinds() if isinstance(handler, ModelsByKey) else [handler]:
        if not getattr(kind, "reads_urls", True):
            raise UsageError(
                f"{type(kind).__name__} loads folders of this machine and names in the Hugging Face hub, and no URLs: its "
                f"models cannot change with {source.describe()!r}; watch a folder that is mounted here, or give "
                "model_metadata_pcoll= a step behind WatchFilePattern that copies each version and gives its local path"
            )


def _check_share(name: str, given: object, expected: str) -> None:
    if not isinstance(given, numbers.Real) or isinstance(given, bool) or not 0 < float(given) < 1:
        raise UsageError(f"{name}={given!r}: expected {expected}")
