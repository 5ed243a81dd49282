"""The guardian: a process that runs no user code, and cleans up if the coordinator is killed.

It is run as a script, without importing the package. On its standard input it hears, a line of JSON each, which processes
and folders there are; when the input ends without a word of farewell, it kills the ones and removes the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time


def main() -> None:
    """Until the coordinator says farewell, or is gone: then its end of the pipe is closed, however it died."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it outlives what ends the coordinator
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    groups: set[int] = set()
    folders: set[str] = set()
    for line in sys.stdin:
        verb, what = json.loads(line)
        if verb == "started":
            groups.add(what)
        elif verb == "ended":
            groups.discard(what)
        elif verb == "folder":
            folders.add(what)
        elif verb == "farewell":
            return
    for group in groups:  # first: a worker that lives could write into a folder that is being removed
        kill(group)
    deadline = time.monotonic() + 3  # seconds; one that is stuck in the kernel is not waited for longer
    while groups and time.monotonic() < deadline:
        groups = {group for group in groups if alive(group)}
        time.sleep(0.01)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def alive(group: int) -> bool:
    """Whether a process of the group is left. They are no children of this one: nobody here can wait for them."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main()
