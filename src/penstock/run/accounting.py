"""Every row is accounted for: what one step gives, the next takes, and steps that promise one row for each keep it."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import AccountingError
from penstock.observe.result import StepCount
from penstock.pipeline.graph import Node, PCollection
from penstock.pipeline.pipeline import Graph


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


def _given_to(node: Node, counts: Mapping[str, StepCount]) -> int | None:
    """How many rows the steps before gave it, if that is known: tags are counted together, batches as their rows."""
    if node.traits.source is not None or node.traits.takes_batches:
        return None
    given = [_rows_of(before, counts) for pcoll in node.inputs for before in _counted_before(pcoll)]
    known = [rows for rows in given if rows is not None]
    return sum(known) if len(known) == len(given) else None


def _rows_of(pcoll: PCollection[object], counts: Mapping[str, StepCount]) -> int | None:
    producer = pcoll.producer
    count = counts.get(producer.label, StepCount())
    failures = producer.outputs.keys() & producer.traits.failures  # these are counted apart
    alike = failures if pcoll.tag in failures else producer.outputs.keys() - failures
    if len(alike) > 1:
        return None
    return count.rows_failed if pcoll.tag in failures else count.rows_out


def _counted_before(pcoll: PCollection[object]) -> list[PCollection[object]]:
    if pcoll.producer.traits.is_counted:
        return [pcoll]
    return [counted for before in pcoll.producer.inputs for counted in _counted_before(before)]


def _error(node: Node, what: str) -> AccountingError:
    kind = "step" if node.traits.sink is None else "sink"
    return AccountingError(f"{kind} {node.label!r} {what}. This is a defect of Penstock: please report it with the pipeline")
