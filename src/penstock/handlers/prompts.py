"""Prompts made of columns, and the columns that requests are made of."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError
from penstock.handlers.column_types import fits
from penstock.inference.handler_checks import checked_columns

if TYPE_CHECKING:
    import pyarrow as pa


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


def request_columns(
    prompt: PromptTemplate | None, columns: str | Sequence[str] | None, args_column: str | None
) -> str | tuple[str, ...] | None:
    """The columns that a request is made of: one by its name where examples are its values. UsageError where no row could
    make a request."""
    checked = checked_columns(columns)
    given = (checked,) if isinstance(checked, str) else checked or ()
    own = tuple(name for name in given if name != args_column)
    more = () if args_column is None else (args_column,)
    if prompt is not None:
        if missing := [name for name in prompt.names if given and name not in (*given, *more)]:
            raise UsageError(
                f"prompt={prompt.template!r} needs {missing}, but columns={columns!r} leaves them out: add them, "
                "or give no columns=, and those of the prompt are taken"
            )
        return tuple(dict.fromkeys([*(given or prompt.names), *more]))
    if len(own) > 1:
        example = ": ".join(f"{{{name}}}" for name in own)
        raise UsageError(f"columns={columns!r} are several: say how a request is made of them, such as prompt={example!r}")
    if more and not own:
        raise UsageError(f'args_column={args_column!r}: name the column of texts, too: columns="text", or prompt="{{text}}"')
    return (*own, *more) if more else own[0] if own else None


def check_request_columns(
    schema: pa.Schema, prompt: PromptTemplate | None, columns: Sequence[str] | None, args_column: str | None, takes: str
) -> None:
    """UsageError where no row of a table can make a request. takes: what a column without a prompt must hold."""
    if columns is None:
        name = next((field.name for field in schema if fits(field.type, takes)), "text")
        raise UsageError(
            f"the rows are dicts with {schema.names}, but requests are made of {takes}: name the column that holds them, "
            f'columns={name!r}, or make a text of several, such as prompt="{{{name}}}"'
        )
    if missing := [name for name in columns if name not in schema.names]:
        what = "columns=" if prompt is None else "prompt= and columns="
        raise UsageError(f"columns {missing} are missing: the table has {schema.names}; check {what}")
    for name in columns:
        kind = schema.field(schema.names.index(name)).type
        if name == args_column:
            _check_args(name, kind)
        elif prompt is None and not fits(kind, takes):
            raise UsageError(
                f"column {name!r} holds {kind}, but requests are made of {takes}: name another one, or make a text of it: "
                f'prompt="{{{name}}}"'
            )


def _check_args(name: str, kind: pa.DataType) -> None:
    import pyarrow as pa

    if not (pa.types.is_struct(kind) or pa.types.is_null(kind)):
        raise UsageError(
            f"args_column={name!r}: the column holds {kind}; expected structs, whose fields go into the request"
        )
