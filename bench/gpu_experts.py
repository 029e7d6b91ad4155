"""Experts on a CUDA card: each way to compute them, by the number of tokens.

    PYTHONPATH=src python bench/gpu_experts.py [--device cuda:0] [--small]

For two shapes in bfloat16, the time of `ops.experts` with the matrices of each choice gathered,
with every expert for every token, with tokens sorted on the host, and by PyTorch's grouped product,
beside the time in which the matrices that are used can be read. ✓ where the way that `ops.experts`
takes is within a quarter of the fastest. Only sorting on the host is waited for, so the others can
be part of a CUDA graph.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from anydevice import ops
from anydevice._engines.torch.experts import in_order_of_experts
from anydevice._ops import transformer
from anydevice._ops.dispatch import primitives

SHAPES = {
    "8 experts, 2 chosen": (8, 2, 4096, 14336),
    "128 experts, 8 chosen": (128, 8, 2048, 768),
}
SMALL = {"8 experts, 2 chosen": (8, 2, 64, 96), "32 experts, 4 chosen": (32, 4, 64, 48)}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BANDWIDTH = 4.0e12
"""Bytes a second that an H200 reads."""
MOST_COPIED = 40e9
"""Bytes that gathering may take."""

Row = tuple[str, str, bool]


def sorted_on_host(networks: Any, x: Any, chosen: Any, weights: Any) -> Any:
    return transformer._sort_by_expert(networks, x, chosen.cpu().numpy(), weights)


def grouped(networks: Any, x: Any, chosen: Any, weights: Any) -> Any:
    gate_up, down, bias, last_bias = networks.stacks
    return in_order_of_experts(
        x, gate_up, down, chosen, weights, bias, last_bias, "swiglu", 1.702, 7.0
    )


WAYS: dict[str, Callable[..., Any]] = {
    "gathered": transformer._gather_experts,
    "every expert": transformer._side_by_side,
    "sorted on the host": sorted_on_host,
    "grouped": grouped,
}


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """The median of some runs, each waited for."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    found = []
    for _ in range(9):
        wait()
        began = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - began)
    return statistics.median(found[2:])


def measured(name: str, shape: tuple[int, int, int, int], device: torch.device) -> Iterator[Row]:
    count, k, hidden, inner = shape
    options: Any = {"device": device, "dtype": torch.bfloat16}
    gate_up = torch.randn(count, 2 * inner, hidden, **options).mul_(hidden**-0.5)
    down = torch.randn(count, hidden, inner, **options).mul_(inner**-0.5)
    matrices = 3 * inner * hidden * 2
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden, **options)
        scores = torch.rand(tokens, count, device=device)
        weights, chosen = scores.softmax(1).topk(k)
        chosen = chosen.int()
        networks = transformer._Networks(
            primitives(x), (gate_up, down, None, None), "swiglu", 1.702, 7.0
        )
        times = {
            way: seconds(partial(run, networks, x, chosen, weights), device)
            for way, run in WAYS.items()
            if way != "gathered" or tokens * k * matrices * 2 < MOST_COPIED
        }
        taken = seconds(partial(ops.experts, x, gate_up, down, chosen, weights), device)
        used = len(chosen.unique()) * matrices / BANDWIDTH
        said = ", ".join(f"{way} {spent * 1e6:.0f}" for way, spent in times.items())
        line = f"{said}; taken {taken * 1e6:.0f} µs, reading alone {used * 1e6:.0f}"
        yield f"{name}, {tokens} tokens", line, taken <= 1.25 * min(times.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="shapes that a CPU computes too")
    options = parser.parse_args()
    with torch.inference_mode():
        for name, shape in (SMALL if options.small else SHAPES).items():
            for label, said, right in measured(name, shape, torch.device(options.device)):
                print(f"{'✓' if right else '✗'} {label:<36}  {said}", flush=True)


if __name__ == "__main__":
    main()
