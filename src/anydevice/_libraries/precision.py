"""The dtypes in which a model keeps its parameters, computes, and returns its output."""

from __future__ import annotations

from functools import reduce

from anydevice import _ops as ops
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES, as_dtype
from anydevice._core.names import find_name
from anydevice._core.record import Record
from anydevice._core.trees import Tree, TreeT, leaves, mapped
from anydevice._libraries.registry import part
from anydevice._machine.engines import registry
from anydevice._machine.hardware.cuda.facts import capability_numbers
from anydevice._machine.settings import config as settings
from anydevice._ops.dispatch import primitives
from anydevice.errors import ConfigurationError

ScaleState = dict[str, Array]

PRECISIONS = ("float32", "float16", "bfloat16", "mixed", "mixed_float16")

_LARGEST_FLOAT32 = 3.4028234663852886e38
_FIRST_WITH_BFLOAT16 = (8, 0)
"""First compute capability of NVIDIA cards with native bfloat16."""


class Policy(Record):
    """The dtypes of a model's parameters, of its computation, and of its output.

    Sums, norms, softmax and losses of 16-bit numbers are computed in float32 under every policy.
    """

    name: str
    parameters: str
    compute: str
    output: str

    @property
    def casts_parameters(self) -> bool:
        """Whether each call casts the parameters for its computation."""
        return self.parameters != self.compute

    @property
    def is_narrow(self) -> bool:
        """Whether the policy computes in 16 bits."""
        return self.compute != "float32"

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients could underflow: float16 has a small exponent range."""
        return self.compute == "float16"

    def for_computing(self, tree: TreeT) -> TreeT:
        """Return parameters or inputs in the dtype of computing; integers are unchanged."""
        return cast_parameters(tree, self.compute)

    def for_output(self, tree: Tree) -> Tree:
        """Return outputs in the dtype for the caller."""
        return cast_parameters(tree, self.output)

    def __str__(self) -> str:
        if self.parameters == self.compute == self.output:
            return self.name
        return (
            f"{self.name}: parameters {self.parameters}, computed in {self.compute}, "
            f"results {self.output}"
        )


def default_precision() -> str:
    """Return the default precision: "mixed" if the setting `mixed_precision` is on."""
    return "mixed" if settings.current()[0].mixed_precision else "float32"


def policy_of(precision: str | None, device: Device) -> Policy:
    """Return the policy with this name on a device; by default, `default_precision()`.

    "mixed" computes in bfloat16 if the device supports it, else in float16; "mixed_float16" always
    in float16. Names of other libraries, such as "16-mixed", count if they mean one of these.
    Raises `ConfigurationError` for others, and for mixed bfloat16 on a device without bfloat16.
    """
    name, hint = default_precision(), ""
    if precision is not None and precision != name:
        ours, hint = find_name("precision", precision, PRECISIONS)
        is_narrow = ours == "mixed" and "bf" in str(precision) and not has_bfloat16(device)
        if ours is None or is_narrow:
            hint = f" (did you mean 'mixed'? {device} has no bfloat16)" if is_narrow else hint
            text = f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}{hint}"
            raise ConfigurationError(text, source="precision=")
        name = ours
    if not name.startswith("mixed"):
        return Policy(name, name, name, name)
    compute = "bfloat16" if name == "mixed" and has_bfloat16(device) else "float16"
    return Policy(name, "float32", compute, "float32")


def has_bfloat16(device: Device) -> bool:
    """Whether the device computes in bfloat16 without emulating it."""
    engine = device.engine
    if engine is None or "bfloat16" in registry.row_of(engine).lacks:
        return False
    if device.backend != "cuda" or (status := device.status) is None:
        return True
    capability = capability_numbers(status.facts)
    return capability is None or capability >= _FIRST_WITH_BFLOAT16


def has_coarse_products(device: Device, *, convolutions: bool = True) -> bool:
    """Whether the device's library computes float32 products with fewer digits (TF32)."""
    if device.engine == "jax":
        return device.kind != "cpu"
    if device.engine != "torch" or device.backend != "cuda":
        return False
    return bool(part("torch", "module").allows_tf32(convolutions=convolutions))


def cast(x: Array, dtype: str) -> Array:
    """Return a floating array in this dtype; integers and booleans are returned unchanged."""
    xp = primitives(x)
    own = xp.dtype(x)
    return xp.astype(x, DTYPES[dtype]) if own.kind == "float" and own.name != dtype else x


def cast_parameters(tree: TreeT, dtype: str) -> TreeT:
    """Return a tree with every floating array in this dtype; others are unchanged."""
    name = as_dtype(dtype).name
    return mapped(lambda x: cast(x, name), tree)


class LossScale(Record):
    """Keeps float16 gradients from underflowing (Micikevicius et al. 2018): the loss is multiplied
    by a factor before differentiation, and the gradients are divided by it afterwards.

    The factor grows after `interval` finite steps, and shrinks with each step that has infinite or
    NaN gradients; such a step changes no parameter. The state is arrays, so it works inside
    compiled code.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    largest: float = 2.0**24

    def start(self, like: Array) -> ScaleState:
        """Return the state before the first step, on the device of an array."""
        xp = primitives(like)
        return {
            "scale": xp.full((), self.initial, DTYPES["float32"], like),
            "good_steps": xp.full((), 0, DTYPES["int32"], like),
        }

    def unscaled(self, gradients: Tree, state: ScaleState) -> Tree:
        """Return the gradients of the loss itself, as float32."""
        factor = ops.divide(ops.add(ops.multiply(state["scale"], 0.0), 1.0), state["scale"])
        return mapped(lambda g: ops.multiply(ops.astype(g, "float32"), factor), gradients)

    def finite(self, gradients: Tree) -> Array:
        """Whether all gradients are finite, as a 0-d array."""

        def nonfinite(x: Array) -> Array:
            finite = ops.less_equal(ops.abs(ops.astype(x, "float32")), _LARGEST_FLOAT32)
            return ops.sum(ops.astype(ops.logical_not(finite), "float32"))

        return ops.equal(reduce(ops.add, map(nonfinite, leaves(gradients))), 0.0)

    def after(self, state: ScaleState, finite: Array) -> ScaleState:
        """Return the state for the next step."""
        scale, good = state["scale"], ops.add(state["good_steps"], 1)
        xp = primitives(good)
        none, interval = (xp.full((), n, xp.dtype(good), good) for n in (0, self.interval))
        due = ops.less_equal(interval, good)
        grown = ops.minimum(ops.multiply(scale, self.growth), self.largest)
        shrunk = ops.maximum(ops.multiply(scale, self.backoff), 1.0)
        return {
            "scale": ops.where(finite, ops.where(due, grown, scale), shrunk),
            "good_steps": ops.where(finite, ops.where(due, none, good), none),
        }
