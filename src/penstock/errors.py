"""Every error that Penstock raises on purpose.

PenstockError
|- UsageError               the call is wrong: change the program, or what it names
|  |- GraphError            the pipeline does not fit together
|  |- NotShippableError     a function, handler or row cannot travel to a worker process
|  |  '- RefusedError       inside a worker alone: a block of such rows, for the step that gave it
|  |- InputError            an input is missing, unreadable or not what its format says
|  |  '- MissingInputError  the path of an input names no file
|  |- OutputError           an output cannot be written, or would overwrite something
|  |- RunChangedError       a run cannot be resumed: its inputs, code or models have changed
|  '- MissingPackageError   an optional package is not installed
|- RowError                 one row failed: look at the row
|  |- StepError             a step's own code raised for the row
|  |- BadRowsError          some rows of a batch failed: raised by handlers, to say which
|  |- PredictionCountError  run_inference() gave back the wrong number of predictions
|  |- RemoteRequestError    a service has not answered a row's request, or not as expected
|  |- ModelTimeoutError     the model took longer over these rows than it may
|  '- ModelCrashError       the model's process died repeatedly with these rows
'- EngineError              the run cannot continue: look at the machine
   |- ModelLoadError        load_model() raised
   |- ModelLostError        raised by handlers: the model is gone, and its process is to be started again
   |- TransientError        reading or writing failed, also after several attempts
   |- WorkerDiedError       a worker process died, repeatedly, with the same work
   |- ServiceUnavailableError  a service has answered no request for too long
   |- BudgetSpentError      requests to a service have taken as much as they may
   |- StoppedError          stop() was called on the run
   |- TooManyFailuresError  a larger share of a step's rows failed than its threshold allows
   '- AccountingError       rows were lost or duplicated: a bug in Penstock
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PenstockError(Exception):
    """The root of every error that Penstock raises on purpose."""


class UsageError(PenstockError):
    """The call is wrong, or what it names. Most are raised before anything starts. Without a `run_dir` nothing of the run is
    kept; with one, the splits that were done are, and the same command resumes it when the cause is fixed."""


class GraphError(UsageError):
    """The pipeline does not fit together."""


class NotShippableError(UsageError):
    """A function, a handler or a row cannot be sent to another process."""


class RefusedError(NotShippableError):
    """A block was emitted for another process, and cannot be packed. Nobody has been given any of it."""

    def __init__(self, message: str, block: Any) -> None:
        super().__init__(message)
        self.block = block

    def plainly(self) -> NotShippableError:
        """The error without the block: it may travel."""
        error = NotShippableError(str(self))
        error.__cause__ = self.__cause__
        return error


class InputError(UsageError):
    """An input is missing, unreadable, or not what its format says."""


class MissingInputError(InputError):
    """The path of an input names no file."""


class OutputError(UsageError):
    """An output cannot be written, or something is there already."""


class RunChangedError(UsageError):
    """The run in `run_dir` was started with another pipeline, other code, models or inputs."""


class MissingPackageError(UsageError, ImportError):
    """A package that this part needs is not installed, or too old, which `problem` then says."""

    def __init__(self, package: str, extra: str, problem: str | None = None) -> None:
        told = f"{package} {problem or 'is not installed'}"
        super().__init__(f"{told}; run: pip install {'' if problem is None else '--upgrade '}'penstock[{extra}]'")
        self.package, self.extra, self.problem = package, extra, problem

    def __reduce__(self) -> tuple[type[MissingPackageError], tuple[str, str, str | None]]:
        return type(self), (self.package, self.extra, self.problem)


class RowError(PenstockError):
    """One row failed."""


class StepError(RowError):
    """The code of a step raised for one row. The original error is `__cause__` where it could travel, else text."""


class BadRowsError(RowError):
    """Some rows of a batch failed, and it is known which. For prepare() and run_inference() of a handler to raise: the rows
    at these positions fail, each with its own error, and no search for them is needed.

    `values` are what would have been returned, with anything at the positions of the errors; None: the other rows are to be
    tried again without these."""

    def __init__(self, errors: Mapping[int, Exception], values: Any = None) -> None:
        super().__init__(f"{len(errors)} rows failed; the first: {next(iter(errors.values()), None)}")
        self.errors = dict(errors)
        self.values = values


class PredictionCountError(RowError):
    """run_inference() returned another number of predictions than it was given examples."""


class RemoteRequestError(RowError):
    """A service has not answered the request of one row, after so many tries, or its answer is not as expected."""


class ModelTimeoutError(RowError):
    """The model took longer over some rows than the timeout allows; its process was killed."""


class ModelCrashError(RowError):
    """The process that holds the model died repeatedly with the same rows."""


class EngineError(PenstockError):
    """The run cannot continue."""


class ModelLoadError(EngineError):
    """load_model() raised in the process that was to hold the model."""


class ModelLostError(EngineError):
    """For load_model() and run_inference() of a handler whose model is in a host to raise: the model is gone, such as a
    server that died. Its process is started again, and the rows that it held run again, as after a crash of the process."""


class TransientError(EngineError):
    """Reading an input or writing an output failed with a transient error, also after several attempts."""


class WorkerDiedError(EngineError):
    """A worker process died repeatedly with the same split."""


class ServiceUnavailableError(EngineError):
    """A service has answered no request for longer than `max_outage_secs`. With `run_dir` the run can be resumed."""


class BudgetSpentError(EngineError):
    """Requests to a service have taken as much as `max_requests`, `max_tokens` or `max_cost` allow. Says how to resume."""


class StoppedError(EngineError):
    """The run was stopped by stop() of its handle. With `run_dir` it can be resumed."""


class TooManyFailuresError(EngineError):
    """More of a step's rows failed than its `threshold` allows. Says how many, of how many, and the commonest errors."""


class AccountingError(EngineError):
    """Rows in and rows out do not add up. This is a bug in Penstock, or in a writer of your own; never in the data."""


REPORT = "this is a bug in Penstock: please report it with the pipeline"
