"""The rules of JAX's and Flax's containers, in which models are values: they are new objects.

JAX's own registry takes apart the trees that it knows. Flax NNX objects are graphs that may share
variables, which the registry would double, so they have their own rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

from jax import tree_util as trees

from anydevice._arrays.trees import rules
from anydevice._arrays.trees.rules import AttributeRule, Parts, Rule, TypeRule


class RegisteredTreeRule(Rule):
    """Containers that JAX's registry knows. JAX is asked about each object, because a type may be
    registered at any time.
    """

    certain = False

    def take_apart(self, container: Any) -> Parts | None:
        if trees.all_leaves((container,)):
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
            return rules.item_step(index)
        named = trees.tree_flatten_with_path(container, lambda value: value is not container)
        (entry,), _ = named[0][index]
        if isinstance(entry, trees.FlattenedIndexKey):
            return rules.item_step(entry.key)
        return str(trees.keystr((entry,)))

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        _, structure, _ = keys[0]
        return structure.unflatten(parts)


class VariableRule(TypeRule):
    """`flax.nnx.Variable`: a new variable with the same metadata and the new value."""

    def take_apart(self, container: Any) -> Parts:
        # Earlier versions of Flax have an attribute in place of the method.
        read = getattr(type(container), "get_raw_value", None)
        return (None,), [read(container) if read else container.raw_value]

    def step(self, key: Any) -> str:
        return ""

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return container.replace(parts[0])


class NnxObjectRule(AttributeRule):
    """A Flax NNX module, optimizer, or other object."""

    def __init__(self, kind: type) -> None:
        super().__init__(kind, copied=("_pytree__state", "_object__state"))


class NnxStateRule(AttributeRule):
    """`flax.nnx.State`, a wrapper of a dict that does not show in paths."""

    def __init__(self, kind: type) -> None:
        super().__init__(kind, hidden=("_mapping",))


REGISTERED = RegisteredTreeRule()
