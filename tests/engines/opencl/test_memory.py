"""Arrays on OpenCL, and the memory that our pool holds."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from anydevice import ops
from anydevice._core.device import Device
from anydevice._core.dtypes import as_dtype
from anydevice._core.engine import Engine, MemoryUse
from anydevice.errors import UnsupportedError
from tests.comparing import COPIED, assert_same_values
from tests.programs import output_of

cl = pytest.importorskip("pyopencl")
from anydevice._engines.opencl import buffers

FLOAT32 = as_dtype("float32")
MIB = 2**20
UINT8 = as_dtype("uint8")
HERE = Device("opencl")


def use_of(engine: Engine, device: Device) -> MemoryUse:
    use = engine.memory.use(device)
    assert use is not None
    return use


@pytest.fixture
def here(engine: Engine) -> Iterator[Device]:
    """The device, without unused memory; a limit is lifted after the test."""
    gc.collect()  # arrays of earlier tests that are garbage would be freed while these count
    device = engine.devices()[0]
    engine.memory.release(device)
    yield device
    engine.memory.set_limit(device, None)


def test_everything_on_opencl_is_counted_but_small_tables(engine: Engine, here: Device) -> None:
    before = use_of(engine, here).in_use
    made: list[Any] = [engine.place(np.ones((512, 512), np.float32), here)]
    for grow in (
        lambda x: engine.empty((512, 512), FLOAT32, here),
        lambda x: x.copy(),
        lambda x: ops.add(x, x),
        lambda x: engine.matmul(x, x),
        lambda x: engine.separate(x[None])[0],
        lambda x: engine.ops.asarray(np.ones((512, 512), np.float32), x),
    ):
        made.append(grow(made[0]))
        engine.synchronize(here)
        assert use_of(engine, here).in_use >= before + len(made) * MIB
    made.clear()
    engine.synchronize(here)
    assert use_of(engine, here).in_use == before
    x = engine.place(np.ones(4, np.float32), here)
    before = use_of(engine, here).in_use
    small = engine.ops.asarray(np.arange(4, dtype=np.float32), x)
    assert_same_values(engine.to_host(small), np.arange(4), because=COPIED)
    assert use_of(engine, here).in_use == before


def test_little_is_lost_to_rounding(engine: Engine, here: Device) -> None:
    use = use_of(engine, here)
    held = [engine.empty((size,), UINT8, here) for size in (MIB, 3 * MIB, 100_000)]
    after = use_of(engine, here)
    taken = after.reserved - use.reserved
    assert 4 * MIB + 100_000 <= taken <= 1.01 * (4 * MIB + 100_000)
    del held


def test_a_driver_that_has_no_room_is_recognised(engine: Engine, here: Device) -> None:
    most = engine.native(here).max_mem_alloc_size
    with pytest.raises(cl.LogicError, match="INVALID_BUFFER_SIZE") as caught:
        engine.empty((2 * most,), UINT8, here)
    assert engine.memory.ran_out(caught.value)
    assert engine.memory.asked(caught.value) is None
    assert not engine.memory.ran_out(cl.LogicError("no record of what went wrong"))


def test_a_limit_of_opencl_says_what_was_asked(engine: Engine, here: Device) -> None:
    engine.memory.set_limit(here, use_of(engine, here).in_use + MIB)
    with pytest.raises(Exception, match="would exceed the limit of") as caught:
        engine.empty((3, MIB), UINT8, here)
    assert engine.memory.asked(caught.value) == 3 * MIB


def test_a_kept_buffer_that_fits_is_used_up_to_the_limit(engine: Engine, here: Device) -> None:
    first = [engine.empty((MIB,), UINT8, here) for _ in range(4)]
    use = use_of(engine, here)
    engine.memory.set_limit(here, use.reserved)
    del first[:2]
    again = engine.empty((MIB,), UINT8, here)
    assert use_of(engine, here).reserved == use.reserved  # the other one is still kept
    # Of what is kept nothing fits: it makes room, and the limit holds.
    larger = engine.empty((3, MIB // 4), UINT8, here)
    after = use_of(engine, here)
    assert after.in_use <= after.reserved <= use.reserved
    with pytest.raises(cl.MemoryError, match="would exceed the limit of") as caught:
        engine.empty((MIB,), UINT8, here)
    assert str(use.reserved) in str(caught.value)
    del again, larger


def test_the_limit_of_a_device_is_one_for_all_contexts_on_it(engine: Engine, here: Device) -> None:
    other = buffers.pool(cl.Context([engine.native(here)]))
    held = other.allocate(4 * MIB)
    engine.memory.set_limit(here, use_of(engine, here).in_use + 2 * MIB)
    with pytest.raises(cl.MemoryError, match="would exceed the limit of"):
        engine.empty((4 * MIB,), UINT8, here)
    del held  # what another pool keeps is given back for it
    assert engine.empty((4 * MIB,), UINT8, here).nbytes == 4 * MIB
    assert other.held == 0


FIRST_USE = """
import threading
import numpy as np
from anydevice import ops, to_device
from anydevice._machine.engines import registry
from anydevice._engines.opencl import buffers

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


def test_threads_that_use_a_device_first_share_its_context(engine: Engine) -> None:
    for _ in range(3):
        assert output_of("-c", FIRST_USE).split() == ["1", "1"]


def test_contexts_made_once(engine: Engine, here: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(*arguments: Any, make: Any = buffers.Pool) -> Any:
        time.sleep(0.05)
        return make(*arguments)

    monkeypatch.setattr(buffers, "Pool", slowly)
    context = cl.Context([engine.native(here)])
    with ThreadPoolExecutor(4) as threads:
        pools = list(threads.map(buffers.pool, [context] * 4))
    assert len(set(map(id, pools))) == 1
    assert sum(each is pools[0] for each in buffers.pools_of(engine.native(here))) == 1


def test_native_is_a_pyopencl_device(engine: Engine) -> None:
    assert engine.native(HERE) == cl.get_platforms()[0].get_devices()[0]
    first, second = (engine.place(np.ones(3, np.float32), HERE) for _ in range(2))
    assert first.context == second.context


def test_an_array_made_elsewhere_is_read(engine: Engine) -> None:
    context = cl.Context([engine.native(HERE)])
    x = cl.array.to_device(cl.CommandQueue(context), np.arange(3, dtype=np.float32))
    without_queue = x.with_queue(None)
    assert engine.devices_of(without_queue) == (HERE,)
    assert_same_values(engine.to_host(x), [0, 1, 2], because=COPIED)


@pytest.mark.parametrize(("one", "two"), [("int32", "int32"), ("float32", "float64")])
def test_numbers_that_it_does_not_multiply_are_refused(engine: Engine, one: str, two: str) -> None:
    a, b = (engine.place(np.ones((2, 2), dtype), HERE) for dtype in (one, two))
    with pytest.raises(UnsupportedError, match=f"multiplies no {one} by {two}; convert both"):
        engine.matmul(a, b)


def test_without_a_driver_it_sees_no_device(tmp_path) -> None:
    driver = tmp_path / "none.icd"
    driver.write_text("/no/such/driver.so")
    program = (
        "from anydevice._machine.engines import registry; print(registry.load('opencl').devices())"
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        env={"OCL_ICD_VENDORS": str(driver), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "()\n"


def test_the_array_of_another_queue_is_waited_for(engine: Engine) -> None:
    queue = cl.CommandQueue(engine.place(np.ones(1, np.float32), HERE).context)
    x = cl.array.to_device(queue, np.arange(2**16, dtype=np.float32), async_=True) + 1
    engine.finish(x)
    assert_same_values(engine.to_host(x), np.arange(1, 2**16 + 1), because=COPIED)


def test_nothing_passes_by_dlpack(engine: Engine) -> None:
    for use in (engine.adopt, engine.export):
        with pytest.raises(UnsupportedError, match="OpenCL has no DLPack; copy the array"):
            use(np.ones(2))
