"""Loading a model while another one answers: in a thread of low priority, where nothing of it is left behind."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ModelLoadError
from penstock.handlers.sklearn import SklearnModelHandlerNumpy
from penstock.inference.loading_beside import NICENESS, load_beside, load_within

OURS = SklearnModelHandlerNumpy("model.pickle", trusted=True)


class Own(ps.ModelHandler[int, int, None]):
    def load_model(self) -> None: ...


def _priority() -> tuple[int, int]:
    thread = threading.get_native_id()
    return thread, os.getpriority(os.PRIO_PROCESS, thread)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")
def test_a_handler_of_ours_loads_with_low_priority_and_the_caller_keeps_its_own():
    before = _priority()
    thread, priority = load_beside(_priority, OURS)
    assert thread != before[0]
    assert priority == max(NICENESS, before[1])
    assert _priority() == before


def test_a_handler_of_the_users_loads_as_ever():
    assert load_beside(_priority, Own()) == _priority()


def test_what_a_load_raises_is_raised():
    error = np.linalg.LinAlgError("no such model")

    def load() -> None:
        raise error

    with pytest.raises(np.linalg.LinAlgError) as raised:
        load_beside(load, OURS)
    assert raised.value is error


def test_a_load_that_does_not_end_is_given_up():
    over = threading.Event()
    try:
        with pytest.raises(ModelLoadError, match=r"longer than the 0\.05 s that loading may take \(load_timeout\)"):
            load_within(0.05, over.wait)
    finally:
        over.set()
    assert load_within(60, over.wait) is True
