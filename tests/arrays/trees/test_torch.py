"""PyTorch in trees: modules and optimizers in place, packed sequences anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.testing._internal.two_tensor import TwoTensor

import anydevice
from anydevice._arrays.trees.tree import flatten
from anydevice.errors import ConfigurationError, TransferError


def is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def paths(tree: object) -> list[str]:
    return [leaf.path for leaf in flatten(tree, is_array)[0]]


def widened(tree: Any) -> Any:
    """The tree with each tensor as another in float64, as if it had been moved."""
    leaves, rebuild = flatten(tree, is_array)
    return rebuild([leaf.value.detach().double() for leaf in leaves])


class Tied(torch.nn.Module):
    """Two layers with one weight, a buffer, and an attribute that is no part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, bias=False)]
        )
        self.layers[1].weight = self.layers[0].weight
        self.layers[1].weight.requires_grad_(False)
        self.again = self.layers[0]
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("none", None)
        self.plain = torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x - self.mean


def test_a_module_is_changed_in_place_and_its_parameters_stay_the_same_objects() -> None:
    model = Tied().eval()
    parameters = dict(model.named_parameters())
    called: list[Any] = []
    model.register_forward_hook(lambda *args: called.append(args))
    assert paths(model) == ["mean", "layers[0].weight", "layers[0].bias"]
    assert widened(model) is model
    assert dict(model.named_parameters()).keys() == parameters.keys()
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert parameter.dtype == torch.float64
    assert model.layers[1].weight is model.layers[0].weight
    assert model.again is model.layers[0]
    assert not model.layers[0].weight.requires_grad
    assert model.layers[0].bias.requires_grad
    assert model.mean.dtype == torch.float64
    assert model.plain.dtype == torch.float32
    assert not model.training
    assert model(torch.ones(1, 3, dtype=torch.float64)).dtype == torch.float64
    assert len(called) == 1


def test_what_does_not_change_is_not_touched() -> None:
    model = Tied()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    buffer = model.mean
    leaves, rebuild = flatten(model, is_array)
    assert rebuild([leaf.value for leaf in leaves]) is model
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert model.mean is buffer


def test_gradients_move_with_their_parameters() -> None:
    model = torch.nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    gradient = model.weight.grad
    assert paths(model) == ["weight", "weight.grad", "bias", "bias.grad"]
    widened(model)
    assert model.weight.grad is gradient
    assert model.weight.grad.dtype == torch.float64
    assert model.weight.grad.tolist() == [[1, 1]]


def test_a_gradient_can_change_alone_and_values_are_not_copied() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    model(torch.ones(1, 2)).sum().backward()
    leaves, rebuild = flatten(model, is_array)
    rebuild([leaves[0].value, torch.full((1, 2), 7.0)])
    assert model.weight.grad.tolist() == [[7, 7]]
    new = torch.ones(1, 2)
    rebuild([new, leaves[1].value])
    assert model.weight.data_ptr() == new.data_ptr()


def test_a_parameter_in_and_outside_a_module_stays_one_object() -> None:
    model = torch.nn.Linear(2, 2)
    for tree in ({"w": model.weight, "model": model}, {"model": model, "w": model.weight}):
        assert widened(tree)["w"] is model.weight
    assert model.weight.dtype == torch.float64


@pytest.mark.parametrize("with_gradient", [True, False])
def test_a_tensor_made_of_tensors_takes_a_parameters_place(with_gradient: bool) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    weight = model.weight
    if with_gradient:
        weight.grad = torch.ones(1, 2)
    leaves, rebuild = flatten(model, is_array)
    rebuild([TwoTensor(leaf.value.detach(), leaf.value.detach()) for leaf in leaves])
    assert model.weight is weight
    assert type(weight.data) is TwoTensor
    assert weight.requires_grad
    assert isinstance(weight.grad, TwoTensor) == with_gradient


def test_recurrent_layers_and_special_containers_work_after_the_move() -> None:
    model = torch.nn.ModuleDict(
        {
            "rnn": torch.nn.LSTM(2, 3),
            "norm": torch.nn.BatchNorm1d(3),
            "some": torch.nn.ParameterList([torch.zeros(1)]),
        }
    )
    assert {"rnn.weight_ih_l0", "norm.running_mean", "some[0]"} <= set(paths(model))
    widened(model)
    output, _ = model["rnn"](torch.ones(4, 1, 2, dtype=torch.float64))
    assert model["norm"](output[:, 0]).dtype == torch.float64
    assert model["rnn"]._flat_weights[0] is model["rnn"].weight_ih_l0


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_module_moves_as_any_other() -> None:
    model = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    assert {"[0].weight", "[1].running_mean"} <= set(paths(model))
    leaves, rebuild = flatten(model, is_array)
    rebuild([torch.full_like(leaf.value, 3) for leaf in leaves])
    state = model.state_dict().values()
    assert all(bool((tensor == 3).all()) for tensor in state)


def test_a_module_refuses_what_is_no_tensor_before_anything_changes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    leaves, rebuild = flatten({"model": model}, is_array)
    values = [leaf.value.detach().double() for leaf in leaves]
    values[-1] = values[-1].numpy()
    with pytest.raises(
        TransferError,
        match=r"^\['model'\]\[1\]\.bias: a torch\.nn\.modules\.linear\.Linear is changed in place "
        r".*numpy\.ndarray; move its state_dict\(\) instead$",
    ) as caught:
        rebuild(values)
    assert caught.value.path == "['model'][1].bias"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert widened(model.state_dict())["0.weight"].dtype == torch.float64


def test_a_change_that_torch_refuses_names_the_module_but_for_memory() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    leaves, rebuild = flatten(model, is_array)
    sparse = [leaf.value.detach().to_sparse() for leaf in leaves]
    with pytest.raises(TransferError, match=r"^\[0\]: a .*Linear could not be changed: Runtime"):
        rebuild(sparse)

    class Full(torch.nn.Linear):
        def flatten_parameters(self) -> None:
            raise MemoryError

    with pytest.raises(MemoryError):
        widened(Full(1, 1))


def test_modules_that_hold_their_parent_are_refused_by_name() -> None:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    model.layers[0].add_module("parent", model)
    with pytest.raises(TransferError, match=r"^layers\[0\]\.parent: the tree contains .*\(Module"):
        flatten(model, is_array)


@pytest.mark.parametrize(
    ("options", "moves_step"),
    [({}, False), ({"capturable": True}, True), ({"fused": True}, True)],
    ids=str,
)
def test_an_optimizers_state_moves_in_place(options: dict[str, bool], moves_step: bool) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0].update(options)
    entry = optimizer.state[model.weight]
    assert ("state[1]['step']" in paths(optimizer)) == moves_step
    assert "state[1]['exp_avg']" in paths(optimizer)
    both = {"model": model, "optimizer": optimizer}
    new = widened(both)
    assert new["optimizer"] is optimizer
    assert optimizer.state[model.weight] is entry
    assert entry["exp_avg"].dtype == torch.float64
    assert (entry["step"].dtype == torch.float64) == moves_step
    optimizer.param_groups[0].update(dict.fromkeys(options, False))
    optimizer.step()


def test_an_optimizer_alone_leaves_the_parameters_to_the_model() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    weight.sum().backward()
    optimizer.step()
    assert paths(optimizer) == ["state[0]['momentum_buffer']"]
    widened(optimizer)
    assert weight.dtype == torch.float32


def test_lists_in_an_optimizers_state_stay_the_same_lists() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([weight], max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    directions = optimizer.state[weight]["old_dirs"]
    assert "state[0]['old_dirs'][0]" in paths(optimizer)
    widened(optimizer)
    assert optimizer.state[weight]["old_dirs"] is directions
    assert directions[0].dtype == torch.float64


def test_state_that_belongs_to_no_parameter_moves_too() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    optimizer.state["shared"] = torch.ones(1)
    optimizer.state[torch.ones(1)] = {"left": (torch.ones(1), 1)}
    assert paths(optimizer) == ["state['shared']", "state[1]['left'][0]"]
    widened(optimizer)
    assert optimizer.state["shared"].dtype == torch.float64


def test_a_packed_sequence_keeps_its_batch_sizes_on_the_host() -> None:
    packed = pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False)
    assert paths({"x": packed}) == [
        f"['x'].{name}" for name in ("data", "sorted_indices", "unsorted_indices")
    ]
    new = widened(packed)
    assert type(new) is type(packed)
    assert new.data.dtype == torch.float64
    assert new.batch_sizes is packed.batch_sizes


def test_what_torch_functions_return_is_rebuilt_by_name() -> None:
    found = torch.max(torch.ones(2, 2), 0)
    assert paths(found) == ["values", "indices"]
    new = widened(found)
    assert type(new) is type(found)
    assert new.values.dtype == torch.float64
    tree = [torch.Generator(), np.random.default_rng(0)]  # these are left alone
    assert paths(tree) == []
    assert widened(tree) is tree


@pytest.fixture
def saved_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose tensors say that they were saved from `cuda:0`; two of them share memory."""
    memory = torch.arange(6, dtype=torch.float32)
    path = tmp_path / "weights.pt"
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"all": memory, "tail": memory[4:], "half": torch.ones(2).bfloat16()}, path)
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="then the file loads without anydevice too")
def test_a_device_says_where_torch_loads_to(saved_on_a_gpu: Path) -> None:
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(saved_on_a_gpu)
    for engine in (None, "torch"):
        loaded = torch.load(saved_on_a_gpu, map_location=anydevice.device("cpu", engine=engine))
        assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}
        assert loaded["half"].dtype == torch.bfloat16
        loaded["all"][5] = 7
        assert loaded["tail"].tolist() == [4, 7]


def test_a_storage_is_moved_as_any_array_and_two_are_a_tree() -> None:
    storage = torch.arange(3).untyped_storage()
    tree = anydevice.to_device({"storage": storage}, "cpu")
    assert list(tree["storage"]) == list(storage)
    assert isinstance(tree["storage"], torch.UntypedStorage)
    with pytest.raises(ConfigurationError, match=r"device\(\(x, y\)\)"):
        anydevice.device("cpu")(torch.ones(1), torch.ones(1))
