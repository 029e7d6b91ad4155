"""Modules of PyTorch, Flax NNX, Equinox and MLX are trained as a loop by hand trains them."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice import nn
from anydevice._libraries import precision
from anydevice.errors import ConfigurationError, VerificationError
from tests.comparing import SAME_PROGRAM, assert_same_values
from tests.train.libraries import CASES, DATA, EPOCHS, RATE, Equinox, Mlx, Torch, X, Y

SAME = 1e-6
LOSS = "cross_entropy"
quiet = {"progress": False}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Any:
    return CASES[request.param]()


@pytest.fixture(params=["torch", "mlx"])
def quick(request: pytest.FixtureRequest) -> Any:
    """Where steps of the two kinds are compiled by nobody: JAX takes a second for each."""
    return CASES[request.param]()


def compiled(case: Any) -> dict[str, Any]:
    """JAX is slow as written, and the others are slow to compile."""
    return {"optimize": "default" if case.engine == "jax" else "none"}


def train(case: Any, model: Any = None, data: Any = DATA, **options: Any) -> Any:
    model = case.model() if model is None else model
    optimizer = options.pop("optimizer", None) or case.optimizer(model)
    options = {"epochs": EPOCHS, "loss": case.loss, "device": "cpu", **quiet} | options
    return nn.train(model, data, optimizer, **{**compiled(case), **options})


def training_of(case: Any, data: Any = DATA, **options: Any) -> nn.Training:
    model = options.pop("model", None) or case.model()
    optimizer = options.pop("optimizer", None) or case.optimizer(model)
    options = {"loss": case.loss, "device": "cpu", **compiled(case), **options}
    return nn.Training(model, optimizer, data, **options)


def losses_of(
    training: nn.Training, epochs: int, path: Path, stop: int | None = None
) -> list[float]:
    """The loss of each step; after `stop` steps the training is saved, and ends."""
    losses: list[float] = []
    for _ in training.epochs(epochs):
        for batch in training:
            losses.append(float(training.step(batch)))
            if len(losses) == stop:
                training.save(path)
                return losses
    return losses


def by_hand(case: Any) -> list[float]:
    """The mean loss of each epoch, over its rows."""
    model = case.model()
    step = case.step(model, case.optimizer(model))
    return [sum(step(x, y) * len(x) for x, y in DATA) / len(X) for _ in range(EPOCHS)]


def assert_same(found: dict[str, Any], expected: dict[str, Any], within: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, atol=within, rtol=within, err_msg=name)


# The same as by hand


def test_the_curve_is_that_of_the_loop_by_hand_and_the_given_module_is_trained(case: Any) -> None:
    expected = by_hand(case)
    model = case.model()
    before = case.weights(model)
    done = train(case, model)
    np.testing.assert_allclose(done.history.losses, expected, rtol=SAME)
    after = case.weights(done.model)
    assert all((after[name] != x).any() for name, x in before.items() if "tracked" not in name)
    if isinstance(case, Equinox):
        assert_same(case.weights(model), before)
    else:
        assert done.model is model
    assert done.report.engine == case.engine


def test_a_loss_that_takes_the_model(quick: Any) -> None:
    def loss(model: Any, x: Any, y: Any) -> Any:
        return quick.loss(model(x), y)

    losses = train(quick).history.losses
    assert train(quick, loss=loss).history.losses == pytest.approx(losses, rel=1e-5)


def test_our_optimizer_and_a_loss_by_its_name(quick: Any) -> None:
    model = quick.model()
    expected = train(quick, model, optimizer=quick.sgd(model)).history.losses
    done = train(quick, optimizer=nn.SGD(RATE), loss="cross_entropy")
    np.testing.assert_allclose(done.history.losses, expected, rtol=SAME)


# Options


def test_batches_that_are_accumulated_are_one_large_batch(quick: Any) -> None:
    whole = [(X[:16], Y[:16]), (X[16:], Y[16:])]
    model = plain(quick)
    parts = train(quick, model, accumulate=2, clip=0.5)
    large = train(quick, plain(quick), whole, clip=0.5)
    np.testing.assert_allclose(parts.history.losses, large.history.losses, rtol=1e-5)
    assert parts.history[-1].steps == large.history[-1].steps == 2 * EPOCHS
    uneven = [(X[:8], Y[:8]), (X[8:11], Y[8:11])]
    found = train(quick, plain(quick), uneven, accumulate=2)
    expected = train(quick, plain(quick), [(X[:11], Y[:11])])
    np.testing.assert_allclose(found.history.losses, expected.history.losses, rtol=1e-5)


def plain(case: Any) -> Any:
    """A module without dropout and norm, which depend on how rows are divided."""
    if isinstance(case, Torch):
        case.torch.manual_seed(0)
        return case.torch.nn.Linear(4, 3)
    if isinstance(case, Mlx):
        case.mx.random.seed(0)
        return case.modules.Linear(4, 3)
    is_nnx = not isinstance(case, Equinox)
    return case.nnx.Linear(4, 3, rngs=case.nnx.Rngs(0)) if is_nnx else case.model()


def test_mixed_precision_computes_in_16_bits_and_keeps_the_weights(case: Any) -> None:
    seen = []

    def loss(output: Any, y: Any) -> Any:
        seen.append(str(output.dtype).rpartition(".")[2])
        return case.loss(output, y)

    done = train(case, plain(case), loss=loss, precision="mixed")
    assert set(seen) == {"bfloat16"}
    assert {str(x.dtype) for x in case.weights(done.model).values()} <= {"float32", "uint32"}
    expected = train(case, plain(case)).history.losses
    assert done.history.losses != expected
    np.testing.assert_allclose(done.history.losses, expected, rtol=0.05)


def test_small_gradients_of_a_module_need_the_scaled_loss(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tiny(output: Any, y: Any) -> Any:
        kind = case.mx.float32 if case.engine == "mlx" else "float32"
        output = output.float() if case.engine == "torch" else output.astype(kind)
        return case.loss(output, y) * 1e-7  # float16 ends at 6e-8

    options = {"loss": tiny, "precision": "mixed_float16", "optimizer": nn.SGD(1e6)}
    scaled = train(case, plain(case), **options).history.losses
    exact = train(case, plain(case), optimizer=nn.SGD(0.1)).history.losses
    np.testing.assert_allclose(np.multiply(scaled, 1e7), exact, rtol=1e-2)
    monkeypatch.setattr(precision.Policy, "needs_loss_scale", False)
    unscaled = train(case, plain(case), **options).history.losses
    assert unscaled[0] - unscaled[-1] < 0.1 * (scaled[0] - scaled[-1])


def test_a_step_of_a_module_that_overflows_changes_nothing(torch: Any) -> None:
    def steep(output: Any, y: Any) -> Any:
        return case.loss(output, y) * 1e4

    case = Torch()
    training = training_of(case, model=plain(case), precision="mixed_float16", loss=steep)
    weights, skipped = case.weights(training.model), []
    for _ in range(20):
        before, left_out = weights, training.skipped_steps
        training.step(DATA[0])
        weights = case.weights(training.model)
        skipped.append(training.skipped_steps > left_out)
        moved = any((before[name] != x).any() for name, x in weights.items())
        assert skipped[-1] != moved
    assert 1 < training.skipped_steps < 19
    assert skipped == sorted(skipped, reverse=True), "smaller scales go on"


def test_gradients_that_no_scale_mends_end_a_training_in_float16(torch: Any) -> None:
    def rooted(output: Any, y: Any) -> Any:
        return torch.sqrt((output * 0).abs()).mean()

    case = Torch()
    model = plain(case)
    weights = case.weights(model)
    with pytest.raises(VerificationError, match=r"stopped at step 17: .* or a gradient, is NaN"):
        train(case, model, epochs=10, precision="mixed_float16", loss=rooted)
    assert_same(case.weights(model), weights)


def test_a_schedule_of_ours_decides_the_rates(quick: Any) -> None:
    schedule = nn.CosineRate(1e-2, steps=9)
    if quick.engine == "torch":
        done = train(quick, schedule=schedule)
    else:
        with pytest.raises(ConfigurationError, match=r"has its own rate: give the schedule to it"):
            train(quick, schedule=schedule)
        done = train(quick, schedule=schedule, optimizer=nn.AdamW(1.0))
    assert [epoch.rate for epoch in done.history] == [schedule(at) for at in (3, 6, 9)]


# Checkpoints


def test_a_training_that_is_resumed_is_the_same_bit_for_bit(case: Any, tmp_path: Path) -> None:
    def steep(output: Any, y: Any) -> Any:
        return case.loss(output, y) * 1e3

    options = {"accumulate": 2, "clip": 1.0, "precision": "mixed_float16", "loss": steep}
    options = {} if case.engine == "jax" else options
    whole = train(case, epochs=4, **options)
    assert case.engine == "jax" or whole.history[1].left_out < whole.history[-1].left_out
    path = tmp_path / "run.safetensors"
    train(case, epochs=2, save=path, **options)
    found = train(case, epochs=4, save=path, resume=True, **options)
    assert_same_values(found.history.losses, whole.history.losses, because=SAME_PROGRAM)
    assert found.history[-1].left_out == whole.history[-1].left_out
    assert_same(case.weights(found.model), case.weights(whole.model))


def test_a_loop_goes_on_in_the_middle_of_an_epoch(quick: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    whole = losses_of(first := training_of(quick, accumulate=2), 2, path)
    begun = losses_of(training_of(quick, accumulate=2), 2, path, stop=4)
    again = training_of(quick, accumulate=2)
    again.load(path)
    assert (again.epoch, again.position) == (2, 1)
    assert begun + losses_of(again, 2, path) == whole
    assert_same(quick.weights(again.model), quick.weights(first.model))


def test_patience_returns_the_best_weights(case: Any) -> None:
    model = case.model()
    kept = []

    def epoch(event: nn.TrainingEvent) -> None:
        kept.append(case.weights(event.model()))

    wrong = [(x, (y + 1) % 3) for x, y in DATA]
    best = train(case, model, epochs=9, validation=wrong, patience=2, callbacks=epoch)
    at = int(np.argmin(best.history.validations))
    assert best.stopped == "no better for 2 epochs"
    assert at < len(best.history) - 1
    assert_same(case.weights(best.model), kept[at])


# Mistakes


def test_nan_in_a_batch_is_told_and_harms_nothing(case: Any) -> None:
    x = X[8:16].copy()
    x[3, 1] = np.nan
    good = case.weights(train(case, data=DATA[:1], epochs=1).model)
    tried = training_of(case, None)
    tried.step(DATA[0])

    def wrong() -> None:  # is told at once, or when the losses are read
        tried.step((x, Y[8:16]))
        tried.read()

    with pytest.raises(VerificationError, match=r"step 2: the batch itself holds NaN values in x"):
        wrong()
    assert_same(case.weights(tried.model), good)


def test_a_target_outside_the_classes_is_named(quick: Any) -> None:
    data = [DATA[0], (DATA[1][0], DATA[1][1] + 5)]
    words = r"step 2: a target is \d, and the model gives 3 classes"
    with pytest.raises(VerificationError, match=words):
        train(quick, data=data, loss=LOSS, optimizer=nn.SGD(RATE))


def test_a_part_whose_output_is_nan_is_named(case: Any) -> None:
    large = np.full((8, 4), 3e38, np.float32)
    model = case.model()
    if isinstance(case, Equinox):
        key, log = case.jax.random.key(0), case.jax.numpy.log
        model = case.jax.vmap(case.eqx.nn.MLP(4, 3, 8, 1, log, key=key))
    with pytest.raises(VerificationError, match=r"the output of .+ is (NaN|infinite)") as told:
        train(case, model, data=[DATA[0], (large, Y[:8])])
    assert told.value.where


@pytest.mark.parametrize(
    ("module", "other"), [("torch", "nnx"), ("nnx", "mlx"), ("mlx", "torch"), ("equinox", "torch")]
)
def test_an_optimizer_of_another_library_is_refused(module: str, other: str) -> None:
    case, wrong = CASES[module](), CASES[other]()
    library = "jax" if module in ("nnx", "equinox") else module
    with pytest.raises(ConfigurationError, match=rf"does not train a module of {library}; give"):
        train(case, optimizer=wrong.optimizer(wrong.model()))


@pytest.mark.parametrize("loader", [iter(DATA), [], X], ids=["once", "empty", "array"])
def test_a_loop_of_your_own_does_not_end_in_silence(loader: Any) -> None:
    def train() -> None:
        model = nn.build(nn.Dense(4, 3), device="cpu")
        training = nn.Training(model, nn.SGD(RATE), loader, LOSS, device="cpu")
        for _ in training.epochs(2):
            for batch in training:
                training.step(batch)

    with pytest.raises(ConfigurationError, match=r"^loader (is|gave) ") as found:
        train()
    assert found.value.source == "loader"


# What PyTorch has


def test_parts_in_inference_mode_stay_in_it(quick: Any) -> None:
    model = quick.model()
    norm = model[1] if isinstance(quick, Torch) else model.layers[1]
    norm.eval()
    before = quick.weights(model)
    train(quick, model, epochs=2, validation=DATA)
    after = quick.weights(model)
    moved = {name for name, x in before.items() if (after[name] != x).any()}
    assert not any("running" in name for name in moved)
    assert moved
    assert model.training
    assert not norm.training


def test_a_scheduler_of_pytorch_steps_after_each_step(torch: Any) -> None:
    case = Torch()

    def parts() -> Any:
        model = case.model()
        optimizer = case.optimizer(model)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.1)

    model, optimizer, schedule = parts()
    step, expected = case.step(model, optimizer), []
    for _ in range(EPOCHS):
        losses = []
        for x, y in DATA:
            losses.append(step(x, y) * len(x))
            schedule.step()
        expected.append(sum(losses) / len(X))
    model, optimizer, schedule = parts()
    done = train(case, model, optimizer=optimizer, schedule=schedule)
    np.testing.assert_allclose(done.history.losses, expected, rtol=SAME)
    np.testing.assert_allclose([epoch.rate for epoch in done.history], [1e-2, 1e-3, 1e-4])
    with pytest.raises(ConfigurationError, match=r"a scheduler of PyTorch needs an optimizer"):
        train(case, optimizer=nn.AdamW(RATE), schedule=schedule)


def test_a_scheduler_with_a_rate_for_each_group(torch: Any) -> None:
    case = Torch()
    model = case.model()
    groups = [{"params": model[0].parameters()}, {"params": model[4].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=RATE)
    factors = [lambda step: 1.0, lambda step: 1.0 * (step == 0)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
    rates = []
    training = training_of(case, model=model, optimizer=optimizer, schedule=schedule)
    for batch in training:
        rates.append([group["lr"] for group in optimizer.param_groups])
        before = model[4].weight.detach().clone()
        training.step(batch)
        assert (len(rates) == 1) == bool((model[4].weight != before).any())
    assert rates == [[RATE, RATE], [RATE, 0.0], [RATE, 0.0]]


def test_parameters_that_are_frozen_or_unused_stay(torch: Any) -> None:
    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
            self.unused = torch.nn.Linear(2, 2)
            self.first.weight.requires_grad_(False)

        def forward(self, x: Any) -> Any:
            return self.last(self.first(x).relu())

    case = Torch()
    for optimizer in (None, nn.Adam(RATE)):
        torch.manual_seed(0)
        model = Net()
        before = case.weights(model)
        after = case.weights(train(case, model, optimizer=optimizer, clip=1.0, epochs=1).model)
        stay = {name for name, x in before.items() if not (after[name] != x).any()}
        assert stay == {"first.weight", "unused.weight", "unused.bias"}
    for x in model.parameters():
        x.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="this model has no parameters to train"):
        train(case, model)


def test_tied_weights_stay_tied(torch: Any, tmp_path: Path) -> None:
    def made() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model

    case, path = Torch(), tmp_path / "run.safetensors"
    whole = train(case, made(), epochs=2).model
    train(case, made(), epochs=1, save=path)
    found = train(case, made(), epochs=2, save=path, resume=True).model
    assert found[2].weight is found[0].weight
    assert_same(case.weights(found), case.weights(whole))


def test_batches_in_dicts_for_a_model_with_a_loss_of_its_own(torch: Any) -> None:
    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.nn.Linear(4, 3)

        def forward(self, inputs: Any, labels: Any = None) -> Any:
            output = self.part(inputs)
            loss = None if labels is None else torch.nn.functional.cross_entropy(output, labels)
            return {"loss": loss, "logits": output}

    case = Torch()
    torch.manual_seed(0)
    rows = [{"inputs": x, "labels": y} for x, y in DATA]
    found = train(case, Net(), rows, loss=None)
    torch.manual_seed(0)
    expected = train(case, torch.nn.Linear(4, 3))
    assert found.history.losses == pytest.approx(expected.history.losses, rel=1e-5)
    with pytest.raises(ConfigurationError, match=r"holds no loss: put labels into the batches"):
        train(case, Net(), [{"inputs": X}], loss=None)
    with pytest.raises(ConfigurationError, match=r"for other batches give loss="):
        train(case, Net(), loss=None)


def test_a_loader_with_its_own_generator_goes_on_in_its_order(torch: Any, tmp_path: Path) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    case, path = Torch(), tmp_path / "run.safetensors"

    def losses(stop: int | None = None, load: bool = False) -> list[float]:
        rows = TensorDataset(torch.tensor(X), torch.tensor(Y))
        generator = torch.Generator().manual_seed(3)
        taken = training_of(case, DataLoader(rows, 4, shuffle=True, generator=generator))
        if load:
            taken.load(path)
        return losses_of(taken, 3, path, stop)

    whole = losses()
    for stop in (2, 6, 9):  # at the start, at the end of an epoch, in the second one
        assert losses(stop) + losses(load=True) == whole, stop


def test_gradients_that_are_nan_do_not_end_in_the_weights_unseen(torch: Any) -> None:
    case = Torch()

    def loss(output: Any, y: Any) -> Any:
        return torch.sqrt((output * 0).abs().sum()) + case.loss(output, y)

    with pytest.raises(VerificationError, match=r"the parameters Sequential.* became NaN"):
        train(case, data=DATA[:1], epochs=1, loss=loss)


def test_a_nan_ends_a_training_in_float16(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "has_bfloat16", lambda device: False)
    training = training_of(Torch(), precision="mixed")
    training.step(DATA[0])
    training.read()
    training.step((np.full_like(X[:8], np.nan), Y[:8]))
    with pytest.raises(VerificationError, match=r"stopped at step 2: the batch itself holds NaN"):
        training.read()


def test_a_loss_and_what_it_holds_go_with_their_training(torch: Any) -> None:
    case = Torch()

    def train_by(teacher: Any) -> weakref.ref[Any]:
        def loss(model: Any, x: Any, y: Any) -> Any:
            return case.loss(model(x) - teacher(x).detach(), y)

        training_of(case, loss=loss).step(DATA[0])
        return weakref.ref(teacher)

    held = train_by(case.model())
    gc.collect()
    assert held() is None


# What JAX has


def test_a_loss_with_a_key_draws_other_numbers_for_each_batch(tmp_path: Path) -> None:
    case = Equinox()

    def loss(model: Any, x: Any, y: Any, key: Any) -> Any:
        kept = case.jax.random.bernoulli(key, 0.5, x.shape)
        return case.loss(model(x * kept), y)

    whole = train(case, data=DATA[:1], loss=loss).history.losses
    path = tmp_path / "run.safetensors"
    train(case, data=DATA[:1], loss=loss, epochs=1, save=path)
    assert train(case, data=DATA[:1], loss=loss, save=path, resume=True).history.losses == whole
    assert train(case, data=DATA[:1], loss=loss, seed=1).history.losses != whole


def stateful(eqx: Any, jax: Any) -> Any:
    class Normed(eqx.Module):  # type: ignore[misc, name-defined]
        first: Any = eqx.field(default_factory=lambda: eqx.nn.Linear(4, 3, key=jax.random.key(0)))
        norm: Any = eqx.field(default_factory=lambda: eqx.nn.BatchNorm(3, "rows", mode="batch"))
        drop: Any = eqx.field(default_factory=lambda: eqx.nn.Dropout(0.5))

        def __call__(self, x: Any, state: Any, key: Any) -> Any:
            y, state = self.norm(self.first(x), state)
            return self.drop(y, key=key), state

    return eqx.nn.make_with_state(Normed)()


def test_state_and_randomness_of_equinox_are_those_of_a_loop_by_hand() -> None:
    case = Equinox()
    eqx, jax = case.eqx, case.jax
    module, state = pair = stateful(eqx, jax)
    done = train(case, pair, data=DATA[:1], optimizer=case.optax.sgd(RATE), epochs=2)
    losses = []
    for step in (1, 2):
        key = jax.random.fold_in(jax.random.key(0), step)
        keys = jax.numpy.stack([jax.random.fold_in(key, row) for row in range(len(DATA[0][0]))])

        def value(module: Any, state: Any = state, keys: Any = keys) -> Any:
            axes = {"in_axes": (0, None, 0), "out_axes": (0, None), "axis_name": "rows"}
            y, after = jax.vmap(module, **axes)(DATA[0][0], state, keys)
            return case.loss(y, DATA[0][1]), after

        (loss, state), slopes = eqx.filter_value_and_grad(value, has_aux=True)(module)
        module = eqx.apply_updates(module, jax.tree.map(lambda x: -RATE * x, slopes))
        losses.append(float(loss))
    np.testing.assert_allclose(done.history.losses, losses, rtol=SAME)
    still = eqx.nn.inference_mode(module)
    expected = [still(x, state, None)[0] for x in X]
    np.testing.assert_allclose(nn.predict(done.model, X), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigurationError, match=r"give \(model, state\)"):
        train(case, pair[0])
