"""The answer to whether a model fits: what lies where, and what would fit if it does not."""

from __future__ import annotations

from typing import Literal

from anydevice.core.device import Device
from anydevice.core.record import Record
from anydevice.memory.estimates import MemoryEstimate
from anydevice.memory.splitting import Parts

Change = Literal["context", "batch", "kv_dtype", "dtype", "quantization"]


class Placement(Record):
    """What one device is to hold: a stretch of layers, and the bytes that they need there.

    `free` is the room that the device has for it, with the limit of `configure(memory=…)`.
    """

    device: Device
    layers: range
    parts: Parts
    free: int

    @property
    def share(self) -> float:
        """How much of the room is needed: 1.0 is all of it."""
        return self.parts.total / max(1, self.free)

    def to_dict(self) -> dict[str, object]:
        """The placement as plain data, ready for JSON; `layers` are the first and the last."""
        return {
            "device": str(self.device),
            "layers": [self.layers[0], self.layers[-1]] if self.layers else None,
            **self.parts.to_dict(),
            "free": self.free,
            "share": round(self.share, 4),
        }


class Alternative(Record):
    """One change that would help: this context, batch or element type instead of the one asked.

    A change of "quantization" is one of the layers' weights alone, with their scales counted in.
    `devices` are those that the model would lie on then, `total` the bytes that it would need.
    """

    change: Change
    value: int | str
    devices: tuple[Device, ...]
    total: int

    def to_dict(self) -> dict[str, object]:
        """The alternative as plain data, ready for JSON."""
        return {
            "change": self.change,
            "value": self.value,
            "devices": [str(device) for device in self.devices],
            "total": self.total,
        }


class Plan(Record):
    """Whether a model fits, and what lies where.

    What fits runs: beside what the estimate says, 3 % of it are free on every accelerator, which
    is what PyTorch's allocator took more in nine of ten models. A share above 97 % does not fit.

    `device` is the one that holds all of it, `None` where it takes several or does not fit.
    `placements` are in the order of the layers. Where the model does not fit, they show how far
    several devices reach, and `unplaced` are the bytes of weights, cache and logits that have no
    place; one device alone is shown with all of it, and a share above 1. Each of the
    `alternatives` by itself would make it fit, or, where it takes several devices or the CPU, fit
    on fewer of them. `notes` say what could not be counted.
    """

    fits: bool
    device: Device | None
    placements: tuple[Placement, ...]
    estimate: MemoryEstimate
    alternatives: tuple[Alternative, ...] = ()
    unplaced: int = 0
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that hold something, in the order of the layers."""
        return tuple(placement.device for placement in self.placements if placement.layers)

    @property
    def free(self) -> int:
        """The room of all devices of the plan together."""
        return sum(placement.free for placement in self.placements)

    def to_dict(self) -> dict[str, object]:
        """The plan as plain data, ready for JSON."""
        return {
            "fits": self.fits,
            "device": str(self.device) if self.device else None,
            "estimate": self.estimate.to_dict(),
            "placements": [placement.to_dict() for placement in self.placements],
            "unplaced": self.unplaced,
            "alternatives": [alternative.to_dict() for alternative in self.alternatives],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from anydevice.memory.plan_text import plan_lines

        return "\n".join(plan_lines(self))
