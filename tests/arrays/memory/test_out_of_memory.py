"""Errors of libraries that ran out of memory: recognized, translated, and their frames cleared."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy
import pytest

import anydevice
from anydevice import ops, testing
from anydevice._arrays.memory import out_of_memory
from anydevice._arrays.memory.out_of_memory import (
    as_oom_error,
    clear_frames,
    in_a_line,
    raise_if_oom,
    ran_out,
    translating_oom,
)
from anydevice._core.device import Device
from anydevice._core.engine import MemoryUse
from anydevice._core.finding import Facts
from anydevice._machine.engines import registry
from anydevice._machine.hardware.readers import DeviceProcess
from anydevice.errors import ConfigurationError, OutOfMemoryError, TransferError
from tests.optional import torch
from tests.programs import output_of

ABSURD = 2**50


def opencl_ones() -> object:
    device = Device("opencl:0", engine="opencl")
    return registry.load("opencl").empty((ABSURD,), anydevice._core.dtypes.DTYPES["int8"], device)


REAL = {
    "python": (lambda: bytearray(2**60), None, None),
    "numpy": (lambda: numpy.ones(ABSURD, numpy.int8), "numpy", ABSURD),
    "torch": (lambda: torch.ones(ABSURD, dtype=torch.int8), "torch", ABSURD),
    "jax": (
        lambda: import_module("jax.numpy").ones(ABSURD // 4).block_until_ready(),
        "jax",
        ABSURD,
    ),
    "opencl": (opencl_ones, "opencl", None),
}


def error_of(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("there was room")


@pytest.fixture
def no_collecting() -> Iterator[None]:
    """What is freed in the block is freed at once, and not because Python looks for cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def import_every_library() -> None:
    for name in ("jax", "mlx.core", "pyopencl"):
        import_module(name)


class Held:
    """Stands for an array: it can be seen whether it still lives."""


# --- which errors they are ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "library",
    [*sorted({*REAL} - {"torch"}), pytest.param("torch", marks=pytest.mark.needs("torch"))],
)
def test_every_librarys_own_error_is_known(library: str) -> None:
    import_every_library()  # and none takes another's error for its own
    call, engine, asked = REAL[library]
    error = error_of(call)
    found = ran_out(error)
    assert found.error is error
    assert (found.engine and found.engine.name) == engine
    ours = as_oom_error(error)
    assert isinstance(ours, OutOfMemoryError)
    assert ours.__cause__ is error
    assert ours.asked == asked
    assert ours.device == Device("opencl:0" if library == "opencl" else "cpu")
    assert str(ours).startswith(f"{ours.device} is out of memory")
    if ours.device == Device("cpu"):
        assert ours.total == Device("cpu").facts.total_memory
        assert ours.free <= ours.total


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of bounds"),
        RuntimeError("shapes do not match"),
        TransferError("memory of a leaf"),
        KeyError("RESOURCE_EXHAUSTED memory"),
        RuntimeError("the user ran out of memory cards"),
        ValueError("the user ran out of memory cards"),
        RuntimeError("unable to allocate a port: not enough memory slots are out of memory"),
        RuntimeError("the quota was RESOURCE_EXHAUSTED, not the memory"),
        KeyboardInterrupt(),
    ],
    ids=str,
)
def test_any_other_error_is_not(error: BaseException) -> None:
    import_every_library()
    assert ran_out(error) is None
    assert as_oom_error(error) is None
    raise_if_oom(error)


def test_what_was_raised_from_one_counts_as_one() -> None:
    outer = RuntimeError("the step failed")
    outer.__cause__ = MemoryError()
    ours = as_oom_error(outer, what="step")
    assert ours.__cause__ is outer
    assert str(ours).startswith("step: cpu is out of memory")
    alone = RuntimeError("happened while another was handled")
    alone.__context__ = MemoryError()
    assert as_oom_error(alone) is None


def test_ours_stays_ours_and_gets_a_name() -> None:
    ours = OutOfMemoryError("no room", asked=3, device=Device("cuda:1"), advice=["less"])
    assert as_oom_error(ours) is ours
    assert as_oom_error(ours, what="layers[0]") is ours
    assert str(ours) == "layers[0]: no room"
    outer = RuntimeError("step")
    outer.__cause__ = ours
    again = as_oom_error(outer, what="train()")
    assert again is not ours
    assert str(again) == "train(): layers[0]: no room"
    assert (again.asked, again.device, again.advice) == (3, Device("cuda:1"), ("less",))
    assert str(as_oom_error(outer)) == "layers[0]: no room"
    copy = pickle.loads(pickle.dumps(ours))
    assert (str(copy), copy.asked, copy.device) == (str(ours), 3, Device("cuda:1"))


def test_the_engine_behind_ours_is_known() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        ops.add(torch.ones(1, 1).expand(2**30, 2**20), 1.0)
    found = ran_out(caught.value)
    assert found.engine.name == "torch"


def test_causes_that_go_round_end() -> None:
    one, two = ValueError(), ValueError()
    one.__cause__, two.__cause__ = two, one
    assert ran_out(one) is None
    clear_frames(one)
    group = ExceptionGroup("round", [one])
    two.__cause__ = group
    assert ran_out(group) is None
    clear_frames(group)


def test_a_group_is_one_where_all_of_it_ran_out() -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    later = RuntimeError("a second task failed")
    later.__cause__ = full
    group = ExceptionGroup("tasks", [ExceptionGroup("inner", [full]), later])
    found = ran_out(group)
    assert found.error is full
    ours = as_oom_error(group, what="the tasks")
    assert ours.__cause__ is group
    assert ours.asked == 2**31
    assert ran_out(ExceptionGroup("tasks", [full, ValueError("a bug")])) is None
    outer = RuntimeError("the tasks failed")
    outer.__cause__ = group
    assert ran_out(outer) is not None
    mixed = ExceptionGroup("tasks", [ValueError("a bug")])
    mixed.__cause__ = full
    assert ran_out(mixed) is not None


def test_what_may_mean_something_else_is_said_to() -> None:
    import pyopencl as cl

    class Failed(cl.RuntimeError):
        code = cl.status_code.OUT_OF_RESOURCES

    ours = as_oom_error(Failed("clEnqueueNDRangeKernel failed: OUT_OF_RESOURCES"))
    assert ours is not None
    assert "or a kernel failed: drivers say OUT_OF_RESOURCES of one that reads" in str(ours)
    assert "a kernel failed" not in str(as_oom_error(error_of(REAL["numpy"][0])))


def test_a_damaged_library_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    error = error_of(REAL["numpy"][0])
    monkeypatch.setattr(registry, "load", Mock(side_effect=ImportError))
    assert ran_out(error).engine is None
    monkeypatch.setattr(registry, "load", Mock(side_effect=ConfigurationError("damaged")))
    anydevice.release()
    assert registry.started_engines() == ()


# --- what is said of them -----------------------------------------------------------------------


PLACES = tuple(map(Device, ("cuda:0", "cuda:1", "cpu")))
TWO_CARDS: Any = SimpleNamespace(name="torch", devices=lambda: PLACES)
CARD = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 139.80 GiB"


@pytest.mark.parametrize(
    ("said", "device", "place"),
    [
        (CARD, None, "cuda:1"),
        (CARD, "cuda:0", "cuda:1"),
        (CARD.replace("GPU 1", "GPU 7"), "cuda:0", "cuda:0"),
        ("CUDA out of memory", "cuda:0", "cuda:0"),
        ("CUDA out of memory", None, None),
        ("DefaultCPUAllocator: can't allocate memory", "cuda:0", "cpu"),
        ("std::bad_alloc", "cuda:0", "cpu"),
    ],
)
def test_whose_memory_it_was(said: str, device: str | None, place: str | None) -> None:
    given = None if device is None else Device(device)
    error = torch.OutOfMemoryError(said)
    found = out_of_memory.place_of_error(error, TWO_CARDS, given)
    assert found == (None if place is None else Device(place))


def test_a_library_without_the_cpu_ran_out_elsewhere() -> None:
    error = error_of(opencl_ones)
    place = out_of_memory.place_of_error(error, registry.load("opencl"), Device("cpu"))
    assert place == Device("opencl:0")


def test_the_first_line_says_what_is_known() -> None:
    facts = Facts("a card", total_memory=2**34)
    card = Device("cuda:0")
    assert out_of_memory.headline(None, None, None) == "the device is out of memory"
    assert out_of_memory.headline(card, 2**30, facts) == (
        "cuda:0 is out of memory: 1.0 GiB were asked for, it has 16.0 GiB in all"
    )
    assert out_of_memory.headline(card, None, Facts("a card", free_memory=2**20)) == (
        "cuda:0 is out of memory: 1.0 MiB are free"
    )


def test_what_the_library_holds_is_said() -> None:
    numpy_engine = registry.load("numpy")
    held = MemoryUse(in_use=2**30, reserved=2**31, limit=2**32)
    assert out_of_memory.holding(numpy_engine, held) == (
        "numpy holds 2.0 GiB in this process, 1.0 GiB of it in arrays, and may hold 4.0 GiB"
    )
    early = MemoryUse(in_use=0, reserved=2**31, preallocated=True)
    told = out_of_memory.holding(numpy_engine, early)
    assert "taken at its start before any array needed it" in told
    assert list(out_of_memory.giving_back(held)) == [
        "anydevice.release(), which gives 1.0 GiB back that no array uses"
    ]
    assert list(out_of_memory.giving_back(early)) == []


def test_who_else_is_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    using = [DeviceProcess(os.getpid(), "this one", 2**36), DeviceProcess(1, "small", 2**10)]
    using += [DeviceProcess(pid, f"python {pid}.py", 2**33) for pid in range(10, 16)]
    monkeypatch.setattr(out_of_memory, "processes", lambda *place: using)
    facts = Facts("a card", total_memory=2**37)
    (said,) = out_of_memory.others(Device("cuda:0"), facts)
    assert said.startswith("others hold memory there: python 10.py (pid 10) 8.0 GiB, python 11.py")
    assert said.endswith("python 13.py (pid 13) 8.0 GiB, and 2 more")
    using[3:] = []
    assert list(out_of_memory.others(Device("cuda:0"), facts)) == [
        "others hold memory there: python 10.py (pid 10) 8.0 GiB"
    ]
    using[2:] = []
    assert list(out_of_memory.others(Device("cuda:0"), facts)) == []


def test_a_device_that_has_the_room_is_named() -> None:
    with testing.fake_machine(cuda=2, memory="16GiB", free=["1GiB", "2GiB"]):
        full = Device("cuda:0")
        assert list(out_of_memory.elsewhere(full, 2**30 + 2**29, full.facts)) == [
            "cuda:1, which has 2.0 GiB free"
        ]
        (said,) = out_of_memory.elsewhere(full, 2**31 + 2**28, full.facts)
        assert said.startswith("cpu, which has ")
        assert said.endswith("; anydevice.cpu_fallback(fn) goes there by itself")
        assert list(out_of_memory.elsewhere(full, 2**50, full.facts)) == []
        assert list(out_of_memory.elsewhere(full, None, full.facts)) == []
        cpu = Device("cpu")
        assert list(out_of_memory.elsewhere(cpu, 2**30 + 2**29, cpu.facts)) == [
            "cuda:1, which has 2.0 GiB free"
        ]


def test_an_error_of_a_card_is_explained_as_one() -> None:
    with testing.fake_machine(cuda=2, memory="16GiB", free=["1GiB", "9GiB"]):
        ours = as_oom_error(torch.OutOfMemoryError(CARD[:49]), Device("cuda:0"))
        assert (ours.device, ours.asked, ours.free) == (Device("cuda:0"), 2**31, 2**30)
        assert "cuda:1, which has 9.0 GiB free" in ours.advice


def test_what_cannot_be_found_out_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> Any:
        raise MemoryError

    for name in ("place_of_error", "others", "own_limit", "elsewhere"):
        monkeypatch.setattr(out_of_memory, name, fail)
    ours = as_oom_error(error_of(REAL["numpy"][0]))
    assert str(ours).startswith("the device is out of memory: 1024.0 TiB were asked for\n  try ")
    assert ours.device is None


@pytest.mark.needs("torch")
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is set as on Linux")
def test_the_processs_own_limit_is_said_and_it_goes_on_below_it() -> None:
    code = """
import resource, sys
import numpy, torch, psutil
import anydevice
from anydevice import ops
from anydevice._arrays.memory.out_of_memory import translating_oom
x, y = numpy.ones(2**20, numpy.float32), torch.ones(2**20)
anydevice.to_numpy(ops.add(y, y)); ops.add(x, x)
anydevice.discover()
most = psutil.Process().memory_info().vms + 2**29
resource.setrlimit(resource.RLIMIT_AS, (most, most))
failed = 0
for _ in range(100):
    for one in (x, y):
        try:
            ops.add(ops.broadcast_to(one, (512, 2**20)), one)
        except anydevice.OutOfMemoryError as error:
            failed += 1
            said = str(error)
        fits = ops.add(ops.broadcast_to(one, (4, 2**20)), one)
        assert float(fits[3, -1]) == 2.0
    del fits
for one in (x, y):
    assert float(ops.add(ops.broadcast_to(one, (32, 2**20)), one)[31, -1]) == 2.0
print(failed)
print(said)
"""
    failed, said = output_of("-W", "error", "-c", code).split("\n", 1)
    assert failed == "200"
    assert "cpu is out of memory: 2.0 GiB were asked for" in said
    assert "the address space of this process ends at" in said


# --- what they hold -----------------------------------------------------------------------------


def hold_and_fail(seen: list[Any]) -> None:
    held = Held()
    seen.append(weakref.ref(held))
    fail_inside(held)


def fail_inside(held: Held) -> None:
    try:
        raise ValueError(held)
    except ValueError:
        numpy.ones(ABSURD)


@pytest.mark.usefixtures("no_collecting")
@pytest.mark.parametrize("grouped", [False, True])
def test_keeping_the_error_does_not_keep_what_failed(grouped: bool) -> None:
    seen: list[Any] = []
    error = error_of(lambda: hold_and_fail(seen))
    assert seen[0]() is not None
    error.__context__ = None  # an exception's own arguments are not a frame's
    ours = as_oom_error(ExceptionGroup("several", [error]) if grouped else error)
    assert seen[0]() is None
    assert "hold_and_fail" in "".join(traceback.format_exception(ours))


@pytest.mark.usefixtures("no_collecting")
def test_an_error_that_is_dropped_is_gone_at_once() -> None:
    seen: list[Any] = []

    def op(x: Any) -> Any:
        seen.append(weakref.ref(x))
        return numpy.ones(ABSURD)

    def guarded(x: Any) -> Any:
        try:
            return op(x)
        except Exception as error:
            seen.append(weakref.ref(error))
            raise_if_oom(error, among=(x,))
            raise

    for call in (lambda: guarded(Held()), lambda: translating_oom()(op)(Held())):
        seen.clear()
        with pytest.raises(OutOfMemoryError):
            call()
        assert [each() for each in seen] == [None] * len(seen)


@pytest.mark.usefixtures("no_collecting")
def test_a_failed_move_leaves_nothing_behind() -> None:
    """Neither what was placed before, nor the error: no cycle holds on to them."""
    jax = Device("cpu", engine="jax")
    huge = numpy.broadcast_to(numpy.float32(1), (2**24, 2**24))
    seen: list[Any] = []
    for _ in range(2):
        try:
            anydevice.to_device([numpy.ones(8, numpy.float32), huge], jax)
        except OutOfMemoryError as error:
            seen.append(weakref.ref(error))
            said = str(error)
    assert said.startswith("[1]: cpu is out of memory: 1024.0 TiB were asked for")
    assert [each() for each in seen] == [None, None]


def going_on(caught: list[MemoryError]) -> Iterator[str]:
    held = Held()
    try:
        raise MemoryError
    except MemoryError as error:
        caught.append(error)
    yield "first"
    yield f"second, with {type(held).__name__}"


def test_a_generator_that_caught_the_error_goes_on() -> None:
    caught: list[MemoryError] = []
    generator = going_on(caught)
    assert next(generator) == "first"
    clear_frames(caught[0])
    assert list(generator) == ["second, with Held"]

    def step(size: int) -> None:
        if size > 1:
            raise caught[0]

    generator = going_on(caught)
    next(generator)
    del caught[0]
    assert anydevice.find_batch_size(step, 4) == 1
    assert list(generator) == ["second, with Held"]


@pytest.mark.parametrize("kind", ["coroutine", "asynchronous generator"])
def test_what_waits_goes_on_too(kind: str) -> None:
    class Pause:
        def __await__(self) -> Iterator[None]:
            yield

    async def coroutine(caught: list[MemoryError]) -> str:
        held = Held()
        try:
            raise MemoryError
        except MemoryError as error:
            caught.append(error)
        await Pause()
        return type(held).__name__

    async def generator(caught: list[MemoryError]) -> Any:
        held = Held()
        try:
            raise MemoryError
        except MemoryError as error:
            caught.append(error)
        await Pause()
        yield type(held).__name__

    caught: list[MemoryError] = []
    running = coroutine(caught) if kind == "coroutine" else generator(caught).__anext__()
    running.send(None)
    clear_frames(caught[0])
    with pytest.raises(StopIteration) as ended:
        running.send(None)
    assert ended.value.value == "Held"


@pytest.mark.usefixtures("no_collecting")
def test_a_generator_that_has_ended_is_let_go_of() -> None:
    seen: list[Any] = []

    def generator() -> Iterator[int]:
        held = Held()
        seen.append(weakref.ref(held))
        yield 1
        raise MemoryError

    started = generator()
    next(started)
    thrown = generator()
    next(thrown)
    kept = [error_of(lambda: next(started)), error_of(lambda: thrown.throw(MemoryError()))]
    assert None not in [each() for each in seen]
    for error in kept:
        clear_frames(error)
    assert [each() for each in seen] == [None, None]


# --- where ours is raised -----------------------------------------------------------------------


def test_a_block_and_a_function() -> None:
    refused = pytest.raises(OutOfMemoryError, match=r"^the batch: cpu is out of memory")
    with refused, translating_oom("cpu", what="the batch"):
        numpy.ones(ABSURD)

    @translating_oom()
    def ones(count: int) -> Any:
        """Some ones."""
        return numpy.ones(count)

    assert ones(2).tolist() == [1, 1]
    assert (ones.__name__, ones.__doc__) == ("ones", "Some ones.")
    with pytest.raises(OutOfMemoryError):
        ones(ABSURD)
    with pytest.raises(KeyError, match="passes"), translating_oom():
        raise KeyError("passes")
    with pytest.raises(KeyboardInterrupt), translating_oom():
        raise KeyboardInterrupt


def test_an_error_in_one_line() -> None:
    said = in_a_line(error_of(REAL["numpy"][0]), Device("cpu"))
    assert said.startswith("OutOfMemoryError: cpu is out of memory: 1024.0 TiB were asked for, ")
    assert "\n" not in said
    assert in_a_line(KeyError()) == "KeyError: no message"


def test_moving_names_the_leaf_that_has_no_room() -> None:
    huge = torch.ones(1, dtype=torch.int8).expand(ABSURD)
    with pytest.raises(OutOfMemoryError, match=r"^\['x'\]: cpu is out of memory") as caught:
        anydevice.to_device({"x": huge}, Device("cpu", engine="jax"), convert=True)
    assert isinstance(caught.value.__cause__, MemoryError | RuntimeError)
    with pytest.raises(OutOfMemoryError, match=r"^\[1\]: cpu is out of memory"):
        anydevice.to_numpy([torch.ones(2), torch.ones(1).bfloat16().expand(ABSURD)])
    batches = [{"x": numpy.broadcast_to(numpy.float32(1), (2**24, 2**24))}]
    with pytest.raises(OutOfMemoryError, match=r"^\['x'\]: cpu is out of memory"):
        list(anydevice.prefetch(batches, Device("cpu", engine="jax")))


def test_random_numbers_for_which_there_is_no_room() -> None:
    random = anydevice.rng(0, "cpu")
    before = random.state
    with pytest.raises(OutOfMemoryError, match=r"cpu is out of memory: 4096\.0 TiB"):
        random.uniform((2**25, 2**25))
    assert random.state == before
    assert len(random.uniform(3)) == 3


def test_waiting_for_what_had_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: Device) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes.")

    monkeypatch.setattr(registry.load("jax"), "synchronize", synchronize)
    with pytest.raises(OutOfMemoryError, match="cpu is out of memory: 64 B were asked for"):
        anydevice.synchronize(Device("cpu", engine="jax"))


def test_benchmarks_and_verdicts_say_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    row = numpy.ones((1, 2**10), numpy.float32)
    timings = anydevice.benchmark(lambda x: x + numpy.ones(ABSURD), row, devices=["cpu"], limit=0.1)
    reason = timings["cpu"].reason
    assert reason.startswith("OutOfMemoryError: cpu is out of memory")

    def place(x: Any, device: Device, *, narrow: bool = False) -> Any:
        return numpy.ones(ABSURD)

    monkeypatch.setattr(registry.load("numpy"), "place", place)
    [cell] = anydevice.verify("add", None, "numpy", "float32", quick=True, isolated=False)
    assert (cell.state, cell.code) == ("not_reached", "out_of_memory")
    assert str(cell.reason).startswith("OutOfMemoryError: cpu is out of memory")


# --- giving back --------------------------------------------------------------------------------


def test_memory_is_given_back_by_every_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    held = mx.ones(2**20)
    mx.eval(held)
    del held
    assert mx.get_cache_memory() > 0
    anydevice.release("cpu")
    assert mx.get_cache_memory() == 0
    anydevice.release()
    with pytest.raises(anydevice.DeviceNotFoundError):
        anydevice.release("tpu:3")


def test_giving_back_starts_no_library() -> None:
    code = """
import jax, anydevice
from jax._src import xla_bridge
anydevice.release()
print(xla_bridge.backends_are_initialized())
"""
    assert output_of("-c", code).strip() == "False"
