"""Every error that anydevice raises on purpose.

    AnyDeviceError
    ├─ DeviceNotFoundError     nothing usable matches; carries every finding
    ├─ DeviceMismatchError     leaves live in several places; carries two paths
    ├─ UnsupportedError        an engine lacks this; carries the Absent
    ├─ OutOfMemoryError        also a MemoryError; asked, free, total, what to try
    ├─ TransferError           carries the leaf's path
    ├─ VerificationError       carries op or layer, shapes, largest error, where
    └─ ConfigurationError      a file, variable or argument; carries where it came from

A message says what happened, where, and what to do next. `code` says the cause to a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anydevice.core.device import Device
    from anydevice.core.engine import Absent
    from anydevice.core.finding import Finding, Reason


class AnyDeviceError(Exception):
    """The root of the tree: catch this to catch everything anydevice raises on purpose.

    `reasons` holds what led to it, where that is known; `code` is the first reason's code, else
    the one of this kind of error.
    """

    reasons: tuple[Reason, ...] = ()
    _code = "failed"

    @property
    def code(self) -> str:
        """The cause as a short word for programs; `docs/troubleshooting.md` lists them all."""
        return self.reasons[0].code if self.reasons else self._code


class AnyDeviceWarning(UserWarning):
    """A warning with the `reasons` behind it."""

    def __init__(self, message: str, reasons: Iterable[Reason] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class DeviceNotFoundError(AnyDeviceError):
    """Nothing usable matches what was asked for; `findings` says why, backend by backend."""

    _code = "no_such_device"

    def __init__(
        self, message: str, findings: Sequence[Finding] = (), reasons: Iterable[Reason] = ()
    ) -> None:
        super().__init__(message)
        self.findings = tuple(findings)
        self.reasons = tuple(reasons)


class DeviceMismatchError(AnyDeviceError):
    """The leaves of one tree live in several places; `paths` names two that differ."""

    _code = "device_mismatch"

    def __init__(self, message: str, paths: tuple[str, str] = ("", "")) -> None:
        super().__init__(message)
        self.paths = paths


class UnsupportedError(AnyDeviceError):
    """An engine lacks this; `absent` says what is missing and what to use instead."""

    _code = "unsupported"

    def __init__(self, message: str, absent: Absent | None = None) -> None:
        super().__init__(message)
        self.absent = absent
        self.reasons = (absent.reason,) if absent else ()


class OutOfMemoryError(AnyDeviceError, MemoryError):
    """A device has no memory left; `asked`, `free` and `total` are bytes, `None` where unknown.

    `device` is the one that is full, as far as that is known. `advice` says what to try, the most
    promising first.
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
    """A result is wrong; `where` names the op or layer, `largest_error` how far off it is.

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
