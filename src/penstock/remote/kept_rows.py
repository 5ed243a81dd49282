"""The answers to the rows of a batch, where a request is for several rows and by a client of the author's own."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from penstock.remote.answers import digest_of
from penstock.remote.budget import Prices, Spending
from penstock.remote.contents import contents_of
from penstock.remote.meter import Meter


class KeptAnswersByRow:
    """Of one batch. Rows are known again by their contents and the inference_args; one that cannot be (see contents_of), or
    whose answer cannot be pickled, is not kept: a resumed run asks for it again."""

    def __init__(self, meter: Meter, name: str, batch: Sequence[Any], args: Mapping[str, Any] | None) -> None:
        """name: of the model; answers of others are others."""
        self._meter = meter
        self._answers = meter.answers
        self._digests: list[bytes | None] = [None] * len(batch)
        if self._answers.keeps and (told := contents_of(dict(args or {}))) is not None:
            contents = map(contents_of, batch)
            self._digests = [each and digest_of(name.encode(), told, each) for each in contents]

    def found(self, prices: Prices) -> tuple[list[Any], set[int]]:
        """The answers that a process was given which is gone, in their places; which of them there are."""
        values: list[Any] = [None] * len(self._digests)
        taken = Spending()
        found: set[int] = set()
        for at, digest in enumerate(self._digests):
            body = None if digest is None else self._answers.find(digest)
            with contextlib.suppress(Exception):  # its class is another by now: asked for again
                if body is not None:
                    values[at], use = pickle.loads(body)
                    taken = taken.plus(Spending(*use))
                    found.add(at)
        if found:
            self._meter.reused(len(found), taken, prices)
        return values, found

    def keep(self, at: int, value: Any, use: Spending) -> None:
        """use: what it took, as the metrics of a resumed run will count it."""
        digest = self._digests[at]
        if digest is None:
            return
        try:
            body = pickle.dumps((value, astuple(use)), protocol=5)
        except Exception:  # whatever an object raises when it is pickled
            return
        self._answers.keep(digest, body)
