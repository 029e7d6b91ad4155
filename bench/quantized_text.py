"""What quantized weights cost in text: two parts of `bench/llm.py`.

`engines` scores a text on every engine with the weights as they are stored, beside the same
numbers unpacked into float32; `schemes` prints the perplexity of each scheme. Both use SmolLM2 and
stories260K, which lies in the folder that `ANYDEVICE_DATA` names.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import anydevice
from anydevice import llm
from anydevice.errors import AnyDeviceError

Row = tuple[str, str, bool | None]

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("ANYDEVICE_DATA", ROOT.parent / "shared/data"))
STORY = (
    "Tim and his sister Sue went to the lake with their dog. The sun was warm and the water was "
    'blue. "Can we swim?" asked Sue. "Yes," said Tim, "but the dog must stay near us." The dog '
    "saw a duck and ran into the water. The duck was scared and flew away. Sue laughed. She threw "
    "a stick and the dog brought it back. Then a big cloud came and it began to rain. They ran to "
    "a tree and waited. Tim shared his cookie with Sue, and Sue gave a little piece to the dog. "
    "When the sun came back, they saw a rainbow over the lake. They were happy and went home to "
    "tell their mom about the duck, the rain and the rainbow."
)
PROMPT = "Once upon a time"
ENGINES = ("numpy", "torch", "jax", "mlx", "opencl")
SCHEMES = ("q8_0", "fp8", "q5_0", "q4_1", "q4_k", "q4_0")
EXACT, ROUNDED = 1e-3, 0.005
"""How far log probabilities may move with exact activations; perplexity, of one, with either."""
REPLY = 48


def score(model: llm.LanguageModel) -> tuple[Any, float]:
    """Return the log probabilities of the story, and its perplexity."""
    found = model.score(STORY)
    return np.array(found.logprobs), found.perplexity


def engines(options: argparse.Namespace) -> Iterator[Row]:
    """Compare log probabilities, perplexity and a greedy reply with those of floats on NumPy."""
    with tempfile.TemporaryDirectory() as folder:
        files = [("SmolLM2 Q4_1", options.model)]
        if (DATA / "stories260K").is_dir():
            for kind in ("q8_0", "q4_0"):
                path = llm.quantize(DATA / "stories260K", Path(folder) / f"{kind}.gguf", kind).path
                files.append((f"stories260K {kind.upper()}", path))
        for name, file in files:
            if options.only in name:
                yield from engines_of(name, file)


def engines_of(name: str, file: Path) -> Iterator[Row]:
    floats = llm.load(file, anydevice.device("cpu", engine="numpy"), weights="float")
    expected, base = score(floats)
    text = floats.generate(PROMPT, REPLY).tokens
    del floats
    for engine in (*ENGINES, "onnxruntime"):
        try:
            if engine == "onnxruntime":  # the default on a CPU, which rounds activations
                model = llm.load(file, "cpu")
            else:
                backend = "opencl" if engine == "opencl" else "cpu"
                here = anydevice.device(backend, engine=engine)
                model = llm.load(file, here, activations="exact")
        except AnyDeviceError as error:
            print(f"  {name}, {engine}: {error}")
            continue
        found, perplexity = score(model)
        reply = model.generate(PROMPT, REPLY).tokens
        moved, price = float(np.abs(found - expected).max()), perplexity / base - 1
        pairs = enumerate(zip(reply, text, strict=False))  # one may end before the other
        same = next((n for n, pair in pairs if pair[0] != pair[1]), REPLY)
        said = f"perplexity {perplexity:.4f} ({100 * price:+.4f} %), log probabilities move by at "
        said += f"most {moved:.1e}, {same} of {REPLY} greedy tokens equal"
        exact = model.executor != "onnxruntime"
        met = price <= ROUNDED and (not exact or (moved <= EXACT and same == REPLY))
        label = f"by default ({model.executor})" if engine == "onnxruntime" else engine
        yield f"{name}, {label}", said, met
        del model


def schemes(options: argparse.Namespace) -> Iterator[Row]:
    """Print the perplexity of the story as stored, by default on a CPU, and by each scheme."""
    numpy = anydevice.device("cpu", engine="numpy")
    for name, file in (("SmolLM2", options.model), ("stories260K", DATA / "stories260K")):
        if not file.exists() or options.only not in name:
            continue
        rows: list[tuple[str, Any, dict[str, str]]] = [
            ("as stored", numpy, {}),
            ("as stored, by default", "cpu", {}),
            *((scheme, numpy, {"weights": scheme}) for scheme in SCHEMES),
        ]
        for label, device, keywords in rows:
            with warnings.catch_warnings(action="ignore"):  # rows that are no whole blocks
                model = llm.load(file, device, **keywords)
            perplexity = score(model)[1]
            yield f"{name}, {label}", f"perplexity {perplexity:.3f} ({model.executor})", None
            del model
