"""anydevice: find every accelerator of a machine, choose one, and use it.

>>> import anydevice
>>> anydevice.device("cpu").kind
'cpu'

Importing this package imports no array library, not even NumPy: every public name loads when it
is first used.
"""

from __future__ import annotations

from anydevice.core.late import load

__version__ = "0.1.0"

_PUBLIC = {
    "AnyDeviceError": "anydevice.errors",
    "Config": "anydevice.choose.settings",
    "ConfigurationError": "anydevice.errors",
    "Device": "anydevice.core.device",
    "DeviceMismatchError": "anydevice.errors",
    "DeviceNotFoundError": "anydevice.errors",
    "Finding": "anydevice.core.finding",
    "OutOfMemoryError": "anydevice.errors",
    "Report": "anydevice.choose.report",
    "TransferError": "anydevice.errors",
    "UnsupportedError": "anydevice.errors",
    "VerificationError": "anydevice.errors",
    "configure": "anydevice.choose.settings",
    "device": "anydevice.choose.scope",
    "devices": "anydevice.choose.discovery",
    "discover": "anydevice.choose.discovery",
    "prefer": "anydevice.choose.preferences",
    "set_device": "anydevice.choose.scope",
    "synchronize": "anydevice.transfer.moving",
    "to_device": "anydevice.transfer.moving",
    "to_numpy": "anydevice.transfer.moving",
    "use_device": "anydevice.choose.scope",
}
_MODULES = ("compat", "testing")

__all__ = ["__version__", *sorted(_PUBLIC), *_MODULES]


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        value: object = load(f"{_PUBLIC[name]}:{name}")
    elif name in _MODULES:
        value = load(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
