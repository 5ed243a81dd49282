"""What is published: the wheel and the source archive are built, installed and used, by each Python that is at hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parents[2]
PYTHONS = ["3.11", "3.12", "3.13"]
PROGRAM = """
import importlib.metadata, sys
import penstock as ps

with ps.Pipeline(workers=2) as p:
    p | ps.Create(range(3000)) | ps.Map(lambda n: {"n": n, "square": n * n}) | ps.WriteToParquet("out")
rows = (ps.Pipeline() | ps.ReadFromParquet("out")).collect()
assert [row["square"] for row in rows] == [n * n for n in range(3000)]
print(ps.__file__, importlib.metadata.version("penstock"))
"""


def run(*command, cwd, may_fail=False):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True, timeout=280, check=False)
    assert may_fail or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def installed(pip, *what, cwd):
    """Install, or skip the test where packages cannot be had at all."""
    done = run(pip, "install", "--quiet", "--disable-pip-version-check", *what, cwd=cwd, may_fail=True)
    if done.returncode and "No matching distribution found" in done.stderr:
        pytest.skip(f"pip finds no {' '.join(map(str, what))} here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


def interpreter(version):
    """Another Python of this machine, if there is one."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    others = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    found = shutil.which(f"python{version}")
    for each in [found, *others]:
        if each and run(each, "--version", cwd=ROOT, may_fail=True).stdout.startswith(f"Python {version}."):
            return str(each)
    return pytest.skip(f"there is no Python {version} on this machine")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel and the source archive, built from a copy of what the project has under version control."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    installed(folder / "venv" / "bin" / "pip", "hatchling", cwd=folder)
    run(folder / "venv" / "bin" / "python", "-m", "hatchling", "build", "-d", folder / "dist", cwd=source)
    return folder / "dist"


def one(folder, pattern):
    (found,) = folder.glob(pattern)
    return found


def check_installed(folder, python, package):
    run(python, "-m", "venv", folder / "venv", cwd=folder)
    binaries = folder / "venv" / "bin"
    installed(binaries / "pip", package, cwd=folder)
    (folder / "job").mkdir()
    (folder / "job" / "program.py").write_text(PROGRAM)
    place, version = run(binaries / "python", "program.py", cwd=folder / "job").stdout.split()
    assert Path(place).is_relative_to(folder / "venv")
    assert version == penstock.__version__
    assert run(binaries / "penstock", "version", cwd=folder).stdout == f"penstock {penstock.__version__}\n"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_is_installed_and_used(built, tmp_path, version):
    check_installed(tmp_path, interpreter(version), one(built, "*.whl"))


def test_the_wheel_and_the_source_archive_hold_the_package(built):
    modules = {
        path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".typed")
    }
    with zipfile.ZipFile(one(built, "*.whl")) as wheel:
        names = set(wheel.namelist())
    assert modules <= names
    assert "penstock/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "examples"))]
    with tarfile.open(one(built, "*.tar.gz")) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in modules} | {"README.md", "LICENSE", "pyproject.toml"} <= inside


@pytest.mark.timeout(300)
def test_the_source_archive_is_built_into_a_wheel(built, tmp_path):
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, one(built, "*.tar.gz"))
    run(*command, cwd=tmp_path)
    check_installed(tmp_path, sys.executable, one(tmp_path, "*.whl"))
    with zipfile.ZipFile(one(tmp_path, "*.whl")) as again, zipfile.ZipFile(one(built, "*.whl")) as wheel:
        assert sorted(again.namelist()) == sorted(wheel.namelist())
