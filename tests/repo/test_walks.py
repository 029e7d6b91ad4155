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
print(json.dumps({{name: [each.calls.total(), each.switches] for name, each in walks().items()}}))
"""


def test_calls_stay_within_few_files() -> None:
    pytest.importorskip("torch")
    ended = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=300, check=True
    )
    calls, switches = {}, {}
    for name, (count, changed) in json.loads(ended.stdout.splitlines()[-1]).items():
        calls[name.partition("(")[0]] = count
        switches[name.partition("(")[0]] = changed
    assert switches["compile"] <= 3 * 616, "it verifies the example and two inputs made from it"
    assert switches["one further step of nn.train"] <= 140
    assert calls["device"] <= 20
    assert switches["ops.softmax"] <= 5
