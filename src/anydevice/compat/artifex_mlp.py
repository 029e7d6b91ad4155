"""Artifex's `MLP`, a module of Flax NNX; the rest of `artifex` needs no flax."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax

import anydevice
from anydevice import ConfigurationError, nn
from anydevice._core.engine import Absent

try:
    from flax import nnx
except ModuleNotFoundError as error:
    what, instead = "MLP needs Flax, which is not installed", "run: pip install flax"
    raise Absent(what, instead, "library_missing").error() from error


class MLP(nn.Model, nnx.Module):
    """Dense layers on the default device of JAX: a module of Flax NNX, and a `nn.Model`.

    `rngs` is flax's `nnx.Rngs`, or a seed. As in flax, dropout is on until `eval()` turns it off.
    With `use_gradient_checkpointing`, gradients recompute most activations instead of keeping them.
    `nn.train` takes it too, and returns a plain `nn.Model`.

    >>> with anydevice.use_device("cpu"):
    ...     mlp = MLP([16, 16, 4], in_features=8, use_gradient_checkpointing=True, rngs=nnx.Rngs(0))
    >>> nnx.jit(lambda model, x: model(x))(mlp, jax.numpy.ones((2, 8))).shape
    (2, 4)
    """

    def __init__(
        self,
        hidden_dims: Sequence[int],
        in_features: int,
        activation: str | None = "gelu",
        *,
        output_activation: str | None = None,
        dropout_rate: float = 0.0,
        use_bias: bool = True,
        use_gradient_checkpointing: bool = False,
        rngs: Any = None,
    ) -> None:
        here = anydevice.device(engine="jax").native
        if not hidden_dims:
            raise ConfigurationError("an MLP needs at least one layer", "hidden_dims=")
        sizes = [*pairwise([in_features, *hidden_dims])]
        dropout = [nn.Dropout(dropout_rate)] if dropout_rate else []
        hidden = (nn.Dense(*ends, use_bias, activation) for ends in sizes[:-1])
        last = nn.Dense(*sizes[-1], use_bias, output_activation)
        chain = nn.Chain(*(part for dense in hidden for part in (dense, *dropout)), last)
        self.layer = nn.recompute(chain) if use_gradient_checkpointing else chain
        self.input_shape, self.output_shape = (in_features,), (hidden_dims[-1],)
        with jax.default_device(here):
            rngs = rngs if isinstance(rngs, nnx.Rngs) else nnx.Rngs(rngs or 0)
            made = [nnx.Linear(*ends, use_bias=use_bias, rngs=rngs) for ends in sizes]
            self.layers = nnx.List(made)
            self.dropout = nnx.Dropout(dropout_rate, rngs=rngs) if dropout_rate else None
        nnx.update(self, jax.tree.map(partial(_bound, place=here), nnx.state(self)))

    @property
    def parameters(self) -> Any:
        """The arrays of `layers`, as the parameters of a `nn.Model`."""
        own = [_of_dense(linear.kernel, linear.bias) for linear in self.layers]
        between: list[Any] = [{}] if self.dropout else []
        return [*(part for each in own[:-1] for part in (each, *between)), own[-1]]

    def __call__(self, x: Any) -> Any:
        """The output for a batch."""
        run = nn.Run(training=True)  # without dropout, it only lets gradients recompute
        if self.dropout is not None and self.dropout.deterministic:
            run = nn.Run()
        elif self.dropout is not None:
            seed = jax.random.randint(self.dropout.rngs(), (), 0, 2**31 - 1)
            run = nn.Run(training=True, seed=seed)
        x = x if isinstance(x, jax.Array) else jax.numpy.asarray(x, self.layers[0].kernel.dtype)
        return self.apply(self.parameters, x, run)


def _bound(array: Any, place: Any) -> Any:
    """The array bound to its device: JAX takes others wherever its default device is.

    Where flax traces, there is no array yet.
    """
    return array if isinstance(array, jax.core.Tracer) else jax.device_put(array, place)


def _of_dense(kernel: Any, bias: Any) -> dict[str, Any]:
    """The variables of flax's `Linear` as the parameters of a `nn.Dense`."""
    weight = {"weight": kernel[...].T}
    return weight if bias is None else {**weight, "bias": bias[...]}


anydevice.register_type(
    MLP,
    lambda module: {"state": nnx.state(module)},
    lambda module, parts: nnx.merge(nnx.graphdef(module), parts["state"]),
)
