"""Why NVML or the CUDA driver gave no devices, and what would mend it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anydevice.core.finding import Sighting
from anydevice.core.record import Record
from anydevice.hardware import cuda_mend
from anydevice.hardware.child import Outcome
from anydevice.hardware.cuda_errors import INVALID_DEVICE, NO_DEVICE, Fault, cuda_fault, nvml_fault
from anydevice.hardware.cuda_surroundings import Surroundings


class Trouble(Record):
    """What went wrong and what helps; `coded` where the driver itself named the error."""

    reason: str
    mend: str | None
    coded: bool = False


def nvml_trouble(outcome: Outcome, around: Surroundings) -> Trouble | None:
    """Why NVML showed no card; `None` where NVML is simply not installed."""
    if outcome.how != "answered":
        return _no_answer("NVML", outcome, around)
    answer = outcome.answer
    if answer["library"] is None:
        return _cannot_open("NVML", answer["problem"], around)
    errors = [answer["error"], *(card["error"] for card in answer["cards"])]
    for error in errors:
        if error is not None:
            return _coded("NVML", nvml_fault(error["code"]), error, around)
    return Trouble("NVML answers but sees no card", cuda_mend.mend("start", around), coded=True)


def driver_trouble(outcome: Outcome | None, around: Surroundings) -> Trouble | None:
    """Why the CUDA driver showed no device; `None` where it is simply not installed."""
    if outcome is None:
        return None
    if outcome.how != "answered":
        return _no_answer("the CUDA driver", outcome, around)
    answer = outcome.answer
    if answer["library"] is None:
        return _cannot_open("the CUDA driver", answer["problem"], around)
    errors = [answer["error"], *(device["error"] for device in answer["devices"])]
    none_seen: dict[str, Any] = {"call": "cuDeviceGetCount", "code": NO_DEVICE}
    error: dict[str, Any] = next((error for error in errors if error is not None), none_seen)
    return _coded("the CUDA driver", cuda_fault(error["code"]), error, around)


def driver_missing(around: Surroundings) -> Trouble:
    """The trouble where NVML answers and there is no CUDA driver library beside it."""
    return Trouble(
        "NVML answers but there is no CUDA driver library", cuda_mend.add_compute(around)
    )


def driver_sees_none(outcome: Outcome | None) -> bool:
    """Whether the driver works, and shows this process no device."""
    if outcome is None or outcome.how != "answered" or outcome.answer["library"] is None:
        return False
    error = outcome.answer["error"]
    if error is None:
        return not outcome.answer["devices"]
    return error["code"] in (NO_DEVICE, INVALID_DEVICE)


def lost_cards(nvml: Outcome) -> tuple[str, ...]:
    """A sentence for each card that NVML counts and cannot read, while it reads others."""
    return tuple(
        f"card {index}: {_described(nvml_fault(row['error']['code']), row['error'])}"
        for index, row in enumerate(nvml.answer["cards"])
        if row["error"] is not None
    )


def not_installed(around: Surroundings) -> Sighting:
    """The sighting where no NVIDIA library is installed: is there a card that would need one?"""
    mend: str | None = cuda_mend.install_driver(around)
    present = True
    if around.cards:
        many = len(around.cards) > 1
        where = ("NVIDIA cards are" if many else "an NVIDIA card is") + " at "
        held = f" (held by {', '.join(around.holders)})" if around.holders else ""
        if cuda_mend.lacks_nodes(around):
            lack = f"this container was started without {'them' if many else 'it'}"
        else:
            lack = "no NVIDIA driver is installed"
        reason = f"{where}{', '.join(around.cards)}{held} but {lack}"
    elif around.tegra:
        reason = f"this is a Jetson ({around.tegra}) but no CUDA driver library is installed"
    elif around.wsl:
        present = False
        reason = "no NVIDIA driver library; in WSL it comes with the NVIDIA driver of Windows"
    elif around.nodes:
        reason = f"{', '.join(around.nodes)} are here but no NVIDIA driver library is"
    else:
        present, mend = False, None
        reason = "no NVIDIA card on the PCI bus and no driver library"
        if around.system == "win32":
            reason = "no NVIDIA driver is installed (no nvml.dll and no nvcuda.dll)"
    return Sighting("cuda", present=present, stage="driver", reason=reason, mend=mend)


def _no_answer(who: str, outcome: Outcome, around: Surroundings) -> Trouble:
    mends = {
        "crashed": "reinstall the NVIDIA driver, then reboot",
        "timed out": cuda_mend.after_no_answer(around),
        "failed": "reinstall the NVIDIA driver, then reboot",
        "not started": None,
    }
    return Trouble(f"{who} {outcome.sentence}", mends[outcome.how])


def _cannot_open(who: str, problem: str | None, around: Surroundings) -> Trouble | None:
    if problem is None:
        return None
    return Trouble(f"{who} cannot be loaded: {problem}", cuda_mend.install_driver(around))


def _coded(who: str, fault: Fault, error: Mapping[str, Any], around: Surroundings) -> Trouble:
    described = _described(fault, error)
    if fault.remedy == "reload" and around.module is not None:
        described += f"; the loaded kernel module is {around.module}"
    return Trouble(f"{who}: {described}", cuda_mend.mend(fault.remedy, around), coded=True)


def _described(fault: Fault, error: Mapping[str, Any]) -> str:
    return f"{fault.meaning} ({fault.symbol}, {error['code']}) in {error['call']}"
