"""GRU and LSTM against torch's own, with their gradients, and under the compilers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops
from anydevice._core.device import Device
from anydevice._machine.engines import registry
from anydevice._nn.layer import Layer
from tests.nn.test_layers import CLOSE, example, parameters_of

Array = np.ndarray[Any, Any]

THEIRS = {
    "input": "weight_ih_l0",
    "recurrent": "weight_hh_l0",
    "input_bias": "bias_ih_l0",
    "recurrent_bias": "bias_hh_l0",
}


def of_torch(layer: nn.GRU | nn.LSTM, parameters: Any, x: Array) -> tuple[Array, dict[str, Array]]:
    """The output, and the gradients of the sum of output³."""
    torch = pytest.importorskip("torch")
    kind = getattr(torch.nn, type(layer).__name__)
    module = kind(layer.inputs, layer.outputs, bias=layer.bias, batch_first=True)
    module.load_state_dict({THEIRS[name]: torch.tensor(own) for name, own in parameters.items()})
    given = torch.tensor(x, requires_grad=True)
    y = module(given)[0]
    y = y[:, -1] if layer.last else y
    (y**3).sum().backward()
    gradients = {name: getattr(module, THEIRS[name]).grad.numpy() for name in parameters}
    return y.detach().numpy(), {**gradients, "x": given.grad.numpy()}


def loss_of(layer: Layer) -> Any:
    def loss(given: Any) -> Any:
        y = layer.apply(given, given["x"], nn.Run(training=True))
        return ops.sum(ops.multiply(y, ops.multiply(y, y)))

    return loss


def assert_gradients(found: Any, expected: dict[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        within = 64 * CLOSE * max(1.0, np.abs(value).max())
        np.testing.assert_allclose(anydevice.to_numpy(found[name]), value, 0, within, err_msg=name)


@pytest.mark.parametrize(("last", "bias"), [(False, True), (True, False)])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_it_computes_what_torch_does(kind: Any, last: bool, bias: bool, trainable: Device) -> None:
    layer = kind(4, 5, last=last, bias=bias)
    parameters, x = parameters_of(layer), example(layer, (6, 4))
    expected, gradients = of_torch(layer, parameters, x)
    there = anydevice.to_device({**parameters, "x": x}, trainable)
    y = layer.apply(there, there["x"], nn.Run())
    np.testing.assert_allclose(anydevice.to_numpy(y), expected, CLOSE, CLOSE)
    autodiff = registry.load(trainable.engine or "").autodiff
    _, found = autodiff.value_and_grad(loss_of(layer))(there)
    assert_gradients(found, gradients)


def test_a_long_sequence_is_compiled_as_one_loop() -> None:
    """The size of what XLA gets does not grow with the time."""
    jax = pytest.importorskip("jax")
    layer = nn.LSTM(4, 5)
    parameters = parameters_of(layer)

    def size(time: int) -> int:
        loss = jax.grad(loss_of(layer))
        return len(str(jax.make_jaxpr(loss)({**parameters, "x": example(layer, (time, 4))})))

    assert size(300) < 1.1 * size(30)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_long_sequence_is_one_op_to_the_compiler_of_torch(kind: Any) -> None:
    """Written out, a hundred steps would take it minutes; gradients stay those of torch."""
    torch = pytest.importorskip("torch")
    common = pytest.importorskip("torch._dynamo.backends.common")
    boxed = pytest.importorskip("functorch.compile").make_boxed_func
    layer = kind(4, 5)
    parameters, x = parameters_of(layer), example(layer, (100, 4))
    expected, gradients = of_torch(layer, parameters, x)
    graphs: list[Any] = []

    def as_it_is(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return boxed(graph.forward)

    backend = common.aot_autograd(
        fw_compiler=as_it_is, bw_compiler=as_it_is, inference_compiler=as_it_is
    )
    loss = torch.compile(loss_of(layer), fullgraph=True, backend=backend)
    device = anydevice.device("cpu", engine="torch")
    there = anydevice.to_device({**parameters, "x": x}, device)
    _, found = registry.load("torch").autodiff.value_and_grad(loss)(there)
    assert_gradients(found, gradients)
    assert len(graphs) == 2
    assert all(len(graph.graph.nodes) < 40 for graph in graphs), "both ways, one op"
    apply = torch.compile(lambda given: layer.apply(given, given["x"], nn.Run()), backend=backend)
    np.testing.assert_allclose(apply(there).numpy(), expected, CLOSE, CLOSE)
