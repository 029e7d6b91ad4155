"""The verdicts of one run of the op tests, for a notebook."""

from __future__ import annotations

from anydevice._check.verdicts import STATES, Verdicts, in_words
from anydevice._core.text import UNUSABLE, USABLE
from anydevice._report import notebook

_SHOWN = 24
"""Failed cells with a line each."""


def html(verdicts: Verdicts) -> str:
    """Return a table of counts by device and engine, and a line for each failed cell."""
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
