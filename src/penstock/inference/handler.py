"""The contract of a model handler: how a model is loaded, how it is called, how its rows are batched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Never, TypeVar

from penstock.batching.limits import BatchLimits
from penstock.blocks import byte_size
from penstock.display import Displayed, Look
from penstock.errors import UsageError
from penstock.inference.columns import Output
from penstock.inference.handler_checks import (
    check_copies,
    check_function,
    check_output,
    checked_columns,
    checked_variables,
    refuse_arguments,
)

if TYPE_CHECKING:
    import pyarrow as pa

AHEAD = 3  # batches at once where one runs on a device: the next one is ready, and the answers of the last are fetched

ExampleT = TypeVar("ExampleT")
PredictionT = TypeVar("PredictionT")
ModelT = TypeVar("ModelT")
SelfT = TypeVar("SelfT", bound="ModelHandler[Any, Any, Any]")


class ModelHandler(Displayed, Generic[ExampleT, PredictionT, ModelT]):
    """A small picklable description of a model. Define load_model() and run_inference(); the rest has defaults.

    The heavy thing exists only after load_model(), in the process that holds it. A subclass need not call
    super().__init__(): all settings default to class attributes.
    """

    retry_safe: bool = True  # False: no row is ever passed to run_inference() twice, so a batch that fails does as a whole
    wraps_answers: bool = False  # True: where rows come out, each answer is a PredictionResult with its example and model_id

    _min_batch_size: int | None = None
    _max_batch_size: int | None = None
    _max_batch_duration_secs: float | None = None
    _max_batch_weight: int | None = None
    _element_size_fn: Callable[[Any], int] | None = None
    _batch_length_fn: Callable[[Any], int] | None = None
    _max_padded_cost: int | None = None
    _lookahead_rows: int | None = None
    _lookahead_bytes: int | None = None
    _batch_size_buckets: Sequence[int] = ()
    _length_buckets: Sequence[int] = ()
    _env_vars: Mapping[str, str] = {}
    _large_model: bool = False
    _model_copies: int | None = None
    _no_batching: bool = False
    _columns: str | tuple[str, ...] | None = None
    _output_column: str | None = None
    _output_prefix: str | None = None
    _preprocess_fns: tuple[Callable[[Any], Any], ...] = ()  # in the order they run
    _postprocess_fns: tuple[Callable[[Any], Any], ...] = ()

    def __init__(
        self,
        *,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        max_batch_duration_secs: float | None = None,
        max_batch_weight: int | None = None,
        element_size_fn: Callable[[ExampleT], int] | None = None,
        batch_length_fn: Callable[[ExampleT], int] | None = None,
        max_padded_cost: int | None = None,
        lookahead_rows: int | None = None,
        lookahead_bytes: int | None = None,
        batch_size_buckets: Sequence[int] = (),
        length_buckets: Sequence[int] = (),
        env_vars: Mapping[str, str] | None = None,
        large_model: bool = False,
        model_copies: int | None = None,
        columns: str | Sequence[str] | None = None,
        output_column: str | None = None,
        output_prefix: str | None = None,
        **unknown: Never,
    ) -> None:
        refuse_arguments(type(self), unknown)
        for name, given in [("batch_size_buckets", batch_size_buckets), ("length_buckets", length_buckets)]:
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise UsageError(f"{name}={given!r}: expected a list of whole numbers, such as [8, 16, 32]")
        self._min_batch_size = min_batch_size
        self._max_batch_size = max_batch_size
        self._max_batch_duration_secs = max_batch_duration_secs
        self._max_batch_weight = max_batch_weight
        self._element_size_fn = element_size_fn
        self._batch_length_fn = batch_length_fn
        self._max_padded_cost = max_padded_cost
        self._lookahead_rows = lookahead_rows
        self._lookahead_bytes = lookahead_bytes
        self._batch_size_buckets = tuple(batch_size_buckets)
        self._length_buckets = tuple(length_buckets)
        self._env_vars = checked_variables(env_vars)
        self._large_model = large_model
        self._model_copies = model_copies
        self._columns = checked_columns(columns)
        check_output(output_column, output_prefix)
        self._output_column, self._output_prefix = output_column, output_prefix
        if not isinstance(large_model, bool):
            raise UsageError(f"large_model={large_model!r}: expected True or False")
        if batch_length_fn is not None:
            check_function("batch_length_fn=", batch_length_fn)
        check_copies(model_copies)
        if type(self).batch_elements_kwargs is ModelHandler.batch_elements_kwargs:
            BatchLimits.of(self.batch_elements_kwargs())

    # What every handler defines.

    def load_model(self) -> ModelT:
        """Load and return the model. Called in the process that will hold it, once per copy; may be slow. The handler
        there is a copy of the user's."""
        raise NotImplementedError(f"{type(self).__name__} must define load_model(self)")

    def run_inference(
        self, batch: Sequence[ExampleT], model: ModelT, inference_args: Mapping[str, Any] | None = None
    ) -> Any:
        """Return one prediction per example, in the same order: a list; or one array or tensor whose first axis is the
        rows; or a dict of such arrays, for several outputs. Raise BadRowsError where it is known which rows are to blame.
        Never called from two threads at once on one model copy, unless max_concurrent_batches() says that this is safe."""
        raise NotImplementedError(f"{type(self).__name__} must define run_inference(self, batch, model, inference_args)")

    # What a handler may define, to prepare rows beside the data.

    def load_prepare(self) -> Any:
        """The tool that prepare() needs, such as a tokenizer. Called once in each process that prepares rows, which may be
        one that never loads the model: import what only the model needs in load_model()."""
        return None

    def prepare_key(self) -> str | None:
        """Handlers of one class and one key share the tool in a process; None: this step has its own."""
        return None

    def prepare(self, examples: Sequence[ExampleT], tool: Any, inference_args: Mapping[str, Any] | None = None) -> Any:
        """What the model needs of each example, made on the CPU: token ids, a decoded image. One value per example, in
        order, that depends on this example alone and can be pickled; a list of them.

        Called once for each row, in the process that read it, for many rows at a time and from several threads at once.
        run_inference() is then given these values instead of the examples, and so is get_lengths(). Raise BadRowsError for
        examples that cannot be prepared, with the values of the others."""
        raise NotImplementedError

    def prepares(self) -> bool:
        """Whether prepare() is to be called."""
        return type(self).prepare is not ModelHandler.prepare

    # What a handler may define, for columns.

    def input_columns(self) -> tuple[str, ...] | None:
        """The columns that the model takes, in order (columns=); None: all of a table, or rows that are no records."""
        return (self._columns,) if isinstance(self._columns, str) else self._columns

    def examples_of(self, table: pa.Table) -> Sequence[ExampleT]:
        """The examples in a table of the input columns: values where columns= is one name, else dicts. Called where rows
        are read, before prepare(); not for handlers that take columns themselves."""
        values: list[Any] = table.column(0).to_pylist() if isinstance(self._columns, str) else table.to_pylist()
        return values

    def takes_columns(self) -> bool | str:
        """Whether run_inference_columns() can be called for blocks that hold columns: as a pyarrow.Table (True or "arrow")
        or as a dict of NumPy arrays ("numpy"). A handler that prepares its rows is given those instead."""
        return False

    def run_inference_columns(self, table: pa.Table, model: ModelT, inference_args: Mapping[str, Any] | None = None) -> Any:
        """Like run_inference(), over a table of the input columns: return an array (Arrow, NumPy), a dict of arrays or a
        list of one prediction per row. The engine adds it to the table that came in, as the columns `inference` and
        `model_id`, or those that output_column= names."""
        raise NotImplementedError(f"{type(self).__name__}.takes_columns() is true, so it must define run_inference_columns")

    def check_columns(self, schema: pa.Schema) -> None:
        """Raise UsageError when no row of a table with these columns can be what the model takes, such as for a column of
        the settings that is not there. Called for each table that reaches the model as it is, before its rows are made:
        what a whole table lacks ends the run at once, and is no row's failure."""

    def model_id(self) -> str | None:
        """What tells this model from others: a path, a name with a version."""
        return None

    def _look(self) -> Look:
        return Look(f"{type(self).__name__}({self.model_id() or ''})")

    def model_files(self) -> Sequence[str]:
        """Local paths or URLs of the files or folders that load_model() reads; used to tell whether a resumed run has the
        same model, and whether it is small enough to be loaded in all workers at once. Called in the user's process, where
        the pipeline was built, and in workers."""
        return ()

    def model_bytes(self, model: ModelT) -> int | None:
        """How many bytes a loaded model takes, on its device or else in RAM: what a memory budget counts, and the metric
        model_byte_size. None: it is measured. To be defined for models whose memory cannot be seen from Python, or that
        share most of it. Called once after load_model(), in its thread."""
        return None

    def batch_elements_kwargs(self) -> Mapping[str, Any]:
        """Limits on batches, by the names of the arguments of __init__()."""
        settings = {
            "min_batch_size": self._min_batch_size,
            "max_batch_size": self._max_batch_size,
            "max_batch_duration_secs": self._max_batch_duration_secs,
            "max_batch_weight": self._max_batch_weight,
            "element_size_fn": self._element_size_fn,
            "max_padded_cost": self._max_padded_cost,
            "lookahead_rows": self._lookahead_rows,
            "lookahead_bytes": self._lookahead_bytes,
            "batch_size_buckets": self._batch_size_buckets or None,
            "length_buckets": self._length_buckets or None,
        }
        return {name: value for name, value in settings.items() if value is not None}

    def measures_length(self) -> bool:
        """Whether rows are batched by their length: whether get_lengths() gives any."""
        return self._batch_length_fn is not None

    def get_lengths(self, batch: Sequence[ExampleT]) -> Sequence[int]:
        """The length of each row, in whatever unit its padding is counted: tokens, samples, points. Called on the callers'
        threads, before the model, with whole blocks of rows; a handler that knows its inputs overrides it."""
        assert self._batch_length_fn is not None
        return [self._batch_length_fn(example) for example in batch]

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether the model failed because the batch was too large for memory: the same rows then run in smaller ones."""
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        told = str(error).lower()  # cuBLAS and cuDNN have words of their own
        return isinstance(error, RuntimeError) and ("out of memory" in told or "status_alloc_failed" in told)

    def after_out_of_memory(self) -> None:
        """Free what can be freed before the rows run again."""

    def changes_rows(self) -> bool:
        """Whether run_inference() may change, in place, rows that it is given. It sees every row as it was submitted, even
        if that runs again, and no other step sees what it changes; a handler that only reads its rows saves their copies."""
        return True

    def max_concurrent_batches(self) -> int:
        """How many run_inference() calls may run at once on one model copy: more than 1 for thread-safe models."""
        return 1

    def is_native(self) -> bool:
        """Whether loading and calling this model runs no Python but its framework's, and takes little time for a row: short
        jobs then run in threads of the user's process. A class of the user's own, derived from any other, is not."""
        return False

    def is_thread_safe(self, model: ModelT) -> bool:
        """Whether several threads may call this loaded model at once. Asked in short jobs; elsewhere
        max_concurrent_batches() counts."""
        return False

    def prepares_ahead(self) -> bool:
        """Whether run_inference() may be called for the next batch while one is on a device that takes them in turn: its
        rows are then collated and moved meanwhile. For thread-safe handlers of models on an accelerator."""
        return False

    def new_shapes_cost(self) -> bool:
        """Whether the first batch of a shape, its rows and padded length, takes much longer than the next ones, as on
        accelerators. Padded lengths are then rounded up, and the search for a size does not mistake first times for the
        costs of a size."""
        return self.prepares_ahead()

    def device_seconds(self) -> float | None:
        """How long the device was at work on what this thread ran since it last asked, which it does before and after each
        run_inference(); None: not known. Where it is, the search for a size looks at nothing else."""
        return None

    def padded_length(self, longest: int) -> int:
        """What run_inference() should pad a batch to whose longest row is so long, and what its cost is computed with: the
        next of length_buckets; else a multiple of 8 where new shapes cost; else just that."""
        return BatchLimits.of(self.batch_elements_kwargs(), self.new_shapes_cost()).padded_length(longest)

    def get_num_bytes(self, batch: Sequence[ExampleT]) -> int:
        """About how many bytes a batch holds, for the metric inference_request_batch_byte_size, which samples it."""
        return byte_size(list(batch))

    def get_metrics_namespace(self) -> str:
        """The namespace of this handler's metrics."""
        return "RunInference"

    def get_resource_hints(self) -> Mapping[str, Any]:
        """Hints for the step that runs this handler, where the user gives none: min_ram, cpus, accelerator."""
        return {}

    def validate_inference_args(self, inference_args: Mapping[str, Any] | None) -> None:
        """Raise when these arguments cannot be right. Called while the pipeline is built."""

    def update_model_path(self, model_path: str) -> None:
        """From now on this handler is for the model at another path, or with another name; it is loaded in the same way.
        Called on a copy of the user's handler, before load_model(): for a model for each key, and for models that change."""
        raise UsageError(
            f"{type(self).__name__} cannot load a model from another path: define update_model_path(self, model_path) if "
            "it loads a file, or give every model a handler of its own: KeyModelMapping(keys, handler)"
        )

    def share_model_across_processes(self) -> bool:
        """Whether all processes of the machine should share one copy, or model_copies() of them, in processes of their
        own."""
        return self._large_model or self._model_copies is not None

    def model_copies(self) -> int | None:
        """Exactly how many copies to hold on the machine, where processes share them; None: one, or one for each GPU."""
        return self._model_copies

    def accelerator(self) -> str | None:
        """What the model runs on: "gpu" if any of the machine's is fine, the name of a device such as "cuda:1"; None: the
        CPU, or what load_model() chooses by itself."""
        return None

    # What users call.

    def with_preprocess_fn(self: SelfT, fn: Callable[[Any], Any]) -> SelfT:
        """This handler with fn(row) before the model. As in Beam, the last one attached runs first."""
        check_function("with_preprocess_fn", fn)
        return self._changed(_preprocess_fns=(fn, *self._preprocess_fns))

    def with_postprocess_fn(self: SelfT, fn: Callable[[Any], Any]) -> SelfT:
        """This handler with fn(answer) after the model; several run in the order they were attached."""
        check_function("with_postprocess_fn", fn)
        return self._changed(_postprocess_fns=(*self._postprocess_fns, fn))

    def with_no_batching(self: SelfT) -> SelfT:
        """This handler for rows that are batches already: each row, a list of examples, is one run_inference() call, and
        gives one answer per example. Functions attached to this handler see the lists before, single answers after."""
        return self._changed(_no_batching=True)

    def get_preprocess_fns(self) -> tuple[Callable[[Any], Any], ...]:
        """The functions of with_preprocess_fn(), in the order in which they run."""
        return self._preprocess_fns

    def get_postprocess_fns(self) -> tuple[Callable[[Any], Any], ...]:
        """The functions of with_postprocess_fn(), in the order in which they run."""
        return self._postprocess_fns

    def _changed(self: SelfT, **attributes: Any) -> SelfT:
        changed = copy.copy(self)
        changed.__dict__.update(attributes)
        return changed


def variables_of(handler: ModelHandler[Any, Any, Any]) -> Mapping[str, str]:
    """What the model wants in the environment of its process (env_vars=)."""
    return handler._env_vars


def output_of(handler: ModelHandler[Any, Any, Any]) -> Output:
    """What the columns of its answers are called (output_column=, output_prefix=)."""
    return Output(handler._output_column, handler._output_prefix)


def measures_examples(handler: ModelHandler[Any, Any, Any]) -> bool:
    """Whether lengths are those of examples, by the user's own function, and not of what they are prepared to."""
    return handler._batch_length_fn is not None


def is_prebatched(handler: ModelHandler[Any, Any, Any]) -> bool:
    """Whether rows are batches already: with_no_batching(), or the handler says so by the name that Beam has for it."""
    return handler._no_batching or bool(getattr(handler, "should_skip_batching", bool)())


def describes_same_model(one: ModelHandler[Any, Any, Any], other: ModelHandler[Any, Any, Any]) -> bool:
    """Whether two steps can share a model; the functions around it are each step's own."""
    around = {"_preprocess_fns", "_postprocess_fns", "_no_batching", "_output_column", "_output_prefix"}
    if not one.takes_columns():  # else its columns go into the call of the model
        around.add("_columns")
    settings = [{k: v for k, v in vars(handler).items() if k not in around} for handler in (one, other)]
    try:
        return type(one) is type(other) and bool(settings[0] == settings[1])
    except ValueError:  # arrays do not compare to a single truth
        return False


def concurrent_batches(handler: ModelHandler[Any, Any, Any]) -> int:
    """How many batches may be in run_inference() at once."""
    limit: object = handler.max_concurrent_batches()
    if not isinstance(limit, int) or limit < 1:
        raise UsageError(f"max_concurrent_batches() returned {limit!r}; expected a whole number of at least 1")
    return max(limit, AHEAD) if handler.prepares_ahead() else limit


class AnnouncingHandler(ModelHandler[ExampleT, PredictionT, ModelT]):
    """A handler that calls its model several times for a batch and says so before each: a timeout is for one call."""

    calling: Callable[[], None] | None = None  # where calls are timed; set before each batch, never for two at once
