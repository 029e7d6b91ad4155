"""Torchless's rows: T1 T2 T3 T6 T7 T8 T10, and of T5 the choice by free memory."""

from __future__ import annotations

import json
import os
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

from anydevice import (
    AnyDeviceError,
    ConfigurationError,
    Device,
    DeviceNotFoundError,
    TransferError,
    benchmark,
    ops,
    prefer,
    to_numpy,
)
from anydevice._check import reference
from anydevice._core.finding import BackendScan, Facts, RawDevice, Reason
from anydevice._machine.engines import registry
from anydevice.compat.torchless import (
    Backend,
    BackendPreference,
    UnifiedTensor,
    discover_backends,
    estimate_inference_memory,
    init_backend,
    init_backend_with_memory_check,
    measure_performance,
    print_backend_summary,
)
from tests.comparing import assert_same_bits
from tests.llm.conftest import data
from tests.machines import machine_of
from tests.optional import torch

GIB = 2**30
NOT_OPENED = Reason("no_permission", "/dev/kfd may not be opened", "usermod -aG")
BROKEN = BackendScan("rocm", present=True, stage="driver", reason=NOT_OPENED)


@pytest.mark.parametrize("name", ["CUDA", "ROCm", "Metal", "OpenCL", "CPU"])
def test_one_named_backend_is_initialised_or_a_typed_error(name: str) -> None:
    preference = BackendPreference(name.lower())
    counts = {"cuda": 1, "rocm": 1, "metal": 1, "opencl": 1}
    with machine_of(**counts, engines=("numpy",)):
        backend = init_backend(preference)
        assert (backend.name(), backend.device.backend) == (name, preference.value)
    if preference is not BackendPreference.CPU:
        with machine_of(), pytest.raises(DeviceNotFoundError, match=preference.value) as caught:
            init_backend(preference)
        assert caught.value.findings


def test_torchless_spelling_is_the_same() -> None:
    ours = ["AUTO", "CUDA", "ROCM", "METAL", "OPENCL", "CPU"]
    theirs = ["Auto", "Cuda", "Rocm", "Metal", "OpenCL", "Cpu"]
    assert [BackendPreference[name] for name in theirs] == [BackendPreference[n] for n in ours]
    assert [preference.name for preference in BackendPreference] == ours


def test_automatic_choice_goes_through_the_backends_in_order() -> None:
    order = ["cuda", "rocm", "metal", "opencl"]
    for at, name in enumerate(order):
        with machine_of(**dict.fromkeys(order[at:], 1), engines=("numpy",)):
            assert init_backend(BackendPreference.AUTO).device.backend == name
    with machine_of():
        assert init_backend().name() == "CPU"


def test_an_opencl_device_that_is_the_cpu_is_not_chosen_unasked() -> None:
    device = RawDevice(0, "cpu", Facts("PoCL", free_memory=GIB))
    pocl = BackendScan("opencl", present=True, devices=(device,), engines=("numpy",))
    with machine_of(scans=[pocl]):
        assert init_backend(BackendPreference.AUTO).name() == "CPU"
        assert init_backend(BackendPreference.OPENCL).name() == "OpenCL"


def test_automatic_choice_follows_a_preference() -> None:
    prefer("rocm")
    with machine_of(cuda=1, rocm=1, engines=("numpy",)):
        assert init_backend(BackendPreference.AUTO).name() == "ROCm"
        assert init_backend(BackendPreference.CUDA).name() == "CUDA"
    prefer("metal")
    with (
        machine_of(cuda=1, engines=("numpy",)),
        pytest.warns(UserWarning, match="using cuda:0: this machine has no metal"),
    ):
        assert init_backend(BackendPreference.AUTO).name() == "CUDA"
    prefer("cpu")
    with machine_of(scans=[BROKEN]), warnings.catch_warnings():
        warnings.simplefilter("error")  # a CPU that was asked for is no reason to warn
        assert init_backend(BackendPreference.AUTO).name() == "CPU"
    prefer("cuda", engine="jax")
    with machine_of(cuda=1, engines=("torch", "jax")):
        assert init_backend(BackendPreference.AUTO).device.engine == "jax"


def test_automatic_choice_says_what_it_had_to_pass_over() -> None:
    with (
        machine_of(scans=[BROKEN]),
        pytest.warns(UserWarning, match=r"using cpu: rocm stopped at driver: .*fix: usermod -aG"),
    ):
        assert init_backend(BackendPreference.AUTO).name() == "CPU"
    with (
        machine_of(cuda=1, memory="16GiB", free="1GiB", engines=("numpy",)),
        pytest.warns(UserWarning, match=r"using cpu: cuda:0: 1\.0 GiB free of 16\.0 GiB"),
    ):
        assert init_backend_with_memory_check(BackendPreference.AUTO, 2 * GIB).name() == "CPU"


def test_only_a_device_with_the_room_is_taken() -> None:
    with machine_of(cuda=2, memory="16GiB", free=["1GiB", "8GiB"], engines=("numpy",)):
        backend = init_backend_with_memory_check(BackendPreference.AUTO, 4 * GIB)
        assert backend.device == Device("cuda:1")


def test_without_the_room_the_error_says_what_each_has() -> None:
    with machine_of(cuda=2, memory="16GiB", free=["1GiB", "8GiB"], engines=("numpy",)):
        with pytest.raises(DeviceNotFoundError) as caught:
            init_backend_with_memory_check(BackendPreference.AUTO, 2**60)
        said = str(caught.value)
        assert "cuda:0: 1.0 GiB free of 16.0 GiB" in said
        assert "cuda:1: 8.0 GiB free of 16.0 GiB" in said
        assert "cpu: " in said
        with pytest.raises(DeviceNotFoundError, match=r"cuda:1: 8\.0 GiB free"):
            init_backend_with_memory_check(BackendPreference.CUDA, 9 * GIB)


def test_every_backend_is_discovered_in_order_usable_or_not() -> None:
    with machine_of(metal=1, engines=("numpy",)):
        found = discover_backends()
    assert [f.backend for f in found] == ["cuda", "rocm", "metal", "xpu", "tpu", "opencl", "cpu"]
    assert [f.backend for f in found if f.usable] == ["metal", "cpu"]


def test_the_summary_shows_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    device = RawDevice(0, "gpu", Facts("An NPU"))
    npu = BackendScan("npu", present=True, devices=(device,), engines=("numpy",))
    scans = [BROKEN, npu, BackendScan("tpu", present=False)]
    memory = {"memory": "32GiB", "free": "28.5GiB"}
    with machine_of(cuda=1, metal=1, engines=("numpy",), scans=scans, **memory):
        print_backend_summary()
    printed = " ".join(capsys.readouterr().out.split())
    assert "✓ cuda:0 fake CUDA device, sm 9.0 32.0 GiB, 28.5 free" in printed
    assert "stopped at: driver /dev/kfd may not be opened fix: usermod -aG" in printed
    for words in ("✗ rocm", "✓ metal:0 fake Metal device", "✓ cpu", "An NPU"):
        assert words in printed
    assert printed.endswith("Recommended: cuda")


def test_every_backend_and_every_library_has_an_install_switch() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    extras = project["project"]["optional-dependencies"]
    assert {"cuda", "rocm", "metal", "xpu", "opencl", "tpu"} <= set(extras)
    assert {"torch", "jax", "mlx", "cupy", "opencl"} <= set(extras)
    assert all(extras[backend] for backend in ("cuda", "rocm", "metal", "xpu", "opencl", "tpu"))


# --- T7: the transfer ---------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "method"), [((6,), "to_device_1d"), ((2, 3), "to_device_2d")])
def test_vectors_and_matrices_go_to_the_backend(shape: tuple[int, ...], method: str) -> None:
    x = np.arange(6, dtype=np.float32).reshape(shape)
    with machine_of(cuda=2, engines=("jax",)):
        backend = init_backend(BackendPreference.CUDA)
        placed = getattr(backend, method)(x)
        assert placed.device == backend.device.native
    assert_same_bits(np.asarray(placed), x, because="only copied")


@pytest.mark.parametrize("wrong", [np.ones((2, 2)), np.float32(1), [1.0, 2.0]])
def test_what_has_other_dimensions_is_refused(wrong: object) -> None:
    backend = init_backend(BackendPreference.CPU)
    with pytest.raises(TransferError, match="to_device_1d takes an array with 1 dimension, not"):
        backend.to_device_1d(wrong)
    with pytest.raises(TransferError, match="to_device_2d takes an array with 2 dimensions, not"):
        backend.to_device_2d(np.ones(3))


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4, 5)])
def test_a_tensor_of_any_shape_goes_there_and_back(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    with machine_of(cuda=2, engines=("jax",)):
        there = UnifiedTensor(x).to_device(Device("cuda:1"))
        assert there.device == Device("cuda:1")
        assert there.data.device == Device("cuda:1", engine="jax").native
        assert there.to_device("cuda:1").data is there.data
        back = there.to_host()
    assert isinstance(back, np.ndarray)
    assert_same_bits(back, x, because="only copied")


def test_a_whole_model_goes_there_in_one_call() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3, bias=False))
    tree = {"model": model, "cache": [np.zeros((2, 3), np.float32)], "name": "tiny"}
    with machine_of(cuda=1, engines=("torch",)):
        moved = UnifiedTensor(tree).to_device(init_backend(BackendPreference.CUDA)).data
    assert moved["model"] is model
    assert isinstance(moved["cache"][0], torch.Tensor)
    assert moved["name"] == "tiny"


def test_a_model_is_loaded_from_its_file_straight_onto_the_backend(tmp_path: Path) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    header = json.dumps({"layer.weight": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + weight.tobytes())
    with machine_of(cuda=2, engines=("jax",)):
        loaded = init_backend(BackendPreference.CUDA).load_weights(path)
        half = init_backend(BackendPreference.CUDA).load_weights(path, "float16")
    assert list(loaded) == ["layer.weight"]
    assert isinstance(loaded["layer.weight"], jax.Array)
    assert_same_bits(np.asarray(loaded["layer.weight"]), weight, because="read from a file")
    assert half["layer.weight"].dtype == np.float16


# --- T6: the operations, and of T8 the product of matrices ----------------------------------------

DRAWN = np.random.default_rng(5)
Q = DRAWN.standard_normal((2, 4, 3, 8)).astype(np.float32)
K, V = DRAWN.standard_normal((2, 2, 2, 6, 8)).astype(np.float32)
X, WEIGHT = Q[0, 0], DRAWN.standard_normal(8).astype(np.float32)
LENGTHS = np.array([6, 4], np.int32)
OPERATIONS = {
    "matmul": ((X, K[0, 0].T.copy()), {}),
    "rmsnorm": ((X, WEIGHT, 1e-5), {}),
    "softmax": ((X, 0), {}),
    "silu": ((X,), {}),
    "rope": ((Q, np.array([7, 8, 9], np.int32)), {"theta": 500.0, "interleaved": True}),
    "attention": ((Q, K, V), {"causal": True, "lengths": LENGTHS}),
}
BACKENDS = [
    ("cuda", "torch"),
    ("rocm", "jax"),
    ("metal", "mlx"),
    ("opencl", "opencl"),
    ("cpu", "numpy"),
]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("name", "engine"), BACKENDS)
def test_every_operation_runs_on_every_backend(name: str, engine: str, operation: str) -> None:
    arguments, options = OPERATIONS[operation]
    with backend_with(name, engine) as backend:
        found = getattr(backend, operation)(*arguments, **options)
        assert registry.load(engine).owns(found)
        host = to_numpy(found)
    wide = [np.float64(x) if getattr(x, "dtype", None) == np.float32 else x for x in arguments]
    expected = reference.call(operation, *wide, **options)
    assert host.dtype == np.float32
    np.testing.assert_allclose(host, expected, rtol=1e-4, atol=1e-5)


@contextmanager
def backend_with(name: str, engine: str) -> Iterator[Backend]:
    """A backend served by an engine: this machine's OpenCL, a fake one where hardware is needed."""
    try:
        seen = registry.load(engine).devices()
    except AnyDeviceError:
        seen = ()
    if not seen:
        assert engine not in os.environ.get("ANYDEVICE_TEST_ENGINES", "").split(",")
        pytest.skip(f"{engine} does not run here")
    if name == "opencl":
        yield init_backend(BackendPreference.OPENCL)
    else:
        fake = {} if name == "cpu" else {name: 1}
        with machine_of(**fake, engines=(engine,)):
            yield init_backend(BackendPreference(name))


@pytest.mark.needs("torch")
def test_what_is_on_the_backend_already_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(ops, "silu", seen.append)
    with machine_of(cuda=1, engines=("torch",)):
        backend = init_backend(BackendPreference.CUDA)
        x = backend.to_device_2d(X)
        backend.silu(x)
    assert seen[0] is x


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"a is \(3, 8\), b is \(3, 8\)"):
        init_backend(BackendPreference.CPU).matmul(X, X)


@pytest.mark.needs("torch")
def test_a_product_is_compared_with_that_of_the_cpu() -> None:
    a = np.ones((32, 32), np.float32)
    with machine_of(cuda=1, engines=("torch",)):
        timings = benchmark(ops.matmul, a, a, devices=["cpu", "cuda"], limit=0.01)
    assert [(row.device, row.engine) for row in timings] == [("cpu", "numpy"), ("cuda:0", "torch")]
    cpu, gpu = (timings[name].seconds for name in ("cpu", "cuda:0"))
    assert timings.speed_ups == {"cpu": 1.0, "cuda:0": pytest.approx(cpu / gpu)}


def test_the_memory_of_a_shape_is_known_before_it_is_loaded() -> None:
    estimate = estimate_inference_memory(4096, 14336, 32, 32000, 32, 8, 4096, 4)
    assert estimate.weights_bytes == 4 * 7_241_732_096 + 512  # and the rotary table
    assert estimate.kv_cache_bytes == 2 * 8 * 128 * 4096 * 32 * 4
    parts = estimate.weights_bytes + estimate.kv_cache_bytes + estimate.activation_bytes
    assert estimate.total_gb() == estimate.total_bytes / 2**30
    assert parts < estimate.total_bytes < parts + 2 * 2**30
    half = estimate_inference_memory(4096, 14336, 32, 32000, 32, 8, 4096, 2)
    assert half.total_gb() < 20
    with pytest.raises(ConfigurationError, match="1, 2, 4 or 8 bytes"):
        estimate_inference_memory(4096, 14336, 32, 32000, 32, 8, 4096, 3)


@pytest.fixture(scope="session")
def stories() -> Path:
    pytest.importorskip("tokenizers", reason="tokenizers are not installed")
    return data("stories260K")


def test_a_model_is_initialised_with_a_memory_check_and_generates(stories: Path) -> None:
    estimate = estimate_inference_memory(64, 172, 5, 512, 8, 4, 512, 4)
    assert estimate.weights_bytes > 4 * 260_032  # which ties its head to the embedding
    with machine_of(cuda=1, memory="2GiB", engines=("numpy",)):
        backend = init_backend_with_memory_check(BackendPreference.CUDA, estimate.total_bytes)
        model = backend.load_model(stories, context=128)
        assert (str(model.device), model.context) == ("cuda:0", 128)
        reply = model.generate("Once upon a time", max_tokens=20)
    golden = (stories / "golden.txt").read_text("utf-8")
    assert golden.startswith("Once upon a time" + reply.text)


def test_tokens_a_second_are_measured(stories: Path) -> None:
    model = init_backend(BackendPreference.CPU).load_model(stories)
    found = measure_performance(model, 100)
    assert found.prompt > 0
    assert found.generation > 0
    with pytest.raises(ConfigurationError, match="512"):
        measure_performance(model, 5000)
