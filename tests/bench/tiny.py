"""Small rows, sizes and results, so that everything can be run for real in no time."""

from __future__ import annotations

from typing import Any

from anydevice._bench.measure import WorkloadSizes
from anydevice._bench.results import Ceiling, MeasuredDevice, Measurement, Results
from anydevice._check.cases.case import Call, Draw, Make, Row, call, per_element

SIZES = WorkloadSizes((2**16,), 2**16, (16,))


def two(*shape: int) -> Make:
    return lambda draw: call(draw.normal(*shape), draw.normal(*shape))


def one(*shape: int, more: tuple[Any, ...] = ()) -> Make:
    return lambda draw: call(draw.normal(*shape), *more)


def row(op: str, make: Make, dtypes: tuple[str, ...] = ("float32",), **how: Any) -> Row:
    small = {"small": make}
    return Row(op, (), dtypes, gpu=small, cpu=small, **how)


def written(draw: Draw) -> Call:
    return call(draw.normal(1, 2, 8, 4), draw.normal(1, 2, 1, 4), draw.integers(0, 8, 1))


ADD = row("add", two(64, 32))
MATMUL = row("matmul", two(32, 32), operations=lambda made: 2 * 32**3)
RESHAPE = row("reshape", one(64, 32, more=((32, 64),)), operations=lambda made: 0)
CACHE_WRITE = row("cache_write", written, operations=lambda made: 0)
SUM = row("sum", one(64, 32), operations=per_element(1))
ROWS = (ADD, MATMUL, RESHAPE, CACHE_WRITE, SUM)


def measurement(op: str = "add", seconds: float = 1e-3, **more: Any) -> Measurement:
    fields: dict[str, Any] = {
        "case": "small",
        "dtype": "float32",
        "device": "cpu",
        "engine": "numpy",
        "low": 0.98 * seconds,
        "high": 1.02 * seconds,
        "first": 2 * seconds,
        "samples": 9,
        "moved": 10**6,
        "operations": 10**6,
    }
    return Measurement(op, seconds=seconds, **{**fields, **more})


def machine(device: str = "cpu", **more: Any) -> MeasuredDevice:
    fields: dict[str, Any] = {
        "kind": "cpu" if device == "cpu" else "gpu",
        "name": "Some Card",
        "uuid": None,
        "driver": None,
        "engines": {"numpy": "2.4", "torch": "2.13"},
    }
    return MeasuredDevice(device, **{**fields, **more})


CEILINGS = (
    Ceiling("cpu", "copy", 10e9, "numpy", "copy of 64 MiB"),
    Ceiling("cpu", "read", 20e9, "torch", "sum of 64 MiB"),
    Ceiling("cpu", "matmul", 100e9, "torch", "matmul of 1024³", "float32"),
)


def results(*measurements: Measurement, **more: Any) -> Results:
    fields: dict[str, Any] = {
        "version": "0.1.0",
        "made": "2030-01-02T03:04:05+00:00",
        "system": "Linux",
        "devices": (machine(),),
        "ceilings": CEILINGS,
        "measurements": measurements,
        "limit": 0.5,
        "seconds": 12.0,
    }
    return Results(**{**fields, **more})
