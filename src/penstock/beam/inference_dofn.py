"""The inference stream inside a DoFn.

    process()        elements are gathered in blocks, and submitted: batches are made in front of the model, of the rows of
                     all bundles and threads of this process, or of all processes that share the model
    finish_bundle()  waits for all answers of its bundle

An answer goes out with the windows, the time and the pane of the element that it answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import EmptySideInput, TaggedOutput
from apache_beam.utils.windowed_value import WindowedValue

from penstock.beam import process_sessions
from penstock.beam.failures import as_beam
from penstock.beam.versions import announce
from penstock.blocks import rows_of, size_of
from penstock.inference.in_flight import Made
from penstock.inference.spec import InferenceSpec
from penstock.inference.stream import open_stream

BLOCK_ROWS = 1024
BLOCK_BYTES = 1 << 20


class InferenceDoFn(beam.DoFn):  # type: ignore[misc]
    """Elements in, answers out, one for each; failures to the outputs that the spec names."""

    def __init__(self, spec: InferenceSpec, step: str, run: str) -> None:
        """step: names the session, errors and metrics. run: the id of the pipeline, by which processes find each other."""
        self._spec = spec
        self._step = step
        self._run = run
        self._hold: process_sessions.Hold | None = None
        self._finalizer: Any = None
        self._versions: Any = None  # that were announced last

    def setup(self) -> None:
        self._open()

    def _open(self) -> process_sessions.Hold:
        if self._hold is None:
            self._hold, self._finalizer = process_sessions.opened(self._run, self)
        return self._hold

    def teardown(self) -> None:
        if self._hold is not None:
            self._finalizer.detach()
            self._hold.release()
            self._hold = None

    def start_bundle(self) -> None:
        self._open().abandon()  # the bundle before it may have failed
        self._elements: list[Any] = []
        self._bytes = 0
        self._pushed = 0
        self._origins: dict[int, WindowedValue] = {}  # by position in the bundle
        self._waiting: list[Any] = []  # what could not go out with the element at hand

    def process(self, element: Any, versions: Any, origin: WindowedValue = beam.DoFn.WindowedValueParam) -> Iterator[Any]:
        """versions: of the model, where it changes: a ModelMetadata, or a list of KeyModelPathMapping; an EmptySideInput
        while there is none; None where it never changes."""
        if versions is not None and versions != self._versions and not isinstance(versions, EmptySideInput):
            self._versions = versions
            announce(versions, self._spec, self._step, self._open().held.sessions.around)
        self._origins[self._pushed + len(self._elements)] = origin
        self._elements.append(element)
        self._bytes += size_of(element)
        if len(self._elements) < BLOCK_ROWS and self._bytes < BLOCK_BYTES:
            return
        if len(origin.windows) == 1:
            yield from self._waiting
            self._waiting = []
            yield from self._push()
        else:  # Beam would multiply the windows of whatever goes out now
            self._waiting += self._push()

    def finish_bundle(self) -> Iterator[Any]:
        yield from self._waiting
        self._waiting = []
        if self._elements:
            yield from self._push()
        hold = self._open()
        if hold.stream is None:
            return
        yield from self._out(hold.stream.finish())
        hold.held.metrics.report(self._step, hold.stream.metrics, hold.held.sessions.drain_metrics())
        hold.abandon()

    def _push(self) -> Iterable[Any]:
        hold = self._open()
        if hold.stream is None:
            hold.stream = open_stream(self._spec, self._step, hold.held.sessions, hold.held.caller())
        elements, self._elements, self._bytes = self._elements, [], 0
        self._pushed += len(elements)
        return self._out(hold.stream.push(elements))

    def _out(self, made: Iterable[Made]) -> Iterator[Any]:
        try:
            for each in made:
                yield from self._answers(each)
        except Exception:  # of the model; a stream that is kept would keep this function, by the frames of the error
            self._open().abandon()
            raise

    def _answers(self, made: Made) -> Iterator[Any]:
        keep = self._spec.path.prebatched  # several answers are of one element then
        for row, at in zip(rows_of(made.block), made.positions, strict=True):
            origin = self._origins[at] if keep else self._origins.pop(at)
            value = row if made.failed is None else as_beam(*row)
            answer = WindowedValue(value, origin.timestamp, origin.windows, origin.pane_info)
            yield answer if made.failed is None else TaggedOutput(made.failed, answer)
