"""Mixtures of experts: each token goes through the few feed-forward networks chosen for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from anydevice._core.array import Array, ArrayT
from anydevice._core.primitives import PrimitivesOf, Shape
from anydevice._machine.engines.registry import owner_of
from anydevice._ops.arguments import (
    INT32,
    finite_numbers,
    in_words,
    require_integers,
    require_one_dtype,
    require_one_library,
    widened,
    wrong,
    wrong_shapes,
)
from anydevice._ops.dispatch import float_version, known_float, primitives, run, wrong_dtype
from anydevice._ops.elementwise import gelu, multiply, swiglu
from anydevice._ops.products import linear


def experts(
    x: ArrayT,
    gate_up: ArrayT,
    down: ArrayT,
    chosen: ArrayT,
    weights: ArrayT,
    *,
    gate_up_bias: ArrayT | None = None,
    down_bias: ArrayT | None = None,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> ArrayT:
    """Compute a mixture of experts: for each token, the weighted sum of its experts' outputs.

    x is (tokens, hidden). `chosen`, integers, and `weights` are (tokens, k): which experts, and how
    much each counts. An expert is a gated feed-forward network, down · activation(gate, up): the
    first half of the rows of its matrix in `gate_up`, (experts, 2 × inner, hidden), gives the gate
    and the second half gives up; `down` is (experts, hidden, inner). Biases are (experts,
    2 × inner) and (experts, hidden). The result has the shape and dtype of x.

    `activation` is one of

    - swiglu: silu(gate) × up
    - geglu: gelu(gate) × up, and geglu_tanh the same with the approximation of gelu by tanh
    - clipped_swiglu: gate × sigmoid(alpha × gate) × (up + 1), as in gpt-oss, where the gate is at
      most `limit`, and up between -limit and limit

    An index in `chosen` that is negative or too large adds nothing, so that -1 stands for none. The
    weights may have another floating-point dtype than x. Sums are float32, or float64 for float64;
    in 16 bits, the gate, up and the activation are rounded on the way.

    Only chosen experts are computed, a product for each that any token uses. On an accelerator, up
    to 128 tokens wait for nothing: for a few choices the matrices are gathered, and for more, which
    use most of the experts anyway, every expert computes every token. More tokens wait for
    `chosen`, to be sorted by expert. JAX and MLX never wait, nor does PyTorch in bfloat16 on cards
    such as NVIDIA's H100 and B200, where it has a kernel for grouped products of contiguous
    matrices whose sizes are multiples of 8. In code compiled by PyTorch every expert computes every
    token, except for a few choices.

    >>> gate_up, down = numpy.ones((3, 2, 1)), numpy.array([[[1.0]], [[10.0]], [[100.0]]])
    >>> chosen, weights = numpy.array([[0, 2], [1, -1]]), numpy.array([[0.5, 0.5], [1.0, 0.0]])
    >>> experts(numpy.ones((2, 1)), gate_up, down, chosen, weights).round(2).tolist()
    [[36.92], [7.31]]
    """
    own = float_version(x, "experts", _experts)
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    present = {name: bias for name, bias in biases.items() if bias is not None}
    require_one_dtype("experts", x=x, gate_up=gate_up, down=down, **present)
    require_integers("experts", "chosen", chosen, x)
    if type(weights) is not type(x):
        require_one_library("experts", "x", x, "weights", weights)
    if known_float(weights) is None:
        wanted = "floating-point numbers in weights; use astype(weights, 'float32')"
        raise wrong_dtype("experts", primitives(weights).dtype(weights), wanted)
    _refuse_shapes(x, gate_up, down, chosen, weights, gate_up_bias, down_bias)
    if not isinstance(activation, str) or activation not in _GATED:
        names = ", ".join(_GATED)
        raise wrong("experts", f"activation must be one of {names}, not {in_words(activation)}")
    alpha, limit = finite_numbers("experts", "above 0", lambda n: n > 0, alpha=alpha, limit=limit)
    return run(
        own, _experts,
        x, gate_up, down, chosen, weights, gate_up_bias, down_bias, activation, alpha, limit,
    )  # fmt: skip


def _refuse_shapes(
    x: Array, gate_up: Array, down: Array, chosen: Array, weights: Array, bias: Any, last_bias: Any
) -> None:
    if len(x.shape) != 2:
        raise wrong_shapes("experts", "x must be (tokens, hidden)", x=x)
    hidden, inner = x.shape[1], down.shape[-1] if len(down.shape) == 3 else -1
    count = gate_up.shape[0] if len(gate_up.shape) else -1
    wanted: tuple[tuple[str, Array, Shape, str], ...] = (
        ("gate_up", gate_up, (count, 2 * inner, hidden), "(experts, 2 × inner, hidden)"),
        ("down", down, (count, hidden, inner), "(experts, hidden, inner)"),
        ("gate_up_bias", bias, (count, 2 * inner), "(experts, 2 × inner)"),
        ("down_bias", last_bias, (count, hidden), "(experts, hidden)"),
    )
    for name, array, shape, rule in wanted:
        if array is not None and tuple(array.shape) != shape:
            arrays = {"x": x, "gate_up": gate_up, "down": down, name: array}
            raise wrong_shapes("experts", f"{name} must be {rule}", **arrays)
    if len(chosen.shape) != 2 or chosen.shape[0] != x.shape[0] or chosen.shape != weights.shape:
        rule = "chosen and weights must be (tokens, k)"
        raise wrong_shapes("experts", rule, x=x, chosen=chosen, weights=weights)


# The networks


def _clipped_swiglu(gate: ArrayT, up: ArrayT, alpha: float, limit: float) -> ArrayT:
    xp = primitives(gate)
    gate = xp.minimum(gate, limit)
    up = xp.maximum(xp.minimum(up, limit), -limit)
    opened = xp.multiply(gate, xp.sigmoid(xp.multiply(gate, alpha)))
    return xp.multiply(opened, xp.add(up, 1.0))


_GATED: Mapping[str, Callable[[Array, Array, float, float], Array]] = {
    "swiglu": lambda gate, up, alpha, limit: swiglu(gate, up),
    "geglu": lambda gate, up, alpha, limit: multiply(gelu(gate), up),
    "geglu_tanh": lambda gate, up, alpha, limit: multiply(gelu(gate, approximate=True), up),
    "clipped_swiglu": _clipped_swiglu,
}


class _Networks:
    """The matrices of all experts, applied to rows; results are in the dtype that sums have."""

    def __init__(
        self, xp: PrimitivesOf[Any], stacks: tuple[Array, Array, Array | None, Array | None],
        activation: str, alpha: float, limit: float,
    ) -> None:  # fmt: skip
        self.xp, self.stacks, self.count = xp, stacks, stacks[0].shape[0]
        self.activation, self.numbers = _GATED[activation], (alpha, limit)

    def one(self, number: int, rows: Array) -> Array:
        """Apply one expert to rows (rows, hidden)."""
        xp = self.xp
        gate_up, down, bias, last_bias = (
            None
            if s is None
            else xp.reshape(xp.slice_axis(s, 0, number, number + 1), tuple(s.shape[1:]))
            for s in self.stacks
        )
        between = self._between(linear(rows, gate_up, bias), rows)
        return widened(xp, linear(between, down, last_bias))

    def of_each(self, numbers: Array, rows: Array) -> Array:
        """Apply each row's own expert to it; the expert's matrices are copied."""
        xp = self.xp
        taken: list[Any] = [None if s is None else xp.take(s, numbers, 0) for s in self.stacks]
        row = xp.reshape(rows, (rows.shape[0], 1, rows.shape[1]))
        between = self._between(self._product(row, taken[0], taken[2]), rows)
        return xp.reshape(self._product(between, taken[1], taken[3]), tuple(rows.shape))

    def of_all(self, rows: Array) -> Array:
        """Apply every expert to rows (rows, hidden): (experts × rows, hidden)."""
        xp, (gate_up, down, bias, last_bias) = self.xp, self.stacks
        shape = (self.count, *rows.shape)
        every = xp.broadcast_to(xp.reshape(rows, (1, *rows.shape)), shape)
        between = self._between(self._product(every, gate_up, bias), rows)
        outputs = self._product(between, down, last_bias)
        return xp.reshape(outputs, (shape[0] * shape[1], shape[2]))

    def _between(self, both: Array, like: Array) -> Array:
        """Apply the activation between the two products of an expert."""
        xp, last = self.xp, len(both.shape) - 1
        inner, both = both.shape[last] // 2, widened(xp, both)
        gate, up = xp.slice_axis(both, last, 0, inner), xp.slice_axis(both, last, inner, 2 * inner)
        return xp.astype(self.activation(gate, up, *self.numbers), xp.dtype(like))

    def _product(self, rows: Array, matrices: Array, bias: Any) -> Array:
        xp = self.xp
        product = widened(xp, xp.matmul(rows, xp.permute_dims(matrices, (0, 2, 1))))
        if bias is None:
            return product
        return xp.add(product, xp.reshape(widened(xp, bias), (bias.shape[0], 1, bias.shape[1])))


# Which products are computed


def _experts(
    x: ArrayT, gate_up: ArrayT, down: ArrayT, chosen: ArrayT, weights: ArrayT, gate_up_bias: Any,
    down_bias: Any, activation: str, alpha: float, limit: float,
) -> ArrayT:  # fmt: skip
    xp = primitives(x)
    (tokens, k), count = chosen.shape, gate_up.shape[0]
    if not tokens * k * count * x.shape[1] * down.shape[2]:
        return xp.full(tuple(x.shape), 0, xp.dtype(x), x)
    networks = _Networks(xp, (gate_up, down, gate_up_bias, down_bias), activation, alpha, limit)
    weights = xp.astype(weights, xp.dtype(widened(xp, x)))
    where = _where(chosen)
    if where == "host" or (where == "device" and tokens > FEW_TOKENS):
        engine = owner_of(chosen)
        assert engine is not None
        result = _sort_by_expert(networks, x, engine.to_host(chosen), weights)
    elif tokens * k * COPIED <= count:
        result = _gather_experts(networks, x, chosen, weights)
    elif tokens <= FEW_TOKENS:
        result = _side_by_side(networks, x, chosen, weights)
    else:
        result = _all_experts(networks, x, chosen, weights)
    return xp.astype(result, xp.dtype(x))


FEW_TOKENS = 128
"""Up to this many tokens go through all experts: on an H200, faster than sorting them."""
COPIED = 12
"""Cost of gathering a matrix, in matrices that are read in place, on an H200."""


def _where(chosen: Array) -> str:
    """Return where the indices are: on the host, on a device, or nowhere while code is traced."""
    engine = owner_of(chosen)
    compiling = sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo.")
    if compiling or engine is None or engine.is_traced(chosen):
        return "nowhere"
    return "host" if all(d.backend == "cpu" for d in engine.devices_of(chosen)) else "device"


_where._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _sort_by_expert(networks: _Networks, x: ArrayT, chosen: Any, weights: ArrayT) -> ArrayT:
    """Compute one product for each chosen expert, over all rows that chose it."""
    import numpy as np

    xp, (tokens, k) = networks.xp, chosen.shape
    flat = chosen.reshape(-1).astype(np.int64)
    order = np.argsort(flat, kind="stable")
    order = order[(flat[order] >= 0) & (flat[order] < networks.count)]
    starts = np.flatnonzero(np.diff(flat[order], prepend=-1)).tolist()
    shares = xp.reshape(weights, (tokens * k, 1))
    pieces = []
    for start, stop in pairwise([*starts, len(order)]):
        mine = order[start:stop]
        alone = tokens == 1 and len(mine) == 1
        rows = x if alone else xp.take(x, xp.asarray(mine // k, x), 0)
        share = xp.slice_axis(shares, 0, int(mine[0]), int(mine[0]) + 1)
        share = share if len(mine) == 1 else xp.take(shares, xp.asarray(mine, x), 0)
        pieces.append(xp.multiply(networks.one(int(flat[mine[0]]), rows), share))
    nothing = xp.full((1, x.shape[1]), 0, xp.dtype(weights), x)
    if tokens == 1:
        return xp.sum(xp.concat([nothing, *pieces], 0), 0, True)
    places = np.zeros(tokens * k, np.int64)
    places[order] = np.arange(1, len(order) + 1)
    outputs = xp.take(xp.concat([nothing, *pieces], 0), xp.asarray(places, x), 0)
    return xp.sum(xp.reshape(outputs, (tokens, k, x.shape[1])), 1)


def _gather_experts(networks: _Networks, x: ArrayT, chosen: ArrayT, weights: ArrayT) -> ArrayT:
    """Copy the matrices of each choice, so that the host need not know the choices."""
    xp, (tokens, k) = networks.xp, chosen.shape
    inside, safe = _inside(xp, chosen, networks.count)
    rows = xp.broadcast_to(xp.reshape(x, (tokens, 1, x.shape[1])), (tokens, k, x.shape[1]))
    outputs = networks.of_each(
        xp.reshape(safe, (tokens * k,)), xp.reshape(rows, (tokens * k, x.shape[1]))
    )
    return _weighted_sum(xp, outputs, inside, weights)


def _side_by_side(networks: _Networks, x: ArrayT, chosen: ArrayT, weights: ArrayT) -> ArrayT:
    """Apply every expert to every token at once, and take the outputs that were chosen."""
    xp, (tokens, k) = networks.xp, chosen.shape
    inside, safe = _inside(xp, chosen, networks.count)
    row = xp.reshape(xp.arange(tokens, INT32, x), (tokens, 1))
    places = xp.reshape(xp.add(xp.multiply(safe, tokens), row), (tokens * k,))
    return _weighted_sum(xp, xp.take(networks.of_all(x), places, 0), inside, weights)


def _weighted_sum(
    xp: PrimitivesOf[ArrayT], outputs: ArrayT, inside: ArrayT, weights: ArrayT
) -> ArrayT:
    """Return the weighted sum of the outputs (tokens × k, hidden) of each token's choices."""
    shape = (*weights.shape, 1)
    outputs = xp.reshape(outputs, (*weights.shape, outputs.shape[1]))
    # Masked before they are multiplied: 0 × NaN would be a gradient.
    own = xp.where(xp.reshape(inside, shape), outputs, 0.0)
    shares = xp.reshape(xp.where(inside, weights, 0.0), shape)
    return xp.sum(xp.multiply(own, shares), 1)


def _all_experts(networks: _Networks, x: ArrayT, chosen: ArrayT, weights: ArrayT) -> ArrayT:
    """Apply every expert to every token, one expert after the other; mask what was not chosen."""
    xp, (tokens, _) = networks.xp, chosen.shape
    inside, safe = _inside(xp, chosen, networks.count)
    total: Any = None
    for number in range(networks.count):
        own = xp.logical_and(inside, xp.equal(safe, number))
        some = xp.reshape(xp.less(0, xp.sum(xp.astype(own, INT32), 1)), (tokens, 1))
        share = xp.reshape(xp.sum(xp.where(own, weights, 0.0), 1), (tokens, 1))
        output = xp.where(some, xp.multiply(networks.one(number, x), share), 0.0)
        total = output if total is None else xp.add(total, output)
    return total


def _inside(xp: PrimitivesOf[ArrayT], chosen: ArrayT, count: int) -> tuple[ArrayT, ArrayT]:
    """Return whether each choice is in range, and the choices as int32, 0 where they are not."""
    if xp.dtype(chosen).bits < 32:
        chosen = xp.astype(chosen, INT32)
    inside = xp.less(chosen, count)
    if xp.dtype(chosen).kind == "int":
        inside = xp.logical_and(inside, xp.less_equal(0, chosen))
    return inside, xp.astype(xp.where(inside, chosen, 0), INT32)
