"""Rules for JAX's and Flax's containers, which are rebuilt as new objects.

JAX's own registry flattens the trees that it knows. Flax NNX objects are graphs that may share
variables, which the registry would duplicate, so they have their own rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

from jax import tree_util as trees

from anydevice._arrays.trees import rules
from anydevice._arrays.trees.rules import AttributeRule, Parts, Rule, TypeRule


class RegisteredTreeRule(Rule):
    """Containers in JAX's registry, queried per object: types can be registered at any time."""

    certain = False

    def take_apart(self, container: Any) -> Parts | None:
        if trees.all_leaves((container,)):
            return None
        # One level: JAX asks first about the container, and everything else is a part.
        answers = chain((False,), repeat(True))
        parts, structure = trees.tree_flatten(container, is_leaf=lambda _: next(answers))
        # JAX would recurse forever on the names of a container that contains itself.
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
        # Earlier versions of Flax have an attribute instead of the method.
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
    """`flax.nnx.State`, a wrapper of a dict that does not appear in paths."""

    def __init__(self, kind: type) -> None:
        super().__init__(kind, hidden=("_mapping",))


REGISTERED = RegisteredTreeRule()
