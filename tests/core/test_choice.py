"""The pure function that chooses."""

from __future__ import annotations

from typing import Any

import pytest

from anydevice._core.choice import (
    Choice,
    Request,
    Wish,
    accelerators_passed_over,
    choose,
    pick_engine,
)
from anydevice._core.device import Device
from anydevice._core.finding import DeviceStatus, Facts, Finding, Reason, Refusal
from anydevice._core.record import replace

GIB = 2**30


def status(kind: Any = "gpu", engines: tuple[str, ...] = ("torch",), **more: Any) -> DeviceStatus:
    memory = {"memory_kind": more.pop("memory_kind", "dedicated"), "total_memory": 16 * GIB}
    facts = Facts(name="card", free_memory=more.pop("free", 8 * GIB), **memory)
    return DeviceStatus(kind, facts, engines, **more)


def finding(backend: str, *statuses: DeviceStatus, present: bool = True) -> Finding:
    devices = tuple(Device.seen(backend, i, s) for i, s in enumerate(statuses))
    return Finding(backend, present, any(s.usable for s in statuses), "stable", devices, stage=None)


CPU = finding("cpu", status("cpu", ("numpy", "torch")))
BROKEN = status(
    engines=(), stage="library", reasons=(Reason("cpu_only_build", "torch is a CPU-only build"),)
)


def pick(request: Request, *findings: Finding) -> Choice:
    return choose(request, findings, lambda d: d.status.facts.free_memory if d.status else None)


def test_the_order_of_backends_decides_without_a_wish() -> None:
    choice = pick(Request(), finding("cuda", status()), finding("rocm", status()), CPU)
    assert str(choice.device) == "cuda:0"
    assert choice.device.chosen_by == "order of backends"


@pytest.mark.parametrize(
    ("name", "device"),
    [("gpu:0", "opencl:1"), ("gpu:1", "cuda:1"), ("gpu:2", "opencl:2"), ("gpu:3", None)],
)
def test_a_gpu_by_number_is_a_card_through_any_backend(name: str, device: str | None) -> None:
    """The first card's CUDA is broken and its OpenCL works; OpenCL also shows the CPU."""

    def card(place: str, broken: bool = False, **more: Any) -> DeviceStatus:
        seen = status(**more)
        facts = replace(seen.facts, pci_address=f"0000:0{place}:00.0")
        return replace(BROKEN if broken else seen, facts=facts)

    cl = {"engines": ("opencl",)}
    opencl = (status("cpu", **cl), card("1", **cl), card("3", **cl), card("2", **cl))
    cards = finding("cuda", card("1", broken=True), card("2")), finding("opencl", *opencl)
    choice = pick(Request((Wish("argument", (name,), binding=True),)), *cards, CPU)
    assert str(choice.device or "") == (device or "")
    assert device or choice.steps[-1].outcome == "this machine has no gpu:3"


def test_it_ends_at_the_cpu_and_keeps_every_reason() -> None:
    choice = pick(Request(), finding("cuda", BROKEN), CPU)
    assert str(choice.device) == "cpu"
    assert [(s.asked, s.taken) for s in choice.steps] == [("cuda", False), ("cpu", True)]
    assert "CPU-only build" in choice.steps[0].outcome
    assert [reason.code for reason in choice.reasons] == ["cpu_only_build"]
    assert choice.steps[0].to_dict()["code"] == "cpu_only_build"


def test_a_binding_wish_that_is_not_met_is_nothing() -> None:
    wish = Wish("argument", ("cuda",), binding=True)
    choice = pick(Request((wish,)), finding("cuda", BROKEN), CPU)
    assert choice.device is None
    assert "CPU-only build" in choice.steps[-1].outcome


def test_a_preference_that_is_not_met_is_passed_over() -> None:
    choice = pick(Request((Wish("user file", ("rocm",)),)), finding("cuda", status()), CPU)
    assert str(choice.device) == "cuda:0"
    assert choice.passed_over[0].source == "user file"
    assert choice.passed_over[0].outcome == "this machine has no rocm"


def test_wishes_are_asked_in_their_order() -> None:
    wishes = (Wish("environment", ("cpu",)), Wish("project file", ("cuda",)))
    choice = pick(Request(wishes), finding("cuda", status()), CPU)
    assert (str(choice.device), choice.device.chosen_by) == ("cpu", "environment")


def test_a_list_is_a_priority() -> None:
    wish = Wish("argument", ("tpu", "cuda:1", "cpu"), binding=True)
    two = finding("cuda", status(), status())
    assert str(pick(Request((wish,)), two, CPU).device) == "cuda:1"
    assert str(pick(Request((wish,)), CPU).device) == "cpu"


def test_gpu_means_any_gpu_but_not_a_cpu_seen_through_opencl() -> None:
    wish = Request((Wish("argument", ("gpu",), binding=True),))
    pocl = finding("opencl", status("cpu", ("opencl",)))
    assert pick(wish, pocl, CPU).device is None
    assert str(pick(wish, finding("rocm", status()), pocl, CPU).device) == "rocm:0"
    by_kind = Request((Wish("argument", ("cpu",), binding=True),))
    assert str(pick(by_kind, pocl, CPU).device) == "cpu"


def test_the_launcher_s_rank_picks_the_index_and_wraps_around() -> None:
    three = finding("cuda", status(), status(), status())
    for rank, index in ((0, 0), (2, 2), (4, 1)):
        assert str(pick(Request(local_rank=rank), three, CPU).device) == f"cuda:{index}"


def test_of_equal_cards_the_one_with_most_free_memory() -> None:
    busy = finding("cuda", status(free=1 * GIB), status(free=12 * GIB), status(free=4 * GIB))
    assert str(pick(Request(), busy, CPU).device) == "cuda:1"
    windows = finding("cuda", status(free=int(11.9 * GIB)), status(free=12 * GIB))
    assert str(pick(Request(), windows, CPU).device) == "cuda:0"  # a desktop does not decide


def test_a_card_goes_before_graphics_that_share_the_machine_s_memory() -> None:
    shared = status(free=60 * GIB, memory_kind="unified")
    assert str(pick(Request(), finding("rocm", shared, status()), CPU).device) == "rocm:1"
    assert str(pick(Request(), finding("rocm", shared), CPU).device) == "rocm:0"


def test_min_free_passes_over_what_is_too_small_and_lists_each() -> None:
    cards = finding("cuda", status(free=4 * GIB), status(free=6 * GIB))
    assert str(pick(Request(min_free=5 * GIB), cards, CPU).device) == "cuda:1"
    wish = Wish("argument", ("cuda",), binding=True)
    choice = pick(Request((wish,), min_free=10 * GIB), cards, CPU)
    assert choice.device is None
    assert "cuda:0: 4.0 GiB free of 16.0 GiB, 10.0 GiB needed" in choice.steps[0].outcome
    assert "cuda:1: 6.0 GiB free" in choice.steps[0].outcome


def test_an_engine_that_is_asked_for_filters_and_gives_its_reason() -> None:
    refusal = Refusal("jax", Reason("plugin_missing", "jax 0.10.2 has no CUDA plugin"))
    cuda = finding("cuda", status(engines=("torch",), refusals=(refusal,)))
    request = Request(
        (Wish("argument", ("cuda",), binding=True),), engine="jax", engine_source="argument"
    )
    choice = pick(request, cuda, CPU)
    assert choice.device is None
    assert "jax 0.10.2 has no CUDA plugin (asked for by argument)" in choice.steps[0].outcome
    served = pick(Request(engine="torch"), cuda, CPU).device
    assert served.engine == "torch"
    unknown = pick(Request((Wish("argument", ("cuda",), True),), engine="cupy"), cuda, CPU)
    assert "cupy does not drive it" in unknown.steps[0].outcome


def test_an_opencl_cpu_is_never_chosen_unasked() -> None:
    pocl = finding("opencl", status("cpu", ("opencl",)))
    choice = pick(Request(), pocl, finding("cpu", status("cpu", ("numpy",))))
    assert str(choice.device) == "cpu"
    assert "only chosen by name" in choice.steps[0].outcome
    assert choice.reasons == ()
    assert accelerators_passed_over([pocl, CPU]) == []
    named = pick(Request((Wish("argument", ("opencl",), binding=True),)), pocl, CPU)
    assert str(named.device) == "opencl:0"


def test_an_opencl_gpu_only_where_no_library_prefers_another_device() -> None:
    card = finding("opencl", status("gpu", ("opencl",)))
    passed = pick(Request(), card, CPU)
    assert str(passed.device) == "cpu"
    (reason,) = passed.reasons
    assert reason.code == "only_by_name"
    assert reason.text == (
        "opencl:0 was passed over: no installed library but opencl drives it; ask for it by name"
    )
    assert accelerators_passed_over([card, CPU]) == [reason.text]
    alone = pick(Request(), card, finding("cpu", status("cpu", ("numpy",))))
    assert str(alone.device) == "opencl:0"
    asked = pick(Request(order=("opencl",)), card, CPU)
    assert str(asked.device) == "opencl:0"


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_the_engine_of_opencl_means_its_device(kind: str) -> None:
    card = finding("opencl", status(kind, ("opencl",)))
    assert str(pick(Request(engine="opencl"), card, CPU).device) == "opencl:0"
    assert str(pick(Request(engine="torch"), card, CPU).device) == "cpu"


def test_beside_an_opencl_gpu_the_opencl_cpu_is_left_alone() -> None:
    both = finding("opencl", status("cpu", ("opencl",)), status("gpu", ("opencl",)))
    only_numpy = finding("cpu", status("cpu", ("numpy",)))
    assert str(pick(Request(), both, only_numpy).device) == "opencl:1"
    asked = Request((Wish("argument", ("opencl",), binding=True),))
    assert str(pick(asked, both, only_numpy).device) == "opencl:1"
    too_much = pick(Request(min_free=10 * GIB), both, only_numpy)
    assert "opencl:0" not in str(too_much.steps)
    assert [reason.text for reason in pick(Request(), both, CPU).reasons] == [
        "opencl:1 was passed over: no installed library but opencl drives it; ask for it by name"
    ]
    two = finding("opencl", status("gpu", ("opencl",)), status("gpu", ("opencl",)))
    assert [reason.text for reason in pick(Request(), two, CPU).reasons] == [
        "opencl:0 and opencl:1 were passed over: no installed library but opencl drives them; ask "
        "for one by name"
    ]


def test_min_free_goes_by_the_whole_memory_if_free_memory_is_unknown() -> None:
    card = finding("opencl", status("gpu", ("opencl",), free=None))
    wish = Wish("argument", ("opencl",), binding=True)
    assert pick(Request((wish,), min_free=20 * GIB), card, CPU).device is None
    assert str(pick(Request((wish,), min_free=10 * GIB), card, CPU).device) == "opencl:0"


def test_auto_ends_a_list() -> None:
    for binding in (True, False):
        wish = Wish("argument", ("tpu", "auto", "nowhere"), binding)
        choice = pick(Request((wish,)), finding("cuda", status()), CPU)
        assert (str(choice.device), choice.device.chosen_by) == ("cuda:0", "order of backends")
        assert choice.steps[0].outcome == "this machine has no tpu; left to the order of backends"
        assert choice.passed_over == ()


def test_an_engine_that_is_only_preferred_is_given_up_where_it_drives_nothing() -> None:
    request = Request(engine="cupy", engine_source="user file", engine_binding=False)
    choice = pick(request, CPU)
    assert (str(choice.device), choice.device.engine) == ("cpu", "numpy")
    assert choice.passed_over[0].source == "user file"
    assert "cpu: cupy does not drive it" in choice.passed_over[0].outcome
    assert pick(Request(engine="cupy"), CPU).device is None


def test_configured_order_goes_before_ours_and_decides_between_gpus_too() -> None:
    findings = (finding("cuda", status()), finding("rocm", status()), CPU)
    choice = pick(Request(order=("rocm", "cpu")), *findings)
    assert (str(choice.device), choice.device.chosen_by) == ("rocm:0", "configure")
    wish = Wish("argument", ("gpu",), binding=True)
    assert str(pick(Request((wish,), order=("rocm",)), *findings).device) == "rocm:0"


def test_an_imported_engine_goes_before_one_only_installed() -> None:
    cuda = finding("cuda", status(engines=("torch", "jax", "cupy")))
    chosen = pick(Request(loaded=frozenset({"jax", "numpy"})), cuda, CPU).device
    assert chosen.engine == "jax"


def test_on_the_cpu_numpy_serves_and_without_an_engine_nothing() -> None:
    for loaded in (set(), {"torch"}):
        assert pick_engine(Device("cpu"), ("numpy", "torch"), loaded) == "numpy"
    assert pick_engine(Device("cuda"), (), {"torch"}) is None
    assert pick(Request(), finding("cuda", BROKEN)).device is None


def test_a_step_is_plain_data() -> None:
    (step,) = pick(Request(), finding("cuda", present=False), CPU).steps  # an absent one is none
    expected = {"source": "order of backends", "asked": "cpu", "outcome": "cpu is usable"}
    assert step.to_dict() == {**expected, "code": None, "taken": True}
