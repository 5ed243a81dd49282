"""A service that is down, fails or hangs, and runs that are killed: what becomes of the rows, and what is asked for twice.

    pip install 'penstock[remote]'
    python benchmarks/remote_faults.py outage [--seconds 60] | errors | kills

`outage`: 500 rows with the default settings; the server is gone for a minute in the middle. `errors`: 2,000 rows from two
processes; 20 % of requests fail, 1 % get no answer within `timeout=5`. `kills`: 2,000 rows with a run_dir; all processes
of the run are killed three times, and it is started again: once with HttpModelHandler, once with a RemoteModelHandler.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.handlers.remote import HttpModelHandler

PROGRAM = str(Path(__file__).with_name("remote_server.py"))
IN_FLIGHT, WORKERS, BATCH = 16, 2, 4


def request_of(row: Any) -> dict[str, int]:
    return {"x": int(row)}


def answer_of(body: Any) -> int:
    return int(body["y"])


class Client(ps.RemoteModelHandler):
    """By the standard library, a batch of rows at a time."""

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._url = url

    def create_client(self) -> str:
        return self._url

    def request(self, batch: Sequence[Any], client: str, inference_args: Any = None) -> list[int]:
        return [self._ask(client, row) for row in batch]

    def _ask(self, url: str, row: Any) -> int:
        asked = urllib.request.Request(url, json.dumps(request_of(row)).encode())
        with urllib.request.urlopen(asked, timeout=60) as reply:
            return answer_of(json.load(reply))


class Server:
    def __init__(self, *settings: float) -> None:
        self._settings = settings
        self.port = 0
        self.start()

    def start(self, delay: float = 0.05, rate: float = 0) -> None:
        more = map(str, [self.port, *self._settings])
        self._process = subprocess.Popen([sys.executable, PROGRAM, str(delay), str(rate), *more], stdout=-1, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}/"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def counts(self) -> dict[str, float]:
        with urllib.request.urlopen(self.url) as reply:
            told: dict[str, float] = json.load(reply)
        return told


def asked(handler: Any, rows: int, workers: int) -> Any:
    p = ps.Pipeline(workers=workers, progress=False)
    made = (p | ps.Create(range(rows)) | "ask" >> ps.RunInference(handler)).collect()
    answers = [getattr(each, "inference", each) for each in made]
    assert answers == list(range(1, rows + 1)), "rows are missing"
    return p.result


def outage(seconds: float) -> None:
    for make in (lambda url: HttpModelHandler(url, request_of, answer_of), lambda url: Client(url, max_batch_size=1)):
        server = Server()
        gone = threading.Thread(target=away, args=[server, seconds])
        gone.start()
        began, handler = time.monotonic(), make(server.url)
        counter = asked(handler, 500, 1).metrics.counter
        print(f"{type(handler).__name__}: 500 rows answered in {time.monotonic() - began:.0f} s", flush=True)
        print({name: counter(name) for name in ("requests", "requests_unreachable", "requests_retried")}, flush=True)
        gone.join()
        server.end()


def away(server: Server, seconds: float) -> None:
    while server.counts()["answered"] < 250:
        time.sleep(0.05)
    server.end()
    time.sleep(seconds)
    server.start()


def errors() -> None:
    server = Server(0.2, 0.01)
    handler = HttpModelHandler(server.url, request_of, answer_of, timeout=5.0)
    began = time.monotonic()
    counter = asked(handler, 2000, 2).metrics.counter
    print(f"2,000 rows answered in {time.monotonic() - began:.0f} s; {server.counts()}")
    print({name: counter(name) for name in ("requests", "requests_refused", "requests_retried")})
    server.end()


def job(folder: str, url: str, kind: str) -> None:
    handler: Any = HttpModelHandler(url, request_of, answer_of, max_in_flight=IN_FLIGHT)
    if kind == "remote":
        handler = Client(url, max_batch_size=BATCH, max_concurrent_requests=IN_FLIGHT)
    p = ps.Pipeline(workers=WORKERS, run_dir=f"{folder}/run", progress=False)
    made = p | ps.ReadFromText(f"{folder}/in.txt") | "ask" >> ps.RunInference(handler)
    made | ps.Map(lambda each: str(getattr(each, "inference", each))) | ps.WriteToText(f"{folder}/out")
    p.run()


def kills(kind: str, times: int = 3, rows: int = 2000) -> None:
    server = Server()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "in.txt").write_text("".join(f"{n}\n" for n in range(rows)))
        command = [sys.executable, __file__, "job", folder, server.url, kind]
        for kill in range(1, times + 1):
            run = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
            while server.counts()["rows"] < kill * rows / (times + 1):
                time.sleep(0.02)
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        subprocess.run(command, check=True)
        made = [int(line) for path in sorted(Path(folder, "out").glob("part-*")) for line in path.read_text().split()]
    told = server.counts()
    server.end()
    assert sorted(made) == list(range(1, rows + 1)), "rows are missing"
    in_flight = times * WORKERS * IN_FLIGHT * (BATCH if kind == "remote" else 1)
    print(f"{kind}: {told['answered'] - told['rows']:.0f} of {rows:,} rows asked for twice, {in_flight} in flight at most")


def main() -> None:
    if sys.argv[1:2] == ["job"]:
        job(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["outage", "errors", "kills"])
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    if given.what == "outage":
        outage(given.seconds)
    elif given.what == "errors":
        errors()
    else:
        kills("http")
        kills("remote")


if __name__ == "__main__":
    main()
