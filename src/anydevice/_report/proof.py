"""The outcome of a proof: a sentence, the lines of a counterexample, and a notebook's view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from anydevice._core.text import UNUSABLE, USABLE, percent
from anydevice._report import notebook
from anydevice._report.svg import Curve

if TYPE_CHECKING:
    from anydevice._proofs.checking.network import Query
    from anydevice._proofs.prove import Result, SearchProgress

_LONGEST_VECTOR, _PRINTED = 16, 8
"""A vector of a counterexample is printed whole up to this length, else its first numbers."""
_MAX_TERMS = 4
"""Conditions, and terms of a sum, that are printed."""
_COVERAGE = {"float32": "for every execution in float32", "real": "exactly"}
_MARKS = {"proved": USABLE, "counterexample": UNUSABLE, "undecided": "?"}
_ADVICE = {
    "time": "The time was up: a longer limit may decide it.",
    "memory": "The memory for open parts was full: a larger one may decide it.",
    "interrupted": "It was interrupted before it was decided.",
    "resolution": "Some parts cannot be divided further: the property holds by a hair, if it does.",
    "refused": "The checker did not accept what the search found; it is not proved.",
}


def outcome_text(data: dict[str, Any]) -> str:
    """Return the sentence behind the name of a result; `data` comes from `outcome_data`."""
    took = f"in {data['seconds']:.1f} s"
    if data["result"] == "proved":
        theorem = f"{_COVERAGE[data['precision']]}{theorem_text(data)}"
        return f"{theorem}, {in_parts(data['parts'])}, {took}"
    if data["result"] == "counterexample":
        return f"{took}: {data['headline']}" if data["headline"] else took
    bound = "none" if data["best_bound"] is None else f"{data['best_bound']:.3g}"
    return f"({data['reason']}) {took}: {data['proved_share']:.1%} proved, worst bound {bound}"


def theorem_text(data: dict[str, Any]) -> str:
    """Return the executors of a theorem, and whether it is about logits."""
    by = f" by {', '.join(data['executors'])}" if data["executors"] else ""
    return by + (", for the logits before the last softmax" if data["logits"] else "")


def counterexample_text(data: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a counterexample: its numbers, and the conditions they violate."""
    yield f"x  {_vector(data['x'])}"
    yield f"y  {_vector(data['y'])}"
    why = _join_some(data.get("violated", ()), " and ")
    yield f"violation  {data['violation']:.4g}" + (f": {why}" if why else "")


def _vector(values: Sequence[float]) -> str:
    """Return the first numbers, each in the fewest digits that identify it."""
    narrow = np.array(values, np.float32)
    exact = bool((narrow == np.array(values)).all())
    texts = [
        str(short) if exact else repr(value) for short, value in zip(narrow, values, strict=True)
    ]
    if len(texts) > _LONGEST_VECTOR:
        texts = [*texts[:_PRINTED], f"… {len(texts) - _PRINTED:,} more: --json has all of them"]
    return f"[{', '.join(texts)}]"


def violated_conditions(
    queries: Sequence[Query], x: Sequence[float], y: Sequence[float]
) -> list[str]:
    """Return the worst violated conditions of these outputs, in VNN-LIB's notation."""
    worst, conditions = inf, list[str]()
    for query in queries:
        bounds = zip(query.low, x, query.high, strict=False)
        same_sizes = (len(query.low), len(query.coefficients[0])) == (len(x), len(y))
        inside = all(float(low) <= value <= float(high) for low, value, high in bounds)
        if not same_sizes or not inside:
            continue
        groups: dict[int, list[int]] = {}
        for number, group in enumerate(query.group):
            groups.setdefault(group, []).append(number)
        coefficients = np.array([[float(c) for c in row] for row in query.coefficients])
        rows = coefficients @ np.array(y) + [float(constant) for constant in query.constants]
        for numbers in groups.values():
            if (largest := float(rows[numbers].max())) < worst:
                worst, conditions = largest, [_condition(query, number) for number in numbers]
    return conditions


def _condition(query: Query, number: int) -> str:
    """Return "row ≤ 0", with the negative terms on the right."""
    terms = [(c, f"Y_{k}") for k, c in enumerate(query.coefficients[number]) if c]
    terms += [(query.constants[number], "")] if query.constants[number] else []
    left = [(c, name) for c, name in terms if c > 0]
    right = [(-c, name) for c, name in terms if c < 0]
    return f"{_sum(left)} {'<' if query.strict[number] else '<='} {_sum(right)}"


def _sum(terms: Sequence[tuple[Fraction, str]]) -> str:
    texts = [
        name if name and c == 1 else f"{float(c):.12g}{name and f' {name}'}" for c, name in terms
    ]
    return _join_some(texts, " + ") or "0"


def _join_some(texts: Sequence[str], between: str) -> str:
    more = len(texts) - _MAX_TERMS
    return between.join([*texts[:_MAX_TERMS], *([f"… {more:,} more"] if more > 0 else ())])


def in_parts(count: int) -> str:
    """Return a number of parts of the region in words."""
    return "1 part" if count == 1 else f"{count:,} parts"


def outcome_html(result: Result) -> str:
    """Return a result for a notebook: the verdict, its figures, and the course of the search."""
    from anydevice._proofs.prove import outcome_data  # loaded by now; a check goes without it

    data = outcome_data(result)
    kind = data["result"]
    advice = [notebook.line(_ADVICE[data["reason"]])] if "reason" in data else []
    verdict = notebook.marked(_MARKS[kind], f"{kind} {outcome_text(data)}", good=kind == "proved")
    facts = notebook.table((), list(_facts(result, data)))
    return notebook.block(verdict, *advice, facts, *_plots(result.course))


def _facts(result: Result, data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    in_float32 = data["precision"] == "float32"
    yield "precision", "float32, in any order of sums" if in_float32 else "exact arithmetic"
    if data["result"] == "counterexample":
        yield "x", _vector(data["x"])
        yield "y", _vector(data["y"])
        how = "in rational numbers" if getattr(result, "exact", False) else "in float64"
        yield "violation", f"{data['violation']:.4g}, {how}"
    if data["result"] == "proved":
        yield "assumed", "IEEE arithmetic in float32" if in_float32 else "exact arithmetic"
    for certificate in getattr(result, "certificates", ()):
        yield "network, SHA-256", f"{certificate.network[:16]}…"
        for name, error in certificate.assumptions.items():
            kind = "an" if name.endswith("absolute") else "a relative"
            yield f"assumed of {name}", f"{kind} error of at most {error:.2g}"
    if data["result"] == "undecided" and result.course.points:
        yield "open at the end", in_parts(result.course.points[-1][1].open)


def _plots(course: SearchProgress) -> Iterator[str]:
    """Yield plots of the search; a search that its first bound decided has none."""
    points = course.points
    if len(points) < 2:
        return
    shares = [(0.0, 0.0), *((at, now.share) for at, now in points)]
    yield _plot("proved, as a share of the region", shares, (0.0, 1.0), percent)
    bounds = [(at, now.worst) for at, now in points]
    if any(isfinite(bound) for _, bound in bounds):
        yield _plot("worst bound in the last batch of parts; proved above 0", bounds)
    open_parts = [(at, float(now.open)) for at, now in points]
    largest = max(count for _, count in open_parts)
    if largest > 1:
        ends = (0.0, max(3.0, largest))  # below 3 there would be ticks between integers
        yield _plot("open parts, not proved yet", open_parts, ends, "{:,.0f}".format)


def _plot(
    title: str,
    points: Sequence[tuple[float, float]],
    ends: tuple[float, float] | None = None,
    words: Callable[[float], str] | None = None,
) -> str:
    return notebook.plot([Curve(title, points)], title, "seconds", ends=ends, words=words, start=0)
