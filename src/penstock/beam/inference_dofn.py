"""The inference stream inside a DoFn.

    process()        elements are gathered in blocks, and submitted: batches are made in front of the model, of the rows of
                     all bundles and threads of this process, or of all processes that share the model
    finish_bundle()  waits for all answers of its bundle

An answer goes out with the windows, the time and the pane of the element that it answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import EmptySideInput, TaggedOutput
from apache_beam.utils.windowed_value import WindowedValue

from penstock.beam import process_sessions
from penstock.beam.failures import as_beam
from penstock.beam.metric_names import naming_of
from penstock.beam.versions import announce
from penstock.blocks import rows_of, size_of
from penstock.inference.in_flight import Made
from penstock.inference.spec import InferenceSpec
from penstock.inference.stream import open_stream

BLOCK_ROWS = 1024
BLOCK_BYTES = 1 << 20
SAMPLED_EVERY = 16  # rows whose bytes are counted


class InferenceDoFn(beam.DoFn):  # type: ignore[misc]
    """Elements in, answers out, one for each; failures to the outputs that the spec names."""

    def __init__(self, spec: InferenceSpec, step: str, run: str, workers: int = 1) -> None:
        """step: names the session, errors and metrics. run: the id of the pipeline, by which processes find each other;
        workers: how many there are on a machine, if that is known."""
        self._spec = spec
        self._step = step
        self._run = run
        self._workers = workers
        self._hold: process_sessions.Hold | None = None
        self._finalizer: Any = None
        self._versions: Any = None  # that were announced last

    def setup(self) -> None:
        self._open()

    def _open(self) -> process_sessions.Hold:
        if self._hold is None:
            self._hold, self._finalizer = process_sessions.opened(self._run, self, self._workers)
            self._naming = naming_of(self._spec, self._step, self._hold.held.sessions.around)
        return self._hold

    def teardown(self) -> None:
        if self._hold is not None:
            self._finalizer.detach()
            self._hold.release()
            self._hold = None

    def start_bundle(self) -> None:
        self._open().abandon()  # the bundle before it may have failed
        self._origins: list[Any] = []  # the elements of the bundle, with their windows; None: it is answered
        self._pushed = 0  # of them, those that were submitted
        self._bytes = self._row_bytes = 0  # of those that were not, about
        self._waiting: list[Any] = []  # what could not go out with the element at hand

    def process(self, element: Any, origin: WindowedValue = beam.DoFn.WindowedValueParam) -> Iterable[Any] | None:
        """Called for every element; most calls do nothing but to keep it."""
        self._origins.append(origin)
        gathered = len(self._origins) - self._pushed
        if gathered % SAMPLED_EVERY == 1:
            self._row_bytes = size_of(element)
        self._bytes += self._row_bytes
        if gathered < BLOCK_ROWS and self._bytes < BLOCK_BYTES:
            return None
        made, self._waiting = [*self._waiting, *self._push(origin)], []
        if len(origin.windows) == 1:
            return made
        self._waiting = made  # Beam would multiply the windows of whatever goes out now
        return None

    def finish_bundle(self) -> Iterator[Any]:
        yield from self._waiting
        self._waiting = []
        if self._pushed < len(self._origins):
            yield from self._push()
        hold = self._open()
        if hold.stream is None:
            return
        with self._abandoning():
            for made in hold.stream.finish():
                yield from self._out(made)
        measured = hold.stream.metrics, hold.held.sessions.drain_metrics()
        hold.held.metrics.report(self._step, self._naming, hold.stream.by_model, *measured)
        hold.abandon()

    def _push(self, at_hand: WindowedValue | None = None) -> list[Any]:
        """Submit what was gathered; what is there to go out. at_hand: the element that this is done for."""
        hold = self._open()
        if hold.stream is None:
            hold.stream = open_stream(self._spec, self._step, hold.held.sessions, hold.held.caller())
        elements = [origin.value for origin in self._origins[self._pushed :]]
        self._pushed, self._bytes = len(self._origins), 0
        with self._abandoning():
            return [each for made in hold.stream.push(elements) for each in self._out(made, at_hand)]

    @contextlib.contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Of errors of the model: a stream that is kept would keep this function, by the frames of the error."""
        try:
            yield
        except Exception:
            self._open().abandon()
            raise

    def _out(self, made: Made, at_hand: WindowedValue | None = None) -> list[Any]:
        """What goes out, with the windows, the time and the pane of the elements. What goes out bare has those of the
        element at hand: for Beam, that is much less work."""
        rows, at = rows_of(made.block), made.positions
        origins = self._origins[at.start : at.stop] if isinstance(at, range) else [self._origins[each] for each in at]
        if not self._spec.path.prebatched:  # else several answers are of one element
            for each in at:
                self._origins[each] = None
        if made.failed is None and at_hand is not None and all(_are_alike(origin, at_hand) for origin in origins):
            return rows
        if made.failed is None:
            return [origin.with_value(row) for origin, row in zip(origins, rows, strict=True)]
        tag, failed = made.failed, zip(origins, rows, strict=True)
        return [TaggedOutput(tag, origin.with_value(as_beam(*row))) for origin, row in failed]


class RefreshedInferenceDoFn(InferenceDoFn):
    """The same with a model that changes: its versions come by a side input."""

    def process(  # type: ignore[override]
        self, element: Any, versions: Any, origin: WindowedValue = beam.DoFn.WindowedValueParam
    ) -> Iterable[Any] | None:
        """versions: a ModelMetadata, or a list of KeyModelPathMapping; an EmptySideInput while there is none."""
        if versions != self._versions and not isinstance(versions, EmptySideInput):
            self._versions = versions
            announce(versions, self._spec, self._step, self._open().held.sessions.around)
        return super().process(element, origin)


def _are_alike(one: WindowedValue, other: WindowedValue) -> bool:
    """In their windows, times and panes."""
    return (
        one.timestamp_micros == other.timestamp_micros
        and (one.windows is other.windows or one.windows == other.windows)
        and (one.pane_info is other.pane_info or one.pane_info == other.pane_info)
    )
