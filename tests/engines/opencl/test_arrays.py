from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from anydevice._core.device import Device
from anydevice._core.engine import Engine
from anydevice.errors import UnsupportedError
from tests.comparing import COPIED, EXACT, assert_same_values

cl = pytest.importorskip("pyopencl")
HERE = Device("opencl")


def test_native_is_a_pyopencl_device(engine: Engine) -> None:
    assert engine.native(HERE) == cl.get_platforms()[0].get_devices()[0]


def test_the_arrays_of_one_device_share_a_context(engine: Engine) -> None:
    first, second = (engine.place(np.ones(3, np.float32), HERE) for _ in range(2))
    assert first.context == second.context


def test_an_array_made_elsewhere_is_read(engine: Engine) -> None:
    context = cl.Context([engine.native(HERE)])
    x = cl.array.to_device(cl.CommandQueue(context), np.arange(3, dtype=np.float32))
    without_queue = x.with_queue(None)
    assert engine.devices_of(without_queue) == (HERE,)
    assert_same_values(engine.to_host(x), [0, 1, 2], because=COPIED)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_of_views(engine: Engine, dtype: str) -> None:
    host = np.arange(24, dtype=dtype).reshape(4, 6)
    placed = engine.place(host, HERE)
    assert_same_values(
        engine.to_host(engine.matmul(placed, placed.T)), host @ host.T, because=EXACT
    )
    rest = engine.matmul(placed[1:], placed.T)
    assert_same_values(engine.to_host(rest), host[1:] @ host.T, because=EXACT)


@pytest.mark.parametrize("shapes", [((0, 3), (3, 2)), ((2, 0), (0, 3))])
def test_a_product_without_terms_is_zero(
    engine: Engine, shapes: tuple[tuple[int, int], ...]
) -> None:
    a, b = (engine.place(np.ones(shape, np.float32), HERE) for shape in shapes)
    product = engine.to_host(engine.matmul(a, b))
    assert_same_values(product, np.zeros((shapes[0][0], shapes[1][1])), because=EXACT)


def test_shapes_that_do_not_fit_are_refused(engine: Engine) -> None:
    a = engine.place(np.ones((2, 3), np.float32), HERE)
    with pytest.raises(ValueError, match=r"\(2, 3\) cannot be multiplied by a matrix \(2, 3\)"):
        engine.matmul(a, a)


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
