"""Whole ops on every engine, by its own fast version where it has one, against the reference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from anydevice import ops
from anydevice._check import reference
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._core.engine import Absent, Engine
from anydevice._core.primitives import Autodiff

from .combinations import each
from .home import Home

ONE_DEVICE = True  # see conftest.py
TOLERANCE = {"float32": 2e-5, "float64": 2e-5, "float16": 2.0**-9, "bfloat16": 2.0**-6}
"""The float64 figure is that of rotary angles, which are float32 everywhere."""

FLOAT_RESULT = ("cross_entropy", "mean_squared_error")
NAN, INF = float("nan"), float("inf")


def draw(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape)


def heads(queries: int, keys: int, kv_heads: int = 2) -> tuple[Any, ...]:
    q = draw(2, 4, queries, 8)
    return q, draw(2, kv_heads, keys, 8, seed=1), draw(2, kv_heads, keys, 8, seed=2)


def some(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).random(shape) < 0.6


LENGTHS = np.array([6, 3])
FAR = np.array([900, 7])
IMAGE = draw(2, 3, 7, 6)
P, G, M, S = ([draw(3, 4, seed=at), draw(5, seed=at + 1)] for at in (0, 2, 4, 6))
S = [np.abs(x) for x in S]

# An op, its arguments in the order of its signature, and which of them the reference takes by name.
CASES: dict[str, tuple[str, tuple[Any, ...], tuple[str, ...]]] = {
    "linear": ("linear", (draw(2, 3, 16), draw(5, 16, seed=1), None), ()),
    "linear with a bias": ("linear", (draw(3, 16), draw(5, 16, seed=1), draw(5)), ()),
    "relu": ("relu", (draw(3, 5),), ()),
    "silu": ("silu", (draw(3, 5) * 4,), ()),
    "gelu": ("gelu", (draw(3, 5) * 2, False), ()),
    "gelu by tanh": ("gelu", (draw(3, 5) * 2, True), ()),
    "swiglu": ("swiglu", (draw(3, 5) * 3, draw(3, 5, seed=1)), ()),
    "softmax": ("softmax", (draw(3, 5, 4), -1), ()),
    "softmax along the first": ("softmax", (draw(3, 5, 4), 0), ()),
    "softmax of large numbers": ("softmax", (draw(3, 5) * 1000, 1), ()),
    "log_softmax": ("log_softmax", (draw(3, 5, 4), 1), ()),
    "mean": ("mean", (draw(3, 5, 4), (0, 2), False), ()),
    "mean of nothing": ("mean", (draw(3, 5), (), False), ()),
    "mean, axes kept": ("mean", (draw(3, 5, 4), (1,), True), ()),
    "rmsnorm": ("rmsnorm", (draw(4, 32), draw(32, seed=1), 1e-6), ()),
    "rmsnorm of little": ("rmsnorm", (draw(4, 32) * 1e-3, draw(32, seed=1), 1e-2), ()),
    "layernorm": ("layernorm", (draw(4, 32) + 3, draw(32, seed=1), draw(32, seed=2), 1e-5), ()),
    "layernorm without a bias": ("layernorm", (draw(4, 32), draw(32, seed=1), None, 1e-5), ()),
    "layernorm alone": ("layernorm", (draw(4, 32), None, None, 1e-5), ()),
    "embedding": ("embedding", (draw(7, 4), np.array([[0, 6], [3, 3]])), ()),
    "cross_entropy": ("cross_entropy", (draw(2, 3, 9), np.array([[0, 8, 4], [1, 1, 2]])), ()),
    "mean_squared_error": ("mean_squared_error", (draw(3, 4), draw(3, 4, seed=1)), ()),
    "conv2d": ("conv2d", (IMAGE, draw(4, 3, 3, 2, seed=1), None, (1, 1), (0, 0)), ()),
    "conv2d, all": ("conv2d", (IMAGE, draw(4, 3, 3, 2, seed=1), draw(4), (2, 1), (1, 2)), ()),
    "max_pool2d": ("max_pool2d", (IMAGE, (2, 3), None), ()),
    "max_pool2d, overlapping": ("max_pool2d", (IMAGE, (3, 2), (1, 2)), ()),
    "avg_pool2d": ("avg_pool2d", (IMAGE, (2, 2), None), ()),
    "avg_pool2d, overlapping": ("avg_pool2d", (IMAGE, (3, 3), (2, 1)), ()),
}
ROPE = ("theta", "interleaved", "scaling")
for label, arguments in {
    "rope": (draw(2, 3, 5, 8), np.arange(5), 10000.0, False, None),
    "rope of pairs": (draw(2, 3, 5, 8), np.arange(5), 500.0, True, None),
    "rope by sequence": (draw(2, 3, 2, 8), np.array([[0, 1], [7, 90]]), 10000.0, False, None),
    "rope, scaled": (draw(2, 3, 2, 8), np.arange(2), 1e4, False, {"type": "linear", "factor": 2}),
}.items():
    CASES[label] = ("rope", arguments, ROPE)
ATTENTION = ("causal", "scale", "mask", "window", "lengths")
for label, arguments in {
    "attention": (*heads(5, 7), False, None, None, None, None),
    "attention of one head each": (*heads(5, 5, 4), True, None, None, None, None),
    "attention, causal": (*heads(5, 5), True, 0.3, None, None, None),
    "attention, causal, later": (*heads(3, 7), True, None, None, None, None),
    "attention of one query": (*heads(1, 7), True, None, None, None, None),
    "attention, window": (*heads(6, 6), True, None, None, 2, None),
    "attention, lengths": (*heads(2, 8), False, None, None, None, LENGTHS),
    "attention, causal, lengths": (*heads(2, 8), True, None, None, None, LENGTHS),
    "attention of more queries than keys": (*heads(4, 8), True, None, None, None, LENGTHS),
    "attention, all": (*heads(2, 8), True, 0.5, some(2, 8), 3, LENGTHS),
    "attention, padding": (*heads(3, 5), False, None, some(2, 5), None, None),
    "attention, a mask for each head": (*heads(3, 5), False, None, some(2, 4, 3, 5), None, None),
    "attention, one mask": (*heads(3, 5), True, None, some(1, 1, 3, 5), None, None),
    "attention, a mask of three axes": (*heads(3, 5), False, None, some(4, 3, 5), None, None),
    "attention of nothing seen": (*heads(3, 5), False, None, np.zeros((2, 5), bool), None, None),
    "attention of one query, a long cache": (*heads(1, 1000), True, 0.2, None, None, FAR),
    "attention of one query, a window": (*heads(1, 1000), True, None, None, 300, FAR),
    "attention of empty sequences": (*heads(1, 4), True, None, None, None, np.array([0, 4])),
}.items():
    CASES[label] = ("attention", arguments, ATTENTION)
SINKS, SHORT = draw(4, seed=5), draw(2, 2, 8, 5, seed=2)
for label, arguments in {
    "a soft cap": (*heads(5, 5), True, 0.9, None, None, None, 1.5, None),
    "a soft cap, lengths": (*heads(2, 8), True, None, None, None, LENGTHS, 2, None),
    "a soft cap, padding": (*heads(3, 5), False, None, some(2, 5), None, None, 2.0, None),
    "sinks": (*heads(5, 5), True, None, None, None, None, None, SINKS),
    "sinks of one query": (*heads(1, 8), True, None, None, 3, LENGTHS, None, SINKS),
    "sinks, padding": (*heads(3, 5), False, None, some(2, 4, 3, 5), None, None, None, SINKS),
    "short values": (*heads(3, 8)[:2], SHORT, False, None, None, None, None, None, None),
    "short values, as many": (*heads(8, 8)[:2], SHORT, True, None, None, None, None, None, None),
    "short values, lengths": (*heads(2, 8)[:2], SHORT, True, 0.5, None, 3, LENGTHS, None, None),
    "all three": (*heads(3, 8)[:2], SHORT, True, 0.9, some(2, 8), 5, LENGTHS, 1.5, SINKS),
}.items():
    CASES[f"attention, {label}"] = ("attention", arguments, (*ATTENTION, "soft_cap", "sinks"))
EXPERTS = ("gate_up_bias", "down_bias", "activation", "alpha", "limit")
for label, count, k, options in [
    ("experts", 3, 2, (None, None, "swiglu", 1.7, 7.0)),
    ("experts, few choices", 12, 2, (None, None, "swiglu", 1.7, 7.0)),
    ("experts, biases", 3, 2, (draw(3, 12), draw(3, 8), "swiglu", 1.7, 7.0)),
    ("experts, biases, few choices", 9, 1, (draw(9, 12), draw(9, 8), "swiglu", 1.7, 7.0)),
    ("experts, clipped", 3, 2, (draw(3, 12), draw(3, 8), "clipped_swiglu", 1.5, 2.0)),
    ("experts, clipped, few choices", 12, 2, (None, None, "clipped_swiglu", 1.5, 2.0)),
    ("experts, gelu", 3, 2, (None, None, "geglu", 1.7, 7.0)),
    ("experts, gelu, few choices", 12, 2, (None, None, "geglu", 1.7, 7.0)),
    ("experts, gelu by tanh", 3, 2, (None, None, "geglu_tanh", 1.7, 7.0)),
]:
    stacks = draw(count, 12, 8, seed=1) / 4, draw(count, 8, 6, seed=2) / 4
    numbers = np.array([[0, 2], [count, 1], [1, -1], [0, 1]])[:, :k]
    plain = (draw(4, 8), *stacks, numbers, draw(4, k, seed=3))
    CASES[label] = ("experts", (*plain, *options), EXPERTS)
SGD = ("rate", "momentum", "decay", "nesterov")
ADAM = ("rate", "beta1", "beta2", "eps", "decay", "decoupled")
for label, op, arguments, named in [
    ("sgd", "update_sgd", (P, G, None, 0.1, 0.0, 0.0, False), SGD),
    ("sgd with decay", "update_sgd", (P, G, None, 0.1, 0.0, 0.1, False), SGD),
    ("sgd with momentum", "update_sgd", (P, G, M, 0.1, 0.9, 0.0, False), SGD),
    ("sgd, idle velocities", "update_sgd", (P, G, M, 0.1, 0.0, 0.0, False), SGD),
    ("sgd, nesterov", "update_sgd", (P, G, M, 0.1, 0.9, 0.1, True), SGD),
    ("adam, first", "update_adam", (P, G, M, S, 1, 0.1, 0.9, 0.999, 1e-8, 0.0, True), ADAM),
    ("adam with decay", "update_adam", (P, G, M, S, 7, 0.1, 0.9, 0.999, 1e-8, 0.1, True), ADAM),
    ("adam, coupled", "update_adam", (P, G, M, S, 7, 0.1, 0.9, 0.99, 1e-6, 0.1, False), ADAM),
    ("adam without a mean", "update_adam", (P, G, M, S, 2, 0.1, 0.0, 0.99, 1e-6, 0.0, True), ADAM),
    ("lion", "update_lion", (P, G, M, 0.1, 0.9, 0.99, 0.1), ("rate", "beta1", "beta2", "decay")),
]:
    CASES[label] = (op, arguments, named)


class Fused(Home):
    """An engine's fast versions of ops, on one of its devices."""

    @property
    def fused(self) -> Mapping[str, Callable[..., Any]]:
        return self.engine.fused

    def put(self, x: Any, dtype: str) -> Any:
        """An argument there: floating arrays as that type, integers as int32."""
        if isinstance(x, list):
            return [self.put(part, dtype) for part in x]
        if not isinstance(x, np.ndarray):
            return x
        return super().put(x, {"f": dtype, "i": "int32", "b": "bool"}[x.dtype.kind])

    def get(self, x: Any) -> Any:
        if isinstance(x, list | tuple):
            return [self.get(part) for part in x]
        return x if x is None else self.engine.to_host(x).astype(np.float64)

    def call(self, op: str, *arguments: Any) -> Any:
        """What the fast version gives; the op itself where that does not serve."""
        result = self.fused[op](*arguments) if op in self.fused else NotImplemented
        if result is not NotImplemented:
            return result
        function = getattr(ops, op)
        names = list(inspect.signature(function).parameters.values())
        given = list(zip(names, arguments, strict=False))
        plain = [x for name, x in given if name.kind is not name.KEYWORD_ONLY]
        return function(*plain, **{n.name: x for n, x in given if n.kind is n.KEYWORD_ONLY})

    def autodiff(self) -> Autodiff:
        if isinstance(self.engine.autodiff, Absent):
            pytest.skip(str(self.engine.autodiff))
        return self.engine.autodiff

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return it as one program on an engine that else compiles every step of a gradient."""
        if "any op" not in self.fused or isinstance(self.engine.compiler, Absent):
            return function
        return self.engine.compiler.compile(function)


@pytest.fixture
def at(engine: Engine, device: Device) -> Fused:
    return Fused(engine, device)


def rounded(x: Any, dtype: str) -> Any:
    """The argument as the numbers that the type can hold, in float64."""
    if isinstance(x, list):
        return [rounded(part, dtype) for part in x]
    if not isinstance(x, np.ndarray) or x.dtype.kind != "f":
        return x
    return x.astype(DTYPES[dtype].numpy()).astype(np.float64)


def expected(case: str, arguments: tuple[Any, ...]) -> Any:
    op, _, names = CASES[case]
    plain = len(arguments) - len(names)
    named = dict(zip(names, arguments[plain:], strict=True))
    return reference.call(op, *arguments[:plain], **named)


def compare(found: Any, wanted: Any, tolerance: float) -> None:
    if isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            compare(one, other, tolerance)
    elif wanted is None:
        assert found is None
    else:
        wanted = np.asarray(wanted)
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def dtypes_of(case: str) -> list[str]:
    """Every floating dtype for the first case of an op, and two for its other cases."""
    first = next(name for name in CASES if CASES[name][0] == CASES[case][0])
    return list(TOLERANCE) if case == first else ["float32", "bfloat16"]


@each("dtype", dtypes_of)
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_the_reference_says(at: Fused, case: str, dtype: str) -> None:
    op, arguments, _ = CASES[case]
    arguments = tuple(rounded(x, dtype) for x in arguments)
    given = [at.put(x, dtype) for x in arguments]
    result = at.call(op, *given)
    compare(at.get(result), expected(case, arguments), TOLERANCE[dtype])
    compare(at.get(given[0]), arguments[0], 0)  # nothing changes its operands
    kind = at.engine.dtype_of(result[0][0] if isinstance(result, tuple) else result).name
    wide = dtype if dtype in ("float32", "float64") else "float32"
    assert kind == (wide if op in FLOAT_RESULT else dtype)


@pytest.mark.parametrize("case", [case for case in CASES if not CASES[case][0].startswith("upd")])
def test_its_gradient_is_the_slope_of_the_reference(at: Fused, case: str) -> None:
    op, arguments, _ = CASES[case]
    arguments = tuple(rounded(x, "float32") for x in arguments)
    autodiff = at.autodiff()
    xp = at.engine.ops
    given = [at.put(x, "float32") for x in arguments]
    result = at.call(op, *given)
    weights = draw(*result.shape, seed=9)
    by = [n for n, x in enumerate(arguments) if isinstance(x, np.ndarray) and x.dtype.kind == "f"]
    direction = {n: draw(*arguments[n].shape, seed=20 + n) for n in by}
    there = at.put(weights, "float32")

    def along(step: float) -> float:
        moved = [x + step * direction[n] if n in by else x for n, x in enumerate(arguments)]
        return float((expected(case, tuple(moved)) * weights).sum())

    def scalar(inputs: dict[str, Any]) -> Any:
        filled = [inputs[str(n)] if n in by else x for n, x in enumerate(given)]
        product = xp.multiply(at.call(op, *filled), there)
        return xp.sum(product, tuple(range(weights.ndim)))

    _, gradients = autodiff.value_and_grad(at.compiled(scalar))({str(n): given[n] for n in by})
    slope = sum(float((at.get(gradients[str(n)]) * direction[n]).sum()) for n in by)
    assert np.isfinite(slope)
    assert slope == pytest.approx((along(1e-6) - along(-1e-6)) / 2e-6, rel=1e-3, abs=1e-3)


@each(dtype=["float32", "bfloat16"])
def test_what_is_out_of_range_is_no_number(at: Fused, dtype: str) -> None:
    weight, ids = at.put(draw(4, 3), dtype), at.put(np.array([0, -1, 4, 2**31 - 1]), dtype)
    found = at.get(at.call("embedding", weight, ids))
    assert np.isnan(found).all(1).tolist() == [False, True, True, True]


@each(target=[-1, 3, -100])
def test_a_target_that_is_no_class_makes_the_loss_no_number(at: Fused, target: int) -> None:
    logits, targets = at.put(draw(2, 3), "float32"), at.put(np.array([1, target]), "float32")
    assert np.isnan(at.get(at.call("cross_entropy", logits, targets)))


def test_what_is_no_number_passes_through(at: Fused) -> None:
    x = np.array([[NAN, 1.0, 2.0, -1.0], [0.0, INF, -2.0, 1.0]])
    for op in ("relu", "silu"):
        compare(at.get(at.call(op, at.put(x, "float32"))), reference.call(op, x), 1e-5)
    large = np.array([NAN, INF, 3e38, 1e20, 65.0, 64.0, -1e20, 1.0] * 4)
    found = at.get(at.call("gelu", at.put(large, "float32"), False))
    compare(found, reference.call("gelu", large), 1e-5)
    image = np.zeros((1, 1, 2, 2))
    image[0, 0, 1, 0] = NAN
    for op in ("max_pool2d", "avg_pool2d"):
        assert np.isnan(at.get(at.call(op, at.put(image, "float32"), (2, 2), None))).all()


@each(op=["max", "min"], length=[700, 3001, 5003], place=[0, 333, -1])
def test_nan_is_found_in_long_rows(at: Fused, op: str, length: int, place: int) -> None:
    x = draw(2, length)
    x[0, place] = NAN
    for axis, array in ((1, x), (0, x.T)):
        found = at.get(getattr(at.engine.ops, op)(at.put(array, "float32"), axis))
        assert np.isnan(found).tolist() == [True, False]


EXCLUDED: dict[str, tuple[int, bool, Any, Any]] = {
    "lengths": (3, False, None, np.array([6, 6])),
    "lengths, causal": (3, True, None, np.array([6, 4])),
    "lengths, one query": (1, True, None, np.array([6, 5])),
    "padding": (3, True, np.arange(8)[None, :] < [[6], [6]], None),
    "a mask for all": (3, False, np.broadcast_to(np.arange(8) < 6, (1, 1, 3, 8)), None),
    "a mask for each head": (3, False, np.broadcast_to(np.arange(8) < 6, (2, 4, 3, 8)), None),
    "a mask of one key": (1, False, np.broadcast_to(np.arange(8) < 6, (4, 1, 8)), None),
    "both": (3, False, np.arange(8)[None, :] < [[7], [6]], np.array([6, 8])),
}
"""The number of queries, `causal`, `mask` and `lengths`, by which the keys 6 and 7 are excluded."""


@each(bad=[NAN, INF], dtype=["float32", "bfloat16"])
@pytest.mark.parametrize("case", EXCLUDED)
def test_what_is_excluded_has_no_influence(at: Fused, case: str, bad: float, dtype: str) -> None:
    queries, causal, mask, lengths = EXCLUDED[case]
    q, k, v = heads(queries, 8)
    mask, lengths = at.put(mask, dtype), at.put(lengths, dtype)
    found = []
    for filling in (0.0, bad):
        k[:, :, 6:] = v[:, :, 6:] = filling
        q_, k_, v_ = (at.put(x, dtype) for x in (q, k, v))
        found.append(at.get(at.call("attention", q_, k_, v_, causal, None, mask, None, lengths)))
    compare(found[1], found[0], TOLERANCE[dtype])


@pytest.mark.parametrize("case", EXCLUDED)
def test_what_is_excluded_has_no_influence_on_gradients(at: Fused, case: str) -> None:
    queries, causal, mask, lengths = EXCLUDED[case]
    q, k, v = heads(queries, 8)
    autodiff, xp = at.autodiff(), at.engine.ops
    mask, lengths = at.put(mask, "float32"), at.put(lengths, "float32")
    weights = at.put(draw(*q.shape, seed=9), "float32")

    def scalar(inputs: dict[str, Any]) -> Any:
        arrays = (inputs[name] for name in "qkv")
        result = at.call("attention", *arrays, causal, None, mask, None, lengths)
        return xp.sum(xp.multiply(result, weights), (0, 1, 2, 3))

    differentiated = autodiff.value_and_grad(at.compiled(scalar))
    found = []
    for filling in (0.0, NAN):
        k[:, :, 6:] = v[:, :, 6:] = filling
        given = {name: at.put(x, "float32") for name, x in zip("qkv", (q, k, v), strict=True)}
        _, gradients = differentiated(given)
        found.append([at.get(gradients[name]) for name in "qkv"])
    compare(found[1], found[0], TOLERANCE["float32"])


def test_nothing_to_attend_to_is_handed_over(at: Fused) -> None:
    q, k = at.put(draw(1, 2, 3, 4), "float32"), at.put(np.zeros((1, 2, 0, 4)), "float32")
    call: Any = partial(at.fused.get("attention", lambda *a: NotImplemented), q, k, k)
    result = call(False, None, None, None, None)
    assert result is NotImplemented or not at.get(result).any()
