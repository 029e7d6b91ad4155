"""The bytes that a library's message says it was asked for when memory ran out."""

from __future__ import annotations

import re

from anydevice.core.sizes import parse_size

_AMOUNT = re.compile(
    r"(?:tried to allocate|trying to allocate|out of memory allocating|unable to allocate"
    r"|out of memory to allocate|attempting to allocate|failed to allocate(?: request for)?)"
    r"\s+([\d,.]*\d)\s*([KMGT]?)(?:i?B|bytes?)\b",
    re.IGNORECASE,
)


def amount_asked(message: str) -> int | None:
    """The amount that a message names, in bytes; `None` where it names none.

    >>> amount_asked("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has …")
    21474836480
    >>> amount_asked("RESOURCE_EXHAUSTED: Out of memory allocating 1234 bytes.")
    1234
    >>> amount_asked("Out of memory while trying to allocate 2.50MiB.")
    2621440
    """
    found = _AMOUNT.search(message)
    if found is None:
        return None
    # Those who write "GB" in such a message mean 2**30 as well.
    return parse_size(found[1].replace(",", "") + found[2])
