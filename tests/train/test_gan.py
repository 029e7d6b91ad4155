"""Two trainings that share a step: a generator learns from the present discriminator."""

from __future__ import annotations

from typing import Any

import numpy as np

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


def test_a_gan_learns_two_dimensional_points(here: Device) -> None:
    how: Any = {"optimize": "none" if here.engine == "torch" else "default"}
    maker = nn.build(nn.Dense(2, 16), "relu", nn.Dense(16, 2), device=here)
    judge = nn.build(nn.Dense(2, 16), "relu", nn.Dense(16, 1), device=here)
    discriminator = nn.Training(judge, nn.Adam(1e-2, 0.5), None, "binary_cross_entropy", **how)
    generator = nn.Training(
        maker, nn.Adam(1e-2), None, fool, others={"judge": discriminator}, **how
    )
    drawn, center = np.random.default_rng(0), np.array([2.0, -1.0])
    for number in range(101):
        noise = drawn.normal(size=(32, 2)).astype(np.float32)
        real = (drawn.normal(size=(32, 2)) * 0.3 + center).astype(np.float32)
        fake = anydevice.to_numpy(generator.model(noise))
        before = bits(generator)
        discriminator.step((np.concatenate([real, fake]), LABELS))
        assert bits(generator) == before
        before, expected = bits(discriminator), None
        if number % 50 == 0:
            points = anydevice.to_device(fake, here)
            expected = anydevice.to_numpy(fool(points, None, discriminator.model))
        value = generator.step((noise, None))
        assert bits(discriminator) == before, "a step of the generator"
        assert expected is None or assert_close(value, expected, terms=256) is None
    assert np.abs(anydevice.to_numpy(generator.model(noise)).mean(0) - center).max() < 1


def test_modules_of_torch_train_as_in_a_loop_by_hand(torch: Any) -> None:
    """The generator's loss leaves gradients in the discriminator, which its own step ignores."""
    score, part = torch.nn.functional.binary_cross_entropy_with_logits, torch.nn.Linear
    drawn = np.random.default_rng(0).normal(size=(9, 2, 32, 2)).astype(np.float32)
    batches, labels = torch.tensor(drawn), torch.tensor(LABELS)

    def losses(by_hand: bool) -> list[list[float]]:
        torch.manual_seed(0)
        both = [torch.nn.Sequential(part(2, 8), torch.nn.ReLU(), part(8, n)) for n in (2, 1)]
        maker, judge = both
        adams = [torch.optim.Adam(module.parameters(), 1e-2) for module in both]
        trainings = [
            nn.Training(maker, adams[0], loss=lambda x, y: score(judge(x), y), device="cpu"),
            nn.Training(judge, adams[1], loss=score, device="cpu"),
        ]

        def step(which: int, x: Any, y: Any) -> float:
            if not by_hand:
                return float(trainings[which].step((x, y)))
            adams[which].zero_grad()
            value = score(judge(x) if which else judge(maker(x)), y)
            value.backward()
            adams[which].step()
            return float(value.detach())

        rows = []
        for noise, real in batches:
            own = step(1, torch.cat([real, maker(noise).detach()]), labels)
            before = bits(trainings[1])
            rows.append([own, step(0, noise, labels[:32])])
            assert bits(trainings[1]) == before
        how: Any = {"others": {"judge": trainings[1]}, "device": "cpu"}
        refuses("must be an nn.Training of an nn.Model", nn.Training, maker, adams[0], **how)
        return rows

    assert_same_values(losses(False), losses(True), because=SAME_PROGRAM)
