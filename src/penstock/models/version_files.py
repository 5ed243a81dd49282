"""How a run tells those who hold its models which versions are wanted, and how they answer: files in the run's own folder.

    <model>.versions             what is wanted, written by whoever watches for new versions, taken at the next look
    <model>.own                  stamps of the files of the handler's own models, as they were here when the run began
    <model>.<process>.status     what became of it there
    <model>.<n>.<what>           somebody has told of what became of version n
    <model>.<process>.<n>.<what> while version n is loaded there, or on trial: who dies then leaves it behind

Each is put in place by a rename, so that nobody reads half of one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.models.host_address import make_private, name_of
from penstock.models.versions import Trial, Version, Wanted, wanted_of


@dataclass(slots=True)
class Status:
    """What became of versions in one process: by the name of the model, and their numbers."""

    served: dict[str, dict[int, str]] = field(default_factory=dict)  # and how the change went
    refused: dict[str, dict[int, str]] = field(default_factory=dict)  # and why
    trials: dict[str, dict[int, Trial]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Status:
        def by_number(each: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[int, Any]]:
            return {name: {int(number): value for number, value in own.items()} for name, own in each.items()}

        trials = {name: {n: Trial(*t) for n, t in own.items()} for name, own in by_number(told["trials"]).items()}
        return cls(by_number(told["served"]), by_number(told["refused"]), trials)


@dataclass(frozen=True)
class VersionFiles:
    """Those of one model, or of the many models of one step."""

    folder: str
    key: str  # of the session

    @property
    def stem(self) -> str:
        return os.path.join(self.folder, name_of(self.key))

    # What is wanted.

    def publish(self, wanted: Mapping[str, Wanted]) -> None:
        make_private(self.folder)
        _put(f"{self.stem}.versions", {name: each.to_json() for name, each in wanted.items()})

    def publish_own(self, stamps: Mapping[str, str]) -> None:
        """By the paths of the files."""
        make_private(self.folder)
        _put(f"{self.stem}.own", stamps)

    def own(self) -> dict[str, str]:
        """Empty as long as nobody has said so."""
        try:
            return dict(json.loads(Path(f"{self.stem}.own").read_text()))
        except OSError:
            return {}

    def announce(self, model: str, path: str, model_id: str, stamp: str, name: str = "", since: float = 0.0) -> bool:
        """A version is to be used from now on, says one of several processes that watch. Whether it is news."""
        make_private(self.folder)
        with open(f"{self.stem}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed: what is read here, and published, is one step
            wanted = self.wanted()
            before = wanted_of(wanted, model)
            numbers = [version.number for each in wanted.values() for version in each.serve]
            version = Version(max(numbers, default=0) + 1, path, model_id, stamp, name, since)
            now = before.announced(version, self._bad(model))
            if now == before:
                return False
            self.publish({**wanted, model: now})
        return True

    def mark(self) -> tuple[int, int] | None:
        """Changes with what is wanted; None: nothing was ever said."""
        try:
            found = os.stat(f"{self.stem}.versions")
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns  # another file each time: see _put()

    def wanted(self) -> dict[str, Wanted]:
        try:
            told = json.loads(Path(f"{self.stem}.versions").read_text())
        except OSError:
            return {}
        return {name: Wanted.from_json(each) for name, each in told.items()}

    # What became of it.

    def report(self, status: Status) -> None:
        with contextlib.suppress(OSError):  # the run has ended, and its folder is gone
            _put(f"{self.stem}.{os.getpid()}.status", asdict(status))

    def reports(self) -> dict[str, Status]:
        """By process."""
        found = {}
        for path in Path(self.folder).glob(f"{name_of(self.key)}.*.status"):
            with contextlib.suppress(OSError, ValueError):
                found[path.name.split(".")[1]] = Status.from_json(json.loads(path.read_text()))
        return found

    def _bad(self, model: str) -> set[int]:
        """Versions of a model that were refused somewhere, and in service nowhere."""
        told = [(each.refused.get(model, {}), each.served.get(model, {})) for each in self.reports().values()]
        return {number for refused, _ in told for number in refused} - {number for _, served in told for number in served}

    def changed_at(self) -> int:
        """When anything was last put into the folder, in nanoseconds; 0: there is none."""
        try:
            return os.stat(self.folder).st_mtime_ns
        except OSError:
            return 0

    def is_first_to_tell(self, version: int, what: str) -> bool:
        """Whether no other process has told of what became of it: where there is no coordinator, the first one does."""
        try:
            # O_EXCL: of processes that try at once, the system lets one make it.
            os.close(os.open(f"{self.stem}.{version}.{what}", os.O_CREAT | os.O_EXCL, 0o600))
        except OSError:
            return False
        return True

    # Who died of a version.

    @contextlib.contextmanager
    def at_work(self, version: Version, what: str, rows: int = 0) -> Iterator[None]:
        """Inside, this process may die of it: whoever comes later sees that (deaths())."""
        path = f"{self.stem}.{os.getpid()}.{version.number}.{what}"
        with contextlib.suppress(OSError):
            Path(path).write_text(str(rows))
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def deaths(self, version: Version, what: str) -> list[int]:
        """Of processes that were at work on it and are gone: the rows of each."""
        rows = []
        for path in Path(self.folder).glob(f"{name_of(self.key)}.*.{version.number}.{what}"):
            if _is_gone(int(path.name.split(".")[1])):
                with contextlib.suppress(OSError, ValueError):
                    rows.append(int(path.read_text() or 0))
        return rows


# Between machines: a run has such a folder on each.


def wanted_files(folder: str) -> dict[str, bytes]:
    """What is wanted, of all models of a run, by the names of the files."""
    return _contents(folder, "*.versions")


def exchange(folder: str, wanted: Mapping[str, bytes]) -> dict[str, bytes]:
    """On another machine: put down what is wanted. What became of it there, by the names of the files."""
    there = wanted_files(folder)
    for name, told in wanted.items():
        if there.get(name) != told:
            _put(os.path.join(folder, name), json.loads(told))
    return _contents(folder, "*.status")


def _contents(folder: str, pattern: str) -> dict[str, bytes]:
    found = {}
    for path in Path(folder).glob(pattern):
        with contextlib.suppress(OSError):
            found[path.name] = path.read_bytes()
    return found


def add_reports(folder: str, machine: str, reports: Mapping[str, bytes]) -> None:
    """Put down what another machine said: its processes get names of their own."""
    with contextlib.suppress(OSError):  # the run has ended
        for name, told in reports.items():
            model, process, _ = name.split(".")
            _put(os.path.join(folder, f"{model}.{machine}-{process}.status"), json.loads(told))


def _is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:  # there is none, or it is somebody else's by now
        return True
    return False


def _put(path: str, told: Any) -> None:
    new = f"{path}.{os.getpid()}-{threading.get_ident()}.new"  # two that write at once do not share it
    with open(new, "w", encoding="utf-8") as file:
        json.dump(told, file)
    os.replace(new, path)  # whole or not at all: whoever reads takes no lock
