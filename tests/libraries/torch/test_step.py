"""Parts of PyTorch that do not belong together are refused, and weights of 16 bits get theirs."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anydevice import nn
from anydevice.errors import ConfigurationError, VerificationError

torch: Any = pytest.importorskip("torch")

X = torch.linspace(-1, 1, 32).reshape(8, 4)
Y = (X[:, 0] > 0).long()
LOSS = torch.nn.functional.cross_entropy


_KILLED = """
import os, sys
from pathlib import Path
from anydevice._core.files import write_whole
os.replace = lambda *paths: os.kill(os.getpid(), 9)
write_whole(Path(sys.argv[1]), [b"half"])
"""


def net() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("optimizer_of", "said"),
    [
        (lambda model: sgd(copy.deepcopy(model)), "SGD has none of the parameters of Sequential"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS calls the model several"),
        (lambda model: sgd(model.requires_grad_(False)), r"to train; model\.requires_grad_\(\)"),
        (lambda model: sgd(model.double()), r"are float64, .*; call model\.float\(\)"),
        (lambda model: sgd(model.half()), r"underflow in PyTorch; take model\.float\(\)"),
    ],
    ids=["other model", "closure", "frozen", "float64", "float16"],
)
def test_what_would_not_train_is_refused(optimizer_of: Callable[[Any], Any], said: str) -> None:
    model = net()
    with pytest.raises(ConfigurationError, match=said):
        nn.Training(model, optimizer_of(model), [(X, Y)], LOSS, device="cpu")


def test_a_schedule_of_another_optimizer_is_refused() -> None:
    model = net()
    other = torch.optim.lr_scheduler.StepLR(sgd(model), 1)
    with pytest.raises(ConfigurationError, match="StepLR changes the rate of another optimizer"):
        nn.Training(model, sgd(model), [(X, Y)], LOSS, device="cpu", schedule=other)


@pytest.mark.parametrize("batch", [None, (X, Y, Y), X])
def test_a_batch_that_is_no_pair_is_refused(batch: Any) -> None:
    model = net()
    training = nn.Training(model, sgd(model), None, LOSS, device="cpu")
    with pytest.raises(ConfigurationError, match=r"batch 1 of epoch 1 is .* a pair \(x, y\)"):
        training.step(batch)


def test_modules_of_mlx_that_are_frozen_and_optimizers_of_flax() -> None:
    mlx, nnx = pytest.importorskip("mlx.nn"), pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")
    frozen = mlx.Linear(4, 2)
    frozen.freeze()
    with pytest.raises(ConfigurationError, match=r"to train; model\.unfreeze\(\)"):
        nn.Training(frozen, nn.SGD(0.1), None, "cross_entropy", device="cpu")
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    held = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    words = r"not nnx\.Optimizer; give what it holds, its tx$"
    with pytest.raises(ConfigurationError, match=words):
        nn.Training(model, held, None, "cross_entropy", device="cpu")
    training = nn.Training(model, held.tx, None, "cross_entropy", device="cpu", optimize="none")
    assert float(training.step((X, Y))) > 0


def test_parameters_that_are_nan_from_the_start_are_named() -> None:
    model = net()
    model[2].bias.data[0] = torch.nan
    training = nn.Training(model, sgd(model), None, LOSS, device="cpu")
    with pytest.raises(VerificationError, match=r"2\.bias'\] were NaN before it"):  # noqa: PT012
        training.step((X, Y))
        training.read()


def test_a_loop_of_a_moment_ends_with_the_error_of_its_last_steps() -> None:
    model = net()
    training = nn.Training(model, sgd(model), [(X, Y), (X * torch.nan, Y)], LOSS, device="cpu")
    with pytest.raises(VerificationError, match="step 2: the batch itself holds NaN"):  # noqa: PT012
        for _ in training.epochs(1):
            for batch in training:
                training.step(batch)


def test_a_loss_that_is_a_class_is_refused() -> None:
    model = net()
    with pytest.raises(ConfigurationError, match=r"the class CrossEntropyLoss; .*Loss\(\)"):
        nn.Training(model, sgd(model), None, torch.nn.CrossEntropyLoss, device="cpu")


def test_gradients_that_no_optimizer_takes_do_not_add_up() -> None:
    model = net()
    training = nn.Training(model, sgd(model[2]), [(X, Y)], LOSS, device="cpu", clip=0.5)
    for batch in training:
        training.step(batch)
    assert model[0].weight.grad is None
    assert model[2].weight.grad is None


def test_parameters_that_a_file_would_not_hold_are_not_lost(tmp_path: Path) -> None:
    model, scale = net(), torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), scale], 0.1)
    path = tmp_path / "run.safetensors"
    training = nn.Training(
        model, optimizer, [(X, Y)], lambda output, y: LOSS(output * scale, y), device="cpu"
    )
    training.step((X, Y))
    assert scale != 1
    with pytest.raises(ConfigurationError, match=r"SGD trains 1 parameters .* loss\(model, x, y\)"):
        training.save(path)
    assert not path.exists()


def test_what_a_killed_save_left_is_deleted_by_the_next_one(tmp_path: Path) -> None:
    path, model = tmp_path / "run.safetensors", net()
    training = nn.Training(model, sgd(model), [(X, Y)], LOSS, device="cpu")
    killed = subprocess.run([sys.executable, "-c", _KILLED, path], check=False)
    assert killed.returncode != 0
    assert any(name.suffix == ".part" for name in tmp_path.iterdir())
    training.save(path)
    assert [name for name in tmp_path.iterdir() if name.suffix != ".lock"] == [path]


def test_weights_in_16_bits_get_inputs_in_16_bits() -> None:
    model = net().bfloat16()
    training = nn.Training(model, sgd(model), [(X, Y)], LOSS, device="cpu")
    losses = [float(training.step((X, Y))) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
