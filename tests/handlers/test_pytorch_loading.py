"""State dicts are loaded without drawing the first weights of a model: it is the model that the ordinary way gives."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch import nn

from penstock.errors import InputError, UsageError
from penstock.handlers.pytorch import PytorchModelHandlerTensor
from penstock.handlers.pytorch_first_weights import FirstWeights


class Plain(nn.Module):
    """Draws, a filled row, constants, and a buffer that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.BatchNorm1d(4))
        nn.init.xavier_uniform_(self.layers[0].weight)
        self.layers[2].weight.data.normal_(std=0.02)
        self.register_buffer("table", torch.arange(5.0))


class Tied(nn.Module):
    """One parameter by two names; two that share memory; and a third that has its own, but not in the file."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Linear(3, 3, bias=False) for _ in range(4))
        if tie:
            self.second.weight = self.first.weight
            self.third.weight = nn.Parameter(self.fourth.weight.data)


class LooksAtItsWeights(nn.Module):
    """Keeps what it draws, and what it computes from that, in places that no file overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.register_buffer("noise", torch.randn(3), persistent=False)
        self.second = nn.Linear(3, 3)
        self.register_buffer("drawn", torch.empty(20).uniform_(), persistent=False)
        self.third = nn.Linear(3, 3)
        self.register_buffer("total", self.second.weight.sum(), persistent=False)
        self.last = nn.Linear(3, 3)


class ReadsMemory(nn.Module):
    """Without an operator that could be seen."""

    def __init__(self, read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.register_buffer("seen", torch.tensor(read(self.first.weight.detach())), persistent=False)
        self.last = nn.Linear(3, 3)


class OfNumpy(nn.Module):
    """Weights in memory that NumPy has: it sees what is drawn, and what is loaded."""

    def __init__(self) -> None:
        super().__init__()
        drawn, self.memory = np.zeros(3, np.float32), np.zeros(3, np.float32)
        self.first = nn.Linear(3, 3)
        torch.from_numpy(drawn).uniform_()
        self.register_buffer("drawn", torch.tensor(drawn), persistent=False)
        self.register_buffer("table", torch.from_numpy(self.memory))
        self.table += 1
        self.last = nn.Linear(3, 3)


class InInferenceMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        with torch.inference_mode():
            flat = self.layer.weight.t().reshape(9)
        self.register_buffer("flat", flat.clone(), persistent=False)


def reads_numpy() -> nn.Module:
    return ReadsMemory(lambda weight: weight.numpy().copy())


def reads_list() -> nn.Module:
    return ReadsMemory(lambda weight: weight.tolist())


def reads_copy() -> nn.Module:
    return ReadsMemory(lambda weight: copy.deepcopy(weight).tolist())


class LeftOver(nn.Module):
    """What is drawn last is not saved: its random numbers come behind those of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(30, 30)
        self.register_buffer("drawn", torch.empty(40).normal_(), persistent=False)


class Seeds(nn.Module):
    """The same random numbers in every process, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(30, 30)
        torch.manual_seed(7)
        self.register_buffer("fixed", torch.empty(40).normal_(), persistent=False)
        self.between = nn.Linear(3, 3)
        torch.manual_seed(8)
        self.register_buffer("projection", torch.rand(4), persistent=False)
        self.after = nn.Linear(3, 3)


class Subclass(torch.Tensor):
    pass


class OfOtherTensors(nn.Module):
    """A tensor of another class looks at a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        total = self.layer.weight.detach().as_subclass(Subclass).sum()
        self.register_buffer("total", total.as_subclass(torch.Tensor), persistent=False)


CONSTANT = torch.arange(9.0).reshape(3, 3)


class FromAConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.layer.weight.data.copy_(CONSTANT)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


def with_norms() -> nn.Module:
    norms = nn.utils.parametrizations
    return nn.Sequential(norms.weight_norm(nn.Linear(3, 3)), norms.spectral_norm(nn.Linear(3, 3)))


def halves() -> nn.Module:
    return nn.Linear(3, 3).half()


def channels_last() -> nn.Module:
    return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)


def refuses_to_be_watched() -> nn.Module:
    if torch.overrides._get_current_function_mode() is not None:
        raise NotImplementedError("not under a mode")
    return LeftOver()


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def storages(model: nn.Module) -> list[list[str]]:
    """Which names share memory."""
    found: dict[int, list[str]] = {}
    for name, tensor in tensors(model).items():
        found.setdefault(tensor.data_ptr(), []).append(name)
    return sorted(found.values())


def loaded(make: Callable[..., nn.Module], weights: Any, path: Path, seed: int = 3) -> nn.Module:
    torch.save(weights, path)
    torch.manual_seed(seed)
    handler = PytorchModelHandlerTensor(state_dict_path=str(path), model_class=make)
    return handler.load_model()


def ordinarily_loaded(make: Callable[..., nn.Module], path: Path, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    model = make()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model


@pytest.mark.parametrize(
    "make",
    [
        *(Plain, Tied, LooksAtItsWeights, LeftOver, Seeds, OfOtherTensors, FromAConstant, encoder, with_norms, halves),
        *(OfNumpy, InInferenceMode, channels_last, reads_numpy, reads_list, reads_copy, refuses_to_be_watched),
        *(lambda: nn.LSTM(3, 4, 2), lambda: nn.MultiheadAttention(4, 2)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_model_is_the_one_that_the_ordinary_way_gives(make: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1)
    weights = make().to(dtype).state_dict()
    model = loaded(make, weights, tmp_path / "model.pt")
    expected = ordinarily_loaded(make, tmp_path / "model.pt")
    found, right = tensors(model), tensors(expected)
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert torch.equal(found[name], tensor), name
        assert (found[name].dtype, found[name].stride(), type(found[name])) == (tensor.dtype, tensor.stride(), type(tensor))
    assert storages(model) == storages(expected)


def test_memory_that_numpy_has_gets_the_weights_of_the_file(tmp_path: Path) -> None:
    weights = {**OfNumpy().state_dict(), "table": torch.tensor([5.0, 6.0, 7.0])}
    model = loaded(OfNumpy, weights, tmp_path / "model.pt")
    assert model.memory.tolist() == [5.0, 6.0, 7.0]


def test_weights_that_are_one_in_the_file_alone_are_two_in_the_model(tmp_path: Path) -> None:
    weights = Tied(tie=True).state_dict()
    model = loaded(lambda: Tied(tie=False), weights, tmp_path / "model.pt")
    assert len(storages(model)) == 4
    assert torch.equal(model.first.weight, weights["first.weight"])


def test_a_model_does_not_share_what_its_class_copies(tmp_path: Path) -> None:
    before = CONSTANT.clone()
    weights = {"layer.weight": torch.ones(3, 3), "layer.bias": torch.ones(3)}
    model = loaded(FromAConstant, weights, tmp_path / "model.pt")
    assert torch.equal(model.layer.weight, torch.ones(3, 3))
    assert torch.equal(CONSTANT, before)


def test_first_weights_are_not_drawn_where_the_file_has_all(tmp_path: Path) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    loaded(Plain, Plain().state_dict(), tmp_path / "model.pt")
    assert torch.equal(torch.get_rng_state(), state)


def test_what_was_read_is_not_copied_where_the_types_are_alike(tmp_path: Path) -> None:
    model, first = FirstWeights.of(Plain)
    torch.save(Plain().state_dict(), tmp_path / "model.pt")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    first.load(model, weights)
    assert {name: tensor.data_ptr() for name, tensor in tensors(model).items()} == {
        name: tensor.data_ptr() for name, tensor in weights.items()
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("make", "taken_over"), [(Plain, True), (with_norms, True), (encoder, True), (Tied, False)])
def test_weights_are_read_to_the_device_where_the_model_takes_them_over(make: Any, taken_over: bool, tmp_path: Path) -> None:
    torch.save(make().state_dict(), path := tmp_path / "model.pt")
    weights = torch.load(path, weights_only=True, map_location="cuda")
    addresses = {tensor.data_ptr() for tensor in weights.values()}
    model, first = FirstWeights.of(make)
    first.load(model, weights)
    assert all(tensor.data_ptr() in addresses for tensor in tensors(model).values()) == taken_over
    handler = PytorchModelHandlerTensor(state_dict_path=str(path), model_class=make, device="GPU")
    found, expected = tensors(handler.load_model()), tensors(ordinarily_loaded(make, path))
    assert {tensor.device.type for tensor in found.values()} == {"cuda"}
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in expected.items() if name in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", ["", "file://", "memory://"])
def test_a_state_dict_in_safetensors(place: str, dtype: torch.dtype, tmp_path: Path) -> None:
    weights = Plain().to(dtype).state_dict()
    path = f"{place}{tmp_path}/model.safetensors"
    with fsspec.open(path, "wb") as file:
        file.write(save(weights))
    model = PytorchModelHandlerTensor(state_dict_path=path, model_class=Plain).load_model()
    for name, tensor in tensors(model).items():
        assert torch.equal(tensor, weights[name].float()), name


def test_weights_on_the_cpu_are_not_those_of_a_mapped_file(tmp_path: Path) -> None:
    """Who writes the file anew while the model runs would change it, or end its process."""
    save_file(Plain().state_dict(), path := tmp_path / "model.safetensors")
    model = PytorchModelHandlerTensor(state_dict_path=str(path), model_class=Plain).load_model()
    before = {name: tensor.clone() for name, tensor in tensors(model).items()}
    path.write_bytes(b"")
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(model).items())


def test_a_torn_file_of_safetensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(save(Plain().state_dict())[:-10])
    handler = PytorchModelHandlerTensor(state_dict_path=str(path), model_class=Plain)
    with pytest.raises(InputError, match="could not be read as a state dict in safetensors"):
        handler.load_model()


def test_safetensors_take_no_arguments_of_torch_load(tmp_path: Path) -> None:
    save_file(Plain().state_dict(), path := tmp_path / "model.safetensors")
    handler = PytorchModelHandlerTensor(state_dict_path=str(path), model_class=Plain, load_model_args={"mmap": True})
    with pytest.raises(UsageError, match="are for torch.load"):
        handler.load_model()


def test_the_random_state_is_the_ordinary_one_where_a_draw_is_seen(tmp_path: Path) -> None:
    loaded(LeftOver, LeftOver().state_dict(), tmp_path / "model.pt")
    found = torch.get_rng_state()
    ordinarily_loaded(LeftOver, tmp_path / "model.pt")
    assert torch.equal(torch.get_rng_state(), found)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_a_file_that_does_not_fit_is_refused_in_the_words_of_torch(change: str, tmp_path: Path) -> None:
    weights = copy.copy(LeftOver().state_dict())
    if change == "missing":
        del weights["layer.bias"]
    else:
        weights["layer.bias" if change == "shape" else "layer.more"] = torch.zeros(2)
    with pytest.raises(RuntimeError) as expected:
        LeftOver().load_state_dict(weights)
    with pytest.raises(UsageError) as raised:
        loaded(LeftOver, weights, tmp_path / "model.pt")
    assert str(expected.value) in str(raised.value)


def test_loading_does_not_import_the_compiler(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "model.pt")
    code = f"""
import sys, torch
from penstock.handlers.pytorch import PytorchModelHandlerTensor
before = set(sys.modules)
model = {{"model_class": torch.nn.Linear, "model_params": {{"in_features": 3, "out_features": 3}}}}
PytorchModelHandlerTensor(state_dict_path={str(tmp_path / "model.pt")!r}, **model).load_model()
print([name for name in set(sys.modules) - before if name.startswith("torch._")])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
