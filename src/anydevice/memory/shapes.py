"""The shape of a model: what decides how much memory it needs, as plain numbers."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from anydevice.core.dtypes import as_dtype
from anydevice.core.record import Record
from anydevice.errors import ConfigurationError
from anydevice.memory.architectures import UNKNOWN, Architecture


class Experts(Record):
    """A mixture of experts: how many a layer has, how many a token passes, how wide each is.

    `shared` is the width of the network that every token passes as well, `layers` are the numbers
    of the layers that have experts.
    """

    count: int
    per_token: int
    intermediate: int
    shared: int = 0
    layers: tuple[int, ...] = ()


class ModelShape(Record):
    """A decoder, or any other model, as the numbers that its memory follows from.

    Parameters are elements, bytes are those of the weights in `dtype`, quantized weights, scales
    and buffers included. `layer_weights` and `layer_bytes` have one number a layer, in order;
    `other_*` is what lies outside of the layers and is neither embedding nor head: final norms,
    buffers, vision towers. A head that is tied to the embedding has no parameters of its own.

    `kv_elements` are the elements that one token leaves in the cache of each layer (0 where the
    layer has none), `windows` the most tokens that each layer keeps (`None`: all of them).

    `rounding` are the bytes that PyTorch's allocator for GPUs adds to the matrices by giving them
    whole blocks, 0 where they are not known one by one.

    `build` is what its family's layers have, `activation` the name of the function in the network,
    `parallel` whether attention and network of a layer work on one input.

    `exact` says that weights and cache are right to the byte; where they are not, or where
    something had to be assumed, `assumed` says what, in sentences.

    >>> from anydevice.memory.models import shape_of
    >>> shape = shape_of(layers=2, hidden=64, intermediate=256, heads=4, vocabulary=1000)
    >>> shape.layers, shape.kv_bytes(context=100, dtype="float16")
    (2, (25600, 25600))
    """

    name: str
    architecture: str
    dtype: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied_embeddings: bool
    layer_weights: tuple[int, ...]
    layer_bytes: tuple[int, ...]
    embedding_parameters: int
    embedding_bytes: int
    head_parameters: int
    head_bytes: int
    other_parameters: int
    other_bytes: int
    kv_elements: tuple[int, ...]
    windows: tuple[int | None, ...]
    experts: Experts | None = None
    quantization: str | None = None
    longest_context: int | None = None
    rounding: int = 0
    build: Architecture = UNKNOWN
    activation: str = ""
    parallel: bool = False
    exact: bool = False
    assumed: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """All parameters; tied ones count once."""
        outside = self.embedding_parameters + self.head_parameters + self.other_parameters
        return sum(self.layer_weights) + outside

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights; tied ones count once."""
        outside = self.embedding_bytes + self.head_bytes + self.other_bytes
        return sum(self.layer_bytes) + outside

    def kv_bytes(self, context: int, batch: int = 1, dtype: str | None = None) -> tuple[int, ...]:
        """The bytes of a static cache for so many tokens, layer by layer.

        `dtype` is that of its elements, the model's own where it is not given.
        """
        width = as_dtype(dtype or self.dtype).itemsize
        return tuple(
            batch * elements * width * (context if window is None else min(window, context))
            for elements, window in zip(self.kv_elements, self.windows, strict=True)
        )


LARGEST = 2**63 - 1
"""The largest number of a shape: what is larger is an error in a file, and no size."""


def whole(name: str, value: object, least: int = 1, most: int = LARGEST) -> int:
    """A number that must be whole and from `least` to `most`, as Python's own `int`.

    Raises `ConfigurationError` otherwise. Whole numbers of other libraries are numbers, too.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ConfigurationError(f"{name} is a whole number, not {shortened(repr(value))}", name)
    try:
        number = operator.index(value)
    except TypeError:  # an array may have the method and more than one number
        raise ConfigurationError(
            f"{name} is a whole number, not {shortened(repr(value))}", name
        ) from None
    if number < least:
        raise ConfigurationError(f"{name} is {least} or more, not {number}", name)
    if number > most:
        raise ConfigurationError(f"{name} is {most} at most, which this is beyond", name)
    return number


def shortened(text: str, most: int = 80) -> str:
    """A text of at most so many characters: a longer one without its middle.

    >>> shortened("a/very/long/path", 9)
    'a/ve…path'
    """
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"


def float_type(name: str, spec: object) -> str:
    """The name of a type that weights or a cache can have: a float that fills bytes of its own.

    Raises `ConfigurationError` for every other one.
    """
    row = as_dtype(spec)
    if row.kind != "float" or row.packed:
        raise ConfigurationError(
            f"{name} is a float of 8 bits or more, such as 'bfloat16', not {row.name!r}", name
        )
    return row.name


def shares(name: str, value: int, divisor_name: str, divisor: int) -> int:
    """`value / divisor` where it is whole; raises `ConfigurationError` otherwise."""
    if value % divisor:
        raise ConfigurationError(
            f"{name} ({value}) is not a multiple of {divisor_name} ({divisor}); check both", name
        )
    return value // divisor
