"""Ways to damage files that are then read: bytes at random, values of JSON, headers, numbers."""

from __future__ import annotations

import json
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anydevice._formats import model as tensor_files

Change = Callable[[Any, dict[str, Any]], Any]
"""Changes the description of a saved file and its table of tensors, or returns another text."""

NASTY: list[Any] = [
    *(0, 1, -1, 2, 4, 7, 8, 255, 10**6, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64),
    *(10**100, 10**400, -(10**30), 0.0, 0.5, 1.0, -0.0, 1e300, True, False, None),
    *(float("nan"), float("inf"), -float("inf")),
    *("", "a", "X", "0", "F32", "F4", "float32", "cuda", "relu", "../../x", "\0", "\ud800"),
    *("x" * 5000, [], [0], [[]], [0, 0], [0, 1], [1, 0], [4, 4], [2**32, 2**32], ["a"] * 300),
    *([1] * 33, [1] * 40, [1] * 5000, {}, {"a": 1}, {"dict": {}}, {"list": []}, {"tuple": [1]}),
    *({"dtype": "F32"}, {"kind": "Dense", "fields": {}}, {"": {"": {"": []}}}),
]
_TEXTS = [b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"\0", b"\xff", b'"', b"\\", b"NaN", b"-"]
_BYTES = b"{}[]\",:=#.'0123456789-+eE \n\\/u\x00\x1f\x7f\xc3\xff"


def at_random(dice: random.Random, raw: bytes, reach: int | None = None) -> bytes:
    """Change, insert, delete or repeat a few bytes among the first `reach`, or cut the rest off."""
    damaged = bytearray(raw)
    for _ in range(dice.choice([1, 1, 1, 2, 5])):
        where = dice.randrange(min(len(damaged), len(raw) if reach is None else reach) + 1)
        stretch = slice(where, where + dice.choice([1, 1, 2, 8, 60]))
        way = dice.randrange(9)
        if way < 2:
            damaged[where : where + 1] = bytes([dice.choice(_BYTES)])
        elif way < 4:
            damaged[where:where] = bytes(dice.choices(_BYTES, k=dice.choice([1, 2, 8])))
        elif way < 6:
            del damaged[stretch]
        elif way < 8:
            damaged[where:where] = damaged[stretch] * dice.choice([1, 1, 30])
        else:
            damaged[where:where] = dice.choice(_TEXTS)
    return bytes(damaged[: dice.randrange(len(damaged) + 1)] if dice.random() < 0.05 else damaged)


def by_meaning(dice: random.Random, tree: Any, names: list[str]) -> None:
    """Replace, drop, repeat, copy or add a value in a tree of JSON, where keys have such names."""
    holder = tree
    while isinstance(holder, dict | list) and len(holder):
        keys: list[Any] = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = dice.choice(keys)
        if isinstance(holder[key], dict | list) and holder[key] and dice.random() < 0.85:
            holder = holder[key]
            continue
        way = dice.randrange(4)
        if way == 0 and isinstance(holder, dict):
            del holder[key]
        elif way == 1 and isinstance(holder, dict):
            holder[dice.choice(names)] = holder[key]
        elif way == 2:
            if isinstance(holder, dict):
                holder[dice.choice(names)] = _nasty(dice)
            else:
                holder *= dice.choice([2, 50])
        else:
            holder[key] = _nasty(dice)
        return


def _nasty(dice: random.Random) -> Any:
    return json.loads(json.dumps(dice.choice(NASTY)))  # of its own, as it may be damaged again


# --- safetensors files ------------------------------------------------------------------------


def content(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def mostly_header(dice: random.Random, raw: bytes) -> bytes:
    """Damage a few bytes, mostly of the header."""
    whole = dice.random() < 0.3
    return at_random(dice, raw, None if whole else 8 + int.from_bytes(raw[:8], "little"))


def header_at_random(dice: random.Random, raw: bytes) -> bytes:
    """The same within the header, whose length is then right again."""
    end = 8 + int.from_bytes(raw[:8], "little")
    return content(at_random(dice, raw[:end])[8:], raw[end:])


def by_value(dice: random.Random, raw: bytes) -> bytes:
    """Replace, drop, copy or add values of the header, which stays JSON."""
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    for _ in range(dice.choice([1, 1, 2, 3])):
        by_meaning(dice, header, ["dtype", "shape", "b", "__metadata__", "more"])
    return content(header, raw[end:])


def by_offset(dice: random.Random, raw: bytes) -> bytes:
    """Move the offsets of a tensor a little: overlaps, gaps, reversals; or swap two tensors'."""
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    if tensors:
        entry, other = dice.choice(tensors), dice.choice(tensors)
        if dice.random() < 0.3:
            entry["data_offsets"], other["data_offsets"] = (
                other["data_offsets"],
                entry["data_offsets"],
            )
        else:
            which = dice.randrange(2)
            entry["data_offsets"][which] += dice.choice([-8, -4, -1, 1, 4, 8, 2**40])
    return content(header, raw[end:])


def by_length(dice: random.Random, raw: bytes) -> bytes:
    """Say another length of the header."""
    length = int.from_bytes(raw[:8], "little")
    lengths = [0, 1, 2**63, 2**64 - 1, 10**8, 10**8 + 1, length - 1, length + 1, len(raw)]
    return dice.choice(lengths).to_bytes(8, "little") + raw[8:]


def cut_off(dice: random.Random, raw: bytes) -> bytes:
    return raw[: dice.randrange(len(raw))]


def drawn_out(dice: random.Random, raw: bytes) -> bytes:
    return raw + bytes(dice.choice([1, 8, 4096]))


# --- any binary file --------------------------------------------------------------------------


def by_number(dice: random.Random, raw: bytes, reach: int) -> bytes:
    """Write a number that means trouble over 4 or 8 bytes among the first `reach`."""
    damaged = bytearray(raw)
    for _ in range(dice.choice([1, 1, 2])):
        size = dice.choice([4, 8])
        where = dice.randrange(max(1, min(reach, len(raw)) - size))
        number = dice.choice([each for each in NASTY if type(each) is int])
        damaged[where : where + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(damaged)


def rewritten(raw: bytes, change: Change) -> bytes:
    """Return a saved file with a changed description or table of tensors, and the right hash."""
    end = 8 + int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8:end])
    description = json.loads(table.pop("__metadata__")["anydevice"])
    given = change(description, table)
    text = given if isinstance(given, str) else json.dumps(description)
    digest = tensor_files._hash_of(text, table)
    digest.update(raw[end:])
    own = {"anydevice": text, "sha256": digest.hexdigest()}
    return content({"__metadata__": own, **table}, raw[end:])


def huge(path: Path) -> None:
    """Make a file of 64 GiB, which takes no room on the disk."""
    path.touch()
    os.truncate(path, 2**36)


def zeros(path: Path, folder: Path) -> None:
    """Make a link to a device without end; for root, a new one in `folder`, lest it is replaced."""
    target = Path("/dev/zero")
    if os.geteuid() == 0:
        target = folder / "zeros"
        os.mknod(target, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    path.symlink_to(target)
