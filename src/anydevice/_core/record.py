"""Records: small immutable values with named fields, quicker to define than dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from inspect import Parameter, Signature

R = TypeVar("R", bound="Record")

NOTHING: Mapping[str, Any] = MappingProxyType({})
"""The default of a field that is a mapping: empty and read-only."""


class _FieldsAsSignature:
    """The signature of a record's class, made on demand: importing `inspect` takes long."""

    def __get__(self, record: Record | None, kind: type[Record]) -> Signature:
        if record is not None:
            # A callable record, such as a schedule, has the signature of its `__call__`.
            raise AttributeError("__signature__")
        from inspect import Parameter, signature

        own = signature(kind.__init__)
        rest = list(own.parameters.values())[1:]
        if [parameter.kind for parameter in rest] == [
            Parameter.VAR_POSITIONAL,
            Parameter.VAR_KEYWORD,
        ]:
            rest = _parameters(kind)
        return own.replace(parameters=rest, return_annotation=own.empty)


@dataclass_transform(frozen_default=True)
class Record:
    """A frozen value: its fields are the annotations of its class, in their order.

    >>> class Point(Record):
    ...     x: int
    ...     y: int = 0
    >>> Point(1), Point(1) == Point(1, y=0), replace(Point(1), y=2)
    (Point(x=1, y=0), True, Point(x=1, y=2))

    A field with a value in the class is optional. Two records are equal if they have the same class
    and equal fields; they can be hashed if their fields can. A subclass adds its fields after the
    inherited ones, and may change the default of an inherited one.
    """

    __signature__ = _FieldsAsSignature()
    _fields: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # of a generic record
        own = vars(cls).get("__annotations__", ())
        cls._fields = (*cls._fields, *(name for name in own if name not in cls._fields))
        cls._defaults = {**cls._defaults, **{n: vars(cls)[n] for n in own if n in vars(cls)}}

    def __init__(self, *values: Any, **named: Any) -> None:
        by_place = dict(zip(self._fields, values, strict=False))
        fields = {**self._defaults, **by_place, **named}
        count = len(values) + len(named)
        if count != len(by_place | named) or fields.keys() != set(self._fields):
            raise TypeError(self._misuse(values, named))
        for name in self._fields:
            # As dataclasses do: Python compilers know this way around `__setattr__`.
            object.__setattr__(self, name, fields[name])

    def _misuse(self, values: tuple[Any, ...], named: dict[str, Any]) -> str:
        fields, by_place = self._fields, len(values)
        first = fields[:by_place]
        missing = [n for n in fields if n not in (*first, *named, *self._defaults)]
        unknown = [f"{name}{self._hint(name)}" for name in named if name not in fields]
        twice = [name for name in named if name in first]
        wrong = [
            f"{verb} {' and '.join(names)}{end}"
            for verb, names, end in (
                ("needs", missing, ""),
                ("has no", unknown, ""),
                ("got", twice, " twice"),
            )
            if names
        ]
        if by_place > len(fields):
            wrong.append(f"got {by_place} values")
        takes = ", ".join(fields) or "nothing"
        return f"{type(self).__name__} {', '.join(wrong)}; it takes {takes}"

    def _hint(self, name: str) -> str:
        from anydevice._core.names import find_name  # only needed for an error

        ours, hint = find_name("field", name, self._fields)
        return f" (did you mean {ours}?)" if ours else hint

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} does not change: {name} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} does not change: {name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({shown})"

    def __reduce__(self) -> tuple[object, ...]:
        # A read-only view of a mapping cannot be pickled; the mapping can.
        plain = {
            name: dict(value) if isinstance(value, MappingProxyType) else value
            for name, value in self.__dict__.items()
        }
        return _remade, (type(self), plain)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data for JSON: records and mappings as dicts, tuples as lists.

        >>> class Line(Record):
        ...     points: tuple[tuple[int, int], ...]
        >>> Line(((0, 0), (1, 2))).to_dict()
        {'points': [[0, 0], [1, 2]]}
        """
        return {name: _plain(value) for name, value in self.__dict__.items()}

    def __replace__(self, **changes: Any) -> Self:
        return type(self)(**{**self.__dict__, **changes})


def _parameters(kind: type[Record]) -> list[Parameter]:
    """Return the fields of a class as parameters, with their annotations."""
    from inspect import Parameter

    types: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        types.update(vars(base).get("__annotations__", {}))
    parameters: list[Parameter] = []
    by_name_only = False
    for name in kind._fields:
        default = kind._defaults.get(name, Parameter.empty)
        # Python allows a required parameter after an optional one only by keyword.
        required = default is Parameter.empty
        optional_before = bool(parameters) and parameters[-1].default is not Parameter.empty
        by_name_only = by_name_only or (required and optional_before)
        how = Parameter.KEYWORD_ONLY if by_name_only else Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(Parameter(name, how, default=default, annotation=types[name]))
    return parameters


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _remade(kind: type[R], fields: dict[str, Any]) -> R:
    return kind(**fields)


def replace(record: R, **changes: Any) -> R:
    """Return a copy of the record with some fields changed."""
    return record.__replace__(**changes)


def as_dict(record: Record) -> dict[str, Any]:
    """Return the fields of a record by name; their values are shared, not copied."""
    return dict(vars(record))
