"""Checks of arguments: each returns Python's own type, or raises a `ConfigurationError`."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from numbers import Real
from typing import TypeGuard, TypeVar

from anydevice._core.text import shortened
from anydevice.errors import ConfigurationError

Value = TypeVar("Value")


def integer(
    name: str,
    value: object,
    at_least: int | None = None,
    at_most: int | None = None,
    *,
    owner: str = "",
    note: str = "",
) -> int:
    """Return `value` as an `int`; integers of array libraries count, booleans do not.

    The bounds `at_least` and `at_most` are allowed values. The error begins with `owner`, a
    function or a class, and `name`, and ends with `note`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # also raised for an array with several elements
        number = None
    if number is None or (at_least is not None and number < at_least):
        wanted = "an integer" if at_least is None else f"an integer of {at_least} or more"
    elif at_most is not None and number > at_most:
        wanted = f"at most {at_most}"
    else:
        return number
    raise error(name, wanted, value, owner=owner, note=note)


def number(
    name: str,
    value: object,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
    owner: str = "",
    note: str = "",
) -> float:
    """Return `value` as a finite `float`; numbers of array libraries count, booleans do not.

    `at_least` and `at_most` are allowed values, `above` and `below` are not. An array with one
    element counts as a number.

    >>> number("share", 1, above=0, at_most=1)
    1.0
    >>> number("share", 1.5, above=0, at_most=1)
    Traceback (most recent call last):
    anydevice.errors.ConfigurationError: share must be a number above 0 and at most 1, not 1.5
    """
    result = math.nan
    try:
        scalar = value.item() if hasattr(value, "item") else value  # an array with one element
        if isinstance(scalar, Real) and not isinstance(scalar, bool):
            result = float(scalar)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # several, traced, or too large
        pass
    if math.isfinite(result) and at_least <= result <= at_most and above < result < below:
        return result
    low = "" if at_least == -math.inf else f"of {at_least:g} or more"
    low = low if above == -math.inf else f"above {above:g}"
    high = "" if at_most == math.inf else f"at most {at_most:g}"
    high = high if below == math.inf else f"below {below:g}"
    bounds = " and ".join(bound for bound in (low, high) if bound)
    kind = "a number" if high else "a finite number"
    raise error(name, f"{kind} {bounds}".rstrip(), value, owner=owner, note=note)


def one_of(name: str, value: Value, choices: Collection[Value], *, owner: str = "") -> Value:
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return value
    *first, last = map(repr, choices)
    wanted = f"{', '.join(first)} or {last}" if first else last
    raise error(name, wanted, value, owner=owner)


def error(
    name: str, wanted: str, value: object, *, owner: str = "", note: str = ""
) -> ConfigurationError:
    """Return the `ConfigurationError` for an argument with a wrong value.

    >>> error("window", "a pair", 3, owner="attention").source
    'attention.window'
    """
    try:
        text = shortened(repr(value))
    except ValueError:  # Python refuses to print an integer of more than 4300 digits
        text = f"a {type(value).__name__}"
    end = f"; {note}" if note else ""
    owner = owner and f"{owner}: "
    source = f"{owner}{name}".replace(": ", ".")
    return ConfigurationError(f"{owner}{name} must be {wanted}, not {text}{end}", source)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether the value is an `int` and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether the value is an `int` or a `float`, and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)
