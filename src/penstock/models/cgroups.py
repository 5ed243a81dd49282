"""What cgroups allow this process: containers, systemd units and scopes, Slurm jobs; v1 and v2, at any depth.

All is decided from the text of files, which the caller's `read(path)` gives: an empty text for one that cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

Read = Callable[[str], str]


class MemoryLimit(NamedTuple):
    """The limit of one cgroup on the way from the process to the root."""

    bytes: int
    used: int  # of them, without the files that the kernel would drop first

    @property
    def left(self) -> int:
        return max(0, self.bytes - self.used)


def read_file(path: str) -> str:
    """The text of a file of the system; empty where there is none."""
    try:
        return Path(path).read_text()
    except (OSError, ValueError):
        return ""


def memory_limits(read: Read = read_file) -> list[MemoryLimit]:
    """All limits that hold: each cgroup that this process is in, from its own to the outermost that can be seen."""
    found = []
    for folder, is_v2 in _folders(read, "memory"):
        names = ("max", "current", "inactive_file") if is_v2 else ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
        limit, used = (read(f"{folder}/memory.{name}").strip() for name in names[:2])
        if limit.isdigit() and used.isdigit():  # v2 says "max" where there is no limit, v1 a number beyond any memory
            files = re.search(rf"^{names[2]} (\d+)", read(f"{folder}/memory.stat"), re.MULTILINE)
            found.append(MemoryLimit(int(limit), max(0, int(used) - (int(files[1]) if files else 0))))
    return found


def cpu_quota(read: Read = read_file) -> float | None:
    """How many cores may be busy at a time, by the smallest quota; None without one."""
    quotas = []
    for folder, is_v2 in _folders(read, "cpu"):
        told = read(f"{folder}/cpu.max") if is_v2 else _v1_quota(read, folder)
        quota, _, period = told.strip().partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _v1_quota(read: Read, folder: str) -> str:
    return " ".join(read(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))


def _folders(read: Read, controller: str) -> Iterator[tuple[str, bool]]:
    """The folders of this process's cgroups that limit by `controller`, its own first, and whether each is of v2."""
    own = _own_cgroups(read("/proc/self/cgroup"))
    for root, mount_point, is_v2, controllers in _mounts(read("/proc/self/mountinfo")):
        path = own.get("") if is_v2 else own.get(controller) if controller in controllers else None
        if path is None:
            continue
        below = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()  # the mount may be of one below
        places = [PurePosixPath(mount_point) / below, *(PurePosixPath(mount_point) / each for each in below.parents)]
        for folder in dict.fromkeys(places):
            yield str(folder), is_v2


def _own_cgroups(text: str) -> dict[str, PurePosixPath]:
    """The path of the process's cgroup by controller; that of v2 by the empty name."""
    found = {}
    for line in text.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        found.update({name: PurePosixPath(path or "/") for name in controllers.split(",")})
    return found


def _mounts(text: str) -> Iterator[tuple[PurePosixPath, str, bool, list[str]]]:
    """Of each hierarchy: the cgroup that is mounted, where, whether it is v2, and its controllers."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) >= 5 and len(kind) >= 3 and kind[0] in ("cgroup", "cgroup2"):
            root, mount_point = map(_unescaped, fields[3:5])
            yield PurePosixPath(root), mount_point, kind[0] == "cgroup2", kind[2].split(",")


def _unescaped(path: str) -> str:
    """Blanks and such are octal numbers there."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)
