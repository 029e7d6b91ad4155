"""The history of a training as a table, and its losses as a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from anydevice._core.text import format_size
from anydevice._report import notebook
from anydevice._report.svg import Curve, picture
from anydevice._report.tables import table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anydevice._train.history import Epoch, History

_COLUMNS: dict[str, Callable[[Epoch], str]] = {
    "epoch": lambda epoch: str(epoch.epoch),
    "loss": lambda epoch: f"{epoch.loss:.4g}",
    "validation": lambda epoch: "" if epoch.validation is None else f"{epoch.validation:.4g}",
    "rate": lambda epoch: "" if math.isnan(epoch.rate) else f"{epoch.rate:.3g}",
    "steps": lambda epoch: f"{epoch.steps:,}",
    "left out": lambda epoch: f"{epoch.left_out:,}" if epoch.left_out else "",
    "seconds": lambda epoch: f"{epoch.seconds:.1f}",
    "peak": lambda epoch: "" if epoch.peak is None else format_size(epoch.peak),
}
_OPTIONAL = ("validation", "rate", "left out", "peak")
_BEFORE_METRICS = ("epoch", "loss", "validation")
_EMPTY = "no epoch has ended"
_SHOWN = 24
"""Epochs with a row each; of a longer history the first and the last ones are shown."""


def text(history: History) -> str:
    if not history:
        return _EMPTY
    head, rows = _cells(history)
    lines = table(head, rows, range(len(head)))
    if len(history) > _SHOWN:
        lines[1 + _SHOWN // 2 : -_SHOWN // 2] = [_omission(history)]
    return "\n".join(lines)


def html(history: History) -> str:
    """Return the history for a notebook: a plot of the losses above the table."""
    if not history:
        return notebook.block(notebook.line(_EMPTY, "soft"))
    head, rows = _cells(history)
    if len(history) > _SHOWN:
        rows[_SHOWN // 2 : -_SHOWN // 2] = [(_omission(history), *[""] * (len(head) - 1))]
    plot = notebook.plot(_curves(history), _title(history), "epoch")
    return notebook.block(plot, notebook.table(head, rows, range(len(head))))


def svg(history: History) -> str:
    """Return a picture of the losses over the epochs, for a file."""
    return picture(_curves(history), title=_title(history), below="epoch")


def _cells(history: History) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the head and the rows of the table; metrics stand behind the losses."""
    columns = {name: [cell(epoch) for epoch in history] for name, cell in _COLUMNS.items()}
    columns = {
        name: cells for name, cells in columns.items() if name not in _OPTIONAL or any(cells)
    }
    losses = {name: cells for name, cells in columns.items() if name in _BEFORE_METRICS}
    values = [epoch.metrics or {} for epoch in history]
    names = dict.fromkeys(name for row in values for name in row)
    metrics = {n: [f"{row[n]:.4g}" if n in row else "" for row in values] for n in names}
    columns = {**losses, **metrics, **columns}
    return list(columns), list(zip(*columns.values(), strict=True))


def _omission(history: History) -> str:
    return f"… {len(history) - _SHOWN} more …"


def _curves(history: History) -> Sequence[Curve]:
    training = Curve("training", [(epoch.epoch, epoch.loss) for epoch in history])
    judged = [(epoch.epoch, epoch.validation) for epoch in history if epoch.validation is not None]
    return [training, Curve("validation", judged)] if judged else [training]


def _title(history: History) -> str:
    last = history[-1]
    seconds = sum(epoch.seconds for epoch in history)
    count = f"{last.epoch} epoch{'s' if last.epoch > 1 else ''}"
    return f"{count}, {last.steps:,} steps, {seconds:.1f} s"
