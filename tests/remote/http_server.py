"""A real HTTP server for tests, in a thread: what it answers is a function of what it is asked."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter


class Answer:
    """What the server gives back. body: bytes, or what becomes JSON. until: it is given when this is true. hang: never.
    drop: the connection is closed instead."""

    def __init__(self, body=b"", status=200, headers=(), until=None, hang=False, drop=False):
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.status, self.headers, self.until, self.hang, self.drop = status, dict(headers), until, hang, drop


class HttpServer:
    """`answer(body, headers)` gives an Answer. `answered` counts requests that were answered with 200, by their text."""

    def __init__(self, answer, port=0):
        self.answer = answer
        self.answered: Counter[str] = Counter()
        self.statuses: list[tuple[float, int]] = []
        self.seen = 0
        self.connections = 0
        self.headers: list[dict[str, str]] = []
        self.bodies: list[object] = []
        self.paths: list[str] = []
        self.refused_one = threading.Event()  # a connection, while it was away
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task] = set()

    def __enter__(self):
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=[ready], daemon=True)
        self._thread.start()
        assert ready.wait(30)
        return self

    def __exit__(self, *error):
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    @property
    def port(self):
        return self._port

    @property
    def url(self):
        return f"http://127.0.0.1:{self._port}"

    def _run(self, ready):
        asyncio.set_event_loop(self._loop)
        started = asyncio.start_server(self._serve, "127.0.0.1", self._port, backlog=2048)
        self._server = self._loop.run_until_complete(started)
        self._port = self._server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()

    def wait_for(self, answered, process):
        """Until so many requests were answered; fails if the process ends before that."""
        while sum(self.answered.values()) < answered:
            if process.poll() is not None:
                raise AssertionError(f"it has ended: {process.communicate()}")
            time.sleep(0.01)

    def pause(self):
        """Nobody can connect any more, and connections are cut; `refused_one` is set after a while."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        threading.Timer(2.0, self.refused_one.set).start()

    def resume(self):
        started = asyncio.start_server(self._serve, "127.0.0.1", self._port, backlog=2048)
        self._server = asyncio.run_coroutine_threadsafe(started, self._loop).result(30)

    async def _close(self):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        self.connections += 1
        task = asyncio.current_task()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _serve_one(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = (await reader.readexactly(int(headers.get("content-length", 0)))).decode()
        self.seen += 1
        self.headers.append(headers)
        self.bodies.append(json.loads(body) if body else None)
        self.paths.append(head[0].split(" ")[1])
        answer = self.answer(json.loads(body) if body else None, headers)
        self.statuses.append((time.monotonic(), answer.status))
        while answer.until is not None and not answer.until():
            await asyncio.sleep(0.005)
        if answer.hang:
            await asyncio.sleep(3600)
        if answer.drop:
            return False
        if answer.status == 200:
            self.answered[body] += 1
        lines = [f"HTTP/1.1 {answer.status} X", f"content-length: {len(answer.body)}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + answer.body)
        await writer.drain()
        return True


def chat(text, **usage):
    """A reply of OpenAI's API to a chat."""
    return {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": usage}
