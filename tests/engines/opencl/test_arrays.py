from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from anydevice._core.device import Device
from anydevice._core.engine import Engine
from anydevice.errors import UnsupportedError
from tests.comparing import COPIED, assert_same_values

cl = pytest.importorskip("pyopencl")
HERE = Device("opencl")


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
