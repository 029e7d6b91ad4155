"""What can be compiled and checked: every kind of model, seen in the same way.

A subject is a model together with its weights in one place. It can be moved, and it can be made a
reference of itself: the same model with float64 weights in the host's memory.

What references need of libraries: float64 on the CPU, whatever the device is.

Listening to the parts of modules that have no hooks: their classes are changed for a while.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import Parameter, signature
from typing import Any

from anydevice.core.device import Device
from anydevice.core.hooks import load
from anydevice.errors import ConfigurationError
from anydevice.models.changes import Follower
from anydevice.models.precision import Policy
from anydevice.transfer.moving import to_device

Array = Any
Arguments = Any
"""What a subject's function takes first: its weights, where they are not part of the function."""

After = Callable[[str, Any], Any]
"""Is told the name of a part and what it gave; what it returns goes on to the next part."""

Change = Callable[[Array], Array]
"""Makes other weights of a NumPy array of them, mostly float64."""


class Subject(ABC):
    """One model in one place.

    `kind` is what it is, in words; `library` the engine that it is written for, `None` where it
    runs on all. `notes` are said in the report.
    """

    kind: str
    library: str | None = None
    notes: tuple[str, ...] = ()
    arguments: Arguments = ()
    follower: Follower | None = None
    """Sees later changes of the module; `None` where there can be none."""

    @abstractmethod
    def call(self, arguments: Arguments, *inputs: Any, **named: Any) -> Any:
        """What the model gives; a function that compilers can look through."""

    @abstractmethod
    def traced(self, after: After, *inputs: Any, **named: Any) -> Any:
        """What the model gives, part by part, each part's result passed through `after`."""

    @abstractmethod
    def weights(self) -> Mapping[str, Array]:
        """Its weights by path."""

    @abstractmethod
    def moved(self, device: Device, dtype: str) -> Subject:
        """The model with weights of this type on a device; weights there already are shared."""

    @abstractmethod
    def reference(self, change: Change, engine: str) -> Subject:
        """The model in the host's memory with the weights that `change` makes of its own.

        `engine` is that of the device that it is compared with.
        """

    def catches_up(self, device: Device, dtype: str) -> bool:
        """Take the weights that the module has now, as `moved` would.

        False where it is changed in more than its weights, and has to be compiled anew.
        """
        return False

    def watch(self) -> Follower | None:
        """Sees later changes of what is checked now; `None` where there can be none."""
        return self.follower

    @property
    def where(self) -> Device | None:
        """Where its weights are; `None` where it has none, or should go where a device is best."""
        return None

    def under(self, policy: Policy) -> Callable[..., Any]:
        """`call` under a policy: weights cast for computing, results for the caller."""
        if not policy.casts_parameters:
            return self.call

        def run(arguments: Arguments, *inputs: Any, **named: Any) -> Any:
            return policy.for_output(self.call(policy.for_computing(arguments), *inputs, **named))

        return run

    def for_tracing(self, device: Device, policy: Policy) -> Subject:
        """The subject whose parts compute as `under(policy)` does."""
        return self.moved(device, policy.compute) if policy.casts_parameters else self

    def input_type(self, policy: Policy) -> str:
        """The type of its floating inputs."""
        return policy.compute

    def scope(self) -> AbstractContextManager[Any]:
        """A block in which it is called without being compiled."""
        return nullcontext()

    def accepts(  # noqa: B027 - most models are free in what they take
        self, inputs: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        """Raise `ConfigurationError` where these are not what the model takes."""

    def input_names(self) -> frozenset[str]:
        """The names by which its inputs may be given."""
        return frozenset()

    def with_parts(self, arguments: Arguments, *inputs: Any, **named: Any) -> list[Any] | None:
        """What every part gives, and in the end the output; compilers can look through this, too.

        `None` where the parts cannot be had in compiled code.
        """
        return None

    def can_be_verified(self) -> None:  # noqa: B027 - most models can
        """Raise `ConfigurationError` where there is nothing right to compare with."""

    def has_coarse_products(self, device: Device) -> bool:
        """Whether float32 products are computed on a device with fewer digits (TF32)."""
        return False

    def reference_input(self, x: Array) -> Array:
        """A NumPy array as this reference takes it."""
        return x


def in_training(path: str, instead: str = "model.eval()") -> ConfigurationError:
    """The error for a module that is to be verified in training mode."""
    return ConfigurationError(
        f"{path} works otherwise in training, by chance or by the batch, so there is nothing to "
        f"compare with; call {instead} before compile",
        source="verify=",
    )


def note_of_training(instead: str = "its eval()") -> str:
    """What the report says of a module in training mode."""
    return f"the module is in training mode; call {instead} for inference"


def names_of_inputs(call: Callable[..., Any]) -> frozenset[str]:
    """The names by which a function's inputs may be given.

    >>> sorted(names_of_inputs(lambda x, /, mask, *rest, scale=1, **more: x))
    ['mask', 'scale']
    """
    try:
        parameters = signature(call).parameters.values()
    except (TypeError, ValueError):  # functions in C say nothing of their inputs
        return frozenset()
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return frozenset(each.name for each in parameters if each.kind in named)


def in_words(value: Any) -> str:
    """What something is, for a message.

    >>> in_words(3), in_words("model.pt"), in_words(names_of_inputs)
    ('an int', 'a str', 'a function')
    """
    kind = type(value)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def float64_scope(engine: str) -> AbstractContextManager[Any]:
    """A block in which the library computes in float64 on the CPU, where it can."""
    make = {"jax": _jax_scope, "mlx": _mlx_scope, "torch": _torch_scope}.get(engine)
    return nullcontext() if make is None else make()


def placed_on_cpu(x: Any, engine: str) -> Any:
    """A NumPy array as one of the library's on the CPU, bit for bit."""
    return to_device(x, Device("cpu", 0, engine=engine), convert=True)


@contextmanager
def _jax_scope() -> Iterator[None]:
    jax: Any = sys.modules["jax"]
    # In earlier releases it is not part of the package itself.
    wide = jax.enable_x64 if hasattr(jax, "enable_x64") else load("jax.experimental:enable_x64")
    with wide(True), jax.default_device(jax.devices("cpu")[0]):
        yield


@contextmanager
def _mlx_scope() -> Iterator[None]:
    mx: Any = sys.modules["mlx.core"]
    with mx.stream(mx.cpu):
        yield


def _torch_scope() -> AbstractContextManager[Any]:
    torch: Any = sys.modules["torch"]
    scope: AbstractContextManager[Any] = torch.no_grad()
    return scope


_changing = threading.Lock()


@contextmanager
def recording(parts: Mapping[str, Any], after: After) -> Iterator[None]:
    """A block in which what each of these objects gives when it is called passes through `after`.

    Python looks a call up in the class. So the classes are given another `__call__` in the block,
    which leaves all other objects of theirs alone; they get back what they had.
    """
    names = {id(part): f"{path} {type(part).__name__}" for path, part in parts.items()}
    with _changing:
        changed: list[tuple[type, Any]] = []
        try:
            for kind in {type(part): None for part in parts.values()}:
                before = kind.__dict__.get("__call__")
                type.__setattr__(kind, "__call__", _heard(kind.__call__, names, after))
                changed.append((kind, before))
            yield
        finally:
            for kind, before in reversed(changed):
                if before is None:
                    type.__delattr__(kind, "__call__")
                else:
                    type.__setattr__(kind, "__call__", before)


def _heard(original: Any, names: Mapping[int, str], after: After) -> Any:
    def call(self: Any, *inputs: Any, **named: Any) -> Any:
        result = original(self, *inputs, **named)
        name = names.get(id(self))
        return result if name is None else after(name, result)

    return call
