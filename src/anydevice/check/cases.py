"""The one table of cases: for every op, what it is checked with, judged by and timed with.

`anydevice verify`, `anydevice bench` and the tests all read it; an op without a row fails the
suite. A row (`check/rows.py`) has

- cases: shapes of real models and nasty ones, each drawn from a seed (`check/drawing.py`), rounded
  to the element type before the reference sees it;
- a budget, from which with the rule of `check/comparing.py` the tolerance of each element follows;
- benchmarks, at the sizes of a 7B model for a GPU and smaller ones for a CPU, with the bytes that
  a call must move and the operations that it must do.

What is out of range is decided here as well: picking gives what is not a number (0 for whole
numbers and conditions), writing leaves it out, a loss is not a number. Magnitudes go up to those
whose squares float32 still holds: ops on 16-bit numbers compute in it.

>>> [case.name for case in TABLE["swiglu"].cases][:2]
['two rows of 14336', 'one row, odd width']
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from anydevice.check.cases_attention import ATTENTION
from anydevice.check.cases_elementwise import ELEMENTWISE
from anydevice.check.cases_layers import LAYERS
from anydevice.check.cases_places import PLACES
from anydevice.check.cases_updates import UPDATES
from anydevice.check.rows import Row
from anydevice.errors import ConfigurationError

TABLE: Mapping[str, Row] = {
    row.op: row for row in (*LAYERS, *ATTENTION, *PLACES, *ELEMENTWISE, *UPDATES)
}


def row_of(op: str) -> Row:
    """The row of an op.

    Raises `ConfigurationError` where there is none: with the name that was meant, or all of them.
    """
    if op not in TABLE:
        meant = get_close_matches(op, TABLE, 1)
        hint = f"did you mean {meant[0]!r}?" if meant else f"the ops are {', '.join(TABLE)}"
        raise ConfigurationError(f"there is no op {op!r}; {hint}", "op")
    return TABLE[op]
