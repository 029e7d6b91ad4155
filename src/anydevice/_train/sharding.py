"""Training in several processes of PyTorch, each with a shard of parameters and state.

For our models, a step gathers the parameters it computes with, and leaves each process its share
of the summed gradients. Users' modules are sharded by PyTorch's own FSDP2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anydevice._arrays.move import to_device, to_numpy
from anydevice._core.device import Device
from anydevice._core.engine import Absent
from anydevice._core.protocols import Function, StepState
from anydevice._core.record import replace
from anydevice._core.trees import Tree, TreeT, leaves, mapped, refilled
from anydevice._formats.packed import Packed
from anydevice._libraries.layers import ModuleLayer
from anydevice._libraries.precision import Policy
from anydevice._libraries.registry import part
from anydevice._nn.optimizers import BuiltIn, Optimizer
from anydevice._parallel.mesh import Mesh
from anydevice._train.data_parallel import ProcessStrategy

if TYPE_CHECKING:
    from anydevice._libraries.torch.mesh import Group, Layout

_CPU = Device("cpu", engine="torch")


class ShardStrategy(ProcessStrategy):
    """A training with parameters and optimizer state divided over processes of PyTorch.

    A stepper of our models updates the shards of this process as plain tensors; callers outside
    see DTensors.
    """

    is_sharded = True

    def __init__(self, group: Group, mesh: Mesh, device: Device, text: str) -> None:
        super().__init__(group, device, text)
        self.reads_within = False  # a step begins with an exchange of its parameters
        self._mesh, self._torch = mesh, part("torch", "mesh")
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

    # Placement of trees

    def parameters(self, tree: Tree) -> Tree:
        return mapped(self._shard, tree)

    def state(self, state: StepState, trained: Sequence[bool] | None) -> StepState:
        parts = {}
        for name in ("parameters", "optimizer", "total"):
            tree = getattr(state, name)
            cut = None if tree is None else mapped(self._shard, tree)
            self._layouts[name] = [self._torch.layout_of(x, self._mesh) for x in leaves(cut)]
            parts[name] = None if tree is None else mapped(self._torch.part_of, cut)
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

    def readable(self, tree: TreeT) -> TreeT:
        return mapped(self._torch.whole, tree)

    def whole(self, tree: TreeT) -> TreeT:
        return mapped(self._torch.whole, tree)

    def saved(self, tree: Tree) -> Tree:
        if tree is None:
            return None
        # One array after the other: no process holds all of them, and only the first keeps them.
        leads = self.leads

        def host(x: Any) -> Any:
            whole = self._torch.whole(x)
            return to_numpy(whole) if leads else None

        there: Any = mapped(host, dict(tree) if isinstance(tree, Packed) else tree)
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
            value, state = loss(
                *self._gather_trees(trained, held), batch, seed, number, scale, rows
            )
            return value * share, state

        own_gradients = differentiate(own_loss)

        def summed(
            trained: Tree, held: Tree, batch: Any, seed: Any, number: Any, scale: Any
        ) -> tuple[tuple[Any, list[Any]], Tree]:
            def whole() -> Any:
                return loss(*self._gather_trees(trained, held), batch, seed, number, scale)[0]

            self._check_first(batch, whole)
            own, rows, share = self._own(batch)
            with self._part(rows, share) as weight:
                (value, state), found = own_gradients(
                    trained, held, own, seed, number, scale, rows, weight
                )
            value = self._own_value(value if weight else value.new_zeros(()))
            sums = self._sum([value], 1.0)
            if sums is None:  # the loss is no mean over rows: repeat with the rows of all processes
                return summed(trained, held, batch, seed, number, scale)
            return (sums[0], state), found

        return summed

    def over_shards(self, number: Any) -> Any:
        return self._torch.summed(number, self._mesh)

    def clip_gradients(self, gradients: Tree, limit: float) -> tuple[Tree, Any]:
        # A part that each process has as a whole counts once in each group of shards.
        is_first = self._group.rank % self._mesh.shard == 0
        counts = [layout.axis is not None or is_first for layout in self._layouts["total"]]
        parts, norm = self._torch.clip_parts(leaves(gradients), counts, limit, self._mesh)
        return refilled(gradients, parts), norm

    def _gather_trees(self, trained: Tree, held: Tree) -> tuple[Tree, Tree]:
        found = []
        for tree, name in ((trained, "trained"), (held, "held")):
            pairs = zip(leaves(tree), self._layouts[name], strict=True)
            whole = None if tree is None else refilled(tree, [at.gathered(x) for x, at in pairs])
            found.append(whole)
        return found[0], found[1]

    def _shard(self, x: Any) -> Any:
        if not self._torch.is_cut(x):
            x = to_device(x, self.device, convert=True)
        return self._torch.sharded(x, self._mesh)

    # Modules of users

    def module(self, layer: ModuleLayer, dtype: str, optimizer: Any) -> ModuleLayer:
        sharded: ModuleLayer = part("torch", "step").shard_layer(
            layer, dtype, self._mesh, self._group, optimizer
        )
        return sharded

    def _module_part(self, loss: Function, batch: Any, rows: Any, share: float) -> Any:
        # A process without rows takes part too, or the others would wait.
        with self._part(rows, share) as weight, part("torch", "random").dropping_as_whole(rows):
            return loss(batch) * weight

    def sum_gradients(self, weights: Sequence[Any]) -> None:
        """Do nothing: FSDP2 has summed the gradients already."""

    def optimizer_state(self, saved: Mapping[str, Any], optimizer: Any) -> Mapping[str, Any]:
        if "param_groups" not in saved:  # the state of an optimizer of anydevice
            return {**saved, "state": self.parameters(saved["state"])}
        step = part("torch", "step")
        weights = step.parameters_of(optimizer)
        state = {at: step.cut_state(own, weights[at]) for at, own in saved["state"].items()}
        return {**saved, "state": state}
