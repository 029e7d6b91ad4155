"""Steps of PyTorch modules in place, as in a hand-written loop: autograd, autocast, optimizers."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anydevice._arrays.move import to_device
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._core.engine import Absent, consuming
from anydevice._core.protocols import Stepper, StepState
from anydevice._core.trees import Tree, mapped
from anydevice._formats.packed import packed, unpacked
from anydevice._libraries.base import in_mode
from anydevice._libraries.layers import ModuleLayer, is_named, loss_and_output, takes_model
from anydevice._libraries.precision import cast_parameters
from anydevice._libraries.torch.mesh import Group, cut_as, fully_sharded, joined_as, part_of, whole
from anydevice._libraries.torch.pipeline import move_tensor
from anydevice._libraries.updates import device_masks, update_by_device
from anydevice._machine.engines import registry
from anydevice._nn.layer import Run
from anydevice._nn.optimizers import Optimizer
from anydevice.errors import ConfigurationError

if TYPE_CHECKING:
    from anydevice._parallel.mesh import Mesh
    from anydevice._train.step_config import CompiledSteps, StepConfig
    from anydevice._train.strategy import Strategy

_CPU = Device("cpu", engine="torch")


class TorchLayer(ModuleLayer):
    """A `torch.nn.Module`, whose parameters a step changes in place."""

    library = "torch"
    has_stepper = True

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        module = self.given
        own = {name: x.detach() for name, x in module.named_parameters()}
        return {**own, **dict(module.named_buffers())}

    @property
    def state_names(self) -> tuple[str, ...]:
        module = self.given
        frozen = [name for name, x in module.named_parameters() if not x.requires_grad]
        return (*frozen, *dict(module.named_buffers()))

    @contextmanager
    def bound(self, parameters: Mapping[str, torch.Tensor], run: Run) -> Iterator[Any]:
        with in_mode(self.given, training=run.training):
            yield self.given

    def finished(self, parameters: Mapping[str, torch.Tensor]) -> Any:
        now = self.parameters
        with torch.no_grad():
            for name, x in parameters.items():
                if now[name].data_ptr() != x.data_ptr():
                    now[name].copy_(x)
        return self.given

    def load(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.finished(parameters)

    def placed(self, device: Device, dtype: str) -> None:
        """Move the module to a device, and its weights to a 16-bit dtype if asked for."""
        module = self.given
        if "float16" in (dtype, narrow_dtype(module)):
            raise ConfigurationError(
                "gradients of float16 weights underflow in PyTorch; take model.float() and "
                "precision='mixed', which keeps the weights in float32, or 'bfloat16'",
                source="precision",
            )
        to_device(module, device)
        kinds = _float_dtypes(module)
        if torch.float64 in kinds and dtype == "float32":
            raise ConfigurationError(
                f"the weights of {self.label} are float64, and trainings compute in float32 or 16 "
                "bits; call model.float() before",
                source="model",
            )
        wanted = getattr(torch, dtype)
        if dtype != "float32" and kinds != {wanted}:
            module.to(wanted)


class TorchStepper(Stepper):
    """Takes steps of a module; a NaN or infinite loss stops all later ones."""

    def __init__(
        self,
        strategy: Strategy,
        config: StepConfig,
        state: StepState,
        compiler: CompiledSteps,
        optimizer: Any,
        schedule: Any,
    ) -> None:
        assert isinstance(config.layer, TorchLayer)
        self.engine = registry.load("torch")
        self.device = device = strategy.device
        self._strategy = strategy
        self.config = config
        self._layer = config.layer
        self._module = config.layer.given
        self._weights = [x for x in self._module.parameters() if x.requires_grad]
        self._statistics = _statistics(self._module)
        self._optimizer: Any = (
            optimizer if optimizer is not None else OwnUpdate(self._module, config.optimizer)
        )
        own = {id(x) for x in parameters_of(self._optimizer)}
        self._others = [x for x in self._weights if id(x) not in own]
        self._schedule = schedule
        self.started, self.batches = state.started, state.batches
        self._added, self._skipped = state.added, 0
        self._kind = self.engine.native(device).type
        policy = config.policy
        self._autocast = policy.casts_parameters and getattr(torch, policy.compute)
        self._scaler = torch.amp.GradScaler(self._kind) if policy.needs_loss_scale else None
        self.compiler = compiler
        loss = config.loss
        self._is_plain = not (loss is None or takes_model(loss) or is_named(loss))
        """Whether the loss takes outputs and targets as they are: a small step has no time."""
        self._value = compiler.compiled(self._loss)
        self._narrow = None if self._autocast else narrow_dtype(self._module)
        self._finite = device.kind == "cpu"
        self._failed = torch.zeros((), device=self._weights[0].device)
        self._since = torch.zeros_like(self._failed)
        if state.own is not None:
            self._restore(state)

    @property
    def parameters(self) -> Tree:
        return self._layer.parameters

    @property
    def rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def state(self) -> StepState:
        if self._added and self._strategy.is_several:
            raise Absent(
                "gradients that wait for those of further batches are in several processes",
                instead="save after a step, once per accumulate batches",
            ).error()
        weights = self._module.named_parameters()
        waiting = {name: x.grad for name, x in weights if x.grad is not None}
        own = {
            "optimizer": self._optimizer.state_dict(),
            "schedule": None if self._schedule is None else self._schedule.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "gradients": waiting if self._added else None,
            "left_out": self._skipped,
        }
        counts = self.batches, self.started, self.started - self._skipped
        return StepState(self.parameters, {}, *counts, added=self._added, own=packed(own))

    def _restore(self, state: StepState) -> None:
        own = unpacked(state.own)
        self._optimizer.load_state_dict(
            self._strategy.optimizer_state(own["optimizer"], self._optimizer)
        )
        self._skipped = own["left_out"]
        for part, saved in ((self._schedule, own["schedule"]), (self._scaler, own["scaler"])):
            if part is not None and saved is not None:
                part.load_state_dict(saved)
        if own["gradients"] is not None:
            by_name = dict(self._module.named_parameters())
            for name, gradient in own["gradients"].items():
                by_name[name].grad = gradient.to(by_name[name].device, by_name[name].dtype)
        self._layer.load(state.parameters)

    def add(self, batch: Any, weight: float = 1.0) -> Array:
        if not self._module.training:
            self._module.train()
        before = [x.clone() for x in self._statistics] if self._finite else []
        with self._scope():
            value = self._strategy.module_loss(self._value, batch)
        share = weight / self.config.accumulate
        if value is not None:
            scaled = value if share == 1.0 else value * share
            if self._scaler is not None:
                scaled = self._scaler.scale(scaled)
            scaled.backward()
        self._added += weight
        self.batches += 1
        value = self._strategy.module_total(value, self._failed)
        if not self._finite:  # on an accelerator, reading the number would wait
            self._failed = torch.maximum(self._failed, 1.0 - torch.isfinite(value).float())
        elif not math.isfinite(value.item()):
            self._failed = torch.ones_like(self._failed)
        if before and bool(self._failed):
            for x, saved in zip(self._statistics, before, strict=True):
                x.copy_(saved)
        return value

    def move(self, rate: float) -> None:
        optimizer, scaler = self._optimizer, self._scaler
        self.started += 1
        self._strategy.sum_gradients(self._weights)
        if scaler is not None:
            scaler.unscale_(optimizer)
        if self._added != self.config.accumulate:
            factor = self.config.accumulate / self._added
            torch._foreach_mul_([x.grad for x in self._weights if x.grad is not None], factor)
        if self.config.clip is not None:
            torch.nn.utils.clip_grad_norm_(self._weights, self.config.clip)
        if rate != self.rate:  # only a schedule of anydevice changes it
            _set_rate(optimizer, rate)
        self._added = 0.0
        skipped = self._finite and bool(self._failed)
        if scaler is not None:
            before = scaler.get_scale()
            if not skipped:
                scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < before:
                skipped = True
                self._skipped += 1
                if before <= 1.0:  # a gradient that is NaN stays so at every scale
                    self._failed = torch.ones_like(self._failed)
        elif not skipped:
            optimizer.step()
        if self._schedule is not None and not skipped:
            self._schedule.step()
        self.drop()
        if skipped or not self._finite:
            self._since = self._since + self._failed

    def drop(self) -> None:
        self._added = 0.0
        self._optimizer.zero_grad()
        for x in self._others:  # else their gradients would accumulate, and count for clip
            x.grad = None

    def evaluate(self, batch: Any, *, with_output: bool = False) -> tuple[Array, Any]:
        with in_mode(self._module, training=False), torch.no_grad(), self._scope():
            return loss_and_output(self.config.loss, self._module, self._cast_batch(batch))

    @property
    def failed(self) -> bool:
        norm = torch.linalg.vector_norm
        sizes = [move_tensor(norm(part_of(x.detach())), self.device) for x in self._weights]
        size = self._strategy.over_shards(torch.stack(sizes).sum())
        return bool(self._failed) or not bool(size.isfinite())

    @property
    def failed_since(self) -> int:
        return self.started + 1 - int(self._since)

    @property
    def skipped_steps(self) -> int:
        return self._skipped

    def _loss(self, batch: Any) -> Any:
        loss = self.config.loss
        if self._is_plain and type(batch) is tuple and isinstance(batch[0], torch.Tensor):
            x, y = self._cast_batch(batch)
            return loss(self._module(x), y)
        return loss_and_output(self.config.loss, self._module, self._cast_batch(batch))[0]

    def _cast_batch(self, batch: Any) -> Any:
        """Return the batch in the dtype of the weights, unless PyTorch casts both."""
        return batch if self._narrow is None else cast_parameters(batch, self._narrow)

    def _scope(self) -> AbstractContextManager[Any]:
        if not self._autocast:
            return nullcontext()
        return torch.autocast(self._kind, dtype=self._autocast)


def narrow_dtype(module: nn.Module) -> str | None:
    """Return the dtype of all weights of a module if it is a 16-bit one."""
    kinds = _float_dtypes(module)
    name = str(kinds.pop()).removeprefix("torch.") if len(kinds) == 1 else ""
    return name if name in ("bfloat16", "float16") else None


def _float_dtypes(module: nn.Module) -> set[torch.dtype]:
    return {x.dtype for x in module.parameters() if x.is_floating_point()}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [x for group in optimizer.param_groups for x in group["params"]]


def check_parts(module: nn.Module, optimizer: Any, schedule: Any) -> None:
    """Raise for an optimizer or a schedule of PyTorch that would not train the module."""
    name, kind = type(module).__name__, type(optimizer).__name__
    own = {id(x) for x in module.parameters() if x.requires_grad}
    if own.isdisjoint(id(x) for x in parameters_of(optimizer)):
        raise ConfigurationError(
            f"{kind} has none of the parameters of {name} that can be trained: it belongs to "
            f"another model, or to this one before it was copied; make torch.optim.{kind}("
            "model.parameters()) of the model that is given here",
            source="optimizer",
        )
    # Schedulers wrap the functions of an optimizer.
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigurationError(
            f"{kind} calls the model several times in a step, which trainings do not; take another "
            "optimizer, such as torch.optim.AdamW or nn.AdamW(1e-3)",
            source="optimizer",
        )
    if schedule is None:
        return
    changed = {id(group) for group in getattr(schedule, "optimizer", optimizer).param_groups}
    if changed.isdisjoint(map(id, optimizer.param_groups)):
        raise ConfigurationError(
            f"{type(schedule).__name__} changes the rate of another optimizer; make it of the one "
            "that is given here",
            source="schedule",
        )


def check_all_held(layer: Any, optimizer: Any) -> None:
    """Raise if the PyTorch optimizer of a saved training trains more than the module."""
    own = {id(x) for x in layer.given.parameters()}
    others = sum(id(x) not in own for x in parameters_of(optimizer))
    if others:
        raise ConfigurationError(
            f"{type(optimizer).__name__} trains {others} parameters that are not of "
            f"{layer.label}, such as those of a loss, and its file would not hold them; "
            "put both into one module, and give a loss(model, x, y)",
            source="optimizer",
        )


def _statistics(module: nn.Module) -> list[torch.Tensor]:
    """Return the buffers that norms update in training."""
    norms = [part for part in module.modules() if getattr(part, "track_running_stats", False)]
    return [x for norm in norms for x in norm.buffers(recurse=False)]


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all groups; each keeps its ratio to the first one."""
    groups = optimizer.param_groups
    for group in groups:
        group.setdefault("initial_lr", group["lr"])
    first = groups[0]["initial_lr"]
    for group in groups:
        group["lr"] = rate * group["initial_lr"] / first if first else rate


class OwnUpdate:
    """An optimizer of anydevice with the interface of `torch.optim`, over a module's weights."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._own = optimizer
        self._weights = {name: x for name, x in module.named_parameters() if x.requires_grad}
        own = {name: part_of(x.detach()) for name, x in self._weights.items()}
        self._state = optimizer.init(own)
        self._devices = device_masks(own)
        self._steps = 0
        rate = optimizer.rate if isinstance(optimizer.rate, float | int) else optimizer.rate_at(1)
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(self._weights.values()), "lr": float(rate)}
        ]

    def step(self) -> None:
        self._steps += 1
        with torch.no_grad(), consuming():
            weights = {name: part_of(x.detach()) for name, x in self._weights.items()}
            gradients = {
                name: torch.zeros_like(weights[name]) if x.grad is None else part_of(x.grad)
                for name, x in self._weights.items()
            }
            rate = self.param_groups[0]["lr"]
            trees = weights, gradients, self._state
            new, self._state = update_by_device(
                self._own.update, self._devices, trees, self._steps, rate
            )
            for name, x in new.items():
                if x is not weights[name]:
                    weights[name].copy_(x)

    def zero_grad(self) -> None:
        for x in self._weights.values():
            x.grad = None

    def state_dict(self) -> dict[str, Any]:
        weights = self._weights
        state: dict[str, Any] = dict(self._state)
        if any(hasattr(x, "to_local") for x in weights.values()):  # divided over processes
            for tree, parts in state.items():
                state[tree] = {name: joined_as(weights[name], x) for name, x in parts.items()}
        return {"state": state, "steps": self._steps}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._state, self._steps = mapped(part_of, saved["state"]), saved["steps"]


class ShardedLayer(TorchLayer):
    """A copy of a user's module, sharded by FSDP2; `original` is the user's module."""

    original: Any = None

    @property
    def label(self) -> str:
        return type(self.original).__name__

    @property
    def root(self) -> str:
        return self.label

    def finished(self, parameters: Mapping[str, Any]) -> Any:
        return TorchLayer(self.original).finished(mapped(whole, dict(parameters)))

    def load(self, parameters: Mapping[str, Any]) -> None:
        now = self.parameters
        with torch.no_grad():
            for name, x in parameters.items():
                part = part_of(cut_as(now[name], x))
                part_of(now[name]).copy_(part)


def shard_layer(
    layer: TorchLayer, dtype: str, mesh: Mesh, group: Group, optimizer: Any
) -> ShardedLayer:
    """Return a copy with the first process's values, sharded by FSDP2; `optimizer` trains it."""
    layer.placed(_CPU, dtype)
    native = registry.load("torch").native(mesh.devices[0])
    for x in layer.parameters.values():
        there = x.to(native)
        group.copy_from_first([there])
        x.copy_(there)
    copied = copy.deepcopy(layer.given)
    sharded = ShardedLayer(fully_sharded(copied, mesh), original=layer.given)
    if optimizer is not None:
        pairs = zip(layer.given.parameters(), sharded.given.parameters(), strict=True)
        new = {id(old): sharded_one for old, sharded_one in pairs}
        state = {new.get(id(x), x): own for x, own in optimizer.state.items()}
        for trained in optimizer.param_groups:
            trained["params"] = [new.get(id(x), x) for x in trained["params"]]
        optimizer.state.clear()
        optimizer.state.update({x: cut_state(own, x) for x, own in state.items()})
    return sharded


def cut_state(state: Mapping[str, Any], weight: torch.Tensor) -> dict[str, Any]:
    """Return the state of a weight, with tensors of its shape cut like the weight."""
    return {name: cut_as(weight, x) for name, x in state.items()}
