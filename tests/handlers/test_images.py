"""The handler for PyTorch models of images: decoding beside the data, what the model gets, and images that are none."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import penstock as ps
from penstock.errors import BadRowsError, RowError, UsageError
from penstock.handlers.images import IMAGENET_MEAN, IMAGENET_STD, PytorchImageModelHandler
from penstock.testing import check_handler

RANDOM = np.random.default_rng(0)


class Echo(torch.nn.Module):
    """Gives back what it got."""

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=getattr(torch, dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class SmallNet(torch.nn.Module):
    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, 4, 3, stride=2)
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.conv(x).relu().mean((2, 3))
        return {"features": features, "logits": self.last(features)}


class Viewing(torch.nn.Module):
    """Looks at the memory of what it computed, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if x.shape[-1] == 5:
            raise RuntimeError("images of 5 pixels are beyond this model")
        return self.conv(x).view(len(x), -1)


def pixels(height: int, width: int, channels: int = 3) -> Any:
    """A picture whose neighbouring pixels are alike."""
    small = RANDOM.integers(0, 256, (4, 4, channels), np.uint8)
    return np.array(Image.fromarray(small.squeeze()).resize((width, height)))


def encoded(array: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image = array if isinstance(array, Image.Image) else Image.fromarray(array)
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    torch.save(Echo().state_dict(), folder / "echo.pt")
    torch.save(SmallNet().state_dict(), folder / "net.pt")
    return folder


@pytest.fixture
def echo(folder: Path) -> Any:
    def make(**settings: Any) -> PytorchImageModelHandler:
        return PytorchImageModelHandler(state_dict_path=str(folder / "echo.pt"), model_class=Echo, **settings)

    return make


def prepared(handler: Any, *examples: Any) -> list[Any]:
    return handler.prepare(list(examples), handler.load_prepare())


def answers_of(handler: Any, *examples: Any) -> Any:
    return handler.run_inference(prepared(handler, *examples), handler.load_model())


# Decoding.


def test_examples_of_every_kind_are_the_same_image(echo: Any, tmp_path: Path) -> None:
    import fsspec

    array = pixels(6, 9)
    content = encoded(array)
    path = tmp_path / "a picture.png"
    path.write_bytes(content)
    with fsspec.open("memory://pictures/a.png", "wb") as file:
        file.write(content)
    examples = [content, bytearray(content), str(path), path, f"file://{path}", "memory://pictures/a.png", Image.open(path)]
    examples += [
        {"bytes": content, "path": None},
        {"bytes": None, "path": str(path)},
        {"bytes": content, "path": "gone.png"},
    ]
    for made in prepared(echo(), *examples):
        assert made.dtype == np.uint8
        np.testing.assert_array_equal(made, array)


def test_modes(echo: Any) -> None:
    grey, colour = pixels(4, 5, 1), pixels(4, 5)
    np.testing.assert_array_equal(prepared(echo(), encoded(grey))[0], np.stack([grey] * 3, axis=2))
    assert prepared(echo(mode="L"), encoded(colour))[0].shape == (4, 5, 1)
    assert prepared(echo(mode="RGBA"), encoded(colour))[0][0, 0, 3] == 255
    palette = Image.fromarray(colour).convert("P")
    np.testing.assert_array_equal(prepared(echo(), encoded(palette, "GIF"))[0], np.array(palette.convert("RGB")))
    assert prepared(echo(), encoded(Image.fromarray(colour).convert("CMYK"), "JPEG"))[0].shape == (4, 5, 3)


def test_photos_are_turned_upright(echo: Any) -> None:
    array = pixels(8, 16)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn by 90 degrees
    turned = prepared(echo(), encoded(array, exif=exif))[0]
    np.testing.assert_array_equal(turned, np.rot90(array, -1))


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({}, (30, 45, 3)),
        ({"size": (10, 20)}, (10, 20, 3)),
        ({"size": [10, 20]}, (10, 20, 3)),
        ({"size": 10}, (10, 15, 3)),
        ({"size": 60}, (60, 90, 3)),
        ({"size": 10, "crop": "center"}, (10, 10, 3)),
        ({"size": 12, "crop": 8}, (8, 8, 3)),
        ({"size": 12, "crop": (8, 12)}, (8, 12, 3)),
        ({"size": (12, 20), "crop": (8, 12)}, (8, 12, 3)),
        ({"size": (20, 10), "crop": "center"}, (20, 10, 3)),
        ({"size": (10, 20), "crop": "center"}, (10, 20, 3)),
    ],
)
def test_sizes(settings: dict[str, Any], shape: tuple[int, ...], echo: Any) -> None:
    assert prepared(echo(**settings), encoded(pixels(30, 45)))[0].shape == shape


def test_what_is_cut_off_is_outside_of_the_middle(echo: Any) -> None:
    array = pixels(20, 40)
    np.testing.assert_array_equal(prepared(echo(size=20, crop="center"), encoded(array))[0], array[:, 10:30])
    np.testing.assert_array_equal(prepared(echo(size=20, crop=(10, 16)), encoded(array))[0], array[5:15, 12:28])
    np.testing.assert_array_equal(prepared(echo(size=(20, 10), crop="center"), encoded(array))[0], array[:, 15:25])
    wide = prepared(echo(size=(10, 20)), encoded(array))[0]
    np.testing.assert_array_equal(wide, np.array(Image.fromarray(array).resize((20, 10), Image.Resampling.BILINEAR)))
    cubic = prepared(echo(size=(10, 20), resample="bicubic"), encoded(array))[0]
    np.testing.assert_array_equal(cubic, np.array(Image.fromarray(array).resize((20, 10), Image.Resampling.BICUBIC)))


def planes(image: Any) -> Any:
    return np.array(image, np.float64).transpose(2, 0, 1) / 2


def as_tensor(image: Any) -> torch.Tensor:
    return torch.from_numpy(planes(image))


@pytest.mark.parametrize("transform", [planes, as_tensor])
def test_a_transform_makes_what_the_model_gets(transform: Any, echo: Any) -> None:
    arrays = [pixels(8, 8) for _ in range(3)]
    handler = echo(size=4, transform=transform)
    answers = answers_of(handler, *map(encoded, arrays))
    assert (answers.shape, answers.dtype) == ((3, 3, 4, 4), torch.float32)
    small = [np.array(Image.fromarray(array).resize((4, 4), Image.Resampling.BILINEAR)) for array in arrays]
    np.testing.assert_array_equal(answers.numpy(), np.stack(small).transpose(0, 3, 1, 2) / 2)
    check_handler(handler, list(map(encoded, arrays)))


def test_a_transform_may_take_images_as_they_are(echo: Any) -> None:
    deep = Image.fromarray(np.arange(16, dtype=np.uint16).reshape(4, 4) * 4000)
    handler = echo(mode=None, transform=lambda image: np.array(image, np.float32)[None] / 65535)
    answers = answers_of(handler, encoded(deep))
    assert answers.max().item() == pytest.approx(15 * 4000 / 65535)


# What the model gets.


def test_values_are_scaled_and_normalised(echo: Any) -> None:
    arrays = [pixels(6, 7) for _ in range(2)]
    contents = list(map(encoded, arrays))
    plain = np.stack(arrays).transpose(0, 3, 1, 2) / np.float32(255)
    answers = answers_of(echo(), *contents)
    assert answers.is_contiguous()
    np.testing.assert_array_equal(answers.numpy(), plain)
    mean, std = (np.array(each, np.float32).reshape(3, 1, 1) for each in (IMAGENET_MEAN, IMAGENET_STD))
    answers = answers_of(echo(mean=IMAGENET_MEAN, std=IMAGENET_STD), *contents)
    np.testing.assert_array_equal(answers.numpy(), (plain - mean) / std)
    np.testing.assert_array_equal(answers_of(echo(mean=0.5, std=0.5), *contents).numpy(), (plain - 0.5) / np.float32(0.5))


def test_floats_are_those_that_the_model_computes_with(tmp_path: Path) -> None:
    torch.save(Echo("bfloat16").state_dict(), tmp_path / "half.pt")
    handler = PytorchImageModelHandler(
        state_dict_path=str(tmp_path / "half.pt"), model_class=Echo, model_params={"dtype": "bfloat16"}
    )
    assert answers_of(handler, encoded(pixels(4, 4))).dtype == torch.bfloat16


def test_a_small_network(folder: Path, tmp_path: Path) -> None:
    paths = []
    for at in range(5):
        path = tmp_path / f"{at}.jpg"
        path.write_bytes(encoded(pixels(40 + at, 50), "JPEG", quality=95))
        paths.append(str(path))
    handler = PytorchImageModelHandler(
        state_dict_path=str(folder / "net.pt"), model_class=SmallNet, size=(24, 24), mean=0.5, std=0.25, columns="image"
    )
    answers = answers_of(handler, *paths)
    assert {name: tuple(part.shape) for name, part in answers.items()} == {"features": (5, 4), "logits": (5, 2)}
    arrays = [np.array(Image.open(path).resize((24, 24), Image.Resampling.BILINEAR), np.float32) for path in paths]
    inputs = (torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    torch.testing.assert_close(answers["logits"], handler.load_model()(inputs)["logits"])
    check_handler(handler, paths)
    check_handler(handler, [Path(path).read_bytes() for path in paths])
    check_handler(handler, [{"bytes": Path(path).read_bytes(), "path": path} for path in paths])
    check_handler(handler, [{"image": {"bytes": None, "path": path}, "label": 1} for path in paths])
    check_handler(handler, [Image.open(path) for path in paths])


@pytest.mark.parametrize("transform", [None, lambda image: torch.tensor(np.asarray(image)).permute(2, 0, 1) / 255])
def test_a_model_gets_images_in_a_layout_that_it_takes(transform: Any, tmp_path: Path) -> None:
    torch.save(Viewing().state_dict(), tmp_path / "viewing.pt")
    handler = PytorchImageModelHandler(
        state_dict_path=str(tmp_path / "viewing.pt"), model_class=Viewing, transform=transform
    )
    model, arrays = handler.load_model(), list(np.arange(3 * 6 * 6 * 3, dtype=np.uint8).reshape(3, 6, 6, 3))
    plain = torch.tensor(np.stack(arrays)).permute(0, 3, 1, 2).contiguous() / 255
    with torch.inference_mode():
        expected = model(plain)
    for count in (1, 3, 2):
        answers = handler.run_inference(prepared(handler, *map(encoded, arrays[:count])), model)
        torch.testing.assert_close(answers, expected[:count])
    fresh = handler.load_model()
    with pytest.raises(RuntimeError, match="5 pixels"):
        handler.run_inference(prepared(handler, encoded(arrays[0][:5, :5])), fresh)
    assert fresh.calls == 1


def test_what_travels_is_small(echo: Any) -> None:
    value = prepared(echo(size=(32, 32)), encoded(pixels(300, 300)))[0]
    assert len(pickle.dumps(value)) < 32 * 32 * 3 + 300


def test_a_copy_can_be_for_another_file(echo: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "doubling.pt")
    torch.save({"weight": torch.tensor(2.0)}, path)
    handler, image = echo(), encoded(pixels(6, 9))
    changed = copy.copy(handler)
    changed.update_model_path(path)
    np.testing.assert_allclose(answers_of(changed, image), answers_of(handler, image) * 2)
    assert (changed.model_id(), list(changed.model_files())) == (path, [path])
    assert handler.model_id() != path


# Images that are none.


def test_bad_images_are_named_and_the_others_are_there(echo: Any, tmp_path: Path) -> None:
    good = encoded(pixels(20, 20), "JPEG")
    (tmp_path / "text.jpg").write_text("not an image at all")
    (tmp_path / "short.jpg").write_bytes(good[: len(good) // 2])
    deep = encoded(Image.fromarray(np.zeros((4, 4), np.uint16)))
    missing, text, short = (str(tmp_path / name) for name in ("missing.jpg", "text.jpg", "short.jpg"))
    bad = [missing, text, short, None, 5, b"", deep, str(tmp_path), "nosuch://bucket/a.jpg", {"bytes": None, "path": None}]
    messages = [
        f"image '{missing}' does not exist",
        f"image '{text}' is not an image that Pillow can read: 19 bytes that begin with b'not an i'",
        f"image '{short}' cannot be decoded: OSError: ",
        "the image is null",
        "an image must be a path, bytes or a PIL image, but saw int",
        "the image is not an image that Pillow can read: 0 bytes",
        "more than 8 bits a channel",
        "is a directory",
        "nosuch://bucket/a.jpg: ",
        "the image is null",
    ]
    handler = echo(size=(8, 8))
    with pytest.raises(BadRowsError) as raised:
        prepared(handler, good, *bad, good)
    errors, values = raised.value.errors, raised.value.values
    assert list(errors) == list(range(1, len(bad) + 1))
    for error, message in zip(errors.values(), messages, strict=True):
        assert isinstance(error, RowError)
        assert message in str(error)
    assert len(values) == len(bad) + 2
    np.testing.assert_array_equal(values[0], values[-1])
    assert values[0].shape == (8, 8, 3)


def test_secrets_of_urls_are_not_told(echo: Any) -> None:
    with pytest.raises(BadRowsError) as raised:
        prepared(echo(), "memory://user:secret@bucket/nothing.png?token=secret")
    assert "nothing.png" in str(raised.value.errors[0])
    assert "secret" not in str(raised.value.errors[0])


def test_what_a_transform_raises_is_its_row_s_error(echo: Any) -> None:
    def transform(image: Any) -> Any:
        if image.width == 5:
            raise KeyError("five")
        return "words" if image.width == 6 else np.array(image)

    with pytest.raises(BadRowsError) as raised:
        prepared(echo(transform=transform), *(encoded(pixels(4, width)) for width in (4, 5, 6)))
    assert isinstance(raised.value.errors[1], KeyError)
    assert "transform= returned str for the image; expected an array or a tensor" in str(raised.value.errors[2])


def test_images_of_several_sizes_do_not_make_a_batch(echo: Any) -> None:
    with pytest.raises(RowError, match=r"one shape, but saw \(4, 4, 3\), \(4, 5, 3\); give size=\(height, width\)"):
        answers_of(echo(), encoded(pixels(4, 4)), encoded(pixels(4, 5)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size=0: expected a whole number of pixels, or"),
        ({"size": (1, 2, 3)}, r"size=\(1, 2, 3\): expected"),
        ({"crop": 5}, "crop=5 cuts the middle out of resized images; give their size="),
        ({"size": 8, "crop": 9}, "crop=9 is larger than size=8"),
        ({"size": 8, "crop": "middle"}, "crop='middle': expected .* or \"center\""),
        ({"mode": "rgb"}, "mode='rgb': expected one of 'RGB', 'L', 'RGBA', or None"),
        ({"mode": None}, "give a transform="),
        ({"resample": "best"}, "resample='best': expected one of 'nearest'"),
        ({"mean": [0.5, 0.5]}, r"mean=\[0.5, 0.5\]: expected a number, or 3 of them"),
        ({"std": 0.0}, "std=0.0: expected numbers other than 0"),
        ({"mean": 0.5, "transform": planes}, "mean= and std= are not applied to what transform= gives"),
        ({"transform": 5}, "transform=5: expected a function"),
        ({"columns": ["a", "b"]}, "expected the one column that holds the images"),
    ],
)
def test_wrong_settings_are_refused_at_once(settings: dict[str, Any], message: str, echo: Any) -> None:
    with pytest.raises(UsageError, match=message):
        echo(**settings)


# Columns, and what is imported.


def test_columns(echo: Any) -> None:
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table(
        {
            "path": ["a.png", None],
            "content": [b"x", b"y"],
            "image": pa.array([{"bytes": b"x", "path": None}, None], struct),
            "number": [1, 2],
        }
    )
    for name, first in [("path", "a.png"), ("content", b"x"), ("image", {"bytes": b"x", "path": None})]:
        handler = echo(columns=name)
        handler.check_columns(table.schema)
        assert handler.examples_of(table.select([name]))[0] == first
        assert not handler.takes_columns()
    assert echo(columns=["path"]).examples_of(table.select(["path"])) == ["a.png", None]
    with pytest.raises(UsageError, match="column 'number' holds int64; expected paths or bytes of images"):
        echo(columns="number").check_columns(table.schema)
    with pytest.raises(UsageError, match=r"columns \['nope'\] are missing"):
        echo(columns="nope").check_columns(table.schema)
    with pytest.raises(UsageError, match=r"the model takes images; name the column .* columns="):
        echo().check_columns(table.schema)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_images_are_prepared_without_torch() -> None:
    code = """if True:
        import io, pickle, sys
        sys.modules["torch"] = None  # it is not installed
        import penstock as ps
        from penstock.handlers.images import PytorchImageModelHandler

        model = {"torch_script_model_path": "a.pt", "trusted": True, "device": "GPU"}
        handler = PytorchImageModelHandler(**model, size=4, columns="image")
        print("PIL" in sys.modules)
        from PIL import Image

        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, "PNG")
        ps.RunInference(handler)
        handler = pickle.loads(pickle.dumps(handler))
        handler.prepares_ahead()
        print(handler.prepare([file.getvalue()], handler.load_prepare())[0].shape)
        handler.load_model()
    """
    done = run_python(code)
    assert done.stdout.splitlines() == ["False", "(4, 4, 3)"]
    assert "torch is not installed; run: pip install 'penstock[images]'" in done.stderr


def test_a_missing_pillow_says_how_to_install_it() -> None:
    code = """if True:
        import sys
        sys.modules["PIL"] = None
        from penstock.handlers.images import PytorchImageModelHandler
        print("imported")
        PytorchImageModelHandler(torch_script_model_path="a.pt", trusted=True)
    """
    done = run_python(code)
    assert done.stdout == "imported\n"
    assert "pillow is not installed; run: pip install 'penstock[images]'" in done.stderr


def test_a_model_that_takes_no_such_images(tmp_path: Path) -> None:
    model = {"model_class": torch.nn.Linear, "model_params": {"in_features": 7, "out_features": 1}}
    torch.save(torch.nn.Linear(7, 1).state_dict(), tmp_path / "model.pt")
    handler = PytorchImageModelHandler(**model, state_dict_path=str(tmp_path / "model.pt"), size=4)
    with pytest.raises(RuntimeError, match=r"Each row is float32 of shape \[3, 4, 4\]: check"):
        handler.run_inference([np.zeros((4, 4, 3), np.uint8)], handler.load_model())


# In a pipeline.


@pytest.mark.parametrize("workers", [0, 2])
def test_a_table_of_images_in_a_pipeline(workers: int, folder: Path, tmp_path: Path) -> None:
    contents = [encoded(pixels(20, 30), "JPEG") for _ in range(8)]
    contents[3], contents[5] = contents[3][:200], None
    pq.write_table(pa.table({"id": range(8), "image": pa.array(contents, pa.binary())}), tmp_path / "in.parquet")
    handler = PytorchImageModelHandler(
        state_dict_path=str(folder / "net.pt"), model_class=SmallNet, size=(16, 16), columns="image", output_prefix="net_"
    )
    pipeline = ps.Pipeline(workers=workers)
    rows = pipeline | ps.ReadFromParquet(tmp_path / "in.parquet")
    good, failures = rows | "Look" >> ps.RunInference(handler).with_exception_handling()
    good | ps.WriteToParquet(tmp_path / "good")
    failures.failed_inferences | ps.Map(lambda row: [row[0]["id"], row[1].kind]) | ps.WriteToJsonl(tmp_path / "bad")
    pipeline.run()
    made = pq.read_table(tmp_path / "good")
    assert made.column_names == ["id", "image", "net_features", "net_logits", "net_model_id"]
    assert made["id"].to_pylist() == [0, 1, 2, 4, 6, 7]
    assert made.schema.field("net_logits").type == pa.list_(pa.float32(), 2)
    expected = answers_of(handler, *made["image"].to_pylist())["logits"]
    torch.testing.assert_close(torch.tensor(made["net_logits"].to_pylist()), expected)
    lines = "".join(path.read_text() for path in sorted((tmp_path / "bad").glob("part-*"))).split()
    assert lines == ['[3,"preparing"]', '[5,"preparing"]']


def test_rows_of_images_in_a_pipeline(folder: Path, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{at}.png") for at in range(4)]
    for path in paths:
        Path(path).write_bytes(encoded(pixels(9, 9)))
    handler = PytorchImageModelHandler(state_dict_path=str(folder / "net.pt"), model_class=SmallNet)
    results = (ps.Pipeline(workers=0) | ps.Create(paths) | ps.RunInference(handler)).collect()
    assert [result.example for result in results] == paths
    torch.testing.assert_close(
        torch.stack([each.inference["logits"] for each in results]), answers_of(handler, *paths)["logits"]
    )
    assert results[0].model_id == str(folder / "net.pt")
