"""What an array library must be able to do to serve anydevice, and how it says what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from anydevice.core.record import Record
from anydevice.errors import UnsupportedError

if TYPE_CHECKING:
    from anydevice.core.device import Device


class Absent(Record):
    """Something an engine cannot do, as data: the sentence, and what to use instead.

    >>> str(Absent("OpenCL has no autodiff", instead="train on torch or jax"))
    'OpenCL has no autodiff; train on torch or jax'
    """

    what: str
    instead: str

    def __str__(self) -> str:
        return f"{self.what}; {self.instead}"

    def error(self) -> UnsupportedError:
        """The error for whoever needs what is absent."""
        return UnsupportedError(str(self), self)


class Engine(Protocol):
    """One array library, the same few methods for each. Importing the file imports the library.

    This is the part that discovery, choosing and the plainest moving need.
    """

    name: str

    def devices(self) -> Sequence[Device]:
        """Every device that this library itself sees now. Never raises."""

    def native(self, device: Device) -> Any:
        """The library's own object for the device: `torch.device`, `jax.Device`, …"""

    def owns(self, x: object) -> bool:
        """Whether `x` is an array of this library."""

    def devices_of(self, x: Any) -> tuple[Device, ...]:
        """Where the array lives; several where it is sharded."""

    def from_host(self, x: Any, device: Device) -> Any:
        """A copy of a NumPy array on the device."""

    def to_host(self, x: Any) -> Any:
        """A copy of the array as NumPy."""

    def move(self, x: Any, device: Device) -> Any:
        """The array on another device of the same library."""

    def matmul(self, a: Any, b: Any) -> Any:
        """The product of two matrices, where they are."""

    def synchronize(self, device: Device) -> None:
        """Wait until everything that was started on the device has ended."""

    def default_scope(self, device: Device) -> AbstractContextManager[Any]:
        """A block in which the library's own default device is this one."""
