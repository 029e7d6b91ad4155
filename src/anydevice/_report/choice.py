"""Explains a choice: why this device, and which preferences could not be met."""

from __future__ import annotations

from anydevice._core.choice import MEASUREMENTS, Choice
from anydevice._core.device import Device
from anydevice._core.text import joined

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anydevice._machine.discovery.discover import Report

_AUTOMATIC = ("configure", "order of backends")
_ASKERS = {
    "use_device": "a use_device block",
    "set_device": "set_device()",
    "environment": "ANYDEVICE_DEVICE",
    "project file": "the project's anydevice.toml",
    "user file": "the user's anydevice.toml",
}


def because(report: Report, choice: Choice) -> str:
    """Return the reason of the choice, to follow "because"; empty if nothing was chosen."""
    if choice.device is None:
        return ""
    measured = any(step.source == MEASUREMENTS and step.taken for step in choice.steps)
    served = f"; {choice.device.engine} serves it, the fastest measured here" if measured else ""
    return f"{_why(report, choice, choice.device)}{served}"


def _why(report: Report, choice: Choice, device: Device) -> str:
    source = device.chosen_by or ""
    if source == "argument":
        return "it was asked for"
    if source not in _AUTOMATIC:
        return f"{_asker(source)} asks for it"
    if source == "configure":
        return "it is the first usable one in the configured order"
    if device.backend != "cpu":
        return "it is the first usable one in the order of backends"
    reasons = []
    for step in choice.steps:
        if step.taken or step.source not in _AUTOMATIC:
            continue
        finding = report[step.asked]
        if not finding.usable:
            place = finding.devices[0] if len(finding.devices) == 1 else finding.backend
            reasons.append(f'{place} stopped at "{finding.stage}"')
        elif not step.ignored:
            reasons.append(step.outcome)
    return joined(reasons) or "no accelerator is in this machine"


def was_automatic(choice: Choice) -> bool:
    """Whether the order of backends decided, and no wish."""
    return choice.device is not None and choice.device.chosen_by in _AUTOMATIC


def unmet_wishes(choice: Choice) -> list[str]:
    """Return a sentence for each wish that was passed over."""
    return [
        f"{step.asked} is not available, although {_asker(step.source)} asks for it"
        for step in choice.passed_over
        if step.source not in _AUTOMATIC
    ]


def _asker(source: str) -> str:
    return _ASKERS.get(source, source)
