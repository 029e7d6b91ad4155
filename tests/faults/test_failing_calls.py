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

LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096];
static long at, seen, allocation, allocated;
static size_t least;
static int code, lasting;

/* The at-th call fails with this error; where it is lasting, all later ones, too. */
void faults_arm(const char *where, long number, int error, int is_lasting) {
    snprintf(folder, sizeof folder, "%s", where);
    at = number; seen = 0; code = error; lasting = is_lasting;
}
long faults_end(void) { long calls = seen; at = 0; return calls; }
void faults_arm_memory(long number, size_t size) {
    least = size; allocated = 0; allocation = number;
}
long faults_end_memory(void) { long calls = allocated; allocation = 0; return calls; }

static int named(const char *path) {
    return at && path && !strncmp(path, folder, strlen(folder));
}
static int described(int descriptor) {
    char name[64], path[4096];
    long length;
    if (!at) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
    length = syscall(SYS_readlink, name, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return named(path);
}
static int fails(void) {
    seen++;
    if (seen == at || (lasting && seen > at)) { errno = code; return 1; }
    return 0;
}
#define REAL(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))
#define CALL(type, name, takes, concerns, gives) \
    type name takes { \
        static __typeof__(&name) real; \
        if (!real) real = REAL(name); \
        if ((concerns) && fails()) return -1; \
        return real gives; \
    }
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        static __typeof__(&name) real; \
        va_list rest; va_start(rest, flags); \
        mode_t mode = va_arg(rest, int); va_end(rest); \
        if (!real) real = REAL(name); \
        return named(path) && fails() ? -1 : real(path, flags, mode); \
    }
OPEN(open) OPEN(open64)
CALL(ssize_t, read, (int f, void *b, size_t n), described(f), (f, b, n))
CALL(ssize_t, pread64, (int f, void *b, size_t n, off64_t o), described(f), (f, b, n, o))
typedef const struct iovec *Pieces;
CALL(ssize_t, preadv64, (int f, Pieces v, int n, off64_t o), described(f), (f, v, n, o))
CALL(ssize_t, preadv64v2, (int f, Pieces v, int n, off64_t o, int g), described(f), (f, v, n, o, g))
CALL(ssize_t, write, (int f, const void *b, size_t n), described(f), (f, b, n))
CALL(ssize_t, writev, (int f, Pieces v, int n), described(f), (f, v, n))
CALL(int, fsync, (int f), described(f), (f))
CALL(int, fdatasync, (int f), described(f), (f))
CALL(int, flock, (int f, int o), described(f), (f, o))
CALL(int, fchmod, (int f, mode_t m), described(f), (f, m))
CALL(int, chmod, (const char *p, mode_t m), named(p), (p, m))
CALL(int, fchmodat, (int d, const char *p, mode_t m, int g), named(p), (d, p, m, g))
CALL(int, rename, (const char *a, const char *b), named(a), (a, b))
CALL(int, renameat, (int c, const char *a, int d, const char *b), named(a), (c, a, d, b))
CALL(int, unlink, (const char *p), named(p), (p))
CALL(int, unlinkat, (int d, const char *p, int g), named(p), (d, p, g))
CALL(int, mkdir, (const char *p, mode_t m), named(p), (p, m))
CALL(int, access, (const char *p, int m), named(p), (p, m))
CALL(int, faccessat, (int d, const char *p, int m, int g), named(p), (d, p, m, g))
CALL(int, stat64, (const char *p, struct stat64 *s), named(p), (p, s))
CALL(int, lstat64, (const char *p, struct stat64 *s), named(p), (p, s))
CALL(int, fstat64, (int f, struct stat64 *s), described(f), (f, s))
CALL(int, fstatat64, (int d, const char *p, struct stat64 *s, int g), named(p), (d, p, s, g))
CALL(int, stat, (const char *p, struct stat *s), named(p), (p, s))
CALL(int, lstat, (const char *p, struct stat *s), named(p), (p, s))
CALL(int, fstat, (int f, struct stat *s), described(f), (f, s))
CALL(ssize_t, readlink, (const char *p, char *b, size_t n), named(p), (p, b, n))
DIR *opendir(const char *path) {
    static DIR *(*real)(const char *);
    if (!real) real = REAL(opendir);
    return named(path) && fails() ? NULL : real(path);
}
int close(int descriptor) {  /* it is closed in any case, as on Linux */
    int failed = described(descriptor) && fails(), kept = errno;
    int closed = syscall(SYS_close, descriptor);
    if (failed) { errno = kept; return -1; }
    return closed;
}

/* Allocations of a size and more: those of arrays and buffers, not of every object. */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
static int refused(size_t size) {
    if (!allocation || size < least) return 0;
    allocated++;
    if (allocated != allocation) return 0;
    errno = ENOMEM;
    return 1;
}
void *malloc(size_t size) { return refused(size) ? NULL : __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return refused(n * size) ? NULL : __libc_calloc(n, size); }
void *realloc(void *old, size_t size) { return refused(size) ? NULL : __libc_realloc(old, size); }
int posix_memalign(void **found, size_t by, size_t size) {
    if (refused(size)) return ENOMEM;
    return (*found = __libc_memalign(by, size)) ? 0 : ENOMEM;
}
void *aligned_alloc(size_t by, size_t size) {
    return refused(size) ? NULL : __libc_memalign(by, size);
}
"""

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
