"""A training as one HTML page: how the loss fell, how fast, where, and all of its epochs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from anydevice import __version__
from anydevice._core.text import format_time
from anydevice._report import page
from anydevice._report.svg import Curve, line_chart, picture
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._train.history import History

_ENDINGS = (".svg", *page.PAGES)
_NAMED = 8
"""Epochs that a note names; of more, the number is said."""
_FEW, _MOST_ROWS = 12, 500
"""Epochs whose table is seen at once; of more than so many, the first and the last have a row."""


def draw(
    history: History, path: str | os.PathLike[str], facts: Sequence[tuple[str, str]] = ()
) -> None:
    """Write the picture of the losses, or the page, as the name of the file ends.

    Raises `ConfigurationError` for another ending, and where there are no epochs; `TransferError`
    where the file cannot be written, as in a folder that is not there.
    """
    target = page.page_file(path, _ENDINGS)
    if not history:
        raise ConfigurationError("there is nothing to draw: no epoch has ended", source="path")
    if target.suffix.lower() in page.PAGES:
        drawn = training_page(history, facts)
    else:
        curves, title = history._curves()
        drawn = picture(curves, title=title, below="epoch")
    page.save_page(path, drawn, _ENDINGS)


def training_page(history: History, facts: Sequence[tuple[str, str]] = ()) -> str:
    """The page of a history; `facts` are names and values of how the model was trained."""
    head, rows, _ = history._table()
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        rows[half:-half] = [("…", *[""] * (len(head) - 1))]
    _, said = history._curves()
    return page.document(
        "anydevice training",
        [f"anydevice {__version__}", *(text for name, text in facts if name == "device"), said],
        page.cards(_cards(history)),
        page.figures(*_figures(history), page.beside([*facts, *_totals(history)])),
        page.folded("All epochs", page.table(head, rows, texts=0), opened=len(history) <= _FEW),
        notes=_notes(history),
    )


def steps_of(history: History) -> list[int]:
    """The steps of each epoch; those of the first are counted from where the history begins."""
    ends = [each.steps for each in history]
    return [after - before for before, after in zip([0, *ends], ends, strict=False)]


def _cards(history: History) -> Iterator[tuple[str, str, str]]:
    last = history[-1]
    yield f"{last.loss:.4g}", "last loss", f"{history[0].loss:.4g} after epoch {history[0].epoch}"
    judged = [each for each in history if each.validation is not None]
    if judged:
        best = min(judged, key=lambda each: _or_inf(each.validation))
        yield f"{best.validation:.4g}", "best validation", f"after epoch {best.epoch}"
    for name, values in (last.metrics or {}).items():
        yield f"{values:.4g}", name, "after the last epoch"
    seconds = sum(each.seconds for each in history)
    yield format_time(seconds), "in all", f"{format_time(seconds / len(history))} an epoch"
    if seconds:
        rate = sum(steps_of(history)) / seconds
        yield f"{rate:,.3g} steps/s", "speed", f"{format_time(1 / rate) if rate else '–'} a step"


def _totals(history: History) -> Iterator[tuple[str, str]]:
    yield "steps", f"{history[-1].steps:,}"
    lowest = min(history, key=lambda each: _or_inf(each.loss))
    yield "lowest loss", f"{lowest.loss:.4g}, in epoch {lowest.epoch}"
    rates = [each.rate for each in history if math.isfinite(each.rate)]
    if rates:
        low, high = min(rates), max(rates)
        yield "learning rate", f"{low:.3g}" if low == high else f"{high:.3g} to {low:.3g}"
    left_out = sum(each.left_out for each in history)
    if left_out:
        yield "steps left out", f"{left_out:,}, whose loss overflowed in float16"


def _figures(history: History) -> Iterator[str]:
    losses = [_curve(history, "training", history.losses)]
    if history.validations:
        losses.append(_curve(history, "validation", [each.validation for each in history]))
    yield _figure("Loss", "the mean of each epoch", losses)
    for name, values in history._by_metric().items():
        yield _figure(name, "of the validation", [_curve(history, name, values)])
    rates = [each.rate for each in history]
    if len(set(filter(math.isfinite, rates))) > 1:
        curve = _curve(history, "learning rate", rates)
        yield _figure("Learning rate", "of the last step of each epoch", [curve], from_0=True)
    times = (each.seconds or math.nan for each in history)
    speeds = [steps / time for steps, time in zip(steps_of(history), times, strict=True)]
    yield _figure("Speed", "steps a second", [_curve(history, "speed", speeds)], from_0=True)


def _figure(title: str, explanation: str, curves: Sequence[Curve], *, from_0: bool = False) -> str:
    most = max((y for curve in curves for _, y in curve.points if math.isfinite(y)), default=1.0)
    ends = (0.0, most) if from_0 and most > 0 else None
    chart = line_chart(curves, title=title, below="epoch", ends=ends)
    return page.figure(title, explanation, chart)


def _curve(history: History, name: str, values: Sequence[float | None]) -> Curve:
    found = zip(history, values, strict=True)
    return Curve(name, [(each.epoch, value) for each, value in found if value is not None])


def _notes(history: History) -> Iterator[str]:
    for name, losses in (
        ("loss", history.losses),
        ("validation loss", [each.validation for each in history]),
    ):
        found = zip(history, losses, strict=True)
        bad = [str(each.epoch) for each, loss in found if not math.isfinite(loss or 0.0)]
        if bad:
            named = f"epoch {', '.join(bad)}" if len(bad) <= _NAMED else f"{len(bad)} epochs"
            yield f"The {name} is not finite in {named}: its curve is interrupted there."


def _or_inf(number: float | None) -> float:
    return math.inf if number is None or math.isnan(number) else number
