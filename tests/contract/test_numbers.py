"""Numbers beside arrays, on every engine, and functions that must give one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from anydevice import ops
from anydevice._core.device import Device
from anydevice._core.engine import Absent, Engine
from anydevice.errors import ConfigurationError

from .combinations import each

ONE_DEVICE = True  # see conftest.py
TWO: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "power": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "less": np.less,
    "less_equal": np.less_equal,
}
COMPARING = ("equal", "less", "less_equal")
WHOLE = (2, np.int64(2), np.uint8(2), np.bool_(True), True)
FRACTIONS = (2.0, np.float64(2), np.float32(2), np.float16(2), ml_dtypes.bfloat16(2))
TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "int32": np.int32}
DTYPES = [("float32", (3,)), ("int32", ()), ("float32", ()), ("bfloat16", (3,))]
EVERY = ("add", "power", "less")
"""The ops beside which every number stands; libraries compile for each dtype and shape."""


@each(("dtype", "shape"), lambda name: DTYPES if name in EVERY else DTYPES[:2])
@pytest.mark.parametrize("name", TWO)
def test_a_number_on_either_side(
    engine: Engine, device: Device, name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    if name == "divide" and dtype == "int32":
        pytest.skip("integers are not divided")
    host = np.resize(np.array([1, 2, 3]), shape).astype(TYPES[dtype])
    x, wide, op = engine.place(host, device), host.astype(np.float64), getattr(ops, name)
    every = WHOLE if dtype == "int32" else (*WHOLE, *FRACTIONS)
    for number in every if name in EVERY else every[::4]:
        for got, want in (
            (op(x, number), TWO[name](wide, float(number))),
            (op(number, x), TWO[name](float(number), wide)),
        ):
            result = engine.to_host(got)
            assert result.dtype == (np.bool_ if name in COMPARING else host.dtype), number
            np.testing.assert_allclose(result.astype(np.float64), want, rtol=2.0**-8)


@each(number=[0.5, np.float64(0.5), np.float32(0.5)])
def test_a_fraction_beside_integers_is_refused(engine: Engine, device: Device, number: Any) -> None:
    x = engine.place(np.arange(3, dtype=np.int32), device)
    with pytest.raises(ConfigurationError, match=r"^add: 0\.5 is not an integer, and a is int32"):
        ops.add(x, number)
    with pytest.raises(ConfigurationError, match=r"0\.5 .* b is int32; use astype\(b, 'float32'\)"):
        ops.subtract(number, x)


def test_numbers_of_numpy_are_taken_wherever_a_number_is(engine: Engine, device: Device) -> None:
    def drawn(*shape: int) -> Any:
        return engine.place(np.random.default_rng(0).random(shape, np.float32), device)

    x, vector, heads, image = drawn(2, 4), drawn(4), drawn(1, 2, 3, 4), drawn(1, 1, 4, 4)
    positions = engine.place(np.arange(3, dtype=np.int32), device)
    below = ops.less(x, 0.5)

    def calls(real: Callable[[float], Any], whole: Callable[[int], Any]) -> list[Any]:
        return [
            ops.where(below, x, real(0.25)),
            ops.where(below, real(0.25), x),
            ops.rmsnorm(x, vector, real(0.125)),
            ops.layernorm(x, vector, None, real(0.125)),
            ops.attention(heads, heads, heads, scale=real(0.25)),
            ops.attention(heads, heads, heads, causal=True, window=whole(2), scale=real(0.25)),
            ops.rope(heads, positions, theta=real(1024.0)),
            ops.sum(x, whole(1)),
            ops.sum(x, (whole(0), whole(1))),
            ops.softmax(x, whole(0)),
            ops.argmax(x, whole(0)),
            ops.top_k(x, whole(2))[0],
            ops.reshape(x, whole(8)),
            ops.concat([x, x], whole(1)),
            ops.max_pool2d(image, whole(2)),
            ops.conv2d(image, image, None, whole(1), whole(1)),
            ops.update_sgd([x], [x], [x], rate=real(0.5), momentum=real(0.25))[0][0],
            ops.update_adam([x], [x], [x], [x], whole(2), rate=real(0.5), beta1=real(0.5))[0][0],
            ops.update_lion([x], [x], [x], rate=real(0.5), decay=real(0.5))[0][0],
        ]

    plain = calls(float, int)
    for real in (np.float64, np.float32):
        for got, want in zip(calls(real, np.int64), plain, strict=True):
            result = engine.to_host(got)
            assert result.dtype == engine.to_host(want).dtype
            np.testing.assert_allclose(result, engine.to_host(want), rtol=1e-6)


@each(gives=["an array of shape (3,)", "a float", "a NoneType"])
def test_only_one_number_has_a_gradient(engine: Engine, device: Device, gives: str) -> None:
    if isinstance(engine.autodiff, Absent):
        pytest.skip(str(engine.autodiff))
    values: dict[str, Callable[[Any], Any]] = {
        "an array of shape (3,)": lambda x: ops.multiply(x, 2),
        "a float": lambda x: 1.0,
        "a NoneType": lambda x: None,
    }
    x = engine.place(np.ones(3, np.float32), device)
    expected = (
        f"a gradient needs a function that returns one number, and this one returned {gives}; end"
    )
    with pytest.raises(TypeError, match=re.escape(expected)):
        engine.autodiff.value_and_grad(values[gives])(x)
    value, gradient = engine.autodiff.value_and_grad(lambda x: ops.sum(ops.multiply(x, 2)))(x)
    assert (float(value), engine.to_host(gradient).tolist()) == (6, [2, 2, 2])
