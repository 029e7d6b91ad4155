"""Training of models with layers on several devices, by `parallel.pipeline`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from anydevice import _ops as ops
from anydevice._arrays.move import to_device
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.engine import Absent, consuming
from anydevice._core.protocols import StepState
from anydevice._core.record import replace
from anydevice._core.trees import Tree, leaves, mapped, partition, refilled
from anydevice._libraries.precision import Policy
from anydevice._libraries.registry import part
from anydevice._libraries.updates import device_masks, home_of, update_by_device
from anydevice._machine.choose.scope import one_device
from anydevice._machine.discovery.discover import devices as devices_of_backend
from anydevice._machine.engines import registry
from anydevice._machine.engines.registry import owner_of
from anydevice._machine.settings.config import check_wish
from anydevice._nn.model import Model
from anydevice._nn.optimizers import BuiltIn, global_norm
from anydevice._parallel.mesh import Mesh, no_collectives
from anydevice._parallel.pipeline import DISK, Staged, pipeline
from anydevice._parallel.pipeline_modules import pipeline_of
from anydevice._parallel.placing import row_ranges
from anydevice._train import strategy as strategies
from anydevice._train.batches import rows_between, rows_of
from anydevice._train.data_parallel import choose_strategy, engine_for
from anydevice._train.randomness import random_state, set_random_state
from anydevice._train.step_config import CompiledSteps, total
from anydevice._train.stepper import FunctionStepper
from anydevice.errors import ConfigurationError

_INSTEAD = "leave microbatches= out"


def pipelined(model: Any, device: Any, devices: Any, strategy: str) -> tuple[Any, str | None]:
    """Return the model of a training, and why it is a pipeline; `None` if it is none."""
    why = pipeline_reason(model, device, devices, strategy)
    if why is None or is_pipeline(model):
        return model, why
    given = list(devices.devices) if isinstance(devices, Mesh) else devices
    if isinstance(given, str) and ":" not in given and given != DISK:
        given = list(devices_of_backend(given)) or [given]
    return pipeline(model, given), why


def is_pipeline(model: Any) -> bool:
    """Whether a model was made by `parallel.pipeline`."""
    own = isinstance(model, Model) and isinstance(model.layer, Staged)
    return own or pipeline_of(model) is not None


def pipeline_reason(model: Any, device: Any, devices: Any, strategy: str) -> str | None:
    """Return why a training is a pipeline, else `None`; raise if it gets devices beside its own."""
    if is_pipeline(model):
        if device is not None or devices is not None or strategy not in ("auto", "pipeline"):
            raise ConfigurationError(
                "this model is a pipeline, which already has its devices; leave out device=, "
                "devices= and strategy=",
                source="devices=",
            )
        return "as the model lies"
    if strategy == "pipeline":
        if devices is None or device is not None:
            raise ConfigurationError(
                'strategy="pipeline" is for several devices; give devices= and no device=',
                source="strategy",
            )
        if isinstance(devices, Mesh) and devices.group is not None:
            raise no_collectives(
                "a pipeline runs in one process, and this mesh has several",
                "give the devices of one process in a list",
            )
        return "as asked"
    if strategy != "auto" or not isinstance(devices, list | tuple) or len(devices) < 2:
        return None
    kinds = {str(device).split(":")[0] for device in devices}
    if kinds & {DISK, "cpu"} and len(kinds) > 1:
        for name in [name for name in map(str, devices) if name != DISK]:
            check_wish(name, "devices=")
        return "parts lie in host memory or on disk"
    if kinds == {"cpu"} or engine_for(model, devices) != "torch":
        return None
    parameters = model.parameters if isinstance(model, Model) else list(model.parameters())
    how, text = choose_strategy(one_device(devices[0]), len(devices), parameters)
    text = f"{text}, and one process of PyTorch drives several devices so"
    return None if how == "replicate" else text


class PipelineStrategy(strategies.Strategy):
    """A training of a model that `parallel.pipeline` made."""

    is_ahead = False

    def __init__(self, model: Any, why: str) -> None:
        module = pipeline_of(model)
        if module is not None:
            self.devices, self.last = module.devices, module.last
            places, self.microbatches = list(module.places.values()), module.microbatches
        else:
            layer = model.layer
            self.devices = tuple(dict.fromkeys(layer.devices))
            self.last, self.microbatches = layer.devices[-1], layer.microbatches
            places = list(layer.places)
            self._homes = [home_of(x) for x in leaves(model.parameters)]
        if any(place.held == DISK for place in places):
            raise no_collectives(
                "layers on disk cannot be trained",
                'train with these layers in host memory, "cpu"',
            )
        super().__init__(self.devices[0])
        offloaded = sum(place.held == "cpu" for place in places)
        more = f", {offloaded} of {len(places)} layers in host memory" if offloaded else ""
        count = f"{len(self.devices)} devices" if len(self.devices) > 1 else str(self.devices[0])
        self.text = f"{count}{more}, pipeline: {why}"
        self.reads_to = Device("cpu", engine="numpy")
        self.rounding = strategies.ROUNDING
        self._compared = 0
        self.place = self._place_batch

    def _place_batch(self, batch: Any) -> Any:
        """Move inputs to the first device, and targets to the last."""
        place = partial(to_device, convert=True, narrow=True)
        if type(batch) is not tuple or len(batch) != 2:
            return place(batch, self.device)
        return place(batch[0], self.device), place(batch[1], self.last)

    def parameters(self, tree: Tree) -> Tree:
        return _all_to_homes(tree, self._homes)

    def state(self, state: StepState, trained: Sequence[bool] | None = None) -> StepState:
        homes = own = self._homes
        if trained is not None:
            own = [home for home, is_own in zip(homes, trained, strict=True) if is_own]
        optimizer = {name: _all_to_homes(tree, own) for name, tree in state.optimizer.items()}
        total = None if state.total is None else _all_to_homes(state.total, own)
        parameters = _all_to_homes(state.parameters, homes)
        return replace(state, parameters=parameters, optimizer=optimizer, total=total)

    def check(
        self, layer: Any, frozen: Collection[str], policy: Policy, optimizer: Any = None
    ) -> None:
        """Raise `UnsupportedError` for options that a pipeline does not support."""
        self.rounding = strategies.ROUNDING_16 if policy.is_narrow else strategies.ROUNDING
        if policy.needs_loss_scale:
            raise Absent(
                f"a pipeline does not train in {policy.compute}, which needs a scaled loss",
                instead='use precision="bfloat16" or "float32"',
            ).error()
        if optimizer is not None and not isinstance(optimizer, BuiltIn):
            raise Absent(
                "the state of this optimizer cannot be divided over devices",
                instead="use one of nn, such as nn.AdamW(1e-3)",
            ).error()
        if self.microbatches > 1:
            strategies.check_rows(layer, frozen, _INSTEAD)

    def module(self, layer: Any, dtype: str, optimizer: Any) -> Any:
        """Return the module unchanged: the pipeline has placed it already."""
        if dtype != "float32":
            raise ConfigurationError(
                f"convert the module with model.to(torch.{dtype}) before parallel.pipeline",
                source="precision",
            )
        return layer

    def module_loss(self, loss: Callable[..., Any], batch: Any) -> Any:
        if self.microbatches == 1:
            return loss(batch)
        before = random_state(*self.devices)
        whole = None
        if self.compares():
            with part("torch", "module").no_gradients():
                whole = float(loss(batch))
        value: Any = None
        for rows, share, microbatch in parts_of(batch, self.microbatches):
            set_random_state(before, *self.devices)
            with part("torch", "random").dropping_as_whole(rows):
                own = loss(microbatch) * share
            value = own if value is None else value + own
        if whole is not None:
            self.compare(whole, float(value.detach()))
        return value

    def compares(self) -> bool:
        """Whether the next batch's loss is also computed without microbatches."""
        self._compared += 1
        return self.microbatches > 1 and strategies.is_compared(self._compared)

    def compare(self, whole: float, parts: float) -> None:
        """Raise `UnsupportedError` if the loss is not the mean over microbatches."""
        if abs(whole - parts) > self.rounding * max(1.0, abs(whole)):
            raise strategies.not_divisible(
                f"the loss of batch {self._compared} is {whole:.6g}, and {parts:.6g} as the "
                f"mean of {self.microbatches} microbatches",
                _INSTEAD,
            )

    def module_total(self, value: Any, like: Any) -> Any:
        owner = owner_of(like)
        assert owner is not None
        return owner.move(value.detach(), owner.devices_of(like)[0])


def _all_to_homes(tree: Tree, homes: Sequence[Device]) -> Tree:
    there = []
    for x, home in zip(leaves(tree), homes, strict=True):
        engine = registry.load(str(home.engine))
        there.append(engine.move(x, home) if owner_of(x) is engine else engine.place(x, home))
    return refilled(tree, there)


def parts_of(batch: Any, count: int) -> Iterator[tuple[tuple[int, int, int], float, Any]]:
    """Yield the microbatches of a batch: the row range, the share, and the microbatch."""
    every = rows_of(batch)
    for first, stop in row_ranges(every, count):
        if first < stop:
            rows = (first, stop - first, every)
            yield rows, (stop - first) / every, rows_between(batch, first, stop)


class PipelineStepper(FunctionStepper):
    """Steps of a model of stages: each device updates its parameters; the host sees each loss."""

    _strategy: PipelineStrategy

    def _start(self, steps: int) -> None:
        if self.compiler.compiles:
            self.compiler.how = f"each stage alone: {self.compiler.how}"
        else:
            layer = self.config.layer
            assert isinstance(layer, Staged)
            self.config = replace(self.config, layer=replace(layer, compiles=False))
        self._seed = int(self.engine.to_host(self._seed))  # an int works on every stage
        self._gradients = self._autodiff.value_and_grad(self._batch_loss, more=True)
        self._is_failing, self._steps_failed = False, 0
        self._masks = device_masks(self._trained)
        update = self.config.optimizer.update
        self._update = self.compiler.compiled(update, "parameters", "state")

    def _make_compiler(self) -> CompiledSteps:
        if self._autodiff.compiles:
            return super()._make_compiler()
        return CompiledSteps(self.engine, "none", fixed=False)  # no compiler spans devices

    def _batch_loss(self, trained: Tree, *rest: Any) -> tuple[Array, list[Array]]:
        """Return the loss of a batch: the mean over its microbatches, weighted by rows."""
        count = self._strategy.microbatches
        if count == 1:
            return self._loss(trained, *rest)
        fixed, batch, seed, number, scale = rest
        value: Any = None
        for rows, share, microbatch in parts_of(batch, count):
            own, _ = self._loss(trained, fixed, microbatch, seed, number, scale, rows)
            own = ops.multiply(own, share)
            value = own if value is None else ops.add(value, own)
        return value, []

    def add(self, batch: Any, weight: float = 1.0) -> Array:
        given = self._fixed, batch, self._seed, self.batches + 1, None
        if self._strategy.compares():
            whole = float(self.engine.to_host(self._loss(self._trained, *given)[0]))
            parts = float(self.engine.to_host(self._batch_loss(self._trained, *given)[0]))
            self._strategy.compare(whole, parts)
        (value, state), gradients = self._gradients(self._trained, *given)
        self._is_failing = self._is_failing or not math.isfinite(self.engine.to_host(value))
        if not self._is_failing:
            self._keep_state(state)
        self._add_up(gradients, weight)
        return value

    def move(self, rate: float) -> None:
        share, gradients = 1.0 / self._added, self._total
        self.drop()
        self.started += 1
        parts = [partition(gradients, mask)[0] for mask in self._masks]
        scale = self._scale_of(parts, share)
        self._is_failing = self._is_failing or not math.isfinite(scale)
        if self._is_failing:
            self._steps_failed += 1
            return
        if scale != 1.0:
            gradients = mapped(lambda x: ops.multiply(x, scale), gradients)
        with consuming():
            self._trained, self._optimizer_state = update_by_device(
                self._update,
                self._masks,
                (self._trained, gradients, self._optimizer_state),
                self.started,
                rate,
            )

    def _scale_of(self, parts: Sequence[Tree], share: float) -> float:
        """Return the factor for the gradients; NaN or infinite if they are."""
        clip = self.config.clip
        if clip is None:
            sums = sum(float(self.engine.to_host(total(part))) for part in parts)
            return share if math.isfinite(sums) else math.nan
        norms = [float(self.engine.to_host(global_norm(part))) for part in parts]
        norm = share * math.hypot(*norms)
        return share * clip / max(norm, clip) if math.isfinite(norm) else math.nan

    def evaluate(self, batch: Any, *, with_output: bool = False) -> tuple[Array, Any]:
        return self._evaluate_batch(self.parameters, batch, with_output)

    @property
    def failed(self) -> bool:
        parts = [partition(self._trained, mask)[0] for mask in self._masks]
        return self._is_failing or not math.isfinite(self._scale_of(parts, 1.0))

    def _failed_steps(self) -> int:
        return self._steps_failed

    def _steps_taken(self) -> int:
        return self.started
