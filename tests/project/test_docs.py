"""What the documentation says is so: its code runs, its output is what it shows, its links lead somewhere.

The python blocks of a page are one script, run from top to bottom in an empty folder. Each block keeps the line numbers that
it has in the page, so that a traceback points there. Where the next block of the page is a text block whose first line is
`output:`, the rest of that block is what the python block prints. In the README, the lines that start with `$ penstock` are
run too, with its first python block as pipeline.py; lines below a command are what it prints.

The pages of docs/reference/api have a line `::: penstock.Name` for each public name, where `make docs` puts its docstring.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import penstock
from penstock.observe import refreshes

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = {"tensorflow.md": "tensorflow"}  # pages whose package has an environment of its own: make test-tensorflow
PROSE = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/beam/README.md"))]
API = sorted((ROOT / "docs" / "reference" / "api").glob("*.md"))
HANDLERS = ROOT / "src" / "penstock" / "handlers"
NOT_DOCUMENTED = {  # values without a docstring, and classes of Beam's own
    "penstock.__version__",
    *(f"penstock.beam.{name}" for name in ("ExampleT", "ModelT", "PredictionT", "RateLimitExceeded", "RemoteModelHandler")),
}
COOKBOOK = sorted((ROOT / "docs" / "cookbook").glob("*.md"))
END_OF_BLOCK = "--- end of block ---"
END_OF_PAGE = "--- end of page ---"
HOME = "/home/me"  # what the README shows in the place of the folder that a command runs in


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def has_code(page: Path) -> bool:
    return "```python\n" in page.read_text()


@dataclass(frozen=True)
class Block:
    language: str
    line: int  # of its first line of code in the page, from 1
    lines: list[str]

    @property
    def output(self) -> str | None:
        is_output = self.language == "text" and self.lines[:1] == ["output:"]
        return "\n".join(self.lines[1:]) if is_output else None


def blocks_of(page: str) -> list[Block]:
    blocks: list[Block] = []
    block: Block | None = None
    for number, line in enumerate(page.splitlines(), start=1):
        if block is None and line.startswith("```"):
            block = Block(line[3:].strip(), number + 1, [])
        elif block is not None and line == "```":
            blocks.append(block)
            block = None
        elif block is not None:
            block.lines.append(line)
    assert block is None, f"the block at line {block.line} is not closed"
    return blocks


def script_of(blocks: list[Block]) -> str:
    """The python blocks, each on its own lines, and a mark in the output where each one ends."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += [*block.lines, f"print({END_OF_BLOCK!r}, flush=True)"]
    return "\n".join(lines) + "\n"


def run(command: list[str | Path], folder: Path, seconds: float = 100) -> subprocess.CompletedProcess[str]:
    # A fixed width: argparse and live lines look at it.
    environment = os.environ | {"COLUMNS": "100"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def check_page(name: str, text: str, folder: Path) -> None:
    script = written(name, text, folder)
    compare(name, text, run([sys.executable, script], folder).stdout)


def written(name: str, text: str, folder: Path) -> Path:
    """The script of a page, in this folder."""
    script = folder / f"page_{Path(name).stem}.py"  # a page may be called like the package that it imports
    script.write_text(script_of([block for block in blocks_of(text) if block.language == "python"]))
    return script


def compare(name: str, text: str, stdout: str) -> None:
    """Fail if the script of a page has printed something else than the page says."""
    blocks, printed = blocks_of(text), iter(stdout.split(f"{END_OF_BLOCK}\n"))
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language == "python":
            seen = next(printed).strip()
            if after is not None and after.output is not None:
                assert seen == after.output.strip(), f"{name}, line {after.line}: the code before it prints\n{seen}"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in COOKBOOK and has_code(page)], ids=page_id)
def test_code_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path) -> None:
    package = NEEDS.get(page.name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"make test-{package} has an environment with it")
    check_page(page.name, page.read_text(), tmp_path)


def test_jobs_of_the_cookbook_run_and_print_what_they_say(tmp_path: Path) -> None:
    """All in one process, each in a folder of its own: their frameworks take longer to import than the jobs to run."""
    pages = {page.name: page.read_text() for page in COOKBOOK if has_code(page)}
    assert len(pages) == 6
    driver = ["import os, runpy"]
    for name, text in pages.items():
        folder = tmp_path / Path(name).stem
        folder.mkdir()
        script = written(name, text, folder)
        driver += [f"os.chdir({str(folder)!r})", f"runpy.run_path({str(script)!r}, run_name='__main__')"]
        driver += [f"print({END_OF_PAGE!r}, flush=True)"]
    (tmp_path / "driver.py").write_text("\n".join(driver) + "\n")
    printed = run([sys.executable, tmp_path / "driver.py"], tmp_path).stdout.split(f"{END_OF_PAGE}\n")
    for (name, text), stdout in zip(pages.items(), printed, strict=False):
        compare(name, text, stdout)


def test_output_that_is_not_what_the_page_says_is_found(tmp_path: Path) -> None:
    page = "```python\nprint(1)\n```\n\n```python\nprint(2)\n```\n\n```text\noutput:\n{}\n```\n"
    check_page("page.md", page.format(2), tmp_path)
    with pytest.raises(AssertionError, match=r"page.md, line 10: the code before it prints\s+2"):
        check_page("page.md", page.format(1), tmp_path)


def test_code_that_raises_is_found_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="line 3, in <module>"):
        check_page("page.md", "Text.\n```python\n1 / 0\n```\n", tmp_path)


@pytest.mark.timeout(300)
def test_commands_of_the_readme_run_and_print_what_it_says(tmp_path: Path) -> None:
    blocks = blocks_of((ROOT / "README.md").read_text())
    first = next(block for block in blocks if block.language == "python")
    (tmp_path / "pipeline.py").write_text("\n".join(first.lines) + "\n")
    commands = [command for block in blocks if block.language == "console" for command in _commands(block)]
    ours = [(command, output) for command, output in commands if command.startswith("penstock ")]
    assert {shlex.split(command)[1] for command, _ in ours} >= {"run", "explain"}
    for command, output in ours:
        done = run([sys.executable, "-m", "penstock.cli", *shlex.split(command)[1:]], tmp_path)
        if output:
            assert done.stdout.replace(str(tmp_path), HOME).splitlines() == output
        if "--run-dir" in command:
            again = run([sys.executable, "-m", "penstock.cli", *shlex.split(command)[1:]], tmp_path)
            assert "nothing is left to do" in again.stderr, "the example can be resumed"


def _commands(block: Block) -> list[tuple[str, list[str]]]:
    """Commands, without the `$ ` before them, each with the lines below it."""
    commands: list[tuple[str, list[str]]] = []
    for line in block.lines:
        if line.startswith("$ "):
            commands.append((line[2:], []))
        else:
            assert commands, f"line {block.line}: a console block starts with `$ `"
            commands[-1][1].append(line)
    return commands


@pytest.mark.parametrize("page", PROSE, ids=page_id)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert target.is_relative_to(ROOT), f"{page.name}: {link}"
        if heading:
            assert heading in _anchors(target), f"{page.name}: {link}"


def _anchors(page: Path) -> set[str]:
    """The names of a page's headings in links: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    names = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
    return names | set(_documented(page))


def _documented(page: Path) -> list[str]:
    """The names whose docstrings are on this page of the API."""
    return re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE)


def public_modules() -> list[str]:
    """The package, its parts that say what is public, and all modules of handlers that do."""
    handlers = [f"penstock.handlers.{path.stem}" for path in sorted(HANDLERS.glob("*.py")) if _public(path)]
    return ["penstock", "penstock.testing", "penstock.beam", *handlers, "penstock.handlers.pytorch"]


def _public(path: Path) -> list[str]:
    """What __all__ of a file says; nothing, if it has none."""
    found: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            found = ast.literal_eval(node.value)
    return found


@pytest.mark.parametrize("module", public_modules())
def test_public_names_have_docstrings_and_are_in_the_reference(module: str) -> None:
    family = module.rpartition(".")[2]
    if importlib.util.find_spec(family) is None and family in NEEDS.values():
        pytest.skip(f"make test-{family} has an environment with it")
    loaded = importlib.import_module(module)
    named = getattr(loaded, "__all__", None) or [
        name for name, value in vars(loaded).items() if _is_own(value, name, module)
    ]
    names = {f"{module}.{name}" for name in named} - NOT_DOCUMENTED
    missing = names - {name for page in API for name in _documented(page)}
    assert not missing, f"give each a line `::: name` in docs/reference/api: {sorted(missing)}"
    values = {name: getattr(loaded, name.rpartition(".")[2]) for name in names}
    bare = [name for name, value in values.items() if callable(value) and not (value.__doc__ or "").strip()]
    assert not bare, f"without a docstring: {sorted(bare)}"


def _is_own(value: object, name: str, module: str) -> bool:
    defined = inspect.isclass(value) or inspect.isfunction(value)
    return defined and not name.startswith("_") and getattr(value, "__module__", None) == module


def test_the_reference_has_no_names_that_are_not_there() -> None:
    for name in [name for page in API for name in _documented(page)]:
        module, _, last = name.rpartition(".")
        package = module.rpartition(".")[2]
        if package not in NEEDS.values() or importlib.util.find_spec(package) is not None:
            assert hasattr(importlib.import_module(module), last), name


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    for page in PAGES[1:]:
        assert f" {page_id(page)}\n" in menu, f"{page_id(page)}: give it a line in nav of mkdocs.yml"


def test_the_readme_lists_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    commands = {"bench", "demo", "docs", "test", "test-tensorflow"}  # what make installs
    table = (ROOT / "README.md").read_text().partition("| extra | for |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([\w-]+)`(?=[^|]*\|[^|]*\|$)", table, flags=re.MULTILINE)) == set(extras) - commands


def test_every_option_and_flag_is_on_the_page_of_options() -> None:
    page = (ROOT / "docs" / "reference" / "execution.md").read_text()
    options = {field.name for field in dataclasses.fields(penstock.RunOptions)}
    flags = set(re.findall(r"--[a-z][a-z-]+", (ROOT / "tests" / "project" / "help" / "run.txt").read_text())) - {"--help"}
    said = set(re.findall(r"`([a-z_-]+)", page))
    missing = (options | {flag for flag in flags if not flag.startswith("--no-")}) - said
    assert not missing, f"docs/reference/execution.md says nothing of {sorted(missing)}"


def test_every_metric_is_in_the_reference() -> None:
    pages = [*(ROOT / "docs" / "reference").glob("*.md"), ROOT / "docs" / "how-to" / "remote.md"]
    said = {name for page in pages for name in re.findall(r"`([a-z_]+)`", page.read_text())}
    names = set(refreshes.METRICS.values())
    counting = ("_count", "_record", "_key", "MetricKey", "counts.add")
    for folder in ("inference", "models", "remote"):
        for path in (ROOT / "src" / "penstock" / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(counting):
                    names |= {
                        each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
                    }
    assert names >= {"num_inferences", "requests", "model_restarts", "useful_cost"}, "they are found"
    assert not names - said, f"no page of the reference says what these are: {sorted(names - said)}"


def test_every_error_is_on_the_page_of_errors() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    inside = {"RefusedError"}  # never leaves a worker
    for name, value in vars(importlib.import_module("penstock.errors")).items():
        if inspect.isclass(value) and issubclass(value, Exception) and name not in inside:
            assert f"`{name}`" in page, name


@pytest.mark.timeout(300)
def test_demo_embeds_real_texts_and_shows_neighbours(tmp_path: Path) -> None:
    demo = ROOT / "examples" / "embed_texts.py"
    printed = run([sys.executable, demo, "--rows", "64", "--output", "out"], tmp_path, seconds=280).stdout
    assert "embedded 64 texts" in printed
    neighbours = re.findall(r"^  (\d\.\d{3})  \S", printed.partition("nearest to: ")[2], flags=re.MULTILINE)
    assert len(neighbours) == 5
    assert [float(each) for each in neighbours] == sorted(map(float, neighbours), reverse=True)
    source, table = pq.read_table(tmp_path / "out" / "reviews.parquet"), pq.read_table(tmp_path / "out" / "embeddings")
    assert table.drop_columns(["embedding", "embedding_model_id"]).to_pylist() == source.to_pylist()
    for vector in table["embedding"].to_pylist():
        assert len(vector) == 384
        assert sum(x * x for x in vector) == pytest.approx(1, abs=1e-5)


def test_example_labels_reviews_by_a_language_model(tmp_path: Path) -> None:
    example = ROOT / "examples" / "label_reviews.py"
    printed = run([sys.executable, example, "--rows", "4", "--output", "out"], tmp_path).stdout
    assert "\n4 reviews, " in printed
    source, table = pq.read_table(tmp_path / "out" / "reviews.parquet"), pq.read_table(tmp_path / "out" / "opinions")
    assert table.select(["id", "text"]).to_pylist() == source.to_pylist()
    assert {row["sentiment"] for row in table["opinion"].to_pylist()} <= {"positive", "negative"}


def test_files_that_the_design_names_are_there() -> None:
    """But for those that it tells how to add."""
    text = (ROOT / "docs" / "design.md").read_text()
    named = set(re.findall(r"\b([a-z_0-9]+\.py)\b", text))
    there = {
        path.name for folder in ("src", "tests", "benchmarks", "examples", "docs") for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in named - there if not re.search(r"(^|_)x\.py$", name)} == set()
