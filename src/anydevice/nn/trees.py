"""Nests of dicts, lists and tuples, taken apart and put together again in plain Python.

Compilers look through these functions. Dicts are walked in the order of their sorted keys, since
libraries return them sorted or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Tree = Any


def leaves(tree: Tree) -> list[Any]:
    """What lies in a nest, in order; `None` is left out.

    >>> leaves({"b": 1, "a": [2, {"c": 3}], "d": {}})
    [2, 3, 1]
    """
    found: list[Any] = []
    _gather(tree, found)
    return found


def refilled(tree: Tree, values: Sequence[Any]) -> Tree:
    """A nest like this one with other leaves, given in the order of `leaves`.

    >>> refilled({"b": 1, "a": [2, {"c": 3}]}, "xyz")
    {'b': 'z', 'a': ['x', {'c': 'y'}]}
    """
    count = len(leaves(tree))
    if count != len(values):
        raise ValueError(f"this tree has {count} leaves, and {len(values)} were given")
    return _rebuilt(tree, iter(values))


def mapped(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """A nest like this one, each leaf replaced by what the function makes of it.

    >>> mapped(lambda x: x + 1, {"a": [1, 2]})
    {'a': [2, 3]}
    """
    return refilled(tree, [function(leaf) for leaf in leaves(tree)])


def _gather(tree: Tree, found: list[Any]) -> None:
    if isinstance(tree, dict):
        for key in sorted(tree):
            _gather(tree[key], found)
    elif isinstance(tree, list | tuple):
        for part in tree:
            _gather(part, found)
    elif tree is not None:
        found.append(tree)


def _rebuilt(tree: Tree, values: Iterator[Any]) -> Tree:
    if isinstance(tree, dict):
        new = {key: _rebuilt(tree[key], values) for key in sorted(tree)}
        return {key: new[key] for key in tree}
    if isinstance(tree, list):
        return [_rebuilt(part, values) for part in tree]
    if isinstance(tree, tuple):
        return tuple([_rebuilt(part, values) for part in tree])
    return None if tree is None else next(values)
