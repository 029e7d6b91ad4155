"""Properties of a model: functions that must hold for an example, and claims for all inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from inspect import signature
from typing import Any

import numpy as np

from anydevice._arrays.move import is_array
from anydevice._arrays.trees.tree import flatten
from anydevice._core import hooks
from anydevice._core.device import Device
from anydevice._core.text import type_text
from anydevice._libraries.base import ModelAdapter, host_array
from anydevice._libraries.precision import Policy
from anydevice.errors import ConfigurationError, VerificationError

Property = Callable[..., Any]
"""A function of the output, (y), or of the input and the output, (x, y): true or false."""


def check_functions(properties: Any) -> None:
    """Raise `ConfigurationError` unless this is a list of functions of (y) or of (x, y)."""
    if not isinstance(properties, Collection) or not all(map(callable, properties)):
        raise ConfigurationError(
            "properties are functions of the output in a list, as in properties=[is_finite]",
            source="properties=",
        )
    for holds in properties:
        takes_input(holds)


def split_claims(properties: Any) -> tuple[list[Any], Any]:
    """Return the claims among properties, which hold for every input, and the functions."""
    claims: list[Any] = []
    functions = properties
    if properties and isinstance(properties, Collection):
        claims, functions = hooks.split_claims(properties)
    check_functions(functions)
    return claims, functions


def check_claims(
    adapter: ModelAdapter, device: Device, policy: Policy, claims: Sequence[Any]
) -> tuple[str, ...]:
    """Return a line for each claim; raise `VerificationError` for one that does not hold."""
    why = ""
    if policy.compute != "float32" or policy.parameters != "float32":
        why = f"not covered: it computes in {policy.compute}"
    elif adapter.has_coarse_products(device):
        why = "not covered: products are computed with fewer digits than float32 (TF32)"
    elif device.kind != "cpu" and any(x.ndim > 2 for x in adapter.weights().values()):
        why = "not covered: accelerators may compute convolutions by other sums (Winograd, FFT)"
    return tuple([f"{claim}: {why or claim.checked(adapter)}" for claim in claims])


def unproved_claims(attached: Sequence[Any], claims: Sequence[Any]) -> tuple[str, ...]:
    """Return the claims of a model that are not among the properties to prove."""
    others = [item for item in attached if hasattr(item, "region") and item not in claims]
    return tuple(map(str, others))


def takes_input(holds: Property) -> bool:
    """Whether a property needs two arguments, the input and the output.

    >>> takes_input(lambda y, least=0: y > least), takes_input(lambda x, y: x < y)
    (False, True)

    Raises `ConfigurationError` if it takes neither (y) nor (x, y).
    """
    try:
        shape = signature(holds)
    except (TypeError, ValueError):  # functions in C may have no signature
        return False
    for arguments in ((0,), (0, 0)):
        try:
            shape.bind(*arguments)
        except TypeError:
            continue
        return len(arguments) == 2
    raise ConfigurationError(
        f"the property {_name_of(holds)} takes {shape}; a property takes the output, (y), or the "
        "input and the output, (x, y)",
        source="properties=",
    )


def check_properties(example: Any, output: Any, properties: Sequence[Property]) -> tuple[str, ...]:
    """Return the names of the properties; raise `VerificationError` if one does not hold."""
    x, y = _to_host(example), _to_host(output)
    for holds in properties:
        name = _name_of(holds)
        try:
            answer = holds(x, y) if takes_input(holds) else holds(y)
        except Exception as error:
            raise VerificationError(
                f"the property {name} could not be checked: {type(error).__name__}: {error}; it "
                "is called with the output, or the input and the output, as NumPy, and returns "
                "true or false",
                where=name,
            ) from error
        truth = np.asarray(host_array(answer) if is_array(answer) else answer)
        if truth.dtype != bool or not truth.size:
            got = "an empty array" if truth.dtype == bool else type_text(answer)
            got = "nothing" if answer is None else got
            raise VerificationError(
                f"the property {name} was not checked: it returned {got}, not true or false",
                where=name,
            )
        if not truth.all():
            first = f" at {np.argwhere(~truth)[0].tolist()}" if truth.ndim else ""
            raise VerificationError(
                f"the property {name} does not hold for the output of the model{first}", where=name
            )
    return tuple(map(_name_of, properties))


def _name_of(holds: Property) -> str:
    return str(getattr(holds, "__name__", repr(holds)))


def _to_host(tree: Any) -> Any:
    arrays, rebuild = flatten(tree, is_array)
    return rebuild([host_array(x) for x in arrays.values])
