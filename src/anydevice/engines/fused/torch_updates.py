"""Optimizers' updates by PyTorch's kernels over whole lists: one pass, whatever the lists' length.

They write into copies, because an update leaves what it is given alone, unless the caller says in a
`consuming` block that it may be overwritten. They have no gradient of their own and work on one
element type, so that whatever else is asked for goes to the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anydevice.core.consuming import under_way

Arrays = Sequence[Any]
_SERVED = ("cpu", "cuda", "mps")


def update_sgd(
    parameters: Arrays,
    gradients: Arrays,
    velocities: Arrays | None,
    rate: float,
    momentum: float,
    decay: float,
    nesterov: bool,
) -> Any:
    """The op of that name, for float tensors of one type that no gradient passes through."""
    lists = [parameters, gradients] if velocities is None else [parameters, gradients, velocities]
    idle = velocities is not None and not momentum  # PyTorch would not keep the velocities
    # With numbers of 16 bits, PyTorch's kernel for the CPU takes a wrong step.
    wrong = parameters[0].element_size() < 4
    if idle or wrong or not _alike(lists) or isinstance(rate, torch.Tensor):
        return NotImplemented
    moved, *kept = (_copies(arrays) for arrays in (parameters, *lists[2:]))
    torch._fused_sgd_(
        moved,
        _laid_out_like(moved, gradients),
        kept[0] if kept else [],
        weight_decay=decay,
        momentum=momentum if kept else 0.0,
        lr=rate,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
        found_inf=under_way.skip,
    )
    return moved, kept[0] if kept else None


def update_adam(
    parameters: Arrays,
    gradients: Arrays,
    means: Arrays,
    squares: Arrays,
    step: Any,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    decoupled: bool,
) -> Any:
    """The op of that name, for float tensors of one type that no gradient passes through."""
    if not _alike([parameters, gradients, means, squares]) or isinstance(rate, torch.Tensor):
        return NotImplemented
    device = parameters[0].device
    count = torch.as_tensor(step, dtype=torch.float32, device=device)
    moved, new_means, new_squares = _copies(parameters), _copies(means), _copies(squares)
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(
        moved,
        _laid_out_like(moved, gradients),
        new_means,
        new_squares,
        [],
        [count] * len(moved),
        lr=rate,
        beta1=beta1,
        beta2=beta2,
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=under_way.skip,
    )
    return moved, new_means, new_squares


def total_size(arrays: Arrays) -> Any:
    """A number that is finite where all of a list are: by few kernels where each start counts."""
    if not _alike([arrays]):
        return NotImplemented
    if arrays[0].device.type == "cuda":
        return torch.stack(torch._foreach_norm(list(arrays), 1)).sum(dtype=torch.float32)
    return torch.stack([array.sum(dtype=torch.float32) for array in arrays]).sum()


def _laid_out_like(moved: list[torch.Tensor], gradients: Arrays) -> list[torch.Tensor]:
    """The gradients with the strides of the copies: CUDA's kernels refuse others."""
    return [
        gradient
        if gradient.stride() == copy.stride()
        else gradient.clone(memory_format=torch.contiguous_format)
        for copy, gradient in zip(moved, gradients, strict=True)
    ]


def _alike(lists: Sequence[Arrays]) -> bool:
    """Whether one kernel serves all of these now; a compiler makes its own of the definition."""
    if torch.compiler.is_compiling():
        return False
    first = lists[0][0]
    kind, device = first.dtype, first.device
    return (
        kind.is_floating_point
        and device.type in _SERVED
        and all(x.dtype == kind and x.device == device for arrays in lists for x in arrays)
        and not (torch.is_grad_enabled() and any(x.requires_grad for y in lists for x in y))
    )


def _copies(arrays: Arrays) -> list[torch.Tensor]:
    """What the kernels write into: copies, or the tensors themselves where they may be consumed."""
    if under_way.allowed and all(x.is_contiguous() for x in arrays):
        return list(arrays)
    return [x.detach().clone(memory_format=torch.contiguous_format) for x in arrays]
