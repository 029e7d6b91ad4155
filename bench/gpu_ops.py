"""How fast our Triton kernels are: against the memory's limits and against PyTorch, in one run.

    PYTHONPATH=src python bench/gpu_ops.py [--sweep] [--only softmax,matvec]

Needs an NVIDIA card of the size of an H200. Sizes are those of a model of 7 billion parameters, in
bfloat16. Every figure is the median of several replays of a CUDA graph whose calls go through
several sets of inputs, so that none is in the cache. `--sweep` also tries other ways to cut the
work. What is wrong is never timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl

from anydevice.engines.kernels import (
    triton_decode,
    triton_matvec,
    triton_rmsnorm,
    triton_rope,
    triton_softmax,
    triton_swiglu,
)

HIDDEN, INNER, HEADS, KEY_HEADS, SIZE, WORDS = 4096, 14336, 32, 8, 128, 32000
HALF = torch.bfloat16
Call = Callable[[int], torch.Tensor]
TURNS = 3


class Case(NamedTuple):
    """One thing to compute: `ours` and `theirs` by name, each called with the number of a set."""

    name: str
    sets: int
    moved: int
    right: Callable[[int], torch.Tensor]
    ours: dict[str, Call]
    theirs: dict[str, Call]
    ceiling: str
    share: float
    least: float


@triton.jit
def _read(x, out, count, block: tl.constexpr, hint: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + place, eviction_policy=hint)
    total = tl.max(value, 0)
    tl.store(out + tl.program_id(0), total, total == 1234567)


@triton.jit
def _copy(x, out, count, block: tl.constexpr, hint: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + place, eviction_policy=hint)
    tl.store(out + place, value)


@cache
def pool() -> tuple[torch.cuda.CUDAGraph | None, tuple[int, int] | None]:
    """Memory that all graphs share, and the graph that keeps it."""
    if os.environ.get("BENCH_POOL") == "0":
        return None, None
    keeper, handle = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with torch.cuda.graph(keeper, pool=handle):
        torch.zeros(1, device="cuda")
    return keeper, handle


def seconds(call: Call, sets: int, replays: int = 9) -> float:
    """The median seconds of one call, in a graph of one call for each set.

    All graphs allocate from one pool, so that results lie in the same places: where they lie
    relative to the inputs changes the rate by a tenth.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for number in range(min(sets, 3)):
            call(number)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool()[1]):
        kept = [call(number) for number in range(sets)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for _ in range(2):
        graph.replay()
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    del kept, graph
    times = [first.elapsed_time(last) for first, last in pairwise(marks)]
    return statistics.median(times) / 1e3 / sets


def ceilings() -> dict[str, float]:
    """The rates at which memory is read, and read and written: the best of several kernels."""
    bytes_ = 4 * 2**30
    x = torch.randint(0, 1000, (bytes_ // 4,), dtype=torch.int32, device="cuda")
    out = torch.empty_like(x)

    def triton_call(kernel: object, block: int, warps: int, hint: str) -> Call:
        def call(number: int) -> torch.Tensor:
            kernel[(x.numel() // block,)](x, out, x.numel(), block=block, hint=hint, num_warps=warps)
            return out

        return call

    cuts = [(1024, 4, ""), (1024, 4, "evict_first"), (2048, 4, ""), (4096, 4, "evict_first"), (4096, 8, ""), (4096, 8, "evict_first")]
    read = min(took := [seconds(triton_call(_read, *cut), 1, 7) for cut in cuts])
    print("read", [round(bytes_ / x / 1e12, 2) for x in took])
    copy = min(took := [seconds(triton_call(_copy, *cut), 1, 7) for cut in cuts] + [seconds(lambda number: out.copy_(x), 1, 7)])
    print("copy", [round(2 * bytes_ / x / 1e12, 2) for x in took])
    return {"read": bytes_ / read, "copy": 2 * bytes_ / copy}


def random(*shape: int, sets: int = 1) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=HALF, device="cuda") for _ in range(sets)]


def rmsnorm(sweep: bool) -> Case:
    sets, rows = 3, 16384
    x, weight = random(rows, HIDDEN, sets=sets), random(HIDDEN)[0]

    def plain(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(HALF)

    compiled = torch.compile(plain)
    cuts = [triton_rmsnorm.Shape(1, HIDDEN, warps) for warps in (4, 8, 16)]

    def ours(cut: triton_rmsnorm.Shape | None) -> Call:
        return lambda number: triton_rmsnorm.rmsnorm(x[number], weight, 1e-6, cut)

    return Case(
        "rmsnorm 16384×4096",
        sets,
        2 * rows * HIDDEN * 2,
        lambda number: plain(x[number].float()),
        labelled(ours, cuts, sweep),
        {
            "fused": lambda number: functional.rms_norm(x[number], (HIDDEN,), weight, 1e-6),
            "compile": lambda number: compiled(x[number]),
        },
        "copy",
        0.9,
        0.97,
    )


def softmax(sweep: bool) -> Case:
    sets, rows = 3, 4096
    x = random(rows, WORDS, sets=sets)
    compiled = torch.compile(lambda x: torch.softmax(x, -1))
    wide = 32768
    made = triton_softmax.Shape
    cuts = [made(1, wide, 16, 1, 2), made(1, wide, 8, 1, 2), made(1, wide, 8, 0, 0, 128), made(1, wide, 16, 0, 0, 64)]

    def ours(cut: triton_softmax.Shape | None) -> Call:
        return lambda number: triton_softmax.softmax(x[number], cut)

    return Case(
        "softmax 4096×32000",
        sets,
        2 * rows * WORDS * 2,
        lambda number: torch.softmax(x[number].float(), -1),
        labelled(ours, cuts, sweep),
        {
            "eager": lambda number: torch.softmax(x[number], -1),
            "compile": lambda number: compiled(x[number]),
        },
        "copy",
        0.9,
        0.97,
    )


def swiglu(sweep: bool) -> Case:
    sets, rows = 2, 16384
    gate, up = random(rows, INNER, sets=sets), random(rows, INNER, sets=sets)

    def plain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (functional.silu(gate.float()) * up.float()).to(HALF)

    compiled = torch.compile(plain)
    cuts = [triton_swiglu.Shape(a, b) for a, b in ((512, 4), (1024, 4))]

    def ours(cut: triton_swiglu.Shape | None) -> Call:
        shape = cut or triton_swiglu.USUAL
        return lambda number: triton_swiglu.swiglu(gate[number], up[number], shape)

    return Case(
        "swiglu 16384×14336",
        sets,
        3 * rows * INNER * 2,
        lambda number: functional.silu(gate[number].float()) * up[number].float(),
        labelled(ours, cuts, sweep),
        {
            "eager": lambda number: functional.silu(gate[number]) * up[number],
            "compile": lambda number: compiled(gate[number], up[number]),
        },
        "copy",
        0.9,
        0.97,
    )


def rope(sweep: bool, transposed: bool = False) -> Case:
    sets, tokens = 3, 16384
    if transposed:
        x = [one.transpose(1, 2) for one in random(1, tokens, HEADS, SIZE, sets=sets)]
    else:
        x = random(1, HEADS, tokens, SIZE, sets=sets)
    positions = torch.arange(tokens, device="cuda")
    powers = torch.arange(0, SIZE, 2, dtype=torch.float64, device="cuda") / SIZE
    frequencies = (10000.0**-powers).float()

    def plain(x: torch.Tensor) -> torch.Tensor:
        angle = positions[:, None].float() * frequencies
        cosine, sine = angle.cos(), angle.sin()
        left, right = x.float().chunk(2, -1)
        turned = torch.cat((left * cosine - right * sine, right * cosine + left * sine), -1)
        return turned.to(x.dtype)

    compiled = torch.compile(plain)
    made = triton_rope.Shape
    cuts = (
        [made(1, 32, 4), made(1, 32, 8), made(1, 16, 2), made(1, 8, 1), made(2, 8, 2), made(2, 32, 8)]
        if transposed
        else [made(16, 2, 4), made(8, 2, 2), made(4, 2, 1), made(4, 4, 2), made(16, 1, 2), made(32, 1, 4)]
    )

    def ours(cut: triton_rope.Shape | None) -> Call:
        return lambda number: triton_rope.rope(
            x[number], positions, frequencies, 1.0, False, shape=cut
        )

    return Case(
        "rope 16384, by token" if transposed else "rope 16384, by head",
        sets,
        2 * tokens * HEADS * SIZE * 2,
        lambda number: plain(x[number].float()),
        labelled(ours, cuts, sweep),
        {"compile": lambda number: compiled(x[number])},
        "copy",
        0.9,
        0.97,
    )


LAYERS = {
    "qkv": (6144, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate+up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "head": (WORDS, HIDDEN),
}


def matvec(sweep: bool, names: tuple[str, ...] = tuple(LAYERS), rows: int = 1) -> Case:
    shapes = [LAYERS[name] for name in names]
    moved = sum(outputs * inputs * 2 for outputs, inputs in shapes)
    repeats = max(2, int(4e8 / moved) + 1)
    weights = [random(*shape, sets=repeats) for shape in shapes]
    inputs = [random(rows, columns)[0] for _, columns in shapes]

    def each(one: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Call:
        def call(number: int) -> torch.Tensor:
            return [one(x, weight[number]) for x, weight in zip(inputs, weights, strict=True)][-1]

        return call

    made = triton_matvec.Shape
    cuts = (
        [
            *(made(*cut, 1, 1, ahead) for cut in ((2, 1024, 4), (2, 2048, 8)) for ahead in (0, 800, 1600, 3200)),
            made(4, 2048, 8, 3),
            made(4, 2048, 8, 3, 1, 800),
        ]
        if rows == 1
        else [
        ]
    )

    def ours(cut: triton_matvec.Shape | None, overlap: bool = True) -> Call:
        return each(lambda x, weight: triton_matvec.matvec(x, weight, None, cut, overlap))

    ways = labelled(ours, cuts, sweep)
    ways["alone"] = ours(None, False)
    return Case(
        f"matvec {rows} × {'+'.join(names)}",
        repeats,
        moved,
        each(lambda x, weight: x.float() @ weight.float().T),
        ways,
        {"cuBLAS": each(functional.linear)},
        "read",
        0.92,
        1.08,
    )


def decode(sweep: bool, batch: int, keys: int) -> Case:
    moved = 2 * batch * KEY_HEADS * keys * SIZE * 2
    sets = max(2, int(4e8 / moved) + 1)
    k, v = (random(batch, KEY_HEADS, keys, SIZE, sets=sets) for _ in range(2))
    q = random(batch, HEADS, 1, SIZE)[0]
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    pairs = batch * KEY_HEADS
    made = triton_decode.Shape
    deep = ((64, 4, 5), (64, 4, 6), (128, 4, 3), (128, 4, 4), (32, 4, 8), (128, 8, 4))
    cuts = {
        (1, 4096): [made(64, 64, 4, 1), made(64, 64, 4, 2), made(32, 128, 4, 2), made(32, 64, 4, 3), made(16, 64, 4, 5), made(16, 128, 4, 3)],
        (1, 32768): [made(16, *cut) for cut in deep] + [made(33, *cut) for cut in ((64, 4, 4), (32, 4, 6), (64, 4, 3))] + [made(128, 64, 4, 1)],
        (16, 4096): [made(1, *cut) for cut in deep] + [made(2, *cut) for cut in ((64, 4, 4), (32, 4, 6))],
    }[batch, keys]

    def ours(cut: triton_decode.Shape | None) -> Call:
        return lambda number: triton_decode.decode_attention(
            q, k[number], v[number], SIZE**-0.5, None, lengths, cut
        )

    def right(number: int) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            q.double(), k[number].double(), v[number].double(), enable_gqa=True
        )

    limit = {(1, 4096): 0.0, (1, 32768): 0.8}.get((batch, keys), 0.9)
    return Case(
        f"decode {batch}×{keys}",
        sets,
        moved,
        right,
        labelled(ours, cuts, sweep),
        {
            "SDPA": lambda number: functional.scaled_dot_product_attention(
                q, k[number], v[number], enable_gqa=True
            )
        },
        "read",
        limit,
        1.0,
    )


def labelled(make: Callable[..., Call], cuts: list[object], sweep: bool) -> dict[str, Call]:
    """Ours as it is used, and with `--sweep` every other way to cut the work, by its numbers."""
    ways = {"ours": make(None)}
    if sweep:
        for cut in cuts:
            ways[",".join(str(value) for value in vars(cut).values())] = make(cut)
    return ways


CASES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "rmsnorm": lambda sweep: iter([rmsnorm(sweep)]),
    "softmax": lambda sweep: iter([softmax(sweep)]),
    "swiglu": lambda sweep: iter([swiglu(sweep)]),
    "rope": lambda sweep: (rope(sweep, way) for way in (False, True)),
    "matvec": lambda sweep: (
        matvec(sweep, names) for names in (tuple(LAYERS), *((name,) for name in LAYERS))
    ),
    "rows": lambda sweep: (matvec(sweep, rows=rows) for rows in (2, 8)),
    "decode": lambda sweep: (decode(sweep, *size) for size in ((1, 4096), (1, 32768), (16, 4096))),
}


def wrong(case: Case, call: Call) -> str | None:
    """What is wrong with a result, element by element; `None` where nothing is."""
    result, right = call(0).double(), case.right(0).double()
    error = ((result - right).norm() / right.norm()).item()
    return None if error < 4e-3 else f"wrong by {error:.1e}"


def run(case: Case, limits: dict[str, float]) -> Iterator[str]:
    ways = {**case.theirs, **case.ours}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, call in ways.items():
            try:
                taken[name].append(seconds(call, case.sets))
            except Exception as error:
                taken[name].append(float("inf"))
                print(name, str(error)[:100])
    middle = {name: statistics.median(times) for name, times in taken.items()}
    theirs = {name: middle[name] for name in case.theirs}
    best = min(theirs.values())
    shown = " ".join(f"{name} {case.moved / took / 1e12:.2f}" for name, took in theirs.items())
    found: list[tuple[float, str]] = []
    for name, call in case.ours.items():
        try:
            trouble = wrong(case, call)
            took = middle[name]
        except Exception as error:
            trouble, took = f"{type(error).__name__}: {str(error)[:60]}", float("inf")
        if trouble:
            yield f"✗ {case.name:<24} {name}: {trouble}"
        else:
            found.append((took, name))
    for took, name in sorted(found, key=lambda row: (row[1] != "ours", row[0]))[:9]:
        rate = case.moved / took
        share, ratio = rate / limits[case.ceiling], best / took
        ok = "✓" if share >= case.share and ratio >= case.least else "✗"
        yield (
            f"{ok} {case.name:<24} {name:<26} {took * 1e6:7.1f} µs {rate / 1e12:.2f} TB/s, "
            f"{share:.3f} of {case.ceiling} (bar {case.share}), {ratio:.2f} × {shown}"
        )
        shown = ""


def compile_ahead(only: list[str], workers: int) -> None:
    """Compile every kernel in other processes first, so that it takes the time of the slowest."""
    command = [sys.executable, __file__, "--sweep", "--only", ",".join(only)]
    children = [
        subprocess.Popen([*command, "--compile", f"{number}/{workers}"], stderr=subprocess.DEVNULL)
        for number in range(workers)
    ]
    for child in children:
        child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="try other ways to cut the work")
    parser.add_argument("--only", default=",".join(CASES), help="which, with commas between")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    only = asked.only.split(",")
    torch.manual_seed(0)
    if asked.compile:
        number, count = map(int, asked.compile.split("/"))
        ways = (call for name in only for case in CASES[name](True) for call in case.ours.values())
        for place, call in enumerate(ways):
            if place % count == number:
                call(0)
        return
    began = time.perf_counter()
    if asked.sweep and not asked.compiled:
        compile_ahead(only, min(14, os.cpu_count() or 1))
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    limits = ceilings()
    print(", ".join(f"{name} {rate / 1e12:.2f} TB/s" for name, rate in limits.items()), flush=True)
    for name in only:
        for case in CASES[name](asked.sweep):
            for line in run(case, limits):
                print(line, flush=True)
            del case
            torch.cuda.empty_cache()
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
