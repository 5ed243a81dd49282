"""The list of handlers: Penstock's own, those of other packages, and what is said where a package is missing or too old."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import penstock
from penstock.errors import MissingPackageError, UsageError
from penstock.handlers import catalog
from penstock.handlers.catalog import FAMILIES, HandlerFamily, Need
from penstock.handlers.huggingface import HuggingFacePipelineModelHandler
from penstock.handlers.images import PytorchImageModelHandler
from penstock.handlers.pytorch_models import PytorchSettings

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(penstock.__file__).parent / "handlers"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

PLUG_IN = """
from penstock.handlers.catalog import HandlerFamily, Need

FAMILY = HandlerFamily(
    name="words", module="wordy.handler", handlers=["WordHandler"],
    needs=[Need(module="no_such_words", distributions=["no-such-words"], least="2", tried="2.5")],
    install="penstock-wordy",
)
"""


@pytest.fixture
def plug_in(tmp_path: Path) -> Any:
    """A package as pip installs it, with one module."""

    def make(module: str, value: str = "wordy:FAMILY") -> subprocess.CompletedProcess[str]:
        (tmp_path / "wordy.py").write_text(module)
        info = tmp_path / "penstock_wordy-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-wordy\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[penstock.handlers]\nwords = {value}\n")
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-m", "penstock.cli", "handlers"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return make


def test_the_command_lists_what_there_is_and_what_is_missing(plug_in: Any) -> None:
    shown = plug_in(PLUG_IN)
    assert shown.returncode == 0, shown.stderr
    lines = [re.split(r"\s{2,}", line.strip()) for line in shown.stdout.splitlines()]
    assert lines[0] == ["family", "needs", "installed", "tried with", "handlers"]
    by_name = {line[0]: line[1:] for line in lines}
    assert by_name["lightgbm"][0] == "lightgbm>=4.3"
    assert by_name["words"] == ["no-such-words>=2", "no", "2.5", "wordy.handler: WordHandler"]
    assert lines[-1] == ["pip install 'penstock-wordy'"]


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("FAMILY = 1", "entry point 'words' of penstock-wordy is a int; expected a HandlerFamily"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_another_package_did_wrong_is_said(module: str, told: str, plug_in: Any) -> None:
    shown = plug_in(module)
    assert (shown.returncode, told in shown.stderr) == (2, True), shown.stderr


def test_the_package_that_the_docs_show_can_be_built_installed_and_listed(tmp_path: Path) -> None:
    group = '[project.entry-points."penstock.handlers"]'
    page = next(text for path in (ROOT / "docs").rglob("*.md") if group in (text := path.read_text()))
    page = page[page.index("## A package of handlers") :]
    blocks = re.findall(r"```(toml|python)\n(.*?)```", page, re.DOTALL)
    settings, family, handler, test = (text for _, text in blocks)
    package = tmp_path / "src" / "penstock_mymodel"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(settings)
    (package / "__init__.py").write_text(family)
    (package / "handler.py").write_text(handler)
    (tmp_path / "test.py").write_text("from penstock_mymodel.handler import MyModelHandler\n" + test)
    site = tmp_path / "site"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(tmp_path)], check=True)
    there: dict[str, Any] = {"env": os.environ | {"PYTHONPATH": str(site)}, "cwd": tmp_path, "text": True, "check": True}
    shown = subprocess.run([sys.executable, "-m", "penstock.cli", "handlers"], capture_output=True, **there).stdout
    assert "penstock_mymodel.handler: MyModelHandler" in shown
    subprocess.run([sys.executable, "test.py"], **there)


def test_all_families_are_listed_with_their_handlers() -> None:
    """Those that define a class of the public name, in the files of the family."""
    for family in FAMILIES:
        files = [path for path in SOURCE.glob(f"{family.name}*.py") if path.stem != "catalog"]
        defined = {
            node.name for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
        }
        assert set(family.handlers) <= defined, family.name
        assert importlib.util.find_spec(family.module) is not None
    modules = {path.stem for path in SOURCE.glob("*.py") if "check_installed(" in path.read_text()} - {"catalog"}
    assert modules | {"huggingface", "images", "llama_cpp", "remote", "vllm"} == {family.name for family in FAMILIES}


def test_every_handler_is_in_a_family() -> None:
    """All but those that are there for others to be derived from."""
    classes = [n for path in SOURCE.glob("*.py") for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)]
    bases = {ast.unparse(base).partition("[")[0] for each in classes for base in each.bases}
    public = {each.name for each in classes if "ModelHandler" in each.name and not each.name.startswith("_")}
    assert public - bases <= {name for family in FAMILIES for name in family.handlers}
    assert len(public - bases) > 10


def test_needs_are_those_of_the_extras() -> None:
    extras = PROJECT["optional-dependencies"]
    for family in FAMILIES:
        extra = re.search(r"penstock\[(\w+)\]", family.install)
        assert extra is not None
        of_extra = [*extras[extra[1]], *(extras["remote"] if "penstock[remote]" in extras[extra[1]] else [])]
        for need in family.needs:
            if need.distributions[0] in family.install.split():
                continue  # no extra has it
            wanted = [each for each in of_extra if re.match(rf"{need.distributions[0]}>=", each)]
            assert [each.split(",")[0] for each in wanted] == [f"{need.distributions[0]}>={need.least}"], family.name


def test_what_is_installed_is_not_older_than_what_was_tried() -> None:
    """Where a test ran with it: the table says so."""
    for family in FAMILIES:
        for need in family.needs:
            if need.is_there():
                assert Version(need.installed() or "0") >= Version(need.tried), family.name


def test_versions_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    need = Need(module="numpy", distributions=["nothing-of-the-kind", "numpy"], least="99", tried="99.1")
    family = HandlerFamily(name="later", module="later", handlers=["Later"], needs=[need], install="penstock[later]")
    assert not need.is_met()
    monkeypatch.setattr(catalog, "FAMILIES", (family,))
    catalog.check_installed("later")
    expected = (
        r"nothing-of-the-kind [\d.]+ is installed, but 99 or later is needed; run: pip install --upgrade 'penstock\[later\]'"
    )
    with pytest.raises(MissingPackageError, match=expected):
        catalog.check_versions("later")
    assert Need(module="numpy", distributions=["no-such"], least="99", tried="99").installed() == "?"


WITHOUT = """
import importlib, importlib.util, sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hide())
there = importlib.util.find_spec
found = lambda name, package: sys if name in {others!r} else there(name, package)
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] == {module!r} else found(name, package)
family = importlib.import_module({family!r})
{make}
"""
MADE = {  # families that are imported without it: a worker may only prepare rows
    "images": 'family.PytorchImageModelHandler(model_class=print, state_dict_path="x", size=3).load_model()',
    "llama_cpp": 'family.LlamaCppModelHandler("x.gguf").load_model()',
    "vllm": 'family.VLLMChatModelHandler("x").load_model()',
}


@pytest.mark.parametrize(
    ("family", "need"),
    [(family, need) for family in FAMILIES for need in family.needs],
    ids=lambda each: getattr(each, "name", None) or each.module,
)
def test_without_a_package_each_family_says_what_to_install(family: HandlerFamily, need: Need) -> None:
    others = [each.module for each in family.needs if each is not need]
    code = WITHOUT.format(module=need.module, others=others, family=family.module, make=MADE.get(family.name, ""))
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = seen.stderr.strip().splitlines()[-1]
    assert re.search(
        rf"{need.distributions[0]} is not installed.*; run: pip install '?(penstock\[\w+\]|(--upgrade )?vllm)", last
    ), seen.stderr


TREES = (print, "model.json")
WEIGHTS: Any = {"state_dict_path": "model.pt", "model_class": print}
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {  # those that are not made of one path
    "HuggingFacePipelineModelHandler": (("text-classification", "model"), {}),
    "JaxModelHandler": ((print, "model.safetensors"), {}),
    "OnnxTextModelHandler": (("model.onnx", "tokenizer"), {}),
    "PytorchImageModelHandler": ((), {**WEIGHTS, "size": 3}),
    "PytorchModelHandlerKeyedTensor": ((), WEIGHTS),
    "PytorchModelHandlerTensor": ((), WEIGHTS),
    **{f"XGBoostModelHandler{rows}": (TREES, {}) for rows in ("Numpy", "Pandas", "SciPy", "Datatable")},
}


def table_of_arguments() -> dict[str, set[str]]:
    """What docs/reference/handlers.md says: the arguments of each handler, but those that all have."""
    page = (ROOT / "docs/reference/handlers.md").read_text()
    lines = page.split("| handlers | the model |")[1].split("\n\n")[0].splitlines()[2:]
    told: dict[str, set[str]] = {}
    above = [""] * 3
    for line in lines:
        first, *cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        above = [last if cell == "the same" else cell for cell, last in zip(cells, above, strict=True)]
        whole, *short = re.findall(r"`(?:\.\.\.)?(\w+)`", first)
        stem = whole.removesuffix("Numpy").removesuffix("Tensor")
        for name in [whole, *(stem + each for each in short)]:
            also = [re.fullmatch(r"(.*?)(?:; of `\.\.\.(\w+)` also (.*))?", cell) for cell in above]
            mine = [found[1] + (found[3] or "") * name.endswith(found[2] or "?") for found in also if found is not None]
            told[name] = set(re.findall(r"`(\w+)`", " ".join(mine)))
    return told


def test_the_table_of_arguments_is_that_of_the_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models behind an API and language models have pages of their own."""
    found, there = importlib.util.find_spec, {"tensorflow", "keras"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: name in there or found(name, package))
    families = [family for family in FAMILIES if family.name not in {"llama_cpp", "remote", "vllm"}]
    own: dict[str, set[str]] = {}
    for family in families:
        for name in family.handlers:
            parameters = inspect.signature(getattr(importlib.import_module(family.module), name)).parameters.values()
            own[name] = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
            if any("PytorchSettings" in str(each.annotation) for each in parameters):
                own[name] |= PytorchSettings.__annotations__.keys()
            own[name] -= penstock.HandlerSettings.__annotations__.keys()
    assert table_of_arguments() == own


AT_IMPORT = {"httpx"}  # what looks at its version when it is imported: see below
OLD = [
    *((f, handler, need) for f in FAMILIES for handler in f.handlers for need in f.needs if need.module not in AT_IMPORT),
    *((f, "SentenceTransformerModelHandler", catalog.SENTENCES) for f in FAMILIES if f.name == "huggingface"),
]


@pytest.mark.parametrize(
    ("family", "handler", "need"), OLD, ids=lambda each: each if isinstance(each, str) else getattr(each, "module", None)
)
def test_with_a_package_that_is_too_old_each_handler_says_which_it_needs(
    family: HandlerFamily, handler: str, need: Need, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it imports the package, which may fail at anything. What is not installed here seems to be."""
    others = {each.distributions[0]: each.tried for each in family.needs}
    seen = {**others, **dict.fromkeys(need.distributions, "0.0.1")}
    version, find = importlib.metadata.version, importlib.util.find_spec
    monkeypatch.setattr(importlib.metadata, "version", lambda name: seen.get(name) or version(name))
    modules = {each.module for each in (*family.needs, need)}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: name in modules or find(name, package))
    args, settings = ARGUMENTS.get(handler, (("model.keras",), {}))
    made = getattr(importlib.import_module(family.module), handler)(*args, **settings)
    told = (
        rf"{need.distributions[0]} 0.0.1 is installed, but {re.escape(need.least)} or later is needed.*pip install --upgrade"
    )
    with pytest.raises(UsageError, match=told):
        made.load_model()


def test_images_are_decoded_by_a_pillow_that_is_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.5.0" if name == "pillow" else version(name))
    for made in (
        PytorchImageModelHandler(**WEIGHTS, size=3),
        HuggingFacePipelineModelHandler("image-classification", "model"),
    ):
        with pytest.raises(MissingPackageError, match="pillow 9.5.0 is installed, but 10 or later is needed"):
            made.load_prepare()


@pytest.mark.parametrize("family", [family.name for family in FAMILIES if "httpx" in {need.module for need in family.needs}])
def test_an_old_httpx(family: str) -> None:
    code = f"import httpx; httpx.__version__ = '0.26.1'; import penstock.handlers.{family}"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (
        "httpx 0.26.1 is installed, but 0.27 or later is needed; run: pip install --upgrade 'penstock[remote]'"
        in seen.stderr
    )


def test_handlers_import_no_metadata() -> None:
    """It would take longer than the handler does."""
    code = "import sys, penstock.handlers.sklearn; print('importlib.metadata' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "False\n", result.stderr
