"""Two trainings that share a step: a generator learns from the present discriminator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops
from anydevice._core.device import Device
from anydevice._core.trees import leaves
from tests.comparing import SAME_PROGRAM, assert_close, assert_same_values
from tests.refusals import refuses

LABELS = np.repeat(np.array([[1.0], [0.0]], np.float32), 32, axis=0)


def fool(output: Any, target: Any, judge: Any) -> Any:
    verdict = judge(output)
    return nn.binary_cross_entropy(verdict, ops.ones_like(verdict))


def bits(training: nn.Training[Any]) -> list[bytes]:
    return [array.tobytes() for array in leaves(anydevice.to_numpy(training.parameters))]


@pytest.mark.parametrize("optimize", ["none", "default"])
def test_a_gan_learns_two_dimensional_points(optimize: str, here: Device) -> None:
    if optimize == "default" and here.engine == "torch":
        pytest.skip("its compiler takes half a minute")
    maker = nn.build(nn.Dense(2, 16), "relu", nn.Dense(16, 2), device=here)
    judge = nn.build(nn.Dense(2, 32), nn.BatchNorm(32), "relu", nn.Dense(32, 1), device=here)
    discriminator = nn.Training(
        judge, nn.Adam(1e-2), None, "binary_cross_entropy", optimize=optimize
    )
    generator = nn.Training(
        maker, nn.Adam(1e-2), loss=fool, others={"judge": discriminator}, optimize=optimize
    )
    drawn, center = np.random.default_rng(0), np.array([2.0, -1.0])
    for number in range(120):
        noise = drawn.normal(size=(32, 2)).astype(np.float32)
        real = (drawn.normal(size=(32, 2)) * 0.3 + center).astype(np.float32)
        fake = anydevice.to_numpy(generator.model(noise))
        mine = bits(generator)
        discriminator.step((np.concatenate([real, fake]), LABELS))
        assert bits(generator) == mine
        theirs = bits(discriminator)
        expected = (
            fool(generator.model(noise), None, discriminator.model) if not number % 40 else None
        )
        value = generator.step((noise, None))
        assert bits(discriminator) == theirs, "a step of the generator"
        assert bits(generator) != mine
        if expected is not None:
            assert_close(value, expected, terms=128)
    assert np.abs(anydevice.to_numpy(generator.model(noise)).mean(0) - center).max() < 1


def modules(torch: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    part = torch.nn.Linear
    maker = torch.nn.Sequential(part(2, 8), torch.nn.ReLU(), part(8, 2))
    return maker, torch.nn.Sequential(part(2, 8), torch.nn.ReLU(), part(8, 1))


def test_modules_of_torch_train_as_in_a_loop_by_hand(torch: Any) -> None:
    """The generator's loss leaves gradients in the discriminator, which its own step ignores."""
    score = torch.nn.functional.binary_cross_entropy_with_logits
    drawn = np.random.default_rng(0).normal(size=(9, 2, 32, 2)).astype(np.float32)
    batches, labels = torch.tensor(drawn), torch.tensor(LABELS)
    maker, judge = modules(torch)
    adams = [torch.optim.Adam(each.parameters(), 1e-2) for each in (maker, judge)]
    expected = []
    for noise, real in batches:
        adams[1].zero_grad()
        (own := score(judge(torch.cat([real, maker(noise).detach()])), labels)).backward()
        adams[1].step()
        adams[0].zero_grad()
        (fooled := score(judge(maker(noise)), labels[:32])).backward()
        adams[0].step()
        expected.append([float(own), float(fooled)])
    maker, judge = modules(torch)
    discriminator = nn.Training(judge, torch.optim.Adam(judge.parameters(), 1e-2), loss=score)
    generator = nn.Training(
        maker,
        torch.optim.Adam(maker.parameters(), 1e-2),
        loss=lambda points, target: score(judge(points), target),
    )
    losses = []
    for noise, real in batches:
        own = discriminator.step((torch.cat([real, maker(noise).detach()]), labels))
        before = bits(discriminator)
        losses.append([float(own), float(generator.step((noise, labels[:32])))])
        assert bits(discriminator) == before
    assert_same_values(losses, expected, because=SAME_PROGRAM)


def test_others_must_be_trainings_of_models_on_the_device(torch: Any) -> None:
    model = nn.build(nn.Dense(2, 2), device=anydevice.device("cpu", engine="torch"))
    maker, _ = modules(torch)
    module = nn.Training(maker, nn.Adam(1e-2), loss="mean_squared_error")
    for given, others in ((model, model), (model, module), (maker, module)):
        options: Any = {"loss": fool, "others": {"judge": others}}
        refuses(
            r"others\['judge'\] must be a nn.Training", nn.Training, given, nn.Adam(), **options
        )
