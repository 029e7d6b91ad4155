"""`nn.predict` and `nn.evaluate`: a model's outputs, loss and metrics over data, by `compile`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from anydevice._arrays.memory.out_of_memory import translating_oom
from anydevice._arrays.move import to_numpy
from anydevice._arrays.trees.containers import without_tables
from anydevice._compile.compile import Compiled
from anydevice._compile.compile import compile as compiled_model
from anydevice._core import checks, hooks
from anydevice._core.device import Device
from anydevice._core.names import other_keywords
from anydevice._core.record import NOTHING, Record
from anydevice._core.table import Table
from anydevice._core.trees import leaves, refilled
from anydevice._libraries import layers
from anydevice._libraries.precision import cast_parameters
from anydevice._libraries.registry import adapter_of, compile_device, part, row_of
from anydevice._nn import losses
from anydevice._nn.layers import with_activation
from anydevice._nn.model import Model
from anydevice._ops.dispatch import primitives
from anydevice._train.batches import (
    INPUT_ERRORS,
    Batches,
    as_numbers,
    batch_name,
    is_pair,
    placed_batches,
    prefix_error,
    rows_of,
)
from anydevice._train.metrics import Specs, metrics_of
from anydevice.errors import ConfigurationError

_IN_FLIGHT = 2
"""Outputs queued before they are read, so that the device stays busy."""

_NAME = "evaluation"
_NARROW = ("float16", "bfloat16")


class Evaluation(Record):
    """The result of `nn.evaluate`: the mean loss, the metrics by name, and the number of examples.

    >>> print(Evaluation(0.25, {"accuracy": 0.9125}, 1000))
    loss      0.25
    accuracy  0.9125
    examples  1,000
    >>> Evaluation(0.25, {"accuracy": 0.9125}, 1000)["accuracy"]
    0.9125
    """

    loss: float | None
    metrics: Mapping[str, float] = NOTHING
    examples: int = 0

    def __getitem__(self, name: str) -> float:
        return self.metrics[name]

    def __str__(self) -> str:
        rows = self._rows()
        wide = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{wide}}  {text}" for name, text in rows)

    def _repr_html_(self) -> str:
        return hooks.render(Table(self._rows()), "html")

    def _rows(self) -> list[tuple[str, str]]:
        loss = {} if self.loss is None else {"loss": self.loss}
        rows = [(name, f"{number:.4g}") for name, number in {**loss, **self.metrics}.items()]
        return [*rows, ("examples", f"{self.examples:,}")]


@other_keywords("evaluation")
def predict(
    model: Any,
    data: Any,
    *,
    size: int = 256,
    device: Device | str | None = None,
    precision: str | None = None,
    optimize: str | None = None,
) -> Any:
    """Return the outputs of a model for all examples, as NumPy arrays, in the order of the data.

    `model` is a `nn.Model`, a module of PyTorch, Flax NNX, Equinox or MLX, a function over arrays,
    or any of them compiled. `data` is an array, a DataFrame or a dict of arrays with an example in
    each row, passed on in batches of `size` rows; an `nn.Batches`; or a loader or a list of
    batches. A batch is an array, a pair (x, y), whose y is ignored, or a dict of inputs by name.

    >>> model = nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 2), device="cpu")
    >>> predict(model, numpy.ones((1000, 4))).shape
    (1000, 2)

    The model runs in inference mode, on its own device unless `device` names another, and in the
    dtype of its weights unless `precision` says otherwise. `precision` and `optimize` are as in
    `compile`; by default JAX and MLX compile, and PyTorch, whose compiler is slow, does not. If the
    output has `logits`, like models of Hugging Face, these are returned.

    Raises `ConfigurationError` for data that the model does not take, with the number of the batch.
    """
    outputs: list[list[Any]] = []
    like: Any = None
    with _ready(model, device, precision, optimize) as run:
        waiting: deque[Any] = deque()
        for batch in _place_batches(data, size, run.device):
            output = layers.logits_of(run.output(batch))
            like = output if like is None else like
            waiting.append(leaves(output))
            if len(waiting) > _IN_FLIGHT:
                outputs.append(to_numpy(waiting.popleft()))
        outputs.extend(map(to_numpy, waiting))
    return refilled(like, [np.concatenate(parts) for parts in zip(*outputs, strict=True)])


@other_keywords("evaluation")
def evaluate(
    model: Any,
    data: Any,
    loss: losses.Loss | str | None = None,
    metrics: Specs = (),
    *,
    size: int = 256,
    device: Device | str | None = None,
    precision: str | None = None,
    optimize: str | None = None,
) -> Evaluation:
    """Return the loss and the metrics of a model over all examples, without training it.

    `loss` and `metrics` are functions of the output and the target, or their names; several metrics
    are a list, or a dict with your own names. `nn.accuracy` and others document their inputs; your
    own metric returns a number, and its mean over batches is weighted by rows. `data` is as in
    `nn.predict`, with targets: two arrays (x, y), an `nn.Batches`, or a loader or a list of batches
    (x, y). Batches of Hugging Face, dicts with `labels`, need no loss: the model computes its own.

    >>> model = nn.build(nn.Dense(4, 2), device="cpu")
    >>> data = numpy.ones((100, 4)), numpy.zeros(100, int)
    >>> evaluate(model, data, nn.cross_entropy, metrics=["accuracy", "f1"]).examples
    100

    A final softmax or sigmoid that the loss includes is left out for the loss, as in `nn.train`;
    metrics get the output of the model itself. The other arguments are those of `nn.predict`.

    Raises `ConfigurationError` for an unknown metric or loss, and for data that do not fit.
    """
    # An `nn.Model` that ends with a sigmoid returns probabilities; others are assumed to be logits.
    inner = model.model if isinstance(model, Compiled) else model
    if loss is not None:
        loss = losses.loss_of(loss, of_module=not isinstance(inner, Model))
    threshold = losses.threshold_of(inner.layer) if isinstance(inner, Model) else 0.0
    measured = metrics_of(metrics, threshold)
    if loss is None and isinstance(inner, Model) and not measured:
        raise ConfigurationError(
            'nothing is evaluated: give a loss, metrics=, or both, as in metrics="accuracy"',
            source="loss",
        )
    states: dict[str, Any] = dict.fromkeys(metric.name for metric in measured)
    lost, examples = 0.0, 0
    values: deque[tuple[Any, int]] = deque()
    with _ready(model, device, precision, optimize, loss) as run:
        for number, batch in enumerate(_place_batches(data, size, run.device, targets=True), 1):
            rows = rows_of((*batch.inputs, batch.named))
            examples += rows
            try:
                value, output = run.loss_and_output(batch, wants_output=bool(measured))
                for metric in measured:
                    target = layers.target_of(batch.named) if batch.target is None else batch.target
                    if target is None:
                        raise ConfigurationError(
                            f"{metric.name} needs targets: give batches (x, y), or dicts with "
                            "'labels'",
                            source="data",
                        )
                    states[metric.name] = metric.add(states[metric.name], output, target)
            except INPUT_ERRORS as error:
                prefix_error(error, batch_name(_NAME, 1, number))
                raise
            values.append((value, rows))
            if len(values) > _IN_FLIGHT:
                lost += _weigh(*values.popleft())
        lost += sum(_weigh(*pair) for pair in values)
        results = {metric.name: metric.result(states[metric.name]) for metric in measured}
    mean = lost / examples
    return Evaluation(None if math.isnan(mean) and not run.has_loss else mean, results, examples)


def _weigh(value: Any, rows: int) -> float:
    return math.nan if value is None else float(to_numpy(value)) * rows


class _Batch(Record):
    """The inputs of a model, positional and by name, and the target, if any."""

    inputs: tuple[Any, ...]
    named: Mapping[str, Any]
    target: Any = None


class _Runner:
    """A model that is ready to run; `activation` and `module` are for its loss."""

    def __init__(self, model: Compiled, loss: Any, activation: Any, module: Any) -> None:
        self.device = model.device
        self._model = model
        self._loss = loss
        self._activation = activation
        self._module = module
        self.has_loss = loss is not None

    def output(self, batch: _Batch) -> Any:
        with translating_oom(self.device):
            return self._model(*batch.inputs, **batch.named)

    def loss_and_output(self, batch: _Batch, *, wants_output: bool) -> tuple[Any, Any]:
        """Return the loss of a batch, and the output for the metrics."""
        loss = self._loss
        if loss is not None and layers.takes_model(loss):
            parts = (batch.named,) if batch.named else (*batch.inputs, batch.target)
            value, _ = layers.loss_and_output(loss, self._module, parts)
            return value, layers.logits_of(self.output(batch)) if wants_output else None
        output = self.output(batch)
        if loss is None:
            find = layers.own_loss if batch.named and not wants_output else layers.loss_in
            own = find(output)
            self.has_loss = self.has_loss or own is not None
            return own, layers.logits_of(output)
        if not losses.computes_in_float32(loss):
            arrays = [x for x in leaves(output) if hasattr(x, "shape")]
            if any(primitives(x).dtype(x).name in _NARROW for x in arrays):
                output = cast_parameters(output, "float32")
        target = batch.named if batch.named and batch.target is None else batch.target
        value = layers.loss_of_output(loss, output, target)
        return value, layers.logits_of(with_activation(output, self._activation))


@contextmanager
def _ready(
    model: Any,
    device: Device | str | None,
    precision: str | None,
    optimize: str | None,
    loss: Any = None,
) -> Iterator[_Runner]:
    """Run a block with the model in inference mode, compiled if `optimize` asks for it."""
    if isinstance(model, Compiled):
        device = model.device if device is None else device
        precision, optimize = precision or model.policy.name, optimize or model.optimize
        model = model.model
    activation = None
    if isinstance(model, Model) and loss is not None:
        layer, changed = losses.fuse_loss(model.layer, loss)
        activation = losses.fused_activation(loss, model.layer) if changed else None
        model = model.with_layer(layer)
    row = row_of(model)
    frozen = nullcontext(model) if row is None else part(row.library, "module").in_inference(model)
    with frozen as still:  # a module gets its own mode back after the block
        adapter = adapter_of(still)
        if device is None:
            device = adapter.device
        target = compile_device(adapter, device, compiled=False)
        if optimize is None:
            optimize = "default" if target.engine in ("jax", "mlx") else "none"
        if not precision:  # keep the precision of 16-bit weights
            names = {primitives(x).dtype(x).name for x in adapter.weights().values()}
            precision = next((name for name in _NARROW if name in names), None)
        made = compiled_model(still, target, optimize=optimize, precision=precision)
        made._adapter.batches = True
        yield _Runner(made, loss, activation, still if callable(still) else made)


def _place_batches(
    data: Any, size: int, device: Device, *, targets: bool = False
) -> Iterator[_Batch]:
    """Yield the batches of data on a device, in order."""
    given = _batches(data, checks.integer("size", size, 1))
    empty = True
    for inputs, named, target in placed_batches(given, 0, 1, device, name=_NAME, form=_parts):
        empty = False
        if targets and target is None and not named:
            raise ConfigurationError(
                "there are no targets to compare with: give two arrays (x, y), or batches (x, y)",
                source="data",
            )
        yield _Batch(inputs, named, target)
    if empty:
        raise ConfigurationError("data gave no batches", source="data")


def _batches(data: Any, size: int) -> Iterator[Any]:
    """Yield the batches of data of any kind, unchanged."""
    if isinstance(data, Batches):
        return Batches(data.x, data.y, data.size, shuffle=False, weights=data.weights)(0, 1)
    if is_pair(data) and isinstance(data[1], Mapping):
        return Batches(data[0], data[1], size, shuffle=False)(0, 1)
    if isinstance(data, tuple) and len(data) == 2 and all(map(_is_table, data)):
        return _slices(tuple(map(without_tables, data)), size)
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Mapping):
        named, y = data
        return _named_slices(named, size, y) if _is_table(y) else iter(data)
    if isinstance(data, Mapping):
        return _named_slices(data, size)
    if _is_table(data) or _is_rows(data):
        return _slices((as_numbers(data, "data"),), size)
    if hasattr(data, "__iter__") or hasattr(data, "__getitem__"):
        return iter(data)
    if callable(data):
        return iter(data(0, 1))
    raise ConfigurationError(
        f"data must be an array, a DataFrame, nn.Batches, a loader or a list of batches, not a "
        f"{type(data).__name__}",
        source="data",
    )


def _is_table(data: Any) -> bool:
    return hasattr(data, "shape") or hasattr(without_tables(data), "shape")


def _is_rows(data: Any) -> bool:
    """Whether the data is nested lists of numbers, not a list of batches (x, y)."""
    if not isinstance(data, list | tuple):
        return False
    first = data[0] if data else None
    if isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], list | tuple):
        return False
    while isinstance(data, list | tuple) and len(data):
        data = data[0]
    return isinstance(data, bool | int | float | np.number)


def _slices(arrays: tuple[Any, ...], size: int) -> Iterator[Any]:
    lengths = {len(array) for array in arrays}
    if len(lengths) > 1:
        raise ConfigurationError(
            f"there are {len(arrays[0])} examples in x and {len(arrays[1])} in y", source="data"
        )
    for start in range(0, lengths.pop(), size):
        parts = tuple([array[start : start + size] for array in arrays])
        yield parts if len(parts) > 1 else parts[0]


def _named_slices(data: Mapping[Any, Any], size: int, y: Any = None) -> Iterator[Any]:
    """Yield batches of a dict of arrays, as from tokenizers; values without rows are in each."""
    parts = {key: as_numbers(part, repr(key)) for key, part in data.items()}
    target = None if y is None else without_tables(y)
    lengths = {key: len(part) for key, part in parts.items() if getattr(part, "shape", ())}
    counts = lengths if target is None else {**lengths, "y": len(target)}
    if not lengths or len(set(counts.values())) > 1:
        counted = ", ".join(f"{count} in {key!r}" for key, count in counts.items())
        raise ConfigurationError(
            "data is a dict, and must hold arrays with as many examples each; there are "
            f"{counted or 'no arrays in it'}",
            source="data",
        )
    for start in range(0, next(iter(lengths.values())), size):
        rows = slice(start, start + size)
        named = {key: part[rows] if key in lengths else part for key, part in parts.items()}
        yield named if target is None else (named, target[rows])


def _parts(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the positional and named inputs of a batch, and its target, as numeric arrays."""
    target = None
    if isinstance(batch, list | tuple):
        if len(batch) not in (1, 2):
            raise ConfigurationError(
                f"a batch must be an array, a pair (x, y) or a dict, not a "
                f"{type(batch).__name__} of {len(batch)}",
                source="data",
            )
        target = as_numbers(batch[1], "y") if len(batch) == 2 else None
        batch = batch[0]
    if isinstance(batch, Mapping):
        return (), {str(key): as_numbers(part, repr(key)) for key, part in batch.items()}, target
    several = isinstance(batch, tuple) and all(hasattr(part, "shape") for part in batch)
    inputs = batch if several else (batch,)
    return tuple([as_numbers(part, "x") for part in inputs]), {}, target
