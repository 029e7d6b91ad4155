"""Devices as an OpenCL loader lists them. Runs in a child process: it loads every driver.

The order is the loader's own. Counted over all platforms, devices have the same numbers as in
`pyopencl.get_platforms()`, if loader and environment are the same.
"""

from __future__ import annotations

import ctypes

TYPE_CHECKING = False  # `import typing` would take longer than most of the questions
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Tell = Callable[[str], None]
    # The bytes that a device or platform answers to a query; empty if it does not know the query.
    Info = Callable[[int], bytes]

_ALL_TYPES = 0xFFFFFFFF
_NOTHING_FOUND = (-1, -1001)

_MOST_HANDLES, _LONGEST_ANSWER = 1024, 2**20
"""Limits on platforms, devices and bytes of a text; a larger answer is an error."""

_PLATFORM_NAME, _PLATFORM_VENDOR = 0x0902, 0x0903

# Texts that are returned unchanged, by the number of the query.
_TEXTS = {"name": 0x102B, "vendor": 0x102C, "driver": 0x102D, "version": 0x102F}
_NUMBERS = {"type": 0x1000, "vendor_id": 0x1001, "memory": 0x101F}
_NUMBERS |= {"compute_units": 0x1002, "work_group": 0x1004}

_EXTENSIONS, _DOUBLE_CONFIG, _HOST_UNIFIED_MEMORY = 0x1030, 0x1032, 0x1035
_UUID_KHR, _PCI_KHR = 0x106A, 0x410F
_CAPABILITY_NV = (0x4000, 0x4001)
_BUS_NV, _SLOT_NV, _DOMAIN_NV = 0x4008, 0x4009, 0x400A
_TOPOLOGY_AMD, _BOARD_NAME_AMD, _FREE_MEMORY_AMD = 0x4037, 0x4038, 0x4039


def ask(tell: Tell, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return all platforms and devices that the loader at `arguments["loader"]` shows."""
    path = arguments["loader"]
    tell(f"loading {path}")
    return read(ctypes.CDLL(path), tell)


def read(library: ctypes.CDLL, tell: Tell) -> dict[str, Any]:
    """Return the platforms of `library`; `error` is its error code, or 0."""
    tell("clGetPlatformIDs")
    error, handles = _handles(library.clGetPlatformIDs)
    platforms = [_platform(library, handle, tell) for handle in handles]
    return {"platforms": platforms, "error": error}


def _platform(library: ctypes.CDLL, handle: int, tell: Tell) -> dict[str, Any]:
    info = _info(library.clGetPlatformInfo, handle)
    tell("clGetPlatformInfo")
    name = _text(info(_PLATFORM_NAME))
    vendor = _text(info(_PLATFORM_VENDOR))
    tell(f"clGetDeviceIDs of {name}")
    error, devices = _handles(
        library.clGetDeviceIDs, ctypes.c_void_p(handle), ctypes.c_uint64(_ALL_TYPES)
    )
    tell(f"clGetDeviceInfo of {name}")
    shown = [_device(_info(library.clGetDeviceInfo, device)) for device in devices]
    return {"name": name, "vendor": vendor, "devices": shown, "error": error}


def _device(info: Info) -> dict[str, Any]:
    extensions = _text(info(_EXTENSIONS)).split()
    return {
        **{name: _text(info(question)) for name, question in _TEXTS.items()},
        **{name: _number(info(question)) for name, question in _NUMBERS.items()},
        "unified": bool(_number(info(_HOST_UNIFIED_MEMORY))),
        "half": "cl_khr_fp16" in extensions,
        "double": "cl_khr_fp64" in extensions or bool(_number(info(_DOUBLE_CONFIG))),
        "uuid": info(_UUID_KHR)[:16].hex() if "cl_khr_device_uuid" in extensions else "",
        "pci": _pci(info, extensions),
        **_from_vendor(info, extensions),
    }


def _pci(info: Info, extensions: list[str]) -> list[int | None] | None:
    """Return domain, bus, device and function; the domain is `None` if the driver omits it."""
    if "cl_khr_pci_bus_info" in extensions:
        answer = info(_PCI_KHR)
        if len(answer) >= 16:
            return [_number(answer[start : start + 4]) for start in (0, 4, 8, 12)]
    if "cl_nv_device_attribute_query" in extensions:
        bus, slot = _number(info(_BUS_NV)), _number(info(_SLOT_NV))
        if bus is not None and slot is not None:
            return [_number(info(_DOMAIN_NV)), bus, slot >> 3, slot & 7]
    if "cl_amd_device_attribute_query" in extensions:
        topology = info(_TOPOLOGY_AMD)
        if len(topology) >= 24 and topology[0] == 1:
            return [None, *topology[21:24]]
    return None


def _from_vendor(info: Info, extensions: list[str]) -> dict[str, Any]:
    """Return facts from the vendor's own extension, if the device has it."""
    if "cl_nv_device_attribute_query" in extensions:
        return {"capability": [_number(info(question)) for question in _CAPABILITY_NV]}
    if "cl_amd_device_attribute_query" in extensions:
        # An array in KiB: all free memory, then its largest block.
        free = _number(info(_FREE_MEMORY_AMD)[: ctypes.sizeof(ctypes.c_size_t)])
        return {"board": _text(info(_BOARD_NAME_AMD)), "free_kib": free}
    return {}


def _handles(call: Any, *before: Any) -> tuple[int | str, list[int]]:
    """Return the handles from a "how many, then which" function, and its error, 0 for none."""
    count = ctypes.c_uint32()
    code = call(*before, ctypes.c_uint32(0), None, ctypes.byref(count))
    if code == 0 and count.value > _MOST_HANDLES:
        return f"{count.value} handles", []
    if code == 0 and count.value:
        handles = (ctypes.c_void_p * count.value)()
        code = call(*before, count, handles, None)
        if code == 0:
            return 0, [handle for handle in handles if handle]
    return (0 if code in _NOTHING_FOUND else code), []


def _info(call: Any, handle: int) -> Info:
    def info(question: int) -> bytes:
        size = ctypes.c_size_t()
        if call(ctypes.c_void_p(handle), question, ctypes.c_size_t(0), None, ctypes.byref(size)):
            return b""
        if size.value > _LONGEST_ANSWER:
            return b""
        answer = (ctypes.c_char * size.value)()
        code = call(ctypes.c_void_p(handle), question, size, answer, None)
        return b"" if code else answer.raw

    return info


def _text(answer: bytes) -> str:
    return answer.split(b"\0", 1)[0].decode("utf-8", "replace").strip()


def _number(answer: bytes) -> int | None:
    return int.from_bytes(answer, "little") if answer else None
