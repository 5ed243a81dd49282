"""One process's connection to a host: what callers see when it cannot be told something."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from penstock.batching.limits import BatchLimits
from penstock.models.client import HostClient
from penstock.models.messages import HostSpec, Join, Submit
from penstock.transport.channel import INLINE_BYTES, Channel

SPEC = HostSpec(name="step", program=b"", limits=BatchLimits())


class HostOfTest:
    """Its sockets are pairs, whose other ends the test reads. `full`: no more files can be opened once it is reached."""

    def __init__(self):
        self.ends = []
        self.full = False
        self.taken = []

    def reach(self, spec):
        ours, theirs = socket.socketpair()
        self.ends.append(Channel(theirs, plain=True))
        with contextlib.suppress(OSError):
            while self.full:
                self.taken.append(os.open(os.devnull, os.O_RDONLY))
        return ours

    def free(self):
        self.full = False
        while self.taken:
            os.close(self.taken.pop())


@pytest.fixture
def few_files():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def rows(ticket, how=b""):
    return Submit(1, ticket, 1, b"", how, None, None, None, False, 1)


def test_rows_that_cannot_be_sent_are_an_error_and_the_next_caller_connects(few_files):
    host = HostOfTest()
    client = HostClient(host, SPEC, listener=None)
    client.join(1)
    host.full = True
    try:
        with pytest.raises(OSError, match="Too many open files"):
            client.submit(rows(1, how=b"." * (2 * INLINE_BYTES)), [b"first"])  # travels in a file
    finally:
        host.free()
    client.submit(rows(2), [b"second"])
    said = [host.ends[1].receive()[0] for _ in range(2)]
    assert (type(said[0]), said[0].lane) == (Join, 1)
    assert (said[1].ticket, bytes(said[1].payload)) == (2, b"second"), "the first rows were refused: they are not sent again"
    client.close(wait=True)
    assert host.ends[0].receive()[0] == said[0]
    with pytest.raises(EOFError):
        host.ends[0].receive()
    for end in host.ends:
        end.close()
