"""The inputs of a compiled model: arrays, and static values, which are part of the code."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import numpy as np

from anydevice._arrays.move import destination_of
from anydevice._arrays.trees.containers import without_tables
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.engine import Engine
from anydevice._core.record import Record
from anydevice._machine.engines.registry import owner_of
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._core.array import HostArray


KeyFunction = Callable[[Any], Hashable]
Path = tuple[Any, ...]

_SMALLER, _LARGER = 1 / 16, 4.0
"""Factors for the rows of other inputs."""
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


class StaticInput(Record):
    """An input that is not an array. 1, 1.0 and True differ; NaN equals NaN.

    >>> StaticInput(1) == StaticInput(True), StaticInput(float("nan")) == StaticInput(float("nan"))
    (False, True)
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticInput) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[type, str]:
        return type(self.value), repr(self.value)


class CallSignature(Record):
    """The tree of a call's inputs, and the static values in it.

    Two calls with one signature differ in their arrays alone. `is_plain` where all inputs are
    arrays, passed by position.
    """

    structure: Any
    constants: tuple[tuple[int, StaticInput], ...]
    count: int
    is_plain: bool = False

    def filled(self, arrays: Sequence[Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs, by position and by name, with these arrays."""
        if self.is_plain:
            return tuple(arrays), {}
        static, rest = dict(self.constants), iter(arrays)
        values = [
            static[place].value if place in static else next(rest) for place in range(self.count)
        ]
        given, named = _unflatten(self.structure, iter(values))
        return tuple(given), dict(named)


def split_inputs(
    inputs: Sequence[Any], named: Mapping[str, Any]
) -> tuple[CallSignature, list[Array]]:
    """Split a call into its signature and its arrays.

    >>> import numpy
    >>> signature, arrays = split_inputs([{"x": numpy.ones(2), "mask": None}], {"scale": 3})
    >>> len(arrays), signature.filled(["an array"])
    (1, (({'x': 'an array', 'mask': None},), {'scale': 3}))

    Raises `ConfigurationError` for anything but arrays, numbers and texts in dicts, lists and
    tuples.
    """
    leaves: list[tuple[Path, Any]] = []
    structure = _structure((tuple(inputs), dict(sorted(named.items()))), (), leaves)
    arrays: list[Array] = []
    constants: list[tuple[int, StaticInput]] = []
    for place, (path, leaf) in enumerate(leaves):
        value = without_tables(leaf)
        if owner_of(value) is not None:
            arrays.append(value)
        elif isinstance(value, _CONSTANTS):
            constants.append((place, StaticInput(value)))
        else:
            raise ConfigurationError(
                f"{_path_text(path)} is a {type(value).__module__}.{type(value).__qualname__}; "
                "a compiled model takes arrays, numbers and texts, in dicts, lists and tuples",
                source="inputs",
            )
    is_plain = not named and len(arrays) == len(inputs) and all(map(is_, arrays, inputs))
    return CallSignature(structure, tuple(constants), len(leaves), is_plain), arrays


def _structure(tree: Any, path: Path, leaves: list[tuple[Path, Any]]) -> Any:
    """Return the tree without its leaves, as a value that can be compared and hashed."""
    if isinstance(tree, dict):
        kind = OrderedDict if isinstance(tree, OrderedDict) else dict
        parts = [(key, _structure(tree[key], (*path, key), leaves)) for key in tree]
        return kind, tuple(parts)
    if isinstance(tree, list | tuple):
        steps = enumerate(tree)
        return type(tree), tuple([_structure(part, (*path, at), leaves) for at, part in steps])
    leaves.append((path, tree))
    return None


def _unflatten(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return next(leaves)
    kind, parts = structure
    if issubclass(kind, dict):
        return kind((key, _unflatten(part, leaves)) for key, part in parts)
    made = [_unflatten(part, leaves) for part in parts]
    return kind._make(made) if hasattr(kind, "_make") else kind(made)


def example_inputs(example: Any) -> tuple[Any, ...]:
    """Return an example as inputs: a tuple is several inputs, anything else is one."""
    return example if isinstance(example, tuple) else (example,)


def is_traced(arrays: Sequence[Array]) -> bool:
    """Whether the caller is itself being compiled or differentiated."""
    return any(owner.is_traced(x) for x in arrays if (owner := owner_of(x)) is not None)


def key_function(x: Any, engine: Engine, device: Device) -> KeyFunction:
    """Return a function that gives arrays a key, for the type of an array on this device.

    Arrays with one key have the same shape, dtype and device. The key is `None` for an array that
    is elsewhere.
    """
    if engine.shares_memory or engine.name == "numpy":
        return attrgetter("shape", "dtype")
    if engine.name == "torch":
        return attrgetter("shape", "dtype", "device")
    if engine.name == "jax":
        # JAX has shape and dtype in one object that is fast to look up; devices are slower.
        if len(engine.devices()) == 1:
            return attrgetter("aval")
        here = x.sharding.device_set
        return lambda x: x.aval if x.sharding.device_set == here else None
    is_there = destination_of(device).already_there.get(type(x))
    if is_there is None:
        return lambda x: None
    return lambda x: (x.shape, x.dtype) if is_there(x) else None


def shapes_text(arrays: Sequence[Array]) -> str:
    """Return the shapes and dtypes of arrays as text: `(32, 64) float32`."""
    rows = []
    for x in arrays:
        owner = owner_of(x)
        assert owner is not None
        rows.append(f"{tuple(x.shape)} {owner.dtype_of(x)}")
    return ", ".join(rows) or "no arrays"


# Other inputs than those of an example, and what they have in common


def other_numbers(example: Sequence[HostArray]) -> Iterator[list[HostArray]]:
    """Inputs of the same shapes with other numbers: smaller and larger, or only smaller ones."""
    rows = _rows_of(example)
    if any(map(_is_floating, example)):
        if rows > 1:
            yield [_scale_rows(x, (_SMALLER, _LARGER)) for x in example]
        yield [_scale_rows(x, (_SMALLER,)) for x in example]
    else:
        yield [np.roll(x, 1, 0 if rows > 1 else -1) if x.ndim else x for x in example]


def other_rows(example: Sequence[HostArray]) -> Iterator[list[HostArray]]:
    """Inputs with one row more, where all have as many."""
    rows = _rows_of(example)
    for factors in ((_SMALLER, _LARGER), (_SMALLER, 1.0)) if rows else ():
        yield [_scale_rows(x[np.arange(rows + 1) % rows], factors) for x in example]


def _rows_of(example: Sequence[HostArray]) -> int:
    """Return how many rows all arrays have; 0 if they differ."""
    rows = {x.shape[0] if x.ndim else 0 for x in example}
    return rows.pop() if len(rows) == 1 else 0


def _scale_rows(x: HostArray, factors: Sequence[float]) -> HostArray:
    """Return the rows of floating numbers multiplied by one factor after the other."""
    if not _is_floating(x):
        return x
    if not x.ndim:
        return np.asarray(x * factors[0], x.dtype)
    scales = np.resize(factors, x.shape[0]).reshape(-1, *[1] * (x.ndim - 1))
    return np.asarray(x.astype(np.float64) * scales).astype(x.dtype)


def _is_floating(x: HostArray) -> bool:
    return x.dtype.kind in "fV"


def range_of(examples: Sequence[Sequence[HostArray]]) -> tuple[float, float] | None:
    """Return the least and the largest of all floating inputs; `None` where there are none."""
    floats = [np.asarray(x, np.float64) for arrays in examples for x in arrays if _is_floating(x)]
    numbers = [x[np.isfinite(x)] for x in floats]
    numbers = [x for x in numbers if x.size]
    if not numbers:
        return None
    return float(min(x.min() for x in numbers)), float(max(x.max() for x in numbers))


def _path_text(path: Path) -> str:
    side, *steps = path
    if side == 1:
        name, *steps = steps
        start = f"{name}="
    else:
        place, *steps = steps
        start = f"input {place}"
    return start + "".join(f"[{step!r}]" for step in steps)
