"""Every ordered pair of engines: what one holds, the other takes bit for bit or refuses."""

from __future__ import annotations

from typing import Any

from anydevice._core.dtypes import DTYPES
from anydevice.errors import UnsupportedError
from tests.comparing import COPIED, assert_same_bits

from .bits import EXACT_EVERYWHERE, ROWS, assert_same, moved, patterns, small_numbers


def test_each_takes_what_the_other_holds(place: Any, other: Any) -> None:
    arrived = []
    for dtype in ROWS:
        for host in (patterns(dtype), small_numbers(dtype, 3, 2), small_numbers(dtype, 0, 2)):

            def there(host: Any = host) -> Any:
                first = place.engine.place(host, place.device)
                second = other.engine.place(place.engine.to_host(first), other.device)
                return other.engine.to_host(second)

            back, warned = moved(there)
            if back is not None:
                assert_same(back, host, warned)
                arrived.append(dtype.name)
    assert set(EXACT_EVERYWHERE) <= set(arrived)


def test_each_takes_over_what_the_other_exports_or_says_why_not(place: Any, other: Any) -> None:
    for dtype in ROWS:
        host = small_numbers(dtype, 32, 2)
        refused = None
        try:
            x = place.engine.place(host.astype(host.dtype), place.device, narrow=True)
        except UnsupportedError:
            continue
        try:
            adopted = other.engine.adopt(place.engine.export(x))
        except UnsupportedError as error:
            refused = error
        if refused is not None:
            assert refused.absent is not None
            assert other.engine.dlpack in (None, refused.absent) or place.engine.dlpack
            continue
        assert other.engine.dlpack is None
        assert other.engine.owns(adopted)
        addresses = {place.engine.address(x), other.engine.address(adopted)} - {None}
        assert len(addresses) < 2, f"{dtype} was copied"
        assert_same_bits(other.engine.to_host(adopted), place.engine.to_host(x), because=COPIED)


def test_each_takes_over_its_own(place: Any, other: Any) -> None:
    if place.engine is not other.engine or place.engine.dlpack is not None:
        return
    x = place.engine.place(small_numbers(DTYPES["float32"], 32, 2), place.device)
    adopted = place.engine.adopt(place.engine.export(x))
    assert place.engine.address(adopted) == place.engine.address(x)
    assert place.engine.devices_of(adopted) == place.engine.devices_of(x)
