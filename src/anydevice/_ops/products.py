"""Products of matrices, and sums of products by names of axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from anydevice._core.array import Array, ArrayT
from anydevice._core.primitives import PrimitivesOf
from anydevice._ops.arguments import (
    broadcasts,
    different_dtypes,
    in_words,
    require_one_dtype,
    require_one_library,
    widened,
    wrong,
    wrong_shapes,
)
from anydevice._ops.dispatch import (
    compiled,
    explain,
    number_primitives,
    number_version,
    primitives,
    run3,
)
from anydevice.errors import ConfigurationError


@compiled
def matmul(a: ArrayT, b: ArrayT) -> ArrayT:
    """Return the products of matrices (…, m, k) and (…, k, n): (…, m, n), of their dtype.

    The axes before the last two broadcast. 16-bit numbers are added up in float32 and rounded
    once.

    >>> import numpy
    >>> matmul(numpy.ones((5, 2, 3)), numpy.ones((3, 4))).shape
    (5, 2, 4)
    """
    own = number_version(a, "matmul", _matmul)
    if type(b) is not type(a):
        require_one_library("matmul", "a", a, "b", b)
    if a.dtype != b.dtype:
        raise different_dtypes("matmul", a=a, b=b)
    left, right = a.shape, b.shape
    if len(left) < 2 or len(right) < 2:
        raise wrong_shapes("matmul", "both must have rows and columns", a=a, b=b)
    if left[-1] != right[-2]:
        raise wrong_shapes("matmul", "a must have as many columns as b has rows", a=a, b=b)
    if len(left) > 2 and len(right) > 2 and not broadcasts(left[:-2], right[:-2]):
        raise wrong_shapes("matmul", "the axes before the last two must broadcast", a=a, b=b)
    result = own(a, b)
    return _matmul(a, b) if result is NotImplemented else result


def linear(x: ArrayT, weight: ArrayT, bias: ArrayT | None = None) -> ArrayT:
    """Return `x · weightᵀ + bias`, of the dtype of x.

    x is (…, in), weight (out, in), bias (out,) or `None`; the result is (…, out).

    >>> import numpy
    >>> linear(numpy.ones((2, 3)), numpy.ones((4, 3)), numpy.arange(4.0)).tolist()
    [[3.0, 4.0, 5.0, 6.0], [3.0, 4.0, 5.0, 6.0]]
    """
    own = number_version(x, "linear", _linear)
    if type(weight) is not type(x):
        require_one_library("linear", "x", x, "weight", weight)
    if x.dtype != weight.dtype:
        raise different_dtypes("linear", x=x, weight=weight)
    shape, sizes = weight.shape, x.shape
    if len(shape) != 2 or not sizes or sizes[-1] != shape[1]:
        raise wrong_shapes("linear", "weight must be (out, in) and x (…, in)", x=x, weight=weight)
    if bias is not None:
        if type(bias) is not type(x):
            require_one_library("linear", "x", x, "bias", bias)
        if x.dtype != bias.dtype:
            raise different_dtypes("linear", x=x, bias=bias)
        if len(bias.shape) != 1 or bias.shape[0] != shape[0]:
            raise wrong_shapes("linear", "bias must be (out,)", weight=weight, bias=bias)
    return run3(own, _linear, x, weight, bias)


@compiled
def outer(a: ArrayT, b: ArrayT) -> ArrayT:
    """Return the outer product of two vectors: (size of a, size of b).

    >>> import numpy
    >>> outer(numpy.array([1, 2]), numpy.array([3, 4, 5])).tolist()
    [[3, 4, 5], [6, 8, 10]]
    """
    xp = number_primitives("outer", a)
    if type(b) is not type(a) or b.dtype != a.dtype:
        require_one_dtype("outer", a=a, b=b)
    if len(a.shape) != 1 or len(b.shape) != 1:
        raise wrong_shapes("outer", "both must be vectors", a=a, b=b)
    return xp.multiply(xp.reshape(a, (a.shape[0], 1)), b)


def einsum(subscripts: str, *arrays: ArrayT) -> ArrayT:
    """Compute an Einstein summation: products of elements, summed over axes that the result lacks.

    `subscripts` names the axes of each array by letters, and after `->` those of the result;
    without it, the result has all letters that occur once, in alphabetical order. `...` stands for
    any axes, which broadcast. A letter that occurs twice in one array takes its diagonal. Arrays
    are multiplied from left to right; 16-bit numbers are added up in float32 and rounded once.

    >>> import numpy
    >>> einsum("ij,j->i", numpy.array([[1, 2], [3, 4]]), numpy.array([1, 10])).tolist()
    [21, 43]
    >>> einsum("ii", numpy.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    5.0
    """
    if type(subscripts) is not str:
        raise wrong("einsum", f"subscripts must be a string, not {in_words(subscripts)}")
    if not arrays:
        raise wrong("einsum", f"there are no arrays for {subscripts!r}")
    number_primitives("einsum", arrays[0])
    require_one_dtype("einsum", **{f"array {n}": x for n, x in enumerate(arrays)})
    try:
        return _einsum(subscripts, arrays)
    except Exception as error:
        explain(error, arrays=arrays)
        raise


def biased(xp: PrimitivesOf[ArrayT], product: ArrayT, bias: ArrayT | None, like: ArrayT) -> ArrayT:
    """Return a product and its bias, rounded to the dtype of `like`."""
    if bias is not None:
        product = xp.add(product, xp.astype(bias, xp.dtype(product)))
    return xp.astype(product, xp.dtype(like))


def _matmul(a: ArrayT, b: ArrayT) -> ArrayT:
    return primitives(a).matmul(a, b)


def _linear(x: ArrayT, weight: ArrayT, bias: ArrayT | None) -> ArrayT:
    xp = primitives(x)
    outputs, inputs = weight.shape
    rows = xp.reshape(x, (prod(x.shape[:-1]), inputs))
    columns = xp.permute_dims(weight, (1, 0))
    if bias is not None:  # the sum with it must be rounded only once
        rows, columns = widened(xp, rows), widened(xp, columns)
    product = biased(xp, xp.matmul(rows, columns), bias, x)
    return xp.reshape(product, (*x.shape[:-1], outputs))


def _einsum(subscripts: str, arrays: Sequence[ArrayT]) -> ArrayT:
    terms, result = _axes_of(subscripts, arrays)
    xp, dtype = primitives(arrays[0]), primitives(arrays[0]).dtype(arrays[0])
    sizes = _sizes_of(subscripts, terms, arrays)
    left, names = _diagonal(xp, arrays[0], terms[0])
    # Two arrays, each axis of which is needed: one product, which rounds once by itself.
    plain = len(arrays) == 2 and all(
        len(set(one)) == len(one) and set(one) <= {*other, *result}
        for one, other in (terms, terms[::-1])
    )
    left = left if plain else widened(xp, left)
    for n, x in enumerate(arrays[1:], 1):
        needed = {*result, *(name for term in terms[n + 1 :] for name in term)}
        left, names = _sum_unneeded(xp, left, names, {*needed, *terms[n]})
        right, also = _diagonal(xp, x if plain else widened(xp, x), terms[n])
        right, also = _sum_unneeded(xp, right, also, {*needed, *names})
        left, names = _product(xp, left, names, right, also, needed, sizes)
    left, names = _sum_unneeded(xp, left, names, set(result))
    return xp.astype(_transpose(xp, left, [names.index(name) for name in result]), dtype)


Names = tuple[str, ...]


def _axes_of(subscripts: str, arrays: Sequence[Array]) -> tuple[list[Names], Names]:
    """Return the names of the axes of each array, and of the result; those of `...` are numbers."""
    operands, arrow, wanted = subscripts.replace(" ", "").partition("->")
    texts = operands.split(",")
    if len(texts) != len(arrays):
        rule = f"{subscripts!r} is for {len(texts)} arrays, not {len(arrays)}"
        raise wrong("einsum", rule)
    terms: list[Names] = []
    for text, x in zip(texts, arrays, strict=True):
        before, dots, after = text.partition("...")
        rest = len(x.shape) - len(before) - len(after)
        letters = before + after
        if rest < 0 or (rest and not dots) or not (letters.isalpha() or not letters):
            raise _unfit(text, letters, x)
        several = tuple([str(at - rest) for at in range(rest)])
        terms.append((*before, *several, *after))
    everything = [name for term in terms for name in term]
    numbers = sorted({name for name in everything if not name.isalpha()}, key=int)
    if not arrow:
        once = sorted(name for name in everything if name.isalpha() and everything.count(name) == 1)
        return terms, (*numbers, *once)
    before, dots, after = wanted.partition("...")
    result = (*before, *(numbers if dots else ()), *after)
    if len(set(result)) != len(result) or not {*before, *after} <= set(everything):
        rule = "the result must have each axis once, and only axes of the arrays"
        raise wrong("einsum", f"{rule}, but it is {wanted!r} in {subscripts!r}")
    return terms, result


def _unfit(text: str, letters: str, x: Array) -> ConfigurationError:
    if letters and not letters.isalpha():
        return wrong("einsum", f"axes must be letters, or '...' once, not {text!r}")
    return wrong_shapes("einsum", f"{text!r} must have a letter for each axis", x=x)


def _sizes_of(subscripts: str, terms: Sequence[Names], arrays: Sequence[Array]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for term, x in zip(terms, arrays, strict=True):
        for name, size in zip(term, x.shape, strict=True):
            known = sizes.setdefault(name, size)
            if known != size and (name.isalpha() or 1 not in (known, size)):
                what = f"axis {name!r}" if name.isalpha() else "an axis of '...'"
                raise wrong("einsum", f"{what} of {subscripts!r} has two sizes: {known} and {size}")
            sizes[name] = size if known == 1 else known
    return sizes


def _diagonal(xp: PrimitivesOf[ArrayT], x: ArrayT, names: Names) -> tuple[ArrayT, Names]:
    """Return the elements whose places agree on axes of one name, which become one, at the end."""
    for name in dict.fromkeys(names):
        while names.count(name) > 1:
            one = names.index(name)
            other = names.index(name, one + 1)
            order = [at for at in range(len(names)) if at not in (one, other)]
            size, around = x.shape[one], tuple([x.shape[at] for at in order])
            square = xp.permute_dims(x, (*order, one, other))
            row = xp.reshape(square, (*around, size * size))
            x = xp.slice_axis(row, len(around), 0, size * size, size + 1) if size else row
            names = (*[names[at] for at in order], name)
    return x, names


def _sum_unneeded(
    xp: PrimitivesOf[ArrayT], x: ArrayT, names: Names, needed: set[str]
) -> tuple[ArrayT, Names]:
    """Return the sum over the axes that are not needed any more."""
    gone = tuple([at for at, name in enumerate(names) if name not in needed])
    if not gone:
        return x, names
    return xp.sum(x, gone), tuple([name for name in names if name in needed])


def _product(
    xp: PrimitivesOf[ArrayT],
    a: ArrayT,
    a_names: Names,
    b: ArrayT,
    b_names: Names,
    needed: set[str],
    sizes: Mapping[str, int],
) -> tuple[ArrayT, Names]:
    """Return the product of two arrays, added up over the axes of both that are not needed."""
    shared = [name for name in a_names if name in b_names]
    batch = [name for name in shared if name in needed]
    inner = [name for name in shared if name not in needed]
    rows = [name for name in a_names if name not in shared]
    columns = [name for name in b_names if name not in shared]
    names = (*batch, *rows, *columns)
    if not inner or xp.dtype(a).kind != "float":  # libraries have no such product of integers
        left = _arrange_axes(xp, a, a_names, [*names, *inner], sizes, columns)
        right = _arrange_axes(xp, b, b_names, [*names, *inner], sizes, rows)
        product = xp.multiply(left, right)
        axes = tuple(range(len(names), len(names) + len(inner)))
        return (xp.sum(product, axes) if axes else product), names
    high, deep, wide = (prod([sizes[name] for name in some]) for some in (rows, inner, columns))
    first = (prod([sizes[name] for name in batch]),) if batch else ()
    left = _arrange_axes(xp, a, a_names, [*batch, *rows, *inner], sizes)
    right = _arrange_axes(xp, b, b_names, [*batch, *inner, *columns], sizes)
    product = xp.matmul(
        xp.reshape(left, (*first, high, deep)), xp.reshape(right, (*first, deep, wide))
    )
    return xp.reshape(product, tuple([sizes[name] for name in names])), names


def _arrange_axes(
    xp: PrimitivesOf[ArrayT],
    x: ArrayT,
    names: Names,
    order: Sequence[str],
    sizes: Mapping[str, int],
    missing: Sequence[str] = (),
) -> ArrayT:
    """Return the axes in an order, of size 1 where they are missing, of full size where both have
    them.
    """
    present = [name for name in order if name in names]
    turned = _transpose(xp, x, [names.index(name) for name in present])
    if missing:
        shape = [1 if name in missing else turned.shape[present.index(name)] for name in order]
        return xp.reshape(turned, tuple(shape))
    return xp.broadcast_to(turned, tuple([sizes[name] for name in order]))


def _transpose(xp: PrimitivesOf[ArrayT], x: ArrayT, axes: Sequence[int]) -> ArrayT:
    return x if list(axes) == sorted(axes) else xp.permute_dims(x, tuple(axes))
