"""Classify images of which some files are corrupt: these are set aside, mended, and run again by themselves.

It needs `pip install -e '.[images]'`: python examples/classify_images.py

The model is a small convolution that was set by hand to tell three colours apart. Put a network of your own in its place.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from PIL import Image

import penstock as ps
from penstock.handlers.images import PytorchImageModelHandler

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (40, 40, 230)}


class ColourNet(torch.nn.Module):
    """The mean of each channel, as a score of each colour."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = torch.nn.Conv2d(3, 3, 1, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.channels(images).mean((2, 3)).argmax(1)


def make_inputs(folder: Path, images: int) -> None:
    """Pictures of one colour; every tenth file is cut off in the middle."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    net = ColourNet()
    net.channels.weight.data = torch.eye(3).reshape(3, 3, 1, 1)
    torch.save(net.state_dict(), folder / "net.pt")
    for n in range(images):
        path = folder / "images" / f"{n:03d}.png"
        Image.new("RGB", (40 + n, 30), [*COLOURS.values()][n % 3]).save(path)
        if n % 10 == 5:
            path.write_bytes(path.read_bytes()[:40])
    rows = [json.dumps({"id": n, "path": str(folder / "images" / f"{n:03d}.png")}) for n in range(images)]
    (folder / "images.jsonl").write_text("\n".join(rows) + "\n")


def classify(rows: Path, folder: Path, name: str, *, are_failures: bool = False) -> ps.RunResult:
    """Rows to folder/name, those that fail to folder/name-failed; with are_failures, rows as such a folder holds them."""
    handler = PytorchImageModelHandler(
        state_dict_path=str(folder / "net.pt"), model_class=ColourNet, columns="path", output_column="colour", size=(32, 32)
    )
    pipeline = ps.Pipeline()
    images = pipeline | ps.ReadFromJsonl(rows)
    if are_failures:
        images = images | "Row" >> ps.Map(lambda failed: failed[0])
    good, failures = images | "Classify" >> ps.RunInference(handler).with_exception_handling()
    good | ps.WriteToJsonl(folder / name, overwrite=True)
    failures | ps.WriteToJsonl(folder / f"{name}-failed", overwrite=True)
    return pipeline.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("example-output"), help="folder (default: %(default)s)")
    parser.add_argument("--images", type=int, default=60, help="how many (default: %(default)s)")
    args = parser.parse_args()
    folder = args.output.absolute()
    make_inputs(folder, args.images)
    first = classify(folder / "images.jsonl", folder, "first")
    print(f"{first.counts['Classify'].rows_failed} of {args.images} images could not be read")
    for n in range(5, args.images, 10):  # they are copied again from where they came
        Image.new("RGB", (40 + n, 30), [*COLOURS.values()][n % 3]).save(folder / "images" / f"{n:03d}.png")
    again = classify(folder / "first-failed", folder, "again", are_failures=True)
    print(f"{again.rows_out('Classify')} of them have an answer now")
    answers = [json.loads(line) for name in ("first", "again") for part in (folder / name).iterdir() for line in part.open()]
    right = sum(answer["colour"] == answer["id"] % 3 for answer in answers)
    print(f"{right} of {len(answers)} colours are right")


if __name__ == "__main__":
    main()
