"""Arrays that are joined from stored tensors, in host memory and through staging buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from anydevice import device
from anydevice._arrays.stage import Ring
from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES
from anydevice._formats import load as loading
from anydevice._formats.load import Joined, OpenFiles, Segment, place
from anydevice._formats.safetensors import read_header
from anydevice._machine.engines import registry
from anydevice.errors import TransferError
from tests.arrays.test_stage import HostCopier
from tests.comparing import assert_same_bits

CUDA, CPU = Device("cuda"), Device("cpu", engine="numpy")


class HostEngine:
    """An engine whose device has the memory of the host; what it makes is counted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.made: list[int] = []

    def empty(self, shape: Any, dtype: Any, _: Device) -> Any:
        array = np.full(shape, 77, dtype.numpy())
        self.made.append(array.nbytes)
        return array

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def place(self, host: Any, _: Device) -> Any:
        raise AssertionError("it goes through the ring")


@pytest.fixture
def parts(tmp_path: Path) -> tuple[list[Segment], Any]:
    """Three matrices in two files, the middle one turned; and all of them in one."""
    dice = np.random.default_rng(1)
    q = dice.standard_normal((700, 512)).astype(np.float32)
    k = dice.standard_normal((512, 300)).astype(ml_dtypes.bfloat16)
    v = dice.standard_normal((301, 512)).astype(np.float16)
    save_file({"pad": np.ones(3, np.int8), "q": q, "v": v}, tmp_path / "1.safetensors")
    save_file({"k": k}, tmp_path / "2.safetensors")
    headers = [read_header(tmp_path / f"{number}.safetensors") for number in (1, 2)]
    tensors = [h.entries[name] for h, name in zip(headers * 2, "qkv", strict=False)]
    found = [Segment(tensors[0]), Segment(tensors[1], np.transpose), Segment(tensors[2])]
    whole = np.concatenate([each.astype(np.float32) for each in (q, k.T, v)])
    return found, whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("staged", [True, False])
def test_parts_lie_one_behind_the_other(
    parts: tuple[list[Segment], Any], monkeypatch: pytest.MonkeyPatch, staged: bool, dtype: str
) -> None:
    found, whole = parts
    joined = Joined(whole.shape, DTYPES[dtype], tuple(found))
    copier = HostCopier()
    ring = Ring(copier, 3, 4096)
    monkeypatch.setattr(loading, "ring_of", lambda _: ring)
    monkeypatch.setattr(loading, "CHUNK", 10_000)
    engine: Any = HostEngine("torch" if staged else "numpy")
    told: list[int] = []
    with OpenFiles() as files:
        array = place(joined, files, engine, CUDA if staged else CPU, told.append)
    ring.close()
    assert array.dtype == DTYPES[dtype].numpy()
    assert_same_bits(
        array.astype(np.float32),
        whole.astype(array.dtype).astype(np.float32),
        because="it is only read and arranged",
    )
    assert engine.made == ([array.nbytes] if staged else [])  # nothing else on the device
    assert (copier.copies > 100) == staged
    assert abs(sum(told) - joined.nbytes) < len(told)


@pytest.mark.parametrize("name", ["torch", "jax", "mlx"])
def test_large_arrays_have_their_own_memory(parts: tuple[list[Segment], Any], name: str) -> None:
    found, whole = parts
    here, engine = device("cpu", engine=name), registry.load(name)
    turned = Segment(found[0].tensor, np.flipud)
    with OpenFiles() as files:
        first, second = (
            place(Joined((700, 512), DTYPES["float32"], (part,)), files, engine, here, silent)
            for part in (found[0], turned)
        )
    assert_same_bits(engine.to_host(first), whole[:700], because="it is only read and arranged")
    assert_same_bits(
        engine.to_host(second), whole[:700][::-1], because="it is only read and arranged"
    )


def silent(_: int) -> None:
    pass


def test_threads_refuse_numbers_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"x": np.full((600, 600), 1e6, np.float32)}, tmp_path / "1.safetensors")
    header = read_header(tmp_path / "1.safetensors")
    part = Segment(header.entries["x"])
    joined = Joined((600, 600), DTYPES["float16"], (part,))
    ring = Ring(HostCopier(), 3, 4096)
    monkeypatch.setattr(loading, "ring_of", lambda _: ring)
    engine: Any = HostEngine("torch")
    said = r"1\.safetensors: .*'x'.*float16 cannot"
    with pytest.raises(TransferError, match=said), OpenFiles() as files:
        place(joined, files, engine, CUDA, lambda _: None)
    ring.close()


def test_a_row_is_a_tensor_of_its_own(tmp_path: Path) -> None:
    x = np.arange(60, dtype=np.int32).reshape(3, 4, 5)
    save_file({"x": x}, tmp_path / "1.safetensors")
    header = read_header(tmp_path / "1.safetensors")
    row = header.entries["x"].row(2)
    found = np.empty(20, np.int32)
    with OpenFiles() as files:
        row.read(files.of(row), found, 0)
    assert row.shape == (4, 5)
    assert_same_bits(found.reshape(4, 5), x[2], because="it is only read and arranged")
