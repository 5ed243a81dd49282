"""What a code object does, without where it stands in a file: line numbers and comments leave no trace."""

from __future__ import annotations

import dis
import re
from bisect import bisect_left
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

Name: TypeAlias = tuple[str, ...]  # of a global: its name; of a module's attribute: the names on the way to it

_KINDS_OF_FUNCTION = 0x04 | 0x08 | 0x20 | 0x80 | 0x200  # *args, **kwargs, generator, coroutine, asynchronous generator
_NO_INSTRUCTION = {"EXTENDED_ARG", "CACHE", "NOP", "NOT_TAKEN"}
_ABOUT_THE_CLASS = {"__doc__", "__firstlineno__", "__qualname__", "__static_attributes__"}  # set by a class's own code
_OF_AN_OBJECT = {"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"}
_TWO_IN_ONE = re.compile(r"((?:LOAD|STORE)_FAST(?:_BORROW)?)_((?:LOAD|STORE)_FAST(?:_BORROW)?)")


class _Target(NamedTuple):
    """Where a jump leads."""

    offset: int


class Operation(NamedTuple):
    """One instruction: what it does, and with what."""

    name: str
    argument: Any  # a constant, which may be another code object; a name; a number; of a jump how many operations on


class Import(NamedTuple):
    """An import of a module, or of names from it."""

    module: str
    names: tuple[str, ...] | None  # None: the module itself
    level: int  # the dots before the name


def signature_of(code: CodeType) -> tuple[Any, ...]:
    """What callers see of a function, and what kind of function it is."""
    parameters = code.co_argcount + code.co_kwonlyargcount
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
    return (*counts, code.co_varnames[:parameters], code.co_flags & _KINDS_OF_FUNCTION)


def operations(code: CodeType) -> list[Operation]:
    """The instructions of a function, without those that only a debugger needs."""
    made = _with_offsets(code)
    offsets = [offset for offset, _ in made]
    return [
        Operation(name, bisect_left(offsets, argument.offset) - at)
        if isinstance(argument, _Target)
        else Operation(name, argument)
        for at, (_, (name, argument)) in enumerate(made)
    ]


def guards(code: CodeType) -> list[tuple[int, int, int]]:
    """Where errors are caught, by number of operation: from which one, before which other, and where it goes on then."""
    offsets = [offset for offset, _ in _with_offsets(code)]
    found: list[tuple[int, int, int]] = []
    entries: Any = dis.Bytecode(code)
    for entry in entries.exception_entries:
        start, end, target = (bisect_left(offsets, offset) for offset in (entry.start, entry.end, entry.target))
        if found and found[-1][1:] == (start, target):  # cut in two by what does nothing
            start = found.pop()[0]
        if start < end:
            found.append((start, end, target))
    return found


def _with_offsets(code: CodeType) -> list[tuple[int, Operation]]:
    found = [each for each in dis.get_instructions(code) if each.opname not in _NO_INSTRUCTION]
    made: list[tuple[int, Operation]] = []
    for one, following in zip(found, [*found[1:], None], strict=True):
        made += [(one.offset, operation) for operation in _operations_of(one, following)]
    return made


def _operations_of(one: dis.Instruction, following: dis.Instruction | None) -> list[Operation]:
    if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
        return [Operation(one.opname, _Target(one.argval))]
    if (two := _TWO_IN_ONE.fullmatch(one.opname)) and one.arg is not None:  # made where both stand on one line
        return [Operation(two[1], one.arg >> 4), Operation(two[2], one.arg & 15)]
    if one.opcode in dis.hasconst:
        about_the_class = following and following.opname == "STORE_NAME" and following.argval in _ABOUT_THE_CLASS
        return [Operation(one.opname, None if about_the_class else one.argval)]
    return [Operation(one.opname, one.argval if one.opcode in dis.hasname else one.arg)]


def nested(code: CodeType) -> Iterator[CodeType]:
    """A code object and all that are defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def uses_of(code: CodeType) -> tuple[list[Name], set[Name], set[Import]]:
    """The globals that code takes, sorted, each with the attributes that are taken of it; those that it sets; imports."""
    taken: set[Name] = set()
    is_set: set[Name] = set()
    imports: set[Import] = set()
    for inner in nested(code):
        name: Name = ()  # of what lies on top of the stack
        is_copied = False
        steps = operations(inner)
        for at, step in enumerate([*steps, Operation("", None)]):
            if name and step.name in _OF_AN_OBJECT:
                name = (*name, step.argument)
                if is_copied or step.name in ("STORE_ATTR", "DELETE_ATTR"):  # a.b += c copies a before it takes b
                    is_set.add(name)
            elif step != ("COPY", 1):
                taken.add(name)
                name = (step.argument,) if step.name in ("LOAD_GLOBAL", "LOAD_NAME") else ()
            if step.name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                is_set.add((step.argument,))
            elif step.name == "IMPORT_NAME":
                imports.add(Import(step.argument, steps[at - 1].argument, steps[at - 2].argument))
            is_copied = step == ("COPY", 1)
    return sorted(taken - {()}), is_set, imports


def cells_set(code: CodeType) -> set[str]:
    """The variables of functions around it that code sets: state as well."""
    steps = [step for inner in nested(code) for step in dis.get_instructions(inner)]
    return {step.argval for step in steps if step.opname in ("STORE_DEREF", "DELETE_DEREF")}
