"""Every row is accounted for: what one step gives, the next takes, and steps that promise one row for each keep it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import REPORT, AccountingError, InputError, OutputError
from penstock.io.sink import Sink
from penstock.io.stored_sink import stored
from penstock.observe.result import StepCount
from penstock.pipeline.graph import Node, PCollection
from penstock.pipeline.pipeline import Graph
from penstock.run.plan import Plan


def check_counts(graph: Graph, counts: Mapping[str, StepCount]) -> None:
    """Raise AccountingError where rows were lost or doubled, inside a step or on the way to it."""
    for node in graph.nodes:
        traits = node.traits
        if not traits.is_counted:
            continue
        count = counts.get(node.label, StepCount())
        if traits.rows == "one" and count.rows_in != count.rows_out + count.rows_failed:
            failed = f" and {count.rows_failed} failures" if count.rows_failed else ""
            raise _error(node, f"took {count.rows_in} rows and gave {count.rows_out}{failed}; it must give one for each")
        if traits.rows == "at most one" and count.rows_in < count.rows_out + count.rows_failed:
            what = f"took {count.rows_in} rows and gave {count.rows_out} and {count.rows_failed} failures"
            raise _error(node, f"{what}; it must give at most one for each")
        if count.rows_in < count.rows_failed:
            raise _error(node, f"took {count.rows_in} rows, of which {count.rows_failed} failed")
        given = _given_to(node, counts)
        if given is not None and given != count.rows_in:
            raise _error(node, f"was given {given} rows and took {count.rows_in}")


def check_read(plan: Plan, counts: Mapping[str, StepCount], known: int | None) -> None:
    """Raise InputError where sources that say how many rows they have gave another number."""
    labels = [root.label for _, _, root, _ in plan.sources()]
    read = sum(counts.get(label, StepCount()).rows_out for label in labels)
    if known is not None and read != known:
        raise InputError(
            f"{', '.join(map(repr, labels))}: {read} rows were read, and the source has {known} by its count(): the input "
            "was changed while it was read, or a source of your own counts wrongly (count() is exact, or None)"
        )


def check_published(label: str, sink: Sink[Any], parts: Sequence[Mapping[str, Any]], count: StepCount) -> None:
    """Raise if not every row that came to a sink is in one of its parts, each published once, and there.

    A part is told by the sink's details() and its rows; those of old journals have none."""
    rows = [part["rows"] for part in parts if "rows" in part]
    if len(rows) == len(parts) and sum(rows) != count.rows_in:
        raise AccountingError(f"sink {label!r} took {count.rows_in} rows, and {sum(rows)} are in its parts; {REPORT}")
    paths = [part["path"] for part in parts if "path" in part]
    if len(set(paths)) < len(paths):
        raise AccountingError(f"sink {label!r}: {len(paths)} parts have {len(set(paths))} names; {REPORT}")
    if parts and (gone := stored(sink).missing(parts)):
        raise OutputError(
            f"{sink.describe()}: {len(gone)} of {len(parts)} published parts are missing, such as {gone[0]}; did "
            "something else remove them? leave the output alone and run again"
        )


def _given_to(node: Node, counts: Mapping[str, StepCount]) -> int | None:
    """How many rows the steps before gave it, if that is known: batches are counted as their rows."""
    if node.traits.source is not None or node.traits.takes_batches:
        return None
    given = [_rows_of(before, counts) for pcoll in node.inputs for before in _counted_before(pcoll)]
    known = [rows for rows in given if rows is not None]
    return sum(known) if len(known) == len(given) else None


def _rows_of(pcoll: PCollection[object], counts: Mapping[str, StepCount]) -> int | None:
    producer = pcoll.producer
    count = counts.get(producer.label, StepCount())
    failures = producer.outputs.keys() & producer.traits.failures  # these are counted apart
    if pcoll.tag in failures and len(failures) == 1:
        return count.rows_failed
    if sum(count.tags.values()) == count.rows_out + count.rows_failed:  # counted one by one
        return count.tags.get(pcoll.tag, 0) if len(producer.outputs) > 1 else count.rows_out
    return count.rows_out if producer.outputs.keys() - failures == {pcoll.tag} else None


def _counted_before(pcoll: PCollection[object]) -> list[PCollection[object]]:
    if pcoll.producer.traits.is_counted:
        return [pcoll]
    return [counted for before in pcoll.producer.inputs for counted in _counted_before(before)]


def _error(node: Node, what: str) -> AccountingError:
    kind = "step" if node.traits.sink is None else "sink"
    return AccountingError(f"{kind} {node.label!r} {what}; {REPORT}")
