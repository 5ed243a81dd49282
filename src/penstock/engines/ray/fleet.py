"""The fleet of Ray's actors: starting them, handing them work, and hearing what became of it.

    coordinator's thread: start, assign, wait <---- events ---- threads of Ray, as calls of actors end

What lies between two stages is in the object store of the node where it was made, or in this process if it is small; this
process owns it and holds references only. A node that dies takes it along, and whatever made it runs again. Ray ends all
actors when this process does.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penstock.engines.ray.cluster import GPU, by_resource, import_ray, lacking, wanted, whole
from penstock.engines.ray.demand import Demand
from penstock.engines.ray.keeper import Keepers, on_node
from penstock.engines.ray.node_counts import NodeCounts, needs_of
from penstock.engines.ray.payloads import StorePayload, with_payloads
from penstock.engines.ray.worker import RayWorker, Where, versions
from penstock.errors import EngineError
from penstock.run.fleet import Died, Done, Event, Failed, FleetSpec, Lost, Ready, Resized, Starved, Work, WorkerProgress
from penstock.run.pools import room_for
from penstock.transport.interpreters import import_path
from penstock.transport.reports import ErrorReport

LOOK_EVERY = 1.0  # seconds between two questions how far a split is
VERSIONS_EVERY = 0.3  # seconds between two looks at which models are wanted
KEEPER, VERSIONS, NOBODY = -1, -2, -3  # instead of a worker: what is heard is of a node, or of the cluster
LOOK_FOR_NODES_EVERY = 2.0  # seconds
STARVED = 10.0  # seconds without a worker, until another pool is to give up its own if it has nothing to do
SILENCE = 20.0  # seconds to find out whether an actor that cannot be reached is gone, and why
TEARDOWN = 30.0  # seconds for all actors to tear down their steps

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Member:
    actor: Any  # None: there is no node that may have it, yet
    pool: int
    since: float  # when it was asked for
    warned: float  # when it was last logged that it does not come; at first the same
    asked: Mapping[str, Any]  # of its node
    meant_for: str  # the node that it must be on, if there is one
    node: str = ""  # once it is there
    is_ready: bool = False
    running: set[int] = field(default_factory=set)
    is_asked: bool = False  # how far it is
    silent_since: float | None = None  # the way to it is broken: nobody knows yet whether it, or its node, is gone


class _Heard(NamedTuple):
    """A call of an actor has ended."""

    worker: int
    what: str
    task: int
    call: Any  # a future
    answers: Any = None  # a generator of references, which are there once the call has ended


class RayFleet:
    """Actors, by the numbers that the scheduler gives them. The coordinator's thread alone uses it, but for wake() and the
    callbacks of Ray, which only put something into `_events`: nothing has a lock. The actors are ended by kill(), or by Ray
    if this process dies."""

    def __init__(self, spec: FleetSpec, resource_wait: float) -> None:
        self._ray = import_ray()
        self._spec = spec
        self._wait_for_resources = resource_wait
        self._pools = {pool.index: pool for pool in spec.pools.pools}
        self._run = spec.around.folder.rpartition("/")[2]
        self._programs = self._ray.put(dict(spec.programs))
        self._script = (import_path(), sys.argv)
        self._class = self._ray.remote(RayWorker)
        self._members: dict[int, _Member] = {}
        self._keepers = Keepers(spec.around.folder, spec.pools.pools)
        self._sizes = {pool.index: pool.size.workers for pool in spec.pools.pools}
        self._counts = NodeCounts(self._pools)
        self._found: list[tuple[int, Event]] = []  # while looking
        self._demand = Demand(self._ray)
        self._leaving: dict[int, tuple[Any, Any]] = {}  # an actor, and its word that it has torn down its steps
        self._events: queue.SimpleQueue[_Heard | None] = queue.SimpleQueue()  # None: somebody called wake()
        self._look_every = VERSIONS_EVERY if spec.changes else LOOK_EVERY
        self._looked = self._looked_for_nodes = time.monotonic()

    def start(self, pool: int, worker: int) -> None:
        chosen, now = self._pools[pool], time.monotonic()
        asked = wanted(chosen, len(self._pools))
        self._members[worker] = _Member(None, pool, now, now, asked, "")  # first: what is heard looks for it
        self._place(worker)

    def _place(self, worker: int) -> None:
        """On a node that has the device of its models, where these have one. If there is none now, that is tried again."""
        member = self._members[worker]
        chosen = self._pools[member.pool]
        there = [each.meant_for for each in self._members.values() if each.pool == member.pool and each.meant_for]
        node = self._keepers.gpu_node(there, by_resource(member.asked)) if chosen.on_device else ""
        if chosen.on_device and not node:
            return
        around = replace(self._spec.around, slots=chosen.size.slots, in_turn=chosen.ahead, nodes_file=f"pool-{chosen.index}")
        member.meant_for = node
        member.actor = self._class.options(
            **member.asked,
            **({"scheduling_strategy": on_node(node)} if node else {}),
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=chosen.size.slots + 2,
            **({"runtime_env": {"env_vars": dict(chosen.variables)}} if chosen.variables else {}),
        ).remote(self._programs, self._script, chosen, around, self._run, self._counts.of(chosen.index))
        self._hear(worker, "where", -1, member.actor.where.remote(list(self._spec.shared)))

    def assign(self, worker: int, work: Work) -> None:
        member = self._members[worker]
        member.running.add(work.task)
        payload = work.payload
        assert payload is None or isinstance(payload, StorePayload)
        beside = [] if payload is None else [payload.ref]
        answers = member.actor.run.options(num_returns="streaming").remote(work, *beside)
        self._hear(worker, "run", work.task, answers.completed(), answers)

    def stop(self, worker: int) -> None:
        member = self._members.pop(worker)
        if not member.is_ready:  # it has nothing to tear down, and may never be there
            if member.actor is not None:
                self._ray.kill(member.actor)
            return
        self._leaving[worker] = member.actor, (word := member.actor.leave.remote())
        self._hear(worker, "left", -1, word)

    def wake(self) -> None:
        self._events.put(None)

    def wait(self, seconds: float | None) -> list[tuple[int, Event]]:
        """Calls that have ended, one at a time; meanwhile actors are asked how far they are."""
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            self._look()
            if self._found:
                found, self._found = self._found, []
                return found
            patience = self._look_every if until is None else min(self._look_every, max(0.0, until - time.monotonic()))
            try:
                heard = self._events.get(timeout=patience)
            except queue.Empty:
                if until is not None and time.monotonic() >= until:
                    return []
                continue
            if heard is None:
                return []
            event = self._event(heard)
            if event is not None:
                return [(heard.worker, event)]

    def close(self) -> None:
        for worker, member in list(self._members.items()):
            if member.is_ready:  # others have nothing to tear down, and may never be
                self.stop(worker)
        if self._spec.changes:
            self._keepers.last_exchange()  # while actors tear down
        words = [word for _, word in self._leaving.values()]
        if words:
            _, late = self._ray.wait(words, num_returns=len(words), timeout=TEARDOWN)
            for _ in late:
                logger.warning("a worker was still busy %g s after the run; it is killed", TEARDOWN)
        self.kill()

    def kill(self) -> None:
        actors = [actor for actor, _ in self._leaving.values()]
        actors += [member.actor for member in self._members.values() if member.actor is not None]
        self._leaving, self._members = {}, {}
        self._demand.close()
        for actor in actors:  # before the keepers leave: no worker asks for a host that is ended
            self._ray.kill(actor)
        self._keepers.end()

    # What is heard.

    def _hear(self, worker: int, what: str, task: int, ref: Any, answers: Any = None) -> None:
        """The callback runs on the thread on which Ray hears of everything: it may not call Ray."""
        # `answers` is held until then: Ray drops what nobody refers to.
        ref.future().add_done_callback(lambda call: self._events.put(_Heard(worker, what, task, call, answers)))

    def _event(self, heard: _Heard) -> Event | None:
        """None: of a worker that has left, or is known to be dead."""
        if heard.worker == KEEPER:
            self._kept_no_more(heard.what)
        elif heard.worker == VERSIONS:
            self._keepers.take_reports(heard.what, heard.call)
        elif heard.what == "left" and heard.worker in self._leaving:  # what it holds is for others from now on
            self._ray.kill(self._leaving.pop(heard.worker)[0])
        member = self._members.get(heard.worker)
        if member is None:
            return None
        error = heard.call.exception()
        if error is not None:
            return self._trouble(heard, member, error)
        if heard.what == "where":
            return self._arrived(heard.worker, member, heard.call.result())
        if heard.what == "settled":
            return None if member.is_ready else self._ready(member)
        if heard.what == "progress":
            member.is_asked = False
            if member.silent_since is not None:
                return self._given_up(heard.worker, "the way to its actor was broken while it ran")
            found: WorkerProgress = heard.call.result()
            return found if found.rows else None
        member.running.discard(heard.task)
        word, *refs = heard.answers  # the call has ended, so that they are there: this does not wait
        try:
            event: Done | Failed = self._ray.get(word)
            return event if isinstance(event, Failed) else with_payloads(event, refs, member.node)
        except self._ray.exceptions.RayTaskError as exc:
            return self._trouble(heard, member, exc)
        except self._ray.exceptions.ObjectLostError:
            return Lost(heard.task, was_input=False)

    def _arrived(self, worker: int, member: _Member, where: Where) -> Ready | None:
        """It is ready once it knows the keeper of its node, where it may need one."""
        for what, here in versions().items():
            if (there := where.versions.get(what)) != here:
                raise EngineError(
                    f"node {where.node} of the Ray cluster has {what} {there}, and this machine {here}: install the same "
                    "version on all of them"
                )
        if where.missing:
            raise EngineError(
                f"{where.missing[0]} does not exist on node {where.node}: outputs of a run on a cluster must be on storage "
                "that all nodes reach, at the same path, or in an object store"
            )
        member.node = where.node
        if not (self._pools[member.pool].hosted or self._spec.changes):
            return self._ready(member)
        if self._keepers.of(where.node) is None:
            self._keep(where.node)
        self._settle(worker, member)
        return None

    def _ready(self, member: _Member) -> Ready:
        member.is_ready = True
        return Ready(member.node)

    # The hosts of models.

    def _keep(self, node: str) -> None:
        keeper = self._keepers.start(node)
        keeper.stays.future().add_done_callback(lambda call: self._events.put(_Heard(KEEPER, node, -1, call)))
        self._hear(VERSIONS, node, -1, keeper.versions)

    def _settle(self, worker: int, member: _Member) -> None:
        keeper = self._keepers.of(member.node)
        assert keeper is not None
        self._hear(worker, "settled", -1, member.actor.settle.remote(keeper.actor, keeper.gpus, keeper.versions))

    def _kept_no_more(self, node: str) -> None:
        """A keeper is gone. Hosts that it has started live on; another one starts those that are needed later."""
        mine = {worker: member for worker, member in self._members.items() if member.node == node}
        if self._keepers.lost(node) and mine:
            logger.warning("the actor that starts models on node %s died; another one is started", node)
            self._keep(node)
            for worker, member in mine.items():
                self._settle(worker, member)

    def _trouble(self, heard: _Heard, member: _Member, error: BaseException) -> Event | None:
        """A call that gave no answer: its actor is gone, or Ray could not carry what it gave."""
        for answer in (heard.answers.completed(), *heard.answers) if heard.answers else ():
            with contextlib.suppress(self._ray.exceptions.RayError):  # Ray logs errors that nobody has looked at
                self._ray.get(answer)
        if heard.what == "settled" and isinstance(error, self._ray.exceptions.RayTaskError):
            self._check_keeper(member, error)
            return None
        kinds = self._ray.exceptions
        gone = (kinds.RayActorError, kinds.ActorUnschedulableError, kinds.OutOfMemoryError)  # the last: Ray has killed it
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):  # the next question how far it is says more
            member.silent_since = member.silent_since or time.monotonic()
            member.is_asked = member.is_asked and heard.what != "progress"
            return None
        if isinstance(error, gone):
            del self._members[heard.worker]
            return self._death(member, error)
        if heard.what == "progress":
            member.is_asked = False
            return None
        if heard.what == "run":
            member.running.discard(heard.task)
            if isinstance(error, self._ray.exceptions.ObjectLostError):
                return Lost(heard.task, was_input=True)
            return Failed(heard.task, ErrorReport.of(_cause_of(error)))
        raise EngineError(f"an actor of Ray cannot say where it is: {type(error).__name__}: {error}") from error

    def _check_keeper(self, member: _Member, error: BaseException) -> None:
        """What the keeper gave for it is an error. If the keeper is gone, that is heard, too, and another one gives it."""
        cause = _cause_of(error)
        if not isinstance(cause, self._ray.exceptions.RayActorError):
            raise EngineError(
                f"the actor that starts models on node {member.node} could not say which GPUs it has, or could not be told "
                f"which versions of models are wanted there: {type(cause).__name__}: {cause}"
            ) from error

    def _death(self, member: _Member, error: BaseException) -> Died:
        """It is the work's fault unless its node is gone, too, or it never ran."""
        told = " ".join(str(error).split())
        is_gone = any(words in told.lower() for words in ("node died", "node has died", "dead node", "actor never ran"))
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        is_gone = is_gone or (bool(member.node) and member.node not in alive)
        return Died(told[:2000], killed="creation task" not in told, blameless=is_gone)

    def _given_up(self, worker: int, why: str) -> Died:
        """What became of its splits is not known: they run again elsewhere, and it is ended."""
        self._ray.kill(self._members.pop(worker).actor)
        return Died(why, killed=True, blameless=True)

    # What is looked at now and then.

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < self._look_every:
            return
        self._looked = now
        if self._spec.changes:
            self._keepers.exchange(lambda node, versions: self._hear(VERSIONS, node, -1, versions))
        for worker, member in list(self._members.items()):
            if member.silent_since is not None and now - member.silent_since > SILENCE:
                self._found.append((worker, self._given_up(worker, f"its actor was not heard of for {SILENCE:g} s")))
            elif (member.running or member.silent_since is not None) and not member.is_asked:
                member.is_asked = True
                self._hear(worker, "progress", -1, member.actor.progress.remote())
        if now - self._looked_for_nodes >= min(LOOK_FOR_NODES_EVERY, self._wait_for_resources):
            self._looked_for_nodes = now
            for worker in [worker for worker, member in self._members.items() if member.actor is None]:
                self._place(worker)
            self._check_resources(now)
            self._say_who_starves(now)
            self._follow_nodes()

    def _follow_nodes(self) -> None:
        """Pools have as many workers as the nodes have room for, up to the user's maximum; what is missing to that is asked
        of the autoscaler while all that there may be have work, and do not wait for a service; to the minimum, always, and
        for workers that no node can have, of which Ray has not heard."""
        machine = whole()
        throttled = self._spec.throttling.pools(time.monotonic())
        for index, pool in self._pools.items():
            room, _ = room_for(pool.hints, pool.most, machine)
            if room != self._sizes[index]:
                self._sizes[index] = room
                self._found.append((NOBODY, Resized(index, room)))
            mine = [member for member in self._members.values() if member.pool == index]
            has_use = sum(bool(member.running) for member in mine) >= room and index not in throttled
            wishes = (pool.most or 0) if has_use else pool.size.least
            missing = sum(member.actor is None for member in mine) + max(0, wishes - room)
            self._demand.ask(index, missing if mine else 0, needs_of(pool, len(self._pools)))
        changed = self._counts.changed()
        for member in self._members.values():
            if member.pool in changed and member.actor is not None:
                member.actor.share.remote(changed[member.pool])

    def _say_who_starves(self, now: float) -> None:
        pools = {member.pool for member in self._members.values() if now - member.since > STARVED}
        pools -= {member.pool for member in self._members.values() if member.is_ready}
        self._found += [(NOBODY, Starved(pool)) for pool in pools]

    def _check_resources(self, now: float) -> None:
        """An error for a pool that no node can have a worker of, when it has waited long enough."""
        served = {member.pool for member in self._members.values() if member.is_ready}
        for member in self._members.values():
            if member.pool in served or now - member.warned < self._wait_for_resources:
                continue
            waited = now - member.since
            pool = self._pools[member.pool]
            who = f"stage {', '.join(map(str, pool.stages))} (resource hints: {pool.hints})"
            if (missing := lacking(needs_of(pool, len(self._pools)))) is not None:
                raise EngineError(
                    f"no node for the workers of {who} after {waited:.0f} s: {missing}; change the hints, or add such a "
                    "node to the cluster"
                )
            if GPU in by_resource(member.asked) and self._keepers.have_all_gpus():
                raise EngineError(
                    f"no GPU for the workers of {who} after {waited:.0f} s: processes of models have those of all nodes "
                    "until the run ends; do the two in runs of their own"
                )
            logger.warning("%s has waited for a worker for %.0f s: the nodes that could have it are busy", who, waited)
            member.warned = now


def _cause_of(error: BaseException) -> BaseException:
    """What an actor's method raised, out of Ray's wrapping."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error
