"""One model copy: loaded when it is first needed, called with whole batches, and the row to blame when a call fails."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

from penstock.batching.limits import up_to_bucket
from penstock.blocks import Block, join, row_count, slice_rows
from penstock.errors import EngineError, ModelLoadError, PenstockError, PredictionCountError, StepError, UsageError
from penstock.inference.columns import as_column, concat_columns
from penstock.inference.handler import ModelHandler
from penstock.models.loading import LoadedModel, load
from penstock.rows import CAUGHT, row_error, safe_str, shorten


class ModelCopy:
    """A handler and the model that it loaded, in this process."""

    def __init__(self, step: str, handler: ModelHandler[Any, Any, Any], size_buckets: tuple[int, ...] = ()) -> None:
        self.step = step
        self.handler = handler
        self._size_buckets = size_buckets
        self._out_of_memory = threading.local()
        self._loading = threading.Lock()
        self._loaded: LoadedModel | None = None

    def load(self) -> LoadedModel | None:
        """Load the model, if nobody has; return what that cost. One thread loads, others wait for it."""
        if self._loaded is not None:
            return None
        with self._loading:
            if self._loaded is not None:
                return None
            try:
                self._loaded = load(self.handler.load_model, self.handler._env_vars)
            except PenstockError:
                raise
            except CAUGHT as exc:
                what = f"{type(self.handler).__name__}.load_model() raised {type(exc).__name__}: {safe_str(exc)}"
                raise ModelLoadError(f"step {self.step!r}: {what}") from exc
            return self._loaded

    def answers(self, batch: Block, args: Any, step: str) -> Any:
        """One answer per row: a list, or for a table an Arrow array. An error names the row that is to blame, and the
        step that it came from: several may share this model."""
        try:
            return self._call(batch, args)
        except (PredictionCountError, UsageError, EngineError):
            raise  # no single row is to blame
        except Exception as exc:
            raised = exc
        if row_count(batch) > 1 and self.handler.is_out_of_memory(raised):
            return self._in_halves(batch, args, step)
        found = self._find_guilty(batch, args, raised)
        if found is not None:
            row, own = found
            raise row_error(step, row, own) from own
        raise StepError(
            f"step {step!r}: {type(raised).__name__}: {safe_str(raised)}\n  raised for a batch of {row_count(batch)} "
            f"rows, none of which fails alone; its first row: {shorten(_row(batch, 0))}"
        ) from raised

    def byte_size(self, batch: Block) -> int | None:
        """The bytes of a batch, if they can be told."""
        with contextlib.suppress(Exception):  # a size that cannot be told is no reason to fail
            return self.handler.get_num_bytes(batch) if isinstance(batch, list) else int(batch.nbytes)
        return None

    @property
    def bytes(self) -> int:
        """By how much this process grew when the model was loaded."""
        return 0 if self._loaded is None else self._loaded.bytes

    def unload(self) -> None:
        """Let go of the model, and give its memory back."""
        with self._loading:
            self._loaded = None
        gc.collect()

    def take_out_of_memory(self) -> int | None:
        """How many rows did not fit in the last batch of this thread, if any did not; the least number that did not."""
        rows: int | None = getattr(self._out_of_memory, "rows", None)
        self._out_of_memory.rows = None
        return rows

    def _in_halves(self, batch: Block, args: Any, step: str) -> Any:
        """The same rows in smaller batches, after they did not fit into memory. A row that does not fit alone fails."""
        self._out_of_memory.rows = row_count(batch)
        self.handler.after_out_of_memory()
        middle = row_count(batch) // 2
        halves = [slice_rows(batch, 0, middle), slice_rows(batch, middle, row_count(batch))]
        answers = [self.answers(half, args, step) for half in halves]
        return answers[0] + answers[1] if isinstance(batch, list) else concat_columns(answers)

    def _call(self, batch: Block, args: Any) -> Any:
        assert self._loaded is not None
        expected = row_count(batch)
        batch = self._filled(batch)
        given = row_count(batch)
        if not isinstance(batch, list):
            answers = as_column(self.handler.run_inference_columns(batch, self._loaded.model, args))
        else:
            answers = self.handler.run_inference(list(batch), self._loaded.model, args)  # its own: it may use it up
            if type(answers) is not list:
                answers = list(answers)
        if len(answers) != given:
            raise PredictionCountError(
                f"step {self.step!r}: run_inference() returned {len(answers)} predictions for {given} examples; "
                "it must return one per example, in the same order"
            )
        return answers if given == expected else answers[:expected]

    def _filled(self, batch: Block) -> Block:
        """The batch, filled up to one of the numbers of rows that are allowed with copies of its last row."""
        missing = up_to_bucket(self._size_buckets, row_count(batch)) - row_count(batch)
        if not missing:
            return batch
        last = slice_rows(batch, row_count(batch) - 1, row_count(batch))
        return join([batch, *[last] * missing])

    def _find_guilty(self, batch: Block, args: Any, exc: Exception) -> tuple[Any, Exception] | None:
        """Halve a batch that raised until one row is left that fails alone: that row, and its own error."""
        low, high = 0, row_count(batch)
        while high - low > 1:
            middle = (low + high) // 2
            if (raised := self._raised_by(slice_rows(batch, low, middle), args)) is None:
                low = middle  # the trouble is in the other half
            else:
                high, exc = middle, raised
        alone = exc if row_count(batch) == 1 else self._raised_by(slice_rows(batch, low, high), args)
        return None if alone is None else (_row(batch, low), alone)

    def _raised_by(self, batch: Block, args: Any) -> Exception | None:
        try:
            self._call(batch, args)
        except Exception as exc:
            return exc
        return None


def _row(batch: Block, index: int) -> Any:
    return batch[index] if isinstance(batch, list) else batch.slice(index, 1).to_pylist()[0]
