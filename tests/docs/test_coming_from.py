"""The page for people who come from another library: its examples run, its rows are complete.

Each section is a session of its own, in an empty folder, in which warnings are errors. A `text`
block right after a `python` block is what it prints, with `…` for what differs between machines.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

from tests.docs.sessions import Sessions
from tests.docs.test_examples import matches, skip_if_left_out, stories260k
from tests.eight_devices import EIGHT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/coming-from.md").read_text("utf-8")
SECTIONS = {
    part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
}
LIBRARIES = ("Lux.jl", "Torchless", "Axiom.jl", "Artifex")
MODULES = dict(zip(LIBRARIES, ("lux", "torchless", "axiom", "artifex"), strict=True))
ROWS = [
    *("L1", "L2", "L3", "L4", "L5", "L6", "L7", "L8", "L9", "L10", "L11", "L12", "L13"),
    *("T1", "T2", "T3", "T4", "T5", "T6", "T7", "T8", "T9", "T10", "T11"),
    *("A1", "A2", "A3", "A4", "A5", "A6", "A7", "A8", "A9", "A10"),
    *("A11", "A12", "A13", "A14", "A15"),
    *("X1", "X2", "X3", "X4", "X5", "X6", "X7", "X8", "X9", "X10", "X11", "X12"),
]
CALLS = dict(
    zip(
        LIBRARIES,
        (
            "supported_gpu_backends() cpu_device() gpu_device() force_gpu_usage gpu_backend!("
            " gpu_backend!() gpu_backend!(gdev) LocalPreferences.toml reset_gpu_device!()"
            " LuxCPUDevice() LuxCUDADevice() LuxAMDGPUDevice() AbstractLuxGPUDevice"
            " LuxCUDA.functional() LuxAMDGPU.functional() `using cpu(x) gpu(x) gdev` Metal"
            " DistributedUtils.initialize( get_distributed_backend( local_rank( total_workers("
            " allreduce!( bcast!( synchronize!!( DistributedDataContainer( DistributedOptimizer(",
            "init_backend( BackendPreference::Auto BackendPreference::Cuda backend.name()"
            " discover_backends() print_backend_summary() estimate_inference_memory( total_gb()"
            " total_bytes init_backend_with_memory_check( to_device_1d to_device_2d"
            " UnifiedTensor::to_device() matmul rmsnorm softmax silu rope attention cargo"
            " metal-gpu simd,parallel tokens requirements backends",
            "detect_gpu() set_backend!( CUDABackend(0) ROCmBackend(0) MetalBackend(0)"
            " JuliaBackend() current_backend() CUDA.functional() CUDA.name(CUDA.device())"
            " AMDGPU.device_name() Pkg.add( @axiom Adam(lr=0.001) CrossEntropyLoss() train!("
            " load_model( compile( optimize=:aggressive :float16 :mixed verify=true @prove"
            " is_finite @with_backend argmax( train_data_parallel! forward( backend_to_gpu("
            " backend_to_cpu( backend_synchronize( @benchmark enable_checkpointing( CUDA.reclaim()"
            " cuda_available() rocm_available() metal_available() batch_size first using",
            "DeviceManager() has_gpu device_count gpu_count get_device_info() get_default_device()"
            " DeviceManager(config) CONSERVATIVE AGGRESSIVE BALANCED memory_fraction enable_x64"
            " enable_jit platform_priority environment_variables capabilities jax_manager"
            " gpu_devices cpu_devices devices distribute_data( target_devices get_device_manager("
            " force_reinit has_gpu() print_device_info() configure_for_generative_models("
            " enable_mixed_precision optimize_for_model_size( device_put( MLP("
            " use_gradient_checkpointing nvidia-smi nnx.jit XLA_PYTHON_CLIENT_PREALLOCATE"
            " DeviceManager(detector=custom) CUDADetector() shard.device()",
        ),
        strict=True,
    )
)
"""The calls and settings that the documents of each library name."""
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\s*^```text\n(.*?)^```$)?", re.M | re.S)


def rows() -> dict[str, str]:
    lines = (line for line in SECTIONS["Row by row"].splitlines() if line.startswith("| "))
    return {line.split("|")[1].strip(): line for line in lines if not line.startswith("| row")}


@pytest.mark.parametrize("section", [*LIBRARIES, "Keras"])
def test_a_section_s_examples_run(section: str, tmp_path: Path, sessions: Sessions) -> None:
    if section == "Artifex":
        pytest.importorskip("jax", reason="Artifex is made for JAX, which is not installed")
    blocks = BLOCK.findall(SECTIONS[section])
    assert blocks
    skip_if_left_out(["\n".join(block) for block in blocks])
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    if stories260k() is None:
        blocks = [block for block in blocks if "stories260K" not in block[0]]
    else:
        (work / "stories260K").symlink_to(stories260k())
    ours = {k: v for k, v in os.environ.items() if not k.startswith("ANYDEVICE_")}
    code, printed, errors = sessions.run(
        [(f"example {number}", 0, source) for number, (source, _) in enumerate(blocks, 1)],
        cwd=work,
        env={**ours, **EIGHT, "ANYDEVICE_HOME": str(home), "ANYDEVICE_SEED": "1"},
    )
    assert code == 0, errors
    for (source, shown), said in zip(blocks, printed, strict=True):
        assert matches(shown, said), f"{source}\nprints:\n{said}"


@pytest.mark.parametrize("section", LIBRARIES)
def test_every_public_name_of_a_module_is_in_its_section(section: str) -> None:
    path = ROOT / f"src/anydevice/compat/{MODULES[section]}.py"
    tree = ast.parse(path.read_text("utf-8"))
    names = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    } - {"AbstractLuxDevice", "AbstractBackend"}
    public = {name for name in names if not name.startswith("_")}
    told = SECTIONS[section] + SECTIONS["Row by row"]
    assert {name for name in public if name not in told} == set()


@pytest.mark.parametrize(("section", "calls"), CALLS.items(), ids=LIBRARIES)
def test_every_call_of_a_library_s_documents_has_its_line(section: str, calls: str) -> None:
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith(("|", "- "))]
    told = "\n".join(lines)
    assert [call for call in calls.split() if call not in told] == []


def test_every_row_is_there_once() -> None:
    assert list(rows()) == ROWS


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_that_a_row_names_exist(row: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", rows()[row])
    assert named
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text("utf-8"), f"{path}::{name}"


def test_what_a_block_prints_is_found() -> None:
    assert BLOCK.findall("```python\nprint(1)\n```\n\n```text\n1\n```\n") == [("print(1)\n", "1\n")]
