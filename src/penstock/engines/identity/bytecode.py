"""What a code object does, without where it stands in a file: line numbers, comments and layout leave no trace.

The compiler keeps no-ops, and jumps to jumps, where a debugger should stop at each line. So instructions are not taken in
the order in which they lie: they are numbered as control flow reaches them, and no-ops and plain jumps are left out.
"""

from __future__ import annotations

import dis
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

Name: TypeAlias = tuple[str, ...]  # of a global: its name; of a module's attribute: the names on the way to it

_KINDS_OF_FUNCTION = 0x04 | 0x08 | 0x20 | 0x80 | 0x200  # *args, **kwargs, generator, coroutine, asynchronous generator
_NO_INSTRUCTION = {"EXTENDED_ARG", "CACHE"}
_NOTHING = {"NOP", "NOT_TAKEN"}
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "INTERPRETER_EXIT"}
_TWO_IN_ONE = re.compile(r"((?:LOAD|STORE)_FAST(?:_BORROW|_CHECK)?)_((?:LOAD|STORE)_FAST(?:_BORROW|_CHECK)?)")
_OPPOSITES = {"POP_JUMP_IF_FALSE": "POP_JUMP_IF_TRUE", "POP_JUMP_IF_NONE": "POP_JUMP_IF_NOT_NONE"}
_KEEPING = {"JUMP_IF_FALSE_OR_POP": "POP_JUMP_IF_FALSE", "JUMP_IF_TRUE_OR_POP": "POP_JUMP_IF_TRUE"}  # without keeping
_ABOUT_THE_CLASS = {"__doc__", "__firstlineno__", "__qualname__", "__static_attributes__"}  # set by a class's own code
_CHANGING = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove"),
    *("setdefault", "sort", "update", "__setitem__"),
}
_OF_CONSTANTS, _OF_NAMES = set(dis.hasconst), set(dis.hasname)
_OF_JUMPS = {*dis.hasjrel, *dis.hasjabs}


@dataclass(frozen=True, slots=True)
class Operation:
    """One instruction: what it does, with what, and which ones may come next, by number."""

    name: str
    argument: Any  # a constant for LOAD_CONST and its like, which may be another code object; else a name or a number
    next: tuple[int, ...]


def signature_of(code: CodeType) -> tuple[Any, ...]:
    """What callers see of a function, and what kind of function it is."""
    parameters = code.co_argcount + code.co_kwonlyargcount
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
    return (*counts, code.co_varnames[:parameters], code.co_flags & _KINDS_OF_FUNCTION)


def operations(code: CodeType) -> list[Operation]:
    """The instructions of a function, in the order in which control flow reaches them first."""
    flow = _Flow(code)
    numbers: dict[int, int] = {}
    waiting = [flow.reached(0)]
    while waiting:
        at = waiting.pop()
        if at not in numbers:
            numbers[at] = len(numbers)
            waiting += reversed(flow.after(at))
    made = []
    for at in numbers:
        name, argument = flow.steps[at].name, flow.steps[at].argument
        made.append(Operation(_OPPOSITES.get(name, name), argument, tuple(numbers[each] for each in flow.after(at))))
    return made


class _Step(NamedTuple):
    offset: int
    name: str
    argument: Any
    target: int | None = None  # the offset that it jumps to


class _Flow:
    """Which step follows which."""

    def __init__(self, code: CodeType) -> None:
        bytecode = dis.Bytecode(code)
        self.steps = _steps([each for each in bytecode if each.opname not in _NO_INSTRUCTION])
        self.offsets = [step.offset for step in self.steps]
        self._shorten_conditions()
        entries = bytecode.exception_entries  # type: ignore[attr-defined]
        self.handlers = [(entry.start, entry.end, entry.target) for entry in entries]

    def _shorten_conditions(self) -> None:
        """`a or b and c`: a jump to another jump on the same condition, or on its opposite, goes where that one leads.
        Compilers of Python 3.11 do so where both stand on one line."""
        for at in reversed(range(len(self.steps))):
            step = self.steps[at]
            if step.target is None or step.name not in _KEEPING:
                continue
            behind = self.reached(bisect_left(self.offsets, step.target))
            other = self.steps[behind]
            if other.name == step.name:
                self.steps[at] = step._replace(target=other.target)
            elif other.name in _KEEPING:
                self.steps[at] = step._replace(name=_KEEPING[step.name], target=self.steps[behind + 1].offset)

    def reached(self, at: int) -> int:
        """Where control flow gets from a step without doing anything."""
        seen: set[int] = set()
        while at not in seen:
            seen.add(at)
            step = self.steps[at]
            if step.name == "JUMP" and step.target is not None:
                at = bisect_left(self.offsets, step.target)
            elif step.name in _NOTHING:
                at += 1
        return at

    def after(self, at: int) -> list[int]:
        """The steps that may come next: the following one, the one jumped to, the one that handles its errors."""
        step = self.steps[at]
        following = []
        if step.name not in _ENDS and step.name != "JUMP" and at + 1 < len(self.steps):
            following.append(self.reached(at + 1))
        if step.target is not None:
            following.append(self.reached(bisect_left(self.offsets, step.target)))
        if step.name in _OPPOSITES:
            following.reverse()
        handler = next((target for start, end, target in self.handlers if start <= step.offset < end), None)
        return following if handler is None else [*following, self.reached(bisect_left(self.offsets, handler))]


def _steps(instructions: list[dis.Instruction]) -> list[_Step]:
    made = []
    for at, one in enumerate(instructions):
        following = instructions[at + 1] if at + 1 < len(instructions) else None
        if one.opcode in _OF_JUMPS:
            made.append(_Step(one.offset, _jump(one.opname), None, one.argval))
        elif (two := _TWO_IN_ONE.fullmatch(one.opname)) and one.arg is not None:
            made.append(_Step(one.offset, _plain(two[1]), one.arg >> 4))
            made.append(_Step(one.offset, _plain(two[2]), one.arg & 15))
        else:
            made.append(_Step(one.offset, _plain(one.opname), _argument(one, following)))
    return _without_lost_stores(made)


def _without_lost_stores(steps: list[_Step]) -> list[_Step]:
    """`a, _, _ = row`: of several stores into one variable right after each other, the last one counts."""
    last: set[Any] = set()
    for at in reversed(range(len(steps))):
        step = steps[at]
        if step.name != "STORE_FAST":
            last = set()
        elif step.argument in last:
            steps[at] = step._replace(name="POP_TOP", argument=None)
        else:
            last.add(step.argument)
    return steps


def _jump(name: str) -> str:
    """A jump's name without its direction."""
    return name.replace("_NO_INTERRUPT", "").replace("_FORWARD", "").replace("_BACKWARD", "")


def _plain(name: str) -> str:
    """Where a variable may be unbound depends on what the compiler could prove."""
    return name.removesuffix("_BORROW").removesuffix("_CHECK") if "_FAST" in name else name


def _argument(one: dis.Instruction, following: dis.Instruction | None) -> Any:
    if one.opcode in _OF_CONSTANTS:
        about_the_class = following and following.opname == "STORE_NAME" and following.argval in _ABOUT_THE_CLASS
        return None if about_the_class else one.argval
    return one.argval if one.opcode in _OF_NAMES else one.arg


def nested(code: CodeType) -> Iterator[CodeType]:
    """A code object and all that are defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def globals_used(code: CodeType) -> list[Name]:
    """The globals that code names, with the attributes that it takes of them in case they are modules, sorted."""
    found: set[Name] = set()
    for inner in nested(code):
        name: Name = ()
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                name = (instruction.argval,)
            elif name and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                name = (*name, instruction.argval)
            elif instruction.opname not in _NO_INSTRUCTION:
                name = ()
            if name:
                found.add(name)
    return sorted(found)


def globals_changed(code: CodeType) -> set[str]:
    """The globals that code sets, or whose items it changes: they are state, not constants."""
    found: set[str] = set()
    for inner in nested(code):
        steps = [each for each in dis.get_instructions(inner) if each.opname not in _NO_INSTRUCTION]
        for at, step in enumerate(steps):
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                found.add(step.argval)
            elif step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") and at > 1 and steps[at - 2].opname == "LOAD_GLOBAL":
                found.add(steps[at - 2].argval)
            elif step.argval in _CHANGING and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                found |= {steps[at - 1].argval} if steps[at - 1].opname == "LOAD_GLOBAL" else set()
    return found
