"""The containers of JAX and Flax. All of them are made anew: in JAX, models are values.

What JAX's own registry knows as a tree is taken apart by it. Flax NNX objects are graphs that may
share variables, which the registry would double; they have rules of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

from anydevice.transfer.attributes import AttributeRule
from anydevice.transfer.rules import Parts, Rule, item_step


class RegisteredTreeRule(Rule):
    """The rule of every type that no other rule is for: what JAX says of it, if JAX is there.

    JAX is asked about each object, because a type may be registered, and JAX be imported, at any
    time.
    """

    certain = False

    def take_apart(self, container: Any) -> Parts | None:
        trees: Any = sys.modules.get("jax.tree_util")
        if trees is None or trees.all_leaves((container,)):
            return None
        # One level: the first thing that JAX asks about is the container, all others are parts.
        answers = chain((False,), repeat(True))
        parts, structure = trees.tree_flatten(container, is_leaf=lambda _: next(answers))
        # JAX would never come to an end with the names of what holds itself.
        named = None if any(part is container for part in parts) else container
        return [(index, structure, named) for index in range(len(parts))], parts

    def step(self, key: Any) -> str:
        index, _, container = key
        if container is None:
            return item_step(index)
        trees: Any = sys.modules["jax.tree_util"]
        pairs, _ = trees.tree_flatten_with_path(
            container, is_leaf=lambda value: value is not container
        )
        (entry,), _ = pairs[index]
        if isinstance(entry, trees.FlattenedIndexKey):
            return item_step(entry.key)
        text: str = trees.keystr((entry,))
        return text

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        _, structure, _ = keys[0]
        return structure.unflatten(parts)


class VariableRule(Rule):
    """`flax.nnx.Variable`: a new variable with the same metadata and the new value."""

    def take_apart(self, container: Any) -> Parts:
        # Earlier versions of Flax have an attribute in place of the method.
        read = getattr(type(container), "get_raw_value", None)
        return (None,), [read(container) if read else container.raw_value]

    def step(self, key: Any) -> str:
        return ""

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return container.replace(parts[0])


def nnx_object_rule(kind: type) -> Rule:
    """The rule of a Flax NNX module, optimizer, or other object."""
    return AttributeRule(kind, copied=("_pytree__state", "_object__state"))


def nnx_state_rule(kind: type) -> Rule:
    """The rule of `flax.nnx.State`, which shows the dict that it holds as if it were one."""
    return AttributeRule(kind, hidden=("_mapping",))
