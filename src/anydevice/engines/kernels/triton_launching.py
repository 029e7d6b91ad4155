"""How our Triton kernels are started, on the device that their tensors are on.

Where the device and Triton can, a kernel may begin while the one before it ends: it then waits in
the kernel, before its first access to memory, for what that one wrote.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

LONGEST_ROW = 65536
"""The most bytes of a row that one program keeps to itself; longer ones are read twice."""


def start(
    kernel: Any, grid: Sequence[int], device: torch.device, *arguments: Any, **options: Any
) -> None:
    """Start `grid` programs of a kernel on the current stream of a device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[tuple(grid)](*arguments, **options)
    else:
        with torch.cuda.device(device):
            kernel[tuple(grid)](*arguments, **options)


def interpreted(kernel: Any) -> bool:
    """Whether a kernel is run by Triton's interpreter, on the CPU, instead of being compiled."""
    return isinstance(kernel, InterpretedFunction)


@cache
def overlapping(device: torch.device) -> dict[str, Any]:
    """The options of a kernel that may begin before the one ahead of it has ended."""
    if (
        device.type != "cuda"
        or torch.version.hip
        or torch.cuda.get_device_capability(device) < (9,)
    ):
        return {"overlap": False}
    options = triton.compiler.compiler.make_backend(
        triton.runtime.driver.active.get_current_target()
    ).parse_options({})
    if not hasattr(options, "launch_pdl"):
        return {"overlap": False}
    return {"overlap": True, "launch_pdl": True}


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs a device can run side by side, if each takes a whole multiprocessor."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
