"""Which layer made a loss infinite or no number: the batch is run again, and every part watched.

Mistakes in a loss or in data that show only when a step is taken, and then as something else.

An engine says of them what it knows, which is nothing of the loss, of layers or of classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from anydevice import ops
from anydevice.core.engine import Absent
from anydevice.core.record import Record
from anydevice.core.trees import leaves
from anydevice.engines import registry
from anydevice.engines.lookup import owner_of
from anydevice.errors import AnyDeviceError, ConfigurationError, VerificationError
from anydevice.models.native import paths_of
from anydevice.nn.layer import Layer, MisfitError, Run
from anydevice.nn.losses import cross_entropy
from anydevice.training.batches import INPUT_ERRORS, prefix_error
from anydevice.training.steps import StepConfig, Stepper
from anydevice.transfer.moving import to_numpy

_ADVICE = "try a smaller rate, clip=1.0, or look at the data"
_OF_FLOAT16 = (
    'float16 ends at 65504: give smaller inputs, or take precision="bfloat16" or "mixed", or '
)
ON_DATA = "look at the data: numpy.isfinite says which numbers they are"


class TrainedBatch(Record):
    """A batch that was trained on, its number (from 1), and the step that it belongs to."""

    x: Any
    y: Any
    batch: int
    step: int


def failure(
    recipe: StepConfig,
    engine: str,
    parameters: Any,
    batches: Iterable[TrainedBatch],
    since: int,
    seed: int,
) -> VerificationError:
    """The error for a training that came to `since`, a step of no use, naming the layer.

    `parameters` are those from before that step, and `batches` those that it took. Where they tell
    nothing, all went wrong in the step before: its update made the parameters what they are.
    """
    wrong = _wrong_leaf(parameters)
    if wrong is not None:
        layer = f"{type(recipe.layer).__name__}{wrong}"
        kind = _kind(paths_of(parameters)[wrong])
        return VerificationError(
            f"training stopped after step {since - 1}: the parameters {layer} became {kind} by "
            f"its update, or that of a step shortly before; nothing of it was saved. {_ADVICE}",
            where=layer,
        )
    for taken in batches:
        spoiled = nonfinite_batch(taken.x, taken.y)
        if spoiled is not None:
            return _error(taken.step, spoiled, "", ON_DATA)
        found = _found(recipe, engine, parameters, taken, seed)
        if found is not None:
            return _error(taken.step, *found, _advice(recipe))
    what = "and it was finite when the batches were run again"
    return _error(since, what, "", _advice(recipe))


def nonfinite_batch(x: Any, y: Any) -> str | None:
    """What is wrong with a batch that holds NaN or what is infinite; `None` where it does not."""
    for name, part in (("x", x), ("y", y)):
        if not _is_finite(part):
            return f"the batch itself holds {_kind(part)} in {name}"
    return None


def _found(
    recipe: StepConfig, engine: str, parameters: Any, taken: TrainedBatch, seed: int
) -> tuple[str, str] | None:
    seen: list[tuple[str, Any]] = []
    is_traced = registry.load(engine).is_traced

    def watch(path: str, layer: Layer, y: Any) -> None:
        # What a transformation of the library's own goes through has no numbers yet.
        if not seen and not any(map(is_traced, leaves(y))) and not _is_finite(y):
            seen.append((f"{type(recipe.layer).__name__}{path} {layer.label}", y))

    run = Run(training=True, seed=seed, step=taken.batch, watch=watch)
    value = recipe.value(parameters, taken.x, taken.y, run)
    if seen:
        name, y = seen[0]
        return f"{name} gave {_kind(y)}", name
    if not _is_finite(value):
        last = recipe.layer.label
        return f"the loss is {_kind(value)}, and what {last} gave is finite", last
    return _in_gradients(recipe, engine, parameters, taken, seed)


def _in_gradients(
    recipe: StepConfig, engine: str, parameters: Any, taken: TrainedBatch, seed: int
) -> tuple[str, str] | None:
    autodiff = registry.load(engine).autodiff
    assert not isinstance(autodiff, Absent), "what trained has gradients"
    run = Run(training=True, seed=seed, step=taken.batch)

    def value_of(parameters: Any) -> Any:
        return recipe.value(parameters, taken.x, taken.y, run)

    gradients = autodiff.value_and_grad(value_of)(parameters)[1]
    wrong = _wrong_leaf(gradients)
    if wrong is None:
        return None
    name = f"{type(recipe.layer).__name__}{wrong}"
    return f"the gradient of {name} is {_kind(paths_of(gradients)[wrong])}", name


def _advice(recipe: StepConfig) -> str:
    return (_OF_FLOAT16 if recipe.policy.needs_loss_scale else "") + _ADVICE


def _error(step: int, what: str, where: str, advice: str) -> VerificationError:
    return VerificationError(
        f"training stopped at step {step}: {what}; no parameter was changed by it. {advice}",
        where=where,
    )


def _wrong_leaf(tree: Any) -> str | None:
    return next((path for path, x in paths_of(tree).items() if not _is_finite(x)), None)


def _is_finite(x: Any) -> bool:
    return all(bool(np.isfinite(np.asarray(leaf, np.float64)).all()) for leaf in _hosts(x))


def _kind(x: Any) -> str:
    nan = any(np.isnan(np.asarray(leaf, np.float64)).any() for leaf in _hosts(x))
    return "NaN" if nan else "infinite"


def _hosts(x: Any) -> list[Any]:
    return [to_numpy(leaf) for leaf in leaves(x)]


def explained(error: Exception, stepper: Stepper, x: Any, y: Any, where: str) -> Exception:
    """What to raise for an error of a step by this batch, which is `where`.

    It is a `ConfigurationError` where the loss gives anything but one number, and where x is whole
    numbers for a layer of floating ones; else the error itself, with where it was.
    """
    if isinstance(error, INPUT_ERRORS):
        prefix_error(error, where)
        return _about_whole_numbers(stepper, x, y, where) or error
    if isinstance(error, AnyDeviceError):
        return error
    value = None
    with suppress(Exception):
        value = stepper.recipe.value(stepper.parameters, x, y, Run())
    return error if value is None else _about_loss(stepper.recipe, value) or error


def check_loss(recipe: StepConfig, value: Any) -> None:
    """Raise `ConfigurationError` where a loss gave this and it is not one number."""
    error = _about_loss(recipe, value)
    if error is not None:
        raise error


def check_shape(recipe: StepConfig, x: Any, where: str) -> None:
    """Raise `ConfigurationError`, which names the layer, for a batch that does not fit or is empty.

    `where` is how the error calls the batch. What is a nest of arrays is for the layer to judge.
    """
    shape = getattr(x, "shape", None)
    if shape is None:
        return
    shape = tuple(shape)
    if 0 in shape[:1]:
        raise ConfigurationError(f"{where} is empty: x has the shape {shape}", source="data")
    try:
        recipe.layer.output(shape[1:])
    except ConfigurationError as error:
        prefix_error(error, where)
        if isinstance(error, MisfitError) and _fits(recipe, shape):
            error.args = (
                f"{error}; x has the shape {shape}: is it one example rather than a batch? "
                "nn.Batches(x, y, size=32) makes batches, and so does a DataLoader",
            )
        raise


def wrong_target(recipe: StepConfig, batches: Iterable[TrainedBatch]) -> VerificationError | None:
    """The error for the first batch with a target that is none of the classes, where one has it."""
    for taken in batches:
        wrong = _wrong_class(recipe, taken.x, taken.y)
        if wrong is not None:
            return VerificationError(f"step {taken.step}: {wrong}", where="target")
    return None


def wrong_batch(recipe: StepConfig, x: Any, y: Any, where: str) -> VerificationError | None:
    """The error for a batch whose loss cannot be a number, whatever the model is."""
    wrong = _wrong_class(recipe, x, y)
    if wrong is not None:
        return VerificationError(f"{where}: {wrong}", where="target")
    spoiled = nonfinite_batch(x, y)
    if spoiled is None:
        return None
    return VerificationError(f"{where}: {spoiled}; {ON_DATA}", where=where)


def _about_loss(recipe: StepConfig, value: Any) -> ConfigurationError | None:
    shape = getattr(value, "shape", None)
    if shape is not None and not tuple(shape):
        return None
    name = getattr(recipe.loss, "__name__", type(recipe.loss).__name__)
    gave = f"a {type(value).__name__}" if shape is None else f"an array of shape {tuple(shape)}"
    return ConfigurationError(
        f"a loss gives one number, an array without axes, and {name} gave {gave}; "
        "take its mean with ops.mean",
        source="loss",
    )


def _about_whole_numbers(stepper: Stepper, x: Any, y: Any, where: str) -> ConfigurationError | None:
    """The error where floating numbers would do, and whole ones do not."""
    owner, recipe = owner_of(x), stepper.recipe
    if owner is None or owner.dtype_of(x).kind == "float":
        return None
    done: set[str] = set()
    watching = Run(watch=lambda path, layer, y: done.add(path))
    try:
        recipe.value(stepper.parameters, ops.astype(x, "float32"), y, Run())
    except Exception:  # then it is something else, and the first error says what
        return None
    with suppress(Exception):
        recipe.value(stepper.parameters, x, y, watching)
    layer = _first_undone(recipe, done)
    return ConfigurationError(
        f"{where}: x is {owner.dtype_of(x).name}, and {layer} computes in "
        f'{recipe.policy.compute}; give x.astype("float32")',
        source="x",
    )


def _first_undone(recipe: StepConfig, done: set[str]) -> str:
    """The innermost layer that gave nothing, with the way to it."""
    layer, path = recipe.layer, ""
    while True:
        rest = [(path + step, part) for step, part in layer.parts if path + step not in done]
        if not rest:
            break
        path, layer = rest[0]
    return f"{type(recipe.layer).__name__}{path} {layer.label}" if path else layer.label


def _fits(recipe: StepConfig, shape: tuple[int, ...]) -> bool:
    try:
        recipe.layer.output(shape)
    except ConfigurationError:
        return False
    return True


def _wrong_class(recipe: StepConfig, x: Any, y: Any) -> str | None:
    loss = recipe.loss.func if isinstance(recipe.loss, partial) else recipe.loss
    if not any(loss is of_classes for of_classes in (cross_entropy, ops.cross_entropy)):
        return None
    if not hasattr(x, "shape") or not hasattr(y, "shape"):
        return None
    classes = recipe.layer.output(tuple(x.shape[1:]))[-1]
    targets = np.asarray(to_numpy(y))
    wrong = targets[(targets < 0) | (targets >= classes)]
    if not wrong.size:
        return None
    return (
        f"a target is {wrong.flat[0]}, and the model gives {classes} classes, which are 0 to "
        f"{classes - 1}; look at the data, or give the last layer more outputs"
    )
