"""A fake machine for tests: any backend, any number of cards, each with memory of its own.

>>> from anydevice import device, device_of, memory_stats, testing
>>> with testing.fake_machine(cuda=["NVIDIA H100 80GiB", "NVIDIA L4 24GiB"]):
...     x = device("cuda:1")(numpy.ones(2**18, "float32"))
...     str(device_of(x)), device_of(x).facts.name, memory_stats("cuda:1").in_use
('cuda:1', 'NVIDIA L4', 1048576)

Data on a fake device lies in the host's memory, in arrays of the device's engine, which compute as
usual. The engines of the block remember where each array is, count its bytes until it is freed, and
refuse what a real card would refuse: what does not fit, and operands on two devices.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import finalize

from anydevice._core.backends import BACKENDS
from anydevice._core.device import unknown_backend
from anydevice._core.finding import BackendScan, Facts, RawDevice, Reason
from anydevice._core.text import parse_size, warn
from anydevice._machine.choose.scope import SETTING_VARIABLES, set_process_device
from anydevice._machine.discovery.discover import Report, discover
from anydevice._machine.engines import registry
from anydevice._machine.hardware.cpu import reader as cpu
from anydevice._machine.settings import files
from anydevice._testing.machine import Machine as _Machine
from anydevice.errors import ConfigurationError

Cards = int | Sequence[str]
"""How many devices of a backend there are, or the name of each, with its memory if it has its own:
`2`, or `["NVIDIA H100 80GiB", "NVIDIA L4 24GiB"]`."""

_NAMED = re.compile(r"(.*?)[\s-]+(\d[\d.]*\s?[kmgt]i?b?)", re.IGNORECASE)
_COMPUTING = ("torch", "jax", "mlx")
"""Engines that compute on any host, and so can stand in for an accelerator."""


@contextmanager
def fake_machine(
    *,
    cuda: Cards = 0,
    rocm: Cards = 0,
    metal: Cards = 0,
    xpu: Cards = 0,
    tpu: Cards = 0,
    opencl: Cards = 0,
    memory: int | str = "16GiB",
    free: int | str | Sequence[int | str] | None = None,
    engines: Sequence[str] | None = None,
    scans: Sequence[BackendScan] = (),
    keep_settings: bool = False,
    sightings: Sequence[BackendScan] = (),
) -> Iterator[Report]:
    """Let this machine have the given devices and the CPU in a block; yield its report.

    Devices are given by their number, or by their names: `cuda=["NVIDIA H100 80GiB", "NVIDIA L4"]`.
    `memory` is for devices whose name does not end with it; `free` (one amount, or one for each
    device of a backend) is the part of it that is free. `engines` are the libraries that drive
    them, if installed; by default those that drive real ones, and NumPy if none is installed.
    `scans` are used as they are, for a backend that fails: `BackendScan("cuda", present=True,
    stage="driver", reason=Reason(…))`.

    Arrays that `to_device` puts on a fake device, and the results that `ops`, models and training
    compute from them, are on that device for `device_of` and use its memory until they are freed.
    An array that does not fit is an `OutOfMemoryError`, and operands on two devices are a
    `DeviceMismatchError`. This includes PyTorch's own functions in the thread of the block. The
    result of another library's own function counts as a host array, which goes with any device;
    `docs/testing-your-code.md` has the rest.

    The whole process has this machine: other threads see it too. The user's own settings are
    ignored in the block: variables such as `ANYDEVICE_DEVICE` and `LOCAL_RANK`, the settings files,
    `set_device`. Settings made in the block are undone after it. `keep_settings=True` keeps
    variables and files.
    """
    counts = {"cuda": cuda, "rocm": rocm, "metal": metal, "xpu": xpu, "tpu": tpu, "opencl": opencl}
    made = {
        backend: fake_backend(backend, cards, memory=memory, free=free, engines=engines)
        for backend, cards in counts.items()
    }
    made["cpu"] = cpu.look(1.0)
    if sightings:  # until 0.4
        warn(DeprecationWarning("fake_machine: sightings= is now scans="))
    made.update({scan.backend: scan for scan in (*scans, *sightings)})
    machine, block = _Machine(made.values()), ExitStack()
    # A program that leaves the block open ends it at its exit, while its modules are still there.
    end = finalize(machine, block.close)
    try:
        if not keep_settings:
            block.enter_context(_nobody_s_settings())
        block.callback(set_process_device, set_process_device(None))
        block.enter_context(machine.in_force())
        yield discover()
    finally:
        end()


def fake_backend(
    backend: str,
    cards: Cards,
    *,
    memory: int | str = "16GiB",
    free: int | str | Sequence[int | str] | None = None,
    engines: Sequence[str] | None = None,
) -> BackendScan:
    """Return the scan of a backend with these cards; not present if there are none."""
    if backend not in BACKENDS:
        raise ConfigurationError(unknown_backend(backend), repr(backend))
    named = _named_cards(backend, cards, memory)
    if not named:
        missing = Reason("no_hardware", "not in this fake machine")
        return BackendScan(backend, present=False, stage="driver", reason=missing)
    row = BACKENDS[backend]
    amounts = [size for _, size in named] if free is None else _amounts(free, len(named))
    devices = tuple(
        RawDevice(
            index=index,
            kind=row.kind,
            facts=Facts(
                name=name,
                uuid=f"FAKE-{backend}-{index}",
                memory_kind="unified" if backend == "metal" else "dedicated",
                total_memory=size,
                usable_memory=size,
                free_memory=amounts[index],
                compute_capability="9.0" if backend == "cuda" else None,
                driver_version="999.0",
                runtime_version="13.0" if backend == "cuda" else None,
                details={"fake": True},
            ),
        )
        for index, (name, size) in enumerate(named)
    )
    if engines is None:
        able = (name for name in row.engines if name in _COMPUTING and registry.version_of(name))
        engines = tuple(able) or ("numpy",)
    return BackendScan(backend, present=True, devices=devices, engines=tuple(engines))


def _named_cards(backend: str, cards: Cards, memory: int | str) -> list[tuple[str, int]]:
    """Return the name and the bytes of each card."""
    every = parse_size(memory)
    if isinstance(cards, int) and not isinstance(cards, bool) and cards >= 0:
        return [(f"fake {BACKENDS[backend].label} device", every)] * cards
    if not isinstance(cards, list | tuple) or not all(isinstance(card, str) for card in cards):
        raise ConfigurationError(
            f"{backend}={cards!r} is not a number of devices, and not a list of their names",
            f"{backend}=",
        )
    matches = [(_NAMED.fullmatch(card), card) for card in cards]
    return [(match[1], parse_size(match[2])) if match else (card, every) for match, card in matches]


def _amounts(free: int | str | Sequence[int | str], count: int) -> list[int]:
    amounts = [free] * count if isinstance(free, int | str) else list(free)
    if len(amounts) != count:
        raise ConfigurationError(f"free= gives {len(amounts)} amounts for {count} devices", "free=")
    return [parse_size(amount) for amount in amounts]


@contextmanager
def _nobody_s_settings() -> Iterator[None]:
    before = {name: os.environ.pop(name, None) for name in SETTING_VARIABLES}
    with (
        TemporaryDirectory(prefix="anydevice-") as home,
        files.fake_project(Path(home) / "project"),
    ):
        os.environ["ANYDEVICE_HOME"] = home
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
