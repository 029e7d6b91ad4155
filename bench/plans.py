"""Whether plans are true: one that says "fits" runs, one that says "does not fit" runs out.

    PYTHONPATH=src python bench/plans.py

Needs an NVIDIA card with torch and transformers. The card is made small by
`configure(memory=…)`; models of Llama's shape are laid 5 % below that edge and 12 % above it, and
each is then really run in a process of its own: prefill and decode with SDPA and a static cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import anydevice
from anydevice._core.record import as_dict
from anydevice._plan.estimates import PARTS, estimate_inference

Row = tuple[str, str, bool]

MIB, GIB = 2**20, 2**30
DEVICE = "cuda:0"
BELOW, ABOVE = 0.95, 1.12
DECODED = 4
TIME_LIMIT = 55
SHAPES: dict[str, dict[str, Any]] = {
    "8GiB": {
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
    },
    "16GiB": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
}
BATCH = 4


def config_of(shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 2**20,
        "torch_dtype": "bfloat16",
        **shape,
    }


def plan_near(limit: str, wanted: float) -> Any:
    """A plan of the context with which the model needs about that share of the limit.

    It is the largest one at or below the share, and where that is above 1 the next one.
    """
    anydevice.configure(memory=limit)
    config = config_of(SHAPES[limit])
    room = anydevice.plan_inference(config, DEVICE, context=1024, batch=BATCH).free
    low, high = DECODED + 1, 2**18
    while low < high:
        middle = (low + high + 1) // 2
        needed = estimate_inference(config, context=middle, batch=BATCH).total
        low, high = (middle, high) if needed <= wanted * room else (low, middle - 1)
    return anydevice.plan_inference(config, DEVICE, context=low + (wanted > 1), batch=BATCH)


def start(limit: str, plan: Any) -> subprocess.Popen[str]:
    """A process that runs what was planned."""
    words = [sys.executable, __file__, "--run", json.dumps([limit, plan.estimate.context])]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def row(limit: str, plan: Any, process: subprocess.Popen[str], seconds: float) -> Row:
    name = f"{limit}, {'fits' if plan.fits else 'does not fit'}"
    try:
        out, err = process.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return (name, "no answer in time", False)
    if process.returncode:
        return (name, (err.strip().splitlines() or ["no word"])[-1], False)
    ended = json.loads(out.splitlines()[-1])
    did = "ran" if ended["ran"] else "ran out"
    planned = plan.estimate
    parts = {name: getattr(planned, name) for name in PARTS} | as_dict(planned.overheads)
    print(f"  {name}: MiB", ", ".join(f"{part} {size / MIB:,.0f}" for part, size in parts.items()))
    if ended["why"]:
        print(f"  {name}: {ended['why']}")
    said = (
        f"{planned.total / plan.free:.2f} of the room at context {planned.context}, "
        f"{planned.total / GIB:.2f} GiB planned; {did}, {ended['peak'] / GIB:.2f} GiB in use "
        f"at the peak, {ended['reserved'] / GIB:.2f} held"
    )
    return (name, said, plan.fits == ended["ran"])


def run(limit: str, context: int) -> dict[str, Any]:
    """Really run the model; what came of it, and the most memory that it took."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    anydevice.configure(memory=limit)
    device = anydevice.device(DEVICE, engine="torch").native
    config = LlamaConfig(**config_of(SHAPES[limit]), attn_implementation="sdpa")
    torch.set_default_dtype(torch.bfloat16)
    why = ""
    try:
        with torch.inference_mode(), torch.device(device):
            model = LlamaForCausalLM(config).eval()
            cache = StaticCache(config=config, max_cache_len=context)
            tokens = torch.randint(0, config.vocab_size, (BATCH, context - DECODED))
            for _ in range(DECODED + 1):
                logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits
                tokens = logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        why = " ".join(str(error).split())[:400]
    return {
        "ran": not why,
        "why": why,
        "peak": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
    }


def show(told: Row) -> None:
    name, said, right = told
    print(f"{'✓' if right else '✗'} {name:<28} {said}", flush=True)


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", help=argparse.SUPPRESS)
    asked = parser.parse_known_args()[0].run
    if asked:
        print(json.dumps(run(*json.loads(asked))))
        return []
    began = time.perf_counter()
    rows: list[Row] = []
    try:
        # All are planned before one runs, because they look at what is free.
        plans = [(limit, plan_near(limit, wanted)) for limit in SHAPES for wanted in (BELOW, ABOVE)]
        started = [(*each, start(*each)) for each in plans]
        for each in started:
            rows.append(row(*each, TIME_LIMIT - (time.perf_counter() - began)))
            show(rows[-1])
    except Exception as error:
        rows.append(("failed", f"{type(error).__name__}: {error}", False))
        show(rows[-1])
    return rows


if __name__ == "__main__":
    main()
