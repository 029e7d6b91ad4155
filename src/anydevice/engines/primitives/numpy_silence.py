"""No warnings of NumPy's for what overflows or is not a number, at the price of a few instructions.

`numpy.errstate` makes its settings anew each time, which takes longer than adding two small arrays.
NumPy 2 keeps the settings of a thread or task in a context variable; where it is there, settings
that were made once are put into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

hush: Callable[[], Any]
"""Begin to be silent in this thread or task; what it returns ends it again."""

speak: Callable[[Any], None]
"""Be as before `hush`, which returned the argument."""

try:
    from numpy._core.umath import _extobj_contextvar, _make_extobj
except ImportError:  # a NumPy that keeps them elsewhere

    def hush() -> Any:
        return np.seterr(all="ignore")

    def speak(before: Any) -> None:
        np.seterr(**before)

else:
    _SILENT = _make_extobj(all="ignore")
    _set = _extobj_contextvar.set

    def hush() -> Any:
        return _set(_SILENT)

    speak = _extobj_contextvar.reset
