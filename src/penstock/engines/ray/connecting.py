"""Becoming a driver of a cluster, within a time that is known."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from penstock.engines.ray.cluster import import_ray
from penstock.errors import EngineError


def connect(address: str | None, wait: float) -> None:
    """Be a driver of the cluster; a process that is one already stays where it is."""
    ray = import_ray()
    if ray.is_initialized():
        return
    chosen = address or os.environ.get("RAY_ADDRESS") or None
    try:
        if chosen is None:
            _keeping_handler(lambda: ray.init(include_dashboard=False))
        else:
            _within(wait, lambda: ray.init(chosen))
    except TimeoutError as exc:
        raise EngineError(
            f"the Ray cluster at {chosen!r} has not answered within {wait:g} s: check that this is the address of its head "
            f"(`ray status` there says so), and that its ports are reached from this machine{_about_tokens()}"
        ) from exc
    except Exception as exc:
        where = f"the Ray cluster at {chosen!r}" if chosen else "a Ray cluster on this machine"
        raise EngineError(
            f"{where} cannot be used: {type(exc).__name__}: {exc}; check the address (`ray status`), and that this machine "
            f"has the cluster's versions of Python and Ray{_about_tokens()}"
        ) from exc


def _within(seconds: float, init: Callable[[], Any]) -> None:
    """On a thread of its own: Ray may wait for ever for a cluster that does not answer. There it sets no handler of signals,
    and says so, which is what is wanted here. Raises TimeoutError; the thread is left behind then."""
    done: Future[None] = Future()

    def work() -> None:
        try:
            init()
            done.set_result(None)
        except BaseException as exc:
            done.set_exception(exc)

    log = logging.getLogger("ray._private.worker")
    log.addFilter(_says_something)
    try:
        # A daemon, which nobody ends: one that waits for a cluster for ever must not keep the process.
        threading.Thread(target=work, name="ray.init", daemon=True).start()
        done.result(seconds)
    finally:
        log.removeFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    return "SIGTERM handler is not set" not in record.getMessage()


def _keeping_handler(init: Callable[[], Any]) -> None:
    """Ray starts a cluster on the main thread only, and then ends the process at SIGTERM without a word."""
    if threading.current_thread() is not threading.main_thread():
        init()
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        init()
    finally:
        signal.signal(signal.SIGTERM, before)


def _about_tokens() -> str:
    """What may be wrong with the token of a cluster that has one."""
    is_there = "RAY_AUTH_TOKEN" in os.environ or Path("~/.ray/auth_token").expanduser().exists()
    if is_there and os.environ.get("RAY_AUTH_MODE") != "token":
        return "; this machine has a token for Ray, which is not sent: set RAY_AUTH_MODE=token if the cluster asks for one"
    return ""
