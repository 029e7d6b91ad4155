"""Recurrent layers: an example is (positions, features), the positions in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from anydevice import _ops as ops
from anydevice._core.array import Array
from anydevice._nn.initializers import ZEROS, Initial, initializer_of
from anydevice._nn.layer import (
    Check,
    Flag,
    Inferred,
    Layer,
    Parameters,
    Run,
    Shape,
    Size,
    features_last,
)
from anydevice._ops.arguments import widened
from anydevice._ops.dispatch import own_version, primitives
from anydevice._ops.dispatch import run as run_op

if TYPE_CHECKING:
    from anydevice._arrays.random.generator import Random

States = tuple[Array, ...]
Step = Callable[[States, Array], States]
"""Computes the next states from the states and the input of a step; the first is the output."""


class _Recurrent(Layer):
    """The base class of layers that go through a sequence step by step."""

    inputs: Inferred
    outputs: Size
    last: Flag = False
    bias: Flag = True
    initializer: Initial = "lecun"

    inferred = ("inputs", -1)
    _gates = 0
    _op = ""

    @property
    def label(self) -> str:
        return f"{type(self).__name__}({self.inputs}→{self.outputs})"

    def output(self, shape: Shape) -> Shape:
        self._check(shape)
        return features_last((self.outputs,) if self.last else (shape[0], self.outputs))

    def _check(self, shape: Shape) -> None:
        if len(shape) != 2 or not shape[0]:
            raise self.misfit(f"got the shape {shape}, expected (positions, {self.inputs})")
        self.takes_features(shape, self.inputs)

    def initial(self, generator: Random) -> Parameters:
        make, rows = initializer_of(self.initializer), self._gates * self.outputs
        parameters = {
            name: make(generator, (rows, size), size, self.outputs)
            for name, size in (("input", self.inputs), ("recurrent", self.outputs))
        }
        if self.bias:
            for name in ("input_bias", "recurrent_bias"):
                parameters[name] = ZEROS(generator, (rows,), 1, 1)
        return parameters

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        self._check(tuple(x.shape[1:]))
        names = ("input", "recurrent", "input_bias", "recurrent_bias")
        weights = [parameters.get(name) for name in names]
        definition = _DEFINITIONS[self._op]
        return run_op(own_version(x, self._op, definition), definition, x, *weights, self.last)


class GRU(_Recurrent):
    """A gated recurrent unit over a sequence (time, inputs), as PyTorch and cuDNN define it.

    The output has all steps, (time, outputs), or with `last` only the last one, (outputs,).
    Its parameters are `input` (3 outputs, inputs) and `recurrent` (3 outputs, outputs), for the
    reset gate, the update gate and the new value in this order, and with `bias` also `input_bias`
    and `recurrent_bias`.

    >>> GRU(8, 16).output((100, 8)), GRU(8, 16, last=True).output((100, 8))
    ((100, 16), (16,))
    """

    _gates = 3
    _op = "gru"


class LSTM(_Recurrent):
    """A long short-term memory over a sequence (time, inputs).

    The output has all steps, (time, outputs), or with `last` only the last one, (outputs,).
    Its parameters are `input` (4 outputs, inputs) and `recurrent` (4 outputs, outputs), for the
    input gate, the forget gate, the new value and the output gate in this order, and with `bias`
    also `input_bias` and `recurrent_bias`.

    >>> LSTM(8, 16).output((100, 8)), LSTM(8, 16, last=True).output((100, 8))
    ((100, 16), (16,))
    """

    _gates = 4
    _op = "lstm"


Directed = Annotated[_Recurrent, Check("a GRU or LSTM", lambda x: isinstance(x, _Recurrent))]


class Bidirectional(Layer):
    """A `GRU` or `LSTM` in both directions: an output has the features of both.

    With `last`, that is the last step of the one and the first step of the other. The parameters
    `forward` and `backward` are those of the layer.

    >>> Bidirectional(LSTM(8, 16)).output((100, 8))
    (100, 32)
    """

    layer: Directed

    @property
    def parts(self) -> Sequence[tuple[str, Layer]]:
        return [(".forward", self.layer), (".backward", self.layer)]

    def output(self, shape: Shape) -> Shape:
        inside = self.output_of(".forward", self.layer, shape)
        return features_last((*inside[:-1], 2 * inside[-1]))

    def initial(self, generator: Random) -> Parameters:
        pairs = zip(("forward", "backward"), generator.split(2), strict=True)
        return {name: self.layer.initial(own) for name, own in pairs}

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        y = run.through(".forward", self.layer, parameters["forward"], x)
        z = run.through(".backward", self.layer, parameters["backward"], ops.flip(x, 1))
        return ops.concat([y, z if self.layer.last else ops.flip(z, 1)], -1)


def _gru_step(recurrent: Array, bias: Array | None) -> Step:
    size = recurrent.shape[1]

    def step(states: States, given: Array) -> States:
        (before,) = states
        own = ops.linear(before, recurrent, bias)
        reset, update = (
            ops.sigmoid(ops.add(_gate(given, at, size), _gate(own, at, size))) for at in (0, 1)
        )
        remembered = ops.multiply(reset, _gate(own, 2, size))
        new = ops.tanh(ops.add(_gate(given, 2, size), remembered))
        return (ops.add(new, ops.multiply(update, ops.subtract(before, new))),)

    return step


def _lstm_step(recurrent: Array, bias: Array | None) -> Step:
    size = recurrent.shape[1]

    def step(states: States, given: Array) -> States:
        output, cell = states
        gates = ops.add(given, ops.linear(output, recurrent, bias))
        enter, forget, leave = (ops.sigmoid(_gate(gates, at, size)) for at in (0, 1, 3))
        new = ops.multiply(enter, ops.tanh(_gate(gates, 2, size)))
        cell = ops.add(ops.multiply(forget, cell), new)
        return ops.multiply(leave, ops.tanh(cell)), cell

    return step


def _gate(gates: Array, at: int, size: int) -> Array:
    return ops.slice_axis(gates, 1, at * size, (at + 1) * size)


def _define(count: int, make_step: Callable[..., Step]) -> Callable[..., Array]:
    """Return the definition of an op with `count` states, which begin as zeros."""

    def definition(
        x: Array, weight: Array, recurrent: Array, bias: Array | None,
        recurrent_bias: Array | None, last: bool,
    ) -> Array:  # fmt: skip
        xp = primitives(x)

        def wide(array: Array | None) -> Any:
            return None if array is None else widened(xp, array)

        inputs = ops.linear(wide(x), wide(weight), wide(bias))
        shape = (x.shape[0], recurrent.shape[1])
        states = (xp.full(shape, 0, xp.dtype(inputs), inputs),) * count
        step = make_step(wide(recurrent), wide(recurrent_bias))
        y = run_op(own_version(inputs, "scan", _scan), _scan, inputs, states, step, last)
        return xp.astype(y, xp.dtype(x))

    return definition


_DEFINITIONS = {"gru": _define(1, _gru_step), "lstm": _define(2, _lstm_step)}


def _scan(inputs: Array, states: States, step: Step, last: bool) -> Array:
    xp = primitives(inputs)
    batch, time, features = inputs.shape
    outputs = []
    for at in range(time):
        states = step(states, xp.reshape(xp.slice_axis(inputs, 1, at, at + 1), (batch, features)))
        outputs.append(xp.reshape(states[0], (batch, 1, -1)))
    return states[0] if last else xp.concat(outputs, 1)
