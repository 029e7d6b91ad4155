"""PyTorch's compiler. It keeps what it made across processes, in a folder of its own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any

import torch

from anydevice.core.primitives import Compiler
from anydevice.engines.base import compiled_for_each

with warnings.catch_warnings(), suppress(ImportError):
    # PyTorch's compiler loads this file of its own, which warns of PyTorch's own old calls.
    warnings.filterwarnings("ignore", ".*torch.jit.script_method", DeprecationWarning)
    import torch.utils.mkldnn

_MOST_VERSIONS = 256
"""Of one function: as many shapes and types as PyTorch lets one function be compiled for at all."""

_KEEPING = "TORCHINDUCTOR_FX_GRAPH_CACHE"
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_MOST = "max-autotune-no-cudagraphs"
"""CUDA graphs would give out memory that the next call overwrites."""

# Left to itself, PyTorch gives up at the ninth shape. Older releases cannot be told otherwise for
# one function, and then take sizes that change for variables.
_KNOWN = signature(torch.compile).parameters
_OPTIONS: dict[str, Any] = (
    {"dynamic": False, "recompile_limit": _MOST_VERSIONS, "isolate_recompiles": True}
    if "isolate_recompiles" in _KNOWN and "recompile_limit" in _KNOWN
    else {"dynamic": None}
)


class TorchCompiler:
    """Whole functions by `torch.compile`: what it cannot look through is an error, not slow."""

    def compile(
        self,
        function: Callable[..., Any],
        *,
        static: Sequence[str] = (),
        donate: Sequence[str] = (),
        whole: bool = True,
        most: bool = False,
    ) -> Callable[..., Any]:
        """See the protocol. PyTorch has no donation: results never take an argument's memory.

        Values of `static` arguments must be hashable; each set of them is compiled by itself.
        """
        mode = _MOST if most else None
        compile_one = partial(torch.compile, fullgraph=whole, mode=mode, **_OPTIONS)
        if static:
            return compiled_for_each(function, static, compile_one)
        compiled: Callable[..., Any] = compile_one(function)
        return compiled

    def efforts(self, most: bool) -> str:
        return f"torch.compile, mode {_MOST}" if most else "torch.compile"

    def keep(self, folder: str) -> str | None:
        """See the protocol. PyTorch reads the variable whenever it compiles, and sets it itself."""
        if os.environ.get(_KEEPING) == "0":
            return None
        return os.environ.setdefault(_FOLDER, folder)


COMPILER: Compiler = TorchCompiler()
