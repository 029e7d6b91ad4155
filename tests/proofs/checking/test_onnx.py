"""ONNX files are read as PyTorch, which wrote them, means it."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from anydevice._proofs.checking.bounds import SoundNetwork
from anydevice._proofs.checking.network import FormatError, Network, NotSupportedError
from anydevice._proofs.checking.operators import read_onnx
from anydevice._proofs.files import read_model
from anydevice.errors import ConfigurationError, UnsupportedError
from tests.proofs.checking.theorems import executed

torch = pytest.importorskip("torch")
nn = torch.nn


def evaluated(network: Network, x: Any) -> Any:
    return executed(network, np.asarray(x).reshape(1, -1))[0]


def exported(model: Any, shape: tuple[int, ...], opset: int = 17) -> bytes:
    """Export a module; PyTorch needs the onnx package only to add functions of users."""
    utilities = pytest.importorskip("torch.onnx._internal.torchscript_exporter.onnx_proto_utils")
    kept, utilities._add_onnxscript_fn = utilities._add_onnxscript_fn, lambda data, _: data
    file = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model, (torch.zeros(shape),), file, dynamo=False, opset_version=opset,
                do_constant_folding=False, training=torch.onnx.TrainingMode.PRESERVE,
            )  # fmt: skip
    finally:
        utilities._add_onnxscript_fn = kept
    return file.getvalue()


class Of(nn.Module):
    """A layer, and a function of its values."""

    def __init__(self, layer: Any, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Any) -> Any:
        return self.function(self.layer(x))


def numbers(like: Any, *shape: int) -> Any:
    """Constants in the graph, which are no parameters."""
    return torch.arange(np.prod(shape)).reshape(shape).to(like) - 3.5


Case = tuple[Callable[[], Any], tuple[int, ...]]
chain = nn.Sequential


def dense(*layers: Any) -> Case:
    """A dense layer, and others behind it."""
    return lambda: chain(nn.Linear(5, 6), *deepcopy(layers)), (1, 5)


def of_dense(function: Callable[[Any], Any]) -> Case:
    """A function of the values of a dense layer."""
    return lambda: Of(nn.Linear(5, 6), function), (1, 5)


def of_input(function: Callable[[Any], Any], *shape: int) -> Case:
    return lambda: Of(nn.Identity(), function), shape


MODELS: dict[str, Case] = {
    "dense": dense(nn.ReLU(), nn.Linear(6, 3)),
    "without biases": (
        lambda: chain(nn.Linear(5, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)),
        (1, 5),
    ),
    "dense over rows": (lambda: chain(nn.Linear(5, 4), nn.ReLU()), (1, 3, 5)),
    "convolution": (
        lambda: chain(
            nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0), groups=2),
            nn.ReLU(),
            nn.Conv2d(4, 3, 2, dilation=2, bias=False),
            nn.Flatten(),
            nn.Linear(3 * 2 * 4, 3),
        ),
        (1, 2, 8, 7),
    ),
    "convolution of a line": (
        lambda: chain(nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
        (1, 2, 9),
    ),
    "average pooling": (lambda: chain(nn.AvgPool2d(3, 2, padding=1), nn.Flatten()), (1, 2, 7, 6)),
    "average pooling that skips the padding": (
        lambda: nn.AvgPool2d(3, 2, padding=1, count_include_pad=False),
        (1, 2, 7, 6),
    ),
    "mean of channels": (
        lambda: chain(nn.Conv2d(2, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        (1, 2, 4, 5),
    ),
    "max pooling": (
        lambda: chain(nn.Conv2d(2, 3, 2), nn.MaxPool2d(3, 2, padding=1), nn.Flatten()),
        (1, 2, 8, 7),
    ),
    "batch norm": (
        lambda: chain(nn.ReLU(), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten()),
        (1, 2, 3, 4),
    ),
    "batch norm of features": dense(nn.BatchNorm1d(6), nn.ReLU()),
    "leaky relu": dense(nn.LeakyReLU(0.2)),
    "learned slopes": dense(nn.PReLU(6)),
    "clip": dense(nn.Hardtanh(-0.3, 0.4)),
    "clip from below": of_dense(lambda x: x.clamp(min=0.1)),
    "relu6": dense(nn.ReLU6()),
    "abs": of_dense(torch.abs),
    "maximum": of_dense(lambda x: torch.maximum(x[:, :3], x[:, 3:])),
    "minimum": of_dense(lambda x: torch.minimum(x[:, :3], x[:, 3:])),
    "affine layers": dense(nn.Linear(6, 6), nn.Linear(6, 2)),
    "skip": of_dense(lambda x: torch.relu(x) + x - 0.5 * x),
    "twice the same": of_dense(lambda x: x + x),
    "concatenation": of_dense(lambda x: torch.cat([torch.relu(x), x, x * 2.0], 1)),
    "halves": of_dense(lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
    "permuted": (
        lambda: Of(nn.Linear(4, 6), lambda x: x.permute(0, 2, 1).reshape(1, 18).relu()),
        (1, 3, 4),
    ),
    "squeezed": (
        lambda: Of(nn.Linear(4, 6), lambda x: x.squeeze(1).unsqueeze(-1).relu()),
        (1, 1, 4),
    ),
    "affine": of_dense(lambda x: (x * 3.0 - 0.7) / 1.7),
    "normalised input": of_input(lambda x: (x - 0.13) / 0.31, 1, 1, 4, 4),
    "one minus": of_dense(lambda x: 1.0 - x),
    "dropout": dense(nn.Dropout(0.5), nn.ReLU()),
    "mean": (lambda: Of(nn.Linear(5, 6), lambda x: x.mean(1)), (1, 3, 5)),
    "padding": (lambda: chain(nn.ZeroPad2d(1), nn.Conv2d(1, 2, 3)), (1, 1, 3, 3)),
    "sigmoid": dense(nn.Sigmoid(), nn.Linear(6, 2)),
    "tanh": dense(nn.Tanh()),
    "gelu": dense(nn.GELU(), nn.Linear(6, 2)),
    "silu": dense(nn.SiLU(), nn.Linear(6, 2)),
    "product": of_dense(lambda x: x[:, :3] * x[:, 3:]),
    "square": of_dense(lambda x: x**2),
    "quotient": of_dense(lambda x: x[:, :3] / (x[:, 3:] ** 2 + 1)),
    "share of the sum": of_dense(lambda x: x / (x.abs().sum(1, keepdim=True) + 0.5)),
    "number over a tensor": of_dense(lambda x: 2.5 / (x**2 + 1)),
    "matrix times vector": of_input(lambda x: numbers(x, 3, 5) @ x, 5),
    "vector times matrix": of_input(lambda x: x @ numbers(x, 5, 3), 5),
    "matrix times matrix": of_input(lambda x: numbers(x, 3, 5) @ x, 5, 4),
    "group norm": (lambda: nn.GroupNorm(2, 4), (1, 4, 3)),
    "instance norm": (lambda: nn.InstanceNorm2d(2, affine=True), (1, 2, 3, 2)),
    "lstm": (
        lambda: Of(nn.LSTM(3, 2, 2, batch_first=True, bidirectional=True), lambda y: y[0][:, -1]),
        (1, 3, 3),
    ),
    "gru": (lambda: Of(nn.GRU(3, 2), lambda y: y[1][-1]), (4, 2, 3)),
    "rnn": (lambda: Of(nn.RNN(3, 2, batch_first=True), lambda y: y[0]), (1, 4, 3)),
    "rnn of relu": (lambda: Of(nn.RNN(3, 2, nonlinearity="relu"), lambda y: y[0]), (4, 1, 3)),
    "linear upsampling": (lambda: nn.Upsample(None, (2, 1.5), "bilinear"), (1, 2, 3, 4)),
    "linear upsampling from corner to corner": (
        lambda: nn.Upsample((4, 5), None, "bilinear", True),
        (1, 2, 3, 3),
    ),
    "matrices times vector": of_input(lambda x: x @ numbers(x, 4), 2, 5, 4),
    "vector times matrices": of_input(lambda x: numbers(x, 5) @ x, 2, 5, 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_network_computes_what_pytorch_does(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in (*model.parameters(), *model.buffers()):
            if parameter.is_floating_point():
                parameter.copy_(torch.rand_like(parameter) + 0.1 - 0.6 * (parameter.dim() > 1))
    network, softmax = read_onnx(exported(model, shape))
    assert not softmax
    double = model.double()
    for seed in range(5):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()
        want = double(x).detach().numpy().reshape(-1)
        # Constants such as an epsilon or sqrt(2) are rounded to float32 in the file.
        assert evaluated(network, x.numpy()) == pytest.approx(want, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("opset", [11, 13, 18, 20])
def test_other_versions_of_the_operators(opset: int) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GELU(), nn.Flatten(), nn.Linear(8, 6), nn.ReLU())
    model = Of(layers, lambda x: torch.cat([x[:, 1:4], x.mean(1, keepdim=True)], 1)).eval()
    network, _ = read_onnx(exported(model, (1, 1, 4, 4), opset))
    x = torch.randn(1, 1, 4, 4).double()
    want = model.double()(x).detach().numpy().reshape(-1)
    assert evaluated(network, x.numpy()) == pytest.approx(want, rel=1e-6)


def test_a_layer_its_bias_and_its_relu_are_one_node() -> None:
    network, _ = read_onnx(exported(MODELS["dense"][0](), (1, 5)))
    assert [(node.inputs, node.function, node.roundings) for node in network.nodes] == [
        ((0,), "relu", 6),
        ((1,), "", 7),
    ]


def test_a_softmax_at_the_end_is_left_out_and_said() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Softmax(1))
    network, softmax = read_onnx(exported(model, (1, 5)))
    plain, _ = read_onnx(exported(model[0], (1, 5)))
    assert softmax
    assert network.hash() == plain.hash()
    with pytest.raises(NotSupportedError, match="the Softmax that gives"):
        read_onnx(exported(nn.Sequential(model, nn.Linear(3, 2)), (1, 5)))


def test_an_unknown_operator_is_named_before_any_work() -> None:
    model = Of(nn.Linear(5, 6), torch.sin)
    with pytest.raises(NotSupportedError, match=r"the Sin that gives '.*' cannot be proved"):
        read_onnx(exported(model, (1, 5)))


def test_other_functions_of_erf_are_not_taken_for_gelu() -> None:
    for function in (
        torch.erf,
        lambda x: x * (1 + torch.erf(x)),
        lambda x: x * torch.erf(x / 2**0.5),
    ):
        with pytest.raises((NotSupportedError, FormatError)):
            read_onnx(exported(Of(nn.Linear(5, 6), function), (1, 5)))


def test_matrices_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, or together: a chain of convolutions, although each is small enough."""
    monkeypatch.setattr("anydevice._proofs.checking.operators.LARGEST", 1000)
    with pytest.raises(NotSupportedError, match="too large to be built"):
        read_onnx(exported(nn.Conv2d(1, 2, 3), (1, 1, 8, 8)))
    chain = exported(nn.Sequential(*(nn.Conv1d(1, 1, 3, padding=1) for _ in range(5))), (1, 1, 50))
    monkeypatch.setattr("anydevice._proofs.checking.operators.LARGEST", 5 * 50 * 50 * 8)
    assert len(read_onnx(chain)[0].nodes) == 5
    monkeypatch.setattr("anydevice._proofs.checking.operators.LARGEST", 4 * 50 * 50 * 8)
    with pytest.raises(NotSupportedError, match=r"50 x 50 is too large to be built: with .* GiB"):
        read_onnx(chain)


def test_weights_that_are_not_finite_are_refused() -> None:
    model = nn.Linear(5, 3)
    with torch.no_grad():
        model.weight[1, 2] = float("nan")
    with pytest.raises(FormatError, match="infinite or NaN"):
        read_onnx(exported(model, (1, 5)))


def test_errors_of_files_name_them(tmp_path: Any) -> None:
    file = tmp_path / "net.onnx"
    with pytest.raises(ConfigurationError, match=r"net\.onnx"):
        read_model(file)
    file.write_bytes(exported(Of(nn.Linear(5, 6), torch.sin), (1, 5)))
    with pytest.raises(UnsupportedError, match=r"net\.onnx.*Sin"):
        read_model(file)
    file.write_bytes(b"\x12\x34no model")
    with pytest.raises(ConfigurationError, match=r"net\.onnx"):
        read_model(file)


def executions(name: str) -> tuple[Network, Any, Any]:
    """Return the network of a model, random inputs, and its outputs for them in float32."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    network, _ = read_onnx(exported(model, shape))
    x = np.random.default_rng(0).normal(0, 1, (200, *shape)).astype(np.float32)
    with torch.no_grad():
        return network, x, np.array([model(torch.tensor(row)).numpy().reshape(-1) for row in x])


def test_every_operator_that_rounds_says_so() -> None:
    """So that bounds of executions in float32 have room for it: gamma of the node's magnitude."""
    for name in ("affine", "square", "product", "average pooling", "mean", "leaky relu", "skip"):
        network, x, run = executions(name)
        real = np.array([evaluated(network, each) for each in x])
        room = np.array([_room(network, each) for each in x])
        assert (np.abs(run - real) <= room).all(), name
        assert (run != real).any(), name


@pytest.mark.parametrize("name", ["quotient", "share of the sum", "number over a tensor"])
def test_bounds_of_quotients_contain_every_execution(name: str) -> None:
    network, x, run = executions(name)
    points = x.reshape(len(x), -1).astype(float)
    found = SoundNetwork(network, "float32").bounds(points, points)
    low, high = (each[len(network.nodes)] for each in (found.low, found.high))
    assert ((low <= run) & (run <= high)).all()
    assert (high - low < 0.01).all()


def _room(network: Network, x: Any) -> Any:
    """How far the outputs of an execution at a point may be from the exact ones."""
    values, rooms = [np.abs(x.reshape(-1)).astype(float)], [np.zeros(x.size)]
    for node in network.nodes:
        size, room = np.abs(node.bias), np.zeros(node.size)
        for i, weight in zip(node.inputs, node.weights, strict=True):
            matrix = np.abs(np.diag(weight) if weight.ndim == 1 else weight)
            size, room = size + matrix @ values[i], room + matrix @ rooms[i]
        room = room + (1.01 * node.roundings * 2.0**-24 + 2 * node.inexact) * (size + room)
        if node.function == "square":
            size, room = size * size, 2 * size * room + room * room
        values.append(size)
        rooms.append(room)
    return rooms[-1] + 1e-12
