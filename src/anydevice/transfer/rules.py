"""What a rule is: how one kind of container is taken apart into parts, and made again from them.

A rule belongs to one type and knows nothing of trees. It recognises libraries by the names of
their classes and finds them in `sys.modules`, so that having a rule for a library imports nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Parts = tuple[Sequence[Any], list[Any]]
"""The keys of a container's parts, and the parts, in the same order."""


class Rule:
    """How containers of one type are taken apart and made again.

    `certain` says that a value of this type is a container without asking whether it is an array.
    """

    certain = True

    def take_apart(self, container: Any) -> Parts | None:
        """The container's parts with their keys; `None` where it is to be left as it is."""
        raise NotImplementedError

    def step(self, key: Any) -> str:
        """What the key adds to a leaf's path: `".bias"`, `"[3]"`, `"['weight']"`."""
        return item_step(key)

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        """A new container like this one, with these parts in place of its own."""
        raise NotImplementedError

    def refill(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        """The same, inside an object that is changed in place: itself, where that can be done."""
        return self.rebuild(container, keys, parts)


class InPlaceRule(Rule):
    """How a container is changed in place because others hold on to it, and returned itself."""

    def holds(self, value: Any) -> bool:
        """Whether a value may take the place of an array of this container."""
        raise NotImplementedError

    def refusal(self, container: Any, value: Any) -> str:
        """What to say of a value that it cannot hold, and what to do instead."""
        raise NotImplementedError

    def renew(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> list[Any]:
        """Write new values into arrays that keep their identity, before anything is rebuilt.

        Returns what stands for each part from now on, everywhere in the tree.
        """
        return parts


ATOM = Rule()
"""Of what never holds an array that could be moved: numbers, texts, functions, classes, sets."""


def item_step(key: Any) -> str:
    """The step of a path that an index or key makes.

    >>> item_step(3), item_step("weight")
    ('[3]', "['weight']")
    """
    return f"[{key!r}]"


def attribute_step(name: Any) -> str:
    """The step of a path that an attribute makes; a name that is a number counts as an index.

    >>> attribute_step("bias"), attribute_step("3"), attribute_step(0.5)
    ('.bias', '[3]', '[0.5]')
    """
    if isinstance(name, str):
        return f"[{name}]" if name.isdecimal() else f".{name}"
    return item_step(name)


def kind_name(kind: type) -> str:
    """How messages call a type: `dict`, `numpy.ndarray`, `torch.Tensor`.

    >>> from collections import OrderedDict
    >>> kind_name(dict), kind_name(OrderedDict)
    ('dict', 'collections.OrderedDict')
    """
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
