"""For packages that add to anydevice: an array library (an engine), or hardware (a probe).

An engine is a row, its arrays and its primitives; `CONTRIBUTING.md` builds one file by file:

>>> row = extend.EngineRow(
...     name="tinylib",
...     label="TinyLib",
...     module="tinylib",
...     target="tinylib_anydevice.arrays:ENGINE",
...     libraries=("tinylib",),
...     backends=("cpu",),
... )
>>> row.label
'TinyLib'

A probe is a function that takes a time limit in seconds and returns a `BackendScan`:

>>> def scan_npu(limit):
...     chip = extend.RawDevice(0, "gpu", extend.Facts("NPU", total_memory=2**30))
...     return extend.BackendScan("npu", present=True, devices=(chip,), engines=("numpy",))
>>> scan_npu(1.0).devices[0].facts.name
'NPU'

A package registers them under the entry points `anydevice.engines` and `anydevice.probes`. Every
name loads when it is first used.
"""

from __future__ import annotations

from anydevice._core.lazy import lazy_names as _lazy_names

TYPE_CHECKING = False  # what a type checker sees; at run time each name loads on first use
if TYPE_CHECKING:
    from anydevice._core.array import Array as Array
    from anydevice._core.device import Device as Device
    from anydevice._core.dtypes import DType as DType
    from anydevice._core.engine import Absent as Absent
    from anydevice._core.engine import Engine as Engine
    from anydevice._core.engine import Memory as Memory
    from anydevice._core.engine import MemoryUse as MemoryUse
    from anydevice._core.engine import Storage as Storage
    from anydevice._core.finding import BackendScan as BackendScan
    from anydevice._core.finding import DeviceStatus as DeviceStatus
    from anydevice._core.finding import Facts as Facts
    from anydevice._core.finding import Finding as Finding
    from anydevice._core.finding import RawDevice as RawDevice
    from anydevice._core.finding import Reason as Reason
    from anydevice._core.primitives import Autodiff as Autodiff
    from anydevice._core.primitives import Compiler as Compiler
    from anydevice._core.primitives import PrimitivesOf as PrimitivesOf
    from anydevice._engines.base import BaseEngine as BaseEngine
    from anydevice._engines.host import known_dtype as known_dtype
    from anydevice._engines.host import private as private
    from anydevice._machine.engines.registry import EngineRow as EngineRow

_MODULES = {
    "_core.array": "Array",
    "_core.device": "Device",
    "_core.dtypes": "DType",
    "_core.engine": "Absent Engine Memory MemoryUse Storage",
    "_core.finding": "BackendScan DeviceStatus Facts Finding RawDevice Reason",
    "_core.primitives": "Autodiff Compiler PrimitivesOf",
    "_engines.base": "BaseEngine",
    "_engines.host": "known_dtype private",
    "_machine.engines.registry": "EngineRow",
}


def load_engine(name: str) -> Engine:
    """Import a library and return its engine, with its `ops`, `autodiff` and `compiler`.

    >>> extend.load_engine("numpy").name
    'numpy'

    Raises `UnsupportedError` if the library is not installed, and `ConfigurationError` for an
    unknown name.
    """
    from anydevice._machine.engines.registry import load

    return load(name)


_names, __getattr__, _ = _lazy_names(__name__, _MODULES)

__all__ = sorted([*_names, "load_engine"])


def __dir__() -> list[str]:
    return __all__
