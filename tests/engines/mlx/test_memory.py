"""Arrays of MLX, their memory, and the limit that anydevice watches over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from anydevice._core.device import Device
from anydevice._core.dtypes import as_dtype
from anydevice._core.finding import BackendScan, Facts, RawDevice
from anydevice._machine.engines import registry
from anydevice.errors import UnsupportedError
from tests.comparing import COPIED, assert_same_values
from tests.programs import output_of

MIB = 2**20
CPU_OF_UNKNOWN_SIZE = BackendScan("cpu", True, (RawDevice(0, "cpu", Facts("a processor")),))
mx = pytest.importorskip("mlx.core")
engine = registry.load("mlx")
CPU = Device("cpu")


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._engines.mlx import arrays
    from anydevice._machine.hardware.cpu import reader

    for name, text in {
        "proc/meminfo": f"MemTotal: {2**26} kB\nMemAvailable: {2**26} kB\n",
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/job/memory.max": f"{2**30}\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    engine, device = registry.load("mlx"), Device("cpu")
    looked = reader.look(root=tmp_path, system="linux")
    monkeypatch.setattr(reader, "look", lambda: looked)
    arrays._machine.cache_clear()
    try:
        with pytest.raises(MemoryError, match=r"process can have, 1\.0 GiB"):
            engine.empty((2**31,), as_dtype("uint8"), device)
        monkeypatch.setattr(reader, "look", lambda: CPU_OF_UNKNOWN_SIZE)
        arrays._machine.cache_clear()
        arrays.refuse_beyond_limit(2**60)  # nobody knows, so MLX itself may try
    finally:
        arrays._machine.cache_clear()


BEYOND_THE_MACHINE = """
import numpy as np
from anydevice._core.device import Device
from anydevice._core.dtypes import as_dtype
from anydevice._machine.engines import registry

engine, cpu = registry.load("mlx"), Device("cpu")
for _ in range(3):
    try:
        engine.empty((2**22, 2**24), as_dtype("float32"), cpu)
    except MemoryError as error:
        assert engine.memory.ran_out(error), error
        assert engine.memory.asked(error) == 2**48, error
        assert "exceed the memory that this process can have" in str(error), error
    else:
        raise SystemExit("made")
assert engine.to_host(engine.place(np.ones(3, np.float32), cpu)).tolist() == [1, 1, 1]
print("went on")
"""


def test_mlx_beyond_the_machine_is_an_error_and_not_the_end_of_the_process() -> None:
    assert output_of("-c", BEYOND_THE_MACHINE).strip() == "went on"


def test_mlx_gives_back_what_it_keeps() -> None:
    engine, cpu = registry.load("mlx"), Device("cpu")
    made = engine.place(np.ones((1024, 1024), np.float32), cpu)
    del made
    kept = engine.memory.use(cpu)
    engine.memory.release(cpu)
    given_back = engine.memory.use(cpu)
    assert kept is not None
    assert given_back is not None
    assert kept.reserved >= given_back.reserved + 4 * MIB
    engine.memory.reset_peak(cpu)
    after = engine.memory.use(cpu)
    assert after is not None
    assert after.peak == after.in_use


def test_the_limit_of_mlx_is_its_own_again_when_lifted() -> None:
    import mlx.core as mx

    memory, cpu = registry.load("mlx").memory, Device("cpu")
    own = mx.set_memory_limit(2**34)
    mx.set_memory_limit(own)
    memory.set_limit(cpu, 2**30)
    memory.set_limit(cpu, 2**29)
    assert mx.set_memory_limit(2**29) == 2**29
    memory.set_limit(cpu, None)
    memory.set_limit(cpu, None)
    assert mx.set_memory_limit(own) == own


@pytest.mark.parametrize(
    ("error", "out", "asked"),
    [
        (RuntimeError("[malloc] Unable to allocate 17 bytes."), True, 17),
        (
            RuntimeError("[metal::malloc] Attempting to allocate 99 bytes which is greater"),
            True,
            99,
        ),
        (RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory"), True, None),
        (RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"), True, None),
        (ValueError("[reshape] Cannot reshape array"), False, None),
        (ValueError("the user ran out of memory cards"), False, None),
        (RuntimeError("unable to allocate a port"), False, None),
    ],
)
def test_errors_of_mlx(error: Exception, out: bool, asked: int | None) -> None:
    memory = registry.load("mlx").memory
    assert (memory.ran_out(error), memory.asked(error)) == (out, asked)


def test_native_and_default_devices() -> None:
    assert engine.native(CPU) == mx.Device(mx.cpu, 0)
    before = mx.default_device()
    seen = []

    def fail_inside() -> None:
        with engine.default_scope(CPU):
            seen.append(mx.default_device())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert seen == [mx.Device(mx.cpu, 0)]
    assert mx.default_device() == before


def test_float64_is_kept_and_complex128_refused() -> None:
    x = np.array([1 + 1e-12])
    placed = engine.place(x, CPU)
    assert placed.dtype == mx.float64
    assert_same_values(engine.to_host(placed), x, because=COPIED)
    with pytest.raises(UnsupportedError, match=r"MLX has no complex128, so .* narrow=True"):
        engine.place(np.zeros(2, np.complex128), CPU)
    with pytest.raises(UnsupportedError, match="MLX has no complex128; use complex64"):
        engine.empty((2,), as_dtype("complex128"), CPU)
    assert engine.place(np.ones(2, np.complex128), CPU, narrow=True).dtype == mx.complex64


def test_what_it_holds_is_finished_and_lent_but_nothing_taken_over() -> None:
    with pytest.raises(UnsupportedError, match="MLX takes over no array without a copy"):
        engine.adopt(np.ones(3, np.float32))
    lent = np.from_dlpack(engine.export(mx.array([1.0]) + 1))
    assert_same_values(lent, [2], because=COPIED)
    later = [mx.ones(4) * number for number in range(3)]
    engine.finish(later)
    assert [np.asarray(x).tolist() for x in later] == [[n] * 4 for n in (0.0, 1.0, 2.0)]
