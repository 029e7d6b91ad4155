"""Mistakes in a loss or in targets that show only when a step is taken, and then as something else.

An engine says of them what it knows, which is nothing of the loss or of classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from anydevice import ops
from anydevice.errors import AnyDeviceError, ConfigurationError, VerificationError
from anydevice.nn.layer import Run
from anydevice.nn.losses import cross_entropy
from anydevice.run.failures import Taken
from anydevice.run.steps import Recipe, Stepper
from anydevice.transfer.moving import to_numpy


@contextmanager
def mistakes_explained(stepper: Stepper, x: Any, y: Any) -> Iterator[None]:
    """An error of the block, which takes a step by this batch, is one about the loss if it is that.

    Raises `ConfigurationError` where the loss gives anything but one number.
    """
    try:
        yield
    except AnyDeviceError:
        raise
    except Exception as error:
        value = None
        with suppress(Exception):
            value = stepper.recipe.value(stepper.parameters, x, y, Run())
        if value is not None:
            check_loss(stepper.recipe, value, error)
        raise


def check_loss(recipe: Recipe, value: Any, cause: Exception | None = None) -> None:
    """Raise `ConfigurationError` where a loss gave this and it is not one number."""
    shape = getattr(value, "shape", None)
    if shape is not None and not tuple(shape):
        return
    name = getattr(recipe.loss, "__name__", type(recipe.loss).__name__)
    gave = f"a {type(value).__name__}" if shape is None else f"an array of shape {tuple(shape)}"
    raise ConfigurationError(
        f"a loss gives one number, an array without axes, and {name} gave {gave}; "
        "take its mean with ops.mean",
        source="loss",
    ) from cause


def wrong_target(recipe: Recipe, batches: Iterable[Taken]) -> VerificationError | None:
    """The error for the first batch with a target that is none of the classes, where one has it."""
    loss = recipe.loss.func if isinstance(recipe.loss, partial) else recipe.loss
    if loss not in (cross_entropy, ops.cross_entropy):
        return None
    for taken in batches:
        classes = recipe.layer.output(tuple(taken.x.shape[1:]))[-1]
        targets = np.asarray(to_numpy(taken.y))
        wrong = targets[(targets < 0) | (targets >= classes)]
        if wrong.size:
            return VerificationError(
                f"step {taken.step}: a target is {wrong.flat[0]}, and the model gives {classes} "
                f"classes, which are 0 to {classes - 1}; look at the data, or give the last layer "
                "more outputs",
                where="target",
            )
    return None
