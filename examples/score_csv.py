"""Score a CSV file with a scikit-learn model: rows with a broken field are set aside with the reason.

It needs `pip install -e '.[sklearn]'`: python examples/score_csv.py
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import skops.io
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import penstock as ps
from penstock.handlers.sklearn import SklearnModelHandlerNumpy

FEATURES = ["radius", "texture", "perimeter", "area"]


def make_inputs(folder: Path) -> None:
    """A table of measurements in which three fields are broken, and a model that was trained on such measurements."""
    folder.mkdir(parents=True, exist_ok=True)
    data = load_breast_cancer()
    values = data.data[:, : len(FEATURES)]
    skops.io.dump(make_pipeline(StandardScaler(), LogisticRegression()).fit(values, data.target), folder / "model.skops")
    rows = [dict(zip(["id", *FEATURES], [n, *row], strict=True)) for n, row in enumerate(values.tolist())]
    for broken, text in [(7, "n/a"), (100, ""), (300, "12,5")]:
        rows[broken]["area"] = text
    with open(folder / "patients.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["id", *FEATURES])
        writer.writeheader()
        writer.writerows(rows)


def numbers(row: dict[str, str]) -> dict[str, object]:
    """The fields of a CSV file are text."""
    return {"id": int(row["id"]), **{name: float(row[name]) for name in FEATURES}}


def score(folder: Path) -> ps.RunResult:
    handler = SklearnModelHandlerNumpy(folder / "model.skops", columns=FEATURES, output_column="benign")
    pipeline = ps.Pipeline()
    rows = pipeline | ps.ReadFromCsv(folder / "patients.csv")
    good, broken = rows | "Parse" >> ps.Map(numbers).with_exception_handling(threshold=0.05)
    good | "Score" >> ps.RunInference(handler) | ps.WriteToCsv(folder / "scored", overwrite=True)
    broken | ps.WriteToJsonl(folder / "broken", overwrite=True)
    return pipeline.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("example-output"), help="folder (default: %(default)s)")
    folder = parser.parse_args().output
    make_inputs(folder)
    result = score(folder)
    print(result)
    print("set aside:")
    for part in sorted((folder / "broken").iterdir()):
        for row, failure in map(json.loads, part.open()):
            print(f"  {row['id']}: {failure['message']}")


if __name__ == "__main__":
    main()
