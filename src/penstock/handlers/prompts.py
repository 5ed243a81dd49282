"""Prompts made of columns."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from penstock.errors import UsageError


class PromptTemplate:
    """A text with the names of columns in braces: "{title}: {text}". {{ and }} are braces."""

    def __init__(self, template: str) -> None:
        if not isinstance(template, str):
            raise UsageError(
                f"prompt={template!r}: expected a text with names of columns in braces, such as '{{title}}: {{text}}'"
            )
        try:
            fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        except ValueError as exc:
            raise UsageError(f"prompt={template!r}: {exc}; write a brace that is not a column twice") from None
        if wrong := [name for name in fields if not name.isidentifier()]:
            what = f"{{{wrong[0]}}} is not the name of a column"
            raise UsageError(f"prompt={template!r}: {what}; write a brace that is not a column twice")
        if not fields:
            raise UsageError(f"prompt={template!r}: expected the name of at least one column in braces, such as '{{text}}'")
        self.template = template
        self.names = tuple(dict.fromkeys(fields))

    def filled(self, row: Any) -> str:
        """The prompt of a record. A column without a value is an error."""
        if not isinstance(row, Mapping):
            raise TypeError(f"a prompt is made of records (dicts or rows of tables), got {type(row).__name__}")
        for name in self.names:
            if row.get(name) is None:
                raise ValueError(f"column {name!r}, which the prompt needs, has no value")
        return self.template.format_map(row)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PromptTemplate) and other.template == self.template

    def __hash__(self) -> int:
        return hash(self.template)
