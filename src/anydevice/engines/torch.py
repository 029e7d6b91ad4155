"""PyTorch: CUDA, ROCm (which it calls CUDA too), Metal (which it calls MPS), and the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import ml_dtypes
import numpy as np
import torch

from anydevice.core.device import Device
from anydevice.core.engine import Engine
from anydevice.engines.registry import BUILT_IN
from anydevice.engines.sight import not_seen

_LACKS = BUILT_IN["torch"].lacks
_GPU = "rocm" if torch.version.hip else "cuda"
_TYPES = {"cpu": "cpu", _GPU: "cuda", "metal": "mps"}
_BACKENDS = {kind: backend for backend, kind in _TYPES.items()}
_WAIT: dict[str, Callable[[torch.device], None]] = {
    "cpu": lambda device: None,
    "cuda": torch.cuda.synchronize,
    "mps": lambda device: torch.mps.synchronize(),
}


class TorchEngine:
    """Tensors of PyTorch."""

    name = "torch"

    def devices(self) -> tuple[Device, ...]:
        cards = tuple(Device(_GPU, index) for index in range(torch.cuda.device_count()))
        metal = (Device("metal"),) if torch.backends.mps.is_available() else ()
        return (*cards, *metal, Device("cpu"))

    def native(self, device: Device) -> torch.device:
        if device not in self.devices():
            raise not_seen("PyTorch", device, self.devices())
        kind = _TYPES[device.backend]
        return torch.device(kind, device.index) if kind == "cuda" else torch.device(kind)

    def owns(self, x: object) -> bool:
        return isinstance(x, torch.Tensor)

    def devices_of(self, x: Any) -> tuple[Device, ...]:
        """Where the tensor lives; nowhere that anydevice knows for a meta tensor."""
        if x.device.type not in _BACKENDS:
            return ()
        return (Device(_BACKENDS[x.device.type], x.device.index or 0),)

    def from_host(self, x: Any, device: Device) -> Any:
        target = self.native(device)
        if device.backend == "metal" and x.dtype == np.float64:
            raise _LACKS["float64"].error()
        # A private copy in C order: PyTorch refuses negative strides and warns of read-only memory.
        private = np.array(x, order="C")
        if private.dtype == ml_dtypes.bfloat16:
            tensor = torch.from_numpy(private.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(private)
        return tensor.to(target)

    def to_host(self, x: Any) -> Any:
        tensor = x.detach().to("cpu", copy=True).resolve_conj().resolve_neg()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def move(self, x: Any, device: Device) -> Any:
        return x.to(self.native(device))

    def matmul(self, a: Any, b: Any) -> Any:
        return torch.matmul(a, b)

    def synchronize(self, device: Device) -> None:
        target = self.native(device)
        _WAIT[target.type](target)

    def default_scope(self, device: Device) -> AbstractContextManager[Any]:
        scope: AbstractContextManager[Any] = self.native(device)
        return scope


ENGINE: Engine = TorchEngine()
