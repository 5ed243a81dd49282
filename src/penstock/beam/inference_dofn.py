"""The inference stream inside a DoFn.

    process()        elements are gathered in blocks, and submitted: batches are made in front of the model, of the rows of
                     all bundles and threads of this process, or of all processes that share the model. From a slow source
                     they are submitted as they come
    finish_bundle()  waits for all answers of its bundle

An answer goes out with the windows, the time and the pane of the element that it answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, starmap
from time import monotonic
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import TaggedOutput
from apache_beam.utils.windowed_value import WindowedValue

from penstock.beam import process_sessions
from penstock.beam.failures import as_beam
from penstock.beam.metric_names import naming_of
from penstock.beam.versions import TimedVersions, VersionNews, announce
from penstock.blocks import rows_of, size_of
from penstock.inference.in_flight import Made
from penstock.inference.spec import InferenceSpec
from penstock.inference.stream import open_stream
from penstock.models.place import Surroundings, choose_place
from penstock.observe.metrics import Metrics

BLOCK_ROWS = 1024
BLOCK_BYTES = 1 << 20
BLOCK_SECONDS = 0.01
SAMPLED_EVERY = 16  # rows whose bytes are counted
NOWHERE = WindowedValue(None, 0, ())


class InferenceDoFn(beam.DoFn):  # type: ignore[misc]
    """Elements in, answers out, one for each; failures to the outputs that the spec names."""

    def __init__(
        self, spec: InferenceSpec, step: str, run: str, workers: int = 1, kept: float = 0.0, counts: Any = None
    ) -> None:
        """step: names the session, errors and metrics. run: the id of the pipeline, by which processes find each other;
        workers: how many there are on a machine, if that is known. kept: seconds for which a model stays after teardown(),
        where a runner sets up anew for each bundle. counts: the handler that is asked whether it counts by itself; the
        spec's, if nothing is said."""
        self._spec = spec
        self._step = step
        self._run = run
        self._workers = workers
        self._kept = kept
        self._counts = spec.handler if counts is None else counts
        self._hold: process_sessions.Hold | None = None
        self._finalizer: Any = None
        self._versions: Sequence[TimedVersions] = ()  # that were announced last
        self._news: VersionNews | None = None

    def setup(self) -> None:
        self._open()

    def _open(self) -> process_sessions.Hold:
        if self._hold is None:
            self._hold, self._finalizer = process_sessions.opened(self._run, self, self._workers)
            around = self._hold.held.sessions.around
            self._naming = naming_of(self._spec, self._step, around, self._counts)
            self._block_rows = _block_rows(self._spec, around)
        return self._hold

    def teardown(self) -> None:
        if self._hold is not None:
            self._finalizer.detach()
            self._hold.release(after=self._kept)
            self._hold = None

    def start_bundle(self) -> None:
        self._open().abandon()  # the bundle before it may have failed
        self._elements: list[Any] = []  # that were not submitted yet
        self._bytes = 0  # of them, about, at the last look
        self._looked, self._look_at = 0, 1  # at how many of them
        self._due = monotonic() + BLOCK_SECONDS  # when to submit them, if somebody comes then
        # Of all elements of the bundle: their windows, times and panes, one object for those that follow each other and are
        # alike. None: it is answered.
        self._origins: list[Any] = []
        self._origin = NOWHERE  # the last one
        self._waiting: list[Any] = []  # what could not go out with the element at hand

    def process(self, element: Any, origin: WindowedValue = beam.DoFn.WindowedValueParam) -> Iterable[Any]:
        """Called for every element; most calls do nothing but to keep it."""
        last = self._origin
        if (
            origin.windows is not last.windows
            or origin.timestamp_micros != last.timestamp_micros
            or origin.pane_info is not last.pane_info
        ):
            last = self._origin = origin.with_value(None)
        self._origins.append(last)
        self._elements.append(element)
        if len(self._elements) < self._look_at and monotonic() < self._due:
            return ()  # None would be a mistake to Beam, which reads this method for it
        return self._look(origin)

    def _look(self, origin: WindowedValue) -> Iterable[Any]:
        """Submit what was gathered if it is a block; otherwise say when to look again."""
        rows, row_bytes = len(self._elements), size_of(origin.value)
        self._bytes += (rows - self._looked) * row_bytes
        self._looked = rows
        if rows < self._block_rows and self._bytes < BLOCK_BYTES and monotonic() < self._due:
            room = 1 + (BLOCK_BYTES - self._bytes) // max(1, row_bytes)
            self._look_at = rows + min(SAMPLED_EVERY, self._block_rows - rows, room)
            return ()
        made, self._waiting = chain(self._waiting, self._push()), []
        if len(origin.windows) == 1:
            return made
        self._waiting = list(made)  # Beam would multiply the windows of whatever goes out now
        return ()

    def finish_bundle(self) -> Iterator[Any]:
        yield from self._waiting
        self._waiting = []
        if self._elements:
            yield from self._push()
        hold = self._open()
        if hold.stream is None:
            return
        yield from self._all_out(hold.stream.finish())
        measured = hold.stream.metrics, hold.held.sessions.drain_metrics(), self._became()
        hold.held.metrics.report(self._step, self._naming, hold.stream.by_model, *measured)
        hold.abandon()

    def _became(self) -> Metrics:
        """Counts of what became of versions of the model."""
        return Metrics()

    def _push(self) -> Iterable[Any]:
        """Submit what was gathered; what is there to go out."""
        hold = self._open()
        if hold.stream is None:
            hold.stream = open_stream(self._spec, self._step, hold.held.sessions, hold.held.caller())
        elements, self._elements = self._elements, []
        self._bytes, self._looked, self._look_at = 0, 0, 1
        return self._all_out(hold.stream.push(elements))

    def _all_out(self, made: Iterable[Made]) -> Iterable[Any]:
        """One by one, as Beam takes them: many at once are work for the garbage collector."""
        return chain.from_iterable(map(self._out, self._abandoning(made)))

    def _abandoning(self, made: Iterable[Made]) -> Iterator[Made]:
        """Of errors of the model: a stream that is kept would keep this function, by the frames of the error."""
        try:
            yield from made
        except Exception:
            self._open().abandon()
            raise
        self._due = monotonic() + BLOCK_SECONDS  # here: this thread may have run the model

    def _out(self, made: Made) -> Iterable[Any]:
        """What goes out, with the windows, the time and the pane of the elements."""
        rows, at = rows_of(made.block), made.positions
        origins = self._origins[at.start : at.stop] if isinstance(at, range) else [self._origins[each] for each in at]
        if not self._spec.path.prebatched:  # else several answers are of one element
            self._forget(at)
        if made.failed is None:
            return starmap(WindowedValue.with_value, zip(origins, rows, strict=True))
        tag, failed = made.failed, zip(origins, rows, strict=True)
        return [TaggedOutput(tag, origin.with_value(as_beam(*row))) for origin, row in failed]

    def _forget(self, at: Sequence[int]) -> None:
        if isinstance(at, range) and at.step == 1:
            self._origins[at.start : at.stop] = [None] * len(at)
            return
        for each in at:
            self._origins[each] = None


def _block_rows(spec: InferenceSpec, around: Surroundings) -> int:
    """Rows that are submitted at once. A model in another process answers one batch while the next is gathered here: a block
    of many batches would be waited for, nearly to its end, before the next element is asked for."""
    if spec.limits.max_size is None or not choose_place(spec.wishes(), around).hosted:
        return BLOCK_ROWS
    return max(SAMPLED_EVERY, min(BLOCK_ROWS, spec.limits.max_size))


class RefreshedInferenceDoFn(InferenceDoFn):
    """The same with a model that changes: its versions come by a side input."""

    def process(  # type: ignore[override]
        self, element: Any, versions: Sequence[TimedVersions], origin: WindowedValue = beam.DoFn.WindowedValueParam
    ) -> Iterable[Any]:
        """versions: a list of TimedVersions, in any order, the same object for as long as Beam has no other."""
        if versions is not self._versions:
            self._versions = versions
            announce(versions, self._spec, self._step, self._open().held.sessions.around)
        return super().process(element, origin)

    def _became(self) -> Metrics:
        if self._news is None:
            self._news = VersionNews(self._spec, self._step, self._open().held.sessions.around)
        return self._news.look()
