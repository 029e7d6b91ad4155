"""Renders the values of all rooms; their `__str__` and `_repr_html_` call it through a hook.

A room of `_report` is loaded when a value of its kind is first rendered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anydevice._core import hooks

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
    from anydevice._report import verdicts

    return {"html": verdicts.html}


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
    "Outcome": _outcome,
    "Plan": _plan,
    "Report": _report,
    "Table": _table,
    "Timings": _timings,
    "TrainingPlan": _training_plan,
    "Verdicts": _verdicts,
}
"""The forms of each class."""

hooks.render.register(render)
