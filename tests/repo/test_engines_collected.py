"""Every engine of the registry is run by the contract tests: none can be forgotten there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from anydevice._core.backends import BACKENDS
from anydevice._machine.engines.registry import BUILT_IN

ROOT = Path(__file__).parents[2]


def test_every_engine_is_collected_by_every_contract_test() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/contract", "--collect-only", "-q", "--no-cov"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        env={k: v for k, v in os.environ.items() if k != "ANYDEVICE_TEST_ENGINES"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    collected: dict[str, set[str]] = {}
    for test, parameters in re.findall(r"^tests/(\S+?)\[(.+)\]$", ended.stdout, re.MULTILINE):
        collected.setdefault(test, set()).update(re.split(r"[-\s]", parameters))
    assert collected
    for test, words in collected.items():
        assert set(BUILT_IN) <= words, test


def test_no_contract_test_names_an_engine() -> None:
    for path in (ROOT / "tests/contract").glob("test_*.py"):
        text = path.read_text("utf-8")
        # NumPy is the neutral form in which all of them are compared; its name is not a case.
        named = [name for name in BUILT_IN if name != "numpy" and f'"{name}"' in text]
        assert not named, path.name


def test_engines_and_backends_name_each_other() -> None:
    by_backend = {(e, row.name) for row in BACKENDS.values() for e in row.engines}
    by_engine = {(row.name, backend) for row in BUILT_IN.values() for backend in row.backends}
    assert by_backend == by_engine


def test_make_test_names_every_engine_that_needs_no_accelerator() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    line = next(line for line in makefile.splitlines() if line.startswith("ENGINES ?="))
    assert set(re.findall(r"[a-z]+", line)) & set(BUILT_IN) == set(BUILT_IN) - {"cupy"}
