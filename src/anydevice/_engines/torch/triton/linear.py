"""Products of a few rows with a large weight, as in decoding: as fast as the weight is read.

One row is multiplied element by element; two to eight go through the matrix units, padded to 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anydevice._core.record import Record
from anydevice._engines.torch.triton.launch import overlapping, start

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"

PADDED_ROWS = tl.constexpr(16)


class MatvecTile(Record):
    """Tile: `outputs` of a program, `inputs` at a time, `warps`, `stages` of loads."""

    outputs: int
    inputs: int
    warps: int
    stages: int = 1


def matvec_tile(rows: int, outputs: int, inputs: int) -> MatvecTile:
    """Return the fastest measured tile for this number of rows and a weight of this shape."""
    if rows > 1:
        return MatvecTile(16, 256 if inputs % 256 == 0 else 128, 2, stages=4)
    if inputs > 8192:
        return MatvecTile(2, 2048, 8)
    return MatvecTile(2, min(1024, triton.next_power_of_2(inputs)), 4)


def matvec(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tile: MatvecTile | None = None,
    overlap: bool = True,
) -> Tensor:
    """Return `x` (rows, inputs) times the transpose of `weight` (outputs, inputs), plus `bias`.

    At most eight rows, each contiguous, as those of `weight`. Sums are float32, rounded once.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    cut = tile or matvec_tile(rows, outputs, inputs)
    options = overlapping(x.device) if overlap else {"overlap": False}
    start(
        _one_row if rows == 1 else _few_rows, (triton.cdiv(outputs, cut.outputs),), x.device,
        x, weight, x if bias is None else bias, out, rows, outputs, inputs,
        x.stride(0), weight.stride(0), biased=bias is not None,
        block_outputs=cut.outputs, block=cut.inputs,
        even=inputs % cut.inputs == 0 and outputs % cut.outputs == 0,
        stages=cut.stages, num_warps=cut.warps, **options,
    )  # fmt: skip
    return out


# Grid (outputs / block_outputs,): tiles of block_outputs × block weights, summed at the end.
@triton.jit(do_not_specialize=["rows"])
def _one_row(
    x, weight, bias, out, rows, outputs, inputs, x_step, weight_step,
    biased: tl.constexpr, block_outputs: tl.constexpr, block: tl.constexpr, even: tl.constexpr,
    stages: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    known = output < outputs
    line = weight + output.to(tl.int64)[:, None] * weight_step
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    products = tl.zeros([block_outputs, block], tl.float32)
    for first in tl.range(0, inputs, block, num_stages=stages):
        place = first + tl.arange(0, block)
        if even:
            value = tl.load(line + place[None, :], eviction_policy="evict_first")
            other = tl.load(x + place, eviction_policy="evict_last")
        else:
            here = place < inputs
            both = known[:, None] & here[None, :]
            value = tl.load(line + place[None, :], both, 0, eviction_policy="evict_first")
            other = tl.load(x + place, here, 0, eviction_policy="evict_last")
        products += value.to(tl.float32) * other.to(tl.float32)[None, :]
    result = tl.sum(products, 1)
    if biased:
        result += tl.load(bias + output, known, 0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), known)


# Grid (outputs / block_outputs,): 16 × block_outputs sums from tiles of block × block_outputs.
@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, weight, bias, out, rows, outputs, inputs, x_step, weight_step,
    biased: tl.constexpr, block_outputs: tl.constexpr, block: tl.constexpr, even: tl.constexpr,
    stages: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    row = tl.arange(0, PADDED_ROWS)
    known = output < outputs
    line = weight + output.to(tl.int64)[None, :] * weight_step
    if overlap:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([PADDED_ROWS, block_outputs], tl.float32)
    for first in tl.range(0, inputs, block, num_stages=stages):
        place = first + tl.arange(0, block)
        here = place < inputs
        few = tl.load(
            x + row[:, None] * x_step + place[None, :],
            (row < rows)[:, None] & here[None, :],
            0,
            eviction_policy="evict_last",
        )
        value = tl.load(
            line + place[:, None],
            known[None, :] & here[:, None],
            0,
            eviction_policy="evict_first",
        )
        sums = tl.dot(few, value, sums)
    if overlap:
        # Not earlier: the next launch would compete for the few free multiprocessors.
        tl.extra.cuda.gdc_launch_dependents()
    if biased:
        sums += tl.load(bias + output, known, 0).to(tl.float32)[None, :]
    places = out + row[:, None] * outputs + output[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), (row < rows)[:, None] & known[None, :])
