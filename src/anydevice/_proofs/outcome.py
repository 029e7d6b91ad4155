"""What came of a proof, and how: as plain data, as a sentence, and as one HTML page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from anydevice import __version__
from anydevice._core.record import Record
from anydevice._core.text import UNUSABLE, USABLE, format_time, percent
from anydevice._report import page
from anydevice._report.svg import Curve, line_chart

if TYPE_CHECKING:
    from anydevice._proofs.checking.network import Query
    from anydevice._proofs.prove import Result
    from anydevice._proofs.search import Progress

_MOST_POINTS = 400
_FEW = 64
"""Numbers of a counterexample that are seen at once on a page."""
_MOST_PRINTED, _PRINTED = 16, 8
"""Of more numbers of a counterexample than these, so many are printed."""
_MOST_TERMS = 4
"""Conditions, and terms of a sum, that are printed."""


class SearchProgress(Record):
    """How a search went: in which arithmetic, and how far it was after so many seconds.

    There are some hundred points at most, and none where the first bound decided it.
    """

    precision: str = "float32"
    points: tuple[tuple[float, Progress], ...] = ()

    def __repr__(self) -> str:
        return f"SearchProgress({self.precision}, {len(self.points)} points)"


class ProgressRecorder:
    """Keeps how far a search is each time that it tells, and tells it on."""

    def __init__(self, begin: float, tell: Callable[[Progress], None] | None) -> None:
        self._begin, self._tell = begin, tell
        self._kept: list[tuple[float, Progress]] = []
        self._last: tuple[tuple[float, Progress], ...] = ()
        self._told, self._every = 0, 1

    def __call__(self, now: Progress) -> None:
        self._last = ((time.monotonic() - self._begin, now),)
        if self._told % self._every == 0:
            self._kept.append(self._last[0])
        self._told += 1
        if len(self._kept) == _MOST_POINTS:
            self._kept, self._every = self._kept[::2], 2 * self._every
        if self._tell is not None:
            self._tell(now)

    def course(self, precision: str) -> SearchProgress:
        """What was kept, and how far the search was at its end."""
        end = () if self._kept[-1:] == list(self._last) else self._last
        return SearchProgress(precision, (*self._kept, *end))


def outcome_data(result: Result) -> dict[str, Any]:
    """The result as plain data, ready for JSON."""
    from anydevice._proofs.prove import Counterexample, Proof

    if isinstance(result, Proof):
        parts = sum(tree.leaves for each in result.certificates for tree in each.trees)
        found = {"result": "proved", "parts": parts, "boxes": result.boxes}
    elif isinstance(result, Counterexample):
        x, y = result.x.reshape(-1).tolist(), result.y.reshape(-1).tolist()
        found = {"result": "counterexample", "x": x, "y": y, "violation": result.violation}
    else:
        found = {
            "result": "undecided",
            "reason": result.reason,
            "proved_share": result.proved_share,
            "best_bound": result.best_bound if isfinite(result.best_bound) else None,
            "boxes": result.boxes,
        }
    return found | {"precision": result.course.precision, "seconds": result.seconds}


def outcome_text(found: dict[str, Any]) -> str:
    """What follows the name of the result in one sentence, of what `outcome_data` gave."""
    took = f"in {found['seconds']:.1f} s"
    if found["result"] == "proved":
        return f"{_WHAT[found['precision']]}, {in_parts(found['parts'])}, {took}"
    if found["result"] == "counterexample":
        return took
    bound = "none" if found["best_bound"] is None else f"{found['best_bound']:.3g}"
    return f"({found['reason']}) {took}: {found['proved_share']:.1%} proved, worst bound {bound}"


def counterexample_text(found: dict[str, Any]) -> Iterator[str]:
    """The lines of a counterexample: its numbers, and what they violate, if `violated` says it."""
    yield f"x  {_few_numbers(found['x'])}"
    yield f"y  {_few_numbers(found['y'])}"
    why = _some(found.get("violated", ()), " and ")
    yield f"violation  {found['violation']:.4g}" + (f": {why}" if why else "")


def _few_numbers(values: Sequence[float]) -> str:
    """Numbers as a list, the first ones of many, each in the fewest digits that tell it."""
    narrow = np.array(values, np.float32)
    exact = bool((narrow == np.array(values)).all())
    texts = [
        str(short) if exact else repr(value) for short, value in zip(narrow, values, strict=True)
    ]
    if len(texts) > _MOST_PRINTED:
        more = f"… {len(texts) - _PRINTED:,} more: --json or --html has all of them"
        texts = [*texts[:_PRINTED], more]
    return f"[{', '.join(texts)}]"


def violated(queries: Sequence[Query], x: Sequence[float], y: Sequence[float]) -> list[str]:
    """The conditions that hold for these outputs and must not, in the words of VNN-LIB.

    Those of the worst group of rows of a query about this input; none where no query is.
    """
    worst, conditions = inf, list[str]()
    for query in queries:
        ends = zip(query.low, x, query.high, strict=False)
        about = (len(query.low), len(query.coefficients[0])) == (len(x), len(y))
        if not about or any(not float(low) <= value <= float(high) for low, value, high in ends):
            continue
        of_group: dict[int, list[int]] = {}
        for number, group in enumerate(query.group):
            of_group.setdefault(group, []).append(number)
        table = np.array([[float(each) for each in row] for row in query.coefficients])
        rows = table @ np.array(y) + [float(each) for each in query.constants]
        for numbers in of_group.values():
            if (most := float(rows[numbers].max())) < worst:
                worst, conditions = most, [_condition(query, number) for number in numbers]
    return conditions


def _condition(query: Query, number: int) -> str:
    """That a row is at most 0, with what is subtracted on the other side."""
    terms = [*((c, f"Y_{k}") for k, c in enumerate(query.coefficients[number]) if c)]
    terms += [(query.constants[number], "")] if query.constants[number] else []
    left = [(c, name) for c, name in terms if c > 0]
    right = [(-c, name) for c, name in terms if c < 0]
    return f"{_sum(left)} {'<' if query.strict[number] else '<='} {_sum(right)}"


def _sum(terms: Sequence[tuple[Fraction, str]]) -> str:
    texts = [
        name if name and c == 1 else f"{float(c):.12g}{name and f' {name}'}" for c, name in terms
    ]
    return _some(texts, " + ") or "0"


def _some(texts: Sequence[str], between: str) -> str:
    more = len(texts) - _MOST_TERMS
    return between.join([*texts[:_MOST_TERMS], *([f"… {more:,} more"] if more > 0 else ())])


def in_parts(count: int) -> str:
    """A number of parts of the region, in words."""
    return "1 part" if count == 1 else f"{count:,} parts"


_WHAT = {"float32": "for every execution in float32", "real": "exactly"}
_MARKS = {"proved": (USABLE, True), "counterexample": (UNUSABLE, False), "undecided": ("?", None)}
_ADVICE = {
    "time": "The time was up: a longer limit may decide it.",
    "memory": "The memory for open parts was full: a larger one may decide it.",
    "interrupted": "It was interrupted before it was decided.",
    "resolution": "Some parts cannot be divided further: the property holds by a hair, if it does.",
    "refused": "The checker did not accept what the search found; it is not proved.",
}


def outcome_page(result: Any, about: Sequence[tuple[str, str]] = ()) -> str:
    """The page of a `Result`; `about` are names and values, such as those of the files."""
    found = outcome_data(result)
    kind = found["result"]
    mark, good = _MARKS[kind]
    return page.document(
        "anydevice prove",
        [f"anydevice {__version__}", *(text for _, text in about)],
        page.verdict(mark, f"{kind} {outcome_text(found)}", good=good),
        page.cards(_cards(result, found)),
        page.figures(*_figures(result.course), page.beside([*about, *_facts(result, found)])),
        *(_numbers(name, found[key]) for name, key in _NUMBERS.items() if key in found),
        notes=[_ADVICE[found["reason"]]] if "reason" in found else [],
    )


_NUMBERS = {"The input that breaks it": "x", "Its outputs": "y"}


def _cards(result: Result, found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    kind = found["result"]
    if kind == "counterexample":
        how = "in rational numbers" if getattr(result, "exact", False) else "in float64"
        yield f"{found['violation']:.4g}", "violation", how
    else:
        share = found.get("proved_share", 1.0)
        yield f"{100 * share:.4g} %", "of the region proved", f"{found.get('reason', '')}"
    if "best_bound" in found:
        bound = found["best_bound"]
        yield "none" if bound is None else f"{bound:.3g}", "worst bound", "proved above 0"
    if "parts" in found:
        yield f"{found['parts']:,}", "parts of the certificate", "checked again with NumPy alone"
    boxes = found.get("boxes") or sum(now.boxes for _, now in result.course.points[-1:])
    rate = boxes / max(result.seconds, 1e-9)
    yield f"{boxes:,}", "boxes bounded", f"{rate:,.0f} a second"
    yield format_time(result.seconds), "in all", ""


def _facts(result: Result, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    in_float32 = found["precision"] == "float32"
    yield "precision", "float32, in any order of sums" if in_float32 else "exact arithmetic"
    assumed: dict[str, float] = {}
    for each in getattr(result, "certificates", ()):
        assumed |= each.assumptions
        yield "network, SHA-256", f"{each.network[:16]}…"
    if found["result"] == "proved":
        yield "assumed", "IEEE arithmetic in float32" if in_float32 else "exact arithmetic"
    for name, error in assumed.items():
        yield f"assumed of {name}", f"a relative error of at most {error:.2g}"
    if found["result"] == "undecided" and result.course.points:
        _, last = result.course.points[-1]
        yield "open at the end", in_parts(last.open)


def _figures(course: SearchProgress) -> Iterator[str]:
    """How the search went; one that its first bound decided has no course."""
    points = course.points
    if len(points) < 2:
        return
    shares = Curve("proved", [(0.0, 0.0), *((at, now.share) for at, now in points)])
    yield _figure("Proved", "share of the region", [shares], (0.0, 1.0), percent)
    bounds = Curve("worst bound", [(at, now.worst) for at, now in points])
    if any(isfinite(bound) for _, bound in bounds.points):
        level = [(0.0, 0.0), (points[-1][0], 0.0)]
        curves = [bounds, Curve("proved above", level, limit=True)]
        yield _figure("Worst bound", "in the last batch of parts", curves)
    still = Curve("open", [(at, float(now.open)) for at, now in points])
    most = max(count for _, count in still.points)
    if most > 1:
        ends = (0.0, max(3.0, most))  # below 3 there would be ticks between integers
        yield _figure("Open parts", "which are not proved yet", [still], ends, "{:,.0f}".format)


def _figure(
    title: str,
    explanation: str,
    curves: Sequence[Curve],
    ends: tuple[float, float] | None = None,
    words: Callable[[float], str] | None = None,
) -> str:
    chart = line_chart(curves, title=title, below="seconds", ends=ends, words=words, start=0)
    return page.figure(title, explanation, chart)


def _numbers(title: str, values: Sequence[float]) -> str:
    text = ", ".join(repr(value) for value in values)
    return page.folded(
        f"{title} ({len(values):,})", page.paragraphs([text]), opened=len(values) <= _FEW
    )
