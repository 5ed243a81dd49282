"""A real Postgres server for tests, which ends with the process.

Its binaries are those that the package pgserver carries; where there is no such package, those of the system.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PASSWORD = "s3cret/:#word"
NOBODY = 65534  # Postgres refuses to run as root
UNTIL_STDIN_ENDS = '"$@" & cat > /dev/null; kill -QUIT $!; wait'


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """Start a server with the user postgres and that PASSWORD; gives the folder of its socket, which is its host."""
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # open to all users, and a socket needs a short path
    try:
        as_user: dict[str, Any] = {}
        binaries = _binaries(folder)
        if os.geteuid() == 0:
            as_user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            os.chown(folder, NOBODY, NOBODY)
        (folder / "password").write_text(PASSWORD)
        (folder / "password").chmod(0o644)
        data, log = folder / "data", folder / "log"
        make = [binaries / "initdb", "-D", data, "-U", "postgres", "-A", "scram-sha-256", f"--pwfile={folder}/password"]
        options = {"cwd": folder, **as_user}
        subprocess.run([*make, "--no-sync", "-E", "UTF8", "--locale=C"], check=True, stdout=subprocess.DEVNULL, **options)
        serve = [binaries / "postgres", "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
        with log.open("w") as to:
            command = ["sh", "-c", UNTIL_STDIN_ENDS, "sh", *serve]
            server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=to, stderr=to, **options)
        try:
            _wait_for(folder, server, log)
            yield str(folder)
        finally:
            assert server.stdin is not None
            server.stdin.close()
            server.wait(30)
    finally:
        shutil.rmtree(folder)


def _binaries(folder: Path) -> Path:
    spec = importlib.util.find_spec("pgserver")
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        return (_readable_copy(package, folder) if os.geteuid() == 0 else package) / "pginstall" / "bin"
    found = [shutil.which("initdb"), *glob.glob("/usr/lib/postgresql/*/bin/initdb")]
    assert any(found), "no Postgres to test with: install the package pgserver, or postgresql of the system"
    return Path(str(next(filter(None, found)))).resolve().parent


def _readable_copy(package: Path, folder: Path) -> Path:
    """The binaries where another user can read them, with the libraries that they look for two folders up."""
    copy = folder / "binaries" / "pgserver"
    shutil.copytree(package / "pginstall", copy / "pginstall", symlinks=True, ignore=shutil.ignore_patterns("include"))
    shutil.copytree(package.parent / "pgserver.libs", copy.parent / "pgserver.libs", symlinks=True)
    return copy


def _wait_for(folder: Path, server: subprocess.Popen[bytes], log: Path) -> None:
    import psycopg

    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(host=str(folder), user="postgres", password=PASSWORD, dbname="postgres").close()
            return
        except psycopg.OperationalError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"Postgres did not start:\n{log.read_text()}") from None
            time.sleep(0.05)
