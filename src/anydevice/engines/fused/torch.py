"""What PyTorch itself has for whole ops, and where our kernels for CUDA come first.

`engines/fused/torch_cuda.py`, where it is there, has a table `KERNELS` from an op's name to a
function of the same arguments. Each is asked first where the op's first array is on CUDA or ROCm,
and hands over by returning `NotImplemented`; so does each function here, to the op's definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, as everyone calls it

from anydevice.core.late import load
from anydevice.engines.fused.torch_attention import attention
from anydevice.engines.fused.torch_updates import total_size, update_adam, update_sgd
from anydevice.engines.primitives.torch import PRIMITIVES

Function = Callable[..., Any]
Pair = tuple[int, int]
_WIDE = (torch.float32, torch.float64)
_MEAN = 1  # as PyTorch numbers the ways to reduce; left out, it reduces nothing
_mse_loss: Function = torch._C._nn.mse_loss  # what is left of PyTorch's for two of one shape
_FOR_GPUS = torch.version.cuda is not None or torch.version.hip is not None
# Products of 16-bit numbers that give float32; releases of PyTorch before 2.8 have none.
_WIDE_PRODUCTS = torch.version.cuda is not None and "dtype" in torch.ops.aten.mm.overloads()


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    if not _FOR_GPUS or not x.is_cuda or x.dtype in _WIDE or x.numel() != x.shape[-1]:
        return F.linear(x, weight, bias)
    row = x.reshape(1, x.shape[-1])
    followed = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if followed or not _WIDE_PRODUCTS or torch.compiler.is_compiling():
        # For a vector, not a matrix of one row, the library adds up 16 bits in 16 bits.
        return F.linear(row, weight, bias).reshape(*x.shape[:-1], len(weight))
    # For one row of an odd width it also rounds the product before the bias comes to it.
    wide = torch.mm(row, weight.t(), out_dtype=torch.float32)
    result = (wide if bias is None else wide + bias).to(x.dtype)
    return result.reshape(*x.shape[:-1], len(weight))


def _gelu(x: Any, approximate: bool) -> Any:
    return F.gelu(x, approximate="tanh") if approximate else F.gelu(x)


def _swiglu(gate: Any, up: Any) -> Any:
    if gate.dtype in _WIDE:
        return F.silu(gate) * up
    return (F.silu(gate.float()) * up).to(gate.dtype)


def _softmax(x: Any, axis: int) -> Any:
    if x.dtype in _WIDE or x.is_cuda:
        return torch.softmax(x, axis)
    # On the CPU, PyTorch would round numbers of 16 bits on the way.
    return torch.softmax(x, axis, dtype=torch.float32).to(x.dtype)


def _log_softmax(x: Any, axis: int) -> Any:
    if x.dtype in _WIDE or x.is_cuda:
        return torch.log_softmax(x, axis)
    return torch.log_softmax(x, axis, dtype=torch.float32).to(x.dtype)


def _mean(x: Any, axis: Any, keepdims: bool) -> Any:
    if not x.dtype.is_floating_point or axis == ():  # to PyTorch, no axes are all of them
        return NotImplemented
    return torch.mean(x, axis[0] if len(axis) == 1 else axis, keepdims)


def _checked_rmsnorm() -> Function | None:
    """What `torch.rms_norm` ends at on a CPU, without the way there; `None` where it is not so."""
    found: Function | None = getattr(torch, "_fused_rms_norm", None)
    try:
        with torch.no_grad():
            x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
            normal, _ = found(x, weight.shape, weight, 0.5)  # type: ignore[misc]
            right = torch.equal(normal, torch.rms_norm(x, weight.shape, weight, 0.5))
    except Exception:  # other releases of PyTorch lack it, or have it for GPUs alone
        return None
    return found if right else None


_straight_rmsnorm = _checked_rmsnorm()


def _rmsnorm(x: Any, weight: Any, eps: float) -> Any:
    if x.dtype != weight.dtype:  # PyTorch would warn that it is slow
        return NotImplemented
    if _FOR_GPUS and x.is_cuda:
        # There it takes a whole row for no numbers where one element is infinite.
        return NotImplemented
    if _straight_rmsnorm is None or not x.is_cpu or torch.compiler.is_compiling():
        return torch.rms_norm(x, weight.shape, weight, eps)
    return _straight_rmsnorm(x, weight.shape, weight, eps)[0]


def _layernorm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    kind = x.dtype
    if (weight is not None and weight.dtype != kind) or (bias is not None and bias.dtype != kind):
        return NotImplemented
    return torch.layer_norm(x, x.shape[-1:] if weight is None else weight.shape, weight, bias, eps)


def _cross_entropy(logits: Any, targets: Any) -> Any:
    if not logits.shape[-1]:
        return NotImplemented
    kind = logits.dtype if logits.dtype in _WIDE else torch.float32
    logarithms = torch.log_softmax(logits, -1, dtype=kind)
    picked = PRIMITIVES.take_along_axis(logarithms, targets[..., None], -1)
    return -picked.mean()


def _mean_squared_error(x: Any, y: Any) -> Any:
    if x.dtype in _WIDE:
        return _mse_loss(x, y, _MEAN)
    return _mse_loss(x.float(), y.float(), _MEAN)


def _conv2d(x: Any, weight: Any, bias: Any, stride: Pair, padding: Pair) -> Any:
    # cuDNN keeps only 10 bits of float32, unless told otherwise for the whole process, and rounds
    # numbers of 16 bits on the way.
    if (x.is_cuda and x.dtype != torch.float64) or not (x.numel() and weight.numel()):
        return NotImplemented
    if stride == (1, 1) and padding == (0, 0):  # PyTorch's own, which it need not read then
        return torch.conv2d(x, weight, bias)
    return torch.conv2d(x, weight, bias, stride, padding)


def _max_pool2d(x: Any, size: Pair, stride: Pair | None) -> Any:
    return F.max_pool2d(x, size, stride) if x.dtype.is_floating_point else NotImplemented


def _avg_pool2d(x: Any, size: Pair, stride: Pair | None) -> Any:
    if not x.dtype.is_floating_point:
        return NotImplemented
    if stride == size and size[0] == size[1]:  # one number is read sooner than two pairs
        return F.avg_pool2d(x, size[0])
    return F.avg_pool2d(x, size, stride)


_OWN: dict[str, Function] = {
    "linear": _linear,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": _gelu,
    "swiglu": _swiglu,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "mean": _mean,
    "rmsnorm": _rmsnorm,
    "layernorm": _layernorm,
    "attention": attention,
    "cross_entropy": _cross_entropy,
    "mean_squared_error": _mean_squared_error,
    "conv2d": _conv2d,
    "max_pool2d": _max_pool2d,
    "avg_pool2d": _avg_pool2d,
    "update_sgd": update_sgd,
    "update_adam": update_adam,
    "total_size": total_size,
}


def _nothing_of_our_own(*arguments: Any) -> Any:
    return NotImplemented


def kernels_first(
    own: Mapping[str, Function], kernels: Mapping[str, Function]
) -> dict[str, Function]:
    """The functions, each behind the kernel of its name, which is asked for arrays on CUDA.

    >>> both = kernels_first({"silu": lambda x: "own"}, {"silu": lambda x: "kernel"})
    >>> both["silu"](torch.ones(1))
    'own'
    """
    merged = dict(own)
    for name, kernel in kernels.items():
        merged[name] = _kernel_first(kernel, own.get(name, _nothing_of_our_own))
    return merged


def _kernel_first(kernel: Function, own: Function) -> Function:
    def either(*arguments: Any) -> Any:
        first = arguments[0]
        if (first if isinstance(first, torch.Tensor) else first[0]).is_cuda:
            result = kernel(*arguments)
            if result is not NotImplemented:
                return result
        return own(*arguments)

    return either


def _kernels() -> Mapping[str, Function]:
    try:
        found: Mapping[str, Function] = load("anydevice.engines.fused.torch_cuda:KERNELS")
    except ModuleNotFoundError:  # Triton comes with PyTorch's builds for GPUs only
        return {}
    return found


FUSED: Mapping[str, Function] = kernels_first(_OWN, _kernels()) if _FOR_GPUS else _OWN
