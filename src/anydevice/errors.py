"""The errors and warnings that anydevice raises.

    AnyDeviceError
    ├─ DeviceNotFoundError     no usable device matches; carries every finding
    ├─ DeviceMismatchError     leaves are on different devices; carries two paths
    ├─ UnsupportedError        an engine does not support this; carries the Absent
    ├─ OutOfMemoryError        also a MemoryError; asked, free, total, what to try
    ├─ TransferError           carries the leaf's path
    ├─ VerificationError       carries op or layer, shapes, largest error, where
    └─ ConfigurationError      a file, variable or argument; carries where it came from

A message says what happened, where, and what to do next. `code` is the cause for programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anydevice._core.device import Device
    from anydevice._core.engine import Absent
    from anydevice._core.finding import Finding, Reason


class AnyDeviceError(Exception):
    """The base class of all errors that anydevice raises.

    `reasons` are its causes, if known. `code` is the code of the first reason, or that of this
    class.
    """

    reasons: tuple[Reason, ...] = ()
    _code = "failed"

    def __str__(self) -> str:
        from anydevice._core.text import printable

        # A message may name a file or repeat what a driver said.
        return printable(super().__str__(), lines=True)

    @property
    def code(self) -> str:
        """The cause as a short code for programs; `docs/troubleshooting.md` lists all codes."""
        return self.reasons[0].code if self.reasons else self._code


class AnyDeviceWarning(UserWarning):
    """A warning with the `reasons` behind it."""

    def __init__(self, message: str, reasons: Iterable[Reason] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class DeviceNotFoundError(AnyDeviceError):
    """No usable device matches the request; `findings` has the reasons, by backend."""

    _code = "no_such_device"

    def __init__(
        self, message: str, findings: Sequence[Finding] = (), reasons: Iterable[Reason] = ()
    ) -> None:
        super().__init__(message)
        self.findings = tuple(findings)
        self.reasons = tuple(reasons)


class DeviceMismatchError(AnyDeviceError):
    """Leaves of a tree, or arguments of a call, are on different devices; `paths` names two."""

    _code = "device_mismatch"

    def __init__(self, message: str, paths: tuple[str, str] = ("", "")) -> None:
        super().__init__(message)
        self.paths = paths


class UnsupportedError(AnyDeviceError):
    """An engine does not support this; `absent` says what is missing and what to use instead."""

    _code = "unsupported"

    def __init__(self, message: str, absent: Absent | None = None) -> None:
        super().__init__(message)
        self.absent = absent
        self.reasons = (absent.reason,) if absent else ()


class OutOfMemoryError(AnyDeviceError, MemoryError):
    """A device ran out of memory; `asked`, `free` and `total` are bytes, `None` if unknown.

    `device` is the full device, if known. `advice` lists what to try, most promising first.
    """

    _code = "out_of_memory"

    def __init__(
        self,
        message: str,
        *,
        asked: int | None = None,
        free: int | None = None,
        total: int | None = None,
        device: Device | None = None,
        advice: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.advice = tuple(advice)
        self.device = device
        self.asked = asked
        self.free = free
        self.total = total


class TransferError(AnyDeviceError):
    """A leaf could not be moved; `path` says which one."""

    _code = "transfer_failed"

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class VerificationError(AnyDeviceError):
    """A result is wrong; `where` is the op or layer, `largest_error` the largest error.

    `shapes` are those of the operands.
    """

    _code = "wrong_answer"

    def __init__(
        self,
        message: str,
        *,
        where: str = "",
        shapes: Sequence[tuple[int, ...]] = (),
        largest_error: float | None = None,
    ) -> None:
        super().__init__(message)
        self.shapes = tuple(shapes)
        self.where = where
        self.largest_error = largest_error


class ConfigurationError(AnyDeviceError):
    """A file, variable or argument is wrong; `source` says which, with the line of a file."""

    _code = "bad_setting"

    def __init__(self, message: str, source: str = "") -> None:
        super().__init__(message)
        self.source = source
