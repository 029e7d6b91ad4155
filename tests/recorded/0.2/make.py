"""Wrote the files of this folder; it was run with anydevice 0.2.0, and stays as it was.

`python make.py EXAMPLES FOLDER` writes them into FOLDER, with the network and the property that are
in EXAMPLES. It needs PyTorch and an OpenCL device. The folders of libraries, which are a part of
the keys of caches, are replaced by made-up ones, and the check that failed is made up.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from anydevice.discovery.check import keep_verdict, key_of

import anydevice
from anydevice import nn, ops, proofs
from anydevice.core.finding import Reason, Verdict

SETTINGS = """# kept
order = ["cpu", "cuda"]
memory = "balanced"
x64 = false
jit = true
mixed_precision = false
time_limit = 45

[env]
OMP_NUM_THREADS = "3"
"""
MADE_UP = "/home/user/.venv/lib/python3.11/site-packages"

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


def cpu(engine: str = "numpy") -> Any:
    return anydevice.device("cpu", engine=engine)


def write_models(folder: Path, expected: dict[str, Any]) -> None:
    """Write models with nearly all kinds of layers, one of them with frozen parameters."""
    inputs = {
        "image": (np.arange(72).reshape(1, 2, 6, 6) / 72).astype(np.float32),
        "text": np.arange(6).reshape(1, 6),
    }
    image = nn.Model(IMAGE, (2, 6, 6), seed=3, device=cpu())
    models = {
        "image": image.freeze("[0]*"),
        "text": nn.Model(TEXT, (6,), seed=4, device=cpu()),
    }
    for name, model in models.items():
        nn.save(model, folder / f"{name}.safetensors")
        expected[name] = model(inputs[name]).reshape(-1)[-8:].tolist()


def write_proofs(folder: Path, expected: dict[str, Any]) -> None:
    """Write a model with two claims, the certificates of the claims, and that of a network."""
    model = nn.build(nn.Dense(2, 6), "relu", nn.Dense(6, 2), "sigmoid", seed=1, device=cpu())
    unit = proofs.box([-1.0, -1.0], [1.0, 1.0])
    reached = model(np.random.default_rng(0).random((1000, 2), np.float32) * 2 - 1)
    narrow = proofs.within(float(reached.min()) - 0.03, float(reached.max()) + 0.03)
    steady = proofs.all_of(proofs.finite(), proofs.lipschitz(3.0))
    claims = []
    for name, claim in (("narrow", narrow), ("steady", steady)):
        found = proofs.prove(model, claim, over=unit, limit=60)
        assert isinstance(found, proofs.Proof), found
        files = [path.name for path in found.save(folder / f"{name}.proof")]
        expected[name] = {"files": files, "parts": found.check(), "claim": repr(claim)}
        claims.append(proofs.claim(claim, unit, proof=found))
    ball = proofs.ball([0.25, -0.5], 0.125, low=-1, high=1)
    claims.append(proofs.claim(proofs.within(0, 1), ball, precision="real"))
    nn.save(model.with_properties(*claims), folder / "proved.safetensors")
    expected["claims"] = [str(claim) for claim in claims]
    network = ["braking.onnx", "braking.vnnlib", "--certificate", "braking.proof"]
    command_line("prove", *(str(folder / each) if "." in each else each for each in network))


def losses() -> dict[str, Any]:
    """Give losses of our own: functions, one inside of a record, and one inside of a partial."""
    return {
        "plain": nn.cross_entropy,
        "module": nn.cross_entropy,
        "certified": proofs.certified("cross_entropy", 0.05, ramp=4, low=0, high=1),
        "partial": functools.partial(ops.cross_entropy),
    }


class Losses(nn.Callback):
    """Keeps the loss of each step, and ends the training with an error after some."""

    def __init__(self, end: int | None = None) -> None:
        self.end, self.found = end, []

    def step(self, moment: nn.Moment) -> None:
        self.found.append(moment.loss())
        if moment.steps == self.end:
            raise KeyboardInterrupt


def train(name: str, loss: Any, steps: Losses, **options: Any) -> nn.Trained:
    x = np.random.default_rng(7).random((48, 3)).astype(np.float32)
    y = ((x[:, 0] > 0.5).astype(np.int32) + (x[:, 1] > 0.5)).astype(np.int32)
    layers = nn.Dense(3, 8), "relu", nn.Dropout(0.1), nn.Dense(8, 3)
    model: Any = nn.build(*layers, seed=5, device=cpu())
    optimizer: Any = nn.AdamW(nn.WarmUp(2, then=nn.CosineRate(0.05, 12)))
    if name == "module":
        torch.manual_seed(5)
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
        optimize="none",
        accumulate=2,
        clip=1.0,
        validation=[(x[40:], y[40:])],
        patience=4,
        seed=2,
        progress=False,
        callbacks=steps,
        **options,
    )


def write_trainings(folder: Path, expected: dict[str, Any]) -> None:
    """Write trainings that ended after the first of three steps of their second epoch."""
    for name, loss in losses().items():
        path = folder / f"training-{name}.safetensors"
        try:
            train(name, loss, Losses(end=5), save=path, save_every=2, resume=False)
        except KeyboardInterrupt:
            pass
        steps = Losses()
        history = train(name, loss, steps).history
        expected[name] = {
            "losses": history.losses,
            "validations": history.validations,
            "steps": steps.found,
        }


def write_random(folder: Path, expected: dict[str, Any]) -> None:
    """Write the state of random numbers."""
    numbers = anydevice.rng(8, cpu())
    numbers.normal((3,))
    (folder / "random.json").write_text(json.dumps(numbers.state) + "\n")
    expected["random"] = numbers.uniform((4,)).tolist()
    expected["split"] = [part.uniform((2,)).tolist() for part in numbers.split(2)]


def write_home(folder: Path) -> None:
    """Write the files of a home: settings, past checks, kernels, measurements; and a benchmark."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        os.environ["ANYDEVICE_HOME"] = name
        (home / "anydevice.toml").write_text(SETTINGS)
        command_line("prefer", "cpu", "--engine", "torch")
        shutil.copy(home / "anydevice.toml", folder)
        (home / "anydevice.toml").unlink()
        bench = "--quick --limit 1 --op gelu,softmax --device cpu --engine numpy,torch"
        bench += " --dtype float32 --save --json"
        command_line("bench", *bench.split(), str(folder / "bench.json"))
        kernels = "--device opencl --op rmsnorm,softmax --dtype float32 --save"
        command_line("verify", *kernels.split())
        device = anydevice.device("cpu")
        device.check("numpy")
        wrong = Reason("wrong_answer", "wrong answer: off by 1", "install another one")
        facts = device.facts
        keep_verdict(
            key_of("cpu", 0, facts, "torch"), Verdict("cpu", "torch", False, wrong, 0.5, 0.25, 0.1)
        )
        installed = str(Path(np.__file__).parents[1])
        for name in ("measurements.json", "kernels.json", "verdicts.json"):
            text = (home / name).read_text()
            (folder / name).write_text(text.replace(installed, MADE_UP))


def command_line(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "anydevice", *words], check=True)


def main(inputs: Path, folder: Path) -> None:
    assert anydevice.__version__ == "0.2.0"
    folder.mkdir(exist_ok=True)
    for name in ("braking.onnx", "braking.vnnlib"):
        shutil.copy(inputs / name, folder)
    expected: dict[str, Any] = {name: {} for name in ("models", "proofs", "trainings")}
    write_models(folder, expected["models"])
    write_proofs(folder, expected["proofs"])
    write_trainings(folder, expected["trainings"])
    write_random(folder, expected)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    write_home(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
