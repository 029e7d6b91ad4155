"""Our Triton kernels as operators of PyTorch, through which gradients and its compiler can pass.

Where there is neither, a kernel is started directly (`kernel`), which takes less time on the host.
Triton is imported when a kernel is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from anydevice.core.hooks import load

# mypy: disable-error-code="untyped-decorator"


_PLACES = {
    "attention": "decode:decode_attention",
    "linear": "matvec:matvec",
    "rmsnorm": "rmsnorm:rmsnorm",
    "rope": "rope:rope",
    "softmax": "softmax:softmax",
    "swiglu": "swiglu:swiglu",
}


@cache
def kernel(name: str) -> Callable[..., torch.Tensor]:
    """The function that starts a kernel."""
    started: Callable[..., torch.Tensor] = load(f"anydevice.engines.torch.triton.{_PLACES[name]}")
    return started


def _operator(name: str, schema: str) -> Any:
    return torch.library.custom_op(f"anydevice_triton::{name}", mutates_args=(), schema=schema)


@_operator("rmsnorm", "(Tensor x, Tensor weight, float eps) -> Tensor")
def rmsnorm(x: Any, weight: Any, eps: float) -> Any:
    return kernel("rmsnorm")(x, weight, eps)


@_operator("softmax", "(Tensor x) -> Tensor")
def softmax(x: Any) -> Any:
    return kernel("softmax")(x)


@_operator("swiglu", "(Tensor gate, Tensor up) -> Tensor")
def swiglu(gate: Any, up: Any) -> Any:
    return kernel("swiglu")(gate, up)


@_operator(
    "rope",
    "(Tensor x, Tensor positions, Tensor frequencies, float factor, bool interleaved, "
    "bool backward) -> Tensor",
)
def rope(
    x: Any, positions: Any, frequencies: Any, factor: float, interleaved: bool, backward: bool
) -> Any:
    return kernel("rope")(x, positions, frequencies, factor, interleaved, backward)


@_operator("linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
def linear(x: Any, weight: Any, bias: Any) -> Any:
    return kernel("linear")(x, weight, bias)


@_operator(
    "attention",
    "(Tensor q, Tensor k, Tensor v, float scale, int? window, Tensor? lengths) -> Tensor",
)
def attention(q: Any, k: Any, v: Any, scale: float, window: int | None, lengths: Any) -> Any:
    return kernel("attention")(q, k, v, scale, window, lengths)


# What a compiler is told of each result before there is one.

for _like in (rmsnorm, softmax, rope):
    _like.register_fake(lambda x, *rest: torch.empty_like(x))
swiglu.register_fake(lambda gate, up: torch.empty(gate.shape, dtype=gate.dtype, device=gate.device))
linear.register_fake(lambda x, weight, bias: x.new_empty((x.shape[0], weight.shape[0])))
attention.register_fake(lambda q, *rest: q.new_empty(q.shape))


# Gradients, in PyTorch's own functions: float32 in between, rounded once.


def _keep_rmsnorm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _rmsnorm_backward(ctx: Any, gradient: Any) -> Any:
    x, weight = ctx.saved_tensors
    wide, slope = x.float(), gradient.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
    normal = wide * factor
    scaled = slope * weight.float()
    by_x = (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * factor
    by_weight = (slope * normal).reshape(-1, x.shape[-1]).sum(0)
    return by_x.to(x.dtype), by_weight.to(weight.dtype), None


def _keep_softmax(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output)


def _softmax_backward(ctx: Any, gradient: Any) -> Any:
    (result,) = ctx.saved_tensors
    weighted = gradient.float() * result.float()
    return (weighted - result.float() * weighted.sum(-1, keepdim=True)).to(result.dtype)


def _keep_swiglu(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, gradient: Any) -> Any:
    gate, up = (one.float() for one in ctx.saved_tensors)
    slope, opened = gradient.float(), torch.sigmoid(gate)
    by_gate = slope * up * opened * (1 + gate * (1 - opened))
    by_up = slope * gate * opened
    return by_gate.to(gradient.dtype), by_up.to(gradient.dtype)


def _keep_rope(ctx: Any, inputs: Any, output: Any) -> None:
    _, positions, frequencies, ctx.factor, ctx.interleaved, ctx.backward = inputs
    ctx.save_for_backward(positions, frequencies)


def _rope_backward(ctx: Any, gradient: Any) -> Any:
    straight = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    turned_back = rope(
        straight,
        *ctx.saved_tensors,
        ctx.factor,
        ctx.interleaved,
        not ctx.backward,
    )
    return turned_back, None, None, None, None, None


def _keep_linear(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight)


def _linear_backward(ctx: Any, gradient: Any) -> Any:
    x, weight = ctx.saved_tensors
    by_bias = gradient.sum(0) if ctx.biased else None
    return gradient @ weight, gradient.T @ x, by_bias


rmsnorm.register_autograd(_rmsnorm_backward, setup_context=_keep_rmsnorm)
softmax.register_autograd(_softmax_backward, setup_context=_keep_softmax)
swiglu.register_autograd(_swiglu_backward, setup_context=_keep_swiglu)
rope.register_autograd(_rope_backward, setup_context=_keep_rope)
linear.register_autograd(_linear_backward, setup_context=_keep_linear)
