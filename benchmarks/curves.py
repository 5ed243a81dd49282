"""How well the size of batches is found, on synthetic cost curves. Time is simulated, so that this takes seconds.

    python benchmarks/curves.py

For each curve: the throughput of the search after its first 5% of 20,000 rows, over that of the best fixed size.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

from penstock.batching.sizes import SizeFinder, ladder

ROWS = 20_000
MOST = 1024
Curve = Callable[[int, int], float]  # (rows in the batch, rows done before it) -> seconds


def linear(size: int, done: int) -> float:
    return 0.010 + 0.001 * size


def steep(size: int, done: int) -> float:
    return 0.0001 + 0.001 * size


def plateau(size: int, done: int) -> float:
    return 0.020 * max(1, -(-size // 64))


def cliff(size: int, done: int) -> float:
    return (0.010 + 0.0005 * size) * (6 if size > 100 else 1)


def drift_up(size: int, done: int) -> float:
    return (0.001 if done < ROWS / 2 else 0.050) + 0.001 * size


def drift_down(size: int, done: int) -> float:
    return linear(size, done) * (1 if done < ROWS / 2 or size <= 48 else 4)


CURVES: dict[str, Curve] = {curve.__name__: curve for curve in (linear, steep, plateau, cliff, drift_up, drift_down)}


def found(curve: Curve, noise: float, seed: int) -> float:
    """Rows/s of the search, without its first 5%."""
    chance = random.Random(seed)
    finder, done, clock, skipped_at = SizeFinder(ladder(1, MOST), 8), 0, 0.0, None
    while done < ROWS:
        size = min(finder.size, ROWS - done)
        seconds = curve(size, done)
        if done >= ROWS * 0.05 and skipped_at is None:
            skipped_at = (done, clock)
        finder.observe(finder.size, size, size, seconds * chance.lognormvariate(0, noise))
        done, clock = done + size, clock + seconds
    assert skipped_at is not None
    return (done - skipped_at[0]) / (clock - skipped_at[1])


def fixed(curve: Curve, size: int) -> float:
    done, clock = 0, 0.0
    while done < ROWS:
        rows = min(size, ROWS - done)
        clock += curve(rows, done)
        done += rows
    return done / clock


def best_fixed(curve: Curve) -> float:
    return max(fixed(curve, size) for size in range(1, MOST + 1))


def share_of_best(curve: Curve, noise: float = 0.0, seeds: int = 1) -> float:
    best = best_fixed(curve)
    return statistics.median(found(curve, noise, seed) / best for seed in range(seeds))


def main() -> None:
    print("| curve | share of the best fixed size | with 10% noise (median of 9) |")
    print("|---|---|---|")
    for name, curve in CURVES.items():
        print(f"| {name} | {share_of_best(curve):.3f} | {share_of_best(curve, 0.1, 9):.3f} |")


if __name__ == "__main__":
    main()
