"""Arguments that a measured function may write into, while the caller's arrays stay as they are."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from typing import Any

from anydevice.engines.ownership import owner_of
from anydevice.transfer.moving import is_array
from anydevice.transfer.tree import flatten


def identities(tree: Any) -> frozenset[int]:
    """What the arrays of a tree are known by, for `apart_from`."""
    return frozenset(map(id, flatten(tree, is_array)[0].values))


def apart_from(theirs: Collection[int], tree: Any) -> Any:
    """The tree with a copy in place of each array that is one of `theirs`.

    Arrays of a model that is changed in place stay its own: what it does to them is its state. So
    do those that a gradient flows through, since it would not flow through a copy.

    >>> import numpy
    >>> given = numpy.ones(2)
    >>> apart_from(identities([given]), [given])[0] is given
    False
    """
    leaves, rebuild = flatten(tree, is_array)
    values = list(leaves.values)
    for position, value in enumerate(values):
        if id(value) in theirs and not leaves[position].kept:
            values[position] = _copied(value)
    return rebuild(values)


def _copied(value: Any) -> Any:
    if getattr(value, "requires_grad", False):
        return value
    try:
        return deepcopy(value)  # which keeps the order of its elements in memory
    except Exception:  # a library without such copies says so in its own way
        owner = owner_of(value)
        assert owner is not None
        return owner.place(owner.to_host(value), owner.devices_of(value)[0])
