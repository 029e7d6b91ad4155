"""What the outcome of asking an OpenCL loader means: pure, so that recordings can test it."""

from __future__ import annotations

from collections.abc import Sequence

from anydevice.core.finding import Seen, Sighting
from anydevice.core.record import replace
from anydevice.hardware import opencl_mends as mends
from anydevice.hardware.child import Outcome
from anydevice.hardware.opencl_answers import read_answer, read_devices
from anydevice.hardware.opencl_loaders import Driver, Loader, Machine, registered_drivers


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
