"""Ops that read and write at places given by arrays of whole numbers."""

from __future__ import annotations

from anydevice.ops.dispatch import Array, own_version, primitives
from anydevice.ops.shapes import axis_of, same_type, whole, wrong_shapes


def embedding(weight: Array, ids: Array) -> Array:
    """The row of `weight` for each id: weight (rows, size), ids of any shape, result (…, size).

    An id that is negative or too large gives a row of what is not a number.

    >>> import numpy
    >>> embedding(numpy.array([[1.0, 2.0], [3.0, 4.0]]), numpy.array([[1, 0], [0, 7]])).tolist()
    [[[3.0, 4.0], [1.0, 2.0]], [[1.0, 2.0], [nan, nan]]]
    """
    own = own_version(weight, "embedding", _embedding)
    whole("embedding", "ids", ids, weight, "weight")
    if len(weight.shape) != 2:
        raise wrong_shapes("embedding", "weight is (rows, size)", weight=weight)
    result = own(weight, ids)
    return _embedding(weight, ids) if result is NotImplemented else result


def take(x: Array, indices: Array, axis: int = 0) -> Array:
    """The slices of x at these places of an axis: the shape of `indices` stands in its place.

    An index that is negative or too large gives what is not a number, or 0 where x does not hold
    floating numbers.

    >>> import numpy
    >>> take(numpy.array([5, 6, 7]), numpy.array([2, 0, 3])).tolist()
    [7, 5, 0]
    """
    xp = primitives(x, "take")
    whole("take", "indices", indices, x)
    return xp.take(x, indices, axis_of("take", x, axis))


def cache_write(cache: Array, new: Array, positions: Array) -> Array:
    """The cache with new rows in it; `cache` itself must not be used afterwards.

    cache is (batch, heads, keys, size), new (batch, heads, tokens, size); positions, (tokens,) or
    (batch, tokens), says which key each token is. Positions outside of the cache are left out.

    >>> import numpy
    >>> cache = numpy.zeros((1, 1, 4, 1))
    >>> cache_write(cache, numpy.array([[[[5.0], [6.0]]]]), numpy.array([2, 9])).ravel().tolist()
    [0.0, 0.0, 5.0, 0.0]
    """
    own = own_version(cache, "cache_write", _cache_write)
    same_type("cache_write", cache, new=new)
    whole("cache_write", "positions", positions, cache, "cache")
    kept, given = tuple(cache.shape), tuple(new.shape)
    if len(kept) != 4 or len(given) != 4 or kept[:2] != given[:2] or kept[3] != given[3]:
        raise wrong_shapes(
            "cache_write",
            "cache is (batch, heads, keys, size) and new (batch, heads, tokens, size)",
            cache=cache,
            new=new,
        )
    if tuple(positions.shape) not in ((given[2],), (given[0], given[2])):
        raise wrong_shapes(
            "cache_write", "positions is (tokens,) or (batch, tokens)", new=new, positions=positions
        )
    result = own(cache, new, positions)
    return _cache_write(cache, new, positions) if result is NotImplemented else result


def _embedding(weight: Array, ids: Array) -> Array:
    return primitives(weight).take(weight, ids, 0)


def _cache_write(cache: Array, new: Array, positions: Array) -> Array:
    xp = primitives(cache)
    batch, _, tokens, _ = new.shape
    return xp.write(cache, new, xp.broadcast_to(positions, (batch, tokens)))
