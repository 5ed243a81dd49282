"""A model the shape of ResNet-50, photos for it, and whether logits are right. All of it runs in the fresh processes.

A folder holds the weights in `model.pt`, the photos in `images` and a third of them in `few`, and the logits of some rows
by a plain loop. Rows repeat a number of photos that differ.
"""

from __future__ import annotations

import io
import os
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workload import Stopwatch, outcome

if TYPE_CHECKING:
    import numpy as np

HEIGHT, WIDTH, QUALITY, SIDE = 240, 320, 85, 224
PHOTOS, FILES, SAMPLE = 2_000, 16, 128
DEPTHS, LABELS = (3, 4, 6, 3), 1_000
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLOSE = 0.25  # how far logits may be from the plain loop's, in distances between two rows: bf16 has three digits
EXPECTED = "expected.npz"


def make(folder: str, rows: int, layers: int, device: str) -> dict[str, Any]:
    """All of it, seeded."""
    import pyarrow as pa
    import torch

    with Stopwatch() as watch:
        with get_context("fork").Pool(os.cpu_count()) as pool:
            photos = pool.map(photo, range(min(PHOTOS, rows)), chunksize=8)
        table = pa.table({"id": pa.array(range(rows)), "image": [photos[at % len(photos)] for at in range(rows)]})
        _save(table, Path(folder, "images"))
        _save(table[: -(-rows // 3)], Path(folder, "few"))
        torch.manual_seed(50)
        torch.save(resnet(layers, half=False).state_dict(), Path(folder, "model.pt"))
        _save_expected(folder, photos, layers, device)
    return outcome(watch, rows, f"{sum(map(len, photos)) / len(photos) / 1e3:.1f} kB a photo")


def photo(number: int) -> bytes:
    """The JPEG file of smooth noise, large and small, in colours."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(number)
    total = np.full((HEIGHT, WIDTH, 3), 128.0)
    for rows, columns, strength in ((3, 4, 60), (15, 20, 35), (60, 80, 20), (120, 160, 12)):
        noise = random.integers(0, 256, (rows, columns, 3), dtype=np.uint8)
        smooth = Image.fromarray(noise).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        total += (np.asarray(smooth, float) - 128) * strength / 74
    file = io.BytesIO()
    Image.fromarray(total.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def _save(table: Any, folder: Path) -> None:
    import pyarrow.parquet as pq

    folder.mkdir()
    size = -(-table.num_rows // FILES)
    for number in range(FILES):
        path = folder / f"part-{number:02d}.parquet"
        pq.write_table(table[number * size : (number + 1) * size], path, compression="none", use_dictionary=False)


def resnet(layers: int, half: bool) -> Any:
    """A module from scaled images to logits: at most so many blocks in each of its four stages. Half precision has channels
    last in memory."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = ResNetConfig(depths=[min(depth, layers) for depth in DEPTHS], num_labels=LABELS)
            self.resnet = ResNetForImageClassification(config)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            images = images.contiguous(memory_format=torch.channels_last) if half else images
            return self.resnet(pixel_values=images).logits.float()  # type: ignore[no-any-return]

    made = Classifier()
    return made.to(torch.bfloat16, memory_format=torch.channels_last) if half else made


def load(folder: str, layers: int, device: str) -> Any:
    """The model on its device, in bf16 on a GPU: a function from uint8 [rows, height, width, channels] to logits there."""
    import torch

    model = resnet(layers, half=device != "cpu")
    model.load_state_dict(torch.load(Path(folder, "model.pt"), weights_only=True))
    model.eval().requires_grad_(False).to(device)
    mean, deviation = (torch.tensor(each, device=device).view(-1, 1, 1) for each in (MEAN, DEVIATION))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def run(images: Any) -> Any:
        with torch.inference_mode():
            floats = images.permute(0, 3, 1, 2).float().div_(255).sub_(mean).div_(deviation)
            return model(floats.to(dtype))

    return run


def pixels(data: bytes) -> np.ndarray[Any, Any]:
    """A photo decoded and resized: uint8, colours last."""
    import numpy as np
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    return np.array(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def _save_expected(folder: str, photos: list[bytes], layers: int, device: str) -> None:
    """Of the first photos: their rows have the same numbers."""
    import numpy as np
    import torch

    run, few = load(folder, layers, device), photos[:SAMPLE]
    logits = [
        run(torch.from_numpy(np.stack([pixels(each) for each in few[at : at + 16]])).to(device)).cpu().numpy()
        for at in range(0, len(few), 16)
    ]
    np.savez(Path(folder, EXPECTED), logits=np.concatenate(logits), photos=len(photos))


def checked(watch: Stopwatch, folder: str, source: str, output: str, **more: Any) -> dict[str, Any]:
    """Read back what a contender wrote. Wrong are rows that are missing or there twice, and rows of the first photos whose
    logits are not close to those of the plain loop."""
    import numpy as np
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    expected = np.load(Path(folder, EXPECTED))
    logits, photos = expected["logits"], int(expected["photos"])
    rows = pq.read_table(Path(folder, source), columns=["id"]).num_rows
    made = pq.read_table(output, columns=["id", "logits"])
    ids = made["id"].to_numpy()
    lost = max(rows, len(ids)) - len(np.unique(ids))
    known = np.flatnonzero(ids % photos < len(logits))
    found = pc.list_flatten(made["logits"].take(known)).to_numpy().reshape(-1, LABELS)
    distance = float(np.median(np.linalg.norm(logits[1:] - logits[:-1], axis=1)))
    off = np.linalg.norm(found - logits[ids[known] % photos], axis=1) / distance
    figures = {**more.pop("figures", {}), "off": float(off.max())}
    return {**outcome(watch, len(ids), f"{lost + int((off > CLOSE).sum())} rows wrong"), "figures": figures, **more}
