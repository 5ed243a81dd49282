"""How objects look at a prompt and in a notebook: a line, and where there is more to see, a small table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_ROWS = 40  # of a table
MOST_TEXT = 160  # characters of a line


class Look(NamedTuple):
    """What is shown of an object: a line, and a table for those who look closer. Numbers stand to the right."""

    line: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str | int]] = ()
    text: str = ""  # as it is, below, in a notebook alone


class Displayed:
    """Objects that people look at. They say what is to be seen in _look()."""

    __slots__ = ()

    def _look(self) -> Look:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self._safe_look().line

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return as_html(self._safe_look())

    def _safe_look(self) -> Look:
        """What is to be seen, also of an object that is half made, as in a debugger."""
        try:
            return self._look()
        except Exception as exc:
            return Look(f"<{type(self).__name__} that cannot be shown: {type(exc).__name__}>")


def one_line(text: str) -> str:
    """The first line, cut to a readable length."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= MOST_TEXT else f"{line[: MOST_TEXT - 3]}..."


def as_text(look: Look) -> str:
    """The line, and the table below it."""
    table = [list(look.columns), *([_told(cell) for cell in row] for row in look.rows[:MOST_ROWS])]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [_is_number(look, at) for at in range(len(look.columns))]
    lines = [look.line]
    for row in table if look.rows else ():
        cells = zip(row, widths, right, strict=True)
        padded = [cell.rjust(width) if is_right else cell.ljust(width) for cell, width, is_right in cells]
        lines.append(f"  {'  '.join(padded)}".rstrip())
    if len(look.rows) > MOST_ROWS:
        lines.append(f"  ... and {len(look.rows) - MOST_ROWS:,} more")
    return "\n".join(lines)


def as_html(look: Look) -> str:
    from html import escape  # here and below: few look at objects in a notebook, and all import this

    right = ["right" if _is_number(look, at) else "left" for at in range(len(look.columns))]
    made = [f"<div><code>{escape(look.line)}</code>"]
    if look.rows:
        made.append("<table><thead>" + _html_row("th", look.columns, right) + "</thead><tbody>")
        made += [_html_row("td", [_told(cell) for cell in row], right) for row in look.rows[:MOST_ROWS]]
        made.append("</tbody></table>")
    if len(look.rows) > MOST_ROWS:
        made.append(f"<p>... and {len(look.rows) - MOST_ROWS:,} more</p>")
    if look.text:
        made.append(f"<pre>{escape(look.text)}</pre>")
    return "".join([*made, "</div>"])


def _html_row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    from html import escape

    made = (f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>' for cell, side in zip(cells, sides, strict=True))
    return f"<tr>{''.join(made)}</tr>"


def _is_number(look: Look, at: int) -> bool:
    return bool(look.rows) and all(isinstance(row[at], int) for row in look.rows)


def _told(cell: str | int) -> str:
    return f"{cell:,}" if isinstance(cell, int) else one_line(cell)
