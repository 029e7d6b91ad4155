"""What is asked of the table of cases: names as people pass them, and whether it has any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from anydevice.check.rows import Row
from anydevice.core.device import Device
from anydevice.errors import ConfigurationError

_Name = TypeVar("_Name", str, str | Device)

_NAMED = 4
"""So many ops are named in a sentence; more are counted."""


def one_or_more(names: _Name | Sequence[_Name] | None) -> list[_Name] | None:
    """The names as a list, where one alone may stand for a list of one.

    >>> one_or_more("softmax"), one_or_more(["add", "exp"]), one_or_more(None)
    (['softmax'], ['add', 'exp'], None)
    """
    if names is None:
        return None
    return [names] if isinstance(names, str | Device) else list(names)


def insist_on_cases(rows: Sequence[Row], dtypes: Sequence[str] | None) -> None:
    """Raise `ConfigurationError` with what there is, where no row has any of the element types.

    >>> from anydevice.check.cases import row_of
    >>> insist_on_cases([row_of("argmax")], ["float32"])
    """
    if any(dtypes is None or dtype in dtypes for row in rows for dtype in row.dtypes):
        return
    had = ", ".join(dict.fromkeys(dtype for row in rows for dtype in row.dtypes))
    ops = ", ".join(row.op for row in rows) if len(rows) <= _NAMED else f"these {len(rows)} ops"
    alone = len(rows) == 1
    if not had or not dtypes:
        raise ConfigurationError(
            "no op or no element type is named, so that there is nothing to do; leave the argument "
            "out for all of them",
            "ops" if not had else "dtypes",
        )
    raise ConfigurationError(
        f"{ops} {'has' if alone else 'have'} no case in {', '.join(dtypes)}; "
        f"{'it has' if alone else 'they have'} {had}",
        "dtype",
    )
