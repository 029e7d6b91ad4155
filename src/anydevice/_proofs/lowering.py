"""Lowers models to a `Network` of affine nodes and elementwise functions, exactly.

Layers of `nn` are lowered by their classes, modules of other libraries by a trace of one run. A
layer that cannot be lowered is refused with its path, before any proof begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod, sqrt
from typing import Any

import numpy as np

from anydevice._arrays.move import to_device
from anydevice._core.device import Device
from anydevice._core.dtypes import as_dtype
from anydevice._core.protocols import FixedTensor, SymbolicTensor, Windows
from anydevice._core.trees import mapped
from anydevice._libraries import registry
from anydevice._libraries.base import ModelAdapter, host_array
from anydevice._libraries.native import NativeAdapter
from anydevice._libraries.registry import adapter_of
from anydevice._nn import convolution, layers, recurrent, transformer
from anydevice._nn.layer import Layer, Parameters, Shape
from anydevice._nn.losses import _without as without_last
from anydevice._nn.model import Model
from anydevice._nn.recompute import Recomputed
from anydevice._proofs.evaluation import evaluate, points
from anydevice._proofs.graph import Builder, Cells, LoweredModel, refused, rounds, windows_of
from anydevice._proofs.properties import Region
from anydevice._proofs.tracing import NetworkTrace
from anydevice.errors import AnyDeviceError, ConfigurationError, UnsupportedError, VerificationError

_LARGEST = 1e36
"""Only smaller numbers are compared: float32 overflows not far above."""


def lower(
    model: Any, shape: Shape | None = None, *, classes: bool = False, over: Region | None = None
) -> LoweredModel:
    """Return the network of a model, for examples of a shape.

    A `nn.Model` knows its shape. With `classes`, a softmax at the end is dropped, which does not
    change the order of the outputs. The network of a module is compared with the module, also at
    points of the region `over`.

    >>> from anydevice import nn
    >>> model = nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 2), "softmax", device="cpu")
    >>> lowered = lower(model, classes=True)
    >>> [(node.size, node.function) for node in lowered.network.nodes], lowered.dropped
    ([(8, 'relu'), (2, '')], 'softmax')

    Raises `UnsupportedError`, with the path of the layer, for a layer that proofs do not take, and
    `ConfigurationError` for weights that are NaN or infinite and for modules in training mode.
    """
    if isinstance(model, NativeAdapter):
        model = model.model
    if isinstance(model, Model):
        return _lower_model(model, shape, classes)
    adapter = model if isinstance(model, ModelAdapter) else adapter_of(model)
    if adapter.library is None:
        raise UnsupportedError(
            f"{adapter.kind}: a plain function has no layers to prove anything of; give a "
            "nn.Model, a module of PyTorch, Flax NNX or Equinox, or the path of an ONNX file"
        )
    if adapter.library == "mlx":
        raise UnsupportedError(
            f"{adapter.kind}: proofs do not take modules of MLX; build the same layers with "
            "anydevice.nn, PyTorch or JAX and copy the weights, or export the model to ONNX and "
            "give the path of that file"
        )
    if shape is None:
        raise ConfigurationError(
            f"a {adapter.kind} does not know the shape of its examples; give a region with one, "
            "such as proofs.box(low, high) over arrays of the shape of one example",
            source="over=",
        )
    adapter.check_verifiable()
    _refuse_weights(adapter.weights())
    trace_output = registry.part(adapter.library, "trace").trace_output
    trace = NetworkTrace(shape)
    try:
        lowered = trace.lowered(trace_output(adapter, trace, shape), classes)
    except AnyDeviceError:
        raise
    except Exception as error:  # the code of a module may raise anything
        raise ConfigurationError(
            f"the {adapter.kind} does not run for an example of the shape {shape}: "
            f"{type(error).__name__}: {error}",
            source="over=",
        ) from error
    _check_agrees(lowered, caller(adapter, shape), over)
    return lowered


def caller(adapter: ModelAdapter, shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """Return the module as a function of a NumPy array with one example."""
    assert adapter.library is not None
    device = (adapter.device or Device("cpu", 0)).served_by(adapter.library)
    call = registry.part(adapter.library, "trace").batch_call(adapter, shape)
    dtypes = [host_array(x).dtype for x in adapter.weights().values()]
    dtype = next((dtype for dtype in dtypes if dtype.kind == "f"), np.dtype(np.float32))

    def run(x: Any) -> Any:
        with adapter.scope():
            return host_array(call(to_device(x.astype(dtype), device, convert=True)))

    return run


def _refuse_weights(weights: Mapping[str, Any]) -> None:
    """Raise an error that names the first weight of 16 bits, or with a NaN or an infinity."""
    for path, weight in weights.items():
        dtype = as_dtype(weight.dtype)
        if dtype.kind != "float":
            continue
        if dtype.bits < 32:
            raise UnsupportedError(
                f"{path} is {dtype}, and proofs do not cover computations in 16 bits; "
                "convert the model to float32, and prove and run that"
            )
        if not np.isfinite(host_array(weight)).all():
            raise ConfigurationError(
                f"{path} has a NaN or an infinity in it; nothing can be proved of this model",
                source=path,
            )


def _check_agrees(lowered: LoweredModel, call: Callable[[Any], Any], over: Region | None) -> None:
    """Raise `VerificationError` if the network gives other outputs than the model at some point."""
    inputs = prod(lowered.input_shape)
    x = points([] if over is None else [over.corners(inputs)], inputs, reach=0.5)
    x = x.reshape(-1, *lowered.input_shape).astype(np.float32)
    outputs, off = evaluate(lowered.network, x.reshape(len(x), -1).astype(np.float64))
    for row, expected, error in zip(x, outputs, off, strict=True):
        if not (np.abs(expected) + error < _LARGEST).all():
            continue  # an execution may overflow, and no proof says otherwise
        got = np.asarray(call(row[None]), np.float64).reshape(-1)
        if lowered.dropped:
            logits = expected.reshape(lowered.output_shape)
            shares = np.exp(logits - logits.max(-1, keepdims=True))
            expected = (shares / shares.sum(-1, keepdims=True)).reshape(-1)
            got = np.exp(got) if lowered.dropped == "log_softmax" else got
        if got.shape != expected.shape or not (np.abs(got - expected) <= 4 * error + 1e-6).all():
            raise VerificationError(
                "the lowered network gives other outputs than the model, so a proof would be about "
                "another function; the model depends on something that is no part of its layers",
                where=type(lowered).__name__,
            )


# Layers of nn


def _lower_model(model: Model, shape: Shape | None, classes: bool) -> LoweredModel:
    if shape is not None and prod(shape) != prod(model.input_shape):
        raise ConfigurationError(
            f"the model takes examples of the shape {model.input_shape}, and the region has the "
            f"shape {shape}",
            source="over=",
        )
    layer, dropped = model.layer, ""
    if classes and len(model.output_shape) == 1:
        without = without_last(layer, "softmax")
        if without is not None:
            layer, dropped = without, "softmax"
    root = layer.root
    _refuse_layers(layer, root)
    _refuse_weights(adapter_of(model).weights())
    graph = Builder(prod(model.input_shape))
    cells = np.arange(graph.inputs).reshape(model.input_shape)
    parameters = mapped(lambda x: np.asarray(host_array(x)), model.parameters)
    cells = _lower_layer(graph, layer, parameters, cells, root)
    return LoweredModel(graph.network(cells), model.input_shape, cells.shape, dropped)


def _refuse_layers(layer: Layer, path: str) -> None:
    """Raise `UnsupportedError` for the first layer that cannot be lowered."""
    if layer.takes_ids_below is not None:
        raise refused(
            path,
            f"{layer.label}, whose input is ids",
            "prove a property of the layers behind the embedding, over boxes of vectors",
        )
    if type(layer) not in (*_LAYERS, *_CONTAINERS):
        raise refused(f"{path} {layer.label}", f"a {type(layer).__name__}")
    if isinstance(layer, transformer.Attention) and layer.rope:
        raise refused(f"{path} {layer.label}", "rope", "use a PositionEmbedding")
    for name in (getattr(layer, "name", None), getattr(layer, "activation", None)):
        if name is not None and name not in _ACTIVATIONS and name != "swiglu":
            raise refused(f"{path} {layer.label}", f"the activation {name}")
    for step, part in layer.parts:
        _refuse_layers(part, path + step)


def _lower_layer(
    graph: Builder, layer: Layer, parameters: Parameters, cells: Cells, path: str
) -> Cells:
    graph.path = f"{path} {layer.label}"
    if type(layer) in _CONTAINERS:
        return _CONTAINERS[type(layer)](graph, layer, parameters, cells, path)
    return _LAYERS[type(layer)](graph, layer, parameters, cells)


def _weights_of(parameters: Parameters, *names: str) -> tuple[list[Any], int]:
    """Return parameters in float64, `None` for missing ones, and 1 if float32 rounds some."""
    arrays = [parameters.get(name) for name in names]
    wide = [None if array is None else np.asarray(array, np.float64) for array in arrays]
    return wide, max([rounds(array) for array in wide if array is not None], default=0)


def _dense(graph: Builder, layer: Any, parameters: Any, cells: Cells) -> Cells:
    (weight, bias), extra = _weights_of(parameters, "weight", "bias")
    return _apply_activation(graph, graph.dense(cells, weight, bias, extra), layer.activation)


def _convolution(graph: Builder, layer: Any, parameters: Any, cells: Cells) -> Cells:
    (weight, bias), extra = _weights_of(parameters, "weight", "bias")
    windows = _windows(weight.ndim - 2, layer.stride, layer.padding)
    if isinstance(layer, convolution.ConvTranspose2d):
        windows = windows._replace(more=_windows(2, layer.output_padding).stride)
    y = graph.convolution(cells, weight, bias, windows, getattr(layer, "groups", None) or 1, extra)
    return _apply_activation(graph, y, layer.activation)


def _windows(
    axes: int, stride: int | tuple[int, ...], padding: int | tuple[int, ...] = 0
) -> Windows:
    steps, widths = [(x,) * axes if isinstance(x, int) else x for x in (stride, padding)]
    return Windows(steps, [(width, width) for width in widths], (1,) * axes)


def _pool_windows(layer: Any, cells: Cells) -> Cells:
    """Return the windows of a pooling, with elements along the last axis."""
    size = (layer.size,) * 2 if isinstance(layer.size, int) else layer.size
    windows = _windows(2, size if layer.stride is None else layer.stride)
    elements = windows_of(cells, size, windows)
    return elements.reshape(*elements.shape[:3], -1)


def _by_row(layer: Any, cells: Cells) -> Cells:
    """Return the cells that a global pooling joins as rows: a channel's, or a feature's."""
    rows = cells if layer.over is None else np.moveaxis(cells, -1, 0)
    return rows.reshape(len(rows), -1)


def _apply_activation(graph: Builder, cells: Cells, name: str | None) -> Cells:
    return cells if name is None else _ACTIVATIONS[name](graph, cells)


_ACTIVATIONS: dict[str, Callable[[Builder, Cells], Cells]] = {
    "identity": lambda graph, cells: cells,
    "leaky_relu": lambda graph, cells: graph.leaky_relu(cells, 0.01),
    "softmax": lambda graph, cells: graph.softmax(cells),
} | {
    name: partial(Builder.function, name=name)
    for name in ("relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "silu")
}


def _batch_norm(graph: Builder, layer: Any, parameters: Any, cells: Cells) -> Cells:
    names = ("weight", "bias", "mean", "variance")
    (weight, bias, mean, variance), _ = _weights_of(parameters, *names)
    return graph.normalize(cells, weight, bias, mean, variance, layer.eps)


def _layer_norm(graph: Builder, layer: Any, parameters: Any, cells: Cells) -> Cells:
    (weight, bias), _ = _weights_of(parameters, "weight", "bias")
    return graph.layer_norm(cells, weight, bias, layer.eps)


def _group_norm(graph: Builder, layer: Any, parameters: Any, cells: Cells) -> Cells:
    (weight, bias), _ = _weights_of(parameters, "weight", "bias")
    y = graph.layer_norm(cells.reshape(layer.groups, -1), None, None, layer.eps)
    scale, shift = (array.reshape(-1, *[1] * (cells.ndim - 1)) for array in (weight, bias))
    return graph.affine(y.reshape(cells.shape), scale, shift, roundings=4)


def _upsample(graph: Builder, layer: Any, parameters: Any, cells: Cells) -> Cells:
    factor = layer.factor
    for axis, size in enumerate(cells.shape[1:], 1):
        if layer.linear:
            cells = graph.interpolate(cells, axis, size * factor, factor, "half_pixel")
        else:
            cells = np.repeat(cells, factor, axis)
    return cells


def _recurrent(graph: Builder, layer: Any, parameters: Any, cells: Cells) -> Cells:
    trace = NetworkTrace(cells.shape, graph)
    arrays, _ = _weights_of(parameters, "input", "recurrent", "input_bias", "recurrent_bias")
    weights = [None if array is None else FixedTensor(array) for array in arrays]
    steps = trace.recurrent(layer._op, SymbolicTensor(cells[:, None]), weights)
    rows = [trace.cells(step)[0] for step in steps]
    return rows[-1] if layer.last else np.stack(rows)


def _bidirectional(graph: Builder, layer: Any, parameters: Any, cells: Cells, path: str) -> Cells:
    y = _lower_layer(graph, layer.layer, parameters["forward"], cells, f"{path}.forward")
    z = _lower_layer(graph, layer.layer, parameters["backward"], cells[::-1], f"{path}.backward")
    return np.concatenate([y, z if layer.layer.last else z[::-1]], -1)


def _position_embedding(graph: Builder, layer: Any, parameters: Any, cells: Cells) -> Cells:
    (weight,), extra = _weights_of(parameters, "weight")
    return graph.affine(cells, 1.0, weight[: cells.shape[-2]], roundings=1 + extra)


def _chain(graph: Builder, layer: Any, parameters: Any, cells: Cells, path: str) -> Cells:
    for (step, part), of_part in zip(layer.parts, parameters, strict=True):
        cells = _lower_layer(graph, part, of_part, cells, path + step)
    return cells


def _residual(graph: Builder, layer: Any, parameters: Any, cells: Cells, path: str) -> Cells:
    inside = _lower_layer(graph, layer.layer, parameters["layer"], cells, f"{path}.layer")
    if layer.shortcut is not None:
        of_shortcut = parameters["shortcut"]
        cells = _lower_layer(graph, layer.shortcut, of_shortcut, cells, f"{path}.shortcut")
    graph.path = f"{path} {layer.label}"
    return graph.combine([(1.0, inside), (1.0, cells)], roundings=1)


def _attention(graph: Builder, layer: Any, parameters: Any, cells: Cells) -> Cells:
    (qkv, output, qkv_bias, output_bias), extra = _weights_of(
        parameters, "qkv", "output", "qkv_bias", "output_bias"
    )
    tokens, size = cells.shape
    joined = graph.dense(cells, qkv, qkv_bias, extra)
    key_heads = layer.heads if layer.kv_heads is None else layer.kv_heads
    edges = [size, size + key_heads * layer.head_size]
    q, k, v = [
        heads.reshape(tokens, -1, layer.head_size).swapaxes(0, 1)
        for heads in np.split(joined, edges, axis=1)
    ]
    shared = layer.heads // key_heads
    k, v = np.repeat(k, shared, axis=0), np.repeat(v, shared, axis=0)
    y = graph.attention(q, k, v, 1 / sqrt(layer.head_size), layer.causal)
    return graph.dense(y.swapaxes(0, 1).reshape(tokens, size), output, output_bias, extra)


def _gated_mlp(graph: Builder, layer: Any, parameters: Any, cells: Cells) -> Cells:
    (gate_up, down), extra = _weights_of(parameters, "gate_up", "down")
    joined = graph.dense(cells, gate_up, None, extra)
    gate, up = np.split(joined, 2, axis=-1)
    return graph.dense(graph.product(graph.function(gate, "silu"), up), down, None, extra)


def _block(graph: Builder, layer: Any, parameters: Any, cells: Cells, path: str) -> Cells:
    inside = dict(layer.parts)
    for name in ("attention", "mlp"):
        y = cells
        for part in (f"{name}_norm", name):
            y = _lower_layer(graph, inside[f".{part}"], parameters[part], y, f"{path}.{part}")
        graph.path = f"{path} {layer.label}"
        cells = graph.combine([(1.0, cells), (1.0, y)], roundings=1)
    return cells


_LAYERS: dict[type[Layer], Callable[[Builder, Any, Any, Cells], Cells]] = {
    layers.Activation: lambda graph, layer, _, cells: _apply_activation(graph, cells, layer.name),
    layers.BatchNorm: _batch_norm,
    layers.Dense: _dense,
    layers.Dropout: lambda graph, layer, _, cells: cells,
    layers.Flatten: lambda graph, layer, _, cells: cells.reshape(-1),
    layers.GroupNorm: _group_norm,
    layers.LayerNorm: _layer_norm,
    layers.LeakyReLU: lambda graph, layer, _, cells: graph.leaky_relu(cells, layer.slope),
    layers.PositionEmbedding: _position_embedding,
    layers.Transpose: lambda graph, layer, _, cells: cells.reshape(len(cells), -1).T,
    layers.RMSNorm: lambda graph, layer, parameters, cells: graph.rms_norm(
        cells, _weights_of(parameters, "weight")[0][0], layer.eps
    ),
    convolution.Conv1d: _convolution,
    convolution.Conv2d: _convolution,
    convolution.ConvTranspose2d: _convolution,
    convolution.AvgPool2d: lambda graph, layer, _, cells: graph.mean(_pool_windows(layer, cells)),
    convolution.MaxPool2d: lambda graph, layer, _, cells: graph.largest(
        _pool_windows(layer, cells)
    ),
    convolution.GlobalAvgPool: lambda graph, layer, _, cells: graph.mean(_by_row(layer, cells)),
    convolution.GlobalMaxPool: lambda graph, layer, _, cells: graph.largest(_by_row(layer, cells)),
    convolution.Upsample: _upsample,
    recurrent.GRU: _recurrent,
    recurrent.LSTM: _recurrent,
    transformer.Attention: _attention,
    transformer.GatedMLP: _gated_mlp,
}
"""The function that lowers each layer, from its parameters and the cells of its input."""

_CONTAINERS: dict[type[Layer], Callable[[Builder, Any, Any, Cells, str], Cells]] = {
    recurrent.Bidirectional: _bidirectional,
    layers.Chain: _chain,
    layers.Residual: _residual,
    Recomputed: lambda graph, layer, parameters, cells, path: _lower_layer(
        graph, layer.layer, parameters, cells, path
    ),
    transformer.TransformerBlock: _block,
}
"""The function that lowers a layer made of others, which takes its path, too."""
