"""What of an engine is not placing data: computing and memory, loaded when it is first used.

Whoever only places data does not pay for it. Each part has a folder of its own, with one file an
engine: `primitives/`, `fused/`, `autodiff/`, `compilers/`, `memory/`.

What a function must give so that it has a gradient: the same demand on every engine.

The bytes that a library's message says it was asked for when memory ran out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from anydevice.core.engine import Absent, Memory
from anydevice.core.hooks import load
from anydevice.core.primitives import Autodiff, Compiler, Primitives
from anydevice.core.text import parse_size
from anydevice.engines.registry import BUILT_IN


class Facets:
    """What an engine that comes with anydevice has beside placing data."""

    name: str

    @cached_property
    def ops(self) -> Primitives:
        primitives: Primitives = self._facet("primitives", "PRIMITIVES")
        return primitives

    @cached_property
    def fused(self) -> Mapping[str, Callable[..., Any]]:
        fused: Mapping[str, Callable[..., Any]] = self._facet("fused", "FUSED")
        return fused

    @cached_property
    def autodiff(self) -> Autodiff | Absent:
        absent = BUILT_IN[self.name].lacks.get("autodiff")
        return absent or self._facet("autodiff", "AUTODIFF")

    @cached_property
    def compiler(self) -> Compiler | Absent:
        absent = BUILT_IN[self.name].lacks.get("compiler")
        return absent or self._facet("compiler", "COMPILER")

    @cached_property
    def memory(self) -> Memory:
        memory: Memory = self._facet("memory", "MEMORY")
        return memory

    def _facet(self, file: str, name: str) -> Any:
        return load(f"anydevice.engines.{self.name}.{file}:{name}")


def refuse_all_but_one_number(value: Any, is_array: bool) -> None:
    """Raise `TypeError`, and say what to do, unless the value is an array without axes."""
    if is_array and not value.shape:
        return
    given = f"an array of shape {tuple(value.shape)}" if is_array else f"a {type(value).__name__}"
    raise TypeError(
        f"a gradient is that of one number, and the function gave {given}; "
        "end it with ops.sum or ops.mean"
    )


_AMOUNT = re.compile(
    r"(?:tried to allocate|trying to allocate|out of memory allocating|unable to allocate"
    r"|out of memory to allocate|attempting to allocate|failed to allocate(?: request for)?)"
    r"\s+([\d,.]*\d)\s*([KMGT]?)(?:i?B|bytes?)\b",
    re.IGNORECASE,
)


def amount_asked(message: str) -> int | None:
    """The amount that a message names, in bytes; `None` where it names none.

    >>> amount_asked("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has …")
    21474836480
    >>> amount_asked("RESOURCE_EXHAUSTED: Out of memory allocating 1234 bytes.")
    1234
    >>> amount_asked("Out of memory while trying to allocate 2.50MiB.")
    2621440
    """
    found = _AMOUNT.search(message)
    if found is None:
        return None
    # Those who write "GB" in such a message mean 2**30 as well.
    return parse_size(found[1].replace(",", "") + found[2])
