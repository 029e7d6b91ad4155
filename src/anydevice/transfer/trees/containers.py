"""Which rule takes a value apart: the table of the kinds of containers, and what users add to it.

In this order: what a user registered; what is never a container; libraries' own classes, found by
name along the method resolution order so that none is imported; the containers of the standard
library with their subclasses; dataclasses and attrs classes; and what JAX's registry knows.

Left alone on purpose are sets, SciPy's sparse matrices (SciPy can hold them nowhere but on the
host), random generators (a generator belongs to its device; make one there with `rng`), Flax Linen
modules (they describe a model and hold none of its numbers), and any class that nobody registered.
"""

from __future__ import annotations

from collections import ChainMap, UserDict, UserList
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import (
    BuiltinFunctionType,
    EllipsisType,
    FunctionType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import Any, TypeVar

from anydevice.errors import ConfigurationError
from anydevice.transfer.trees.libraries import (
    MlxModuleRule,
    MlxOptimizerRule,
    ModuleRule,
    OptimizerRule,
    PackedSequenceRule,
    RegisteredTreeRule,
    VariableRule,
    nnx_object_rule,
    nnx_state_rule,
)
from anydevice.transfer.trees.rules import (
    ATOM,
    AttributeRule,
    Parts,
    Rule,
    attribute_step,
    attrs_rule,
    dataclass_rule,
    kind_name,
    standard_rule,
)

T = TypeVar("T")

ATOMS: frozenset[type] = frozenset(
    (
        *(bool, int, float, complex, str, bytes, bytearray, range, slice, set, frozenset, type),
        *(NoneType, EllipsisType, FunctionType, BuiltinFunctionType, MethodType, ModuleType),
    )
)
"""Types whose values are never arrays and never hold one that could be moved."""

_ATOMIC_BASES = (int, float, complex, str, bytes, bytearray, set, frozenset, type, Enum)

_BY_NAME: Mapping[str, Callable[[type], Rule]] = {
    "torch.nn.modules.module.Module": lambda kind: ModuleRule(),
    "torch.optim.optimizer.Optimizer": lambda kind: OptimizerRule(),
    "torch.nn.utils.rnn.PackedSequence": lambda kind: PackedSequenceRule(),
    "mlx.nn.layers.base.Module": lambda kind: MlxModuleRule(),
    "mlx.optimizers.optimizers.Optimizer": lambda kind: MlxOptimizerRule(),
    "flax.nnx.variablelib.Variable": lambda kind: VariableRule(),
    "flax.nnx.statelib.State": nnx_state_rule,
    "flax.nnx.pytreelib.Pytree": nnx_object_rule,
    "flax.nnx.object.Object": nnx_object_rule,  # its name in earlier versions
    "flax.linen.module.Module": lambda kind: ATOM,
    "scipy.sparse._base._spbase": lambda kind: ATOM,
}
"""Classes of libraries, by the name of the class in the module that defines it."""

_UNKNOWN = RegisteredTreeRule()
_MOST = 4096  # programs that make classes without end must not grow this table without end
_registered: dict[type, _UserRule] = {}
known: dict[type, Rule] = {}
"""The rules that `rule_of` has found already, for whoever cannot afford to call it each time."""


def rule_of(kind: type) -> Rule:
    """The rule for values of a type, looked up once; every type has one.

    >>> rule_of(dict) is rule_of(dict), rule_of(str) is ATOM
    (True, True)
    """
    rule = known.get(kind)
    if rule is None:
        if len(known) >= _MOST:
            known.clear()
        rule = known[kind] = _find(kind)
    return rule


def register_type(
    cls: type[T],
    flatten: Callable[[T], Mapping[str, Any]],
    rebuild: Callable[[T, dict[str, Any]], T],
) -> None:
    """Tell anydevice how to move objects of a class, and of its subclasses.

    `flatten(object)` returns the object's parts by name: arrays, or anything that holds arrays.
    `rebuild(object, parts)` returns what stands for the object after the move, from the same
    names with the moved parts; the object is given too, for whatever is not a part of it.

    >>> import anydevice, numpy
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

    It goes before every rule that anydevice has itself, so it may also be used to treat a known
    class in another way. Raises `ConfigurationError` for a built-in type, for what is not a class
    or a function, and for a class that is registered already with other functions.
    """
    if not isinstance(cls, type):
        raise ConfigurationError(f"register_type takes a class, and {cls!r} is none")
    name = kind_name(cls)
    if cls.__module__ == "builtins":
        raise ConfigurationError(
            f"{name} is built in, and anydevice treats it in its own way; register a subclass of it"
        )
    for role, function in (("flatten", flatten), ("rebuild", rebuild)):
        if not callable(function):
            raise ConfigurationError(
                f"register_type({name}): {role} must be a function, and {function!r} is none"
            )
    earlier = _registered.get(cls)
    if earlier is not None and (earlier.flatten, earlier.remake) != (flatten, rebuild):
        raise ConfigurationError(
            f"{name} is registered already, with other functions; register a class only once"
        )
    _registered[cls] = _UserRule(name, flatten, rebuild)
    known.clear()


class _UserRule(Rule):
    """What a user registered."""

    def __init__(
        self, name: str, flatten: Callable[[Any], Any], remake: Callable[..., Any]
    ) -> None:
        self.flatten = flatten
        self.remake = remake
        self._name = name

    def take_apart(self, container: Any) -> Parts:
        parts = self.flatten(container)
        if not isinstance(parts, Mapping):
            raise TypeError(
                f"the flatten function that was registered for {self._name} returned a "
                f"{kind_name(type(parts))}; it must return a dict of the parts by name"
            )
        return list(parts), list(parts.values())

    def step(self, key: Any) -> str:
        return attribute_step(key)

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        return self.remake(container, dict(zip(keys, parts, strict=True)))


def _find(kind: type) -> Rule:
    for base in kind.__mro__:
        if base in _registered:
            return _registered[base]
    if kind in ATOMS or issubclass(kind, _ATOMIC_BASES):
        return ATOM
    for base in kind.__mro__:
        make = _BY_NAME.get(f"{base.__module__}.{base.__qualname__}")
        if make is not None:
            return make(kind)
    standard = standard_rule(kind)
    if standard is not None:
        return standard
    if issubclass(kind, UserDict | UserList):
        return AttributeRule(kind, hidden=("data",))
    if issubclass(kind, ChainMap):
        return AttributeRule(kind)
    if issubclass(kind, SimpleNamespace):
        return AttributeRule(kind, base=SimpleNamespace)
    if hasattr(kind, "__dataclass_fields__"):
        return dataclass_rule(kind)
    if hasattr(kind, "__attrs_attrs__"):
        return attrs_rule(kind)
    return _UNKNOWN
