"""The last words of a run, for people."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.observe.result import RunResult, StepCount

MOST_STEPS = 5  # whose failures are told one by one
MOST_MODELS = 10  # whose loads are


def rows_read(counts: Mapping[str, StepCount]) -> int:
    """How many rows the sources gave."""
    return sum(count.rows_out for count in counts.values() if not count.rows_in)


def summary(result: RunResult, run_dir: object) -> str:
    """How many rows, how long, what failed, and where the output is."""
    read = f"{rows_read(result.counts):,} rows"
    if result.was_finished:
        told = f"the run in {run_dir} is finished, nothing is left to do (fresh=True, or --fresh, starts over): {read}"
    elif result.splits_before:
        told = f"{read} ({result.rows_before:,} of them before), {result.seconds:.1f} s"
    else:
        told = f"{read} in {result.seconds:.1f} s"
    where = f" -> {', '.join(result.outputs)}" if result.outputs else ""
    return f"{told}{_failed(result.counts)}{where}"


def warnings(result: RunResult) -> list[str]:
    """Steps that failed for every row: then it is seldom the rows that are wrong."""
    return [
        f"step {label!r} failed for all {count.rows_in:,} rows; the commonest error: {_commonest(count)}"
        for label, count in result.counts.items()
        if count.rows_in and count.rows_failed == count.rows_in
    ]


def models(result: RunResult) -> list[str]:
    """Of steps with many models: how often they were loaded, and which cost most."""
    used = result.metrics.models
    told = []
    for step in dict.fromkeys(key.step for key in used):
        uses = {key.name: use for key, use in used.items() if key.step == step}
        loads, seconds = sum(use.loads for use in uses.values()), sum(use.seconds for use in uses.values())
        most = sorted(uses, key=lambda name: -uses[name].seconds)[:MOST_MODELS]
        top = [f"{name} ({uses[name].loads:,} x, {uses[name].seconds:.2g} s)" for name in most]
        told.append(f"step {step!r}: {len(uses):,} models, {loads:,} loads in {seconds:.1f} s; most: {', '.join(top)}")
    return told


def _failed(counts: Mapping[str, StepCount]) -> str:
    failed = {label: count.rows_failed for label, count in counts.items() if count.rows_failed}
    if not failed:
        return ""
    most = sorted(failed, key=lambda label: -failed[label])[:MOST_STEPS]
    steps = [f"{label}: {failed[label]:,}" for label in most]
    others = [f"other steps: {rest:,}"] if (rest := sum(failed.values()) - sum(failed[label] for label in most)) else []
    return f", {sum(failed.values()):,} failed ({', '.join(steps + others)})"


def _commonest(count: StepCount) -> str:
    (error_type, message), rows = max(count.errors.items(), key=lambda item: item[1])
    first_line = message.partition("\n")[0]
    return f"{rows:,} x {error_type}: {first_line}"
