"""What discovery says: of a device as its driver shows it, of a backend, and of its use here.

The hardware layer makes a `Sighting` a backend: which devices there are, as the driver tells it.
Discovery adds the installed libraries and the verdicts of past checks, and makes it a `Finding`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from anydevice.core.facts import Facts
from anydevice.core.record import Record

if TYPE_CHECKING:
    from anydevice.core.device import Device

Stage = Literal["driver", "device", "library", "compute"]
"""Where a backend stopped, in the order in which they are looked at."""

Kind = Literal["cpu", "gpu", "tpu"]
Tier = Literal["stable", "experimental", "untested"]


class Seen(Record):
    """One device as its driver shows it; with a `reason` where it is not fit for use."""

    index: int
    kind: Kind
    facts: Facts
    reason: str | None = None
    mend: str | None = None


class Sighting(Record):
    """What the hardware layer, or a user's own probe, says of one backend.

    `present` tells "here but not usable" from "not in this machine". `stage`, `reason` and `mend`
    are set where the backend as a whole stopped at its driver or devices. `engines` names who can
    drive a backend that anydevice does not know; left empty, the installed libraries are asked.
    """

    backend: str
    present: bool
    devices: tuple[Seen, ...] = ()
    stage: Stage | None = None
    reason: str | None = None
    mend: str | None = None
    notes: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()


class Refusal(Record):
    """Why one engine cannot drive one device, and the command that would mend it."""

    engine: str
    reason: str
    mend: str | None = None


class Verdict(Record):
    """The outcome of a small computation on a device through one engine; true if it was right."""

    device: str
    engine: str
    right: bool
    reason: str | None = None
    seconds: float = 0.0
    first_call: float | None = None
    second_call: float | None = None

    def __bool__(self) -> bool:
        return self.right


class Standing(Record):
    """One device with all that discovery knows of it.

    `engines` can drive it, in order of choice; `refusals` says why the others cannot. Where no
    engine is left, `stage`, `reasons` and `mend` say what stopped it.
    """

    kind: Kind
    facts: Facts
    engines: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    stage: Stage | None = None
    reasons: tuple[str, ...] = ()
    mend: str | None = None

    @property
    def usable(self) -> bool:
        return self.stage is None


class Finding(Record):
    """What discovery says of one backend.

    `usable` is true where at least one of `devices` is. Where it is false, `stage` says how far it
    got, `reason` what stopped it and `mend` the one command that would help; `present` tells
    whether any of this hardware or its driver is in the machine at all.
    """

    backend: str
    present: bool
    usable: bool
    tier: Tier
    devices: tuple[Device, ...] = ()
    stage: Stage | None = None
    reasons: tuple[str, ...] = ()
    mend: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def reason(self) -> str | None:
        """All reasons as one sentence; `None` where the backend is usable."""
        return "; ".join(self.reasons) or None

    def __iter__(self) -> Iterator[Device]:
        return iter(self.devices)

    def to_dict(self) -> dict[str, object]:
        """The same as plain data, ready for JSON."""
        return {
            "backend": self.backend,
            "present": self.present,
            "usable": self.usable,
            "tier": self.tier,
            "stage": self.stage,
            "reason": self.reason,
            "reasons": list(self.reasons),
            "mend": self.mend,
            "notes": list(self.notes),
            "devices": [device.to_dict() for device in self.devices],
        }
