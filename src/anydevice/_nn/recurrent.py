"""Recurrent layers: an example is (time, features).

The product with the input is one for all steps. The rest goes step by step: by PyTorch's own
functions, in a loop of XLA's on JAX, and in a loop of Python elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anydevice import _ops as ops
from anydevice._core.array import Array
from anydevice._nn.initializers import Constant, Initializer, initializer_of
from anydevice._nn.layer import (
    Inferred,
    Layer,
    Parameters,
    Run,
    Shape,
    check_booleans,
    check_integers,
)
from anydevice._ops.arguments import widened
from anydevice._ops.dispatch import own_version, primitives
from anydevice._ops.dispatch import run as run_op

if TYPE_CHECKING:
    from anydevice._arrays.random.generator import Random

_ZEROS = Constant(0.0)

States = tuple[Array, ...]
Step = Callable[[States, Array], States]
"""The next states, of which the first is the output, from those before and one step's input."""


class _Recurrent(Layer):
    """The base class of layers that go through a sequence step by step."""

    inputs: Inferred
    outputs: int
    last: bool = False
    bias: bool = True
    initializer: Initializer | str = "lecun"

    inferred = ("inputs", -1)
    _gates = 0

    @property
    def label(self) -> str:
        return f"{type(self).__name__}({self.inputs}→{self.outputs})"

    def settings_fit(self) -> None:
        check_integers(self, inputs=self.inputs, outputs=self.outputs)
        check_booleans(self, last=self.last, bias=self.bias)
        initializer_of(self.initializer)

    def output(self, shape: Shape) -> Shape:
        if len(shape) != 2 or not shape[0]:
            raise self.misfit(f"got the shape {shape}, expected (time, {self.inputs})")
        self.takes_features(shape, self.inputs)
        return (self.outputs,) if self.last else (shape[0], self.outputs)

    def initial(self, generator: Random) -> Parameters:
        make, rows = initializer_of(self.initializer), self._gates * self.outputs
        parameters = {
            name: make(generator, (rows, size), size, self.outputs)
            for name, size in (("input", self.inputs), ("recurrent", self.outputs))
        }
        if self.bias:
            for name in ("input_bias", "recurrent_bias"):
                parameters[name] = _ZEROS(generator, (rows,), 1, 1)
        return parameters

    def _through(
        self, name: str, definition: Callable[..., Array], parameters: Parameters, x: Array
    ) -> Array:
        self.output(tuple(x.shape[1:]))
        weights = [
            parameters.get(each) for each in ("input", "recurrent", "input_bias", "recurrent_bias")
        ]
        return run_op(own_version(x, name, definition), definition, x, *weights, self.last)


class GRU(_Recurrent):
    """A gated recurrent unit over a sequence (time, inputs), as PyTorch and cuDNN define it.

    The output is that of each step, (time, outputs), or with `last` that of the last step alone.
    Its parameters are `input` (3 outputs, inputs) and `recurrent` (3 outputs, outputs), for the
    reset gate, the update gate and the new value in this order, and with `bias` also `input_bias`
    and `recurrent_bias`.

    >>> GRU(8, 16).output((100, 8)), GRU(8, 16, last=True).output((100, 8))
    ((100, 16), (16,))
    """

    _gates = 3

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return self._through("gru", _gru, parameters, x)


class LSTM(_Recurrent):
    """A long short-term memory over a sequence (time, inputs).

    The output is that of each step, (time, outputs), or with `last` that of the last step alone.
    Its parameters are `input` (4 outputs, inputs) and `recurrent` (4 outputs, outputs), for the
    input gate, the forget gate, the new value and the output gate in this order, and with `bias`
    also `input_bias` and `recurrent_bias`.

    >>> LSTM(8, 16).output((100, 8)), LSTM(8, 16, last=True).output((100, 8))
    ((100, 16), (16,))
    """

    _gates = 4

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        return self._through("lstm", _lstm, parameters, x)


def _gru(
    x: Array,
    weight: Array,
    recurrent: Array,
    bias: Array | None,
    recurrent_bias: Array | None,
    last: bool,
) -> Array:
    wide, weight, recurrent, bias, recurrent_bias = _widen_all(
        x, weight, recurrent, bias, recurrent_bias
    )
    size = recurrent.shape[1]

    def step(states: States, given: Array) -> States:
        (before,) = states
        own = ops.linear(before, recurrent, recurrent_bias)
        reset, update = (
            ops.sigmoid(ops.add(_gate(given, at, size), _gate(own, at, size))) for at in (0, 1)
        )
        kept = ops.multiply(reset, _gate(own, 2, size))
        new = ops.tanh(ops.add(_gate(given, 2, size), kept))
        return (ops.add(new, ops.multiply(update, ops.subtract(before, new))),)

    return _scan_steps(ops.linear(wide, weight, bias), 1, size, step, last, x)


def _lstm(
    x: Array,
    weight: Array,
    recurrent: Array,
    bias: Array | None,
    recurrent_bias: Array | None,
    last: bool,
) -> Array:
    wide, weight, recurrent, bias, recurrent_bias = _widen_all(
        x, weight, recurrent, bias, recurrent_bias
    )
    size = recurrent.shape[1]

    def step(states: States, given: Array) -> States:
        output, cell = states
        gates = ops.add(given, ops.linear(output, recurrent, recurrent_bias))
        enter, forget, leave = (ops.sigmoid(_gate(gates, at, size)) for at in (0, 1, 3))
        new = ops.multiply(enter, ops.tanh(_gate(gates, 2, size)))
        cell = ops.add(ops.multiply(forget, cell), new)
        return ops.multiply(leave, ops.tanh(cell)), cell

    return _scan_steps(ops.linear(wide, weight, bias), 2, size, step, last, x)


def _gate(gates: Array, at: int, size: int) -> Array:
    return ops.slice_axis(gates, 1, at * size, (at + 1) * size)


def _widen_all(x: Array, *weights: Array | None) -> list[Any]:
    xp = primitives(x)
    return [None if array is None else widened(xp, array) for array in (x, *weights)]


def _scan_steps(inputs: Array, count: int, size: int, step: Step, last: bool, x: Array) -> Array:
    """Return the outputs of a step over (batch, time, …), or the last, in the dtype of x.

    It begins with `count` states of this size, all 0.
    """
    xp = primitives(inputs)
    states = (xp.full((inputs.shape[0], size), 0, xp.dtype(inputs), inputs),) * count
    y = run_op(own_version(inputs, "scan", _scan), _scan, inputs, states, step, last)
    return xp.astype(y, xp.dtype(x))


def _scan(inputs: Array, states: States, step: Step, last: bool) -> Array:
    xp = primitives(inputs)
    batch, time, features = inputs.shape
    outputs = []
    for at in range(time):
        states = step(states, xp.reshape(xp.slice_axis(inputs, 1, at, at + 1), (batch, features)))
        outputs.append(xp.reshape(states[0], (batch, 1, -1)))
    return states[0] if last else xp.concat(outputs, 1)
