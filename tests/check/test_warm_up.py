"""Kernels are checked once and then used; what is usual is compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from anydevice import testing
from anydevice._check.verify import warm_up
from anydevice._engines import trust
from anydevice._machine.discovery.discover import discover
from anydevice._machine.engines import registry
from anydevice._ops import trusted_kernels
from anydevice.errors import AnyDeviceError
from tests.refusals import refuses

CARD = "opencl:0"

pytestmark = pytest.mark.usefixtures("no_kernels_trusted")


@pytest.fixture
def two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """An OpenCL device, and of its kernels the two that are verified fastest."""
    try:
        registry.load("opencl")
    except AnyDeviceError as error:
        pytest.skip(f"OpenCL cannot run here: {error}")
    if not any(str(device) == CARD for device in discover().devices):
        pytest.skip("this machine has no OpenCL device")
    kernels = ("silu", "swiglu")
    monkeypatch.setattr(trusted_kernels, "kernels_of", lambda engine, device: kernels)


def told() -> tuple[list[str], Any]:
    steps: list[str] = []
    return steps, lambda done, total, doing: steps.append(doing)


@pytest.mark.usefixtures("two_kernels")
def test_only_what_is_not_trusted_yet_is_checked() -> None:
    steps, progress = told()
    kept = warm_up(CARD, dtypes=["float32"], progress=progress)
    here = "in float32 on opencl:0 with opencl"
    assert steps == [f"our kernel for silu {here}", f"our kernel for swiglu {here}"]
    both = (("silu", "float32", CARD), ("swiglu", "float32", CARD))
    assert (kept.trusted, kept.refused, kept.problem) == (both, (), None)
    assert warm_up(CARD, dtypes=["float32"], progress=progress).trusted == both
    trusted_kernels.forget()  # as in another process
    assert warm_up(CARD, dtypes=["float32"], progress=progress).trusted == both
    assert len(steps) == 2, "they were trusted already"
    trusted_kernels._replace({both[0]})
    warm_up(CARD, dtypes=["float32"], progress=progress)
    assert steps[2:] == [f"our kernel for swiglu {here}"]
    assert trust.is_trusted(*both[1])


def test_without_kernels_there_is_nothing_to_do() -> None:
    kept = warm_up("cpu")
    assert (kept.trusted, kept.refused) == ((), ())
    refuses("float31", warm_up, "cpu", dtypes=["float31"])


@pytest.fixture
def made_up_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("torch", reason="it serves the made-up card")
    monkeypatch.setattr(trusted_kernels, "kernels_of", lambda engine, device: ("silu",))
    with testing.fake_machine(cuda=1, engines=("torch",)):
        yield


@pytest.mark.usefixtures("made_up_card")
def test_usual_sizes_are_compiled_ahead_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_cuda = pytest.importorskip("anydevice._engines.torch.triton.fused", reason="Triton")
    calls: list[tuple[str, tuple[str, ...]]] = []
    real = torch_cuda.warm_up

    def watched(device: str, dtypes: tuple[str, ...]) -> Any:
        calls.append((device, dtypes))
        return real(device, dtypes)

    monkeypatch.setattr(torch_cuda, "warm_up", watched)
    assert warm_up("cuda:0", dtypes=["float32", "float16"]).problem is None
    assert calls == [("cpu", ("float16", "float32"))]
    warm_up("cuda:0", dtypes=["float16"])
    assert calls[1:] == [("cpu", ("float16",))], "also where all is trusted already"


@pytest.mark.usefixtures("made_up_card")
def test_what_cannot_be_compiled_ahead_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: str, dtypes: tuple[str, ...]) -> None:
        raise RuntimeError("no compiler\nhere")

    module = SimpleNamespace(warm_up=fails)
    monkeypatch.setattr(trusted_kernels, "kernel_module", lambda engine: module)
    kept = warm_up("cuda:0", dtypes=["float32"])
    assert kept.trusted == (("silu", "float32", "cuda:0"),)
    assert kept.problem == "the kernels could not be compiled ahead of their use: no compiler"
