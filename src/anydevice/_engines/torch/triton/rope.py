"""Rotary positions: each pair of numbers is rotated by an angle that grows with the position.

The cosines and sines of a few tokens are computed once and used for all heads of the program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anydevice._core.record import Record
from anydevice._engines.torch.triton.launch import start

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"


class RopeTile(Record):
    """Tile: `tokens` and `heads` of a program, and its `warps`."""

    tokens: int
    heads: int
    warps: int


def rope_tile(heads: int, tokens: int, size: int, by_token: bool) -> RopeTile:
    """Return the fastest measured tile; `by_token`: a token's heads are neighbours in memory."""
    rows = max(1, 4096 // triton.next_power_of_2(size))
    if by_token:
        return RopeTile(1, min(triton.next_power_of_2(heads), rows), 4)
    block = min(triton.next_power_of_2(tokens), max(1, rows // 4))
    return RopeTile(block, min(triton.next_power_of_2(heads), max(1, rows // 2 // block)), 2)


def rope(
    x: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    factor: float,
    interleaved: bool,
    backward: bool = False,
    tile: RopeTile | None = None,
) -> Tensor:
    """Rotate `x` (batch, heads, tokens, size) by `positions` × `frequencies`, times `factor`.

    `positions` is (tokens,) or (batch, tokens), `frequencies` float32 (size / 2,). The last axis of
    `x` must be contiguous. `backward` turns the other way, as the gradient must be. Angles,
    cosines and sines are float32, and the result is rounded once.
    """
    out = torch.empty_like(x)
    if not x.numel():
        return out
    batch, heads, tokens, size = x.shape
    cut = tile or rope_tile(heads, tokens, size, x.stride(1) < x.stride(2))
    start(
        _rope, (triton.cdiv(tokens, cut.tokens), triton.cdiv(heads, cut.heads), batch), x.device,
        x, positions, frequencies, out, -factor if backward else factor, factor, heads, tokens,
        positions.stride(0) if positions.ndim == 2 else 0, positions.stride(-1),
        *x.stride()[:3], *out.stride()[:3],
        half=size // 2, block_half=triton.next_power_of_2(size // 2), block_tokens=cut.tokens,
        block_heads=cut.heads, interleaved=interleaved, num_warps=cut.warps,
    )  # fmt: skip
    return out


# Rotary embedding (Su et al. 2021, RoFormer). Grid (tokens / block_tokens, heads / block_heads,
# batch); the angles of a token are computed once for all heads of the program.
@triton.jit(do_not_specialize=["heads", "tokens"])
def _rope(
    x, positions, frequencies, out, sine_factor, cosine_factor, heads, tokens,
    positions_batch, positions_token, x_batch, x_head, x_token, out_batch, out_head, out_token,
    half: tl.constexpr, block_half: tl.constexpr, block_tokens: tl.constexpr,
    block_heads: tl.constexpr, interleaved: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    row = token.to(tl.int64)[:, None, None]
    line = head.to(tl.int64)[None, :, None]
    source = x + batch * x_batch + line * x_head + row * x_token
    target = out + batch * out_batch + line * out_head + row * out_token
    known = (token < tokens)[:, None, None] & (head < heads)[None, :, None]
    # Loaded first, so that the loads run while the angles are computed.
    if interleaved:
        place = tl.arange(0, 2 * block_half)[None, None, :]
        here = known & (place < 2 * half)
        both = tl.load(source + place, here, 0)
    else:
        place = tl.arange(0, block_half)[None, None, :]
        here = known & (place < half)
        left = tl.load(source + place, here, 0)
        right = tl.load(source + half + place, here, 0)

    pair = tl.arange(0, block_half)
    where = positions + batch * positions_batch + token.to(tl.int64) * positions_token
    position = tl.load(where, token < tokens, 0).to(tl.float32)
    frequency = tl.load(frequencies + pair, pair < half, 0)
    sine, cosine = sine_and_cosine(position[:, None] * frequency[None, :])
    sine = (sine * sine_factor)[:, None, :]
    cosine = (cosine * cosine_factor)[:, None, :]

    if interleaved:
        apart = tl.reshape(both, [block_tokens, block_heads, block_half, 2])
        left, right = tl.split(apart)
    left = left.to(tl.float32)
    right = right.to(tl.float32)
    low = (left * cosine - right * sine).to(out.dtype.element_ty)
    high = (right * cosine + left * sine).to(out.dtype.element_ty)
    if interleaved:
        turned = tl.reshape(tl.join(low, high), [block_tokens, block_heads, 2 * block_half])
        tl.store(target + place, turned, here)
    else:
        tl.store(target + place, low, here)
        tl.store(target + half + place, high, here)


@triton.jit
def sine_and_cosine(angle):
    """Return sine and cosine of a float32 angle: quadrant by float64, then Taylor series."""
    turns = angle.to(tl.float64) * 0.6366197723675814
    quarter = tl.floor(turns + 0.5)
    near = ((turns - quarter) * 1.5707963267948966).to(tl.float32)
    count = quarter.to(tl.int64).to(tl.int32)
    square = near * near
    sine = near + near * square * (
        -1.6666667e-1 + square * (8.3333333e-3 + square * (-1.9841270e-4 + square * 2.7557319e-6))
    )
    cosine = 1.0 + square * (
        -0.5 + square * (4.1666667e-2 + square * (-1.3888889e-3 + square * 2.4801587e-5))
    )
    swapped = (count & 1) == 1
    first = tl.where(swapped, cosine, sine)
    second = tl.where(swapped, sine, cosine)
    return (
        tl.where((count & 2) == 2, -first, first),
        tl.where(((count + 1) & 2) == 2, -second, second),
    )
