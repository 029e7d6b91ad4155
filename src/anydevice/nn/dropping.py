"""Leaving out elements in training."""

from __future__ import annotations

from anydevice import ops
from anydevice.nn.layer import Array, Layer, Parameters, Run
from anydevice.nn.random_choice import chosen


class Dropout(Layer):
    """In training, each element becomes 0 with the probability `rate`, and the others grow by as
    much as is missing; otherwise nothing happens.

    Which ones depends on the seed and step of the run and on the layer's path: the same on every
    engine, and the same again when activations are recomputed.

    >>> import numpy
    >>> x = numpy.ones((2, 4), numpy.float32)
    >>> Dropout(0.5).apply({}, x, Run(training=True, seed=1, step=1)).tolist()
    [[0.0, 0.0, 0.0, 2.0], [2.0, 0.0, 2.0, 0.0]]
    >>> Dropout(0.5).apply({}, x, Run()) is x
    True
    """

    rate: float

    @property
    def label(self) -> str:
        return f"Dropout({self.rate:g})"

    def settings_fit(self) -> None:
        self.share(rate=self.rate)

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        if not run.training or not self.rate:
            return x
        left_out = chosen(run, self.rate, x)
        return ops.where(left_out, 0.0, ops.multiply(x, 1 / (1 - self.rate)))
