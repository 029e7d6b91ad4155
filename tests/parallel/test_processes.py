"""Joining processes: which library they compute with, and which cards are theirs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from anydevice import device, parallel, testing
from anydevice._parallel.processes import Launched, _take_own_cards, launched
from anydevice.errors import UnsupportedError
from tests.programs import run_python

TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_python("-W", "ignore", "-c", program, env=variables, limit=100)


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("one_of_two")
def test_engines_without_collectives_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="numpy do not compute together"):
        parallel.initialize("cpu", engine="numpy")
    monkeypatch.setenv("ANYDEVICE_ENGINE", "numpy")
    with pytest.raises(UnsupportedError) as seen:
        parallel.initialize("cpu")
    assert seen.value.absent is not None
    assert seen.value.absent.code == "no_collectives"
    assert "torch, jax or mlx" in seen.value.absent.instead


@pytest.mark.usefixtures("one_of_two")
def test_a_ring_that_nobody_described_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx.core")
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    with pytest.raises(UnsupportedError, match="anydevice launch --engine mlx"):
        parallel.initialize("cpu", engine="mlx")


def test_the_variables_of_a_ring_are_understood(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text('[["10.0.0.1:5000"], ["10.0.0.2:5000"], ["10.0.0.3:5000"]]')
    found = launched({"MLX_RANK": "2", "MLX_HOSTFILE": str(file)})
    assert found is not None
    assert (found.rank, found.size) == (2, 3)


def test_jax_that_has_computed_cannot_join_others() -> None:
    pytest.importorskip("jax")
    program = (
        "import jax; jax.numpy.ones(2).block_until_ready()\n"
        "from anydevice import parallel; parallel.initialize('cpu', engine='jax')"
    )
    done = run(program, **TWO)
    assert done.returncode == 1
    assert "ConfigurationError: JAX has already started its devices" in done.stderr


@pytest.mark.parametrize(
    ("before", "local", "here", "after"),
    [
        (None, 1, 2, "2,3"),
        (None, 3, 4, "3"),
        ("4,5,6,7", 1, 2, "6,7"),
        (None, 0, 1, None),
        (None, 5, 8, None),
    ],
)
def test_jax_sees_its_share_of_the_cards(before: Any, local: int, here: int, after: Any) -> None:
    with testing.fake_machine(cuda=4, engines=["jax"]), mock.patch.dict(os.environ):
        place = device("cuda:0", engine="jax")
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ.update({"CUDA_VISIBLE_DEVICES": before} if before else {})
        _take_own_cards(place, Launched(local, here, local, here, "127.0.0.1", 1))
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == after


def test_one_process_of_jax_has_all_its_devices_where_jax_is_asked_for() -> None:
    pytest.importorskip("jax")
    program = (
        "from anydevice import parallel\n"
        "def sizes(**options): return [parallel.initialize(place, **options).size\n"
        "                              for place in ('cpu', 'cpu:1', None)]\n"
        "print(sizes(), sizes(engine='jax'))"
    )
    flags = "--xla_force_host_platform_device_count=4"
    done = run(program, XLA_FLAGS=flags, ANYDEVICE_DEVICE="cpu")
    assert done.stdout.strip() == "[1, 1, 1] [4, 1, 4]", done.stderr[-2000:]
