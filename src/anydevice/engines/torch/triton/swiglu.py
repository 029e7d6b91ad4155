"""SwiGLU, `silu(gate) * up`, in one pass; the two may be halves of one wider tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anydevice.core.record import Record
from anydevice.engines.torch.triton.launch import start

# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"


LOG2_E = tl.constexpr(1.4426950408889634)


class Shape(Record):
    """How the work is cut: so many elements for a program, by so many warps."""

    elements: int
    warps: int


USUAL = Shape(1024, 4)
"""What measures fastest: small programs, so that memory is read and written in its order."""


def swiglu(gate: torch.Tensor, up: torch.Tensor, shape: Shape = USUAL) -> torch.Tensor:
    """`silu(gate) * up` in float32, rounded once, as a contiguous tensor.

    Each operand is a matrix, or looks like one when all axes but the last are taken as one, whose
    rows are contiguous.
    """
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not gate.numel():
        return out
    flat = gate.is_contiguous() and up.is_contiguous()
    columns = gate.numel() if flat else gate.shape[-1]
    blocks = triton.cdiv(columns, shape.elements)
    start(
        _swiglu,
        (blocks,) if flat else (gate.numel() // columns, blocks),
        gate.device,
        gate,
        up,
        out,
        columns,
        *((0, 0) if flat else (one.view(-1, columns).stride(0) for one in (gate, up))),
        flat=flat,
        block=shape.elements,
        num_warps=shape.warps,
    )
    return out


@triton.jit
def _swiglu(gate, up, out, columns, gate_step, up_step, flat: tl.constexpr, block: tl.constexpr):
    if flat:
        begin = tl.program_id(0).to(tl.int64) * block
    else:
        row = tl.program_id(0).to(tl.int64)
        begin = tl.program_id(1).to(tl.int64) * block
        gate += row * gate_step
        up += row * up_step
        out += row * columns
    column = begin + tl.arange(0, block)
    here = column < columns
    value = tl.load(gate + column, here, 0).to(tl.float32)
    other = tl.load(up + column, here, 0).to(tl.float32)
    result = value / (1.0 + tl.exp2(-value * LOG2_E)) * other
    tl.store(out + column, result.to(out.dtype.element_ty), here)
