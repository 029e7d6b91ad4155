"""Files that a version wrote are read by every later one: models, trainings, settings and caches.

A new format gets a folder of its own, and the old ones stay:
`python tests/formats/test_recorded_files.py tests/recorded/saved/<name>` writes one.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import nn
from anydevice._core.finding import Reason, Verdict
from anydevice._machine.choose import measurements
from anydevice._machine.discovery.check import keep_verdict, read_verdicts
from anydevice._machine.settings.config import forget_files
from anydevice._machine.settings.files import verdicts_file

SAVED = Path(__file__).parents[1] / "recorded" / "saved"
FORMATS = sorted(path.parent.name for path in SAVED.glob("*/expected.json"))
assert FORMATS, "the files of this version are kept"

MODELS: dict[str, tuple[nn.Layer, tuple[int, ...]]] = {
    "image": (
        nn.Chain(
            nn.Conv2d(1, 2, 3, padding=1, activation="relu"),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.LayerNorm(32),
            nn.Dense(32, 3, initializer=nn.Scaled(2.0, "both", uniform=True)),
        ),
        (1, 8, 8),
    ),
    "language": (
        nn.TiedEmbedding(
            11,
            8,
            nn.Chain(
                nn.PositionEmbedding(6, 8),
                nn.TransformerBlock(8, 2),
                nn.RMSNorm(8),
                nn.GatedMLP(8, 12),
                nn.Dropout(0.1),
            ),
        ),
        (6,),
    ),
}
X = np.linspace(-1, 1, 48, dtype=np.float32).reshape(12, 4)
VERDICT = Verdict("cpu", "numpy", False, Reason("wrong_answer", "off by one", None), 0.5)
SETTINGS = (
    '# kept\ndevice = ["cuda", "cpu"]\nengine = "numpy"\norder = ["cpu"]\nmemory = "balanced"\n'
    'x64 = false\njit = true\nmixed_precision = false\n[env]\nOMP_NUM_THREADS = "3"\n'
)


def cpu(engine: str = "numpy") -> Any:
    return anydevice.device("cpu", engine=engine)


def example(shape: tuple[int, ...]) -> Any:
    numbers = np.arange(np.prod(shape)).reshape(1, *shape)
    return numbers % 11 if len(shape) == 1 else (numbers / 64).astype(np.float32)


def trained(precision: str, **options: Any) -> nn.Trained:
    data = nn.Batches(X, X[:, :2], size=4)
    return nn.train(
        nn.Model(nn.Chain(nn.Dense(4, 3), "tanh", nn.Dense(3, 2)), device=cpu()),
        data,
        nn.AdamW(nn.WarmUp(2, then=1e-2)),
        nn.mean_squared_error,
        device=cpu("torch"),
        precision=precision,
        validation=[(X, X[:, :2])],
        patience=3,
        optimize="none",
        progress=False,
        **options,
    )


def record(folder: Path) -> None:
    """Write the files of this version, and what must come of them."""
    folder.mkdir(parents=True)
    expected: dict[str, Any] = {"outputs": {}, "validations": {}}
    for name, (layer, shape) in MODELS.items():
        model = nn.Model(layer, shape, seed=3, device=cpu())
        nn.save(model, folder / f"{name}.safetensors")
        expected["outputs"][name] = model(example(shape)).reshape(-1)[-8:].tolist()
    for precision in ("float32", "float16"):
        path = folder / f"{precision}.safetensors"
        trained(precision, epochs=2, save=path)
        expected["validations"][precision] = trained(precision, epochs=4).history.validations
    (folder / "anydevice.toml").write_text(SETTINGS)
    keep_verdict("device | driver | library", VERDICT)
    measurements.keep_measurements({"device | driver | library": {"add": 0.25}})
    for name in ("verdicts.json", "measurements.json"):
        shutil.copy(verdicts_file().with_name(name), folder)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMATS)
def test_a_recorded_model_gives_what_it_gave(form: str, name: str) -> None:
    expected = json.loads((SAVED / form / "expected.json").read_text())["outputs"][name]
    model = nn.load(SAVED / form / f"{name}.safetensors", cpu())
    assert model.layer == MODELS[name][0]
    output = model(example(MODELS[name][1])).reshape(-1)[-8:]
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


def test_models_of_0_1_give_what_they_gave() -> None:
    expected = [-1.9233421, 3.8391774, -1.2415617, -0.3851356, 1.4257076, 0.1615032, 0.9821529]
    model = nn.load(SAVED / "0.1" / "transformer.safetensors", cpu())
    output = model(np.array([[1, 2, 3, 4, 0]]))
    np.testing.assert_allclose(output[0, -1], expected, rtol=1e-4, atol=1e-5)
    model = nn.load(SAVED / "0.1" / "image.safetensors", cpu())
    output = model(np.ones((1, 1, 8, 8), np.float32))
    np.testing.assert_allclose(output, [[0.2007261, -0.0358380, 0.5429143]], rtol=1e-4, atol=1e-5)


def test_a_training_of_0_1_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "training.safetensors"
    shutil.copy(SAVED / "0.1" / "training.safetensors", path)
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)

    def resumed(**options: Any) -> nn.Trained:
        model = nn.build(nn.Dense(2, 3), "tanh", nn.Dense(3, 1), device="cpu")
        adam, batches = nn.AdamW(nn.WarmUp(2, then=1e-2)), nn.Batches(x, x[:, :1], size=4)
        given = {"validation": [(x, x[:, :1])], "patience": 3, "device": cpu("torch"), **options}
        return nn.train(model, batches, adam, nn.mean_squared_error, resume=path, **given)

    history = resumed(epochs=4, optimize="none").history
    assert resumed(epochs=2).report.optimize == "default", "trainings were always compiled then"
    assert len(history) == 4
    np.testing.assert_allclose(history.validations[:2], [0.8197739, 0.7283694], rtol=1e-5)
    assert history.validations[-1] < 0.6


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_recorded_training_goes_on(tmp_path: Path, form: str, precision: str) -> None:
    pytest.importorskip("torch")
    expected = json.loads((SAVED / form / "expected.json").read_text())["validations"][precision]
    path = tmp_path / "run.safetensors"
    shutil.copy(SAVED / form / f"{precision}.safetensors", path)
    found = trained(precision, epochs=4, resume=path).history.validations
    np.testing.assert_allclose(found, expected, rtol=1e-3 if precision == "float16" else 1e-5)


@pytest.mark.parametrize("form", FORMATS)
def test_recorded_settings_are_used(home: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    for name in ("anydevice.toml", "verdicts.json", "measurements.json"):
        shutil.copy(SAVED / form / name, home)
    forget_files()
    config = anydevice.configure()
    found = (config.order, config.memory, config.x64, config.jit)
    assert found == (("cpu",), "balanced", False, True)
    assert dict(config.env) == {"OMP_NUM_THREADS": "3"}
    assert anydevice.device().chosen_by == "user file"
    anydevice.prefer("cpu")
    assert (home / "anydevice.toml").read_text().startswith("# kept\n")
    assert read_verdicts() == {"device | driver | library": VERDICT}
    assert measurements.read_measurements() == {"device | driver | library": {"add": 0.25}}


if __name__ == "__main__":
    record(Path(sys.argv[1]))
