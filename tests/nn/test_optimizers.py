"""Optimizers against those of torch and optax: 100 steps, on every engine that has gradients."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn
from anydevice._core.device import Device
from anydevice._core.engine import Absent, consuming
from anydevice._core.trees import leaves
from anydevice._libraries.layers import optimizer_of
from anydevice._machine.engines import registry
from anydevice._nn.optimizers import ByName, Optimizer
from anydevice._nn.saving import from_json, to_json
from anydevice._train.checkpoint import fingerprint, setting_difference
from anydevice.errors import ConfigurationError
from tests.comparing import rounding

Array = np.ndarray[Any, Any]
STEPS = 100
RATE = 1e-2

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": nn.SGD(RATE),
    "momentum": nn.SGD(RATE, momentum=0.9, decay=0.1),
    "nesterov": nn.SGD(RATE, momentum=0.9, nesterov=True),
    "adam": nn.Adam(RATE, decay=0.1),
    "adamw": nn.AdamW(RATE, decay=0.1),
    "lion": nn.Lion(RATE, decay=0.1),
    "rmsprop": nn.RMSprop(RATE, momentum=0.9, decay=0.1),
}


def start() -> dict[str, Any]:
    drawn = np.random.default_rng(0)
    return {
        "weight": drawn.normal(size=(3, 4)).astype(np.float32),
        "inner": [{"bias": drawn.normal(size=5).astype(np.float32)}],
    }


def gradients_of(step: int) -> dict[str, Any]:
    """Their keys stand in another order, as some libraries return them."""
    drawn = np.random.default_rng(step)
    weight = drawn.normal(size=(3, 4)).astype(np.float32)
    return {"inner": [{"bias": drawn.normal(size=5).astype(np.float32)}], "weight": weight}


def moved_by(
    optimizer: Any, device: Device, steps: int, update: Any = None, by_arrays: bool = False
) -> list[Array]:
    """The parameters after some steps; `update` is the optimizer's own, or a compiled one."""
    parameters = anydevice.to_device(start(), device)
    state = optimizer.init(parameters)
    for number in range(1, steps + 1):
        gradients = anydevice.to_device(gradients_of(number), device)
        step: Any = number
        rate: Any = optimizer.rate_at(number)
        if by_arrays:
            step = anydevice.to_device(np.array(step, np.int32), device)
            rate = anydevice.to_device(np.array(rate, np.float32), device)
        with consuming() if update else nullcontext():
            parameters, state = (update or optimizer.update)(
                parameters, gradients, state, step, rate
            )
    stays = list(parameters) == ["weight", "inner"]
    assert stays or update, "the order of the parameters, but for JAX's compiled functions"
    return [np.asarray(leaf) for leaf in leaves(anydevice.to_numpy(parameters))]


@cache
def by_torch(name: str) -> list[Array] | None:
    torch = pytest.importorskip("torch")
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, RATE),
        "momentum": lambda p: torch.optim.SGD(p, RATE, momentum=0.9, weight_decay=0.1),
        "nesterov": lambda p: torch.optim.SGD(p, RATE, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, RATE, weight_decay=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, RATE, weight_decay=0.1),
        "rmsprop": lambda p: torch.optim.RMSprop(p, RATE, weight_decay=0.1, momentum=0.9),
    }
    if name not in makers:
        return None
    theirs = [torch.nn.Parameter(torch.tensor(leaf)) for leaf in leaves(start())]
    optimizer = makers[name](theirs)
    for number in range(1, STEPS + 1):
        for parameter, gradient in zip(theirs, leaves(gradients_of(number)), strict=True):
            parameter.grad = torch.tensor(gradient)
        optimizer.step()
    return [parameter.detach().numpy() for parameter in theirs]


@cache
def by_optax(name: str) -> list[Array] | None:
    optax = pytest.importorskip("optax")
    decayed = optax.add_decayed_weights(0.1)
    makers = {
        "sgd": lambda: optax.sgd(RATE),
        "momentum": lambda: optax.chain(decayed, optax.sgd(RATE, momentum=0.9)),
        "nesterov": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
        "adam": lambda: optax.chain(decayed, optax.adam(RATE)),
        "adamw": lambda: optax.adamw(RATE, weight_decay=0.1),
        "lion": lambda: optax.lion(RATE, weight_decay=0.1),
    }
    if name not in makers:
        return None
    optimizer, parameters = makers[name](), start()
    state = optimizer.init(parameters)
    for number in range(1, STEPS + 1):
        changes, state = optimizer.update(gradients_of(number), state, parameters)
        parameters = optax.apply_updates(parameters, changes)
    return [np.asarray(leaf) for leaf in leaves(parameters)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("by_arrays", [False, True], ids=["numbers", "arrays"])
def test_steps_are_those_of_torch_and_optax(name: str, by_arrays: bool, cpu: Device) -> None:
    result = moved_by(OPTIMIZERS[name], cpu, STEPS, by_arrays=by_arrays)
    for theirs in (by_torch(name), by_optax(name)):
        if theirs is None:
            continue  # torch has no Lion, and optax another RMSprop
        for a, b in zip(result, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=rounding(np.float32, 2 * STEPS))


def test_a_schedule_gives_the_rate_of_each_step() -> None:
    sgd = nn.SGD(nn.SteppedRate(1.0, every=1, factor=0.5))
    parameters = {"x": np.zeros(1)}
    for step in (1, 2, 3):
        parameters, _ = sgd.update(parameters, {"x": np.ones(1)}, {}, step)
    assert parameters["x"].tolist() == [-1.75]
    assert [sgd.rate_at(1), sgd.rate_at(3), nn.SGD(0.5).rate_at(9)] == [1.0, 0.25, 0.5]
    warm = nn.WarmUp(2, then=nn.CosineRate(1.0, steps=4, floor=0.1))
    shown = [round(warm(step), 4) for step in range(1, 9)]
    assert shown == [0.5, 1.0, 1.0, 0.8682, 0.55, 0.2318, 0.1, 0.1]
    assert nn.ConstantRate(0.3)(17) == 0.3


def test_a_plateau_lowers_the_rate_as_in_torch() -> None:
    torch = pytest.importorskip("torch")
    losses = np.random.default_rng(0).normal(size=80).cumsum().tolist()
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    options = {"factor": 0.5, "patience": 2, "threshold": 0, "min_lr": 0.05, "eps": 0}
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, **options)
    ours = nn.PlateauRate(0.5, factor=0.5, patience=3, floor=0.05)
    for count, loss in enumerate(losses, 1):
        theirs.step(loss)
        rate = ours(1) * ours.factor_after(losses[:count])
        assert rate == pytest.approx(sgd.param_groups[0]["lr"], rel=1e-12)
    assert rate == 0.05
    assert nn.WarmUp(5, then=ours).factor_after(losses) == ours.factor_after(losses)


def test_an_average_follows_the_parameters(cpu: Device) -> None:
    optimizer = nn.EMA(nn.SGD(RATE), 0.9)
    parameters = anydevice.to_device(start(), cpu)
    state, expected = optimizer.init(parameters), [x.astype(np.float64) for x in leaves(start())]
    for number in range(1, 21):
        with consuming():
            gradients = anydevice.to_device(gradients_of(number), cpu)
            parameters, state = optimizer.update(parameters, gradients, state, number)
        now = leaves(anydevice.to_numpy(parameters))
        expected = [0.9 * mean + 0.1 * x for mean, x in zip(expected, now, strict=True)]
    found = leaves(anydevice.to_numpy(state["average"]))
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, 0, rounding(np.float32, 40))
    assert from_json(to_json(optimizer)) == optimizer


def test_the_state_of_16_bit_parameters_is_kept_in_float32() -> None:
    state = nn.Adam().init({"x": np.ones(2, np.float16), "y": np.ones(2, np.float64)})
    assert state["means"]["x"].dtype == np.float32
    assert state["squares"]["y"].dtype == np.float64


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.SGD(-1.0),
        lambda: nn.SGD("fast"),
        lambda: nn.SGD(0.1, momentum=1.0),
        lambda: nn.Adam(float("nan")),
        lambda: nn.Adam(float("inf")),
        lambda: nn.Adam(beta2=1.5),
        lambda: nn.CosineRate(1.0, steps=0),
        lambda: nn.CosineRate(-1.0, steps=5),
        lambda: nn.WarmUp(2.5, then=1.0),
        lambda: nn.SteppedRate(1.0, every=True),
        lambda: nn.SGD(True),
        lambda: nn.SGD(0.1, nesterov=True),
        lambda: nn.SGD(0.1, momentum=0.9, nesterov="yes"),
        lambda: nn.SGD(0.1, momentum=nn.ConstantRate(0.9)),
        lambda: nn.AdamW(0.1, eps="small"),
        lambda: nn.Lion(0.1, decay=-1),
        lambda: nn.ConstantRate(nn.ConstantRate(1.0)),
        lambda: nn.CosineRate(nn.ConstantRate(1.0), steps=5),
        lambda: nn.WarmUp(2, then="fast"),
        lambda: nn.EMA(0.9),
        lambda: nn.Muon(rms=0.0),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()


@pytest.mark.parametrize("given", [float("nan"), -1.0, float("inf"), None])
def test_a_schedule_of_ones_own_that_gives_no_rate_is_named_with_the_step(given: Any) -> None:
    class Odd(nn.Schedule):
        def __call__(self, step: int) -> float:
            return 0.5 if step < 3 else given

    sgd = nn.SGD(Odd())
    assert sgd.rate_at(2) == 0.5
    with pytest.raises(ConfigurationError, match=f"the schedule returned {given} for step 3"):
        sgd.update({"x": np.zeros(1)}, {"x": np.ones(1)}, {}, 3)


def test_an_optimizer_of_ones_own_has_its_fields_and_says_what_it_lacks() -> None:
    class Moody(Optimizer):
        mood: str = "calm"

    assert Moody(0.1, mood="wild").mood == "wild"
    calls = (
        lambda: Moody().init({}),
        lambda: Moody().update({}, {}, {}, 1),
        lambda: nn.Schedule()(1),
    )
    for call in calls:
        with pytest.raises(NotImplementedError):
            call()


GROUPED: dict[str, Optimizer] = {
    "momentum": nn.SGD(
        RATE, 0.9, 0.1, groups={"*.bias": {"decay": 0.0}, "inner": {"rate": 2e-3, "momentum": 0.5}}
    ),
    "sgd": nn.SGD(RATE, groups={"weight": {"momentum": 0.9}}),
    "adam": nn.Adam(RATE, decay=0.1, groups={"*.bias": {"decay": 0.0, "beta1": 0.5}}),
    "adamw": nn.AdamW(
        nn.CosineRate(RATE, 20), decay=0.1, groups={"weight": {"decay": 0.0, "rate": 2e-3}}
    ),
}


@cache
def grouped_by_torch(name: str) -> list[Array]:
    torch = pytest.importorskip("torch")
    bias, weight = (torch.nn.Parameter(torch.tensor(leaf)) for leaf in leaves(start()))
    if name == "momentum":
        own = [{"params": [bias], "lr": 2e-3, "momentum": 0.5, "weight_decay": 0.0}]
        made = torch.optim.SGD([*own, {"params": [weight]}], RATE, momentum=0.9, weight_decay=0.1)
    elif name == "sgd":
        made = torch.optim.SGD([{"params": [weight], "momentum": 0.9}, {"params": [bias]}], RATE)
    elif name == "adam":
        own = [{"params": [bias], "betas": (0.5, 0.999), "weight_decay": 0.0}]
        made = torch.optim.Adam([*own, {"params": [weight]}], RATE, weight_decay=0.1)
    else:
        own = [{"params": [weight], "lr": 2e-3, "weight_decay": 0.0}]
        made = torch.optim.AdamW([*own, {"params": [bias]}], RATE, weight_decay=0.1)
    rates = [group["lr"] for group in made.param_groups]
    for number in range(1, 21):
        for group, rate in zip(made.param_groups, rates, strict=True):
            if name == "adamw":
                group["lr"] = rate * nn.CosineRate(1.0, 20)(number)
        for parameter, gradient in zip((bias, weight), leaves(gradients_of(number)), strict=True):
            parameter.grad = torch.tensor(gradient)
        made.step()
    return [each.detach().numpy() for each in (bias, weight)]


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_parameters_are_those_of_torch(name: str, anywhere: Device) -> None:
    engine = registry.load(str(anywhere.engine))
    found = [moved_by(GROUPED[name], anywhere, 20, GROUPED[name].update)]
    if not isinstance(engine.autodiff, Absent) and engine.autodiff.compiles:
        assert not isinstance(engine.compiler, Absent)
        update = engine.compiler.compile(GROUPED[name].update)
        found.append(moved_by(GROUPED[name], anywhere, 20, update, by_arrays=True))
    for arrays in found:
        for mine, theirs in zip(arrays, grouped_by_torch(name), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)


def by_singular_values(optimizer: nn.Muon, steps: int) -> list[Array]:
    """Muon in float64: the iteration as a polynomial of the singular values, and AdamW."""
    bias, weight = (x.astype(np.float64) for x in leaves(start()))
    mean, first, second = np.zeros((3, 4)), np.zeros(5), np.zeros(5)
    rate, decay, share = RATE, optimizer.decay, optimizer.momentum
    for number in range(1, steps + 1):
        slope, gradient = (x.astype(np.float64) for x in leaves(gradients_of(number)))
        first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
        change = first / (1 - 0.9**number) / (np.sqrt(second / (1 - 0.999**number)) + 1e-8)
        bias = bias - rate * (decay * bias + change)
        mean = share * mean + (1 - share) * gradient
        ahead = share * mean + (1 - share) * gradient if optimizer.nesterov else mean
        u, s, v = np.linalg.svd(ahead, full_matrices=False)
        s = s / np.sqrt((s**2).sum())
        for _ in range(5):
            s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
        weight = weight - rate * (decay * weight + optimizer.rms * 2 * (u * s) @ v)
    return [bias, weight]


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_turns_momentum_as_by_its_singular_values(nesterov: bool, cpu: Device) -> None:
    optimizer = nn.Muon(RATE, nesterov=nesterov)
    for by_arrays in (False, True):
        found = moved_by(optimizer, cpu, STEPS, by_arrays=by_arrays)
        for mine, theirs in zip(found, by_singular_values(optimizer, STEPS), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5)


def test_muon_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    first, *gradients = np.random.default_rng(0).normal(size=(21, 7, 3)).astype(np.float32)
    theirs = torch.nn.Parameter(torch.tensor(first))
    made = torch.optim.Muon([theirs], RATE, 0.1, adjust_lr_fn="match_rms_adamw")
    optimizer, mine = nn.Muon(RATE), {"x": first}
    state = optimizer.init(mine)
    for number, gradient in enumerate(gradients, 1):
        theirs.grad = torch.tensor(gradient)
        made.step()
        mine, state = optimizer.update(mine, {"x": gradient}, state, number)
    way, off = (np.abs(theirs.detach().numpy() - x).max() for x in (first, mine["x"]))
    assert off < 0.03 * way, "torch iterates in bfloat16"
    assert state["squares"]["x"].shape == (), "a matrix has no squares"


def test_each_parameter_has_the_optimizer_of_the_first_pattern(anywhere: Device) -> None:
    sgd, adam = nn.SGD(nn.CosineRate(0.5, 20), 0.9), nn.AdamW(nn.CosineRate(RATE, 20))
    both = ByName({"*.bias": nn.SGD(0.5, 0.9), "*": adam})
    parts = moved_by(sgd, anywhere, 20)[0], moved_by(adam, anywhere, 20)[1]
    state, parameters = both.init(start()), start()
    for number in range(1, 21):
        parameters, state = both.update(parameters, gradients_of(number), state, number)
    shapes = {name: [x.shape for x in leaves(tree)] for name, tree in state.items()}
    assert shapes == {"velocities": [(5,), ()], "means": [(), (3, 4)], "squares": [(), (3, 4)]}
    for mine, theirs in zip(leaves(parameters), parts, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    assert from_json(to_json(both)) == both
    swapped = fingerprint(ByName({"*.bias": nn.SGD(0.5, 0.8), "*": adam}))
    assert setting_difference(fingerprint(both), swapped, "optimizer") is not None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"*.wieght": nn.SGD(), "*": nn.SGD()}, r"'\*\.wieght'.*'weight'"),
        ({"*": nn.SGD(), "*.bias": nn.Adam()}, "parameters of earlier patterns; put it first"),
        ({"*.bias": nn.SGD()}, r"no pattern matches 'weight'; add a last pattern '\*'"),
        ({"*": nn.EMA(nn.SGD())}, r"optimizer\['\*'\] must be one of nn without groups"),
        ({"*": nn.SGD(groups={"weight": {"rate": 1.0}})}, "must be one of nn without groups"),
        ({}, "must be one of nn without groups"),
        (
            {"*.bias": nn.SGD(nn.ConstantRate(1.0)), "*": nn.SGD()},
            "the rate of the last optimizer a number",
        ),
    ],
)
def test_optimizers_by_name_that_leave_something_open_are_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        optimizer_of(given).init(start())  # type: ignore[union-attr]


def test_groups_apply_to_what_is_left_of_a_tree() -> None:
    optimizer = nn.SGD(0.5, groups={"[1]": {"rate": 0.25}, "*.bias": {"rate": 0.125}})
    one = np.ones(1, np.float32)
    held = [{"weight": one, "bias": None}, {"weight": one, "bias": one}]
    moved, _ = optimizer.update(held, held, optimizer.init(held), 1)
    assert [leaf.tolist() for leaf in leaves(moved)] == [[0.5], [0.875], [0.75]]
    assert moved[0]["bias"] is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.SGD(groups={"*.bias": {"beta1": 0.5}}), "may have rate, momentum, decay"),
        (lambda: nn.AdamW(groups={"*.bias": {"decay": -1}}), r"groups\['\*\.bias'\].*decay"),
        (lambda: nn.AdamW(groups=["*.bias"]), "groups must be a dict such as"),
        (lambda: nn.AdamW(groups={"a": {"groups": {}}}), "may have rate, beta1"),
        (lambda: nn.AdamW(groups={"a": {"rate": nn.ConstantRate(1.0)}}), "must be a number"),
        (lambda: nn.AdamW(0.0, groups={"a": {"rate": 1.0}}), "the rate of AdamW a number"),
        (lambda: nn.AdamW(groups={"*.wieght": {}}).init(start()), r"'\*\.wieght'.*'weight'"),
    ],
)
def test_groups_that_make_no_sense_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_groups_are_kept_as_given() -> None:
    given: dict[str, dict[str, Any]] = {"*.bias": {"decay": 0.0}}
    optimizer = nn.AdamW(groups=given)
    again = from_json(to_json(optimizer))
    given["*.bias"]["decay"] = 1.0
    assert optimizer.groups == {"*.bias": {"decay": 0.0}}
    assert again == optimizer
    assert hash(again) == hash(optimizer)
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer
    other = nn.AdamW(groups={"*.bias": {"decay": 0.5}})
    said = setting_difference(fingerprint(optimizer), fingerprint(other), "optimizer")
    assert said == "its optimizer.groups['*.bias']['decay'] was 0.0, and now it is 0.5"
    early = {key: each for key, each in fingerprint(nn.AdamW()).items() if key != ".groups"}
    assert setting_difference(early, fingerprint(nn.AdamW()), "optimizer") is None
    assert setting_difference(early, fingerprint(other), "optimizer") is not None
