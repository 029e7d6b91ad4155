"""How far usual calls walk through the files, counted by `bench/walks.py`, stays within bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
COUNT = f"""
import json, sys
sys.path.insert(0, {str(BENCH)!r})
from walks import walks
counts = {{name: [each.calls.total(), len(each.calls)] for name, each in walks().items()}}
print(json.dumps(counts))
"""

LIMITS = {
    "compile": (1_500, 33),
    "device": (12, 5),
    "llm.load": (1_550, 47),
    "one further step of nn.train": (480, 33),
    "one more token of stream": (150, 15),
    "ops.softmax": (6, 3),
}
"""The most calls, and the most files they are in."""


def test_calls_stay_within_few_files() -> None:
    pytest.importorskip("torch")
    ended = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=300, check=True
    )
    counts = json.loads(ended.stdout.splitlines()[-1])
    over = {
        name: count
        for name, count in counts.items()
        if any(a > b for a, b in zip(count, LIMITS[name.partition("(")[0]], strict=True))
    }
    assert not over
