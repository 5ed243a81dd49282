"""Linear layers that oneDNN computes: the answers of torch's own, and models that stay what they are."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from penstock.handlers.pytorch import PytorchModelHandlerTensor
from penstock.handlers.pytorch_linear import OneDnnLinear, quicken

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")

WIDTH, CLASSES = 384, 256
RANDOM = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=RANDOM)


INPUTS = {
    "rows": normal(64, WIDTH),
    "rows of tokens": normal(4, 32, WIDTH),
    "four axes": normal(2, 2, 32, WIDTH),
    "turned": normal(WIDTH, 64).T,
    "every second": normal(64, 2 * WIDTH)[:, ::2],
    "one row again and again": normal(1, WIDTH).expand(64, WIDTH),
    "not aligned": normal(64 * WIDTH + 1)[1:].view(64, WIDTH),
    "few": normal(2, WIDTH),
    "none": normal(0, WIDTH),
    "one axis": normal(WIDTH),
    "another type": normal(64, WIDTH).double(),
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, CLASSES), torch.nn.GELU(), torch.nn.Linear(CLASSES, 8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows)


class Quantized(PytorchModelHandlerTensor):
    def load_model(self) -> torch.nn.Module:
        return torch.ao.quantization.quantize_dynamic(super().load_model(), {torch.nn.Linear})


def layer(bias: bool = True) -> OneDnnLinear:
    made = OneDnnLinear(WIDTH, CLASSES, bias=bias)
    return made.requires_grad_(False)


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Any]:
    torch.save(Net().state_dict(), tmp_path / "net.pt")
    return {"model_class": Net, "state_dict_path": str(tmp_path / "net.pt")}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", INPUTS)
def test_outputs_are_those_of_torch(name: str, bias: bool) -> None:
    made, rows = layer(bias).to(INPUTS[name].dtype), INPUTS[name]
    with torch.inference_mode():
        expected = functional.linear(rows, made.weight, made.bias)
        torch.testing.assert_close(made(rows), expected, rtol=1e-5, atol=1e-5)


def test_values_beyond_numbers_stay_in_their_rows() -> None:
    rows = INPUTS["rows"].clone()
    rows[3, 5], rows[4, 5] = float("nan"), float("inf")
    with torch.inference_mode():
        finite = layer()(rows).isfinite()
    assert finite.all(dim=1).tolist() == [at not in (3, 4) for at in range(64)]
    assert not finite[3:5].any()


def test_gradients_autocast_and_wrong_shapes_are_left_to_torch() -> None:
    made, rows = layer(), INPUTS["rows"].clone().requires_grad_()
    made(rows).sum().backward()
    torch.testing.assert_close(rows.grad, made.weight.sum(0).expand(64, WIDTH))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert made(rows).dtype is torch.bfloat16
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"64x383 and 384x256"):
        made(rows[:, 1:])


class Doubled(torch.Tensor):
    """Weights that know better how to multiply, as torchao's do."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear:
            return 2 * functional.linear(args[0], args[1].as_subclass(torch.Tensor), *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changed", [lambda weight: weight.as_subclass(Doubled), lambda weight: weight.to_sparse_csr()])
def test_weights_of_other_kinds_are_left_to_torch(changed: Any) -> None:
    made, rows = layer(bias=False), INPUTS["rows"]
    made.weight = torch.nn.Parameter(changed(made.weight.detach()), requires_grad=False)
    with torch.no_grad():
        torch.testing.assert_close(made(rows), functional.linear(rows, made.weight))


@pytest.mark.filterwarnings("ignore")
def test_layers_are_copied_pickled_exported_and_traced() -> None:
    made, rows = layer(), INPUTS["rows"]
    with torch.inference_mode():
        expected = made(rows)
        again = [copy.deepcopy(made), pickle.loads(pickle.dumps(made)), torch.export.export(made, (rows,)).module()]
        for each in [*again, torch.jit.trace(made, rows)]:
            torch.testing.assert_close(each(rows), expected, rtol=1e-5, atol=1e-5)


def test_only_plain_linear_layers_change_and_answers_do_not() -> None:
    model = torch.nn.Sequential(Net(), torch.nn.ReLU(), torch.nn.MultiheadAttention(8, 2).out_proj).requires_grad_(False)
    others = [type(each) for each in model.modules() if type(each) is not torch.nn.Linear]
    with torch.inference_mode():
        expected = model(INPUTS["rows"])
        quicken(model)
        torch.testing.assert_close(model(INPUTS["rows"]), expected, rtol=1e-5, atol=1e-5)
    kinds = [type(each) for each in model.modules()]
    assert [kind for kind in kinds if kind not in (torch.nn.Linear, OneDnnLinear)] == others
    assert len({kind for kind in kinds if issubclass(kind, torch.nn.Linear)} - {type(model[2])}) == 1  # all of them, or none


@pytest.mark.filterwarnings("ignore")
def test_nothing_changes_where_one_dnn_is_turned_off() -> None:
    model = Net()
    with torch.backends.mkldnn.flags(enabled=False):
        quicken(model)
    assert not any(isinstance(each, OneDnnLinear) for each in model.modules())


def test_a_handler_gives_the_answers_of_the_model(saved: dict[str, Any]) -> None:
    handler, rows = PytorchModelHandlerTensor(**saved), INPUTS["rows"]
    model = handler.load_model()
    assert {type(each) for each in model.layers} == {torch.nn.Linear, torch.nn.GELU}  # as its class made it
    with torch.inference_mode():
        expected = model(rows)
    answers = handler.run_inference(list(rows), model)
    torch.testing.assert_close(answers, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_layers_that_a_subclass_replaces_after_the_load_are_left_alone(saved: dict[str, Any]) -> None:
    handler = Quantized(**saved)
    model = handler.load_model()
    before = [type(each) for each in model.modules()]
    handler.run_inference(list(INPUTS["rows"]), model)
    assert [type(each) for each in model.modules()] == before
    assert "quantized" in before[2].__module__
