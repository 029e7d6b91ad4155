"""Rotary position embeddings."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

from anydevice._core.array import Array, ArrayT
from anydevice._core.primitives import PrimitivesOf
from anydevice._core.rope_scaling import (
    Frozen,
    Scaling,
    depends_on_length,
    freeze,
    frequencies,
    growth_of_theta,
    kind_of,
    original_length,
    refuse_scaling,
    thaw,
)
from anydevice._ops.arguments import (
    FLOAT32,
    INT32,
    in_words,
    is_finite,
    python_number,
    require_integers,
    widened,
    wrong,
    wrong_shapes,
)
from anydevice._ops.dispatch import float_version, known, primitives, run

Key = tuple[str, str, Frozen, str]
"""Size, theta, scaling and length, with numbers as exact texts: see `freeze`."""

_tables: dict[Key, tuple[Any, float]] = {}
_kept = SimpleNamespace()
_names: dict[tuple[Key, str, bool], str] = {}


def rope(
    x: ArrayT,
    positions: ArrayT,
    *,
    theta: float = 10000.0,
    interleaved: bool = False,
    scaling: Scaling | None = None,
    length: int | ArrayT | None = None,
) -> ArrayT:
    """Return the array with each pair of elements rotated by an angle that grows with its position.

    x is (batch, heads, tokens, size) with an even size, and positions, integers, is (tokens,) or
    (batch, tokens); the result has the shape and dtype of x. Pair n is rotated by
    theta ** (-2 n / size) per position. A pair is elements n and n + size / 2 or, `interleaved`,
    elements 2 n and 2 n + 1. Angles, cosine and sine are float32.

    `scaling` stretches positions for a longer context, spelled as in Hugging Face's
    `rope_parameters`: a mapping whose `rope_type` is default, linear, llama3, yarn, dynamic or
    longrope, with its numbers. Raises `ConfigurationError` for an unknown type, and for missing or
    invalid values.

    The types dynamic and longrope depend on `length`, how many tokens there are in the whole
    sequence, of which x may be a part: an integer, or integers (batch,) on the device, which may
    differ from call to call of compiled code. If it is not given, it is the largest position of
    each text + 1. So a text that grows token by token is rotated as transformers does with a cache:
    what was rotated before stays as it was. Padding has no part in a length: give it if there is
    any. Both need `original_max_position_embeddings`; longrope needs `factor`, by how much the
    context was extended, or `attention_factor`.

    >>> import numpy
    >>> rope(numpy.ones((1, 1, 2, 2)), numpy.array([0, 1])).round(3).tolist()
    [[[[1.0, 1.0], [-0.301, 1.382]]]]
    """
    own = float_version(x, "rope", _rope)
    require_integers("rope", "positions", positions, x)
    shape = tuple(x.shape)
    if len(shape) != 4 or shape[3] % 2:
        raise wrong_shapes("rope", "x must be (batch, heads, tokens, size) with an even size", x=x)
    if tuple(positions.shape) not in (shape[2:3], (shape[0], shape[2])):
        rule = "positions must be (tokens,) or (batch, tokens)"
        raise wrong_shapes("rope", rule, x=x, positions=positions)
    theta, interleaved = python_number(theta), python_number(interleaved)
    if not is_finite(theta) or theta <= 0:
        raise wrong("rope", f"theta must be a number above 0, not {in_words(theta)}")
    if type(interleaved) is not bool:
        raise wrong("rope", f"interleaved must be True or False, not {in_words(interleaved)}")
    if scaling is not None:
        refuse_scaling(scaling)
    if length is not None:
        length = python_number(length)
        _refuse_length(x, length)
    return run(own, _rope, x, positions, theta, interleaved, scaling, length)


def _refuse_length(x: Array, length: Any) -> None:
    if known(length) is None:
        if type(length) is not int or length < 0:
            rule = "length must be an integer of 0 or more, or an array (batch,)"
            raise wrong("rope", f"{rule}, not {in_words(length)}")
        return
    require_integers("rope", "length", length, x)
    if tuple(length.shape) != (x.shape[0],):
        raise wrong_shapes("rope", "length must be (batch,)", x=x, length=length)


def _rope(
    x: ArrayT,
    positions: ArrayT,
    theta: float,
    interleaved: bool,
    scaling: Scaling | None,
    length: Any = None,
) -> ArrayT:
    xp = primitives(x)
    batch, heads, tokens, size = x.shape
    if not batch * heads * tokens * size:
        return x
    known_length = length if type(length) is int and depends_on_length(scaling) else None
    key = _key(size, theta, scaling, known_length)
    factor = float.fromhex(_factor(key))
    where = xp.reshape(positions, (*positions.shape[:-1], 1, tokens, 1))
    steps = _steps(key, positions)
    if known_length is None and scaling is not None and depends_on_length(scaling):
        if length is None:
            length = xp.add(xp.max(positions, -1), 1)
        steps = _steps_by_length(xp, steps, key, scaling, length)
    angles = xp.multiply(xp.astype(where, FLOAT32), steps)
    y = widened(xp, x)
    cosine, sine = xp.cos(angles), xp.sin(angles)
    if factor != 1:
        cosine, sine = xp.multiply(cosine, factor), xp.multiply(sine, factor)
    cosine, sine = xp.astype(cosine, xp.dtype(y)), xp.astype(sine, xp.dtype(y))
    if interleaved:
        first, second = xp.slice_axis(y, 3, 0, size, 2), xp.slice_axis(y, 3, 1, size, 2)
    else:
        first, second = xp.slice_axis(y, 3, 0, size // 2), xp.slice_axis(y, 3, size // 2, size)
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


def _key(size: int, theta: float, scaling: Scaling | None, length: float | None) -> Key:
    text = "" if length is None else float(length).hex()
    return (float(size).hex(), float(theta).hex(), freeze(scaling), text)


def _steps_by_length(
    xp: PrimitivesOf[ArrayT], short: ArrayT, key: Key, scaling: Scaling, length: ArrayT
) -> ArrayT:
    """Return the steps for lengths on the device, () or (batch,): of each text, with axes to
    broadcast.
    """
    here = xp.reshape(xp.astype(length, FLOAT32), (-1, 1, 1, 1))
    if kind_of(scaling) == "longrope":
        longer = xp.less(original_length(scaling), here)
        return xp.where(longer, _steps((*key[:3], math.inf.hex()), length), short)
    growth, less = growth_of_theta(scaling)
    grown = xp.maximum(xp.subtract(xp.multiply(here, growth), less), 1.0)
    pairs = short.shape[0]
    powers = xp.multiply(xp.astype(xp.arange(pairs, INT32, length), FLOAT32), -1 / (pairs - 1))
    return xp.multiply(short, xp.exp(xp.multiply(xp.log(grown), powers)))


def _table(key: Key) -> tuple[Any, float]:
    """Return the frequencies as a NumPy array of float32, and the factor; computed once for each
    key.
    """
    if key not in _tables:
        import numpy as np

        size, theta, scaling, text = key
        length = float.fromhex(text) if text else None
        steps, factor = frequencies(
            int(float.fromhex(size)), float.fromhex(theta), thaw(scaling), length
        )
        _tables[key] = np.array(steps, "float32"), float(factor)
    return _tables[key]


def _steps(key: Key, like: ArrayT) -> ArrayT:
    """Return the angle of each pair for one position, on the device of `like`."""
    name = _kept_for_compiler(key, like)
    return getattr(_kept, name) if name else primitives(like).asarray(_table(key)[0], like)


def _kept_for_compiler(key: Key, like: Array) -> str:
    """Return the name under which `_kept` has the steps, for PyTorch's compiler; else nothing.

    It cannot look through the making of an array from NumPy's. It runs this instead and reads what
    was made, so that the steps are already on the device when the compiled code is called. Anyone
    else's arrays are not kept: some only stand for numbers, and must not outlive a call.
    """
    if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo."):
        return ""
    steps = primitives(like).asarray(_table(key)[0], like)
    # What is made while no gradients are recorded cannot be used where they are.
    of = (key, str(steps.device), steps.is_inference())  # type: ignore[attr-defined]
    if of not in _names:
        _names[of] = f"steps_{len(_names)}"
        setattr(_kept, _names[of], steps)
    return _names[of]


def _factor(key: Key) -> str:
    """Return the factor of cosine and sine, as an exact text: to PyTorch's compiler a constant."""
    return _table(key)[1].hex()


# PyTorch's compiler runs these while it looks through the caller, and keeps what they return.
_kept_for_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]
_factor._dynamo_marked_constant = True  # type: ignore[attr-defined]
