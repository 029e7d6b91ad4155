"""Refusing settings that make no sense, in the name of whoever has them.

Layers, optimizers, schedules and initializers are descriptions: what is wrong in one is said when
it is made, and not in the middle of a training.
"""

from __future__ import annotations

import math

from anydevice.errors import ConfigurationError


def whole_numbers(owner: object, least: int = 1, /, **fields: object) -> None:
    """Refuse fields that are no whole numbers, or too small."""
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise refusal(owner, name, f"a whole number from {least} on", value)


def numbers(owner: object, below: float = math.inf, /, **fields: object) -> None:
    """Refuse fields that are no finite numbers from 0 on, or not below a bound."""
    for name, value in fields.items():
        if not _is_number(value) or not 0 <= value < below:  # type: ignore[operator]
            bound = "" if below == math.inf else f" and below {below:g}"
            raise refusal(owner, name, f"a finite number from 0 on{bound}", value)


def positive(owner: object, /, **fields: object) -> None:
    """Refuse fields that are no finite numbers above 0."""
    for name, value in fields.items():
        if not _is_number(value) or not 0 < value < math.inf:  # type: ignore[operator]
            raise refusal(owner, name, "a finite number above 0", value)


def truths(owner: object, /, **fields: object) -> None:
    """Refuse fields that are neither `True` nor `False`."""
    for name, value in fields.items():
        if not isinstance(value, bool):
            raise refusal(owner, name, "True or False", value)


def refusal(owner: object, name: str, wanted: str, value: object) -> ConfigurationError:
    """The error for one field."""
    kind = type(owner).__name__
    return ConfigurationError(
        f"{kind}: {name} must be {wanted}, not {value!r}", source=f"{kind}.{name}"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
