"""stub"""

import glob
import os

from penstock.io.model_versions import ModelMetadata, WatchModels


def stamp_of(path: str) -> str:
    try:
        f = os.stat(path)
    except OSError:
        return ""
    return f"{f.st_ino}-{f.st_size}-{f.st_mtime_ns}"


class FilePattern:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.last = None

    def look(self):
        found = max(glob.glob(self.pattern), key=os.path.getmtime, default=None)
        if found is None or (found, stamp_of(found)) == self.last:
            return []
        self.last = found, stamp_of(found)
        return [ModelMetadata(found, found)]

    def describe(self) -> str:
        return self.pattern


class WatchFilePattern(WatchModels):
    def __init__(self, file_pattern: str, interval: float = 10.0, stop_timestamp: float | None = None) -> None:
        super().__init__(FilePattern(file_pattern), interval, stop_timestamp)
