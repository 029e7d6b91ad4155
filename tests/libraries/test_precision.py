"""Element types of a run, and the scale of a loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import ops
from anydevice._core.device import Device
from anydevice._core.finding import DeviceStatus, Facts
from anydevice._libraries.precision import (
    LossScale,
    Policy,
    cast_parameters,
    default_precision,
    has_bfloat16,
    policy_of,
)
from anydevice._libraries.registry import adapter_of
from anydevice._machine.engines import registry
from anydevice._train.stepper import _select
from anydevice.errors import ConfigurationError
from tests.nn.conftest import ALL, device_of_engine


@pytest.fixture(params=ALL)
def cpu(request: pytest.FixtureRequest) -> Device:
    return device_of_engine(request.param)


def card(capability: str | None, engine: str = "torch") -> Device:
    facts = Facts(name="card", compute_capability=capability)
    status = DeviceStatus(kind="gpu", facts=facts, engines=(engine,))
    return Device.seen("cuda", 0, status).served_by(engine)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_one_type_for_all(name: str, cpu: Device) -> None:
    policy = policy_of(name, cpu)
    assert policy == Policy(name, name, name, name)
    assert not policy.casts_parameters
    assert str(policy) == name
    assert policy.needs_loss_scale is (name == "float16")


def test_mixed_keeps_weights_in_32_bits(cpu: Device) -> None:
    policy = policy_of("mixed", cpu)
    assert (policy.parameters, policy.compute, policy.output) == ("float32", "bfloat16", "float32")
    assert policy.casts_parameters
    assert not policy.needs_loss_scale
    assert str(policy) == "mixed: parameters float32, computed in bfloat16, results float32"


def test_the_setting_is_the_default_and_other_names_are_refused(cpu: Device) -> None:
    with pytest.raises(ConfigurationError, match="bfloat16, mixed, mixed_float16, not 'int8'"):
        policy_of("int8", cpu)
    assert default_precision() == policy_of(None, cpu).name == "float32"
    anydevice.configure(mixed_precision=True)
    assert default_precision() == policy_of(None, cpu).name == "mixed"
    assert policy_of("float32", cpu).name == "float32"
    anydevice.configure(mixed_precision=None)
    assert default_precision() == "float32"


def test_mixed_is_float16_where_bfloat16_is_imitated() -> None:
    policy = policy_of("mixed", card("7.5"))
    assert policy.compute == "float16"
    assert policy.needs_loss_scale


@pytest.mark.parametrize(
    ("device", "has"),
    [
        (card("7.5"), False),
        (card("8.0"), True),
        (card("9.0"), True),
        (card(None), True),
        (card("9.0", "cupy"), False),
    ],
)
def test_which_cards_have_bfloat16(device: Device, has: bool) -> None:
    assert has_bfloat16(device) is has


def test_only_floating_numbers_are_cast(cpu: Device) -> None:
    tree = cpu({"weight": np.ones(3, np.float32), "ids": [np.arange(3, dtype=np.int32)]})
    there = cast_parameters(tree, "bfloat16")
    assert str(there["weight"].dtype).endswith("bfloat16")
    assert there["ids"][0] is tree["ids"][0]
    same = policy_of("float32", cpu).for_computing(tree)
    assert same["weight"] is tree["weight"], "what is of that type already stays the same array"


def test_a_scale_grows_after_good_steps_and_shrinks_at_once(cpu: Device) -> None:
    scale = LossScale(initial=8.0, interval=2, largest=32.0)
    state = scale.start(cpu(np.ones(2, np.float32)))
    good, bad = (cpu(np.array(x, np.float32)) for x in ([1.0, 2.0], [1.0, np.nan]))
    seen = []
    for gradient in (good, good, good, bad, good, good, good, good, good, good):
        state = scale.after(state, scale.finite([gradient]))
        seen.append(float(np.asarray(anydevice.to_numpy(state["scale"]))))
    assert seen == [8, 16, 16, 8, 8, 16, 16, 32, 32, 32]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_one_wrong_number_anywhere_is_found(cpu: Device, wrong: float) -> None:
    tree = cpu({"a": np.ones((2, 3), np.float16), "b": [np.ones(4, np.float32)]})
    assert bool(anydevice.to_numpy(LossScale().finite(tree)))
    spoiled = np.ones((2, 3), np.float16)
    spoiled[1, 2] = wrong
    tree["a"] = cpu(spoiled)
    assert not bool(anydevice.to_numpy(LossScale().finite(tree)))


def test_a_step_with_wrong_gradients_changes_nothing(cpu: Device) -> None:
    scale = LossScale(initial=4.0)
    old, new = cpu([np.zeros(2, np.float32)]), cpu([np.ones(2, np.float32)])
    state = scale.start(old[0])
    for gradient, kept in ((np.inf, 0.0), (2.0, 1.0)):
        gradients = scale.unscaled(cpu([np.array([gradient, 8.0], np.float16)]), state)
        assert anydevice.to_numpy(gradients[0])[1] == 2.0
        finite = scale.finite(gradients)
        assert anydevice.to_numpy(_select(finite, new, old)[0]).tolist() == [kept, kept]


def test_scaling_keeps_small_gradients(cpu: Device) -> None:
    scale = LossScale()
    x = cpu(np.array(1e-7, np.float32))
    state = scale.start(x)
    half = ops.astype(ops.multiply(x, state["scale"]), "float16")
    (back,) = scale.unscaled([half], state)
    assert float(anydevice.to_numpy(back)) == pytest.approx(1e-7, rel=1e-3)
    assert float(anydevice.to_numpy(ops.astype(x, "float16"))) != pytest.approx(1e-7, rel=1e-2)


def test_it_works_inside_compiled_code() -> None:
    pytest.importorskip("jax")
    cpu = anydevice.device("cpu", engine="jax")
    scale = LossScale(initial=2.0)

    def step(state: Any, gradients: Any) -> Any:
        return scale.after(state, scale.finite(gradients))

    compiled = registry.load("jax").compiler.compile(step)  # type: ignore[union-attr]
    state = scale.start(cpu(np.ones(1, np.float32)))
    after = compiled(state, cpu([np.array([np.inf], np.float32)]))
    assert float(after["scale"]) == 1.0


def test_who_multiplies_with_fewer_digits_on_a_card() -> None:
    torch = pytest.importorskip("torch")
    nn = torch.nn
    here = card("9.0")
    dense, image = nn.Linear(4, 4), nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    ours = anydevice.nn.build(anydevice.nn.Dense(4, 4), device="cpu")
    models = {"dense": dense, "image": image, "text": nn.GRU(4, 4), "ours": ours, "function": abs}

    def coarse(device: Device = here) -> set[str]:
        return {name for name, x in models.items() if adapter_of(x).has_coarse_products(device)}

    assert coarse() == {"image", "text", "function"}, "as PyTorch is set"
    assert coarse(Device("cpu", engine="torch")) == set()
    torch.set_float32_matmul_precision("high")
    try:
        assert coarse() == set(models)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert coarse(card("9.0", "cupy")) == set()
    assert adapter_of(abs).has_coarse_products(card("9.0", "jax"))
    assert not adapter_of(ours).has_coarse_products(card("9.0", "jax")), "ops ask for all digits"


@pytest.mark.parametrize("kind", ["tf32", "ieee"])
def test_the_newer_settings_of_pytorch_are_read(kind: str) -> None:
    """The older ones cannot be read any more once these are set."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("this PyTorch has the older settings alone")
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, kind
    try:
        coarse = adapter_of(torch.nn.Linear(4, 4)).has_coarse_products(card("9.0"))
        assert coarse == (kind == "tf32")
    finally:
        matmul.fp32_precision = before
