"""MLX's modules and optimizers, changed in place and returned.

A module is what `mlx.nn.value_and_grad` and `mlx.core.compile` keep hold of, and its own `update`
changes it in place, with the dicts and lists inside it. So does moving it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from anydevice.transfer.rules import InPlaceRule, Parts, attribute_step, kind_name


class MlxRule(InPlaceRule):
    """What modules and optimizers have in common: they can hold MLX arrays and nothing else."""

    def holds(self, value: Any) -> bool:
        return isinstance(value, sys.modules["mlx.core"].array)

    def refusal(self, container: Any, value: Any) -> str:
        return (
            f"a {kind_name(type(container))} is changed in place and can hold only MLX arrays, and "
            f"this would become a {kind_name(type(value))}; move {self.instead} instead"
        )

    instead = "its parameters()"

    def step(self, key: Any) -> str:
        return attribute_step(key)


class MlxModuleRule(MlxRule):
    """`mlx.nn.Module`, which is a dict of its arrays and inner modules."""

    def take_apart(self, container: Any) -> Parts:
        return list(container), list(dict.values(container))

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        for key, part in zip(keys, parts, strict=True):
            dict.__setitem__(container, key, part)
        return container


class MlxOptimizerRule(MlxRule):
    """`mlx.optimizers.Optimizer`: its state, a dict that stays the same dict."""

    instead = "its state"

    def take_apart(self, container: Any) -> Parts:
        return ("state",), [container.state]

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        # Reached only where the same dict occurs outside the optimizer too, and was made anew.
        container.state = parts[0]
        return container
