"""The scheduler, driven through random runs by a simulator that keeps its own books, and rule by rule."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.observe.metrics import MetricKey, Metrics
from penstock.run import schedule
from penstock.run.locality import Locality
from penstock.run.schedule import Assign, PoolSize, Scheduler, StartWorker, StopWorker
from penstock.run.throttling import Throttling

# Random runs.


@dataclass
class World:
    """What a run looks like from outside: stages in pools, and how much trouble there is."""

    stages: list[tuple[int, list[int]]]
    pools: dict[int, PoolSize]
    splits: list[int]  # of the stages that nobody feeds
    bundle_attempts: int
    trouble: int  # percent of events that are not good news
    killed: bool  # whether workers that die while they start are killed


@st.composite
def worlds(draw):
    count = draw(st.integers(1, 4))
    pools = draw(st.integers(1, min(3, count)))
    stages = []
    for index in range(count):
        feeds = [later for later in range(index + 1, count) if draw(st.booleans())]
        stages.append((draw(st.integers(0, pools - 1)), feeds))
    return World(
        stages=stages,
        pools={i: PoolSize(*(draw(st.integers(least, 3)) for least in (1, 1, 0))) for i in range(pools)},
        splits=draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)),
        bundle_attempts=draw(st.integers(1, 3)),
        trouble=draw(st.sampled_from([0, 10, 30, 60])),
        killed=draw(st.booleans()),
    )


@dataclass
class Book:
    """What the simulator itself knows of a task."""

    stage: int
    size: int
    order: tuple
    state: str = "queued"  # queued, waiting, running, done
    not_before: float = 0.0
    started: int = 0
    troubles: int = 0
    errors: int = 0
    suspect: bool = False


@dataclass
class Member:
    pool: int
    ready: bool = False
    leaks: bool = False
    running: list[int] = field(default_factory=list)


class RunEndedError(Exception):
    """The scheduler gave the verdict that ends the run."""


MAX_TASKS = 40
MAX_EVENTS = 400  # after this many, only good things happen


class Simulator:
    def __init__(self, world, random):
        self.world = world
        self.random = random
        self.scheduler = Scheduler(world.stages, world.pools, bundle_attempts=world.bundle_attempts)
        self.now = 0.0
        self.books: dict[int, Book] = {}  # numbered like the scheduler's tasks: in the order they are added
        self.workers: dict[int, Member] = {}
        self.failed_starts = dict.fromkeys(world.pools, 0)
        self.ever_started: set[int] = set()
        self.events = self.retries = self.deaths = 0
        fed = {index for _, feeds in world.stages for index in feeds}
        for stage, splits in enumerate(world.splits):
            for number in range(splits if stage not in fed else 0):
                self.add(stage, (number,))

    def add(self, stage, key):
        number = len(self.books)
        self.books[number] = Book(stage, self.random.randint(0, 3), (0, key))
        self.scheduler.add(stage, 0, key, number, self.books[number].size)

    # Carrying out commands, as the coordinator would, and checking each.

    def decide(self):
        for book in self.books.values():
            if book.state == "waiting" and book.not_before <= self.now:
                book.state = "queued"
        for command in self.scheduler.decide(self.now):
            if isinstance(command, StartWorker):
                self.start(command)
            elif isinstance(command, StopWorker):
                self.stop(command)
            else:
                self.assign(command)
        assert self.scheduler.finished == all(book.state == "done" for book in self.books.values())
        waiting = [book.not_before for book in self.books.values() if book.state == "waiting"]
        assert self.scheduler.deadline() == min(waiting, default=None)
        busy = any(not member.ready or member.running for member in self.workers.values())
        assert busy or waiting or self.scheduler.finished, "nothing runs, nothing starts, nothing waits: a deadlock"
        for pool, size in self.world.pools.items():
            there = sum(member.pool == pool for member in self.workers.values())
            assert self.is_over(pool) or there >= min(size.least, size.workers), "fewer workers than the minimum"

    def start(self, command):
        assert command.worker not in self.ever_started
        self.ever_started.add(command.worker)
        self.workers[command.worker] = Member(command.pool)
        in_pool = [m for m in self.workers.values() if m.pool == command.pool]
        assert len(in_pool) <= self.world.pools[command.pool].workers
        assert not self.is_over(command.pool), "a worker for a pool without work"

    def stop(self, command):
        member = self.workers.pop(command.worker)
        assert member.ready
        assert not member.running
        assert member.leaks or self.is_over(member.pool), "stopped, but work can still come"

    def assign(self, command):
        number, member = command.task.payload, self.workers[command.worker]
        book = self.books[number]
        assert book.state == "queued"
        assert member.ready
        assert not member.leaks
        assert member.pool == self.world.stages[book.stage][0]
        assert book.order == min(b.order for b in self.books.values() if b.state == "queued" and b.stage == book.stage)
        self.check_not_held_back(book.stage)
        book.state = "running"
        book.started += 1
        assert command.task.attempt == book.started
        assert command.task.suspect == book.suspect
        member.running.append(number)
        assert len(member.running) <= self.world.pools[member.pool].slots
        assert len(member.running) == 1 or not any(self.books[n].suspect for n in member.running), "a suspect has company"

    def check_not_held_back(self, stage):
        for follower in self.world.stages[stage][1]:
            queued = [b for b in self.books.values() if b.stage == follower and b.state == "queued"]
            assert len(queued) < schedule.QUEUED_TASKS
            assert sum(b.size for b in queued) < schedule.QUEUED_BYTES

    def is_over(self, pool):
        reached = {book.stage for book in self.books.values() if book.state != "done"}
        for stage, (_, feeds) in enumerate(self.world.stages):  # feeds lead to later stages only
            if stage in reached:
                reached |= set(feeds)
        return not any(self.world.stages[stage][0] == pool for stage in reached)

    # What may happen.

    def happen(self):
        """One event, drawn from all that are possible now."""
        self.events += 1
        good, bad = self.possible()
        if bad and self.events < MAX_EVENTS and (not good or self.random.randint(1, 100) <= self.world.trouble):
            self.random.choice(bad)()
        else:
            self.random.choice(good)()

    def possible(self):
        good, bad = [], []
        for number, member in self.workers.items():
            if not member.ready:
                good.append(lambda n=number: self.ready(n))
                bad.append(lambda n=number: self.start_fails(n))
            else:
                bad.append(lambda n=number: self.die(n))
            for task in member.running:
                good.append(lambda n=number, t=task: self.done(n, t))
                bad.append(lambda n=number, t=task: self.fail(n, t, may_pass=True))
                bad.append(lambda n=number, t=task: self.fail(n, t, may_pass=False))
        if (deadline := self.scheduler.deadline()) is not None:
            good.append(lambda: self.pass_time(deadline))
        return good, bad

    def pass_time(self, deadline):
        self.now = max(self.now, deadline)

    def ready(self, worker):
        assert self.scheduler.is_starting(worker)
        self.scheduler.worker_ready(worker)
        self.workers[worker].ready = True
        self.failed_starts[self.workers[worker].pool] = 0
        assert not self.scheduler.is_starting(worker)

    def start_fails(self, worker):
        pool = self.workers.pop(worker).pool
        self.failed_starts[pool] += 1
        self.deaths += 1
        again = self.scheduler.start_failed(worker, killed=self.world.killed)
        allowed = schedule.KILLED_START_ATTEMPTS if self.world.killed else schedule.START_ATTEMPTS
        assert again == (self.failed_starts[pool] < allowed)
        if not again:
            raise RunEndedError

    def done(self, worker, task):
        self.workers[worker].running.remove(task)
        leaks = self.random.randint(1, 100) <= self.world.trouble
        self.workers[worker].leaks |= leaks
        book = self.books[task]
        ended = self.scheduler.task_done(worker, task, leaks=leaks)
        assert ended.payload == task
        book.state = "done"
        for follower in self.world.stages[book.stage][1]:
            for number in range(self.random.randint(0, 3)):
                if len(self.books) < MAX_TASKS:
                    self.add(follower, (*book.order[1], book.stage, number))

    def fail(self, worker, task, may_pass):
        self.workers[worker].running.remove(task)
        book = self.books[task]
        again = self.scheduler.task_failed(worker, task, self.now, may_pass=may_pass)
        if may_pass:
            book.troubles += 1
            assert again == (book.troubles < schedule.ATTEMPTS)
        else:
            book.errors += 1
            assert again == (book.errors < self.world.bundle_attempts)
        if not again:
            raise RunEndedError
        self.wait(book)
        assert book.not_before > self.now

    def die(self, worker):
        held = [self.books[number] for number in self.workers.pop(worker).running]
        blameless = self.random.choice([False, False, True])
        fatal = self.scheduler.worker_died(worker, self.now, blameless=blameless)
        self.deaths += 1
        charged = len(held) == 1 and not blameless
        if charged:
            held[0].troubles += 1
        if charged and held[0].troubles >= schedule.ATTEMPTS:
            assert fatal is not None
            assert self.books[fatal.payload] is held[0]
            raise RunEndedError
        assert fatal is None, "a task was charged that had company, or too early"
        for book in held:
            book.suspect = book.suspect or not blameless
            self.wait(book)

    def wait(self, book):
        number = next(n for n, b in self.books.items() if b is book)
        task = next(t for t in self.scheduler.waiting if t.payload == number)
        assert (task.troubles, task.errors) == (book.troubles, book.errors)
        assert not self.scheduler.is_running(task.id)
        book.state, book.not_before = "waiting", task.not_before
        self.retries += 1

    def run(self):
        self.decide()
        while not self.scheduler.finished:
            for _ in range(self.random.randint(1, 3)):  # several events may come between two decisions
                good, _ = self.possible()
                if good:
                    self.happen()
            self.decide()


@settings(max_examples=250)
@given(world=worlds(), random=st.randoms(use_true_random=False), bound=st.integers(1, 4), limit=st.integers(1, 6))
def test_random_runs(world, random, bound, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "QUEUED_TASKS", bound)
        patch.setattr(schedule, "QUEUED_BYTES", limit)
        simulator = Simulator(world, random)
        try:
            simulator.run()
        except RunEndedError:
            assert world.trouble, "the run ended without any trouble"
            return
        assert all(book.state == "done" for book in simulator.books.values())
        assert simulator.scheduler.retries == simulator.retries
        assert simulator.scheduler.deaths == simulator.deaths
        assert not any(member.ready for member in simulator.workers.values()), "an idle worker was not told to stop"


def test_a_worker_that_leaks_is_replaced_when_its_tasks_are_done():
    scheduler = with_splits(one_pool(slots=2), "a", "b", "c", "d")
    assert started(scheduler) == [(0, "a"), (0, "b")]
    scheduler.task_done(0, 0, leaks=True)
    assert decide(scheduler) == [], "it gets no more, and still runs one"
    assert not scheduler.task_failed(0, 1, 0.0, may_pass=False)
    assert decide(scheduler) == [("stop", 0), ("start", 1)]
    scheduler.worker_ready(1)
    assert decide(scheduler) == [(1, "c"), (1, "d")]


@settings(max_examples=100)
@given(world=worlds(), random=st.randoms(use_true_random=False))
def test_a_run_without_trouble_tries_everything_once(world, random):
    world.trouble = 0
    simulator = Simulator(world, random)
    simulator.run()
    assert {book.started for book in simulator.books.values()} <= {1}
    assert simulator.scheduler.retries == simulator.scheduler.deaths == 0


# The rules, one by one.


def one_pool(workers=1, slots=1, stages=((0, ()),), **options):
    return Scheduler(list(stages), {0: PoolSize(workers, slots)}, **options)


def decide(scheduler, now=0.0):
    """Commands as short tuples: ("start", worker), ("stop", worker), (worker, payload)."""
    short = []
    for command in scheduler.decide(now):
        if isinstance(command, Assign):
            short.append((command.worker, command.task.payload))
        else:
            short.append(("start" if isinstance(command, StartWorker) else "stop", command.worker))
    return short


def started(scheduler, now=0.0):
    """Start and ready whatever the scheduler wants; the assignments that follow."""
    for what, worker in decide(scheduler, now):
        assert what == "start"
        scheduler.worker_ready(worker)
    return decide(scheduler, now)


def with_splits(scheduler, *payloads, stage=0):
    for number, payload in enumerate(payloads):
        scheduler.add(stage, 0, (number,), payload)
    return scheduler


def test_nothing_to_do():
    scheduler = one_pool()
    assert scheduler.finished
    assert decide(scheduler) == []
    assert scheduler.deadline() is None


@pytest.mark.parametrize(
    ("splits", "slots", "expected"), [(1, 1, 1), (3, 1, 3), (9, 1, 4), (3, 2, 2), (4, 2, 2), (99, 3, 4)]
)
def test_as_many_workers_as_there_is_work_for(splits, slots, expected):
    scheduler = with_splits(one_pool(workers=4, slots=slots), *range(splits))
    assert decide(scheduler) == [("start", n) for n in range(expected)]
    assert decide(scheduler) == [], "workers that are coming are counted"


def test_work_goes_to_the_least_loaded_worker_in_order():
    scheduler = with_splits(one_pool(workers=2, slots=2), *"abcde")
    assert started(scheduler) == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]
    scheduler.task_done(1, 1)
    assert decide(scheduler) == [(1, "e")]


def test_a_worker_that_is_not_ready_gets_no_work():
    scheduler = with_splits(one_pool(workers=2), "a", "b")
    assert decide(scheduler) == [("start", 0), ("start", 1)]
    scheduler.worker_ready(1)
    assert decide(scheduler) == [(1, "a")]


def test_splits_go_by_root_and_key_not_by_arrival():
    scheduler = one_pool(slots=9)
    for root, key in [(1, (0,)), (0, (2,)), (0, (1, 5)), (0, (1,)), (0, (10,))]:
        scheduler.add(0, root, key, (root, key))
    assert [task for _, task in started(scheduler)] == [(0, (1,)), (0, (1, 5)), (0, (2,)), (0, (10,)), (1, (0,))]


def test_the_stage_further_down_goes_first():
    scheduler = one_pool(stages=[(0, (1,)), (0, (2,)), (0, ())])
    scheduler.add(0, 0, (0,), "first")
    scheduler.add(2, 0, (0,), "last")
    scheduler.add(1, 0, (0,), "middle")
    assert started(scheduler) == [(0, "last")]
    scheduler.task_done(0, 1)
    assert decide(scheduler) == [(0, "middle")]


def test_the_order_of_stages_holds_where_a_stage_feeds_an_earlier_number():
    scheduler = one_pool(stages=[(0, ()), (0, (0,))])
    scheduler.add(0, 0, (0,), "fed")
    scheduler.add(1, 0, (0,), "feeder")
    assert started(scheduler) == [(0, "fed")]


@pytest.mark.parametrize("bound", ["tasks", "bytes"])
def test_a_stage_is_held_back_while_its_follower_has_enough(bound):
    scheduler = Scheduler([(0, (1,)), (1, ())], {0: PoolSize(1), 1: PoolSize(1)})
    waiting = schedule.QUEUED_TASKS if bound == "tasks" else 2
    size = 0 if bound == "tasks" else schedule.QUEUED_BYTES // 2
    scheduler.add(0, 0, (0,), "feeder")
    for number in range(waiting):
        scheduler.add(1, 0, (number,), number, size)
    assert decide(scheduler) == [("start", 0)], "only the follower's pool has something to do"
    scheduler.worker_ready(0)
    assert decide(scheduler)[0] == (0, 0)
    assert ("start", 1) in decide(scheduler), "with one less waiting, the feeder may go on"


def test_what_waits_for_another_try_is_not_forgotten_by_a_pool_that_is_idle():
    scheduler = with_splits(one_pool(bundle_attempts=2), "a")
    assert started(scheduler) == [(0, "a")]
    assert scheduler.task_failed(0, 0, 5.0, may_pass=False)
    assert not scheduler.finished
    assert decide(scheduler, 5.0) == [], "the worker stays, the task waits"
    deadline = scheduler.deadline()
    assert deadline > 5.0
    assert decide(scheduler, deadline) == [(0, "a")]


def test_errors_of_a_step_are_final_unless_bundle_attempts_say_otherwise():
    scheduler = with_splits(one_pool(), "a")
    started(scheduler)
    assert not scheduler.task_failed(0, 0, 0.0, may_pass=False)
    scheduler = with_splits(one_pool(bundle_attempts=3), "a")
    started(scheduler)
    now = 0.0
    for again in (True, True, False):
        assert scheduler.task_failed(0, 0, now, may_pass=False) == again
        now = scheduler.deadline() or now
        decide(scheduler, now)
    assert scheduler.retries == 2


def test_passing_trouble_has_four_tries_with_growing_waits():
    scheduler = with_splits(one_pool(), "a")
    started(scheduler)
    now, waits = 0.0, []
    while scheduler.task_failed(0, 0, now, may_pass=True):
        waits.append(scheduler.deadline() - now)
        now = scheduler.deadline()
        assert decide(scheduler, now) == [(0, "a")]
    assert len(waits) == schedule.ATTEMPTS - 1 == 3
    assert waits == sorted(set(waits)), "each wait is longer than the one before"


def test_waits_are_bounded():
    scheduler = with_splits(one_pool(bundle_attempts=600), "a")
    started(scheduler)
    now = 0.0
    for _ in range(599):
        assert scheduler.task_failed(0, 0, now, may_pass=False)
        assert scheduler.deadline() - now <= 3600
        now = scheduler.deadline()
        assert decide(scheduler, now) == [(0, "a")]


def test_a_task_that_died_in_company_is_not_charged_and_runs_alone():
    scheduler = with_splits(one_pool(slots=3), *"abcd")
    assert started(scheduler) == [(0, "a"), (0, "b"), (0, "c")]
    assert scheduler.worker_died(0, 1.0) is None
    assert scheduler.deadline() == 1.0
    assert decide(scheduler, 1.0) == [("start", 1)]
    scheduler.worker_ready(1)
    for number, payload in enumerate("abc"):
        assert decide(scheduler, 1.0) == [(1, payload)], "suspects run one by one"
        assert scheduler.task_done(1, number).troubles == 0
    assert decide(scheduler, 1.0) == [(1, "d")]
    assert scheduler.deaths == 1
    assert scheduler.retries == 3


def test_nobody_joins_a_suspect():
    scheduler = with_splits(one_pool(slots=2), "a", "b")
    started(scheduler)
    scheduler.worker_died(0, 0.0)
    scheduler.add(0, 0, (9,), "new")
    assert started(scheduler) == [(1, "a")]


def test_a_suspect_does_not_join_others():
    scheduler = with_splits(one_pool(slots=2, stages=[(0, (1,)), (0, ())]), "a", "b")
    started(scheduler)
    scheduler.worker_died(0, 0.0)
    scheduler.add(1, 0, (0,), "deeper")
    assert started(scheduler) == [(1, "deeper")], "a slot is free, but a suspect needs the worker for itself"
    scheduler.task_done(1, 2)
    assert decide(scheduler) == [(1, "a")]


def test_the_fourth_death_alone_ends_the_run():
    scheduler = with_splits(one_pool(), "killer", "innocent")
    for death in range(schedule.ATTEMPTS - 1):
        assert started(scheduler) == [(death, "killer")]
        assert scheduler.worker_died(death, 0.0) is None
    assert started(scheduler) == [(3, "killer")]
    fatal = scheduler.worker_died(3, 0.0)
    assert (fatal.payload, fatal.troubles, fatal.attempt) == ("killer", 4, 4)


def test_a_blameless_death_charges_nothing_however_often_it_happens():
    scheduler = with_splits(one_pool(slots=2), "a", "b")
    for death in range(3 * schedule.ATTEMPTS):
        assert started(scheduler) == [(death, "a"), (death, "b")], "they are no suspects: they run together again, at once"
        assert scheduler.worker_died(death, 0.0, blameless=True) is None
    assert started(scheduler) == [(death + 1, "a"), (death + 1, "b")]
    assert [scheduler.task_done(death + 1, number).troubles for number in (0, 1)] == [0, 0]
    assert scheduler.deaths == 3 * schedule.ATTEMPTS


def test_a_blameless_death_clears_no_suspect():
    scheduler = with_splits(one_pool(slots=2), "a", "b")
    started(scheduler)
    scheduler.worker_died(0, 0.0)
    assert started(scheduler) == [(1, "a")]
    scheduler.worker_died(1, 0.0, blameless=True)
    assert started(scheduler) == [(2, "a")], "alone still"


def test_blameless_deaths_before_a_worker_is_ready_do_not_end_the_run():
    scheduler = with_splits(one_pool(workers=1), "a")
    for worker in range(2 * schedule.KILLED_START_ATTEMPTS):
        assert decide(scheduler) == [("start", worker)]
        assert scheduler.start_failed(worker, killed=True, blameless=True)


def test_passing_trouble_and_deaths_alone_add_up():
    scheduler = with_splits(one_pool(), "a")
    started(scheduler)
    now = 0.0
    for _ in range(2):
        assert scheduler.task_failed(0, 0, now, may_pass=True)
        now = scheduler.deadline()
        decide(scheduler, now)
    assert scheduler.worker_died(0, now) is None
    assert started(scheduler, now) == [(1, "a")]
    assert scheduler.worker_died(1, now).payload == "a"


def test_an_idle_worker_that_dies_is_replaced_when_there_is_work():
    scheduler = with_splits(one_pool(workers=1), "a")
    decide(scheduler)
    scheduler.worker_ready(0)
    assert scheduler.worker_died(0, 0.0) is None
    assert started(scheduler) == [(1, "a")]


@pytest.mark.parametrize(
    ("killed", "allowed"),
    [(False, schedule.START_ATTEMPTS), (True, schedule.KILLED_START_ATTEMPTS)],
    ids=["ended", "killed"],
)
def test_failed_starts_in_a_row_end_the_run(killed, allowed):
    scheduler = with_splits(one_pool(workers=1), "a")
    verdicts = []
    for worker in range(allowed):
        assert decide(scheduler) == [("start", worker)]
        verdicts.append(scheduler.start_failed(worker, killed=killed))
    assert verdicts == [True] * (allowed - 1) + [False]
    assert scheduler.deaths == allowed


def test_starts_that_were_killed_do_not_use_up_those_that_may_end_by_themselves():
    scheduler = with_splits(one_pool(workers=1), "a")
    for worker in range(schedule.START_ATTEMPTS):
        decide(scheduler)
        assert scheduler.start_failed(worker, killed=worker < schedule.START_ATTEMPTS - 1)


def test_a_start_that_succeeds_clears_the_failed_ones():
    scheduler = with_splits(one_pool(workers=1), "a")
    for round_ in range(3):
        for number in range(schedule.START_ATTEMPTS - 1):
            worker = round_ * schedule.START_ATTEMPTS + number
            assert decide(scheduler) == [("start", worker)]
            assert scheduler.start_failed(worker, killed=False)
        assert decide(scheduler) == [("start", worker + 1)]
        scheduler.worker_ready(worker + 1)
        assert scheduler.worker_died(worker + 1, 0.0) is None


def test_failed_starts_are_counted_for_each_pool():
    scheduler = Scheduler([(0, ()), (1, ())], {0: PoolSize(1), 1: PoolSize(1)})
    with_splits(scheduler, "a", stage=0)
    with_splits(scheduler, "b", stage=1)
    for first in (0, 2):
        assert decide(scheduler) == [("start", first), ("start", first + 1)]
        assert scheduler.start_failed(first, killed=False)
        assert scheduler.start_failed(first + 1, killed=False)


def test_a_pool_is_stopped_when_no_work_can_come_and_not_before():
    scheduler = Scheduler([(0, (1,)), (1, ())], {0: PoolSize(1), 1: PoolSize(1)})
    scheduler.add(0, 0, (0,), "a")
    scheduler.add(1, 0, (0,), "b")
    assert sorted(started(scheduler)) == [(0, "a"), (1, "b")]
    scheduler.task_done(1, 1)
    assert decide(scheduler) == [], "stage 0 may still feed pool 1"
    scheduler.add(1, 0, (1,), "c")
    scheduler.task_done(0, 0)
    assert sorted(map(str, decide(scheduler))) == sorted(map(str, [("stop", 0), (1, "c")]))
    scheduler.task_done(1, 2)
    assert decide(scheduler) == [("stop", 1)]
    assert scheduler.finished


def test_a_worker_that_starts_for_nothing_is_stopped_when_it_is_ready():
    scheduler = with_splits(one_pool(workers=2), "a", "b")
    assert decide(scheduler) == [("start", 0), ("start", 1)]
    scheduler.worker_ready(0)
    assert decide(scheduler) == [(0, "a")]
    scheduler.task_done(0, 0)
    assert decide(scheduler) == [(0, "b")]
    scheduler.task_done(0, 1)
    assert decide(scheduler) == [("stop", 0)]
    scheduler.worker_ready(1)
    assert decide(scheduler) == [("stop", 1)]


# Nodes.


def on_nodes(places, *rows, workers=("a", "b")):
    """A stage that is fed, with one ready worker on each of the nodes; `rows`: their names, and `places` where they are."""
    scheduler = Scheduler([(0, (1,)), (1, ())], {0: PoolSize(1), 1: PoolSize(len(workers))})
    for number in range(len(workers)):
        scheduler.add(1, 0, (-1, number), f"warm {number}")
    for command in scheduler.decide(0.0):
        scheduler.worker_ready(command.worker, workers[command.worker])
    decide(scheduler)
    for number, (name, place) in enumerate(zip(rows, places, strict=True)):
        scheduler.add(1, 0, (number,), name, locality=Locality(place))
    return scheduler


def freed(scheduler, *workers):
    for worker in workers:
        scheduler.task_done(worker, worker)
    return decide(scheduler)


def test_rows_go_to_a_free_worker_of_their_node():
    assert freed(on_nodes("ba", "x", "y"), 0, 1) == [(1, "x"), (0, "y")]


def test_a_free_worker_takes_the_first_rows_of_its_node():
    assert freed(on_nodes("bbab", *"wxyz"), 0) == [(0, "y")]


def test_rows_of_a_node_that_is_busy_or_gone_go_elsewhere():
    assert freed(on_nodes("bb", "x", "y"), 0) == [(0, "x")]
    assert freed(on_nodes(["gone", ""], "x", "y"), 0, 1) == [(0, "x"), (1, "y")]


def test_rows_wait_for_a_bounded_number_of_others():
    ahead = schedule.LOOK_AHEAD
    scheduler = on_nodes("b" * ahead + "a", *range(ahead), "far behind")
    assert freed(scheduler, 0) == [(0, 0)]


def test_lost_rows_cost_no_try():
    scheduler = on_nodes("a", "x")
    assert freed(scheduler, 0) == [(0, "x")]
    for attempt in range(2, 2 * schedule.ATTEMPTS):
        task = scheduler.task_lost(0, 2)
        assert decide(scheduler) == []
        scheduler.again(task)
        assert decide(scheduler) == [(0, "x")]
        assert (task.attempt, task.troubles, task.errors) == (attempt, 0, 0)


def for_models(scheduler, number, *models, place=""):
    scheduler.add(1, 0, (number,), f"rows {number}", locality=Locality(place, frozenset(models)))


def test_rows_go_to_the_node_that_has_most_of_their_models():
    scheduler = on_nodes("", *())
    for_models(scheduler, 0, 1, 2)
    for_models(scheduler, 1, 3)
    assert freed(scheduler, 0, 1) == [(0, "rows 0"), (1, "rows 1")]
    for_models(scheduler, 2, 3, place="a")
    for_models(scheduler, 3, 1, 2, 3)
    for worker, task in [(0, 2), (1, 3)]:
        scheduler.task_done(worker, task)
    assert decide(scheduler) == [(1, "rows 2"), (0, "rows 3")]


def test_models_of_a_node_that_died_are_looked_for_there_no_more():
    scheduler = on_nodes("", *())
    for_models(scheduler, 0, 7)
    assert freed(scheduler, 1) == [(1, "rows 0")]
    scheduler.worker_died(1, 0.0, blameless=True)
    (new,) = [command.worker for command in scheduler.decide(0.0) if isinstance(command, StartWorker)]
    scheduler.worker_ready(new, "c")
    assert decide(scheduler) == [(new, "rows 0")]
    for_models(scheduler, 1, 7)
    scheduler.task_done(0, 0)
    scheduler.task_done(new, 2)
    assert decide(scheduler) == [(new, "rows 1")], "its model is there now"


def test_a_pool_grows_and_shrinks():
    scheduler = with_splits(one_pool(workers=1), *"abcd")
    assert started(scheduler) == [(0, "a")]
    scheduler.resize(0, 3)
    assert decide(scheduler) == [("start", 1), ("start", 2)]
    scheduler.worker_ready(1)
    assert decide(scheduler) == [(1, "b")]
    scheduler.resize(0, 1)
    assert decide(scheduler) == [("stop", 2)], "it was not there yet"
    scheduler.task_done(0, 0)
    assert decide(scheduler) == [(0, "c")], "one with work is not stopped"
    scheduler.task_done(0, 2)
    scheduler.task_done(1, 1)
    assert decide(scheduler) == [(0, "d"), ("stop", 1)]


def test_a_pool_has_its_least_from_the_start_until_its_work_is_over():
    scheduler = with_splits(Scheduler([(0, (1,)), (1, ())], {0: PoolSize(3, least=2), 1: PoolSize(3, least=2)}), "a")
    assert decide(scheduler) == [("start", 0), ("start", 1), ("start", 2), ("start", 3)]
    scheduler.resize(1, 1)
    assert decide(scheduler) == [("stop", 2)], "there is room for one"
    scheduler.resize(1, 5)
    assert decide(scheduler) == [("start", 4)]
    scheduler.worker_ready(0)
    scheduler.worker_died(4, 0.0)
    assert decide(scheduler) == [(0, "a"), ("start", 5)]
    for worker in (1, 3, 5):
        scheduler.worker_ready(worker)
    scheduler.task_done(0, 0)
    assert sorted(decide(scheduler)) == [("stop", 0), ("stop", 1), ("stop", 3), ("stop", 5)]


def test_a_pool_gives_up_its_least_to_one_that_gets_none():
    scheduler = with_splits(Scheduler([(0, (1,)), (1, ())], {0: PoolSize(1, least=1), 1: PoolSize(1, least=1)}), "a")
    assert decide(scheduler) == [("start", 0), ("start", 1)]
    scheduler.worker_ready(1)
    scheduler.starved.add(0)
    assert decide(scheduler) == [("stop", 1)]
    assert decide(scheduler) == [], "until the other has one"
    scheduler.worker_ready(0)
    assert decide(scheduler) == [(0, "a"), ("start", 1 + 1)]


def test_a_pool_that_waits_for_a_service_does_not_grow():
    scheduler = with_splits(one_pool(workers=1), *"abcd")
    assert started(scheduler) == [(0, "a")]
    scheduler.resize(0, 3)
    scheduler.hold({0})
    assert decide(scheduler) == []
    scheduler.worker_died(0, 0.0, blameless=True)
    assert decide(scheduler) == [("start", 1)], "one that has no worker gets one"
    scheduler.worker_ready(1)
    assert decide(scheduler) == [(1, "a")]
    scheduler.hold(set())
    assert decide(scheduler) == [("start", 2), ("start", 3)]


def test_pools_that_need_the_same_scarce_thing_take_turns():
    scheduler = Scheduler([(0, (1,)), (1, ())], {0: PoolSize(1), 1: PoolSize(1)})
    for number in range(1000):
        scheduler.add(0, 0, (number,), number)
    holder, asking, turns, done = None, {}, [], 0
    while not scheduler.finished:
        commands = scheduler.decide(0.0)
        for command in commands:
            if isinstance(command, StartWorker):
                asking[command.worker] = command.pool
            elif isinstance(command, StopWorker):
                holder = None if command.worker == holder else holder
                asking.pop(command.worker, None)
            else:
                task = scheduler.task_done(command.worker, command.task.id)
                done += task.stage
                if task.stage == 0:
                    scheduler.add(1, 0, task.key, None)
        if holder is None and asking:
            holder = min(asking)
            turns.append(asking.pop(holder))
            scheduler.worker_ready(holder)
        elif not commands:
            assert set(asking.values()) - scheduler.starved, "nobody can go on"
            scheduler.starved.update(asking.values())
    assert done == 1000
    assert turns == [0, 1, 0, 1, 0, 1, 0, 1]


def test_workers_that_have_something_to_do_are_not_given_up():
    scheduler = with_splits(Scheduler([(0, ()), (1, ())], {0: PoolSize(1), 1: PoolSize(1)}), *"abc")
    scheduler.add(1, 0, (0,), "d")
    assert decide(scheduler) == [("start", 0), ("start", 1)]
    scheduler.worker_ready(0)
    assert decide(scheduler) == [(0, "a")]
    scheduler.starved.add(1)
    scheduler.task_done(0, 0)
    assert decide(scheduler) == [(0, "b")]
    scheduler.worker_ready(1)
    assert not scheduler.starved


def throttled(step, milli_secs):
    return Metrics(
        {MetricKey(step, "model", "throttled_milli_secs"): milli_secs, MetricKey(step, "model", "requests"): 9999}
    )


def test_which_pools_wait_for_a_service():
    throttling = Throttling({"read": 0, "ask": 1, "ask again": 1})
    throttling.seen(throttled("ask", 1500), 100.0)
    assert throttling.pools(100.0) == set()
    throttling.seen(throttled("ask again", 1000), 101.0)  # of all steps and processes of the pool together
    throttling.seen(throttled("another run's", 9999), 101.0)
    assert throttling.pools(101.0) == {1}
    assert throttling.pools(104.9) == {1}
    assert throttling.pools(105.0) == set()
