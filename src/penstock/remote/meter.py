"""What stands between a step and the service that it asks: the pace, the budget, the answers that are kept, the counts."""

from __future__ import annotations

import os

from penstock.remote.account import Account
from penstock.remote.answers import KeptAnswers
from penstock.remote.budget import Prices, Spending
from penstock.remote.counts import Counts
from penstock.remote.gate import Gate
from penstock.remote.nodes import Nodes
from penstock.remote.rules import AskingRules
from penstock.remote.shared_pace import SharedPace


class Meter:
    """Of one step in one process. pace_file: the file by which processes of a machine share one pace; None: there is one
    process. run_dir: of a run that can be resumed; its budget and its answers are kept there, by the id of the run.
    nodes_file: that says how many nodes share the limits (nodes.py); empty: there is one machine."""

    def __init__(
        self,
        step: str,
        rules: AskingRules,
        *,
        pace_file: str | None = None,
        run_dir: str = "",
        run: str = "",
        nodes_file: str = "",
    ) -> None:
        self.counts = Counts()
        pace = SharedPace(rules.pace, pace_file, nodes=Nodes(nodes_file))
        self.gate = Gate(step, pace, self.counts, rules.max_outage_secs)
        self.answers = KeptAnswers(run_dir, run, step)
        spent = None if pace_file is None else f"{pace_file}.spent"
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
            self.counts.add("input_tokens", use.input_tokens)
            self.counts.add("output_tokens", use.output_tokens)
        if cost := use.cost(prices):
            self.counts.add("cost_micros", round(cost * 1_000_000))

    def close(self) -> None:
        self.gate.pace.close()
        self.account.close()
        self.answers.close()
