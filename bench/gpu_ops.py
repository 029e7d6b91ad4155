"""How fast our Triton kernels are: against the memory's limits and against PyTorch, in one run.

    PYTHONPATH=src python bench/gpu_ops.py [--sweep] [--only softmax,matvec]

Needs an NVIDIA card of the size of an H200. Sizes are those of a model of 7 billion parameters, in
bfloat16. Every figure is the median of several replays of a CUDA graph whose calls go through
several sets of inputs, so that none is in the cache, with PyTorch and ours in turns. `--sweep` also
tries other ways to cut the work. What is wrong is never timed.
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

from anydevice._engines.torch.triton import attention as triton_attention
from anydevice._engines.torch.triton import linear as triton_linear
from anydevice._engines.torch.triton import rope as triton_rope
from anydevice._engines.torch.triton import rows as triton_rows

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
    longest: float = 0.0


@triton.jit
def _read(x, out, block: tl.constexpr, hint: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + place, eviction_policy=hint)
    total = tl.max(value, 0)
    tl.store(out + tl.program_id(0), total, total == 1234567)


@triton.jit
def _copy(x, out, block: tl.constexpr, hint: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + place, eviction_policy=hint)
    tl.store(out + place, value)


@cache
def pool() -> tuple[torch.cuda.CUDAGraph, tuple[int, int]]:
    """Memory that all graphs share, and the graph that keeps it."""
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
    x = torch.randint(-(2**31), 2**31, (bytes_ // 4,), dtype=torch.int32, device="cuda")
    out = torch.empty_like(x)

    def triton_call(kernel: object, block: int, warps: int, hint: str) -> Call:
        def call(number: int) -> torch.Tensor:
            kernel[(x.numel() // block,)](x, out, block=block, hint=hint, num_warps=warps)
            return out

        return call

    cuts = [(1024, 4, ""), (2048, 4, ""), (4096, 4, "evict_first"), (4096, 8, "evict_first")]
    read = min(seconds(triton_call(_read, *cut), 1) for cut in cuts)
    copies = [triton_call(_copy, *cut) for cut in cuts]
    copy = min(seconds(call, 1) for call in (*copies, lambda number: out.copy_(x)))
    return {"read": bytes_ / read, "copy": 2 * bytes_ / copy}


def plain_read(bytes_: int, sets: int) -> float:
    """The rate at which so many bytes are read by one kernel that does nothing else with them."""
    count = bytes_ // 4 // 4096 * 4096
    x = torch.randint(-(2**31), 2**31, (sets, count), dtype=torch.int32, device="cuda")
    out = torch.empty(count // 1024, dtype=torch.int32, device="cuda")

    def reading(block: int, warps: int) -> Call:
        def call(number: int) -> torch.Tensor:
            _read[(count // block,)](x[number], out, block=block, hint="", num_warps=warps)
            return out

        return call

    return 4 * count / min(seconds(reading(*cut), sets) for cut in ((1024, 4), (4096, 8)))


def random(*shape: int, sets: int = 1) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=HALF, device="cuda") for _ in range(sets)]


def rmsnorm(sweep: bool) -> Case:
    sets, rows = 3, 16384
    x, weight = random(rows, HIDDEN, sets=sets), random(HIDDEN)[0]

    def plain(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(HALF)

    compiled = torch.compile(plain)
    cuts = [triton_rows.RowTile(1, HIDDEN, warps) for warps in (4, 8, 16)]

    def ours(cut: triton_rows.RowTile | None) -> Call:
        return lambda number: triton_rows.rmsnorm(x[number], weight, 1e-6, cut)

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
    cut = triton_rows.RowTile
    cuts = [cut(1, 32768, 16, 2), cut(1, 32768, 32, 1), cut(1, 32768, 16), cut(1, 8192, 16)]

    def ours(cut: triton_rows.RowTile | None) -> Call:
        return lambda number: triton_rows.softmax(x[number], cut)

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
    cuts = [triton_rows.RowTile(1, *one) for one in ((512, 4), (1024, 4), (2048, 8))]

    def ours(cut: triton_rows.RowTile | None) -> Call:
        shape = cut or triton_rows.SWIGLU_TILE
        return lambda number: triton_rows.swiglu(gate[number], up[number], shape)

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
    by_token, by_head = ((1, 32, 4), (1, 32, 8), (1, 16, 2)), ((8, 2, 2), (16, 2, 4), (32, 2, 8))
    cuts = [triton_rope.RopeTile(*one) for one in (by_token if transposed else by_head)]

    def ours(cut: triton_rope.RopeTile | None) -> Call:
        return lambda number: triton_rope.rope(
            x[number], positions, frequencies, 1.0, False, tile=cut
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

    one_row = ((2, 1024, 4), (2, 2048, 8), (4, 1024, 4), (1, 4096, 4), (4, 2048, 8, 3))
    few_rows = ((16, 256, 2, 4), (16, 128, 2, 6), (32, 512, 4, 3))
    cuts = [triton_linear.MatvecTile(*one) for one in (one_row if rows == 1 else few_rows)]

    def ours(cut: triton_linear.MatvecTile | None, overlap: bool = True) -> Call:
        return each(lambda x, weight: triton_linear.matvec(x, weight, None, cut, overlap))

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
    parts = max(1, 132 // (batch * KEY_HEADS))
    several = ((parts, 128, 4, 3), (parts, 128, 4, 4), (2 * parts, 64, 4, 4), (4 * parts, 64, 4, 1))
    cuts = [triton_attention.DecodeTile(*one) for one in several]

    def ours(cut: triton_attention.DecodeTile | None) -> Call:
        return lambda number: triton_attention.decode_attention(
            q, k[number], v[number], SIZE**-0.5, None, lengths, tile=cut
        )

    def right(number: int) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            q.double(), k[number].double(), v[number].double(), enable_gqa=True
        )

    least_share, longest = {4096 * 16: (0.9, 0.0), 32768: (0.8, 0.0)}.get(
        batch * keys, (0.0, 12e-6)
    )
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
        least_share,
        1.0,
        longest,
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
    """What is wrong with a result; `None` where nothing is."""
    try:
        result = call(0)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    result, right = result.double(), case.right(0).double()
    error = ((result - right).norm() / right.norm()).item()
    return None if error < 4e-3 else f"wrong by {error:.1e}"


def run(case: Case, limits: dict[str, float]) -> Iterator[str]:
    wrongs = {name: wrong(case, call) for name, call in case.ours.items()}
    ways = {**case.theirs, **{name: case.ours[name] for name, why in wrongs.items() if not why}}
    yield from (f"✗ {case.name:<24} {name}: {why}" for name, why in wrongs.items() if why)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, call in ways.items():
            taken[name].append(seconds(call, case.sets))
    middle = {name: statistics.median(times) for name, times in taken.items()}
    best = min(middle[name] for name in case.theirs)
    shown = " ".join(f"{name} {case.moved / middle[name] / 1e12:.2f}" for name in case.theirs)
    for name in sorted(
        set(ways) - set(case.theirs), key=lambda name: (name != "ours", middle[name])
    ):
        took = middle[name]
        rate = case.moved / took
        share, ratio = rate / limits[case.ceiling], best / took
        fast = took <= case.longest if case.longest else share >= case.share
        yield (
            f"{'✓' if fast and ratio >= case.least else '✗'} {case.name:<24} {name:<12} "
            f"{took * 1e6:6.1f} µs, {rate / 1e12:.2f} TB/s: {share:.3f} of {case.ceiling} "
            f"(bar {f'{case.longest * 1e6:.0f} µs' if case.longest else case.share}), "
            f"{ratio:.2f} × the best (bar {case.least}) of {shown}"
        )


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
    if asked.sweep:
        compile_ahead(only, min(14, os.cpu_count() or 1))
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    limits = ceilings()
    print(", ".join(f"{name} {rate / 1e12:.2f} TB/s" for name, rate in limits.items()), flush=True)
    reads: dict[str, tuple[int, int]] = {}
    for name in only:
        for case in CASES[name](asked.sweep):
            for line in run(case, limits):
                print(line, flush=True)
            if case.ceiling == "read":
                reads[case.name] = (case.moved, case.sets)
            del case
            torch.cuda.empty_cache()
    # Last: where arrays lie in memory changes what comes after them.
    for name, size in reads.items():
        print(f"  {name:<24} a plain read of as many bytes: {plain_read(*size) / 1e12:.2f} TB/s")
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
