"""Run the tests as on lesser processors, which must give the same verdicts.

    python tests/soak_isa.py [ROUND ...]

Five rounds. In each, every test file runs once: a third of them with each number of threads (1,
2, 4), and with the instructions of 2008, of 2013 or all. In five rounds a file has run with each
number and with each of the instructions, and every pair of both occurs. Hash seed and order
differ from round to round, and each seed is that of one order alone. XLA is held to the
instructions of 2013 at least: below them it cannot compile float16. `tests/repo` and `tests/docs`
are left out: they compute nothing.

Each third is divided again, since some processes wait while others compute: two more of them run at
once than there are cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = ("repo", "docs")
PARTS = 6
"""Of the files: each part has the threads and instructions of one third."""

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


def parts() -> list[list[str]]:
    """Return the test files in parts of about the same size."""
    tests = ROOT / "tests"
    files = [
        path
        for path in sorted(tests.rglob("test_*.py"))
        if path.relative_to(tests).parts[0] not in LEFT_OUT
    ]
    files.sort(key=lambda path: -path.stat().st_size)
    names = [str(path.relative_to(ROOT)) for path in files]
    return [names[part::PARTS] for part in range(PARTS)]


def run_part(number: int, part: int) -> bool:
    """Run one part of a round, print its last line and its faults, and return whether it passed."""
    count, year = ROUNDS[number - 1][part % 3]
    variables = {
        **os.environ,
        **instructions(year),
        **threads(count),
        # PyTorch takes code from its cache without asking for which instructions it was made.
        "TORCHINDUCTOR_CACHE_DIR": str(ROOT / ".cache" / "tests" / f"inductor-{year}"),
        "PYTHONDONTWRITEBYTECODE": "",  # many tests start Python anew
        "PYTHONHASHSEED": str(100 * number + part),
        "ANYDEVICE_TEST_ORDER": str(number),
        "COLUMNS": "240",  # room for the errors in the summary
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *parts()[part]]
    ended = subprocess.run(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    lines = ended.stdout.decode(errors="replace").splitlines()
    name = f"round {number}: {count} threads, instructions of {year}"
    faults = [f"  {line}" for line in lines if line.startswith(("FAILED", "ERROR"))]
    print("\n".join([f"{name}: {lines[-1] if lines else 'no output'}", *faults]), flush=True)
    return ended.returncode == 0


def run_round(number: int) -> bool:
    """Run one round, print how long it took, and return whether all of it passed."""
    started = time.monotonic()
    with ThreadPoolExecutor((os.cpu_count() or 1) + 2) as pool:
        passed = list(pool.map(lambda part: run_part(number, part), range(PARTS)))
    print(f"round {number}: {time.monotonic() - started:.0f} s", flush=True)
    return all(passed)


if __name__ == "__main__":
    chosen = [int(each) for each in sys.argv[1:]] or range(1, len(ROUNDS) + 1)
    verdicts = [run_round(number) for number in chosen]
    sys.exit(not all(verdicts))
