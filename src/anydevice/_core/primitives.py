"""The primitive operations that every engine implements; all other ops are written in them.

They are named as in the array API standard, if it has them. They work the same everywhere:

- Array operands share a dtype and broadcast; a Python number beside an array adopts the array's
  dtype. The result has that dtype; comparisons return `bool`.
- Counts and indices (`argmax`, `top_k`) are `int32`; index arguments may have any integer dtype.
- `sum` and `matmul` of 16-bit floats accumulate in `float32` and round once, at the end.
- `max`, `maximum` and similar ops propagate NaN; `argmax` and `top_k` take it for the largest.
- Only `write` changes an operand: it consumes its first.
- An index out of range reads nothing: `take` and `take_along_axis` return NaN for floating dtypes
  and 0 for others; `write` skips it. Negative indices are out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from anydevice._core.array import Array, HostArray
    from anydevice._core.dtypes import DType

OPTIONAL_ONE: tuple[str, ...] = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cosh", "expm1", "log10", "log1p",
    "log2", "sinh", "tan", "trunc",
)  # fmt: skip
BITWISE = tuple(f"bitwise_{name}" for name in ("and", "left_shift", "or", "right_shift", "xor"))
OPTIONAL_TWO: tuple[str, ...] = (
    *BITWISE, "atan2", "copysign", "floor_divide", "hypot", "logaddexp", "remainder",
)  # fmt: skip
"""Functions of one array and of two that an engine has if its library has them."""

Shape = tuple[int, ...]
A = TypeVar("A")
"""The array type of one library."""


class PrimitivesOf(Protocol[A]):
    """The primitives of one engine, on arrays `A`; a result is on the device of `like`."""

    # Making

    def full(self, shape: Shape, value: float, dtype: DType, like: A) -> A:
        """Return a new array, every element `value`."""

    def arange(self, stop: int, dtype: DType, like: A) -> A:
        """Return the integers from 0 up to `stop`, exclusive."""

    def asarray(self, values: HostArray, like: A) -> A:
        """Return a small NumPy array as an array of this engine."""

    # Dtypes and shapes

    def dtype(self, x: A) -> DType:
        """Return the dtype; works for traced arrays too."""

    def astype(self, x: A, dtype: DType) -> A:
        """Return the numbers in another dtype, rounded; `x` itself if it has that dtype."""

    def reshape(self, x: A, shape: Shape) -> A:
        """Return the elements in C order in another shape; one size may be -1."""

    def permute_dims(self, x: A, axes: Sequence[int]) -> A:
        """Return the axes in another order."""

    def broadcast_to(self, x: A, shape: Shape) -> A:
        """Repeat `x` along new axes and along those of size 1."""

    def concat(self, arrays: Sequence[A], axis: int) -> A:
        """Concatenate arrays along an axis that they have."""

    def slice_axis(self, x: A, axis: int, start: int, stop: int, step: int = 1) -> A:
        """Return `x[start:stop:step]` of an axis; `0 <= start <= stop <= size`, `step >= 1`."""

    # One array

    def abs(self, x: A) -> A: ...
    def negative(self, x: A) -> A: ...
    def sign(self, x: A) -> A: ...
    def floor(self, x: A) -> A: ...
    def exp(self, x: A) -> A: ...
    def log(self, x: A) -> A: ...
    def sqrt(self, x: A) -> A: ...
    def rsqrt(self, x: A) -> A: ...
    def sin(self, x: A) -> A: ...
    def cos(self, x: A) -> A: ...
    def tanh(self, x: A) -> A: ...
    def sigmoid(self, x: A) -> A: ...
    def erf(self, x: A) -> A: ...
    def isnan(self, x: A) -> A: ...
    def logical_not(self, x: A) -> A: ...

    # Two arrays, or an array and a number

    def add(self, a: A | float, b: A | float) -> A: ...
    def subtract(self, a: A | float, b: A | float) -> A: ...
    def multiply(self, a: A | float, b: A | float) -> A: ...
    def divide(self, a: A | float, b: A | float) -> A: ...
    def pow(self, a: A | float, b: A | float) -> A: ...
    def maximum(self, a: A | float, b: A | float) -> A: ...
    def minimum(self, a: A | float, b: A | float) -> A: ...
    def equal(self, a: A | float, b: A | float) -> A: ...
    def less(self, a: A | float, b: A | float) -> A: ...
    def less_equal(self, a: A | float, b: A | float) -> A: ...
    def logical_and(self, a: A, b: A) -> A: ...
    def logical_or(self, a: A, b: A) -> A: ...

    def where(self, condition: A, a: A | float, b: A | float) -> A:
        """Return `a` where the condition is true, else `b`; at least one of them is an array."""

    # Along axes

    def sum(self, x: A, axis: int | tuple[int, ...], keepdims: bool = False) -> A: ...
    def max(self, x: A, axis: int | tuple[int, ...], keepdims: bool = False) -> A: ...
    def min(self, x: A, axis: int | tuple[int, ...], keepdims: bool = False) -> A: ...

    def argmax(self, x: A, axis: int) -> A:
        """Return the index of the largest element; the first one on a tie."""

    def top_k(self, x: A, k: int) -> tuple[A, A]:
        """Return the `k` largest elements of the last axis, largest first, and their indices."""

    # Products and indices

    def matmul(self, a: A, b: A) -> A:
        """Multiply matrices (…, m, k) and (…, k, n); the axes before them broadcast."""

    def take(self, x: A, indices: A, axis: int) -> A:
        """Return the slices of `x` at `indices`; the axis is replaced by the shape of `indices`."""

    def take_along_axis(self, x: A, indices: A, axis: int) -> A:
        """Return one element for each index; `indices` has the axes of `x` and broadcasts to it."""

    def write(self, x: A, new: A, positions: A) -> A:
        """Return `x` with rows replaced; `x` itself must not be used afterwards.

        `x` is (batch, heads, keys, size), `new` (batch, heads, tokens, size), `positions`
        (batch, tokens): row `t` of `new` goes to row `positions[b, t]`.
        """


Primitives = PrimitivesOf["Array"]
"""The primitives of any engine, for code that names no library."""


class Autodiff(Protocol):
    """Gradients. Trees are dicts, lists and tuples of arrays, nested to any depth."""

    compiles: bool
    """Whether a compiled function may take gradients; otherwise gradients wrap the compiled one."""

    def value_and_grad(
        self, function: Callable[..., Any], *, more: bool = False
    ) -> Callable[..., tuple[Any, Any]]:
        """Return a function of the scalar and its gradient with respect to the first argument.

        The gradient is a tree like the first argument. The function may be compiled. With `more`,
        it returns the scalar and a list of arrays, and so does the result in the scalar's place.
        """

    def stop_gradient(self, x: Any) -> Array:
        """Return the same array as a constant for gradients."""

    def checkpoint(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, recomputed for its gradient instead of keeping activations."""

    def together(self, tree: Any) -> Any:
        """Return the same tree, with all of its gradients computed before any is used."""


class Compiler(Protocol):
    """Makes faster versions of functions over arrays."""

    def compile(
        self,
        function: Callable[..., Any],
        *,
        static: Sequence[str] = (),
        donate: Sequence[str] = (),
        whole: bool = True,
        max_effort: bool = False,
        fixed: bool = False,
    ) -> Callable[..., Any]:
        """Return the function, compiled at its first call with arrays of new shapes or dtypes.

        `static` names arguments that are constants of the compiled code, `donate` arguments that
        the caller gives up, so that results may take their memory. Code that the compiler cannot
        trace is an error; with `whole=False` it runs uncompiled, if the library can do that.
        `max_effort` asks for the fastest code, however long compiling takes. `fixed` promises that
        only arrays differ from call to call, so that only they are compared.
        """

    def efforts(self, max_effort: bool) -> str:
        """Return a description of what `compile` does."""

    def keep(self, folder: str) -> str | None:
        """Keep compiled code here unless the user named another folder; return it or `None`."""
