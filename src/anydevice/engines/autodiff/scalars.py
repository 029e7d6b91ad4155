"""What a function must give so that it has a gradient: the same demand on every engine."""

from __future__ import annotations

from typing import Any


def refuse_all_but_one_number(value: Any, is_array: bool) -> None:
    """Raise `TypeError`, and say what to do, unless the value is an array without axes."""
    if is_array and not value.shape:
        return
    given = f"an array of shape {tuple(value.shape)}" if is_array else f"a {type(value).__name__}"
    raise TypeError(
        f"a gradient is that of one number, and the function gave {given}; "
        "end it with ops.sum or ops.mean"
    )
