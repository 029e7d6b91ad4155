"""Axiom.jl's backends, models and timing, spelled in Python over anydevice.

>>> from anydevice.compat import axiom
>>> with axiom.with_backend(axiom.CPUBackend()):
...     axiom.current_backend()
CPUBackend()

A backend is callable: `x |> CUDABackend(0)` is `CUDABackend(0)(x)`. `@with_backend` is a `with`
statement. A function that ends in `!` in Julia returns the new value here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy

import anydevice
from anydevice import (
    Compiled,
    ConfigurationError,
    Device,
    VerificationError,
    nn,
    ops,
    parallel,
    proofs,
    use_device,
)
from anydevice._bench.functions import DeviceTiming
from anydevice._core.choice import accelerators_passed_over
from anydevice._core.text import warn
from anydevice._machine.choose.scope import block_device, why
from anydevice._nn.losses import Loss
from anydevice._nn.model import bound, parameters_device
from anydevice.compat.named import NamedDevice

if TYPE_CHECKING:
    from anydevice._proofs.properties import Property, Region


class AbstractBackend(NamedDevice):
    """The base class of Axiom's backends: an anydevice `Device` under Axiom's name."""

    def __repr__(self) -> str:
        return super().__repr__() if self.kind == "cpu" else f"{type(self).__name__}({self.index})"


class CPUBackend(AbstractBackend, backend="cpu"):
    """The CPU, which is always there. Axiom calls it `JuliaBackend`."""


class CUDABackend(AbstractBackend, backend="cuda"):
    """An NVIDIA GPU by its index."""


class ROCmBackend(AbstractBackend, backend="rocm"):
    """An AMD GPU by its index."""


class MetalBackend(AbstractBackend, backend="metal"):
    """An Apple GPU by its index."""


JuliaBackend = CPUBackend

_KINDS = {kind.of_backend: kind for kind in (CUDABackend, ROCmBackend, MetalBackend, CPUBackend)}


def detect_gpu() -> Device | None:
    """Return the GPU to use, or `None`; no backend has to be registered first."""
    device = why([backend for backend in _KINDS if backend != "cpu"]).device
    return device and _with_name(device)


def set_backend(backend: Device | str | None) -> Device:
    """Set the backend of the whole process, and return it.

    `None`, the result of `detect_gpu()` without a GPU, sets the CPU and warns with the reason.
    Raises `DeviceNotFoundError`, and changes nothing, where the backend is not usable.
    """
    if backend is None:
        usable = [str(device) for device in anydevice.devices() if device.kind != "cpu"]
        given = [f"no backend was given, although there is {', '.join(usable)}"] if usable else []
        reasons = accelerators_passed_over(anydevice.discover().findings) + given
        text = "; ".join(reasons) or "no accelerator is in this machine"
        warn(f"using the CPU: {text}")
    chosen = anydevice.set_device("cpu" if backend is None else backend)
    assert chosen is not None
    return _with_name(chosen)


def current_backend() -> Device:
    """Return the backend of the block, else of the process, else the best one, as `device()`."""
    return _with_name(anydevice.device())


class with_backend(use_device):  # noqa: N801, a macro there
    """A block or decorated function with this `current_backend()`, as `use_device`.

    Models of this module, `forward` and `argmax` move themselves and their arguments there; other
    data is moved by the backend: `with with_backend(CUDABackend(0)) as gpu: gpu(x)`.
    """

    def __init__(self, backend: Device | str) -> None:
        super().__init__(backend)

    def __enter__(self) -> Device:
        return _with_name(super().__enter__())


def cuda_available() -> bool:
    """Whether an NVIDIA GPU is usable here."""
    return bool(anydevice.devices("cuda"))


def rocm_available() -> bool:
    """Whether an AMD GPU is usable here."""
    return bool(anydevice.devices("rocm"))


def metal_available() -> bool:
    """Whether an Apple GPU is usable here."""
    return bool(anydevice.devices("metal"))


def backend_to_gpu(backend: Device | str, x: Any) -> Any:
    """Move every array in `x` to that backend; from another GPU it goes directly."""
    return anydevice.to_device(x, backend)


def backend_to_cpu(backend: Device | str, x: Any) -> Any:
    """Move every array in `x` to the CPU; `backend`, where it comes from, is not needed."""
    return anydevice.to_device(x, "cpu")


def backend_synchronize(backend: Device | str) -> None:
    """Wait until all work on that backend is done."""
    anydevice.synchronize(backend)


def reclaim(backend: Device | str | None = None) -> None:
    """Release cached memory of one backend or of all; `CUDA.reclaim()` in Julia."""
    anydevice.release(backend)


def forward(model: Callable[..., Any], x: Any) -> Any:
    """Return the model's output for `x`; in a `with_backend` block both are moved there first."""
    block = block_device()
    if isinstance(model, nn.Model):
        return _follow_blocks(model)(x)
    if block is not None:
        model, x = anydevice.to_device((model, x), block)
    return model(x)


def argmax(x: Any, axis: int = -1) -> Any:
    """Return the index of the largest along an axis; a `with_backend` block moves `x` there."""
    block = block_device()
    return ops.argmax(x if block is None else anydevice.to_device(x, block), axis)


def benchmark(function: Callable[..., Any], *arguments: Any, limit: float = 1.0) -> DeviceTiming:
    """Time one call on the current backend for `limit` seconds, as `anydevice.benchmark`."""
    here = current_backend()
    return anydevice.benchmark(function, *arguments, devices=[here], limit=limit)[str(here)]


def warm_up(model: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Compile a call and anydevice's kernels on the current backend; return the call's result.

    `options` are those of `anydevice.warm_up`, such as `dtypes=["float32"]`.
    """
    here = current_backend()
    anydevice.warm_up(here, **options)
    model, arguments = anydevice.to_device((model, arguments), here)
    result = model(*arguments)
    anydevice.to_numpy(result)  # waits, even if a library computes lazily
    return result


class Model(nn.Model):
    """A `nn.Model` that computes where it is, or in a block by a copy kept on its backend."""

    _copy: tuple[Device, nn.Model] | None = None

    def __call__(self, x: Any) -> Any:
        block, own = block_device(), parameters_device(self.parameters)
        if block is None or own is None:
            return super().__call__(x)
        status, there = block.status, block
        if status is not None and block.engine_is_free and own.engine in status.engines:
            there = block.served_by(own.engine)
        if self._copy is None or (self._copy[0], self._copy[0].engine) != (there, there.engine):
            moved = anydevice.to_device(self.parameters, there, convert=True)
            self._copy = there, bound(self.layer, self.input_shape, moved)
        x = x if isinstance(x, numpy.ndarray) else anydevice.to_device(x, there, convert=True)
        return self._copy[1](x)


def _follow_blocks(model: nn.Model) -> Model:
    """Return the model as one that follows blocks."""
    if isinstance(model, Model):
        return model
    made = Model.__new__(Model)
    vars(made).update(vars(model))
    return made


anydevice.register_type(
    Model,
    lambda model: {"parameters": model.parameters},
    lambda model, parts: _follow_blocks(
        bound(model.layer, model.input_shape, parts["parameters"], model.frozen, model.properties)
    ),
)

relu, gelu, tanh = nn.Activation("relu"), nn.Activation("gelu"), nn.Activation("tanh")
sigmoid, softmax = nn.Activation("sigmoid"), nn.Activation("softmax")


def Dense(inputs: int, outputs: int, *, bias: bool = True) -> Model:  # noqa: N802, its name
    """Make a dense layer as a model of its own, on the current backend.

    >>> with anydevice.use_device("cpu"):
    ...     Dense(784, 128).output_shape
    (128,)
    """
    return _follow_blocks(nn.build(nn.Dense(inputs, outputs, bias)))


def chain(*parts: nn.Model | nn.Layer | str, input_shape: Any = None, seed: int = 0) -> Model:
    """Make a new model of these layers on the current backend; `@axiom begin … end` in Julia.

    `input_shape` is the shape of one example, if the first layer does not define it.

    >>> with anydevice.use_device("cpu"):
    ...     chain(Dense(784, 128), relu, Dense(128, 10), softmax).parameter_count
    101770
    """
    layers = [part.layer if isinstance(part, nn.Model) else part for part in parts]
    return _follow_blocks(nn.build(*layers, input_shape=input_shape, seed=seed))


def Adam(lr: float = 1e-3) -> nn.Adam:  # noqa: N802, its name
    """Return the Adam optimizer with this learning rate."""
    return nn.Adam(lr)


def CrossEntropyLoss() -> Loss:  # noqa: N802, its name
    """Return the cross entropy; a softmax at the end of the model is not applied twice."""
    return nn.cross_entropy


def train(
    model: nn.Model,
    data: Any,
    optimizer: nn.Optimizer,
    loss: Loss | str = nn.cross_entropy,
    *,
    epochs: int = 1,
    **options: Any,
) -> nn.Model:
    """Return the model trained on the current backend, or where `model_parallel` put its layers.

    The options are those of `nn.train`. Julia's `train!` changes the model itself.
    """
    in_parts = hasattr(model.layer, "stages")
    if "devices" not in options and not in_parts:
        options.setdefault("device", anydevice.device())
    trained: nn.Model = nn.train(model, data, optimizer, loss, epochs=epochs, **options).model
    return trained if in_parts else _follow_blocks(trained)


def train_data_parallel(
    model: nn.Model,
    data: Any,
    optimizer: nn.Optimizer,
    loss: Loss | str = nn.cross_entropy,
    *,
    gpus: Sequence[int | Device | str] = (0, 1, 2, 3),
    epochs: int = 1,
    **options: Any,
) -> Model:
    """Train copies of the model on several devices; numbers are GPUs. The losses are those of one.

    Raises `DeviceNotFoundError` if a device is missing.
    """
    options.setdefault("strategy", "replicate")
    places = _gpus_of(gpus)
    trained = nn.train(model, data, optimizer, loss, epochs=epochs, devices=places, **options)
    return _follow_blocks(trained.model)


def model_parallel(
    model: nn.Model, gpus: Sequence[int | Device | str], *, microbatches: int = 1
) -> nn.Model:
    """Divide the layers over several GPUs, as `parallel.pipeline`; `train` trains the result.

    In Julia, parts are models: `Dense(784, 4096) |> CUDABackend(0)`.
    """
    divided: nn.Model = parallel.pipeline(model, _gpus_of(gpus), microbatches=microbatches)
    return divided


def save_model(model: nn.Model, path: str | os.PathLike[str]) -> None:
    """Write a model to a `.safetensors` file."""
    nn.save(model, path)


def load_model(path: str | os.PathLike[str]) -> Model:
    """Load the model of a file to the current backend."""
    return _follow_blocks(nn.load(path))


def compile(  # noqa: A001, its name
    model: Any, *, backend: Device | str | None = None, verify: Any = None, **options: Any
) -> Compiled:
    """Compile the model for a backend, by default the current one, as `anydevice.compile`.

    With `verify=True` it is checked on random examples, and the claims of `ensure` are proved; with
    `verify=x` it is checked on `x`. `VerificationError` names the first wrong layer.
    """
    example = _examples(model) if verify is True else None if verify is False else verify
    place = anydevice.device() if backend is None else backend
    own = getattr(model, "properties", ()) if verify is True else ()
    options["properties"] = (*own, *options.get("properties", ()))
    return anydevice.compile(model, place, verify=example, **options)


def enable_checkpointing(model: nn.Model) -> Model:
    """Return the model with activations recomputed for gradients."""
    return _follow_blocks(nn.recompute(model))


def is_finite(y: Any) -> bool:
    """Whether an array of any library has no NaN and no infinity."""
    return bool(numpy.isfinite(numpy.asarray(anydevice.to_numpy(y), "float64")).all())


def ensure(
    property: Property,  # noqa: A002 - what it is
    over: Region,
) -> Callable[[Any], Any]:
    """Claim a property of a model, or of every model that a function makes; `@ensure` in Julia.

    The claim is saved with the model; `compile(…, verify=True)` proves it for the compiled weights.

    >>> @ensure(proofs.within(0, 1), over=proofs.box(-1.0, 1.0))
    ... def share():
    ...     return chain(Dense(2, 8), relu, Dense(8, 1), sigmoid)
    >>> with anydevice.use_device("cpu"):
    ...     len(share().properties)
    1
    """
    stated = proofs.claim(property, over)

    def ensured(made: Any) -> Any:
        if isinstance(made, nn.Model):
            return _follow_blocks(made.with_properties(*made.properties, stated))

        @wraps(made)
        def make(*given: Any, **named: Any) -> Any:
            return ensured(made(*given, **named))

        return make

    return ensured


def prove(
    inputs: Iterable[Any] | Region,
    holds: Any,
    property: Property | None = None,  # noqa: A002 - what it is
    **options: Any,
) -> Any:
    """Prove a claim for inputs; `@prove ∀x ∈ inputs. …` in Julia.

    With a region of `anydevice.proofs`, `holds` is the model, and the proof of `property` is
    returned. With other inputs, `holds` is called with each, and their number is returned.
    `VerificationError` names the first input for which it fails.

    >>> prove(range(10), lambda x: x * x >= x)
    10
    >>> with anydevice.use_device("cpu"):
    ...     model = chain(Dense(2, 8), relu, Dense(8, 1), sigmoid)
    >>> prove(proofs.box(-1.0, 1.0), model, proofs.within(0, 1)).check() > 0
    True
    """
    from anydevice._proofs.properties import Region as Set

    if isinstance(inputs, Set):
        return _prove_region(inputs, holds, property, options)
    count = 0
    for count, x in enumerate(inputs, 1):
        if not holds(x):
            where = f"inputs[{count - 1}]"
            raise VerificationError(f"the property does not hold for {where}: {x!r}", where=where)
    return count


def _prove_region(region: Any, model: Any, stated: Any, options: dict[str, Any]) -> Any:
    if stated is None:
        text = "prove(region, model, property) takes a property such as proofs.finite()"
        raise ConfigurationError(text, source="property")
    result = proofs.prove(model, stated, region, **options)
    if isinstance(result, proofs.Counterexample):
        text = f"{stated} does not hold for x = {result.x.tolist()!r:.200}"
        raise VerificationError(text, where="inputs")
    if isinstance(result, proofs.Undecided):
        text = f"{stated} was neither proved nor refuted: {result.reason}"
        raise VerificationError(f"{text}, {result.proved_share:.0%} proved", where="inputs")
    return result


def _gpus_of(gpus: Sequence[int | Device | str]) -> list[Device | str]:
    return [CUDABackend(gpu) if isinstance(gpu, int) else gpu for gpu in gpus]


def _with_name(device: Device) -> Device:
    """Return the device under Axiom's name, if Axiom has one."""
    kind = _KINDS.get(device.backend)
    return kind(device.index, engine=device.engine) if kind else device


def _examples(model: Any) -> Any:
    """Return eight random examples for a model of anydevice."""
    model = model.model if isinstance(model, Compiled) else model
    if not isinstance(model, nn.Model):
        kind = type(model).__name__
        raise ConfigurationError(f"give an example for a {kind}, as verify=x", source="verify=")
    shape, generator = (8, *model.input_shape), numpy.random.default_rng(0)
    ids = model.layer.takes_ids_below
    if ids is not None:
        return generator.integers(0, ids, shape, "int32")
    return generator.standard_normal(shape, "float32")
