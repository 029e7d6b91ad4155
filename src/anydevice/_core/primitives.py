"""The primitive operations that every engine implements; all other ops are written in them.

They are named as in the array API standard where it has them. They work the same everywhere:

- Array operands share a dtype and broadcast; a Python number beside an array adopts the array's
  dtype. The result has that dtype, comparisons give `bool`.
- Results that count or point (`argmax`, `top_k`) are `int32`; indices may have any integer dtype.
- `sum` and `matmul` of 16-bit floats add up in `float32` and are rounded once, at the end.
- NaN is passed on by `max`, `maximum` and their kin; `argmax` and `top_k` take it for the largest.
- Nothing changes its operands, except `write`, which consumes its first.
- An index out of range reads nothing: `take` and `take_along_axis` give NaN for floating dtypes
  and 0 for others, `write` leaves it out. Negative indices are out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from anydevice._core.array import Array
    from anydevice._core.dtypes import DType

Shape = tuple[int, ...]


class Primitives(Protocol):
    """One engine's version of each primitive. `like` is an array whose device the result is on."""

    # Making

    def full(self, shape: Shape, value: float, dtype: DType, like: Any) -> Array:
        """Return a new array, every element `value`."""

    def arange(self, stop: int, dtype: DType, like: Any) -> Array:
        """Return the integers from 0 up to and without `stop`."""

    def asarray(self, values: Any, like: Any) -> Array:
        """Return a small NumPy array as an array of this engine."""

    # Dtypes and shapes

    def dtype(self, x: Any) -> DType:
        """Return the dtype; works for traced arrays too."""

    def astype(self, x: Any, dtype: DType) -> Array:
        """Return the numbers in another dtype, rounded; `x` itself if it has that dtype."""

    def reshape(self, x: Any, shape: Shape) -> Array:
        """Return the elements in C order in another shape; one size may be -1."""

    def permute_dims(self, x: Any, axes: Sequence[int]) -> Array:
        """Return the axes in another order."""

    def broadcast_to(self, x: Any, shape: Shape) -> Array:
        """Repeat `x` along new axes and along those of size 1."""

    def concat(self, arrays: Sequence[Any], axis: int) -> Array:
        """Concatenate arrays along an axis that they have."""

    def slice_axis(self, x: Any, axis: int, start: int, stop: int, step: int = 1) -> Array:
        """Return `x[start:stop:step]` of an axis; `0 <= start <= stop <= size`, `step >= 1`."""

    # One array

    def abs(self, x: Any) -> Array: ...
    def negative(self, x: Any) -> Array: ...
    def sign(self, x: Any) -> Array: ...
    def floor(self, x: Any) -> Array: ...
    def exp(self, x: Any) -> Array: ...
    def log(self, x: Any) -> Array: ...
    def sqrt(self, x: Any) -> Array: ...
    def rsqrt(self, x: Any) -> Array: ...
    def sin(self, x: Any) -> Array: ...
    def cos(self, x: Any) -> Array: ...
    def tanh(self, x: Any) -> Array: ...
    def sigmoid(self, x: Any) -> Array: ...
    def erf(self, x: Any) -> Array: ...
    def isnan(self, x: Any) -> Array: ...
    def logical_not(self, x: Any) -> Array: ...

    # Two arrays, or an array and a number

    def add(self, a: Any, b: Any) -> Array: ...
    def subtract(self, a: Any, b: Any) -> Array: ...
    def multiply(self, a: Any, b: Any) -> Array: ...
    def divide(self, a: Any, b: Any) -> Array: ...
    def pow(self, a: Any, b: Any) -> Array: ...
    def maximum(self, a: Any, b: Any) -> Array: ...
    def minimum(self, a: Any, b: Any) -> Array: ...
    def equal(self, a: Any, b: Any) -> Array: ...
    def less(self, a: Any, b: Any) -> Array: ...
    def less_equal(self, a: Any, b: Any) -> Array: ...
    def logical_and(self, a: Any, b: Any) -> Array: ...
    def logical_or(self, a: Any, b: Any) -> Array: ...

    def where(self, condition: Any, a: Any, b: Any) -> Array:
        """Return `a` where the condition is true, else `b`; at least one of them is an array."""

    # Along axes

    def sum(self, x: Any, axis: int | tuple[int, ...], keepdims: bool = False) -> Array: ...
    def max(self, x: Any, axis: int | tuple[int, ...], keepdims: bool = False) -> Array: ...
    def min(self, x: Any, axis: int | tuple[int, ...], keepdims: bool = False) -> Array: ...

    def argmax(self, x: Any, axis: int) -> Array:
        """Return the index of the largest element, the first of equal ones."""

    def top_k(self, x: Any, k: int) -> tuple[Array, Array]:
        """Return the `k` largest along the last axis, largest first, and their indices."""

    # Products and indices

    def matmul(self, a: Any, b: Any) -> Array:
        """Multiply matrices (…, m, k) and (…, k, n); the axes before them broadcast."""

    def take(self, x: Any, indices: Any, axis: int) -> Array:
        """Return the slices of `x` at `indices`, whose shape takes the place of the axis."""

    def take_along_axis(self, x: Any, indices: Any, axis: int) -> Array:
        """Return one element for each index; `indices` broadcasts to `x`, with as many axes."""

    def write(self, x: Any, new: Any, positions: Any) -> Array:
        """Return `x` with rows replaced; `x` itself must not be used afterwards.

        `x` is (batch, heads, keys, size), `new` (batch, heads, tokens, size), `positions`
        (batch, tokens): row `t` of `new` goes to row `positions[b, t]`.
        """


class Autodiff(Protocol):
    """Gradients. Trees are dicts, lists and tuples of arrays, in any depth."""

    compiles: bool
    """Whether a compiled function may take gradients inside; else they are taken of one."""

    def value_and_grad(
        self, function: Callable[..., Any], *, more: bool = False
    ) -> Callable[..., tuple[Any, Any]]:
        """Return a function of the scalar and its gradient by the arrays of the first argument.

        The gradient is a tree like the first argument. The function may be a compiled one. With
        `more`, it returns the scalar and a list of arrays, and both stand in place of the scalar.
        """

    def stop_gradient(self, x: Any) -> Array:
        """Return the same array, taken for a constant."""

    def checkpoint(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, run again for its gradient instead of keeping what it computed."""

    def together(self, tree: Any) -> Any:
        """Return the same tree, whose gradients are all computed before any of them goes on.

        For libraries that choose the order themselves, and hold what the last ones need.
        """


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

        `static` names arguments that are constants of the compiled code, `donate` those that the
        caller gives up, so that results may take their memory. Code that the compiler cannot
        trace is an error; with `whole=False` it runs uncompiled, if the library can do that.
        `max_effort` asks for the fastest code, however long compiling takes. `fixed` promises that
        only arrays differ from call to call, so that nothing else is compared.
        """

    def efforts(self, max_effort: bool) -> str:
        """Return a description of what `compile` does."""

    def keep(self, folder: str) -> str | None:
        """Keep compiled code across processes in a folder, unless the user has named another.

        Returns the folder that is used; `None` if the library keeps nothing.
        """
