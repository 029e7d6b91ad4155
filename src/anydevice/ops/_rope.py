"""Rotary position embeddings."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from anydevice.core.rope_scaling import Frozen, Scaling, freeze, frequencies, refuse_scaling, thaw
from anydevice.ops.arguments import (
    FLOAT32,
    in_words,
    is_finite,
    python_number,
    require_integers,
    widened,
    wrong,
    wrong_shapes,
)
from anydevice.ops.dispatch import Array, float_version, primitives, run

Key = tuple[str, str, Frozen]
"""Size, theta and scaling, with numbers as exact texts: see `freeze`."""

_tables: dict[Key, tuple[Any, float]] = {}
_kept = SimpleNamespace()
_names: dict[tuple[Key, str, bool], str] = {}


def rope(
    x: Array,
    positions: Array,
    *,
    theta: float = 10000.0,
    interleaved: bool = False,
    scaling: Scaling | None = None,
) -> Array:
    """The array with each pair of elements rotated by an angle that grows with its position.

    x is (batch, heads, tokens, size) with an even size, and positions, integers, is (tokens,) or
    (batch, tokens); the result has the shape and dtype of x. Pair n is rotated by
    theta ** (-2 n / size) per position. A pair is elements n and n + size / 2 or, `interleaved`,
    elements 2 n and 2 n + 1. Angles, cosine and sine are float32.

    `scaling` stretches positions for a longer context, spelled as in Hugging Face's
    `rope_parameters`: a mapping whose `rope_type` is default, linear, llama3 or yarn, with its
    numbers. Raises `ConfigurationError` for an unknown type, and for missing or invalid values.

    >>> import numpy
    >>> rope(numpy.ones((1, 1, 2, 2)), numpy.array([0, 1])).round(3).tolist()
    [[[[1.0, 1.0], [-0.301, 1.382]]]]
    """
    own = float_version(x, "rope", _rope)
    require_integers("rope", "positions", positions, x)
    shape = tuple(x.shape)
    if len(shape) != 4 or shape[3] % 2:
        raise wrong_shapes("rope", "x is (batch, heads, tokens, size) with an even size", x=x)
    if tuple(positions.shape) not in (shape[2:3], (shape[0], shape[2])):
        rule = "positions is (tokens,) or (batch, tokens)"
        raise wrong_shapes("rope", rule, x=x, positions=positions)
    theta, interleaved = python_number(theta), python_number(interleaved)
    if not is_finite(theta) or theta <= 0:
        raise wrong("rope", f"theta is a number above 0, but it is {in_words(theta)}")
    if type(interleaved) is not bool:
        raise wrong("rope", f"interleaved is True or False, but it is {in_words(interleaved)}")
    if scaling is not None:
        refuse_scaling(scaling)
    return run(own, _rope, x, positions, theta, interleaved, scaling)


def _rope(
    x: Array, positions: Array, theta: float, interleaved: bool, scaling: Scaling | None
) -> Array:
    xp = primitives(x)
    batch, heads, tokens, size = x.shape
    key = (float(size).hex(), float(theta).hex(), freeze(scaling))
    factor = _factor(key)
    where = xp.reshape(positions, (*positions.shape[:-1], 1, tokens, 1))
    angles = xp.multiply(xp.astype(where, FLOAT32), _steps(key, positions))
    y = widened(xp, x)
    cosine, sine = xp.cos(angles), xp.sin(angles)
    if factor != 1:
        cosine, sine = xp.multiply(cosine, factor), xp.multiply(sine, factor)
    cosine, sine = xp.astype(cosine, xp.dtype(y)), xp.astype(sine, xp.dtype(y))
    if interleaved:
        first, second = xp.part(y, 3, 0, size, 2), xp.part(y, 3, 1, size, 2)
    else:
        first, second = xp.part(y, 3, 0, size // 2), xp.part(y, 3, size // 2, size)
    turned = [
        xp.subtract(xp.multiply(first, cosine), xp.multiply(second, sine)),
        xp.add(xp.multiply(second, cosine), xp.multiply(first, sine)),
    ]
    if interleaved:
        apart = [xp.reshape(half, (batch, heads, tokens, size // 2, 1)) for half in turned]
        rotated = xp.reshape(xp.concat(apart, 4), (batch, heads, tokens, size))
    else:
        rotated = xp.concat(turned, 3)
    return xp.astype(rotated, xp.dtype(x))


def _table(key: Key) -> tuple[Any, float]:
    """The frequencies as a NumPy array of float32, and the factor; computed once for each key."""
    if key not in _tables:
        import numpy as np

        size, theta, scaling = key
        found, factor = frequencies(int(float.fromhex(size)), float.fromhex(theta), thaw(scaling))
        _tables[key] = np.array(found, "float32"), factor
    return _tables[key]


def _steps(key: Key, like: Array) -> Array:
    """The angle of each pair for one position, on the device of `like`."""
    name = _kept_for_compiler(key, like)
    return getattr(_kept, name) if name else primitives(like).asarray(_table(key)[0], like)


def _kept_for_compiler(key: Key, like: Array) -> str:
    """The name under which `_kept` has the steps, for PyTorch's compiler; else nothing.

    It cannot look through the making of an array from NumPy's. It runs this instead and reads what
    was made, so that the steps are already on the device when the compiled code is called. Anyone
    else's arrays are not kept: some only stand for numbers, and must not outlive a call.
    """
    if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo."):
        return ""
    steps = primitives(like).asarray(_table(key)[0], like)
    # What is made while no gradients are recorded cannot be used where they are.
    of = (key, str(steps.device), steps.is_inference())
    if of not in _names:
        _names[of] = f"steps_{len(_names)}"
        setattr(_kept, _names[of], steps)
    return _names[of]


def _factor(key: Key) -> float:
    return _table(key)[1]


# PyTorch's compiler runs these while it looks through the caller, and keeps what they return.
_kept_for_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]
_factor._dynamo_marked_constant = True  # type: ignore[attr-defined]
