"""The first batches of a new version: whose answers are taken, and what they say about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.blocks import row_count
from penstock.inference.live_versions import Live, VersionCall, differing, one_error, told_error, tried
from penstock.models.outcome import Outcome

if TYPE_CHECKING:
    from penstock.inference.refresher import Refresher


class Proving:
    """Of the versions of one model. judge(version, rows, errors, why) is told of each batch."""

    def __init__(
        self,
        reports: Refresher,
        compare: Callable[[Any, Any], Any] | None,
        judge: Callable[[Live, int, int, str], None],
    ) -> None:
        self._reports = reports
        self._compare = compare
        self._judge = judge

    def beside(self, new: Live, old: Live, call: VersionCall) -> Outcome:
        """The answers of a version that has to prove itself, if it has one for each row; else those of the other."""
        rows = row_count(call.batch)
        with self._reports.at_work(new.version, "trial", rows):
            made, why = tried(new, call)
        if old.prepared != new.prepared:  # the one in service cannot be asked for these rows
            if made is None or len(made.failures) == rows:
                self._judge(new, rows, rows, why)
                return Outcome([None] * rows, stale=old.version.number)
            self._judge(new, rows, 0, "")
            return call.for_another().on(new) if made.failures else made
        failed = set(range(rows)) if made is None else set(made.failures)
        if not failed and self._compare is None:
            self._judge(new, rows, 0, "")
            assert made is not None
            return made
        kept = call.for_another().on(old)
        errors = failed - set(kept.failures)
        if self._compare is not None and made is not None:
            unlike, told = differing(self._compare, kept, made)
            errors |= unlike
            why = why or told
        if len(kept.failures) < rows or not failed:  # rows that both fail for say nothing
            self._judge(new, rows, len(errors), why)
        return made if made is not None and not failed and not errors else kept

    def once(self, new: Live, call: VersionCall) -> Outcome:
        """The answers of one whose rows may be passed to no other (retry_safe): what fails, fails."""
        rows = row_count(call.batch)
        new.is_proven = True
        with self._reports.at_work(new.version, "trial", rows):
            try:
                made = call.on(new)
            except Exception as exc:
                self._judge(new, rows, rows, told_error(exc))
                raise
        self._judge(new, rows, len(made.failures), one_error(made))
        return made
