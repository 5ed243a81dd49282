"""What stands between a step and the service that it asks: the pace, the budget, the answers that are kept, the counts."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from penstock.remote.account import Account
from penstock.remote.answers import KeptAnswers
from penstock.remote.budget import Prices, Spending
from penstock.remote.counts import Counts
from penstock.remote.gate import Gate
from penstock.remote.nodes import Nodes
from penstock.remote.rules import AskingRules
from penstock.remote.shared_pace import SharedPace


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedFiles:
    """The files by which processes of a machine share what they know of a service; None: there is one process."""

    pace: str | None = None
    spent: str | None = None
    limits: str | None = None  # of processes that have a service each
    nodes: str = ""  # says how many nodes share the limits (nodes.py); empty: there is one machine


class Meter:
    """Of one step in one process. run_dir: of a run that can be resumed; its budget and its answers are kept there, by the
    id of the run. own_service: nobody else asks it; limits and budget are shared all the same. keeps_bad: answers that
    cannot be used are kept as well, because their rows fail for good; else they end the run, and are asked for again."""

    def __init__(
        self,
        step: str,
        rules: AskingRules,
        files: SharedFiles,
        *,
        run_dir: str = "",
        run: str = "",
        own_service: bool = False,
        keeps_bad: bool = False,
    ) -> None:
        self.keeps_bad = keeps_bad
        self.counts = Counts()
        limits, pace_rules, nodes = None, rules.pace, Nodes(files.nodes)
        if own_service and rules.pace.has_limits:
            limits, nodes = SharedPace(rules.pace, files.limits, nodes=nodes), Nodes()
            pace_rules = replace(rules.pace, requests_per_minute=None, tokens_per_minute=None)
        pace = SharedPace(pace_rules, None if own_service else files.pace, nodes=nodes)
        self.gate = Gate(step, pace, self.counts, rules.max_outage_secs, limits)
        self.answers = KeptAnswers(run_dir, run, step)
        spent = files.spent
        if self.answers.folder is not None:
            spent = os.path.join(self.answers.folder, f"{self.answers.stem}.spent")
        shared = rules.budget.is_set  # else nobody asks, and each request is spared the lock
        self.account = Account(
            step, rules.budget, rules.prices, spent if shared else None, resumable=self.answers.folder is not None
        )

    def used(self, use: Spending, prices: Prices) -> None:
        """What a request took, for the budget and the metrics. The request itself is counted before it is sent."""
        if use.input_tokens or use.output_tokens:
            self.account.used(use)
        self._count(use, prices)

    def reused(self, rows: int, use: Spending, prices: Prices) -> None:
        """What answers took that a process was given which is gone, for the metrics of the whole run: that process has
        counted it for rows that were never done. The budget knows of it."""
        self.counts.add("answers_reused", rows)
        if use.requests:
            self.counts.add("requests", use.requests)
        self._count(use, prices)

    def _count(self, use: Spending, prices: Prices) -> None:
        if use.input_tokens or use.output_tokens:
            self.counts.add("input_tokens", use.input_tokens)
            self.counts.add("output_tokens", use.output_tokens)
        if cost := use.cost(prices):
            self.counts.add("cost_micros", round(cost * 1_000_000))

    def close(self) -> None:
        self.gate.close()
        self.account.close()
        self.answers.close()
