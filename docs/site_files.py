"""For mkdocs: pages link to files of the repository outside of docs/, such as examples; these become part of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#\s:]+)")
SHOWN = ("CHANGELOG.md", "benchmarks/RESULTS.md", "examples/*.py", "examples/beam/*")  # what pages may link to


def on_files(files: Files, config: Any) -> Files:
    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file():
                files.append(File.generated(config, name, content=_as_in_docs(name, path) or path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ lead to the copy of that file."""
    if page.file.generated_by:
        return markdown
    here = ROOT / "docs" / page.file.src_uri

    def inside(match: re.Match[str]) -> str:
        target = (here.parent / match[2]).resolve()
        if target.is_relative_to(ROOT / "docs") or not target.is_relative_to(ROOT):
            return match[0]
        up = "../" * page.file.src_uri.count("/")
        return f"{match[1]}{up}{target.relative_to(ROOT).as_posix()}"

    return LINK.sub(inside, markdown)


def _as_in_docs(name: str, path: Path) -> str | None:
    """The text of a page, with links to docs/ as from inside of it."""
    if path.suffix != ".md":
        return None
    up = "../" * name.count("/")
    return path.read_text().replace(f"]({up}docs/", f"]({up}")
