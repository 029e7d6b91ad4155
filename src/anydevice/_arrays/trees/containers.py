"""The table of rules for containers, and the types that users register.

The order of lookup: registered types; types that are never containers; classes of libraries, by
name along the method resolution order, so that no library is imported; containers of the standard
library and their subclasses; dataclasses and attrs classes; and trees that JAX knows.

Left alone on purpose are sets, SciPy's sparse matrices (SciPy has them only on the host), random
generators (they belong to their device; make one there with `rng`), Flax Linen modules (they
describe a model without its arrays), and classes that are not registered.
"""

from __future__ import annotations

import types
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, cast

from anydevice._arrays.trees import rules
from anydevice._arrays.trees.rules import ATOM, Parts, Rule, kind_name
from anydevice._core.hooks import is_loaded, load
from anydevice._core.quantized import QuantizedWeight
from anydevice.errors import ConfigurationError

T = TypeVar("T")

ATOMS: frozenset[type] = frozenset(
    (
        *(bool, int, float, complex, str, bytes, bytearray, range, slice, set, frozenset, type),
        *(types.NoneType, types.EllipsisType, types.ModuleType),
        *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    )
)
"""Types whose values are never arrays and never contain one that could be moved."""

_ATOMIC_BASES = (int, float, complex, str, bytes, bytearray, set, frozenset, type, Enum)


class TableRule(Rule):
    """A DataFrame or a Series of pandas or polars: an array of its rows, which takes its place."""

    def take_apart(self, container: Any) -> Parts:
        return (None,), [self.array(container)]

    def step(self, key: Any) -> str:
        return ""

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return parts[0]

    def array(self, table: Any) -> Any:
        """Return the rows as one NumPy array, of the smallest dtype that holds every column.

        Raises `ConfigurationError`, with the column, if a column is not numeric, has missing
        values, or has integers that do not fit into the floating dtype of the others.
        """
        import numpy as np  # a walk through a tree imports no library

        if hasattr(table, "collect"):
            raise ConfigurationError("a LazyFrame has no rows yet; collect() it first")
        columns = _columns(table)
        if columns is None:
            return _numbers(table)
        arrays = [_numbers(column) for column in columns]
        dtype = np.result_type(*arrays) if arrays else np.dtype("float32")
        rows = np.empty((len(table), len(arrays)), dtype)
        for at, (column, array) in enumerate(zip(columns, arrays, strict=True)):
            rows[:, at] = array
            if dtype.kind == "f" and array.dtype.kind in "iu" and array.size:
                most = 2 ** (np.finfo(dtype).nmant + 1)
                if not -most <= int(array.min()) <= int(array.max()) <= most:
                    raise _not_numbers(column, f"has integers that {dtype} does not hold")
        return rows


def _columns(table: Any) -> list[Any] | None:
    """Return the columns of a DataFrame as Series; `None` for a Series itself."""
    if hasattr(table, "get_columns"):  # polars
        return list(table.get_columns())
    return [column for _, column in table.items()] if hasattr(table, "columns") else None


def _numbers(column: Any) -> Any:
    """Return the column as an array of numbers; raises `ConfigurationError` for any other."""
    array = column.to_numpy()
    declared = _declared_kind(column.dtype)
    if declared in "biuf" and array.dtype.kind != declared:
        raise _not_numbers(column, "has missing values; fill them, or leave its rows out")
    if array.dtype.kind not in "biufc" or array.ndim != 1:
        raise _not_numbers(
            column, f"is {column.dtype}, not numbers; leave it out, or encode it as numbers"
        )
    return array


def _declared_kind(dtype: Any) -> str:
    """Return NumPy's letter for the declared numbers of a column; "O" for anything else."""
    if hasattr(dtype, "kind"):  # of pandas
        return str(dtype.kind)
    integer = "u" if dtype.is_unsigned_integer() else "i"
    known = {"Boolean": "b", "Float32": "f", "Float64": "f"}
    return integer if dtype.is_integer() else known.get(str(dtype), "O")


def _not_numbers(column: Any, what: str) -> ConfigurationError:
    name = "this Series" if column.name in (None, "") else f"the column {column.name!r}"
    return ConfigurationError(f"{name} {what}")


_BY_NAME: Mapping[str, Rule | str] = {
    "torch.nn.modules.module.Module": "torch.trees:ModuleRule",
    "torch.optim.optimizer.Optimizer": "torch.trees:OptimizerRule",
    "torch.nn.utils.rnn.PackedSequence": "torch.trees:PackedSequenceRule",
    "torch.storage.UntypedStorage": "torch.trees:StorageRule",
    "mlx.nn.layers.base.Module": "mlx.trees:MlxModuleRule",
    "mlx.optimizers.optimizers.Optimizer": "mlx.trees:MlxOptimizerRule",
    "flax.nnx.variablelib.Variable": "jax.trees:VariableRule",
    "flax.nnx.statelib.State": "jax.trees:NnxStateRule",
    "flax.nnx.pytreelib.Pytree": "jax.trees:NnxObjectRule",
    "flax.nnx.object.Object": "jax.trees:NnxObjectRule",  # its name in earlier versions
    **dict.fromkeys(
        (
            *("pandas.DataFrame", "pandas.core.frame.DataFrame"),  # the second in earlier versions
            *("pandas.Series", "pandas.core.series.Series"),
            *("polars.dataframe.frame.DataFrame", "polars.lazyframe.frame.LazyFrame"),
            "polars.series.series.Series",
        ),
        TableRule(),
    ),
    "flax.linen.module.Module": ATOM,
    "scipy.sparse._base._spbase": ATOM,
}
"""Classes of libraries, by the name of the class in the module that defines it.

A text names the class of a rule in `_libraries`, which is loaded with the first value of that type.
"""


class _UnknownRule(Rule):
    """The rule of every type that has no other: JAX's registry decides, if JAX is imported."""

    certain = False

    def take_apart(self, container: Any) -> Parts | None:
        # Checked for each object: JAX may be imported at any time.
        return _registered_tree().take_apart(container) if is_loaded("jax.tree_util") else None

    def step(self, key: Any) -> str:
        return _registered_tree().step(key)

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return _registered_tree().rebuild(container, keys, parts)


@cache
def _registered_tree() -> Rule:
    return cast("Rule", load("anydevice._libraries.jax.trees:REGISTERED"))


_UNKNOWN = _UnknownRule()
_MOST = 4096  # a program that makes classes in a loop must not grow this table for ever
_registered: dict[type, _UserRule] = {}
known: dict[type, Rule] = {}
"""The cache of `rule_of`; `flatten` looks here first, to save a call."""


def rule_of(kind: type) -> Rule:
    """Return the rule for values of a type, looked up once; every type has one.

    >>> rule_of(dict) is rule_of(dict), rule_of(str) is ATOM
    (True, True)
    """
    rule = known.get(kind)
    if rule is None:
        if len(known) >= _MOST:
            known.clear()
        rule = known[kind] = _find(kind)
    return rule


def without_tables(x: Any) -> Any:
    """Return a DataFrame or a Series as `TableRule.array` does, and anything else as it is."""
    rule = rule_of(type(x))
    return rule.array(x) if isinstance(rule, TableRule) else x


def register_type(
    cls: type[T],
    flatten: Callable[[T], Mapping[str, Any]],
    rebuild: Callable[[T, dict[str, Any]], T],
) -> None:
    """Tell anydevice how to move objects of a class, and of its subclasses.

    `flatten(object)` returns the object's parts by name: arrays, or anything that holds arrays.
    `rebuild(object, parts)` returns the object after the move, from the moved parts by the same
    names; it gets the old object too, for everything that is not a part.

    >>> class Points:
    ...     def __init__(self, positions, label):
    ...         self.positions, self.label = positions, label
    >>> register_type(
    ...     Points,
    ...     flatten=lambda points: {"positions": points.positions},
    ...     rebuild=lambda points, parts: Points(parts["positions"], points.label),
    ... )
    >>> anydevice.to_device(Points(numpy.zeros((2, 3)), "corners"), "cpu").label
    'corners'

    A registered type overrides anydevice's own rules. Raises `ConfigurationError` for a built-in
    type, for arguments that are not a class and functions, and for a class that is registered
    already with other functions.
    """
    if not isinstance(cls, type):
        raise ConfigurationError(f"register_type takes a class, not {cls!r}")
    name = kind_name(cls)
    if cls.__module__ == "builtins":
        raise ConfigurationError(
            f"{name} is a built-in type, which anydevice treats itself; register a subclass of it"
        )
    for role, function in (("flatten", flatten), ("rebuild", rebuild)):
        if not callable(function):
            raise ConfigurationError(
                f"register_type({name}): {role} must be a function, not {function!r}"
            )
    earlier = _registered.get(cls)
    if earlier is not None and (earlier.flatten, earlier.remake) != (flatten, rebuild):
        raise ConfigurationError(
            f"{name} is registered already, with other functions; register a class only once"
        )
    _registered[cls] = _UserRule(name, flatten, rebuild)
    known.clear()


class _UserRule(Rule):
    """The rule of a type that a user registered."""

    def __init__(self, name: str, flatten: Callable[..., Any], remake: Callable[..., Any]) -> None:
        self.flatten, self.remake, self._name = flatten, remake, name

    def take_apart(self, container: Any) -> Parts:
        parts = self.flatten(container)
        if not isinstance(parts, Mapping):
            raise TypeError(
                f"the flatten function that was registered for {self._name} returned a "
                f"{kind_name(type(parts))}; it must return a dict of the parts by name"
            )
        return list(parts), list(parts.values())

    def step(self, key: Any) -> str:
        return rules.attribute_step(key)

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return self.remake(container, dict(zip(keys, parts, strict=True)))


_registered[QuantizedWeight] = _UserRule(
    "QuantizedWeight", attrgetter("arrays"), QuantizedWeight.with_arrays
)


def _find(kind: type) -> Rule:
    for base in kind.__mro__:
        if base in _registered:
            return _registered[base]
    if kind in ATOMS or issubclass(kind, _ATOMIC_BASES):
        return ATOM
    for base in kind.__mro__:
        rule = _BY_NAME.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None:
            if isinstance(rule, str):
                rule = cast("Rule", load(f"anydevice._libraries.{rule}")(kind))
            return rule
    if standard := rules.standard_rule(kind):
        return standard
    if issubclass(kind, UserDict | UserList):
        return rules.AttributeRule(kind, hidden=("data",))
    if issubclass(kind, ChainMap):
        return rules.AttributeRule(kind)
    if issubclass(kind, types.SimpleNamespace):
        return rules.AttributeRule(kind, base=types.SimpleNamespace)
    if hasattr(kind, "__dataclass_fields__"):
        return rules.dataclass_rule(kind)
    if hasattr(kind, "__attrs_attrs__"):
        first = [attribute.name for attribute in kind.__attrs_attrs__]
        return rules.AttributeRule(kind, certain=False, first=first)
    return _UNKNOWN
