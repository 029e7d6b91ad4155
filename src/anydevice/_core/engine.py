"""The protocol of engines, which wrap array libraries, and `Absent` for unsupported features."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from anydevice._core.finding import Reason
from anydevice._core.record import Record
from anydevice.errors import UnsupportedError

if TYPE_CHECKING:
    from anydevice._core.array import Array, HostArray
    from anydevice._core.device import Device
    from anydevice._core.dtypes import DType
    from anydevice._core.primitives import Autodiff, Compiler, Primitives


class Absent(Record):
    """A feature that an engine lacks, as data: a sentence, the alternative, and a code.

    >>> str(Absent("OpenCL has no autodiff", instead="train on torch or jax", code="no_autodiff"))
    'OpenCL has no autodiff; train on torch or jax'
    """

    what: str
    instead: str
    code: str = "unsupported"

    def __str__(self) -> str:
        return f"{self.what}; {self.instead}"

    @property
    def reason(self) -> Reason:
        """The absent feature as a reason; its fix is the alternative."""
        return Reason(self.code, self.what, self.instead)

    def error(self) -> UnsupportedError:
        return UnsupportedError(str(self), self)

    if not TYPE_CHECKING:  # type checkers must reject every use

        def __getattr__(self, name: str) -> NoReturn:
            """Raise `AbsentError` for every use of the feature."""
            if name.startswith("_") or name in self._fields:
                raise AttributeError(name)
            raise AbsentError(str(self), self)


class AbsentError(UnsupportedError, AttributeError):
    """A feature that an engine lacks was used; an `AttributeError`, so `hasattr` is false."""


class Storage(Record):
    """The memory of an array: its allocation, and the array's place in it.

    `address` and `size` (bytes) describe the allocation; if the library has no pointers, `address`
    is a handle, only good for comparisons. `offset` is the distance in bytes to the array's first
    element, `strides` are bytes. Two arrays on one device with the same `allocation` are views of
    one memory.

    >>> whole, row = Storage(64, 32, 0, (16, 4), (2, 4)), Storage(64, 32, 16, (4,), (4,))
    >>> whole.allocation == row.allocation
    True
    """

    address: int
    size: int
    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def allocation(self) -> tuple[int, int]:
        """The same for all views of one memory."""
        return self.address, self.size


class MemoryUse(Record):
    """The memory of a device that one library uses in this process: bytes, `None` if unknown.

    `in_use` is the memory of arrays, `reserved` all that the library holds, with its cache. `peak`
    is the largest `in_use` since the start or `reset_peak`, `limit` the library's limit, if it has
    one. `preallocated` marks memory that was taken at the start, before any array needed it;
    `reserved` is then larger than the need.

    >>> MemoryUse(in_use=10, reserved=30).reserved
    30
    """

    in_use: int
    reserved: int
    peak: int | None = None
    limit: int | None = None
    preallocated: bool = False


class Memory(Protocol):
    """The memory of one library; a device that it does not see is a `DeviceNotFoundError`."""

    def use(self, device: Device) -> MemoryUse | None:
        """Return the memory that the library holds there now; `None` if it keeps no count."""

    def reset_peak(self, device: Device) -> None:
        """Reset the peak, if the library records one."""

    def set_limit(self, device: Device, limit: int | None) -> str | None:
        """Limit the bytes that the library may hold there from now on; `None` removes the limit.

        An allocation beyond it fails as if the device were full. If the limit has no effect,
        returns a sentence with the cause and the fix.
        """

    def release(self, device: Device) -> None:
        """Give unused memory back to the device."""

    def ran_out(self, error: BaseException) -> bool:
        """Whether the error is the library's out-of-memory error."""

    def asked(self, error: BaseException) -> int | None:
        """Return the bytes of the failed allocation; `None` if the error does not tell."""


class LayerConfig(Record):
    """A decoder layer that an engine may compute in one call, one token of each row.

    Describes a layer except its weights and its cache. Hashable.

    Root-mean-square norms with `eps` stand before attention and the SwiGLU network. `heads` of
    queries share `kv_heads` of keys and values, each of `size` elements. Scores are multiplied by
    `scale`, and additions to the residual stream by `factor`. The first `rotated` elements of each
    head are rotated by `theta` and `scaling`, the items of the mapping that `ops.rope` takes; 0 if
    there is no rotation. With `ring`, the token at position p is in slot p % slots of the cache and
    sees as many tokens as there are slots; otherwise it is in slot p.
    """

    heads: int
    kv_heads: int
    size: int
    eps: float
    scale: float
    rotated: int = 0
    theta: float = 10000.0
    interleaved: bool = False
    scaling: tuple[tuple[str, Any], ...] = ()
    ring: bool = False
    factor: float = 1.0


class Engine(Protocol):
    """One array library, with the same methods for each. Importing the file imports the library.

    The properties are its features; a missing one is an `Absent` that says so. The methods find
    devices and place data. They raise `DeviceNotFoundError` for a device that the library does not
    see, and `UnsupportedError` for a dtype that it does not have.
    """

    name: str

    @property
    def ops(self) -> Primitives:
        """The primitives, in which all other ops are written."""

    @property
    def fused(self) -> Mapping[str, Callable[..., Any]]:
        """Faster versions of ops, by name.

        Each takes all arguments of its op by position, after their shapes were checked. It may
        return `NotImplemented`, before any work, to fall back to the op's definition.
        """

    @property
    def autodiff(self) -> Autodiff | Absent:
        """Gradients."""

    @property
    def compiler(self) -> Compiler | Absent:
        """Faster versions of functions over arrays."""

    @property
    def memory(self) -> Memory:
        """The memory that the library holds on a device, and its limit."""

    @property
    def shares_memory(self) -> bool:
        """Whether all devices of the library share one memory, so that an array is on each."""

    @property
    def has_views(self) -> bool:
        """Whether two arrays can share memory, so that writing to one changes the other."""

    @property
    def dlpack(self) -> Absent | None:
        """Why `adopt` does not work; `None` if it does."""

    def devices(self) -> Sequence[Device]:
        """Return every device that this library itself sees now. Never raises."""

    def native(self, device: Device) -> Any:
        """Return the library's own object for the device: `torch.device`, `jax.Device`, …"""

    def owns(self, x: object) -> bool:
        """Whether `x` is an array of this library."""

    def is_traced(self, x: Any) -> bool:
        """Whether the array has no data of its own: a tracer, a fake or a meta tensor."""

    def is_meta(self, x: Any) -> bool:
        """Whether the array has a shape and a dtype but no data, and is not part of a trace."""

    def devices_of(self, x: Any) -> tuple[Device, ...]:
        """Return the devices of the array: several if it is sharded, none if it is traced."""

    def dtype_of(self, x: Any) -> DType:
        """Return the dtype of the array."""

    def storage(self, x: Any) -> Storage | None:
        """Return the memory of the array; `None` if it is unknown or has no elements."""

    def address(self, x: Any) -> int | None:
        """Return the pointer to the elements; `None` unless they are in C and native order."""

    def view(
        self, x: Any, dtype: DType, offset: int, strides: tuple[int, ...], shape: tuple[int, ...]
    ) -> Array:
        """Return an array in the memory of `x`; `offset` and `strides` are bytes, as in `Storage`.

        Raises `UnsupportedError` if the library has no views.
        """

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> Array:
        """Return a new array in C order on the device, not initialized.

        Its memory may be written from any stream at once: no earlier work uses it, and later work
        of the calling thread need not wait.
        """

    def place(self, x: Any, device: Device, *, narrow: bool = False) -> Array:
        """Return a copy of a NumPy array on the device, bit for bit.

        If the library has no 64-bit dtypes, integers that fit are narrowed to 32 bits, with one
        warning for the process; any other change is refused with `UnsupportedError`. With `narrow`,
        floating-point numbers are rounded to the next smaller dtype without a warning; numbers
        that are too large for it are still refused.
        """

    def to_host(self, x: Any) -> HostArray:
        """Return a copy of the array as NumPy, bit for bit, that belongs to the caller."""

    def adopt(self, x: Any) -> Array:
        """Return another library's array as an array of this library, in the same memory.

        `x` has `__dlpack__` and is on a device that this library sees. Writes to one are seen by
        both. Raises `UnsupportedError` if a copy would be needed.
        """

    def export(self, x: Any) -> Any:
        """Return the array as something that another library's `adopt` takes."""

    def move(self, x: Any, device: Device) -> Array:
        """Return the array on another device of the same library."""

    def separate(self, stacked: Any) -> Sequence[Array]:
        """Return the rows along the first axis, bit for bit, each with memory of its own."""

    def matmul(self, a: Any, b: Any) -> Array:
        """Return the product of two matrices, on their device."""

    def finish(self, arrays: Any) -> None:
        """Wait until the arrays are complete: then any stream may read their memory."""

    def launch(self, arrays: Sequence[Any]) -> None:
        """Start computing arrays of a lazy library; do not wait."""

    def receive(self, arrays: Sequence[Any]) -> None:
        """Record that this stream uses arrays of another thread, lest they be reused early."""

    def synchronize(self, device: Device) -> None:
        """Wait until all work on the device has ended."""

    def default_scope(self, device: Device) -> AbstractContextManager[object]:
        """Return a block in which this device is the library's own default."""

    def inference_scope(self, device: Device) -> AbstractContextManager[object]:
        """Return a block of work on the device without gradients, traces and compilation.

        A library may use faster code in the block. Arrays made in it may be changed only in such a
        block.
        """

    def serial_scope(self) -> AbstractContextManager[object]:
        """Return a block of CPU work in this thread: threads slow down small operations."""


class _Donation(threading.local):
    """Whether an update may write its results into its arguments, and return these."""

    allowed: bool = False
    skip: Array | None = None


donation = _Donation()
"""Whether this thread is in a block of `consuming`, and its `skip` array."""


class consuming:  # noqa: N801 - it is used like a function
    """Let updates in this thread write their results into their arguments, unless `skip` is 1."""

    def __init__(self, skip: Array | None = None) -> None:
        self._skip = skip
        self._before: tuple[bool, Array | None] = (False, None)

    def __enter__(self) -> None:
        self._before = donation.allowed, donation.skip
        donation.allowed, donation.skip = True, self._skip

    def __exit__(self, *_: object) -> None:
        donation.allowed, donation.skip = self._before
