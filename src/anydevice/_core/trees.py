"""Trees of parameters: dicts, lists and tuples of arrays, in Python that compilers trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, TypeAlias, TypeVar

from anydevice._core.array import Array
from anydevice.errors import ConfigurationError

Tree: TypeAlias = "Array | Mapping[str, Tree] | Sequence[Tree] | None"
"""Arrays in dicts, lists and tuples, nested to any depth."""

TreeT = TypeVar("TreeT")
"""The type of a tree: a function that returns it keeps its containers."""


def leaves(tree: object) -> list[Any]:
    """Return the leaves of a tree, in order; `None` is left out.

    >>> leaves({"b": 1, "a": [2, {"c": 3}], "d": {}})
    [2, 3, 1]
    """
    if isinstance(tree, dict):
        tree = tuple(map(tree.__getitem__, sorted(tree)))
    if not isinstance(tree, list | tuple):
        return [] if tree is None else [tree]
    gathered: list[Any] = []
    for part in tree:
        gathered += leaves(part)
    return gathered


def leaf_paths(tree: object) -> list[str]:
    return _labels(tree, "", "[{!r}]")


def leaf_names(tree: object, name: str = "") -> list[str]:
    """Return the name of each of `leaves`, written as paths of layers are."""
    return _labels(tree, name, ".{}")


def _labels(tree: object, label: str, by_key: str) -> list[str]:
    """Return the label of each leaf; `by_key` is the format of a dict's keys."""
    if isinstance(tree, dict):
        parts = [(by_key.format(key), tree[key]) for key in sorted(tree)]
    elif isinstance(tree, list | tuple):
        parts = [(f"[{at}]", part) for at, part in enumerate(tree)]
    else:
        return [] if tree is None else [label]
    return [inner for step, part in parts for inner in _labels(part, label + step, by_key)]


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern is the name of a leaf, or of a subtree that holds it.

    `*` stands for anything, `?` for one character; brackets are as written.

    >>> matches("[0]", "[0].weight"), matches("*.bias", "[0].bias"), matches("[1]*", "[10].bias")
    (True, True, False)
    >>> matches("encoder", ".encoder.weight"), matches("enc", ".encoder.weight")
    (True, False)
    """
    text = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    start = "" if pattern[:1] in (".", "[", "*", "?") else r"\.?"
    return re.match(f"{start}(?:{text})(?=$|[.\\[])", name) is not None


def unmatched(pattern: str, names: Sequence[str], source: str) -> ConfigurationError:
    """Return the error for a pattern that matches none of these names, with the closest ones."""
    from difflib import get_close_matches  # only needed for an error

    # `[1].inside` and `[1]` hold `[1].inside[0]`. At the top of a tree, a name needs no dot.
    ends = [(name, at.start()) for name in names for at in re.finditer(r"[.\[]", name)]
    parts = [name[:end] for name, end in ends if end]
    known = list(dict.fromkeys(name.removeprefix(".") for name in [*parts, *names]))
    near = get_close_matches(pattern, known, 3, 0.3) or known[:3]
    return ConfigurationError(
        f"{source}: no parameter is named {pattern!r}; the nearest are "
        f"{', '.join(map(repr, near))}, and * stands for anything, as in '*.bias'",
        source=source,
    )


def first_leaf(tree: object) -> Any:
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree)]
    if not isinstance(tree, list | tuple):
        return tree
    return next((leaf for part in tree if (leaf := first_leaf(part)) is not None), None)


def refilled(tree: TreeT, values: Sequence[object]) -> TreeT:
    """Return the tree with other leaves, given in the order of `leaves`."""
    count = len(leaves(tree))
    if count != len(values):
        raise ValueError(f"this tree has {count} leaves, and {len(values)} were given")
    result: TreeT = _rebuild(tree, iter(values))
    return result


def mapped(function: Callable[[Any], object], tree: TreeT) -> TreeT:
    return refilled(tree, [function(leaf) for leaf in leaves(tree)])


def partition(tree: TreeT, chosen: Sequence[bool]) -> tuple[TreeT, TreeT]:
    """Split a tree into the chosen leaves and the others, with `None` in place of the rest.

    >>> partition({"b": 1, "a": [2, 3]}, [True, False, True])
    ({'b': 1, 'a': [2, None]}, {'b': None, 'a': [None, 3]})
    """
    pairs = list(zip(leaves(tree), chosen, strict=True))
    mine = [leaf if own else None for leaf, own in pairs]
    others = [None if own else leaf for leaf, own in pairs]
    return refilled(tree, mine), refilled(tree, others)


def combined(tree: Any, other: Any) -> Any:
    """Join the two trees that `partition` returned.

    >>> combined({"b": 1, "a": [2, None]}, {"b": None, "a": [None, 3]})
    {'b': 1, 'a': [2, 3]}
    """
    if tree is None:
        return other
    if isinstance(tree, dict):
        return {key: combined(part, other[key]) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [combined(*both) for both in zip(tree, other, strict=True)]
        return parts if isinstance(tree, list) else tuple(parts)
    return tree


def _rebuild(tree: Any, values: Iterator[object]) -> Any:
    if isinstance(tree, dict):
        new = {key: _rebuild(tree[key], values) for key in sorted(tree)}
        ordered = {key: new[key] for key in tree}
        if type(tree) is dict:
            return ordered
        like = copy(tree)
        like.update(ordered)
        return like
    if isinstance(tree, list):
        return [_rebuild(part, values) for part in tree]
    if isinstance(tree, tuple):
        parts = [_rebuild(part, values) for part in tree]
        return tree._make(parts) if hasattr(tree, "_make") else tuple(parts)
    return None if tree is None else next(values)


def difference(tree: object, other: object, path: str = "") -> str | None:
    """Describe the first difference of two trees in keys, lengths or shapes; `None` without one."""
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
        return _shape_difference(here, tree, other)
    texts = (difference(mine, theirs, where) for where, mine, theirs in pairs)
    return next((text for text in texts if text is not None), None)


def _shape_difference(here: str, leaf: object, other: object) -> str | None:
    if leaf is None and other is None:
        return None
    mine, theirs = getattr(leaf, "shape", None), getattr(other, "shape", None)
    if mine is not None and theirs is not None and tuple(mine) == tuple(theirs):
        return None
    shape = "None" if mine is None else f"the shape {tuple(mine)}"
    return (
        f"{here} has {shape}, and {_entries(other) if theirs is None else tuple(theirs)} was given"
    )


def _entries(tree: object) -> str:
    """Describe the contents of a node in words."""
    if isinstance(tree, dict):
        return f"a dict of {', '.join(map(repr, sorted(tree, key=str))) or 'nothing'}"
    if isinstance(tree, list | tuple):
        return f"a list of {len(tree)}"
    shape = getattr(tree, "shape", None)
    return f"a {type(tree).__name__}" if shape is None else f"an array of shape {tuple(shape)}"
