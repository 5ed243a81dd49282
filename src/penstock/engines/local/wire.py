"""What goes over the socket between the coordinator and a worker process, beside the work itself and the fleet's events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.run.chunks import AnonymousFile, Chunk
from penstock.run.fleet import Payload


@dataclass(frozen=True, slots=True)
class Install:
    """To a worker: a stage that it will get work for, pickled."""

    stage: int
    program: bytes


@dataclass(frozen=True, slots=True)
class Stop:
    """To a worker: finish and leave."""


def travelling(payload: Payload, fds: list[int]) -> Payload:
    """A payload as it is sent: its file goes beside the message, as one of `fds`, and stays open here."""
    if not isinstance(payload, Chunk) or not isinstance(payload.file, AnonymousFile):
        return payload
    if payload.file.fd not in fds:
        fds.append(payload.file.fd)
    return replace(payload, file=fds.index(payload.file.fd))


def take_files(payloads: Sequence[Payload], fds: Sequence[int]) -> None:
    """Give payloads that came the files that came beside the message: these are theirs now."""
    files = [AnonymousFile(fd) for fd in fds]
    for payload in payloads:
        if isinstance(payload, Chunk) and isinstance(payload.file, int):
            payload.file = files[payload.file].shared()
