"""PyTorch's own functions for whole ops, behind our kernels on CUDA and ROCm.

Each function takes the arguments of its op, and returns `NotImplemented` to hand over to the op's
definition. For arrays on CUDA or ROCm, `torch/triton/fused.py` is asked first.

Updates of optimizers go over lists of one dtype in one pass, without a gradient. They write into
copies, or into donated arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, as everyone calls it
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from anydevice._core.engine import donation
from anydevice._core.quantized import QuantizedWeight
from anydevice._core.rope_scaling import depends_on_length, freeze, frequencies, thaw
from anydevice._engines.base import visible_keys
from anydevice._engines.quantized import dequantizer, linear
from anydevice._engines.torch.captured import captured_step
from anydevice._engines.torch.decoder_layer import decoder_layer, lay_out_matrices
from anydevice._engines.torch.experts import experts
from anydevice._engines.torch.primitives import PRIMITIVES, is_eager_on_cpu, sortable

Arrays = Sequence[Any]
Function = Callable[..., Any]
Pair = tuple[int, int]

PREFER: Mapping[tuple[int, int], tuple[SDPBackend, ...]] = {
    (9, 0): (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ),
}
"""By compute capability, the order in which PyTorch's kernels are tried for many queries.

On an H200, causal and of 16-bit numbers, cuDNN's reaches 527 TFLOP/s with 4,096 tokens and 630
with 16,384, flash attention's 266 and 335. Cards that are not named keep PyTorch's own order.
"""

_orders: dict[Any, tuple[SDPBackend, ...]] = {}
_WIDE = (torch.float32, torch.float64)
_MEAN = 1  # PyTorch's number for this reduction; by default it reduces nothing
_mse_loss: Function = (
    torch._C._nn.mse_loss
)  # the kernel below PyTorch's own, for two arrays of one shape
_FOR_GPUS = torch.version.cuda is not None or torch.version.hip is not None
_WIDE_PRODUCTS = torch.version.cuda is not None
"""Whether products of 16-bit numbers may give float32."""


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not _FOR_GPUS or not x.is_cuda or x.dtype in _WIDE or not x.numel():
        if bias is None or x.dtype in _WIDE:
            return F.linear(x, weight, bias)
        # Only the bias of a matrix is added before the product is rounded, if it is contiguous.
        product = F.linear(x.reshape(-1, x.shape[-1]), weight, bias.contiguous())
        return product.reshape(*x.shape[:-1], len(weight))
    count, width = weight.shape
    is_row = x.numel() == width
    # With a bias and a size that is no multiple of eight, the library may round the product before
    # the bias comes to it: up to half of the elements are off then.
    rounds_twice = bias is not None and (width % 8 or count % 8)
    followed = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    alone = _WIDE_PRODUCTS and not followed and not torch.compiler.is_compiling()
    if alone and (is_row or rounds_twice):
        wide = torch.mm(x.reshape(-1, width), weight.t(), out_dtype=torch.float32)
        result = (wide if bias is None else wide + bias).to(x.dtype)
        return result.reshape(*x.shape[:-1], count)
    if is_row:  # a vector, unlike a matrix of one row, would be summed in 16 bits
        return F.linear(x.reshape(1, width), weight, bias).reshape(*x.shape[:-1], count)
    return F.linear(x, weight, bias)


def _gelu(x: Tensor, approximate: bool) -> Tensor:
    if approximate:
        return F.gelu(x, approximate="tanh")
    if _GELU_OVERFLOWS and x.is_cpu:
        return torch.where(x > _ALL, x, F.gelu(x.clamp(max=_ALL)))
    return F.gelu(x)


_ALL = 64.0  # above it, gelu(x) is x in every dtype
# With the instructions of AVX-512, oneDNN makes NaN of infinity, and infinity of large numbers.
_GELU_OVERFLOWS = not torch.equal(
    F.gelu(torch.full((16,), torch.inf)), torch.full((16,), torch.inf)
)


def _compute_wide(function: Function) -> Function:
    """Return the function of arrays, computed in 32 bits or more and rounded once."""

    def run(x: Tensor, *others: Any) -> Tensor:
        if x.dtype in _WIDE:
            return function(x, *others)
        return function(x.float(), *others).to(x.dtype)

    return run


def _softmax(function: Function, x: Tensor, axis: int) -> Tensor:
    if x.dtype in _WIDE or x.is_cuda:
        return function(x, axis)
    # On the CPU, PyTorch would round intermediate results to 16 bits.
    return function(x, axis, dtype=torch.float32).to(x.dtype)


def _mean(x: Tensor, axis: tuple[int, ...], keepdims: bool) -> Tensor:
    if not x.dtype.is_floating_point or axis == ():  # to PyTorch, no axes are all of them
        return NotImplemented
    return torch.mean(x, axis[0] if len(axis) == 1 else axis, keepdims)


def _spread(
    function: Function, x: Tensor, axis: tuple[int, ...], keepdims: bool, correction: float
) -> Tensor:
    count = math.prod([x.shape[one] for one in axis])
    # PyTorch warns if the divisor is 0.
    if not x.dtype.is_floating_point or axis == () or count <= correction:
        return NotImplemented
    return function(x, axis, correction=correction, keepdim=keepdims)


def _sort(x: Tensor, axis: int, descending: bool) -> Any:
    return torch.sort(sortable(x), dim=axis, descending=descending, stable=True)


def _prod(x: Tensor, axis: tuple[int, ...], keepdims: bool) -> Tensor:
    if len(axis) != 1 or (x.dtype not in _WIDE and x.dtype.is_floating_point):
        return NotImplemented
    return torch.prod(x, axis[0], keepdims, dtype=x.dtype)


def _cumulative_sum(x: Tensor, axis: int) -> Tensor:
    kind = torch.float32 if x.dtype.is_floating_point and x.dtype not in _WIDE else x.dtype
    return torch.cumsum(x, axis, dtype=kind).to(x.dtype)


def _truths(function: Function, x: Tensor, axis: tuple[int, ...], keepdims: bool) -> Tensor:
    return function(x.to(torch.bool), axis, keepdims) if axis else NotImplemented


_log_of_sum = _compute_wide(torch.logsumexp)


def _clip(x: Tensor, low: Any, high: Any) -> Tensor:
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return NotImplemented
    return x if low is high is None else torch.clamp(x, low, high)


def _checked_rmsnorm() -> Function | None:
    """Return the kernel behind `torch.rms_norm` on a CPU; `None` if this release has another."""
    kernel: Function | None = getattr(torch, "_fused_rms_norm", None)
    try:
        with torch.no_grad():
            x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
            normal, _ = kernel(x, weight.shape, weight, 0.5)  # type: ignore[misc]
            right = torch.equal(normal, torch.rms_norm(x, weight.shape, weight, 0.5))
    except Exception:  # other releases of PyTorch lack it, or have it for GPUs alone
        return None
    return kernel if right else None


_straight_rmsnorm = _checked_rmsnorm()


def _rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # PyTorch warns of two dtypes; on a GPU, one infinite element makes a whole row NaN.
    if x.dtype != weight.dtype or (_FOR_GPUS and x.is_cuda):
        return NotImplemented
    if _straight_rmsnorm is None or not x.is_cpu or torch.compiler.is_compiling():
        return torch.rms_norm(x, weight.shape, weight, eps)
    return _straight_rmsnorm(x, weight.shape, weight, eps)[0]


def _layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    kind = x.dtype
    if (weight is not None and weight.dtype != kind) or (bias is not None and bias.dtype != kind):
        return NotImplemented
    return torch.layer_norm(x, x.shape[-1:] if weight is None else weight.shape, weight, bias, eps)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    if not logits.shape[-1]:
        return NotImplemented
    kind = logits.dtype if logits.dtype in _WIDE else torch.float32
    logarithms = torch.log_softmax(logits, -1, dtype=kind)
    picked = PRIMITIVES.take_along_axis(logarithms, targets[..., None], -1)
    return -picked.mean()


def _batch_norm_training(x: Tensor, *arrays: Any) -> Any:
    *statistics, eps, momentum = arrays
    weight, bias, mean, variance = _as_wide(statistics)
    # PyTorch writes the new state into what it is given.
    mean, variance = mean.detach().clone(), variance.detach().clone()
    y = torch.batch_norm(x, weight, bias, mean, variance, True, momentum, eps, _FOR_GPUS)
    return y, mean, variance


def _as_wide(arrays: Arrays) -> list[Tensor]:
    """Return the arrays in 32 bits or more."""
    return [x if x.dtype in _WIDE else x.float() for x in arrays]


def _conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    # cuDNN keeps only 10 bits of float32 unless a setting of the whole process forbids it, and
    # rounds intermediate results to 16 bits.
    if (x.is_cuda and x.dtype != torch.float64) or not (x.numel() and weight.numel()):
        return NotImplemented
    if stride == (1, 1) and padding == (0, 0):  # the defaults: parsing pairs takes longer
        return torch.conv2d(x, weight, bias)
    return torch.conv2d(x, weight, bias, stride, padding)


def _conv_transpose2d(x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    short = x.dtype == torch.float16  # on a CPU, PyTorch sums it in 16 bits
    if short or (x.is_cuda and x.dtype != torch.float64) or not (x.numel() and weight.numel()):
        return NotImplemented  # as for `conv2d`
    return torch.conv_transpose2d(x, weight, *options)


def _avg_pool2d(x: Tensor, size: Pair, stride: Pair | None) -> Tensor:
    if not x.dtype.is_floating_point:
        return NotImplemented
    if stride == size and size[0] == size[1]:  # parsing pairs takes longer
        return F.avg_pool2d(x, size[0])
    return F.avg_pool2d(x, size, stride)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, mask: Tensor | None,
    window: int | None, lengths: Tensor | None, soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `ops.attention`; `NotImplemented` without elements, for soft caps and for sinks."""
    q_shape, k_shape = q.shape, k.shape
    if 0 in q_shape or 0 in k_shape or soft_cap is not None or sinks is not None:
        return NotImplemented
    if k_shape[3] != v.shape[3] and (not v.shape[3] or q.dtype not in _WIDE):
        return NotImplemented  # PyTorch would round intermediate results to 16 bits
    queries, keys = q_shape[2], k_shape[2]
    if lengths is not None and mask is None and is_eager_on_cpu(q, k, v, lengths):
        k, v, window, lengths = _valid(queries, k, v, window, lengths)
        keys = k.shape[2]
        if not keys:
            return NotImplemented
    if lengths is None and mask is None and window is None:
        if queries == 1 or not causal:
            if scale is None and q_shape[1] == k_shape[1] and not q.is_cuda:
                return scaled_dot_product_attention(q, k, v)
            return _of_groups(q, k, v, None, scale)
        if queries == keys:
            return causal_attention(q, k, v, scale)
    visible = _visible_keys(q, keys, causal, mask, window, lengths)
    some = visible.any(-1, keepdim=True)
    # A query without visible keys would give NaN: it sees all, and its result is replaced.
    shown = visible | ~some
    # Hidden keys and values may be NaN, but rarely are: on a CPU, the result shows it.
    hopeful = is_eager_on_cpu(*(x for x in (q, k, v, mask, lengths) if x is not None))
    if not hopeful and (mask is not None or lengths is not None):
        k, v = _zero_hidden_keys(k, v, visible)
    result = torch.where(some, _of_groups(q, k, v, shown, scale), 0.0)
    if hopeful and not torch.isfinite(result.detach().sum()):
        return NotImplemented
    return result


def _valid(
    queries: int, k: Tensor, v: Tensor, window: int | None, lengths: Tensor
) -> tuple[Tensor, Tensor, int | None, Tensor | None]:
    """Cut keys and values to those that any query may see; drop limits that have no effect."""
    keys = k.shape[2]
    valid = [min(max(length, 0), keys) for length in lengths.tolist()]
    first, most = 0, max(valid)
    unequal = None if min(valid) == most else lengths
    if unequal is None and window is not None:
        first = max(0, most - queries + 1 - window)
        window = None if queries == 1 else window
    return k[:, :, first:most], v[:, :, first:most], window, unequal


def _zero_hidden_keys(k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Zero the keys and values that no query attends to: a weight of 0 times NaN is NaN."""
    some = visible.any(2)
    if some.shape[1] > 1:
        some = some.reshape(some.shape[0], k.shape[1], -1, some.shape[2]).any(2)
    return torch.where(some[..., None], k, 0.0), torch.where(some[..., None], v, 0.0)


def _rope(x: Tensor, positions: Tensor, *options: Any) -> Tensor:
    theta, interleaved, scaling, *_ = options
    if torch.compiler.is_compiling() or depends_on_length(scaling) or not x.numel():
        return NotImplemented
    size = x.shape[3]
    steps, factor = _steps(size, theta, freeze(scaling), x.device)
    angles = positions[..., None, :, None] * steps
    y = x if x.dtype in _WIDE else x.float()
    cosine, sine = angles.cos(), angles.sin()
    if factor != 1:
        cosine, sine = cosine * factor, sine * factor
    if y.dtype == torch.float64:
        cosine, sine = cosine.double(), sine.double()
    first, second = (y[..., ::2], y[..., 1::2]) if interleaved else y.chunk(2, -1)
    rotated = (
        torch.addcmul(first * cosine, second, sine, value=-1),
        torch.addcmul(second * cosine, first, sine),
    )
    result = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return result.to(x.dtype)


@lru_cache(maxsize=64)
def _steps(size: int, theta: float, scaling: Any, device: torch.device) -> tuple[Tensor, float]:
    """Return the angle of each pair for one position, and the factor of cosine and sine."""
    frequency, factor = frequencies(size, theta, thaw(scaling))
    with torch.inference_mode(False):  # tensors of that mode cannot take part in gradients
        return torch.tensor(frequency, dtype=torch.float32, device=device), factor


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Compute causal attention for as many queries as keys."""
    if scale is not None and scale < 0:  # PyTorch's CPU kernel gives NaN, as it masks before
        q, scale = -q, -scale
    with _kernel_order(q):
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def _of_groups(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None) -> Tensor:
    """Attend with the heads of one key head as rows of one matrix: any kernel serves, no copy."""
    batch, heads, queries, size = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    groups = heads // kv_heads
    if groups > 1:
        q = q.reshape(batch, kv_heads, groups * queries, size)
        if visible is not None:
            visible = visible.expand(
                visible.shape[0], heads if visible.shape[1] > 1 else groups, queries, keys
            )
            visible = visible.reshape(visible.shape[0], -1, groups * queries, keys)
    with _kernel_order(q):
        result = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    return result.reshape(batch, heads, queries, v.shape[3])


def _visible_keys(
    q: Tensor, keys: int, causal: bool, mask: Tensor | None, window: int | None,
    lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the keys that a query may attend to, on four axes; the first two may have size 1."""
    valid = None if lengths is None else lengths.to(torch.int64).clamp(0, keys)[:, None, None, None]
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]
    arange = partial(torch.arange, device=q.device)
    visible = visible_keys(arange, q.shape[2], keys, valid, causal, window, mask)
    shape = (1,) * (4 - visible.ndim) + tuple(visible.shape)
    return visible.reshape(shape).expand(shape[0], shape[1], q.shape[2], keys)


def _kernel_order(q: Tensor) -> AbstractContextManager[object]:
    """Return the order of PyTorch's kernels for this card; for one query, PyTorch's own order."""
    if not q.is_cuda or q.shape[2] == 1:
        return nullcontext()
    order = _orders.get(q.device)
    if order is None:
        order = _orders[q.device] = PREFER.get(torch.cuda.get_device_capability(q.device), ())
    return sdpa_kernel(list(order), set_priority=True) if order else nullcontext()


def update_sgd(
    parameters: Arrays, gradients: Arrays, velocities: Arrays | None,
    rate: float, momentum: float, decay: float, nesterov: bool,
) -> Any:  # fmt: skip
    """Compute the op of that name for float tensors of one dtype, without a gradient."""
    lists = [parameters, gradients] if velocities is None else [parameters, gradients, velocities]
    idle = velocities is not None and not momentum  # PyTorch would not keep the velocities
    # With numbers of 16 bits, PyTorch's kernel for the CPU takes a wrong step.
    wrong = parameters[0].element_size() < 4
    if idle or wrong or not _alike(lists) or isinstance(rate, Tensor):
        return NotImplemented
    moved, *velocities_copy = (_copies(arrays) for arrays in (parameters, *lists[2:]))
    torch._fused_sgd_(
        moved, _laid_out_like(moved, gradients), velocities_copy[0] if velocities_copy else [],
        lr=rate, momentum=momentum if velocities_copy else 0.0, dampening=0.0, weight_decay=decay,
        nesterov=nesterov, maximize=False, is_first_step=False, found_inf=donation.skip,
    )  # fmt: skip
    return moved, velocities_copy[0] if velocities_copy else None


def update_adam(
    parameters: Arrays, gradients: Arrays, means: Arrays, squares: Arrays, step: Tensor,
    rate: float, beta1: float, beta2: float, eps: float, decay: float, decoupled: bool,
) -> Any:  # fmt: skip
    """Compute the op of that name for float tensors of one dtype, without a gradient."""
    if not _alike([parameters, gradients, means, squares]) or isinstance(rate, Tensor):
        return NotImplemented
    count = torch.as_tensor(step, dtype=torch.float32, device=parameters[0].device)
    moved, new_means, new_squares = _copies(parameters), _copies(means), _copies(squares)
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(
        moved, _laid_out_like(moved, gradients), new_means, new_squares, [], [count] * len(moved),
        lr=rate, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps,
        amsgrad=False, maximize=False, found_inf=donation.skip,
    )  # fmt: skip
    return moved, new_means, new_squares


def total_size(arrays: Arrays) -> Any:
    """Return a number that is finite if all tensors of a list are, by few kernels."""
    if not _alike([arrays]):
        return NotImplemented
    if arrays[0].device.type == "cuda":
        return torch.stack(torch._foreach_norm(list(arrays), 1)).sum(dtype=torch.float32)
    return torch.stack([array.sum(dtype=torch.float32) for array in arrays]).sum()


def _laid_out_like(moved: list[Tensor], gradients: Arrays) -> list[Tensor]:
    """Return the gradients with the strides of the copies: CUDA's kernels refuse others."""
    return [
        gradient
        if gradient.stride() == copy.stride()
        else gradient.clone(memory_format=torch.contiguous_format)
        for copy, gradient in zip(moved, gradients, strict=True)
    ]


def _alike(lists: Sequence[Arrays]) -> bool:
    """Whether one kernel serves all lists; a compiler makes a kernel of the definition."""
    if torch.compiler.is_compiling():
        return False
    first = lists[0][0]
    kind, device = first.dtype, first.device
    return (
        kind.is_floating_point
        and device.type in ("cpu", "cuda", "mps", "xpu")
        and all(x.dtype == kind and x.device == device for arrays in lists for x in arrays)
        and not (torch.is_grad_enabled() and any(x.requires_grad for y in lists for x in y))
    )


def _copies(arrays: Arrays) -> list[Tensor]:
    """Return tensors that the kernels may write: copies, or donated ones."""
    if donation.allowed and all(x.is_contiguous() for x in arrays):
        return list(arrays)
    return [x.detach().clone(memory_format=torch.contiguous_format) for x in arrays]


# Recurrent layers. PyTorch's compiler would unroll the steps, and take minutes for a hundred. So to
# it, a whole sequence is one op, whose gradient computes the sequence again.


def _recurrent(kind: str) -> Function:
    """Return the layer over (batch, time, inputs): it gives all outputs, or the last one."""

    def run(*arguments: Any) -> Any:
        *arrays, last = arguments
        own = _whole_sequence if torch.compiler.is_compiling() else _sequence
        y = own(kind, *arrays)
        return y[:, -1] if last else y

    return run


def _sequence(kind: str, x: Tensor, *weights: Tensor) -> Tensor:
    if x.is_cuda and x.dtype != torch.float64:  # cuDNN keeps only 10 bits of float32
        return _step_by_step(kind, x, *weights)
    arrays, states = _initial_states(x, *weights)
    layer, state = (torch.lstm, states) if kind == "lstm" else (torch.gru, states[0])
    y = layer(
        arrays[0], state, arrays[1:], len(arrays) > 3, 1, 0.0, torch.is_grad_enabled(), False, True
    )
    return y[0].to(x.dtype)


def _step_by_step(kind: str, x: Tensor, *weights: Tensor) -> Tensor:
    arrays, states = _initial_states(x, *weights)
    states = [state[0] for state in states]
    outputs = []
    for one in arrays[0].unbind(1):
        if kind == "lstm":
            states = list(torch.lstm_cell(one, states, *arrays[1:]))
        else:
            states = [torch.gru_cell(one, states[0], *arrays[1:])]
        outputs.append(states[0])
    return torch.stack(outputs, 1).to(x.dtype)


def _initial_states(x: Tensor, *weights: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the given arrays in 32 bits or more, and two states of zeros."""
    arrays = [array for array in (x, *weights) if array is not None]
    if x.dtype not in _WIDE:
        arrays = [array.float() for array in arrays]
    return arrays, [arrays[0].new_zeros(1, len(x), weights[1].shape[1])] * 2


_ARGUMENTS = "str kind, Tensor x, Tensor weight, Tensor recurrent, Tensor? bias, Tensor? own_bias"


def _sequence_gradients(slope: Tensor, kind: str, *arrays: Tensor) -> list[Tensor]:
    """Return the gradients by the given arrays."""

    def outputs(*given: Tensor) -> Any:  # oneDNN's layer has no gradient below that of the op
        return _step_by_step(kind, *given, *arrays[len(given) :])

    _, gradients = torch.func.vjp(outputs, *[x for x in arrays if x is not None])
    return [x.contiguous() for x in gradients(slope)]


def _keep_inputs(ctx: torch.autograd.function.FunctionCtx, inputs: Tensor, output: Tensor) -> None:
    ctx.kind = inputs[0]
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: torch.autograd.function.FunctionCtx, slope: Tensor) -> Any:
    arrays = ctx.saved_tensors
    gradients = iter(_whole_gradients(slope, ctx.kind, *arrays))
    return None, *[x if x is None else next(gradients) for x in arrays]


_whole_sequence: Any = torch.library.custom_op(
    "anydevice::sequence", lambda *arguments: _sequence(*arguments).contiguous(),
    mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor",
)  # fmt: skip
_whole_gradients: Any = torch.library.custom_op(
    "anydevice::sequence_gradients", _sequence_gradients,
    mutates_args=(), schema=f"(Tensor slope, {_ARGUMENTS}) -> Tensor[]",
)  # fmt: skip
_whole_sequence.register_fake(
    lambda kind, x, weight, recurrent, *biases: x.new_empty(*x.shape[:2], recurrent.shape[1])
)
_whole_gradients.register_fake(
    lambda slope, kind, *arrays: [x.new_empty(x.shape) for x in arrays if x is not None]
)
_whole_sequence.register_autograd(_backward, setup_context=_keep_inputs)


def _quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Compute on the CPU by NumPy, in PyTorch's own memory: PyTorch takes twice as long."""
    tensors: dict[str, Any] = dict(weight.arrays)
    given = [x] if bias is None else [x, bias]
    followed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    if x.dtype != torch.float32 or followed or not is_eager_on_cpu(*given, *tensors.values()):
        return NotImplemented
    for name, tensor in tensors.items():
        tensors[name] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    values = [tensor.detach().numpy() for tensor in given]
    product = linear(values[0], weight.with_arrays(tensors), *values[1:])
    return torch.from_numpy(product)


@lru_cache(maxsize=16)
def _levels(table: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a table as a tensor; once, because CUDA graphs take no copies from the host."""
    return torch.tensor(table, dtype=torch.float32, device=device)


_OWN: dict[str, Function] = {
    "linear": _linear,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": _gelu,
    "swiglu": _compute_wide(lambda gate, up: F.silu(gate) * up),
    "softmax": partial(_softmax, torch.softmax),
    "log_softmax": partial(_softmax, torch.log_softmax),
    "mean": _mean,
    "var": partial(_spread, torch.var),
    "std": partial(_spread, torch.std),
    "sort": lambda x, *how: _sort(x, *how)[0].to(x.dtype),
    "argsort": lambda x, *how: _sort(x, *how)[1].to(torch.int32),
    "argmin": lambda x, axis: torch.argmin(sortable(x), axis).to(torch.int32),
    "prod": _prod,
    "any": partial(_truths, torch.any),
    "all": partial(_truths, torch.all),
    "logsumexp": lambda x, axis, keepdims: (
        _log_of_sum(x, axis, keepdims) if axis and x.numel() else NotImplemented
    ),
    "cumulative_sum": _cumulative_sum,
    "clip": _clip,
    "isfinite": torch.isfinite,
    "round": torch.round,
    "pad": lambda x, widths, value: F.pad(
        x, [size for pair in widths[::-1] for size in pair], value=value
    ),
    "stack": torch.stack,
    "flip": torch.flip,
    "leaky_relu": F.leaky_relu,
    "rmsnorm": _rmsnorm,
    "layernorm": _layernorm,
    "batch_norm": lambda x, *others: torch.batch_norm(
        x, *_as_wide(others[:-1]), False, 0.0, others[-1], _FOR_GPUS
    ),
    "batch_norm_training": _batch_norm_training,
    "attention": attention,
    "experts": experts,
    "rope": _rope,
    "cross_entropy": _cross_entropy,
    "mean_squared_error": lambda x, y: _mse_loss(*_as_wide([x, y]), _MEAN),
    "conv2d": _conv2d,
    "grouped_conv2d": lambda x, weight, bias, stride, padding, groups: (
        NotImplemented if x.is_cuda else torch.conv2d(x, weight, bias, stride, padding, 1, groups)
    ),
    "conv_transpose2d": _conv_transpose2d,
    "gru": _recurrent("gru"),
    "lstm": _recurrent("lstm"),
    "max_pool2d": lambda x, size, stride: (
        F.max_pool2d(x, size, stride) if x.dtype.is_floating_point else NotImplemented
    ),
    "avg_pool2d": _avg_pool2d,
    "update_sgd": update_sgd,
    "update_adam": update_adam,
    "total_size": total_size,
    "captured_step": captured_step,
    "decoder_layer": decoder_layer,
    "lay_out_matrices": lay_out_matrices,
    "dequantize": dequantizer(
        torch.stack, Tensor.float, lambda table, codes: _levels(table, codes.device)[codes.int()]
    ),
    "quantized_linear": _quantized_linear,
}


def kernels_first(
    own: Mapping[str, Function], kernels: Mapping[str, Function]
) -> dict[str, Function]:
    """Return the functions, each after the kernel of its name, which is tried on CUDA.

    >>> both = kernels_first({"silu": lambda x: "own"}, {"silu": lambda x: "kernel"})
    >>> both["silu"](torch.ones(1))
    'own'
    """
    behind = {name: _kernel_first(kernel, own.get(name)) for name, kernel in kernels.items()}
    return {**own, **behind}


def _kernel_first(kernel: Function, own: Function | None) -> Function:
    def either(*arguments: Any) -> Tensor:
        first = arguments[0]
        if (first if isinstance(first, Tensor) else first[0]).is_cuda:
            result = kernel(*arguments)
            if result is not NotImplemented:
                return result
        return NotImplemented if own is None else own(*arguments)

    return either


FUSED: Mapping[str, Function] = _OWN
if _FOR_GPUS:
    from anydevice._engines.torch.triton.fused import KERNELS

    FUSED = kernels_first(_OWN, KERNELS)
