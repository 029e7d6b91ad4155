"""How long `anydevice plan` takes for a model of 405 billion parameters, and what it imports.

    PYTHONPATH=src python bench/planning.py [--runs 11]

Each run is a fresh process, as a user starts it: the start of the interpreter and the look at the
machine are part of the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

Row = tuple[str, str, bool]

BAR = 0.3
ARRAY_LIBRARIES = ("numpy", "torch", "jax", "jaxlib", "mlx", "cupy", "pyopencl", "ml_dtypes")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def command(model: Path) -> list[str]:
    return ["plan", str(model), "--context", "8192", "--batch", "4", "--dtype", "bfloat16"]


def seconds(words: list[str]) -> float:
    began = time.perf_counter()
    ended = subprocess.run(words, capture_output=True, check=False)
    taken = time.perf_counter() - began
    if ended.returncode not in (0, 1):  # it fits, or it does not
        raise RuntimeError(ended.stderr.decode() or f"exit code {ended.returncode}")
    return taken


def time_of(model: Path, runs: int) -> Row:
    words = [sys.executable, "-m", "anydevice", *command(model)]
    seconds(words)  # fills the disk cache
    times = [seconds(words) for _ in range(runs)]
    median = statistics.median(times)
    empty = statistics.median(seconds([sys.executable, "-c", "pass"]) for _ in range(runs))
    said = (
        f"{median * 1e3:.0f} ms, worst {max(times) * 1e3:.0f} ms (bar {BAR * 1e3:.0f}); "
        f"an interpreter that does nothing takes {empty * 1e3:.0f} ms"
    )
    return ("plan of a 405B shape", said, median <= BAR)


def imports_of(model: Path) -> Row:
    code = (
        "import sys; from anydevice.cli.main import main; "
        f"main({command(model)!r}); "
        f"print(*(set({ARRAY_LIBRARIES!r}) & set(sys.modules)), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    loaded = ended.stderr.decode().split()
    said = f"imported: {', '.join(loaded) or 'none'} (bar none)"
    return ("array libraries of a plan", said, not loaded)


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=11)
    runs = parser.parse_known_args()[0].runs
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "config.json"
        model.write_text(json.dumps(CONFIG), "utf-8")
        for part in (lambda: time_of(model, runs), lambda: imports_of(model)):
            try:
                rows.append(part())
            except Exception as error:
                rows.append(("failed", f"{type(error).__name__}: {error}", False))
    for name, said, right in rows:
        print(f"{'✓' if right else '✗'} {name:<28} {said}")
    return rows


if __name__ == "__main__":
    main()
