"""Errors of a training: the layer that produced NaN, and mistakes in the data or the loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from anydevice import _ops as ops
from anydevice._arrays.move import to_numpy
from anydevice._core.engine import Absent
from anydevice._core.protocols import Stepper
from anydevice._core.trees import leaves
from anydevice._libraries.layers import ModuleLayer, takes_model
from anydevice._libraries.native import paths_of
from anydevice._libraries.registry import adapter_of
from anydevice._machine.engines import registry
from anydevice._machine.engines.registry import owner_of
from anydevice._nn.layer import Layer, MisfitError, Run, names_of
from anydevice._nn.losses import _name_of, cross_entropy, split_weights
from anydevice._train.batches import INPUT_ERRORS, mark_batch, prefix_error
from anydevice._train.step_config import StepConfig, copied
from anydevice.errors import AnyDeviceError, ConfigurationError, VerificationError

_ADVICE = "try a smaller rate, clip=1.0, or look at the data"
_OF_FLOAT16 = (
    'float16 ends at 65504: give smaller inputs, or take precision="bfloat16" or "mixed", or '
)
_DATA_ADVICE = "look at the data: numpy.isfinite says which numbers they are"


class TrainedBatch(NamedTuple):
    """A batch that was trained on, its number (from 1), and its step."""

    batch: Any
    number: int
    step: int


def failure(
    config: StepConfig,
    engine: str,
    parameters: Any,
    batches: Iterable[TrainedBatch],
    since: int,
    seed: int,
) -> VerificationError:
    """Return the error for a training that failed after `parameters`, in one of `batches`."""
    batches = list(batches)
    for batch in batches:
        wrong = nonfinite_batch(batch.batch)
        if wrong is not None:
            return _error(batch.step, wrong, "", _DATA_ADVICE)
    wrong = _wrong_leaf(parameters)
    if wrong is not None:  # by the update of the previous step
        layer = f"{config.layer.root}{wrong}"
        kind = _kind(paths_of(parameters)[wrong])
        if since == 1:
            return VerificationError(
                f"training stopped at step 1: the parameters {layer} were {kind} before it; give "
                "the model other ones",
                where=layer,
            )
        return VerificationError(
            f"training stopped after step {since - 1}: the parameters {layer} became {kind} by "
            f"its update, or that of a step shortly before; nothing of it was saved. {_ADVICE}",
            where=layer,
        )
    advice = (_OF_FLOAT16 if config.policy.needs_loss_scale else "") + _ADVICE
    for batch in batches:
        failed = _failed_layer(config, engine, parameters, batch, seed)
        if failed is not None:
            return _error(batch.step, *failed, advice)
    return _error(since, "and it was finite when the batches were run again", "", advice)


def nonfinite_batch(batch: Any) -> str | None:
    """Return a sentence about NaN or infinite numbers in a batch; `None` if there are none."""
    pair = isinstance(batch, tuple) and len(batch) == 2
    parts = {"x": batch[0], "y": batch[1]} if pair else paths_of(batch)
    for name, part in parts.items():
        if not _is_finite(part):
            return f"the batch itself holds {_kind(part)} values in {name}"
    return None


def _failed_layer(
    config: StepConfig, engine: str, parameters: Any, batch: TrainedBatch, seed: int
) -> tuple[str, str] | None:
    if isinstance(config.layer, ModuleLayer):
        return _failed_part(config.layer, parameters, batch.batch)
    failed: list[tuple[str, Any]] = []
    is_traced = registry.load(engine).is_traced

    def watch(path: str, layer: Layer, y: Any) -> None:
        # Inside a transformation of the library, arrays have no numbers yet.
        if not failed and not any(map(is_traced, leaves(y))) and not _is_finite(y):
            failed.append((f"{config.layer.root}{path} {layer.label}", y))

    run = Run(training=True, seed=seed, step=batch.number, watch=watch, frozen=config.frozen)
    value = config.value(parameters, batch.batch, run)
    if failed:
        name, y = failed[0]
        return f"the output of {name} is {_kind(y)}", name
    if not _is_finite(value):
        last = config.layer.label
        return f"the loss is {_kind(value)}, and the output of {last} is finite", last
    return _failed_gradient(config, engine, parameters, batch, seed)


def _failed_part(layer: ModuleLayer, parameters: Any, batch: Any) -> tuple[str, str]:
    """Return the first part of another library's module with an output that is not finite."""
    failed: list[tuple[str, Any]] = []

    def after(name: str, y: Any) -> Any:
        if not failed and not _is_finite(y):
            failed.append((name, y))
        return y

    inputs = batch[0] if isinstance(batch, tuple) else batch
    model, parts = layer.watched(layer.finished(copied(parameters)), inputs)
    adapter = adapter_of(model)
    with suppress(Exception), adapter.scope():  # a loss may call the module differently
        for part in parts:
            named = part if isinstance(part, Mapping) else {}
            adapter.traced(after, *(() if named else (part,)), **named)
    if not failed:
        return f"the loss of {layer.label}, or a gradient, is NaN or infinite", layer.label
    name, y = failed[0]
    return f"the output of {name} is {_kind(y)}", name


def _failed_gradient(
    config: StepConfig, engine: str, parameters: Any, batch: TrainedBatch, seed: int
) -> tuple[str, str] | None:
    autodiff = registry.load(engine).autodiff
    assert not isinstance(autodiff, Absent), "a training has gradients"
    run = Run(training=True, seed=seed, step=batch.number, frozen=config.frozen)
    loss = partial(config.value, batch=batch.batch, run=run)
    gradients = autodiff.value_and_grad(loss)(parameters)[1]
    wrong = _wrong_leaf(gradients)
    if wrong is None:
        return None
    name = f"{config.layer.root}{wrong}"
    return f"the gradient of {name} is {_kind(paths_of(gradients)[wrong])}", name


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


def explain_error(error: Exception, stepper: Stepper, batch: Any, where: str) -> Exception:
    """Return the error to raise if the step of this batch failed; `where` is the batch's name."""
    if isinstance(error, INPUT_ERRORS):
        prefix_error(error, where)
        return _integer_error(stepper, batch, where) or _label_error(stepper, batch, where) or error
    if isinstance(error, AnyDeviceError):
        return error
    value = None
    with suppress(Exception):
        value = stepper.config.value(stepper.parameters, batch, Run())
    if value is None:
        return _label_error(stepper, batch, where) or error
    return _loss_error(stepper.config, value) or error


def check_loss(config: StepConfig, value: Any) -> None:
    """Raise `ConfigurationError` if the value of a loss is not a scalar."""
    error = _loss_error(config, value)
    if error is not None:
        raise error


def check_shape(config: StepConfig, batch: Any, where: str) -> None:
    """Raise `ConfigurationError`, naming the layer, for a batch that does not fit or is empty."""
    is_module = isinstance(config.layer, ModuleLayer) and not isinstance(batch, Mapping)
    takes_pairs = is_module and config.loss is not None and not takes_model(config.loss)
    if takes_pairs and (not isinstance(batch, tuple) or len(batch) != 2):
        parts = f"{len(batch)} parts" if isinstance(batch, tuple) else f"a {type(batch).__name__}"
        error = ConfigurationError(
            f"{where} is {parts}, and must be a pair (x, y), or a dict of the model's arguments; "
            "several inputs are a pair ((first, second), y), and a loss(model, …) takes any batch",
            source="data",
        )
        raise mark_batch(error)
    x = batch[0] if isinstance(batch, tuple) and batch else batch
    shape = getattr(x, "shape", None)
    if shape is None:
        return
    shape = tuple(shape)
    if 0 in shape[:1]:
        raise mark_batch(
            ConfigurationError(f"{where} is empty: x has the shape {shape}", source="data")
        )
    try:
        config.layer.output(shape[1:])
    except ConfigurationError as error:
        prefix_error(error, where)
        with suppress(ConfigurationError):
            config.layer.output(shape)  # raises if it is not one example either
            if isinstance(error, MisfitError):
                error.args = (
                    f"{error}; x has the shape {shape}: is it one example rather than a batch? "
                    "nn.Batches(x, y, size=32) makes batches, and so does a DataLoader",
                )
        raise


def wrong_target(
    config: StepConfig, parameters: Any, batches: Iterable[TrainedBatch]
) -> VerificationError | None:
    """Return the error for the first batch with a target outside the classes, or `None`."""
    for batch in batches:
        wrong = _wrong_class(config, batch.batch, parameters)
        if wrong is not None:
            return VerificationError(f"step {batch.step}: {wrong}", where="target")
    return None


def wrong_batch(config: StepConfig, batch: Any, where: str) -> VerificationError | None:
    """Return the error for a batch whose loss cannot be finite for any model."""
    wrong = _wrong_class(config, batch)
    if wrong is not None:
        return VerificationError(f"{where}: {wrong}", where="target")
    wrong = nonfinite_batch(batch)
    if wrong is None:
        return None
    return VerificationError(f"{where}: {wrong}; {_DATA_ADVICE}", where=where)


def _loss_error(config: StepConfig, value: Any) -> ConfigurationError | None:
    shape = getattr(value, "shape", None)
    if shape is not None and not tuple(shape):
        return None
    name = _name_of(config.loss)
    gave = f"a {type(value).__name__}" if shape is None else f"an array of shape {tuple(shape)}"
    return ConfigurationError(
        f"a loss must return a scalar; {name} returned {gave}; take its mean with ops.mean",
        source="loss",
    )


def _integer_error(stepper: Stepper, batch: Any, where: str) -> ConfigurationError | None:
    """Return the error if x fails as integers but would not fail as floats."""
    config = stepper.config
    if isinstance(config.layer, ModuleLayer):
        return None
    x, y = batch
    owner = owner_of(x)
    if owner is None or owner.dtype_of(x).kind == "float":
        return None
    finished: set[str] = set()
    watching = Run(watch=lambda path, layer, y: finished.add(path))
    try:
        config.value(stepper.parameters, (ops.astype(x, "float32"), y), Run())
    except Exception:  # then the original error is the right one
        return None
    with suppress(Exception):
        config.value(stepper.parameters, (x, y), watching)
    layer, path = config.layer, ""  # the innermost layer without an output
    while rest := [(path + s, part) for s, part in layer.parts if path + s not in finished]:
        path, layer = rest[0]
    name = f"{config.layer.root}{path} {layer.label}" if path else layer.label
    return ConfigurationError(
        f"{where}: x is {owner.dtype_of(x).name}, and {name} computes in "
        f'{config.policy.compute}; give x.astype("float32")',
        source="x",
    )


def _label_error(stepper: Stepper, batch: Any, where: str) -> ConfigurationError | None:
    """Return the error if y fits in another dtype, or is for examples and not for positions."""
    config, pair = stepper.config, isinstance(batch, tuple) and len(batch) == 2
    x: Any = batch[0] if pair else None
    y: Any = batch[1] if pair else None
    owner = owner_of(y)
    if owner is None or not hasattr(x, "shape"):
        return None
    with suppress(Exception):
        config.value(stepper.parameters, batch, Run())
        return None  # the labels are right: the error is another one
    for dtype in ("int64", "int32", "float32"):
        with suppress(Exception):
            config.value(stepper.parameters, (x, ops.astype(y, dtype)), Run())
            return ConfigurationError(
                f"{where}: y is {owner.dtype_of(y).name}, and {_name_of(config.loss)} takes "
                f'{"numbers" if dtype == "float32" else "integers"}; give y.astype("{dtype}")',
                source="y",
            )
    shape = config.layer.output(tuple(x.shape[1:]))  # of a module, without names
    if "positions" not in names_of(shape) or len(y.shape) != 1:
        return None
    return ConfigurationError(
        f"{where}: y has one label for each example, and {config.layer.label} has an output for "
        f"each of {shape[0]} positions; give its nn.LSTM or nn.GRU last=True, or put "
        'nn.GlobalAvgPool(over="positions") before its last layer',
        source="y",
    )


def _wrong_class(config: StepConfig, batch: Any, parameters: Any = None) -> str | None:
    """Return a sentence about a target outside the classes; a module needs its parameters."""
    if not isinstance(batch, tuple) or len(batch) != 2:
        return None
    x, y = batch[0], split_weights(batch[1])[0]
    loss = config.loss.func if isinstance(config.loss, partial) else config.loss
    if not any(loss is of_classes for of_classes in (cross_entropy, ops.cross_entropy)):
        return None
    if not hasattr(x, "shape") or not hasattr(y, "shape"):
        return None
    if not isinstance(config.layer, ModuleLayer):
        classes = config.layer.output(tuple(x.shape[1:]))[-1]
    elif parameters is None:
        return None
    else:
        try:
            classes = int(config.value_and_output(parameters, batch, Run())[1].shape[-1])
        except Exception:  # the output is no array
            return None
    targets = np.asarray(to_numpy(y))
    wrong = targets[(targets < 0) | (targets >= classes)]
    if not wrong.size:
        return None
    return (
        f"a target is {wrong.flat[0]}, and the model gives {classes} classes, which are 0 to "
        f"{classes - 1}; look at the data, or give the last layer more outputs"
    )
