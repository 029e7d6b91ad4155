"""Training that cannot go on, or not as it was asked to: found out, said, and nothing bad kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops
from anydevice._compile.versions import FallbackFunction
from anydevice._core.device import Device
from anydevice._core.engine import Absent
from anydevice._core.protocols import StepState
from anydevice._core.record import replace
from anydevice._core.trees import leaves
from anydevice._libraries.precision import policy_of
from anydevice._machine.engines import registry
from anydevice._nn.layer import without_gradient
from anydevice._train.step_config import StepConfig, total
from anydevice._train.stepper import stepper_for
from anydevice._train.strategy import Strategy
from anydevice.errors import ConfigurationError, OutOfMemoryError, VerificationError

# PyTorch's compiler itself imports what PyTorch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")

LAYER = nn.Chain(nn.Dense(2, 3), nn.Dense(3, 1))
X = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
Y = np.ones((8, 1), np.float32)


def trained(
    here: Device, layer: nn.Layer = LAYER, loss: Any = "mean_squared_error", **options: Any
) -> nn.Trained:
    """A short training, compiled only where that takes less time than it saves."""
    given = {
        "data": [(X, Y)],
        "optimizer": nn.SGD(0.1),
        "epochs": 1,
        "optimize": "default" if here.engine == "jax" else "none",
        **options,
    }
    model = nn.Model(layer, (2,), device=here)
    data, optimizer = given.pop("data"), given.pop("optimizer")
    return nn.train(model, data, optimizer, loss, device=here, progress=False, **given)


def numbers(tree: Any) -> list[Any]:
    return [np.asarray(x, np.float32) for x in leaves(anydevice.to_numpy(tree))]


def steep_at_zero(output: Any, target: Any) -> Any:
    """Finite, but for its slope where the target is 0."""
    root = ops.sqrt(ops.multiply(output, ops.multiply(target, target)))
    return ops.add(ops.mean(ops.multiply(root, 0.0)), ops.mean(ops.multiply(output, output)))


class Large(nn.Layer):
    """Positive, so that it has a root."""

    def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
        return ops.add(ops.multiply(x, x), 1.0)


ROOTED = nn.Chain(LAYER, Large())
STEEP = (X, np.zeros_like(Y))


# What is no number


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_nan_in_the_last_step_is_not_saved(here: Device, accumulate: int, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    fine = [(X, Y)] * (3 * accumulate - 1)
    words = r"step 3: the gradient of Chain\[0\]\[0\]\S+ is NaN; no parameter was changed"
    with pytest.raises(VerificationError, match=words):
        trained(
            here, ROOTED, steep_at_zero,
            data=[*fine, STEEP], save=path, save_every=2, accumulate=accumulate,
        )  # fmt: skip
    kept = trained(here, ROOTED, steep_at_zero, data=fine[: 2 * accumulate], accumulate=accumulate)
    resumed = anydevice.load_weights(path, here)
    saved = [value for name, value in resumed.items() if name.startswith("parameters")]
    assert len(saved) == 4
    for one in numbers(kept.model.parameters):
        same = [other for other in numbers(saved) if other.shape == one.shape]
        assert any(not np.abs(one - other).max() for other in same), "two runs of one program"


@pytest.mark.needs("torch")
def test_an_infinite_gradient_that_no_parameter_shows_is_found() -> None:
    """Lion takes the sign of it, and has it in its state."""

    def steep(output: Any, target: Any) -> Any:
        zero = ops.subtract(output, without_gradient(output))
        steep = ops.multiply(ops.multiply(zero, ops.multiply(target, 1e30)), 1e30)
        return ops.add(ops.mean(steep), ops.mean(ops.multiply(output, output)))

    torch = anydevice.device("cpu", engine="torch")
    data = [(np.abs(X), Y * 0)] * 5
    data[2] = (np.abs(X), np.ones_like(Y))
    with pytest.raises(VerificationError, match=r"step 3: the gradient of Dense\S+ is infinite"):
        trained(torch, nn.Dense(X.shape[1], 1), steep, data=data, optimizer=nn.Lion(0.01))


class Falling(nn.Layer):
    """A number whose gradient is 1, and none from 0.25 on."""

    def initial(self, generator: Any) -> Any:
        return {"height": ops.multiply(generator.uniform((1,)), 0.0)}

    def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
        height = parameters["height"]
        room = ops.subtract(0.25, height)
        root = ops.sqrt(ops.add(room, ops.abs(room)))
        return ops.add(height, ops.multiply(root, 0.0))


def test_the_step_is_the_one_that_went_wrong_not_the_first_with_such_a_batch(here: Device) -> None:
    """All batches are one: had it been run with the last parameters, the first had failed."""
    with pytest.raises(VerificationError, match="at step 4: the gradient of Falling"):
        trained(
            here, Falling(), lambda output, target: ops.negative(ops.mean(output)),
            data=[(X, Y)] * 6,
        )  # fmt: skip


def test_an_update_that_overflows_is_found_before_it_is_saved(here: Device, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    with pytest.raises(VerificationError, match=r"after step 1: the parameters Chain\[0\]") as seen:
        trained(here, optimizer=nn.SGD(3e38), data=[(X, Y * 1e3)], save=path)
    assert "became infinite" in str(seen.value)
    assert "no parameter was changed" not in str(seen.value)


def test_float16_whose_gradients_are_never_numbers_ends_with_an_error(here: Device) -> None:
    with pytest.raises(VerificationError, match=r"the gradient of Chain\[0\]\[0\]\S+ is NaN"):
        trained(here, ROOTED, steep_at_zero, data=[STEEP] * 20, precision="float16")


def test_a_batch_of_no_numbers_stops_float16_at_once(here: Device) -> None:
    wrong = X.copy()
    wrong[0, 0] = np.nan
    with pytest.raises(VerificationError, match="step 2: the batch itself holds NaN"):
        trained(here, data=[(X, Y), (wrong, Y), (X, Y)], precision="float16")


def test_the_history_says_how_many_steps_a_scaled_loss_left_out(here: Device) -> None:
    steep = lambda output, target: ops.multiply(ops.mean(output), 4.0)  # noqa: E731
    run = trained(here, loss=steep, data=[(X, Y)] * 4, precision="float16", epochs=2)
    assert [epoch.steps for epoch in run.history] == [4, 8]
    first, second = (epoch.left_out for epoch in run.history)
    assert 1 <= first == second < 4
    assert trained(here).history[0].left_out == 0
    assert nn.History.from_list(run.history.to_list()) == run.history


def test_what_a_recomputed_block_gives_is_watched(here: Device) -> None:
    class Bad(nn.Layer):
        def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
            return ops.divide(x, ops.multiply(x, 0.0))

    layer = nn.Chain(
        nn.Dense(2, 3), nn.Chain(nn.Dense(3, 3), Bad(), nn.Dense(3, 3)), nn.Dense(3, 1)
    )
    words = r"step 1: the output of Chain\[1\]\[1\] Bad is infinite"
    with pytest.raises(VerificationError, match=words):
        trained(here, nn.recompute(layer))


def test_what_the_library_only_traces_is_not_read() -> None:
    jax = pytest.importorskip("jax")

    class Traced(nn.Layer):
        inside: nn.Layer

        @property
        def parts(self) -> Any:
            return [(".inside", self.inside)]

        def initial(self, generator: Any) -> Any:
            return self.inside.initial(generator)

        def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
            again = jax.checkpoint(lambda p, x: run.through(".inside", self.inside, p, x))
            return ops.divide(again(parameters, x), ops.multiply(ops.sum(x), 0.0))

    here = anydevice.device("cpu", engine="jax")
    with pytest.raises(VerificationError, match=r"Chain\[1\] Traced is infinite"):
        trained(here, nn.Chain(nn.Dense(2, 2), Traced(nn.Dense(2, 1))))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_one_wrong_number_anywhere_makes_the_total_wrong(here: Device, wrong: float) -> None:
    tree: Any = {
        "a": np.ones((2, 3), np.float32),
        "b": [np.ones(4, np.float32), np.array(2, np.float32)],
    }
    assert np.isfinite(anydevice.to_numpy(total(here(tree, convert=True))))
    tree["a"][1, 2] = wrong
    assert not np.isfinite(anydevice.to_numpy(total(here(tree, convert=True))))


# Losses in 16 bits


@pytest.mark.parametrize("precision", ["mixed", "bfloat16", "float16"])
def test_every_loss_is_trained_in_16_bits_and_is_a_float32(here: Device, precision: str) -> None:
    seen: list[tuple[str, str]] = []

    def own(output: Any, target: Any) -> Any:
        seen.append((str(output.dtype), str(target.dtype)))
        return ops.mean(ops.multiply(output, target))

    yes = (Y > 0).astype(np.float32)
    losses: tuple[tuple[Any, Any], ...] = (
        ("mean_squared_error", Y),
        ("binary_cross_entropy", yes),
        (own, Y),
    )
    for loss, target in losses:
        given: dict[str, Any] = {"loss": loss, "data": [(X, target)], "optimize": "none"}
        exact = trained(here, **given).history.losses
        narrow = trained(here, **given, precision=precision).history.losses
        assert narrow == pytest.approx(exact, rel=0.02, abs=0.01), loss
    assert {kind.rpartition(".")[2] for kinds in seen for kind in kinds} == {"float32"}


@pytest.mark.parametrize("loss", [nn.cross_entropy, ops.cross_entropy])
def test_logits_of_16_bits_are_not_copied_for_our_cross_entropy(here: Device, loss: Any) -> None:
    config = StepConfig(nn.Dense(2, 3), loss, nn.SGD(), policy_of("mixed", here))
    parameters = nn.Model(nn.Dense(2, 3), device=here).parameters
    given: list[str] = []

    class Told(nn.Layer):
        def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
            given.append(str(x.dtype))
            return x

    x, y = here((X, np.zeros(8, np.int32)), convert=True)
    value = replace(config, layer=nn.Chain(nn.Dense(2, 3), Told())).value(
        [parameters, {}], (x, y), nn.Run()
    )
    assert given[0].endswith("bfloat16")
    assert str(value.dtype).endswith("float32")


# Compiling


class Opaque(nn.Layer):
    """What no compiler looks through: it asks for a number."""

    def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
        return ops.multiply(x, 2.0 if int(run.step) == 2 else 1.0)


def test_what_no_compiler_looks_through_is_trained_as_it_is_written(here: Device) -> None:
    layer = nn.Chain(nn.Dense(2, 3), Opaque(), nn.Dense(3, 1))
    # PyTorch would compile the pieces from the second step on, which takes long.
    data = [(X, Y)] * (1 if here.engine == "torch" else 3)
    words = r"a part of the training step is not compiled as a whole: .* instead, which is slower"
    with pytest.warns(UserWarning, match=words) as said:
        run = trained(here, layer, data=data, optimize="default")
    assert len([one for one in said if "training step" in str(one.message)]) == 1
    plain = trained(here, layer, data=data, optimize="none")
    assert run.history.losses == pytest.approx(plain.history.losses, rel=1e-4)


def test_a_mistake_is_our_sentence_though_the_step_is_compiled(here: Device) -> None:
    words = r"output is \(8, 1\), .* use target\.reshape\(8, 1\)"
    with pytest.raises(ConfigurationError, match=words):
        trained(here, data=[(X, Y[:, 0])], optimize="default")


def test_an_error_of_ones_own_is_raised_as_it_is() -> None:
    pytest.importorskip("jax")

    def loss(output: Any, target: Any) -> Any:
        raise LookupError("no such target")

    with pytest.raises(LookupError, match="no such target"):
        trained(anydevice.device("cpu", engine="jax"), loss=loss, optimize="default")


def compiled_with(
    here: Device, optimize: str, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """What the compiler is asked for when steps are made ready, before any of them is taken."""
    compiler = registry.load(here.engine or "").compiler
    assert not isinstance(compiler, Absent)
    asked: list[dict[str, Any]] = []
    original = compiler.compile

    def watched(function: Any, **options: Any) -> Any:
        asked.append(options)
        return original(function, **options)

    monkeypatch.setattr(compiler, "compile", watched)
    optimizer = nn.SGD(0.1)
    parameters = nn.Model(LAYER, device=here).parameters
    config = StepConfig(
        LAYER, nn.mean_squared_error, optimizer, policy_of("float32", here), optimize=optimize
    )
    stepper_for(Strategy(here), config, StepState(parameters, optimizer.init(parameters)), 0)
    return asked


def test_steps_are_compiled_as_hard_as_asked(here: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {one["max_effort"] for one in compiled_with(here, "default", monkeypatch)} == {False}
    assert {one["max_effort"] for one in compiled_with(here, "aggressive", monkeypatch)} == {True}
    assert compiled_with(here, "none", monkeypatch) == []
    anydevice.configure(jit=False)
    assert compiled_with(here, "default", monkeypatch) == []


def test_training_hands_on_how_hard(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    here = anydevice.device("cpu", engine="jax")
    asked: list[str] = []

    def watched(strategy: Strategy, config: StepConfig, *others: Any) -> Any:
        asked.append(config.optimize)
        return stepper_for(strategy, config, *others)

    monkeypatch.setattr("anydevice._train.training.stepper_for", watched)
    for optimize in ("aggressive", None, "none"):
        trained(here, optimize=optimize)
    assert asked == ["aggressive", "default", "none"]


# Memory


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_running_out_of_memory_is_our_error(engine: str) -> None:
    """Not MLX, which computes on a CPU in a thread of its own, and ends the process there."""

    class Vast(nn.Layer):
        def apply(self, parameters: Any, x: Any, run: nn.Run) -> Any:
            vast = ops.add(ops.broadcast_to(ops.sum(x), (2**20, 2**20, 2**10)), 1.0)
            return ops.add(x, ops.mean(vast))

    pytest.importorskip(engine)
    here = anydevice.device("cpu", engine=engine)
    with pytest.raises(OutOfMemoryError, match="cpu is out of memory"):
        trained(here, nn.Chain(nn.Dense(2, 1), Vast()), optimize="none")


def test_each_way_is_tried_once_and_what_failed_is_said() -> None:
    def broken(function: Any) -> Any:
        def run(x: int) -> int:
            raise RuntimeError("cannot")

        return run

    def full(*arguments: Any) -> Any:
        raise MemoryError

    said: list[str] = []
    double = FallbackFunction(
        lambda x: 2 * x, [("whole", broken), ("in pieces", broken)], said.append
    )
    assert [double(3) for _ in range(4)] == [6, 6, 6, 6]
    assert said == [
        "not whole: cannot; in pieces instead",
        "not in pieces: cannot; run as written instead",
    ]
    with pytest.raises(TypeError, match="unsupported"):
        double(None)
    own = FallbackFunction(lambda x: 2 * x, [("whole", broken)], said.append)
    with pytest.raises(TypeError, match="unsupported") as raised:
        own(None)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert own(1) == 2
    without_room = FallbackFunction(pytest.fail, [("compiled", lambda function: full)], pytest.fail)
    with pytest.raises(MemoryError):
        without_room(1)
