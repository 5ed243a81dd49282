"""How ParDo works on blocks: a DoFn, its life cycle, and its named outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from penstock.blocks import Block, Pacer, rows_of
from penstock.errors import PenstockError, RefusedError, StepError
from penstock.failures import Failure
from penstock.forks import end_if_forked
from penstock.pipeline.graph import FAILURES
from penstock.pipeline.transforms import ParDo
from penstock.rows import let_through, row_error, rows_made, safe_str, without
from penstock.steps.failing_rows import RowGuard, saw_made
from penstock.steps.operator import Operator
from penstock.transport.packing import why_not_packed


class ParDoOperator(Operator):
    def __init__(self, label: str, transform: ParDo[Any, Any]) -> None:
        super().__init__(label)
        self._dofn = transform.dofn
        self._args, self._kwargs = transform.args, transform.kwargs
        self._tagged = transform.tagged
        self._made: dict[str, list[Any]] = {tag: [] for tag in transform.good_tags()}
        self._pacers = {tag: Pacer() for tag in self._made}

    def setup(self) -> None:
        self._guarded("setup", self._dofn.setup)

    def start(self) -> None:
        self._made = {tag: [] for tag in self._made}
        self._pacers = {tag: Pacer() for tag in self._made}
        self._guarded("start_bundle", self._dofn.start_bundle)

    def push(self, block: Block) -> None:
        process, args, kwargs = self._dofn.process, self._args, self._kwargs
        for row in rows_of(block):
            self.count.rows_in += 1
            try:
                items = process(row, *args, **kwargs)
            except BaseException as exc:
                let_through(exc)
                raise row_error(self.label, row, exc) from exc
            if items is not None:
                self._take(items, "process()", lambda exc, row=row: row_error(self.label, row, exc))  # type: ignore[misc]
            end_if_forked(self.process, self.label)
        self._emit_all()

    def finish(self) -> None:
        items = self._guarded("finish_bundle", self._dofn.finish_bundle)
        if items is not None:
            self._take(items, "finish_bundle()", lambda exc: self._error("finish_bundle", exc))
        self._emit_all()

    def teardown(self) -> None:
        self._guarded("teardown", self._dofn.teardown)

    def _take(self, items: Any, giver: str, error: Callable[[BaseException], StepError]) -> None:
        try:
            iterator = rows_made(items, giver)
        except TypeError as exc:
            raise error(exc) from exc.__cause__
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                return
            except BaseException as exc:
                let_through(exc)
                raise error(exc) from exc
            self._put(item, error)

    def _put(self, item: Any, error: Callable[[BaseException], StepError]) -> None:
        try:
            tag, value = self._tagged(item)
        except ValueError as exc:
            raise error(exc) from exc.__cause__
        made = self._made[tag]
        made.append(value)
        if len(made) >= self._pacers[tag].rows:
            self._emit_made(tag)

    def _emit_all(self) -> None:
        for tag in self._made:
            self._emit_made(tag)

    def _emit_made(self, tag: str) -> None:
        made, self._made[tag] = self._made[tag], []
        if made:
            self._pacers[tag].saw(made)
            self.emit(made, tag)

    def _guarded(self, method: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except PenstockError:
            raise
        except BaseException as exc:
            let_through(exc)
            raise self._error(method, exc) from exc

    def _error(self, method: str, exc: BaseException) -> StepError:
        return StepError(f"step {self.label!r}: {type(exc).__name__} in {method}(): {safe_str(exc)}")


class GuardedParDo(ParDoOperator):
    """A DoFn whose rows may fail by themselves, or are tried again. Its life cycle is that of any other."""

    def __init__(self, label: str, transform: ParDo[Any, Any]) -> None:
        super().__init__(label, transform)
        self._guard = RowGuard(label, transform.outputs_of, transform)
        self._pacer = Pacer()

    def start(self) -> None:
        self._pacer = Pacer()
        super().start()

    def push(self, block: Block) -> None:
        for rows in self._pacer.pieces(rows_of(block)):
            made, failed = self._guard.each(rows)
            self.count.rows_in += len(rows)
            given = [item for each in made if each for item in each]
            saw_made(self._pacer, len(rows), given)
            self._give(made, failed)
            self.fail([(rows[at], failed[at]) for at in sorted(failed)], FAILURES)

    def _give(self, made: list[Any], failed: dict[int, Failure]) -> None:
        """By output. One that packs comes first: it may refuse. Where several do, each is looked at before."""
        blocks = self._blocks(made, failed)
        packing = [tag for tag in blocks if self.packs(tag)]
        if len(packing) > 1 and any(why_not_packed(blocks[tag]) for tag in packing):
            failed |= self._not_packed(made, failed, packing)
            blocks = self._blocks(made, failed)
        for tag in sorted(blocks, key=lambda tag: tag not in packing):
            try:
                self.emit(blocks[tag], tag)
            except RefusedError as exc:
                refused = self._not_packed(made, failed, packing) if exc.block is blocks[tag] else {}
                if not refused:
                    raise
                failed |= refused
                self._give(made, failed)
                return

    def _blocks(self, made: list[Any], failed: Collection[int]) -> dict[str, list[Any]]:
        """What was made of rows that did not fail, by output."""
        blocks: dict[str, list[Any]] = {}
        for each in without(made, failed):
            for tag, value in each:
                blocks.setdefault(tag, []).append(value)
        return blocks

    def _not_packed(self, made: list[Any], failed: Collection[int], packing: list[str]) -> dict[int, Failure]:
        return self._guard.not_packed([[value for tag, value in each or () if tag in packing] for each in made], failed)
