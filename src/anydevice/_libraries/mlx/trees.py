"""Rules for MLX's modules and optimizers, which are changed in place and returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from anydevice._arrays.trees import rules
from anydevice._arrays.trees.rules import InPlaceRule, Parts


class MlxModuleRule(InPlaceRule):
    """`mlx.nn.Module`, which is a dict of its arrays and inner modules."""

    arrays, instead = "MLX arrays", "its parameters()"

    def holds(self, value: Any) -> bool:
        return isinstance(value, mx.array)

    def take_apart(self, container: Any) -> Parts:
        return list(container), list(dict.values(container))

    def step(self, key: Any) -> str:
        return rules.attribute_step(key)

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        for key, part in zip(keys, parts, strict=True):
            dict.__setitem__(container, key, part)
        return container


class MlxOptimizerRule(MlxModuleRule):
    """`mlx.optimizers.Optimizer`: its state, updated in the same dict."""

    instead = "its state"

    def take_apart(self, container: Any) -> Parts:
        return ("state",), [container.state]

    def rebuild(self, container: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        # Reached only if the same dict also occurs outside the optimizer, and was rebuilt.
        container.state = parts[0]
        return container
