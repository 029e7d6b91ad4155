"""Cases of mixtures of experts."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np

from anydevice.check import budgets
from anydevice.check.case import LARGE, LARGE_KERNELS, Call, Case, Draw, Make, Row, call


def _mixed(
    tokens: int,
    k: int,
    count: int,
    hidden: int = 32,
    inner: int = 24,
    *,
    biased: bool = False,
    spread: float = 1.0,
    chosen: Any = None,
    **options: Any,
) -> Make:
    """`k` of `count` experts for each token; `chosen` are just those."""

    def make(draw: Draw) -> Call:
        x = draw.normal(tokens, hidden, spread=spread)
        gate_up = draw.normal(count, 2 * inner, hidden, spread=hidden**-0.5)
        down = draw.normal(count, hidden, inner, spread=inner**-0.5)
        numbers = draw.integers(0, count, tokens, k)
        if chosen is not None:
            numbers = np.broadcast_to(np.array(chosen, np.int32), (tokens, k)).copy()
        given = dict(options)
        if biased:
            given["gate_up_bias"] = draw.normal(count, 2 * inner)
            given["down_bias"] = draw.normal(count, hidden)
        return call(x, gate_up, down, numbers, draw.normal(tokens, k), **given)

    return make


def _nan_of_its_own(draw: Draw) -> Call:
    """NaN and infinity in one token, in one weight, and in the expert that one token chose."""
    x, gate_up, down, _, weights = _mixed(9, 2, 5)(draw).arguments
    chosen = np.array([[0, 1]] * 7 + [[3, 2], [2, 0]], np.int32)
    x[1, 3], x[2, 0], weights[4, 1] = nan, inf, nan
    down[3, 7, 5] = nan
    return call(x, gate_up, down, chosen, weights)


def _nan_not_chosen(choices: Any, count: int) -> Make:
    """NaN in experts that nobody chose, and in the weights of what is no expert."""

    def make(draw: Draw) -> Call:
        chosen = np.array(choices, np.int32)
        tokens, k = chosen.shape
        made = _mixed(tokens, k, count, biased=True, chosen=choices)(draw)
        *stacks, weights = (made.arguments[at] for at in (1, 2, 4))
        for stack in (*stacks, made.options["gate_up_bias"], made.options["down_bias"]):
            stack[np.setdiff1d(np.arange(count), chosen)] = nan
        weights[(chosen < 0) | (chosen >= count)] = nan
        return made

    return make


def _work(made: Call) -> int:
    """Three products of a vector for each choice."""
    _, _, down, chosen, _ = made.arguments
    return int(6 * np.prod(chosen.shape) * down.shape[1] * down.shape[2])


def _moved(made: Call, result_bytes: int) -> int:
    """Each expert that can be chosen is read once."""
    x, gate_up, down, chosen, weights = made.arguments
    used = min(int(np.prod(chosen.shape)), len(down))
    matrices = (gate_up.nbytes + down.nbytes) // len(down) * used
    return int(x.nbytes + chosen.nbytes + weights.nbytes + matrices + result_bytes)


_CLIPPED: dict[str, Any] = {"activation": "clipped_swiglu"}

EXPERTS = Row(
    "experts",
    (
        Case("9 tokens, 2 of 4", _mixed(9, 2, 4)),
        Case("one token, 2 of 8", _mixed(1, 2, 8)),
        Case("one token, biases", _mixed(1, 4, 8, biased=True)),
        Case("3 tokens, 2 of 16", _mixed(3, 2, 16)),
        Case("67 tokens, 3 of 5, biases", _mixed(67, 3, 5, biased=True)),
        Case("40 tokens, 8 of 64", _mixed(40, 8, 64, 16, 8), LARGE),
        Case("clipped", _mixed(9, 2, 4, biased=True, spread=4.0, **_CLIPPED)),
        Case("clipped, one token", _mixed(1, 4, 8, biased=True, spread=4.0, **_CLIPPED)),
        Case("another limit", _mixed(9, 2, 4, spread=4.0, alpha=1.3, limit=2, **_CLIPPED), LARGE),
        Case("gelu", _mixed(9, 2, 4, activation="geglu"), LARGE),
        Case("gelu, one token", _mixed(1, 2, 4, activation="geglu", spread=4.0)),
        Case("gelu by tanh", _mixed(9, 2, 4, activation="geglu_tanh"), LARGE),
        Case("gelu by tanh, one token", _mixed(1, 2, 4, activation="geglu_tanh", spread=4.0)),
        Case("one of one", _mixed(5, 1, 1), LARGE),
        Case("all of them", _mixed(5, 4, 4, chosen=[3, 0, 2, 1]), LARGE),
        Case("all tokens choose one", _mixed(33, 1, 7, chosen=[[5]]), LARGE),
        Case("an expert twice", _mixed(5, 3, 4, chosen=[[2, 2, 0]]), LARGE),
        Case("an expert twice, one token", _mixed(1, 3, 4, chosen=[[2, 2, 0]]), LARGE),
        Case("none for some", _mixed(4, 2, 3, chosen=[[-1, 1], [2, -1], [-1, -1], [0, 0]])),
        Case("none for one token", _mixed(1, 3, 4, chosen=[[-1, 2, -1]]), LARGE),
        Case("none at all", _mixed(5, 2, 3, chosen=[[-1, -1]]), LARGE),
        Case(
            "out of range", _mixed(4, 2, 3, chosen=[[3, 1], [2, 2**31 - 1], [-(2**31), 0], [1, 9]])
        ),
        Case("out of range, few", _mixed(2, 2, 6, chosen=[[6, 1], [2**31 - 1, -(2**31)]]), LARGE),
        Case("no tokens", _mixed(0, 2, 3), LARGE),
        Case("no choices", _mixed(3, 0, 3), LARGE),
        Case("one number each", _mixed(3, 2, 3, 1, 1), LARGE),
        Case("matrices that lie apart", _mixed(9, 2, 4, biased=True), strided=True),
        Case("one token, matrices that lie apart", _mixed(1, 2, 8), strided=True),
        Case("odd widths", _mixed(5, 2, 3, 1031, 517), LARGE),
        Case("one token, wide", _mixed(1, 2, 4, 1031, 517), LARGE),
        Case("1,031 tokens, 4 of 16", _mixed(1031, 4, 16), LARGE),
        Case("259 tokens, 2 of 300", _mixed(259, 2, 300, 16, 8), LARGE),
        Case("nan of its own", _nan_of_its_own),
        Case(
            "nan that was not chosen", _nan_not_chosen([[0, 3], [3, -1], [0, 0]], 5), LARGE_KERNELS
        ),
        Case("nan that was not chosen, few", _nan_not_chosen([[0, 3], [3, -1]], 9), LARGE_KERNELS),
    ),
    budget=budgets.of_experts,
    gradient=_mixed(3, 2, 3, 4, 3, biased=True),
    gpu={
        "one token, 8 of 128": _mixed(1, 8, 128, 2048, 768),
        "4,096 tokens, 8 of 128": _mixed(4096, 8, 128, 2048, 768),
    },
    cpu={
        "one token, 2 of 8": _mixed(1, 2, 8, 1024, 512),
        "256 tokens, 2 of 8": _mixed(256, 2, 8, 1024, 512),
    },
    moved=_moved,
    operations=_work,
)
