"""Thousands of damaged settings files and caches: each is read or refused, soon and by its name."""

from __future__ import annotations

import json
import random
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import anydevice
from anydevice._bench.results import read_results
from anydevice._machine.choose import measurements
from anydevice._machine.discovery.check import read_verdicts
from anydevice._machine.settings.files import user_file
from anydevice._machine.settings.preferences import forget_files
from anydevice._ops import trusted_kernels

LONGEST = 5.0
"""Seconds that one file may take."""

MEMORY = 256 * 2**20
"""Bytes that all of them may add to this process."""

TOML = b"""# mine
device = ["cuda", "cpu"]
engine = "torch"
order = ["cuda", "cpu"]
memory = "20GiB"
x64 = false
time_limit = 5.0

[env]
XLA_FLAGS = "--xla_gpu_autotune_level=2"
OMP_NUM_THREADS = "4"
"""

VERDICT = {
    "device": "cuda:0",
    "engine": "torch",
    "right": False,
    "reason": {"code": "wrong_answer", "text": "off by 1", "fix": None},
    "seconds": 1.5,
    "first_call": 0.25,
    "second_call": None,
}
CACHES: dict[str, object] = {
    "verdicts.json": {"cuda | GPU-1 | 535 | torch 2.1 in a folder": VERDICT},
    "measurements.json": {"cpu | a chip 0 | - | numpy 2": {"add float32": 1e-3, "matmul": 2}},
    "kernels.json": {"cuda | GPU-1": [["softmax", "float32"], ["rms_norm", "bfloat16"]]},
    "results.json": {
        "format": 1,
        "devices": [],
        "ceilings": [],
        "measurements": [],
        "notes": ["one"],
    },
}

NASTY = (
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"9" * 5000,
    b"-" + b"9" * 400,
    b"1e999",
    b"Infinity",
    b"NaN",
    b"\0",
    b"\\u0000",
    b"\\ud800",
    b"\xff\xfe",
    b'"' * 3,
    b"a." * 30_000,
    b"[[x]]\n" * 5000,
    b"\x1b[2J",
    b"null",
    b"true",
    b"{}",
    b"[]",
    b'""',
    b"{",
    b"\n" * 1000,
    b"#" * 1000,
    b"'''",
    b"inf",
    b"1979-05-27",
)


def damaged(text: bytes, chance: random.Random) -> bytes:
    """The text with some bytes or tokens changed."""
    data = bytearray(text)
    for _ in range(chance.randint(1, 4)):
        at, upto = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        match chance.randrange(6):
            case 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[at:upto]
            case 2:
                data[at:at] = chance.choice(NASTY)
            case 3:
                tokens = data.split(b" ")
                tokens[chance.randrange(len(tokens))] = bytearray(chance.choice(NASTY))
                data = bytearray(b" ").join(tokens)
            case 4:
                data[at:at] = data[at:upto] * chance.randint(1, 20)
            case _:
                del data[at:]
    return bytes(data)


def use_settings(path: Path) -> None:
    forget_files()
    anydevice.configure()
    anydevice.prefer("cpu")


READERS: dict[str, Callable[[Path], object]] = {
    "anydevice.toml": use_settings,
    "verdicts.json": lambda path: read_verdicts(),
    "measurements.json": lambda path: measurements.read_measurements(),
    "kernels.json": lambda path: trusted_kernels._read(),
    "results.json": lambda path: read_results(str(path)),
}


def attack(home: Path, count: int, seed: int) -> None:
    chance = random.Random(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for turn in range(count):
        name = tuple(READERS)[turn % len(READERS)]
        text = TOML if name.endswith("toml") else json.dumps(CACHES[name], indent=1).encode()
        path = user_file() if name.endswith("toml") else home / name
        data = damaged(text, chance)
        path.write_bytes(data)
        began, refused = time.monotonic(), str(path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                READERS[name](path)
        except anydevice.ConfigurationError as error:
            refused = str(error)
        except BaseException as error:
            raise AssertionError(f"{name}, turn {turn}: {data[:300]!r}") from error
        assert str(path) in refused, data[:300]
        assert time.monotonic() - began < LONGEST, f"{name}: {data[:300]!r}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MEMORY


def test_damaged_settings_and_caches_are_read_or_refused(home: Path) -> None:
    attack(home, 300, 1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_10_000_damaged_settings_and_caches_are_read_or_refused(home: Path) -> None:
    attack(home, 10_000, 2)
