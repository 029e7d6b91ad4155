"""Rules: how one kind of container is taken apart into parts, and rebuilt from them.

A rule belongs to one type and knows nothing of trees. Rules of the standard library, and of objects
whose parts are their attributes, are here; rules of array libraries are in `_libraries`.

Objects are made again without `__init__` and `__post_init__`: every attribute is copied, and arrays
in attributes are replaced. Values that a class computed at its start stay, and frozen and slotted
classes work too. A subclass of a standard container keeps its attributes in the same way: the
factory of a `defaultdict`, the attributes of a Hugging Face `ModelOutput`. A `set` is no container
here: its members must be hashable, and arrays are not.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from types import MappingProxyType, MemberDescriptorType
from typing import Any, cast

Parts = tuple[Sequence[Any], list[Any]]
"""The keys of a container's parts, and the parts, in the same order."""


class Rule:
    """How to take a container apart and rebuild it; a `certain` one is not tested for an array."""

    certain = True

    def take_apart(self, container: Any) -> Parts | None:
        """Return the container's parts with their keys; `None` if it is left as it is."""
        raise NotImplementedError

    def step(self, key: Any) -> str:
        """Return the step that the key adds to a path: `".bias"`, `"[3]"`, `"['weight']"`."""
        return item_step(key)

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        """Make a container like this one with other parts."""
        raise NotImplementedError

    def refill(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        """Fill an object that is changed in place: the container itself, if possible."""
        return self.rebuild(container, keys, parts)


class TypeRule(Rule):
    """A rule of a library, which is made with the type of the container."""

    def __init__(self, kind: type) -> None:
        self.kind = kind


class InPlaceRule(TypeRule):
    """The rule of a container that is changed in place; `arrays` and `instead` are for messages."""

    arrays: str
    instead: str

    def holds(self, value: object) -> bool:
        """Whether a value may take the place of an array of this container."""
        raise NotImplementedError

    def refusal(self, container: object, value: object) -> str:
        """Return the message for a value that the container cannot hold."""
        return (
            f"a {kind_name(type(container))} is changed in place and can hold only {self.arrays}, "
            f"and this would become a {kind_name(type(value))}; move {self.instead} instead"
        )

    def renew(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> list[Any]:
        """Write new values into arrays that keep their identity; return the parts from now on."""
        return parts


ATOM = Rule()
"""The rule of values that never hold a movable array: numbers, strings, functions, sets."""


def item_step(key: object) -> str:
    """Return the step of a path that an index or key makes.

    >>> item_step(3), item_step("weight")
    ('[3]', "['weight']")
    """
    return f"[{key!r}]"


def attribute_step(name: object) -> str:
    """Return the step of a path for an attribute; a name that is a number is an index.

    >>> attribute_step("bias"), attribute_step("3"), attribute_step(0.5)
    ('.bias', '[3]', '[0.5]')
    """
    if isinstance(name, str):
        return f"[{name}]" if name.isdecimal() else f".{name}"
    return item_step(name)


def kind_name(kind: type) -> str:
    """Return the name of a type in messages: `dict`, `numpy.ndarray`, `torch.Tensor`.

    >>> from collections import OrderedDict
    >>> kind_name(dict), kind_name(OrderedDict)
    ('dict', 'collections.OrderedDict')
    """
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return prefix + kind.__qualname__


def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """Return the slots of a class and of its bases by name."""
    slots: dict[str, MemberDescriptorType] = {}
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, MemberDescriptorType) and name != "__dict__":
                slots.setdefault(name, member)
    return slots


def attributes_of(holder: object, slots: Mapping[str, MemberDescriptorType]) -> dict[str, Any]:
    """Return all attributes of the object itself, in slots or not, except unset slots."""
    attributes: dict[str, Any] = {}
    for name, member in slots.items():
        try:
            attributes[name] = member.__get__(holder)
        except AttributeError:  # a slot that was never filled
            continue
    try:
        # Not `vars`: a wrapper without a `__dict__` may return that of the object in it.
        attributes.update(object.__getattribute__(holder, "__dict__"))
    except AttributeError:
        pass
    return attributes


def give_attributes(
    holder: Any, slots: Mapping[str, MemberDescriptorType], attributes: Mapping[str, Any]
) -> None:
    """Set attributes without `__setattr__`, which frozen classes forbid and others override."""
    for name, value in attributes.items():
        if name in slots:
            slots[name].__set__(holder, value)
        else:
            object.__getattribute__(holder, "__dict__")[name] = value


class AttributeRule(Rule):
    """Objects of one class, taken apart into their attributes.

    Attributes in `first` come first; `static` ones are left alone; `hidden` ones do not show in a
    path (the dict inside a `UserDict`); `copied` ones must not be shared by two objects. `defaults`
    are values that an object has from its class until it gets its own.
    """

    def __init__(
        self,
        kind: type,
        *,
        certain: bool = True,
        base: Any = object,
        first: Sequence[str] = (),
        static: Collection[str] = (),
        hidden: Collection[str] = (),
        copied: Sequence[str] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.certain, self._kind, self._base = certain, kind, base
        self._first, self._copied = tuple(first), tuple(copied)
        self._static, self._hidden = frozenset(static), frozenset(hidden)
        self._defaults = dict(defaults or {})
        self._slots = slots_of(kind)

    def take_apart(self, container: Any) -> Parts:
        attributes = {**self._defaults, **attributes_of(container, self._slots)}
        for name in self._static:
            attributes.pop(name, None)
        first = {name: attributes[name] for name in self._first if name in attributes}
        ordered = first | attributes
        return list(ordered), list(ordered.values())

    def step(self, key: Any) -> str:
        return "" if key in self._hidden else attribute_step(key)

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        new = self._base.__new__(self._kind)
        attributes = attributes_of(container, self._slots)
        attributes.update(zip(keys, parts, strict=True))
        for name in self._copied:
            if name in attributes:
                attributes[name] = copy(attributes[name])
        give_attributes(new, self._slots, attributes)
        return new


def dataclass_rule(kind: type) -> AttributeRule:
    """Return a dataclass's rule, without `static=True` and Flax's `pytree_node=False` fields."""
    names, static, defaults = [], [], {}
    for field in dataclasses.fields(cast("Any", kind)):
        names.append(field.name)
        if field.metadata.get("static") is True or field.metadata.get("pytree_node") is False:
            static.append(field.name)
        if not field.init and field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
    return AttributeRule(kind, certain=False, first=names, static=static, defaults=defaults)


class DictRule(Rule):
    """Exactly `dict`."""

    def take_apart(self, container: Any) -> Parts:
        return list(container), list(container.values())

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return dict(zip(keys, parts, strict=True))

    def refill(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        container.update(zip(keys, parts, strict=True))
        return container


class ListRule(Rule):
    """Exactly `list`."""

    def take_apart(self, container: list[Any]) -> Parts:
        return range(len(container)), container.copy()

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return parts

    def refill(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        container[:] = parts
        return container


class TupleRule(Rule):
    """Exactly `tuple`."""

    def take_apart(self, container: tuple[Any, ...]) -> Parts:
        return range(len(container)), list(container)

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return tuple(parts)


class ProxyRule(DictRule):
    """A read-only view of a dict: a new dict, and a view of that."""

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return MappingProxyType(dict(zip(keys, parts, strict=True)))

    refill = rebuild


class StructureRule(TupleRule):
    """A named tuple made in C, such as the result of `torch.max`; only its class can make one."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._names: tuple[str, ...] = getattr(kind, "__match_args__", ())

    def step(self, key: Any) -> str:
        return attribute_step(self._names[key])

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return self._kind(parts)


class SubclassRule(Rule):
    """A subclass of a container: items have keys `(False, key)`, then attributes `(True, name)`."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._slots = slots_of(kind)

    def items(self, container: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the keys of the items, and the items."""
        return range(len(container)), list(container)

    def make(self, container: Any, keys: Sequence[Any], items: list[Any]) -> Any:
        """Make a container with these items, and no attributes yet."""
        raise NotImplementedError

    def take_apart(self, container: Any) -> Parts:
        keys, items = self.items(container)
        attributes = attributes_of(container, self._slots)
        marked = [(False, key) for key in keys] + [(True, name) for name in attributes]
        return marked, [*items, *attributes.values()]

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
        entries = dict(self._base.items(container))
        return list(entries), list(entries.values())

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
    """`deque` and its subclasses, with their `maxlen`."""

    def make(self, container: Any, keys: Sequence[Any], items: list[Any]) -> Any:
        new: Any = deque.__new__(self._kind)
        deque.__init__(new, items, container.maxlen)
        return new


def standard_rule(kind: type) -> Rule | None:
    """Return the rule of a container of the standard library or a subclass of one; else `None`."""
    if kind in _EXACT:
        return _EXACT[kind]
    if issubclass(kind, tuple) and hasattr(kind, "n_sequence_fields"):
        return StructureRule(kind)
    return next((rule(kind) for base, rule in _BY_BASE.items() if issubclass(kind, base)), None)


_EXACT: dict[type, Rule] = {
    dict: DictRule(),
    list: ListRule(),
    tuple: TupleRule(),
    MappingProxyType: ProxyRule(),
}
_BY_BASE: dict[type, Callable[[type], Rule]] = {
    dict: DictSubclassRule,
    list: ListSubclassRule,
    deque: DequeRule,
    tuple: TupleSubclassRule,
}
