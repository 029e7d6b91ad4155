"""Ops as users call them: our error where memory runs out, and in all else the op itself."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import numpy as np
import pytest

from anydevice import ops
from anydevice.errors import ConfigurationError, OutOfMemoryError
from anydevice.ops.dispatch import public


@pytest.mark.parametrize("name", ops.__all__)
def test_a_public_op_is_the_op(name: str) -> None:
    op = getattr(ops, name)
    inside = op.__wrapped__
    assert inspect.signature(op) == inspect.signature(inside)
    assert (op.__name__, op.__qualname__, op.__module__) == (name, name, "anydevice.ops")
    assert op.__doc__ == inside.__doc__
    assert pickle.loads(pickle.dumps(op)) is op


def test_an_op_without_room_says_so() -> None:
    x = np.broadcast_to(np.float32(1), (2**24, 2**24))
    for call in (lambda: ops.add(x, x), lambda: ops.exp(x), lambda: ops.concat([x, x], 0)):
        with pytest.raises(OutOfMemoryError, match=r"^cpu is out of memory: .* asked for") as said:
            call()
        assert isinstance(said.value.__cause__, MemoryError)


def test_any_other_error_is_the_librarys() -> None:
    problem = ValueError("something else")

    def op(x: Any, *, scale: float = 2.0) -> Any:
        if scale < 0:
            raise problem
        return x * scale

    guarded = public(op, __name__)
    assert (guarded(3.0), guarded(x=3.0, scale=1.0)) == (6.0, 3.0)
    with pytest.raises(ValueError, match="something else") as caught:
        guarded(1.0, scale=-1.0)
    assert caught.value is problem
    assert caught.value.__cause__ is None


def test_parameters_without_a_name_stay_so() -> None:
    def op(a: Any, /, b: Any, *, c: Any = 3) -> Any:
        return a, b, c

    guarded = public(op, __name__)
    assert guarded(1, b=2) == (1, 2, 3)
    with pytest.raises(TypeError, match="positional-only"):
        guarded(a=1, b=2)


@pytest.mark.parametrize("name", ops.__all__)
def test_parameters_are_taken_by_name(name: str) -> None:
    op = getattr(ops, name)
    missing = object()
    named = dict.fromkeys(inspect.signature(op).parameters, missing)
    with pytest.raises(ConfigurationError, match=f"^{name}: "):
        op(**named)
