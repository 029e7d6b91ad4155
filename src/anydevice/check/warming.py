"""Making ready what would otherwise take its time, or not be used at all, on the first call."""

from __future__ import annotations

from collections.abc import Sequence

from anydevice.check.trusting import Kept, kernels_of, save
from anydevice.check.verifying import Progress, verify
from anydevice.choose.scope import device as choose_device
from anydevice.core.device import Device
from anydevice.errors import DeviceNotFoundError

DTYPES = ("bfloat16", "float16", "float32")


def warm_up(
    device: Device | str | None = None,
    *,
    dtypes: Sequence[str] = DTYPES,
    progress: Progress | None = None,
) -> Kept:
    """Compile our own kernels for a device and check them, so that ops use them from now on.

    Compiled code and what was found right are kept for later processes. Until a kernel was found
    right on a device, ops there use the library's own functions. Returns which kernels are used
    now, and which were refused because they were wrong; nothing of either where the device's
    engine has no kernels of ours.

    >>> warm_up("cpu").trusted
    ()

    Raises `DeviceNotFoundError` where the device is not usable.
    """
    chosen = choose_device(device)
    if chosen.engine is None:
        raise DeviceNotFoundError(f"no installed library drives {chosen}: {chosen.why_not}")
    names = kernels_of(chosen.engine, chosen)
    if not names:
        return Kept((), ())
    verdicts = verify(
        names, devices=[str(chosen)], engines=[chosen.engine], dtypes=dtypes, progress=progress
    )
    return save(verdicts)
