"""Linear algebra as a JAX step, beside NumPy and scikit-learn: what jax.numpy is worth, at several sizes.

    pip install 'penstock[jax,sklearn]'
    python benchmarks/jax_linalg.py [--device cpu|gpu] [--rows N ...] [--markdown FILE]

Two jobs over a matrix of rows x 64 floats of 32 bits: an RBF kernel with 1,000 centres; and the 16 main components of the
rows (PCA) with their distances to 1,000 others. JAX runs through JaxModelHandler, as a step does: rows from NumPy to the
device, and answers back, are on the clock. Compiling a shape, which happens once, is given apart. Best of five; every answer
is compared with NumPy's. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from penstock.handlers.jax import JaxModelHandler

COLUMNS, CENTRES, COMPONENTS, GAMMA = 64, 1_000, 16, 1 / 64
TIMES = 5


def squared_distances(xp: Any, x: Any, y: Any) -> Any:
    """In the words that NumPy and JAX share."""
    return xp.maximum((x**2).sum(1)[:, None] - 2 * x @ y.T + (y**2).sum(1)[None, :], 0)


def kernel(xp: Any, x: Any, y: Any) -> Any:
    return xp.exp(-GAMMA * squared_distances(xp, x, y))


def components(xp: Any, x: Any, y: Any) -> Any:
    """Distances in the space of the main components of x: by the eigenvectors of its covariance."""
    mean = x.mean(0)
    _, vectors = xp.linalg.eigh((x - mean).T @ (x - mean) / len(x))
    main = vectors[:, -COMPONENTS:]
    return xp.sqrt(squared_distances(xp, (x - mean) @ main, (y - mean) @ main))


def kernel_by_sklearn(x: Any, y: Any) -> Any:
    from sklearn.metrics.pairwise import rbf_kernel

    return rbf_kernel(x, y, gamma=GAMMA)


def components_by_sklearn(x: Any, y: Any) -> Any:
    from sklearn.decomposition import PCA
    from sklearn.metrics.pairwise import euclidean_distances

    fitted = PCA(COMPONENTS, svd_solver="covariance_eigh").fit(x)
    return euclidean_distances(fitted.transform(x), fitted.transform(y))


JOBS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "RBF kernel": (kernel, kernel_by_sklearn),
    "PCA and distances": (components, components_by_sklearn),
}


def step(job: Callable[..., Any], folder: str, device: str) -> Callable[[Any], Any]:
    """A batch through a JAX handler whose parameters are the centres."""

    def apply(params: Any, x: Any) -> Any:
        import jax.numpy as jnp

        return job(jnp, x, params["centres"])

    handler = JaxModelHandler(apply, f"{folder}/centres.safetensors", device=device)
    model = handler.load_model()
    return lambda x: handler.run_inference(x, model)


def best(call: Callable[[], Any]) -> tuple[float, Any]:
    seconds, answer = [], None
    for _ in range(TIMES):
        started = time.perf_counter()
        answer = np.asarray(call())
        seconds.append(time.perf_counter() - started)
    return min(seconds), answer


def compared(name: str, rows: int, folder: str, device: str) -> str:
    job, by_sklearn = JOBS[name]
    random = np.random.default_rng(rows)
    x = random.standard_normal((rows, COLUMNS)).astype(np.float32) * np.linspace(1, 3, COLUMNS, dtype=np.float32)
    y = x[:CENTRES]
    save_file({"centres": y}, f"{folder}/centres.safetensors")
    run = step(job, folder, device)
    started = time.perf_counter()
    run(x)
    first = time.perf_counter() - started
    numpy, expected = best(lambda: job(np, x, y))
    sklearn, _ = best(lambda: by_sklearn(x, y))
    jax, answer = best(lambda: run(x))
    off = float(np.abs(answer - expected).max() / np.abs(expected).max())
    times = " | ".join(f"{seconds * 1e3:,.1f}" for seconds in (numpy, sklearn, jax))
    return f"| {name} | {rows:,} | {times} | {numpy / jax:.2f} | {sklearn / jax:.2f} | {first:.2f} | {off:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear algebra as a JAX step.")
    parser.add_argument("--device", default="cpu", choices=("cpu", "gpu"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1_024, 8_192, 65_536])
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this file, too")
    given = parser.parse_args()
    lines = [
        f"JAX on the {given.device}; milliseconds",
        "",
        "| job | rows | NumPy | scikit-learn | JAX step | times NumPy | times scikit-learn | first call, s | off |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        lines += [compared(name, rows, folder, given.device) for name in JOBS for rows in given.rows]
    print("\n".join(lines))
    if given.markdown:
        given.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
