"""The scheduler: which worker runs which split, when. Pure: events and the time go in, commands come out.

    task:    queued -> running -> done
                ^--- waiting ---'        (after a death, or trouble that may pass)
    worker:  starting -> ready -> stopped | dead

A stage that is further down goes first, and a stage whose followers have enough waiting for them is held back: so what lies
between stages is bounded. A death is charged to a split only when the split was alone in its worker; splits that died in
company run again alone.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from penstock.steps.bundle import Key

ATTEMPTS = 4  # of a split, when machinery fails: a death, input or output
START_ATTEMPTS = 3  # of a pool's workers, in a row, that end by themselves before they are ready
KILLED_START_ATTEMPTS = 10  # that are killed before they are ready: whoever does that may stop
LONGEST_PAUSE = 60.0  # seconds before a split is tried again
QUEUED_BYTES = 128 << 20  # waiting for one stage, before the stages that feed it are held back
QUEUED_TASKS = 256


@dataclass(eq=False, slots=True)
class Task:
    """One split for one stage. `payload` is the split or its rows; the scheduler does not look into it."""

    id: int
    stage: int
    root: int
    key: Key
    payload: Any
    bytes: int = 0
    origin: Any = None  # the split of a source that its rows come from, where that is followed
    attempt: int = 0  # how many times it was started
    troubles: int = 0  # deaths alone and passing errors: up to ATTEMPTS
    errors: int = 0  # of a step's own code: up to bundle_attempts
    suspect: bool = False  # its worker died while it ran beside others
    not_before: float = 0.0

    def __lt__(self, other: Task) -> bool:
        return (self.root, self.key) < (other.root, other.key)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many workers a pool may have, and how many splits each runs at a time."""

    workers: int
    slots: int = 1


@dataclass(frozen=True, slots=True)
class StartWorker:
    pool: int
    worker: int


@dataclass(frozen=True, slots=True)
class StopWorker:
    worker: int


@dataclass(frozen=True, slots=True)
class Assign:
    worker: int
    task: Task


Command: TypeAlias = StartWorker | StopWorker | Assign


@dataclass(slots=True)
class _Worker:
    pool: int
    ready: bool = False
    running: dict[int, Task] = field(default_factory=dict)

    def has_room(self, slots: int) -> bool:
        return self.ready and len(self.running) < slots and not any(task.suspect for task in self.running.values())


@dataclass(slots=True)
class _Stage:
    pool: int
    feeds: Sequence[int]
    queued: list[Task] = field(default_factory=list)  # a heap
    queued_bytes: int = 0
    running: int = 0

    def push(self, task: Task) -> None:
        heapq.heappush(self.queued, task)
        self.queued_bytes += task.bytes

    def pop(self) -> Task:
        task = heapq.heappop(self.queued)
        self.queued_bytes -= task.bytes
        return task


class Scheduler:
    """Everything that is decided while a run goes on. `stages`: the pool of each, and the stages that it feeds."""

    def __init__(
        self, stages: Sequence[tuple[int, Sequence[int]]], pools: Mapping[int, PoolSize], *, bundle_attempts: int = 1
    ) -> None:
        self._stages = [_Stage(pool, feeds) for pool, feeds in stages]
        self._order = _deepest_first([feeds for _, feeds in stages])
        self._pools = pools
        self._bundle_attempts = bundle_attempts
        self._workers: dict[int, _Worker] = {}
        self._failed_starts: Counter[tuple[int, bool]] = Counter()  # in a row, by pool and whether they were killed
        self._waiting: list[Task] = []  # until their not_before
        self._next_task = 0
        self._next_worker = 0
        self.retries = 0
        self.deaths = 0

    # Events.

    def add(self, stage: int, root: int, key: Key, payload: Any, size: int = 0, origin: Any = None) -> None:
        """A new split for a stage."""
        self._stages[stage].push(Task(self._next_task, stage, root, key, payload, size, origin))
        self._next_task += 1

    def worker_ready(self, worker: int) -> None:
        self._workers[worker].ready = True
        pool = self._workers[worker].pool
        del self._failed_starts[pool, True], self._failed_starts[pool, False]

    def task_done(self, worker: int, task: int) -> Task:
        """The task is done; what it made for other stages is added by the caller."""
        return self._end(worker, task)

    def task_failed(self, worker: int, task: int, now: float, *, may_pass: bool) -> bool:
        """Whether the task will run again: after trouble that may pass, or within bundle_attempts."""
        failed = self._end(worker, task)
        if may_pass:
            failed.troubles += 1
            again = failed.troubles < ATTEMPTS
        else:
            failed.errors += 1
            again = failed.errors < self._bundle_attempts
        if again:
            tries = min(failed.troubles + failed.errors, 10)
            self._later(failed, now + min(LONGEST_PAUSE, 0.1 * 4 ** (tries - 1)))
        return again

    def worker_died(self, worker: int, now: float, *, blameless: bool = False) -> Task | None:
        """The task that ends the run, if this death is the last that it is allowed. Others run again elsewhere; after a
        blameless death all do, as if they had not been tried."""
        self.deaths += 1
        held = list(self._workers[worker].running.values())
        for task in held:
            self._end(worker, task.id)
        del self._workers[worker]
        for task in held:
            if len(held) == 1 and not blameless:
                task.troubles += 1
                if task.troubles >= ATTEMPTS:
                    return task
            task.suspect = task.suspect or not blameless
            self._later(task, now)
        return None

    def start_failed(self, worker: int, *, killed: bool, blameless: bool = False) -> bool:
        """A worker ended before it was ready. Whether starting another is worth while."""
        self.deaths += 1
        pool = self._workers.pop(worker).pool
        if blameless:
            return True
        self._failed_starts[pool, killed] += 1
        return self._failed_starts[pool, killed] < (KILLED_START_ATTEMPTS if killed else START_ATTEMPTS)

    def is_starting(self, worker: int) -> bool:
        return not self._workers[worker].ready

    def is_running(self, task: int) -> bool:
        return any(task in worker.running for worker in self._workers.values())

    def queued(self, stage: int) -> int:
        """How many splits wait for a stage."""
        return len(self._stages[stage].queued)

    # Decisions.

    def abandon(self) -> list[Task]:
        """All tasks that are not done."""
        tasks = [task for stage in self._stages for task in stage.queued] + self._waiting
        return tasks + [task for worker in self._workers.values() for task in worker.running.values()]

    @property
    def finished(self) -> bool:
        return not self._waiting and all(not stage.queued and not stage.running for stage in self._stages)

    def deadline(self) -> float | None:
        """When a waiting task may run again."""
        return min((task.not_before for task in self._waiting), default=None)

    def decide(self, now: float) -> list[Command]:
        due = [task for task in self._waiting if task.not_before <= now]
        self._waiting = [task for task in self._waiting if task.not_before > now]
        for task in due:
            self._stages[task.stage].push(task)
        commands: list[Command] = []
        for pool, size in self._pools.items():
            commands += self._assign(pool, size)
            commands += self._resize(pool, size)
        return commands

    def _assign(self, pool: int, size: PoolSize) -> list[Command]:
        commands: list[Command] = []
        for index in self._order:
            stage = self._stages[index]
            while stage.pool == pool and stage.queued and not self._held_back(stage):
                worker = self._worker_for(stage.queued[0], pool, size.slots)
                if worker is None:
                    break
                task = stage.pop()
                task.attempt += 1
                stage.running += 1
                self._workers[worker].running[task.id] = task
                commands.append(Assign(worker, task))
        return commands

    def _worker_for(self, task: Task, pool: int, slots: int) -> int | None:
        slots = 1 if task.suspect else slots
        free = [
            (len(worker.running), number)
            for number, worker in self._workers.items()
            if worker.pool == pool and worker.has_room(slots)
        ]
        return min(free)[1] if free else None

    def _held_back(self, stage: _Stage) -> bool:
        followers = [self._stages[index] for index in stage.feeds]
        return any(f.queued_bytes >= QUEUED_BYTES or len(f.queued) >= QUEUED_TASKS for f in followers)

    def _resize(self, pool: int, size: PoolSize) -> list[Command]:
        """Workers for what waits; none for a pool whose work is over."""
        mine = {number: worker for number, worker in self._workers.items() if worker.pool == pool}
        stages = [stage for stage in self._stages if stage.pool == pool]
        if self._is_over(pool):
            over = [number for number, worker in mine.items() if worker.ready and not worker.running]
            for number in over:
                del self._workers[number]
            return [StopWorker(number) for number in over]
        wanted = sum(len(stage.queued) for stage in stages if not self._held_back(stage))
        coming = sum(size.slots for worker in mine.values() if not worker.ready)
        missing = min(size.workers - len(mine), -(-(wanted - coming) // size.slots))
        return [self._start(pool) for _ in range(missing)]

    def _start(self, pool: int) -> StartWorker:
        number = self._next_worker
        self._next_worker += 1
        self._workers[number] = _Worker(pool)
        return StartWorker(pool, number)

    def _is_over(self, pool: int) -> bool:
        """Whether no task can come to this pool any more."""
        open_stages = {task.stage for task in self._waiting}
        open_stages |= {index for index, stage in enumerate(self._stages) if stage.queued or stage.running}
        return not any(self._stages[index].pool == pool for index in self._reached_from(open_stages))

    def _reached_from(self, stages: set[int]) -> set[int]:
        reached, waiting = set(stages), list(stages)
        while waiting:
            for fed in self._stages[waiting.pop()].feeds:
                if fed not in reached:
                    reached.add(fed)
                    waiting.append(fed)
        return reached

    def _end(self, worker: int, task: int) -> Task:
        ended = self._workers[worker].running.pop(task)
        self._stages[ended.stage].running -= 1
        return ended

    def _later(self, task: Task, when: float) -> None:
        self.retries += 1
        task.not_before = when
        self._waiting.append(task)


def _deepest_first(feeds: Sequence[Sequence[int]]) -> list[int]:
    """Stages so that each comes after all that it feeds."""
    order: list[int] = []
    seen: set[int] = set()

    def visit(index: int) -> None:
        if index not in seen:
            seen.add(index)
            for fed in feeds[index]:
                visit(fed)
            order.append(index)

    for index in range(len(feeds)):
        visit(index)
    return order
