"""Quantized GGUF files on a CPU, beside llama.cpp: a part of `bench/llm.py`.

Each side has its own process, and both answer in turn, so that only one computes at a time. The
process of llama.cpp may belong to another interpreter: `pip install xllamacpp` there, and name it
with `--peer-python` or in `ANYDEVICE_PEER_PYTHON`. `--cpu-time --threads 1` counts seconds of
processor time, for a machine that does other things meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

Row = tuple[str, str, bool | None]

QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""The shape of Qwen2.5-1.5B."""
CONTEXT, PROMPT, TOKENS = 1024, 337, 128
THREADS = 2
BARS = {"SmolLM2 Q4_1": (1.0, 2.0), "1.5B Q4_K_M": (0.75, 1.1)}
"""Decode and prompt, llama.cpp being 1."""
MEMORY, LOAD = 1.6, 3.0
"""Resident memory in files and caches; seconds for each GB of a file to the first token."""
PERPLEXITY = 0.005
PAGES = "architecture computing language-models memory models proofs security several-devices"
PAGE = 1024
"""Tokens of each of these pages of the documentation that are scored."""


def quantized(options: argparse.Namespace) -> Iterator[Row]:
    """SmolLM2 as it is stored, and the shape of Qwen2.5-1.5B with random weights."""
    with ExitStack() as stack:
        for name in BARS:
            file = options.model if name.startswith("SmolLM2") else options.shape_file
            if options.only not in name:
                continue
            if file is None:
                file = write_shape(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            yield from beside_llama_cpp(name, file, options)
    if options.only in "perplexity":
        yield perplexity(options.model, options.threads)


def perplexity(file: Path, threads: int) -> Row:
    """Score pages with rounded activations, and with the numbers of the file in floats."""
    import numpy as np

    import anydevice
    from anydevice import llm

    anydevice.configure(threads=threads)
    stored = llm.load(file, "cpu", context=PAGE, progress=False)
    floats = llm.load(file, "cpu", context=PAGE, weights="float", progress=False)
    docs = Path(__file__).parents[1] / "docs"
    pages = [(docs / f"{name}.md").read_text("utf-8") for name in PAGES.split()]
    texts = [stored.tokenizer.encode(page)[:PAGE] for page in pages]
    pairs = [(stored.score(text).logprobs, floats.score(text).logprobs) for text in texts]
    off = np.array([np.mean(np.subtract(*pair)) for pair in pairs])
    price, error = np.expm1(-off.mean()), off.std(ddof=1) / len(off) ** 0.5
    moved = np.mean([np.abs(np.subtract(*pair)).mean() for pair in pairs])
    said = f"{100 * price:+.2f} % ± {100 * error:.2f} over {len(texts)} pages of {PAGE} tokens, "
    said += f"log probabilities move by {moved:.3f} (bar {100 * PERPLEXITY} %)"
    return "SmolLM2 Q4_1, perplexity", said, price <= PERPLEXITY


def beside_llama_cpp(name: str, file: Path, options: argparse.Namespace) -> Iterator[Row]:
    decode_bar, prompt_bar = BARS[name]
    speeds: list[list[Any]] = []
    large = file.stat().st_size > 5e8
    runs = min(options.runs, 3) if large else options.runs
    with (
        process("anydevice", sys.executable, file, options) as ours,
        process("llama.cpp", options.peer_python, file, options) as theirs,
    ):
        sides = (ours, theirs)
        first = [ask(side, "load") for side in sides]
        for turn in range(runs + (not options.cpu_time)):
            answers = {}
            for number in (turn % 2, 1 - turn % 2):
                time.sleep(0.3)  # threads of the one before still look for work
                answers[number] = ask(sides[number], "speed")
            if turn or options.cpu_time:
                speeds.append([answers[0], answers[1]])
        memory = [ask(side, "memory")["bytes"] for side in sides]
    for key, bar in (("decode", decode_bar), ("prompt", prompt_bar)):
        one, other = (statistics.median(pair[side][key] for pair in speeds) for side in (0, 1))
        ratio = statistics.median(pair[0][key] / pair[1][key] for pair in speeds)
        said = f"{one:.1f} tok/s, llama.cpp {other:.1f}: {ratio:.2f} × (bar {bar})"
        yield f"{name}, {key}", said, ratio >= bar
    size, cache = file.stat().st_size, first[0]["cache"]
    small = not large  # then most of it does not grow with the file
    bars = ("no bar", "no bar") if small else (f"bar {MEMORY}", f"bar {LOAD}")
    ratio, other = (bytes_ / (size + cache) for bytes_ in memory)
    said = f"{memory[0] / 2**30:.2f} GiB, {ratio:.2f} of file and cache ({bars[0]}); llama.cpp "
    said = f"{said}{memory[1] / 2**30:.2f} GiB, {other:.2f}"
    yield f"{name}, memory", said, None if small else ratio <= MEMORY
    rest = first[0]["resting"] / (size + cache)
    yield (
        f"{name}, memory at rest",
        f"{rest:.2f} of file and cache, after the load",
        None if small else rest <= MEMORY,
    )
    rate, other = (each["seconds"] / (size / 1e9) for each in first)
    said = f"{first[0]['seconds']:.2f} s, {rate:.2f} s/GB ({bars[1]}); llama.cpp {other:.2f} s/GB"
    yield f"{name}, load to first token", said, None if small else rate <= LOAD


@contextmanager
def process(side: str, python: str, file: Path, options: argparse.Namespace) -> Iterator[Any]:
    file.read_bytes()  # into the page cache
    command = [python, __file__, side, str(file), str(options.threads), str(options.tokens)]
    command.append("cpu" if options.cpu_time else "wall")
    with tempfile.TemporaryFile("w+") as log:
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
        try:
            yield child
        except EOFError as error:
            log.seek(0)
            raise SystemExit(f"{side} ended: {log.read()[-2000:]}") from error
        finally:
            child.communicate()


def ask(child: Any, question: str) -> Any:
    child.stdin.write(question + "\n")
    child.stdin.flush()
    answer = child.stdout.readline()
    if not answer:
        raise EOFError
    return json.loads(answer)


def write_shape(folder: Path) -> Path:
    """Write random weights of Qwen2.5-1.5B's shape as a Q4_K_M file, and return its path."""
    import numpy as np

    from anydevice import llm
    from anydevice._llm.description import describe
    from anydevice._llm.weights import parameters_of
    from anydevice._plan.config import as_config

    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(QWEN))
    letters = {chr(code): code - 0x21 for code in range(0x21, 0x7F)}
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    none = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix"))
    none["end_of_word_suffix"] = None
    model = {"type": "BPE", **none, "vocab": letters, "merges": []}
    model |= {"fuse_unk": False, "byte_fallback": False}
    tokenizer = {"version": "1.0", "model": model, "pre_tokenizer": step, "decoder": step}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    rng = np.random.default_rng(0)
    random = (rng.standard_normal(1 << 24, np.float32) * 0.02).view(np.uint32) >> 16
    random = random.astype(np.uint16)
    entries: dict[str, Any] = {}
    names: list[tuple[str, int]] = []
    at = 0
    for each in parameters_of(describe(as_config(QWEN))):
        for name, shape in each.ways[0].tensors:
            size = int(np.prod(shape))
            entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + 2 * size]}
            names.append((name, size))
            at += 2 * size
    header = json.dumps(entries).encode()
    with open(source / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, left in names:
            if "norm" in name:
                file.write(np.full(left, 0x3F80, np.uint16).tobytes())
                continue
            start = int(rng.integers(0, len(random)))
            while left:
                part = random[start : start + left]
                file.write(part.tobytes())
                left, start = left - len(part), 0
    path = llm.quantize(source, folder / "shape.gguf", "q4_k_m").path
    (source / "model.safetensors").unlink()
    return path


# --- in the process of a side -------------------------------------------------------------------


def peak(key: str = "VmHWM") -> int:
    """Return the most memory that this process had, or with "VmRSS" the memory that it has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def tokens(turn: int) -> list[int]:
    """Return a prompt that begins as no other does."""
    return [1 + (turn * 31 + 7 * number) % 90 for number in range(PROMPT)]


class Ours:
    def __init__(self, threads: int) -> None:
        import anydevice
        from anydevice import llm

        anydevice.configure(threads=threads)
        self._load: Any = llm.load
        import gguf
        import jinja2
        import onnx
        import onnxruntime
        import tokenizers

        import anydevice._llm.graph

        del gguf, jinja2, onnx, onnxruntime, tokenizers

    def load(self, file: Path) -> dict[str, Any]:
        self._model: Any = self._load(file, "cpu", context=CONTEXT, progress=False)
        assert self._model.executor == "onnxruntime", self._model
        self._model.tokenizer.eos_ids = ()  # all tokens are written
        self._model.generate([5], 1)
        d = self._model.description
        return {"cache": 2 * len(d.layers) * d.kv_heads * d.head_size * CONTEXT * 4}

    def speed(self, turn: int, count: int) -> dict[str, float]:
        speed = self._model.generate(tokens(turn), count).speed
        return {"prompt": speed.prefill, "decode": speed.decode}


class Theirs:
    def __init__(self, threads: int) -> None:
        import xllamacpp

        self._options = options = xllamacpp.CommonParams()
        options.n_ctx, options.n_parallel, options.warmup = CONTEXT, 1, False
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
        self._server: Any = xllamacpp.Server

    def load(self, file: Path) -> dict[str, Any]:
        self._options.model.path = str(file)
        self._server = self._server(self._options)
        self._complete([5], 1)
        return {}

    def _complete(self, prompt: list[int], count: int) -> Any:
        values = {"prompt": prompt, "n_predict": count, "temperature": 0, "cache_prompt": False}
        reply = self._server.handle_completions({**values, "ignore_eos": True})
        return json.loads(reply) if isinstance(reply, str | bytes) else reply

    def speed(self, turn: int, count: int) -> dict[str, float]:
        timings = self._complete(tokens(turn), count)["timings"]
        assert timings["prompt_n"] == PROMPT, timings
        return {"prompt": timings["prompt_per_second"], "decode": timings["predicted_per_second"]}


def wall_speed(side: Ours | Theirs, turn: int, count: int) -> dict[str, float]:
    return side.speed(turn, count)


def cpu_speed(side: Ours | Theirs, turn: int, count: int) -> dict[str, float]:
    """Return tokens for each second of processor time: with and without the reply's tokens."""
    times = [time.process_time()]
    for number, more in enumerate((1, 1 + count)):
        side.speed(2 * turn + number, more)
        times.append(time.process_time())
    prompt, both = times[1] - times[0], times[2] - times[1]
    return {"prompt": PROMPT / prompt, "decode": count / (both - prompt)}


def main() -> None:
    name, file, threads, count, clock = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too
    side = {"anydevice": Ours, "llama.cpp": Theirs}[name](int(threads))
    base, turn = peak(), 0
    for line in sys.stdin:
        question, answer = line.strip(), dict[str, Any]()
        if question == "load":
            now = time.process_time if clock == "cpu" else time.perf_counter
            began = now()
            answer = side.load(Path(file))
            answer["seconds"] = now() - began
            answer["resting"] = peak("VmRSS") - base
        elif question == "memory":
            answer = {"bytes": peak() - base}
        else:
            turn += 1
            answer = (cpu_speed if clock == "cpu" else wall_speed)(side, turn, int(count))
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
