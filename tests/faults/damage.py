"""Ways to damage files, for those that are then read: bytes at random, and values of JSON."""

from __future__ import annotations

import json
import random
from typing import Any

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
