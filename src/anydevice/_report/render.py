"""Renders the values of all rooms; their `__str__` and `_repr_html_` call it through a hook."""

from __future__ import annotations

from importlib import import_module

from anydevice._core import hooks
from anydevice._core.text import UNUSABLE, USABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anydevice._check.verdicts import Verdicts

_SHOWN = 24
"""Failed cells of verdicts with a line each."""
FORMS = {
    "Device": {"html": "summary.device_html"},
    "DeviceStatus": {"advice": "diagnosis.advice_of"},
    "Devices": {"html": "summary.devices_html"},
    "Finding": {"advice": "diagnosis.advice_of"},
    "History": {"text": "history.text", "html": "history.html", "svg": "history.svg"},
    "Plan": {"text": "plan.plan_lines", "html": "plan.plan_html"},
    "ProofOutcome": {"html": "proof.outcome_html"},
    "Report": {"text": "summary.text", "html": "summary.html"},
    "Table": {"text": "tables.table_lines", "html": "notebook.table_block"},
    "Timings": {"text": "benchmark.timings_text", "html": "benchmark.timings_html"},
    "TrainingPlan": {"text": "plan.training_lines", "html": "plan.training_plan_html"},
    "Verdicts": {"html": "render.verdicts_html"},
}
"""Functions of a class by form: "text" for terminals, "html" for notebooks, "svg" for files.

"advice" is what `anydevice doctor` gives for an unusable device or backend.
"""


def render(value: object, form: str) -> str:
    """Return a value as "text", "html" or "svg"; the name of its class says who renders it."""
    names = [kind.__name__ for kind in type(value).__mro__]
    room, _, function = next(FORMS[name] for name in names if name in FORMS)[form].partition(".")
    text: str | list[str] = getattr(import_module(f"anydevice._report.{room}"), function)(value)
    return text if isinstance(text, str) else "\n".join(text)


def verdicts_html(verdicts: Verdicts) -> str:
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


hooks.render.register(render)
