"""A training whose parameters are divided over processes of PyTorch: the losses of one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.torch_processes import held

pytestmark = [
    pytest.mark.usefixtures("children_count_lines"),
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
    ),
]

SAME = """
from anydevice._libraries.torch import mesh as torch_mesh

shard, MAKES = {"strategy": "shard"}, (ours, users)

def frozen():
    return ours().freeze("[0]")

def each(epochs, makes=MAKES, **options):
    return lambda: {make.__name__: trained(make, epochs, **options) for make in makes}

def held(make, own=None):
    mesh, model = parallel.initialize("cpu"), make()
    (optimizer, data, loss), given = arguments(model, **({"optimizer": own} if own else {}))
    tensors = leaves(model.parameters) if isinstance(model, nn.Model) else model.parameters()
    count = sum(x.numel() for x in tensors)
    training = nn.Training(model, optimizer, data, loss, devices=mesh, **shard, **given)
    training.step((X[:50], Y[:50]))
    state = training.stepper.state
    own = [x for x in leaves([state.parameters, state.optimizer, state.own]) if x.ndim]
    here = sum(torch_mesh.part_of(x).nbytes for x in own)
    return count, here * mesh.size / (3 * 4 * count)

def all_held():
    return [held(*each) for each in ((ours,), (users,), (users, nn.AdamW(1e-3)))]

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

class Own(nn.Optimizer):
    def init(self, parameters):
        return {}

def refused():
    bad = X.copy()
    bad[3] = np.nan
    given = ({"optimizer": Own()}, {"data": nn.Batches(bad, Y, size=50)})
    for make, options in ((ours, given[0]), (ours, given[1]), (users, given[1])):
        try:
            trained(make, **options, **shard)
        except anydevice.AnyDeviceError as error:
            yield f"{type(error).__name__}: {error}"

lion = {"clip": None, "optimizer": nn.Lion(1e-4)}
cases = {"two": {"epochs": 1, "accumulate": 2, "clip": 0.1}, "three": {"epochs": 2},
         "four": {"epochs": 1, **lion}}
found = together(
    2, two=each(**cases["two"], **shard), still=each(1, [frozen], **shard),
    narrow=each(1, precision="mixed_float16", **shard), refused=lambda: list(refused()),
)
found |= together(3, three=each(**cases["three"], **shard), held=all_held,
                  mutants=lambda: mutants(**shard))
found |= together(4, four=each(**cases["four"], **shard), saved=saving,
                  best=lambda: [best(make) for make in MAKES])
resumed()

for own, wrong, users_wrong in found["refused"]:
    assert "UnsupportedError" in own and "Own may compute with whole parameters" in own, own
    for told in (wrong, users_wrong):
        assert "the batch itself holds NaN values in x" in told, told
for ratios in found["held"]:  # of three processes, over which tensors divide unevenly
    for count, ratio in ratios:
        assert count > 83_000 and ratio <= 1.05, found["held"]
for at, make in enumerate(MAKES):
    name = make.__name__
    for case, options in cases.items():
        far = apart(trained(make, **options), [losses[name] for losses in found[case]])
        assert far <= 1e-6, (name, case, far)
    one = trained(make, 1)
    for wrong in ("unweighted", "mask_per_shard"):
        far = apart(one, [losses[name, wrong] for losses in found["mutants"]])
        assert far > 1e-4, (name, wrong, far)
    losses, weights = best(make)
    for theirs, parts in (each[at] for each in found["best"]):
        assert apart(losses, [theirs]) <= 1e-6
        assert max(np.abs(a - b).max() for a, b in zip(weights, parts, strict=True)) <= 1e-5
assert apart(trained(frozen, 1), [losses["frozen"] for losses in found["still"]]) <= 1e-6
for make in MAKES:
    narrow = [losses[make.__name__] for losses in found["narrow"]]
    assert apart(trained(make, 1, precision="mixed_float16"), narrow) <= 2e-3
print("held")
"""

SAVED = """
from pathlib import Path
from anydevice._formats.model import read

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

def file_of(make):
    return f"{make.__name__}.safetensors"

def saving():
    for make in MAKES:
        trained(make, 1, save=file_of(make), **shard)

def going_on():
    own, found = (shard if parallel.initialize("cpu").size > 1 else {}), {}
    for make in MAKES:
        loaded(make, file_of(make), **own)
        found[make.__name__] = [trained(make, resume=file_of(make), **own)]
    found["ours"].append(trained(ours, resume=file_of(ours)))  # replicated
    if JAX:
        found["ours"].append(trained(ours, resume="jax.safetensors", **own))
    return found

def resumed():
    # What four have saved goes on with any number of processes, and on JAX; and what that saved.
    found = []
    if JAX:
        first = parallel.launch(lambda: on_jax(epochs=1, save="jax.safetensors") and
                                {"ours": [on_jax(resume=file_of(ours))]}, processes=1)
        found += first
    for n in ((1, 2, 3, 8) if LONG else (1, 3)):
        found += parallel.launch(going_on, processes=n)
    (whole,) = parallel.launch(lambda: [trained(make) for make in MAKES], processes=1)
    for one, make in zip(whole, MAKES, strict=True):
        several = [losses for each in found for losses in each.get(make.__name__, ())]
        assert apart(one, several) <= 1e-6, (make, one, several)
"""


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_sharded_over_processes_losses_are_the_same(long: bool, tmp_path: Path) -> None:
    """And it goes on with any number of processes. One program, as importing PyTorch takes long."""
    has_jax = importlib.util.find_spec("jax") is not None
    assert held(SAVED + SAME, tmp_path, JAX=has_jax, LONG=long) == "held"


def test_what_all_processes_hold_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from anydevice._libraries.torch import mesh as torch_mesh
    from anydevice._libraries.torch.mesh import Group, Layout
    from anydevice._parallel.mesh import Mesh
    from anydevice._train.data_parallel import ShardStrategy

    squares: list[float] = []

    def noted(number: Any, mesh: Mesh) -> Any:
        squares.append(float(number))
        return number

    monkeypatch.setattr(torch_mesh, "summed", noted)
    for rank in range(4):  # two groups of two
        group = Group(rank, 4)
        mesh = Mesh(["cpu"], replicate=2, shard=2, group=group)
        strategy = object.__new__(ShardStrategy)
        strategy._group, strategy._mesh, strategy._torch = group, mesh, torch_mesh
        strategy._layouts = {"total": [Layout(mesh, 0, (4,)), Layout(mesh, None, ())]}
        strategy.clip_gradients({"a": torch.full((2,), 2.0), "b": torch.tensor(3.0)}, 1.0)
    assert squares[0] + squares[1] == squares[2] + squares[3] == 2 * (2 * 4.0) + 9.0


def test_a_mesh_that_shards_is_kept_and_not_replicated() -> None:
    from anydevice._libraries.torch.mesh import Group
    from anydevice._parallel.mesh import Mesh
    from anydevice._train.data_parallel import _choose_sizes
    from anydevice.errors import ConfigurationError

    mesh = Mesh(["cpu"], replicate=2, shard=2, group=Group(0, 4))
    for strategy in ("auto", "shard"):
        assert _choose_sizes(mesh, strategy, {})[0] is mesh
    with pytest.raises(ConfigurationError, match="contradicts the mesh, which divides"):
        _choose_sizes(mesh, "replicate", {})
