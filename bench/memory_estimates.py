"""Estimated against measured memory on one NVIDIA GPU: 13 ways of inference, 6 of training.

    PYTHONPATH=src python bench/memory_estimates.py [--quick] [--only NAME,NAME]

Needs torch with CUDA and transformers. Weights are random and made on the GPU. What is compared is
what PyTorch's allocator says was allocated at the peak, with the estimate less the process's
context and what the allocator holds idle, which are compared with what the process has and what
the allocator holds. Weights and cache are compared with the tensors' own bytes. Every part is
printed with its estimate, so that a formula that is off can be found from one run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from anydevice._plan.estimates import (
    CONTEXT,
    ForwardPass,
    MemoryEstimate,
    estimate_inference,
    moments,
)
from anydevice._plan.training import estimate_training

Row = tuple[str, str, bool]
MIB = 2**20
NEW_TOKENS = 4

LLAMA_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
LLAMA_8B = LLAMA_1B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "tie_word_embeddings": False,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
}
QWEN2_1B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
GEMMA_2B = {
    "model_type": "gemma",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 256000,
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "sliding_window": 512,
}
PHI3_MINI = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
}
PHI_2 = {
    "model_type": "phi",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 51200,
}
MIXTRAL_SMALL = {
    "model_type": "mixtral",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK_SMALL = {
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 129280,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}

INFERENCE = (  # config, context, batch, dtype
    (LLAMA_1B, 4096, 4, "bfloat16"),
    (LLAMA_1B, 2048, 2, "float32"),
    (LLAMA_8B, 2048, 1, "bfloat16"),
    (LLAMA_8B, 8192, 4, "bfloat16"),
    (MISTRAL_7B, 8192, 2, "float16"),
    (QWEN2_1B, 2048, 16, "bfloat16"),
    (QWEN3_4B, 8192, 2, "bfloat16"),
    (MIXTRAL_SMALL, 4096, 2, "bfloat16"),
    (GEMMA_2B, 4096, 2, "bfloat16"),
    (GEMMA3_1B, 8192, 4, "bfloat16"),
    (PHI3_MINI, 4096, 4, "float16"),
    (PHI_2, 2048, 4, "float32"),
    (DEEPSEEK_SMALL, 4096, 2, "bfloat16"),
)

LLAMA_SMALL = LLAMA_1B | {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
LLAMA_GROUPED = LLAMA_SMALL | {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 18,
    "num_key_value_heads": 4,
}
QWEN3_SMALL = QWEN3_4B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
}

TRAINING = (  # config, context, batch, mixed, checkpointing
    (LLAMA_SMALL, 1024, 8, False, False),
    (LLAMA_SMALL, 1024, 8, True, False),
    (LLAMA_GROUPED, 2048, 4, True, True),
    (LLAMA_GROUPED, 1024, 4, False, True),
    (QWEN3_SMALL, 1024, 4, True, False),
    (LLAMA_GROUPED, 512, 2, False, False),
)


def shown(size: float) -> str:
    return f"{size / MIB:,.0f}"


def released() -> None:
    """Everything that is not in use goes back to the driver, workspaces included."""
    import torch

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def made(config: dict[str, Any], dtype: str) -> Any:
    """A model with random weights on the GPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {name: value for name, value in config.items() if name != "model_type"}
    full = AutoConfig.for_model(config["model_type"], **known)
    with torch.device("cuda"):
        make: Any = AutoModelForCausalLM.from_config
        return make(full, dtype=getattr(torch, dtype)).to("cuda")


def process_bytes() -> int:
    """What the device as a whole has in use; the process is alone on it."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def kernel(model: Any, batch: int, tokens: int, dtype: str) -> str:
    """The attention kernel that PyTorch takes for a prompt."""
    import torch

    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = (config.num_attention_heads, config.num_key_value_heads)
    queries, keys = (
        torch.empty(batch, count, tokens, size, dtype=getattr(torch, dtype), device="cuda")
        for count in heads
    )
    grouped = heads[0] != heads[1]
    choice = torch._fused_sdp_choice(
        queries, keys, keys, None, 0.0, True, scale=None, enable_gqa=grouped
    )
    return str(torch.nn.attention.SDPBackend(choice)).rpartition(".")[2]


def inference_name(config: dict[str, Any], context: int, batch: int, dtype: str) -> str:
    return f"{config['model_type']} {config['hidden_size']} {dtype} {context}×{batch}"


def training_name(
    config: dict[str, Any], context: int, batch: int, mixed: bool, checkpointing: bool
) -> str:
    way = f"{'mixed' if mixed else 'float32'}{' checkpointed' if checkpointing else ''}"
    return f"train {config['model_type']} {config['hidden_size']} {way} {context}×{batch}"


def inference(config: dict[str, Any], context: int, batch: int, dtype: str) -> Row:
    import torch
    from transformers import StaticCache

    name = inference_name(config, context, batch, dtype)
    estimate = estimate_inference(config, context=context, batch=batch, dtype=dtype)
    released()
    before = torch.cuda.memory_allocated()
    model = made(config, dtype).eval()
    gc.collect()
    weights = torch.cuda.memory_allocated() - before
    tensors = {each.data_ptr(): each for each in (*model.parameters(), *model.buffers())}
    own = sum(each.untyped_storage().nbytes() for each in tensors.values())
    chosen = kernel(model, batch, context, dtype)
    released()
    tokens = torch.randint(0, config["vocab_size"], (batch, context - NEW_TOKENS), device="cuda")
    peaks = {}
    with torch.no_grad():
        cache: Any = StaticCache(config=model.config, max_cache_len=context)
        for phase in ("prefill", "decode"):
            torch.cuda.reset_peak_memory_stats()
            for _ in range(1 if phase == "prefill" else NEW_TOKENS - 1):
                output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                logits = output.logits[:, -1, :].to(copy=True, dtype=torch.float32)
                tokens = logits.argmax(-1)[:, None]
                del output, logits
            torch.cuda.synchronize()
            peaks[phase] = torch.cuda.max_memory_allocated() - before
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    reserved, process = torch.cuda.memory_reserved(), process_bytes()
    del cache, tokens
    gc.collect()
    kept = torch.cuda.memory_allocated() - before - weights
    measured = max(peaks.values())
    parts = estimate.overheads
    counted = estimate.total - CONTEXT - parts.idle
    ratio = counted / measured
    print(f"\n{name}: kernel {chosen}; MiB, estimated → measured")
    print(
        f"  weights {estimate.weights} → {own} bytes, with rounding "
        f"{estimate.weights + parts.rounding} → {weights}, "
        f"cache {estimate.kv_cache} → {held} bytes"
    )
    for phase, line in _phases(estimate, peaks, weights + held, kept):
        print(f"  {phase:<8} {line}")
    print(
        f"  workspace kept {shown(kept)}; idle {shown(parts.idle)} → {shown(reserved - measured)}; "
        f"reserved {shown(counted + parts.idle)} → {shown(reserved)}; process {shown(process)} "
        f"(context {shown(process - reserved)}, estimate of it {shown(CONTEXT)}); "
        f"total {shown(estimate.total)} → {shown(process)}"
    )
    said = f"{shown(counted)} → {shown(measured)} MiB: {ratio:.3f} (0.97 to 1.10)"
    exact = estimate.kv_cache == held and estimate.weights == own
    return name, said, 0.97 <= ratio <= 1.10 and exact


def _phases(
    estimate: MemoryEstimate, peaks: dict[str, int], there: int, kept: int
) -> Iterator[tuple[str, str]]:
    """Each phase's activations, estimated and measured, and the moments that were thought of."""
    import torch

    shape = estimate.shape
    assert shape is not None
    width = getattr(torch, estimate.dtype).itemsize
    for phase, peak in peaks.items():
        tokens = estimate.context if phase == "prefill" else 1
        found = moments(shape, ForwardPass(estimate.batch, tokens, estimate.context, width))
        largest = sorted(found.items(), key=lambda item: -item[1])[:4]
        listed = ", ".join(f"{name} {shown(size)}" for name, size in largest)
        yield phase, f"{shown(largest[0][1])} → {shown(peak - there - kept)} ({listed})"


def training(
    config: dict[str, Any], context: int, batch: int, mixed: bool, checkpointing: bool
) -> Row:
    import torch

    name = training_name(config, context, batch, mixed, checkpointing)
    estimate = estimate_training(
        config, context=context, batch=batch, mixed=mixed, checkpointing=checkpointing
    )
    released()
    before = torch.cuda.memory_allocated()
    model = made(config, "float32").train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.randint(0, config["vocab_size"], (batch, context), device="cuda")
    stages: dict[str, int] = {}
    for _ in range(3):
        for stage, run in _stages(model, optimizer, tokens, mixed):
            torch.cuda.reset_peak_memory_stats()
            run()
            torch.cuda.synchronize()
            stages[stage] = torch.cuda.max_memory_allocated() - before
            stages[f"after {stage}"] = torch.cuda.memory_allocated() - before
    measured = max(stages.values())
    reserved, process = torch.cuda.memory_reserved(), process_bytes()
    ratio = (estimate.total - CONTEXT) / measured
    print(f"\n{name}: {model.num_parameters():,} parameters; MiB")
    parts = {n: v for n, v in vars(estimate).items() if isinstance(v, int) and v > 4096}
    print("  estimated", ", ".join(f"{part} {shown(size)}" for part, size in parts.items()))
    print(f"  estimated peak at {estimate.peak_at}; measured", end=" ")
    print(", ".join(f"{stage} {shown(size)}" for stage, size in stages.items()))
    print(f"  reserved {shown(reserved)}; process {shown(process)}; total {shown(estimate.total)}")
    said = f"{shown(estimate.total - CONTEXT)} → {shown(measured)} MiB: {ratio:.3f} (0.85 to 1.15)"
    return name, said, 0.85 <= ratio <= 1.15


def _stages(
    model: Any, optimizer: Any, tokens: Any, mixed: bool
) -> Iterator[tuple[str, Callable[[], None]]]:
    import torch

    losses: list[Any] = []

    def forward() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
            losses.append(model(input_ids=tokens, labels=tokens, use_cache=False).loss)

    yield "forward", forward
    yield "backward", lambda: losses.pop().backward()
    yield "step", optimizer.step


def main() -> list[Row]:
    import torch
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smaller half of each")
    parser.add_argument(
        "--only", default="", help="rows whose name begins with one of these, with commas between"
    )
    asked = parser.parse_known_args()[0]
    quick, only = asked.quick, tuple(filter(None, asked.only.split(",")))
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "device": torch.cuda.get_device_name(),
        "python": sys.version.split()[0],
    }
    print(json.dumps(versions))
    tasks: list[tuple[Callable[..., Row], tuple[Any, ...]]] = [
        *((inference, each) for each in (INFERENCE[::3] if quick else INFERENCE)),
        *((training, each) for each in (TRAINING[::2] if quick else TRAINING)),
    ]
    rows: list[Row] = []
    for task, arguments in tasks:
        named = (inference_name if task is inference else training_name)(*arguments)
        if only and not named.startswith(only):
            continue
        try:
            rows.append(task(*arguments))
        except Exception as error:
            rows.append((named, f"{type(error).__name__}: {error}", False))
    print()
    for name, said, right in rows:
        print(f"{'✓' if right else '✗'} {name:<48} {said}")
    return rows


if __name__ == "__main__":
    main()
