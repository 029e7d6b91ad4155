"""Whatever is placed comes back bit for bit, or is refused with a reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES, DType
from anydevice._core.engine import Engine
from anydevice._engines.host import NARROWER
from anydevice.errors import UnsupportedError
from tests.comparing import COPIED, assert_same_bits

from .bits import EXACT_EVERYWHERE, ROWS, assert_same, moved, patterns, small_numbers
from .combinations import each

FLOATS = patterns(DTYPES["float32"])[:24]


def unaligned() -> np.ndarray[Any, Any]:
    return np.frombuffer(b"x" + FLOATS.tobytes(), np.float32, offset=1)


LAYOUTS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "transposed": lambda: FLOATS.reshape(4, 6).T,
    "reversed": lambda: FLOATS[::-1],
    "reversed twice": lambda: FLOATS.reshape(4, 6)[::-1, ::-2],
    "strided": lambda: FLOATS[::3],
    "single": lambda: FLOATS[0].reshape(()),
    "empty": lambda: FLOATS[:0].reshape(0, 3),
    "read-only": lambda: np.frombuffer(FLOATS.tobytes(), np.float32),
    "unaligned": unaligned,
    "repeated": lambda: np.broadcast_to(FLOATS[:3], (4, 3)),
    "many dimensions": lambda: FLOATS.reshape(1, 2, 3, 1, 4),
    "big-endian": lambda: FLOATS.astype(">f4"),
    "little-endian": lambda: FLOATS.astype("<f4"),
    "matrix": lambda: FLOATS.reshape(4, 6).view(np.matrix),
}


def round_trip(engine: Engine, device: Device, host: Any) -> tuple[Any, list[str]]:
    return moved(lambda: engine.to_host(engine.place(host, device)))


@each(dtype=ROWS)
def test_every_bit_arrives_or_is_refused(engine: Engine, device: Device, dtype: DType) -> None:
    for host in (patterns(dtype), small_numbers(dtype, 3, 4), small_numbers(dtype)):
        back, warned = round_trip(engine, device, host)
        assert back is not None or dtype.name not in EXACT_EVERYWHERE
        if back is not None:
            assert type(back) is np.ndarray
            assert back.flags.writeable
            assert_same(back, host, warned)


@each(layout=LAYOUTS)
def test_every_layout_arrives(engine: Engine, device: Device, layout: str) -> None:
    host = LAYOUTS[layout]()
    back, warned = round_trip(engine, device, host)
    assert back is not None
    assert_same(back, np.asarray(host), warned)


@each(name=["bfloat16", "complex64", "int16"])
def test_the_other_byte_order_is_turned(engine: Engine, device: Device, name: str) -> None:
    host = patterns(DTYPES[name])
    # As integers, since `byteswap` leaves bfloat16 as it is with ml-dtypes 0.5.3.
    integers = np.uint32 if name == "complex64" else np.uint16
    other = host.view(integers).byteswap().view(host.dtype.newbyteorder())
    back, warned = round_trip(engine, device, other)
    if back is not None:
        assert_same(back, host, warned)


def test_a_memory_mapped_file_arrives(engine: Engine, device: Device, tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(FLOATS.tobytes())
    back, warned = round_trip(engine, device, np.memmap(path, np.float32, "r"))
    assert back is not None
    assert type(back) is np.ndarray
    assert_same(back, FLOATS, warned)


REFUSED: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "objects": lambda: np.array([None, 1]),
    "texts": lambda: np.array(["one", "two"]),
    "dates": lambda: np.array(["2026-01-01"], "datetime64[D]"),
    "records": lambda: np.zeros(2, [("x", "f4"), ("y", "f4")]),
    "longer numbers": lambda: np.zeros(2, np.longdouble),
    "a mask": lambda: np.ma.masked_array(np.zeros(2, np.float32), [True, False]),
}


@each(kind=REFUSED)
def test_what_would_be_lost_is_refused(engine: Engine, device: Device, kind: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        engine.place(REFUSED[kind](), device)
    assert caught.value.absent is not None


@each(name=NARROWER)
def test_narrowing_is_done_if_asked_and_needed(engine: Engine, device: Device, name: str) -> None:
    host = (np.arange(-3, 4) * (1 + 2**-40)).astype(name) if "int" not in name else np.arange(7)
    host = host.astype(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = engine.to_host(engine.place(host, device, narrow=True))
    assert back.dtype in (host.dtype, np.dtype(NARROWER[name]))
    assert_same_bits(back, host.astype(back.dtype), because=COPIED)


@each(narrow=[False, True], name=NARROWER)
def test_large_numbers_stay(engine: Engine, device: Device, name: str, narrow: bool) -> None:
    host = np.array([1, 2**62 if "int" in name else 1e300]).astype(name)
    back, warned = moved(lambda: engine.to_host(engine.place(host, device, narrow=narrow)))
    if back is not None:
        assert back.dtype == host.dtype
        assert_same(back, host, warned)


@each(name=["float64", "complex128"])
def test_a_refused_precision_says_how_to_go_on(engine: Engine, device: Device, name: str) -> None:
    said = None
    try:
        engine.place(np.ones(2, name), device)
    except UnsupportedError as error:
        said = str(error)
    assert said is None or "narrow=True" in said


def test_narrowed_integers_are_warned_of_once(engine: Engine, device: Device) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        placed = [engine.place(np.arange(3, dtype=name), device) for name in ("int64", "uint64")]
    narrow = {engine.dtype_of(x).bits == 32 for x in placed}
    assert len(narrow) == 1
    assert len(seen) == int(narrow.pop())
