"""Lux.jl's rows: L1 to L12, those of MLDataDevices.jl among them."""

from __future__ import annotations

import pickle
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import jax
import numpy as np
import pytest

from anydevice import (
    ConfigurationError,
    Device,
    DeviceMismatchError,
    DeviceNotFoundError,
    device_of,
    prefer,
    use_device,
)
from anydevice._core.finding import BackendScan
from anydevice._machine.discovery.discover import machine_from
from anydevice.compat.lux import (
    AbstractLuxGPUDevice,
    DeviceIterator,
    LuxAMDGPU,
    LuxAMDGPUDevice,
    LuxCPUDevice,
    LuxCUDA,
    LuxCUDADevice,
    LuxMetalDevice,
    cpu,
    cpu_device,
    default_device_rng,
    functional,
    get_device,
    gpu,
    gpu_backend,
    gpu_device,
    loaded,
    reset_gpu_device,
    supported_gpu_backends,
)
from anydevice.testing import fake_backend
from tests.comparing import assert_same_bits
from tests.machines import machine_of
from tests.optional import torch

GPUS = (LuxCUDADevice, LuxAMDGPUDevice, LuxMetalDevice)

TORCH = pytest.param("torch", marks=pytest.mark.needs("torch"))


def test_supported_is_not_the_same_as_working() -> None:
    with machine_of():
        assert supported_gpu_backends() == ("CUDA", "AMDGPU", "Metal")
        assert [functional(name) for name in supported_gpu_backends()] == [False, False, False]


def test_the_trigger_packages_answer_as_they_are_spelled() -> None:
    with machine_of(rocm=1, engines=("numpy",)):
        assert (LuxCUDA.functional(), LuxAMDGPU.functional()) == (False, True)
        assert LuxAMDGPU.functional() == functional("AMDGPU")


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ({"metal": 1, "rocm": 1, "cuda": 1}, LuxCUDADevice),
        ({"metal": 1, "rocm": 1}, LuxAMDGPUDevice),
        ({"metal": 1, "opencl": 1, "tpu": 1}, LuxMetalDevice),
    ],
)
def test_the_first_backend_that_works_is_chosen_in_the_order_of_the_supported(
    machine: dict[str, int], expected: type[AbstractLuxGPUDevice]
) -> None:
    with machine_of(**machine, engines=("numpy",)):
        chosen = gpu_device()
    assert type(chosen) is expected
    assert chosen.chosen_by == "order of backends"


def test_the_cpu_is_always_there_and_takes_data() -> None:
    with machine_of():
        x = np.ones((3, 2), np.float32)
        assert isinstance(cpu_device(), LuxCPUDevice)
        assert functional(cpu_device())
        assert loaded(LuxCPUDevice)
        assert cpu_device()(x) is x


@pytest.mark.needs("torch")
def test_data_goes_to_the_gpu_and_comes_back() -> None:
    with machine_of(cuda=1, engines=("torch",)):
        x = np.random.default_rng(0).standard_normal((3, 2), np.float32)
        on_gpu = gpu_device()(x)
        assert type(on_gpu).__module__ == "torch"
        assert_same_bits(np.asarray(cpu_device()(on_gpu)), x, because="only copied")


@pytest.mark.needs("torch")
def test_the_older_spelling_moves_data_too() -> None:
    x = {"x": np.arange(3, dtype=np.float32), "name": "layer"}
    with machine_of(cuda=1, engines=("torch",)):
        there = gpu(x)
        assert type(there["x"]).__module__ == "torch"
        assert (cpu(there)["x"].tolist(), there["name"]) == ([0, 1, 2], "layer")
    with machine_of(), pytest.warns(UserWarning, match="using the CPU"):
        assert isinstance(get_device(gpu(x)), LuxCPUDevice)


@pytest.mark.parametrize("library", [TORCH, "jax"])
def test_nested_parameters_go_to_the_gpu_and_come_back(library: str) -> None:
    numbers = np.random.default_rng(1)
    layer = {"weight": numbers.standard_normal((4, 3), np.float32), "bias": np.zeros(4, np.float32)}
    state = {"layers": [layer, (layer["weight"], 3)], "name": "dense", "act": np.tanh, "none": None}
    with machine_of(cuda=2, engines=(library,)):
        on_gpu = LuxCUDADevice(1)(state)
        back = cpu_device()(on_gpu)
        where = device_of(on_gpu)
    placed, (again, three) = on_gpu["layers"]
    assert type(placed["weight"]).__module__.partition(".")[0].startswith(library)
    assert again is placed["weight"]
    assert (on_gpu["name"], on_gpu["act"], on_gpu["none"], three) == ("dense", np.tanh, None, 3)
    assert list(on_gpu) == list(state)
    assert where == Device("cuda:1")
    for name, value in layer.items():
        np.testing.assert_allclose(np.asarray(back["layers"][0][name]), value)


def test_it_is_told_where_something_lives() -> None:
    x = np.ones(3, np.float32)
    assert isinstance(get_device({"x": x, "name": "layer"}), LuxCPUDevice)
    assert get_device(["no array", 3, None]) is None
    first, second = (jax.device_put(x, place) for place in jax.devices("cpu")[:2])
    assert get_device((second, [second])) == Device("cpu:1")
    with pytest.raises(DeviceMismatchError) as caught:
        get_device({"weight": first, "layers": [second]})
    assert caught.value.paths == ("['weight']", "['layers'][0]")


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("cuda:1", LuxCUDADevice),
        ("rocm:0", LuxAMDGPUDevice),
        ("metal:0", LuxMetalDevice),
        ("opencl:0", Device),
    ],
)
def test_a_place_is_told_under_the_name_that_lux_has_for_it(
    place: str, kind: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anydevice.device_of", lambda x: Device(place))
    found = get_device(np.ones(2))
    assert type(found) is kind
    assert found == Device(place)


@pytest.mark.needs("torch")
def test_batches_are_placed_ahead_and_earlier_ones_are_let_go() -> None:
    third_is_made = Event()

    def load() -> Iterator[dict[str, np.ndarray]]:
        for number in range(4):
            if number == 2:
                third_is_made.set()
            yield {"x": np.full(3, number, np.float32)}

    seen: list[weakref.ref[torch.Tensor]] = []
    with machine_of(cuda=1, engines=("torch",)):
        for number, batch in enumerate(DeviceIterator(LuxCUDADevice(), load())):
            assert third_is_made.wait(300), "the loader was not asked ahead of the loop"
            assert batch["x"].tolist() == [number] * 3
            assert [earlier() for earlier in seen] == [None] * number
            seen.append(weakref.ref(batch["x"]))
            del batch
    assert len(seen) == 4


@pytest.mark.needs("torch")
def test_batches_can_be_gone_through_again_and_counted() -> None:
    with machine_of(cuda=1, engines=("torch",)):
        batches = DeviceIterator("cuda:0", [np.ones(2, np.float32), np.zeros(2, np.float32)])
        assert len(batches) == 2
        for _ in range(2):
            assert [float(batch.sum()) for batch in batches] == [2, 0]


@pytest.mark.parametrize("library", ["numpy", TORCH, "jax"])
def test_random_numbers_for_a_device_follow_from_the_seed_alone(library: str) -> None:
    expected = default_device_rng("cpu", seed=7).normal((2, 3))
    with machine_of(cuda=1, engines=(library,)):
        drawn = default_device_rng(LuxCUDADevice(), seed=7).normal((2, 3))
    assert type(drawn).__module__.partition(".")[0].startswith(library)
    assert_same_bits(drawn, expected, because="numbers follow from the seed alone, bit by bit")


def test_without_a_seed_random_numbers_cannot_be_foretold() -> None:
    first, second = (default_device_rng(cpu_device()).bits(4).tolist() for _ in range(2))
    assert first != second


def test_a_saved_preference_goes_before_the_order() -> None:
    with machine_of(cuda=1, rocm=1, engines=("numpy",)):
        gpu_backend("AMDGPU")
        chosen = gpu_device()
    assert type(chosen) is LuxAMDGPUDevice
    assert chosen.chosen_by == "preference"


def test_a_preference_that_does_not_work_is_passed_over_with_a_warning() -> None:
    with machine_of(cuda=1, engines=("numpy",)):
        gpu_backend("Metal")
        words = "using cuda:0, because metal is preferred but does not"
        with pytest.warns(UserWarning, match=words):
            assert type(gpu_device()) is LuxCUDADevice
        prefer("cuda:3")
        with pytest.warns(UserWarning, match="this machine has no cuda:3"):
            assert gpu_device() == Device("cuda:0")


@pytest.mark.needs("torch")
def test_the_engine_that_is_asked_for_serves_it_if_it_can() -> None:
    prefer("cuda", engine="jax")
    with machine_of(cuda=1, engines=("torch", "jax")):
        assert gpu_device().engine == "jax"
    with (
        machine_of(cuda=1, engines=("torch",)),
        pytest.warns(UserWarning, match="using cuda:0 with torch: user file asks for jax, but"),
    ):
        assert gpu_device().engine == "torch"
    with (
        machine_of(cuda=1, engines=("torch",)),
        use_device("cpu", engine="numpy"),
        pytest.warns(UserWarning, match="no GPU works here: cuda:0: numpy does not drive it"),
    ):
        assert gpu_device() == cpu_device()


def test_a_block_goes_before_a_file_and_what_is_no_gpu_does_not_count() -> None:
    with machine_of(cuda=2, engines=("numpy",)):
        gpu_backend("CUDA")
        with use_device("cuda:1"):
            assert gpu_device() == Device("cuda:1")
        with use_device("cpu"):
            assert gpu_device() == Device("cuda:0")


def test_without_a_gpu_it_is_the_cpu_with_a_warning() -> None:
    with (
        machine_of(),
        pytest.warns(UserWarning, match="using the CPU: no GPU works here: this machine has no"),
    ):
        assert gpu_device() == cpu_device()


def test_a_forced_gpu_is_an_error_where_there_is_none() -> None:
    with machine_of():
        with pytest.raises(DeviceNotFoundError, match="no GPU works here") as caught:
            gpu_device(force_gpu_usage=True)
        assert {finding.backend for finding in caught.value.findings} >= {"cuda", "rocm", "metal"}
    with machine_of(rocm=1, engines=("numpy",)):
        assert gpu_device(force_gpu_usage=True) == Device("rocm:0")


def test_the_preference_is_saved_replaced_and_deleted_in_a_local_file(home: Path) -> None:
    file = Path("anydevice.toml")  # in the working directory: the project has none yet
    gpu_backend("")
    assert not file.exists()
    gpu_backend("CUDA")
    assert file.read_text().endswith('\ndevice = "cuda"\n')
    gpu_backend("amdgpu")
    assert file.read_text().endswith('\ndevice = "rocm"\n')
    gpu_backend(LuxMetalDevice())
    assert file.read_text().endswith('\ndevice = "metal"\n')
    gpu_backend("")
    assert not file.exists(), "it was made for the preference"
    assert list(home.iterdir()) == []


def test_the_preference_is_the_one_of_the_project(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "anydevice.toml").write_text('device = "cuda"\n')
    other = tmp_path / "other"
    other.mkdir()
    with machine_of(cuda=1, rocm=1, engines=("numpy",)):
        gpu_backend("AMDGPU")
        assert gpu_device() == Device("rocm:0")
        monkeypatch.chdir(other)
        assert gpu_device() == Device("cuda:0")


@pytest.mark.parametrize("nothing", ["", None])
def test_nothing_deletes_and_takes_effect_at_once(nothing: str | None) -> None:
    with machine_of(cuda=1, rocm=1, engines=("numpy",)):
        gpu_backend("AMDGPU")
        assert gpu_device() == Device("rocm:0")
        gpu_backend(nothing)
        assert gpu_device() == Device("cuda:0")
        gpu_backend("AMDGPU")
        gpu_backend()
        assert gpu_device() == Device("cuda:0")


@pytest.mark.parametrize(
    "wrong",
    [
        "CUDNN",
        "cpu",
        LuxCPUDevice(),
        Device("tpu"),
        3,
        0,
        False,
        b"CUDA",
        ["CUDA"],
        int,
        AbstractLuxGPUDevice,
    ],
)
def test_a_wrong_name_is_refused_with_the_valid_ones(home: Path, wrong: object) -> None:
    with pytest.raises(ConfigurationError, match="the valid names are 'CUDA', 'AMDGPU', 'Metal'"):
        gpu_backend(wrong)
    for question in (functional, loaded):
        if not isinstance(wrong, Device):
            with pytest.raises(ConfigurationError, match="is not a GPU backend of Lux"):
                question(wrong)
    assert not (home / "anydevice.toml").exists()
    assert not Path("anydevice.toml").exists()


def test_resetting_lets_the_choice_run_again() -> None:
    machine = [fake_backend("rocm", 1, engines=("numpy",))]
    with machine_from(lambda limit: machine):
        assert gpu_device() == Device("rocm:0")
        machine.append(fake_backend("cuda", 1, engines=("numpy",)))
        assert gpu_device() == Device("rocm:0")
        reset_gpu_device()
        assert gpu_device() == Device("cuda:0")


@pytest.mark.usefixtures("site")
def test_hardware_that_no_library_drives_warns_with_what_to_install(card: BackendScan) -> None:
    with machine_of(scans=[card]):
        assert not loaded("CUDA")
        with pytest.warns(UserWarning, match=r"cuda stopped at library: .*\(fix: pip install "):
            assert gpu_device() == cpu_device()


@pytest.mark.usefixtures("cupy_for_cuda")
def test_a_library_may_be_there_without_its_hardware() -> None:
    with machine_of():
        assert [loaded(kind) for kind in GPUS] == [True, False, False]
        assert [functional(kind) for kind in GPUS] == [False, False, False]


def test_a_device_made_by_hand_is_what_it_names() -> None:
    with machine_of(cuda=2, engines=("numpy",)):
        device = LuxCUDADevice(1)
        assert device == Device("cuda:1")
        assert (functional(device), loaded(device)) == (True, True)
        assert not functional(LuxCUDADevice(2))
        assert not functional(LuxAMDGPUDevice())
        assert device(np.ones(2)).sum() == 2


def test_all_gpus_have_one_type_and_the_cpu_has_another() -> None:
    assert all(isinstance(kind(), AbstractLuxGPUDevice) for kind in GPUS)
    assert not isinstance(LuxCPUDevice(), AbstractLuxGPUDevice)


def test_the_tier_of_each_is_shown() -> None:
    assert [kind().tier for kind in GPUS] == ["stable", "untested", "untested"]
    assert LuxCPUDevice().tier == "stable"


@pytest.mark.parametrize("device", [LuxCPUDevice(), LuxCUDADevice(1, engine="jax")])
def test_a_device_keeps_its_type_when_it_is_pickled(device: Device) -> None:
    again = pickle.loads(pickle.dumps(device))
    assert type(again) is type(device)
    assert (again, repr(again)) == (device, repr(device))


def test_a_choice_that_is_met_is_silent() -> None:
    with machine_of(cuda=1, engines=("numpy",)), warnings.catch_warnings():
        warnings.simplefilter("error")
        gpu_backend("CUDA")
        assert gpu_device().engine == "numpy"
