"""Texts and images in Parquet files to their vectors or logits in others: Penstock, Ray Data, Daft and the plain loops.

Every function runs in a fresh process, whose start and imports are on the clock.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from columns_inputs import checked
from columns_models import (
    INPUT,
    OUTPUT,
    SIZE,
    WIDTH,
    as_lists,
    image_loader_loop,
    image_loop,
    image_model_class,
    image_model_path,
    load,
    text_loop,
    text_model_path,
)
from workload import COMPRESSION, Stopwatch


def run(contender: str, kind: str, source: str, **settings: Any) -> dict[str, Any]:
    """One of the functions below over the files in the folder `source`, and whether what it wrote is right."""
    with tempfile.TemporaryDirectory() as output:
        watch = CONTENDERS[contender](kind, source, output, **settings)
        return checked(watch, kind, Path(source), Path(output))


def penstock(kind: str, source: str, output: str) -> Stopwatch:
    """With no setting."""
    import penstock as ps

    with Stopwatch() as watch, ps.Pipeline() as p:
        p | ps.ReadFromParquet(f"{source}/*.parquet") | ps.RunInference(handler_of(kind)) | ps.WriteToParquet(output)
    return watch


def handler_of(kind: str) -> Any:
    if kind == "texts":
        from penstock.handlers.huggingface import SentenceTransformerModelHandler

        return SentenceTransformerModelHandler(text_model_path(), columns="text", output_column="vector")
    from penstock.handlers.images import IMAGENET_MEAN, IMAGENET_STD, PytorchImageModelHandler

    return PytorchImageModelHandler(
        state_dict_path=image_model_path(),
        model_class=image_model_class(),
        model_params={"model_name": "efficientnet-lite0"},
        columns="image",
        output_column="logits",
        size=(SIZE, SIZE),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def ray(kind: str, source: str, output: str, batch_size: int) -> Stopwatch:
    """The model in two actors, each on one thread."""
    with Stopwatch() as watch:
        from rivals import start_ray

        ray = start_ray()

        class Actor:
            def __init__(self) -> None:
                self.model = load(kind, threads=1)

            def __call__(self, table: Any) -> Any:
                return table.append_column(OUTPUT[kind], as_lists(self.model(table[INPUT[kind]].to_pylist())))

        dataset = ray.data.read_parquet(source)
        pool = {"compute": ray.data.ActorPoolStrategy(size=2), "num_cpus": 0.5}
        dataset = dataset.map_batches(Actor, batch_size=batch_size, batch_format="pyarrow", **pool)
        dataset.write_parquet(output, compression=COMPRESSION)
    return watch


def daft(kind: str, source: str, output: str, batch_size: int, processes: int) -> Stopwatch:
    """The model in so many processes, each on one thread, which have to find these modules; 0: where Daft puts it."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with Stopwatch() as watch:
        import daft

        place = {"use_process": True, "max_concurrency": processes} if processes else {}
        answer_type = daft.DataType.fixed_size_list(daft.DataType.float32(), WIDTH[kind])

        @daft.cls(**place)
        class Encoder:
            def __init__(self, kind: str, threads: int | None) -> None:
                self.model = load(kind, threads)

            @daft.method.batch(return_dtype=answer_type, batch_size=batch_size)
            def answer(self, values: Any) -> Any:
                return as_lists(self.model(values.to_pylist()))

        frame = daft.read_parquet(f"{source}/*.parquet")
        answers = Encoder(kind, 1 if processes else None).answer(frame[INPUT[kind]])
        frame.with_column(OUTPUT[kind], answers).write_parquet(output, compression=COMPRESSION)
    return watch


def _loop(function: Callable[..., Stopwatch]) -> Callable[..., Stopwatch]:
    return lambda kind, source, output, **settings: function(source, output, **settings)


CONTENDERS: dict[str, Callable[..., Stopwatch]] = {
    "penstock": penstock,
    "ray": ray,
    "daft": daft,
    "text loop": _loop(text_loop),
    "image loop": _loop(image_loop),
    "image loop with a DataLoader": _loop(image_loader_loop),
}
