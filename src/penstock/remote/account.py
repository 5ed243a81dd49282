"""What a run has spent, over all processes of a machine."""

from __future__ import annotations

from penstock.errors import BudgetSpentError
from penstock.remote.budget import Budget, Prices, Spending
from penstock.remote.shared_numbers import SharedNumbers


class Account:
    """What all processes of a machine have spent in a run, and may still spend. Used by any thread.

    path: of the file that they share, which outlives them where a run can be resumed; None: there is one process."""

    def __init__(self, step: str, budget: Budget, prices: Prices, path: str | None = None, *, resumable: bool = False):
        self._step = step
        self._budget = budget
        self._prices = prices
        self._resumable = resumable
        self._numbers = SharedNumbers(path, [0.0, 0.0, 0.0])

    def begin_request(self) -> None:
        """Count a request that is about to be sent. BudgetSpentError: it must not be. Without a budget none
        is counted."""
        if not self._budget.is_set:
            return
        with self._numbers.held() as values:
            limit = self._budget.spent(_use(values), self._prices)
            if limit is None:
                values[0] += 1
                return
        raise BudgetSpentError(self._told(limit))

    def take_back(self) -> None:
        """The request did not reach the service."""
        if not self._budget.is_set:
            return
        with self._numbers.held() as values:
            values[0] -= 1

    def used(self, use: Spending) -> None:
        """Tokens that a request took; the request itself is counted."""
        if not self._budget.is_set:
            return
        with self._numbers.held() as values:
            values[1] += use.input_tokens
            values[2] += use.output_tokens

    def total(self) -> Spending:
        return _use(self._numbers.read())

    def close(self) -> None:
        self._numbers.close()

    def _told(self, limit: str) -> str:
        use = self.total()
        cost = f", cost {use.cost(self._prices):,.4g}" if use.cost(self._prices) else ""
        taken = f"{use.requests:,} requests, {use.input_tokens:,} input and {use.output_tokens:,} output tokens{cost}"
        go_on = (
            "answers are kept in run_dir and not asked for again: set a larger budget and resume the run"
            if self._resumable
            else "nothing of this run is kept; with run_dir= it could be resumed"
        )
        return f"step {self._step!r}: the budget {limit} is spent: {taken}; {go_on}"


def _use(values: list[float]) -> Spending:
    return Spending(*map(int, values))
