"""Where a library compiles, an op of arrays is one program, checks included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import ops
from anydevice._machine.engines import registry
from anydevice._ops import dispatch
from anydevice._ops.dispatch import compiled
from tests.comparing import EXACT, SAME_PROGRAM, assert_same_values, rounding
from tests.refusals import refuses

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

X = np.linspace(-2.0, 2.0, 12, dtype=np.float32).reshape(3, 4)
CLOSE = rounding(np.float32, 20)
"""Sums of four, and an exponential or a logarithm."""


def program_of(name: str, kind: type) -> Any:
    op = getattr(ops, name).__wrapped__
    return next(table.get(kind) for known, _, table in dispatch._programs if known is op)


@pytest.mark.usefixtures("nothing_met")
def test_a_program_is_there_once_the_library_is_met() -> None:
    x = jnp.asarray(X)
    assert program_of("exp", type(x)) is None
    first = ops.exp(x)  # which meets the type, and has no program yet
    assert program_of("exp", type(x)) is not None
    assert_same_values(ops.exp(x), first, because=SAME_PROGRAM)
    assert program_of("exp", np.ndarray) is None
    dispatch.forget()
    assert program_of("exp", type(x)) is None


@pytest.mark.usefixtures("nothing_met")
def test_what_is_traced_has_none() -> None:
    kinds = []

    def traced(x: Any) -> Any:
        kinds.append(type(x))
        return ops.exp(x)

    jax.jit(traced)(jnp.asarray(X))
    assert program_of("exp", kinds[0]) is None


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("tanh", (X,)),
        ("relu", (X,)),
        ("silu", (X,)),
        ("softmax", (X, 0)),
        ("log_softmax", (X, -2)),
        ("subtract", (X, X[:1])),
        ("less", (X, -X)),
        ("matmul", (X, X.T.copy())),
        ("logical_and", (X < 0, X > -1)),
        ("where", (X < 0, X, -X)),
    ],
)
def test_it_gives_what_the_op_gives(name: str, arguments: tuple[Any, ...]) -> None:
    given = [jnp.asarray(each) if isinstance(each, np.ndarray) else each for each in arguments]
    ops.exp(jnp.asarray(X))
    assert program_of(name, type(given[0])) is not None
    expected = getattr(ops, name)(*arguments)
    for _ in range(2):
        np.testing.assert_allclose(getattr(ops, name)(*given), expected, rtol=CLOSE, atol=CLOSE)
    with jax.disable_jit():
        np.testing.assert_allclose(getattr(ops, name)(*given), expected, rtol=CLOSE, atol=CLOSE)


def test_its_checks_are_made_for_each_shape_and_type() -> None:
    x = jnp.asarray(X)
    ops.matmul(x, x.T)
    for _ in range(2):  # what was refused is not kept as a program
        refuses(r"^matmul: a must have .* a is \(3, 4\), b is \(3", ops.matmul, x, x)
        refuses(r"^matmul: .* a is float32, b is int32", ops.matmul, x, x.T.astype(jnp.int32))
        refuses(r"^exp: this is an array of int32", ops.exp, x.astype(jnp.int32))
        refuses(r"^softmax: axis 2 is out of range", ops.softmax, x, 2)


def test_arrays_of_two_libraries_are_refused_all_the_same() -> None:
    x = jnp.asarray(X)
    refuses(r"^add: a is an array of JAX and b one of NumPy", ops.add, x, X)
    refuses(r"^where: .*condition is an array of JAX and b", ops.where, x < 0, 1.0, X)
    refuses(r"^softmax: axis must be an integer, .*True", ops.softmax, x, True)
    assert_same_values(ops.add(x, 0.5), X + np.float32(0.5), because=EXACT)


def test_gradients_pass_through() -> None:
    def loss(x: Any) -> Any:
        return ops.sum(ops.multiply(ops.tanh(x), constant))

    constant = jnp.asarray(X)
    ops.tanh(constant)
    slope = jax.grad(loss)(constant)
    np.testing.assert_allclose(slope, X * (1 - np.tanh(X) ** 2), rtol=CLOSE, atol=CLOSE)


def test_numbers_are_constants_of_a_program() -> None:
    def op(x: Any, axis: int = 0) -> str:
        return f"the op with {axis}"

    guarded = compiled(op)
    known, numbers, table = dispatch._programs.pop()
    assert (known, numbers) == (op, (1,))
    table[list] = lambda x, axis: f"the program with {axis}"
    said = guarded([]), guarded([], 1), guarded([], axis=2)
    assert said == ("the program with 0", "the program with 1", "the program with 2")
    assert guarded([], 1.0) == "the op with 1.0"  # type: ignore[arg-type]
    assert guarded((), 3) == "the op with 3"


def several(y: Any) -> Any:
    """Ops of many kinds, one after the other."""
    ordered = ops.sort(ops.clip(y, -1.0, 1.0), 1, descending=True)
    share = ops.exp(ops.subtract(y, ops.logsumexp(y, 1, keepdims=True)))
    weights = ops.one_hot(ops.argmin(y), 6, y.dtype)
    parts = ops.stack([ordered, share, weights, ops.round(y), ops.cumulative_sum(y)])
    first, second = ops.split(ops.diff(parts, 2, 2), 2, 2)
    total = ops.einsum("nij,j->ni", parts, ops.arange(6, like=y))
    spread = ops.multiply(ops.std(first, 2), ops.vector_norm(second, 2))
    return ops.pad(ops.flip(ops.add(total, spread), 1), [(0, 0), (1, 1)])


@pytest.mark.parametrize("engine", ["torch", "jax", "mlx"])
def test_compilers_look_through_whole_functions(engine: str) -> None:
    pytest.importorskip("mlx.core" if engine == "mlx" else engine)
    x = anydevice.device("cpu", engine=engine)(
        np.random.default_rng(0).normal(size=(4, 6)).astype("float32")
    )
    if engine == "torch":  # as one graph, without the seconds that code for it takes
        import torch

        whole = torch.compile(several, backend="eager", fullgraph=True)
    else:
        compiler: Any = registry.load(engine).compiler
        whole = compiler.compile(several)
    found, wanted = (anydevice.to_numpy(function(x)) for function in (whole, several))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
