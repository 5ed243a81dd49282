"""The PyTorch handlers, with real small models: loading, answers, and what goes wrong."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import pickle
import re
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import penstock as ps
from penstock.errors import InputError, PredictionCountError, RowError, StepError, UsageError
from penstock.handlers.pytorch import (
    PytorchModelHandlerKeyedTensor,
    PytorchModelHandlerTensor,
    default_tensor_inference_fn,
    make_keyed_tensor_model_fn,
    make_tensor_model_fn,
)
from penstock.handlers.pytorch_loading import usable_device
from penstock.rows import PredictionResult
from penstock.testing.handlers import check_handler


class LinearRegression(torch.nn.Module):
    def __init__(self, input_dim: int = 1, output_dim: int = 1) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(input_dim, output_dim)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x) * scale

    def halved(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) / 2


class Weighted(torch.nn.Module):
    """Named inputs: k1 * weight + k2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, k1: torch.Tensor, k2: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        return k1 * self.weight + k2 + shift

    def difference(self, k1: torch.Tensor, k2: torch.Tensor) -> torch.Tensor:
        return k1 - k2


class Answering(torch.nn.Module):
    """Gives back whatever `answer` makes of its input."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: torch.Tensor) -> Any:
        return self.answer(x)


class RunsCode:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def doubling() -> LinearRegression:
    """y = 2x + 0.5"""
    model = LinearRegression()
    model.load_state_dict({"linear.weight": torch.tensor([[2.0]]), "linear.bias": torch.tensor([0.5])})
    return model


def saved(path: Path, content: Any) -> str:
    torch.save(content, path)
    return str(path)


@pytest.fixture
def weights(tmp_path: Path) -> str:
    return saved(tmp_path / "model.pt", doubling().state_dict())


def handler_of(weights: str, **arguments: Any) -> PytorchModelHandlerTensor:
    return PytorchModelHandlerTensor(state_dict_path=weights, model_class=LinearRegression, **arguments)


EXAMPLES = [torch.tensor([float(value)]) for value in (1, -2, 30, 0, 5)]
EXPECTED = [2.5, -3.5, 60.5, 0.5, 10.5]


def answers_of(handler: Any, examples: Any = EXAMPLES, **arguments: Any) -> list[Any]:
    made = handler.run_inference(examples, handler.load_model(), **arguments)
    if isinstance(made, dict):
        return [dict(zip(made, row, strict=True)) for row in zip(*made.values(), strict=True)]
    return [each.inference if isinstance(each, PredictionResult) else each for each in made]


# Loading and answers.


def test_state_dict(weights: str) -> None:
    handler = handler_of(weights, model_params={"input_dim": 1, "output_dim": 1})
    model = handler.load_model()
    answers = handler.run_inference(EXAMPLES, model)
    assert not model.training
    assert answers.flatten().tolist() == EXPECTED
    assert (answers.shape, answers.device.type, answers.requires_grad) == ((5, 1), "cpu", False)
    assert handler.wraps_answers
    assert handler.model_id() == weights
    check_handler(handler, EXAMPLES)
    check_handler(handler, EXAMPLES, inference_args={"scale": 3.0})


def test_torch_script(tmp_path: Path) -> None:
    path = str(tmp_path / "script.pt")
    torch.jit.save(torch.jit.script(doubling()), path)
    handler = PytorchModelHandlerTensor(torch_script_model_path=path, trusted=True)
    assert [answer.item() for answer in answers_of(handler)] == EXPECTED
    assert handler.model_id() == path
    check_handler(handler, EXAMPLES)


def test_exported_program(tmp_path: Path) -> None:
    path = tmp_path / "program.pt2"
    rows = torch.export.Dim("rows", min=1, max=1024)
    program = torch.export.export(torch.nn.Linear(1, 2), (torch.zeros(4, 1),), dynamic_shapes=({0: rows},))
    torch.export.save(program, path)
    handler = PytorchModelHandlerTensor(exported_program_path=str(path), trusted=True)
    answers = answers_of(handler)
    torch.testing.assert_close(torch.stack(answers), program.module()(torch.stack(EXAMPLES)).detach())
    check_handler(handler, EXAMPLES)


def test_an_exported_program_can_run_code_so_it_needs_trust(tmp_path: Path) -> None:
    program, crafted, trace = tmp_path / "program.pt2", tmp_path / "crafted.pt2", tmp_path / "ran"
    torch.export.save(torch.export.export(torch.nn.Linear(1, 1), (torch.zeros(4, 1),)), program)
    content = io.BytesIO()
    torch.save(((RunsCode(trace),), {}), content)
    with zipfile.ZipFile(program) as source, zipfile.ZipFile(crafted, "w", zipfile.ZIP_STORED) as target:
        for name in source.namelist():
            target.writestr(name, content.getvalue() if "sample_inputs" in name else source.read(name))
    with pytest.raises(UsageError, match="trusted=True"):
        PytorchModelHandlerTensor(exported_program_path=str(crafted))
    assert not trace.exists()
    with contextlib.suppress(InputError):  # what comes after does not matter here
        PytorchModelHandlerTensor(exported_program_path=str(crafted), trusted=True).load_model()
    assert trace.exists(), "torch.export.load() no longer runs code: trusted=True is needed no more"


def test_keyed_tensors(tmp_path: Path) -> None:
    path = saved(tmp_path / "weighted.pt", Weighted().state_dict())
    handler = PytorchModelHandlerKeyedTensor(state_dict_path=path, model_class=Weighted)
    examples = [{"k1": torch.tensor([float(row)]), "k2": torch.tensor([row / 10])} for row in range(4)]
    assert [round(answer.item(), 4) for answer in answers_of(handler, examples)] == [0.0, 3.1, 6.2, 9.3]
    assert handler.get_num_bytes(examples) == 4 * 2 * 4
    check_handler(handler, examples, inference_args={"shift": 1.0})


def test_models_can_be_anywhere_fsspec_reaches(weights: str) -> None:
    import fsspec

    with fsspec.open("memory://models/doubling.pt", "wb") as file:
        file.write(Path(weights).read_bytes())
    assert answers_of(handler_of("memory://models/doubling.pt"))[0].item() == 2.5


def test_named_methods_of_the_model(weights: str, tmp_path: Path) -> None:
    handler = handler_of(weights, inference_fn=make_tensor_model_fn("halved"))
    assert [answer.item() for answer in answers_of(handler)] == [value / 2 for value in EXPECTED]
    check_handler(handler, EXAMPLES)

    path = saved(tmp_path / "weighted.pt", Weighted().state_dict())
    keyed = PytorchModelHandlerKeyedTensor(
        state_dict_path=path, model_class=Weighted, inference_fn=make_keyed_tensor_model_fn("difference")
    )
    examples = [{"k1": torch.tensor([float(row)]), "k2": torch.tensor([1.0])} for row in range(3)]
    assert [answer.item() for answer in answers_of(keyed, examples)] == [-1.0, 0.0, 1.0]
    check_handler(keyed, examples)


def test_own_inference_fn_gets_all_it_needs(weights: str) -> None:
    seen = []

    def inference_fn(batch: Any, model: Any, device: Any, inference_args: Any, model_id: Any) -> Any:
        seen.append((len(batch), device, inference_args, model_id))
        return default_tensor_inference_fn(batch, model, device, None, "mine")

    handler = handler_of(weights, inference_fn=inference_fn)
    results = list(handler.run_inference(EXAMPLES, handler.load_model(), {"a": 1}))
    assert seen == [(5, torch.device("cpu"), {"a": 1}, weights)]
    assert results[0].model_id == "mine"
    assert results[0].example is EXAMPLES[0]
    assert not handler.wraps_answers


def test_a_subclass_that_calls_super_gets_what_it_always_got(weights: str) -> None:
    class Rounding(PytorchModelHandlerTensor):
        def run_inference(self, batch: Any, model: Any, inference_args: Any = None) -> Any:
            results = super().run_inference(batch, model, inference_args)
            return [PredictionResult(each.example, round(each.inference.item()), each.model_id) for each in results]

    handler = Rounding(state_dict_path=weights, model_class=LinearRegression)
    assert not handler.wraps_answers
    assert not Rounding(state_dict_path=weights, model_class=LinearRegression, columns=["x"]).takes_columns()
    assert answers_of(handler) == [2, -4, 60, 0, 10]
    check_handler(handler, EXAMPLES)


def test_settings_are_kept(weights: str) -> None:
    handler = handler_of(weights, min_batch_size=2, max_batch_size=8, max_batch_duration_secs=0.5, model_copies=2)
    assert handler.batch_elements_kwargs() == {"min_batch_size": 2, "max_batch_size": 8, "max_batch_duration_secs": 0.5}
    assert (handler.share_model_across_processes(), handler.model_copies()) == (True, 2)
    plain = handler_of(weights)
    assert (plain.share_model_across_processes(), plain.model_copies()) == (False, None)
    assert handler_of(weights, large_model=True).share_model_across_processes()
    assert plain.get_metrics_namespace() == "Penstock_PyTorch"
    assert plain.get_num_bytes(EXAMPLES) == 20
    assert not plain.takes_columns()


def kind_of_file(kind: str, path: Path, factor: float) -> PytorchModelHandlerTensor:
    """A handler for a model of one kind that is saved there: y = factor * x."""
    model = torch.nn.Linear(1, 1)
    model.load_state_dict({"weight": torch.tensor([[factor]]), "bias": torch.zeros(1)})
    if kind == "state_dict_path":
        return PytorchModelHandlerTensor(
            state_dict_path=saved(path, model.state_dict()),
            model_class=torch.nn.Linear,
            model_params={"in_features": 1, "out_features": 1},
        )
    if kind == "torch_script_model_path":
        torch.jit.save(torch.jit.script(model), path)
        return PytorchModelHandlerTensor(torch_script_model_path=str(path), trusted=True)
    rows = torch.export.Dim("rows", min=1, max=1024)
    torch.export.save(torch.export.export(model, (torch.zeros(4, 1),), dynamic_shapes=({0: rows},)), path)
    return PytorchModelHandlerTensor(exported_program_path=str(path), trusted=True)


@pytest.mark.parametrize("kind", ["state_dict_path", "torch_script_model_path", "exported_program_path"])
def test_a_copy_can_be_for_another_file(kind: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first.pt2", tmp_path / "second.pt2"
    handler = kind_of_file(kind, first, 2.0)
    kind_of_file(kind, second, 3.0)
    changed = copy.copy(handler)
    changed.update_model_path(str(second))
    for each, path, factor in [(changed, second, 3.0), (handler, first, 2.0)]:
        assert answers_of(each) == pytest.approx([factor * float(example) for example in EXAMPLES])
        assert (each.model_id(), list(each.model_files())) == (str(path), [str(path)])
    pickle.loads(pickle.dumps(changed))


def test_a_path_that_is_none(weights: str) -> None:
    for wrong in ("", None, 3):
        with pytest.raises(UsageError, match=r"update_model_path\(.*expected the path of a model"):
            handler_of(weights).update_model_path(wrong)  # type: ignore[arg-type]


def test_a_model_for_each_file_of_a_pattern(tmp_path: Path) -> None:
    for name, factor in [("a", 2.0), ("b", 3.0)]:
        saved(tmp_path / f"{name}.pt", {"linear.weight": torch.tensor([[factor]]), "linear.bias": torch.zeros(1)})
    keyed = ps.KeyedModelHandler.from_pattern(f"{tmp_path}/{{key}}.pt", handler_of("the pattern counts"))
    for name, factor in [("a", 2.0), ("b", 3.0), ("a", 2.0)]:
        handler = keyed.unkeyed.handler_of(keyed.unkeyed.model_of(name))
        assert answers_of(handler) == pytest.approx([factor * float(example) for example in EXAMPLES])
        assert handler.model_id() == f"{tmp_path}/{name}.pt"


# ModelOutputs of every shape.


def outputs(answer: Any, rows: int = 3) -> list[Any]:
    examples = [torch.tensor([float(row), row + 0.5]) for row in range(rows)]
    results = default_tensor_inference_fn(examples, Answering(answer), torch.device("cpu"))
    return [result.inference for result in results]


def whole_output(answer: Any, rows: int = 3) -> Any:
    """What run_inference() gives for a batch."""
    examples = [torch.tensor([float(row), row + 0.5]) for row in range(rows)]
    return PytorchModelHandlerTensor(torch_script_model_path="none", trusted=True).run_inference(examples, Answering(answer))


def test_a_batch_is_answered_by_one_tensor_or_a_dict_of_them() -> None:
    assert whole_output(lambda x: x * 2).tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    answers = whole_output(lambda x: OrderedDict(sum=x.sum(1), x=x))
    assert {name: part.tolist() for name, part in answers.items()} == {
        "sum": [0.5, 2.5, 4.5],
        "x": [[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]],
    }
    for answer in (lambda x: (x[:, 0], x[:, 1]), lambda x: [x[:, 0], x[:, 1]]):
        assert [tuple(part.item() for part in row) for row in whole_output(answer)] == [(0.0, 0.5), (1.0, 1.5), (2.0, 2.5)]
    nested = whole_output(lambda x: {"x": (x[:, 0], x[:, 1]), "words": ["a", "b", "c"]})
    assert [(row["x"][1].item(), row["words"]) for row in nested] == [(0.5, "a"), (1.5, "b"), (2.5, "c")]


def test_a_batch_s_answers_own_their_memory_and_can_be_changed() -> None:
    kept = torch.zeros(3, 2)
    for answer in (
        lambda x: x.repeat(1, 500)[:, :2],
        lambda x: x.T.contiguous().T,
        lambda x: kept,
        lambda x: x[:1].expand(3, 2),
    ):
        answers = whole_output(answer)
        assert answers.untyped_storage().nbytes() == 24
        answers.add_(1)
    assert kept.tolist() == [[0.0, 0.0]] * 3, "a model may give away a tensor that it keeps"


def test_dicts_become_one_dict_per_row() -> None:
    assert [{key: value.tolist() for key, value in row.items()} for row in outputs(lambda x: {"sum": x.sum(1), "x": x})] == [
        {"sum": 0.5, "x": [0.0, 0.5]},
        {"sum": 2.5, "x": [1.0, 1.5]},
        {"sum": 4.5, "x": [2.0, 2.5]},
    ]


@pytest.mark.parametrize("kind", [tuple, list])
def test_tuples_and_lists_of_tensors_become_one_tuple_per_row(kind: type) -> None:
    rows = outputs(lambda x: kind((x[:, 0], x[:, 1])))
    assert [tuple(value.item() for value in row) for row in rows] == [(0.0, 0.5), (1.0, 1.5), (2.0, 2.5)]
    assert all(type(row) is tuple for row in rows)


def test_a_list_of_anything_else_has_the_rows_answers() -> None:
    boxes = outputs(lambda x: [{"boxes": row[: 1 + at % 2], "tags": ("a", "b")} for at, row in enumerate(x)])
    assert [len(box["boxes"]) for box in boxes] == [1, 2, 1]
    assert outputs(lambda x: ["a", "b", "c"]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: {"all": x, "few": x[:2]}, r"tensor of shape \(2, 2\) as output\['few'\] for a batch of 3 rows"),
        (lambda x: x[:2], r"tensor of shape \(2, 2\) for a batch of 3 rows"),
        (lambda x: {"loss": x.sum(), "x": x}, r"tensor of shape \(\) as output\['loss'\] for a batch of 3 rows"),
        (lambda x: (x, x[:1]), r"tensor of shape \(1, 2\)"),
        (lambda x: ["a", "b"], "a list for a batch of 3"),
        (lambda x: {}, "a dict for a batch of 3"),
        (lambda x: None, "a NoneType for a batch of 3"),
    ],
)
def test_an_output_without_one_answer_per_row_is_an_error(answer: Any, message: str) -> None:
    for run in (outputs, whole_output):
        with pytest.raises(PredictionCountError, match=message):
            run(answer)


@pytest.mark.parametrize(
    "answer",
    [lambda x: x.repeat(1, 500), lambda x: {"a": x.repeat(1, 500)}, lambda x: [[row] for row in x.repeat(1, 500)]],
)
def test_an_answer_owns_its_memory_alone(answer: Any) -> None:
    row = outputs(answer, rows=200)[7]
    assert len(pickle.dumps(row)) < 8_000


def test_answers_can_be_changed_in_place() -> None:
    """Tensors made in inference mode could not."""
    assert outputs(lambda x: x)[1].add_(1).tolist() == [2.0, 2.5]


def test_no_gradients_are_kept(weights: str) -> None:
    handler = handler_of(weights)
    model = handler.load_model()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(answer.requires_grad for answer in answers_of(handler))


# What goes wrong.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "got no model"),
        ({"state_dict_path": "a"}, "got state_dict_path; expected one of"),
        ({"model_class": LinearRegression}, "got model_class; expected one of"),
        (
            {"state_dict_path": "a", "model_class": LinearRegression()},
            "got a LinearRegression; pass the class itself: model_class=LinearRegression",
        ),
        (
            {"torch_script_model_path": "a", "exported_program_path": "b"},
            "torch_script_model_path and exported_program",
        ),
        ({"state_dict_path": "a", "model_class": LinearRegression, "torch_script_model_path": "b"}, "expected one of"),
        ({"torch_script_model_path": "a", "model_class": LinearRegression}, "expected one of"),
        ({"torch_script_model_path": "a", "model_params": {"x": 1}}, "model_params are the arguments of model_class"),
        ({"torch_script_model_path": "a"}, "a TorchScript file is a program, .*; pass trusted=True if you made it"),
        ({"torch_script_model_path": "a", "device": "toaster"}, "device='toaster': expected 'CPU', 'GPU'"),
        (
            {"state_dict_path": "a", "model_class": LinearRegression, "load_model_args": {"weights_only": False}},
            "weights_only=False would run code",
        ),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PytorchModelHandlerTensor(**arguments)


@pytest.mark.parametrize("row", [torch.zeros(3), torch.zeros(1, dtype=torch.float64)])
def test_rows_of_a_shape_or_type_that_the_model_does_not_take(row: torch.Tensor, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(1, 1).state_dict(), tmp_path / "model.pt")
    arguments = {"model_class": torch.nn.Linear, "model_params": {"in_features": 1, "out_features": 1}}
    handler = PytorchModelHandlerTensor(**arguments, state_dict_path=str(tmp_path / "model.pt"))
    kind, shape = str(row.dtype).removeprefix("torch."), list(row.shape)
    told = rf"RuntimeError: mat1 and mat2 [\s\S]*Each row is {kind} of shape {re.escape(str(shape))}: check"
    rows = ps.Pipeline(workers=0) | ps.Create([row])
    with pytest.raises(StepError, match=told):
        (rows | ps.RunInference(handler)).collect()


def test_missing_file() -> None:
    with pytest.raises(InputError, match=r"'/nowhere/model.pt' does not exist"):
        handler_of("/nowhere/model.pt").load_model()


@pytest.mark.parametrize("path", ["nosuchprotocol://bucket/model.pt", str(Path(__file__).parent)])
def test_what_is_no_file(path: str) -> None:
    with pytest.raises(InputError, match="model file"):
        handler_of(path).load_model()


def test_weights_that_do_not_fit(weights: str) -> None:
    with pytest.raises(UsageError, match=r"model.pt' do not fit LinearRegression.*(?s:.*)size mismatch for linear.weight"):
        handler_of(weights, model_params={"input_dim": 3}).load_model()


def test_a_whole_model_is_not_a_state_dict(tmp_path: Path) -> None:
    path = saved(tmp_path / "whole.pt", torch.nn.Linear(1, 1))
    with pytest.raises(InputError, match=r"more than plain weights \(torch.nn.modules.linear.Linear\).*state_dict"):
        handler_of(path).load_model()


@pytest.mark.parametrize("save", [torch.save, lambda value, path: Path(path).write_bytes(pickle.dumps(value))])
def test_a_file_that_would_run_code_does_not(tmp_path: Path, save: Any) -> None:
    trace = tmp_path / "ran"
    save({"linear.weight": RunsCode(trace)}, tmp_path / "evil.pt")
    with pytest.raises(InputError, match="could run code from the file"):
        handler_of(str(tmp_path / "evil.pt")).load_model()
    assert not trace.exists()


@pytest.mark.parametrize("content", [b"", b"this is not a model at all"])
def test_a_file_of_something_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "junk.pt"
    path.write_bytes(content)
    with pytest.raises(InputError, match="could not be read as a state dict"):
        handler_of(str(path)).load_model()
    with pytest.raises(InputError, match="could not be read as a TorchScript model"):
        PytorchModelHandlerTensor(torch_script_model_path=str(path), trusted=True).load_model()


def test_rows_of_several_shapes(weights: str) -> None:
    with pytest.raises(RowError, match=r"one shape, but saw Tensor\(1,\), Tensor\(2,\).*pad"):
        answers_of(handler_of(weights), [torch.zeros(1), torch.zeros(2), torch.zeros(1)])


def test_rows_that_are_no_tensors(weights: str) -> None:
    with pytest.raises(RowError, match="must be tensors of one shape, but saw list"):
        answers_of(handler_of(weights), [[1.0], [2.0]])


def test_rows_with_other_keys(tmp_path: Path) -> None:
    path = saved(tmp_path / "weighted.pt", Weighted().state_dict())
    handler = PytorchModelHandlerKeyedTensor(state_dict_path=path, model_class=Weighted)
    with pytest.raises(RowError, match=r"same keys, but saw \['k1', 'k2'\] and \['k1'\]"):
        answers_of(handler, [{"k1": torch.zeros(1), "k2": torch.zeros(1)}, {"k1": torch.zeros(1)}])


def test_a_gpu_that_is_not_there_is_the_cpu_with_a_warning(
    weights: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    usable_device.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [answer.item() for answer in answers_of(handler_of(weights, device="GPU"))] == EXPECTED
        answers_of(handler_of(weights, device="GPU"))
    usable_device.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "no CUDA device can be used here, so the model runs on the CPU instead of 'cuda'"
    ]


def test_frameworks_are_imported_by_their_own_file_alone() -> None:
    code = (
        "import sys, penstock.inference.handler, penstock.handlers, penstock.handlers.model_files\n"
        "print([name for name in ('torch', 'sklearn', 'numpy', 'pandas', 'fsspec', 'pyarrow') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_describing_a_model_imports_no_torch() -> None:
    code = """if True:
        import pickle, sys
        import penstock as ps
        from penstock.handlers.pytorch import PytorchModelHandlerKeyedTensor, PytorchModelHandlerTensor, make_tensor_model_fn

        script = {"torch_script_model_path": "a.pt", "trusted": True}
        handler = PytorchModelHandlerTensor(**script, columns=["x"], device="CPU", max_batch_size=8)
        ps.RunInference(PytorchModelHandlerTensor(**script, device="GPU"))
        PytorchModelHandlerKeyedTensor(**script, device="cuda:1", inference_fn=make_tensor_model_fn("f"))
        handler = pickle.loads(pickle.dumps(handler.with_preprocess_fn(str)))
        handler.takes_columns(), handler.changes_rows(), handler.prepares_ahead(), handler.accelerator(), handler.model_id()
        print([name for name in ("torch", "transformers") if name in sys.modules])
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_missing_framework_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport penstock.handlers.pytorch"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "torch is not installed; run: pip install 'penstock[torch]'" in result.stderr


# check_handler() finds what is wrong.


class Swapping(PytorchModelHandlerTensor):
    def run_inference(self, batch: Any, model: Any, inference_args: Any = None) -> list[PredictionResult]:
        results = list(super().run_inference(batch, model, inference_args))
        inferences = [result.inference for result in reversed(results)]
        return [PredictionResult(r.example, i, r.model_id) for r, i in zip(results, inferences, strict=True)]


class Dropping(PytorchModelHandlerTensor):
    def run_inference(self, batch: Any, model: Any, inference_args: Any = None) -> list[PredictionResult]:
        return list(super().run_inference(batch, model, inference_args))[:2]


class Unsized(PytorchModelHandlerTensor):
    def get_num_bytes(self, batch: Any) -> int:
        return -1


class WithoutArguments(PytorchModelHandlerTensor):
    def run_inference(self, batch: Any, model: Any) -> Any:  # type: ignore[override]
        return super().run_inference(batch, model)


class Unsendable(PytorchModelHandlerTensor):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.lock = __import__("threading").Lock()


@pytest.mark.parametrize(
    ("handler_class", "message"),
    [
        (Swapping, "example 0 is answered .* in batches of 2, but .* in a batch of 1"),
        (Dropping, "on a batch of 5 returned 2 predictions; expected one prediction per example, 5"),
        (Unsized, r"get_num_bytes\(\) returned -1"),
        (WithoutArguments, r"must accept \(batch, model, inference_args\)"),
        (Unsendable, "pickling the handler raised TypeError"),
    ],
)
def test_check_handler_finds(handler_class: Any, message: str, weights: str) -> None:
    handler = handler_class(state_dict_path=weights, model_class=LinearRegression)
    with pytest.raises(AssertionError, match=message):
        check_handler(handler, EXAMPLES)


def test_check_handler_finds_a_model_that_does_not_load() -> None:
    with pytest.raises(AssertionError, match=r"load_model\(\) raised InputError"):
        check_handler(handler_of("/nowhere/model.pt"), EXAMPLES)
    with pytest.raises(AssertionError, match="give at least 3"):
        check_handler(handler_of("/nowhere/model.pt"), EXAMPLES[:1])


def test_a_table_has_no_tensors_and_that_is_no_row_s_failure(weights: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0, 2.0]}), tmp_path / "rows.parquet")
    handler = PytorchModelHandlerTensor(state_dict_path=weights, model_class=LinearRegression)
    pipeline = ps.Pipeline(workers=0)
    rows = pipeline | ps.ReadFromParquet(str(tmp_path / "rows.parquet"))
    good, _ = rows | ps.RunInference(handler).with_exception_handling()
    with pytest.raises(
        UsageError, match=r"values, \['x'\], but the model takes tensors; name the columns .* columns=\[...\]"
    ):
        good.collect()
    made = handler.with_preprocess_fn(lambda row: torch.tensor([row["x"]]))
    good, _ = rows | ps.RunInference(made).with_exception_handling()
    assert len(good.collect()) == 2


def test_an_inference_fn_may_have_one_tensor_for_the_answers_of_each_batch(tmp_path):
    kept = torch.zeros(2, 1)

    def doubled(batch, model, device, inference_args, model_id):
        torch.mul(torch.stack(list(batch)), 2, out=kept[: len(batch)])
        return [ps.PredictionResult(example, answer, model_id) for example, answer in zip(batch, kept, strict=False)]

    torch.save(torch.nn.Linear(1, 1).state_dict(), tmp_path / "model.pt")
    handler = PytorchModelHandlerTensor(
        model_class=torch.nn.Linear,
        model_params={"in_features": 1, "out_features": 1},
        state_dict_path=str(tmp_path / "model.pt"),
        inference_fn=doubled,
        max_batch_size=2,
    )
    rows = [torch.tensor([float(at)]) for at in range(6)]
    made = (ps.Pipeline(workers=0) | ps.Create(rows) | ps.RunInference(handler)).collect()
    assert [(result.example.item(), result.inference.item()) for result in made] == [(at, 2 * at) for at in range(6)]
