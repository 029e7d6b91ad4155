"""The same training in one process and in several of PyTorch, which fork from one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch_processes import held

pytestmark = pytest.mark.usefixtures("children_count_lines")

SAME = """
# A loss that is no mean over rows is computed of those of all processes.
def masked_tokens(output, y):
    each = T.functional.cross_entropy(output, y.long(), reduction="none")
    return (each * (y > 3)).sum() / (y > 3).sum()

def each(**options):
    def run():
        return {make.__name__: trained(make, **options) for make in (ours, users)}
    return run

several = {n: together(n, same=each())["same"] for n in ((2, 4) if LONG else (4,))}
more = together(
    3, same=each(), added=each(epochs=1, accumulate=2), mutants=mutants,
    **{how: each(epochs=1, loss=masked_tokens, strategy=how) for how in ("replicate", "shard")},
)
several[3] = more["same"]
for make in (ours, users):
    name = make.__name__
    one, added = trained(make), trained(make, 1, accumulate=2)
    masked = trained(make, 1, loss=masked_tokens)
    for n, found in several.items():
        far = apart(one, [losses[name] for losses in found])
        assert far <= 1e-6, (name, n, far)
    for wanted, how in ((added, "added"), (masked, "replicate"), (masked, "shard")):
        far = apart(wanted, [losses[name] for losses in more[how]])
        assert far <= 1e-6, (name, how, far)
    for wrong in ("unweighted", "mask_per_shard"):
        far = apart(one[:1], [losses[name, wrong] for losses in more["mutants"]])
        assert far > 1e-4, (name, wrong, far)
print("held")
"""

REFUSED = """
def masked(output, y):
    kept, each = (y > 3).float(), T.functional.cross_entropy(output, y.long(), reduction="none")
    return (each * kept).sum() / kept.sum()

def masked_of_model(model, x, y):
    return masked(model(x), y)

told = failing(trained, users, loss=masked_of_model)
assert "UnsupportedError" in told and "it is no mean over rows" in told, told

def others():
    trained(ours, data=nn.Batches(X + parallel.initialize("cpu").rank, Y, size=50))

told = failing(others)
assert "the processes have different batches" in told, told

# One process has fewer batches than the others, of any number; or smaller ones.
PARTS = [(X[at : at + 10], Y[at : at + 10]) for at in range(0, 100, 10)]

def fewer(more=0, **options):
    short = PARTS[:6] + ([(X[:7], Y[:7])] if more else [])
    own = short if parallel.initialize("cpu").rank == 1 else PARTS
    given = {"data": PARTS, "validation": own} if "validation" in options else {"data": own}
    trained(ours, 2, **given, callbacks=Counting())

class Counting(nn.Callback):
    steps = 0
    def step(self, moment):
        Counting.steps = moment.steps

def refused(options):
    try:
        fewer(**options)
    except anydevice.ConfigurationError as error:
        return str(error), Counting.steps

for options, wanted in (
    ({}, "batch 7 of epoch 1: the processes have different batches: 0 of 2 has one of 10 rows, and "
         "1 of 2 has no such batch"),
    ({"more": 1}, "0 of 2 has one of 10 rows, and 1 of 2 has 7 rows"),
    ({"validation": 1}, "batch 7 of the validation: the processes have different batches"),
):
    # Each of them says so, before it takes a step with such a batch.
    for told, steps in parallel.launch(refused, options, processes=2):
        assert wanted in told, told
        assert steps == (10 if "validation" in options else 6), steps

# A loss that is a mean over rows until batch 8.
late = [(x, np.where(y == 9, 0, y).astype(np.int32)) for x, y in PARTS]
late[7][1][2] = 9

def weighted(output, y):
    each = T.functional.cross_entropy(output, y.long(), reduction="none")
    weights = 1.0 + 4.0 * (y == 9)
    return (each * weights).sum() / weights.sum()

def weighted_of_model(model, x, y):
    return weighted(model(x), y)

told = failing(trained, users, 1, loss=weighted_of_model, data=late)
assert "UnsupportedError" in told and "the loss of batch 8" in told, told

def joined_late():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        losses = trained(users, 1, loss=weighted, data=late)
    if parallel.initialize("cpu").size > 1:
        assert "the loss of batch 8 is not a mean over rows" in str(seen[-1].message), seen
    return losses

joined = parallel.launch(joined_late, processes=3)
assert apart(parallel.launch(joined_late, processes=1)[0], joined) <= 1e-6, joined

def statistics():
    return nn.build(nn.Dense(64, 10), nn.BatchNorm(10), seed=1, device=TORCH)

told = failing(trained, statistics, optimizer=nn.SGD(0.1), loss="cross_entropy")
assert "BatchNorm" in told and "statistics of whole batches" in told, told

wrong = X.copy()
wrong[3] = np.nan
told = failing(trained, ours, data=nn.Batches(wrong, Y, size=50))
assert "the batch itself holds NaN values in x" in told, told
print("held")
"""

SAVED = """
def every(epochs, file=None):
    def run():
        given = {make: {file: f"{make.__name__}.safetensors"} if file else {} for make in MAKES}
        return [trained(make, epochs, **given[make]) for make in MAKES]
    return run

MAKES = ours, users
together(4, saved=every(1, "save"))
two = together(2, rest=every(2, "resume"))
one = together(1, rest=every(2, "resume"), whole=every(2))
for at, whole in enumerate(one["whole"][0]):
    rest = [each[at] for each in (*two["rest"], *one["rest"])]
    assert apart(whole, rest) <= 1e-6, (at, whole, rest)

# Ctrl-C in one process stops all of them after the same step.
def interrupted():
    mesh, steps = parallel.initialize("cpu"), []

    class Interrupting(nn.Callback):
        def step(self, moment):
            steps.append(moment)
            if mesh.rank == 1 and len(steps) == 2:
                os.kill(os.getpid(), signal.SIGINT)

    result = nn.train(ours(), nn.Batches(X, Y, size=20), nn.AdamW(1e-3), "cross_entropy", epochs=9,
                      devices=mesh, optimize="none", callbacks=Interrupting(), save="c.safetensors")
    return result.stopped, len(steps)

stopped = parallel.launch(interrupted, processes=2)
assert stopped == [("Ctrl-C", 3)] * 2, stopped
print("held")
"""


@pytest.fixture(autouse=True)
def torch_is_there() -> None:
    pytest.importorskip("torch")


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_several_processes_train_as_one(long: bool, tmp_path: Path) -> None:
    """The same losses, also where one has no rows; the same files; what would differ is refused.

    All in one program, since importing PyTorch takes longest. The single process comes last: once
    it has computed, a fork may be unsafe.
    """
    assert held(REFUSED + SAVED + SAME, tmp_path, LONG=long).split() == ["held"] * 3
