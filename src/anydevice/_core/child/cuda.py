"""Devices as the CUDA driver lists them. Runs in a child process, where it may crash or hang.

Arguments: `libraries`, file names of the driver, tried in order; `free_memory`, whether to create
a context on each device, which the driver needs to report free memory. The driver itself applies
CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER of the child's environment.
"""

from __future__ import annotations

import ctypes

from .shared_library import open_first

TYPE_CHECKING = False  # `import typing` would take longer than most of the questions
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Answer = dict[str, Any]

_MULTIPROCESSORS, _INTEGRATED, _COMPUTE_MODE = 16, 18, 20
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


def ask(tell: Callable[[str], None], arguments: dict[str, Any]) -> Answer:
    """Return the devices in CUDA's order, or the failed call with its code, or no library."""
    tell("loading the CUDA driver")
    name, driver, problem = open_first(arguments["libraries"])
    if driver is None:
        return {"library": None, "problem": problem}
    answer: Answer = {"library": name, "error": None, "cuda_version": None, "devices": []}
    tell("cuDriverGetVersion")
    answer["cuda_version"] = _number(getattr(driver, "cuDriverGetVersion", None))
    tell("cuInit")
    code = driver.cuInit(0)
    if code:
        return {**answer, "error": {"call": "cuInit", "code": code}}
    count = ctypes.c_int()
    tell("cuDeviceGetCount")
    code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return {**answer, "error": {"call": "cuDeviceGetCount", "code": code}}
    for ordinal in range(count.value):
        tell(f"reading device {ordinal}")
        answer["devices"].append(_device(driver, ordinal, arguments.get("free_memory", False)))
    return answer


def _device(driver: ctypes.CDLL, ordinal: int, with_free_memory: bool) -> Answer:
    device = ctypes.c_int()
    code = driver.cuDeviceGet(ctypes.byref(device), ordinal)
    if code:
        return {"error": {"call": "cuDeviceGet", "code": code}}
    name, bus = ctypes.create_string_buffer(256), ctypes.create_string_buffer(64)
    total = ctypes.c_size_t()
    named = driver.cuDeviceGetName(name, len(name), device)
    placed = driver.cuDeviceGetPCIBusId(bus, len(bus), device)
    counted = driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    major = _attribute(driver, _CAPABILITY_MAJOR, device)
    minor = _attribute(driver, _CAPABILITY_MINOR, device)
    return {
        "error": None,
        "name": None if named else name.value.decode("utf-8", "replace"),
        "uuid": _uuid(driver, device),
        "bus": None if placed else bus.value.decode("ascii", "replace"),
        "capability": None if major is None or minor is None else [major, minor],
        "compute_mode": _attribute(driver, _COMPUTE_MODE, device),
        "integrated": bool(_attribute(driver, _INTEGRATED, device)),
        "multiprocessors": _attribute(driver, _MULTIPROCESSORS, device),
        "total": None if counted else total.value,
        "free": _free_memory(driver, device) if with_free_memory else None,
    }


def _uuid(driver: ctypes.CDLL, device: ctypes.c_int) -> str | None:
    # The second form returns a MIG instance's own UUID; drivers before 11.4 have only the first.
    ask_uuid = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
    raw = ctypes.create_string_buffer(16)
    if ask_uuid(raw, device):
        return None
    digits = raw.raw.hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "-".join(parts)


def _attribute(driver: ctypes.CDLL, attribute: int, device: ctypes.c_int) -> int | None:
    value = ctypes.c_int()
    failed = driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return None if failed else value.value


def _number(function: Any) -> int | None:
    value = ctypes.c_int()
    return None if function is None or function(ctypes.byref(value)) else value.value


def _free_memory(driver: ctypes.CDLL, device: ctypes.c_int) -> int | None:
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    failed = driver.cuCtxSetCurrent(context) or driver.cuMemGetInfo_v2(
        ctypes.byref(free), ctypes.byref(total)
    )
    return None if failed else free.value
