"""Everything that needs a real NVIDIA card, in one call, with a short table last.

    PYTHONPATH=src python bench/h200.py [part …]

Runs the contract tests on the card, compares what discovery says with `nvidia-smi`, checks the
card with every library, uses CUDA in a forked child after discovery, and measures how long finding
takes; then the benchmarks of moving, ops, memory and training, and `anydevice verify` for every
engine of the card. Names of parts run only those. Exits with 1 where anything is wrong.
"""

from __future__ import annotations

import compileall
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench")]

import discovery as discovery_bench  # noqa: E402

import anydevice  # noqa: E402
from anydevice._machine.discovery.check import engines_to_check  # noqa: E402

Row = tuple[str, str, bool]


def smi(*fields: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [part.strip() for part in text.splitlines()[0].split(",")]


def facts_against_smi() -> list[Row]:
    name, uuid, bus, total, free, capability, driver = smi(
        "name", "uuid", "pci.bus_id", "memory.total", "memory.free", "compute_cap", "driver_version"
    )
    facts = anydevice.Device("cuda:0").facts
    mebibytes = [round((size or 0) / 2**20) for size in (facts.total_memory, facts.free_memory)]
    return [
        ("name", facts.name, facts.name == name),
        ("UUID", str(facts.uuid), facts.uuid == uuid),
        ("PCI", str(facts.pci_address), bus.lower().endswith(str(facts.pci_address))),
        ("total memory", f"{mebibytes[0]} MiB", mebibytes[0] == int(total)),
        ("free memory", f"{mebibytes[1]} MiB", abs(mebibytes[1] - int(free)) <= 64),
        ("capability", str(facts.compute_capability), facts.compute_capability == capability),
        ("driver", str(facts.driver_version), facts.driver_version == driver),
    ]


def checks() -> list[Row]:
    rows = []
    for place in ("cuda:0", "opencl"):
        cards = [d for d in anydevice.devices(place.split(":")[0]) if d.kind == "gpu"]
        if not cards:
            rows.append((f"check {place}", str(anydevice.discover()["opencl"].reason), False))
            continue
        for engine in engines_to_check(cards[0]):
            verdict = cards[0].check(engine)
            said = verdict.reason or f"right, {verdict.seconds:.1f} s"
            rows.append((f"check {cards[0]} {engine}", said, bool(verdict)))
    return rows


def one_card() -> list[Row]:
    cards = [[str(device) for device in card] for card in anydevice.discover().cards]
    linked = [card for card in cards if "cuda:0" in card]
    return [("cards", str(cards), len(linked) == 1 and len(linked[0]) == 2)]


FORK = """
import os, sys, threading, anydevice
anydevice.discover(); chosen = anydevice.device(); chosen.facts
assert len(os.listdir("/proc/self/task")) == 1, "discovery left a thread behind"
assert str(chosen) == "cuda:0", chosen
assert "torch" not in sys.modules
pid = os.fork()
if pid == 0:
    import torch
    x = torch.ones(1000, device="cuda").sum().item()
    os._exit(0 if x == 1000 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def fork_after_discovery() -> list[Row]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK], capture_output=True, text=True
    )
    said = (done.stderr.strip().splitlines() or ["works, no thread left behind"])[-1]
    return [("CUDA in a forked child", said[:90], done.returncode == 0)]


TESTED = (
    "engines/torch",
    "engines/cupy",
    "llm",
    "train",
    "compile",
    "nn",
    "libraries",
    "compat",
    "test_testing.py",
    "arrays",
)


def environment() -> dict[str, str]:
    """What tests are started with."""
    engines = {"ANYDEVICE_TEST_ENGINES": "numpy,torch,jax,cupy,opencl"}
    return {**os.environ, **engines, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def card_tests() -> list[Row]:
    """The tests of whole folders, in as many processes as half the cores; needs pytest-xdist.

    Each line is printed as it comes, so that a run that is stopped has told what failed.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    command += [
        "-n",
        str(max(2, (os.cpu_count() or 2) // 2)),
        "--dist=worksteal",
        "-v",
        "--tb=short",
    ]
    # What newer releases of PyTorch say of cards, of themselves and of their profiler.
    command += ["-W", "ignore:TensorFloat32 tensor cores:UserWarning"]
    command += ["-W", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"]
    command += ["-W", "ignore:Warning:UserWarning"]
    process = subprocess.Popen(
        [*command, *(str(ROOT / "tests" / name) for name in TESTED)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    last, passed = "no output", 0
    for line in process.stdout:
        passed += " PASSED " in line
        begins = line.startswith("tests/") and "::" in line
        if not begins and " PASSED " not in line and " SKIPPED " not in line:
            print(line, end="", flush=True)
        last = line.strip("= \n") or last
    return [("tests on the card", f"{passed} passed; {last}", process.wait() == 0)]


def contract_tests() -> list[Row]:
    """One process a file, all at once: most of the time goes into compiling on the CPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=500"]
    if importlib.util.find_spec("pytest_timeout") is None:
        command = [*command[:-1], "-o", "addopts=", "-W", "ignore::pytest.PytestConfigWarning"]
    files = sorted((ROOT / "tests" / "contract").glob("test_*.py"))
    # PoCL beside NVIDIA's driver would make OpenCL test the CPU.
    variables = {**environment(), "OCL_ICD_VENDORS": "/etc/OpenCL/vendors/nvidia.icd"}
    running = {
        file: subprocess.Popen(
            [*command, str(file)],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for file in files
    }
    rows = []
    for file, process in running.items():
        said = process.communicate()[0]
        if process.returncode:
            print(said[-3000:])
        last = (said.strip().splitlines() or ["no output"])[-1].strip("= ")
        rows.append((f"contract {file.stem[5:]}", last, process.returncode == 0))
    return rows


def script(name: str, *arguments: str) -> list[Row]:
    """The rows that another benchmark prints.

    In a process of its own, so that what it holds on the card does not disturb the others.
    """
    done = subprocess.run(
        [sys.executable, f"bench/{name}.py", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    print(done.stdout[-6000:], done.stderr[-2000:])
    lines = [line for line in done.stdout.splitlines() if line[:1] in ("✓", "✗")]
    pairs = [(line[0] == "✓", *line[2:].partition("  ")) for line in lines]
    rows = [(label, text.strip(), met) for met, label, _, text in pairs]
    return rows or [(name, f"ended with {done.returncode}", False)]


def moving() -> list[Row]:
    return script("moving")


def kernels() -> list[Row]:
    return script("gpu_ops")


def decoding() -> list[Row]:
    return script("gpu_decode", "check", "speed")


def quantized() -> list[Row]:
    return script("gpu_quantized")


def experts() -> list[Row]:
    return script("gpu_experts")


def language_models() -> list[Row]:
    return script("llm", "gpu", "start")


def cpu_and_gpu() -> list[Row]:
    return script("cpu_and_gpu")


def offload() -> list[Row]:
    return script("offload", "disk")


def dispatched() -> list[Row]:
    return script("gpu_dispatched")


def memory() -> list[Row]:
    names = ("memory_limits", "batch_sizes", "memory_estimates", "plans")
    return [row for name in names for row in script(name)]


def training() -> list[Row]:
    return script("gpt_training")


def parallel() -> list[Row]:
    return script("launch_training")


def proofs() -> list[Row]:
    return [*script("proofs", "card"), *script("proofs", "engines")]


def verifying() -> list[Row]:
    return [*script("quick_verify"), *script("gpu_verify", "300"), *script("verified_models")]


def speed() -> list[Row]:
    # An installed package comes compiled; a checkout on a machine that writes no caches does not.
    compileall.compile_dir(ROOT / "src", quiet=1)
    figures = discovery_bench.measure(5)
    took = f"{figures['anydevice_devices_s'] * 1000:.0f} ms"
    against = f"{figures['import_torch_s'] * 1000:.0f} ms for torch"
    ratio = figures["times_faster"]
    imported = figures["import_anydevice_ms"]
    return [
        ("anydevice devices", f"{took}, {against}: {ratio:.1f} × (bar 10)", ratio >= 10),
        ("import anydevice", f"{imported:.1f} ms (bar 15)", imported <= 15),
    ]


PARTS: tuple[Callable[[], list[Row]], ...] = (
    facts_against_smi,
    one_card,
    checks,
    fork_after_discovery,
    contract_tests,
    card_tests,
    moving,
    kernels,
    decoding,
    quantized,
    experts,
    language_models,
    cpu_and_gpu,
    offload,
    dispatched,
    memory,
    training,
    parallel,
    proofs,
    verifying,
    speed,
)


def main() -> None:
    print(anydevice.discover())
    rows: list[Row] = []
    wanted = sys.argv[1:] or [part.__name__ for part in PARTS]
    for part in (part for part in PARTS if part.__name__ in wanted):
        began = time.perf_counter()
        try:
            rows += part()
        except Exception as error:
            rows.append((part.__name__, f"{type(error).__name__}: {error}", False))
        print(f"{part.__name__}: {time.perf_counter() - began:.1f} s", flush=True)
    print()
    for name, said, right in rows:
        print(f"{'✓' if right else '✗'} {name:<28} {said}")
    sys.exit(0 if all(right for _, _, right in rows) else 1)


if __name__ == "__main__":
    main()
