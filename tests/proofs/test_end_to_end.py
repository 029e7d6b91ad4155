"""From models to proofs: random models and properties, whose proofs no run ever contradicts."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, proofs
from anydevice._core.trees import mapped
from anydevice._proofs.properties import Less

CPU = anydevice.device("cpu", engine="numpy")
ACTIVATIONS = ("relu", "leaky_relu", "tanh", "sigmoid", "gelu", "silu", "gelu_tanh", "softmax")


def drawn_model(random: np.random.Generator) -> nn.Model:
    size = inputs = int(random.integers(2, 4))
    layers: list[Any] = []
    for _ in range(int(random.integers(1, 3))):
        width = int(random.integers(2, 6))
        layers.append(nn.Dense(size, width))
        size = width
        residual = nn.Residual(nn.Chain(nn.Dense(size, size), "relu"))
        kinds = [*ACTIVATIONS, nn.LayerNorm(size), nn.BatchNorm(size), residual]
        layers.append(kinds[int(random.integers(len(kinds)))])
    layers.append(nn.Dense(size, 2))
    model = nn.build(*layers, input_shape=(inputs,), seed=int(random.integers(1000)), device=CPU)

    def changed(x: Any) -> Any:
        if x.ndim == 1 and (x == 1).all():
            return x
        return (x + 0.1 * random.standard_normal(x.shape) * (x.ndim == 1)).astype(np.float32)

    return model.with_parameters(mapped(changed, model.parameters))


def outcome(seed: int, memory: int) -> str:
    """Decide one random theorem, and assert that no run contradicts the result."""
    random = np.random.default_rng(seed)
    model = drawn_model(random)
    (inputs,) = model.input_shape
    low = random.uniform(-1, 0, inputs).astype(np.float32).astype(np.float64)
    high = (low + random.uniform(0.05, 0.8, inputs)).astype(np.float32).astype(np.float64)
    x = (low + (high - low) * random.random((2000, inputs))).astype(np.float32)
    x = np.clip(x, low.astype(np.float32), high.astype(np.float32))
    y = model(x).astype(np.float64)
    spare = float(random.choice([-0.05, 0.01, 0.2])) * float(np.ptp(y, 0).max() + 1e-3)
    claim: Any = proofs.within(float(y.min() - spare), float(y.max() + spare))
    if random.random() < 0.4:
        claim = proofs.any_of(proofs.less(0, 1), proofs.less(1, 0), claim)
        if random.random() < 0.5:
            claim = proofs.less(0, 1)
    precision = "float32" if random.random() < 0.7 else "real"
    result = proofs.prove(model, claim, proofs.box(low, high), memory=memory, precision=precision)

    def margin(outputs: Any) -> Any:
        """Above 0 where the property holds, whatever float32 rounds."""
        if isinstance(claim, Less):
            return outputs[:, 1] - outputs[:, 0]
        bounds = claim if not hasattr(claim, "parts") else claim.parts[-1]
        inside = np.minimum(outputs - bounds.low, bounds.high - outputs).min(1)
        apart = np.abs(outputs[:, 0] - outputs[:, 1]) if hasattr(claim, "parts") else -np.inf
        return np.maximum(inside, apart)

    if isinstance(result, proofs.Proof):
        assert result.check() >= 1
        least = 0.0 if precision == "float32" else -1e-5
        assert margin(y).min() >= least, (seed, claim)
    if isinstance(result, proofs.Counterexample):
        flat = np.asarray(result.x, np.float32).reshape(1, -1)
        assert margin(model(flat).astype(np.float64))[0] <= 1e-4, (seed, claim)
        assert (low <= result.x).all()
        assert (result.x <= high).all()
    return type(result).__name__


def test_no_run_contradicts_a_proof() -> None:
    found = Counter(outcome(seed, 1 << 15) for seed in range(24))
    assert found["Proof"] >= 5
    assert found["Counterexample"] >= 5


@pytest.mark.soak
def test_no_run_contradicts_a_proof_of_many() -> None:
    found = Counter(outcome(seed, 1 << 18) for seed in range(100, 600))
    assert found["Proof"] >= 100
    assert found["Counterexample"] >= 100


def module_of(library: str) -> Any:
    if library == "torch":
        torch: Any = pytest.importorskip("torch")
        torch.manual_seed(0)
        chain = torch.nn.Sequential
        return chain(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    jax: Any = pytest.importorskip("jax")
    if library == "nnx":
        nnx: Any = pytest.importorskip("flax.nnx")
        rngs = nnx.Rngs(0)
        return nnx.Sequential(nnx.Linear(3, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 2, rngs=rngs))
    eqx: Any = pytest.importorskip("equinox")
    return eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))


@pytest.mark.parametrize("library", ["torch", "nnx", "equinox"])
def test_modules_of_every_library_are_proved_and_refuted(library: str) -> None:
    from anydevice._libraries.registry import adapter_of
    from anydevice._proofs.lowering import caller

    module = module_of(library)
    call = caller(adapter_of(module), (3,))
    x = np.array([0.2, -0.4, 0.7], np.float32)
    y = np.asarray(call(x[None]))[0]
    label = int(y.argmax())
    near = proofs.prove(module, proofs.same_class(label), over=proofs.ball(x, 1e-3))
    assert isinstance(near, proofs.Proof)
    assert near.check() >= 1
    far = proofs.prove(module, proofs.within(-100, float(y.max())), over=proofs.ball(x, 1.0))
    assert isinstance(far, proofs.Counterexample)
    assert np.asarray(call(far.x[None].astype(np.float32))).max() >= y.max() - 1e-5


def test_a_small_transformer_is_certified() -> None:
    """Attention, norms and SiLU: without a promise for larger ones."""
    block = nn.TransformerBlock(4, 2, hidden=4)
    model = nn.build(block, nn.Flatten(), nn.Dense(8, 2), input_shape=(2, 4), seed=1, device=CPU)
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    label = int(model(x[None]).argmax())
    region = proofs.ball(x, 1e-4)
    result = proofs.prove(model, proofs.same_class(label), over=region, precision="real", limit=120)
    assert isinstance(result, proofs.Proof), result
    assert result.check() >= 1


def test_the_drawing_of_the_docs_shows_a_proof() -> None:
    drawing = runpy.run_path(str(Path(__file__).parents[2] / "docs/proof_boxes.py"))
    model = drawing["network"]()
    limit = float(drawing["outputs"](model).max()) + 0.05
    claim = proofs.within(-np.inf, limit)
    result = proofs.prove(model, claim, over=drawing["REGION"], limit=60)
    assert isinstance(result, proofs.Proof)
    boxes = list(drawing["parts"](result.certificates[0].trees[0].steps.tolist()))
    areas = [(right - left) * (top - bottom) for left, right, bottom, top in boxes]
    assert sum(areas) == 4  # halves are exact: nothing is left out, and nothing twice
    assert len(boxes) == result.check() > 5
