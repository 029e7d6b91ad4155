"""The layers of a transformer: an example is (positions, features)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from anydevice import _ops as ops
from anydevice._core.array import Array
from anydevice._core.dtypes import DTYPES
from anydevice._nn.initializers import ZEROS, Initial, initializer_of
from anydevice._nn.layer import (
    Flag,
    Layer,
    OptionalSize,
    Parameters,
    Positive,
    Run,
    Shape,
    Size,
    features_last,
    setting_error,
)
from anydevice._nn.layers import Activation, Chain, Dense, Dropout, LayerNorm, RMSNorm
from anydevice._ops.dispatch import primitives
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._arrays.random.generator import Random


class Attention(Layer):
    """Multi-head self-attention.

    With `causal`, a token attends to itself and earlier tokens. `kv_heads` may be fewer than
    `heads`: several heads then share keys and values. `rope` rotates queries and keys by their
    positions, with `theta` as its base. Its parameters are `qkv` ((heads + 2 kv heads) × head size,
    size) and `output` (size, size), and with `bias` also `qkv_bias` and `output_bias`.

    >>> Attention(64, 4, causal=True).output((10, 64)), Attention(64, 4).label
    ((10, 64), 'Attention(64, 4 heads)')
    """

    size: Size
    heads: Size
    kv_heads: OptionalSize = None
    causal: Flag = False
    rope: Flag = False
    theta: Positive = 10000.0
    bias: Flag = False
    initializer: Initial = "lecun"

    @property
    def label(self) -> str:
        return f"Attention({self.size}, {self.heads} heads)"

    @property
    def head_size(self) -> int:
        """The features of one head."""
        return self.size // self.heads

    @property
    def _key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    def settings_fit(self) -> None:
        for what, of, divisor in (
            ("size", self.size, self.heads),
            ("heads", self.heads, self._key_heads),
        ):
            if of % divisor:
                raise ConfigurationError(
                    f"{self.label}: {what} must be a multiple of {divisor}, not {of}",
                    source=f"Attention.{what}",
                )
        if self.rope and self.head_size % 2:
            raise ConfigurationError(
                f"{self.label}: rope needs an even head size, not {self.head_size}",
                source="Attention.rope",
            )

    def output(self, shape: Shape) -> Shape:
        self.takes_features(shape, self.size)
        if len(shape) != 2:
            raise self.misfit(f"got the shape {shape}, expected (positions, {self.size})")
        return features_last(shape)

    def initial(self, generator: Random) -> Parameters:
        make, size = initializer_of(self.initializer), self.size
        joined = (self.heads + 2 * self._key_heads) * self.head_size
        parameters = {
            "qkv": make(generator, (joined, size), size, joined),
            "output": make(generator, (size, size), size, size),
        }
        if self.bias:
            parameters["qkv_bias"] = ZEROS(generator, (joined,), 1, 1)
            parameters["output_bias"] = ZEROS(generator, (size,), 1, 1)
        return parameters

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        batch, tokens, size = x.shape
        keys = self._key_heads * self.head_size
        y = ops.linear(x, parameters["qkv"], parameters["qkv_bias"] if self.bias else None)
        q = self._by_head(ops.slice_axis(y, 2, 0, size), self.heads)
        k = self._by_head(ops.slice_axis(y, 2, size, size + keys), self._key_heads)
        v = self._by_head(ops.slice_axis(y, 2, size + keys, size + 2 * keys), self._key_heads)
        if self.rope:
            positions = primitives(x).arange(tokens, DTYPES["int32"], x)
            q = ops.rope(q, positions, theta=self.theta)
            k = ops.rope(k, positions, theta=self.theta)
        y = ops.attention(q, k, v, causal=self.causal)
        y = ops.reshape(ops.permute(y, (0, 2, 1, 3)), (batch, tokens, size))
        return ops.linear(y, parameters["output"], parameters["output_bias"] if self.bias else None)

    def _by_head(self, x: Array, heads: int) -> Array:
        """Return (batch, tokens, heads × size) as (batch, heads, tokens, size)."""
        batch, tokens, _ = x.shape
        return ops.permute(ops.reshape(x, (batch, tokens, heads, self.head_size)), (0, 2, 1, 3))


class GatedMLP(Layer):
    """`(silu(x · gateᵀ) × (x · upᵀ)) · downᵀ`, token by token.

    Its parameters are `gate_up` (2 hidden, size), the gate before the other, and `down`
    (size, hidden).

    >>> GatedMLP(64, 172).label
    'GatedMLP(64→172→64)'
    """

    size: Size
    hidden: Size
    initializer: Initial = "lecun"

    @property
    def label(self) -> str:
        return f"GatedMLP({self.size}→{self.hidden}→{self.size})"

    @property
    def input_shape(self) -> Shape:
        return (self.size,)

    def output(self, shape: Shape) -> Shape:
        self.takes_features(shape, self.size)
        return features_last(shape)

    def initial(self, generator: Random) -> Parameters:
        make, size, hidden = initializer_of(self.initializer), self.size, self.hidden
        return {
            "gate_up": make(generator, (2 * hidden, size), size, 2 * hidden),
            "down": make(generator, (size, hidden), hidden, size),
        }

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        y, last = ops.linear(x, parameters["gate_up"]), x.ndim - 1
        gate = ops.slice_axis(y, last, 0, self.hidden)
        up = ops.slice_axis(y, last, self.hidden, 2 * self.hidden)
        return ops.linear(ops.swiglu(gate, up), parameters["down"])


class TransformerBlock(Layer):
    """Pre-norm attention and MLP with residual connections.

    `hidden` is the width of the MLP; the default is 4 × size. `activation` is `"swiglu"` for a
    `GatedMLP`, or the name of the activation between two `Dense`. `norm` is `"rms"` or `"layer"`.
    `bias` gives a bias to attention and to `Dense`. In training, `dropout` is applied to both
    residual branches.

    >>> block = TransformerBlock(64, 4, causal=True, rope=True)
    >>> block.output((10, 64)), [step for step, part in block.parts]
    ((10, 64), ['.attention_norm', '.attention', '.mlp_norm', '.mlp'])
    """

    # Made once from the fields, and not fields themselves: a saved layer does not repeat itself.
    __slots__ = ("_dropout", "_inside")
    if TYPE_CHECKING:

        @property
        def _inside(self) -> dict[str, Layer]: ...
        @property
        def _dropout(self) -> Layer: ...

    size: int
    heads: int
    kv_heads: int | None = None
    hidden: int | None = None
    causal: bool = False
    rope: bool = False
    theta: float = 10000.0
    activation: str = "swiglu"
    norm: Literal["rms", "layer"] = "rms"
    bias: bool = False
    dropout: float = 0.0
    initializer: Initial = "lecun"

    @property
    def label(self) -> str:
        return f"TransformerBlock({self.size}, {self.heads} heads)"

    @property
    def parts(self) -> Sequence[tuple[str, Layer]]:
        return [(f".{name}", part) for name, part in self._inside.items()]

    def settings_fit(self) -> None:
        if not isinstance(self.norm, str) or self.norm not in _NORMS:
            raise setting_error(self, "norm", f"one of {', '.join(_NORMS)}", self.norm)
        inside = {
            "attention_norm": _NORMS[self.norm](self.size),
            "attention": Attention(
                self.size,
                self.heads,
                self.kv_heads,
                self.causal,
                self.rope,
                self.theta,
                self.bias,
                self.initializer,
            ),
            "mlp_norm": _NORMS[self.norm](self.size),
            "mlp": self._network(),
        }
        object.__setattr__(self, "_inside", inside)
        object.__setattr__(self, "_dropout", Dropout(self.dropout))

    def output(self, shape: Shape) -> Shape:
        for step, part in self.parts:
            shape = self.output_of(step, part, shape)
        return shape

    def initial(self, generator: Random) -> Parameters:
        own = generator.split(len(self._inside))
        pairs = zip(self._inside.items(), own, strict=True)
        return {name: part.initial(one) for (name, part), one in pairs}

    def apply(self, parameters: Parameters, x: Array, run: Run) -> Array:
        for name in ("attention", "mlp"):
            y = x
            for part in (f"{name}_norm", name):
                y = run.through(f".{part}", self._inside[part], parameters[part], y)
            if self.dropout:
                y = run.through(f".{name}_dropout", self._dropout, {}, y)
            x = ops.add(x, y)
        return x

    def _network(self) -> Layer:
        hidden = 4 * self.size if self.hidden is None else self.hidden
        if self.activation == "swiglu":
            return GatedMLP(self.size, hidden, self.initializer)
        function = Activation(self.activation)
        return Chain(
            Dense(self.size, hidden, self.bias, function.name, self.initializer),
            Dense(hidden, self.size, self.bias, None, self.initializer),
        )


_NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
