"""anydevice: find every accelerator of a machine, choose one, and use it.

>>> anydevice.device("cpu").kind
'cpu'

Importing this package imports no array library, not even NumPy: every public name loads when it
is first used.
"""

from __future__ import annotations

from anydevice._core.lazy import lazy_names as _lazy_names

TYPE_CHECKING = False  # what a type checker sees; at run time each name loads on first use
if TYPE_CHECKING:
    from anydevice import compat as compat
    from anydevice import extend as extend
    from anydevice import llm as llm
    from anydevice import nn as nn
    from anydevice import ops as ops
    from anydevice import parallel as parallel
    from anydevice import proofs as proofs
    from anydevice import testing as testing
    from anydevice._arrays.memory.stats import MemoryStats as MemoryStats
    from anydevice._arrays.memory.stats import memory_stats as memory_stats
    from anydevice._arrays.memory.stats import release as release
    from anydevice._arrays.move import device_of as device_of
    from anydevice._arrays.move import synchronize as synchronize
    from anydevice._arrays.move import to_device as to_device
    from anydevice._arrays.move import to_numpy as to_numpy
    from anydevice._arrays.prefetch import prefetch as prefetch
    from anydevice._arrays.random.generator import rng as rng
    from anydevice._arrays.trees.containers import register_type as register_type
    from anydevice._bench.functions import benchmark as benchmark
    from anydevice._check.verify import verify as verify
    from anydevice._check.verify import warm_up as warm_up
    from anydevice._compile.compile import Compiled as Compiled
    from anydevice._compile.compile import compile as compile  # noqa: A004  as its name is public
    from anydevice._core.device import Device as Device
    from anydevice._core.finding import Finding as Finding
    from anydevice._core.finding import Reason as Reason
    from anydevice._formats.load import load_weights as load_weights
    from anydevice._machine.choose.limits import configure as configure
    from anydevice._machine.choose.scope import device as device
    from anydevice._machine.choose.scope import set_device as set_device
    from anydevice._machine.choose.scope import use_device as use_device
    from anydevice._machine.discovery.discover import Report as Report
    from anydevice._machine.discovery.discover import devices as devices
    from anydevice._machine.discovery.discover import discover as discover
    from anydevice._machine.settings.config import Config as Config
    from anydevice._machine.settings.config import prefer as prefer
    from anydevice._plan.estimates import MemoryEstimate as MemoryEstimate
    from anydevice._plan.estimates import estimate_inference as estimate_inference
    from anydevice._plan.plan import plan_inference as plan_inference
    from anydevice._plan.retry import cpu_fallback as cpu_fallback
    from anydevice._plan.retry import find_batch_size as find_batch_size
    from anydevice._plan.training import estimate_training as estimate_training
    from anydevice._plan.training_plan import plan_training as plan_training
    from anydevice.errors import AnyDeviceError as AnyDeviceError
    from anydevice.errors import ConfigurationError as ConfigurationError
    from anydevice.errors import DeviceMismatchError as DeviceMismatchError
    from anydevice.errors import DeviceNotFoundError as DeviceNotFoundError
    from anydevice.errors import OutOfMemoryError as OutOfMemoryError
    from anydevice.errors import TransferError as TransferError
    from anydevice.errors import UnsupportedError as UnsupportedError
    from anydevice.errors import VerificationError as VerificationError

__version__ = "0.3.0"

_MODULES = {
    "_bench.functions": "benchmark",
    "_check.verify": "verify warm_up",
    "_machine.choose.limits": "configure",
    "_machine.choose.scope": "device set_device use_device",
    "_compile.compile": "Compiled compile",
    "_core.device": "Device",
    "_core.finding": "Finding Reason",
    "_machine.discovery.discover": "Report devices discover",
    "errors": "AnyDeviceError ConfigurationError DeviceMismatchError DeviceNotFoundError "
    "OutOfMemoryError TransferError UnsupportedError VerificationError",
    "_arrays.memory.stats": "MemoryStats memory_stats release",
    "_plan.retry": "cpu_fallback find_batch_size",
    "_plan.estimates": "MemoryEstimate estimate_inference",
    "_plan.plan": "plan_inference",
    "_plan.training": "estimate_training",
    "_plan.training_plan": "plan_training",
    "_machine.settings.config": "Config prefer",
    "_arrays.move": "device_of synchronize to_device to_numpy",
    "_arrays.prefetch": "prefetch",
    "_arrays.random.generator": "rng",
    "_arrays.trees.containers": "register_type",
    "_formats.load": "load_weights",
}
"""The public names by the module that has them."""

_PACKAGES = ("compat", "extend", "llm", "nn", "ops", "parallel", "proofs", "testing")

_names, __getattr__, _ = _lazy_names(__name__, _MODULES, packages=_PACKAGES)

__all__ = ["__version__", *_names]


def __dir__() -> list[str]:
    return __all__
