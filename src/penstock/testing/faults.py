"""A model whose rows fail as a test says: to see what a pipeline makes of it."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack, get_args

from penstock.errors import UsageError
from penstock.inference.handler import ModelHandler
from penstock.inference.handler_settings import HandlerSettings

Fault = Literal["raise", "out of memory", "wrong count", "not picklable", "hang", "exit", "segfault", "kill"]

EXIT_CODE = 3  # of "exit"
LONG = 3_600  # seconds: of "hang"


class FaultyModelHandler(ModelHandler[Any, Any, None]):
    """Answers each row with `answer(row)`, unless `faults` has a fault for it: a dict by row, or a function of the row that
    returns a fault or None.

    | fault | the batch with this row |
    |---|---|
    | `"raise"` | raises `ValueError` |
    | `"out of memory"` | raises `MemoryError` |
    | `"wrong count"` | gets an answer too few |
    | `"not picklable"` | has a lock for this row's answer |
    | `"hang"` | never returns: it waits in C and keeps the interpreter's lock, so that no thread of its process goes on |
    | `"exit"`, `"segfault"`, `"kill"` | ends its process: exit code 3, SIGSEGV, SIGKILL |

    The last two lines are meant for models with a process of their own (`timeout=`, `use_subprocess=True`,
    `large_model=True`): elsewhere they stop or end the process that runs the pipeline.

    `seconds` is how long each batch takes. `load_fault`, one of the same faults, is what load_model() meets.
    """

    def __init__(
        self,
        faults: Mapping[Any, Fault] | Callable[[Any], Fault | None],
        *,
        answer: Callable[[Any], Any] = lambda row: row,
        seconds: float = 0.0,
        load_fault: Fault | None = None,
        **settings: Unpack[HandlerSettings],
    ) -> None:
        super().__init__(**settings)
        named = [*(faults.values() if isinstance(faults, Mapping) else ()), *([] if load_fault is None else [load_fault])]
        for fault in named:
            _check(fault)
        self._fault_of = faults.get if isinstance(faults, Mapping) else faults
        self._answer = answer
        self._seconds = seconds
        self._load_fault = load_fault

    def load_model(self) -> None:
        if self._load_fault is not None:
            _meet(self._load_fault, "load_model()")

    def run_inference(self, batch: Sequence[Any], model: None, inference_args: Mapping[str, Any] | None = None) -> list[Any]:
        time.sleep(self._seconds)
        answers = []
        for row in batch:
            fault = self._fault_of(row)
            if fault is None:
                answers.append(self._answer(row))
            elif fault == "not picklable":
                answers.append(threading.Lock())
            elif fault != "wrong count":
                _meet(_check(fault), f"row {row!r}")
        return answers


def _check(fault: Any) -> Fault:
    if fault not in get_args(Fault):
        raise UsageError(f"a fault is {fault!r}; expected one of {', '.join(map(repr, get_args(Fault)))}")
    known: Fault = fault
    return known


def _meet(fault: Fault, where: str) -> None:
    if fault == "out of memory":
        raise MemoryError(f"the memory that a test takes away from {where}")
    if fault == "hang":
        ctypes.PyDLL(None).sleep(LONG)
    if fault == "exit":
        os._exit(EXIT_CODE)
    if fault == "segfault":
        ctypes.string_at(0)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"the fault of {where}")
