"""Intel's GPUs as Level Zero lists them. Runs in a child process, where a driver may crash or hang.

The one argument is `libraries`, file names of the loader. The driver itself reads ZE_AFFINITY_MASK.
"""

from __future__ import annotations

from ctypes import CDLL, addressof, byref, c_size_t, c_uint32, c_void_p, create_string_buffer
from struct import calcsize, iter_unpack, pack, unpack_from

from .shared_library import open_first

TYPE_CHECKING = False  # `import typing` would take longer than most of the questions
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Answer = dict[str, Any]

_GPU_DRIVERS_ONLY, _INTEGRATED, _INTEL = 1, 1, 0x8086
_MOST = 1024
"""A limit on drivers and devices; of more, none is listed."""

# The structures of Level Zero 1.17 (ze_api.h, ze_loader.h) in the notation of `struct`. Most begin
# with `stype`, whose value stands before the fields here, and `pNext`.
_HANDLE, _COMPONENT = "P", "64sI3i"
_DRIVER, _DEVICE = (0x1, "IP16sI"), (0x3, "IP6IQ7IQ2I16s256s")
_MEMORY, _PCI, _FREE = (0x7, "IP3IQ256s"), (0x10008, "IP4I2iq"), (0x20041, "IPQ")


def ask(tell: Callable[[str], None], arguments: dict[str, Any]) -> Answer:
    """Return the devices of all drivers, or the error of `zeInit`, or no library."""
    tell("loading the Level Zero loader")
    name, loader, problem = open_first(arguments["libraries"])
    answer: Answer = {"library": name, "problem": problem, "devices": []}
    if loader is None:
        return answer
    tell("zeInit")
    answer["error"] = loader.zeInit(_GPU_DRIVERS_ONLY)
    versions = getattr(loader, "zelLoaderGetVersions", None)
    parts = {_text(row[0]): row[2:] for row in (_list(_COMPONENT, versions) if versions else ())}
    answer["loader_version"] = ".".join(map(str, parts.get("loader", ()))) or None
    for (driver,) in () if answer["error"] else _list(_HANDLE, loader.zeDriverGet):
        tell("zeDeviceGet")
        for (device,) in _list(_HANDLE, loader.zeDeviceGet, c_void_p(driver)):
            tell("zeDeviceGetProperties")
            answer["devices"] += _device(loader, c_void_p(driver), c_void_p(device))
    return answer


def _device(loader: CDLL, driver: c_void_p, device: c_void_p) -> list[Answer]:
    """Return the facts of a device; none if its driver refuses, or is not Intel's."""
    free = _blank(*_FREE)  # drivers that do not know it leave it as it is
    row = _read(_DEVICE, loader.zeDeviceGetProperties, device, following=free)
    if row is None or row[3] != _INTEL:
        return []
    api, count = c_uint32(), c_uint32(1)
    loader.zeDriverGetApiVersion(driver, byref(api))
    number = f"{api.value >> 16}.{api.value & 0xFFFF}"
    version = _read(_DRIVER, loader.zeDriverGetProperties, driver)
    memory = _read(_MEMORY, loader.zeDeviceGetMemoryProperties, device, byref(count))
    call = getattr(loader, "zeDevicePciGetPropertiesExt", None)
    place = call and _read(_PCI, call, device)
    facts = {
        "device": row[4],
        "integrated": bool(row[5] & _INTEGRATED),
        "uuid": row[19].hex(),
        "name": _text(row[20]),
        "memory": memory and (memory[5] or None),
        "free": unpack_from(_FREE[1], free)[2] or None,
        "pci": place and list(place[2:6]),
        "api": number,
        "driver": version and f"{number}.{version[3] & 0xFFFF}",  # as packages write it
    }
    return [facts]


def _blank(kind: int, fields: str, following: Any = None) -> Any:
    """Return an empty structure with its `stype` and `pNext`."""
    head = pack("IP", kind, addressof(following) if following else 0)
    return create_string_buffer(head, calcsize(f"{fields}0P"))


def _read(layout: tuple[int, str], call: Any, *before: Any, following: Any = None) -> Any:
    """Return the fields of a structure; `None` if the call fails."""
    data = _blank(*layout, following)
    return None if call(*before, data) else unpack_from(layout[1], data)


def _list(fields: str, call: Any, *before: Any) -> list[Any]:
    """Call an enumeration function for the count, then the items; [] on failure."""
    count = c_size_t()  # some functions write 32 bits of it; these processors are little-endian
    if call(*before, byref(count), None) or not 0 < count.value <= _MOST:
        return []
    rows = create_string_buffer(calcsize(fields) * count.value)
    return [] if call(*before, byref(count), rows) else list(iter_unpack(fields, rows.raw))


def _text(written: bytes) -> str:
    return written.split(b"\0", 1)[0].decode("utf-8", "replace").strip()
