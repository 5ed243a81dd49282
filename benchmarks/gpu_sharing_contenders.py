"""Jobs that share one GPU: copies of an encoder, two encoders, the same GPU listed twice. Each function runs in a fresh
process.

The folder that they are given holds two of gpu_texts_inputs: `a`, and `b` with the same texts and a smaller encoder of other
weights.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from gpu_texts_inputs import checked, make, make_words, save_expected, save_texts
from workload import Stopwatch, outcome


def make_all(folder: str, rows: int, long_rows: int, layers: int, device: str) -> dict[str, Any]:
    """`a` and `b`; and where long_rows is not 0, `long`: so many texts, and the encoder of `a`."""
    with Stopwatch() as watch:
        for name, depth, seed in [("a", layers, 12), ("b", max(1, layers // 2), 34)]:
            Path(folder, name).mkdir()
            made = make(str(Path(folder, name)), rows, depth, device, seed)
        if long_rows:
            long = Path(folder, "long")
            long.mkdir()
            (long / "model").symlink_to(Path(folder, "a", "model"))
            save_texts(long / "texts", make_words(), long_rows)
            save_expected(str(long), long_rows, device)
    return outcome(watch, rows, made["checksum"])


def copies(folder: str, device: str, model_copies: int | None = None, visible: str | None = None) -> dict[str, Any]:
    """Encoder `a` in so many processes; `visible` is CUDA_VISIBLE_DEVICES for the whole job."""
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    return encoders(folder, device, ["a"], model_copies)


def encoders(folder: str, device: str, names: list[str], model_copies: int | None = None) -> dict[str, Any]:
    """These encoders over the same rows, one step after the other in one pipeline. A row counts once for each."""
    from gpu_handlers import NotingEncoderHandler
    from gpu_progress import run_watched, words_of

    import penstock as ps

    with tempfile.TemporaryDirectory() as scratch:
        output, noted_in = f"{scratch}/vectors", f"{scratch}/calls"
        with Stopwatch() as watch:
            p = ps.Pipeline()
            rows = p | ps.ReadFromParquet(f"{folder}/{names[0]}/texts/*.parquet")
            for name in names:
                handler = NotingEncoderHandler(
                    f"{folder}/{name}/model",
                    device="CPU" if device == "cpu" else "GPU",
                    columns="text",
                    output_column=name,
                    model_copies=model_copies,
                )
                handler.noted_in = noted_in
                rows = rows | name >> ps.RunInference(handler)
            _ = rows | ps.WriteToParquet(output)
            watched = run_watched(p, handler)
        calls = watched.calls
        figures = {**watched.figures(), "span": calls[-1].ended - min(call.started for call in calls)}
        done = [
            checked(watch, f"{folder}/{name}", output, name, figures=figures, words=words_of(watched.result))
            for name in names
        ]
        wrong = sum(int(each["checksum"].split()[0]) for each in done)
        figures["off"] = max(each["figures"]["off"] for each in done)
        return {**done[0], "checksum": f"{wrong} rows wrong", "figures": figures}
