"""Which kernels of our own were found right here, kept across processes.

A kernel is used only where `engines/trust.py` has it. What is kept is keyed by device,
driver and library version, as verdicts of checks are, and by the kernels' own text: whatever
changes, the kernel is verified anew before it is used again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

from anydevice.check.verdicts import Cell, Verdicts
from anydevice.core.device import Device
from anydevice.core.hooks import load
from anydevice.core.record import Record
from anydevice.discovery._discover import discover
from anydevice.discovery.verdicts import key_of
from anydevice.engines import trust as table
from anydevice.engines.lookup import place_of
from anydevice.errors import ConfigurationError
from anydevice.settings.files import verdicts_file, writing

_TABLES = {
    "torch": "anydevice.engines.torch.triton.fused:KERNELS",
    "opencl": "anydevice.engines.opencl.fused:KERNELS",
}
"""Where the engines that have kernels of our own list them, by the names of their ops."""

Entry = table.Entry

_trusted: set[Entry] = set()
_is_loaded = False
_changing = RLock()
"""Held while what is trusted is read, changed or written; never while anything is computed."""


class Kept(Record):
    """What saving came to: the kernels that are trusted now, and those that were found wrong.

    `problem` says why nothing could be written; `None` where all is well.
    """

    trusted: tuple[Entry, ...]
    refused: tuple[Entry, ...]
    problem: str | None = None


def kernels_of(engine: str, device: Device) -> tuple[str, ...]:
    """The kernels of our own that an engine has on a device, by the names of their ops.

    >>> kernels_of("numpy", Device("cpu"))
    ()
    """
    if engine == "torch" and device.backend not in ("cuda", "rocm"):
        return ()
    return _listed(engine)


@contextmanager
def on_trial(kernels: Collection[str], dtype: str, device: str) -> Iterator[Callable[[], None]]:
    """A block in which this thread uses these kernels and no others, so that they can be judged.

    It is given a function that condemns them: they are trusted no more, by any thread. Otherwise
    all are trusted as before.
    """
    load_into_table()
    tried = {(kernel, dtype, device) for kernel in kernels}

    def condemn() -> None:
        with _changing:
            _replace(_trusted - tried)

    with table.trial(tried):
        yield condemn


def save(verdicts: Verdicts) -> Kept:
    """Trust the kernels that were right everywhere, now and in later processes; forget the wrong.

    Raises `ConfigurationError` for the verdicts of a quick run, which are too little to go by.
    """
    if verdicts.quick:
        raise ConfigurationError("a quick run is too little to trust kernels by; run all", "quick")
    judged = [cell for cell in verdicts if cell.of == "kernel" and cell.state != "unsupported"]
    refused = {_entry(cell) for cell in judged if not cell}
    right = {_entry(cell) for cell in judged} - refused
    problem = _keep(right, refused)
    return Kept(tuple(sorted(right)), tuple(sorted(refused)), problem)


def refuse(verdicts: Verdicts) -> tuple[Entry, ...]:
    """Trust no kernel that was found wrong, now and in later processes; which those are."""
    refused = {_entry(cell) for cell in verdicts.wrong if cell.of == "kernel"}
    if refused:
        _keep(set(), refused)
    return tuple(sorted(refused))


def _keep(right: set[Entry], refused: set[Entry]) -> str | None:
    """Add to and take from what is trusted, in the file too; why that could not be written."""
    with _changing:
        load_into_table()
        _replace((_trusted | right) - refused)
        return _written_down(right, refused)


def _written_down(right: set[Entry], refused: set[Entry]) -> str | None:
    try:
        with writing(kernels_file()) as write:
            kept = _read()
            for device, key in _keys().items():
                here = kept.get(key, set())
                here -= {(kernel, dtype) for kernel, dtype, place in refused if place == device}
                here |= {(kernel, dtype) for kernel, dtype, place in right if place == device}
                kept[key] = here
            write(_written(kept))
    except OSError as error:
        return f"the kernels could not be kept in {kernels_file()}: {error.strerror}"
    return None


def load_into_table() -> tuple[Entry, ...]:
    """Trust every kernel that was verified for this device, driver, library and text of it.

    The file is read once in a process. Returns what is trusted now.
    """
    global _is_loaded
    with _changing:
        kept = {} if _is_loaded else _read()
        _is_loaded = True
        if kept:  # else nobody need look at the machine
            found = {
                (kernel, dtype, device)
                for device, key in _keys().items()
                for kernel, dtype in kept.get(key, ())
            }
            _replace(_trusted | found)
        return tuple(sorted(_trusted))


def forget() -> None:
    """Trust no kernel any more, until the file, which stays as it is, is read again."""
    global _is_loaded
    with _changing:
        _is_loaded = False
        _replace(set())


def kernels_file() -> Path:
    """Where it is kept which kernels were right."""
    return verdicts_file().with_name("kernels.json")


@cache
def sources() -> str:
    """A short hash of the text of all our kernels, and of the files that start them."""
    digest = hashlib.sha256()
    engines = Path(table.__file__).parent
    patterns = ("torch/fused.py", "torch/triton/*", "opencl/*", "opencl/kernels/*")
    for path in sorted(path for pattern in patterns for path in engines.glob(pattern)):
        if path.suffix in (".py", ".cl"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def _listed(engine: str) -> tuple[str, ...]:
    if engine not in _TABLES:
        return ()
    try:
        return tuple(load(_TABLES[engine]))
    except ImportError:  # PyTorch is there without Triton
        return ()


def _entry(cell: Cell) -> Entry:
    return cell.op, cell.dtype, cell.device


def _replace(entries: set[Entry]) -> None:
    _trusted.update(entries)
    _trusted.intersection_update(entries)
    table.replace(entries)


def _keys() -> dict[str, str]:
    """What is kept of each device goes by this key; only of those that kernels may run on."""
    found = {}
    for device in discover().devices:
        standing = device.standing
        if standing is None or device.backend == "cpu" or place_of(device) != device:
            continue  # what is elsewhere is a fake
        for engine in standing.engines:
            if engine in _TABLES:
                card = key_of(device.backend, device.index, standing.facts, engine)
                found[str(device)] = f"{card} | {sources()}"
    return found


def _read() -> dict[str, set[tuple[str, str]]]:
    """What is kept; nothing where the file is missing or damaged."""
    try:
        data = json.loads(kernels_file().read_text("utf-8"))
        return {
            str(key): {(str(kernel), str(dtype)) for kernel, dtype in pairs}
            for key, pairs in data.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _written(kept: dict[str, Any]) -> str:
    lists = {key: sorted(map(list, pairs)) for key, pairs in kept.items()}
    return json.dumps(lists, indent=1, sort_keys=True) + "\n"
