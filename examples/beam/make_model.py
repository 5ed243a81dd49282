"""What classify_flowers.py needs: a model that knows three kinds of iris, and a file of flowers with one bad line."""

from __future__ import annotations

import argparse
from pathlib import Path

import skops.io
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where iris.skops and flowers.csv are written")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    iris = load_iris()
    skops.io.dump(LogisticRegression(max_iter=1000).fit(iris.data, iris.target_names[iris.target]), folder / "iris.skops")
    lines = [",".join(f"{value:g}" for value in flower) for flower in iris.data]
    (folder / "flowers.csv").write_text("\n".join([*lines, "not,a,flower"]) + "\n")


if __name__ == "__main__":
    main()
