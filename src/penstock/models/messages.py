"""The messages of a model host: between its clients, its broker and the model's process.

Rows, answers and arguments are bytes to the broker: it reads none of them, so that nothing of the user's runs there. Where
they are large they are in shared memory instead, whose descriptor travels beside the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from penstock.batching.limits import BatchLimits
from penstock.failures import Failure
from penstock.models.budget import MemoryBudget
from penstock.models.outcome import Outcome
from penstock.transport.reports import ErrorReport
from penstock.transport.segments import SegmentRef

Payload: TypeAlias = bytes | SegmentRef  # one packed block; or where it is
Piece: TypeAlias = tuple[int, int, int]  # a ticket or an entry, and which of its rows: from, to


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """What a host is told by whoever starts it."""

    name: str  # of the step, for people
    program: bytes  # a pickled Served: the model, and how it is called
    limits: BatchLimits
    by_length: bool = False
    copies: int = 1
    concurrent: int = 1  # batches that a copy may run at once
    in_turn: bool = False  # of these the device runs one after the other
    retry_safe: bool = True  # whether a batch may be called again
    timeout: float | None = None  # seconds for one call of the model
    load_timeout: float | None = None
    variables: dict[str, str] = field(default_factory=dict)  # for the environment of the model's process
    devices: tuple[dict[str, str], ...] = ()  # more of them, one set for each device: copies are dealt out to them
    grace: float = 2.0  # seconds without any client before it leaves
    budget: MemoryBudget | None = None  # for many models, by name; None: there is one
    by_step: bool = False  # each of the models is that of a step, and measured as such
    own_limits: dict[str, tuple[BatchLimits, bool]] = field(default_factory=dict)  # of some of them, and whether by length
    run_dir: str = ""  # of a run that can be resumed


class Freed(NamedTuple):
    """Passed on to whom these segments belong: nobody refers to them any more."""

    owner: str
    numbers: list[int]


# From a client.


class Join(NamedTuple):
    """A bundle begins: rows may come from it."""

    lane: int
    model: str | None = None  # for which all of them are, where models of several steps share a place


class Submit(NamedTuple):
    lane: int
    ticket: int
    rows: int
    payload: Payload
    how: bytes  # what the model's process is told about these rows; rows share a batch if theirs is equal
    group: Any
    weights: list[int] | None
    lengths: list[int] | None
    alone: bool
    size: int  # bytes
    parts: Sequence[tuple[str, int, int]] | None = None  # of many models: a name, and which rows are for it, from and to
    files: Mapping[str, int] = {}  # bytes of the files of these models, as far as they are known


class Waits(NamedTuple):
    """No rows come from this bundle until the ticket is answered; or, for None, until it says so."""

    lane: int
    ticket: int | None


class Goes(NamedTuple):
    lane: int


class Leave(NamedTuple):
    """A bundle ends: what it still has there, nobody wants."""

    lane: int


class Shutdown(NamedTuple):
    """End now, whoever else is there."""


# From the broker to a client.


class Started(NamedTuple):
    """A model's process leads this group. Whoever sees the broker die ends what is left of it."""

    group: int


class Ended(NamedTuple):
    """That process is gone, and its group with it."""

    group: int


class Answers(NamedTuple):
    """The answers to some rows: one packed block of them, in the order of the pieces, for all pieces together."""

    pieces: list[Piece]  # by ticket
    payload: Payload
    failures: Any  # by position among these rows; None for a row that runs again, and is answered later
    model_id: str | None  # of the model that gave them
    wrapped: bool  # each is to be a PredictionResult of its row, by this model
    stale: int | None = None  # there are none: the rows are to be prepared again, for the version of this number


class Broken(NamedTuple):
    """Rows that get no answer because the process that had them was killed or died; or because there is no model for them,
    if it cannot be loaded or is too large."""

    pieces: list[Piece]
    kind: str  # of the failure
    message: str
    rows: int  # in the batch, of which one is to blame; 1: each by itself
    model: str | None = None  # of many, the one that they were for
    error: LoadFailed | None = None  # that its load has raised


class Refused(NamedTuple):
    """Rows that get no answer because of an error that is the user's to see; no pieces: all rows, and for good."""

    pieces: list[Piece]
    error: ErrorReport


class Happened(NamedTuple):
    """An event for people, told to one of the clients, which logs it."""

    what: str


# Between the broker and the model's process.


class Bring(NamedTuple):
    """Entries for the batch that follows, where there are many."""

    new: list[tuple[int, Payload, bytes]]


class RunRows(NamedTuple):
    batch: int
    pieces: list[Piece]  # by entry
    readers: list[int]  # for each piece, who gets its answers
    new: list[tuple[int, Payload, bytes]]  # entries that are not there yet, and how they are called
    done: list[int]  # entries that are not needed after this batch
    final: bool = False  # whatever comes of it counts: a row that does not fit in this fresh process never does
    model: str | None = None  # of many, the one that is called


class Load(NamedTuple):
    """Of many models, this one: beside what runs."""

    model: str


class Unload(NamedTuple):
    """Nobody uses it any more."""

    model: str


class HostReady(NamedTuple):
    """Of a process for many models: it has none, and can load them."""

    device_bytes: int | None  # that models may take there, if they are on a device


class Loaded(NamedTuple):
    seconds: float
    bytes: int
    search_key: str | None = None  # of what a search for a size finds (models/kept_sizes.py); None: it is not kept
    model: str | None = None  # which one, of many
    certain: int = 0  # as of a LoadedModel
    in_ram: int = 0
    on_device: bool = False


class ModelResized(NamedTuple):
    """A new version of one of many models has taken the place of the old one."""

    model: str
    bytes: int


class LoadFailed(NamedTuple):
    error: ErrorReport
    model: str | None = None
    failure: Failure | None = None  # of rows for this one of many
    no_memory: bool = False  # was left for it, where it was loaded


class Leaks(NamedTuple):
    """Models were unloaded, and the memory that they took is not free, again and again."""

    bytes: int  # that are held, by more than should be
    expected: int


class Calling(NamedTuple):
    """The model is about to be called for this batch, or once more for a part of it: its time begins."""

    batch: int


class Ran(NamedTuple):
    batch: int
    seconds: float
    answers: list[tuple[int, Payload, Any]]  # by reader: packed answers, failures by position, None: it runs again
    outcome: Outcome  # without these; all rows `again`: there are no answers


class ModelLost(NamedTuple):
    """The last word of a process whose model is gone: it ends now."""

    why: str


class Raised(NamedTuple):
    batch: int
    error: ErrorReport
