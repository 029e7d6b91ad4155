"""Training: the same on every engine, with all that can be asked of it."""

from __future__ import annotations

import functools
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops, testing
from anydevice._core.device import Device
from anydevice._core.engine import consuming
from anydevice._core.text import clock
from anydevice._core.trees import leaves
from anydevice._libraries.precision import Policy
from anydevice._train import training
from anydevice._train.batches import checked_data, placed_batches
from anydevice._train.history import Epoch, TrainingProgress
from anydevice._train.step_config import default_optimize
from anydevice.errors import ConfigurationError, UnsupportedError, VerificationError
from tests.comparing import (
    SAME_PROGRAM,
    assert_close,
    assert_same_bits,
    assert_same_integers,
    assert_same_values,
    rounding,
)
from tests.nn.conftest import TRAINING
from tests.nn.conftest import device_of_engine as cpu
from tests.programs import output_of
from tests.train.conftest import on_step

# PyTorch's compiler itself imports what PyTorch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")

Array = np.ndarray[Any, Any]
LAYER = nn.Chain(nn.Dense(8, 16), "relu", nn.Dropout(0.1), nn.Dense(16, 3))


def allowed(steps: int, size: int = 8) -> float:
    """How far losses or parameters may lie apart after so many steps with batches of a size.

    Each goes there and back through sums of 8, of 16, of 3 and of the batch.
    """
    return rounding(np.float32, steps * 3 * (8 + 16 + 3 + size))


def examples(count: int = 48) -> tuple[Array, Array]:
    x = np.random.default_rng(0).normal(size=(count, 8)).astype(np.float32)
    return x, x[:, :3].argmax(1).astype(np.int32)


def data(size: int = 8, count: int = 48) -> nn.Batches:
    return nn.Batches(*examples(count), size)


def trained(device: Device | str | None, **options: Any) -> nn.Trained:
    """A short training, compiled only where that takes less time than it saves."""
    compiled = isinstance(device, Device) and device.engine == "jax"
    given = {
        "data": data(),
        "optimizer": nn.AdamW(1e-2),
        "loss": nn.cross_entropy,
        "epochs": 2,
        "optimize": "default" if compiled else "none",
        "device": device,
        **options,
    }
    model = given.pop("model", None) or nn.Model(LAYER, device="cpu")
    return nn.train(model, given.pop("data"), given.pop("optimizer"), given.pop("loss"), **given)


def numbers(model: nn.Model) -> list[Array]:
    return [np.asarray(x) for x in leaves(anydevice.to_numpy(model.parameters))]


def same(a: nn.Model, b: nn.Model) -> bool:
    """Whether two runs of one program gave the same bits."""
    pairs = zip(numbers(a), numbers(b), strict=True)
    return not any(np.not_equal(x, y).any() for x, y in pairs)


# The same everywhere


def test_losses_of_one_seed_are_the_same_on_every_engine() -> None:
    options: dict[str, Any] = {"epochs": 4, "clip": 1.0, "seed": 5, "validation": data(16)}
    runs = [trained(cpu(engine), **options) for engine in TRAINING]
    for run in runs:
        assert run.history.losses == pytest.approx(runs[0].history.losses, abs=allowed(24))
        assert run.history.validations == pytest.approx(
            runs[0].history.validations, abs=allowed(24)
        )
    assert runs[0].history[-1].loss < runs[0].history[0].loss - 0.1
    assert runs[0].history[-1].steps == 24
    assert all(epoch.seconds > 0 and epoch.rate == 1e-2 for epoch in runs[0].history)


# PyTorch's compiler is Python too, and slower where lines are counted.
@pytest.mark.no_cover
def test_compiled_and_recomputed_steps_are_those_that_are_not(here: Device) -> None:
    compiled, plain = (trained(here, optimize=how) for how in ("default", "none"))
    recomputed = trained(here, model=nn.recompute(nn.Model(LAYER, device="cpu")))
    for other in (compiled, recomputed):
        assert other.history.losses == pytest.approx(plain.history.losses, abs=allowed(12))


@pytest.mark.parametrize(
    "optimizer", [nn.SGD(0.1), nn.SGD(0.1, momentum=0.9), nn.Adam(), nn.Lion(1e-3)], ids=str
)
def test_every_optimizer_moves_alike_on_every_engine(optimizer: nn.Optimizer) -> None:
    runs = [trained(cpu(engine), optimizer=optimizer) for engine in TRAINING]
    for run in runs[1:]:
        assert run.history.losses == pytest.approx(runs[0].history.losses, abs=allowed(12))


def test_the_same_seed_gives_the_same_training_and_the_model_stays(here: Device) -> None:
    model = nn.Model(LAYER, device=here)
    before = numbers(model)
    runs = [trained(here, model=model, seed=seed) for seed in (1, 1, 2)]
    assert same(runs[0].model, runs[1].model)
    curves = [run.history.losses for run in runs]
    assert_same_values(curves[0], curves[1], because=SAME_PROGRAM)
    assert not same(runs[0].model, runs[2].model)
    for now, old in zip(numbers(model), before, strict=True):
        assert_same_bits(now, old, because="the given model is not trained")
    assert runs[0].model.layer == model.layer
    assert anydevice.device_of(runs[0].model) == here
    model(anydevice.to_device(examples()[0], here))


def test_accumulated_gradients_are_those_of_larger_batches(here: Device) -> None:
    layer = nn.Chain(nn.Dense(8, 16), "relu", nn.Dense(16, 3))
    model = nn.Model(layer, device="cpu")
    x, y = examples(40)
    small = nn.Batches(x, y, 4, shuffle=False)
    large = nn.Batches(x, y, 16, shuffle=False)
    options: dict[str, Any] = {"model": model, "optimizer": nn.SGD(0.1)}
    by_parts = trained(here, data=small, accumulate=4, **options)
    whole = trained(here, data=large, **options)
    for a, b in zip(numbers(by_parts.model), numbers(whole.model), strict=True):
        np.testing.assert_allclose(a, b, atol=allowed(6, 16))
    assert by_parts.history[-1].steps == whole.history[-1].steps == 6


@pytest.mark.parametrize("precision", ["mixed", "bfloat16"])
def test_other_precisions(here: Device, precision: str) -> None:
    run = trained(here, precision=precision, epochs=6)
    exact = trained(here, epochs=6)
    assert run.history.losses == pytest.approx(exact.history.losses, rel=0.03)
    kinds = {str(x.dtype).rpartition(".")[2] for x in leaves(run.model.parameters)}
    assert kinds == {"float32" if precision == "mixed" else "bfloat16"}


def test_a_scaled_loss_skips_overflows(here: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first scale is too large for float16: some steps go by, then training goes on."""
    monkeypatch.setattr("anydevice._libraries.precision.has_bfloat16", lambda device: False)
    run = trained(here, precision="mixed", epochs=6)
    exact = trained(here, epochs=6)
    assert run.history[-1].loss < exact.history[0].loss - 0.1
    assert run.history[-1].loss == pytest.approx(exact.history[-1].loss, abs=0.15)


def tiny(output: Any, target: Any) -> Any:
    """A loss whose gradients are less than the smallest number of float16, 6e-8."""
    return ops.multiply(nn.cross_entropy(output, target), 1e-7)


def test_small_gradients_need_the_scaled_loss(
    here: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"optimizer": nn.SGD(1e6), "loss": tiny, "epochs": 3}
    exact = trained(here, **options).history.losses
    scaled = trained(here, precision="mixed_float16", **options)
    assert scaled.history.losses == pytest.approx(exact, rel=1e-2)
    assert exact[-1] < 0.9 * exact[0]
    assert scaled.report is not None
    assert "parameters float32, computed in float16" in str(scaled.report)
    monkeypatch.setattr(Policy, "needs_loss_scale", False)
    unscaled = trained(here, precision="mixed_float16", **options).history.losses
    assert unscaled[0] - unscaled[-1] < 0.1 * (exact[0] - exact[-1])


def test_a_step_that_overflows_changes_nothing_and_halves_the_scale(here: Device) -> None:
    def steep(output: Any, target: Any) -> Any:
        return ops.multiply(nn.cross_entropy(output, target), 1e4)

    model, optimizer = nn.Model(LAYER, device=here), nn.SGD(1e-5, momentum=0.9)
    options: dict[str, Any] = {"precision": "mixed_float16", "optimize": "none"}
    training = nn.Training(model, optimizer, None, steep, **options)
    scales, skipped = [], []
    for _ in range(20):
        before, left_out = training.model, training.skipped_steps
        training.step(examples())
        skipped.append(training.skipped_steps > left_out)
        assert skipped[-1] == same(training.model, before)
        scales.append(float(anydevice.to_numpy(training.stepper.state.scale["scale"])))
    count = training.skipped_steps
    assert skipped == [True] * count + [False] * (20 - count)
    assert 1 < count < 19
    assert scales == [2.0**16 / 2 ** min(at, count) for at in range(1, 21)]


def test_schedules_give_the_rate_of_each_step(here: Device) -> None:
    rates: list[float] = []
    schedule = nn.WarmUp(4, then=nn.CosineRate(0.1, 8))
    noting = on_step(lambda event: rates.append(event.rate))
    run = trained(here, schedule=schedule, callbacks=[noting])
    assert rates == [schedule(step) for step in range(1, 13)]
    assert run.history[-1].rate == schedule(12)
    own = trained(here, optimizer=nn.AdamW(schedule))
    assert same(run.model, own.model)


def test_torch_updates_in_place_only_where_it_may_and_is_not_told_to_skip(torch: Any) -> None:
    for optimizer in (nn.AdamW(0.1), nn.SGD(0.1, momentum=0.9)):
        parameters = {"a": torch.ones(3), "b": torch.ones(2, 2)}
        gradients = {name: torch.ones_like(x) for name, x in parameters.items()}
        state = optimizer.init(parameters)
        plain, _ = optimizer.update(parameters, gradients, state, 1)
        assert plain["a"] is not parameters["a"]
        with consuming(torch.tensor(1.0)):
            skipped, _ = optimizer.update(parameters, gradients, state, 1)
        assert skipped["a"] is parameters["a"]
        assert (parameters["a"] == 1).all()
        with consuming(torch.tensor(0.0)):
            moved, _ = optimizer.update(parameters, gradients, state, 1)
        assert moved["a"] is parameters["a"]
        for name in ("a", "b"):
            assert_close(parameters[name], plain[name], terms=16)


def test_the_setting_mixed_precision_is_the_default(here: Device) -> None:
    plain, mixed = trained(here), trained(here, precision="mixed")
    anydevice.configure(mixed_precision=True)
    try:
        by_setting, asked = trained(here), trained(here, precision="float32")
    finally:
        anydevice.configure(mixed_precision=None)
    for one, other in ((by_setting, mixed), (asked, plain)):
        assert_same_values(one.history.losses, other.history.losses, because=SAME_PROGRAM)
    assert mixed.history.losses != plain.history.losses
    for run, policy in ((by_setting, "mixed"), (asked, "float32")):
        assert run.report is not None
        assert run.report.policy.name == policy
        assert f"precision  {run.report.policy}" in str(run)


# Where, and how


def test_one_device_may_stand_in_a_list_and_several_are_asked_for_by_devices() -> None:
    pytest.importorskip("torch")
    wrong: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (["cpu:0", "cpu:1"], {}, r"device= is one device, .*use devices="),
        ("cpu", {"devices": ["cpu"]}, "both given"),
        (None, {"devices": []}, "devices= is empty"),
        (None, {"devices": ["cpu"], "strategy": "both"}, "strategy is one of auto, replicate"),
        ("cpu", {"strategy": "shard"}, "give devices= too"),
    )
    for device, options, words in wrong:
        with pytest.raises(ConfigurationError, match=words):
            trained(device, **options)
    with pytest.raises(UnsupportedError, match="2 devices in one process need JAX") as seen:
        trained(None, devices=[cpu("mlx"), "cpu:1"])
    assert "anydevice launch" in seen.value.reasons[0].fix
    for one in (["cpu"], [cpu("torch")], "cpu:0"):
        assert anydevice.device_of(trained(None, devices=one).model) == cpu("torch")


def compiled_frames() -> int:
    """How many functions PyTorch's compiler has looked at in this process."""
    import torch._dynamo.utils as dynamo

    return int(dynamo.counters["frames"]["total"])


def test_a_small_training_by_torch_is_over_before_it_would_be_compiled() -> None:
    here, before = cpu("torch"), compiled_frames()
    run = trained(here, optimize=None)
    assert compiled_frames() == before
    assert run.report is not None
    assert (run.report.optimize, run.report.how) == ("none", "run as written")
    plain = trained(here, optimize="none")
    assert_same_values(run.history.losses, plain.history.losses, because=SAME_PROGRAM)


@pytest.mark.parametrize(
    ("model", "epochs", "batches", "expected"),
    [
        (nn.Model(LAYER, device="cpu"), 100, 1_000, "none"),
        (nn.Model(LAYER, device="cpu"), 100, 10_000, "default"),
        (nn.Model(LAYER, device="cpu"), 100, None, "none"),
        (nn.Model(nn.Dense(1000, 1000), device="cpu"), 10, 1_000, "none"),
        (nn.Model(nn.Dense(1000, 1000), device="cpu"), 10, 10_000, "default"),
        (nn.Model(nn.Dense(1000, 1000), (500, 1000), device="cpu"), 10, 100, "default"),
    ],
)
def test_size_alone_decides(model: nn.Model, epochs: int, batches: Any, expected: str) -> None:
    assert default_optimize(Device("cpu", engine="torch"), model, epochs, batches) == expected
    for other in (Device("cpu", engine="jax"), Device("cuda", engine="torch")):
        assert default_optimize(other, model, epochs, batches) == "default"


class Threads(nn.Layer):
    """Notes how many threads PyTorch computes with."""

    seen: list[int]

    def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
        import torch

        self.seen.append(torch.get_num_threads())
        if len(x) == 3:
            raise LookupError("three")
        return x


def test_small_steps_by_torch_run_in_one_thread_and_no_others_do() -> None:
    torch, here = pytest.importorskip("torch"), cpu("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x, y = examples(16384)
        threads = Threads([])
        model = nn.Model(nn.Chain(nn.Dense(8, 16), threads, nn.Dense(16, 3)), device="cpu")
        batches = [(x[:8], y[:8]), (x, y), (x[:3], y[:3])]
        with pytest.raises(LookupError, match="three"):
            trained(here, model=model, data=batches, epochs=1)
        assert threads.seen[:3] == [1, 2, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_slow_compilation_is_said_in_a_line_where_there_is_no_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("anydevice._train.history._SLOW", 0.0)
    here, line = cpu("jax"), "jax is compiling the training step, which may take a minute"
    trained(here, optimize="default")
    assert capsys.readouterr().err.count(line) == 1
    trained(here, optimize="default", progress=False)
    trained(here, optimize="none")
    monkeypatch.setattr("anydevice._train.history._SLOW", 60.0)
    trained(here, optimize="default")
    assert line not in capsys.readouterr().err
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    assert all(each.finished.is_set() for each in timers)  # the threads of some may be ending yet


# What is said and seen


def test_patience_ends_a_training_and_gives_the_best_model() -> None:
    x, y = examples()
    held = nn.Batches(x, np.roll(y, 1), 16, shuffle=False)  # learning must make this one worse
    models: list[nn.Model] = []
    run = trained(
        cpu("jax"),
        epochs=50,
        validation=held,
        patience=2,
        optimizer=nn.AdamW(5e-2),
        callbacks=lambda event: models.append(event.model()),
    )
    assert run.stopped == "no better for 2 epochs"
    assert len(run.history) < 50
    losses = run.history.validations
    assert min(losses) == losses[-3]
    assert same(run.model, models[-3])
    assert not same(run.model, models[-1])


def test_callbacks_see_the_training_and_may_stop_it(here: Device) -> None:
    class Watches(nn.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []
            self.epochs: list[int] = []

        def step(self, event: nn.TrainingEvent) -> None:
            self.losses.append(event.loss())
            assert event.ended is None
            if event.steps == 9:
                event.stop()

        def epoch(self, event: nn.TrainingEvent) -> None:
            assert event.ended is not None
            assert event.history[-1] is event.ended
            assert event.loss() == self.losses[-1]
            self.epochs.append(event.epoch)

    watches = Watches()
    run = trained(here, callbacks=[watches])
    assert run.stopped == "a callback"
    assert len(watches.losses) == 9
    assert np.mean(watches.losses[:6]) == pytest.approx(run.history[0].loss)
    assert watches.epochs == [1]
    assert len(run.history) == 1
    with pytest.raises(ConfigurationError, match=r"a callback is a nn\.Callback"):
        trained(here, callbacks=["text"])


def interrupt(event: nn.TrainingEvent) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_after_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.safetensors"
    interrupting = on_step(lambda event: interrupt(event) if event.steps == 8 else None)
    run = trained(cpu("jax"), save=path, callbacks=[interrupting])
    assert run.stopped == "Ctrl-C"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert f"after step 8: saved to {path}" in capsys.readouterr().err
    rest = trained(cpu("jax"), resume=path)
    assert same(rest.model, trained(cpu("jax")).model)
    assert trained(cpu("jax"), callbacks=[interrupting]).stopped == "Ctrl-C"
    assert "nothing was saved" in capsys.readouterr().err


FORKING = """
import os, signal
from anydevice._train.train import Interrupts

with Interrupts() as interrupts:
    interrupts.acknowledge = lambda: os.write(1, b"stopping ")
    worker = os.fork()
    os.kill(os.getpid(), signal.SIGINT)
    if not worker:
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), interrupts.requested)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_workers_that_read_data_leave_ctrl_c_to_the_training() -> None:
    """A terminal tells all of them, and a worker has the handlers of the process it comes from."""
    assert output_of("-c", FORKING) == "stopping 3 True\n"


def test_ctrl_c_at_the_end_of_an_epoch_twice_and_other_threads() -> None:
    run = trained(cpu("jax"), callbacks=[interrupt])
    assert (run.stopped, len(run.history)) == ("Ctrl-C", 1)
    with pytest.raises(KeyboardInterrupt):
        trained(cpu("jax"), callbacks=[on_step(interrupt), on_step(interrupt)])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    runs: list[nn.Trained] = []
    thread = threading.Thread(target=lambda: runs.append(trained(cpu("jax"))))
    thread.start()
    thread.join()
    assert len(runs[0].history) == 2


def recorder() -> Any:
    """A logger with `log(dict)`, and the rows that it gets."""
    rows: list[dict[str, Any]] = []
    return SimpleNamespace(rows=rows, log=rows.append)


class Writer:
    """What a TensorBoard SummaryWriter gets."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.setdefault(name, []).append((step, value))


def test_a_log_gets_every_epoch() -> None:
    log, writer, every = recorder(), Writer(), recorder()
    logs = [nn.Log(log), nn.Log(writer), nn.Log(every, every=3)]
    history = trained(cpu("jax"), validation=data(), callbacks=logs).history
    names = "loss", "validation", "rate", "seconds", "epoch"
    expected = [
        {**{name: getattr(each, name) for name in names}, "step": each.steps} for each in history
    ]
    assert log.rows == expected
    assert [row for row in every.rows if "loss" in row] == expected
    assert writer.scalars["loss"] == [(each.steps, each.loss) for each in history]
    assert writer.scalars["validation"] == [(each.steps, each.validation) for each in history]
    steps = [row for row in every.rows if "step_loss" in row]
    assert [row["step"] for row in steps] == list(range(3, history[-1].steps + 1, 3))
    assert all(np.isfinite(row["step_loss"]) for row in steps)


def test_a_log_gets_metrics_by_their_names_and_no_rate_that_nobody_knows() -> None:
    log = recorder()
    run = trained(cpu("jax"), validation=data(), metrics="accuracy", callbacks=nn.Log(log))
    assert [row["accuracy"] for row in log.rows] == run.history.metrics["accuracy"]
    assert "metrics" not in log.rows[0]
    nn.Log(log).send(Epoch(1, 0.5, None, math.nan, 10, 1.5))
    assert log.rows[-1] == {"loss": 0.5, "seconds": 1.5, "epoch": 1, "step": 10}


def test_a_summary_writer_of_tensorboard_reads_back_what_was_sent(tmp_path: Path) -> None:
    board = pytest.importorskip("torch.utils.tensorboard")
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with board.SummaryWriter(tmp_path) as writer:
        run = trained(cpu("jax"), callbacks=nn.Log(writer))
    events = reading.EventAccumulator(str(tmp_path))
    events.Reload()
    read = [(each.step, each.value) for each in events.Scalars("loss")]
    assert [step for step, _ in read] == [each.steps for each in run.history]
    np.testing.assert_allclose([value for _, value in read], run.history.losses, rtol=1e-6)


def test_a_log_that_takes_no_numbers_or_after_no_number_of_steps_is_refused() -> None:
    words = r"add_scalar\(name, value, step\).*nor log\(dict"
    for target in ("run.log", logging.getLogger(), print):
        with pytest.raises(ConfigurationError, match=words):
            nn.Log(target)
    for every in (0, True, 2.5):
        with pytest.raises(ConfigurationError, match="every must be an integer of 1"):
            nn.Log(recorder(), every=every)  # type: ignore[arg-type]


def test_data_without_a_length_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_READ_EVERY", 0.0)
    trained(cpu("jax"), progress=True, data=lambda seed, epoch: data()(seed, epoch))
    with TrainingProgress(2, None, 0, wanted=True) as shown:
        shown.tell(1, 0, None, 0.0, 0)
    assert clock(59.6) == "1:00"


# What goes wrong


class Broken(nn.Layer):
    """Infinite from a step on, as a layer may become."""

    limit: float

    def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
        return ops.divide(x, ops.astype(ops.less(ops.abs(x), self.limit), "float32"))


def with_outlier(at: int) -> list[tuple[Array, Array]]:
    batches = list(nn.Batches(*examples(), 8, shuffle=False)(0, 1))
    batches[at][0][3] *= 1e4
    return batches


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_nan_names_step_and_layer(here: Device, clip: float | None, accumulate: int) -> None:
    layer = nn.Chain(nn.Dense(8, 8), "tanh", nn.Dense(8, 8), nn.Chain("relu", Broken(1e2)))
    layer = nn.Chain(layer, nn.Dense(8, 3))
    model = nn.Model(layer, device="cpu")
    model.parameters[0][2]["weight"] *= 1e4
    words = r"step 1: the output of Chain\[0\]\[3\]\[1\] Broken"
    with pytest.raises(VerificationError, match=words) as raised:
        trained(here, model=model, clip=clip, accumulate=accumulate)
    assert raised.value.where == "Chain[0][3][1] Broken"


def test_the_step_is_the_one_that_failed_and_a_batch_that_holds_nan_is_named(here: Device) -> None:
    model = nn.Model(nn.Chain(Broken(1e3), nn.Dense(8, 3)), (8,), device="cpu")
    words = r"at step 5: the output of Chain\[0\] Broken is infinite"
    with pytest.raises(VerificationError, match=words):
        trained(here, model=model, data=with_outlier(4))
    batches = with_outlier(2)
    batches[2][0][1, 1] = np.nan
    with pytest.raises(VerificationError, match="step 3: the batch itself holds NaN"):
        trained(here, data=batches)


def test_a_gradient_that_is_no_number_is_named(here: Device) -> None:
    """The root of 0 is finite, and its slope is not."""

    class Root(nn.Layer):
        def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
            return ops.sqrt(x)

    model = nn.Model(nn.Chain(nn.Dense(8, 3), Root()), device="cpu")
    zeros = [(np.zeros((4, 8), np.float32), np.zeros(4, np.int32))] * 3
    for clip in (1.0, None):
        with pytest.raises(VerificationError, match=r"step 1: the gradient of Chain\[0\]"):
            trained(here, model=model, data=zeros, clip=clip)


def test_a_loss_that_is_no_number_by_itself(here: Device) -> None:
    def loss(output: Any, target: Any) -> Any:
        return ops.log(ops.mean(ops.multiply(output, 0.0)))

    with pytest.raises(VerificationError, match=r"the loss is infinite, and the output of Chain"):
        trained(here, loss=loss)


def test_float16_that_no_scale_mends_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anydevice._libraries.precision.has_bfloat16", lambda device: False)
    model = nn.Model(nn.Dense(8, 3), device="cpu")
    model.parameters["weight"] *= 1e6
    for engine in ("torch", "jax"):
        with pytest.raises(VerificationError, match="Dense"):
            trained(cpu(engine), model=model, precision="mixed", epochs=10)


def test_a_failure_that_does_not_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anydevice._train.stepper.HostStepper.failed", True)
    with pytest.raises(VerificationError, match="finite when the batches were run again"):
        trained(cpu("torch"))


def test_engines_without_gradients_name_those_that_have_them() -> None:
    with pytest.raises(UnsupportedError, match="train on torch, jax or mlx"):
        trained(anydevice.device("cpu", engine="numpy"))
    assert trained(None).model is not None
    assert trained(anydevice.device("cpu")).model is not None


def test_wrong_arguments_are_refused() -> None:
    here = cpu("jax")
    for options, words in (
        ({"epochs": 0}, "epochs must be an integer"),
        ({"accumulate": True}, "accumulate must be"),
        ({"patience": -1}, "patience must be"),
        ({"save_every": 0.5}, "save_every must be"),
        ({"save_every": 2}, "save_every= needs save="),
        ({"optimizer": 0.1}, "optimizer must be one such as"),
        ({"optimize": "most"}, "optimize is one of"),
        ({"precision": "float8"}, "precision is one of"),
        ({"loss": "hinge"}, "unknown loss"),
        ({"model": "resnet"}, "a str cannot be trained; give a nn.Model, or a module of PyTorch"),
        ({"model": abs}, "cannot be trained; give a nn.Model, or a module of PyTorch"),
        ({"model": nn.Model("relu", (2,), device="cpu")}, "no parameters to train"),
        ({"save": "run.pt"}, "must end with .safetensors"),
        ({"schedule": 0.1}, "schedule must give the rate of each step"),
        ({"schedule": lambda step: -1.0}, r"the schedule returned -1\.0 for step 1"),
        ({"schedule": lambda step: math.nan}, "the schedule returned nan for step 1"),
        ({"schedule": lambda step: "x"}, "the schedule returned 'x' for step 1"),
        ({"clip": "x"}, "clip must be a finite number above 0, not 'x'; it is the largest norm"),
        ({"clip": 0}, "a finite number above 0, not 0"),
        ({"clip": True}, "a finite number above 0, not True"),
        ({"clip": math.inf}, "a finite number above 0, not inf"),
        ({"seed": 1.5}, "seed must be an integer of 0 or more, not 1.5"),
        ({"seed": -1}, "seed must be an integer of 0 or more, not -1"),
        ({"seed": True}, "seed must be an integer of 0 or more, not True"),
        ({"resume": True}, "needs save="),
        ({"data": []}, "no batches in epoch 1"),
        ({"data": 5}, "not a int"),
        ({"data": lambda epoch: []}, "does not take two arguments"),
        ({"data": iter(list(data()(0, 1)))}, "can be iterated only once"),
        ({"data": [(1, 2, 3)]}, "a batch must be a pair"),
        ({"data": [5]}, "not a int"),
        ({"validation": []}, "validation gave no batches"),
        ({"data": [(np.ones((2, 7), np.float32), np.zeros(2, np.int32))]}, "got 7 features"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            trained(here, **options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_not_one_number_is_refused(here: Device, accumulate: int) -> None:
    def rows(output: Any, target: Any) -> Any:
        return ops.mean(output, axis=1)

    def one_row(output: Any, target: Any) -> Any:
        return ops.reshape(ops.mean(output), (1,))

    for loss, words in (
        (rows, r"rows returned an array of shape \(8,\); take its mean"),
        (one_row, r"one_row returned an array of shape \(1,\)"),
        (lambda output, target: 5.0, "returned a float"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            trained(here, loss=loss, accumulate=accumulate, optimize="none")


def outside(target: int) -> list[tuple[Array, Array]]:
    batches = with_outlier(0)
    batches[2][1][4] = target
    return batches


def test_a_target_that_is_no_class_is_named(here: Device) -> None:
    words = "and the model gives 3 classes, which are 0 to 2"
    same = ops.cross_entropy, functools.partial(ops.cross_entropy)
    for target, loss in ((3, nn.cross_entropy), *((-2, each) for each in same)):
        with pytest.raises(VerificationError, match=f"step 3: a target is {target}, {words}"):
            trained(here, data=outside(target), loss=loss)


# Data


def test_batches_are_shuffled_by_seed_and_epoch_alone() -> None:
    x = np.arange(10)
    batches = nn.Batches(x, x, 3)

    def order(seed: int, epoch: int) -> list[int]:
        return [int(i) for part, _ in batches(seed, epoch) for i in part]

    assert order(0, 1) == order(0, 1) != list(range(10))
    assert sorted(order(0, 1)) == list(range(10))
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (1, 2)}) == 4
    assert len(nn.Batches(x, x, 3, whole_only=True)) == 3
    for wrong, words in (((x, x[:3], 2), "10 examples in x and 3"), ((x, x, 0), "no batch")):
        with pytest.raises(ConfigurationError, match=words):
            nn.Batches(*wrong)
    with pytest.raises(ConfigurationError, match="no batch of size 11"):
        nn.Batches(x, x, 11, whole_only=True)


def test_the_order_of_equal_numbers_is_the_same_everywhere() -> None:
    """Among so many numbers of 32 bits some are equal: their order is that of the examples."""
    x = np.arange(150_000)
    drawn = anydevice.rng(0, cpu("numpy")).split(2)[1].bits(len(x))
    assert len(np.unique(drawn)) < len(x)
    ((order, _),) = nn.Batches(x, x, len(x))(0, 1)
    assert_same_integers(order, np.lexsort((x, drawn)))


def test_data_is_iterated_once_an_epoch() -> None:
    class Loader:
        begun = 0

        def __iter__(self) -> Iterator[tuple[Array, Array]]:
            self.begun += 1
            return iter(list(data()(0, self.begun)))

    loader = Loader()
    trained(cpu("torch"), data=loader, validation=[next(data()(0, 1))])
    assert loader.begun == 2


def test_functions_are_called_with_seed_and_epoch() -> None:
    called: list[tuple[int, int]] = []

    def batches(seed: int, epoch: int) -> Iterator[tuple[Array, Array]]:
        called.append((seed, epoch))
        yield from data()(seed, epoch)

    trained(cpu("jax"), data=batches, seed=7)
    assert called == [(7, 1), (7, 2)]
    assert checked_data(max, 2) is max, "what C functions take is not always said"


def test_batches_of_other_libraries_are_converted(torch: Any) -> None:
    x, y = examples()
    pairs = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    loader = torch.utils.data.DataLoader(pairs, batch_size=8)
    by_loader = trained(cpu("jax"), data=loader)
    by_arrays = trained(cpu("jax"), data=nn.Batches(x, y, 8, shuffle=False))
    assert same(by_loader.model, by_arrays.model)


@pytest.mark.parametrize("own", [False, True], ids=["global numbers", "a generator"])
def test_a_loader_that_shuffles_goes_on_in_its_order(torch: Any, own: bool, tmp_path: Path) -> None:
    x, y = examples()

    def loader(seed: int) -> Any:
        torch.manual_seed(seed)
        pairs = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
        order = torch.Generator().manual_seed(seed) if own else None
        return torch.utils.data.DataLoader(pairs, batch_size=8, shuffle=True, generator=order)

    whole = trained(cpu("torch"), data=loader(1), epochs=3)
    path = tmp_path / "run.safetensors"
    trained(cpu("torch"), data=loader(1), epochs=1, save=path)
    rest = trained(cpu("torch"), data=loader(7), epochs=3, resume=path)
    assert_same_values(rest.history.losses, whole.history.losses, because=SAME_PROGRAM)
    assert same(rest.model, whole.model)


def test_batches_are_placed_ahead_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    here, ready = cpu("jax"), list(data()(0, 1))
    monkeypatch.setattr(Device, "kind", "gpu")
    threads: set[str] = set()

    def batches(seed: int, epoch: int) -> Iterator[tuple[Array, Array]]:
        for batch in ready:
            threads.add(threading.current_thread().name)
            yield batch

    assert len(list(placed_batches(batches, 0, 1, here, skip=2))) == 4
    assert threads == {"anydevice prefetch"}


def test_losses_are_looked_at_when_many_batches_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_MOST_BYTES", 1)
    often = trained(cpu("jax")).history
    monkeypatch.undo()
    seldom = trained(cpu("jax")).history
    assert_same_values(often.losses, seldom.losses, because=SAME_PROGRAM)


def test_compiled_models_train_where_and_as_they_were_compiled() -> None:
    here = cpu("jax")
    compiled = anydevice.compile(nn.Model(LAYER, device="cpu"), here, precision="mixed")
    run = trained(None, model=compiled, optimize=None)
    expected = trained(here, precision="mixed", optimize="default").history.losses
    assert run.history.losses == pytest.approx(expected)
    function = anydevice.compile(lambda x: ops.relu(x), here)
    with pytest.raises(ConfigurationError, match="a function cannot be trained"):
        trained(None, model=function)


def test_histories_are_drawn(tmp_path: Path) -> None:
    run = trained(cpu("jax"), validation=data(16))
    run.history.plot(tmp_path / "losses.svg")
    text = (tmp_path / "losses.svg").read_text()
    assert "validation" in text
    assert "2 epochs, 12 steps" in text
    with pytest.raises(ConfigurationError, match=r"ending in \.svg"):
        run.history.plot(tmp_path / "losses.png")
    with pytest.raises(ConfigurationError, match="no epoch has ended"):
        nn.History().plot(tmp_path / "none.svg")
    wide = [1000.0, 1.0, math.nan, 0.01]
    rows = [{**run.history.to_list()[0], "epoch": n, "loss": loss} for n, loss in enumerate(wide)]
    nn.History.from_list(rows).plot(tmp_path / "wide.svg")
    assert ">100<" in (tmp_path / "wide.svg").read_text()
    nn.History.from_list([{**rows[2], "validation": None}]).plot(tmp_path / "nothing.svg")
    assert run.history == nn.History(run.history)
    assert hash(run.history) == hash(nn.History(run.history))
    assert run.history != list(run.history)
    assert repr(run.history).startswith("History([Epoch(epoch=1")
    assert run.history[:1] == (run.history[0],)


@pytest.mark.parametrize("place", ["cpu", "cuda:0"])
def test_each_epoch_has_its_own_peak_of_memory(place: str) -> None:
    """The first epoch has large batches. Of a fake card, live arrays are counted."""
    pytest.importorskip("torch")
    if place == "cpu" and sys.platform != "linux":
        pytest.skip("only Linux resets the peak of a process")
    x, seen = np.ones((2**15, 64), np.float32), list[Any]()
    with testing.fake_machine(cuda=1, engines=["torch"]):
        here = anydevice.device(place, engine="torch")

        def batches(seed: int, epoch: int) -> Any:
            size = 2**15 if epoch == 1 else 64
            return [(x[:size], x[:size])] * 3

        done = nn.train(
            nn.build(nn.Dense(64, 512), "relu", nn.Dense(512, 64), device=here), batches,
            nn.SGD(1e-3), "mean_squared_error", epochs=3, optimize="none", progress=False,
            callbacks=lambda event: seen.append(event.ended.peak),
        )  # fmt: skip
    first, *rest = seen
    assert [epoch.peak for epoch in done.history] == seen
    activations = 2**15 * 512 * 4
    assert all(first - peak > activations / 2 for peak in rest), seen
    assert "peak" in str(done.history)
