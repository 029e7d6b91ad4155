"""Devices as they are not: a CPU stands for a GPU, or for a device with small groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from anydevice.errors import UnsupportedError


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that this driver cannot run because of a defect of its own."""
    try:
        return (yield)
    except UnsupportedError as error:
        if error.code == "driver_defect":
            pytest.skip(str(error))
        raise


@pytest.fixture
def assume() -> Iterator[Callable[..., None]]:
    """Have the kernels assume this of every device: `assume(is_cpu=False)`."""
    from anydevice._engines.opencl.kernels import (
        attention,
        elementwise,
        products,
        programs,
        reductions,
        rows,
    )

    def change(**assumed: object) -> None:
        programs.assumed = programs.Assumed(**assumed)
        for module in (attention, elementwise, products, programs, reductions, rows):
            for name, value in vars(module).items():
                # What is built goes by its text, which says all that was assumed.
                if hasattr(value, "cache_clear") and name not in ("program", "text"):
                    value.cache_clear()

    yield change
    change()


@pytest.fixture(
    params=[{}, {"work_group": 1}, {"work_group": 16, "is_cpu": False}, {"is_cpu": False}],
    ids=["cpu", "groups of 1", "groups of 16", "gpu"],
)
def assumed(request: pytest.FixtureRequest, assume: Callable[..., None]) -> None:
    """Run the test on each kind of device."""
    assume(**request.param)
