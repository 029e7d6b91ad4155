"""Run the tests as on lesser processors, which must give the same verdicts.

    python tests/soak_isa.py [ROUND ...]

Five rounds. In each, three processes run a third of the test files each, so that every file runs
five times, with each number of threads (1, 2, 4) and with the instructions of 2008, of 2013 and
all; every pair of both occurs. Hash seed and order differ from round to round. XLA is held to the
instructions of 2013 at least: below them it cannot compile float16. `tests/repo` and `tests/docs`
are left out: they compute nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = ("repo", "docs")

ROUNDS = (
    (("1", "2008"), ("2", "2013"), ("4", "all")),
    (("2", "all"), ("4", "2008"), ("1", "2013")),
    (("4", "2013"), ("1", "all"), ("2", "2008")),
    (("2", "2013"), ("4", "all"), ("1", "2008")),
    (("4", "2008"), ("1", "2013"), ("2", "all")),
)
"""Threads and instructions of each third of the files, in each round."""

OF_2013 = {"AVX2", "FMA3", "X86_V3"}


def instructions(year: str) -> dict[str, str]:
    """Return the variables that hold the libraries to the instructions of a year."""
    optimized = "--xla_backend_optimization_level=3"
    if year == "all":
        return {"XLA_FLAGS": optimized}
    import numpy

    extensions = numpy.show_config("dicts")["SIMD Extensions"].get("found", ())
    is_old = year == "2008"
    return {
        "XLA_FLAGS": f"{optimized} --xla_cpu_max_isa=AVX2",
        "ATEN_CPU_CAPABILITY": "default" if is_old else "avx2",
        "ONEDNN_MAX_CPU_ISA": "SSE41" if is_old else "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2" if is_old else "AVX2",
        "OPENBLAS_CORETYPE": "Nehalem" if is_old else "Haswell",
        "NPY_DISABLE_CPU_FEATURES": " ".join(
            name for name in extensions if is_old or name not in OF_2013
        ),
    }


def threads(count: str) -> dict[str, str]:
    """Return the variables that give the libraries a number of threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "POCL_MAX_PTHREAD_COUNT")
    return dict.fromkeys(names, count)


def thirds() -> list[list[str]]:
    """Return the test files in three parts of about the same size."""
    tests = ROOT / "tests"
    files = [
        path
        for path in sorted(tests.rglob("test_*.py"))
        if path.relative_to(tests).parts[0] not in LEFT_OUT
    ]
    files.sort(key=lambda path: -path.stat().st_size)
    names = [str(path.relative_to(ROOT)) for path in files]
    return [names[part::3] for part in range(3)]


def run_round(number: int) -> bool:
    """Run one round, print the last line of each process, and return whether they passed."""
    started, processes = time.monotonic(), []
    for files, (count, year) in zip(thirds(), ROUNDS[number - 1], strict=True):
        variables = {
            **os.environ,
            **instructions(year),
            **threads(count),
            # PyTorch takes code from its cache without asking for which instructions it was made.
            "TORCHINDUCTOR_CACHE_DIR": str(ROOT / ".cache" / "tests" / f"inductor-{year}"),
            "PYTHONHASHSEED": str(100 * number + len(processes)),
            "ANYDEVICE_TEST_ORDER": str(number),
            "COLUMNS": "240",  # room for the errors in the summary
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        processes.append((f"{count} threads, instructions of {year}", process))
    passed = True
    for name, process in processes:
        lines = process.communicate()[0].decode(errors="replace").splitlines()
        faults = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        print(f"round {number}: {name}: {lines[-1] if lines else 'no output'}", flush=True)
        print(*(f"  {fault}" for fault in faults), sep="\n", end="\n" if faults else "")
        passed = passed and process.returncode == 0
    print(f"round {number}: {time.monotonic() - started:.0f} s", flush=True)
    return passed


if __name__ == "__main__":
    chosen = [int(each) for each in sys.argv[1:]] or range(1, len(ROUNDS) + 1)
    verdicts = [run_round(number) for number in chosen]
    sys.exit(not all(verdicts))
