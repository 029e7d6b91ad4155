"""Our own Triton kernels as versions of ops, for tensors on NVIDIA and AMD GPUs.

Each function takes all arguments of its op by position, and returns `NotImplemented` before any
work if its kernel does not fit or is not trusted on this device. PyTorch's compiler fuses
`rmsnorm`, `swiglu` and `rope` itself.

A kernel is also an operator of PyTorch, for gradients and the compiler. Without these it is started
directly, which takes less time on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from anydevice._core.quantized import QuantizedWeight
from anydevice._core.rope_scaling import depends_on_length, frequencies
from anydevice._engines.torch.primitives import is_plain
from anydevice._engines.trust import is_trusted

MOST_ROWS = 8
"""The most rows of `x` for which `linear` is a matter of reading the weight."""
MOST_NORMED_ROWS = 64
"""The most rows of `x` for which `final_logits` is."""
LAYER_ARGUMENTS = 15
"""Number of arguments of `prompt_layer` after `x`, with the optional last one."""
LEAST_WEIGHT = 2**20
"""The fewest elements of a weight for which our own kernel is faster."""

_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_HALF = (torch.float16, torch.bfloat16)
_INTEGERS = (torch.int32, torch.int64)
_SIZES = (16, 32, 64, 128, 256)
# This variable starts Triton's interpreter, which takes tensors of the CPU.
_PLACE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
_GPU = "rocm" if torch.version.hip else "cuda"
_READY = find_spec("triton") is not None


@cache
def _kernel(name: str) -> Callable[..., Tensor]:
    """Return the function that starts a kernel; Triton is imported with the first one."""
    from anydevice._engines.torch.triton import (
        attention,
        decoder_layer,
        linear,
        rope,
        rows,
        tokens,
    )

    started: dict[str, Callable[..., Tensor]] = {
        "attention": attention.decode_attention,
        "cache_write": tokens.cache_write,
        "draw_token": tokens.draw_token,
        "embedding": tokens.embedding,
        "final_logits": decoder_layer.any_product,
        "linear": linear.matvec,
        "rmsnorm": rows.rmsnorm,
        "rope": rope.rope,
        "softmax": rows.softmax,
        "swiglu": rows.swiglu,
    }
    return started[name]


# The operators: a schema, and the shape and dtype of the result for compilers.


def _operator(name: str, schema: str, result: Callable[..., Tensor]) -> Any:
    def run(*arguments: Any) -> Tensor:
        return _kernel(name)(*arguments)

    made = torch.library.custom_op(f"anydevice_triton::{name}", run, mutates_args=(), schema=schema)
    made.register_fake(result)
    return made


def _like_the_first(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _contiguous(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_OPERATORS = {
    name: _operator(name, f"({schema}) -> Tensor", result)
    for name, schema, result in (
        ("rmsnorm", "Tensor x, Tensor weight, float eps", _like_the_first),
        ("softmax", "Tensor x", _like_the_first),
        ("swiglu", "Tensor gate, Tensor up", _contiguous),
        (
            "rope",
            "Tensor x, Tensor positions, Tensor frequencies, float factor, bool interleaved, "
            "bool backward",
            _like_the_first,
        ),
        (
            "linear",
            "Tensor x, Tensor weight, Tensor? bias",
            lambda x, weight, bias: x.new_empty((x.shape[0], weight.shape[0])),
        ),
        (
            "attention",
            "Tensor q, Tensor k, Tensor v, float scale, int? window, Tensor? lengths, "
            "float? soft_cap, Tensor? sinks",
            _contiguous,
        ),
    )
}


# Gradients, in PyTorch's own functions: float32 in between, rounded once.


def _keep_rmsnorm(ctx: torch.autograd.function.FunctionCtx, inputs: Tensor, output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _rmsnorm_backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    wide, slope = x.float(), gradient.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
    normal = wide * factor
    scaled = slope * weight.float()
    by_x = (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * factor
    by_weight = (slope * normal).reshape(-1, x.shape[-1]).sum(0)
    return by_x.to(x.dtype), by_weight.to(weight.dtype), None


def _softmax_backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Any:
    (result,) = ctx.saved_tensors
    weighted = gradient.float() * result.float()
    return (weighted - result.float() * weighted.sum(-1, keepdim=True)).to(result.dtype)


def _swiglu_backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Any:
    gate, up = (one.float() for one in ctx.saved_tensors)
    slope, opened = gradient.float(), torch.sigmoid(gate)
    by_gate = slope * up * opened * (1 + gate * (1 - opened))
    by_up = slope * gate * opened
    return by_gate.to(gradient.dtype), by_up.to(gradient.dtype)


def _keep_rope(ctx: torch.autograd.function.FunctionCtx, inputs: Tensor, output: Tensor) -> None:
    _, positions, frequencies, ctx.factor, ctx.interleaved, ctx.backward = inputs
    ctx.save_for_backward(positions, frequencies)


def _rope_backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Any:
    straight = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    options = (ctx.factor, ctx.interleaved, not ctx.backward)
    turned_back = _OPERATORS["rope"](straight, *ctx.saved_tensors, *options)
    return turned_back, None, None, None, None, None


def _keep_linear(ctx: torch.autograd.function.FunctionCtx, inputs: Tensor, output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight)


def _linear_backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    by_bias = gradient.sum(0) if ctx.biased else None
    return gradient @ weight, gradient.T @ x, by_bias


for _name, _backward, _keep in (
    ("rmsnorm", _rmsnorm_backward, _keep_rmsnorm),
    ("softmax", _softmax_backward, lambda ctx, inputs, output: ctx.save_for_backward(output)),
    ("swiglu", _swiglu_backward, lambda ctx, inputs, output: ctx.save_for_backward(*inputs)),
    ("rope", _rope_backward, _keep_rope),
    ("linear", _linear_backward, _keep_linear),
):
    _OPERATORS[_name].register_autograd(_backward, setup_context=_keep)


# The versions of ops.


def _run(name: str, as_operator: bool, *arguments: Any) -> Tensor:
    """Start a kernel, through PyTorch's operator for a gradient or the compiler."""
    return (_OPERATORS[name] if as_operator else _kernel(name))(*arguments)


def _rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if (
        not _serves_eagerly(x, weight)
        or weight.dtype not in (x.dtype, torch.float32)
        or not (x.is_contiguous() and weight.is_contiguous())
    ):
        return NotImplemented
    return _run("rmsnorm", _needs_gradient(x, weight), x, weight, eps)


def _softmax(x: Tensor, axis: int) -> Tensor:
    if not _serves(x) or not x.ndim or axis not in (-1, x.ndim - 1) or not x.is_contiguous():
        return NotImplemented
    return _run("softmax", torch.compiler.is_compiling() or _needs_gradient(x), x)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if (
        not _serves_eagerly(gate, up)
        or gate.dtype != up.dtype
        or gate.shape != up.shape
        or not (_has_rows(gate) and _has_rows(up))
    ):
        return NotImplemented
    return _run("swiglu", _needs_gradient(gate, up), gate, up)


def _rope(
    x: Tensor, positions: Tensor, theta: float, interleaved: bool,
    scaling: Mapping[str, Any] | None, length: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if (
        depends_on_length(scaling)
        or not _serves_eagerly(x, positions)
        or positions.dtype not in _INTEGERS
        or x.stride(-1) != 1
    ):
        return NotImplemented
    frozen = () if scaling is None else tuple(sorted(scaling.items()))
    steps, factor = _frequencies(x.shape[-1], theta, frozen, x.device)
    return _run("rope", _needs_gradient(x), x, positions, steps, factor, interleaved, False)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    inputs = weight.shape[-1]
    if (
        x.dtype not in _HALF
        or not _serves(x, weight, *(() if bias is None else (bias,)))
        or weight.dtype != x.dtype
        or (bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()))
        or not inputs
        or not 1 <= x.numel() // inputs <= MOST_ROWS
        or weight.stride(-1) != 1
    ):
        return NotImplemented
    rows = x.reshape(-1, inputs)
    as_operator = torch.compiler.is_compiling() or _needs_gradient(x, weight, bias)
    return _run("linear", as_operator, rows, weight, bias).view(*x.shape[:-1], weight.shape[0])


def _attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, mask: Tensor | None,
    window: int | None, lengths: Tensor | None, soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    size = q.shape[-1]
    if (
        q.shape[2] != 1
        or mask is not None
        or q.dtype not in _HALF
        or not _serves(q, k, v, *(x for x in (lengths, sinks) if x is not None))
        or (sinks is not None and not sinks.is_contiguous())
        or not q.dtype == k.dtype == v.dtype
        or (lengths is not None and (lengths.dtype not in _INTEGERS or not lengths.is_contiguous()))
        or size not in _SIZES
        or v.shape[-1] != size
        or not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        or _needs_gradient(q, k, v, sinks)
    ):
        return NotImplemented
    factor = size**-0.5 if scale is None else scale
    as_operator = torch.compiler.is_compiling()
    return _run("attention", as_operator, q, k, v, factor, window, lengths, soft_cap, sinks)


def _cache_write(cache: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    if (
        not _serves_eagerly(cache, new, positions)
        or positions.dtype not in _INTEGERS
        or 0 in cache.stride()
        or not (cache.stride(-1) == 1 and new.stride(-1) == 1)
        or _needs_gradient(cache, new)
    ):
        return NotImplemented
    return _kernel("cache_write")(cache, new, positions)


def _embedding(weight: Tensor, ids: Tensor) -> Tensor:
    if (
        not _serves_eagerly(weight, ids)
        or ids.dtype not in _INTEGERS
        or weight.stride(1) != 1
        or not ids.is_contiguous()
        or _needs_gradient(weight)
    ):
        return NotImplemented
    return _kernel("embedding")(weight, ids)


def _draw_token(
    logits: Tensor, numbers: Tensor, seeds: Tensor, place: Any, greedy: bool, top_p: bool,
    min_p: bool, constants: tuple[Any, ...],
) -> Tensor:  # fmt: skip
    if (
        not _serves_eagerly(logits, numbers, seeds, place)
        or logits.ndim != 2
        or not logits.numel()
        or logits.stride(1) != 1
        or numbers.dtype != torch.float32
        or not seeds.dtype == place.dtype == torch.int32
        or not (seeds.is_contiguous() and place.is_contiguous() and numbers.is_contiguous())
    ):
        return NotImplemented
    return _kernel("draw_token")(logits, numbers, seeds, place, greedy, top_p, min_p, constants)


def _decoder_layer(x: Tensor, *arguments: Any) -> Any:
    from anydevice._engines.torch.triton.decoder_layer import decoder_layer, fits

    return _whole_layer(decoder_layer, fits, x, *arguments)


def _prompt_layer(x: Tensor, *others: Any) -> Any:
    from anydevice._engines.torch.triton.prompt_layer import fits, prompt_layer

    *arguments, only = others if len(others) == LAYER_ARGUMENTS else (*others, None)
    if only is not None and not (_serves(x, only) and only.dtype == others[0].dtype):
        return NotImplemented
    layer = partial(prompt_layer, only=only)
    return _whole_layer(layer, partial(fits, only=only), x, *arguments)


def _quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    from anydevice._engines.torch.triton import quantized

    if (
        x.dtype not in _HALF
        or not _serves_eagerly(x, *weight.arrays.values(), *(() if bias is None else (bias,)))
        or _needs_gradient(x, bias)
        or not x.numel()
        or not quantized.serves(weight)
        or (bias is not None and not bias.is_contiguous())
    ):
        return NotImplemented
    outputs, inputs = weight.shape
    rows = x.reshape(-1, inputs).contiguous()
    if len(rows) <= MOST_NORMED_ROWS:
        y = quantized.product("op", rows, weight, bias=bias, terms=2)
    elif torch.version.cuda is not None:  # products of 16-bit numbers that give float32
        y = quantized.product_of_many(rows, weight, bias)
    else:
        return NotImplemented
    return y.view(*x.shape[:-1], outputs)


def _quantized_embedding(like: Tensor, table: QuantizedWeight, ids: Tensor) -> Tensor:
    from anydevice._engines.torch.triton import quantized

    if (
        not _serves_eagerly(like, ids, *table.arrays.values())
        or ids.dtype not in _INTEGERS
        or not (ids.is_contiguous() and ids.numel())
        or not quantized.serves(table)
    ):
        return NotImplemented
    return quantized.dequantized_rows(table, ids, like.dtype)


def _tensors(weight: Any) -> list[Any]:
    """Return the tensors of a weight, which may be quantized and in parts."""
    if isinstance(weight, QuantizedWeight):
        return list(weight.arrays.values())
    return [x for part in weight for x in _tensors(part)] if type(weight) is tuple else [weight]


def _serves_quantized(weights: Iterable[Any], gated: Any = None) -> bool:
    """Whether the kernels take the quantized ones among these weights."""
    several = [weight for weight in weights if not isinstance(weight, Tensor)]
    if not several:
        return True
    from anydevice._engines.torch.triton import quantized

    return all(quantized.serves(weight, weight is gated) for weight in several)


def _whole_layer(
    layer: Callable[..., Tensor], fits: Callable[..., bool], x: Tensor, positions: Tensor,
    keys: Tensor, values: Tensor, *arguments: Any,
) -> Any:  # fmt: skip
    from anydevice._engines.torch.triton.decode_attention import LARGEST_SIZE, Rotation
    from anydevice._engines.torch.triton.decoder_layer import LayerWeights

    weights, config = LayerWeights(*arguments[:-1]), arguments[-1]
    given = [weight for weight in weights if weight is not None]
    present = [weight for weight in given if isinstance(weight, Tensor)]
    if (
        x.dtype not in _HALF
        or not _serves_eagerly(x, positions, keys, values, *_tensors(tuple(given)))
        or not _serves_quantized(given, weights.gate_up)
        or positions.dtype not in _INTEGERS
        or depends_on_length(dict(config.scaling))
        or _needs_gradient(x, keys, values, *present)
        or x.ndim != 3
        or config.size > LARGEST_SIZE
        or keys.shape != values.shape
        or positions.shape != x.shape[:1]
        or not positions.is_contiguous()
        or any(y.dtype != x.dtype or not y.is_contiguous() for y in (x, keys, values, *present))
        or not fits(x, keys, config)
    ):
        return NotImplemented
    rotation = Rotation()
    if config.rotated:
        steps = _frequencies(config.rotated, config.theta, config.scaling, x.device)
        rotation = Rotation(*steps)
    return layer(x, positions, keys, values, weights, config, rotation), keys, values


def _final_logits(x: Tensor, norm: Tensor, head: Any, eps: float, exact: bool = True) -> Tensor:
    plain = [head] if isinstance(head, Tensor) else []
    if (
        x.dtype not in _HALF
        or not _serves_eagerly(x, norm, *_tensors(head))
        or not _serves_quantized([head])
        or not (x.ndim == 2 and 1 <= x.shape[0] <= MOST_NORMED_ROWS)
        or any(y.dtype != x.dtype or not y.is_contiguous() for y in (x, norm, *plain))
        or _needs_gradient(x, norm, *plain)
    ):
        return NotImplemented
    return _kernel("final_logits")("head", x, head, norm=norm, eps=eps, exact=exact)


def _serves(x: Tensor, *others: Any) -> bool:
    """Whether these are plain tensors on one GPU, and the first of a dtype that kernels take."""
    if not _READY or x.device.type != _PLACE or x.dtype not in _NAMES:
        return False
    if any(other.device != x.device for other in others):
        return False
    if torch.compiler.is_compiling():
        return True
    return all(is_plain(one) and one.layout == torch.strided for one in (x, *others))


def _serves_eagerly(x: Tensor, *others: Any) -> bool:
    return not torch.compiler.is_compiling() and _serves(x, *others)


def _has_rows(x: Tensor) -> bool:
    """Whether a tensor is a matrix of contiguous rows when all axes but the last are one."""
    if x.is_contiguous():
        return True
    try:
        return bool(x.ndim > 1 and x.view(-1, x.shape[-1]).stride(1) == 1)
    except RuntimeError:
        return False


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


@cache
def _frequencies(
    size: int, theta: float, scaling: tuple[tuple[str, Any], ...], device: torch.device
) -> tuple[Tensor, float]:
    """Return the angle of each pair for one position, and the factor of cosine and sine."""
    frequency, factor = frequencies(size, float(theta), dict(scaling) if scaling else None)
    with torch.inference_mode(False):  # it is kept, and a gradient may need it later
        return torch.tensor(frequency, dtype=torch.float32, device=device), float(factor)


UNTRUSTED_KERNELS: Mapping[str, Callable[..., Any]] = {
    "attention": _attention,
    "cache_write": _cache_write,
    "decoder_layer": _decoder_layer,
    "draw_token": _draw_token,
    "embedding": _embedding,
    "final_logits": _final_logits,
    "linear": _linear,
    "prompt_layer": _prompt_layer,
    "quantized_embedding": _quantized_embedding,
    "quantized_linear": _quantized_linear,
    "rmsnorm": _rmsnorm,
    "rope": _rope,
    "softmax": _softmax,
    "swiglu": _swiglu,
}
"""The kernels, trusted or not, for their verification."""


def _run_trusted(name: str, x: Tensor, *arguments: Any) -> Any:
    device = f"{_GPU}:{x.device.index or 0}"  # as anydevice names it; PyTorch calls both CUDA
    if x.device.type != _PLACE or not is_trusted(name, _NAMES.get(x.dtype, ""), device):
        return NotImplemented
    if name == "linear" and arguments[0].numel() < LEAST_WEIGHT:
        return NotImplemented
    return UNTRUSTED_KERNELS[name](x, *arguments)


KERNELS: Mapping[str, Callable[..., Any]] = {
    name: partial(_run_trusted, name) for name in UNTRUSTED_KERNELS
}
"""The kernels that may be used: those that `_engines/trust.py` has."""


def warm_up(device: str, dtypes: Iterable[str] = ("bfloat16",)) -> tuple[str, ...]:
    """Compile the kernels of ops for the widths of usual models, ahead of their first use.

    Returns the names of the compiled kernels: none without Triton, or for a device that is no
    NVIDIA or AMD GPU. PyTorch and Triton raise their own errors for a missing device or a kernel
    that cannot be compiled.

    >>> warm_up("meta")
    ()
    """
    made: dict[str, None] = {}
    for dtype in dtypes:
        new = partial(torch.ones, dtype=getattr(torch, dtype), device=device)
        for name, arguments in _usual(new, torch.ones(1, dtype=torch.int32, device=device)):
            if UNTRUSTED_KERNELS[name](*arguments) is not NotImplemented:
                made[name] = None
    return tuple(made)


def _usual(new: Callable[..., Tensor], one: Any) -> Iterable[tuple[str, tuple[Any, ...]]]:
    """Yield small calls that need the same machine code as usual models."""
    for width in (2048, 4096, 8192):
        yield "rmsnorm", (new(1, width), new(width), 1e-6)
        yield "embedding", (new(8, width), one)
        for rows in (1, 2):
            yield "linear", (new(rows, width), new(64, width), None)
    for width in (32000, 32768, 128256):
        yield "softmax", (new(2, width), -1)
    yield "swiglu", (new(1, 8192), new(1, 8192))
    for size in (64, 128):
        yield "rope", (new(1, 32, 1, size), one, 10000.0, False, None)
        keys = new(1, 8, 4096, size)
        yield "attention", (new(1, 32, 1, size), keys, keys, True, None, None, None, one)
        yield "cache_write", (keys, new(1, 8, 64, size), one.repeat(64))
