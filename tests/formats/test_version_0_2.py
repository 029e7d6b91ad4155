"""Files of version 0.2.0 are still read: models, trainings, certificates, settings and caches.

`tests/recorded/0.2/README.md` says how. All are read as a user reads them, except for the kernels
that are trusted: no command lists these.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn, ops, proofs
from tests.programs import output_of, run_python

FILES = Path(__file__).parents[1] / "recorded" / "0.2"
EXPECTED = json.loads((FILES / "expected.json").read_text())

IMAGE = nn.Chain(
    nn.Conv2d(2, 3, 3, padding=1, activation="relu"),
    nn.BatchNorm(3),
    nn.LeakyReLU(0.1),
    nn.MaxPool2d(2),
    nn.ConvTranspose2d(3, 2, 2, stride=2),
    nn.AvgPool2d(2),
    nn.Residual(nn.Conv2d(2, 2, 1, initializer=nn.Normal(0.2))),
    nn.Flatten(),
    nn.LayerNorm(18),
    nn.Dense(18, 4, initializer=nn.Scaled(2.0, "both", uniform=True), activation="tanh"),
    nn.Dense(4, 3, bias=False, initializer=nn.Uniform(0.5)),
    nn.Dropout(0.1),
    "softmax",
)
TEXT = nn.TiedEmbedding(
    11,
    8,
    nn.Chain(
        nn.PositionEmbedding(6, 8),
        nn.recompute(nn.TransformerBlock(8, 2)),
        nn.Residual(nn.GatedMLP(8, 12)),
        nn.Attention(8, 2),
        nn.RMSNorm(8),
        nn.GRU(8, 6),
        nn.LSTM(6, 8),
        nn.Dense(8, 8, initializer=nn.Constant(0.25)),
    ),
)
LOSSES = {
    "plain": nn.cross_entropy,
    "module": nn.cross_entropy,
    "certified": proofs.certified("cross_entropy", 0.05, ramp=4, low=0, high=1),
    "partial": functools.partial(ops.cross_entropy),
}
UNIT = proofs.box([-1.0, -1.0], [1.0, 1.0])
CLAIMS = {
    "narrow": proofs.within(0.1412133139371872, 0.9026457953453064),
    "steady": proofs.all_of(proofs.finite(), proofs.lipschitz(3.0)),
}


def cpu(engine: str = "numpy") -> anydevice.Device:
    return anydevice.device("cpu", engine=engine)


def command_line(*words: str | Path) -> Any:
    """Run a command, and give what it prints with --json."""
    return json.loads(output_of("-m", "anydevice", *map(str, words), "--json"))


def in_a_process(line: str) -> Any:
    """Run a line of Python where anydevice has read nothing yet, and give what it returns."""
    ended = run_python("-c", f"import json, anydevice; print(json.dumps({line}))")
    assert ended.returncode == 0, ended.stderr
    assert "is not used" not in ended.stderr
    return json.loads(ended.stdout)


# Models


@pytest.mark.parametrize(
    ("name", "layer", "x"),
    [
        ("image", IMAGE, (np.arange(72).reshape(1, 2, 6, 6) / 72).astype(np.float32)),
        ("text", TEXT, np.arange(6).reshape(1, 6)),
    ],
    ids=["image", "text"],
)
def test_a_model_has_its_layers_and_gives_what_it_gave(name: str, layer: nn.Layer, x: Any) -> None:
    model = nn.load(FILES / f"{name}.safetensors", cpu())
    assert model.layer == layer
    output = model(x).reshape(-1)[-8:]
    np.testing.assert_allclose(output, EXPECTED["models"][name], rtol=1e-4, atol=1e-6)
    assert model.frozen == ({"[0].weight", "[0].bias"} if name == "image" else set())


# Trainings


class Losses(nn.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def step(self, event: nn.TrainingEvent) -> None:
        self.found.append(event.loss())


def resumed(name: str, path: Path, loss: Any, steps: Losses) -> nn.Trained:
    """Train as make.py did, from a file."""
    x = np.random.default_rng(7).random((48, 3)).astype(np.float32)
    y = ((x[:, 0] > 0.5).astype(np.int32) + (x[:, 1] > 0.5)).astype(np.int32)
    layers = nn.Dense(3, 8), "relu", nn.Dropout(0.1), nn.Dense(8, 3)
    model: Any = nn.build(*layers, seed=6, device=cpu())
    optimizer: Any = nn.AdamW(nn.WarmUp(2, then=nn.CosineRate(0.05, 12)))
    if name == "module":
        import torch

        parts = torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Dropout(0.1)
        model = torch.nn.Sequential(*parts, torch.nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return nn.train(
        model,
        nn.Batches(x[:40], y[:40], size=8),
        optimizer,
        loss,
        epochs=4,
        device=cpu("torch"),
        accumulate=2,
        clip=1.0,
        validation=[(x[40:], y[40:])],
        patience=4,
        seed=2,
        progress=False,
        callbacks=steps,
        resume=path,
    )


@pytest.mark.parametrize("name", LOSSES)
def test_a_training_goes_on_in_the_middle_of_an_epoch(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "training.safetensors"
    shutil.copy(FILES / f"training-{name}.safetensors", path)
    with pytest.raises(anydevice.ConfigurationError, match="belongs to another training: its loss"):
        resumed(name, path, nn.mean_squared_error, Losses())
    steps, expected = Losses(), EXPECTED["trainings"][name]
    history = resumed(name, path, LOSSES[name], steps).history
    # Two of the five batches of the second epoch were used: of its three steps, two are left.
    assert len(steps.found) == 2 + 3 + 3
    np.testing.assert_allclose(steps.found, expected["steps"][4:], rtol=1e-5)
    np.testing.assert_allclose(history.losses, expected["losses"], rtol=1e-5)
    np.testing.assert_allclose(history.validations, expected["validations"], rtol=1e-5)


# Proofs


def test_the_command_line_accepts_a_certificate() -> None:
    network, theorem = FILES / "braking.onnx", FILES / "braking.vnnlib"
    found = command_line("prove", network, theorem, "--check", FILES / "braking.proof")
    assert (found["result"], found["parts"]) == ("proved", 1)


@pytest.mark.parametrize("name", CLAIMS)
def test_a_certificate_holds_for_its_model(name: str) -> None:
    model = nn.load(FILES / "proved.safetensors", cpu())
    expected = EXPECTED["proofs"][name]
    certificates = tuple((FILES / file).read_bytes() for file in expected["files"])
    claim = proofs.Claim(CLAIMS[name], UNIT, "float32", certificates)
    assert claim.check(model) == expected["parts"]


def test_claims_come_with_a_model_and_are_checked_when_it_is_compiled() -> None:
    model = nn.load(FILES / "proved.safetensors", cpu())
    first, second, third = model.properties
    assert [first.property, second.property] == list(CLAIMS.values())
    assert first.region == second.region == UNIT
    ball = proofs.ball([0.25, -0.5], 0.125, low=-1, high=1)
    assert third == proofs.claim(proofs.within(0, 1), ball, precision="real")
    layers = nn.Dense(2, 6), "relu", nn.Dense(6, 2), "sigmoid"
    with pytest.raises(anydevice.VerificationError, match="another network"):
        first.check(nn.build(*layers, seed=2, device=cpu()))
    compiled = anydevice.compile(model, cpu(), properties=model.properties)
    words = [text.partition(";")[0] for text in compiled.report.proved]
    assert [text.partition(": ")[0] for text in words] == EXPECTED["proofs"]["claims"]


# Random numbers


def test_random_numbers_go_on() -> None:
    state = json.loads((FILES / "random.json").read_text())
    numbers = anydevice.rng(state, cpu())
    assert numbers.uniform((4,)).tolist() == EXPECTED["random"]
    assert [part.uniform((2,)).tolist() for part in numbers.split(2)] == EXPECTED["split"]


# Settings and caches


@pytest.mark.needs("torch")
def test_settings_are_obeyed_and_kept_beside_a_preference(home: Path) -> None:
    shutil.copy(FILES / "anydevice.toml", home)
    found = command_line("config", "--why")
    expected = {"order": ["cpu", "cuda"], "memory": "balanced", "time_limit": 45.0, "jit": True}
    expected |= {"x64": False, "mixed_precision": False, "env": {"OMP_NUM_THREADS": "3"}}
    expected |= {"memory_fraction": None, "return_memory": True, "threads": None}
    assert found["settings"] | {"memory_fraction": None} == expected
    assert (found["engine"], found["engine_source"]) == ("torch", "user file")
    assert found["wishes"][0]["devices"] == ["cpu"]
    assert found["chosen"] == "cpu"
    anydevice.prefer("cpu", engine="numpy")
    before = (FILES / "anydevice.toml").read_text()
    assert (home / "anydevice.toml").read_text() == before.replace('"torch"', '"numpy"')


def key_here(key: str) -> str:
    """Give the key of this machine for that of a device and library of another one.

    Keys name the backend, the card, its driver, and the library with its version and folder.
    """
    backend, _, _, library = key.split(" | ")
    engine, _ = library.split(" ", 1)
    module, facts = pytest.importorskip(engine), anydevice.device(backend, engine="numpy").facts
    card = facts.uuid or facts.pci_address or f"{facts.name} 0"
    library = f"{engine} {module.__version__} in {Path(module.__file__).parent}"
    return " | ".join((backend, card, facts.driver_version or "-", library))


def put_here(name: str, home: Path) -> list[Any]:
    """Put a cache into a home, as if this machine had written it; what it has for each key."""
    kept = json.loads((FILES / name).read_text())
    here = {key_here(key): value for key, value in kept.items()}
    (home / name).write_text(json.dumps(here))
    return list(kept.values())


def test_verdicts_of_past_checks_count(home: Path) -> None:
    right, wrong = put_here("verdicts.json", home)
    device = "anydevice.device('cpu', engine='numpy')"
    found = in_a_process(f"[each.to_dict() for each in {device}.status.verdicts]")
    good, bad = sorted(found, key=lambda each: str(each["engine"]))
    why = wrong.pop("reason")
    assert right.items() <= good.items()
    assert {**wrong, "code": why["code"], "fix": why["fix"]}.items() <= bad.items()
    engines = in_a_process(f"{device}.status.engines")
    assert "numpy" in engines
    assert "torch" not in engines, "its check failed"


def test_measurements_choose_the_engine(home: Path) -> None:
    numpy, torch = put_here("measurements.json", home)
    assert sum(torch.values()) < sum(numpy.values())
    assert in_a_process("anydevice.device('cpu').engine") == "torch"
    (home / "measurements.json").unlink()
    assert in_a_process("anydevice.device('cpu').engine") == "numpy"


@pytest.mark.parametrize("name", ["verdicts.json", "measurements.json"])
def test_a_cache_of_another_machine_is_read_without_a_complaint(name: str, home: Path) -> None:
    shutil.copy(FILES / name, home)
    device = "anydevice.device('cpu')"
    assert in_a_process(f"({device}.status.verdicts, {device}.engine)") == [[], "numpy"]


def test_kernels_are_trusted_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._ops import trusted_kernels

    shutil.copy(FILES / "kernels.json", home)
    ((key, pairs),) = json.loads((FILES / "kernels.json").read_text()).items()
    monkeypatch.setattr(trusted_kernels, "_keys", lambda: {"opencl:0": key})
    trusted_kernels.forget()
    try:
        found = trusted_kernels.load_trusted()
    finally:
        trusted_kernels.forget()
    assert found == tuple((kernel, dtype, "opencl:0") for kernel, dtype in pairs)


def test_kernels_that_were_found_right_are_kept_beside_new_ones(home: Path) -> None:
    shutil.copy(FILES / "kernels.json", home)
    words = "--op add --device cpu --engine numpy --dtype float32 --save"
    command_line("verify", *words.split())
    before = json.loads((FILES / "kernels.json").read_text())
    assert before.items() <= json.loads((home / "kernels.json").read_text()).items()


def test_a_benchmark_is_shown_and_compared() -> None:
    path = FILES / "bench.json"
    found = command_line("bench", "--from", path, "--compare", path)
    comparison = found.pop("comparison")
    assert found == json.loads(path.read_text())
    assert (comparison["alike"], comparison["slower"], comparison["apart"]) == (4, [], None)
