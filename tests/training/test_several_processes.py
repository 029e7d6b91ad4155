"""The same training in one process and in several of PyTorch, which fork from one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch_processes import held

pytestmark = pytest.mark.usefixtures("children_count_lines")

SAME = """
several = {(make, n): parallel.launch(trained, make, processes=n)
           for make in (ours, users) for n in (2, 3, 4)}
for make in (ours, users):
    several[make, "added"] = parallel.launch(lambda: trained(make, 1, accumulate=2), processes=3)

# A loss that is no mean over rows is computed of those of all processes.
def masked_tokens(output, y):
    each = T.functional.cross_entropy(output, y.long(), reduction="none")
    return (each * (y > 3)).sum() / (y > 3).sum()

several |= {(make, how): parallel.launch(
                lambda: trained(make, 1, loss=masked_tokens, strategy=how), processes=3)
            for make in (ours, users) for how in ("replicate", "shard")}
wrong = mutants()
for make in (ours, users):
    one, added = trained(make), trained(make, 1, accumulate=2)
    for n in (2, 3, 4):
        assert apart(one, several[make, n]) <= 1e-6, (make, n, apart(one, several[make, n]))
    assert apart(added, several[make, "added"]) <= 1e-6, make
    masked = trained(make, 1, loss=masked_tokens)
    for how in ("replicate", "shard"):
        far = apart(masked, several[make, how])
        assert far <= 1e-6, (make, how, far)
    for (made, name), losses in wrong.items():
        if made is make:
            assert apart(one[:1], losses) > 1e-4, (make, name, apart(one, losses))
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
    trained(ours, 2, **given)

for options, wanted in (
    ({}, "batch 7 of epoch 1: the processes have different batches: 0 of 2 has one of 10 rows, and "
         "1 of 2 has no such batch"),
    ({"more": 1}, "0 of 2 has one of 10 rows, and 1 of 2 has 7 rows"),
    ({"validation": 1}, "batch 7 of the validation: the processes have different batches"),
):
    told = failing(fewer, **options)
    assert wanted in told, told

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
        assert "the loss of batch 8 is no mean over rows" in str(seen[-1].message), seen
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
for make in (ours, users):
    name = f"{make.__name__}.safetensors"
    parallel.launch(lambda: trained(make, 1, save=name), processes=4)
    two = parallel.launch(lambda: trained(make, resume=name), processes=2)
    whole = parallel.launch(trained, make, processes=1)[0]
    one = parallel.launch(lambda: trained(make, resume=name), processes=1)[0]
    assert apart(whole, [one, *two]) <= 1e-6, (make, whole, one, two)

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


def test_several_processes_train_as_one(tmp_path: Path) -> None:
    """The same losses, also where one has no rows; the same files; what would differ is refused.

    All in one program, since importing PyTorch takes longest. The single process comes last: once
    it has computed, a fork may be unsafe.
    """
    assert held(REFUSED + SAVED + SAME, tmp_path).split() == ["held"] * 3
