"""Numbers that say how an op is to be computed: what they must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anydevice.ops.dispatch import known
from anydevice.ops.numbers import in_words, plain_number
from anydevice.ops.shapes import wrong

_INFINITE = float("inf")


def is_finite(number: Any) -> bool:
    """Whether it is a number of Python's that has an end; truth values and arrays are none.

    >>> is_finite(0.5), is_finite(float("nan")), is_finite(True), is_finite("1")
    (True, False, False, False)
    """
    return type(number) in (int, float) and -_INFINITE < number < _INFINITE


def numbers_that(
    op: str, rule: str, holds: Callable[[float], bool], **numbers: Any
) -> tuple[Any, ...]:
    """The numbers as Python's own; the first that is not finite or breaks the rule is refused.

    >>> numbers_that("update_adam", "is at least 0", lambda number: number >= 0, decay=0.5)
    (0.5,)
    """
    plain = tuple([plain_number(number) for number in numbers.values()])
    for name, number in zip(numbers, plain, strict=True):
        if not is_finite(number) or not holds(number):
            raise wrong(op, f"{name} is a number that {rule}, but it is {in_words(number)}")
    return plain


def number_or_array(op: str, name: str, value: Any, kinds: tuple[str, ...]) -> Any:
    """A number of Python's, or an array without axes whose element type is of one of the kinds.

    Whether a number has an end is not looked at: code that is compiled for any rate would be
    compiled anew for each.
    """
    number = plain_number(value)
    if type(number) in (int, float):
        return number
    xp = known(number)
    if xp is None or number.shape or xp.dtype(number).kind not in kinds:
        here = in_words(number)
        if xp is not None:
            here = f"an array of {xp.dtype(number)} of the shape {tuple(number.shape)}"
        raise wrong(op, f"{name} is a number, or an array of one without axes, but it is {here}")
    return number
