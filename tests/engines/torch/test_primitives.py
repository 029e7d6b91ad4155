"""What is peculiar to PyTorch: its compiler, its tape, and our kernels before its functions."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anydevice._core.dtypes import DTYPES
from anydevice.errors import ConfigurationError, UnsupportedError
from tests.comparing import assert_close

torch = pytest.importorskip("torch")

from anydevice._engines.torch import fused
from anydevice._engines.torch.autodiff import AUTODIFF
from anydevice._engines.torch.compiler import COMPILER
from anydevice._engines.torch.primitives import PRIMITIVES as xp  # noqa: N811

FLOAT32, INT32 = DTYPES["float32"], DTYPES["int32"]


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def looked_through(function: Any) -> Any:
    """The function as PyTorch's compiler sees it, without making code of it."""
    return torch.compile(function, fullgraph=True, backend="eager")


def every_primitive(x: Any, indices: Any, cache: Any, new: Any, positions: Any) -> list[Any]:
    ours = xp.dtype(x)
    some = xp.less(x, 0.5)
    unary = (xp.abs, xp.negative, xp.sign, xp.floor, xp.exp, xp.sin, xp.cos, xp.tanh, xp.sigmoid)
    binary = (xp.add, xp.subtract, xp.multiply, xp.divide, xp.maximum, xp.minimum, xp.equal)
    positive = xp.add(xp.abs(x), 1)
    return [
        xp.full((2,), 3.0, ours, x),
        xp.arange(4, INT32, x),
        xp.asarray(np.array([1.0, 2.0], np.float32), x),
        xp.astype(x, DTYPES["bfloat16"]),
        xp.astype(x, FLOAT32 if ours.bits == 16 else ours),
        xp.reshape(x, (-1,)),
        xp.permute_dims(x, (1, 0)),
        xp.broadcast_to(x, (2, *x.shape)),
        xp.concat([x, x], 0),
        xp.slice_axis(x, -1, 0, 4, 2),
        *(function(x) for function in unary),
        *(function(x, 2.0) for function in binary),
        *(function(2, x) for function in binary),
        *(function(positive) for function in (xp.log, xp.sqrt, xp.rsqrt, xp.erf)),
        xp.pow(positive, 2.0),
        xp.isnan(x),
        xp.less_equal(x, x),
        xp.logical_not(some),
        xp.logical_and(some, True),
        xp.logical_or(False, some),
        xp.where(some, x, 0),
        xp.sum(x, (0, 1)),
        xp.max(x, -1, True),
        xp.min(x, 0),
        xp.argmax(x, -1),
        *xp.top_k(x, 2),
        xp.matmul(x, xp.permute_dims(x, (1, 0))),
        xp.take(x, indices, 0),
        xp.take_along_axis(x, indices[:, None], 1),
        xp.write(cache, new, positions),
    ]


def test_the_compiler_looks_through_every_primitive() -> None:
    def arguments() -> list[Any]:
        torch.manual_seed(0)
        indices, positions = torch.tensor([0, 2, 9]), torch.tensor([[5, 1, -1]])
        cache, new = torch.zeros(1, 2, 6, 4), torch.randn(1, 2, 3, 4)
        return [torch.randn(3, 4), indices, cache, new, positions]

    found = looked_through(every_primitive)(*arguments())
    for one, other in zip(found, every_primitive(*arguments()), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


loading_its_compiler = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
"""PyTorch warns of a part of itself that its compiler imports."""


def decode(x: Any, cache: Any, position: Any) -> tuple[Any, Any]:
    """One token through something like attention, with the position on the device."""
    cache = xp.write(cache, x, xp.reshape(position, (1, 1)))
    keys = xp.arange(cache.shape[2], INT32, x)
    scores = xp.matmul(x, xp.permute_dims(cache, (0, 1, 3, 2)))
    scores = xp.where(xp.less_equal(keys, position), scores, float("-inf"))
    weights = fused.FUSED["softmax"](scores, -1)
    return xp.matmul(weights, cache), cache


@loading_its_compiler
def test_a_static_cache_is_compiled_for_once() -> None:
    torch.manual_seed(0)
    tokens = torch.randn(20, 1, 2, 1, 4)
    compiled = COMPILER.compile(decode, donate=["cache"])
    cache, plain = torch.zeros(1, 2, 32, 4), torch.zeros(1, 2, 32, 4)
    torch._dynamo.utils.counters.clear()
    for number, token in enumerate(tokens):
        position = torch.tensor([number], dtype=torch.int32)
        found, cache = compiled(token, cache, position)
        expected, plain = decode(token, plain, position)
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(cache, plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_more_shapes_than_pytorch_would_take_by_itself(monkeypatch: Any) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **k: compile_(f, backend="eager", **k))
    compiled = COMPILER.compile(lambda x: xp.add(x, 1))
    for size in range(2, 14):
        assert compiled(torch.zeros(size)).shape == (size,)


def test_static_arguments_are_constants(monkeypatch: Any) -> None:
    compile_ = torch.compile
    made = []

    def counted(function: Any, **options: Any) -> Any:
        made.append(function)
        return compile_(function, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", counted)

    def function(x: Any, power: int, y: Any = 1.0, *, mode: str = "add") -> Any:
        return xp.add(xp.pow(x, power), y) if mode == "add" else xp.multiply(x, y)

    compiled = COMPILER.compile(function, static=["mode", "power"])
    x = torch.tensor([2.0, 3.0])
    assert compiled(x, 2).tolist() == [5, 10]
    assert compiled(x, power=2, y=x).tolist() == [6, 12]
    assert len(made) == 1
    assert compiled(x, 3, mode="add").tolist() == [9, 28]
    assert compiled(x, 3, x, mode="multiply").tolist() == [4, 9]
    assert len(made) == 3
    with pytest.raises(ConfigurationError, match="no argument colour; it has"):
        COMPILER.compile(function, static=["colour"])


@loading_its_compiler
def test_a_gradient_through_compiled_and_checkpointed_code() -> None:
    def layer(x: Any, weight: Any) -> Any:
        return xp.tanh(xp.matmul(x, weight))

    def loss(parameters: Any, x: Any) -> Any:
        x = AUTODIFF.checkpoint(layer)(x, parameters["layers"][0])
        return xp.sum(xp.multiply(x, parameters["scale"]), (0, 1))

    torch.manual_seed(0)
    parameters = {"layers": [torch.randn(4, 4)], "scale": torch.randn(4), "none": None}
    x = torch.randn(3, 4)
    value, gradient = AUTODIFF.value_and_grad(loss)(parameters, x)
    assert not value.requires_grad
    assert gradient["none"] is None
    again, compiled = AUTODIFF.value_and_grad(COMPILER.compile(loss))(parameters, x)
    torch.testing.assert_close(again, value)
    torch.testing.assert_close(compiled["layers"][0], gradient["layers"][0])
    torch.testing.assert_close(compiled["scale"], gradient["scale"])
    y = torch.tanh(x @ parameters["layers"][0])
    torch.testing.assert_close(gradient["scale"], y.sum(0))


def test_gradients_come_in_the_containers_of_the_argument() -> None:
    pair = namedtuple("pair", "b a")
    tree = pair(OrderedDict(z=torch.ones(1), y=None), (torch.ones(2), [torch.ones(3)]))
    _, found = AUTODIFF.value_and_grad(lambda t: xp.sum(t.b["z"], 0))(tree)
    assert isinstance(found, pair)
    assert type(found.b) is OrderedDict
    assert list(found.b) == ["z", "y"]
    assert [type(part) for part in found.a] == [torch.Tensor, list]


def test_gradients_of_what_is_not_used_are_zero() -> None:
    leaves = [torch.ones(2), torch.ones(3)]
    with torch.no_grad():
        value, gradient = AUTODIFF.value_and_grad(lambda t: xp.sum(t[0], 0))(leaves)
    assert float(value) == 2
    assert [part.tolist() for part in gradient] == [[1, 1], [0, 0, 0]]
    _, gradient = AUTODIFF.value_and_grad(lambda t: torch.tensor(1.0))(leaves)
    assert not gradient[0].any()
    assert AUTODIFF.value_and_grad(lambda t: torch.tensor(1.0))([]) == (torch.tensor(1.0), [])
    stopped = AUTODIFF.value_and_grad(lambda x: xp.sum(AUTODIFF.stop_gradient(x), 0))(leaves[0])
    assert not stopped[1].any()


def test_a_gradient_of_a_gradient() -> None:
    def slope(x: Any, y: Any) -> Any:
        cubed = AUTODIFF.value_and_grad(lambda z: xp.sum(xp.multiply(xp.pow(z, 3), y), 0))
        return xp.sum(cubed(x)[1], 0)

    x, y = torch.tensor([2.0]), torch.tensor([5.0])
    assert AUTODIFF.value_and_grad(slope)(x, y)[1].tolist() == [60.0]
    by_the_other = AUTODIFF.value_and_grad(lambda b: slope(x, b))(y)
    assert by_the_other[1].tolist() == [12.0]


@pytest.mark.parametrize(
    ("tree", "where"),
    [({"step": torch.ones(1, dtype=torch.int32)}, r"\['step'\]"), (3.0, "the first argument")],
)
def test_there_is_no_gradient_by_what_is_not_a_floating_array(tree: Any, where: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{where}.*another argument"):
        AUTODIFF.value_and_grad(lambda t: torch.tensor(1.0))(tree)


def test_sums_of_truths_are_counts_and_bits_are_refused() -> None:
    x = torch.ones(300, 2, dtype=torch.bool)
    assert xp.sum(x, 0).tolist() == [300, 300]
    assert xp.sum(x, ()).dtype == xp.sum(x, 0).dtype == torch.int32
    with pytest.raises(UnsupportedError):
        xp.dtype(torch.empty(2, dtype=torch.bits8))


def test_writing_is_in_place_unless_the_tape_needs_what_was_there() -> None:
    new, positions = torch.ones(1, 1, 1, 2), torch.tensor([[1]])
    x = torch.zeros(1, 1, 3, 2)
    assert xp.write(x, new, positions).data_ptr() == x.data_ptr()
    leaf = torch.zeros(1, 1, 3, 2, requires_grad=True)
    written = xp.write(leaf, new, positions)
    assert not leaf.any()
    (gradient,) = torch.autograd.grad(written.sum(), leaf)
    assert gradient[0, 0, :, 0].tolist() == [1, 0, 1]
    spread = torch.zeros(1, 1, 1, 2).expand(1, 1, 3, 2)
    assert xp.write(spread, new, positions)[0, 0, :, 0].tolist() == [0, 1, 0]


def test_the_compiler_looks_through_every_fast_version() -> None:
    x, q = torch.randn(3, 8), torch.randn(1, 4, 5, 8)
    k, lengths = torch.randn(1, 2, 5, 8), torch.tensor([4])

    def all_of_them(x: Any, q: Any, k: Any, lengths: Any) -> list[Any]:
        own = fused.FUSED
        return [
            own["rmsnorm"](x, x[0], 1e-6),
            own["layernorm"](x, x[0], None, 1e-5),
            own["swiglu"](x, x),
            own["gelu"](x, True),
            own["cross_entropy"](x, torch.tensor([1, 2, -1])),
            own["attention"](q, k, k, True, None, None, None, None),
            own["attention"](q, k, k, True, None, None, 2, lengths),
            own["attention"](q, k, k, False, None, None, None, None),
        ]

    found = looked_through(all_of_them)(x, q, k, lengths)
    for one, other in zip(found, all_of_them(x, q, k, lengths), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_what_pytorch_does_otherwise_is_handed_over() -> None:
    x, half, own = torch.ones(2, 4), torch.ones(4, dtype=torch.bfloat16), fused.FUSED
    for result in (
        own["mean"](x.to(torch.int32), (0,), False),
        own["mean"](x, (), False),
        own["rmsnorm"](x, half, 1e-6),
        own["layernorm"](x, None, half, 1e-5),
        own["cross_entropy"](torch.ones(2, 0), torch.zeros(2, dtype=torch.int64)),
        own["max_pool2d"](x[None, None].to(torch.int32), (2, 2), None),
        own["avg_pool2d"](x[None, None].to(torch.int32), (2, 2), None),
        own["update_adam"]([x], [x], [x], [half], 1, 0.1, 0.9, 0.9, 1e-8, 0.0, True),
    ):
        assert result is NotImplemented


def test_a_kernel_is_asked_first_for_arrays_on_cuda(monkeypatch: Any) -> None:
    def kernel(x: Any, how: str) -> Any:
        return NotImplemented if how == "own" else "kernel"

    both = fused.kernels_first({"silu": lambda x, how: "own"}, {"silu": kernel, "rope": kernel})
    there = [SimpleNamespace(is_cuda=True)]
    assert both["silu"](there, "kernel") == "kernel"
    assert both["silu"](there, "own") == "own"
    assert both["silu"]([torch.ones(1)], "kernel") == "own"
    assert both["rope"](there, "own") is NotImplemented
    assert both["rope"](torch.ones(1), "kernel") is NotImplemented
    image = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    assert fused._conv2d(image, None, None, (1, 1), (0, 0)) is NotImplemented


def test_updates_that_one_kernel_cannot_serve_are_handed_over() -> None:
    p, g = [torch.ones(2)], [torch.ones(2)]
    sgd = fused.update_sgd
    assert sgd(p, [torch.ones(2, dtype=torch.bfloat16)], None, 0.1, 0, 0, False) is NotImplemented
    assert sgd(p, g, None, torch.tensor(0.1), 0, 0, False) is NotImplemented
    assert sgd([torch.ones(2, requires_grad=True)], g, None, 0.1, 0, 0, False) is NotImplemented
    assert sgd([torch.ones(2, device="meta")], g, None, 0.1, 0, 0, False) is NotImplemented
    with torch.no_grad():
        moved, _ = sgd([torch.ones(2, requires_grad=True)], g, None, 0.5, 0, 0, False)
    assert moved[0].tolist() == [0.5, 0.5]

    def compiled(p: Any, g: Any) -> Any:
        return sgd([p], [g], None, 0.1, 0, 0, False) is NotImplemented

    assert looked_through(compiled)(p[0], g[0])


def test_an_update_takes_its_step_from_the_device() -> None:
    lists = [[torch.ones(2)] for _ in range(4)]
    options = (0.1, 0.9, 0.999, 1e-8, 0.0, True)
    ours = fused.update_adam(*lists, 3, *options)
    theirs = fused.update_adam(*lists, torch.tensor(3, dtype=torch.int32), *options)
    for x, y in zip(ours, theirs, strict=True):
        assert_close(x[0], y[0], terms=8)
    assert lists[0][0].tolist() == [1, 1]


def test_the_order_of_kernels_is_that_of_the_card(monkeypatch: Any) -> None:
    query = SimpleNamespace(is_cuda=True, shape=(1, 2, 64, 8), device="a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fused, "_orders", {})
    with fused._kernel_order(query):
        first = torch._C._get_sdp_priority_order()[0]
    assert first == int(fused.PREFER[9, 0][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    before = torch._C._get_sdp_priority_order()
    fused._orders.clear()
    with fused._kernel_order(query):
        assert torch._C._get_sdp_priority_order() == before
