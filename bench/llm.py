"""Language models: as fast as they should be, and the same as in transformers.

    PYTHONPATH=src python bench/llm.py [cpu] [equal] [gpu] [start] [quantized] [engines] [schemes]

`cpu` measures SmolLM2 from its GGUF file (make chat fetches it) in float32 with one prompt, every
engine and transformers' `generate` in turn; `equal` compares 100 tokens of five prompts. `gpu`
measures a 7B shape with random weights on a CUDA card: steps, prompts, batches, memory, beside
transformers with a compiled static cache. `start` measures from the start of a process to its first
token, with such a model in the page cache. `quantized` measures GGUF files on the CPU beside
llama.cpp, which `--peer-python` has (see `quantized_cpu.py`); `engines` and `schemes` what their
weights cost in text (see `quantized_text.py`). Without names, the first two run, and on a card the
first four.
Prints a line for each figure: ✓ where it meets its bar, ✗ where not, · where it has none. Run it on
a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from quantized_cpu import THREADS, quantized
from quantized_text import engines, schemes

import anydevice
from anydevice import llm
from anydevice._llm.description import describe
from anydevice._llm.generate import runner_for, slots_for
from anydevice._llm.sampling import sampling
from anydevice._llm.weights import parameters_of
from anydevice._plan.config import as_config
from anydevice._plan.plan import PREFILL_CHUNK
from anydevice.errors import AnyDeviceError

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
SMOLLM2 = ROOT / ".cache/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BARS = {"torch": 1.2, "jax": 0.8, "mlx": 0.8, "numpy": 0.0}
"""How fast engines are on the CPU, transformers being 1."""
PROMPTS: list[Any] = [
    "The capital of France is a city that",
    [{"role": "user", "content": "What is a computer? Answer in three sentences."}],
    [
        {"role": "system", "content": "You are a helpful teacher."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "def fibonacci(n):\n    ",
    "In the year 1969, the first people",
]
TOKENS = 100
MISTRAL = {
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
CONTEXT = 8192
MARKS = {True: "✓", False: "✗", None: "·"}

Row = tuple[str, str, bool | None]
"""A label, a figure, and whether it meets its bar; `None` if it has none."""
Options = argparse.Namespace


# --- on this machine's CPU ----------------------------------------------------------------------


def their_model(file: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    return model.eval()


def their_tokens(model: Any, ids: list[int], count: int, ends: tuple[int, ...]) -> list[int]:
    import torch

    prompt = torch.tensor([ids])
    with torch.inference_mode():
        found = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=list(ends) or None,
            pad_token_id=ends[0] if ends else 0,
        )
    tokens: list[int] = found[0, len(ids) :].tolist()
    return tokens[:-1] if tokens[-1] in ends else tokens


def our_models(file: Path) -> Iterator[tuple[str, llm.LanguageModel]]:
    for engine in BARS:
        try:
            yield engine, llm.load(file, anydevice.device("cpu", engine=engine), "float32")
        except AnyDeviceError as error:
            print(f"  {engine}: {error}")


def cpu(options: Options) -> Iterator[Row]:
    """100 tokens after one prompt: the median of alternating runs, of all that wait for them."""
    theirs, models = their_model(options.model), dict(our_models(options.model))
    tokenizer = next(iter(models.values())).tokenizer
    ids = tokenizer.encode(PROMPTS[4])
    count = options.tokens
    runs: dict[str, Callable[[], Any]] = {
        "transformers": lambda: their_tokens(theirs, ids, count, ())
    }
    for engine, model in models.items():
        model.tokenizer.eos_ids = ()  # both write all tokens
        runs[engine] = partial(model.generate, ids, count)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.runs + 1):
        for name, run in runs.items():
            time.sleep(0.3)  # threads of the one before still look for work
            began = time.perf_counter()
            run()
            if turn:
                rates[name].append(count / (time.perf_counter() - began))
    middle = {name: statistics.median(found) for name, found in rates.items()}
    base = middle.pop("transformers")
    yield "transformers", f"{base:.1f} tok/s", None
    for name, rate in middle.items():
        ratio = rate / base
        bar = BARS[name]
        said = f"{rate:.1f} tok/s, {ratio:.2f} × transformers' generate (bar {bar})"
        yield f"SmolLM2 on {name}", said, ratio >= bar


def equal(options: Options) -> Iterator[Row]:
    """Greedy tokens, float32, on the same unpacked weights."""
    theirs, expected = their_model(options.model), None
    for engine, model in our_models(options.model):
        encode, chat = model.tokenizer.encode, model.tokenizer.encode_chat
        prompts = [encode(each) if isinstance(each, str) else chat(each) for each in PROMPTS]
        ends = model.tokenizer.eos_ids
        if expected is None:
            expected = [their_tokens(theirs, ids, TOKENS, ends) for ids in prompts]
        found = [list(model.generate(ids, TOKENS).tokens) for ids in prompts]
        same = sum(one == other for one, other in zip(found, expected, strict=True))
        together = [list(reply.tokens) for reply in model.generate(prompts, TOKENS)]
        alike = sum(one == other for one, other in zip(together, expected, strict=True))
        said = f"{same} of 5 prompts equal alone, {alike} of 5 together"
        yield f"SmolLM2 on {engine}", said, same == alike == len(PROMPTS)


# --- on a card ----------------------------------------------------------------------------------


class Digits:
    """A tokenizer for weights that mean nothing: every token is a letter."""

    eos_ids: tuple[int, ...] = ()
    decoder_kinds = ("ByteLevel",)

    def token_bytes(self, token: int) -> bytes:
        return b"a"


def random_model(device: Any) -> llm.LanguageModel:
    from tests.llm.random_weights import random_parameters

    config = as_config(MISTRAL)
    description = describe(config)
    parameters = random_parameters(description, 0, device, "bfloat16")
    plan = anydevice.plan_inference(
        MISTRAL, device, context=CONTEXT, dtype="bfloat16", prefill=PREFILL_CHUNK["other"]
    )
    tokenizer: Any = Digits()
    return llm.LanguageModel(
        description, parameters, tokenizer, device, plan, "7B of random weights"
    )


def numbers(length: int) -> list[int]:
    return [7 + at % 1000 for at in range(length)]


def streamed(model: llm.LanguageModel, length: int, count: int) -> float:
    """Tokens a second through `stream`, each read by the host, behind a prompt."""
    stream = model.stream(numbers(length), count, temperature=0.8, seed=1)
    for _ in stream:
        pass
    return stream.reply.speed.decode


def replayed(model: llm.LanguageModel, length: int, count: int) -> float:
    """Steps a second of the graph alone, which nobody reads."""
    executor = model._executor
    slots = slots_for(executor, 1, length, count + 16, model.context)
    runner: Any = executor.idle_runner(1, slots) or runner_for(executor, 1, slots)
    with executor.lock():
        runner.prefill([numbers(length)], sampling(0.8, seed=1)).read()
        for _ in range(8):
            step = runner.step()
        step.read()
        began = time.perf_counter()
        for _ in range(count):
            runner._replay._graph.replay()  # nothing of it is copied to the host
        executor.engine.synchronize(model.device)
        seconds = time.perf_counter() - began
    executor.keep_runner(1, slots, runner)
    return count / seconds


def median_of(runs: int, measure: Callable[[], float]) -> float:
    measure()
    return statistics.median(measure() for _ in range(runs))


def gpu(options: Options) -> Iterator[Row]:
    """Steps, prompts, batches and memory of a 7B shape in bfloat16."""
    device = anydevice.device("cuda", engine="torch")
    anydevice.warm_up(device, dtypes=["bfloat16"])
    model = random_model(device)
    for length, bar, goal in ((512, 272, 290), (4096, 248, 265)):
        rate = median_of(options.runs, partial(streamed, model, length, 256))
        said = f"{rate:.1f} tok/s through stream (bar {bar}, goal {goal})"
        yield f"7B, context {length}", said, rate >= bar
        share = rate / median_of(options.runs, partial(replayed, model, length, 256))
        yield f"7B, stream {length}", f"{share:.3f} of bare steps (bar 0.98)", share >= 0.98
    for rows, bar in ((8, 1800), (32, 5500)):
        rate = median_of(options.runs, partial(together, model, rows))
        yield f"7B, {rows} prompts", f"{rate:.0f} tok/s (bar {bar})", rate >= bar
    rate = 4096 / median_of(options.runs, partial(first_token, model, 4096))
    yield "7B, prompt of 4,096", f"{rate:.0f} tok/s (bar 42000, goal 45000)", rate >= 42_000
    seconds = median_of(options.runs, partial(first_token, model, 512))
    yield "7B, first token of 512", f"{1000 * seconds:.1f} ms (bar 16)", seconds <= 0.016
    yield from against_plan(model)
    del model
    anydevice.release(device)
    yield from compiled_static_cache(options)


def together(model: llm.LanguageModel, rows: int) -> float:
    """Tokens a second of all rows, around a context of 1,024."""
    prompts = [numbers(1024 - 64) for _ in range(rows)]
    found = model.generate(prompts, 128, temperature=0.8, seed=1)
    return float(sum(reply.speed.decode for reply in found))


def first_token(model: llm.LanguageModel, length: int) -> float:
    return float(model.generate(numbers(length), 1).speed.first_token)


def against_plan(model: llm.LanguageModel) -> Iterator[Row]:
    """What PyTorch held at its peak with a full context, beside the plan without the context."""
    device, estimate = model.device, model.plan.estimate
    memory = model._executor.engine.memory
    model._executor.idle_runner(0, 0)  # which has a cache of its own
    memory.release(device)
    memory.reset_peak(device)
    model.generate(numbers(CONTEXT - 16), 15)
    use = memory.use(device)
    assert use is not None
    assert use.peak is not None
    planned = estimate.total - estimate.overhead
    ratio = use.peak / planned
    said = f"{use.peak / 2**30:.2f} GiB, {ratio:.3f} of the plan (bar within 3 %)"
    yield "7B, peak memory", said, abs(ratio - 1) <= 0.03


def compiled_static_cache(options: Options) -> Iterator[Row]:
    """Transformers on the same card, as its own documentation makes it fastest."""
    if importlib.util.find_spec("transformers") is None:
        yield "transformers, compiled", "not installed here", None
        return
    import torch
    import transformers

    values: dict[str, Any] = {**MISTRAL}
    theta = values.pop("rope_theta")
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    kind: Any = transformers.AutoModelForCausalLM
    with torch.device("cuda"):
        model = kind.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None

    def seconds(ids: Any, count: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                cache_implementation="static",
            )
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def more(ids: Any) -> float:
        """The seconds of 256 tokens, without the prompt."""
        return seconds(ids, 264) - seconds(ids, 8)

    for length in (512, 4096):
        ids = torch.tensor([numbers(length)], device="cuda")
        rate = 256 / median_of(options.runs, partial(more, ids))
        yield f"transformers, {length}", f"{rate:.1f} tok/s with a compiled static cache", None


# --- from the start of a process ----------------------------------------------------------------

START = """
import sys, time
from anydevice import llm
model = llm.load(sys.argv[1], "cuda", context=4096, progress=False)
for piece in model.stream([5] * 64, 1): pass
print(time.time())
"""


def start(options: Options) -> Iterator[Row]:
    """From the start of Python to the first token of a 7B model whose file is in memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder)
        found = []
        for turn in range(options.runs + 1):
            began = time.time()
            done = subprocess.run(
                [sys.executable, "-c", START, name], capture_output=True, text=True, check=False
            )
            if done.returncode:
                yield "7B, start to first token", done.stderr[-300:], False
                return
            if turn:  # the first finds kernels to compile
                found.append(float(done.stdout.split()[-1]) - began)
    seconds = statistics.median(found)
    yield "7B, start to first token", f"{seconds:.1f} s (bar 8)", seconds <= 8


def write_folder(folder: Path) -> None:
    """A folder as Hugging Face's libraries save one, of zeros except for what norms need."""
    import numpy as np

    (folder / "config.json").write_text(json.dumps(MISTRAL))
    model = {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "b": 1}}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    entries: dict[str, Any] = {}
    at = 0
    tensors = [
        t for each in parameters_of(describe(as_config(MISTRAL))) for t in each.ways[0].tensors
    ]
    for tensor, shape in tensors:
        size = 2 * int(np.prod(shape))
        entries[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(entries).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        ones = np.full(1 << 24, 0x3C00, np.uint16).tobytes()  # small positive numbers
        left = at
        while left:
            left -= file.write(ones[: min(left, len(ones))])


PARTS = {"cpu": cpu, "equal": equal, "gpu": gpu, "start": start, "quantized": quantized}
PARTS |= {"engines": engines, "schemes": schemes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each run on the CPU")
    peer = os.environ.get("ANYDEVICE_PEER_PYTHON", sys.executable)
    parser.add_argument("--peer-python", default=peer, help="the Python that has xllamacpp")
    parser.add_argument("--shape-file", type=Path, help="the 1.5B file, if it is there already")
    parser.add_argument(
        "--only", default="", help="part of a quantized model's name, or perplexity"
    )
    parser.add_argument("--threads", type=int, default=THREADS, help="of both sides, quantized")
    parser.add_argument("--cpu-time", action="store_true", help="of both sides, quantized")
    options = parser.parse_args()
    card = any(device.backend == "cuda" for device in anydevice.devices())
    rows = []
    for part in options.parts or ("cpu", "equal", *(["gpu", "start"] if card else [])):
        for label, said, met in PARTS[part](options):
            rows.append(met)
            print(f"{MARKS[met]} {label:<28} {said}", flush=True)
    sys.exit(1 if False in rows else 0)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
