"""One step of training, as fast as the engine can: gradients, clipping, update.

Where gradients may be taken inside compiled code, the whole step is one compiled function that is
given its parameters for good. Elsewhere the loss is compiled, gradients are taken of it, and the
engine's own kernels update the parameters where they lie. Either way nothing is read back: what
the step counts and watches stays on the device, so that the next step can be started at once.
"""

from __future__ import annotations

from anydevice.core.device import Device
from anydevice.core.engine import Absent
from anydevice.engines import registry
from anydevice.engines.places import place_of
from anydevice.errors import DeviceNotFoundError
from anydevice.run.outer_steps import OuterStepper
from anydevice.run.steps import Recipe, Standing, Stepper
from anydevice.run.whole_steps import WholeStepper


def stepper_for(device: Device, recipe: Recipe, standing: Standing, seed: int) -> Stepper:
    """The stepper that suits the engine of a device, which holds the arrays of `standing`.

    They are consumed: nobody else may use them afterwards. Raises `UnsupportedError`, with the
    engines that can, where the engine has no gradients.
    """
    if device.engine is None:
        raise DeviceNotFoundError(f"no installed library drives {device}: {device.why_not}")
    engine = registry.load(device.engine)
    autodiff = engine.autodiff
    if isinstance(autodiff, Absent):
        raise autodiff.error()
    kind = WholeStepper if autodiff.compiles else OuterStepper
    return kind(engine, place_of(device), recipe, standing, seed)
