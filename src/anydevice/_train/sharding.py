"""A training in several processes of PyTorch, each of which holds its share of everything.

Of our models, a step gathers parameters where it computes with them, and leaves each process the
sum of its share of the gradients. Modules of users are sharded by PyTorch's own FSDP2.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from anydevice._arrays.move import to_device, to_numpy
from anydevice._core.device import Device
from anydevice._core.engine import Absent
from anydevice._core.record import replace
from anydevice._core.trees import Tree, leaves, mapped, refilled
from anydevice._libraries.precision import Policy
from anydevice._nn.optimizers import BuiltIn, Optimizer
from anydevice._parallel import torch_mesh
from anydevice._parallel.mesh import Mesh
from anydevice._parallel.placing import part_of, row_ranges
from anydevice._parallel.processes import Group
from anydevice._parallel.torch_mesh import Layout
from anydevice._train.checkpoint import Packed
from anydevice._train.data_parallel import ProcessSpread
from anydevice._train.randomness import dropping_as_whole
from anydevice._train.steps import StepState
from anydevice._train.strategy import Function
from anydevice._train.torch_modules import TorchLayer, parameters_of

_CPU = Device("cpu", engine="torch")


class ShardSpread(ProcessSpread):
    """A training whose parameters and state are divided over processes of PyTorch.

    A stepper of our models has the parts of this process, plain tensors that it updates as any
    others; what others see of them are DTensors.
    """

    is_sharded = True

    def __init__(self, group: Group, mesh: Mesh, device: Device, text: str) -> None:
        super().__init__(group, device, text)
        self.reads_within = False  # a step begins with an exchange, that of its parameters
        self._mesh = mesh
        self._layouts: dict[str, list[Layout]] = {}

    @property
    def reads_to(self) -> Device:
        return _CPU

    def check(
        self, layer: Any, frozen: Collection[str], policy: Policy, optimizer: Optimizer | None
    ) -> None:
        super().check(layer, frozen, policy, optimizer)
        if optimizer is not None and not isinstance(optimizer, BuiltIn):
            raise Absent(
                f"{type(optimizer).__name__} may compute with whole parameters, of which each "
                "process has a part",
                instead='take nn.AdamW, nn.Adam, nn.SGD or nn.Lion, or strategy="replicate"',
                code="no_collectives",
            ).error()

    # Where trees lie

    def parameters(self, tree: Tree) -> Tree:
        return mapped(self._sharded, tree)

    def state(self, state: StepState, trained: Sequence[bool] | None) -> StepState:
        parts = {}
        for name in ("parameters", "optimizer", "total"):
            tree = getattr(state, name)
            spread = None if tree is None else mapped(self._sharded, tree)
            self._layouts[name] = [torch_mesh.layout_of(x, self._mesh) for x in leaves(spread)]
            parts[name] = None if tree is None else mapped(part_of, spread)
        every = self._layouts["parameters"]
        is_trained = trained or [True] * len(every)
        pairs = list(zip(every, is_trained, strict=True))
        self._layouts["trained"] = self._layouts["total"] = [each for each, own in pairs if own]
        self._layouts["held"] = [each for each, own in pairs if not own]
        scale = state.scale
        parts["scale"] = None if scale is None else to_device(scale, self.device, convert=True)
        return replace(state, **parts)

    def joined(self, tree: Tree, name: str) -> Tree:
        pairs = zip(leaves(tree), self._layouts[name], strict=True)
        return None if tree is None else refilled(tree, [at.joined(x) for x, at in pairs])

    def readable(self, tree: Tree) -> Tree:
        return mapped(_whole, tree)

    def whole(self, tree: Tree) -> Tree:
        return mapped(_whole, tree)

    def saved(self, tree: Tree) -> Tree:
        if tree is None:
            return None
        # One after the other: no process holds all of them, and only the first one keeps them.
        leads = self.leads

        def host(x: Any) -> Any:
            whole = _whole(x)
            return to_numpy(whole) if leads else None

        there = mapped(host, dict(tree) if isinstance(tree, Packed) else tree)
        if isinstance(tree, Packed):
            there = Packed(there)
            there.text = tree.text
        return there

    # Steps of our models

    def gradients(self, differentiate: Function, loss: Function) -> Function:
        def own_loss(
            trained: Tree, held: Tree, batch: Any, seed: Any, number: Any, scale: Any, rows: Any,
            share: float,
        ) -> tuple[Any, list[Any]]:  # fmt: skip
            value, state = loss(*self._gathered(trained, held), batch, seed, number, scale, rows)
            return value * share, state

        own_gradients = differentiate(own_loss)

        def summed(
            trained: Tree, held: Tree, batch: Any, seed: Any, number: Any, scale: Any
        ) -> tuple[tuple[Any, list[Any]], Tree]:
            def whole() -> Any:
                return loss(*self._gathered(trained, held), batch, seed, number, scale)[0]

            self._check_first(batch, whole)
            part, rows, share = self._own(batch)
            with self._part(rows, share) as weight:
                (value, state), found = own_gradients(
                    trained, held, part, seed, number, scale, rows, weight
                )
            value = self._own_value(value if weight else value.new_zeros(()))
            sums = self._sum([value], 1.0)
            if sums is None:  # found to be no mean over rows: once more, with all of them
                return summed(trained, held, batch, seed, number, scale)
            return (sums[0], state), found

        return summed

    def over_shards(self, number: Any) -> Any:
        return torch_mesh.summed(number, self._mesh)

    def clip_gradients(self, gradients: Tree, limit: float) -> tuple[Tree, Any]:
        torch: Any = sys.modules["torch"]
        parts = leaves(gradients)
        # What each process has as a whole counts once in each group that holds everything.
        is_first = self._group.rank % self._mesh.shard == 0
        once = [at.axis is not None or is_first for at in self._layouts["total"]]
        sizes = [x.float().square().sum() for x, own in zip(parts, once, strict=True) if own]
        square = torch.stack(sizes).sum() if sizes else parts[0].new_zeros((), dtype=torch.float32)
        norm = self.over_shards(square).sqrt()
        factor = limit / torch.clamp(norm, min=limit)
        return refilled(gradients, [(x * factor).to(x.dtype) for x in parts]), norm

    def _gathered(self, trained: Tree, held: Tree) -> tuple[Tree, Tree]:
        found = []
        for tree, name in ((trained, "trained"), (held, "held")):
            pairs = zip(leaves(tree), self._layouts[name], strict=True)
            whole = None if tree is None else refilled(tree, [at.gathered(x) for x, at in pairs])
            found.append(whole)
        return found[0], found[1]

    def _sharded(self, x: Any) -> Any:
        if not torch_mesh.is_cut(x):
            x = to_device(x, self.device, convert=True)
        return torch_mesh.sharded(x, self._mesh)

    # Modules of users

    def module(self, layer: TorchLayer, dtype: str, optimizer: Any) -> TorchLayer:
        layer.placed(_CPU, dtype)
        for x in leaves(layer.parameters):  # what each process made is that of the first
            there = x.to(self._native)
            self._group.copy_from_first([there])
            x.copy_(there)
        copied = copy.deepcopy(layer.given)
        there = ShardedLayer(torch_mesh.fully_sharded(copied, self._mesh), original=layer.given)
        if optimizer is not None:
            pairs = zip(layer.given.parameters(), there.given.parameters(), strict=True)
            _point_to(optimizer, {id(old): new for old, new in pairs})
        return there

    def _module_part(self, loss: Function, part: Any, rows: Any, share: float) -> Any:
        # One without rows takes part, or the others would wait.
        with self._part(rows, share) as weight, dropping_as_whole(rows):
            return loss(part) * weight

    def sum_gradients(self, weights: Sequence[Any]) -> None:
        """FSDP2 has summed them already."""

    def optimizer_state(self, saved: Mapping[str, Any], optimizer: Any) -> Mapping[str, Any]:
        if "param_groups" not in saved:  # one of ours
            return {**saved, "state": self.parameters(saved["state"])}
        of = parameters_of(optimizer)
        state = {at: _cut_state(own, of[at]) for at, own in saved["state"].items()}
        return {**saved, "state": state}

    @property
    def _native(self) -> Any:
        from anydevice._machine.engines import registry

        return registry.load("torch").native(self.device)


class ShardedLayer(TorchLayer):
    """A copy of a user's module that FSDP2 has sharded; `original` is the user's own."""

    original: Any = None

    @property
    def label(self) -> str:
        return type(self.original).__name__

    @property
    def root(self) -> str:
        return self.label

    def finished(self, parameters: Mapping[str, Any]) -> Any:
        return TorchLayer(self.original).finished(mapped(_whole, dict(parameters)))

    def load(self, parameters: Mapping[str, Any]) -> None:
        now = self.parameters
        with sys.modules["torch"].no_grad():
            for name, x in parameters.items():
                part = part_of(torch_mesh.cut_as(now[name], x))
                part_of(now[name]).copy_(part)


class JoinedLoss:
    """A loss of (output, y) that is no mean over rows, such as one of masked tokens.

    Once it `is_on`, each process computes the loss of the outputs of all, joined by a DTensor, and
    takes gradients by its own. `rows` are those of the part that is computed, and their share.
    """

    def __init__(self, loss: Any, mesh: Mesh) -> None:
        self.loss, self.is_on = loss, False
        self.rows: tuple[tuple[int, int, int], float] | None = None
        self._mesh = Mesh(mesh.devices, shard=mesh.size, group=mesh.group)
        self.__name__ = getattr(loss, "__name__", type(loss).__name__)

    def __call__(self, output: Any, y: Any) -> Any:
        if self.rows is None:
            return self.loss(output, y)
        return self.loss(mapped(self._joined, output), mapped(self._joined, y))

    def _joined(self, x: Any) -> Any:
        """The rows of all processes, of which this one has some."""
        torch: Any = sys.modules["torch"]
        assert self.rows is not None, "rows are joined while a part is computed"
        (_, count, every), share = self.rows
        if not getattr(x, "ndim", 0) or x.shape[0] % count:
            return x
        times, ranges = x.shape[0] // count, row_ranges(every, self._mesh.size)
        most = (ranges[0][1] - ranges[0][0]) * times
        own = x if share else x[:0]
        # Of equal size in all of them, as a DTensor has it.
        part = torch.cat([own, own.new_zeros((most - own.shape[0], *x.shape[1:]))])
        at = Layout(self._mesh, 0, (most * self._mesh.size, *x.shape[1:]))
        every_row = at.whole(part)
        kept = [
            every_row[rank * most : rank * most + (stop - start) * times]
            for rank, (start, stop) in enumerate(ranges)
        ]
        return torch.cat(kept)


def _point_to(optimizer: Any, new: Mapping[int, Any]) -> None:
    """Let an optimizer of PyTorch train other weights, with the state that it has."""
    state = {new.get(id(x), x): own for x, own in optimizer.state.items()}
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(x), x) for x in group["params"]]
    optimizer.state.clear()
    optimizer.state.update({x: _cut_state(own, x) for x, own in state.items()})


def _cut_state(state: Mapping[str, Any], weight: Any) -> dict[str, Any]:
    """The state of a weight, in which what is like the weight is cut as that is."""
    return {name: torch_mesh.cut_as(weight, x) for name, x in state.items()}


def _whole(x: Any) -> Any:
    return torch_mesh.whole_of(x) if torch_mesh.is_cut(x) else x
