"""JAX's compiler, XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from anydevice.core.primitives import Compiler


class JaxCompiler:
    """Whole functions by `jax.jit`."""

    def compile(
        self,
        function: Callable[..., Any],
        *,
        static: Sequence[str] = (),
        donate: Sequence[str] = (),
    ) -> Callable[..., Any]:
        """See the protocol. Values of `static` arguments must be hashable.

        A donated array is deleted by the call: JAX raises where it is used again.
        """
        compiled: Callable[..., Any] = jax.jit(
            function, static_argnames=tuple(static), donate_argnames=tuple(donate)
        )
        return compiled


COMPILER: Compiler = JaxCompiler()
