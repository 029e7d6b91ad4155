"""Models: a layer with its parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np

from anydevice._arrays.move import device_of, is_array, refuse_mismatch, to_device
from anydevice._arrays.random.generator import rng
from anydevice._arrays.trees.containers import register_type, without_tables
from anydevice._core import hooks
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.engine import Engine
from anydevice._core.table import Table
from anydevice._core.text import format_size
from anydevice._core.trees import difference, first_leaf, leaf_names, leaves, matches, unmatched
from anydevice._machine.choose.scope import block_device, one_device
from anydevice._machine.engines import registry
from anydevice._machine.engines.registry import owner_of
from anydevice._nn.layer import (
    Layer,
    MisfitError,
    Parameters,
    Run,
    Shape,
    state_paths,
    state_places,
)
from anydevice._nn.layers import Chain, Heads, Input, TiedEmbedding, as_layer
from anydevice._ops.dispatch import primitives
from anydevice.errors import ConfigurationError, DeviceMismatchError

_NOT_TRAINING = Run()
_NUMBERS = (int, float, np.number, np.bool_)
_HEADINGS = ("model", "", "output", "parameters", "bytes", "training")

Row = tuple[str, ...]


class Model:
    """A layer with its parameters: `model(x)` is its output for a batch.

    `input_shape` is that of one example, without the batch; it is optional if the first layer
    defines it. All shapes are checked at once, and errors name the layer that does not fit. The
    parameters depend on the seed alone: they are the same on every engine and device. Without a
    `device`, they are on `anydevice.device()`.

    >>> cpu = anydevice.device("cpu", engine="numpy")
    >>> layer = nn.Chain(nn.Dense(64, 128), "relu", nn.Dense(128, 10))
    >>> model = nn.Model(layer, seed=0, device=cpu)
    >>> model(numpy.ones((2, 64), numpy.float32)).shape
    (2, 10)
    >>> print(model)
    model                 output  parameters     bytes
    [0]    Dense(64→128)  128          8,320  32.5 KiB
    [1]    relu           128              0       0 B
    [2]    Dense(128→10)  10           1,290   5.0 KiB
    Chain  64 → 10                     9,610  37.5 KiB

    A model is a tree: `device(model)` and `to_device(model, "cpu")` return a model on that device,
    and `device_of` and `to_numpy` take it. It is immutable; `with_parameters` returns a new one.

    Raises `ConfigurationError` if shapes do not fit.
    """

    frozen: frozenset[str] = frozenset()
    properties: tuple[Any, ...] = ()

    def __init__(
        self,
        layer: Layer | str,
        input_shape: int | Sequence[int] | None = None,
        seed: int = 0,
        device: Device | str | None = None,
    ) -> None:
        described = as_layer(layer)
        shape: Any = inputs_of(described) or _shape_of(described, input_shape)
        self.input_shape: Any = shape
        self.layer = described.resolved(shape)
        self.output_shape = self.layer.output(shape)
        # Drawn in host memory and moved together: many small copies would take longer.
        drawn = self.layer.initial(rng(seed, Device("cpu", 0, engine="numpy")))
        self.parameters: Parameters = to_device(drawn, one_device(device))
        self._array_type, self._place = _type_and_place(self.parameters)

    def __call__(self, x: Array) -> Array:
        """Return the output for a batch, in inference and not in training.

        An array of the parameters' library is taken as it is. A NumPy array, a DataFrame of pandas
        or polars, or nested lists of numbers, is placed on their device first, and floating numbers
        get their dtype. A model is never moved by itself: in a `use_device` block of another device
        it is refused.

        >>> nn.build(nn.Dense(2, 3), device="cpu")([[1.0, 2.0]]).shape
        (1, 3)

        Raises `ConfigurationError` for arrays of other libraries and of shapes that do not fit, and
        `DeviceMismatchError` if the array or the block is of another device than the parameters.
        """
        _refuse_other_block(self._place)
        if type(x) is not self._array_type:
            x = as_batch(x, self.layer, self.input_shape, self.layer.like(self.parameters))
        return self.apply(self.parameters, x, _NOT_TRAINING)

    def apply(self, parameters: Parameters, x: Array, run: Run = _NOT_TRAINING) -> Array:
        """Compute the output for these parameters; differentiate this function."""
        try:
            return self.layer.apply(parameters, x, run)
        except (ConfigurationError, ValueError):
            if hasattr(x, "shape"):
                check_batch(self, tuple(x.shape))  # names the layer, if the shape is wrong
            raise
        except DeviceMismatchError as error:
            refuse_mismatch(error, x=x, parameters=parameters)  # names the parameter
            raise

    def with_parameters(self, parameters: Parameters) -> Model:
        """Return the model with other parameters, in the same tree and of the same shapes.

        They may be on another device, and of another dtype. Raises `ConfigurationError`, with the
        first difference.
        """
        mismatch = difference(self.parameters, parameters)
        if mismatch is not None:
            raise ConfigurationError(
                f"these parameters do not fit this model: {mismatch}", source="parameters"
            )
        return bound(self.layer, self.input_shape, parameters, self.frozen, self.properties)

    def with_layer(self, layer: Layer) -> Model:
        """Return the model with another layer that takes the same parameters."""
        return bound(layer, self.input_shape, self.parameters, self.frozen, self.properties)

    def with_properties(self, *properties: Any) -> Model:
        """Return the model with properties that are to hold for it, in place of its own.

        They are claims of `anydevice.proofs`, which are saved with the model, or functions as
        `anydevice.compile` takes them, which cannot be saved. They stay when the model is moved or
        trained; whether they hold for the new parameters is for `compile(properties=…)` to say.

        >>> model = nn.build(nn.Dense(2, 1), "sigmoid", device="cpu")
        >>> share = proofs.claim(proofs.within(0, 1), over=proofs.box(-1.0, 1.0))
        >>> model.with_properties(share).properties == (share,)
        True
        """
        for holds in properties:
            if not callable(holds) and not hasattr(holds, "region"):
                raise ConfigurationError(
                    "a property of a model is a claim with its region, as in proofs.claim("
                    f"proofs.within(0, 1), over=proofs.box(low, high)), not {holds!r}",
                    source="properties",
                )
        return bound(self.layer, self.input_shape, self.parameters, self.frozen, properties)

    def freeze(self, *names: str) -> Model:
        """Return the model with frozen parameters, which training does not change; by default all.

        A name is the path of a layer or of a parameter, as tables and errors have them; `*` stands
        for anything. `frozen` has the names of all frozen parameters. They stay frozen when the
        model is moved, saved or trained, until `unfreeze`. A layer whose state is frozen, such as a
        `BatchNorm`, behaves in training as in inference.

        >>> model = nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 2), device="cpu")
        >>> sorted(model.freeze("[0]", "*.bias").frozen)
        ['[0].bias', '[0].weight', '[2].bias']
        >>> model.freeze("[0]").unfreeze("*.bias").frozen
        frozenset({'[0].weight'})

        Raises `ConfigurationError`, with the nearest names, for a name that matches nothing.
        """
        return self._with_frozen(self.frozen | self._matching(names, "freeze"))

    def unfreeze(self, *names: str) -> Model:
        """Return the model with parameters that training changes again; see `freeze`."""
        return self._with_frozen(self.frozen - self._matching(names, "unfreeze"))

    def _matching(self, names: Sequence[str], source: str) -> frozenset[str]:
        known = leaf_names(self.parameters)
        matched: set[str] = set() if names else set(known)
        for name in names:
            if not isinstance(name, str):
                raise ConfigurationError(
                    f"{source} takes names such as '[0]' or '*.bias', not {name!r}", source=source
                )
            rest = name.removeprefix(self.layer.root)  # errors have it: Chain[2]
            path = rest if rest[:1] in ("", ".", "[") else name
            here = [leaf for leaf in known if name and matches(path, leaf)]
            if not here:
                raise unmatched(name, known, source)
            matched.update(here)
        return frozenset(matched)

    def _with_frozen(self, frozen: frozenset[str]) -> Model:
        return bound(self.layer, self.input_shape, self.parameters, frozen, self.properties)

    @property
    def parameter_count(self) -> int:
        """The number of parameters."""
        return sum(math.prod(leaf.shape) for leaf in leaves(self.parameters))

    def summary(self) -> None:
        """Print the table of layers, output shapes and parameters, as `print(model)` does."""
        print(self)

    def __str__(self) -> str:
        return hooks.render(self._table(), "text")

    def _repr_html_(self) -> str:
        return hooks.render(self._table(), "html")

    def _table(self) -> Table:
        counts = _Counts(self)
        rows = list(_rows(self.layer, self.input_shape, self.parameters, "", counts))
        sizes = f"{_sizes(self.input_shape)} → {_sizes(self.output_shape)}"
        *total, remark = _row(self.layer.root, sizes, "", self.parameters, "", counts)
        rows.append((*total, f"{counts.trained:,} trained, {remark}"))
        columns = 6 if remark else 5
        cells = [row[:columns] for row in rows]
        return Table(cells, _HEADINGS[:columns], (3, 4), title=repr(self))

    def __repr__(self) -> str:
        counts = _Counts(self)
        layers = len(list(_rows(self.layer, self.input_shape, self.parameters, "", counts)))
        try:
            device = parameters_device(self.parameters)
        except DeviceMismatchError:  # of a pipeline
            device = None
        parts = [
            self.layer.label if layers == 1 else f"{self.layer.root} of {layers} layers",
            f"{_sizes(self.input_shape)} → {_sizes(self.output_shape)}",
            f"{self.parameter_count:,} parameters",
            counts.text("", self.parameters),
            "" if device is None else f"{device} {device.engine}",
        ]
        return f"Model({', '.join(part for part in parts if part)})"


def build(
    *layers: Layer | str,
    input_shape: int | Sequence[int] | None = None,
    seed: int = 0,
    device: Device | str | None = None,
) -> Model:
    """Build a model of these layers in sequence; see `Model`.

    >>> nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 2), device="cpu").output_shape
    (2,)
    """
    layer = layers[0] if len(layers) == 1 else Chain(*layers)
    return Model(layer, input_shape, seed, device)


def built_for(
    layer: Layer | str, x: Any, seed: int = 0, device: Device | str | None = None
) -> Model:
    """Return the model of a layer whose examples are those of a batch, which must be an array."""
    layer, table = as_layer(layer), without_tables(x)
    if inputs_of(layer):
        return Model(layer, None, seed, device)
    try:
        shape = tuple(table.shape if hasattr(table, "shape") else np.asarray(table).shape)
    except (TypeError, ValueError):
        shape = ()
    if not shape:
        raise ConfigurationError(
            f"the input shape of {layer.label} is taken from the first batch, which must be an "
            f"array, not {type(x).__name__}; or set it with nn.build(…, input_shape=…)",
            source="input_shape",
        )
    return Model(layer, tuple(map(int, shape[1:])), seed, device)


def bound(
    layer: Layer,
    input_shape: Any,
    parameters: Parameters,
    frozen: frozenset[str] = frozenset(),
    properties: tuple[Any, ...] = (),
) -> Model:
    """Return the model of a layer with given parameters; none are drawn."""
    model = Model.__new__(Model)
    model.layer = layer
    model.input_shape = input_shape
    model.output_shape = layer.output(input_shape)
    model.parameters = parameters
    model.frozen = frozen
    model.properties = properties
    model._array_type, model._place = _type_and_place(parameters)
    return model


def check_batch(model: Model, shape: Shape) -> None:
    """Raise `ConfigurationError`, naming the layer, if the model does not take this shape.

    It takes a batch of examples. One example without a batch is taken if the model works on the
    last axes alone, so that it means the same with axes before it and without.

    >>> model = nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 2), device="cpu")
    >>> check_batch(model, (3, 4)), check_batch(model, (4,))
    (None, None)
    """
    layer, is_example = model.layer, shape == model.input_shape
    if is_example and _takes_more_axes(layer, shape):
        return
    try:
        layer.output(shape[1:])
    except MisfitError as error:
        if is_example:
            error.args = (f"{error}; x has the shape of one example, {shape}: give x[None]",)
        raise
    if is_example:
        raise ConfigurationError(
            f"x has the shape of one example, {shape}, and {layer.label} would read it as a batch "
            f"of {shape[0]}: give x[None] for one example, or build the model with input_shape="
            f"{shape[1:]}",
            source="x",
        )


def _takes_more_axes(layer: Layer, shape: Shape) -> bool:
    """Whether axes of any size before those of an example reach the output as they are."""
    try:
        output = layer.output(shape)
        return all(layer.output((size, *shape)) == (size, *output) for size in (2, 3))
    except ConfigurationError:
        return False


def trained_leaves(model: Model) -> list[bool]:
    """Return for each leaf whether gradients move it: neither frozen parameters, nor state."""
    untrained = model.frozen.union(state_paths(model.layer))
    return [name not in untrained for name in leaf_names(model.parameters)]


def frozen_layers(model: Model) -> frozenset[str]:
    """Return the paths of layers whose state is frozen, for `Run.frozen`."""
    places = state_places(model.layer)
    moving = {path for path, name in places if f"{path}.{name}" not in model.frozen}
    return frozenset(path for path, _ in places) - moving


def example_shape(x: Any) -> Any:
    """Return the shape of an example of a batch; of a dict of arrays, one by name."""
    if isinstance(x, Mapping):
        return {name: example_shape(part) for name, part in x.items()}
    return tuple(x.shape if hasattr(x, "shape") else np.shape(x))[1:]


def inputs_of(layer: Layer) -> dict[str, Shape]:
    """Return the shapes of the inputs that a layer takes by name, if it does."""
    if isinstance(layer, Input):
        return {layer.name: layer.shape}
    shapes: dict[str, Shape] = {}
    for _, part in layer.parts[:1] if isinstance(layer, Chain) else layer.parts:
        for name, shape in inputs_of(part).items():
            if shapes.setdefault(name, shape) != shape:
                text = f"the inputs {name!r} have the shapes {shapes[name]} and {shape}"
                raise ConfigurationError(text, source="layer")
    return shapes


def _shape_of(layer: Layer, given: int | Sequence[int] | None) -> Shape:
    shape = layer.input_shape if given is None else given
    if shape is None:
        first = _first(layer)
        if first.inferred[0] and getattr(first, first.inferred[0]) is None:
            raise ConfigurationError(
                f"{first.label} takes its size from the input, whose shape is not known yet; give "
                "the shape of one example, without the batch, as in input_shape=(64,), or give "
                "nn.train the layer: it takes the shape from the first batch",
                source="input_shape",
            )
        raise ConfigurationError(
            f"{layer.label} takes examples of many shapes; give one, without the batch, as in "
            f"input_shape={_likely_shape(layer)}",
            source="input_shape",
        )
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigurationError(
            f"input_shape must be the shape of one example, without the batch, not {given!r}",
            source="input_shape",
        )
    return sizes


register_type(
    Model,
    lambda model: {"parameters": model.parameters},
    lambda model, parts: _rebuilt(model, parts["parameters"]),
)


def _rebuilt(model: Model, parameters: Parameters) -> Model:
    """Return the model with moved parameters; a pipeline that was moved is one layer again."""
    same = all(map(is_, leaves(parameters), leaves(model.parameters)))
    layer = model.layer if same else model.layer.alone
    return bound(layer, model.input_shape, parameters, model.frozen, model.properties)


def parameters_device(parameters: Parameters) -> Device | None:
    """Return the device of parameters, with their library as its engine, or `None`."""
    place, owner = device_of(leaves(parameters)), owner_of(first_leaf(parameters))
    return None if place is None or owner is None else place.served_by(owner.name)


def _type_and_place(parameters: Parameters) -> tuple[type | None, str | None]:
    """Return the type of the first parameter, and its device if it is on one only."""
    first = first_leaf(parameters)
    owner = owner_of(first)
    if owner is None or len(owner.devices_of(first)) != 1:
        return None if first is None else type(first), None
    return type(first), str(device_of(first))


def _refuse_other_block(place: str | None) -> None:
    """Refuse a call in a `use_device` block for another device than the parameters'."""
    block = block_device()
    if block is None or place is None or place == str(block):
        return
    raise DeviceMismatchError(
        f'this model is on {place}, and it is called in a block of use_device("{block}"); move it '
        f'with to_device(model, "{block}"), or call it outside of the block',
        ("model", "use_device"),
    )


# PyTorch's compiler runs this while it looks through the caller.
_refuse_other_block._dynamo_marked_constant = True  # type: ignore[attr-defined]


def as_batch(x: Any, layer: Layer, input_shape: Any, parameters: Parameters) -> Any:
    """Place a batch as an array of the parameters' library on their device."""
    if isinstance(input_shape, dict):
        layer.output(example_shape(x))  # names an input that is missing
        return {n: as_batch(x[n], layer, own, parameters) for n, own in input_shape.items()}
    given, x = x, without_tables(x)
    if isinstance(x, list | tuple) and _is_of_numbers(x):
        x = _array_of(x, layer.takes_ids_below is not None, input_shape)
    elif isinstance(x, _NUMBERS):
        raise ConfigurationError(
            f"this model takes a batch of examples of the shape {input_shape}, not the single "
            f"number {x}",
            source="x",
        )
    first = first_leaf(parameters)
    if not (is_array(x) and is_array(first)):
        return x
    owner, wanted = owner_of(x), owner_of(first)
    assert owner is not None
    assert wanted is not None
    if owner is wanted and x is given:
        return x
    if owner.name != "numpy":
        theirs, mine = (registry.row_of(engine.name).label for engine in (owner, wanted))
        raise ConfigurationError(
            f"this is an array of {theirs}, and the model's parameters are of {mine}; move one of "
            "them with anydevice.to_device(…, device, convert=True)",
            source="x",
        )
    return _place_like(x, first, wanted)


def _place_like(x: Array, like: Array, owner: Engine) -> Array:
    """Place a NumPy array on the device of another one; floating numbers get its dtype."""
    place = device_of(like)
    assert place is not None
    xp = primitives(like)
    dtype = xp.dtype(like)
    floating = primitives(x).dtype(x).kind == "float" and dtype.kind == "float"
    # `narrow`: floating numbers are cast to the parameters' dtype anyway.
    there = to_device(x, place.served_by(owner.name), convert=True, narrow=floating)
    return xp.astype(there, dtype) if floating else there


def _is_of_numbers(x: Any) -> bool:
    """Whether nested lists begin with a number or a NumPy array, at any depth."""
    while isinstance(x, list | tuple) and x:
        x = x[0]
    return isinstance(x, (*_NUMBERS, list, tuple)) or type(x) is np.ndarray


def _array_of(x: Any, ids: bool, input_shape: Shape) -> Array:
    """Return nested lists as an array: ids as int32 if they fit, everything else as float32."""
    try:
        array = np.asarray(x)
        if not ids or array.dtype.kind not in "iu":
            return array.astype("float32")
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"this is not a batch of examples of shape {input_shape}: {error}",
            source="x",
        ) from None
    small = array.astype("int32")
    return small if (small == array).all() else array


def _first(layer: Layer) -> Layer:
    """Return the innermost layer that gets the model's input."""
    return _first(layer.parts[0][1]) if layer.parts else layer


def _likely_shape(layer: Layer) -> Shape:
    """Return a usual shape that the layer accepts, or at least its first part; for a message."""
    for shape in _usual_shapes(layer):
        try:
            layer.output(shape)
        except ConfigurationError:
            continue
        return shape
    return _likely_shape(layer.parts[0][1]) if layer.parts else (28, 28)


def _usual_shapes(layer: Layer) -> Iterator[Shape]:
    if layer.takes_ids_below is not None:
        yield from ((128,), (16,), (1,))
        return
    yield from ((28, 28), (3, 28, 28))
    for features in _features(layer):
        yield (features, 28, 28)
        yield (features, 224, 224)
        yield from ((128, features), (16, features), (1, features))
        yield (features,)


def _features(layer: Layer) -> Iterator[int]:
    """Yield the numbers of features and channels of a layer and its parts, in order."""
    for name in ("inputs", "size"):
        value = getattr(layer, name, None)
        if isinstance(value, int):
            yield value
    for _, part in layer.parts:
        yield from _features(part)


class _Counts:
    """The numbers of parameters that training does not move: frozen ones, and state."""

    def __init__(self, model: Model) -> None:
        state = dict.fromkeys(state_paths(model.layer), "state")
        self._kinds = state | dict.fromkeys(model.frozen, "frozen")
        moved = zip(leaves(model.parameters), trained_leaves(model), strict=True)
        self.trained = sum(math.prod(array.shape) for array, own in moved if own)

    def text(self, path: str, parameters: Parameters) -> str:
        counts = {"frozen": 0, "state": 0}
        for name, array in zip(leaf_names(parameters, path), leaves(parameters), strict=True):
            if name in self._kinds:
                counts[self._kinds[name]] += math.prod(array.shape)
        return ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)


def _rows(
    layer: Layer,
    shape: Any,
    parameters: Parameters,
    path: str,
    counts: _Counts,
    remark: str = "",
) -> Iterator[Row]:
    """Yield a row of the table for every layer of a chain, and of the chains inside it."""
    if layer.parts and not layer.parts[0][0]:  # it wraps a layer, such as one to recompute
        inside = layer.parts[0][1]
        remark += layer.label.removeprefix(inside.label)
        yield from _rows(inside, shape, parameters, path, counts, remark)
    elif isinstance(layer, Chain):
        for (step, part), own in zip(layer.parts, parameters, strict=True):
            yield from _rows(part, shape, own, path + step, counts, remark)
            shape = part.output(shape)
    elif isinstance(layer, TiedEmbedding):
        weight, output = parameters["weight"], _sizes(layer.output(shape))
        yield _row(path, layer.label, output, weight, f"{path}.weight", counts)
        inner = (*shape, layer.size)
        inside, own = layer.inside, parameters["inside"]
        yield from _rows(inside, inner, own, f"{path}.inside", counts, remark)
    else:
        several = layer.parts and (isinstance(shape, dict) or isinstance(layer, Heads))
        for at, (step, part) in enumerate(layer.parts if several else ()):
            own = parameters[at if isinstance(parameters, list) else step[1:]]
            yield from _rows(part, shape, own, path + step, counts, remark)
        label, output = layer.label + remark, _sizes(layer.output(shape))
        if not isinstance(layer, Heads):
            yield _row(path, label, output, [] if several else parameters, path, counts)


def _row(
    shown: str, label: str, output: str, parameters: Parameters, path: str, counts: _Counts
) -> Row:
    arrays = leaves(parameters)
    count = sum(math.prod(array.shape) for array in arrays)
    size = sum(math.prod(array.shape) * primitives(array).dtype(array).itemsize for array in arrays)
    remark = counts.text(path, parameters)
    return shown, label, output, f"{count:,}", format_size(size), remark


def _sizes(shape: Any) -> str:
    if isinstance(shape, dict):
        return ", ".join(f"{name} {_sizes(own)}" for name, own in shape.items())
    return "×".join(map(str, shape)) or "1"
