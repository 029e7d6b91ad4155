"""The error codes of NVML and of the CUDA driver: their names, what they mean, what mends them."""

from __future__ import annotations

from typing import Literal, NamedTuple

Remedy = Literal[
    "start", "reload", "access", "reset", "reboot", "update", "fabric", "compat", "stub",
    "unified", "busy", "mps", "inspect",
]  # fmt: skip
"""What kind of help there is; `cuda_mend.mend` makes it a sentence for the machine at hand."""


class Fault(NamedTuple):
    """One error code: its name in the vendor's header, its meaning, and the kind of help."""

    symbol: str
    meaning: str
    remedy: Remedy


_NVML = {
    1: Fault("NVML_ERROR_UNINITIALIZED", "NVML was not initialised", "reload"),
    2: Fault("NVML_ERROR_INVALID_ARGUMENT", "NVML refused an argument", "update"),
    3: Fault("NVML_ERROR_NOT_SUPPORTED", "this driver does not support NVML", "inspect"),
    4: Fault(
        "NVML_ERROR_NO_PERMISSION", "this user may not open the card's device files", "access"
    ),
    6: Fault("NVML_ERROR_NOT_FOUND", "the driver found no card", "inspect"),
    8: Fault(
        "NVML_ERROR_INSUFFICIENT_POWER", "a power cable of the card is not plugged in", "inspect"
    ),
    9: Fault("NVML_ERROR_DRIVER_NOT_LOADED", "the NVIDIA kernel driver is not loaded", "start"),
    10: Fault("NVML_ERROR_TIMEOUT", "the driver did not answer NVML in time", "reboot"),
    11: Fault(
        "NVML_ERROR_IRQ_ISSUE", "the kernel has a problem with the card's interrupt", "reset"
    ),
    12: Fault("NVML_ERROR_LIBRARY_NOT_FOUND", "a library that NVML needs is missing", "reload"),
    13: Fault("NVML_ERROR_FUNCTION_NOT_FOUND", "this NVML is too old", "update"),
    15: Fault("NVML_ERROR_GPU_IS_LOST", "the card has fallen off the bus", "reset"),
    16: Fault("NVML_ERROR_RESET_REQUIRED", "the card must be reset before it can be used", "reset"),
    17: Fault("NVML_ERROR_OPERATING_SYSTEM", "the operating system blocked the request", "access"),
    18: Fault(
        "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
        "driver/library version mismatch: the loaded kernel module and the installed libraries"
        " are of different versions",
        "reload",
    ),
    20: Fault("NVML_ERROR_MEMORY", "NVML ran out of memory", "inspect"),
    27: Fault("NVML_ERROR_NOT_READY", "the driver is not ready yet", "reboot"),
    28: Fault("NVML_ERROR_GPU_NOT_FOUND", "the driver found no card", "inspect"),
    29: Fault("NVML_ERROR_INVALID_STATE", "the driver is in a bad state", "reboot"),
    999: Fault("NVML_ERROR_UNKNOWN", "the driver failed without saying why", "reboot"),
}

_CUDA = {
    1: Fault("CUDA_ERROR_INVALID_VALUE", "the driver refused an argument", "update"),
    2: Fault("CUDA_ERROR_OUT_OF_MEMORY", "there is no memory left to start CUDA", "busy"),
    3: Fault("CUDA_ERROR_NOT_INITIALIZED", "the CUDA driver could not be initialised", "reload"),
    4: Fault("CUDA_ERROR_DEINITIALIZED", "the CUDA driver is shutting down", "reload"),
    34: Fault(
        "CUDA_ERROR_STUB_LIBRARY",
        "a stub of libcuda, made only for linking, stands before the real driver library",
        "stub",
    ),
    35: Fault("cudaErrorInsufficientDriver", "the driver is older than the CUDA in use", "update"),
    36: Fault(
        "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER",
        "the driver is older than the CUDA in use",
        "update",
    ),
    46: Fault("CUDA_ERROR_DEVICE_UNAVAILABLE", "another process holds the card alone", "busy"),
    100: Fault("CUDA_ERROR_NO_DEVICE", "the CUDA driver sees no device", "start"),
    101: Fault("CUDA_ERROR_INVALID_DEVICE", "the CUDA driver refused a device", "inspect"),
    304: Fault("CUDA_ERROR_OPERATING_SYSTEM", "a call to the operating system failed", "access"),
    719: Fault("CUDA_ERROR_LAUNCH_FAILED", "the card failed and must be reset", "reset"),
    800: Fault("CUDA_ERROR_NOT_PERMITTED", "this user may not use the card", "access"),
    801: Fault("CUDA_ERROR_NOT_SUPPORTED", "the driver does not support this system", "inspect"),
    802: Fault(
        "CUDA_ERROR_SYSTEM_NOT_READY",
        "the system is not yet initialised: on machines with NVSwitch the fabric manager must run",
        "fabric",
    ),
    803: Fault(
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "driver/library version mismatch: the loaded kernel module and libcuda are of different"
        " versions",
        "reload",
    ),
    804: Fault(
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "a forward-compatibility libcuda was found, and this card does not support that",
        "compat",
    ),
    805: Fault("CUDA_ERROR_MPS_CONNECTION_FAILED", "the MPS server does not answer", "mps"),
    806: Fault("CUDA_ERROR_MPS_RPC_FAILURE", "talking to the MPS server failed", "mps"),
    807: Fault("CUDA_ERROR_MPS_SERVER_NOT_READY", "the MPS server is not ready", "mps"),
    808: Fault("CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", "the MPS server has no free client", "mps"),
    999: Fault(
        "CUDA_ERROR_UNKNOWN",
        "the driver failed without saying why, often because nvidia_uvm is not loaded or was"
        " broken by a suspend",
        "unified",
    ),
}


def nvml_fault(code: int) -> Fault:
    """What NVML's error `code` means; an unknown one is said to be that."""
    return _NVML.get(code) or Fault("NVML_ERROR", "NVML failed", "inspect")


def cuda_fault(code: int) -> Fault:
    """What the CUDA driver's error `code` means; an unknown one is said to be that."""
    return _CUDA.get(code) or Fault("CUDA_ERROR", "the CUDA driver failed", "inspect")


NO_DEVICE = 100
"""The code with which the driver says that it sees none, also where a variable hides them all."""

INVALID_DEVICE = 101
"""The code with which the driver refuses a CUDA_VISIBLE_DEVICES that names a card twice."""
