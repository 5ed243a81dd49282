"""Asking a service for each of many rows: by Penstock, and by a bare loop of asyncio and httpx."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workload import Stopwatch, outcome


@contextlib.contextmanager
def server(delay: float, rate: float = 0.0, core: int | None = None) -> Iterator[str]:
    """The address of a server that was started, and ends with the block."""
    program = [sys.executable, str(Path(__file__).with_name("remote_server.py")), str(delay), str(rate)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.kill()
        process.wait()


def counts(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url) as reply:
        told: dict[str, float] = json.load(reply)
    return told


def on_one_core() -> int | None:
    """This process has the first core from now on; the number of another, for the server."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    return cores[-1] if len(cores) > 1 else None


def bare_loop(rows: int, in_flight: int, delay: float, clients: int = 1, spared: bool = False) -> dict[str, Any]:
    """clients: that the requests are dealt out to; httpx looks at all connections of a client for each request. spared: it
    does not look for a package that is not there, either."""
    import httpx

    if spared and importlib.util.find_spec("sniffio") is None:
        sys.modules["sniffio"] = None  # type: ignore[assignment]

    async def ask(url: str) -> int:
        each = in_flight // clients
        limits = httpx.Limits(max_connections=each, max_keepalive_connections=each)
        verify = httpx.create_ssl_context()
        asking = [httpx.AsyncClient(limits=limits, timeout=60, verify=verify) for _ in range(clients)]
        free = [client for client in asking for _ in range(each)]
        most = asyncio.Semaphore(in_flight)

        async def one(row: int) -> int:
            async with most:
                client = free.pop()
                reply = await client.post(url, content=json.dumps({"x": row}).encode())
                free.append(client)
                return int(reply.json()["y"])

        return sum(await asyncio.gather(*map(one, range(rows))))

    with server(delay, core=on_one_core()) as url:
        with Stopwatch() as watch:
            total = asyncio.run(ask(url))
        return outcome(watch, rows, total)


def _request(row: int) -> dict[str, int]:
    return {"x": row}


def _answer(body: dict[str, int]) -> int:
    return body["y"]


def penstock(rows: int, in_flight: int, delay: float) -> dict[str, Any]:
    import penstock as ps
    from penstock.handlers.remote import HttpModelHandler

    with server(delay, core=on_one_core()) as url:
        with Stopwatch() as watch:
            handler = HttpModelHandler(url, _request, _answer, max_in_flight=in_flight)
            p = ps.Pipeline(workers=0, progress=False)
            made = (p | ps.Create(range(rows)) | ps.RunInference(handler)).collect()
        return outcome(watch, len(made), sum(each.inference for each in made))


def limited(rows: int, rate: float, workers: int, told: bool) -> dict[str, Any]:
    """Against a server with a limit. told: the handler knows it; else it is found by what is refused."""
    import penstock as ps
    from penstock.handlers.remote import HttpModelHandler

    with server(0.02, rate) as url:
        handler = HttpModelHandler(url, _request, _answer, requests_per_minute=rate * 60 if told else None)
        p = ps.Pipeline(workers=workers, progress=False)
        with Stopwatch() as watch:
            made = (p | ps.Create(range(rows)) | ps.RunInference(handler)).collect()
        seen = counts(url)
    figures = {
        "of the limit": rows / seen["seconds"] / rate,
        "refused": seen["refused"] / (seen["answered"] + seen["refused"]),
        "refused after 5 s": seen["late_refused"] / max(1, seen["late"]),
        "answered": seen["answered"],
    }
    return {**outcome(watch, len(made), sum(each.inference for each in made)), "figures": figures}
