"""The CUDA driver calls that staged copies need, in the context that all libraries share.

PyTorch, JAX and CuPy all use the device's primary context, so memory that one of them allocated
can be filled by a copy that is started here. Nothing is loaded before the first copy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache

from anydevice.errors import AnyDeviceError, OutOfMemoryError

_OUT_OF_MEMORY = 2
_PORTABLE = 1
_NON_BLOCKING = 1
_NO_TIMING = 2
_MEMORY_TYPE = 2
_HOST = 1


class CudaDriver:
    """One device's primary context; every method may be called from any thread."""

    def __init__(self, index: int) -> None:
        self._cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        self._files: dict[int, tuple[int, mmap.mmap]] = {}
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def enter(self) -> None:
        """Make the context that of the calling thread; needed once in each."""
        self._call("cuCtxSetCurrent", self._context)

    def pinned(self, size: int) -> int:
        """Return the address of newly allocated host memory that the device can read by itself."""
        if hasattr(os, "memfd_create"):
            return self._pinned_file(size)
        address = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), _PORTABLE)
        assert address.value is not None
        return address.value

    def _pinned_file(self, size: int) -> int:
        file = os.memfd_create("anydevice")
        try:
            os.ftruncate(file, size)
            memory = mmap.mmap(file, size)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            start, count = ctypes.c_void_p(address), ctypes.c_size_t(size)
            self._call("cuMemHostRegister_v2", start, count, _PORTABLE)
        except BaseException:
            os.close(file)
            raise
        self._files[address] = (file, memory)
        return address

    def file_of(self, address: int) -> int | None:
        """Return the descriptor of the file that this pinned memory maps, or `None`."""
        known = self._files.get(address)
        return known[0] if known else None

    def is_pinned(self, address: int, size: int) -> bool:
        """Whether the device can read that much host memory by itself."""
        kind = ctypes.c_uint()
        for end in (address, address + size - 1):
            query = (ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(end))
            if self._cuda.cuPointerGetAttribute(*query) or kind.value != _HOST:
                return False
        return True

    def pin(self, address: int, size: int) -> bool:
        """Let the device read memory of the program; `False` if refused, as for pinned memory."""
        start, count = ctypes.c_void_p(address), ctypes.c_size_t(size)
        return bool(self._cuda.cuMemHostRegister_v2(start, count, _PORTABLE) == 0)

    def unpin(self, address: int) -> None:
        self._cuda.cuMemHostUnregister(ctypes.c_void_p(address))

    def give_back(self, address: int) -> None:
        file = self._files.pop(address, None)
        if file is None:
            self._call("cuMemFreeHost", ctypes.c_void_p(address))
            return
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))
        os.close(file[0])  # the memory goes with the last reference to its map

    def stream(self) -> ctypes.c_void_p:
        """Return a queue of copies that waits for no other."""
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return stream

    def event(self) -> ctypes.c_void_p:
        """Return a mark that can be put into a stream."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), _NO_TIMING)
        return event

    def destroy(self, stream: ctypes.c_void_p, *events: ctypes.c_void_p) -> None:
        for event in events:
            self._call("cuEventDestroy_v2", event)
        self._call("cuStreamDestroy_v2", stream)

    def copy_in(self, target: int, source: int, size: int, stream: ctypes.c_void_p) -> None:
        """Start a copy from pinned memory to the device."""
        to, start, count = ctypes.c_uint64(target), ctypes.c_void_p(source), ctypes.c_size_t(size)
        self._call("cuMemcpyHtoDAsync_v2", to, start, count, stream)

    def copy_out(self, target: int, source: int, size: int, stream: ctypes.c_void_p) -> None:
        """Start a copy from the device to pinned memory."""
        to, start, count = ctypes.c_void_p(target), ctypes.c_uint64(source), ctypes.c_size_t(size)
        self._call("cuMemcpyDtoHAsync_v2", to, start, count, stream)

    def mark(self, event: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        """Put the mark behind everything in the stream."""
        self._call("cuEventRecord", event, stream)

    def wait(self, event: ctypes.c_void_p) -> None:
        self._call("cuEventSynchronize", event)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code == _OUT_OF_MEMORY:
            raise OutOfMemoryError(
                f"{name} found no memory; call anydevice.release() and try again"
            )
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            message = (text.value or b"unknown").decode("utf-8", "replace")
            raise AnyDeviceError(f"the CUDA driver answered {name} with error {code}: {message}")


@cache
def driver_of(index: int) -> CudaDriver:
    """Return the driver of `cuda:index`, opened on the first copy to it."""
    return CudaDriver(index)
