"""Arrays of every dtype, and how two of them are compared bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from anydevice._core.dtypes import DTYPES, DType
from anydevice._engines.host import NARROWER, forget_warning
from anydevice.errors import UnsupportedError
from tests.comparing import COPIED, assert_same_bits, assert_same_values

Array = np.ndarray[Any, Any]

EXACT_EVERYWHERE = (
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "float32", "complex64"),
)
"""What no engine may refuse."""


def patterns(dtype: DType) -> Array:
    """Numbers of the type with every kind of bits: NaNs with payloads, zeros of both signs, …"""
    if dtype.kind == "bool" or dtype.packed:
        return np.array([0, 1, 1, 0, 1, 0], np.uint8).astype(dtype.numpy())
    if dtype.itemsize <= 2:
        return np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype.numpy())
    part = dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize
    special = {
        4: [0x7FA00123, 0xFFC00456, 0x80000000, 0x00000001, 0x7F800000, 0xFF800000],
        8: [0x7FF0000000000123, 0xFFF8000000000456, 1 << 63, 1, 0x7FF << 52, 0xFFF << 52],
    }[part]
    noise = np.random.default_rng(part).integers(0, 256, 64 * part, dtype=np.uint8)
    return np.concatenate([np.array(special, f"u{part}"), noise.view(f"u{part}")]).view(
        dtype.numpy()
    )


def small_numbers(dtype: DType, *shape: int) -> Array:
    """Numbers that every type of 32 bits has, too."""
    return np.resize(np.array([0, 1, 1, 0, 1], np.uint8).astype(dtype.numpy()), shape)


def moved(move: Callable[[], Array]) -> tuple[Array | None, list[str]]:
    """What `move` gives, and what it warned of; `None` where it refused, giving its reason."""
    forget_warning()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            back = move()
        except UnsupportedError as error:
            refused: UnsupportedError | None = error
        else:
            refused = None
    if refused is not None:
        assert str(refused) == str(refused.absent), "it says what to do instead"
        return None, []
    return back, [str(warning.message) for warning in seen]


def assert_same(back: Array, host: Array, warned: list[str]) -> None:
    """The same bits; integers may have been narrowed, but then not without a word."""
    wanted = host.astype(host.dtype.newbyteorder("="))
    if back.dtype != wanted.dtype:
        assert wanted.dtype.kind in "iu"
        assert back.dtype == NARROWER[wanted.dtype.name]
        assert len(warned) == 1
        assert_same_values(back, wanted, because=COPIED)
    else:
        assert warned == []
        assert_same_bits(back, wanted, because=COPIED)
    assert back.shape == host.shape


ROWS = tuple(DTYPES.values())
