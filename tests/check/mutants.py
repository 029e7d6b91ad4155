"""Wrong versions of ops, each of which `verify` has to find.

A mutant takes the right op, as users call it with arrays of NumPy, and returns a wrong one. Most
are right wherever it is easy: for small arrays, near positions, finite numbers, the usual axis.
They are mistakes that kernels have had: a grid that ends too soon, an index of 16 bits, a sum in
the dtype of its numbers, an identity of 0 for a maximum, NaN that is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from anydevice import ops
from anydevice._core.quantized import QuantizedWeight
from anydevice._core.record import replace

Array = Any
Op = Callable[..., Any]


class Mutant(NamedTuple):
    """One wrong version of an op; a `short` one is tried each time."""

    op: str
    title: str
    broken: Callable[[Op], Op]
    dtype: str = "float32"
    short: bool = False

    def __str__(self) -> str:
        return f"{self.op}: {self.title}"


MUTANTS: list[Mutant] = []


def mutant(ops: str, title: str, dtype: str = "float32", *, short: bool = False) -> Any:
    """Put a wrong op into the list: it takes the right one and then the arguments of a call."""

    def put(wrong: Op) -> Op:
        def broken(right: Op) -> Op:
            @np.errstate(all="ignore")
            def run(*arguments: Any, **options: Any) -> Any:
                return as_arrays(wrong(right, *arguments, **options))

            return run

        MUTANTS.extend(Mutant(op, title, broken, dtype, short) for op in ops.split())
        return wrong

    return put


def changed(result: Array, at: Any, by: Array = 0) -> Array:
    """A copy with other elements at a place of the flat array."""
    flat = np.array(result).reshape(-1)
    flat[at] = by
    return flat.reshape(np.shape(result))


def as_arrays(result: Any) -> Any:
    """The result with arrays for NumPy's scalars: that is not what is wrong with it."""
    if isinstance(result, list | tuple):
        return type(result)(map(as_arrays, result))
    return None if result is None else np.asarray(result)


def every_axis(x: Array, axis: Any) -> Any:
    return tuple(range(x.ndim)) if axis is None else axis


# Kinds of mistakes


def result(change: Callable[[Any], Any]) -> Op:
    """The result is changed by a function."""
    return lambda right, *given, **how: change(right(*given, **how))


def in_parts(count: int) -> Op:
    """Runs of `count` elements along the axis are computed apart."""

    def wrong(right: Op, x: Array, axis: int = -1, *how: Any, **named: Any) -> Array:
        parts = np.split(x, range(count, x.shape[axis], count), axis)
        return np.concatenate([right(part, axis, *how, **named) for part in parts], axis)

    return wrong


def long_rows(count: int, change: Callable[[Array], Array]) -> Op:
    """Rows of more than `count` elements are changed before they are reduced."""

    def wrong(right: Op, x: Array, axis: Any = None, keepdims: bool = False) -> Any:
        return right(change(x) if axis == -1 and x.shape[-1] > count else x, axis, keepdims)

    return wrong


def ends_at(count: int, by: Any = 0) -> Op:
    """The elements of the flat result beyond `count` are zero."""
    return result(lambda value: changed(value, slice(count, None), by))


def zero_at(at: Any, ndim: int | None = None) -> Op:
    """A part of a result, of one that has `ndim` axes, is zero."""

    def change(value: Array) -> Array:
        wrong = np.array(value)
        if wrong.ndim and ndim in (None, wrong.ndim):
            wrong[at] = 0
        return wrong

    return result(change)


def repeated_at(at: Any, first: Any, ndim: int | None = None) -> Op:
    """A part of a result, of one that has `ndim` axes, is that of another place."""

    def change(value: Array) -> Array:
        wrong = np.array(value)
        if ndim in (None, wrong.ndim):
            wrong[at] = wrong[first]
        return wrong

    return result(change)


def kept_at(at: Any) -> Op:
    """A part of the result is that of the first argument."""

    def wrong(right: Op, x: Array, *given: Any, **how: Any) -> Array:
        kept = x[at].copy()  # NumPy may write into the argument itself
        result = np.array(right(x, *given, **how))
        result[at] = kept
        return result

    return wrong


def argument(at: int, change: Callable[[Any], Any]) -> Op:
    """An argument is changed by a function."""
    return lambda right, *x, **how: right(*x[:at], change(x[at]), *x[at + 1 :], **how)


def option(name: str, change: Callable[[Any], Any]) -> Op:
    """An option that is given is changed by a function."""

    def wrong(right: Op, *given: Any, **how: Any) -> Any:
        if how.get(name) is not None:
            how[name] = change(how[name])
        return right(*given, **how)

    return wrong


def always(**options: Any) -> Op:
    """Options are those, whatever is given."""
    return lambda right, *given, **how: right(*given, **{**how, **options})


def nan_as(value: float) -> Callable[[Array], Array]:
    return lambda x: np.where(np.isnan(x), np.float32(value), x)


def as_float(x: Array) -> Array:
    return x.astype(np.float32)


def short_index(x: Array) -> Array:
    return np.where(x > 0, x & 0xFFFF, x).astype(np.int32)


def round_trip(x: Array) -> Array:
    """Integers as they come back from float32."""
    return x.astype(np.float32).clip(-(2**31), 2**30).astype(np.int32)


# Of one element each

mutant("negative sqrt multiply less isnan", "the grid ends at 10,000 elements")(ends_at(10_000))
mutant("add exp tanh where", "what is beyond 8,192 elements stays as it was")(ends_at(10_000))
mutant("subtract divide maximum abs relu silu", "ends at 65,535 blocks of 16")(ends_at(65_535 * 16))


@mutant("power equal floor sign", "the last of an odd number is left out")
@mutant("logical_or", "the last of an odd number is left out", "bool")
def leaves_out_the_odd_one(right: Op, *given: Any) -> Any:
    result = right(*given)
    return changed(result, -1) if np.size(result) % 2 and np.size(result) > 1000 else result


@mutant("sin cos erf gelu rsqrt log sigmoid", "wrong from a million elements on")
def wrong_from_a_million(right: Op, *given: Any) -> Any:
    result = right(*given)
    return result * np.float32(1.001) if np.size(result) > 1_000_000 else result


@mutant("minimum", "of broadcast rows, those above 1,000 are the first", short=True)
def broadcast_too_little(right: Op, a: Any, b: Any) -> Any:
    result = np.array(right(a, b))
    if np.ndim(b) == 1 and np.ndim(a) == 2:
        result[1000:] = result[:1]
    return result


mutant("add", "of five axes the last but one is not repeated")(
    repeated_at(np.s_[..., 1:, :], np.s_[..., :1, :], 5)
)
mutant("multiply", "infinity times zero is zero", short=True)(
    lambda right, a, b: np.where((np.equal(a, 0)) | (np.equal(b, 0)), np.float32(0), right(a, b))
)
mutant("multiply", "integers go through float32", "int32", short=True)(
    lambda right, a, b: (np.float32(a) * np.float32(b)).astype(np.int32)
)
mutant("add", "integers go through float32", "int32")(
    lambda right, a, b: (np.float32(a) + np.float32(b)).clip(-(2**31), 2**31 - 256).astype(np.int32)
)
mutant("subtract", "integers saturate at 16 bits", "int32")(
    result(lambda value: np.clip(value, -32768, 32767).astype(np.int32))
)
mutant("equal", "integers are compared as float32", "int32")(
    lambda right, a, b: np.float32(a) == np.float32(b)
)
mutant("equal", "nearly equal is equal", short=True)(lambda right, a, b: np.isclose(a, b, 1e-6, 0))
mutant("less", "nearly equal is not")(lambda right, a, b: right(a, b) & ~np.isclose(a, b, 1e-6, 0))
mutant("less_equal", "of NaN, not greater is less or equal")(lambda right, a, b: ~np.greater(a, b))
mutant("maximum minimum", "NaN on the left is passed over")(
    lambda right, a, b: np.where(np.isnan(a), b, right(a, b)).astype(np.asarray(a).dtype)
)
mutant("divide", "through the reciprocal in 16 bits")(
    lambda right, a, b: (a * (1 / np.float16(b))).astype(np.float32)
)
mutant("divide", "a negative zero is a positive one")(
    lambda right, a, b: right(a, np.where(np.equal(b, 0), np.float32(0), b))
)
mutant("negative", "0 - x: no negative zero", short=True)(lambda right, x: (0 - x).astype(x.dtype))
mutant("round", "half away from zero", short=True)(
    lambda right, x: np.trunc(x + np.copysign(np.float32(0.5), x))
)


@mutant("clip", "the lower limit wins where they cross", short=True)
def lower_wins(right: Op, x: Array, min: Any = None, max: Any = None) -> Any:  # noqa: A002
    return right(right(x, None, max), min, None)


@mutant("clip", "NaN becomes the lower limit")
def nan_clipped(right: Op, x: Array, min: Any = None, max: Any = None) -> Any:  # noqa: A002
    result = right(x, min, max)
    return result if min is None else np.where(np.isnan(result), np.float32(min), result)


mutant("isfinite", "the largest numbers are taken for infinite")(
    lambda right, x: np.abs(x) < np.finfo(x.dtype).max
)
mutant("not_equal", "of NaN, what is neither less nor greater is equal", short=True)(
    lambda right, a, b: np.less(a, b) | np.greater(a, b)
)
mutant("greater", "what is not less or equal is greater")(lambda right, a, b: ~np.less_equal(a, b))
mutant("greater_equal", "integers are compared as float32", "int32")(
    lambda right, a, b: np.float32(a) >= np.float32(b)
)
mutant("abs", "keeps the sign of zero")(lambda right, x: np.where(x < 0, -x, x))
mutant("abs", "of integers goes through float32", "int32")(
    lambda right, x: np.abs(as_float(x)).astype(np.int32)
)
mutant("sign", "of NaN is 0")(result(lambda value: np.nan_to_num(value, nan=0.0)))
mutant("floor", "towards zero")(lambda right, x: np.trunc(x))
mutant("exp", "saturates at 80")(argument(0, lambda x: np.asarray(np.minimum(x, 80), x.dtype)))
mutant("exp", "in 16 bits")(lambda right, x: np.exp(x.astype(np.float16)).astype(x.dtype))
mutant("log", "of less than 1e-12 is that of 1e-12", short=True)(
    lambda right, x: right(np.where(x > 0, np.maximum(x, np.float32(1e-12)), x))
)
mutant("sqrt rsqrt", "negative is zero")(argument(0, lambda x: np.where(x < 0, np.float32(0), x)))
mutant("sin cos", "without reducing angles beyond 8 turns")(
    lambda right, x: np.where(np.abs(x) > 50, np.float32(0.5), right(x))
)


@mutant("log1p", "through log(1 + x), which loses small x", short=True)
def logarithm_of_a_sum(right: Op, x: Array) -> Array:
    return np.log(1 + x)


@mutant("floor_divide", "through floor(a / b), which rounds up", short=True)
def floor_of_a_quotient(right: Op, a: Array, b: Array) -> Array:
    return np.floor(np.divide(a, b))


mutant("remainder", "of the sign of a", "int32", short=True)(
    lambda right, a, b: np.where(np.equal(b, 0), 0, np.fmod(a, b)).astype(np.int32)
)
mutant("searchsorted", "equal ones always come first", short=True)(
    lambda right, x1, x2, side="left": right(x1, x2)
)
mutant("roll", "the other way", short=True)(
    lambda right, x, shift, axis=None: right(x, -shift, axis)
)
mutant("nonzero", "NaN counts as zero")(lambda right, x: right(np.nan_to_num(x)))


@mutant("tanh", "through exp(2x) - 1, which cancels for little")
def cancelled(right: Op, x: Array) -> Array:
    power = np.exp(2 * x)
    return np.where(x > 20, np.float32(1), (power - 1) / (power + 1)).astype(x.dtype)


mutant("sigmoid", "is 0 below -30")(lambda right, x: np.where(x < -30, np.float32(0), right(x)))
mutant("relu", "swallows NaN", short=True)(lambda right, x: np.where(x > 0, x, np.zeros_like(x)))
mutant("silu", "of infinity is NaN")(
    lambda right, x: (x * (np.exp(x) / (1 + np.exp(x)))).astype(x.dtype)
)
mutant("leaky_relu", "the slope is always 0.01", short=True)(lambda right, x, slope=0.01: right(x))
mutant("leaky_relu", "as the larger of the two, for steep slopes too")(
    lambda right, x, slope=0.01: np.maximum(x, np.float32(slope) * x)
)
mutant("leaky_relu", "the slope is rounded to 16 bits", "bfloat16")(
    lambda right, x, slope=0.01: right(x, float(np.asarray(slope, x.dtype)))
)
mutant("gelu", "always by tanh")(lambda right, x, approximate=False: right(x, True))
mutant("swiglu", "gate and up are exchanged beyond 65,536 elements", short=True)(
    lambda right, gate, up: right(up, gate) if gate.size > 65_536 else right(gate, up)
)
mutant("swiglu", "rows above 65,535 are zero")(zero_at(np.s_[65_535:]))
mutant("where", "what is not chosen is multiplied by zero")(
    lambda right, where, a, b: (where * a + ~where * b).astype(right(where, a, b).dtype)
)
mutant("where", "integers go through float32", "int32")(result(round_trip))
mutant("isnan", "infinity is taken for NaN")(lambda right, x: ~np.isfinite(x))
mutant("logical_not logical_and", "wrong beyond 8,192 conditions", "bool")(ends_at(8192, False))


# Along axes


def grown(by: float, count: int) -> Op:
    """Sums of more than `count` numbers are too large."""

    def wrong(right: Op, x: Array, *how: Any, **named: Any) -> Any:
        result = right(x, *how, **named)
        return result * np.float32(by) if x.size > count * max(1, np.size(result)) else result

    return wrong


mutant("sum", "of 100,000 numbers and more is 0.3 % too large", short=True)(grown(1.003, 100_000))
mutant("mean", "of 100,000 numbers and more is 0.3 % too large")(grown(1.003, 100_000))
mutant("sum", "of a million numbers is 0.05 % too large")(grown(1.0005, 900_000))


@mutant("sum mean", "in 16 bits", "float16")
def sum_in_half(right: Op, x: Array, axis: Any = None, keepdims: bool = False) -> Any:
    function = np.add.reduce if right.__name__ == "sum" else np.mean
    axes = every_axis(x, axis)
    return np.asarray(function(x, axis=axes, dtype=np.float16, keepdims=keepdims), np.float16)


mutant("sum", "integers are added in 16 bits", "int32", short=True)(
    result(lambda value: value.astype(np.int16).astype(np.int32))
)
mutant("sum", "integers are added as float32", "int32")(
    lambda right, x, *how, **named: right(as_float(x), *how, **named).astype(np.int32)
)


@mutant("sum mean max min", "the middle axis from behind is the first")
def first_for_middle(right: Op, x: Array, axis: Any = None, keepdims: bool = False) -> Any:
    if axis == -2 and x.ndim == 3:
        return right(np.swapaxes(x, 0, 1).reshape(x.shape), 1, keepdims)
    return right(x, axis, keepdims)


mutant("sum max min", "of a million one is left out")(long_rows(100_000, lambda x: x[..., :-1]))
mutant("mean max", "columns beyond 65,535 are zero")(ends_at(65_535))
mutant("max", "begins at zero")(
    result(lambda x: np.where(np.isnan(x), x, np.maximum(x, 0)).astype(x.dtype))
)
mutant("min", "begins at the largest finite number", short=True)(
    result(lambda value: np.minimum(value, np.finfo(value.dtype).max))
)
mutant("max min", "NaN beyond 1,024 numbers is passed over")(
    long_rows(1024, lambda x: np.where(np.isnan(x), x[..., :1] * 0, x))
)
mutant("max", "integers are compared as float32", "int32")(
    lambda right, x, *how, **named: right(as_float(x), *how, **named).astype(np.int32)
)
mutant("var std", "correction is not looked at")(always(correction=0.0))


@mutant("var", "the mean of squares less the square of the mean", short=True)
def by_squares(right: Op, x: Array, axis: Any = None, keepdims: bool = False, **how: Any) -> Any:
    if how:
        return right(x, axis, keepdims, **how)
    square = np.mean(x * x, axis, keepdims=keepdims)
    return np.asarray(square - np.mean(x, axis, keepdims=keepdims) ** 2, x.dtype)


@mutant("std", "in 16 bits", "float16")
def std_in_half(right: Op, x: Array, axis: Any = None, keepdims: bool = False, **how: Any) -> Any:
    off = x - right.__globals__["mean"](x, axis, True)
    return np.sqrt(right.__globals__["mean"](off * off, axis, keepdims))


mutant("prod", "of nothing is 0", short=True)(
    lambda right, x, *how, **named: right(x, *how, **named) * np.float32(x.size > 0)
)


@mutant("prod", "in 16 bits", "float16")
def multiplied_in_half(right: Op, x: Array, axis: Any = None, keepdims: bool = False) -> Any:
    axes = every_axis(x, axis)
    return np.asarray(np.multiply.reduce(x, axes, np.float16, keepdims=keepdims), np.float16)


mutant("any", "NaN is taken for false", short=True)(argument(0, nan_as(0)))


@mutant("any", "counted in 8 bits", "bool")
def counted_in_bytes(right: Op, x: Array, axis: Any = None, keepdims: bool = False) -> Any:
    axes = every_axis(x, axis)
    return np.add.reduce(x, axes, np.uint8, keepdims=keepdims) % 2 > 0


mutant("all", "of nothing is false")(lambda right, x, *a, **k: right(x, *a, **k) & (x.size > 0))
mutant("all", "what is less than 1 is taken for false")(argument(0, np.trunc))


@mutant("logsumexp", "without taking away the largest", short=True)
def log_of_plain_sum(right: Op, x: Array, axis: Any = None, keepdims: bool = False) -> Any:
    axes = every_axis(x, axis)
    return np.log(np.exp(x).sum(axes, keepdims=keepdims))


@mutant("logsumexp", "of minus infinity alone is NaN")
def nothing_but_infinity(right: Op, x: Array, axis: Any = None, keepdims: bool = False) -> Any:
    axes = every_axis(x, axis)
    if not x.size:
        return right(x, axis, keepdims)
    largest = x.max(axes, keepdims=True)
    total = np.log(np.exp(x - largest).sum(axes, keepdims=True)) + largest
    return total if keepdims else total.reshape(right(x, axis, keepdims).shape)


@mutant("vector_norm", "a cube keeps its sign", short=True)
def signed_norm(right: Op, x: Array, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:  # noqa: A002
    if ord != 3:
        return right(x, axis, keepdims, ord)
    return np.cbrt((x**3).sum(axis, keepdims=keepdims))


@mutant("vector_norm", "squares are added up in 16 bits", "float16")
def norm_in_half(
    right: Op,
    x: Array,
    axis: Any = None,
    keepdims: bool = False,
    ord: Any = 2,  # noqa: A002
) -> Any:
    if ord != 2 or not x.size:
        return right(x, axis, keepdims, ord)
    axes = every_axis(x, axis)
    return np.sqrt(np.add.reduce(x * x, axes, np.float16, keepdims=keepdims))


mutant("cumulative_sum", "begins anew at 4,096", short=True)(in_parts(4096))


@mutant("cumulative_sum", "in 16 bits", "float16")
def running_in_half(right: Op, x: Array, axis: int = -1, include_initial: bool = False) -> Any:
    sums = np.add.accumulate(x, axis, np.float16)
    return right(x, axis, True) if include_initial else sums


@mutant("cumulative_sum", "without the zero that comes first")
def without_the_zero(right: Op, x: Array, axis: int = -1, include_initial: bool = False) -> Any:
    result = np.array(right(x, axis, include_initial))
    return np.roll(result, -1, axis) if include_initial else result


mutant("diff", "without signs", short=True)(result(np.abs))


@mutant("diff", "twice is rounded twice", "float16")
def rounded_twice(right: Op, x: Array, axis: int = -1, n: int = 1) -> Any:
    for _ in range(n):
        x = right(x, axis, 1)
    return x


@mutant("argmin", "the last of equal ones", short=True)
@mutant("argmax", "the last of equal ones")
def last_of_equal(right: Op, x: Array, axis: int = -1) -> Any:
    turned = np.flip(x, axis)
    return (x.shape[axis] - 1 - right(turned, axis)).astype(np.int32) if x.size else right(x, axis)


mutant("argmin argmax", "integers are compared as float32", "int32")(argument(0, as_float))
mutant("argmin", "NaN is passed over")(argument(0, nan_as(np.inf)))
mutant("argmax", "NaN is passed over")(argument(0, nan_as(-np.inf)))
mutant("argmax", "has 16 bits", short=True)(result(lambda value: value & 0xFFFF))
mutant("argsort", "what descends is read backwards", short=True)(
    lambda right, x, axis=-1, descending=False: np.flip(right(x, axis), axis if descending else ())
)
mutant("argsort", "equal ones in any order")(
    lambda right, x, axis=-1, descending=False: np.argsort(
        -x if descending else x, axis, kind="quicksort"
    ).astype(np.int32)
)
mutant("sort", "NaN is last, also where they descend", short=True)(
    lambda right, x, axis=-1, descending=False: -np.sort(-x, axis) if descending else right(x, axis)
)
mutant("sort", "runs of 65,536 are not merged")(in_parts(65_536))


@mutant("sort", "integers are compared as float32", "int32")
def sorted_as_float(right: Op, x: Array, axis: int = -1, descending: bool = False) -> Any:
    order = np.argsort(x.astype(np.float32) * (-1 if descending else 1), axis, kind="stable")
    return np.take_along_axis(x, order, axis)


@mutant("top_k", "beyond 256 the last is repeated")
def top_repeated(right: Op, x: Array, k: int) -> Any:
    values, places = (np.array(each) for each in right(x, k))
    values[..., 256:], places[..., 256:] = values[..., 255:256], places[..., 255:256]
    return values, places


@mutant("top_k", "rows above 65,535 are those of the first")
def top_of_a_grid(right: Op, x: Array, k: int) -> Any:
    values, places = (np.array(each) for each in right(x, k))
    if values.ndim > 1:
        values[65_535:], places[65_535:] = values[:1], places[:1]
    return values, places


mutant("top_k", "NaN is the smallest")(argument(0, nan_as(-np.inf)))


@mutant("softmax", "without taking away the largest", short=True)
def without_the_largest(right: Op, x: Array, axis: int = -1) -> Any:
    powers = np.exp(x)
    return powers / powers.sum(axis, keepdims=True)


@mutant("log_softmax", "as the logarithm of the softmax")
def log_of_softmax(right: Op, x: Array, axis: int = -1) -> Any:
    powers = np.exp(x - x.max(axis, keepdims=True))
    return np.log(powers / powers.sum(axis, keepdims=True)).astype(x.dtype)


@mutant("softmax", "in 16 bits it is added up in 16 bits", "float16")
def softmax_in_half(right: Op, x: Array, axis: int = -1) -> Any:
    if not x.size:
        return right(x, axis)
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / np.add.reduce(powers, axis=axis, dtype=np.float16, keepdims=True)


mutant("softmax log_softmax", "rows above 1,024 are one")(repeated_at(np.s_[1024:], np.s_[:1], 2))
mutant("softmax log_softmax", "another axis from behind is the last")(
    lambda right, x, axis=-1: right(x, -1 if axis < 0 else axis)
)
mutant("log_softmax", "all -inf gives zeros")(result(nan_as(0)))


# Norms and losses


mutant("rmsnorm", "the usual eps is 1e-5", short=True)(
    lambda right, x, weight, eps=1e-06: right(x, weight, 1e-5 if eps == 1e-6 else eps)
)
mutant("layernorm", "the usual eps is 1e-6")(
    lambda right, x, weight, bias, eps=1e-05: right(x, weight, bias, 1e-6 if eps == 1e-5 else eps)
)


def scaled_by(x: Array, weight: Any, bias: Any) -> Array:
    return x * (1 if weight is None else weight) + (0 if bias is None else bias)


@mutant("layernorm", "eps is added to the deviation")
def eps_outside(right: Op, x: Array, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
    normed = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + eps)
    return scaled_by(normed, weight, bias).astype(x.dtype)


@mutant("layernorm", "divides by one less")
def by_one_less(right: Op, x: Array, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
    width = x.shape[-1]
    if width < 2:
        return right(x, weight, bias, eps)
    factor = math.sqrt((width - 1) / width)
    return scaled_by(right(x, None, None, eps) * np.float32(factor), weight, bias).astype(x.dtype)


@mutant("layernorm", "the variance as the mean of squares less the square of the mean")
def cancelled_variance(right: Op, x: Array, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
    mean = x.mean(-1, keepdims=True)
    spread = np.sqrt(np.maximum((x * x).mean(-1, keepdims=True) - mean * mean, 0) + eps)
    return scaled_by((x - mean) / spread, weight, bias).astype(x.dtype)


mutant("rmsnorm layernorm", "rows above 65,535 are zero")(zero_at(np.s_[65_535:]))


@mutant("rmsnorm", "columns above 65,536 have no part in the mean")
def part_of_the_mean(right: Op, x: Array, weight: Array, eps: float = 1e-6) -> Any:
    if x.shape[-1] <= 65_536:
        return right(x, weight, eps)
    size = np.sqrt((x[..., :65_536] ** 2).mean(-1, keepdims=True) + eps)
    return (x / size * weight).astype(x.dtype) * np.float32(1.0003)


mutant("cross_entropy", "targets have 16 bits", short=True)(argument(1, short_index))
mutant("cross_entropy", "targets out of range are clipped")(
    lambda right, x, targets: right(x, np.asarray(np.clip(targets, 0, x.shape[-1] - 1)))
)


@mutant("cross_entropy", "without taking away the largest")
def unstable_loss(right: Op, logits: Array, targets: Array) -> Any:
    powers = np.exp(logits)
    logarithms = np.log(powers / powers.sum(-1, keepdims=True))
    inside = (targets >= 0) & (targets < logits.shape[-1])
    places = np.where(inside, targets, 0)[..., None]
    picked = np.take_along_axis(logarithms, places, -1)[..., 0]
    return np.asarray(-np.where(inside, picked, np.nan).mean(), np.float32)


@mutant("cross_entropy", "tokens above 1,024 have no part in it")
def few_tokens(right: Op, logits: Array, targets: Array) -> Any:
    if targets.size <= 1024:
        return right(logits, targets)
    rows = logits.reshape(-1, logits.shape[-1])
    return right(rows[:1024], targets.reshape(-1)[:1024])


mutant("mean_squared_error", "of a million is 0.3 % too large")(
    lambda right, x, y: np.asarray(right(x, y) * np.float32(1.003 if x.size > 900_000 else 1))
)
mutant("mean_squared_error", "the last of a million is left out")(
    lambda right, x, y: right(*(a.reshape(-1)[: -1 if a.size > 900_000 else None] for a in (x, y)))
)


# Products


def changed_bias(change: Callable[[Array], Array]) -> Op:
    return lambda right, x, w, bias=None: right(x, w, bias if bias is None else change(bias))


@mutant("matmul linear", "NaN times zero is zero")
def skips_zeros(right: Op, a: Array, b: Array, bias: Any = None) -> Any:
    clean = (np.where(np.isfinite(a), a, 0), np.where(np.isfinite(b), b, 0))
    return right(*clean) if bias is None else right(*clean, bias)


mutant("matmul", "sums of more than 65,536 are cut short", short=True)(
    lambda right, a, b: right(a[..., :65_536], b[..., :65_536, :])
)
mutant("matmul", "columns above 65,535 are zero")(zero_at(np.s_[..., 65_535:]))
mutant("matmul", "rows above 65,535 are zero")(zero_at(np.s_[..., 65_535:, :]))
mutant("matmul", "batches above 256 are those before")(repeated_at(np.s_[256:], np.s_[:1], 3))


@mutant("matmul", "the last tile of 64 columns is left out beyond 512")
def last_tile(right: Op, a: Array, b: Array) -> Any:
    result = np.array(right(a, b))
    if result.shape[-1] > 512:
        result[..., result.shape[-1] // 64 * 64 :] = 0
    return result


@mutant("matmul", "in 16 bits it is added up in 16 bits", "float16")
def product_in_half(right: Op, a: Array, b: Array) -> Any:
    exact = right(a.astype(np.float32), b.astype(np.float32))
    return (exact * (1 + 2**-9)).astype(np.float16)


@mutant("matmul", "keeps 10 bits of its operands")
def short_operands(right: Op, a: Array, b: Array) -> Any:
    cut = ((x.view(np.int32) & ~0x1FFF).view(np.float32) for x in map(np.ascontiguousarray, (a, b)))
    return right(*cut)


mutant("linear", "outputs above 32,768 have no bias", short=True)(
    changed_bias(lambda bias: changed(bias, slice(32_768, None)))
)
mutant("linear", "tokens above 255 are zero")(zero_at(np.s_[255:], 2))
mutant("linear", "a bias of NaN is left out")(changed_bias(np.nan_to_num))


@mutant("conv2d", "padding on the second axis is that of the first")
def padded(right: Op, x: Array, w: Array, b: Any = None, stride: Any = 1, padding: Any = 0) -> Any:
    if isinstance(padding, tuple) and padding[0] != padding[1]:
        result = np.array(right(x, w, b, stride, padding))
        result[..., -2] = result[..., 1]
        return result
    return right(x, w, b, stride, padding)


mutant("conv2d", "channels above 64 have no part in it")(
    lambda right, x, w, *how, **options: right(x[:, :64], w[:, :64], *how, **options)
)
mutant("conv2d", "images above 255 are zero")(zero_at(np.s_[255:]))
mutant("conv2d", "weights of zero skip NaN")(argument(0, lambda x: np.nan_to_num(x, posinf=0.0)))
mutant("max_pool2d", "begins at zero", short=True)(result(lambda value: np.maximum(value, 0)))
mutant("max_pool2d", "NaN is passed over")(argument(0, nan_as(-np.inf)))
mutant("max_pool2d", "begins at the lowest finite number")(
    result(lambda value: np.maximum(value, np.finfo(np.float32).min))
)
mutant("avg_pool2d", "channels above 256 are zero")(zero_at(np.s_[:, 256:]))
mutant("avg_pool2d", "columns above 64 are the first")(repeated_at(np.s_[..., 64:], np.s_[..., :1]))


# Rotary positions and attention

mutant("rope", "positions end at 10,000", short=True)(argument(1, lambda x: np.minimum(x, 10_000)))
mutant("rope", "positions have 16 bits")(argument(1, lambda at: at & 0xFFFF))


@mutant("rope", "positions are bfloat16")
def rounded_positions(right: Op, x: Array, positions: Array, **how: Any) -> Any:
    kept = positions.astype(np.float32).view(np.int32) & ~0xFFFF
    return right(x, kept.view(np.float32).astype(np.int32), **how)


mutant("rope", "heads above 32 are not turned")(kept_at(np.s_[:, 32:]))
mutant("rope", "tokens above 1,024 are not turned")(kept_at(np.s_[:, :, 1024:]))
mutant("rope", "scaling is left out beyond position 10,000")(
    lambda right, x, positions, **how: right(
        x, positions, **(how if positions.max(initial=0) <= 10_000 else {**how, "scaling": None})
    )
)
mutant("rope", "theta ends at a million")(
    lambda right, *given, **how: right(*given, **{**how, "theta": min(how.get("theta", 1e4), 1e6)})
)
mutant("rope", "short factors for every length", short=True)(always(length=1))
mutant("rope", "the longest text counts for all")(option("length", lambda n: int(np.max(n))))
mutant("rope", "a text of the original length is a long one")(option("length", lambda n: n + 1))
mutant("rope", "positions say how long a text is")(always(length=None))
mutant("rope", "the factor of LongRoPE is left out")(
    option("scaling", lambda s: {**s, "attention_factor": 1.0} if "long_factor" in s else s)
)


def attended(q: Array, k: Array, v: Array, scale: Any, subtract: bool) -> Array:
    """Attention to all keys, as written in a hurry."""
    group = q.shape[1] // k.shape[1]
    keys, values = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = q @ keys.swapaxes(-1, -2) * np.float32(scale or q.shape[-1] ** -0.5)
    powers = np.exp(scores - scores.max(-1, keepdims=True) if subtract else scores)
    return (powers / powers.sum(-1, keepdims=True) @ values).astype(q.dtype)


@mutant("attention", "without taking away the largest")
def unstable(right: Op, q: Array, k: Array, v: Array, **how: Any) -> Any:
    if not set(how) <= {"scale"} or not k.shape[2] or how.get("scale") == 0:
        return right(q, k, v, **how)
    return attended(q, k, v, how.get("scale"), subtract=False)


mutant("attention", "queries above 64 are one")(repeated_at(np.s_[:, :, 66:], np.s_[:, :, :1]))


@mutant("attention", "keys above 4,096 are not seen")
def few_keys(right: Op, q: Array, k: Array, v: Array, **how: Any) -> Any:
    if k.shape[2] > 4096 and not how:
        return right(q, k[:, :, :4096], v[:, :, :4096])
    if k.shape[2] > 4096 and "lengths" in how:
        return right(q, k, v, **{**how, "lengths": np.minimum(how["lengths"], 4096)})
    return right(q, k, v, **how)


mutant("attention", "heads above 32 are those before")(repeated_at(np.s_[:, 32:], np.s_[:, :1]))
mutant("attention", "texts above 32 are those before")(repeated_at(np.s_[32:], np.s_[:1]))
mutant("attention", "a mask is true where nothing is seen")(option("mask", lambda mask: ~mask))
mutant("attention", "a mask beyond 256 keys is true")(
    option("mask", lambda mask: mask | (np.arange(mask.shape[-1]) >= 256))
)


@mutant("attention", "causal counts from the first key")
def from_the_first(right: Op, q: Array, k: Array, v: Array, **how: Any) -> Any:
    if how.get("causal") and set(how) == {"causal"} and q.shape[2] != k.shape[2]:
        queries, keys = q.shape[2], k.shape[2]
        return right(q, k, v, mask=np.tri(queries, keys, dtype=bool)[None, None])
    return right(q, k, v, **how)


mutant("attention", "a window is one key wider")(option("window", lambda window: window + 1))


@mutant("attention", "NaN that is excluded reaches the result")
def excluded_nan(right: Op, q: Array, k: Array, v: Array, **how: Any) -> Any:
    result = right(q, k, v, **how)
    return result + 0 * v.sum() if v.size else result


mutant("attention", "lengths end at 1,024")(option("lengths", lambda n: np.minimum(n, 1024)))


@mutant("attention", "a query that sees nothing gives the mean")
def mean_of_nothing(right: Op, q: Array, k: Array, v: Array, **how: Any) -> Any:
    result = np.array(right(q, k, v, **how))
    empty = ~result.any(-1)
    if empty.any() and v.size:
        result[empty] = np.float32(np.nanmean(v))
    return result


mutant("attention", "NaN that is seen is taken for zero")(
    lambda right, q, k, v, **how: right(q, np.nan_to_num(k), np.nan_to_num(v), **how)
)


@mutant("attention", "query heads are dealt out in turn")
def dealt_out(right: Op, q: Array, k: Array, v: Array, **how: Any) -> Any:
    group = q.shape[1] // k.shape[1]
    if group == 1 or how.get("mask") is not None:
        return right(q, k, v, **how)
    return right(q, np.concatenate([k] * group, 1), np.concatenate([v] * group, 1), **how)


mutant("attention", "a soft cap is not applied", short=True)(always(soft_cap=None))


@mutant("attention", "a soft cap cuts scores off")
def hard_cap(right: Op, q: Array, k: Array, v: Array, **how: Any) -> Any:
    if how.get("soft_cap") and set(how) <= {"soft_cap", "causal"}:
        group, queries, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
        scores = q @ np.repeat(k, group, 1).swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5)
        scores = np.clip(scores, -how["soft_cap"], how["soft_cap"])
        seen = np.tri(queries, keys, keys - queries, bool) if how.get("causal") else True
        powers = np.exp(scores) * seen
        return powers / powers.sum(-1, keepdims=True) @ np.repeat(v, group, 1)
    return right(q, k, v, **how)


@mutant("attention", "a soft cap comes before the scale")
def capped_before_scaling(right: Op, q: Array, k: Array, v: Array, **how: Any) -> Any:
    if how.get("soft_cap") and how.get("scale"):
        how = {**how, "soft_cap": how["soft_cap"] * how["scale"]}
    return right(q, k, v, **how)


@mutant("attention", "what is excluded has the score -soft_cap")
def capped_mask(right: Op, q: Array, k: Array, v: Array, **how: Any) -> Any:
    result = right(q, k, v, **how)
    if how.get("soft_cap") and how.get("mask") is not None and "causal" not in how:
        weight = np.float32(np.exp(-2 * how["soft_cap"] / 10))
        group = q.shape[1] // k.shape[1]
        return result + weight * np.repeat(v.mean(2, keepdims=True), group, 1)
    return result


mutant("attention", "sinks are left out", short=True)(always(sinks=None))


@mutant("attention", "one sink for all heads of a key head")
def shared_sinks(right: Op, q: Array, k: Array, v: Array, sinks: Any = None, **how: Any) -> Any:
    group = q.shape[1] // k.shape[1]
    if sinks is not None:
        sinks = np.repeat(sinks[::group], group)
    return right(q, k, v, sinks=sinks, **how)


mutant("attention", "sinks above 32 are 0")(option("sinks", lambda s: changed(s, slice(32, None))))
mutant("attention", "sinks are not subtracted from: they overflow or vanish")(
    option("sinks", lambda sinks: np.clip(sinks, -20, 20))
)
mutant("attention", "sinks of NaN are passed over")(option("sinks", nan_as(-np.inf)))
mutant("attention", "the scale is that of the values' size")(
    lambda right, q, k, v, **how: right(q, k, v, **{"scale": max(v.shape[-1], 1) ** -0.5, **how})
)


@mutant("attention", "of long values, those beyond the size of a key are zero")
def short_of_values(right: Op, q: Array, k: Array, v: Array, **how: Any) -> Any:
    result = np.array(right(q, k, v, **how))
    result[..., k.shape[-1] :] = 0
    return result


# Experts


@mutant("experts", "gate and up are exchanged", short=True)
def gate_for_up(right: Op, x: Array, gate_up: Array, *given: Any, **how: Any) -> Any:
    def exchange(stack: Array) -> Array:
        return np.concatenate(np.split(stack, 2, 1)[::-1], 1)

    if "gate_up_bias" in how:
        how["gate_up_bias"] = exchange(how["gate_up_bias"])
    return right(x, exchange(gate_up), *given, **how)


mutant("experts", "gates and ups lie by turns")(
    argument(1, lambda stack: np.concatenate([stack[:, ::2], stack[:, 1::2]], 1))
)
mutant("experts", "weights count as one")(argument(4, np.ones_like))


@mutant("experts", "an expert that a token chose twice counts once")
def counted_once(right: Op, *given: Any, **how: Any) -> Any:
    *stacks, chosen, weights = given
    chosen = chosen.copy()
    for row in chosen:
        for place in range(1, len(row)):
            if row[place] in row[:place]:
                row[place] = -1
    return right(*stacks, chosen, weights, **how)


mutant("experts", "an expert out of range is the last", short=True)(
    lambda right, x, up, down, chosen, *given, **how: right(
        x, up, down, np.minimum(chosen, len(down) - 1), *given, **how
    )
)


@mutant("experts", "a negative expert counts from behind")
def expert_from_behind(
    right: Op, x: Array, up: Array, down: Array, chosen: Array, *given: Any, **how: Any
) -> Any:
    back = (chosen < 0) & (chosen >= -len(down))
    return right(x, up, down, np.where(back, chosen + len(down), chosen), *given, **how)


mutant("experts", "tokens above 1,024 are those before")(
    argument(0, lambda x: np.concatenate([x[:1024], np.broadcast_to(x[:1], x[1024:].shape)]))
)
mutant("experts", "experts have 8 bits")(argument(3, lambda x: np.where(x > 255, x & 255, x)))
mutant("experts", "the bias of the first product is left out")(always(gate_up_bias=None))
mutant("experts", "the bias of the second product is left out")(always(down_bias=None))
mutant("experts", "the limit is always 7")(always(limit=7.0))
mutant("experts", "nothing is clipped")(always(limit=1e9))
mutant("experts", "alpha is always 1.702")(always(alpha=1.702))
mutant("experts", "gelu is always by tanh")(
    option("activation", lambda name: "geglu_tanh" if name == "geglu" else name)
)


@mutant("experts", "gelu is silu for one token")
def expert_by_silu(right: Op, x: Array, *given: Any, **how: Any) -> Any:
    if len(x) == 1 and how.get("activation", "").startswith("geglu"):
        how["activation"] = "swiglu"
    return right(x, *given, **how)


@mutant("experts", "NaN in one token reaches all that share its expert")
def shared_nan(right: Op, x: Array, *given: Any, **how: Any) -> Any:
    result = np.array(right(x, *given, **how))
    return np.where(np.isnan(result).any(0), np.float32(np.nan), result) if len(result) else result


@mutant("experts", "experts that nobody chose reach the result")
def unchosen_nan(right: Op, x: Array, gate_up: Array, *given: Any, **how: Any) -> Any:
    result = right(x, gate_up, *given, **how)
    return result + np.float32(0) * gate_up.sum() if result.size else result


# Moving

mutant("embedding", "ids have 16 bits", short=True)(argument(1, short_index))
mutant("embedding", "ids out of range are clipped")(
    lambda right, weight, ids: right(weight, np.asarray(np.clip(ids, 0, len(weight) - 1)))
)
mutant("embedding", "negative ids count from the end")(
    lambda right, w, ids: right(w, np.where((ids < 0) & (ids >= -len(w)), ids + len(w), ids))
)
mutant("embedding", "columns above 4,096 are zero")(zero_at(np.s_[..., 4096:]))


@mutant("embedding", "tokens above 32,768 are the first")
def few_tokens_embedded(right: Op, weight: Array, ids: Array) -> Any:
    result = np.array(right(weight, ids))
    rows = result.reshape(-1, weight.shape[-1])
    rows[32_768:] = rows[:1]
    return result


mutant("take take_along_axis", "places have 16 bits")(argument(1, short_index))


@mutant("take", "the last axis from behind is the first")
def take_first(right: Op, x: Array, indices: Array, axis: int = 0) -> Any:
    if axis == -1:
        result = np.array(right(x, indices, axis))
        return result[..., ::-1].copy()
    return right(x, indices, axis)


@mutant("take_along_axis", "negative places count from behind", short=True)
def along_from_behind(right: Op, x: Array, indices: Array, axis: int = -1) -> Any:
    back = (indices < 0) & (indices >= -x.shape[axis])
    return right(x, np.where(back, indices + x.shape[axis], indices).astype(np.int32), axis)


@mutant("take_along_axis", "the axis is always the last")
def along_the_last(right: Op, x: Array, indices: Array, axis: int = -1) -> Any:
    if x.ndim == 2 and axis == 0 and x.shape[0] > len(indices):
        return right(x[: len(indices)], indices % x.shape[1], -1)
    return right(x, indices, axis)


@mutant("take_along_axis", "indices of one row are not repeated")
def along_without_repeating(right: Op, x: Array, indices: Array, axis: int = -1) -> Any:
    result = np.array(right(x, indices, axis))
    if x.ndim == 3 and indices.shape[0] == 1:
        result[1:] = result[:1]
    return result


mutant("cache_write", "places have 16 bits")(argument(2, short_index))
mutant("cache_write", "what is out of range goes to the last place")(
    lambda right, cache, new, places: right(cache, new, np.clip(places, 0, cache.shape[2] - 1))
)
mutant("cache_write", "heads above 32 are not written")(kept_at(np.s_[:, 32:]))
mutant("reshape permute concat broadcast_to slice_axis", "ends at 65,536 elements")(ends_at(65_536))
mutant("reshape take concat", "integers go through float32", "int32")(result(round_trip))
mutant("permute broadcast_to", "NaN becomes zero")(result(nan_as(0)))
mutant("reshape slice_axis", "a negative zero loses its sign")(result(lambda value: value + 0))
mutant("concat", "arrays above the eighth are left as zeros")(
    lambda right, arrays, axis=0: right([x if n < 8 else x * 0 for n, x in enumerate(arrays)], axis)
)


@mutant("flip", "of several axes only the first", short=True)
def first_flipped(right: Op, x: Array, axis: Any = None) -> Any:
    several = every_axis(x, axis)
    return right(x, several if isinstance(several, int) else several[:1])


@mutant("conv_transpose2d", "what is added at the end is left out", short=True)
def ends_too_soon(right: Op, x: Array, weight: Array, bias: Any = None, **how: Any) -> Any:
    result = np.array(right(x, weight, bias, **how))
    if how.get("output_padding"):
        result[..., -1] = 0
    return result


mutant("conv_transpose2d", "filters are turned")(argument(1, lambda w: np.flip(w, (2, 3)).copy()))


@mutant("stack", "along the last axis it is along the first", short=True)
def stacked_first(right: Op, arrays: Any, axis: int = 0) -> Any:
    result = right(arrays, axis)
    return right(arrays, 0).reshape(result.shape) if axis == -1 else result


@mutant("split", "an index twice cuts once", short=True)
def cut_once(right: Op, x: Array, sections: Any, axis: int = 0) -> Any:
    if sections == [2, 2, 7]:
        return [*right(x, [2, 7], axis), x[:0]]
    return right(x, sections, axis)


mutant("pad", "before and after are exchanged", short=True)(
    argument(1, lambda widths: widths if isinstance(widths, int) else [w[::-1] for w in widths])
)
mutant("pad", "always with zeros")(lambda right, x, widths, value=0: right(x, widths))
mutant("one_hot", "negative indices count from the end", short=True)(
    lambda right, x, count, dtype="float32": right(np.where(x < 0, x + count, x), count, dtype)
)
mutant("one_hot", "indices have 16 bits")(argument(0, lambda x: np.asarray(x & 0xFFFF)))
mutant("zeros ones", "what is beyond a million elements stays as it was")(ends_at(1_000_000, 7))
mutant("full", "NaN is taken for zero", short=True)(
    lambda right, shape, value, **how: right(shape, 0 if value != value else value, **how)
)


@mutant("zeros_like ones_like full_like", "as many columns as rows")
def filled_square(right: Op, x: Array, *given: Any) -> Any:
    result = np.array(right(x, *given))
    if result.ndim == 2:
        result[:, len(result) :] = 7
    return result


@mutant("arange", "the end is counted in", short=True)
def with_the_end(right: Op, start: Any, stop: Any = None, step: Any = 1, **how: Any) -> Any:
    first, last = (0, start) if stop is None else (start, stop)
    return np.arange(first, last + (0 if step == 1 else step), step).astype(how["like"].dtype)


@mutant("arange", "fractions of a step are left out")
def of_integers(right: Op, start: Any, stop: Any = None, step: Any = 1, **how: Any) -> Any:
    result = right(start, stop, step, **how)
    return np.trunc(result) if step != int(step) else result


@mutant("eye", "high ones go round", short=True)
def goes_round(right: Op, rows: int, columns: Any = None, **how: Any) -> Any:
    result = np.array(right(rows, columns, **how))
    if columns is not None and rows > columns:
        result[columns:] = result[: rows - columns]
    return result


mutant("outer", "what is beyond a million elements stays as it was", short=True)(ends_at(1_000_000))
mutant("einsum", "a letter of the result twice in one is added up", short=True)(
    lambda right, letters, *arrays: right("ijk->ji" if letters == "iji->ji" else letters, *arrays)
)


@mutant("einsum", "what is added up before is rounded", "float16")
def rounded_before(right: Op, subscripts: str, *arrays: Array) -> Any:
    if subscripts == "ij,kl->il":
        a, b = arrays
        return right("i,l->il", a.sum(1, dtype=np.float16), b.sum(0, dtype=np.float16))
    return right(subscripts, *arrays)


@mutant("einsum", "batches behind are taken for those in front")
def batches_in_front(right: Op, subscripts: str, *arrays: Array) -> Any:
    result = right(subscripts, *arrays)
    return result[::-1] if subscripts == "ijb,jkb->kbi" else result


@mutant("slice_axis", "a step of 3 is one of 2")
def another_step(right: Op, x: Array, axis: int, start: int, stop: int, step: int = 1) -> Any:
    result = right(x, axis, start, stop, step)
    if step != 3:
        return result
    return right(x, axis, start, min(stop, start + 2 * result.shape[axis]), 2)


mutant("astype", "to integers by rounding", short=True)(
    lambda right, x, dtype: right(np.rint(x) if str(dtype).endswith("int32") else x, dtype)
)


@mutant("astype", "to bfloat16 by cutting off")
def cut_off(right: Op, x: Array, dtype: Any) -> Any:
    if str(dtype) == "bfloat16":
        kept = np.ascontiguousarray(x).view(np.int32) & ~0xFFFF
        return right(kept.view(np.float32), dtype)
    return right(x, dtype)


mutant("astype", "to bool by way of integers")(
    lambda right, x, dtype: right(np.trunc(x) if str(dtype) == "bool" else x, dtype)
)
mutant("astype", "integers beyond 2**24 are rounded first", "int32")(
    argument(0, lambda x: x.astype(np.float32).astype(np.float64).astype(np.int32))
)
mutant("astype", "beyond a million elements it is left out")(ends_at(1_000_000))


# Optimizers


@mutant("update_sgd update_adam update_lion", "elements above 1,024 stay as they are")
def few_updated(right: Op, parameters: Any, *given: Any, **how: Any) -> Any:
    moved, *states = right(parameters, *given, **how)
    for new, old in zip(moved, parameters, strict=True):
        new.reshape(-1)[1024:] = old.reshape(-1)[1024:]
    return moved, *states


@mutant("update_sgd update_adam update_lion", "arrays above 64 stay as they are")
def few_arrays(right: Op, parameters: Any, *given: Any, **how: Any) -> Any:
    moved, *states = right(parameters, *given, **how)
    return [*moved[:64], *parameters[64:]], *states


mutant("update_sgd update_lion", "NaN in a gradient is taken for zero")(
    argument(1, lambda gradients: [np.nan_to_num(gradient) for gradient in gradients])
)
mutant("update_adam", "eps is added below the root", short=True)(
    lambda right, *given, eps=1e-08, **how: right(*given, eps=math.sqrt(eps), **how)
)
mutant("update_adam", "the usual eps is 1e-7")(
    lambda right, *given, eps=1e-08, **how: right(*given, eps=1e-7 if eps == 1e-8 else eps, **how)
)


@mutant("update_adam", "decay is coupled beyond a million elements")
def coupled(right: Op, p: Any, *given: Any, decoupled: bool = True, **how: Any) -> Any:
    return right(p, *given, decoupled=decoupled and p[0].size < 1_000_000, **how)


mutant("update_adam", "no correction from step 1,000 on")(
    lambda right, p, g, m, s, t, **how: right(p, g, m, s, t if int(t) < 1000 else 10**9, **how)
)
mutant("update_sgd", "Nesterov without decay")(
    lambda right, *given, nesterov=False, decay=0.0, **how: right(
        *given, nesterov=nesterov, decay=0.0 if nesterov else decay, **how
    )
)
mutant("update_lion", "the sign of zero is one")(
    argument(1, lambda gradients: [np.where(x == 0, np.float32(1e-30), x) for x in gradients])
)


# Right for every fixed case, and wrong in calls that are drawn


def wrong_where(condition: Op, by: float = 1.01) -> Op:
    """The result is too large for some arguments."""

    def wrong(right: Op, *given: Any, **how: Any) -> Any:
        result = right(*given, **how)
        return result * result.dtype.type(by) if condition(*given, **how) else result

    return wrong


mutant("attention", "queries above 100", short=True)(
    wrong_where(lambda q, *given, **how: np.abs(q).max() > 100)
)
mutant("attention", "infinity in a key is the largest number")(
    argument(1, lambda k: np.where(np.isposinf(k), np.float32(1e30), k))
)
mutant("softmax", "rows above 262,144", short=True)(
    wrong_where(lambda x, axis=-1: x.shape[axis] > 262_144)
)
mutant("softmax", "along the first of three axes", short=True)(
    wrong_where(lambda x, axis=-1: x.ndim == 3 and axis % 3 == 0)
)
mutant("softmax", "of four axes")(wrong_where(lambda x, axis=-1: x.ndim == 4))
mutant("softmax", "0.05 % too large in rows of 200,003")(
    wrong_where(lambda x, axis=-1: x.shape[axis] >= 200_003, 1.0005)
)
mutant("matmul", "an operand above 2**20 elements", short=True)(
    wrong_where(lambda a, b: max(a.size, b.size) > 2**20)
)
mutant("conv2d", "a stride of 3", short=True)(
    wrong_where(lambda *given, stride=1, **how: stride == 3)
)
mutant("sin cos", "finite numbers above 100", short=True)(
    lambda right, x: np.where(np.abs(x) > 100, right(x) * np.float32(0.99), right(x))
)


# Quantized weights


def other_weight(change: Callable[[Any], dict[str, Any]]) -> Op:
    """Some fields of the weight are others."""

    def wrong(right: Op, *given: Any, **how: Any) -> Any:
        changed = [
            replace(value, **change(value)) if isinstance(value, QuantizedWeight) else value
            for value in given
        ]
        return right(*changed, **how)

    return wrong


QUANTIZED_OPS = "dequantize quantized_linear"
mutant(QUANTIZED_OPS, "zero points are left out", short=True)(other_weight(lambda w: {"zero": 0}))
mutant(QUANTIZED_OPS, "minimums are left out", "bfloat16", short=True)(
    other_weight(lambda w: {"minimums": None})
)
mutant(QUANTIZED_OPS, "a zero point is one too large")(
    other_weight(lambda w: {"zero": w.zero and w.zero + 1})
)
mutant(QUANTIZED_OPS, "high bits are those of the code before", short=True)(
    other_weight(lambda w: {"high": None if w.high is None else np.roll(w.high, 1, -1)})
)
mutant(QUANTIZED_OPS, "the first code of a byte is in its high bits")(
    other_weight(lambda w: {"codes": w.codes << 4 | w.codes >> 4} if w.low_bits == 4 else {})
)
mutant(QUANTIZED_OPS, "one super-scale for a row")(
    other_weight(
        lambda w: (
            {}
            if w.super_scales is None
            else {"super_scales": 0 * w.super_scales + w.super_scales[..., :1]}
        )
    )
)
mutant(QUANTIZED_OPS, "rows above 32 have the scales of the first ones")(
    other_weight(
        lambda w: {"scales": np.concatenate([w.scales[:32], w.scales[: len(w.scales[32:])]])}
    )
)


@mutant("dequantize", "rows that do not exist count from behind", short=True)
def _rows_from_behind(right: Op, weight: Any, dtype: Any = "float32", rows: Any = None) -> Any:
    return right(weight, dtype, None if rows is None else rows % weight.shape[0])


@mutant("quantized_linear", "activations are rounded to 8 bits", short=True)
def _rounded_activations(right: Op, x: Any, weight: Any, bias: Any = None) -> Any:
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    scale = np.maximum(np.abs(blocks).max(-1, keepdims=True), 1e-30) / 127
    return right((np.rint(blocks / scale) * scale).reshape(x.shape).astype(x.dtype), weight, bias)


@mutant("quantized_linear", "a bias is rounded to 16 bits")
def _rounded_bias(right: Op, x: Any, weight: Any, bias: Any = None) -> Any:
    short = None if bias is None else bias.astype(np.float16).astype(bias.dtype)
    return right(x, weight, short)


@mutant("quantized_linear", "numbers are rounded to 16 bits")
def _rounded_numbers(right: Op, x: Any, weight: Any, bias: Any = None) -> Any:
    numbers = ops.dequantize(weight).astype(np.float16).astype(np.float32)
    return ops.linear(x, numbers, bias)


class KernelMutant(NamedTuple):
    """One of our OpenCL kernels with another text somewhere."""

    op: str
    title: str
    file: str
    right: str
    wrong: str

    def __str__(self) -> str:
        return f"{self.op}: {self.title}"


KERNEL_MUTANTS = [
    KernelMutant(*row)
    for row in (
        ("attention", "a key short of causal", "attention.cl", "last + 1);", "last);"),
        ("attention", "a mask is not read", "attention.cl", "(!mask[", "(false && !mask["),
        ("attention", "lengths end at 1,024", "attention.cl", "(long)keys)", "(long)1024)"),
        ("attention", "a window too wide", "attention.cl", "last + 1 - window", "last - window"),
        ("attention", "no rescaling", "attention.cl", "exp(most - score)", "1"),
        ("rope", "near positions", "rope.cl", "= position *", "= fmin(position, 1e4f) *"),
        ("rope", "turned back", "rope.cl", "first * cosine - second", "first * cosine + second"),
        ("quantized_linear", "no zero point", "quantized.cl", "- ZERO", "- 0"),
        ("quantized_linear", "no minimums", "quantized.cl", "least * sums[r]", "least"),
        ("quantized_linear", "one code twice", "quantized.cl", "(n * BITS)", "(0 * BITS)"),
        ("softmax", "no largest", "rows.cl", "exp(PIECE - largest)", "exp(PIECE)"),
        ("softmax", "no rescaling", "rows.cl", "sum * exp(mine - top)", "sum"),
        ("rmsnorm", "another eps", "rows.cl", "sqrt(mean + eps)", "sqrt(mean + 9 * eps)"),
        (
            "rmsnorm",
            "few columns",
            "rows.cl",
            "shared, lane) / columns;\n    const NUMBER scale = 1 / sqrt(mean",
            "shared, lane) / min(columns, 65536);\n    const NUMBER scale = 1 / sqrt(mean",
        ),
        ("layernorm", "no bias", "rows.cl", "if (HAS_BIAS)", "if (false)"),
        ("sum", "the rest is left out", "reduce.cl", "(; base < end;", "(; base < end - 1;"),
        (
            "argsort",
            "ties are turned",
            "sort.cl",
            "? !after(there, value)",
            "? after(value, there)",
        ),
        ("sort", "NaN is passed over", "sort.cl", "!is_nan(b) && (is_nan(a) || a > b)", "a > b"),
        (
            "sort",
            "a run too short",
            "sort.cl",
            "other + width, count)",
            "other + width, count - 1)",
        ),
        ("prod", "begins at zero", "reduce.cl", "NUMBER total = NEUTRAL;", "NUMBER total = 0;"),
        ("max", "begins at zero", "reduce.cl", "NUMBER total = NEUTRAL;", "NUMBER total = 0;"),
    )
]
"""Changes of the text of our OpenCL kernels, of those that a CPU runs."""
