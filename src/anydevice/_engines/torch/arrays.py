"""The PyTorch engine: CUDA, ROCm (as "cuda"), Metal (as "mps"), Intel's GPUs and the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES, DType
from anydevice._core.engine import Absent, Engine, Storage
from anydevice._engines.base import BaseEngine
from anydevice._engines.host import known_dtype, lacking, narrowed, plain, private
from anydevice._machine.engines.registry import BUILT_IN

_LACKS = BUILT_IN["torch"].lacks
_GPU = "rocm" if torch.version.hip else "cuda"
_TYPES = {"cpu": "cpu", _GPU: "cuda", "metal": "mps", "xpu": "xpu"}
_BACKENDS = {kind: backend for backend, kind in _TYPES.items()}
MODULES: dict[str, Any] = {"cuda": torch.cuda, "xpu": torch.xpu}
"""PyTorch's modules for cards, which have the same names: streams, memory and random numbers."""
_WAIT: dict[str, Callable[[torch.device], None]] = {
    "cpu": lambda device: None,
    "cuda": torch.cuda.synchronize,
    "mps": lambda device: torch.mps.synchronize(),
    "xpu": torch.xpu.synchronize,
}
_FINISH = _WAIT | {
    kind: lambda device: MODULES[device.type].current_stream(device).synchronize()
    for kind in MODULES
}
_NO_DATA = Absent(
    "a tensor on the meta device has a shape and no data",
    instead="make memory for its module with module.to_empty(device=…) and load its weights into "
    "it, or make the module on a device that has data",
)
_DOUBLE = ("float64", "complex128")

NATIVE: dict[DType, torch.dtype] = {
    row: getattr(torch, row.name)
    for row in DTYPES.values()
    if not row.packed and isinstance(getattr(torch, row.name, None), torch.dtype)
}
KNOWN = {theirs: row for row, theirs in NATIVE.items()}
"""The dtypes of PyTorch by ours, and ours by those of PyTorch."""
_BY_NUMPY = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64} | {
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}
"""The dtypes that PyTorch and NumPy share; the others pass as integers of the same size."""
_AS_BITS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}
_natives: dict[Device, torch.device] = {}
_idle_streams: dict[torch.device, Any] = {}


class TorchEngine(BaseEngine):
    """Tensors of PyTorch."""

    name = "torch"
    has_views = True
    dlpack = None
    from_dlpack = staticmethod(torch.from_dlpack)

    def devices(self) -> tuple[Device, ...]:
        cards = tuple(Device(_GPU, index) for index in range(torch.cuda.device_count()))
        metal = (Device("metal"),) if torch.backends.mps.is_available() else ()
        intel = (Device("xpu", index) for index in range(torch.xpu.device_count()))
        return (*cards, *metal, *intel, Device("cpu"))

    def native(self, device: Device) -> torch.device:
        known = _natives.get(device)
        if known is None:
            if device not in self.devices():
                raise self.not_seen(device)
            kind = _TYPES[device.backend]
            known = torch.device(kind, device.index) if kind in MODULES else torch.device(kind)
            _natives[device] = known
        return known

    def owns(self, x: object) -> bool:
        return isinstance(x, Tensor)

    def is_traced(self, x: Tensor) -> bool:
        """Whether the tensor is meta, fake, or wrapped by a transformation of `torch.func`."""
        fake = isinstance(x, FakeTensor)
        return x.is_meta or fake or torch._C._functorch.is_functorch_wrapped_tensor(x)

    def is_meta(self, x: Tensor) -> bool:
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
        return x.is_meta and not isinstance(x, FakeTensor) and not wrapped

    def devices_of(self, x: Tensor) -> tuple[Device, ...]:
        """Return the tensor's device; none for a meta tensor."""
        return _places(x.device)

    def dtype_of(self, x: Tensor) -> DType:
        return KNOWN.get(x.dtype) or known_dtype(x.dtype)

    def storage(self, x: Tensor) -> Storage | None:
        if not self._has_memory(x):
            return None
        whole = x.untyped_storage()
        if not whole.nbytes():
            return None
        item = x.element_size()
        strides = tuple(step * item for step in x.stride())
        offset = x.storage_offset() * item
        return Storage(whole.data_ptr(), whole.nbytes(), offset, strides, tuple(x.shape))

    def address(self, x: Tensor) -> int | None:
        # On Metal, what PyTorch calls a pointer is the handle of a buffer.
        if x.device.type == "mps" or not self._has_memory(x) or not x.is_contiguous():
            return None
        pointer: int = x.data_ptr()
        return pointer

    def view(
        self, x: Tensor, dtype: DType, offset: int, strides: tuple[int, ...], shape: tuple[int, ...]
    ) -> Tensor:
        steps = tuple(step // dtype.itemsize for step in strides)
        made = torch.empty(0, dtype=NATIVE[dtype], device=x.device)
        return made.set_(x.untyped_storage(), offset // dtype.itemsize, shape, steps)

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> Tensor:
        target = self.native(device)
        if dtype not in NATIVE:
            raise lacking("PyTorch", dtype)
        module = MODULES.get(target.type)
        try:
            if module is None:
                return torch.empty(shape, dtype=NATIVE[dtype], device=target)
        except TypeError as error:  # Metal has fewer dtypes than the CPU
            raise lacking(f"PyTorch on {device}", dtype) from error
        # PyTorch reuses memory freed on a stream for that stream, before the work there has ended.
        # For a stream without work, it waits for the streams that were recorded.
        if target not in _idle_streams:
            _idle_streams[target] = module.Stream(target)
        with module.stream(_idle_streams[target]):
            made = torch.empty(shape, dtype=NATIVE[dtype], device=target)
        made.record_stream(module.current_stream(target))
        return made

    def place(self, x: Any, device: Device, *, narrow: bool = False) -> Tensor:
        target = self.native(device)
        host = narrowed(
            x,
            _lacking_dtypes(target),
            why=_LACKS["float64"].what,
            remedy="keep it on the CPU",
            narrow=narrow,
        )
        theirs = NATIVE.get(known_dtype(host.dtype))
        if theirs is None:
            raise lacking("PyTorch", known_dtype(host.dtype))
        # The CPU tensor keeps the memory, so that it must be its own; PyTorch warns of memory
        # that must not be written, even where it only reads.
        mine = target.type == "cpu" or not host.flags.writeable
        host = private(host) if mine else plain(host)
        if theirs in _BY_NUMPY:
            tensor = torch.from_numpy(host)
        else:
            tensor = torch.from_numpy(host.view(_AS_BITS[host.itemsize])).view(theirs)
        try:
            return tensor.to(target)
        except TypeError as error:  # Metal has fewer dtypes than the CPU
            raise lacking(f"PyTorch on {device}", known_dtype(host.dtype)) from error

    def to_host(self, x: Tensor) -> Any:
        traced = self.is_traced(x)
        if traced and self.is_meta(x):
            raise _NO_DATA.error()
        if x.layout != torch.strided or traced or x.dtype not in KNOWN:
            raise Absent(
                f"a tensor of {x.dtype} with {x.layout} on {x.device} cannot be read as it is",
                instead="make it a plain one first, with to_dense() or dequantize()",
            ).error()
        with torch._C._DisableFuncTorch():  # inside of torch.func, no tensor would have memory
            tensor = x.detach().to("cpu", copy=True).resolve_conj().resolve_neg()
            if x.dtype in _BY_NUMPY:
                return tensor.numpy()
            row = self.dtype_of(x)
            as_bits = getattr(torch, _AS_BITS[row.itemsize])
            return tensor.view(as_bits).numpy().view(row.numpy())

    def export(self, x: Tensor) -> Tensor:
        return x.detach().resolve_conj().resolve_neg()

    def move(self, x: Tensor, device: Device) -> Tensor:
        if x.is_meta:
            raise _NO_DATA.error()
        return x.to(self.native(device))

    def separate(self, stacked: Tensor) -> list[Tensor]:
        if stacked.is_cuda and stacked.ndim > 1 and stacked.numel():
            count, first = stacked.shape[:2]
            row = stacked[0]
            rows = [torch.empty_like(row) for _ in range(count)]
            torch.split_with_sizes_copy(stacked.flatten(0, 1), [first] * count, out=rows)
            return rows
        return [row.clone() for row in stacked]

    def finish(self, arrays: Any) -> None:
        several = arrays if isinstance(arrays, list | tuple) else (arrays,)
        for device in {x.device for x in several}:
            _FINISH.get(device.type, lambda device: None)(device)

    def receive(self, arrays: Sequence[Tensor]) -> None:
        for x in arrays:
            if x.device.type in MODULES:
                x.record_stream(MODULES[x.device.type].current_stream(x.device))

    def synchronize(self, device: Device) -> None:
        target = self.native(device)
        _WAIT[target.type](target)

    def default_scope(self, device: Device) -> AbstractContextManager[object]:
        scope: AbstractContextManager[object] = self.native(device)
        return scope

    def inference_scope(self, device: Device) -> AbstractContextManager[object]:
        """Keep no steps for gradients; on the CPU, this mode saves 4 % of a small model's token."""
        mode = torch.inference_mode if device.backend == "cpu" else torch.no_grad
        scope: AbstractContextManager[object] = mode()
        return scope

    @contextmanager
    def serial_scope(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _has_memory(self, x: Tensor) -> bool:
        """Whether its elements lie in memory just as they are, at known distances."""
        plain_layout = x.layout == torch.strided and not x.is_conj() and not x.is_neg()
        of_tensors = hasattr(x, "__tensor_flatten__")
        return plain_layout and not of_tensors and not self.is_traced(x)


@cache
def _lacking_dtypes(native: torch.device) -> tuple[str, ...]:
    """Return the dtypes that a device cannot compute in: Metal, and Arc cards of the A series."""
    if native.type == "xpu" and torch.xpu.get_device_properties(native).has_fp64:
        return ()
    return _DOUBLE if native.type in ("mps", "xpu") else ()


@cache
def _places(native: torch.device) -> tuple[Device, ...]:
    backend = _BACKENDS.get(native.type)
    return (Device(backend, native.index or 0),) if backend else ()


ENGINE: Engine = TorchEngine()
