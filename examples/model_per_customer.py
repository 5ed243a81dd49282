"""A model for each customer, with room in memory for a few of them at a time; customers without one get the common model.

It needs `pip install -e '.[sklearn]'`: python examples/model_per_customer.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import skops.io
from sklearn.linear_model import LinearRegression

import penstock as ps
from penstock.handlers.sklearn import SklearnModelHandlerNumpy

CUSTOMERS = 20
ROWS = 4000


def make_inputs(folder: Path) -> None:
    """A table of orders, and a model of prices for each customer: of customer n, an order of x pieces costs n * x."""
    (folder / "models").mkdir(parents=True, exist_ok=True)
    for customer in ("common", *range(CUSTOMERS)):
        slope = 1.0 if customer == "common" else float(customer)
        model = LinearRegression().fit([[0.0], [1.0]], [0.0, slope])
        skops.io.dump(model, folder / "models" / f"{customer}.skops")
    customers = np.arange(ROWS) % (CUSTOMERS + 2)  # two of them are new, and have no model
    pieces = np.arange(ROWS, dtype=float) % 50
    pq.write_table(pa.table({"customer": customers.astype(str), "pieces": pieces}), folder / "orders.parquet")


def price(folder: Path) -> ps.RunResult:
    model = SklearnModelHandlerNumpy(folder / "models" / "common.skops", columns="pieces", output_column="price")
    handler = ps.KeyedModelHandler.from_pattern(
        str(folder / "models" / "{key}.skops"),
        model,
        default=model,
        key_column="customer",
        max_models_per_worker_hint=5,
    )
    pipeline = ps.Pipeline()
    orders = pipeline | ps.ReadFromParquet(folder / "orders.parquet")
    orders | "Price" >> ps.RunInference(handler) | ps.WriteToParquet(folder / "prices", overwrite=True)
    return pipeline.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("example-output"), help="folder (default: %(default)s)")
    folder = parser.parse_args().output
    make_inputs(folder)
    result = price(folder)
    print(result)
    for row in pq.read_table(folder / "prices").slice(3 * (CUSTOMERS + 2) + CUSTOMERS - 1, 3).to_pylist():
        print(row["customer"], row["pieces"], round(row["price"], 6))


if __name__ == "__main__":
    main()
