"""Compiled functions by MLX."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import mlx.core as mx

from anydevice.core.primitives import Compiler
from anydevice.errors import ConfigurationError


class MlxCompiler:
    """`mx.compile`, with arguments that are constants.

    `donate` changes nothing: MLX gives the memory of an array to a result by itself, as soon as
    nobody holds the array any more. `whole` and `most` change nothing either: MLX compiles
    functions as a whole or not at all, and in one way. The state of `mx.random` is an input and an
    output of what is compiled: random numbers are others in every call, as without a compiler.
    """

    def compile(
        self,
        function: Callable[..., Any],
        *,
        static: Sequence[str] = (),
        donate: Sequence[str] = (),
        whole: bool = True,
        most: bool = False,
    ) -> Callable[..., Any]:
        signature = inspect.signature(function)
        _refuse_unknown(signature, (*static, *donate))
        if not static:
            plain = mx.compile(function, inputs=mx.random.state, outputs=mx.random.state)

            @wraps(function)
            def run_plain(*arguments: Any, **named: Any) -> Any:
                return plain(*arguments, **named)

            return run_plain

        compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

        @wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            constants = {name: bound.arguments.pop(name) for name in static}
            key = tuple(constants.values())
            try:
                ready = compiled.get(key)
            except TypeError as error:
                raise ConfigurationError(
                    f"a static argument must be hashable: {error}, among {', '.join(static)}; "
                    "pass a tuple or a frozen record"
                ) from error
            if ready is None:
                ready = compiled[key] = mx.compile(
                    _closed_over(function, signature, constants),
                    inputs=mx.random.state,
                    outputs=mx.random.state,
                )
            return ready(dict(bound.arguments))

        return run

    def efforts(self, most: bool) -> str:
        return "mx.compile, which has one way of compiling" if most else "mx.compile"

    def keep(self, folder: str) -> str | None:
        return None


def _refuse_unknown(signature: inspect.Signature, names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in signature.parameters]
    if unknown:
        raise ConfigurationError(
            f"the function has no argument {', '.join(unknown)}; "
            f"it has {', '.join(signature.parameters)}"
        )


def _closed_over(
    function: Callable[..., Any], signature: inspect.Signature, constants: dict[str, Any]
) -> Callable[[dict[str, Any]], Any]:
    """The function of the other arguments alone, given by name."""

    def run(others: dict[str, Any]) -> Any:
        bound = inspect.BoundArguments(signature, {**others, **constants})
        return function(*bound.args, **bound.kwargs)

    return run


COMPILER: Compiler = MlxCompiler()
