"""Lines by room, and the files that usual calls walk through: what adds takes away elsewhere."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.programs import output_of

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "anydevice"

BUDGETS = {
    "_arrays": 3_660,  # peaks of processes and of meters; quantized weights are moved
    "_bench": 1_545,
    "_check": 6_470,  # the standard's ops; cases of quantized weights; calls in other orders
    "_compile": 2_205,  # calls may change nothing else; inputs in other forms
    "_core": 5_915,  # optional primitives; Intel GPUs; quantized weights; other names; signals
    "_engines": 12_880,  # optional primitives; quantized products, also in Triton; torch.xpu
    "_formats": 3_640,  # GGUF files are written; quantized folders; quantizers; scales are checked
    "_libraries": 6_135,  # watched processes; ONNX Runtime; Equinox is mapped; inputs by name
    "_llm": 5_680,  # types of replies; quantized weights; decoders as graphs of ONNX Runtime
    "_machine": 8_700,  # requirements and their sources; Intel GPUs; virtual CPUs; variables
    "_nn": 4_500,  # layers, losses and optimizers of Keras people; axes; several inputs and outputs
    "_ops": 4_930,  # the rest of the array API standard; products with quantized weights, experts
    "_parallel": 2_205,
    "_plan": 5_600,  # quantized weights in plans
    "_proofs": 9_510,  # ONNX files are lowered twice, and compared; recurrent layers in both
    "_report": 1_815,
    "_testing": 575,
    "_train": 6_270,  # weights of examples; averages; errors about labels; processes; GANs
    "cli": 3_245,  # anydevice quantize; metrics for Prometheus and rows of CSV; completion
    "compat": 1_440,
}
"""The largest number of lines of Python in each room."""

OTHERS = 1_075
"""The same of all public files, and of the modules of 0.2 that only forward."""


def lines_by_room() -> Counter[str]:
    """Count the lines of Python in each room, and in all other files."""
    lines: Counter[str] = Counter()
    for path in (ROOT / "src").rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0] if path.is_relative_to(SOURCE) else ""
        with path.open("rb") as file:
            lines[room if room in BUDGETS else "others"] += sum(1 for _ in file)
    return lines


def test_every_room_keeps_to_its_budget() -> None:
    limits = {**BUDGETS, "others": OTHERS}
    over = {room: n - limits[room] for room, n in lines_by_room().items() if n > limits[room]}
    assert not over, "lines above the budget"


def test_no_budget_is_too_large() -> None:
    lines = lines_by_room()
    loose = {room: limit for room, limit in BUDGETS.items() if lines[room] < 0.9 * limit}
    assert not loose, "lower these, so that they say something"


COUNT = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "bench")!r})
from walks import walks
counts = {{name: [each.calls.total(), len(each.calls)] for name, each in walks().items()}}
print(json.dumps(counts))
"""

LIMITS = {
    "compile": (1_500, 25),
    "device": (12, 5),
    "llm.load": (1_500, 30),
    "one further step of nn.train": (450, 32),
    "one more token of stream": (150, 15),
    "ops.softmax": (6, 3),
}
"""The most calls, and the most files they are in."""


def test_calls_stay_within_few_files() -> None:
    pytest.importorskip("torch")
    counts = json.loads(output_of("-c", COUNT).splitlines()[-1])
    over = {
        name: count
        for name, count in counts.items()
        if any(a > b for a, b in zip(count, LIMITS[name.partition("(")[0]], strict=True))
    }
    assert not over
