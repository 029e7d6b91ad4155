"""Reads properties in VNN-LIB 1.0 and 2.0: a formula that inputs and bad outputs satisfy.

Decimals are the rationals that they name. This module imports NumPy alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from math import prod
from typing import Any

from anydevice.proofs.checking.network import FormatError, NotSupportedError, Query

_TOKEN = re.compile(r"[()]|;[^\n]*|[^\s()\[\];]*\[[^\]()]*\]|[^\s()\[\];]+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_VARIABLE = re.compile(r"([XY])(?:_(\d{1,8})|\[([\d\s,]{1,99})\])")
MOST_CASES, LARGEST, DEEPEST = 20_000, 1 << 24, 60

Sizes = dict[str, tuple[int, ...]]
Row = tuple[Any, bool]
"""What must be <= 0 (< 0 where True): coefficients of ("X", 3) …, the constant is that of ""."""


def read_vnnlib(content: str) -> tuple[int, int, tuple[Query, ...]]:
    """How many inputs and outputs the property in a VNN-LIB file is about, and its queries."""
    sizes: Sizes = {"X": (0,), "Y": (0,)}
    common, cases, line = list[Row](), [list[Row]()], 1
    try:
        for line, (word, *rest) in _forms(content):  # noqa: B007  an error names it
            if word == "assert":
                new = _cases(rest[0], sizes)
                common, cases = (
                    (common + new[0], cases) if len(new) == 1 else (common, _both(cases, new))
                )
            elif word in ("declare-const", "declare-fun"):
                kind, number = rest[0].split("_")
                sizes[kind] = (max(int(number) + 1, *sizes[kind]),)
            elif word == "declare-network":
                for each in rest[1:]:
                    kind = {"declare-input": "X", "declare-output": "Y"}[each[0]]
                    sizes[kind] = tuple(map(int, re.findall(r"\d{1,8}", each[3])))
            elif word != "vnnlib-version":
                raise NotSupportedError(f"{word!r} is not read")
        return prod(sizes["X"]), prod(sizes["Y"]), tuple(_queries(common, cases, sizes))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind_of = NotSupportedError if isinstance(error, NotSupportedError) else FormatError
        raise kind_of(f"line {line}: {error}") from error


def _forms(content: str) -> Iterator[tuple[int, list[Any]]]:
    stack: list[list[Any]] = [[]]
    line, at = 1, 0
    for token in _TOKEN.finditer(content):
        line, at, word = line + content.count("\n", at, token.start()), token.start(), token[0]
        if word == "(" and len(stack) < DEEPEST:
            stack.append([])
        elif word == ")" and len(stack) > 1:
            stack[-2].append(stack.pop())
        elif word[0] not in "();":
            stack[-1].append(word)
        elif word[0] != ";":
            raise FormatError(f"line {line}: parentheses do not match, or are too deep")
        if len(stack) == 1 and stack[0]:
            yield line, stack[0].pop()
    if len(stack) > 1:
        raise FormatError(f"line {line}: {len(stack) - 1} parentheses are not closed")


def _both(a: list[list[Row]], b: list[list[Row]]) -> list[list[Row]]:
    if len(a) * len(b) > MOST_CASES:
        raise NotSupportedError(f"there are more than {MOST_CASES} cases")
    return [[*one, *other] for one, other in product(a, b)]


def _cases(form: Any, sizes: Sizes) -> list[list[Row]]:
    """The formula as cases, one of which must hold."""
    word, *parts = form
    if word == "or":
        return [case for part in parts for case in _cases(part, sizes)]
    if word == "and":
        cases: list[list[Row]] = [[]]
        for part in parts:
            cases = _both(cases, _cases(part, sizes))
        return cases
    left, right = (_linear(part, sizes) for part in parts)
    less, more = _sum(left, right, -1), _sum(right, left, -1)
    kinds = {"<=": [less], ">=": [more], "==": [less, more], "<": [less], ">": [more]}
    return [[(each, word in ("<", ">")) for each in kinds[word]]]


def _linear(form: Any, sizes: Sizes) -> Counter[Any]:
    if not isinstance(form, str):
        word, total, *terms = form[0], *(_linear(part, sizes) for part in form[1:])
        total = total if terms or word != "-" else _sum(Counter(), total, -1)
        for term in terms:
            if word == "*" and set(total) <= {""}:
                total = _sum(Counter(), term, total[""])
            elif word == "*" and set(term) <= {""}:
                total = _sum(Counter(), total, term[""])
            else:
                total = _sum(total, term, {"+": 1, "-": -1}[word])
        return total
    variable = _VARIABLE.fullmatch(form)
    if variable is None:
        if not _NUMBER.fullmatch(form):
            raise FormatError(f"{form!r} is neither a number nor a variable X or Y")
        return Counter({"": Fraction(form)})
    place, numbers = 0, [int(number) for number in (variable[2] or variable[3]).split(",")]
    for number, size in zip(numbers, sizes[variable[1]], strict=True):
        place = place * size + number
        if number >= size:
            raise FormatError(f"{form} was not declared")
    return Counter({(variable[1], place): Fraction(1)})


def _sum(a: Counter[Any], b: Counter[Any], factor: Any) -> Counter[Any]:
    total = Counter(a)
    total.update({variable: factor * coefficient for variable, coefficient in b.items()})
    return total


def _queries(common: list[Row], cases: list[list[Row]], sizes: Sizes) -> Iterator[Query]:
    inputs, outputs = prod(sizes["X"]), prod(sizes["Y"])
    if inputs * outputs == 0 or inputs + len(cases) * outputs > LARGEST or not cases:
        raise FormatError(f"{inputs} inputs X, {outputs} outputs Y and {len(cases)} cases")
    boxes: dict[Any, list[list[Row]]] = {}
    whole = _box(common, ((None,) * inputs,) * 2)
    for case in cases:
        rows = [row for row in common + case if not _about(row, "X")]
        boxes.setdefault(_box(case, whole), []).append(rows or [(Counter(), False)])
    for (low, high), groups in boxes.items():
        for i, (a, b) in enumerate(zip(low, high, strict=True)):
            if a is None or b is None or a > b:
                raise FormatError(f"the interval of input X {i} is empty, or has no end")
        rows = [row for each in groups for row in each]
        table = [tuple(Fraction(row[("Y", k)]) for k in range(outputs)) for row, _ in rows]
        group = tuple(number for number, each in enumerate(groups) for _ in each)
        constants = tuple(Fraction(row[""]) for row, _ in rows)
        yield Query(low, high, tuple(table), constants, group, tuple(row[1] for row in rows))


def _about(row: Row, kind: str) -> list[Any]:
    return [variable for variable in row[0] if variable and variable[0] == kind]


def _box(rows: list[Row], box: Any) -> Any:
    """The box, narrowed by the rows that bound an input."""
    low, high = map(list, box)
    for row in (row for row in rows if _about(row, "X")):
        (variable, *others), (linear, strict) = _about(row, "X"), row
        if others or strict or _about(row, "Y") or not linear[variable]:
            raise NotSupportedError(f"a condition on X {variable[1]} is no <= with a number")
        edge, k = -Fraction(linear[""]) / linear[variable], variable[1]
        if linear[variable] > 0:
            high[k] = edge if high[k] is None else min(edge, high[k])
        else:
            low[k] = edge if low[k] is None else max(edge, low[k])
    return tuple(low), tuple(high)
