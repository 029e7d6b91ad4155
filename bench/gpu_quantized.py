"""Quantized models on CUDA: kernels checked, tiles tuned, a 7B shape measured, text compared.

    PYTHONPATH=src python bench/gpu_quantized.py [check] [tune] [speed] [text] [experts]

Needs an NVIDIA card of the size of an H200; all but `tune` run unless some are named. `check`
runs the cases that decide about trust. `tune` times each product alone over many tiles. `speed`
runs a 7B shape with random weights through the public API, in each scheme and in bfloat16: a
stream, batches, and a prompt. `text` scores a story with stories260K, which lies in the folder
that `ANYDEVICE_DATA` names, beside float32 on the CPU. `experts` runs a small gpt-oss in MXFP4,
beside NumPy. `--only q4_k,q8_0` names schemes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import llm as language_models
import numpy as np
import torch
from quantized_text import DATA, PROMPT, REPLY, ROUNDED, STORY

import anydevice
from anydevice import llm
from anydevice._check import verify
from anydevice._check.cases.quantized import SCHEMES
from anydevice._core.quantized import FP4_TABLE, SUPER_BLOCK, QuantizedWeight, low_bits
from anydevice._engines.torch.triton import decode_products, quantized
from anydevice._engines.torch.triton.decode_products import ProductTile
from anydevice._formats.quantized import FLOAT8_TABLES
from anydevice._llm.description import describe
from anydevice._llm.weights import parameters_of, tree_of
from anydevice._ops.trusted_kernels import on_trial
from anydevice._plan.config import as_config
from anydevice._plan.plan import PREFILL_CHUNK

HALF = torch.bfloat16
LAYERS = "decoder_layer", "prompt_layer", "final_logits"
SHAPES = {
    "qkv": (6144, 4096, False),
    "output": (4096, 4096, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "head": (32000, 4096, False),
}
BARS = {"q8_0": 420.0, "q4_0": 520.0, "q4_1": 520.0, "q4_k_m": 450.0, "fp8": 390.0}
"""Tokens a second of one stream behind a prompt of 512."""
AGAINST_BFLOAT16 = {8: 1.4, 32: 1.1, 64: 0.9}
"""Of batches in Q4_K_M, by rows."""
PROMPTS = {"q8_0": 0.9, "q4_k_m": 0.9, "fp8": 1.2}
"""Of prompts of 4,096 tokens, bfloat16 being 1."""
Row = tuple[str, str, bool | None]


def random_weight(scheme: str, rows: int, columns: int) -> QuantizedWeight:
    """Make random codes and scales on the card; numbers have a spread of about 1 / √columns."""
    bits, block, zero, minimums, integer, table = 8, columns, 0, False, False, None
    if scheme == "fp8":
        table = FLOAT8_TABLES["float8_e4m3fn"]
    else:
        layout = SCHEMES[scheme]
        bits, block, zero = layout.bits, layout.block, layout.zero
        minimums, integer = layout.minimums, layout.integer_scales
    low = low_bits(bits)
    spread = columns**-0.5 * 2.0 ** (1 - bits)

    def packed(some: int) -> torch.Tensor:
        shape = rows, columns * some // 8
        return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")

    def scales(size: int, spread: float) -> torch.Tensor:
        return (torch.rand(rows, size, device="cuda") * spread).half()

    fields: dict[str, Any] = {
        "codes": packed(low),
        "high": packed(bits - low) if bits > low else None,
    }
    if integer:
        blocks, groups = columns // block, columns // SUPER_BLOCK
        many = partial(torch.randint, 1, 64, (rows, blocks), dtype=torch.int8, device="cuda")
        fields |= {"scales": many(), "super_scales": scales(groups, spread / 32)}
        if minimums:
            fields |= {"minimums": -many(), "super_minimums": scales(groups, spread / 8)}
    elif table is not None:
        fields["codes"] = (
            (torch.randn(rows, columns, device="cuda") * 16)
            .to(torch.float8_e4m3fn)
            .view(torch.uint8)
        )
        fields["scales"] = torch.full((rows, 1), columns**-0.5 / 16, device="cuda")
    else:
        fields["scales"] = scales(columns // block, spread)
        if minimums:
            fields["minimums"] = -scales(columns // block, spread * 8)
    return QuantizedWeight(scheme, (rows, columns), bits, block, **fields, zero=zero, table=table)


# Are they right?


def check(options: argparse.Namespace) -> Iterator[Row]:
    """Judge the kernels by the cases that decide about trust."""
    here = verify.runner(anydevice.device("cuda", engine="torch"), "torch")
    for name in ("quantized_linear", "quantized_embedding", *LAYERS):
        for dtype in options.dtypes.split(","):
            step = verify._Step(verify._row_of(name), "kernel", dtype)
            with on_trial((name,), dtype, str(here.place)):
                verdict, _ = verify._judge(step, here, lambda case: None)
            yield f"{name}, {dtype}", f"{verdict}", verdict.state == "right"


# Which tiles


def candidates(rows: int, kind: str, bits: int) -> list[ProductTile]:
    count, columns, gated = SHAPES[kind]
    found = []
    if rows == 1:
        for outputs, inputs, warps in itertools.product(
            (1, 2, 4, 8, 16), (1024, 2048, 4096, 8192), (1, 2, 4, 8)
        ):
            if inputs > columns:
                continue
            words = outputs * (2 if gated else 1) * inputs * (4 if bits < 8 else 8) // 32
            if 4 <= words / (32 * warps) <= 32:
                found.append(ProductTile(outputs, inputs, warps))
        return found
    for outputs, inputs, warps, stages, splits in itertools.product(
        (16, 32, 64, 128), (128, 256, 512), (2, 4, 8), (2, 3), (1, 2, 4, 8)
    ):
        lines = outputs * (2 if gated else 1)
        programs = count // lines * splits
        if (
            lines > 128
            or not 130 <= programs <= 2500
            or not 2**12 <= lines * inputs <= 2**15
            or columns < splits * inputs * 4
        ):
            continue
        found.append(ProductTile(outputs, inputs, warps, stages, splits))
    return found


def compile_tile(scheme: str, kind: str, rows: int, tile: ProductTile) -> str:
    try:
        run = launches(scheme, kind, rows, tile, 1, count=512)
        run()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"
    return ""


def launches(
    scheme: str, kind: str, rows: int, tile: ProductTile, copies: int, count: int = 0
) -> Any:
    own, columns, gated = SHAPES[kind]
    count = count or own
    weights = KEPT.get((scheme, kind)) if count == own else None
    if weights is None:
        weights = [random_weight(scheme, count, columns) for _ in range(copies)]
        if count == own:
            KEPT.clear()
            KEPT[scheme, kind] = weights
    rounded = rows == 1
    x = torch.randn(rows, columns, device="cuda", dtype=HALF)
    arranged = quantized.Arranged(x, None, 0.0, 1 if weights[0].low_bits == 8 else 2, rounded)
    wide = count // (2 if gated else 1)
    out = torch.empty(rows, wide, device="cuda", dtype=HALF)
    residual = torch.randn_like(out) if kind in ("output", "down") else None
    in_order, tile_rows = kind == "qkv", 1 if rounded else quantized._rows_of_tile(rows)
    tiles = {(f"{kind}, {quantized._bits(weights[0])}", tile_rows): tile}

    def run_float8() -> None:
        for weight in weights:
            decode_products.product(
                kind, x, weight.codes.view(torch.float8_e4m3fn), scales=weight.scales,
                gated=gated, residual=residual, tiles={(kind, 1): tile}, in_order=in_order,
            )  # fmt: skip

    def run() -> None:
        for weight in weights:
            fitted = quantized.tile_of(kind, tile_rows, weight, tiles, in_order)
            quantized._multiply(
                fitted, arranged, weight, None, residual, out, 0, wide, gated, 1.0, rounded, 1
            )

    return run_float8 if scheme == "fp8" and rounded else run


KEPT: dict[Any, Any] = {}


def timed(run: Any, copies: int) -> float:
    """The microseconds of one launch in a graph of several."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    for _ in range(2):
        graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(8):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / 8 / copies


def tune(options: argparse.Namespace) -> Iterator[Row]:
    schemes = options.only.split(",") if options.only else ["q4_0", "q4_k", "q8_0", "q6_k"]
    context = multiprocessing.get_context("spawn")
    many = [int(each) for each in options.batches.split(",")]
    ends = time.monotonic() + options.seconds
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), mp_context=context) as pool:
        jobs: dict[Any, Any] = {}
        for rows, scheme, kind in itertools.product(many, schemes, SHAPES):
            if scheme == "q6_k" and kind not in ("down", "head", "qkv"):
                continue
            bits = 8 if scheme in ("q8_0", "fp8") else 4
            for tile in candidates(rows, kind, bits)[:: options.stride]:
                jobs[rows, scheme, kind, tile] = pool.submit(compile_tile, scheme, kind, rows, tile)
        best: dict[Any, tuple[float, ProductTile]] = {}
        bytes_of: dict[Any, float] = {}
        for (rows, scheme, kind, tile), job in jobs.items():
            if time.monotonic() > ends:
                print("out of time", flush=True)
                for other in jobs.values():
                    other.cancel()
                break
            said = job.result()
            if said:
                continue
            count, columns, _ = SHAPES[kind]
            copies = max(3, int(300e6 / (count * columns)))
            try:
                took = timed(launches(scheme, kind, rows, tile, copies), copies)
            except Exception as error:
                print(kind, tile, type(error).__name__, str(error)[:80], flush=True)
                continue
            size = sum(x.nbytes for x in KEPT[scheme, kind][0].arrays.values())
            bytes_of[rows, scheme, kind] = size
            if (rows, scheme, kind) not in best or took < best[rows, scheme, kind][0]:
                best[rows, scheme, kind] = took, tile
        for key, (took, tile) in best.items():
            yield str(key), f"{took:.2f} µs, {bytes_of[key] / took / 1e6:.2f} TB/s, {tile}", None


# How fast


def random_model(scheme: str, context: int = 8192) -> llm.LanguageModel:
    """Make a 7B shape with random weights; Q4_K_M has Q6_K in the head and half of two matrices."""
    device = anydevice.device("cuda", engine="torch")
    description = describe(as_config(language_models.MISTRAL))
    layers = len(description.layers)
    arrays: dict[Any, Any] = {}
    for parameter in parameters_of(description):
        path, shape = parameter.path, parameter.shape
        name = path[-2] if len(path) > 1 else path[0]
        if len(shape) < 2 or scheme == "bfloat16":
            spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
            random = torch.randn(shape, device="cuda", dtype=HALF) * spread
            arrays[path] = random if len(shape) > 1 else random + 1
            continue
        kind = "q6_k" if (scheme, path[0]) == ("q4_k", "head") else scheme
        if scheme == "q4_k_m":
            number = path[1] if path[0] == "layers" else 0
            more = number < layers // 8 or number >= 7 * layers // 8 or number % 3 == 2
            kind = "q6_k" if path[0] == "head" or (more and name == "down") else "q4_k"
            if more and name == "qkv":
                keys = 1024
                arrays[path] = (
                    random_weight("q4_k", shape[0] - keys, shape[1]),
                    random_weight("q6_k", keys, shape[1]),
                )
                continue
        arrays[path] = random_weight(kind, *shape)
    weights = scheme if scheme in SCHEMES or scheme == "fp8" else "stored"
    plan = anydevice.plan_inference(
        language_models.MISTRAL, device, context=context, dtype="bfloat16",
        prefill=PREFILL_CHUNK["other"], weights=weights,
    )  # fmt: skip
    tokenizer: Any = language_models.Digits()
    return llm.LanguageModel(description, tree_of(arrays), tokenizer, device, plan, f"7B, {scheme}")


def measure(scheme: str, runs: int, batches: list[int]) -> tuple[dict[str, float], list[Row]]:
    """Measure the rates of a scheme, and its memory; there is no plan of a mixture."""
    model = random_model(scheme)
    median = partial(language_models.median_of, runs)
    found = {"stream": median(partial(language_models.streamed, model, 512, 256))}
    found["prompt"] = 4096 / median(partial(language_models.first_token, model, 4096))
    for rows in batches:
        found[f"{rows} rows"] = median(partial(language_models.together, model, rows))
    memory: list[Row] = []
    if scheme != "q4_k_m":
        memory = [(f"{scheme}, peak", *rest) for _, *rest in language_models.against_plan(model)]
    del model
    gc.collect()
    anydevice.release(anydevice.device("cuda", engine="torch"))
    return found, memory


def speed(options: argparse.Namespace) -> Iterator[Row]:
    device = anydevice.device("cuda", engine="torch")
    began = time.perf_counter()
    kept = anydevice.warm_up(device, dtypes=["bfloat16"])
    said = f"{time.perf_counter() - began:.1f} s, refused {kept.refused}, {kept.problem}"
    yield "kernels verified", said, not kept.refused
    schemes = options.only.split(",") if options.only else list(BARS)
    batches = [] if options.alone else [8, 32, 64]
    plain, memory = measure("bfloat16", options.runs, batches)
    yield "bfloat16", str({name: round(rate, 1) for name, rate in plain.items()}), None
    yield from memory
    for scheme in schemes:
        found, memory = measure(scheme, options.runs, batches if scheme == "q4_k_m" else [])
        yield from memory
        rate, bar = found["stream"], BARS[scheme]
        yield f"{scheme}, stream", f"{rate:.1f} tok/s (bar {bar:g})", rate >= bar
        share, bar = found["prompt"] / plain["prompt"], PROMPTS.get(scheme, 0.0)
        said = f"{found['prompt']:.0f} tok/s, {share:.2f} × bfloat16 (bar {bar})"
        yield f"{scheme}, prompt of 4,096", said, share >= bar if bar else None
        for rows, bar in AGAINST_BFLOAT16.items():
            name = f"{rows} rows"
            if name in found:
                share = found[name] / plain[name]
                said = f"{found[name]:.0f} tok/s, {share:.2f} × bfloat16 (bar {bar})"
                yield f"{scheme}, {name}", said, share >= bar


# Which text


def text(options: argparse.Namespace) -> Iterator[Row]:
    card, host = (anydevice.device(name, engine="torch") for name in ("cuda", "cpu"))
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("q8_0", "q4_0", "q4_1"):
            path = llm.quantize(DATA / "stories260K", Path(folder, f"{kind}.gguf"), kind).path
            right = llm.load(path, host, "float32", activations="exact")
            expected = right.generate(PROMPT, REPLY).tokens
            for dtype, exact in itertools.product(
                ("bfloat16", "float16", "float32"), (None, "exact")
            ):
                model = llm.load(path, card, dtype, activations=exact)
                more = model.score(STORY).perplexity / right.score(STORY).perplexity - 1
                found = model.generate(PROMPT, REPLY).tokens
                same = sum(one == other for one, other in zip(found, expected, strict=True))
                said = f"perplexity {more:+.3%} (bar 0.5 %), {same} of {REPLY} tokens equal"
                yield f"{kind}, {dtype}, {exact or '8 bits'}", said, abs(more) <= ROUNDED


GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 200, "sliding_window": 16, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_theta": 150000, "tie_word_embeddings": False,
    "swiglu_limit": 7.0, "attention_bias": True,
}  # fmt: skip


def experts(options: argparse.Namespace) -> Iterator[Row]:
    from tests.llm.random_weights import random_parameters

    card, host = anydevice.device("cuda", engine="torch"), anydevice.device("cpu", engine="numpy")
    description, random = describe(as_config(GPT_OSS)), np.random.default_rng(0)
    parameters = random_parameters(description, 0, host, "float32")
    for layer in parameters["layers"]:
        for name in ("gate_up", "down"):
            shape = tuple(layer["experts"][name].shape)
            codes: Any = random.integers(0, 256, (*shape[:-1], shape[-1] // 2)).astype(np.uint8)
            exponents = random.integers(-5, -3, (*shape[:-1], shape[-1] // 32))
            scales: Any = np.float32(2 * shape[-1] ** -0.5) * 2.0**exponents
            layer["experts"][name] = QuantizedWeight(
                "mxfp4", shape, 4, 32, codes, scales.astype(np.float32), table=FP4_TABLE
            )
    replies = []
    for device in (host, card):
        plan = anydevice.plan_inference(GPT_OSS, device, context=256, dtype="float32")
        tokenizer: Any = language_models.Digits()
        moved = anydevice.to_device(parameters, device)
        model = llm.LanguageModel(description, moved, tokenizer, device, plan)
        replies.append(model.generate(language_models.numbers(40), 24, logprobs=True))
    same = sum(a == b for a, b in zip(replies[0].tokens, replies[1].tokens, strict=True))
    off = max(abs(a - b) for a, b in zip(replies[0].logprobs, replies[1].logprobs, strict=True))
    yield (
        "gpt-oss in MXFP4",
        f"{same} of 24 tokens equal, log probabilities off by {off:.1e}",
        same == 24,
    )


PARTS = {"check": check, "tune": tune, "speed": speed, "text": text, "experts": experts}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", default="")
    parser.add_argument("--dtypes", default="float16,bfloat16")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="no batches")
    options = parser.parse_args()
    for name in options.parts or [name for name in PARTS if name != "tune"]:
        for label, said, met in PARTS[name](options):
            print(f"{language_models.MARKS[met]} {label:<32} {said}", flush=True)


if __name__ == "__main__":
    main()
