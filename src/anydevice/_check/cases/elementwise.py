"""Cases of the ops that work element by element: one plain shape, and all special numbers.

Other shapes and layouts are drawn (`_check/cases/drawn.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from anydevice._check import budgets
from anydevice._check.budgets import Budget
from anydevice._check.cases.case import (
    EVERYTHING,
    FLOATS,
    INTEGERS,
    LARGE,
    LARGE_KERNELS,
    NUMBERS,
    Call,
    Case,
    Draw,
    Gives,
    Make,
    Row,
    call,
    condition,
    per_element,
    same,
)
from anydevice._core.record import replace

FLUSHED = ("float32", "bfloat16", "float64")
"""The dtypes whose denormal numbers an engine may flush."""


def _one(*shape: int, **how: float) -> Make:
    return lambda draw: call(draw.normal(*shape, **how))


def _special(draw: Draw) -> Call:
    return call(draw.special())


_DENORMALS = Case("denormals", lambda draw: call(draw.denormal(65)), FLUSHED, denormal=True)
_ONE_TIMED: dict[str, Any] = {
    "gpu": {"16,384 rows of 4096": _one(16384, 4096)},
    "cpu": {"512 rows of 4096": _one(512, 4096)},
}


def _of_all_magnitudes(draw: Draw) -> Call:
    return call(draw.large(7, 129))


def _of_all_sizes(draw: Draw) -> Call:
    return call(np.abs(draw.large(7, 129)))


def _up_to_eighty(draw: Draw) -> Call:
    return call(draw.uniform(-80, 80, 7, 129))


def _around_integers(draw: Draw) -> Call:
    return call(draw.listed([-2.5, -2.0, -0.5, -0.25, -0.0, 0.0, 0.25, 0.5, 2.0, 2.5, 1023.5]))


_POSITIVE = (0.01, 30)


def _unary(
    op: str,
    budget: Budget = budgets.exact,
    *,
    dtypes: tuple[str, ...] = FLOATS,
    bounds: tuple[float, float] | None = None,
    special: Make = _special,
    spread: Make = _of_all_magnitudes,
    smooth: bool = True,
    gives: Gives = same,
    operations: int = 1,
    signs: bool = False,
    integers: Make = lambda draw: call(draw.digits(7, 129)),
) -> Row:
    def make(*shape: int) -> Make:
        if bounds is not None:
            return lambda draw: call(draw.uniform(*bounds, *shape))
        return _one(*shape, spread=4.0)

    cases = [Case("two rows of 4096", make(2, 4096))]
    cases += [Case("nan, infinities and limits", special, FLOATS), _DENORMALS]
    cases.append(Case("of all magnitudes", spread, FLOATS))
    if dtypes == NUMBERS:
        cases.append(Case("all digits", integers, INTEGERS))
    return Row(
        op,
        tuple(cases),
        dtypes,
        budget,
        gives,
        signs=signs,
        gradient=make(3, 5) if smooth else None,
        operations=per_element(operations),
        **_ONE_TIMED,
    )


def _bounds(draw: Draw) -> Call:
    return call(draw.listed([np.nan, np.inf, -np.inf, 0.0, 1.0, -1.0, 3.0]))


def _two(
    a: tuple[int, ...], b: tuple[int, ...], kinds: tuple[str, str] = ("normal", "normal")
) -> Make:
    left, right = kinds
    return lambda draw: call(getattr(draw, left)(*a), getattr(draw, right)(*b))


def _cross(a: Any, b: Any) -> Call:
    """Return all pairs of elements, contiguous: to broadcast them would compile one more kernel."""
    return call(np.repeat(a, len(b)), np.tile(b, len(a)))


_TWO_TIMED: dict[str, Any] = {
    "gpu": {"16,384 rows of 4096": _two((16384, 4096), (16384, 4096))},
    "cpu": {"512 rows of 4096": _two((512, 4096), (512, 4096))},
}


def _binary(
    op: str,
    budget: Budget = budgets.exact,
    *,
    dtypes: tuple[str, ...] = NUMBERS,
    kinds: tuple[str, str] = ("normal", "normal"),
    special: Make = lambda draw: _cross(draw.special(), draw.special()),
    spread: Make = lambda draw: call(draw.large(7, 129), draw.large(7, 129)),
    integers: Make = lambda draw: call(draw.digits(7, 129), draw.digits(7, 129)),
    denormal: bool = True,
    smooth: bool = True,
    gives: Gives = same,
) -> Row:
    make = partial(_two, kinds=kinds)
    cases = [Case("two rows of 4096", make((2, 4096), (2, 4096)))]
    cases.append(Case("a million, repeated", make((1031, 1), (1033,)), LARGE))
    cases.append(Case("of all magnitudes", spread, FLOATS))
    if dtypes == NUMBERS:
        cases.append(Case("all digits", integers, INTEGERS))
    cases.append(Case("a number on the right", lambda draw: call(draw.positive(5, 7), 3)))
    # Exact in every dtype.
    cases.append(
        Case("a fraction on the right", lambda draw: call(draw.positive(5, 7), 0.375), FLOATS)
    )
    cases.append(Case("nan, infinities and limits", special, FLOATS))
    if denormal:
        both = _two((65,), (65,), ("denormal", "denormal"))
        cases.append(Case("denormals", both, FLUSHED, denormal=True))
    return Row(
        op,
        tuple(cases),
        dtypes,
        budget,
        gives,
        gradient=make((3, 5), (5,)) if smooth else None,
        **_TWO_TIMED,
    )


def _quotients_of_like(draw: Draw) -> Call:
    """Numbers of all magnitudes by others of about the same: no quotient is too large or small."""
    a = draw.large(7, 129)
    return call(a, (a * draw.positive(7, 129)).astype(a.dtype))


def _short_integers(draw: Draw) -> Call:
    return call(draw.integers(-46340, 46341, 7, 129), draw.integers(-46340, 46341, 7, 129))


def _neighbours(draw: Draw) -> Call:
    return call(*draw.neighbours(7, 129))


def _comparison_row(op: str, **how: Any) -> Row:
    row = _binary(op, spread=_neighbours, integers=_neighbours, **how)
    many = Case("a million neighbours", lambda draw: call(*draw.neighbours(1031, 1033)), LARGE)
    return replace(row, cases=(*row.cases, many))


def _logical(op: str, *dtypes: str) -> Row:
    """Describe an op on booleans, or on bits of these dtypes."""
    case = Case("two rows of 4096", _two((2, 4096), (2, 4096)))
    return Row(op, (case,), dtypes or ("bool",), **_TWO_TIMED)


def _where(at: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> Make:
    return lambda draw: call(draw.chance(*at), draw.digits(*a), draw.digits(*b))


def _where_special(draw: Draw) -> Call:
    """Put special numbers on the side that is not chosen: they have no influence."""
    special = draw.special()
    return call(np.arange(18) % 2 == 0, np.repeat(special, 2), np.repeat(special[::-1], 2))


_WHERE = Row(
    "where",
    (
        Case("two rows of 4096", _where((2, 4096), (2, 4096), (2, 4096))),
        Case("a number elsewhere", lambda draw: call(draw.chance(3, 5), draw.normal(3, 5), 0)),
        Case("a number there", lambda draw: call(draw.chance(3, 5), 1, draw.normal(3, 5))),
        Case("nan, infinities and limits", _where_special, FLOATS),
    ),
    EVERYTHING,
    signs=True,
    gradient=_where((3, 5), (3, 5), (5,)),
    gpu={"16,384 rows of 4096": _where((16384, 4096), (16384, 4096), (16384, 4096))},
    cpu={"512 rows of 4096": _where((512, 4096), (512, 4096), (512, 4096))},
)


def _gelu(approximate: bool, *shape: int) -> Make:
    return lambda draw: call(draw.normal(*shape, spread=3.0), approximate)


_GELU = Row(
    "gelu",
    (
        Case("two rows of 14336", _gelu(False, 2, 14336)),
        Case("two rows of 14336, by tanh", _gelu(True, 2, 14336)),
        Case("up to eighty", _up_to_eighty),
        Case("of all magnitudes", _of_all_magnitudes),
        Case("nan, infinities and limits", _special, FLOATS),
        Case(
            "nan, infinity and the largest, by tanh",
            lambda draw: call(draw.listed([np.nan, np.inf, 1e4, -30.0, 0.0]), True),
        ),
    ),
    budget=budgets.of_gelu,
    gradient=_gelu(False, 3, 5),
    gpu={"16,384 rows of 14336": _gelu(True, 16384, 14336)},
    cpu={"256 rows of 14336": _gelu(True, 256, 14336)},
    operations=per_element(8),
)


def _clip_call(*shape: int, **limits: Any) -> Make:
    return lambda draw: call(draw.digits(*shape), **limits)


_CLIP = Row(
    "clip",
    (
        Case("two rows of 4096", _clip_call(2, 4096, min=-1, max=1)),
        Case("fractions", _clip_call(3, 77, min=-0.375, max=0.5), FLOATS),
        Case("below alone", _clip_call(3, 77, min=0)),
        Case("crossed limits", _clip_call(3, 77, min=1, max=-1)),
        Case(  # some limits are crossed: the upper one wins
            "by arrays",
            lambda draw: call(draw.digits(3, 5, 7), draw.normal(5, 1), draw.normal(7)),
        ),
        Case("nan, infinities and limits", lambda draw: call(draw.special(), -2, 2), FLOATS),
    ),
    NUMBERS,
    gradient=_clip_call(3, 5, min=-0.5, max=0.5),
    **_ONE_TIMED,
)


def _leaky(*shape: int, slope: float = 0.01) -> Make:
    return lambda draw: call(draw.normal(*shape), slope)


_LEAKY_RELU = Row(
    "leaky_relu",
    (
        Case("two rows of 4096", _leaky(2, 4096)),
        Case("a slope of its own", _leaky(3, 77, slope=0.3)),
        Case("of all magnitudes", _of_all_magnitudes),
        Case("nan, infinities and limits", _special),
    ),
    budget=budgets.relative(2, once=True),
    gradient=_leaky(3, 5, slope=0.25),
    operations=per_element(2),
    **_ONE_TIMED,
)


def _gate_call(*shape: int) -> Make:
    return lambda draw: call(draw.normal(*shape, spread=3.0), draw.normal(*shape))


_SWIGLU = Row(
    "swiglu",
    (
        Case("two rows of 14336", _gate_call(2, 14336)),
        Case("one row, odd width", _gate_call(1, 1001)),
        Case("one element", _gate_call(1)),
        Case("empty", _gate_call(0, 8)),
        Case("rows that lie apart", _gate_call(3, 5, 64), strided=True),
        Case("columns that lie apart", _gate_call(33, 65), strided=True),
        Case("a million, odd", _gate_call(1031, 1033), LARGE_KERNELS),
        Case("many rows", _gate_call(70001, 5), LARGE_KERNELS),
        Case("up to eighty", lambda draw: call(draw.uniform(-80, 80, 9, 65), draw.normal(9, 65))),
        Case("nan and infinities", lambda draw: call(draw.special(), draw.positive(9)), FLOATS),
        Case(
            "nan and infinities above",
            lambda draw: call(draw.positive(7), _bounds(draw).arguments[0]),
        ),
    ),
    budget=budgets.of_sigmoid(32),
    gradient=_gate_call(3, 5),
    gpu={"16,384 rows of 14336": _gate_call(16384, 14336)},
    cpu={"256 rows of 14336": _gate_call(256, 14336)},
    operations=per_element(5),
)


_LIMITS, _ABSOLUTE = budgets.relative(16), budgets.absolute(8)


ELEMENTWISE: tuple[Row, ...] = (
    *(_unary(op, _LIMITS, bounds=(-0.9, 0.9)) for op in ("acos", "asin", "atanh")),
    *(_unary(op, _LIMITS) for op in ("atan", "asinh")),
    _unary("acosh", _LIMITS, bounds=(1.1, 30), spread=_of_all_sizes),
    *(_unary(op, budgets.of_exponential(16), spread=_up_to_eighty) for op in ("cosh", "sinh")),
    _unary("expm1", budgets.of_exponential(16), operations=4),
    _unary("square", dtypes=NUMBERS, integers=lambda draw: call(draw.integers(-46340, 46341, 9))),
    _unary("reciprocal", budgets.relative(6), bounds=_POSITIVE),
    *(_logical(f"bitwise_{op}", "int32", "bool") for op in ("and", "or", "xor")),
    *(_logical(f"bitwise_{op}_shift", "int32") for op in ("left", "right")),
    *(_binary(op, _LIMITS, dtypes=FLOATS, denormal=False) for op in ("atan2", "hypot")),
    _binary("copysign", dtypes=FLOATS, denormal=False),
    _binary("logaddexp", budgets.absolute(16), dtypes=FLOATS, denormal=False),
    _binary("floor_divide", budgets.relative(4), denormal=False, smooth=False),
    _binary("remainder", kinds=("normal", "positive"), denormal=False),
    _binary("add"),
    _binary("subtract"),
    _binary("multiply", integers=_short_integers),
    _binary(
        "divide",
        budgets.relative(6),
        dtypes=FLOATS,
        kinds=("normal", "positive"),
        special=lambda draw: _cross(
            draw.special(), draw.listed([2.0, -3.0, np.inf, np.nan, 0.0, -0.0])
        ),
        spread=_quotients_of_like,
        denormal=False,
    ),
    _binary(
        "power",
        budgets.relative(64),
        dtypes=FLOATS,
        kinds=("positive", "normal"),
        special=lambda draw: _cross(
            draw.listed([0.5, -2.0, 3.0, -1.5, 1.0, 0.0, np.inf, -np.inf, np.nan]),
            draw.listed([0.0, 1.0, 2.0, 3.0, 5.0]),
        ),
        spread=lambda draw: call(draw.uniform(0.01, 30, 7, 129), draw.uniform(-3, 3, 7, 129)),
        denormal=False,
    ),
    *(_comparison_row(op) for op in ("maximum", "minimum")),
    *(
        _comparison_row(op, smooth=False, gives=condition)
        for op in ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")
    ),
    *(_logical(f"logical_{op}") for op in ("and", "or", "xor")),
    _WHERE,
    *(_unary(op, dtypes=NUMBERS, signs=True) for op in ("negative", "positive", "abs")),
    _unary("sign", dtypes=NUMBERS, smooth=False),
    _unary("floor", smooth=False, spread=_around_integers),
    *(
        _unary(op, dtypes=NUMBERS, smooth=False, spread=_around_integers)
        for op in ("ceil", "round", "trunc")
    ),
    _CLIP,
    _unary("exp", budgets.of_exponential(16), operations=4),
    *(
        _unary(op, _LIMITS, bounds=_POSITIVE, spread=_of_all_sizes, operations=4)
        for op in ("log", "log1p", "log2", "log10")
    ),
    _unary("sqrt", budgets.relative(6), bounds=_POSITIVE, spread=_of_all_sizes),
    _unary("rsqrt", budgets.relative(6), bounds=_POSITIVE, spread=_of_all_sizes, special=_bounds),
    *(
        _unary(op, budget, special=_bounds, spread=_up_to_eighty, operations=4)
        for op, budget in (("sin", _ABSOLUTE), ("cos", _ABSOLUTE), ("tan", budgets.of_tan))
    ),
    _unary("tanh", budgets.relative(32), operations=4),
    _unary("sigmoid", budgets.of_sigmoid(16), operations=4),
    _unary("erf", budgets.absolute(32), operations=4),
    *(_unary(op, smooth=False, gives=condition) for op in ("isinf", "isnan", "signbit")),
    _unary("isfinite", dtypes=NUMBERS, smooth=False, gives=condition),
    *(
        Row(op, (Case("two rows of 4096", _one(2, 4096)),), dtypes, **_ONE_TIMED)
        for op, dtypes in (("logical_not", ("bool",)), ("bitwise_invert", ("int32", "bool")))
    ),
    _unary("relu", dtypes=NUMBERS),
    _unary("silu", budgets.of_sigmoid(24), spread=_up_to_eighty, operations=5),
    _LEAKY_RELU,
    _GELU,
    _SWIGLU,
)
