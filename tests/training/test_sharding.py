"""A training whose parameters are divided over processes of PyTorch: the losses of one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, cast

import pytest

from tests.torch_processes import held

pytestmark = [
    pytest.mark.usefixtures("children_count_lines"),
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
    ),
]

SAME = """
from anydevice.parallel import torch_mesh

shard = {"strategy": "shard"}

def frozen():
    return ours().freeze("[0]")

cases = {  # epochs, processes and options, of each kind of model
    "two": (1, 2, {"accumulate": 2, "clip": 0.1}),
    "three": (2, 3, {}),
    "four": (1, 4, {"clip": None, "optimizer": nn.Lion(1e-4)}),
}
several = {(make, name): parallel.launch(lambda: trained(make, epochs, **shard, **options),
                                         processes=n)
           for make in (ours, users) for name, (epochs, n, options) in cases.items()}
narrow = parallel.launch(lambda: trained(ours, 1, precision="float16", **shard), processes=2)
still = parallel.launch(lambda: trained(frozen, 1, **shard), processes=2)
wrong = mutants(**shard)

def held(make, own=None):
    mesh, model = parallel.initialize("cpu"), make()
    (optimizer, data, loss), given = arguments(model, **({"optimizer": own} if own else {}))
    tensors = leaves(model.parameters) if isinstance(model, nn.Model) else model.parameters()
    count = sum(x.numel() for x in tensors)
    training = nn.Training(model, optimizer, data, loss, devices=mesh, **shard, **given)
    training.step((X[:50], Y[:50]))
    state = training.stepper.state
    own = [x for x in leaves([state.parameters, state.optimizer, state.own]) if x.ndim]
    return count, torch_mesh.bytes_here(own) * mesh.size / (3 * 4 * count)

for make, own in ((ours, None), (users, None), (users, nn.AdamW(1e-3))):
    for count, ratio in parallel.launch(held, make, own, processes=3):  # which divide unevenly
        assert count > 83_000 and ratio <= 1.05, (make, own, ratio)

# Two groups of two, with the best epoch of a validation: the model is that of one process.
def best(make):
    mesh = parallel.initialize("cpu")
    if mesh.size > 1:
        mesh = parallel.Mesh(mesh.devices, replicate=2, shard=2, group=mesh.group)
    model = make()
    (optimizer, data, loss), given = arguments(model)
    done = nn.train(model, data, optimizer, loss, devices=mesh, epochs=2, progress=False,
                    patience=1, validation=[(X[:9], Y[:9])], metrics="accuracy", **given)
    assert mesh.size == 1 or "2 groups that hold all of it" in done.report.spread
    own = isinstance(model, nn.Model)
    assert own or done.model is model
    found = leaves(done.model.parameters) if own else list(model.parameters())
    assert not any(hasattr(x, "full_tensor") for x in found)
    losses = [loss for each in done.history for loss in (each.loss, each.validation)]
    return losses, [x.detach().numpy() for x in found]

groups = {make: parallel.launch(best, make, processes=4) for make in (ours, users)}

class Own(nn.Optimizer):
    def init(self, parameters):
        return {}

told = failing(trained, ours, optimizer=Own(), **shard)
assert "UnsupportedError" in told and "Own may compute with whole parameters" in told, told
bad = X.copy()
bad[3] = np.nan
for make in (ours, users):
    told = failing(trained, make, data=nn.Batches(bad, Y, size=50), **shard)
    assert "the batch itself holds NaN values in x" in told, told

for make in (ours, users):
    for name, (epochs, n, options) in cases.items():
        far = apart(trained(make, epochs, **options), several[make, name])
        assert far <= 1e-6, (make, name, far)
    one = trained(make, 1)
    for (made, name), losses in wrong.items():
        assert made is not make or apart(one, losses) > 1e-4, (make, name, apart(one, losses))
    losses, weights = best(make)
    for theirs, parts in groups[make]:
        assert apart(losses, [theirs]) <= 1e-6
        assert max(np.abs(a - b).max() for a, b in zip(weights, parts, strict=True)) <= 1e-5
assert apart(trained(frozen, 1), still) <= 1e-6
assert apart(trained(ours, 1, precision="float16"), narrow) <= 2e-3
print("held")
"""

SAVED = """
from pathlib import Path
from anydevice.saving.files import read

def loaded(make, name, **options):
    # Nothing is rounded on the way into the file and out of it.
    mesh, model = parallel.initialize("cpu"), make()
    (optimizer, data, loss), given = arguments(model)
    training = nn.Training(model, optimizer, data, loss, devices=mesh, **given,
                           **(options if mesh.size > 1 else {}))
    training.load(name)
    there = parallel.gather(training.parameters)
    saved = read(Path(name), "training", TORCH).trees["parameters"]
    for a, b in zip(leaves(there), leaves(saved), strict=True):
        np.testing.assert_array_equal(anydevice.to_numpy(a), anydevice.to_numpy(b))

def on_jax(**options):
    jax = anydevice.device("cpu", engine="jax")
    model = nn.build(ours().layer, seed=1, device=jax)
    return trained(lambda: model, devices=parallel.Mesh([jax]), **options)

shard = {"strategy": "shard"}
for make in (ours, users):
    name = f"{make.__name__}.safetensors"
    parallel.launch(lambda: trained(make, 1, save=name, **shard), processes=4)
    found = []
    for n in (1, 2, 3, 8) if make is ours else (1, 3):
        def resumed():
            loaded(make, name, **shard)
            return trained(make, resume=name, **(shard if n > 1 else {}))
        found += parallel.launch(resumed, processes=n)
    if make is ours:
        found += parallel.launch(lambda: trained(make, resume=name), processes=2)  # replicated
    if JAX and make is ours:
        parallel.launch(lambda: on_jax(epochs=1, save="jax.safetensors"), processes=1)
        found += parallel.launch(lambda: trained(make, resume="jax.safetensors", **shard),
                                 processes=2)
        found += parallel.launch(lambda: on_jax(resume=name), processes=1)
    (whole,) = parallel.launch(trained, make, processes=1)
    assert apart(whole, found) <= 1e-6, (make, whole, found)
print("held")
"""


def test_sharded_over_processes_a_training_has_the_losses_of_one(tmp_path: Path) -> None:
    assert held(SAME, tmp_path) == "held"


def test_a_sharded_training_goes_on_with_any_number_of_processes(tmp_path: Path) -> None:
    has_jax = importlib.util.find_spec("jax") is not None
    assert held(f"JAX = {has_jax}\n{SAVED}", tmp_path) == "held"


def test_what_every_process_holds_as_a_whole_counts_once_in_each_group() -> None:
    torch = pytest.importorskip("torch")
    from anydevice.parallel.mesh import Mesh
    from anydevice.parallel.processes import Group
    from anydevice.parallel.torch_mesh import Layout
    from anydevice.training.sharding import ShardSpread

    squares: list[float] = []

    def noted(number: Any) -> Any:
        squares.append(float(number))
        return number

    for rank in range(4):  # two groups of two
        group = Group(rank, 4)
        mesh = Mesh(["cpu"], replicate=2, shard=2, group=group)
        spread = object.__new__(ShardSpread)
        spread._group, spread._mesh = group, mesh
        spread._layouts = {"total": [Layout(mesh, 0, (4,)), Layout(mesh, None, ())]}
        cast(Any, spread).over_shards = noted
        spread.clipped({"a": torch.full((2,), 2.0), "b": torch.tensor(3.0)}, 1.0)
    assert squares[0] + squares[1] == squares[2] + squares[3] == 2 * (2 * 4.0) + 9.0


def test_a_mesh_that_shards_is_kept_and_not_replicated() -> None:
    from anydevice.errors import ConfigurationError
    from anydevice.parallel.mesh import Mesh
    from anydevice.parallel.processes import Group
    from anydevice.training.spreading import _chosen

    mesh = Mesh(["cpu"], replicate=2, shard=2, group=Group(0, 4))
    for strategy in ("auto", "shard"):
        assert _chosen(mesh, strategy, {})[0] is mesh
    with pytest.raises(ConfigurationError, match="contradicts the mesh, which divides"):
        _chosen(mesh, "replicate", {})
