"""What the documentation says is so: its code runs, its output is what it shows, its links lead somewhere.

The python blocks of a page are one script, run from top to bottom in an empty folder. Each block keeps the line numbers that
it has in the page, so that a traceback points there. Where the next block of the page is a text block whose first line is
`output:`, the rest of that block is what the python block prints. In the README, the lines that start with `$ penstock` are
run too, with its first python block as pipeline.py; lines below a command are what it prints.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
END_OF_BLOCK = "--- end of block ---"
HOME = "/home/me"  # what the README shows in the place of the folder that a command runs in


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
    blocks = blocks_of(text)
    code = [block for block in blocks if block.language == "python"]
    script = folder / f"{Path(name).stem}.py"
    script.write_text(script_of(code))
    printed = run([sys.executable, script], folder).stdout.split(f"{END_OF_BLOCK}\n")
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language == "python" and after is not None and after.output is not None:
            seen = printed[code.index(block)].strip()
            assert seen == after.output.strip(), f"{name}, line {after.line}: the code before it prints\n{seen}"


@pytest.mark.parametrize("page", [page for page in PAGES if "```python\n" in page.read_text()], ids=lambda page: page.name)
def test_code_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path) -> None:
    check_page(page.name, page.read_text(), tmp_path)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


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
