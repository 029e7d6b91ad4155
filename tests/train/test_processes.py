"""A list of devices with PyTorch: `nn.train` starts a process for each, and gives back its result.

The functions here are imported by these processes; what they compute is written to files.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import (
    AnyDeviceError,
    ConfigurationError,
    DeviceNotFoundError,
    UnsupportedError,
    nn,
    parallel,
    testing,
)
from anydevice._core.trees import leaves
from tests.comparing import assert_close
from tests.programs import run_python

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("children_count_lines")

TWO = ["cpu:0", "cpu:1"]
_numbers = np.random.default_rng(0)
X = _numbers.standard_normal((102, 8)).astype(np.float32)  # the last batch has two rows
Y = _numbers.integers(0, 3, 102)


class Net(torch.nn.Module):  # type: ignore[misc]
    """A module that notes the rows that its process computes gradients of."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.folder = folder
        self.inner = torch.nn.Linear(8, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.outer = torch.nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        if torch.is_grad_enabled():
            with (self.folder / f"rows{os.environ.get('RANK', '')}").open("a") as file:
                file.write(f"{len(x)} ")
        return self.outer(torch.dropout(self.norm(self.inner(x)), 0.1, self.training))


def cross_entropy(output: Any, y: Any) -> Any:
    if output.shape[0] < 20 and os.environ.get("RANK") == os.environ.get("TEST_FAILING_RANK", ""):
        raise ValueError("boom")
    return torch.nn.functional.cross_entropy(output, y.long())


def train_module(model: Any, seen: list[Any], **options: Any) -> tuple[nn.Trained, Any, Any]:
    torch.manual_seed(2)
    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    loader = torch.utils.data.DataLoader(rows, 50, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    class Seeing(nn.Callback):
        def step(self, event: Any) -> None:
            if event.steps == 2:
                seen.append((event.epoch, event.loss()))

        def epoch(self, event: Any) -> None:
            seen.append((event.ended.steps, event.model() is model, model.outer.bias[0].item()))
            if event.epoch == 3:
                event.stop()

    trained = nn.train(
        model, loader, optimizer, cross_entropy, epochs=5, clip=0.5, schedule=schedule,
        validation=nn.Batches(X, Y, size=40), metrics="accuracy", callbacks=Seeing(),
        progress=False, **options,
    )  # fmt: skip
    return trained, optimizer, schedule


def apart(one: nn.Trained, several: nn.Trained) -> float:
    """Return the largest difference of two curves."""
    pairs = [(one.history.losses, several.history.losses)]
    pairs.append((one.history.validations, several.history.validations))
    return max(abs(a - b) for p, q in pairs for a, b in zip(p, q, strict=True))


@pytest.fixture(autouse=True)
def all_processes_end() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def test_a_module_is_trained_in_place_as_by_one_device(tmp_path: Path) -> None:
    """With shuffled data, dropout, a schedule and callbacks; uneven rows are computed in parts."""
    results = []
    for places in ({"device": "cpu"}, {"devices": TWO}):
        model, seen = Net(tmp_path).eval(), list[Any]()
        trained, optimizer, schedule = train_module(model, seen, **places)
        assert trained.model is model
        assert model.training
        counts = int(optimizer.state[model.outer.bias]["step"]), schedule.last_epoch
        results.append((trained, seen, counts, [*model.parameters()], torch.rand(1)))
    one, several = results
    assert apart(one[0], several[0]) <= 1e-6
    assert several[0].stopped == "a callback"
    accuracies = [run[0].history.metrics["accuracy"] for run in (several, one)]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.01)  # of one row at most
    assert several[0].report is not None
    assert str(several[0].report.spread).startswith("2 processes, replicate: ")
    for a, b in zip(one[1], several[1], strict=True):
        assert a[:-1] == b[:-1]
        assert abs(a[-1] - b[-1]) <= 1e-6
    assert one[2] == several[2] == (9, 9)
    for a, b in zip(one[3], several[3], strict=True):
        assert_close(b.detach().numpy(), a.detach().numpy(), terms=512)
    assert one[4] == several[4], "the random numbers go on as after one device"
    assert (tmp_path / "rows").read_text().split() == ["50", "50", "2"] * 3
    for rank in "01":
        assert (tmp_path / f"rows{rank}").read_text().split() == ["25", "25", "1"] * 3


def test_a_model_of_torch_is_trained_by_torch_and_saved(tmp_path: Path) -> None:
    """JAX has three devices in these tests, and would train it, too."""
    here = anydevice.device("cpu", engine="torch")

    def train(**options: Any) -> nn.Trained:
        model = nn.build(
            nn.Dense(8, 16), "gelu", nn.Dropout(0.1), nn.Dense(16, 3), seed=1, device=here
        )
        data, rate = nn.Batches(X, Y, size=25), nn.CosineRate(1e-2, steps=9)
        return nn.train(
            model, data, nn.AdamW(1e-2), "cross_entropy", seed=3, accumulate=2, schedule=rate,
            validation=0.2, optimize="none", progress=False, **options,
        )  # fmt: skip

    one, path = train(epochs=3, device=here), tmp_path / "half.safetensors"
    several = train(epochs=2, devices=TWO, strategy="shard", save=path, patience=2)
    assert several.report is not None
    assert (several.report.engine, several.report.device) == ("torch", here)
    assert str(several.report.spread).startswith("2 processes, shard: as asked")
    assert all(type(x) is torch.Tensor for x in leaves(several.model.parameters))
    rest = train(epochs=3, device=here, resume=path)
    assert rest.history[0] == several.history[0]
    assert apart(one, rest) <= 1e-6


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_all_with_its_signal(tmp_path: Path, rank: int) -> None:
    killed = []

    def kill(event: Any) -> None:
        children = multiprocessing.active_children()
        sorted(children, key=lambda each: int(each.pid or 0))[rank].kill()
        killed.append(time.monotonic())

    words = rf"(?s)process {rank} of 2 failed:.*\(SIGKILL\)"
    with pytest.raises(AnyDeviceError, match=words):
        nn.train(
            Net(tmp_path), nn.Batches(X, Y, size=50), nn.AdamW(1e-2), cross_entropy,
            epochs=10_000, callbacks=kill, devices=TWO, progress=False,
        )  # fmt: skip
    assert time.monotonic() - killed[0] < 10
    assert multiprocessing.active_children() == []


def test_an_error_of_a_process_is_raised_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_FAILING_RANK", "1")
    with pytest.raises(ValueError, match="boom") as raised:
        train_module(Net(tmp_path), [], devices=TWO)
    assert isinstance(raised.value.__cause__, AnyDeviceError)
    lines = str(raised.value.__cause__).splitlines()
    assert (lines[0], lines[-1]) == ("process 1 of 2 failed:", "ValueError: boom")


TORCH, *JAX = (anydevice.Device("cpu", engine=engine) for engine in ("torch", "jax"))
CARDS = ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("engine", "devices", "options", "error", "words"),
    [
        ("torch", ["cpu:0", "cpu:1", "cpu:0"], {}, ConfigurationError, "twice: cpu, cpu:1, cpu"),
        ("torch", "cpu:0, cpu:1, cpu:0", {}, ConfigurationError, "twice: cpu, cpu:1, cpu"),
        ("torch", ["cuda:0", "cuda:7"], {}, DeviceNotFoundError, "no cuda:7"),
        ("torch", ["cpu", *CARDS], {"strategy": "shard"}, ConfigurationError, "several kinds"),
        ("torch", [*JAX, TORCH, *JAX], {}, UnsupportedError, "3 devices in one process need JAX"),
        ("torch", TWO, {"epochs": 0}, ConfigurationError, "epochs must be"),
        ("torch", TWO, {"callbacks": 3}, ConfigurationError, "a callback is"),
        ("torch", TWO, {"data": ((X, Y) for _ in "1")}, ConfigurationError, "data= cannot be sent"),
        ("mlx", TWO, {}, UnsupportedError, "mlx drives one device a process"),
    ],
)
def test_a_list_that_cannot_be_trained_on_is_refused(
    engine: str, devices: Any, options: dict[str, Any], error: Any, words: str
) -> None:
    pytest.importorskip("mlx.core" if engine == "mlx" else engine)
    model = nn.build(nn.Dense(8, 3), device=anydevice.device("cpu", engine=engine))
    given = {"data": nn.Batches(X, Y, size=50), "epochs": 1, "loss": cross_entropy, **options}
    with testing.fake_machine(cuda=2), pytest.raises(error, match=words):
        nn.train(model, optimizer=nn.SGD(0.1), devices=devices, **given)


def test_no_other_engine_and_no_other_process_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    data, module = nn.Batches(X, Y, size=50), torch.nn.Linear(8, 3)
    model = nn.build(nn.Dense(8, 3), device=TORCH)
    rest = nn.SGD(0.1), data, cross_entropy
    words = "torch trains this model, and jax drives devices="
    with pytest.raises(UnsupportedError, match="torch drives one device a process"):
        nn.Training(module, *rest, devices=TWO)
    with pytest.raises(ConfigurationError, match=words):
        nn.Training(module, *rest, devices=JAX)
    with pytest.raises(ConfigurationError, match=words):
        nn.Training(model, *rest, devices=parallel.Mesh(TWO))
    with pytest.raises(ConfigurationError, match="devices=: '3' does not name a device"):
        nn.train(module, data, nn.SGD(0.1), cross_entropy, epochs=1, devices=["cpu:0", 3])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="this is one of several processes"):
        nn.train(module, data, nn.SGD(0.1), cross_entropy, epochs=1, devices=TWO)


SCRIPT = """
import os, signal, sys
import numpy as np, torch
from anydevice import nn

print("imported")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.inner(x)

def loss(output, y):
    return torch.nn.functional.cross_entropy(output, y.long())

def interrupt(event):
    if event.epoch == 2:
        os.kill(os.getpid(), signal.SIGINT)

def main(**options):
    x = np.ones((10, 8), "float32")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trained = nn.train(Net(), [(x, x[:, 0])], nn.SGD(0.1), loss, epochs=10_000, progress=False,
                       callbacks=interrupt, devices=["cpu:0", "cpu:1"], **options)
    print(trained.stopped, len(trained.history) < 10_000)

"""
GUARD = "if __name__ == '__main__':\n    "
WITHOUT_CLOUDPICKLE = "sys.modules['cloudpickle'] = None\n"


def test_a_script_is_imported_for_its_classes_and_ctrl_c_stops_all(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + WITHOUT_CLOUDPICKLE + GUARD + "main()\n")
    done = run_python("train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["imported"] * 3 + ["Ctrl-C", "True"]
    assert done.stderr.count("stopped by Ctrl-C") == 1, done.stderr


def test_a_notebook_sends_its_functions_by_cloudpickle() -> None:
    pytest.importorskip("cloudpickle")
    done = run_python("-c", SCRIPT + "main()\n")  # a main module that no file defines
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["imported", "Ctrl-C", "True"]


CLASS = r"model= cannot .* \(it is defined in the main program.*run: pip install cloudpickle"
LAMBDA = "schedule= cannot be sent .*pip install cloudpickle, or .*`anydevice launch -n 2 train.py`"
UNGUARDED = "this is one of several .* put the training under `if __name__ == .__main__.:`"


@pytest.mark.parametrize(
    ("file", "end", "words"),
    [
        (False, "main()", CLASS),
        (True, GUARD + "main(schedule=lambda step: 0.1)", LAMBDA),
        (True, "main()", UNGUARDED),
    ],
)
def test_what_cannot_be_sent_or_imported_is_named(
    file: bool, end: str, words: str, tmp_path: Path
) -> None:
    program = SCRIPT + WITHOUT_CLOUDPICKLE + end
    (tmp_path / "train.py").write_text(program)
    done = run_python(*(["train.py"] if file else ["-c", program]), cwd=tmp_path)
    assert done.stdout.split() == ["imported"] * (3 if words == UNGUARDED else 1)
    text = done.stderr.splitlines()[-1]
    assert re.search(f"^anydevice.errors.ConfigurationError: {words}", text), done.stderr
