"""Renders the values of all rooms; their `__str__` and `_repr_html_` call it through a hook.

A room of `_report` is loaded when a value of its kind is first rendered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anydevice._core import hooks
from anydevice._core.text import UNUSABLE, USABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anydevice._check.verdicts import Verdicts

_SHOWN = 24
"""Failed cells of verdicts with a line each."""
Forms = dict[str, Callable[[Any], str]]
"""Functions by form: "text" for terminals, "html" for notebooks, "svg" for files."""


def render(value: object, form: str) -> str:
    """Return a value as "text", "html" or "svg"; the name of its class says who renders it."""
    names = [kind.__name__ for kind in type(value).__mro__]
    forms = next(FORMS[name] for name in names if name in FORMS)
    return forms()[form](value)


def _report() -> Forms:
    from anydevice._report import summary

    return {"text": summary.text, "html": summary.html}


def _devices() -> Forms:
    from anydevice._report import summary

    return {"html": summary.devices_html}


def _device() -> Forms:
    from anydevice._report import summary

    return {"html": summary.device_html}


def _plan() -> Forms:
    from anydevice._report import plan

    return {"text": lambda value: "\n".join(plan.plan_lines(value)), "html": plan.plan_html}


def _training_plan() -> Forms:
    from anydevice._report.training_plan import training_lines, training_plan_html

    return {"text": lambda plan: "\n".join(training_lines(plan)), "html": training_plan_html}


def _outcome() -> Forms:
    from anydevice._report import proof

    return {"html": proof.outcome_html}


def _history() -> Forms:
    from anydevice._report import history

    return {"text": history.text, "html": history.html, "svg": history.svg}


def _timings() -> Forms:
    from anydevice._report import benchmark

    return {"text": benchmark.timings_text, "html": benchmark.timings_html}


def _verdicts() -> Forms:
    return {"html": _verdicts_html}


def _verdicts_html(verdicts: Verdicts) -> str:
    """Return a table of counts by device and engine, and a line for each failed cell."""
    from anydevice._check.verdicts import STATES, in_words
    from anydevice._report import notebook

    good, pairs = bool(verdicts), dict.fromkeys((cell.device, cell.engine) for cell in verdicts)
    states = [state for state in STATES if verdicts.of(state)]
    rows = [
        (*pair, *(str(sum((c.device, c.engine) == pair for c in verdicts.of(s))) for s in states))
        for pair in pairs
    ]
    head = ("device", "engine", *map(in_words, states))
    failed = (*verdicts.failed, *verdicts.of("not_reached"))
    more = [f"… {len(failed) - _SHOWN} more …"] if len(failed) > _SHOWN else []
    title = f"{len(verdicts):,} verdicts in {verdicts.seconds:.1f} s" + ", quick" * verdicts.quick
    return notebook.block(
        notebook.marked(USABLE if good else UNUSABLE, title, good=good),
        notebook.table(head, rows, range(2, len(head))),
        *(notebook.line(text) for text in (*map(str, failed[:_SHOWN]), *more)),
    )


def _table() -> Forms:
    from anydevice._report import notebook, tables

    return {
        "text": lambda table: "\n".join(tables.table(table.head, table.rows, table.right)),
        "html": notebook.table_block,
    }


FORMS: dict[str, Callable[[], Forms]] = {
    "Device": _device,
    "Devices": _devices,
    "History": _history,
    "Plan": _plan,
    "ProofOutcome": _outcome,
    "Report": _report,
    "Table": _table,
    "Timings": _timings,
    "TrainingPlan": _training_plan,
    "Verdicts": _verdicts,
}
"""The forms of each class."""

hooks.render.register(render)
