"""Every example runs, ends well, and says what is true; some run as a command of their own.

How long each took is printed: `pytest -rP tests/examples`. On a quiet machine it is to be less than
a minute; examples/README.md has what was measured. No test fails by the clock, but for an example
that hangs: they run side by side, on machines that do other things too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.docs.sessions import Sessions
from tests.llm.conftest import data

EXAMPLES = Path(__file__).parents[2] / "examples"
ENGINES = ("torch", "jax", "mlx")
JAX_TAKES_LONG = ("torch", pytest.param("jax", marks=pytest.mark.soak), "mlx")
"""JAX compiles these examples for longer than they run; others train on it in `make test`."""
HANGS_AFTER = 300
"""Seconds: five times what an example may take."""

pytestmark = pytest.mark.timeout(HANGS_AFTER + 20)


RUN = """
import runpy, sys

sys.argv = {command!r}
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as ended:
    if ended.code:
        raise
"""
FILTERS = ("error", "ignore:using cpu")
"""Any warning other than about a missing accelerator is an error."""

Run = Callable[..., str]


@pytest.fixture
def run(sessions: Sessions, tmp_path: Path) -> Run:
    """What an example prints: `run("digits", "--device", "cpu")`.

    The engine is asked for by the option, or it is what the user of this machine prefers. An
    example runs in a session, where the libraries are loaded already, or `alone`: as a command.
    """

    def run(
        name: str,
        *options: str,
        engine: str | None = None,
        preferred: bool = False,
        alone: bool = False,
        processes: int | None = None,
        **variables: str,
    ) -> str:
        # One thread: the tests run side by side, and threads would wait for one another.
        ours = {k: v for k, v in os.environ.items() if not k.startswith("ANYDEVICE_")}
        ours |= {"ANYDEVICE_HOME": str(tmp_path), "ANYDEVICE_SEED": "1"}
        ours |= {"OMP_NUM_THREADS": "1", **variables}
        if engine is not None:
            pytest.importorskip(
                "mlx.core" if engine == "mlx" else engine, reason=f"{engine} is not installed"
            )
            if preferred:
                ours["ANYDEVICE_ENGINE"] = engine
            else:
                options = (*options, "--engine", engine)
        command = [str(EXAMPLES / f"{name}.py"), *options]
        since = time.perf_counter()
        if alone or processes:
            launch = ["-m", "anydevice", "launch", "-n", str(processes)] if processes else []
            code, said, errors = as_a_command([*launch, *command], ours, tmp_path)
        else:
            blocks = [(name, 0, RUN.format(command=command))]
            code, printed, errors = sessions.run(blocks, cwd=tmp_path, env=ours, filters=FILTERS)
            said = "".join(printed)
        print(f"examples/{name}.py {' '.join(options)}: {time.perf_counter() - since:.1f} s")
        assert code == 0, said + errors
        return said

    return run


def as_a_command(command: list[str], env: dict[str, str], cwd: Path) -> tuple[int, str, str]:
    filters = [part for each in FILTERS for part in ("-W", each)]
    ended = subprocess.run(
        [sys.executable, *filters, *command],
        capture_output=True,
        text=True,
        env=env,
        cwd=cwd,
        timeout=HANGS_AFTER,
    )
    return ended.returncode, ended.stdout, ended.stderr


def losses_of(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"\d+\.\d+", said)]


def test_every_example_has_a_test_and_the_two_options() -> None:
    tests = Path(__file__).read_text("utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'run("{path.stem}"' in tests
        assert '"--device"' in path.read_text("utf-8")
        assert '"--engine"' in path.read_text("utf-8")


@pytest.mark.parametrize("engine", ENGINES)
def test_digits_are_read(engine: str, run: Run) -> None:
    # Who prefers an engine gets it wherever none is named, also for the model that is loaded.
    preferred = engine == "torch"
    how = "default" if engine == "jax" else "none"  # JAX would compile every op by itself
    said = run("digits", "--device", "cpu", "--optimize", how, engine=engine, preferred=preferred)
    found = re.search(r"read correctly: (\d+\.\d+)% of 360 test digits", said)
    assert found is not None
    assert float(found[1]) >= 97
    assert "verified there: right: 8 parts, 6 weights read back" in said
    assert "loaded on cpu: reads as well" in said
    assert "is read as a 6" in said
    # The same on every engine: those of one more than a thousandth off would print other digits.
    assert "10 epochs: loss 0.9974 → 0.0082" in said


def test_digits_are_certified(run: Run, tmp_path: Path) -> None:
    plot = tmp_path / "shares.svg"
    options = ("--device", "cpu", "--epochs", "30", "--images", "8", "--plot", str(plot))
    said = run("certified_digits", *options, engine="torch")
    shares = {
        name: list(map(int, re.findall(rf"^{name}, each .*: (\d+)% certified", said, re.M)))
        for name in ("plain", "certified")
    }
    assert all(len(each) == 5 for each in shares.values())
    assert shares["certified"][3] >= 90  # changes of 0.06
    assert shares["certified"][4] > shares["plain"][4]
    assert all(first >= later for each in shares.values() for first, later in pairwise(each))
    assert plot.read_text("utf-8").count("<polyline") == 2


def test_digits_find_an_engine_by_themselves(run: Run) -> None:
    said = run("digits", "--epochs", "5", alone=True)
    assert "trained on" in said


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.soak)])
def test_characters_are_learned_and_written(engine: str, run: Run) -> None:
    said = run("characters", "--device", "cpu", engine=engine)
    assert "77,376" in said  # the parameters, in the table of the model
    losses = losses_of(said.partition(": losses ")[2].partition("\n")[0])
    assert len(losses) == 5
    assert losses[-1] < 1.0 < 2.0 < losses[0] < np.log(58)
    assert "\nThe Walrus and the " in said
    assert int(re.findall(r"(\d+)% of its words", said)[0]) > 50


@pytest.mark.parametrize("engine", ["numpy", *ENGINES])
def test_three_blocks_on_two_devices(engine: str, run: Run) -> None:
    said = run("three_blocks", "--device", "cpu", engine=engine)
    assert "1. prepared on cpu: 1,797 images" in said
    library = "jaxlib" if engine == "jax" else engine
    assert f"with {engine}: (1797, 1797) numbers, by {library}" in said
    assert re.search(r"3\. evaluated on cpu: 9[5-9]\.\d% of the images", said)


def test_three_blocks_on_opencl(run: Run) -> None:
    pytest.importorskip("pyopencl", reason="pyopencl is not installed")
    said = run("three_blocks", "--device", "opencl")
    assert "2. computed on opencl:0 with opencl" in said


@pytest.mark.parametrize(("engine", "kind"), [("torch", "torch.nn"), ("jax", "flax.nnx")])
def test_a_model_of_another_library_is_brought_along(engine: str, kind: str, run: Run) -> None:
    pytest.importorskip("flax", reason="flax is not installed")
    how = "none" if engine == "torch" else "default"  # PyTorch's compiler takes half a minute
    said = run("bring_your_own", "--device", "cpu", "--optimize", how, engine=engine)
    assert f"model      {kind}.Module" in said
    assert f"device     cpu, {engine}" in said
    assert "4 weights read back" in said
    assert "holds: shares_add_up" in said
    assert "the property is_certain does not hold" in said


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to a limit")
@pytest.mark.parametrize("engine", ["numpy", "torch", "jax"])
def test_running_out_of_memory_on_the_cpu(engine: str, run: Run) -> None:
    said = run("out_of_memory", "--device", "cpu", engine=engine, alone=True)
    assert "cpu is out of memory" in said
    assert "find_batch_size" in said
    assert "one text still gives the same result" in said
    assert 1 <= int(re.findall(r"(\d+) texts at once, of 64", said)[0]) < 64
    assert "this is the CPU already" in said


def test_running_out_of_memory_on_a_device(run: Run) -> None:
    pytest.importorskip("pyopencl", reason="pyopencl is not installed")
    said = run("out_of_memory", "--device", "opencl", alone=True)
    assert "attended() runs on the CPU: opencl:0 is out of memory" in said
    assert "the result of 64 texts is on cpu" in said


@pytest.mark.parametrize("engine", JAX_TAKES_LONG)
def test_a_training_is_set_up(engine: str, run: Run) -> None:
    said = run("training_setup", "--device", "cpu", engine=engine)
    assert "25,793 parameters need 0.4 MiB: cpu has that much free" in said
    assert "a batch of 64 fits" in said
    assert "19 layers recompute their activations" in said
    assert "resumed: the parameters differ by 0.0e+00" in said
    losses = losses_of(said.partition("losses on cpu: ")[2])
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("engine", JAX_TAKES_LONG)
def test_precision_is_mixed(engine: str, run: Run) -> None:
    said = run("mixed_precision", "--device", "cpu", engine=engine)
    trained, used = said.split("\n\n")
    assert re.search(r"^mixed +\d\.\d+ +float32 +9\d\.\d%$", trained, re.MULTILINE)
    rows = dict(re.findall(r"^(\w+) +(\d+\.\d) +KiB +9\d\.\d%", used, re.MULTILINE))
    assert rows == {"float32": "51.2", "mixed": "51.2", "bfloat16": "25.6", "float16": "25.6"}


@pytest.mark.parametrize(
    "engine", ["torch", *[pytest.param(name, marks=pytest.mark.soak) for name in ("jax", "mlx")]]
)
def test_a_resnet_names_shapes(engine: str, run: Run) -> None:
    said = run("resnet", "--device", "cpu", engine=engine)
    assert "78,259  305.7 KiB  77,587 trained, 672 state" in said
    assert "verified there: right: 35 parts, 47 weights read back" in said
    assert float(re.findall(r"named correctly: (\d+\.\d)%", said)[0]) >= 95
    assert float(re.findall(r"an image differs by (\S+)", said)[0]) < 1e-4
    assert "saved and loaded: the statistics are the same" in said


@pytest.mark.parametrize("layer", ["lstm", pytest.param("gru", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "engine", ["torch", *[pytest.param(name, marks=pytest.mark.soak) for name in ("jax", "mlx")]]
)
def test_waves_are_told_apart(engine: str, layer: str, run: Run) -> None:
    said = run("waves", "--device", "cpu", "--layer", layer, engine=engine)
    assert "verified there: right: 2 parts, 6 weights read back" in said
    found = re.findall(r"named correctly: (\d+\.\d)% of 256 waves of (\d+) steps", said)
    assert [steps for _, steps in found] == ["48", "96"]
    assert min(float(share) for share, _ in found) >= 90
    assert "is a saw" in said


@pytest.mark.parametrize("engine", JAX_TAKES_LONG)
def test_prices_of_a_table_are_learned(engine: str, run: Run) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    said = run("prices", "--device", "cpu", engine=engine)
    assert "1,393 trained, 16 state" in said
    assert len(re.findall(r"^(harbor|hills|old town|station) .*\d\.\d%$", said, re.M)) == 4
    assert float(re.findall(r"held out: (\d+\.\d)%", said)[0]) <= 8


def test_one_script_trains_on_one_device_on_eight_and_in_two_processes(run: Run) -> None:
    eight = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    place = ("--device", "cpu")
    ways = {
        "": run("several_devices", *place, engine="torch"),
        "8 devices, replicate: ": run("several_devices", *place, engine="jax", **eight),
        "2 processes, replicate: ": run("several_devices", *place, engine="torch", processes=2),
    }
    curves = [losses_of(said.partition("\nlosses ")[2]) for said in ways.values()]
    assert [len(curve) for curve in curves] == [3, 3, 3]
    np.testing.assert_allclose(curves[1:], [curves[0]] * 2, rtol=0, atol=1e-6)
    for how, said in ways.items():
        assert how in said
    assert "devices" not in ways[""]


def test_the_digits_are_all_there() -> None:
    with np.load(EXAMPLES / "data/digits.npz") as file:
        images, labels = file["images"], file["labels"]
    assert images.shape == (1797, 8, 8)
    assert images.max() == 16
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


@pytest.mark.parametrize("engine", ["numpy", pytest.param("jax", marks=pytest.mark.soak)])
def test_a_model_talks(engine: str, run: Run) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers are not installed")
    folder = data("stories260K")
    said = run("chat", str(folder), "--device", "cpu", engine=engine)
    assert f"stories260K on cpu with {engine}" in said
    assert re.search(r"\[40 tokens, \d+ tokens/s\]", said)
    assert "Once upon a time …', there was a" in said
    likely, unlikely = (float(found) for found in re.findall(r"perplexity +([\d.]+)", said))
    assert likely < unlikely
