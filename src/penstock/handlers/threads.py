"""How many threads a framework may start, where it does not ask the environment itself."""

from __future__ import annotations

import os


def thread_share() -> int | None:
    """This process's share of the cores: worker processes and hosts are told theirs when they start. None: no one said."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdigit() and int(told) else None
