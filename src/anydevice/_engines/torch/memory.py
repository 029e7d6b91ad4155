"""Memory of PyTorch: what its caching allocators hold of a GPU; the CPU's it does not count."""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from anydevice._core.device import Device
from anydevice._core.engine import Memory, MemoryUse
from anydevice._engines.base import BaseMemory
from anydevice._engines.torch.arrays import ENGINE, MODULES

_OUT_OF_MEMORY: type[BaseException] = getattr(
    torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError
)
_SAID = re.compile(
    r"\bDefaultCPUAllocator: (?:can't allocate|not enough) memory"  # the second one on Windows
    r"|^std::bad_alloc$"  # of the host, for anything but a tensor
    r"|^Storage size calculation overflowed"  # more than any machine could have
    r"|\b(?:CUDA|HIP|XPU|MPS backend)(?: driver)?(?: error:)? out of memory\b"
    r"|\bUR_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY\b"  # of SYCL's runtime
    r"|^Triton Error \[\w+\]: out of memory"
    r"|^Invalid buffer size: [\d.]+ "  # Metal, for more at once than it gives out
    r"|\b[A-Z]+(?:_STATUS)?_ALLOC_FAILED\b|\bmiopenStatusAllocFailed\b",  # of their libraries
    re.MULTILINE,
)
"""PyTorch's messages in a plain `RuntimeError`, which other code raises too."""
_limits: dict[Device, int] = {}
_shares_before: dict[Device, float] = {}


class TorchMemory(BaseMemory):
    """Memory of PyTorch's allocators, by device."""

    def use(self, device: Device) -> MemoryUse | None:
        """Return the bytes of a GPU's allocator, without starting it; `None` for the CPU."""
        target = ENGINE.native(device)
        limit, module = _limits.get(device), MODULES.get(target.type)
        if module:
            if not module.is_initialized():
                return MemoryUse(0, 0, 0, limit)
            return MemoryUse(
                in_use=module.memory_allocated(target),
                reserved=module.memory_reserved(target),
                peak=module.max_memory_allocated(target),
                limit=limit,
            )
        if target.type == "mps":
            in_use = torch.mps.current_allocated_memory()
            return MemoryUse(in_use, max(in_use, torch.mps.driver_allocated_memory()), limit=limit)
        return None

    def reset_peak(self, device: Device) -> None:
        target = ENGINE.native(device)
        module = MODULES.get(target.type)
        if module and module.is_initialized():
            module.reset_peak_memory_stats(target)

    def set_limit(self, device: Device, limit: int | None) -> str | None:
        """Limit PyTorch on a GPU once it starts it; `None` restores the share from before."""
        target = ENGINE.native(device)
        if target.type == "cpu":
            if limit is None:
                return None
            return (
                "PyTorch does not count its memory on the CPU, so a limit has no effect there; "
                "use the system's own: ulimit -v, or a cgroup"
            )
        if limit is None:
            if _limits.pop(device, None) is None:
                return None
        else:
            _limits[device] = limit
        if target.type == "mps":
            # Without a limit, PyTorch's default share of Metal's recommendation; above 2 it raises.
            share = float(os.environ.get("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "1.7"))
            if limit is not None:
                share = min(2.0, limit / torch.mps.recommended_max_memory())
            torch.mps.set_per_process_memory_fraction(share)
        else:
            # Now if the GPU has started, else when it starts, with the limit of that moment.
            MODULES[target.type]._lazy_call(lambda: _limit_card(device, target))
        return None

    def release(self, device: Device) -> None:
        target = ENGINE.native(device)
        module = MODULES.get(target.type)
        if module and module.is_initialized():
            with module.device(target):
                module.empty_cache()
        elif target.type == "mps":
            torch.mps.empty_cache()

    def ran_out(self, error: BaseException) -> bool:
        if isinstance(error, _OUT_OF_MEMORY) or type(error) is MemoryError:
            return True
        its_own = type(error).__module__.partition(".")[0] == "torch"
        if not (isinstance(error, RuntimeError) and its_own) and type(error) is not RuntimeError:
            return False
        message = str(error)
        return _SAID.search(message) is not None or (its_own and "out of memory" in message.lower())


def _limit_card(device: Device, target: Any) -> None:
    limit, module = _limits.get(device), MODULES[target.type]
    if limit is None:
        share = _shares_before.pop(device, None)
    else:
        if device not in _shares_before:  # old releases do not tell the share
            ask = getattr(module, "get_per_process_memory_fraction", lambda target: 1.0)
            _shares_before[device] = float(ask(target))
        share = min(1.0, limit / module.get_device_properties(target).total_memory)
    if share is not None:  # a limit that was lifted before the GPU started has changed nothing
        module.set_per_process_memory_fraction(share, target)


MEMORY: Memory = TorchMemory(ENGINE)
