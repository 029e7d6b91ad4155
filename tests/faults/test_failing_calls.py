"""Every call to the system fails once, and then for good: the disk, and the memory for arrays.

A library that is loaded before all others counts the calls that concern one folder, and lets the
n-th fail; and likewise the calls that ask for memory. Whatever is done is done again for n = 1,
2, … until it needs fewer calls than that. Each time it must end well, or with an error of ours; the
files are as before or as after, whole; nothing is left open or locked; and the next try works.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import output_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="calls are caught as on Linux")

LIBRARY = Path(__file__).with_name("failing_calls.c").read_text("utf-8")

PROGRAM = r"""
import ctypes, errno, json, os, re, sys, time, warnings
from pathlib import Path
import numpy as np
import anydevice
from anydevice import nn
from anydevice._core.trees import leaves, mapped
from anydevice.errors import AnyDeviceError
from anydevice._machine.settings.files import user_file
from anydevice._machine.settings.config import forget_files

what, folder = sys.argv[1], Path(sys.argv[2])
every, each_allocation, least, strict = map(int, sys.argv[3:])
faults = ctypes.CDLL(None, use_errno=True)
numpy = anydevice.device("cpu", engine="numpy")
path = folder / "file.safetensors"
old, new = (nn.Model(nn.Dense(192, 192), seed=seed, device=numpy) for seed in (1, 2))
turned = new.with_parameters(mapped(np.asfortranarray, new.parameters))  # which is copied

def same(a, b):
    return all(map(np.array_equal, leaves(a.parameters), leaves(b.parameters)))

def close(a, b):  # the products of two trainings may be rounded differently
    pairs = zip(leaves(a.parameters), leaves(b.parameters), strict=True)
    return all(np.allclose(x, y, rtol=1e-4, atol=1e-6) for x, y in pairs)

def clear():
    for each in folder.iterdir():
        each.unlink()

class Save:
    def prepare(self):
        nn.save(old, path)
    def do(self):
        nn.save(turned, path)
    def check(self, ended_well):
        found = nn.load(path, numpy)
        assert same(found, new) or (not ended_well and same(found, old))

class Load(Save):
    def do(self):
        self.found = nn.load(path, numpy)
    def check(self, ended_well):
        assert not ended_well or same(self.found, old)
        assert same(nn.load(path, numpy), old)

class Prefer:
    text = '# mine\nx64 = false\ndevice = "cpu"\n'
    def prepare(self):
        user_file().write_text(self.text)
        forget_files()
    def do(self):
        anydevice.prefer("cuda")
    def check(self, ended_well):
        found = user_file().read_text()
        assert found.startswith("# mine\nx64 = false\n"), found
        assert ("cuda" in found) or (not ended_well and found == self.text), (ended_well, found)
        began = time.monotonic()
        anydevice.prefer("metal")  # whose lock is free
        assert "metal" in user_file().read_text() and time.monotonic() - began < 60

class Read(Prefer):
    def do(self):
        forget_files()
        anydevice.configure()
    def check(self, ended_well):
        assert user_file().read_text() == self.text

class Train:
    x = np.linspace(-1, 1, 16 * 192, dtype=np.float32).reshape(16, 192)
    model = nn.Model(nn.Chain(nn.Dense(192, 96), nn.Dropout(0.2)), device=numpy)
    def run(self, **saving):
        data = nn.Batches(self.x, self.x[:, :96], size=8)
        here = anydevice.device("cpu", engine="torch")
        return nn.train(self.model, data, nn.AdamW(1e-2), "mean_squared_error", epochs=3,
                        device=here, optimize="none", progress=False, **saving).model
    def prepare(self):
        self.whole = getattr(self, "whole", None) or self.run()
    def do(self):
        self.found = self.run(save=path)
    def check(self, ended_well):
        assert not ended_well or close(self.found, self.whole)
        assert close(self.run(save=path, resume=True), self.whole)
        left = [each.name for each in folder.iterdir()]
        assert left == [path.name], left

class Resume(Train):
    def prepare(self):
        super().prepare()
        class Stops(nn.Callback):
            def epoch(self, moment): raise KeyError
        try:
            self.run(save=path, callbacks=[Stops()])
        except KeyError:
            pass
    def do(self):
        self.found = self.run(save=path, resume=True)

task = {kind.__name__.lower(): kind for kind in (Save, Load, Prefer, Read, Train, Resume)}[what]()
faults_seen, errors = {}, {}
warnings.simplefilter("ignore")

def is_allowed(error, memory):
    # Where small objects fail, Python gives a plain MemoryError, and libraries what they like.
    if not memory or strict:
        return isinstance(error, AnyDeviceError) or memory and what in ("prefer", "read")
    known = "should be string|not PosixPath|can't allocate|digital envelope|std::bad_alloc"
    ours = isinstance(error, AnyDeviceError | MemoryError | SystemError)
    return ours or re.search(known, str(error))

def attempt(arm, end, memory):
    clear()
    task.prepare()
    ended_well, opened = False, os.listdir("/proc/self/fd")
    arm()
    try:
        task.do()
        ended_well = True
    except Exception as error:
        calls = end()
        if not is_allowed(error, memory):
            raise
        errors[type(error).__name__] = errors.get(type(error).__name__, 0) + 1
    else:
        calls = end()
    assert not strict or os.listdir("/proc/self/fd") == opened
    task.check(ended_well)
    return calls

clear()
task.prepare()
task.do()
task.check(True)
where = str(folder).encode()
kinds = [("EIO", errno.EIO, 0), ("ENOSPC", errno.ENOSPC, 0), ("EIO for good", errno.EIO, 1)]
for name, error, lasting in kinds if every == 1 else kinds[:1] if every else []:
    number, arm = 1, lambda: faults.faults_arm(where, number, error, lasting)
    while attempt(arm, faults.faults_end, False) >= number:
        number += every
    faults_seen[name] = number - 1
number, arm = 1, lambda: faults.faults_arm_memory(number, least)
while attempt(arm, faults.faults_end_memory, True) >= number:
    number += each_allocation
faults_seen["memory"] = number - 1
print(json.dumps([faults_seen, errors]))
"""
LEAST = {"save": 15, "load": 8, "prefer": 15, "read": 4, "train": 40, "resume": 40}
"""The calls of each; those of a training fail all in the long form, and else every ninth."""
SIZES = {"save": 4096, "load": 4096, "prefer": 512, "read": 512, "train": 65536, "resume": 65536}
"""Bytes of the allocations that fail: those that are for arrays, buffers and tables."""
TRAININGS = ("train", "resume")


def fail_in_turn(
    folder: Path, library: Path, what: str, *numbers: int, **env: str
) -> tuple[dict[str, int], dict[str, int]]:
    """How many calls there were of each kind, and the errors that came of it."""
    if what in TRAININGS:
        pytest.importorskip("torch")
    folder.mkdir()
    arguments = ("-c", PROGRAM, what, str(folder), *map(str, numbers))
    env |= {"LD_PRELOAD": str(library), "ANYDEVICE_HOME": str(folder)}
    printed = output_of(*arguments, env=env, cwd=folder.parent, limit=None)
    seen, errors = json.loads(printed.splitlines()[-1])
    return seen, errors


@pytest.fixture
def library(build_library: Callable[[str, str], Path]) -> Path:
    return build_library("failing.so", LIBRARY) / "failing.so"


@pytest.mark.parametrize(
    ("what", "every"),
    [
        *((what, 1) for what in LEAST if what not in TRAININGS),
        *((what, 9) for what in TRAININGS),
        *(pytest.param(what, 1, marks=pytest.mark.soak) for what in TRAININGS),
    ],
)
def test_failing_calls_damage_nothing(tmp_path: Path, library: Path, what: str, every: int) -> None:
    several = -(-every // 3)
    seen, errors = fail_in_turn(tmp_path / "files", library, what, every, several, SIZES[what], 1)
    assert seen["EIO"] >= LEAST[what]
    assert what == "read" or sum(errors.values()) >= 3
    if what in ("save", "load", "train"):
        assert errors["OutOfMemoryError"] == -(-seen["memory"] // several) > 0
    assert what == "read" or errors["OutOfMemoryError"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("what", LEAST)
def test_failing_allocations_damage_nothing(tmp_path: Path, library: Path, what: str) -> None:
    """Those of every object; of a training those of 4 KiB: of smaller ones PyTorch itself dies."""
    least, env = (4096, {}) if what in TRAININGS else (1, {"PYTHONMALLOC": "malloc"})
    seen, errors = fail_in_turn(tmp_path / "files", library, what, 0, 1, least, 0, **env)
    assert seen["memory"] > (50 if what in TRAININGS else 500)
    assert errors["MemoryError"] > 0
