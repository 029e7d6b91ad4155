"""The fake machine: arrays know where they are, memory is counted, and all is undone afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import anydevice
from anydevice import (
    ConfigurationError,
    DeviceMismatchError,
    OutOfMemoryError,
    device,
    device_of,
    memory_stats,
    nn,
    ops,
    parallel,
    testing,
    to_device,
    to_numpy,
)
from tests.comparing import assert_close, assert_same_bits
from tests.programs import run_python

MIB = 2**20
CARDS = ["NVIDIA H100 64MiB", "NVIDIA L4 16MiB"]
MODEL = {"hidden": 1024, "layers": 8, "heads": 8, "intermediate": 2048, "vocabulary": 4096}
LIBRARIES = ("numpy", "torch", "jax")


def numbers(mebibytes: float) -> Any:
    return np.ones(int(mebibytes * MIB) // 4, np.float32)


def used(place: str) -> int:
    gc.collect()
    in_use = memory_stats(place).in_use
    assert in_use is not None
    return in_use


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(name)
    return name


@pytest.fixture
def two_cards(library: str) -> Iterator[str]:
    with testing.fake_machine(cuda=CARDS, engines=[library]):
        yield library


@pytest.mark.needs("torch")
def test_numpy_drives_a_fake_card_if_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with testing.fake_machine(cuda=1):
        [card] = anydevice.devices("cuda")
        assert card.status.engines[0] == "torch"
        assert "numpy" not in card.status.engines
    monkeypatch.setattr(testing, "_COMPUTING", ())
    with testing.fake_machine(cuda=1):
        assert isinstance(device("cuda")(np.ones(3, np.float32)), np.ndarray)


def test_an_array_is_on_the_fake_device_that_it_was_sent_to(two_cards: str) -> None:
    for place in ("cuda:0", "cuda:1", "cpu"):
        here = device(place, engine=two_cards)
        there = here({"x": np.ones((2, 3), np.float32), "name": "batch"})
        assert device_of(there) == here
        assert device_of(there).engine == two_cards  # type: ignore[union-attr]
        assert (to_numpy(there)["x"] == 1).all()


def test_an_array_moves_from_card_to_card_and_back(two_cards: str) -> None:
    first = to_device(numbers(4), "cuda:0")
    second = to_device(first, "cuda:1")
    assert second is not first
    assert (str(device_of(first)), str(device_of(second))) == ("cuda:0", "cuda:1")
    assert to_device(second, "cuda:1") is second
    assert str(device_of(to_device(second, "cpu"))) == "cpu"
    if two_cards != "numpy":  # of which to_numpy() leaves the arrays as they are
        assert str(device_of(to_numpy(second))) == "cpu"


def test_cards_have_names_and_memory_of_their_own() -> None:
    with testing.fake_machine(cuda=["NVIDIA H100-80GB", "NVIDIA L4"], rocm=1, memory="24GiB"):
        facts = [device(place).facts for place in ("cuda:0", "cuda:1", "rocm")]
    assert [each.name for each in facts] == ["NVIDIA H100", "NVIDIA L4", "fake ROCm device"]
    assert [each.total_memory for each in facts] == [80 * 10**9, 24 * 2**30, 24 * 2**30]
    assert len({each.uuid for each in facts}) == 3


@pytest.mark.parametrize("cards", [-1, True, 1.5, "two", ["H100", 3]])
def test_what_names_no_cards_is_refused(cards: Any) -> None:
    words = "cuda=.* is not a number of devices"
    with pytest.raises(ConfigurationError, match=words), testing.fake_machine(cuda=cards):
        pass


def test_memory_is_taken_and_given_back(two_cards: str) -> None:
    before = device("cuda:0").facts.free_memory
    assert before == 64 * MIB
    x = to_device(numbers(8), "cuda:0")
    stats = memory_stats("cuda:0")
    assert (stats.in_use, stats.free, stats.total) == (8 * MIB, 56 * MIB, 64 * MIB)
    assert device("cuda:0").facts.free_memory == 56 * MIB
    assert used("cuda:1") == 0
    y = ops.add(x, x)
    assert used("cuda:0") == 16 * MIB
    del x
    assert used("cuda:0") == 8 * MIB
    del y
    assert used("cuda:0") == 0
    assert memory_stats("cuda:0").peak == 16 * MIB


def test_what_does_not_fit_is_refused(two_cards: str) -> None:
    kept = to_device(numbers(10), "cuda:1")
    with pytest.raises(OutOfMemoryError) as refused:
        to_device({"weights": numbers(8)}, "cuda:1")
    error = refused.value
    assert "weights" in str(error)
    assert str(error.device) == "cuda:1"
    assert (error.asked, error.free, error.total) == (8 * MIB, 6 * MIB, 16 * MIB)
    del error, refused
    with pytest.raises(OutOfMemoryError, match="cuda:1 is out of memory"):
        ops.add(kept, kept)
    assert used("cuda:1") == 10 * MIB
    assert str(device_of(to_device({"weights": numbers(8)}, "cuda:0"))) == "cuda:0"


def test_what_ops_compute_is_where_their_operands_are(two_cards: str) -> None:
    x = to_device(np.ones((4, 8), np.float32), "cuda:1")
    results = [
        ops.add(x, 1.0),
        ops.softmax(x),
        ops.rmsnorm(x, to_device(np.ones(8, np.float32), "cuda:1")),
        ops.matmul(x, ops.permute(x, (1, 0))),
        ops.sum(x, 0),
        ops.concat([x, x], 0),
    ]
    assert {str(device_of(each)) for each in results} == {"cuda:1"}


def test_operands_on_two_devices_are_refused(two_cards: str) -> None:
    x, y = (to_device(np.ones(3, np.float32), f"cuda:{index}") for index in range(2))
    with pytest.raises(DeviceMismatchError, match=r"cuda:0.*cuda:1|cuda:1.*cuda:0"):
        ops.add(x, y)
    host = to_device(y, "cpu")
    with pytest.raises(DeviceMismatchError, match=r"cuda:0.*cpu|cpu.*cuda:0"):
        ops.add(x, host)
    with pytest.raises(DeviceMismatchError):
        device_of([x, y])


def test_the_choice_follows_what_is_free() -> None:
    pytest.importorskip("torch")
    with testing.fake_machine(cuda=2, memory="64MiB", engines=["torch"]):
        assert str(device()) == "cuda:0"
        kept = to_device(numbers(40), "cuda:0")
        assert str(device()) == "cuda:1"
        assert str(device(min_free="30MiB")) == "cuda:1"
        with pytest.raises(anydevice.DeviceNotFoundError):
            device("cuda:0", min_free="30MiB")
        del kept
        assert str(device()) == "cuda:0"


def test_views_take_memory_once() -> None:
    torch = pytest.importorskip("torch")
    with testing.fake_machine(cuda=1, memory="64MiB", engines=["torch"]):
        tied = torch.ones(MIB)
        model = to_device({"a": tied, "b": tied, "half": tied[: MIB // 2]}, "cuda:0")
        assert used("cuda:0") == 4 * MIB
        assert {str(device_of(each)) for each in model.values()} == {"cuda:0"}
        part = model["half"]
        del model
        assert used("cuda:0") == 4 * MIB  # as long as a view is there
        del part
        assert used("cuda:0") == 0


def test_a_module_and_its_gradients_are_on_its_device() -> None:
    torch = pytest.importorskip("torch")
    with testing.fake_machine(cuda=CARDS, engines=["torch"]):
        here = device("cuda:1")
        model = here(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()))
        assert device_of(model) == here
        weights = used("cuda:1")
        assert weights == 4 * (256 * 256 + 256)
        y = model(here(torch.ones(64, 256)))
        assert device_of(y) == here
        y.square().mean().backward()
        assert device_of([each.grad for each in model.parameters()]) == here
        del y
        assert used("cuda:1") == 2 * weights
        with pytest.raises(RuntimeError, match=r"same device.*cuda:1.*cuda:0"):
            model(to_device(torch.ones(2, 256), "cuda:0"))


def test_pytorch_itself_runs_out_of_memory() -> None:
    torch = pytest.importorskip("torch")
    with testing.fake_machine(cuda=1, memory="16MiB", engines=["torch"]):
        x = to_device(torch.ones(2 * MIB), "cuda:0")
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.cat([x, x])
        assert used("cuda:0") == 8 * MIB

        def step(size: int) -> Any:
            return to_device(torch.ones(size), "cuda:0") * 2

        assert anydevice.find_batch_size(step, 4 * MIB) == MIB

        def doubled(x: Any) -> Any:
            return torch.cat([x, x])

        with pytest.warns(UserWarning, match="runs on the CPU"):
            y = anydevice.cpu_fallback(doubled)(x)
        assert (str(device_of(y)), y.shape) == ("cpu", (4 * MIB,))


def test_a_plan_counts_what_is_taken() -> None:
    pytest.importorskip("torch")
    with testing.fake_machine(cuda=1, memory="8GiB", engines=["torch"]):
        before = anydevice.plan_inference(**MODEL, context=128, devices="cuda:0")
        kept = to_device(numbers(64), "cuda:0")
        after = anydevice.plan_inference(**MODEL, context=128, devices="cuda:0")
        del kept
    assert before != after


@pytest.mark.parametrize("library", ["torch", "jax"], indirect=True)
def test_a_model_trains_on_its_fake_device(two_cards: str) -> None:
    here = device("cuda:1")
    model = nn.build(nn.Dense(4, 8), "relu", nn.Dense(8, 3), device=here)
    assert device_of(model) == here
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    y = x[:, :3].argmax(1).astype("int32")
    trained = nn.train(
        model, nn.Batches(x, y, 16), nn.Adam(0.01), "cross_entropy", epochs=2, optimize="none"
    )
    assert device_of(trained.model) == here
    assert device_of(trained.model(x)) == here
    ready = anydevice.compile(trained.model, verify=x[:8], optimize="none")
    assert device_of(ready(x)) == here
    del model, trained, ready
    assert used("cuda:1") == 0


FOUR = """
import os, jax, numpy as np
from anydevice._machine.engines import registry
from anydevice import device, device_of, devices, nn, testing, to_device

with testing.fake_machine(cuda=2, engines=["jax"]):
    registry.load("jax")  # which starts later
    print(jax.config.jax_num_cpu_devices, os.environ["JAX_NUM_CPU_DEVICES"])
print(jax.config.jax_num_cpu_devices, "JAX_NUM_CPU_DEVICES" in os.environ)

block = testing.fake_machine(cuda=4, engines=["jax"])
block.__enter__()  # which nobody leaves
cards = devices("gpu")
print(len({each.native for each in (*cards, device("cpu", engine="jax"))}))
x = np.ones((10, 4), np.float32)
print([str(device_of(to_device(x, card) + 1)) for card in cards])
model = nn.build(nn.Dense(4, 2), device=cards[0])
rest = nn.Batches(x, x[:, :2], 8), nn.SGD(0.1), "mean_squared_error"
options = {"epochs": 3, "progress": False}
one, several = (nn.train(model, *rest, devices=d, **options) for d in ("cuda:0", cards))
print(max(abs(a - b) for a, b in zip(one.history.losses, several.history.losses)) < 1e-6)
"""


def test_fake_devices_are_distinct_to_jax_and_end_with_the_program() -> None:
    pytest.importorskip("jax")
    done = run_python("-c", FOUR, env={"XLA_FLAGS": None})
    cards = [f"cuda:{index}" for index in range(4)]
    assert done.stdout.splitlines()[2:] == ["5", str(cards), "True"], done.stderr
    assert done.stdout.splitlines()[:2] == ["3 3", "-1 False"]
    assert done.stderr == ""


LEFT = """
import anydevice
from anydevice import testing
with testing.fake_machine(cuda=2, engines=["jax"]):
    import jax  # its modules end after ours
    x = jax.numpy.ones(2)
    left = [anydevice.to_device(x, anydevice.Device(f"cuda:{index}")) for index in range(2)]
"""


def test_arrays_of_a_fake_device_may_outlive_the_program() -> None:
    pytest.importorskip("jax")
    assert run_python("-c", LEFT).stderr == ""


def test_too_few_devices_of_jax_are_said() -> None:
    """JAX has started with three CPU devices here."""
    pytest.importorskip("jax")
    anydevice.device("cpu", engine="jax").native  # noqa: B018
    with testing.fake_machine(cuda=4, engines=["jax"]):
        cards = anydevice.devices("gpu")
        said = r"take cuda:0, cuda:1, cuda:2 and cuda:3 for one device, because JAX shows \d on"
        with pytest.warns(UserWarning, match=said):
            assert cards[1].native == cards[3].native
        with (
            pytest.warns(UserWarning, match=said),
            pytest.raises(ConfigurationError, match="cuda:3 for 1, and needs distinct"),
        ):
            parallel.shard(np.ones(4, np.float32), parallel.Mesh(cards))


def test_a_model_that_does_not_fit_its_card_is_refused(two_cards: str) -> None:
    with pytest.raises(OutOfMemoryError, match="cuda:1 is out of memory"):
        nn.build(nn.Dense(2048, 4096), device=device("cuda:1"))
    assert used("cuda:1") == 0


def test_a_limit_holds_on_a_fake_card() -> None:
    pytest.importorskip("torch")
    with testing.fake_machine(cuda=1, memory="64MiB", engines=["torch"]):
        anydevice.configure(memory=0.5)
        kept = to_device(numbers(30), "cuda:0")
        with pytest.raises(OutOfMemoryError) as refused:
            to_device(numbers(4), "cuda:0")
        assert "may hold 32.0 MiB" in str(refused.value)
        del refused
        anydevice.configure(memory=None)
        assert str(device_of([kept, to_device(numbers(4), "cuda:0")])) == "cuda:0"


def test_engines_that_drive_no_fake_card_do_not_show_the_computer_s_own() -> None:
    pytest.importorskip("pyopencl")
    from anydevice._machine.engines import registry

    gc.collect()  # garbage of earlier tests is no part of what is counted
    own = registry.load("opencl").devices()
    before = memory_stats(own[0]).in_use or 0
    with testing.fake_machine(cuda=1, opencl=0, engines=["numpy"]):
        assert registry.load("opencl").devices() == ()
        assert {each.backend for each in registry.load("numpy").devices()} == {"cpu", "cuda"}
    assert registry.load("opencl").devices() == own != ()
    kept = to_device(numbers(4), str(own[0]), convert=True)
    with testing.fake_machine(opencl=1, engines=["numpy"]):
        assert memory_stats("opencl:0").in_use == 0
    assert memory_stats(own[0]).in_use == before + kept.nbytes


def test_settings_made_in_the_block_are_undone() -> None:
    anydevice.configure(time_limit=7)
    try:
        with testing.fake_machine(cuda=1, engines=["numpy"]):
            anydevice.configure(time_limit=3, memory=0.5)
            device("cuda:0", engine="numpy")
        assert anydevice.configure().time_limit == 7
        assert anydevice.configure().memory is None
    finally:
        anydevice.configure(time_limit=None)


def test_everything_is_as_before_after_an_error(library: str) -> None:
    from anydevice._core import hooks
    from anydevice._machine.engines import registry
    from anydevice._machine.engines.registry import owner_of

    x = device("cpu", engine=library)(np.ones(3, np.float32))
    engine, hook = registry.load(library), hooks.free_memory.function
    inside: list[Any] = []

    def fail() -> None:
        with testing.fake_machine(cuda=1, engines=[library]):
            inside.append(to_device(x, "cuda:0"))
            assert owner_of(x) is not engine
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert registry.load(library) is engine
    assert owner_of(x) is engine
    assert hooks.free_memory.function is hook
    for each in (inside[0], ops.add(inside[0], 1.0)):
        assert device_of(each).backend == "cpu"  # type: ignore[union-attr]  # where it really is


def test_a_machine_inside_another_leaves_it_as_it_was(library: str) -> None:
    with testing.fake_machine(cuda=1, memory="64MiB", engines=[library]):
        x = to_device(numbers(8), "cuda:0")
        with testing.fake_machine(rocm=2, memory="16MiB", engines=[library]):
            y = to_device(numbers(4), "rocm:1")
            assert str(device_of(y)) == "rocm:1"
            assert used("rocm:1") == 4 * MIB
        assert str(device_of(x)) == "cuda:0"
        assert used("cuda:0") == 8 * MIB
        assert str(device_of(ops.add(x, x))) == "cuda:0"


def test_other_threads_see_the_same_machine(two_cards: str) -> None:
    found: list[Any] = []

    def work() -> None:
        for _ in range(50):
            x = to_device(numbers(0.25), "cuda:0")
            found.append(device_of(ops.multiply(x, 2.0)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert {str(each) for each in found} == {"cuda:0"}
    assert len(found) == 200
    assert used("cuda:0") == 0


def test_many_and_large_arrays_arrive_whole(two_cards: str) -> None:
    many = [np.full(8, number, np.float32) for number in range(100)]
    tree = to_device({"many": many, "large": np.arange(4 * MIB, dtype=np.float32)}, "cuda:0")
    assert device_of(tree) == anydevice.Device("cuda:0")
    back = to_numpy(tree)
    assert [each[0] for each in back["many"]] == list(range(100))
    large = np.arange(4 * MIB, dtype=np.float32)
    assert_same_bits(back["large"], large, because="only copied")


def test_batches_are_placed_ahead_on_a_fake_device(two_cards: str) -> None:
    batches = [{"x": numbers(1), "step": step} for step in range(6)]
    for step, batch in enumerate(anydevice.prefetch(batches, "cuda:1")):
        assert (batch["step"], str(device_of(batch))) == (step, "cuda:1")
    del batch
    assert used("cuda:1") == 0


def test_pytorch_s_compiler_works_in_the_block_and_after_it() -> None:
    torch = pytest.importorskip("torch")

    def computed(x: Any) -> Any:
        return ops.softmax(ops.add(x, 2 * x))

    compiled = torch.compile(computed, fullgraph=True, backend="eager")
    expected = np.full(4, 0.25, np.float32)
    with testing.fake_machine(cuda=1, engines=["torch"]):
        assert_close(compiled(to_device(torch.ones(4), "cuda:0")), expected, terms=8)
    assert_close(compiled(torch.ones(4)), expected, terms=8)
