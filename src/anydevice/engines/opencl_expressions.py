"""What each elementwise operation is in OpenCL C, for floating and for whole numbers.

`a` and `b` are the operands, `NUMBER` is their type. An operation that has no text for whole
numbers is not defined for them.
"""

from __future__ import annotations

from anydevice.core.engine import Absent
from anydevice.engines.opencl_numbers import Number

_SIGMOID = "(a >= 0 ? 1 / (1 + exp(-a)) : exp(a) / (1 + exp(a)))"

FLOATING: dict[str, str] = {
    "abs": "fabs(a)",
    "negative": "-a",
    "sign": "(isnan(a) ? a : (NUMBER)((a > 0) - (a < 0)))",
    "floor": "floor(a)",
    "exp": "exp(a)",
    "log": "log(a)",
    "sqrt": "sqrt(a)",
    "rsqrt": "rsqrt(a)",
    "sin": "sin(a)",
    "cos": "cos(a)",
    "tanh": "tanh(a)",
    "sigmoid": _SIGMOID,
    "erf": "erf(a)",
    "isnan": "isnan(a)",
    "add": "a + b",
    "subtract": "a - b",
    "multiply": "a * b",
    "divide": "a / b",
    "pow": "pow(a, b)",
    "maximum": "(a > b || a != a ? a : b)",
    "minimum": "(a < b || a != a ? a : b)",
    "silu": f"(a * {_SIGMOID})",
    "swiglu": f"(a * {_SIGMOID}) * b",
}

WHOLE: dict[str, str] = {
    "abs": "(a < 0 ? -a : a)",
    "negative": "-a",
    "sign": "((a > 0) - (a < 0))",
    "floor": "a",
    "isnan": "0",
    "add": "a + b",
    "subtract": "a - b",
    "multiply": "a * b",
    "pow": "whole_power(a, b)",
    "maximum": "(a > b ? a : b)",
    "minimum": "(a < b ? a : b)",
}

TRUTH: dict[str, str] = {
    "logical_not": "a == 0",
    "equal": "a == b",
    "less": "a < b",
    "less_equal": "a <= b",
    "logical_and": "a != 0 && b != 0",
    "logical_or": "a != 0 || b != 0",
}
"""Those that are the same for all numbers; like `isnan`, their results are truth values."""


def expression(operation: str, number: Number) -> str:
    """The text of an operation on numbers of a type.

    Raises `UnsupportedError` where it is not defined for them.
    """
    own = FLOATING if number.floating else WHOLE
    text = TRUTH.get(operation) or own.get(operation)
    if text is None:
        raise Absent(
            f"OpenCL has no {operation} of {number.name}", instead="convert the array to float32"
        ).error()
    return text


def gives_truth(operation: str) -> bool:
    """Whether the results are truth values, whatever the operands are."""
    return operation == "isnan" or operation in TRUTH
