"""The memory that anydevice itself watches over: our pool on OpenCL, and MLX's limit."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice import ops
from anydevice.core.device import Device
from anydevice.core.dtypes import as_dtype
from anydevice.core.engine import Engine
from anydevice.core.finding import Facts, Seen, Sighting
from anydevice.engines import registry

FLOAT32 = as_dtype("float32")
MIB = 2**20
CPU_OF_UNKNOWN_SIZE = Sighting("cpu", True, (Seen(0, "cpu", Facts("a processor")),))


@pytest.fixture
def opencl() -> Engine:
    engine = registry.load("opencl")
    if not engine.devices():
        pytest.skip("no OpenCL driver is installed here")
    return engine


@pytest.fixture
def here(opencl: Engine) -> Device:
    device = opencl.devices()[0]
    opencl.memory.release(device)
    return device


def in_use(engine: Engine, device: Device) -> int:
    use = engine.memory.use(device)
    assert use is not None
    return use.in_use


def test_everything_on_opencl_is_counted(opencl: Engine, here: Device) -> None:
    before = in_use(opencl, here)
    made: list[Any] = [opencl.place(np.ones((512, 512), np.float32), here)]
    for grow in (
        lambda x: opencl.empty((512, 512), FLOAT32, here),
        lambda x: x.copy(),
        lambda x: ops.add(x, x),
        lambda x: opencl.matmul(x, x),
        lambda x: opencl.separate(x[None])[0],
        lambda x: opencl.ops.asarray(np.ones((512, 512), np.float32), x),
    ):
        made.append(grow(made[0]))
        opencl.synchronize(here)
        assert in_use(opencl, here) >= before + len(made) * MIB
    made.clear()
    opencl.synchronize(here)
    assert in_use(opencl, here) == before


def test_a_small_table_is_made_without_waiting_and_not_counted(
    opencl: Engine, here: Device
) -> None:
    x = opencl.place(np.ones(4, np.float32), here)
    before = in_use(opencl, here)
    small = opencl.ops.asarray(np.arange(4, dtype=np.float32), x)
    np.testing.assert_array_equal(opencl.to_host(small), np.arange(4))
    assert in_use(opencl, here) == before


def test_little_is_lost_to_rounding(opencl: Engine, here: Device) -> None:
    use = opencl.memory.use(here)
    assert use is not None
    held = [opencl.empty((size,), as_dtype("uint8"), here) for size in (MIB, 3 * MIB, 100_000)]
    after = opencl.memory.use(here)
    assert after is not None
    taken = after.reserved - use.reserved
    assert 4 * MIB + 100_000 <= taken <= 1.01 * (4 * MIB + 100_000)
    del held


def test_a_driver_that_has_no_room_is_recognised(opencl: Engine, here: Device) -> None:
    import pyopencl as cl

    most = opencl.native(here).max_mem_alloc_size
    with pytest.raises(cl.LogicError, match="INVALID_BUFFER_SIZE") as caught:
        opencl.empty((2 * most,), as_dtype("uint8"), here)
    assert opencl.memory.ran_out(caught.value)
    assert opencl.memory.asked(caught.value) is None
    assert not opencl.memory.ran_out(cl.LogicError("no record of what went wrong"))


def test_a_limit_of_opencl_says_what_was_asked(opencl: Engine, here: Device) -> None:
    opencl.memory.set_limit(here, in_use(opencl, here) + MIB)
    try:
        with pytest.raises(Exception, match="are beyond the limit of") as caught:
            opencl.empty((3, MIB), as_dtype("uint8"), here)
        assert opencl.memory.asked(caught.value) == 3 * MIB
    finally:
        opencl.memory.set_limit(here, None)


def test_a_kept_buffer_that_fits_is_used_up_to_the_limit(opencl: Engine, here: Device) -> None:
    import pyopencl as cl

    first = [opencl.empty((MIB,), as_dtype("uint8"), here) for _ in range(4)]
    use = opencl.memory.use(here)
    assert use is not None
    opencl.memory.set_limit(here, use.reserved)
    try:
        del first[:2]
        again = opencl.empty((MIB,), as_dtype("uint8"), here)
        after = opencl.memory.use(here)
        assert after is not None
        assert after.reserved == use.reserved  # the other one is still kept
        # Of what is kept nothing fits: it makes room, and the limit holds.
        larger = opencl.empty((3, MIB // 4), as_dtype("uint8"), here)
        after = opencl.memory.use(here)
        assert after is not None
        assert after.in_use <= after.reserved <= use.reserved
        with pytest.raises(cl.MemoryError, match="are beyond the limit of") as caught:
            opencl.empty((MIB,), as_dtype("uint8"), here)
        assert str(use.reserved) in str(caught.value)
        del again, larger
    finally:
        opencl.memory.set_limit(here, None)


def test_the_limit_of_a_device_is_one_for_all_contexts_on_it(opencl: Engine, here: Device) -> None:
    import pyopencl as cl

    from anydevice.engines.opencl.buffers import pool

    other = pool(cl.Context([opencl.native(here)]))
    held = other.allocate(4 * MIB)
    opencl.memory.set_limit(here, in_use(opencl, here) + 2 * MIB)
    try:
        with pytest.raises(cl.MemoryError, match="are beyond the limit of"):
            opencl.empty((4 * MIB,), as_dtype("uint8"), here)
        del held  # what another pool keeps is given back for it
        assert opencl.empty((4 * MIB,), as_dtype("uint8"), here).nbytes == 4 * MIB
        assert other.held == 0
    finally:
        opencl.memory.set_limit(here, None)


FIRST_USE = """
import threading
import numpy as np
from anydevice import ops, to_device
from anydevice.engines import registry
from anydevice.engines.opencl import buffers

registry.load("opencl")
together, placed, wrong = threading.Barrier(4), [], []

def first():
    together.wait(20)
    try:
        placed.append(to_device(np.ones(8, np.float32), "opencl:0"))
    except BaseException as error:
        wrong.append(error)

threads = [threading.Thread(target=first) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong, wrong
for x in placed:
    ops.add(placed[0], x)
print(len({x.context.int_ptr for x in placed}), len(buffers._pools))
"""


def test_threads_that_use_a_device_first_share_its_context(opencl: Engine) -> None:
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", FIRST_USE], capture_output=True, text=True, timeout=400
        )
        assert (ended.returncode, ended.stdout.split()) == (0, ["1", "1"]), ended.stderr


def test_a_context_that_is_slow_to_make_is_made_once(
    opencl: Engine, here: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyopencl as cl

    from anydevice.engines.opencl import buffers

    def slowly(*arguments: Any, make: Any = buffers.Pool) -> Any:
        time.sleep(0.05)
        return make(*arguments)

    monkeypatch.setattr(buffers, "Pool", slowly)
    context = cl.Context([opencl.native(here)])
    with ThreadPoolExecutor(4) as threads:
        pools = list(threads.map(buffers.pool, [context] * 4))
    assert len(set(map(id, pools))) == 1
    assert sum(each is pools[0] for each in buffers.pools_of(opencl.native(here))) == 1


def test_what_mlx_can_have_is_what_its_container_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anydevice.engines.mlx import arrays
    from anydevice.hardware.cpu import reader

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
from anydevice.core.device import Device
from anydevice.core.dtypes import as_dtype
from anydevice.engines import registry

engine, cpu = registry.load("mlx"), Device("cpu")
for _ in range(3):
    try:
        engine.empty((2**22, 2**24), as_dtype("float32"), cpu)
    except MemoryError as error:
        assert engine.memory.ran_out(error), error
        assert engine.memory.asked(error) == 2**48, error
        assert "beyond the memory that this process can have" in str(error), error
    else:
        raise SystemExit("made")
assert engine.to_host(engine.place(np.ones(3, np.float32), cpu)).tolist() == [1, 1, 1]
print("went on")
"""


def test_mlx_beyond_the_machine_is_an_error_and_not_the_end_of_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BEYOND_THE_MACHINE], capture_output=True, text=True, timeout=400
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "went on"), ended.stderr


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


def test_numpy_says_what_was_to_be_made() -> None:
    memory = registry.load("numpy").memory
    with pytest.raises(MemoryError) as caught:
        np.empty((2**40, 2**10), np.float64)
    assert memory.ran_out(caught.value)
    assert memory.asked(caught.value) == 2**53
    assert memory.asked(MemoryError()) is None


def test_more_than_any_machine_could_have_is_out_of_memory_too() -> None:
    import torch

    with pytest.raises(ValueError, match="array is too big") as caught:
        np.ones((2**40, 2**40), np.int8)
    assert registry.load("numpy").memory.ran_out(caught.value)
    assert registry.load("numpy").memory.asked(caught.value) is None
    with pytest.raises(RuntimeError) as failed:
        torch.empty((2**40, 2**40), dtype=torch.int8)
    assert registry.load("torch").memory.ran_out(failed.value)
