"""The example for Apache Beam: its pipeline runs, and its container recipe is right, line by line."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from penstock.version import __version__

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "beam"
RECIPE = (EXAMPLE / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = re.compile(r"apache/beam_python(?P<python>3\.\d+)_sdk:(?P<beam>[\d.]+)")
PIP_FLAGS = {"--no-cache-dir"}


def instructions_of(recipe: str) -> list[tuple[str, str]]:
    lines = [line for line in recipe.splitlines() if line.strip() and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in whole)]


def check_recipe(recipe: str) -> None:
    instructions = instructions_of(recipe)
    assert [word for word, _ in instructions].count("FROM") == 1
    assert instructions[0][0] == "FROM"
    check_base(instructions[0][1])
    copied: dict[str, Path] = {}
    for word, rest in instructions[1:-1]:
        if word == "COPY":
            copied |= check_copy(shlex.split(rest))
        else:
            assert word == "RUN", f"{word} is not expected here"
            check_run(shlex.split(rest), copied)
    word, rest = instructions[-1]
    assert (word, json.loads(rest)) == ("ENTRYPOINT", ["/opt/apache/beam/boot"])


def check_base(image: str) -> None:
    found = BASE.fullmatch(image)
    assert found, f"{image} is no image of Beam's SDK for Python"
    assert found["python"] in SpecifierSet(PROJECT["requires-python"])
    assert f"Programming Language :: Python :: {found['python']}" in PROJECT["classifiers"]
    assert f"apache-beam=={found['beam']}" in PROJECT["optional-dependencies"]["test"], "the tests run with another Beam"
    assert metadata("apache-beam")["Version"] == found["beam"]


def check_copy(words: list[str]) -> dict[str, Path]:
    """What is where in the image."""
    *sources, target = words
    assert sources
    assert target.startswith("/")
    assert target.endswith("/") or len(sources) == 1, "several files go into a folder, whose name ends with /"
    for source in sources:
        assert (ROOT / source).exists(), f"{source} is not in the repository"
    return {target + Path(source).name if target.endswith("/") else target: ROOT / source for source in sources}


def check_run(words: list[str], copied: dict[str, Path]) -> None:
    if words == ["pip", "check"]:
        return
    assert words[:2] == ["pip", "install"]
    rest = words[2:]
    assert rest
    while rest:
        word = rest.pop(0)
        if word == "--requirement":
            check_requirements(copied[rest.pop(0)])
        elif word not in PIP_FLAGS:
            check_project(word, copied)


def check_project(word: str, copied: dict[str, Path]) -> None:
    found = re.fullmatch(r"(?P<folder>/[\w/]+)\[(?P<extras>[\w,]+)\]", word)
    assert found, f"{word}: only Penstock itself, with its extras, and requirements files are installed"
    for extra in found["extras"].split(","):
        assert extra in PROJECT["optional-dependencies"], f"there is no extra {extra!r}"
    for needed in ["pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "src"]:
        assert copied[f"{found['folder']}/{needed}"] == ROOT / needed


def check_requirements(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    needed = {each.name: each for each in map(Requirement, lines)}
    base = BASE.search(RECIPE)
    assert base is not None
    assert str(needed["apache-beam"].specifier) == f"=={base['beam']}", "requirements.txt has another Beam than the image"
    assert needed["apache-beam"].extras <= set(metadata("apache-beam").get_all("Provides-Extra") or [])


def test_recipe_is_right_in_every_line() -> None:
    check_recipe(RECIPE)
    build = f"docker build --file examples/beam/Dockerfile --tag penstock-beam:{__version__} ."
    assert build in RECIPE
    assert build in (EXAMPLE / "README.md").read_text()


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("sdk:2.77.0", "sdk:2.76.0"),
        ("python3.11_sdk", "python3.9_sdk"),
        ("COPY src ", "COPY sources "),
        (" LICENSE ", " "),
        ("[beam,sklearn]", "[beams,sklearn]"),
        ("--requirement /opt/penstock/requirements.txt", "--requirement requirements.txt"),
        ("RUN pip check", "RUN pip chek"),
        ("/opt/apache/beam/boot", "/opt/apache/boot"),
    ],
)
def test_wrong_line_of_the_recipe_is_found(line: str, wrong: str) -> None:
    assert line in RECIPE
    with pytest.raises((AssertionError, KeyError)):
        check_recipe(RECIPE.replace(line, wrong))


def docker_runs() -> bool:
    try:
        return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def test_image_of_the_example_is_built() -> None:
    if not docker_runs():
        pytest.skip("no Docker daemon runs here")
    build = ["docker", "build", "--quiet", "--file", EXAMPLE / "Dockerfile", ROOT]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    image = done.stdout.strip()
    imports = ["docker", "run", "--rm", "--entrypoint", "python", image, "-c", "import penstock.beam as b; b.RunInference"]
    assert subprocess.run(imports, check=False).returncode == 0


def test_pipeline_of_the_example_classifies_flowers(tmp_path: Path) -> None:
    run("make_model.py", str(tmp_path))
    files = {"input": "flowers.csv", "model": "iris.skops", "output": "species"}
    run("classify_flowers.py", "--runner=FnApiRunner", *(f"--{name}={tmp_path / file}" for name, file in files.items()))
    answers = rows_of(tmp_path, "species-0*.jsonl")
    flowers = [
        [float(value) for value in line.split(",")] for line in (tmp_path / "flowers.csv").read_text().splitlines()[:-1]
    ]
    assert sorted(answer["measurements"] for answer in answers) == sorted(flowers)
    assert {answer["species"] for answer in answers} == {"setosa", "versicolor", "virginica"}
    (failed,) = rows_of(tmp_path, "species-failed-0*.jsonl")
    assert failed["line"] == "not,a,flower"
    assert "could not convert string to float" in failed["error"]


def run(script: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, EXAMPLE / script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def rows_of(folder: Path, pattern: str) -> list[dict[str, str]]:
    return [json.loads(line) for path in folder.glob(pattern) for line in path.read_text().splitlines()]
