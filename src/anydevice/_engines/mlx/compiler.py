"""MLX's compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx

from anydevice._core.primitives import Compiler
from anydevice._engines.base import CompileOptions, check_names, compiled_for_each


class MlxCompiler:
    """`mx.compile`, with arguments that are constants.

    `donate`, `whole` and `max_effort` change nothing: MLX reuses the memory of unreferenced
    arrays, and compiles whole functions in one way. The state of `mx.random` is an input and an
    output of the compiled function, so random numbers differ in each call.
    """

    def compile(self, function: Callable[..., mx.array], **named: Any) -> Callable[..., Any]:
        options = CompileOptions(**named)
        check_names(function, options.donate)
        if not options.static:
            return _compile(function)
        return compiled_for_each(function, options.static, _compile)

    def efforts(self, max_effort: bool) -> str:
        return "mx.compile, which has one way of compiling" if max_effort else "mx.compile"

    def keep(self, folder: str) -> str | None:
        return None


def _compile(function: Callable[..., mx.array]) -> Callable[..., Any]:
    state: Any = mx.random.state
    compiled = mx.compile(function, inputs=state, outputs=state)

    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        key = state[0]
        try:
            return compiled(*arguments, **named)
        except BaseException:
            # MLX leaves a placeholder of the trace as its state, and could draw nothing any more.
            high, low = key.tolist()
            mx.random.seed(high << 32 | low)
            raise

    return run


COMPILER: Compiler = MlxCompiler()
