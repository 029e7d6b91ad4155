"""The walk through trees of parameters, and how two of them differ."""

from __future__ import annotations

from typing import Any

from anydevice.core.trees import Tree, first_leaf, leaves, mapped, refilled

__all__ = ["Tree", "difference", "first_leaf", "leaves", "mapped", "refilled"]


def difference(tree: Tree, other: Tree, path: str = "") -> str | None:
    """Where a tree of arrays first differs from another in keys, lengths or shapes, in words.

    `None` where it does not. Lists and tuples are one kind; dtypes are not compared.

    >>> import numpy
    >>> difference([{"a": numpy.ones(2)}], [{"a": numpy.ones(3)}])
    "[0]['a'] has the shape (2,), and (3,) was given"
    """
    here = path or "the tree"
    if isinstance(tree, dict):
        if not isinstance(other, dict) or tree.keys() != other.keys():
            return f"{here} has {_entries(tree)}, and {_entries(other)} was given"
        pairs = [(f"{path}[{key!r}]", tree[key], other[key]) for key in tree]
    elif isinstance(tree, list | tuple):
        if not isinstance(other, list | tuple) or len(tree) != len(other):
            return f"{here} has {_entries(tree)}, and {_entries(other)} was given"
        pairs = [(f"{path}[{at}]", *both) for at, both in enumerate(zip(tree, other, strict=True))]
    else:
        return _other_shape(here, tree, other)
    found = (difference(mine, given, where) for where, mine, given in pairs)
    return next((text for text in found if text is not None), None)


def _other_shape(here: str, leaf: Any, other: Any) -> str | None:
    if leaf is None and other is None:
        return None
    mine, given = getattr(leaf, "shape", None), getattr(other, "shape", None)
    if mine is not None and given is not None and tuple(mine) == tuple(given):
        return None
    shape = "None" if mine is None else f"the shape {tuple(mine)}"
    return f"{here} has {shape}, and {_entries(other) if given is None else tuple(given)} was given"


def _entries(tree: Tree) -> str:
    """What a place of a tree holds, in words."""
    if isinstance(tree, dict):
        return f"a dict of {', '.join(map(repr, sorted(tree, key=str))) or 'nothing'}"
    if isinstance(tree, list | tuple):
        return f"a list of {len(tree)}"
    shape = getattr(tree, "shape", None)
    return f"a {type(tree).__name__}" if shape is None else f"an array of shape {tuple(shape)}"
