"""anydevice: find every accelerator of a machine, choose one, and use it.

>>> import anydevice
>>> anydevice.device("cpu").kind
'cpu'

Importing this package imports no array library, not even NumPy: every public name loads when it
is first used.
"""

from __future__ import annotations

from anydevice.core.lazy import lazy_names as _lazy_names

TYPE_CHECKING = False  # what a type checker sees; at run time each name loads on first use
if TYPE_CHECKING:
    from anydevice import compat as compat
    from anydevice import llm as llm
    from anydevice import nn as nn
    from anydevice import ops as ops
    from anydevice import parallel as parallel
    from anydevice import proofs as proofs
    from anydevice import testing as testing
    from anydevice.bench.functions import benchmark as benchmark
    from anydevice.check.verifying import verify as verify
    from anydevice.check.verifying import warm_up as warm_up
    from anydevice.choose.limits import configure as configure
    from anydevice.choose.scope import device as device
    from anydevice.choose.scope import set_device as set_device
    from anydevice.choose.scope import use_device as use_device
    from anydevice.compiling._compile import Compiled as Compiled
    from anydevice.compiling._compile import compile as compile  # noqa: A004  as its name is public
    from anydevice.core.device import Device as Device
    from anydevice.core.finding import Finding as Finding
    from anydevice.core.finding import Reason as Reason
    from anydevice.discovery._discover import Report as Report
    from anydevice.discovery._discover import devices as devices
    from anydevice.discovery._discover import discover as discover
    from anydevice.errors import AnyDeviceError as AnyDeviceError
    from anydevice.errors import ConfigurationError as ConfigurationError
    from anydevice.errors import DeviceMismatchError as DeviceMismatchError
    from anydevice.errors import DeviceNotFoundError as DeviceNotFoundError
    from anydevice.errors import OutOfMemoryError as OutOfMemoryError
    from anydevice.errors import TransferError as TransferError
    from anydevice.errors import UnsupportedError as UnsupportedError
    from anydevice.errors import VerificationError as VerificationError
    from anydevice.memory.stats import MemoryStats as MemoryStats
    from anydevice.memory.stats import memory_stats as memory_stats
    from anydevice.memory.stats import release as release
    from anydevice.planning.batch_size import find_batch_size as find_batch_size
    from anydevice.planning.cpu_fallback import cpu_fallback as cpu_fallback
    from anydevice.planning.estimates import MemoryEstimate as MemoryEstimate
    from anydevice.planning.estimates import estimate_inference as estimate_inference
    from anydevice.planning.plan import plan_inference as plan_inference
    from anydevice.planning.training import estimate_training as estimate_training
    from anydevice.planning.training_plan import plan_training as plan_training
    from anydevice.settings.config import Config as Config
    from anydevice.settings.preferences import prefer as prefer
    from anydevice.transfer.moving import device_of as device_of
    from anydevice.transfer.moving import synchronize as synchronize
    from anydevice.transfer.moving import to_device as to_device
    from anydevice.transfer.moving import to_numpy as to_numpy
    from anydevice.transfer.prefetching import prefetch as prefetch
    from anydevice.transfer.random.generator import rng as rng
    from anydevice.transfer.trees.containers import register_type as register_type
    from anydevice.transfer.weights.loading import load_weights as load_weights

__version__ = "0.2.0"

_MODULES = {
    "bench.functions": "benchmark",
    "check.verifying": "verify warm_up",
    "choose.limits": "configure",
    "choose.scope": "device set_device use_device",
    "compiling._compile": "Compiled compile",
    "core.device": "Device",
    "core.finding": "Finding Reason",
    "discovery._discover": "Report devices discover",
    "errors": "AnyDeviceError ConfigurationError DeviceMismatchError DeviceNotFoundError "
    "OutOfMemoryError TransferError UnsupportedError VerificationError",
    "memory.stats": "MemoryStats memory_stats release",
    "planning.batch_size": "find_batch_size",
    "planning.cpu_fallback": "cpu_fallback",
    "planning.estimates": "MemoryEstimate estimate_inference",
    "planning.plan": "plan_inference",
    "planning.training": "estimate_training",
    "planning.training_plan": "plan_training",
    "settings.config": "Config",
    "settings.preferences": "prefer",
    "transfer.moving": "device_of synchronize to_device to_numpy",
    "transfer.prefetching": "prefetch",
    "transfer.random.generator": "rng",
    "transfer.trees.containers": "register_type",
    "transfer.weights.loading": "load_weights",
}
"""The public names by the module that has them."""

_PACKAGES = ("compat", "llm", "nn", "ops", "parallel", "proofs", "testing")

_names, __getattr__, _ = _lazy_names(__name__, _MODULES, packages=_PACKAGES)

__all__ = ["__version__", *_names]


def __dir__() -> list[str]:
    return __all__
