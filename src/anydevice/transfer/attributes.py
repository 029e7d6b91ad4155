"""Objects whose parts are their attributes: dataclasses, attrs classes, namespaces, Flax modules.

They are made again without calling `__init__` or `__post_init__`: every attribute is carried over
as it is, and those that hold arrays are replaced. Whatever the class computed when the object was
made therefore stays as it was, and a frozen or slotted class is no obstacle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from types import MemberDescriptorType
from typing import Any, cast

from anydevice.transfer.rules import Parts, Rule, attribute_step


def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """The slots of a class by name, its own before those of its bases."""
    found: dict[str, MemberDescriptorType] = {}
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, MemberDescriptorType) and name != "__dict__":
                found.setdefault(name, member)
    return found


def attributes_of(holder: Any, slots: Mapping[str, MemberDescriptorType]) -> dict[str, Any]:
    """Everything that the object itself holds, in slots or not; what is unset is not there."""
    found: dict[str, Any] = {}
    for name, member in slots.items():
        try:
            found[name] = member.__get__(holder)
        except AttributeError:  # a slot that was never filled
            continue
    try:
        # Not `vars`: a class without a `__dict__` may hand out that of something it wraps.
        found.update(object.__getattribute__(holder, "__dict__"))
    except AttributeError:
        pass
    return found


def give_attributes(
    holder: Any, slots: Mapping[str, MemberDescriptorType], attributes: Mapping[str, Any]
) -> None:
    """Set attributes past any `__setattr__`, which a frozen class forbids and others watch."""
    for name, value in attributes.items():
        if name in slots:
            slots[name].__set__(holder, value)
        else:
            object.__getattribute__(holder, "__dict__")[name] = value


class AttributeRule(Rule):
    """Objects of one class, taken apart into their attributes.

    `first` are the names that come first, `static` those that are left alone, `hidden` those that
    do not show in a path (the dict inside a `UserDict`), `copied` those that two objects must not
    share, and `defaults` what an object has from its class until it is given its own.
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
        self.certain = certain
        self._kind = kind
        self._base = base
        self._first = tuple(first)
        self._static = frozenset(static)
        self._hidden = frozenset(hidden)
        self._copied = tuple(copied)
        self._defaults = dict(defaults or {})
        self._slots = slots_of(kind)

    def take_apart(self, container: Any) -> Parts:
        held = {**self._defaults, **attributes_of(container, self._slots)}
        for name in self._static:
            held.pop(name, None)
        ordered = {name: held[name] for name in self._first if name in held} | held
        return list(ordered), list(ordered.values())

    def step(self, key: Any) -> str:
        return "" if key in self._hidden else attribute_step(key)

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        new = self._base.__new__(self._kind)
        held = attributes_of(container, self._slots)
        held.update(zip(keys, parts, strict=True))
        for name in self._copied:
            if name in held:
                held[name] = copy(held[name])
        give_attributes(new, self._slots, held)
        return new


def dataclass_rule(kind: type) -> AttributeRule:
    """The rule of a dataclass; a field that its library calls static is left alone.

    Equinox and JAX mark such fields with `static=True`, Flax with `pytree_node=False`.
    """
    fields = dataclasses.fields(cast("Any", kind))
    return AttributeRule(
        kind,
        certain=False,
        first=[field.name for field in fields],
        static=[
            field.name
            for field in fields
            if field.metadata.get("static") is True or field.metadata.get("pytree_node") is False
        ],
        defaults={
            field.name: field.default
            for field in fields
            if not field.init and field.default is not dataclasses.MISSING
        },
    )


def attrs_rule(kind: type) -> AttributeRule:
    """The rule of a class made by attrs."""
    declared = cast("Any", kind).__attrs_attrs__
    return AttributeRule(kind, certain=False, first=[attribute.name for attribute in declared])
