"""Making ready what would otherwise take its time, or not be used at all, on the first call."""

from __future__ import annotations

from collections.abc import Sequence

from anydevice.check.trusting import Entry, Kept, kernels_of, load_into_table, save
from anydevice.check.verifying import Progress, verify_kernels
from anydevice.choose.scope import device as choose_device
from anydevice.core.device import Device
from anydevice.core.dtypes import as_dtype
from anydevice.core.late import load
from anydevice.core.record import replace
from anydevice.engines import registry
from anydevice.engines.places import place_of
from anydevice.errors import DeviceNotFoundError

DTYPES = ("bfloat16", "float16", "float32")

_COMPILING = {"torch": "anydevice.engines.fused.torch_cuda:warm_up"}
"""Where an engine compiles its kernels for the sizes of usual models, ahead of their use."""


def warm_up(
    device: Device | str | None = None,
    *,
    dtypes: Sequence[str] = DTYPES,
    progress: Progress | None = None,
) -> Kept:
    """Compile our own kernels for a device and check them, so that ops use them from now on.

    Compiled code and what was found right are kept for later processes: what was checked once with
    this driver and these versions is not checked again. Until a kernel was found right on a device,
    ops there use the library's own functions. Returns which kernels are used now, and which were
    refused because they were wrong; nothing of either where the device's engine has no kernels of
    ours.

    >>> warm_up("cpu").trusted
    ()

    Raises `DeviceNotFoundError` where the device is not usable, and `ConfigurationError` for an
    element type that there is not.
    """
    chosen = choose_device(device)
    if chosen.engine is None:
        raise DeviceNotFoundError(f"no installed library drives {chosen}: {chosen.why_not}")
    kinds = [as_dtype(dtype).name for dtype in dtypes]
    names = kernels_of(chosen.engine, chosen)
    if not names:
        return Kept((), ())
    kept = _checked(chosen, chosen.engine, names, kinds, progress)
    problem = _compiled_ahead(chosen, chosen.engine, kept.trusted)
    return kept if problem is None else replace(kept, problem=kept.problem or problem)


def _checked(
    device: Device,
    engine: str,
    names: Sequence[str],
    kinds: Sequence[str],
    progress: Progress | None,
) -> Kept:
    """Verify what is not trusted yet; all that is trusted then, of these kernels and types."""
    asked = {(name, kind, str(device)) for name in names for kind in kinds}
    missing = asked.difference(load_into_table())
    refused: tuple[Entry, ...] = ()
    problem = None
    if missing:
        pairs = sorted((name, kind) for name, kind, _ in missing)
        kept = save(verify_kernels(pairs, device, engine, progress=progress))
        refused, problem = kept.refused, kept.problem
    return Kept(tuple(sorted(asked.intersection(load_into_table()))), refused, problem)


def _compiled_ahead(device: Device, engine: str, trusted: Sequence[Entry]) -> str | None:
    """Compile for the sizes of usual models; why that did not work, where it did not."""
    kinds = tuple(dict.fromkeys(kind for _, kind, _ in trusted))
    if engine not in _COMPILING or not kinds:
        return None
    place = registry.load(engine).native(place_of(device.served_by(engine)))
    try:
        load(_COMPILING[engine])(str(place), kinds)
    except Exception as error:  # the compiler of a kernel fails in any way it likes
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"the kernels could not be compiled ahead of their use: {first_line}"
    return None
