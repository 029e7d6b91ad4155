"""Ops as anydevice.ops dispatches them on a GPU, against the best of the library, in one run.

    PYTHONPATH=src python bench/gpu_dispatched.py

Needs an NVIDIA card with torch; OpenCL on the same card, where PyOpenCL is there. Products of
matrices, attention over a whole text, the same in OpenCL, and the decoder slice on every engine.
Every figure is the median of several, both sides in turn.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import anydevice
from anydevice import ops
from anydevice._core.engine import Absent
from anydevice._engines import trust
from anydevice._llm import decoder
from anydevice._llm.description import describe
from anydevice._machine.engines import registry
from anydevice._plan.config import as_config

Row = tuple[str, str, bool]
Call = Callable[[], Any]
TURNS = 10
DECODER = describe(
    as_config(
        {"model_type": "llama", "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 2}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 688}
    )
)


def milliseconds(call: Call, times: int) -> float:
    """The time on the GPU of one call, the mean over several in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / times


def in_turn(calls: dict[str, Call], times: int) -> dict[str, float]:
    """The median time of each; every second turn goes backwards, for a card slows as it warms."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS + 1):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            took = milliseconds(calls[name], times)
            if turn:
                taken[name].append(took)
    return {name: statistics.median(some) for name, some in taken.items()}


def matmul() -> list[Row]:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    took = in_turn({"torch": lambda: torch.matmul(a, b), "ours": lambda: ops.matmul(a, b)}, 5)
    ratio = took["torch"] / took["ours"]
    rate = 2 * 8192**3 / took["ours"] / 1e9
    return [("matmul 8192³", f"{rate:.0f} TFLOP/s, {ratio:.3f} × torch (bar 0.98)", ratio >= 0.98)]


def prefill(tokens: int) -> Row:
    heads, kv_heads, size = 32, 8, 128
    q = torch.randn(1, heads, tokens, size, device="cuda", dtype=torch.bfloat16)
    k, v = (
        torch.randn(1, kv_heads, tokens, size, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )

    def by(backend: SDPBackend) -> Call:
        def call() -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return call

    calls: dict[str, Call] = {"ours": lambda: ops.attention(q, k, v, causal=True)}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            by(backend)()
            calls[backend.name] = by(backend)
        except RuntimeError:
            continue
    took = in_turn(calls, 30 if tokens < 8192 else 4)  # so many that the GPU is never idle
    ours = took.pop("ours")
    best = min(took, key=lambda name: took[name])
    ratio = took[best] / ours
    rate = 2 * 2 * heads * size * tokens**2 / 2 / ours / 1e9
    said = f"{rate:.0f} TFLOP/s, {ratio:.3f} × {best} (bar 0.97)"
    return (f"prefill attention {tokens:,}", said, ratio >= 0.97)


def attention() -> list[Row]:
    return [prefill(4096), prefill(16384)]


def wall(call: Call, finish: Call, times: int) -> float:
    """Median milliseconds of one call, each waited for after several in a row."""
    taken = []
    for turn in range(TURNS + 1):
        finish()
        began = time.perf_counter()
        for _ in range(times):
            call()
        finish()
        if turn:
            taken.append((time.perf_counter() - began) / times * 1e3)
    return statistics.median(taken)


def opencl() -> list[Row]:
    cards = [device for device in anydevice.devices("opencl") if device.kind == "gpu"]
    if not cards:
        return [("OpenCL", "no OpenCL GPU here", False)]
    card = cards[0]
    rows: list[Row] = []
    engine = registry.load("opencl")

    def finish() -> None:
        engine.synchronize(card)

    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    host = a.cpu().numpy(), b.cpu().numpy()
    left, right = card(host[0]), card(host[1])
    theirs = wall(lambda: torch.matmul(a, b), torch.cuda.synchronize, 5)
    ours = wall(lambda: ops.matmul(left, right), finish, 5)
    close = np.allclose(
        anydevice.to_numpy(ops.matmul(left, right)), (a @ b).cpu().numpy(), atol=1e-2
    )
    ratio = theirs / ours
    rate = 2 * 4096**3 / ours / 1e9
    said = f"{rate:.1f} TFLOP/s, {ratio:.2f} × cuBLAS (bar 0.4)"
    rows.append(("OpenCL matmul 4096³ float32", said, ratio >= 0.4 and bool(close)))
    began = time.perf_counter()
    host[0] @ host[1]
    on_cpu = (time.perf_counter() - began) * 1e3
    times = f"{on_cpu / theirs:.0f} × torch on CUDA, {on_cpu / ours:.0f} × OpenCL"
    rows.append(("float32 matmul over NumPy there", f"{times} (reported)", True))
    return rows + _opencl_rows(card, finish)


def _opencl_rows(card: anydevice.Device, finish: Call) -> list[Row]:
    big = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    copy = 2 * big.numel() / milliseconds(lambda: other.copy_(big), 20) / 1e6
    rows = []
    random = np.random.default_rng(0)
    for name, shape in (("rmsnorm", (16384, 4096)), ("softmax", (4096, 32000))):
        x = card(random.standard_normal(shape, dtype=np.float32))
        weight = card(np.ones(shape[1], np.float32))

        def call(x: Any = x, weight: Any = weight, name: str = name) -> Any:
            return ops.rmsnorm(x, weight) if name == "rmsnorm" else ops.softmax(x)

        exact = anydevice.to_numpy(call())  # by the definition, before the kernel is trusted
        trust.trust(name, "float32", str(card))
        right = np.allclose(anydevice.to_numpy(call()), exact, rtol=1e-5, atol=1e-7)
        took = wall(call, finish, 10)
        rate = 2 * 4 * shape[0] * shape[1] / took / 1e6
        said = f"{rate / 1e3:.2f} TB/s, {rate / copy:.2f} of a copy (bar 0.7)"
        rows.append((f"OpenCL {name}", said, rate / copy >= 0.7 and right))
    return rows


ON_THE_CARD = (("cuda", "torch"), ("cuda", "cupy"), ("opencl", "opencl"), ("cuda", "jax"))


def slice_everywhere() -> Iterator[Row]:
    """The decoder on each engine of the card, against float64 on the CPU.

    Its logits, whole and from a cache, and where the engine can: compiled, and a step of training.
    JAX comes last: not compiled as a whole, it compiles every op by itself, which takes minutes.
    """
    from tests.llm.random_weights import random_parameters

    ids = np.random.default_rng(7).integers(0, DECODER.vocabulary, (2, 33)).astype(np.int32)
    host = random_parameters(DECODER, 0, anydevice.device("cpu", engine="numpy"))
    right, _ = _forward(_as_float64(host), ids)
    stepped = []
    for spec, name in ON_THE_CARD:
        try:
            card = anydevice.device(spec, engine=name)
            off = _logits_off(card, host, ids, right)
            yield f"decoder on {name}", f"{off} (bar 1e-4)", max(off.values()) <= 1e-4
            if not isinstance(registry.load(name).autodiff, Absent):
                stepped.append(_after_one_step(card, host, ids))
        except Exception as error:
            yield f"decoder on {name}", f"{type(error).__name__}: {error}"[:110], False
    between = float(np.abs(stepped[0] - stepped[1]).max()) if len(stepped) == 2 else np.inf
    said = f"torch and JAX differ by {between:.1e} at most (bar 1e-4)"
    yield "decoder, a training step", said, between <= 1e-4


def _forward(parameters: Any, *arguments: Any) -> Any:
    """The logits, and the cache after them."""
    hidden, cache = decoder.forward(DECODER, parameters, *arguments)
    return decoder.logits(DECODER, parameters, hidden), cache


def _loss(parameters: Any, ids: Any, targets: Any) -> Any:
    return ops.cross_entropy(_forward(parameters, ids)[0], targets)


def _logits_off(
    card: anydevice.Device, host: Any, ids: np.ndarray, right: np.ndarray
) -> dict[str, float]:
    """The largest errors of the logits, relative to the largest logit."""
    parameters = card(host)
    compiler = registry.load(card.engine).compiler
    ways = {"": _forward}
    if not isinstance(compiler, Absent):
        ways["compiled "] = compiler.compile(_forward)
    off = {}
    for way, forward in ways.items():
        whole, _ = forward(parameters, card(ids[:, :32].copy()))
        cache = decoder.new_cache(DECODER, 2, 64, parameters["embedding"])
        for start, stop in ((0, 32), (32, 33)):
            numbers = [start] * 2, [stop - start] * 2
            some = (card(np.array(each, np.int32)) for each in (ids[:, start:stop], *numbers))
            last, cache = forward(parameters, *some, cache)
        for what, logits, part in (
            ("whole", whole, right[:, :32]),
            ("cached", last, right[:, 32:]),
        ):
            away = np.abs(anydevice.to_numpy(logits) - part).max() / np.abs(right).max()
            off[way + what] = float(f"{away:.1e}")
    return off


def _after_one_step(card: anydevice.Device, host: Any, ids: np.ndarray) -> np.ndarray:
    """The embedding after one step of training."""
    gradient = registry.load(card.engine).autodiff.value_and_grad(_loss)
    parameters = card(host)
    _, slopes = gradient(parameters, card(ids[:, :-1].copy()), card(ids[:, 1:].copy()))
    (embedding,), _ = ops.update_sgd(
        [parameters["embedding"]], [slopes["embedding"]], None, rate=0.1
    )
    return anydevice.to_numpy(embedding)


def _as_float64(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _as_float64(part) for name, part in tree.items()}
    if isinstance(tree, list):
        return [_as_float64(part) for part in tree]
    return tree.astype(np.float64)


def main() -> None:
    for part in (matmul, attention, opencl, slice_everywhere):
        try:
            for name, said, right in part():
                print(f"{'✓' if right else '✗'} {name:<32} {said}", flush=True)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[:200]
            print(f"✗ {part.__name__:<32} {said}", flush=True)


if __name__ == "__main__":
    main()
