"""Layers in host memory that come to the card as they are computed, against what the bus can do.

    PYTHONPATH=src python bench/offload.py [toy] [disk]

A Llama of 8 billion parameters in bfloat16 has its 32 layers in host memory, and the rest on the
card. In turns: copies from pinned memory, which is the limit; forward passes of ours; one of
accelerate's `cpu_offload` over the same numbers in ordinary memory of their own, since ours pins
its memory where it is: in the first pass, which is not timed, but told. Several passes of ours are
timed as one, since each begins with the two layers that the one before has brought ahead. `disk`
has the layers in a file instead. `toy` is a small model, also on a CPU, to see that it runs.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import anydevice
from anydevice import parallel

Row = tuple[str, str, bool]

transformers: Any = importlib.import_module("transformers")
accelerate: Any = importlib.import_module("accelerate")

TOY = "toy" in sys.argv
CARD = "cuda:0" if torch.cuda.is_available() else "cpu"
TOKENS, RUNS, PASSES = 16, 5, 4
SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
CONFIG: Any = transformers.LlamaConfig(
    **(SMALL if TOY else SIZES), **HEADS, vocab_size=1000 if TOY else 128256, dtype=torch.bfloat16
)


def weights() -> dict[str, Any]:
    """Random weights, in ordinary host memory."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    found = {}
    for name, x in model.named_parameters():
        made = torch.randn(x.shape, dtype=x.dtype, device=CARD) * 0.02
        found[name] = anydevice.to_device(made, "cpu")
    return found


def model_of(tensors: dict[str, Any]) -> Any:
    """A model over these tensors, with all but its layers on the card."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    model.load_state_dict(tensors, assign=True)
    made = type(model.model.rotary_emb)(CONFIG)
    model.model.rotary_emb = made
    for part in (model.model.embed_tokens, model.model.norm, model.lm_head, made):
        part.to(CARD)
    return model.eval()


def seconds(function: Callable[[], Any]) -> float:
    if CARD != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    if CARD != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def limit(size: int) -> Callable[[], Any]:
    """A copy of some bytes from pinned memory, as one call."""
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=CARD != "cpu")
    target = torch.empty(size, dtype=torch.uint8, device=CARD)
    return lambda: target.copy_(pinned, non_blocking=True)


def map_of(place: str) -> dict[str, str]:
    outside = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    return {"model.layers": place, **dict.fromkeys(outside, CARD)}


def measure(place: str, tensors: dict[str, Any]) -> list[Row]:
    ids = torch.arange(TOKENS, device=CARD)[None]
    own = {name: x.clone() for name, x in tensors.items()}
    ours, theirs = model_of(tensors), model_of(own)
    moved = sum(x.nbytes for name, x in tensors.items() if ".layers." in name)
    part = moved // CONFIG.num_hidden_layers
    empty = peak(reset=True)
    with tempfile.TemporaryDirectory(prefix="offload-") as folder:
        ours = parallel.pipeline(ours, map_of(place), folder=folder)
    slots = peak(reset=True) - empty
    for layer in theirs.model.layers:
        accelerate.cpu_offload(layer, execution_device=torch.device(CARD))
    copied = min(moved, 2**26 if TOY else 2**30)
    copy = limit(copied)
    found: list[Any] = []

    def passes(model: Any, count: int) -> Callable[[], Any]:
        return lambda: found.append([model(input_ids=ids, use_cache=False) for _ in range(count)])

    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "limit": (copy, 1),
        "ours": (passes(ours, PASSES), PASSES),
        "theirs": (passes(theirs, 1), 1),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        first = seconds(passes(ours, 1))
        passes(theirs, 1)()
        same = torch.equal(*(each[0].logits for each in found))
        found.clear()
        before = peak(reset=True)
        passes(ours, 1)()
        more = peak() - before
        for _ in range(RUNS):
            for name, (call, count) in calls.items():
                found.clear()
                taken[name].append(seconds(call) / count)
    middle = {name: statistics.median(each) for name, each in taken.items()}
    ceiling = copied / middle["limit"] / 1e9
    rate, other = (moved / middle[name] / 1e9 for name in ("ours", "theirs"))
    share, times = rate / ceiling, middle["theirs"] / middle["ours"]
    said = (
        f"{rate:.1f} GB/s of {moved / 1e9:.1f} GB, first pass {first:.1f} s, pinned {ceiling:.1f}"
    )
    bars = TOY or CARD == "cpu" or place == "disk"
    said_of = [f"{size / 2**20:.0f} MiB" for size in (slots, 2 * part, more)]
    held = "{} for layers, of which two have {}; {} for activations".format(*said_of)
    fits = slots <= 2.02 * part and more <= part
    return [
        (f"layers on {place}", f"{said}: {share:.3f} of it (bar 0.95)", bars or share >= 0.95),
        (
            f"layers on {place}, accelerate",
            f"{other:.1f} GB/s: ours is {times:.1f} × (bar 7)",
            bars or times >= 7,
        ),
        (f"layers on {place}, memory", held, fits),
        (f"layers on {place}, results", "the same logits" if same else "other logits", same),
    ]


def peak(*, reset: bool = False) -> int:
    if CARD == "cpu":
        return 0
    if reset:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    return int(torch.cuda.max_memory_allocated())


def main() -> None:
    tensors = weights()
    place = "cpu" if CARD != "cpu" else "disk"
    rows = measure(place, tensors)
    if "disk" in sys.argv:
        rows += measure("disk", tensors)
    for name, said, right in rows:
        print(f"{'✓' if right else '✗'} {name}  {said}")
    sys.exit(0 if all(right for _, _, right in rows) else 1)


if __name__ == "__main__":
    main()
