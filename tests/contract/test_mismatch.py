"""A forgotten move between two devices is a `DeviceMismatchError`, on every engine that has two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops
from anydevice._core.device import Device
from anydevice._core.engine import Engine
from anydevice.errors import DeviceMismatchError

from .combinations import each

FLOATS = np.ones((2, 4), np.float32)
BIAS = np.ones(2, np.float32)
IDS = np.zeros(2, np.int32)
HEADS = np.ones((1, 1, 2, 4), np.float32)
IMAGE = np.ones((1, 2, 4, 4), np.float32)
Place = Callable[[Any], Any]
Pair = tuple[Place, Place]
CALLS: dict[str, tuple[tuple[str, str], Callable[[Place, Place], Any]]] = {
    "add": (("a", "b"), lambda u, v: ops.add(u(FLOATS), v(FLOATS))),
    "where": (("condition", "a"), lambda u, v: ops.where(u(FLOATS > 0), v(FLOATS), v(FLOATS))),
    "matmul": (("a", "b"), lambda u, v: ops.matmul(u(FLOATS), v(FLOATS.T.copy()))),
    "linear": (("x", "weight"), lambda u, v: ops.linear(u(FLOATS), v(FLOATS))),
    "linear's bias": (("x", "bias"), lambda u, v: ops.linear(u(FLOATS), u(FLOATS), v(BIAS))),
    "concat": (("arrays[0]", "arrays[1]"), lambda u, v: ops.concat([u(FLOATS), v(FLOATS)])),
    "take": (("x", "indices"), lambda u, v: ops.take(u(FLOATS), v(IDS))),
    "embedding": (("weight", "ids"), lambda u, v: ops.embedding(u(FLOATS), v(IDS))),
    "rmsnorm": (("x", "weight"), lambda u, v: ops.rmsnorm(u(FLOATS), v(FLOATS[0]))),
    "layernorm": (("x", "weight"), lambda u, v: ops.layernorm(u(FLOATS), v(FLOATS[0]), None)),
    "attention": (("q", "k"), lambda u, v: ops.attention(u(HEADS), v(HEADS), v(HEADS))),
    "conv2d": (("x", "weight"), lambda u, v: ops.conv2d(u(IMAGE), v(IMAGE[..., :3, :3]))),
    "cross_entropy": (("logits", "targets"), lambda u, v: ops.cross_entropy(u(FLOATS), v(IDS))),
}


@pytest.fixture
def pair(engine: Engine, device: Device) -> Pair:
    """Two functions that place an array on this device, and on another one of the engine."""
    others = [other for other in engine.devices() if other != device]
    if not others or engine.shares_memory:
        pytest.skip(f"{engine.name} has one device here, or one memory")
    return (
        lambda x: engine.place(np.asarray(x), device),
        lambda x: engine.place(np.asarray(x), others[0]),
    )


def named(caught: pytest.ExceptionInfo[DeviceMismatchError], *words: str) -> bool:
    said = str(caught.value)
    return all(w in said for w in (*words, "to_device(")) and caught.value.__cause__ is not None


@each("call", CALLS)
def test_an_op(engine: Engine, device: Device, pair: Pair, call: str) -> None:
    paths, compute = CALLS[call]
    with pytest.raises(DeviceMismatchError) as caught:
        compute(*pair)
    assert caught.value.paths == paths
    (other,) = engine.devices_of(pair[1](IDS))
    assert named(caught, f"{paths[0]} is on {device}", f"{paths[1]} is on {other}")


def test_a_model(engine: Engine, device: Device, pair: Pair) -> None:
    model = nn.build(nn.Dense(4, 3), "relu", nn.Dense(3, 2), device=device.served_by(engine.name))
    with pytest.raises(DeviceMismatchError) as caught:
        model(pair[1](FLOATS))
    assert caught.value.paths == ("x", "parameters[0]['weight']")
    (other,) = engine.devices_of(pair[1](IDS))
    assert named(caught, f"x is on {other}", f"weight'] is on {device}")
    moved = anydevice.to_device(pair[1](FLOATS), device)
    assert device in engine.devices_of(model(moved))


def test_a_compiled_model_moves(engine: Engine, device: Device, pair: Pair) -> None:
    here = device.served_by(engine.name)
    compiled = anydevice.compile(nn.build(nn.Dense(4, 3), device=here), here, optimize="none")
    assert device in engine.devices_of(compiled(pair[1](FLOATS)))


def test_a_held_array_elsewhere(engine: Engine, device: Device, pair: Pair) -> None:
    held = pair[1](FLOATS)
    here = device.served_by(engine.name)
    compiled = anydevice.compile(lambda x: ops.add(x, held), here, optimize="none")
    with pytest.raises(DeviceMismatchError) as caught:
        compiled(pair[0](FLOATS))
    assert named(caught, f"a is on {device}")


@each("given", ["an array", "NumPy"])
def test_a_model_in_another_block(engine: Engine, device: Device, pair: Pair, given: str) -> None:
    model = nn.build(nn.Dense(4, 3), device=device.served_by(engine.name))
    x = pair[0](FLOATS) if given == "an array" else FLOATS
    (other,) = engine.devices_of(pair[1](IDS))
    with anydevice.use_device(other, engine=engine.name) as there:
        with pytest.raises(DeviceMismatchError) as caught:
            model(x)
        moved = anydevice.to_device(model, there)
        result = moved(anydevice.to_device(x, there))
        with anydevice.use_device(device, engine=engine.name):
            assert device in engine.devices_of(model(x))
    assert other in engine.devices_of(result)
    said = str(caught.value)
    assert f"this model is on {device}" in said
    assert f'to_device(model, "{other}")' in said
    assert device in engine.devices_of(model(x)), "outside of the block, it runs where it is"


def test_the_process_device_moves_no_model(engine: Engine, device: Device, pair: Pair) -> None:
    model = nn.build(nn.Dense(4, 3), device=device.served_by(engine.name))
    anydevice.set_device(engine.devices_of(pair[1](IDS))[0])
    try:
        assert device in engine.devices_of(model(pair[0](FLOATS)))
    finally:
        anydevice.set_device(None)
