"""Axiom.jl's rows on models: A3 A4 A9 A10, and of A12 the checkpointing, of A13 the warm-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anydevice
from anydevice import ConfigurationError, VerificationError, nn, proofs
from anydevice._train import training
from anydevice.compat import axiom
from anydevice.compat.axiom import (
    Adam,
    CPUBackend,
    CrossEntropyLoss,
    CUDABackend,
    Dense,
    chain,
    enable_checkpointing,
    forward,
    is_finite,
    load_model,
    prove,
    relu,
    save_model,
    set_backend,
    softmax,
    train,
    warm_up,
)
from tests.comparing import assert_close, rounding
from tests.machines import machine_of
from tests.peaks import measured


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_warned", set())  # what is said once is said in every test
    set_backend(CPUBackend(engine="torch"))


def dots() -> Any:
    """Points of two clouds, and which cloud each is of."""
    numbers = np.random.default_rng(0)
    labels = numbers.integers(0, 2, 256).astype("int32")
    points = numbers.standard_normal((256, 8)) + labels[:, None]
    return points.astype("float32"), labels


def defined() -> nn.Model:
    return chain(Dense(8, 16), relu, Dense(16, 2), softmax)


def learned(**options: Any) -> nn.Model:
    data = nn.Batches(*dots(), 32)
    return train(
        defined(), data, Adam(lr=0.01), CrossEntropyLoss(), epochs=5, optimize="none", **options
    )


def accuracy(model: Any) -> float:
    points, labels = dots()
    guesses = anydevice.to_numpy(model(torch.from_numpy(points))).argmax(axis=1)
    return float((guesses == labels).mean())


def test_a_model_is_defined_once_and_trained_with_adam() -> None:
    with pytest.warns(UserWarning, match="left out for cross_entropy"):
        model = learned()
    assert accuracy(model) > 0.9
    assert model.layer == defined().layer  # the softmax is back after training
    shares = anydevice.to_numpy(model(torch.zeros(3, 8)))
    assert np.allclose(shares.sum(axis=1), 1)


def test_the_same_code_trains_on_the_gpu() -> None:
    with machine_of(cuda=2, engines=("jax",)):
        gpu = set_backend(CUDABackend(1))
        assert defined().parameters[0]["weight"].device == gpu.native
        with pytest.warns(UserWarning, match="left out"):
            model = learned()
        assert model.parameters[0]["weight"].device == gpu.native


def test_the_current_backend_is_where_a_model_is_trained_and_compiled() -> None:
    points, labels = dots()
    model = Dense(8, 2)
    set_backend(CPUBackend(engine="jax"))
    fast = axiom.compile(model, optimize="none")
    assert fast.device.engine == "jax"
    options: dict[str, Any] = {"optimize": "none", "progress": False}
    there = train(model, [(points, labels)], Adam(), **options)
    assert type(there.parameters["weight"]) is type(fast.parameters["weight"])
    back = train(there, [(points, labels)], Adam(), device=CPUBackend(engine="torch"), **options)
    assert isinstance(back.parameters["weight"], torch.Tensor)


def test_each_layer_is_a_model_of_its_own_and_goes_where_it_is_sent() -> None:
    layer = Dense(8, 4)
    assert tuple(forward(layer, torch.ones(2, 8)).shape) == (2, 4)
    with machine_of(cuda=2, engines=("jax",)):
        gpu = CUDABackend(1)
        moved = gpu(anydevice.to_numpy(layer))
        assert moved.parameters["weight"].device == gpu.native
        assert moved.layer == layer.layer


def test_a_model_is_saved_loaded_and_compiled(tmp_path: Path) -> None:
    model = defined()
    save_model(model, tmp_path / "my_model.safetensors")
    again = load_model(tmp_path / "my_model.safetensors")
    fast = axiom.compile(again, backend=CPUBackend(engine="torch"), optimize="none")
    x = np.ones((2, 8), np.float32)
    expected = anydevice.to_numpy(model(torch.ones(2, 8)))
    allowed = rounding(np.float32, 64)
    np.testing.assert_allclose(anydevice.to_numpy(fast(x)), expected, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("optimize", ["none", "default", "aggressive"])
def test_optimize_has_levels(optimize: str) -> None:
    backend = CPUBackend(engine="jax")
    fast = axiom.compile(Dense(4, 2), backend=backend, optimize=optimize)
    assert fast.report.optimize == optimize
    assert tuple(fast(np.ones((1, 4), np.float32)).shape) == (1, 2)


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "mixed"])
def test_it_runs_in_16_bits(precision: str) -> None:
    fast = axiom.compile(defined(), optimize="none", precision=precision, verify=True)
    assert fast.policy.compute.endswith("float16")
    assert fast.report.checked is not None


def test_it_is_trained_in_mixed_precision() -> None:
    with pytest.warns(UserWarning, match="left out"):
        model = learned(precision="mixed")
    assert model.parameters[0]["weight"].dtype == torch.float32
    assert accuracy(model) > 0.9


def test_compiling_verifies_that_properties_hold() -> None:
    def adds_up(shares: Any) -> bool:
        return bool(np.allclose(shares.sum(axis=1), 1, atol=1e-5))

    def is_sure(shares: Any) -> bool:
        return bool((shares.max(axis=1) > 0.999).all())

    fast = axiom.compile(defined(), optimize="none", verify=True, properties=iter([adds_up]))
    checked = fast.report.checked
    assert checked is not None
    assert checked.properties == ("adds_up",)
    with pytest.raises(VerificationError, match="is_sure"):
        axiom.compile(defined(), optimize="none", verify=dots()[0], properties=[is_sure])


def test_verifying_without_an_example_knows_what_a_model_takes() -> None:
    tokens = chain(nn.Embedding(5, 4), Dense(4, 2), input_shape=3)
    assert axiom.compile(tokens, optimize="none", verify=True).report.checked
    tied = nn.Model(nn.TiedEmbedding(5, 4, nn.Dense(4, 4)), (3,), device="cpu")
    assert axiom.compile(tied, optimize="none", verify=True).report.checked
    compiled = axiom.compile(defined(), optimize="none")
    assert axiom.compile(compiled, optimize="none", verify=True).report.checked
    with pytest.raises(ConfigurationError, match="give an example"):
        axiom.compile(torch.nn.Linear(2, 2), verify=True)


def test_a_property_is_checked_for_all_of_a_set() -> None:
    model = axiom.compile(defined(), optimize="none", verify=True)
    inputs = np.random.default_rng(1).standard_normal((5, 3, 8)).astype("float32")
    assert prove(inputs, lambda x: is_finite(model(x))) == 5
    inputs[2, 0, 0] = np.nan
    with pytest.raises(VerificationError, match=r"does not hold for inputs\[2\]") as caught:
        prove(inputs, lambda x: is_finite(model(x)))
    assert caught.value.where == "inputs[2]"


def test_checkpointing_lowers_the_peak_and_changes_no_result() -> None:
    model = chain(*[Dense(16, 16), relu] * 20)
    saving = enable_checkpointing(model)
    assert "recomputed" in str(saving)
    x = torch.randn(2048, 16)
    assert_close(saving(x), model(x), terms=16 * 20)

    def gradients(model: nn.Model) -> Any:
        leaf = x.clone().requires_grad_()
        model.apply(model.parameters, leaf, nn.Run(training=True)).square().sum().backward()
        return leaf.grad

    expected, plain = measured("torch", gradients, model)
    found, again = measured("torch", gradients, saving)
    assert_close(found, expected, terms=2 * 16 * 20)
    assert again < 0.6 * plain


def test_a_model_is_warmed_up() -> None:
    assert tuple(warm_up(defined(), np.ones((1, 8), np.float32)).shape) == (1, 2)


def test_properties_are_ensured_and_proved_for_all_inputs(tmp_path: Path) -> None:
    unit = proofs.box(-1.0, 1.0)
    with axiom.with_backend(axiom.CPUBackend(engine="numpy")):

        @axiom.ensure(proofs.within(0, 1), over=unit)
        def share(seed: int) -> axiom.Model:
            layers = axiom.Dense(2, 8), axiom.relu, axiom.Dense(8, 1), axiom.sigmoid
            return axiom.chain(*layers, seed=seed)

        model = share(3)
        axiom.save_model(model, tmp_path / "share.safetensors")
        again = axiom.load_model(tmp_path / "share.safetensors")
        assert again.properties == model.properties
        fast = axiom.compile(again, verify=True)
        assert "for every float32 execution" in fast.report.proved[0]
        assert axiom.compile(again).report.proved == ()
        assert axiom.prove(unit, model, proofs.finite()).check() >= 1
        with pytest.raises(VerificationError, match="does not hold for x = "):
            axiom.prove(unit, model, proofs.within(0.9, 1))
        false = axiom.ensure(proofs.within(0.9, 1), over=unit)(model)
        assert len(false.properties) == 2
        with pytest.raises(VerificationError, match="does not hold"):
            axiom.compile(false, verify=True)
        with pytest.raises(ConfigurationError, match="takes a property"):
            axiom.prove(unit, model)
