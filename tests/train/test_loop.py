"""Ctrl-C at any moment of a training, and what the bar shows while it goes on."""

from __future__ import annotations

import itertools
import os
import pty
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn
from anydevice._compile.versions import Compilers
from anydevice._core.device import Device
from anydevice._train import stepper as stepping
from anydevice._train import training
from anydevice._train.history import TrainingProgress
from tests.comparing import SAME_PROGRAM, assert_same_values
from tests.train.conftest import on_step

X = np.random.default_rng(0).normal(size=(24, 2)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)
BATCHES = [(X[at : at + 4], Y[at : at + 4]) for at in range(0, 24, 4)]


class Interrupted(nn.Layer):
    """As a compiler that a Ctrl-C ends: the signal comes, and an error of its own."""

    def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
        if next(CALLS) == 0:
            interrupt()
            raise OSError("the compiler ended")
        return x


CALLS: Iterator[int] = itertools.count(1)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def trained(device: Device, data: Any = BATCHES, at: int = 0, **options: Any) -> nn.Trained:
    """A training that is interrupted in the step `at`, where it is not 0."""
    global CALLS
    CALLS = itertools.count(1 - at if at else 1)
    layer = nn.Chain(nn.Dense(2, 8), Interrupted(), nn.Dropout(0.3), nn.Dense(8, 2))
    model = nn.Model(layer, device="cpu")
    given = {"epochs": 2, "optimize": "none", **options}
    return nn.train(model, data, nn.Adam(0.01), "cross_entropy", device=device, **given)


def numbers(run: nn.Trained) -> list[float]:
    flat = [np.asarray(x).ravel() for part in run.model.parameters for x in part.values()]
    return [float(x) for x in np.concatenate([np.asarray(anydevice.to_numpy(x)) for x in flat])]


def failing_loader(seed: int, epoch: int) -> Iterator[Any]:
    yield from BATCHES[:3]
    interrupt()
    raise RuntimeError("a worker of the loader ended")


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 3), (2, 1)])
@pytest.mark.parametrize("interrupted", ["compiler", "loader"])
def test_an_error_by_ctrl_c_ends_as_one_and_a_resume_goes_on_as_if_nothing_had_been(
    here: Device,
    interrupted: str,
    accumulate: int,
    steps: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path, by_loader = tmp_path / "run.safetensors", interrupted == "loader"
    data = failing_loader if by_loader else BATCHES
    run = trained(here, data, at=0 if by_loader else 4, save=path, accumulate=accumulate)
    said = capfd.readouterr().err
    assert run.stopped == "Ctrl-C"
    assert said.count("stopping after this step; Ctrl-C again: now\n") == 1  # XLA may log before
    assert f"stopped by Ctrl-C after step {steps}: saved to {path}" in said
    # A function has no content to compare, so the file of one goes on with another.
    rest = (lambda seed, epoch: BATCHES) if by_loader else BATCHES
    resumed = trained(here, rest, resume=path, accumulate=accumulate)
    whole = trained(here, accumulate=accumulate)
    assert numbers(resumed) == numbers(whole)
    assert_same_values(resumed.history.losses, whole.history.losses, because=SAME_PROGRAM)


def test_an_error_without_ctrl_c_stays_one(here: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.interrupt", lambda: None)
    with pytest.raises(OSError, match="the compiler ended"):
        trained(here, at=4)


def test_a_loader_that_fails_by_itself_raises(here: Device) -> None:
    def batches(seed: int, epoch: int) -> Iterator[Any]:
        yield BATCHES[0]
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        trained(here, batches)


def test_an_error_in_a_callback_is_raised_after_ctrl_c_too(here: Device) -> None:
    def fail(event: nn.TrainingEvent) -> None:
        interrupt()
        raise LookupError("of its own")

    with pytest.raises(LookupError, match="of its own"):
        trained(here, callbacks=[on_step(fail)])


def test_a_compiler_that_ctrl_c_ends_is_no_reason_for_a_warning(
    here: Device, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def compiler(function: Any, donate: Any = (), fixed: bool = False) -> Any:
        def run(*arguments: Any) -> Any:
            if not asked:
                asked.append(1)
                interrupt()
            raise OSError("the compiler ended")

        return run

    ways = Compilers((("compiled as a whole", compiler),), "compiled")
    monkeypatch.setattr("anydevice._train.step_config.compilers_for", lambda engine, optimize: ways)
    run = trained(here, optimize="default")
    assert (run.stopped, asked) == ("Ctrl-C", [1])
    said = capfd.readouterr().err
    assert said.startswith("stopping once compiled; Ctrl-C again: now\nstopped by Ctrl-C after")


def test_ctrl_c_before_the_first_step_takes_none(
    here: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make = stepping.stepper_for

    def slowly(*arguments: Any) -> Any:
        interrupt()
        return make(*arguments)

    path = tmp_path / "run.safetensors"
    monkeypatch.setattr(training, "stepper_for", slowly)
    run = trained(here, save=path)
    assert (run.stopped, len(run.history)) == ("Ctrl-C", 0)
    said = capfd.readouterr().err
    assert said.startswith("stopping; Ctrl-C again: now\n")
    assert f"after step 0: saved to {path}" in said
    monkeypatch.undo()
    assert numbers(trained(here, resume=path)) == numbers(trained(here))


# The bar


def shown_text(shown: TrainingProgress) -> str:
    assert shown._bar._bar is not None
    return str(shown._bar._bar.tasks[0].description)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets the time of the bar go on by so many seconds."""
    now = [100.0]
    monkeypatch.setattr("anydevice._train.history.time.monotonic", lambda: now[0])

    def go_on(seconds: float) -> None:
        now[0] += seconds

    return go_on


def test_the_bar_forecasts_from_steps_alone(clock: Callable[[float], None]) -> None:
    with TrainingProgress(2, 1000, 0, wanted=True) as shown:
        assert shown_text(shown) == "starting"
        shown.compiles(1, "torch")
        assert shown_text(shown) == "epoch 1/2  compiling"
        clock(48.0)
        shown.tell(1, 1, 0.51234, 2.5e-4, 8)
        assert shown_text(shown) == "epoch 1/2  loss 0.5123  rate 0.00025"
        clock(1.0)
        shown.tell(1, 4, 0.5, 2.5e-4, 32)
        assert "left" not in shown_text(shown)
        shown.tell(1, 101, 0.5, 2.5e-4, 808)
        assert shown_text(shown) == "epoch 1/2  loss 0.5  800 examples/s  0:19 left"
        shown.ends("stopping after this step; Ctrl-C again: now")
        assert shown_text(shown).startswith("stopping after this step")
        shown.tell(1, 102, 0.5, 2.5e-4, 816)
        assert shown_text(shown).startswith("stopping after this step")


@pytest.mark.parametrize("columns", [80, 60, 200])
def test_the_bar_fits(
    clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    size = os.terminal_size((columns, 24))
    monkeypatch.setattr("os.get_terminal_size", lambda *where: size)
    monkeypatch.setattr("sys.stderr.fileno", lambda: 2, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    with TrainingProgress(500, 1000, 0, wanted=True) as shown:
        shown.tell(1, 1, 0.5, 1e-3, 20)
        clock(3.0)
        shown.tell(250, 2, 1.2345e-5, 1.25e-3, 123_456_789)
        said = shown_text(shown)
        assert said.startswith("epoch 250/500")
        assert ("examples/s" in said) == (columns == 200)
        assert ("left" in said and "loss 1.234e-05" in said) == (columns >= 80)
        bar = shown._bar._bar
        assert bar is not None
        line = "".join(part.text for part in bar.console.render(bar.get_renderable()))
        assert "249002/500000" in line
        assert "…" not in line
        assert len(line.rstrip("\n")) <= columns


def test_batches_of_a_new_shape_are_said_to_be_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = anydevice.device("cpu", engine="jax")
    told: list[str] = []
    compiles = TrainingProgress.compiles
    monkeypatch.setattr(training, "_READ_EVERY", 0.0)

    def tell(self: TrainingProgress, epoch: int, engine: str) -> None:
        told.append(f"{epoch} {engine}")
        compiles(self, epoch, engine)

    monkeypatch.setattr(TrainingProgress, "compiles", tell)
    data = [*BATCHES, (X[:3], Y[:3])]
    trained(here, data, optimize="default", progress=True)
    assert told == ["1 jax", "1 jax"]
    trained(here, data, progress=True)
    assert len(told) == 2


def test_the_bar_of_a_real_terminal_asks_it_for_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        with TrainingProgress(2, 10, 0) as shown:
            shown.tell(1, 1, 0.5, 1e-3, 20)
            assert shown_text(shown).startswith("epoch 1/2")
    written = b""
    with suppress(OSError):  # the other end is closed
        while b"starting" not in written:
            written += os.read(leader, 65536)
    os.close(leader)
    assert b"starting" in written
    monkeypatch.setattr("sys.stderr", None)
    with TrainingProgress(2, 10, 0) as shown:
        shown.ends("nobody sees it")
