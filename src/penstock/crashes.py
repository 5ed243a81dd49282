"""Places where a test can have this process killed: after each write, sync and rename that a resumed run must survive.

PENSTOCK_CRASH_AT=<role>:<n>:<file>     the first process of that role to come to its n-th place makes the file, and dies
PENSTOCK_CRASH_COUNTS=<folder>          each process adds a byte to <folder>/<role>-<pid> at each place that it comes to
"""

from __future__ import annotations

import os
import signal

_role = "coordinator"
_left = 0
_mark = ""
_counts = ""


def crash_point() -> None:
    """Die here, if a test wants it."""
    global _left
    if _counts:
        _count()
    if _left > 0:
        _left -= 1
        if _left == 0 and _is_first(_mark):
            os.kill(os.getpid(), signal.SIGKILL)


def become(role: str) -> None:
    """What this process is; said when it starts."""
    global _role, _left, _mark, _counts
    _role = role
    _counts = os.environ.get("PENSTOCK_CRASH_COUNTS", "")
    wanted, _, rest = os.environ.get("PENSTOCK_CRASH_AT", "").partition(":")
    if wanted == _role:
        number, _, _mark = rest.partition(":")
        _left = int(number)


def _count() -> None:
    with open(os.path.join(_counts, f"{_role}-{os.getpid()}"), "ab") as file:
        file.write(b".")


def _is_first(mark: str) -> bool:
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


become(_role)
