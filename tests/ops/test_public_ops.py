"""Ops as users call them: our error where memory runs out, and in all else the library's."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import numpy as np
import pytest

from anydevice import ops
from anydevice.check.cases import TABLE
from anydevice.errors import ConfigurationError, OutOfMemoryError
from anydevice.ops import dispatch


@pytest.mark.parametrize("name", ops.__all__)
def test_an_op_is_known_by_its_public_name(name: str) -> None:
    op = getattr(ops, name)
    assert (op.__name__, op.__qualname__, op.__module__) == (name, name, "anydevice.ops")
    assert inspect.signature(op) == inspect.signature(inspect.unwrap(op))
    assert pickle.loads(pickle.dumps(op)) is op


def test_an_op_without_room_says_so() -> None:
    x = np.broadcast_to(np.float32(1), (2**24, 2**24))
    for call in (lambda: ops.add(x, x), lambda: ops.exp(x), lambda: ops.concat([x, x], 0)):
        with pytest.raises(OutOfMemoryError, match=r"^cpu is out of memory: .* asked for") as said:
            call()
        assert isinstance(said.value.__cause__, MemoryError)


class Failing:
    """NumPy's primitives, each of which raises this error."""

    def __init__(self, error: Exception) -> None:
        self.error, self.dtype = error, dispatch.primitives(np.ones(1)).dtype

    def __getattr__(self, name: str) -> Any:
        def fail(*arguments: Any) -> Any:
            raise self.error

        return fail


def first_call(name: str, monkeypatch: pytest.MonkeyPatch, error: Exception) -> Any:
    row = TABLE[name]
    made = row.draw(row.cases[0], row.dtypes[0])
    monkeypatch.setitem(dispatch._primitives, "numpy", Failing(error))
    monkeypatch.setitem(dispatch._fused, "numpy", {})
    return getattr(ops, name)(*made.arguments, **made.options)


@pytest.mark.parametrize("name", ops.__all__)
def test_every_op_says_that_memory_ran_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfMemoryError, match=r"^cpu is out of memory"):
        first_call(name, monkeypatch, MemoryError())


@pytest.mark.parametrize("name", ["add", "attention", "mean", "reshape", "softmax", "update_sgd"])
def test_any_other_error_is_the_librarys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ValueError("something else")
    with pytest.raises(ValueError, match="something else") as caught:
        first_call(name, monkeypatch, problem)
    assert caught.value is problem
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("name", ops.__all__)
def test_parameters_are_taken_by_name(name: str) -> None:
    op = getattr(ops, name)
    missing = object()
    named = dict.fromkeys(inspect.signature(op).parameters, missing)
    with pytest.raises(ConfigurationError, match=f"^{name}: "):
        op(**named)
