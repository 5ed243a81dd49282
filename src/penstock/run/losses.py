"""Rows between two stages that were lost with a node: whatever made them runs again, and makes the same once more.

a task's rows are gone -> its maker runs again; if the rows that the maker had were released, their maker first
-> what it makes is compared with what it made, and given to the tasks that wait for it; nothing of it is counted twice
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from penstock.errors import EngineError
from penstock.run.fleet import Done
from penstock.run.schedule import Scheduler, Task
from penstock.steps.bundle import Key
from penstock.steps.stage import Outlet

logger = logging.getLogger(__name__)


def key_of(outlet: Outlet, maker: Task, number: int) -> Key:
    """Of the rows of one payload among all that lead to the same place: they are sorted by it."""
    return (*outlet.path, *maker.key, number)


class Losses:
    """The tasks of one run that wait for their rows to be made again."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: dict[int, list[Task]] = {}  # by the id of the maker
        self._is_told = False

    def make_again(self, task: Task) -> None:
        """Its rows are gone. It waits until they are there again."""
        maker = task.maker
        assert maker is not None
        waiting = self._waiting.setdefault(maker.id, [])
        waiting.append(task)
        if len(waiting) > 1:
            return
        level = logging.INFO if self._is_told else logging.WARNING
        logger.log(level, "rows of split %s were lost with a node, and are computed again", _named(maker))
        self._is_told = True
        if maker.maker is None:
            self._scheduler.again(maker)
        else:
            self.make_again(maker)  # what it read was released when it was done

    def made_again(self, maker: Task, done: Done) -> bool:
        """Whether a task that is done has run for others that wait: these have their rows, and nothing else counts."""
        waiting = self._waiting.pop(maker.id, None)
        made = {
            (outlet.target, key_of(outlet, maker, number)): payload
            for outlet, payloads in done.shipped
            if outlet.kind == "stage"
            for number, payload in enumerate(payloads)
        }
        rows = {where: payload.rows for where, payload in made.items()}
        if waiting is None:
            maker.made = rows
            return False
        if rows != maker.made:
            raise EngineError(
                f"rows of split {_named(maker)} of stage {maker.stage} were lost with a node of the cluster, and its steps "
                f"made others when they ran again ({_told(maker.made)}, then {_told(rows)}): a step whose rows change from "
                "one time to the next cannot be repeated; give it a seed, or write what it makes to files first"
            )
        for task in waiting:
            payload = made[task.stage, task.key]
            task.payload, task.locality = payload, payload.locality
            self._scheduler.again(task)
        taken = {id(task.payload) for task in waiting}
        for payload in done.payloads:
            if id(payload) not in taken:
                payload.release()
        return True


def _named(task: Task) -> str:
    return "-".join(map(str, task.key))


def _told(rows: Mapping[tuple[int, Key], int]) -> str:
    return f"{sum(rows.values())} rows in {len(rows)} pieces"
