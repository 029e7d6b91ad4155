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
