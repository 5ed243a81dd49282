"""What a pipeline does to its rows, as an Identity: its shape, its code, its handlers and where its models are."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from os import PathLike
from types import FunctionType
from typing import Any

from penstock.inference.handler import ModelHandler
from penstock.inference.models_by_key import ModelsByKey
from penstock.inference.spec import InferenceSpec
from penstock.io.files import checked_path, without_secrets
from penstock.io.memory import MemorySource
from penstock.journal.identity.changes import ROWS_IN_MEMORY, Identity
from penstock.journal.identity.code import digest_of, files_of, is_users, script
from penstock.journal.identity.settings import SettingDigests, attributes_of, is_free
from penstock.pipeline.graph import PTransform
from penstock.pipeline.pipeline import Graph
from penstock.run.plan import Plan
from penstock.steps.stage import Outlet, Stage, Step

_OPTIONS = re.compile(r"(args|kwargs|params|options|config)$")  # settings of handlers that are dicts of settings

# Flags of the command line, which scripts may have too: with a value, and without.
OWN_FLAGS = {"--address", "--engine", "--workers", "--threads-per-worker", "--run-dir", "--accept-change"}
OWN_SWITCHES = {"--deterministic", "--progress", "--no-progress", "--fresh", "--input-digests", "--no-input-digests"}


def describe_run(graph: Graph, plan: Plan) -> Identity:
    """The identity of a run of this graph. In the user's process, before anything of the plan is sent anywhere."""
    names, digests = stable_names(graph), SettingDigests()
    models = {names[node.label]: spec for node in graph.nodes if (spec := node.transform.traits().model) is not None}
    return Identity(
        shape=tuple(_shape(graph, plan, names)),
        settings={names[node.label]: _settings_of(node.transform, digests) for node in graph.nodes},
        handlers={name: dict(_handler_settings(spec, digests)) for name, spec in models.items()},
        model_files={
            name: tuple(map(str, spec.handler.model_files())) if spec.refresh is None else ()  # it is declared to change
            for name, spec in models.items()
        },
        files=files_of(digests.modules),  # last: the modules are known now
        arguments=None if script() is None else digest_of(*_arguments(sys.argv[1:])),
    )


def _arguments(given: Sequence[str]) -> Iterator[str]:
    """The script's arguments without those that say how Penstock runs it."""
    left = iter(given)
    for each in left:
        if each in OWN_FLAGS:
            next(left, None)
        elif each.partition("=")[0] not in OWN_FLAGS | OWN_SWITCHES:
            yield each


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
        traits = node.transform.traits()
        if traits.source is not None:
            where = getattr(traits.source, "pattern", None)
            of = f" of {without_secrets(where)}" if isinstance(where, str) else ""
            yield f"source {names[node.label]!r}: {type(traits.source).__name__}{of}"
        elif traits.sink is not None:
            yield f"sink {names[node.label]!r}: {type(traits.sink).__name__} to {without_secrets(traits.sink.describe())}"


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


# The settings of steps.


def _settings_of(transform: PTransform[Any, Any], digests: SettingDigests) -> dict[str, str]:
    source = transform.traits().source
    if isinstance(source, MemorySource):
        return {ROWS_IN_MEMORY: digests.rows(source.rows)}
    return {name: digests.of(value) for name, value in _attributes(transform).items() if value is not None}


def _attributes(transform: PTransform[Any, Any]) -> dict[str, Any]:
    """The attributes of a step that decide what becomes of rows."""
    traits = transform.traits()
    if traits.model is not None:
        return {}
    if traits.source is not None:
        return _public(traits.source, {"pattern"})
    if traits.sink is not None:
        return _public(traits.sink, {"path", "overwrite"})
    found = transform.compared()
    dofn = found.pop("dofn", None)
    return found if dofn is None else {**found, **_with_class(dofn)}


def _with_class(thing: Any) -> dict[str, Any]:
    """An object's attributes, and its class under its own name."""
    return {type(thing).__name__: type(thing), **attributes_of(thing)}


def _public(thing: Any, but: set[str]) -> dict[str, Any]:
    """The settings of a source or sink. What classes of ours keep privately may be what they found out about files."""
    bases = [base for base in type(thing).__mro__ if not is_users(base.__module__)]
    functions = [each for base in bases for each in vars(base).values() if isinstance(each, FunctionType)]
    private = {name for each in functions for name in each.__code__.co_names if name.startswith("_")}
    return {name: value for name, value in _with_class(thing).items() if name not in but | private}


# What of a model handler decides on its answers; how and where the model runs may change from run to run.


def _handler_settings(spec: InferenceSpec, digests: SettingDigests) -> Iterator[tuple[str, str]]:
    """Of a step's handler, of the functions around the model, and of the arguments of its calls."""
    path = spec.path
    found = dict(_handler(path.model_handler, ""))
    before, after = path.before + path.before_model, path.after_model + path.after
    for name, functions in (("preprocess_fn", before), ("postprocess_fn", after)):
        found |= {f"{name}[{number}]": function for number, function in enumerate(functions)}
    layers = path.keys, len(path.before), len(path.after_model), path.prebatched
    if layers != (None, 0, 0, False):
        found["keys and layers"] = layers
    found |= dict(_options("inference_args", spec.inference_args or {}, set()))
    return ((name, digests.of(value)) for name, value in found.items())


def _handler(handler: ModelHandler[Any, Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    yield f"{prefix}class", type(handler)
    files = set(map(str, handler.model_files()))
    settings = handler.compared() if isinstance(handler, ModelsByKey) else attributes_of(handler)
    for name, value in settings.items():
        yield from _attribute(f"{prefix}{name.lstrip('_')}", value, files)


def _attribute(name: str, value: Any, files: Set[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, ModelHandler):
        yield from _handler(value, f"{name}.")
    elif isinstance(value, Mapping) and _OPTIONS.search(name):
        yield from _options(name, value, files)
    elif is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith("penstock."):
        for field in fields(value):  # settings that were put together: people know them by their own names
            yield from _attribute(field.name, getattr(value, field.name), files)
    elif not _is_nothing(value):
        is_file = isinstance(value, (str, PathLike)) and str(value) in files
        yield name, checked_path(value, name) if is_file else value  # the same from whatever folder a run is started


def _options(name: str, settings: Mapping[Any, Any], files: Set[str]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if not is_free(str(key)):
            yield from _attribute(f"{name}.{key}", value, files)


def _is_nothing(value: Any) -> bool:
    """What a setting is that was left out; so a setting that a later version has in addition changes nothing."""
    return value is None or value is False or (isinstance(value, (str, tuple, list, dict)) and not value)
