"""Axiom.jl's rows: A1 A2 A5 A8 A11 A12 A13 A14 A15."""

from __future__ import annotations

import operator
import pickle
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import anydevice
from anydevice import (
    Device,
    DeviceMismatchError,
    DeviceNotFoundError,
    device,
    device_of,
    find_batch_size,
    ops,
    set_device,
)
from anydevice._core.finding import BackendScan, Reason
from anydevice._machine.engines import registry
from anydevice.compat.axiom import (
    Adam,
    CPUBackend,
    CrossEntropyLoss,
    CUDABackend,
    Dense,
    JuliaBackend,
    MetalBackend,
    ROCmBackend,
    argmax,
    backend_synchronize,
    backend_to_cpu,
    backend_to_gpu,
    benchmark,
    chain,
    cuda_available,
    current_backend,
    detect_gpu,
    enable_checkpointing,
    forward,
    load_model,
    metal_available,
    reclaim,
    relu,
    rocm_available,
    save_model,
    set_backend,
    softmax,
    train,
    warm_up,
    with_backend,
)
from tests.comparing import assert_same_integers, rounding
from tests.machines import machine_of
from tests.optional import torch

CPU_ONLY = Reason("cpu_only_build", "torch is a CPU-only build")


@pytest.mark.parametrize(
    ("machine", "kind"),
    [({"cuda": 1, "rocm": 1}, CUDABackend), ({"rocm": 1, "metal": 1}, ROCmBackend),
     ({"metal": 1, "tpu": 1, "opencl": 1}, MetalBackend)],
)  # fmt: skip
def test_the_gpu_is_detected(machine: dict[str, int], kind: type[Device]) -> None:
    with machine_of(**machine, engines=("numpy",)):
        found = detect_gpu()
    assert type(found) is kind
    assert found.engine == "numpy"


def test_without_a_gpu_nothing_is_detected() -> None:
    with machine_of():
        assert detect_gpu() is None


def test_the_current_backend_is_set_and_read() -> None:
    with machine_of(cuda=2, engines=("numpy",)):
        assert set_backend(CUDABackend(1)) == Device("cuda:1")
        assert current_backend() == CUDABackend(1)
        assert type(current_backend()) is CUDABackend
        assert device() == Device("cuda:1")
        set_backend(JuliaBackend())
        assert type(current_backend()) is CPUBackend


def test_a_backend_that_is_not_usable_is_refused_and_the_former_one_stays() -> None:
    with machine_of(cuda=1, engines=("numpy",)):
        set_backend(CUDABackend(0))
        with pytest.raises(DeviceNotFoundError, match="this machine has no rocm:0"):
            set_backend(ROCmBackend(0))
        assert current_backend() == CUDABackend(0)


def test_a_device_that_axiom_has_no_name_for_can_be_current() -> None:
    with machine_of(tpu=1, engines=("numpy",)):
        set_device("tpu")
        assert current_backend() == Device("tpu:0")


@pytest.mark.parametrize("backend", ["cuda", "rocm", "metal"])
def test_availability_is_told_for_each(backend: str) -> None:
    with machine_of(**{backend: 1}, engines=("numpy",)):
        told = {"cuda": cuda_available(), "rocm": rocm_available(), "metal": metal_available()}
    assert told == {name: name == backend for name in told}


def test_hardware_that_no_library_drives_is_not_available() -> None:
    unfit = BackendScan("cuda", present=True, stage="library", reason=CPU_ONLY)
    with machine_of(scans=[unfit]):
        assert not cuda_available()


@pytest.mark.needs("torch")
def test_blocks_run_on_different_devices_and_data_is_carried_between_them() -> None:
    raw = np.arange(6, dtype=np.float32).reshape(2, 3)
    seen = []
    with machine_of(cuda=1, engines=("torch",)):
        set_backend(CUDABackend(0))
        with with_backend(JuliaBackend()) as cpu:
            seen.append(current_backend())
            preprocessed = cpu(raw) / raw.max()
        with with_backend(CUDABackend(0)) as gpu:
            seen.append(current_backend())
            on_gpu = gpu(preprocessed)
            predictions = on_gpu @ on_gpu.T
        with with_backend("cpu"):
            seen.append(current_backend())
            results = backend_to_cpu(CUDABackend(0), predictions).argmax(axis=1)
        assert current_backend() == CUDABackend(0)
    assert [type(backend) for backend in seen] == [CPUBackend, CUDABackend, CPUBackend]
    assert type(on_gpu).__module__ == "torch"
    assert results.tolist() == [1, 1]


def normalize(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / x.std()


@pytest.mark.parametrize("places", [("cpu:1", "cpu:2"), ("cpu:2", "cpu")])
def test_the_mixed_workflow_runs_as_it_is_written(places: tuple[str, str]) -> None:
    """A model is made on one device; each block computes where it says, whatever comes in."""
    raw = np.random.default_rng(0).standard_normal((6, 4)).astype("float32")
    made_on, block = places
    with with_backend(made_on):
        model = chain(Dense(4, 8), relu, Dense(8, 3), softmax)
    own = model.parameters[0]["weight"]

    with with_backend(JuliaBackend()):
        preprocessed = normalize(raw)
    with with_backend(block):
        predictions = model(preprocessed)
        again = model(predictions @ np.ones((3, 4), np.float32))
        copied = model._copy
        moved = forward(Dense(3, 2), model(backend_to_gpu(made_on, preprocessed)))
    with with_backend(JuliaBackend()):
        results = argmax(predictions, axis=1)

    assert device_of(predictions) == device_of(again) == device_of(moved) == Device(block)
    assert device_of(results) == Device("cpu")
    assert model._copy is copied  # the weights were moved once
    assert model.parameters[0]["weight"] is own
    outside = model(preprocessed)
    assert device_of(outside) == Device(made_on)
    allowed = rounding(np.float32, 32)
    np.testing.assert_allclose(predictions, outside, rtol=allowed, atol=allowed)
    assert_same_integers(results, np.asarray(outside).argmax(axis=1))


def test_what_is_made_of_a_model_follows_the_block_too(tmp_path: Path) -> None:
    x, y = np.ones((8, 4), np.float32), np.zeros(8, np.int32)
    with with_backend("cpu:1"):
        model = Dense(4, 2)
        save_model(model, tmp_path / "model.safetensors")
        made = [
            load_model(tmp_path / "model.safetensors"),
            enable_checkpointing(model),
            train(model, [(x, y)], Adam(), CrossEntropyLoss(), optimize="none", progress=False),
            CPUBackend(2)(model),
        ]
    assert [str(device_of(one)) for one in made] == ["cpu:1", "cpu:1", "cpu:1", "cpu:2"]
    for one in made:
        with with_backend(CPUBackend(2)):
            assert device_of(one(x)) == Device("cpu:2")


def test_other_models_and_functions_follow_through_forward() -> None:
    double = jax.jit(lambda x: 2 * x)
    x = jax.device_put(np.ones(3, np.float32), jax.devices("cpu")[1])
    with with_backend("cpu:2"):
        assert forward(double, x).device == jax.devices("cpu")[2]
        model = anydevice.nn.build(anydevice.nn.Dense(3, 2), device="cpu:1")
        assert forward(model, x[None]).device == jax.devices("cpu")[2]
        with pytest.raises(DeviceMismatchError, match=r"cpu:1.*cpu:2"):
            model(x[None])
    assert forward(double, x).device == jax.devices("cpu")[1]


@pytest.mark.needs("torch")
def test_a_block_keeps_the_library_of_a_model_where_it_can() -> None:
    with with_backend(CPUBackend(engine="torch")):
        model = Dense(4, 2)
    x = np.ones((1, 4), np.float32)
    with with_backend(JuliaBackend()):
        assert isinstance(model(x), torch.Tensor)
    with with_backend(CPUBackend(engine="jax")):
        assert isinstance(model(torch.ones(1, 4)), jax.Array)
    with with_backend(CPUBackend(2)):  # a device of JAX alone
        assert isinstance(model(x), jax.Array)


def test_a_block_on_a_device_that_is_not_usable_is_not_entered() -> None:
    with machine_of(), pytest.raises(DeviceNotFoundError), with_backend(CUDABackend(0)):
        pytest.fail("the block was entered")


def test_a_function_can_be_bound_to_a_backend() -> None:
    @with_backend(CPUBackend())
    def where() -> Device:
        return current_backend()

    with machine_of(cuda=1, engines=("numpy",)):
        assert where() == CPUBackend()
        assert current_backend() == CUDABackend(0)


@pytest.mark.needs("torch")
def test_data_is_moved_once_and_stays() -> None:
    with machine_of(cuda=2, engines=("torch",)):
        x = backend_to_gpu(CUDABackend(0), np.ones(3, np.float32))
        assert type(x).__module__ == "torch"
        assert backend_to_gpu(CUDABackend(0), x) is x
        backend_synchronize(CUDABackend(0))
        backend_synchronize(current_backend())
        there = CUDABackend(1)(backend_to_cpu(CUDABackend(0), {"x": x, "name": "layer"}))
        assert there["name"] == "layer"
        assert there["x"].tolist() == [1, 1, 1]


def test_a_model_that_is_there_is_not_copied() -> None:
    with machine_of(cuda=2, engines=("jax",)):
        model = {"layers": [np.ones((2, 2), np.float32), np.zeros(2, np.float32)]}
        once = backend_to_gpu(CUDABackend(1), model)
        again = backend_to_gpu(CUDABackend(1), once)
        assert all(map(operator.is_, again["layers"], once["layers"]))
        other = backend_to_gpu(CUDABackend(0), once)
        assert other["layers"][0] is not once["layers"][0]


def test_data_goes_from_device_to_device_without_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it went through the host")

    with machine_of(cuda=2, engines=("jax",)):
        first = backend_to_gpu(CUDABackend(0), {"x": np.arange(3, dtype=np.float32)})
        with monkeypatch.context() as patch:
            for way in ("to_host", "place"):
                patch.setattr(type(registry.load("jax")), way, refuse)
            second = backend_to_gpu(CUDABackend(1), first)
        assert second["x"].device == CUDABackend(1, engine="jax").native
        assert first["x"].device == CUDABackend(0, engine="jax").native
    assert second["x"].tolist() == [0, 1, 2]


def test_data_comes_back_to_the_cpu() -> None:
    with machine_of(cuda=2, engines=("jax",)):
        there = backend_to_gpu(CUDABackend(1), {"x": np.ones(3, np.float32)})
        back = backend_to_cpu(CUDABackend(1), there)
        assert (device_of(there), device_of(back)) == (Device("cuda:1"), Device("cpu"))


def test_falling_back_to_the_cpu_warns_with_the_reason() -> None:
    with machine_of():
        with pytest.warns(UserWarning, match="using the CPU: no accelerator is in this machine"):
            set_backend(detect_gpu())
        assert current_backend() == CPUBackend()
    mismatch = Reason("version_mismatch", "driver mismatch", "reboot")
    broken = BackendScan("cuda", present=True, stage="driver", reason=mismatch)
    with machine_of(scans=[broken]):
        with pytest.warns(UserWarning, match=r"driver mismatch \(fix: reboot\)"):
            set_backend(None)
        set_device(None)
        with pytest.warns(UserWarning, match="driver mismatch"):
            assert current_backend() == CPUBackend()


def test_no_backend_where_there_is_one_is_told_apart_from_no_gpu() -> None:
    with (
        machine_of(cuda=1, engines=("numpy",)),
        pytest.warns(UserWarning, match="no backend was given, although there is cuda:0"),
    ):
        assert set_backend(None) == CPUBackend()


@pytest.mark.usefixtures("site")
def test_a_card_alone_is_not_a_backend(card: BackendScan) -> None:
    with machine_of(scans=[card]):
        assert detect_gpu() is None


@pytest.mark.usefixtures("cupy_for_cuda")
def test_a_backend_appears_when_its_package_is_there(card: BackendScan) -> None:
    with machine_of(scans=[card]):
        found = detect_gpu()
    assert found == CUDABackend(0)
    assert found.engine == "cupy"


def test_a_backend_keeps_its_type_when_it_is_pickled() -> None:
    again = pickle.loads(pickle.dumps(CUDABackend(1)))
    assert type(again) is CUDABackend
    assert (repr(again), repr(CPUBackend())) == ("CUDABackend(1)", "CPUBackend()")


# --- A11: timing; A13: the first call -------------------------------------------------------------


def layer() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(16, 16)


def test_a_model_is_timed_on_each_backend_in_turn() -> None:
    model, x = layer(), torch.ones(4, 16)
    with machine_of(cuda=1, engines=("torch",)):
        set_backend(JuliaBackend())
        on_cpu = benchmark(forward, model, x, limit=0.01)
        set_backend(CUDABackend(0))
        on_gpu = benchmark(forward, model, x, limit=0.01)
    assert (on_cpu.device, on_gpu.device, on_gpu.engine) == ("cpu", "cuda:0", "torch")
    for timing in (on_cpu, on_gpu):
        assert timing.samples >= 1
        assert 0 < timing.low <= timing.seconds <= timing.high


def test_timing_waits_for_each_result(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    kind = type(registry.load("jax"))
    finish = kind.finish
    monkeypatch.setattr(kind, "finish", lambda self, xs: waited.append(1) or finish(self, xs))
    with machine_of(cuda=1, engines=("jax",)):
        timing = benchmark(ops.silu, np.ones(16, np.float32), limit=0.01)
    assert (timing.device, timing.engine, timing.reason) == ("cuda:0", "jax", None)
    assert len(waited) >= timing.samples


def test_the_first_call_is_told_apart() -> None:
    calls = []

    def slow_at_first(x: np.ndarray) -> np.ndarray:
        if not calls:
            time.sleep(0.05)
        calls.append(1)
        return x + 1

    with with_backend(CPUBackend()):
        timing = benchmark(slow_at_first, np.ones(4), limit=0.01)
    assert timing.first >= 0.05 > 2 * timing.seconds


def test_what_cannot_run_says_why() -> None:
    with with_backend(CPUBackend()):
        timing = benchmark(ops.matmul, np.ones(3), np.ones(3), limit=0.01)
    assert timing.seconds is None
    assert "both must have rows and columns" in timing.reason


def test_warming_up_compiles_and_gives_the_complete_result() -> None:
    compiled = []

    @jax.jit
    def model(x: jax.Array) -> jax.Array:
        compiled.append(1)
        return ops.silu(x)

    x = np.ones((2, 3), np.float32)
    with machine_of(cuda=2, engines=("jax",)), with_backend(CUDABackend(1)):
        result = warm_up(model, x)
        assert result.device == CUDABackend(1, engine="jax").native
        benchmark(model, x, limit=0.01)
    assert len(compiled) == 1
    np.testing.assert_allclose(result, x / (1 + np.exp(-x)), rtol=rounding(np.float32, 8))


def test_warming_up_moves_a_model_that_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anydevice, "warm_up", lambda device: None)  # see the next test
    model = layer()
    with machine_of(cuda=1, engines=("torch",)):
        set_backend(CUDABackend(0))
        result = warm_up(model, np.ones((4, 16), np.float32))
    assert result.requires_grad
    expected = model(torch.ones(4, 16)).detach()
    allowed = rounding(np.float32, 32)
    np.testing.assert_allclose(result.detach(), expected, rtol=allowed, atol=allowed)


@pytest.mark.needs("torch")
def test_warming_up_makes_the_kernels_of_the_backend_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed = []
    monkeypatch.setattr(anydevice, "warm_up", lambda *given, **named: warmed.append((given, named)))
    with machine_of(cuda=2, engines=("torch",)), with_backend(CUDABackend(1)):
        warm_up(ops.silu, np.ones(3, np.float32))
        warm_up(ops.silu, np.ones(3, np.float32), dtypes=["float32"])
    here = (Device("cuda:1"),)
    assert warmed == [(here, {}), (here, {"dtypes": ["float32"]})]


def test_after_running_out_memory_is_given_back_and_a_smaller_batch_is_found() -> None:
    place = Device("opencl:0", engine="opencl")
    memory = registry.load("opencl").memory
    one = place(np.ones((1, 2**16), np.float32))
    memory.set_limit(place, 2**24)
    try:
        found = find_batch_size(
            lambda size: ops.add(ops.broadcast_to(one, (size, 2**16)), one), 128
        )
        assert found == 32  # 8 MiB; with 16 MiB and the row itself it is at its limit
        ops.add(ops.broadcast_to(one, (found, 2**16)), one)
        kept = memory.use(place).reserved
        assert kept > 32 * one.nbytes
        reclaim()
        assert one.nbytes <= memory.use(place).reserved < 2 * one.nbytes
    finally:
        memory.set_limit(place, None)
