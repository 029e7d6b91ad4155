"""JAX's compiler, XLA."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from anydevice.core.primitives import Compiler

_MOST: dict[str, float | str] = (
    {"exec_time_optimization_effort": 1.0}
    if hasattr(jax.config, "jax_exec_time_optimization_effort")
    else {"optimization_level": "O3"}  # since JAX 0.11.2
)
_KEEP_ALL = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}

KEPT = 2**30
"""Bytes of compiled code that are in the folder when a process begins with it, at most.

JAX has such a limit (jax_compilation_cache_max_size) only where `filelock` is installed.
"""


class JaxCompiler:
    """Whole functions by `jax.jit`."""

    def compile(
        self,
        function: Callable[..., Any],
        *,
        static: Sequence[str] = (),
        donate: Sequence[str] = (),
        whole: bool = True,
        most: bool = False,
        fixed: bool = False,
    ) -> Callable[..., Any]:
        """See the protocol. Values of `static` arguments must be hashable.

        A donated array is deleted by the call: JAX raises where it is used again. JAX compiles
        functions as a whole or not at all.
        """
        options = {"compiler_options": dict(_MOST)} if most else {}
        compiled: Callable[..., Any] = jax.jit(
            function, static_argnames=tuple(static), donate_argnames=tuple(donate), **options
        )
        return compiled

    def efforts(self, most: bool) -> str:
        if most:
            return "jax.jit, XLA told to spend most effort on fast code"
        return "jax.jit"

    def keep(self, folder: str) -> str | None:
        """See the protocol. Code is kept however small it is and however fast it was made.

        What was longest not used goes where there is more than `KEPT`.
        """
        if not jax.config.jax_enable_compilation_cache:
            return None
        named: str | None = jax.config.jax_compilation_cache_dir
        if named:
            return named
        os.makedirs(folder, exist_ok=True)
        with suppress(OSError):  # other processes remove files, too
            _remove_oldest(folder)
        jax.config.update("jax_compilation_cache_dir", folder)
        for option, value in _KEEP_ALL.items():
            if option.upper() not in os.environ:
                jax.config.update(option, value)
        # What was compiled before made JAX settle that there is no folder.
        compilation_cache.reset_cache()
        return folder


def _remove_oldest(folder: str) -> None:
    """Remove files, those first that were longest not read, until what is left is `KEPT`."""
    with os.scandir(folder) as entries:
        files = [(entry.stat(follow_symlinks=False), entry.path) for entry in entries]
    total = sum(status.st_size for status, _ in files)
    for status, path in sorted(files, key=lambda file: max(file[0].st_atime, file[0].st_mtime)):
        if total <= KEPT:
            return
        os.unlink(path)
        total -= status.st_size


COMPILER: Compiler = JaxCompiler()
