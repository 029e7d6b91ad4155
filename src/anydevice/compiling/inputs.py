"""The inputs of a compiled model: arrays, and all else, which becomes part of the code."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.core.record import Record
from anydevice.engines.lookup import owner_of
from anydevice.errors import ConfigurationError
from anydevice.transfer.moving import target_of

Array = Any
Signer = Callable[[Array], Hashable]
Path = tuple[Any, ...]

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


class Constant(Record):
    """An input that is no array. 1, 1.0 and True are three; NaN equals NaN.

    >>> Constant(1) == Constant(True), Constant(float("nan")) == Constant(float("nan"))
    (False, True)
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._written() == other._written()

    def __hash__(self) -> int:
        return hash(self._written())

    def _written(self) -> tuple[type, str]:
        return type(self.value), repr(self.value)


class Form(Record):
    """The form of a call: the tree of its inputs, and everything in it that is no array.

    Two calls of one form differ in their arrays alone. `is_plain` where all inputs are arrays, by
    place.
    """

    structure: Any
    constants: tuple[tuple[int, Constant], ...]
    count: int
    is_plain: bool = False

    def filled(self, arrays: Sequence[Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs, those by place and those by name, with these arrays."""
        values: list[Any] = [None] * self.count
        fixed = dict(self.constants)
        rest = iter(arrays)
        for place in range(self.count):
            values[place] = fixed[place].value if place in fixed else next(rest)
        given, named = _unflattened(self.structure, iter(values))
        return tuple(given), dict(named)


def taken_apart(inputs: Sequence[Any], named: Mapping[str, Any]) -> tuple[Form, list[Array]]:
    """The form of a call and its arrays.

    >>> import numpy
    >>> form, arrays = taken_apart([{"x": numpy.ones(2), "mask": None}], {"scale": 3})
    >>> len(arrays), form.filled(["an array"])
    (1, (({'x': 'an array', 'mask': None},), {'scale': 3}))

    Raises `ConfigurationError` for anything but arrays, numbers and texts in dicts, lists and
    tuples.
    """
    leaves: list[tuple[Path, Any]] = []
    structure = _structure((tuple(inputs), dict(sorted(named.items()))), (), leaves)
    arrays: list[Array] = []
    constants: list[tuple[int, Constant]] = []
    for place, (path, value) in enumerate(leaves):
        if owner_of(value) is not None:
            arrays.append(value)
        elif isinstance(value, _CONSTANTS):
            constants.append((place, Constant(value)))
        else:
            raise ConfigurationError(
                f"{_named(path)} is a {type(value).__module__}.{type(value).__qualname__}; "
                "a compiled model takes arrays, numbers and texts, in dicts, lists and tuples",
                source="inputs",
            )
    is_plain = not named and len(arrays) == len(inputs) and all(map(is_, arrays, inputs))
    return Form(structure, tuple(constants), len(leaves), is_plain), arrays


def _structure(tree: Any, path: Path, leaves: list[tuple[Path, Any]]) -> Any:
    """The tree without its leaves, as a value that can be compared and hashed."""
    if isinstance(tree, dict):
        kind = OrderedDict if isinstance(tree, OrderedDict) else dict
        parts = [(key, _structure(tree[key], (*path, key), leaves)) for key in tree]
        return kind, tuple(parts)
    if isinstance(tree, list | tuple):
        steps = enumerate(tree)
        return type(tree), tuple([_structure(part, (*path, at), leaves) for at, part in steps])
    leaves.append((path, tree))
    return None


def _unflattened(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return next(leaves)
    kind, parts = structure
    if issubclass(kind, dict):
        return kind((key, _unflattened(part, leaves)) for key, part in parts)
    made = [_unflattened(part, leaves) for part in parts]
    return kind._make(made) if hasattr(kind, "_make") else kind(made)


def example_inputs(example: Any) -> tuple[Any, ...]:
    """An example as inputs: a tuple is several, anything else is one."""
    return example if isinstance(example, tuple) else (example,)


def is_traced(arrays: Sequence[Array]) -> bool:
    """Whether the caller is being compiled or differentiated himself."""
    return any(owner.is_traced(x) for x in arrays if (owner := owner_of(x)) is not None)


def signer_of(x: Array, engine: Engine, device: Device) -> Signer:
    """What tells arrays of one type apart, for an array that lies on this device.

    Two with one sign have the same shape and element type. Where one lies is part of its sign, or
    it has none.
    """
    if engine.shares_memory or engine.name == "numpy":
        return _shape_and_type
    if engine.name == "torch":
        return _shape_type_and_place
    if engine.name == "jax":
        # JAX has shape and type in one object that is quickly looked up, and a device less so.
        if len(engine.devices()) == 1:
            return attrgetter("aval")
        here = x.sharding.device_set
        return lambda x: x.aval if x.sharding.device_set == here else None
    is_there = target_of(device).already_there.get(type(x))
    if is_there is None:
        return lambda x: None
    return lambda x: (x.shape, x.dtype) if is_there(x) else None


def _shape_and_type(x: Array) -> Hashable:
    return x.shape, x.dtype


def _shape_type_and_place(x: Array) -> Hashable:
    return x.shape, x.dtype, x.device


def shapes_text(arrays: Sequence[Array]) -> str:
    """The shapes and types of arrays, as a person reads them: `(32, 64) float32`."""
    rows = []
    for x in arrays:
        owner = owner_of(x)
        assert owner is not None
        rows.append(f"{tuple(x.shape)} {owner.dtype_of(x)}")
    return ", ".join(rows) or "no arrays"


def _named(path: Path) -> str:
    side, *steps = path
    if side == 1:
        name, *steps = steps
        start = f"{name}="
    else:
        place, *steps = steps
        start = f"input {place}"
    return start + "".join(f"[{step!r}]" for step in steps)
