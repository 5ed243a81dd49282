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
from penstock.inference.bundle_stream import InferenceStream
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
        self._held: process_sessions.PipelineSessions | None = None
        self._stream: InferenceStream | None = None
        self._versions: Any = None  # that were announced last

    def setup(self) -> None:
        self._open()

    def _open(self) -> process_sessions.PipelineSessions:
        if self._held is None:
            self._held = process_sessions.opened(self._run)
        return self._held

    def teardown(self) -> None:
        self._abandon()  # of a bundle that failed: no other one is to wait for its rows
        if self._held is not None:
            process_sessions.closed(self._held)
            self._held = None

    def start_bundle(self) -> None:
        self._abandon()
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
            announce(versions, self._spec, self._step, self._open().sessions.around)
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
        stream, held = self._stream, self._held
        if stream is None or held is None:
            return
        yield from self._out(stream.finish())
        held.metrics.report(self._step, stream.metrics, held.sessions.drain_metrics())
        self._abandon()

    def _push(self) -> Iterable[Any]:
        held = self._open()
        if self._stream is None:
            self._stream = open_stream(self._spec, self._step, held.sessions, held.caller())
        elements, self._elements, self._bytes = self._elements, [], 0
        self._pushed += len(elements)
        return self._out(self._stream.push(elements))

    def _out(self, made: Iterable[Made]) -> Iterator[Any]:
        for each in made:
            keep = self._spec.path.prebatched  # several answers are of one element then
            for row, at in zip(rows_of(each.block), each.positions, strict=True):
                origin = self._origins[at] if keep else self._origins.pop(at)
                value = row if each.failed is None else as_beam(*row)
                answer = WindowedValue(value, origin.timestamp, origin.windows, origin.pane_info)
                yield answer if each.failed is None else TaggedOutput(each.failed, answer)

    def _abandon(self) -> None:
        """Of a bundle that has ended, or has failed: what is in flight, nobody wants."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
