"""The memory that a function takes at most, as its library counts it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest


def measured(engine: str, function: Any, *arguments: Any) -> tuple[Any, int]:
    """What a function gives, and the bytes in use at most meanwhile, as its library counts them."""
    if engine == "jax":
        jax = pytest.importorskip("jax")
        compiled = jax.jit(function).lower(*arguments).compile()
        return compiled(*arguments), int(compiled.memory_analysis().temp_size_in_bytes)
    if engine == "mlx":
        mx = pytest.importorskip("mlx.core")
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(result := mx.compile(function)(*arguments))
        return result, int(mx.get_peak_memory() - before)
    torch = pytest.importorskip("torch")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        result = function(*arguments)
    events = profile.profiler.kineto_results.events()
    moves = [(each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"]
    return result, max(itertools.accumulate(moved for _, moved in sorted(moves)))
