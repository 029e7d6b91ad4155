"""How fast a GPT of 124 million parameters trains, against a straight torch loop, in one run.

    PYTHONPATH=src python bench/gpt_training.py [--tiny]

Needs an NVIDIA card with torch; `--tiny` runs a small one on the CPU, whose figures mean nothing.
The loop by hand is torch's own layers, `torch.compile`, autocast to bfloat16 and the fused AdamW.
Both sides take the same batches in turn; figures are medians.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import anydevice
from anydevice import nn
from anydevice._core.protocols import StepState
from anydevice._core.record import Record, replace
from anydevice._core.trees import leaves
from anydevice._libraries.precision import policy_of
from anydevice._machine.engines import registry
from anydevice._train.step_config import StepConfig
from anydevice._train.stepper import stepper_for

Row = tuple[str, str, bool]
Step = Callable[[], Any]
RATE, DECAY = 3e-4, 0.1


class Sizes(Record):
    """A GPT and its batch."""

    layers: int = 12
    size: int = 768
    heads: int = 12
    vocabulary: int = 50304
    tokens: int = 1024
    batch: int = 16


TINY = Sizes(layers=1, size=32, heads=2, vocabulary=128, tokens=16, batch=2)


def layer_of(sizes: Sizes, *, recomputed: bool = False) -> nn.Layer:
    block = nn.TransformerBlock(
        sizes.size, sizes.heads, causal=True, activation="gelu_tanh", norm="layer", bias=True,
        initializer=nn.Normal(0.02),
    )  # fmt: skip
    inside: nn.Layer = nn.Chain(
        nn.PositionEmbedding(sizes.tokens, sizes.size),
        *[block] * sizes.layers,
        nn.LayerNorm(sizes.size),
    )
    if recomputed:
        inside = nn.recompute(inside)
    return nn.TiedEmbedding(sizes.vocabulary, sizes.size, inside)


class Block(torch.nn.Module):  # type: ignore[misc]
    """A transformer block as people write it."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = torch.nn.LayerNorm(size), torch.nn.LayerNorm(size)
        self.qkv, self.output = torch.nn.Linear(size, 3 * size), torch.nn.Linear(size, size)
        self.up, self.down = torch.nn.Linear(size, 4 * size), torch.nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, size = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, size // self.heads).transpose(1, 2)
            for part in self.qkv(self.first(x)).split(size, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(y.transpose(1, 2).reshape(batch, tokens, size))
        return x + self.down(functional.gelu(self.up(self.second(x)), approximate="tanh"))


class Gpt(torch.nn.Module):  # type: ignore[misc]
    """The same model by hand, with the parameters of ours."""

    def __init__(self, sizes: Sizes, parameters: Any) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(sizes.vocabulary, sizes.size)
        self.places = torch.nn.Embedding(sizes.tokens, sizes.size)
        self.blocks = torch.nn.ModuleList(
            Block(sizes.size, sizes.heads) for _ in range(sizes.layers)
        )
        self.norm = torch.nn.LayerNorm(sizes.size)
        places, *blocks, norm = parameters["inside"]
        pairs: list[tuple[torch.nn.Parameter, Any]] = [
            (self.words.weight, parameters["weight"]),
            (self.places.weight, places["weight"]),
            *_of_layer(self.norm, norm),
        ]
        for block, own in zip(self.blocks, blocks, strict=True):
            attention, mlp = own["attention"], own["mlp"]
            pairs += [
                (block.qkv.weight, attention["qkv"]),
                (block.qkv.bias, attention["qkv_bias"]),
                (block.output.weight, attention["output"]),
                (block.output.bias, attention["output_bias"]),
                *_of_layer(block.first, own["attention_norm"]),
                *_of_layer(block.second, own["mlp_norm"]),
                *_of_layer(block.up, mlp[0]),
                *_of_layer(block.down, mlp[1]),
            ]
        for parameter, value in pairs:
            assert parameter.shape == tuple(value.shape)
            parameter.data = torch.as_tensor(value).clone()

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.words.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _of_layer(module: Any, own: Any) -> list[tuple[Any, Any]]:
    return [(module.weight, own["weight"]), (module.bias, own["bias"])]


def by_hand(sizes: Sizes, model: nn.Model, x: Any, y: Any) -> Step:
    module = Gpt(sizes, anydevice.to_numpy(model.parameters)).to(x.device)
    compiled = torch.compile(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def step() -> Any:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            loss = compiled(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def in_training(sizes: Sizes, model: nn.Model, device: anydevice.Device, x: Any, y: Any) -> Step:
    """The module by hand, in `nn.Training`."""
    module = torch.compile(Gpt(sizes, anydevice.to_numpy(model.parameters)).to(x.device))
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def loss(model: Any, x: Any, y: Any) -> Any:
        return model(x, y)

    training = nn.Training(module, optimizer, loss=loss, device=device, precision="mixed")
    return lambda: training.step((x, y))


def ours(model: nn.Model, device: anydevice.Device, precision: str, x: Any, y: Any) -> Step:
    optimizer = nn.AdamW(RATE, decay=DECAY)
    config = StepConfig(model.layer, nn.cross_entropy, optimizer, policy_of(precision, device))
    parameters = device(anydevice.to_numpy(model.parameters), convert=True)
    state = StepState(parameters, optimizer.init(parameters))
    stepper = stepper_for(device, config, state, seed=0)
    return lambda: stepper.step((x, y), RATE)


def seconds(step: Step, device: anydevice.Device, steps: int) -> float:
    anydevice.synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    anydevice.synchronize(device)
    return (time.perf_counter() - began) / steps


def speed(sizes: Sizes, device: anydevice.Device) -> list[Row]:
    model = nn.Model(layer_of(sizes), (sizes.tokens,), device=device)
    drawn = anydevice.rng(0, device)
    shape = (sizes.batch, sizes.tokens)
    x = drawn.integers(0, sizes.vocabulary, shape).long()
    y = drawn.integers(0, sizes.vocabulary, shape).long()
    sides = {
        "by hand": by_hand(sizes, model, x, y),
        "nn.Training": in_training(sizes, model, device, x, y),
        "mixed": ours(model, device, "mixed", x, y),
        "float32": ours(model, device, "float32", x, y),
    }
    began = time.perf_counter()
    first = {name: float(step()) for name, step in sides.items()}
    compiling = time.perf_counter() - began
    for step in sides.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(7):
        for name in ("by hand", "nn.Training", "mixed"):
            times[name].append(seconds(sides[name], device, 10))
    for _ in range(3):
        times["float32"].append(seconds(sides["float32"], device, 3))
    middle = {name: statistics.median(all_of) for name, all_of in times.items()}
    tokens = {name: sizes.batch * sizes.tokens / value for name, value in middle.items()}
    apart = max(first.values()) - min(first.values())
    right = apart < 0.02 * math.log(sizes.vocabulary)
    count = model.parameter_count / 1e6
    ratio, gain = (tokens["mixed"] / tokens[name] for name in ("by hand", "float32"))
    pairs = zip(times["nn.Training"], times["by hand"], strict=True)
    more = statistics.median(own / plain for own, plain in pairs) - 1
    return [
        (
            "the module in nn.Training",
            f"{middle['by hand'] * 1e3:.2f} → {middle['nn.Training'] * 1e3:.2f} ms a step: "
            f"{more:+.1%} (bar 1 %)",
            more <= 0.01 and right,
        ),
        (
            f"GPT, {count:.0f} million, mixed",
            f"{tokens['by hand']:,.0f} → {tokens['mixed']:,.0f} tokens/s: {ratio:.3f} × (bar 0.97)"
            f", first losses {apart:.4f} apart, compiled in {compiling:.0f} s",
            ratio >= 0.97 and right,
        ),
        (
            "mixed against float32",
            f"{tokens['float32']:,.0f} → {tokens['mixed']:,.0f} tokens/s: {gain:.2f} × (bar 1.7)",
            gain >= 1.7,
        ),
    ]


def recomputation(sizes: Sizes, device: anydevice.Device) -> list[Row]:
    """Not compiled: what is kept does not depend on it, and compiling would take minutes."""
    autodiff: Any = registry.load("torch").autodiff
    drawn = anydevice.rng(1, device)
    shape = (sizes.batch, sizes.tokens)
    x = drawn.integers(0, sizes.vocabulary, shape).long()
    peaks, found = [], []
    parameters = nn.Model(layer_of(sizes), (sizes.tokens,), device=device).parameters
    for recomputed in (False, True):
        layer = layer_of(sizes, recomputed=recomputed)

        def loss(parameters: Any, layer: nn.Layer = layer) -> Any:
            return nn.cross_entropy(layer.apply(parameters, x, nn.Run(training=True)), x)

        peak, gradients = _peak(lambda: autodiff.value_and_grad(loss)(parameters)[1], device)
        peaks.append(peak)
        found.append(leaves(gradients))
    gradients_size = sum(each.nbytes for each in found[0])
    kept = [peak - (gradients_size if device.kind == "gpu" else 0) for peak in peaks]
    error = max(
        float((a - b).abs().max() / a.abs().max().clamp(min=1e-12))
        for a, b in zip(*found, strict=True)
    )
    ratio = kept[1] / kept[0]
    said = (
        f"activations {kept[0] / 2**20:,.0f} → {kept[1] / 2**20:,.0f} MiB: {ratio:.2f} (bar 0.5), "
        f"gradients {error:.0e} apart"
    )
    return [(f"recomputation, {sizes.layers} layers", said, ratio <= 0.5 and error < 1e-4)]


def _peak(call: Callable[[], Any], device: anydevice.Device) -> tuple[int, Any]:
    """The most memory that a call takes; on the CPU, the bytes that are kept for the backward."""
    if device.kind == "gpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, result
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    # Within a recomputed block, hooks of its own take the place of these.
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    with hooks(keep, lambda tensor: tensor):
        result = call()
    return sum(sizes), result


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a small one, on the CPU")
    tiny = parser.parse_known_args()[0].tiny
    device = anydevice.device("cpu" if tiny else "cuda", engine="torch")
    sizes = TINY if tiny else Sizes()
    deep = Sizes(layers=24, size=1024, heads=16, vocabulary=1024, batch=4)
    deep = replace(TINY, layers=24) if tiny else deep
    rows: list[Row] = []
    parts: tuple[Callable[[], list[Row]], ...] = (
        lambda: recomputation(deep, device),
        lambda: speed(sizes, device),
    )
    for part in parts:
        try:
            new = part()
        except Exception as error:
            new = [("failed", f"{type(error).__name__}: {error}", False)]
        for name, said, right in new:
            print(f"{'✓' if right else '✗'} {name:<28} {said}", flush=True)
        rows += new
    return rows


if __name__ == "__main__":
    main()
