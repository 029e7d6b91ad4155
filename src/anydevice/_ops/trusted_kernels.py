"""Our own kernels that ops may use on this machine, saved across processes.

A kernel is used only where `_engines/trust.py` has it. The file is keyed by device, driver and
library version, like verdicts of checks, and by the kernels' own text: if one of them changes, the
kernel is verified again before it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from anydevice._core.device import Device
from anydevice._core.files import writing
from anydevice._core.hooks import load
from anydevice._core.locks import ForkSafeLock
from anydevice._engines import trust
from anydevice._engines.trust import Entry
from anydevice._machine.discovery.check import key_of
from anydevice._machine.discovery.discover import discover
from anydevice._machine.engines.registry import place_of, row_of
from anydevice._machine.settings.files import described, read_cache, verdicts_file

_trusted: set[Entry] = set()
_is_loaded = False
_lock = ForkSafeLock(reentrant=True)
"""Guards the trusted kernels while they are read, changed or written; never while one computes."""


def load_trusted() -> tuple[Entry, ...]:
    """Trust the kernels verified for this device, driver, library and text; return all trusted."""
    global _is_loaded
    with _lock.native:
        saved = {} if _is_loaded else _read()  # once in a process
        _is_loaded = True
        if saved:  # else the machine need not be read
            entries = {
                (kernel, dtype, device)
                for device, key in _keys().items()
                for kernel, dtype in saved.get(key, ())
            }
            _replace(_trusted | entries)
        return tuple(sorted(_trusted))


def change_trusted(right: set[Entry], wrong: set[Entry]) -> str | None:
    """Trust the kernels in `right` and no more those in `wrong`; return why that is not saved."""
    with _lock.native:
        load_trusted()
        _replace((_trusted | right) - wrong)
        try:
            with writing(kernels_file(), private=True) as write:
                saved = _read()
                for device, key in _keys().items():
                    here = saved.get(key, set())
                    here -= {(kernel, dtype) for kernel, dtype, place in wrong if place == device}
                    here |= {(kernel, dtype) for kernel, dtype, place in right if place == device}
                    saved[key] = here
                lists = {key: sorted(map(list, pairs)) for key, pairs in saved.items()}
                write(json.dumps(lists, indent=1, sort_keys=True) + "\n")
        except OSError as error:
            return f"the kernels could not be kept in {described(kernels_file())}: {error.strerror}"
    return None


@contextmanager
def on_trial(kernels: Collection[str], dtype: str, device: str) -> Iterator[Callable[[], None]]:
    """Use only these kernels in this thread in the block; yield a function that condemns them."""
    load_trusted()
    tried = {(kernel, dtype, device) for kernel in kernels}

    def condemn() -> None:
        with _lock.native:
            _replace(_trusted - tried)

    with trust.trial(tried):
        yield condemn


def forget() -> None:
    """Trust no kernel any more, until the file, which stays as it is, is read again."""
    global _is_loaded
    with _lock.native:
        _is_loaded = False
        _replace(set())


def kernels_of(engine: str, device: Device) -> tuple[str, ...]:
    """Return the kernels of our own that an engine has on a device, by the names of their ops."""
    if device.backend not in row_of(engine).kernel_backends:
        return ()
    module = kernel_module(engine)
    return () if module is None else tuple(module.KERNELS)


@cache
def kernel_module(engine: str) -> ModuleType | None:
    """Return the module with an engine's kernels; `None` if there are none for this machine."""
    kernels = row_of(engine).kernels
    try:
        return cast("ModuleType", load(kernels)) if kernels else None
    except ImportError:  # PyTorch without Triton
        return None


def kernels_file() -> Path:
    return verdicts_file().with_name("kernels.json")


@cache
def sources() -> str:
    """Return a short hash of the text of all our kernels, and of the files that start them."""
    digest = hashlib.sha256()
    engines = Path(trust.__file__).parent
    patterns = ["base.py", "primitives.py", "torch/primitives.py", "torch/fused.py"]
    patterns += ["torch/triton/*", "opencl/*", "opencl/kernels/*"]
    for path in sorted(path for pattern in patterns for path in engines.glob(pattern)):
        if path.suffix in (".py", ".cl"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _replace(entries: set[Entry]) -> None:
    _trusted.update(entries)
    _trusted.intersection_update(entries)
    trust.replace(entries)


def _keys() -> dict[str, str]:
    """Return the key in the file for each device that has kernels."""
    keys = {}
    for device in discover().devices:
        status = device.status
        if status is None or place_of(device) != device:
            continue  # a fake device, whose data lies elsewhere
        for engine in status.engines:
            if device.backend in row_of(engine).kernel_backends:
                card = key_of(device.backend, device.index, status.facts, engine)
                keys[str(device)] = f"{card} | {sources()}"
    return keys


def _read() -> dict[str, set[tuple[str, str]]]:
    """Return the saved entries; none if the file is missing or damaged."""
    return {
        key: {(kernel, dtype) for kernel, dtype in pairs}
        for key, pairs in read_cache(kernels_file()).items()
        if isinstance(pairs, list) and all(map(_is_pair, pairs))
    }


def _is_pair(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) == 2
    return is_list and all(isinstance(text, str) for text in value)
