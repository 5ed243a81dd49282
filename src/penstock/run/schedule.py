"""The scheduler: which worker runs which split, when. Pure: events and the time go in, commands come out.

    task:    queued -> running -> done
                ^--- waiting ---'        (after a death, or trouble that may pass)
                ^------- lost ---'       (its rows are gone: until they are made again)
    worker:  starting -> ready -> stopped | dead

A stage that is further down goes first, and a stage whose followers have enough waiting for them is held back: so what lies
between stages is bounded. Rows are run on the node that has their models, or them, when a worker there is free. A pool that
waits for a service gets no more workers (throttling.py), and one that has nothing to do gives up its own where no worker of
another comes: so pools that need the same scarce thing take turns. A death is charged to a split only when the split was
alone in its worker; splits that died in company run again alone.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from penstock.run.locality import ANYWHERE, Homes, Locality
from penstock.steps.bundle import Key

ATTEMPTS = 4  # of a split, when machinery fails: a death, input or output
START_ATTEMPTS = 3  # of a pool's workers, in a row, that end by themselves before they are ready
KILLED_START_ATTEMPTS = 10  # that are killed before they are ready: whoever does that may stop
LONGEST_PAUSE = 60.0  # seconds before a split is tried again
QUEUED_BYTES = 128 << 20  # waiting for one stage, before the stages that feed it are held back
QUEUED_TASKS = 256
LOOK_AHEAD = 16  # splits that wait, among which a free worker finds one whose rows are on its node


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
    maker: Task | None = None  # what made its rows, where that is another task
    locality: Locality = ANYWHERE
    made: Mapping[Any, int] = field(default_factory=dict)  # rows that it gave to each task of which it is the maker
    attempt: int = 0  # how many times it was started
    troubles: int = 0  # deaths alone and transient errors: up to ATTEMPTS
    errors: int = 0  # of a step's own code: up to bundle_attempts
    suspect: bool = False  # its worker died while it ran beside others
    not_before: float = 0.0

    def __lt__(self, other: Task) -> bool:
        return (self.root, self.key) < (other.root, other.key)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many workers a pool may have, how many splits each runs at a time, and how many workers there are at least, as
    far as there may be, from the start of the run until no work can come to the pool."""

    workers: int
    slots: int = 1
    least: int = 0


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
    leaks: bool = False  # it keeps memory that it does not use: it gets no more tasks, and another takes its place
    place: str = ""
    running: dict[int, Task] = field(default_factory=dict)

    def has_room(self, slots: int) -> bool:
        return (
            self.ready
            and not self.leaks
            and len(self.running) < slots
            and not any(task.suspect for task in self.running.values())
        )


@dataclass(slots=True)
class _Stage:
    pool: int
    feeds: Sequence[int]
    queued: list[Task] = field(default_factory=list)  # a heap
    queued_bytes: int = 0
    placed: int = 0  # of those that are queued: rows that some worker may be nearer to
    running: int = 0

    def push(self, task: Task) -> None:
        heapq.heappush(self.queued, task)
        self.queued_bytes += task.bytes
        self.placed += task.locality != ANYWHERE

    def take(self, task: Task) -> None:
        if task is self.queued[0]:
            heapq.heappop(self.queued)
        else:
            self.queued.remove(task)
            heapq.heapify(self.queued)
        self.queued_bytes -= task.bytes
        self.placed -= task.locality != ANYWHERE

    def first(self) -> list[Task]:
        """Those that may be next: all but the first only for a worker that has their rows near."""
        return heapq.nsmallest(LOOK_AHEAD, self.queued) if self.placed else self.queued[:1]


class Scheduler:
    """Everything that is decided during a run. `stages`: the pool of each, and the stages that it feeds."""

    def __init__(
        self, stages: Sequence[tuple[int, Sequence[int]]], pools: Mapping[int, PoolSize], *, bundle_attempts: int = 1
    ) -> None:
        self._stages = [_Stage(pool, feeds) for pool, feeds in stages]
        self._order = _deepest_first([feeds for _, feeds in stages])
        self._pools = dict(pools)
        self._bundle_attempts = bundle_attempts
        self._workers: dict[int, _Worker] = {}
        self._failed_starts: Counter[tuple[int, bool]] = Counter()  # in a row, by pool and whether they were killed
        self.waiting: list[Task] = []  # until their not_before
        self._homes = Homes()
        self._held: Set[int] = frozenset()  # pools that do not grow
        self.starved: set[int] = set()  # pools whose workers do not come: others may have what these need
        self._next_task = 0
        self._next_worker = 0
        self.retries = 0
        self.deaths = 0

    # Events.

    def add(self, stage: int, root: int, key: Key, payload: Any, size: int = 0, **more: Any) -> None:
        """A new split for a stage; `more` of a Task: where its rows come from, and what is near to them."""
        self._stages[stage].push(Task(self._next_task, stage, root, key, payload, size, **more))
        self._next_task += 1

    def worker_ready(self, worker: int, place: str = "") -> None:
        self._workers[worker].ready = True
        self._workers[worker].place = place
        pool = self._workers[worker].pool
        self.starved.discard(pool)
        del self._failed_starts[pool, True], self._failed_starts[pool, False]

    def task_done(self, worker: int, task: int, *, leaks: bool = False) -> Task:
        """The task is done; what it made for other stages is added by the caller. leaks: its worker keeps memory."""
        return self._end(worker, task, leaks)

    def task_failed(self, worker: int, task: int, now: float, *, may_pass: bool, leaks: bool = False) -> bool:
        """Whether the task will run again: after trouble that may pass, or within bundle_attempts."""
        failed = self._end(worker, task, leaks)
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

    def task_lost(self, worker: int, task: int) -> Task:
        """The task came to nothing, and is nobody's until again(): no try is used up."""
        self.retries += 1
        return self._end(worker, task)

    def again(self, task: Task) -> None:
        """A task that was lost, or that is done and must make the same once more, waits to be run."""
        self._stages[task.stage].push(task)

    def worker_died(self, worker: int, now: float, *, blameless: bool = False) -> Task | None:
        """The task that ends the run, if this death is the last that it is allowed. Others run again elsewhere; after a
        blameless death all do, as if they had not been tried."""
        self.deaths += 1
        held = list(self._workers[worker].running.values())
        for task in held:
            self._end(worker, task.id)
        place = self._workers.pop(worker).place
        if not any(other.place == place for other in self._workers.values()):
            self._homes.forget(place)
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

    def resize(self, pool: int, workers: int) -> None:
        """There is room for more workers of a pool than before, or for fewer: then those without work leave."""
        self._pools[pool] = replace(self._pools[pool], workers=workers)

    def hold(self, pools: Set[int]) -> None:
        """These pools have use for no more workers than they have; one that has none gets one."""
        self._held = pools

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
        tasks = [task for stage in self._stages for task in stage.queued] + self.waiting
        return tasks + [task for worker in self._workers.values() for task in worker.running.values()]

    @property
    def finished(self) -> bool:
        return not self.waiting and all(not stage.queued and not stage.running for stage in self._stages)

    def deadline(self) -> float | None:
        """When a waiting task may run again."""
        return min((task.not_before for task in self.waiting), default=None)

    def decide(self, now: float) -> list[Command]:
        due = [task for task in self.waiting if task.not_before <= now]
        self.waiting = [task for task in self.waiting if task.not_before > now]
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
            while stage.pool == pool and stage.queued and not _is_held_back(stage, self._stages):
                task, worker = self._next(stage, pool, size.slots)
                if worker is None:
                    break
                stage.take(task)
                task.attempt += 1
                stage.running += 1
                self._workers[worker].running[task.id] = task
                self._homes.remember(task.stage, task.locality, self._workers[worker].place)
                commands.append(Assign(worker, task))
        return commands

    def _next(self, stage: _Stage, pool: int, slots: int) -> tuple[Task, int | None]:
        """The first task that is near to a free worker, and that worker; else the first of all."""
        first = stage.first()
        for task in first:
            place = self._homes.place_of(task.stage, task.locality)
            if place and (near := _free(self._workers, task, pool, slots, place)):
                return task, min(near)[1]
        free = _free(self._workers, first[0], pool, slots)
        return first[0], min(free)[1] if free else None

    def _resize(self, pool: int, size: PoolSize) -> list[Command]:
        """Workers for what waits, and in the place of those that leak; none for a pool whose work is over."""
        leaky = [n for n, worker in self._workers.items() if worker.pool == pool and worker.leaks and not worker.running]
        for number in leaky:
            del self._workers[number]
        stops: list[Command] = [StopWorker(number) for number in leaky]
        mine = {number: worker for number, worker in self._workers.items() if worker.pool == pool}
        stages = [stage for stage in self._stages if stage.pool == pool]
        idle = [number for number, worker in mine.items() if not worker.running]
        wanted = sum(len(stage.queued) for stage in stages if not _is_held_back(stage, self._stages))
        if (is_over := self._is_over(pool)) or (not wanted and self.starved - {pool}):
            over = [number for number in idle if mine[number].ready]
        else:
            over = sorted(idle, key=lambda number: mine[number].ready)[: max(0, len(mine) - size.workers)]
        for number in over:
            del self._workers[number]
        if over or is_over:
            return stops + [StopWorker(number) for number in over]
        coming = sum(size.slots for worker in mine.values() if not worker.ready)
        least = 0 if self.starved - {pool} else size.least
        most = min(size.workers, max(1, least, len(mine))) if pool in self._held else size.workers
        missing = min(most - len(mine), max(least - len(mine), -(-(wanted - coming) // size.slots)))
        return stops + [self._start(pool) for _ in range(missing)]

    def _start(self, pool: int) -> StartWorker:
        number = self._next_worker
        self._next_worker += 1
        self._workers[number] = _Worker(pool)
        return StartWorker(pool, number)

    def _is_over(self, pool: int) -> bool:
        """Whether no task can come to this pool any more."""
        open_stages = {task.stage for task in self.waiting}
        open_stages |= {index for index, stage in enumerate(self._stages) if stage.queued or stage.running}
        reached = _reached([stage.feeds for stage in self._stages], open_stages)
        return not any(self._stages[index].pool == pool for index in reached)

    def _end(self, worker: int, task: int, leaks: bool = False) -> Task:
        self._workers[worker].leaks |= leaks
        ended = self._workers[worker].running.pop(task)
        self._stages[ended.stage].running -= 1
        return ended

    def _later(self, task: Task, when: float) -> None:
        self.retries += 1
        task.not_before = when
        self.waiting.append(task)


def _is_held_back(stage: _Stage, stages: Sequence[_Stage]) -> bool:
    """Whether enough waits for the stages that it feeds."""
    followers = [stages[index] for index in stage.feeds]
    return any(f.queued_bytes >= QUEUED_BYTES or len(f.queued) >= QUEUED_TASKS for f in followers)


def _free(workers: Mapping[int, _Worker], task: Task, pool: int, slots: int, place: str = "") -> list[tuple[int, int]]:
    """How busy each worker is that has room for the task, and its number; with `place`, of that node."""
    slots = 1 if task.suspect else slots
    return [
        (len(worker.running), number)
        for number, worker in workers.items()
        if worker.pool == pool and worker.has_room(slots) and (not place or worker.place == place)
    ]


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


def _reached(feeds: Sequence[Sequence[int]], stages: set[int]) -> set[int]:
    """These stages, and all that their rows go on to."""
    reached, waiting = set(stages), list(stages)
    while waiting:
        for fed in feeds[waiting.pop()]:
            if fed not in reached:
                reached.add(fed)
                waiting.append(fed)
    return reached
