"""What of an engine is not placing data: computing and memory, loaded when it is first used.

Whoever only places data does not pay for it. Each part has a folder of its own, with one file an
engine: `primitives/`, `fused/`, `autodiff/`, `compilers/`, `memory/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from anydevice.core.engine import Absent, Memory
from anydevice.core.late import load
from anydevice.core.primitives import Autodiff, Compiler, Primitives
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
        return absent or self._facet("compilers", "COMPILER")

    @cached_property
    def memory(self) -> Memory:
        memory: Memory = self._facet("memory", "MEMORY")
        return memory

    def _facet(self, folder: str, name: str) -> Any:
        return load(f"anydevice.engines.{folder}.{self.name}:{name}")
