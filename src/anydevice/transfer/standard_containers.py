"""The containers of the standard library: dicts, lists, tuples, deques, and their subclasses.

A subclass is made again by the standard class beneath it, without its own `__init__`, and keeps
what it holds beside its items: the factory of a `defaultdict`, the attributes of a Hugging Face
`ModelOutput`. A `set` is no container here: its members must be hashable, and arrays are not.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from anydevice.transfer.attributes import attributes_of, give_attributes, slots_of
from anydevice.transfer.rules import Parts, Rule, attribute_step, item_step


class DictRule(Rule):
    """Exactly `dict`."""

    def take_apart(self, container: dict[Any, Any]) -> Parts:
        return list(container), list(container.values())

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> dict[Any, Any]:
        return dict(zip(keys, parts, strict=True))

    def refill(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> dict[Any, Any]:
        container.update(zip(keys, parts, strict=True))
        return container  # type: ignore[no-any-return]


class ListRule(Rule):
    """Exactly `list`."""

    def take_apart(self, container: list[Any]) -> Parts:
        return range(len(container)), container.copy()

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> list[Any]:
        return parts

    def refill(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> list[Any]:
        container[:] = parts
        return container  # type: ignore[no-any-return]


class TupleRule(Rule):
    """Exactly `tuple`."""

    def take_apart(self, container: tuple[Any, ...]) -> Parts:
        return range(len(container)), list(container)

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> tuple[Any, ...]:
        return tuple(parts)


class ProxyRule(Rule):
    """A read-only view of a dict: a new dict, and a view of that."""

    def take_apart(self, container: MappingProxyType[Any, Any]) -> Parts:
        return list(container), list(container.values())

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return MappingProxyType(dict(zip(keys, parts, strict=True)))


class StructureRule(Rule):
    """A named tuple made in C, such as what `torch.max` returns; only its class can make one."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._names: tuple[str, ...] = getattr(kind, "__match_args__", ())

    def take_apart(self, container: tuple[Any, ...]) -> Parts:
        return range(len(container)), list(container)

    def step(self, key: Any) -> str:
        return attribute_step(self._names[key])

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return self._kind(parts)


class SubclassRule(Rule):
    """A subclass of a standard container: its items, then its attributes.

    A key is `(True, name)` for an attribute, `(False, key)` for an item.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._slots = slots_of(kind)

    def items(self, container: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """The keys of the items, and the items."""
        return range(len(container)), list(container)

    def make(self, container: Any, keys: Sequence[Any], items: list[Any]) -> Any:
        """A new container with these items, and no attributes yet."""
        raise NotImplementedError

    def take_apart(self, container: Any) -> Parts:
        keys, items = self.items(container)
        held = attributes_of(container, self._slots)
        marked = [(False, key) for key in keys] + [(True, name) for name in held]
        return marked, [*items, *held.values()]

    def step(self, key: Any) -> str:
        is_attribute, name = key
        return attribute_step(name) if is_attribute else item_step(name)

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        names = [key for is_attribute, key in keys if is_attribute]
        count = len(keys) - len(names)
        new = self.make(container, [key for _, key in keys[:count]], parts[:count])
        give_attributes(new, self._slots, dict(zip(names, parts[count:], strict=True)))
        return new


class DictSubclassRule(SubclassRule):
    def __init__(self, kind: type) -> None:
        super().__init__(kind)
        # An OrderedDict keeps an order of its own, which only its own methods see and set.
        self._base: type[dict[Any, Any]] = OrderedDict if issubclass(kind, OrderedDict) else dict

    def items(self, container: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        pairs = list(self._base.items(container))
        return [key for key, _ in pairs], [value for _, value in pairs]

    def make(self, container: Any, keys: Sequence[Any], items: list[Any]) -> Any:
        new: Any = self._base.__new__(self._kind)
        for key, value in zip(keys, items, strict=True):
            self._base.__setitem__(new, key, value)
        return new


class ListSubclassRule(SubclassRule):
    def make(self, container: Any, keys: Sequence[Any], items: list[Any]) -> Any:
        new: Any = list.__new__(self._kind)
        list.extend(new, items)
        return new


class TupleSubclassRule(SubclassRule):
    """Subclasses of `tuple`, named tuples among them."""

    def __init__(self, kind: type) -> None:
        super().__init__(kind)
        self._names: tuple[str, ...] = getattr(kind, "_fields", ())

    def items(self, container: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        items = list(tuple.__iter__(container))
        return range(len(items)), items

    def step(self, key: Any) -> str:
        is_attribute, name = key
        if not is_attribute and self._names:
            return attribute_step(self._names[name])
        return super().step(key)

    def make(self, container: Any, keys: Sequence[Any], items: list[Any]) -> Any:
        return tuple.__new__(self._kind, items)


class DequeRule(SubclassRule):
    """`deque` and its subclasses, with their greatest length."""

    def make(self, container: Any, keys: Sequence[Any], items: list[Any]) -> Any:
        new: Any = deque.__new__(self._kind)
        deque.__init__(new, items, container.maxlen)
        return new


def standard_rule(kind: type) -> Rule | None:
    """The rule of a container of the standard library or a subclass of one; else `None`."""
    if kind in _EXACT:
        return _EXACT[kind]
    if issubclass(kind, dict):
        return DictSubclassRule(kind)
    if issubclass(kind, list):
        return ListSubclassRule(kind)
    if issubclass(kind, deque):
        return DequeRule(kind)
    if issubclass(kind, tuple):
        return (
            StructureRule(kind) if hasattr(kind, "n_sequence_fields") else TupleSubclassRule(kind)
        )
    return None


_EXACT: dict[type, Rule] = {
    dict: DictRule(),
    list: ListRule(),
    tuple: TupleRule(),
    MappingProxyType: ProxyRule(),
}
