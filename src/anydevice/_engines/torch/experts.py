"""Mixtures of experts on NVIDIA cards: two grouped products of sorted rows, without a host wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, as everyone calls it
from torch import Tensor

from anydevice._engines.torch.primitives import is_eager

_grouped_product = getattr(F, "grouped_mm", None)
"""Releases of PyTorch before 2.10 have none."""
_ALIGNED = 8
"""Rows of a multiple of this many 16-bit numbers begin at aligned addresses."""

_FEW_TOKENS = 64
"""Up to this many tokens pass through all experts: faster on an H200 if most are chosen."""
_MOST_BETWEEN = 2**26
"""Limit of the numbers between the two products: further tokens are computed after the others."""


def experts(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, activation: str, alpha: float,
    limit: float,
) -> Tensor:  # fmt: skip
    """Return the op of that name, in bfloat16 on a card that has a kernel for grouped products."""
    tokens, choices, count = len(x), chosen.numel(), len(gate_up)
    if (
        x.dtype is not torch.bfloat16
        or not _has_kernel(x.device)
        or not is_eager(x, gate_up, down, chosen, weights)
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())  # not tried in a CUDA graph
        or not (_is_aligned(gate_up) and _is_aligned(down))
        or not (choices and gate_up.numel() and down.numel())
        or (tokens <= _FEW_TOKENS and choices >= 2 * count)
    ):
        return NotImplemented
    block = max(_FEW_TOKENS, _MOST_BETWEEN * tokens // (choices * gate_up.shape[1]))
    parts = [
        in_order_of_experts(
            x[start : start + block], gate_up, down, chosen[start : start + block],
            weights[start : start + block], gate_up_bias, down_bias, activation, alpha, limit,
        )
        for start in range(0, tokens, block)
    ]  # fmt: skip
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def in_order_of_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, activation: str, alpha: float,
    limit: float,
) -> Tensor:  # fmt: skip
    """Return the same, wherever PyTorch has the product."""
    assert _grouped_product is not None
    (tokens, k), count = chosen.shape, len(gate_up)
    chosen = chosen.long()
    inside = (chosen >= 0) & (chosen < count)
    # A choice out of range goes through the first expert, and is zeroed at the end.
    numbers, order = torch.where(inside, chosen, 0).reshape(-1).sort(stable=True)
    every = torch.arange(count, device=x.device)
    ends = torch.searchsorted(numbers, every, right=True, out_int32=True)

    def product(rows: Tensor, matrices: Tensor, bias: Tensor | None) -> Tensor:
        outputs = _grouped_product(rows, matrices.mT, offs=ends).float()
        return outputs if bias is None else outputs + bias[numbers].float()

    gate, up = product(x[order // k], gate_up, gate_up_bias).chunk(2, -1)
    between = _GATED[activation](gate, up, alpha, limit).to(x.dtype)
    outputs = product(between, down, down_bias)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    # Zeroed before they are multiplied: the gradient of 0 × NaN is NaN.
    own = torch.where(inside[..., None], outputs[places].reshape(tokens, k, x.shape[1]), 0)
    shares = torch.where(inside, weights.float(), 0)
    return (own * shares[..., None]).sum(1).to(x.dtype)


def _clipped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


_GATED: Mapping[str, Callable[[Any, Any, float, float], Any]] = {
    "swiglu": lambda gate, up, alpha, limit: F.silu(gate) * up,
    "geglu": lambda gate, up, alpha, limit: F.gelu(gate) * up,
    "geglu_tanh": lambda gate, up, alpha, limit: F.gelu(gate, approximate="tanh") * up,
    "clipped_swiglu": _clipped_swiglu,
}


@lru_cache
def _has_kernel(device: torch.device) -> bool:
    """Whether the product is one kernel there; elsewhere PyTorch waits, and goes by experts."""
    if device.type != "cuda" or _grouped_product is None or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def _is_aligned(matrices: Tensor) -> bool:
    return bool(
        matrices.is_contiguous()
        and matrices.shape[-1] % _ALIGNED == 0
        and matrices.shape[-2] % _ALIGNED == 0
        and matrices.data_ptr() % 16 == 0
    )
