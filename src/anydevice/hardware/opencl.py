"""The OpenCL devices of this machine, as its loader and drivers show them.

Drivers are loaded in a child process only. The loader asked is the one that pyopencl will use, so
that `opencl:1` means the same device here and there; the system's own where pyopencl is missing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from anydevice.core.finding import Seen, Sighting
from anydevice.hardware import opencl_mends as mends
from anydevice.hardware.child import Outcome, ask
from anydevice.hardware.opencl_answers import read_answer, read_devices, without_loader
from anydevice.hardware.opencl_loaders import (
    FRAMEWORK,
    Driver,
    Loader,
    Machine,
    alone,
    find_loaders,
    pyopencl_folder,
    registered_drivers,
    this_machine,
)

_FIRST_SHARE = 0.6
_WORTH_ASKING = 0.1


def look(limit: float) -> Sighting:
    """Every OpenCL device, or why there is none, within `limit` seconds; never raises.

    A driver that crashes or hangs is a finding of its own: the drivers are then asked one by one,
    so that the bad one is named and the devices of the others are listed. Those are not usable
    as long as it is there, since it would do the same to any program that lists devices.
    """
    machine = this_machine()
    return look_through(find_loaders(machine, pyopencl_folder()), machine, limit)


def look_through(loaders: Sequence[Loader], machine: Machine, limit: float) -> Sighting:
    """The same through these loaders, of which the first is the one that counts."""
    if not loaders:
        return without_loader(machine)
    end = time.monotonic() + limit
    outcome = _ask(loaders[0], loaders[0].environment(machine), limit * _FIRST_SHARE)
    if outcome.how in ("crashed", "timed out"):
        drivers = _separable_drivers(loaders[0], machine)
        outcomes = _ask_each(drivers, loaders[0], machine, end) if len(drivers) > 1 else ()
        return read_breakdown(outcome, drivers, outcomes, loaders[0], machine)
    sighting = read_outcome(outcome, loaders[0], machine)
    left = end - time.monotonic()
    if sighting.stage == "driver" and len(loaders) > 1 and left > _WORTH_ASKING:
        elsewhere = _ask(loaders[1], loaders[1].environment(machine), left)
        return add_seen_elsewhere(sighting, elsewhere, loaders[1], machine)
    return sighting


def _ask(loader: Loader, environment: dict[str, str], limit: float) -> Outcome:
    # Whole hundredths, because the limit is said in the reason.
    limit = max(int(limit * 100), 1) / 100
    return ask("opencl", {"loader": loader.path}, limit=limit, environment=environment)


def _separable_drivers(loader: Loader, machine: Machine) -> tuple[Driver, ...]:
    # Windows lists its drivers in the registry, and Apple's framework has none to take apart.
    if machine.system == "win32" or loader.path.startswith(FRAMEWORK):
        return ()
    return registered_drivers(loader, machine)


def _ask_each(
    drivers: Sequence[Driver], loader: Loader, machine: Machine, end: float
) -> tuple[Outcome, ...]:
    """Each driver asked by itself, all at once; empty where no time or disk is left for it."""
    from concurrent.futures import ThreadPoolExecutor
    from tempfile import TemporaryDirectory

    def ask_one(driver: Driver, folder: Path) -> Outcome:
        folder.mkdir()
        return _ask(loader, alone(driver, machine, folder), end - time.monotonic())

    if end - time.monotonic() < _WORTH_ASKING:
        return ()
    try:
        with TemporaryDirectory(prefix="anydevice-") as folder:
            folders = [Path(folder) / str(number) for number in range(len(drivers))]
            with ThreadPoolExecutor(len(drivers)) as pool:
                return tuple(pool.map(ask_one, drivers, folders))
    except OSError:
        return ()


def read_outcome(outcome: Outcome, loader: Loader, machine: Machine) -> Sighting:
    """The sighting for a child that came back, with an answer or without one."""
    if outcome.how == "answered":
        return read_answer(outcome.answer, loader, machine)
    if outcome.how == "not started":
        return Sighting(
            "opencl",
            present=bool(registered_drivers(loader, machine)),
            stage="driver",
            reason=f"OpenCL could not be asked, because no child process started: {outcome.error}",
        )
    return Sighting(
        "opencl",
        present=True,
        stage="driver",
        reason=f"the OpenCL loader {loader.path} does not work: {outcome.sentence}",
        mend=mends.repair(loader, machine),
    )


def read_breakdown(
    together: Outcome,
    drivers: Sequence[Driver],
    outcomes: Sequence[Outcome],
    loader: Loader,
    machine: Machine,
) -> Sighting:
    """The sighting after all drivers together crashed or hung, and each was asked alone.

    `outcomes` belongs to `drivers`, one for one; it is empty where they were not asked.
    """
    if len(drivers) == 1:
        outcomes = (together,)
    pairs = list(zip(drivers, outcomes, strict=False))
    bad = [(driver, outcome) for driver, outcome in pairs if outcome.how != "answered"]
    good = [outcome.answer for _, outcome in pairs if outcome.how == "answered"]
    if bad:
        blamed = "; ".join(f"{driver} {outcome.sentence}" for driver, outcome in bad)
        names = " and ".join(driver.name for driver, _ in bad)
        reason = f"{blamed}; remove or hide it, since it does so in every program that uses OpenCL"
    else:
        names = "one of its drivers" if drivers else "it"
        known = ", ".join(str(driver) for driver in drivers) or "none that could be named"
        reason = f"the OpenCL loader {loader.path} {together.sentence}; its drivers: {known}"
        if good:
            reason += "; each of them answers when it is alone"
    mend = mends.hide([driver for driver, _ in bad], machine)
    does = "hangs" if together.how == "timed out" else "crashes"
    devices = read_devices([each for answer in good for each in answer["platforms"]], machine)
    unusable = f"listing the OpenCL devices {does}, because of {names}"
    return Sighting(
        "opencl",
        present=True,
        devices=_made_unusable(devices, unusable, mend),
        stage="driver",
        reason=reason,
        mend=mend,
    )


def add_seen_elsewhere(
    sighting: Sighting, outcome: Outcome, system: Loader, machine: Machine
) -> Sighting:
    """What the system's loader shows, where the loader that pyopencl uses shows nothing."""
    if outcome.how != "answered":
        return sighting
    devices = read_devices(outcome.answer["platforms"], machine)
    if not devices:
        return sighting
    reason = f"only the system's loader {system.path} shows it, and pyopencl uses another"
    return replace(
        sighting,
        present=True,
        devices=_made_unusable(devices, reason, mends.LINK_WITH_SYSTEM),
        mend=mends.LINK_WITH_SYSTEM,
    )


def _made_unusable(devices: Sequence[Seen], reason: str, mend: str | None) -> tuple[Seen, ...]:
    return tuple(
        device if device.reason else replace(device, reason=reason, mend=mend) for device in devices
    )
