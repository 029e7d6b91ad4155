"""Axiom.jl's backends, models and timing, spelled in Python over anydevice.

>>> from anydevice.compat import axiom
>>> with axiom.with_backend(axiom.CPUBackend()):
...     axiom.current_backend()
CPUBackend()

A backend is callable where Julia pipes: `x |> CUDABackend(0)` is `CUDABackend(0)(x)`. The block
of `@with_backend` is a `with` statement, and a function that ends in `!` there has no mark here:
what it changed there, it returns here. The models are in `axiom_models`.

Axiom.jl's models: defined, trained, compiled, checked and kept, spelled over `anydevice.nn`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy

from anydevice.bench.functions import DeviceTiming
from anydevice.bench.functions import benchmark as time_on_devices
from anydevice.check.verifying import warm_up as make_kernels_ready
from anydevice.choose.scope import device, set_device, use_device, why
from anydevice.choose.scope import device as current_device
from anydevice.compiling._compile import Compiled
from anydevice.compiling._compile import compile as make_compiled
from anydevice.compiling.verification import Property
from anydevice.core.choice import accelerators_passed_over
from anydevice.core.device import Device
from anydevice.discovery._discover import devices, discover
from anydevice.errors import ConfigurationError, VerificationError
from anydevice.memory.release import release
from anydevice.nn import optimizers
from anydevice.nn.layer import Layer
from anydevice.nn.layers import Activation
from anydevice.nn.layers import Dense as DenseLayer
from anydevice.nn.losses import Loss, cross_entropy
from anydevice.nn.model import Model, build
from anydevice.nn.recompute import recompute
from anydevice.saving.models import load, save
from anydevice.training._train import train as train_model
from anydevice.transfer.moving import synchronize, to_device, to_numpy


class AbstractBackend(Device):
    """What every backend of Axiom is: an anydevice `Device`, equal to the one of the same place."""

    __slots__ = ()
    _of_backend: str

    def __init__(self, index: int = 0, *, engine: str | None = None) -> None:
        super().__init__(self._of_backend, index, engine=engine)

    def __repr__(self) -> str:
        shown = "" if self.kind == "cpu" and not self.index else self.index
        return f"{type(self).__name__}({shown})"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.index, self._engine)


class CPUBackend(AbstractBackend):
    """The CPU, which is always there. Axiom calls it `JuliaBackend`."""

    __slots__ = ()
    _of_backend = "cpu"


class CUDABackend(AbstractBackend):
    """An NVIDIA GPU by its index."""

    __slots__ = ()
    _of_backend = "cuda"


class ROCmBackend(AbstractBackend):
    """An AMD GPU by its index."""

    __slots__ = ()
    _of_backend = "rocm"


class MetalBackend(AbstractBackend):
    """An Apple GPU by its index."""

    __slots__ = ()
    _of_backend = "metal"


JuliaBackend = CPUBackend

_SPELLED = {kind._of_backend: kind for kind in (CUDABackend, ROCmBackend, MetalBackend, CPUBackend)}


def detect_gpu() -> AbstractBackend | None:
    """The GPU to use, or `None` where none is usable.

    Nothing has to be registered: a backend is there as soon as its driver answers and a library
    that drives it is installed.
    """
    found = why([name for name in _SPELLED if name != "cpu"]).device
    return None if found is None else _SPELLED[found.backend](found.index, engine=found.engine)


def set_backend(backend: Device | str | None) -> Device:
    """Make this the backend of the whole process, and return it.

    `None`, which is what `detect_gpu()` gives on a machine without a GPU, means the CPU, with a
    warning that says why. Raises `DeviceNotFoundError` where the backend is not usable; the former
    one then stays.
    """
    if backend is None:
        warnings.warn(f"using the CPU: {_why_no_gpu()}", stacklevel=2)
    chosen = set_device(CPUBackend() if backend is None else backend)
    assert chosen is not None
    return _spelled(chosen)


def current_backend() -> Device:
    """Where work goes now: the block's backend, else the process's, else the best of the machine.

    Without any choice it may end at the CPU, with one warning that says why.
    """
    return _spelled(device())


@contextmanager
def with_backend(backend: Device | str) -> Iterator[Device]:
    """A block, or a decorated function, in which `current_backend()` is this one.

    Data is carried from block to block by applying the backend to it:
    `with with_backend(CUDABackend(0)) as gpu: predictions = model(gpu(batch))`. Raises
    `DeviceNotFoundError` on entering where the backend is not usable.
    """
    with use_device(backend) as chosen:
        yield _spelled(chosen)


def cuda_available() -> bool:
    """Whether an NVIDIA GPU is usable here."""
    return bool(devices("cuda"))


def rocm_available() -> bool:
    """Whether an AMD GPU is usable here."""
    return bool(devices("rocm"))


def metal_available() -> bool:
    """Whether an Apple GPU is usable here."""
    return bool(devices("metal"))


def backend_to_gpu(backend: Device | str, x: Any) -> Any:
    """Every array in `x` on that backend; what is there already is not copied.

    From one GPU to another it goes directly: there is no need for `backend_to_cpu` in between.
    """
    return to_device(x, backend)


def backend_to_cpu(backend: Device | str, x: Any) -> Any:
    """Every array in `x` back on the CPU; `backend` is where it comes from, and need not be."""
    return to_device(x, "cpu")


def backend_synchronize(backend: Device | str) -> None:
    """Wait until everything that was started on that backend has ended."""
    synchronize(backend)


def reclaim(backend: Device | str | None = None) -> None:
    """Give memory that no array uses back, of one backend or of all; there, `CUDA.reclaim()`."""
    release(backend)


def forward(model: Callable[..., Any], x: Any) -> Any:
    """What the model gives for x, where they are."""
    return model(x)


def benchmark(function: Callable[..., Any], *arguments: Any, limit: float = 1.0) -> DeviceTiming:
    """The seconds of one call with these arguments on the current backend.

    Arrays and models among them are moved there first, and every call is waited for: there is
    nothing to synchronize. `first` is the first call, which compiles. Calling goes on for `limit`
    seconds; where it fails, `reason` says why.
    """
    here = current_backend()
    return time_on_devices(function, *arguments, devices=[here], limit=limit)[str(here)]


def warm_up(model: Callable[..., Any], *arguments: Any) -> Any:
    """The model's result for these arguments on the current backend, complete.

    What is compiled on a first call is compiled after it, so that the next one is not slow; so are
    our own kernels, which are checked as well.
    """
    here = current_backend()
    make_kernels_ready(here)
    moved, there = to_device((model, arguments), here)
    result = moved(*there)
    to_numpy(result)  # waits, also for a library that computes only what is asked for
    return result


def _spelled(chosen: Device) -> Device:
    """The device under Axiom's name; one that Axiom has no name for stays as it is."""
    kind = _SPELLED.get(chosen.backend)
    return kind(chosen.index, engine=chosen.engine) if kind else chosen


def _why_no_gpu() -> str:
    stopped = accelerators_passed_over(tuple(discover()))
    usable = [str(found) for found in devices() if found.kind != "cpu"]
    others = [f"no backend was given, although there is {', '.join(usable)}"] if usable else []
    return "; ".join((*stopped, *others)) or "no accelerator is in this machine"


def _rebuild(kind: type[AbstractBackend], index: int, engine: str | None) -> AbstractBackend:
    return kind(index, engine=engine)


relu, gelu, tanh = Activation("relu"), Activation("gelu"), Activation("tanh")
sigmoid, softmax = Activation("sigmoid"), Activation("softmax")

_EXAMPLES = 8


def Dense(inputs: int, outputs: int, *, bias: bool = True) -> Model:  # noqa: N802 - Axiom's name
    """A dense layer as a model of its own, on the current backend.

    >>> from anydevice import use_device
    >>> with use_device("cpu"):
    ...     Dense(784, 128).output_shape
    (128,)
    """
    return build(DenseLayer(inputs, outputs, bias))


def chain(*parts: Model | Layer | str, input_shape: Any = None, seed: int = 0) -> Model:
    """Layers one behind the other, on the current backend; there, `@axiom begin … end`.

    The parameters are drawn anew, for each layer by itself: those of a `Dense` that is given are
    not used. `input_shape` is that of one example, where the first layer does not say it.

    >>> from anydevice import use_device
    >>> with use_device("cpu"):
    ...     chain(Dense(784, 128), relu, Dense(128, 10), softmax).parameter_count
    101770
    """
    layers = [part.layer if isinstance(part, Model) else part for part in parts]
    return build(*layers, input_shape=input_shape, seed=seed)


def Adam(lr: float = 1e-3) -> optimizers.Adam:  # noqa: N802 - Axiom's name
    """Adam with this rate."""
    return optimizers.Adam(lr)


def CrossEntropyLoss() -> Loss:  # noqa: N802 - Axiom's name
    """The cross entropy. A softmax at the end of the model is part of it, and not applied twice."""
    return cross_entropy


def train(
    model: Model,
    data: Any,
    optimizer: optimizers.Optimizer,
    loss: Loss | str = cross_entropy,
    *,
    epochs: int = 1,
    **options: Any,
) -> Model:
    """The trained model, on the current backend; there, `train!`, which changes what it is given.

    `data` and the other options are those of `nn.train`; its `device` is another backend.
    """
    if options.get("device") is None:
        options["device"] = current_device()
    return train_model(model, data, optimizer, loss, epochs=epochs, **options).model


def save_model(model: Model, path: str | os.PathLike[str]) -> None:
    """Write a model to a `.safetensors` file, whole or not at all."""
    save(model, path)


def load_model(path: str | os.PathLike[str]) -> Model:
    """The model of a file, on the current backend."""
    return load(path)


def compile(  # noqa: A001 - Axiom's name
    model: Any,
    *,
    backend: Device | str | None = None,
    optimize: str = "default",
    precision: str = "float32",
    verify: Any = False,
    properties: Iterable[Property] = (),
) -> Compiled:
    """The model compiled for a backend, the current one where none is given.

    With `verify=True` it is checked there on random examples, with `verify=x` on those; so are the
    `properties`. Raises `VerificationError` with the first layer that is wrong.
    """
    example = None if verify is False or verify is None else verify
    if example is True:
        example = _examples(model)
    return make_compiled(
        model,
        current_device() if backend is None else backend,
        optimize=optimize,
        precision=precision,
        verify=example,
        properties=tuple(properties),
    )


def enable_checkpointing(model: Model) -> Model:
    """The model whose activations are computed again for gradients, and not kept."""
    return recompute(model)


def is_finite(y: Any) -> bool:
    """Whether every number of an array of any library is finite."""
    return bool(numpy.isfinite(numpy.asarray(to_numpy(y), "float64")).all())


def prove(inputs: Iterable[Any], holds: Callable[[Any], object]) -> int:
    """Check a property for all of a set of inputs; there, `@prove ∀x ∈ inputs. …`.

    Each of them is tried. Returns how many there were, and raises `VerificationError` with the
    first for which it does not hold.

    >>> prove(range(10), lambda x: x * x >= x)
    10
    """
    count = 0
    for count, x in enumerate(inputs, 1):
        if not holds(x):
            where = f"inputs[{count - 1}]"
            raise VerificationError(f"the property does not hold for {where}: {x!r}", where=where)
    return count


def _examples(model: Any) -> Any:
    """A few random examples for one of our own models."""
    if isinstance(model, Compiled):
        model = model.model
    if not isinstance(model, Model):
        raise ConfigurationError(
            "verify=True draws examples for models of anydevice, whose shapes are known; "
            f"give an example for a {type(model).__name__}: verify=x",
            source="verify=",
        )
    shape = (_EXAMPLES, *model.input_shape)
    numbers = numpy.random.default_rng(0)
    ids = model.layer.takes_ids_below
    if ids is not None:
        return numbers.integers(0, ids, shape, "int32")
    return numbers.standard_normal(shape, "float32")
