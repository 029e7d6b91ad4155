"""A 7B shape in bfloat16 on a machine's CPU and on its GPU: how many times the CPU is the GPU?

    PYTHONPATH=src python bench/cpu_and_gpu.py [--json FILE] [--limit 150] [--layers 2 --width 512]

The same decoder with the same weights, through PyTorch: a matrix product of 4096³, a prompt, and
tokens one by one behind it, on all cores and on the first CUDA card. A row is printed, and written
to `--json`, as soon as it is known, and one side's error leaves the other's figures. Our kernels
are verified at the lowest priority while the CPU computes; if that takes longer than `--limit`
allows, the card computes without them, and the rows say so. `--gpu cpu` tries the program without a
card. ✗ marks what could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from llm import MISTRAL, Digits, numbers  # noqa: E402

import anydevice  # noqa: E402
from anydevice import llm, ops  # noqa: E402
from anydevice._llm.description import Description, describe  # noqa: E402
from anydevice._llm.weights import parameters_of, tree_of  # noqa: E402
from anydevice._ops import trusted_kernels  # noqa: E402
from anydevice._plan.config import as_config  # noqa: E402
from anydevice._plan.plan import PREFILL_CHUNK  # noqa: E402

PROMPT, LONG_PROMPT = 512, 4096
CPU_TOKENS, GPU_TOKENS = 8, 256
CPU_PROMPT_SECONDS = 30.0
"""A slow CPU reads a shorter prompt, so that this is not exceeded by much."""
GPU_SECONDS = 25.0
"""Time kept for the card after its kernels are verified."""
BLOCK = 1_000_003
"""Random numbers that are repeated; prime, so that each row of a matrix begins elsewhere."""
VERIFY = """
import sys, time, anydevice
began = time.perf_counter()
kept = anydevice.warm_up(anydevice.device(sys.argv[1], engine="torch"), dtypes=["bfloat16"])
print(f"{len(kept.trusted)} kernels right, {time.perf_counter() - began:.0f} s", kept.problem or "")
"""


class Table:
    """Rows as they come, beside those of the CPU; each is printed and written at once."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.began = file, time.perf_counter()
        self.values: dict[str, Any] = {}
        self.met = True

    def say(self, label: str, said: str, met: bool = True) -> None:
        self.met &= met
        print(f"{'✓' if met else '✗'} {label:<46} {said}", flush=True)

    def row(self, side: str, label: str, value: float, unit: str, beside: str = "") -> None:
        """Add a figure; `beside` is the label of the CPU's row, if it differs."""
        self.values[f"{side}, {label}"] = round(value, 3)
        cpu = self.values.get(f"CPU, {beside or label}")
        said = f"{value:,.1f} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
        if side != "CPU" and cpu:
            self.values[f"{side}, {label}, times the CPU"] = round(value / cpu, 2)
            said += f", {value / cpu:,.1f} × the CPU" + (f" ({beside})" if beside else "")
        self.say(f"{side}, {label}", said)
        self.write()

    def write(self) -> None:
        self.values["seconds"] = round(time.perf_counter() - self.began, 1)
        if self.file is not None:
            self.file.write_text(json.dumps(self.values, indent=1) + "\n")


def shape_of(layers: int, width: int) -> dict[str, Any]:
    heads = max(2, width // 128)
    return {
        **MISTRAL,
        "hidden_size": width,
        "intermediate_size": width * 7 // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": width // heads,
    }


def repeated_weights(description: Description) -> dict[str, Any]:
    """Weights of the right variance from one random block: as fast as memory is written."""
    import torch

    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).bfloat16()
    arrays = {}
    for parameter in parameters_of(description):
        count = prod(parameter.shape)
        weight = torch.empty(count, dtype=torch.bfloat16)
        if len(parameter.shape) == 1:
            weight.fill_(1.0)
        else:
            whole = count // BLOCK * BLOCK
            scaled = block * parameter.shape[-1] ** -0.5
            weight[:whole].view(-1, BLOCK).copy_(scaled)
            weight[whole:] = scaled[: count - whole]
        arrays[parameter.path] = weight.view(parameter.shape)
    return tree_of(arrays)


def model_on(device: Any, config: dict[str, Any], weights: Any) -> llm.LanguageModel:
    context = LONG_PROMPT + GPU_TOKENS + 64
    chunk = PREFILL_CHUNK["cpu" if device.kind == "cpu" else "other"]
    plan = anydevice.plan_inference(
        config, device, context=context, dtype="bfloat16", prefill=chunk
    )
    tokenizer: Any = Digits()
    return llm.LanguageModel(describe(as_config(config)), weights, tokenizer, device, plan)


def matmul_rate(device: Any, size: int, seconds: float = 1.0) -> float:
    """GFLOP/s of a matrix product in bfloat16."""
    import torch

    x = anydevice.to_device(torch.randn(size, size).bfloat16(), device)
    wait: Callable[[], None] = (
        torch.cuda.synchronize if device.backend == "cuda" else (lambda: None)
    )
    for _ in range(3):
        ops.matmul(x, x)
    wait()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(1 if device.kind == "cpu" else 100):
            ops.matmul(x, x)
            count += 1
        wait()
    return 2 * size**3 * count / (time.perf_counter() - began) / 1e9


def cpu_side(table: Table, config: dict[str, Any], weights: Any, size: int) -> None:
    device = anydevice.device("cpu", engine="torch")
    gflops = matmul_rate(device, size)
    table.row("CPU", f"matmul {size}³", gflops, "GFLOP/s")
    model = model_on(device, config, weights)
    model.generate(numbers(64), 3)
    read = 2 * sum(prod(p.shape) for p in parameters_of(describe(as_config(config)))) * 64
    first = model.generate(numbers(64), 1).speed.first_token
    table.values["CPU, prompt of 64, GFLOP/s"] = round(read / first / 1e9, 1)
    length = PROMPT
    while length > 64 and first * length / 64 > CPU_PROMPT_SECONDS:
        length //= 2
    speed = model.generate(numbers(length), 1 + CPU_TOKENS).speed
    shorter = "" if length == PROMPT else f" (of {length} only)"
    table.row("CPU", f"prompt of {PROMPT}", speed.prefill, f"tokens/s{shorter}")
    table.row("CPU", "tokens behind it", speed.decode, f"tokens/s ({CPU_TOKENS} of them)")


def gpu_side(
    table: Table, config: dict[str, Any], weights: Any, size: int, place: str, kernels: Any
) -> None:
    import torch

    device = anydevice.device(place, engine="torch")
    torch.zeros(1, device=place)  # the library starts
    began = time.perf_counter()
    moved = anydevice.to_device(weights, device)
    if device.backend == "cuda":
        torch.cuda.synchronize()
    spent = time.perf_counter() - began
    total = sum(2 * prod(p.shape) for p in parameters_of(describe(as_config(config))))
    table.say(
        "to the card", f"{total / 1e9:.1f} GB in {spent:.2f} s, {total / spent / 1e9:.1f} GB/s"
    )
    table.values["GPU, GB/s from the host"] = round(total / spent / 1e9, 2)
    name = "GPU" + kernels.wait()
    table.row(name, f"matmul {size}³", matmul_rate(device, size), "GFLOP/s")
    model = model_on(device, config, moved)
    for length, beside in ((PROMPT, ""), (LONG_PROMPT, f"prompt of {PROMPT}")):
        for _ in range(3):  # kernels start, then graphs are captured
            speed = model.generate(numbers(length), 1).speed
        table.row(name, f"prompt of {length}", speed.prefill, "tokens/s", beside)
    for length, label, beside in (
        (PROMPT, "tokens behind it", ""),
        (LONG_PROMPT, "tokens behind 4096", "tokens behind it"),
    ):
        for _ in range(2):  # a step is captured
            speed = model.generate(numbers(length), GPU_TOKENS, temperature=0.8, seed=1).speed
        table.row(name, label, speed.decode, "tokens/s", beside)


class Kernels:
    """The verification of our kernels in another process, at the lowest priority."""

    def __init__(self, place: str, ends: float) -> None:
        self.ends, self.process = ends, None
        if place != "cpu":
            self.process = subprocess.Popen(
                ["nice", "-n", "19", sys.executable, "-c", VERIFY, place],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip

    def wait(self) -> str:
        """Wait for the verdicts, and use them; return what to add to the rows without them."""
        if self.process is None:
            return " without our kernels"
        began = time.perf_counter()
        try:
            said = self.process.communicate(timeout=max(1.0, self.ends - began))[0]
        except subprocess.TimeoutExpired:
            self.stop()
            print("  our kernels are not verified in time", flush=True)
            return " without our kernels"
        waited = time.perf_counter() - began
        last = (said.strip().splitlines() or ["no output"])[-1]
        print(f"  kernels: {last}; waited {waited:.0f} s", flush=True)
        trusted_kernels.forget()  # so that the file is read again
        return "" if trusted_kernels.load_trusted() else " without our kernels"

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of everything")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--matmul", type=int, default=4096)
    parser.add_argument("--gpu", default="cuda:0")
    options = parser.parse_args()
    table = Table(options.json)
    kernels: Any = None
    try:
        anydevice.device(options.gpu, engine="torch")
        kernels = Kernels(options.gpu, table.began + options.limit - GPU_SECONDS)
    except Exception as error:
        table.say("GPU", f"{type(error).__name__}: {str(error).splitlines()[0]}", False)
    import torch

    config = shape_of(options.layers, options.width)
    places = ["cpu", options.gpu][: 1 if kernels is None else 2]
    machine = [str(anydevice.Device(place).facts.name) for place in places]
    machine += [f"{os.cpu_count()} cores", f"{torch.get_num_threads()} threads"]
    table.values["machine"] = [*machine, f"torch {torch.__version__}"]
    print("  " + ", ".join(table.values["machine"]), flush=True)
    began = time.perf_counter()
    weights = repeated_weights(describe(as_config(config)))
    print(f"  weights made in {time.perf_counter() - began:.1f} s", flush=True)
    sides: list[tuple[str, Callable[[], None]]] = [
        ("CPU", lambda: cpu_side(table, config, weights, options.matmul))
    ]
    if kernels is not None:
        sides.append(
            ("GPU", lambda: gpu_side(table, config, weights, options.matmul, options.gpu, kernels))
        )
    try:
        for side, measure in sides:
            try:
                measure()
            except Exception as error:
                table.say(side, f"{type(error).__name__}: {error}", False)
    finally:
        if kernels is not None:
            kernels.stop()
    table.write()
    print(f"  {table.values['seconds']:.0f} s in all", flush=True)
    sys.exit(0 if table.met else 1)


if __name__ == "__main__":
    main()
