"""A server for the benchmark of remote models, in a process of its own: it answers after a while, and limits its callers.

python remote_server.py DELAY RATE [PORT [ERRORS [HANGS]]]
    prints its port; RATE requests a second, 0: no limit; ERRORS, HANGS: the share of requests that fail, or get no answer
GET answers with what it has counted: {"answered": .., "refused": .., .., "rows": .., "seconds": ..}
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

SETTLED = 5.0  # seconds after the first request, from which refusals count by themselves


class Limit:
    """A bucket of one second's requests that fills at the rate."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.level = rate
        self.at = time.monotonic()

    def allows(self) -> bool:
        if not self.rate:
            return True
        now = time.monotonic()
        self.level = min(self.rate, self.level + (now - self.at) * self.rate)
        self.at = now
        if self.level < 1:
            return False
        self.level -= 1
        return True


class Server(asyncio.Protocol):
    delay = 0.0
    limit = Limit(0)
    errors = hangs = 0.0
    rows: set[int] = set()  # that were answered
    counts = {"answered": 0, "refused": 0, "late_refused": 0, "late": 0}
    first = 0.0
    last = 0.0

    def connection_made(self, transport):
        self.transport = transport
        self.buffer = b""

    def data_received(self, data):
        self.buffer += data
        while b"\r\n\r\n" in self.buffer:
            head, _, rest = self.buffer.partition(b"\r\n\r\n")
            length = next((int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"), 0)
            if len(rest) < length:
                return
            body, self.buffer = rest[:length], rest[length:]
            self.request(head, body)

    def request(self, head, body):
        own = type(self)
        if head.startswith(b"GET"):
            seconds = own.last - own.first
            self.reply(b"200 OK", json.dumps({**own.counts, "rows": len(own.rows), "seconds": seconds}).encode())
            return
        now = time.monotonic()
        own.first, own.last = own.first or now, now
        late = now - own.first > SETTLED
        own.counts["late"] += late
        if not own.limit.allows():
            own.counts["refused"] += 1
            own.counts["late_refused"] += late
            self.reply(b"429 Too Many Requests", b"{}", b"retry-after: 1\r\n")
            return
        chance = random.random()
        if chance < own.hangs:
            return
        if chance < own.hangs + own.errors:
            self.reply(random.choice([b"500 Oh", b"502 Oh", b"503 Later"]), b"{}")
            return
        own.counts["answered"] += 1
        row = json.loads(body)["x"]
        own.rows.add(row)
        answer = json.dumps({"y": row + 1}).encode()
        asyncio.get_running_loop().call_later(own.delay, self.reply, b"200 OK", answer)

    def reply(self, status, body, more=b""):
        if not self.transport.is_closing():
            head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n" % (
                status,
                more,
                len(body),
            )
            self.transport.write(head + body)


async def main(delay: float, rate: float, port: float = 0, errors: float = 0.0, hangs: float = 0.0) -> None:
    Server.delay, Server.limit, Server.errors, Server.hangs = delay, Limit(rate), errors, hangs
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", int(port), backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*map(float, sys.argv[1:])))
