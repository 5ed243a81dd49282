"""What a pipeline does to its rows, as an Identity: its shape, its code, its handlers and where its models are."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.inference.transform import RunInference
from penstock.io.files import without_secrets
from penstock.io.memory import MemorySource
from penstock.io.sink import Write
from penstock.io.source import Read
from penstock.journal.identity.bytecode import operations
from penstock.journal.identity.changes import ROWS_IN_MEMORY, Identity
from penstock.journal.identity.definitions import functions_in, is_users_class, state_of
from penstock.journal.identity.handlers import handler_digests, is_left_out
from penstock.journal.identity.modules import DIGEST_BYTES
from penstock.journal.identity.values import VALUE, digests, fingerprint
from penstock.pipeline.graph import PTransform
from penstock.pipeline.pipeline import Graph
from penstock.pipeline.transforms import BatchElements, GroupIntoBatches, ParDo
from penstock.run.plan import Plan
from penstock.steps.stage import Outlet, Stage, Step

ROWS_AT_ONCE = 1000
_SCALARS = {bool, float, int, str, type(None)}

# How a step is named, where it runs, and what it does with errors: rows that passed would pass again.
_NOT_OF_ROWS = {"label", "hints", "function_name", "handling", "retry", "tags"}


def describe_run(graph: Graph, plan: Plan) -> Identity:
    """The identity of a run of this graph. In the user's process, before anything of the plan is sent anywhere."""
    names = stable_names(graph)
    models = {names[node.label]: node.transform for node in graph.nodes if isinstance(node.transform, RunInference)}
    return Identity(
        shape=tuple(_shape(graph, plan, names)),
        code={names[node.label]: _code(node.transform) for node in graph.nodes},
        handlers={name: handler_digests(model) for name, model in models.items()},
        model_files={name: tuple(map(str, model.path.model_handler.model_files())) for name, model in models.items()},
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
    )


def stable_names(graph: Graph) -> dict[str, str]:
    """Names for steps, by label, that stay when code moves in its file: labels of lambdas say in which line they stand."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for node in graph.nodes:
        first = re.sub(r"\(lambda at [^/]*?:\d+\)(#\d+)?", "(lambda)", node.label)
        others = (f"{first}#{number}" for number in itertools.count(2))
        name = next(each for each in itertools.chain([first], others) if each not in taken)
        taken.add(name)
        names[node.label] = name
    return names


# The shape.


def _shape(graph: Graph, plan: Plan, names: Mapping[str, str]) -> Iterator[str]:
    for stage in plan.stages:
        for step in stage.steps():
            yield from _ways(stage, step, plan, names)
    for node in graph.nodes:
        if isinstance(node.transform, Read):
            source = node.transform.source
            where = getattr(source, "pattern", None)
            of = f" of {without_secrets(where)}" if isinstance(where, str) else ""
            yield f"source {names[node.label]!r}: {type(source).__name__}{of}"
        elif isinstance(node.transform, Write):
            sink = node.transform.sink
            yield f"sink {names[node.label]!r}: {type(sink).__name__} to {without_secrets(sink.describe())}"


def _ways(stage: Stage, step: Step, plan: Plan, names: Mapping[str, str]) -> Iterator[str]:
    """Where the rows of a step go, in order, in one line for each; outputs that nobody takes decide nothing."""
    kind = "rows that come in" if step.transform is None else type(step.transform).__name__
    start = f"stage {stage.index}, step {names[step.label]!r}: {kind}"
    ways = [(tag, end) for tag, ends in step.next.items() for end in ends]
    if not ways:
        yield start
    for tag, end in ways:
        yield f"{start}{f', output {tag!r},' if tag else ''} to {_end(end, plan, names)}"


def _end(end: Step | Outlet, plan: Plan, names: Mapping[str, str]) -> str:
    if isinstance(end, Step):
        return repr(names[end.label])
    inputs = f" by inputs {'.'.join(map(str, end.path))}" if end.path else ""
    if end.kind == "sink":
        return f"{names[plan.sinks[end.target].label]!r}{inputs}"
    return f"{'stage' if end.kind == 'stage' else 'collected as'} {end.target}{inputs}"


# The code.


def _code(transform: PTransform[Any, Any]) -> dict[str, str]:
    if isinstance(transform, RunInference):
        return {}
    found: dict[str, str] = {}
    for name, value in _attributes(transform).items():
        if name == ROWS_IN_MEMORY:
            found[name] = f"{VALUE}:{_rows_digest(value)}"
        elif value is not None:
            found |= digests(name, value, is_left_out)
    return found


def _attributes(transform: PTransform[Any, Any]) -> dict[str, Any]:
    """The attributes of a step that decide what becomes of rows."""
    if isinstance(transform, Read):
        return _public(transform.source, {"pattern"})
    if isinstance(transform, Write):
        return _public(transform.sink, {"path", "overwrite"})
    found = {name: value for name, value in vars(transform).items() if name not in _NOT_OF_ROWS}
    if isinstance(transform, (BatchElements, GroupIntoBatches)):
        limits = found.pop("limits")
        found |= {"batch size": limits.max_size, "batch weight": limits.max_weight, "element_size_fn": limits.weigh}
    if isinstance(transform, ParDo):
        found |= _with_class(found.pop("dofn"))
        found = {name: value for name, value in found.items() if name not in ("args", "kwargs") or value}
    return found


def _with_class(thing: Any) -> dict[str, Any]:
    """An object's attributes, and its class under its own name."""
    state = state_of(thing, is_left_out)
    attributes = state if isinstance(state, dict) else {"state": state}
    return {type(thing).__name__: type(thing), **{str(name): value for name, value in attributes.items()}}


def _public(thing: Any, but: set[str]) -> dict[str, Any]:
    """The settings of a source or sink. What classes of ours keep privately may be what they found out about files."""
    if isinstance(thing, MemorySource):
        return {ROWS_IN_MEMORY: thing.rows}
    members = [member for base in type(thing).__mro__ if not is_users_class(base) for member in vars(base).values()]
    steps = [step for member in members for function in functions_in(member) for step in operations(function.__code__)]
    found_out = {step.argument for step in steps if step.name == "STORE_ATTR" and step.argument.startswith("_")}
    return {name: value for name, value in _with_class(thing).items() if name not in but | found_out}


def _rows_digest(rows: Any) -> str:
    """The digest of rows in memory. Most are what JSON can write, far faster than we would."""
    if not isinstance(rows, (list, tuple)):
        return fingerprint(rows)
    digest = hashlib.blake2b(str(len(rows)).encode(), digest_size=DIGEST_BYTES)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        piece = list(rows[start : start + ROWS_AT_ONCE])
        try:
            text = json.dumps(piece, sort_keys=True) if _is_json(piece) else fingerprint(piece)
        except (ValueError, RecursionError):  # a number of thousands of digits; rows that hold themselves
            text = fingerprint(piece)
        digest.update(text.encode())
    return digest.hexdigest()


def _is_json(value: Any) -> bool:
    """Whether JSON writes nothing else in the same way: of other types it makes text, as keys, and lists."""
    if type(value) is dict:
        return set(map(type, value)) <= {str} and _is_json(list(value.values()))
    if type(value) is list:
        return set(map(type, value)) <= _SCALARS or all(map(_is_json, value))
    return type(value) in _SCALARS
