"""Does an engine run pipelines as every engine must?"""

from __future__ import annotations

import ast
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from penstock.errors import PenstockError, RowError, StoppedError
from penstock.inference.handler import ModelHandler
from penstock.inference.transform import RunInference
from penstock.io.lines import WriteToText
from penstock.io.memory import Create
from penstock.observe.progress import StageProgress
from penstock.observe.result import RunResult, StepCount
from penstock.pipeline.graph import PCollection
from penstock.pipeline.pipeline import Engine, Pipeline
from penstock.pipeline.transforms import (
    BatchElements,
    DoFn,
    Filter,
    FlatMap,
    Flatten,
    Map,
    MapBatches,
    ParDo,
    Partition,
    Reshuffle,
    TaggedOutput,
)
from penstock.testing.sources import check_same, expect

ROWS = 300
ORDERED_ROWS = 4000  # enough for several splits wherever they run
BAD = (7, 150, 299)  # rows that steps fail for

Rows: TypeAlias = PCollection[Any]
Case: TypeAlias = tuple[
    Callable[[Rows], Rows], list[Any]
]  # what is made of the numbers 0, 1, 2 ..., and what must come of it


def check_engine(
    engine: str | Engine = "local",
    groups: Collection[str] = ("rows", "order", "resume"),
    *,
    folder: str | os.PathLike[str] | None = None,
    **options: Any,
) -> None:
    """Raise AssertionError, with the case and what was expected, unless the engine keeps its contract.

    Small pipelines are run as `Pipeline(engine=engine, **options)` runs them. The groups: `rows`: every transform gives the
    right rows, failures and counts, errors end the run and leave no output, models may live in hosts, explain() and
    progress() tell of a run; `order`: rows come out in the order in which they went in; `resume`: a run with `run_dir` that
    was interrupted is resumed, and ends with the output of a clean run. `folder` is an empty one for inputs and outputs that
    all workers reach; without, one is made here.
    """
    unknown = set(groups) - set(GROUPS)
    expect(not unknown, f"check_engine() has no group {', '.join(sorted(unknown))}; expected some of {', '.join(GROUPS)}")
    with tempfile.TemporaryDirectory(dir=folder, prefix="check-engine-") as made:
        for name in groups:
            for number, check in enumerate(GROUPS[name]):
                place = Path(made, f"{name}-{number}")
                place.mkdir()
                check(_Bench(engine, options, place))


@dataclass(frozen=True)
class _Bench:
    """An engine to be checked, and an empty folder."""

    engine: str | Engine
    options: Mapping[str, Any]
    folder: Path

    def pipeline(self, **more: Any) -> Pipeline:
        return Pipeline(engine=self.engine, **{**self.options, **more})

    def check(self, cases: Mapping[str, Case], rows: int = ROWS, *, in_order: bool = False) -> RunResult:
        """All cases are one run, each with an output of its own."""
        p = self.pipeline()
        numbers = p | "Numbers" >> Create(range(rows))
        for name, (build, _) in cases.items():
            build(numbers) | Map(repr) | f"Write {name}" >> WriteToText(str(self.folder / name))
        result = p.run()
        for name, (_, expected) in cases.items():
            written = self.written(name)
            if not in_order:
                expected, written = sorted(expected, key=repr), sorted(written, key=repr)
            check_same(expected, written, f"{name}: what was written{' in order' if in_order else ''}")
            count = result.counts[f"Write {name}"].rows_in
            expect(count == len(expected), f"{name}: {count} rows were counted, expected {len(expected)}")
        return result

    def written(self, name: str) -> list[Any]:
        """The rows of an output, in the order of its files' names."""
        files = sorted(self.folder.joinpath(name).glob("part-*"))
        return [ast.literal_eval(line) for file in files for line in file.read_text().splitlines()]


class _Doubling(ModelHandler[int, int, int]):
    """Doubles numbers; fails for some of them."""

    def __init__(self, bad: Iterable[int] = (), **settings: Any) -> None:
        super().__init__(**settings)
        self.bad = tuple(bad)

    def load_model(self) -> int:
        return 2

    def run_inference(
        self, batch: Sequence[int], model: int, inference_args: Mapping[str, Any] | None = None
    ) -> Iterable[int]:
        for number in batch:
            _refuse(number, self.bad)
        return [model * number for number in batch]


class _Counting(DoFn[int, Any]):
    """Gives even numbers, odd ones to the output "odd", and for each row of a bundle a 1 to "ones", at its end."""

    def setup(self) -> None:
        self.one = 1

    def start_bundle(self) -> None:
        self.rows = 0

    def process(self, element: int) -> Iterable[Any]:
        self.rows += self.one
        yield TaggedOutput("odd", element) if element % 2 else element

    def finish_bundle(self) -> Iterable[Any]:
        for _ in range(self.rows):
            yield TaggedOutput("ones", 1)


def _refuse(number: int, bad: Sequence[int] = BAD) -> int:
    if number in bad:
        raise ValueError(f"{number} is refused")
    return number


def _counted(rows: Rows) -> Any:
    return rows | ParDo(_Counting()).with_outputs("odd", "ones", main="even")


def _why(rows: Rows) -> Rows:
    return rows | Map(lambda failed: (failed[0], failed[1].kind, failed[1].error_type))


def _transforms(bench: _Bench) -> None:
    numbers = list(range(ROWS))
    bench.check(
        {
            "Map": (lambda rows: rows | Map(lambda n: n + 1), [n + 1 for n in numbers]),
            "FlatMap": (lambda rows: rows | FlatMap(lambda n: [n] * (n % 3)), [n for n in numbers for _ in range(n % 3)]),
            "Filter": (lambda rows: rows | Filter(lambda n: n % 2), numbers[1::2]),
            "MapBatches": (lambda rows: rows | MapBatches(lambda some: [-n for n in some]), [-n for n in numbers]),
            "BatchElements": (
                lambda rows: rows | BatchElements(max_batch_size=7) | FlatMap(lambda some: some if len(some) <= 7 else ()),
                numbers,
            ),
            "Partition": (lambda rows: (rows | Partition(lambda n, parts: n % parts, 3))[2], numbers[2::3]),
            "ParDo": (lambda rows: _counted(rows).even, numbers[::2]),
            "a tagged output": (lambda rows: _counted(rows).odd, numbers[1::2]),
            "finish_bundle()": (lambda rows: _counted(rows).ones, [1] * ROWS),
            "Flatten": (lambda rows: (rows, rows | Map(lambda n: -n)) | Flatten(), numbers + [-n for n in numbers]),
            "Reshuffle": (lambda rows: rows | Reshuffle() | Map(lambda n: n + 1), [n + 1 for n in numbers]),
            "RunInference": (lambda rows: rows | RunInference(_Doubling(max_batch_size=8)), [2 * n for n in numbers]),
            "no rows": (lambda rows: rows | Filter(lambda n: n < 0) | Reshuffle() | Map(lambda n: 1 // n), []),
        }
    )


def _failures(bench: _Bench) -> None:
    refused = [(n, "raised", "ValueError") for n in BAD]
    good = [n for n in range(ROWS) if n not in BAD]

    def handled(rows: Rows) -> Any:
        return rows | "refusing" >> Map(_refuse).with_exception_handling()

    def inferred(rows: Rows, **settings: Any) -> Any:
        return rows | RunInference(_Doubling(BAD, **settings)).with_exception_handling()

    result = bench.check(
        {
            "Map with exception handling": (lambda rows: handled(rows)[0], good),
            "failures of Map": (lambda rows: _why(handled(rows)[1]), refused),
            "RunInference with exception handling": (lambda rows: inferred(rows)[0], [2 * n for n in good]),
            "failures of RunInference": (lambda rows: _why(inferred(rows)[1].failed_inferences), refused),
            "failures of a model in a host": (
                lambda rows: _why(inferred(rows, large_model=True)[1].failed_inferences),
                refused,
            ),
        }
    )
    seen, expected = result.counts["refusing"], StepCount(rows_in=ROWS, rows_out=len(good), rows_failed=len(BAD))
    expect(seen == expected, f"a Map that fails for {len(BAD)} rows is counted as {seen}, expected {expected}")


def _errors(bench: _Bench) -> None:
    p = bench.pipeline()
    p | Create(range(ROWS)) | "refusing" >> Map(_refuse) | Map(str) | WriteToText(str(bench.folder / "out"))
    try:
        p.run()
    except RowError as exc:
        expect("refusing" in str(exc), f"a step that raises: the error is {exc}; it must name the step, 'refusing'")
    else:
        raise AssertionError("a step that raises, without exception handling: run() returned; it must raise a RowError")
    expect(not list(bench.folder.glob("out/part-*")), "a run that failed, without run_dir, has left output; it must not")


def _collected(bench: _Bench) -> None:
    p = bench.pipeline()
    rows = p | Create(range(ROWS)) | Reshuffle() | Map(lambda n: [n])
    check_same([[n] for n in range(ROWS)], sorted(rows.collect()), "collect()")


def _told(bench: _Bench) -> None:
    """What the engine says of a run: before it, meanwhile and after it."""
    ran = bench.folder / "ran"
    p = bench.pipeline()
    rows = p | "Numbers" >> Create(range(ROWS)) | "Mark" >> Map(_mark, str(ran)) | Reshuffle() | "Text" >> Map(str)
    rows | "Write" >> WriteToText(str(bench.folder / "out"))
    told: object = p.explain()
    expect(isinstance(told, str), f"explain() returned {told!r}; it must say in words how the pipeline would run")
    for name in ("Numbers", "Mark", "Text", "Write"):
        expect(name in str(told), f"explain() does not name the step {name!r}: {told}")
    expect(not ran.exists() and not (bench.folder / "out").exists(), "explain() has run the pipeline; it must run nothing")
    run = p.start()
    before = _progress(run.progress(), "before wait()")
    expect(sum(stage.rows for stage in before) <= 2 * ROWS, f"progress() before wait() tells of too many rows: {before}")
    run.wait()
    after = _progress(run.progress(), "after wait()")
    seen = sum(stage.rows for stage in after)
    told = f"progress() after wait() tells of {seen} rows in {len(after)} stage(s), expected {ROWS} in each: {after}"
    expect(bool(after) and seen == ROWS * len(after), told)


def _progress(told: object, when: str) -> Sequence[StageProgress]:
    stages = list(told) if isinstance(told, Sequence) else None
    expect(
        stages is not None and all(isinstance(each, StageProgress) for each in stages),
        f"progress() {when} returned {told!r}; it must be a StageProgress for each stage, or nothing yet",
    )
    assert stages is not None
    for stage in stages:
        known = stage.rows if stage.known is None else stage.known
        expect(stage.rows <= known, f"progress() {when}: {stage.rows} rows of {known}: {stage}")
    return stages


def _mark(number: int, path: str) -> int:
    Path(path).touch()
    return number


def _order(bench: _Bench) -> None:
    numbers = list(range(ORDERED_ROWS))
    negative = [-n for n in numbers]

    def by_length(rows: Rows) -> Rows:
        return rows | RunInference(_Doubling(max_batch_size=32, batch_length_fn=lambda n: n % 50))

    bench.check(
        {
            "Map over uneven rows": (lambda rows: rows | Map(_uneven), numbers),
            "FlatMap": (lambda rows: rows | FlatMap(lambda n: [n] * (n % 3)), [n for n in numbers for _ in range(n % 3)]),
            "Reshuffle": (lambda rows: rows | Map(_uneven) | Reshuffle() | Map(lambda n: -n), negative),
            "Flatten": (lambda rows: (rows | Map(_uneven), rows | Map(lambda n: -n)) | Flatten(), numbers + negative),
            "Flatten, then Reshuffle": (
                lambda rows: (rows | Map(_uneven), rows | Map(lambda n: -n)) | Flatten() | Reshuffle() | Map(lambda n: n),
                numbers + negative,
            ),
            "RunInference by length": (by_length, [2 * n for n in numbers]),
        },
        ORDERED_ROWS,
        in_order=True,
    )
    rows = bench.pipeline() | Create(numbers) | Map(_uneven) | Reshuffle() | Map(_uneven)
    check_same(numbers, rows.collect(), "collect() in order")


def _uneven(number: int) -> int:
    """Some rows take longer than others, the first ones most of all."""
    return number + 0 * sum(range(20_000 if number < 20 else number % 7))


def _note(number: int, log: str, marker: str) -> int:
    """Note that a row was run. The last one fails as long as the marker is there."""
    with open(log, "a") as file:
        file.write(f"{number}\n")
    if number == ORDERED_ROWS - 1 and os.path.exists(marker):
        raise ValueError("interrupted on purpose")
    return number


def _resumable(bench: _Bench) -> Pipeline:
    p = bench.pipeline(run_dir=str(bench.folder / "run"))
    notes = p | Create(range(ORDERED_ROWS)) | "Note" >> Map(_note, str(bench.folder / "log"), str(bench.folder / "marker"))
    notes | Reshuffle() | Map(repr) | WriteToText(str(bench.folder / "out"))
    return p


def _interrupted(bench: _Bench) -> None:
    marker, log = bench.folder / "marker", bench.folder / "log"
    marker.touch()
    try:
        _resumable(bench).run()
    except PenstockError:
        pass
    else:
        raise AssertionError("a run whose last row fails returned; it must raise")
    marker.unlink()
    log.write_text("")
    result = _resumable(bench).run()
    _check_resumed(bench, result, "a run that was interrupted and run again")
    again = len(log.read_text().split())
    expect(
        again < ORDERED_ROWS,
        f"a run that was interrupted at its last row and run again ran all {again} rows again; "
        "what was done before must be kept in run_dir and not run again",
    )
    log.write_text("")
    result = _resumable(bench).run()
    _check_resumed(bench, result, "a finished run that is run again")
    again = len(log.read_text().split())
    expect(again == 0 and result.was_finished, f"a finished run that is run again ran {again} rows; it must run none")


def _stopped(bench: _Bench) -> None:
    bench.folder.joinpath("log").touch()
    run = _resumable(bench).start()
    run.stop()
    try:
        run.wait()
    except StoppedError:
        pass
    else:
        raise AssertionError("a run that was stopped: wait() returned; it must raise StoppedError")
    _check_resumed(bench, _resumable(bench).run(), "a run that was stopped and run again")


def _check_resumed(bench: _Bench, result: RunResult, what: str) -> None:
    check_same(list(range(ORDERED_ROWS)), bench.written("out"), f"{what}: its output")
    count = result.counts["Note"].rows_in
    expect(count == ORDERED_ROWS, f"{what}: {count} rows were counted, expected those of the whole run: {ORDERED_ROWS}")


GROUPS: dict[str, Sequence[Callable[[_Bench], None]]] = {
    "rows": (_transforms, _failures, _errors, _collected, _told),
    "order": (_order,),
    "resume": (_interrupted, _stopped),
}
