"""Reads properties in VNN-LIB 1.0 and 2.0: a formula that inputs and bad outputs satisfy.

Decimals are the rationals that they name. This module imports NumPy alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from math import prod
from typing import Any

from anydevice.proofs.checking.network import FormatError, NotSupportedError, Query

_TOKEN = re.compile(r"[()]|;[^\n]*|[^\s()\[\];]*\[[^\]()]*\]|[^\s()\[\];]+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_VARIABLE = re.compile(r"([XY])(?:_(\d{1,8})|\[([\d\s,]{1,99})\])")
MOST_CASES, LARGEST, DEEPEST = 20_000, 1 << 24, 60

Sizes = dict[str, tuple[int, ...]]
Linear = dict[tuple[str, int], Fraction]
"""Coefficients of the variables ("X", 3); that of ("", 0) is the constant."""
Case = list[tuple[Linear, bool]]
"""What must be <= 0 (< 0 where True), all of it."""


def read_vnnlib(content: str) -> tuple[int, int, tuple[Query, ...]]:
    """How many inputs and outputs the property in a VNN-LIB file is about, and its queries."""
    sizes: Sizes = {"X": (0,), "Y": (0,)}
    cases: list[Case] = [[]]
    for line, form in _forms(content):
        try:
            if form[0] == "assert" and len(form) == 2:
                cases = _both(cases, _cases(form[1], sizes))
            elif form[0] in ("declare-const", "declare-fun"):
                kind, number, _ = _VARIABLE.fullmatch(form[1]).groups()  # type: ignore[union-attr]
                sizes[kind] = (max(int(number) + 1, *sizes[kind]),)
            elif form[0] == "declare-network":
                for each in form[2:]:
                    kind = {"declare-input": "X", "declare-output": "Y"}[each[0]]
                    sizes[kind] = tuple(map(int, re.findall(r"\d{1,8}", each[3])))
            elif form[0] != "vnnlib-version":
                raise NotSupportedError(f"{form[0]!r} is not read")
        except NotSupportedError as error:
            raise NotSupportedError(f"line {line}: {error}") from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise FormatError(f"line {line} cannot be read: {error}") from error
    inputs, outputs = prod(sizes["X"]), prod(sizes["Y"])
    if not 0 < inputs <= LARGEST or not 0 < outputs <= LARGEST or not cases:
        raise FormatError(f"it declares {inputs} inputs X, {outputs} outputs Y, or no case")
    return inputs, outputs, tuple(_queries(cases, inputs, outputs))


def _forms(content: str) -> Iterator[tuple[int, list[Any]]]:
    stack: list[list[Any]] = [[]]
    line, at = 1, 0
    for token in _TOKEN.finditer(content):
        line, at, word = line + content.count("\n", at, token.start()), token.start(), token[0]
        if word == "(":
            stack.append([])
        elif word == ")" and len(stack) > 1:
            stack[-2].append(stack.pop())
        elif word[0] != ";":
            stack[-1].append(word)
        if len(stack) == 1 and stack[0]:
            if not isinstance(stack[0][0], list) or not stack[0][0]:
                raise FormatError(f"line {line}: {word!r} stands in no form, or a form is empty")
            yield line, stack[0].pop()
        if len(stack) > DEEPEST:
            raise FormatError(f"line {line}: parentheses are deeper than {DEEPEST}")
    if len(stack) > 1:
        raise FormatError(f"line {line}: {len(stack) - 1} parentheses are not closed")


def _both(a: list[Case], b: list[Case]) -> list[Case]:
    if len(a) * len(b) > MOST_CASES:
        raise NotSupportedError(f"there are more than {MOST_CASES} cases")
    if len(a) == len(b) == 1:  # thousands of bounds, one after the other
        a[0].extend(b[0])
        return a
    return [[*one, *other] for one in a for other in b]


def _cases(form: Any, sizes: Sizes) -> list[Case]:
    """The formula as cases, one of which must hold."""
    word, *parts = form
    if word == "and":
        cases: list[Case] = [[]]
        for part in parts:
            cases = _both(cases, _cases(part, sizes))
        return cases
    if word == "or":
        return [case for part in parts for case in _cases(part, sizes)]
    left, right = (_linear(part, sizes) for part in parts)
    less, more = (_plus(left, right, -1), _plus(right, left, -1))
    if word not in ("<=", "<", ">=", ">", "=="):
        raise NotSupportedError(f"{word!r} is not read")
    return [
        [(each, word in "<>") for each in {"<": [less], ">": [more]}.get(word[0], [less, more])]
    ]


def _linear(form: Any, sizes: Sizes) -> Linear:
    if isinstance(form, str):
        variable = _VARIABLE.fullmatch(form)
        if variable is None and _NUMBER.fullmatch(form):
            return {("", 0): Fraction(form)}
        if variable is None:
            raise FormatError(f"{form!r} is neither a number nor a variable X or Y")
        place, shape = 0, sizes[variable[1]]
        numbers = [int(number) for number in (variable[2] or variable[3]).split(",")]
        for number, size in zip(numbers, shape, strict=True):
            place = place * size + number
            if number >= size:
                raise FormatError(f"{form} was not declared")
        return {(variable[1], place): Fraction(1)}
    word, *parts = form
    total, *terms = (_linear(part, sizes) for part in parts)
    if word == "-" and not terms:
        return _plus({}, total, -1)
    for term in terms:
        constant, other = (total, term) if total.keys() <= {("", 0)} else (term, total)
        if word not in ("+", "-", "*") or (word == "*" and not constant.keys() <= {("", 0)}):
            raise NotSupportedError(f"{word!r} of these is not read")
        product = _plus({}, other, constant.get(("", 0), Fraction(0)))
        total = product if word == "*" else _plus(total, term, 1 if word == "+" else -1)
    return total


def _plus(a: Linear, b: Linear, factor: Fraction | int) -> Linear:
    total = dict(a)
    for variable, coefficient in b.items():
        total[variable] = total.get(variable, Fraction(0)) + factor * coefficient
    return total


def _queries(cases: list[Case], inputs: int, outputs: int) -> Iterator[Query]:
    boxes: dict[tuple[tuple[Fraction, ...], tuple[Fraction, ...]], list[Case]] = {}
    for case in cases:
        bounds = [each for each in case if any(kind == "X" for kind, _ in each[0])]
        rows = [each for each in case if not any(kind == "X" for kind, _ in each[0])]
        boxes.setdefault(_box(bounds, inputs), []).append(rows or [({}, False)])
    if len(boxes) * inputs + len(cases) * outputs > LARGEST:
        raise NotSupportedError("it has more numbers than are kept")
    for (low, high), groups in boxes.items():
        rows = [row for each in groups for row in each]
        coefficients = tuple(
            tuple(linear.get(("Y", k), Fraction(0)) for k in range(outputs)) for linear, _ in rows
        )
        constants = tuple(linear.get(("", 0), Fraction(0)) for linear, _ in rows)
        group = tuple(number for number, each in enumerate(groups) for _ in each)
        yield Query(low, high, coefficients, constants, group, tuple(strict for _, strict in rows))


def _box(bounds: Case, inputs: int) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
    low: dict[int, Fraction] = {}
    high: dict[int, Fraction] = {}
    for linear, strict in bounds:
        (kind, number), *others = (each for each in linear if each[0] and linear[each])
        if others or strict:
            raise NotSupportedError(f"a condition on X {number} is no <= or >= with a number")
        edge = -linear.get(("", 0), Fraction(0)) / linear[kind, number]
        side, narrower = (high, min) if linear[kind, number] > 0 else (low, max)
        side[number] = narrower(side.get(number, edge), edge)
    for i in range(inputs):
        if i not in low or i not in high or low[i] > high[i]:
            raise FormatError(f"the interval of input X {i} is empty, or has no end")
    return tuple(low[i] for i in range(inputs)), tuple(high[i] for i in range(inputs))
