"""TPUs, found by their PCI devices and device files; no driver is loaded, no network is asked.

Chips up to v4 appear as `/dev/accel0`, later ones mostly as `/dev/vfio/N` with N the IOMMU group of
their PCI device. A device here is what JAX lists as one: a core of a v2, v3 or TPU7x chip, a whole
chip otherwise. On a slice of several hosts these are those of this host, `jax.local_devices()`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path

from anydevice._core.finding import BackendScan, Facts, RawDevice, Reason
from anydevice._core.record import Record
from anydevice._machine.hardware.linux import DEVICES, may_open, names_in, read_line, read_text

_GOOGLE = "0x1ae0"
_MEMORY_SOURCE = "by generation"

_stopped_scan = partial(BackendScan.stopped, "tpu")


class _Generation(Record):
    """A kind of chip: memory is that of one device, in GiB; `None` if it is not public.

    `pci` is the number of its PCI device, `types` are the parts of TPU_ACCELERATOR_TYPE before the
    count: "v5litepod-8", "v4-8", "tpu7x-4".
    """

    name: str
    devices_per_chip: int
    memory: int | None
    vfio: bool
    pci: str
    types: tuple[str, ...]


_V2 = _Generation("v2", 2, 8, False, "0x0027", ("v2",))
_V3 = _Generation("v3", 2, 16, False, "0x0027", ("v3",))  # the subsystem distinguishes it from v2
_V4 = _Generation("v4", 1, 32, False, "0x005e", ("v4",))
_V5E = _Generation("v5e", 1, 16, True, "0x0063", ("v5litepod", "v5lite", "v5e"))
_V5P = _Generation("v5p", 1, 95, True, "0x0062", ("v5p",))
_V6E = _Generation("v6e", 1, 32, True, "0x006f", ("v6e",))
_V7X = _Generation("7x", 2, 96, True, "0x0076", ("tpu7x",))
_UNNAMED = _Generation("of a generation without a public name", 1, None, False, "0x0056", ())

_GENERATIONS = (_V2, _V3, _V4, _V5E, _V5P, _V6E, _V7X, _UNNAMED)
_BY_PCI_DEVICE = {chip.pci: chip for chip in _GENERATIONS}
_BY_TYPE = {name: chip for chip in _GENERATIONS for name in chip.types}
_SUBSYSTEM_OF_V2 = "0x004e"


class _Chip(Record):
    generation: _Generation
    pci_address: str | None
    node: Path | None
    """The chip's device file under the root; `None` if there is none."""
    node_name: str


def look(
    limit: float = 5.0,
    *,
    root: Path = Path("/"),
    system: str = sys.platform,
    environment: Mapping[str, str] = os.environ,
    accessible: Callable[[Path], bool] | None = None,
) -> BackendScan:
    """Return the TPUs of this machine that this process sees, in the order of their chips.

    Memory is the public figure of the chip's generation: the driver tells neither that nor what is
    free. `TPU_VISIBLE_CHIPS` (before it `TPU_VISIBLE_DEVICES`) and the chips per process that
    `TPU_CHIPS_PER_PROCESS_BOUNDS` asks for are obeyed. Chips without a device file, or with one
    that this user may not open, stop the backend at its driver. Never raises and never waits, so
    that `limit` has nothing to do.
    """
    del limit
    if not system.startswith("linux"):
        return _stopped_scan("wrong_system", "TPUs are only on Linux", present=False)
    chips = _chips_on_pci(root) or _chips_by_type(root, environment)
    if not chips:
        return _stopped_scan("no_hardware", "no TPU on the PCI bus nor in /dev", present=False)
    notes = _holders(root)
    with_node = [chip for chip in chips if chip.node is not None]
    if not with_node:
        text = f"{_count(len(chips))} on the PCI bus, but no device file {chips[0].node_name}"
        fix = (
            "in a container: pass the device files on (docker run --privileged); "
            "otherwise start the machine from an image with the TPU driver"
        )
        return _stopped_scan("not_in_container", text, fix, notes=notes)
    if len(with_node) < len(chips):
        notes += (f"{len(with_node)} of {_count(len(chips))} have a device file here",)
    visible, wrong = _visible(with_node, environment)
    if wrong is not None:
        return BackendScan("tpu", True, stage="device", reason=wrong, notes=notes)
    return _scan(visible, root, accessible or may_open, notes)


def _scan(
    chips: list[tuple[int, _Chip]],
    root: Path,
    accessible: Callable[[Path], bool],
    notes: tuple[str, ...],
) -> BackendScan:
    devices: list[RawDevice] = []
    refused: list[Reason] = []
    for number, chip in chips:
        closed = next((node for node in _nodes(chip, root) if not accessible(node)), None)
        reason = None
        if closed is not None:
            text = f"no permission to open /{closed.relative_to(root)}"
            reason = Reason("no_permission", text, _permission(closed, root))
            refused.append(reason)
        for core in range(chip.generation.devices_per_chip):
            devices.append(RawDevice(len(devices), "tpu", _facts(chip, number, core), reason))
    if len(refused) < len(chips):
        return BackendScan("tpu", present=True, devices=tuple(devices), notes=notes)
    return BackendScan("tpu", True, tuple(devices), "driver", refused[0], notes=notes)


def _facts(chip: _Chip, number: int, core: int) -> Facts:
    generation = chip.generation
    name = f"Google TPU{'' if generation is _V7X else ' '}{generation.name}"
    return Facts(
        name=name,
        pci_address=chip.pci_address,
        memory_kind="dedicated",
        total_memory=None if generation.memory is None else generation.memory * 2**30,
        architecture=None if generation is _UNNAMED else name.removeprefix("Google "),
        details={
            "chip": number,
            "core": core,
            "devices_per_chip": generation.devices_per_chip,
            "device_file": chip.node_name,
            "memory": _MEMORY_SOURCE,
        },
    )


def _chips_on_pci(root: Path) -> list[_Chip]:
    chips: list[_Chip] = []
    for address in sorted(names_in(root / DEVICES)):
        device = root / DEVICES / address
        generation = _generation(device)
        if generation is not None:
            names = _node_names(device, generation, len(chips))
            name = next((name for name in names if _if_there(root, name)), names[0])
            chips.append(_Chip(generation, address, _if_there(root, name), name))
    return chips


def _generation(device: Path) -> _Generation | None:
    if _word(device / "vendor") != _GOOGLE:
        return None
    generation = _BY_PCI_DEVICE.get(_word(device / "device"))
    second = generation is _V3 and _word(device / "subsystem_device") == _SUBSYSTEM_OF_V2
    return _V2 if second else generation


def _node_names(device: Path, generation: _Generation, position: int) -> list[str]:
    """The device files that this chip may have, the usual one of its generation first."""
    try:
        group = os.path.basename(os.readlink(device / "iommu_group"))
    except OSError:
        group = str(position)
    names = [f"/dev/accel{position}", f"/dev/vfio/{group}"]
    return names[::-1] if generation.vfio else names


def _chips_by_type(root: Path, environment: Mapping[str, str]) -> list[_Chip]:
    """Return the chips by their device files, if the PCI bus is hidden, as in some containers."""
    kind = environment.get("TPU_ACCELERATOR_TYPE", "").strip().lower().rpartition("-")[0]
    generation = _BY_TYPE.get(kind)
    if generation is None:
        return []
    folder, prefix = ("dev/vfio", "") if generation.vfio else ("dev", "accel")
    matches = (re.fullmatch(prefix + r"(\d{1,6})", name) for name in names_in(root / folder))
    numbers = sorted(int(match[1]) for match in matches if match)
    nodes = [f"/{folder}/{prefix}{number}" for number in numbers]
    return [_Chip(generation, None, _if_there(root, node), node) for node in nodes]


def _visible(
    chips: list[_Chip], environment: Mapping[str, str]
) -> tuple[list[tuple[int, _Chip]], Reason | None]:
    """The chips that the environment leaves, with their numbers; or what is wrong with it."""
    numbers = list(range(len(chips)))
    # libtpu looks at the second name only where the first is not set or empty.
    for variable in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
        text = environment.get(variable, "").strip()
        if not text:
            continue
        words = [word.strip() for word in text.split(",")]
        if not all(re.fullmatch(r"\d{1,6}", word) and int(word) in numbers for word in words):
            fix = f"unset {variable}, or name chips 0 to {len(chips) - 1}"
            wrong = f"{variable}={text} does not name chips of this machine"
            return [], Reason("hidden", wrong, fix)
        numbers = sorted({int(word) for word in words})
        break
    for variable in ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"):
        text = environment.get(variable, "").strip()
        if re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", text):
            numbers = numbers[: prod(int(word) for word in text.split(","))]
            break
    return [(number, chips[number]) for number in numbers], None


def _nodes(chip: _Chip, root: Path) -> list[Path]:
    # A VFIO group is opened through the container file beside it.
    container = root / "dev/vfio/vfio"
    shared = [container] if "vfio" in chip.node_name and os.path.exists(container) else []
    return [*([chip.node] if chip.node else []), *shared]


def _permission(node: Path, root: Path) -> str:
    """The command that would let this user open the device file."""
    try:
        status = os.stat(node)
        import grp

        group = grp.getgrgid(status.st_gid).gr_name
    except (OSError, KeyError, ImportError):
        group = "root"
    else:
        if status.st_mode & 0o060 != 0o060:
            group = "root"
    if group != "root":
        return f"sudo usermod -aG {group} $USER, then log in again"
    name = f"/{node.relative_to(root)}"
    every = re.sub(r"\d+$", "*", name) if "accel" in name else "/dev/vfio/*"
    return f"sudo chmod a+rw {every} (a udev rule makes it last)"


def _holders(root: Path) -> tuple[str, ...]:
    """Return a note if another process has locked the TPUs, read without opening the lock file."""
    inodes: set[str] = set()
    for file in ("tmp/libtpu_lockfile", f"tmp/libtpu_lock_{os.getuid()}/libtpu_lockfile"):
        try:
            inodes.add(str(os.stat(root / file).st_ino))
        except OSError:
            continue
    for line in (read_text(root / "proc/locks") or "").splitlines() if inodes else ():
        # "1: POSIX  ADVISORY  WRITE 4711 08:01:3935 0 EOF"; the device number before the inode is
        # not compared, since overlay file systems show another one to stat().
        words = line.split()
        if len(words) < 6 or words[5].rpartition(":")[2] not in inodes:
            continue
        if words[4] != str(os.getpid()):
            return (f"the TPUs are in use by process {words[4]}; JAX gets them when it ends",)
    return ()


def _count(chips: int) -> str:
    return "1 TPU chip" if chips == 1 else f"{chips} TPU chips"


def _if_there(root: Path, node: str) -> Path | None:
    path = root / node.lstrip("/")
    return path if os.path.exists(path) else None


def _word(file: Path) -> str:
    return read_line(file).lower()
