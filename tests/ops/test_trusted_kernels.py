"""Kernels of our own are used only where they were right, in this process and in later ones."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any

import pytest

from anydevice._check.verdicts import Cell, Of, State, Verdicts, refuse_wrong, save
from anydevice._check.verify import verify
from anydevice._core.device import Device
from anydevice._core.record import replace
from anydevice._engines import trust
from anydevice._machine.discovery.discover import discover
from anydevice._machine.engines import registry
from anydevice._ops import trusted_kernels
from anydevice.errors import AnyDeviceError
from tests.refusals import refuses

CARD = "opencl:0"

pytestmark = pytest.mark.usefixtures("no_kernels_trusted")
KEPT = ("kernel 7", "float32", CARD)


def cell(
    op: str = "softmax", state: State = "right", dtype: str = "float32", of: Of = "kernel"
) -> Cell:
    return Cell(op, of, dtype, CARD, "opencl", state, 5)


@pytest.fixture
def one_card(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with one OpenCL device; what it is kept by can be changed."""
    key = ["opencl | GPU-1 | 570.1 | pyopencl 2024"]
    monkeypatch.setattr(trusted_kernels, "_keys", lambda: {CARD: key[0]})
    return key


def trusted(op: str = "softmax", dtype: str = "float32") -> bool:
    return trust.is_trusted(op, dtype, CARD)


@pytest.mark.parametrize("state", ["crashed", "timed_out"])
def test_what_crashes_or_hangs_is_not_used(one_card: list[str], state: State) -> None:
    save(Verdicts((cell(), cell("rope"))))
    assert save(Verdicts((cell(state=state),))).refused == (("softmax", "float32", CARD),)
    assert not trusted()
    assert save(Verdicts((cell("rope", "not_reached"),))).refused == ()
    assert trusted("rope"), "of which nothing new is known"


def test_what_was_right_is_used_now_and_later(one_card: list[str]) -> None:
    kept = save(Verdicts((cell(), cell("rope", dtype="float16"))))
    assert kept.trusted == (("rope", "float16", CARD), ("softmax", "float32", CARD))
    assert kept.problem is None
    assert trusted()
    assert trusted("rope", "float16")
    trusted_kernels.forget()  # as in another process
    assert not trusted()
    assert trusted_kernels.load_trusted() == kept.trusted
    assert trusted()
    assert not trusted("rope", "float32")


def test_what_is_wrong_is_named_and_forgotten(one_card: list[str]) -> None:
    save(Verdicts((cell(), cell("rope"))))
    kept = save(Verdicts((cell(state="wrong"),)))
    assert kept.refused == (("softmax", "float32", CARD),)
    assert not trusted()
    assert trusted("rope"), "of which nothing new is known"
    trusted_kernels.forget()
    assert trusted_kernels.load_trusted() == (("rope", "float32", CARD),)


def test_a_trial_loses_nothing_that_was_kept(one_card: list[str]) -> None:
    save(Verdicts((cell(), cell("rope"))))
    trusted_kernels.forget()  # as in another process, in which a trial comes before the first op
    with trusted_kernels.on_trial(["softmax"], "float32", CARD):
        assert trusted()
        assert not trusted("rope")
        trusted_kernels.load_trusted()  # which the first op does
        assert not trusted("rope"), "it is not on trial"
    assert trusted()
    assert trusted("rope")


def test_what_is_wrong_is_forgotten_without_being_asked_to(one_card: list[str]) -> None:
    save(Verdicts((cell(), cell("rope"))))
    found = refuse_wrong(Verdicts((cell(state="wrong"), cell("rope")), quick=True))
    assert found == (("softmax", "float32", CARD),)
    assert not trusted()
    trusted_kernels.forget()
    assert trusted_kernels.load_trusted() == (("rope", "float32", CARD),)


def test_only_kernels_that_ran_count(one_card: list[str]) -> None:
    kept = save(Verdicts((cell(of="value"), cell(state="unsupported"))))
    assert kept.trusted == kept.refused == ()
    assert not trusted()


def test_another_driver_or_text_of_the_kernels_starts_anew(one_card: list[str]) -> None:
    save(Verdicts((cell(),)))
    trusted_kernels.forget()
    one_card[0] = "opencl | GPU-1 | 571.0 | pyopencl 2024"
    assert trusted_kernels.load_trusted() == ()
    assert not trusted()


def test_the_text_of_the_kernels_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = trusted_kernels._keys()
    monkeypatch.setattr(trusted_kernels, "sources", lambda: "changed")
    after = trusted_kernels._keys()
    assert before.keys() == after.keys()
    assert all(before[device] != after[device] for device in before)
    assert "cpu" not in before


def test_the_hash_follows_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel = tmp_path / "opencl" / "kernels" / "softmax.cl"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("kernel void softmax() {}")
    starting = tmp_path / "opencl" / "primitives.py"
    starting.write_text("")
    monkeypatch.setattr(trust, "__file__", str(tmp_path / "trust.py"))
    trusted_kernels.sources.cache_clear()
    one = trusted_kernels.sources()
    kernel.write_text("kernel void softmax() { }")
    trusted_kernels.sources.cache_clear()
    two = trusted_kernels.sources()
    kernel.with_name("notes.txt").write_text("not a kernel")
    trusted_kernels.sources.cache_clear()
    three = trusted_kernels.sources()
    starting.write_text("group = 1")
    trusted_kernels.sources.cache_clear()
    assert one != two == three != trusted_kernels.sources()
    trusted_kernels.sources.cache_clear()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]"], ids=lambda x: x[:10] or "none")
def test_a_damaged_file_is_as_good_as_none_and_is_named(one_card: list[str], text: str) -> None:
    trusted_kernels.kernels_file().write_text(text)
    with pytest.warns(UserWarning, match=r"kernels\.json is not used"):
        assert trusted_kernels.load_trusted() == ()


@pytest.mark.parametrize(
    "text", ['{"a": 5}', '{"a": [1]}', '{"a": [["b"]]}', '{"a": [["b", 1]]}', '{"a": {"bc": 1}}']
)
def test_damaged_entries_are_passed_over(one_card: list[str], text: str) -> None:
    trusted_kernels.kernels_file().write_text(text)
    assert trusted_kernels.load_trusted() == ()
    save(Verdicts((cell(),)))
    assert json.loads(trusted_kernels.kernels_file().read_text()) == {
        one_card[0]: [["softmax", "float32"]]
    }


def test_unwritable_files(one_card: list[str], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("ANYDEVICE_HOME", str(home / "file"))
    with pytest.warns(UserWarning, match="file is not a folder"):
        kept = save(Verdicts((cell(),)))
    assert kept.problem is not None
    assert kept.problem.startswith("the kernels could not be kept in ")
    assert trusted(), "in this process it is used all the same"


def test_a_quick_run_is_too_little() -> None:
    refuses("a quick run is not enough", save, Verdicts((cell(),), quick=True))


def test_on_trial_only_these_are_used(one_card: list[str]) -> None:
    save(Verdicts((cell("rope"), cell("silu"))))
    with trusted_kernels.on_trial(["softmax"], "float32", CARD):
        assert trusted()
        assert not trusted("rope")
    assert not trusted()
    assert trusted("rope")
    with trusted_kernels.on_trial(["rope"], "float32", CARD) as condemn:
        condemn()
        assert trusted("rope"), "until the trial is over"
    assert not trusted("rope")
    assert trusted("silu")


def test_who_has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trusted_kernels.kernels_of("numpy", Device("cpu")) == ()
    assert trusted_kernels.kernels_of("torch", Device("cpu")) == ()
    assert {"softmax", "attention"} <= set(trusted_kernels.kernels_of("opencl", Device(CARD)))
    nowhere = replace(registry.BUILT_IN["torch"], kernels="anydevice.nowhere")
    monkeypatch.setitem(registry.BUILT_IN, "torch", nowhere)
    trusted_kernels.kernel_module.cache_clear()
    assert trusted_kernels.kernels_of("torch", Device("cuda:0")) == ()
    trusted_kernels.kernel_module.cache_clear()


def opencl() -> tuple[Any, Device]:
    try:
        engine = registry.load("opencl")
    except AnyDeviceError as error:
        pytest.skip(f"OpenCL cannot run here: {error}")
    if not any(str(device) == CARD for device in discover().devices):
        pytest.skip("this machine has no OpenCL device")
    return engine, Device(CARD)


def test_a_kernel_is_verified_beside_the_definition_and_then_used(home: Path) -> None:
    opencl()
    verdicts = verify(["softmax"], [CARD], ["opencl"], ["float32"])
    assert {c.of: c.state for c in verdicts} == {
        "value": "right",
        "kernel": "right",
        "gradient": "unsupported",
    }
    assert not trusted(), "not before it is saved"
    assert save(verdicts).trusted == (("softmax", "float32", CARD),)
    assert trusted()
    trusted_kernels.forget()
    assert trusted_kernels.load_trusted() == (("softmax", "float32", CARD),)


def test_a_wrong_kernel_is_caught_named_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from anydevice._ops import dispatch

    engine, device = opencl()

    def wrong(x: Any, axis: int) -> Any:
        if not trusted():
            return NotImplemented
        return engine.ops.multiply(x, 0)

    import numpy

    dispatch.primitives(engine.place(numpy.zeros(1, "float32"), device))
    table = MappingProxyType({**dispatch._fused["opencl"], "softmax": wrong})
    monkeypatch.setitem(dispatch._fused, "opencl", table)
    trusted_kernels._replace({("softmax", "float32", CARD)})
    verdicts = verify(["softmax"], [CARD], ["opencl"], ["float32"], isolated=False)
    (condemned,) = verdicts.wrong
    assert str(condemned).startswith("our kernel for softmax in float32 on opencl:0 with opencl, ")
    assert not trusted()
    assert save(verdicts).refused == (("softmax", "float32", CARD),)


def elsewhere(ask: Callable[[], Any]) -> Any:
    """What another thread gets."""
    with ThreadPoolExecutor(1) as others:
        return others.submit(ask).result(timeout=400)


def test_a_trial_is_the_matter_of_one_thread(one_card: list[str]) -> None:
    save(Verdicts((cell("rope"),)))
    with trusted_kernels.on_trial(["softmax"], "float32", CARD) as condemn:
        assert (trusted(), trusted("rope")) == (True, False)
        assert elsewhere(lambda: (trusted(), trusted("rope"))) == (False, True)

        def another_trial() -> tuple[bool, ...]:
            with trusted_kernels.on_trial(["silu"], "float32", CARD):
                return trusted(), trusted("rope"), trusted("silu")

        assert elsewhere(another_trial) == (False, False, True)
        assert trusted(), "the other trial changed nothing here"
        condemn()
    with trusted_kernels.on_trial(["rope"], "float32", CARD) as condemn:
        condemn()
        assert trusted("rope"), "until the trial is over"
        assert not elsewhere(lambda: trusted("rope")), "where nothing is on trial"


def test_a_trial_within_a_trial_gives_way_to_the_first_again(one_card: list[str]) -> None:
    with trusted_kernels.on_trial(["softmax"], "float32", CARD):
        with trusted_kernels.on_trial(["rope"], "float32", CARD):
            assert (trusted(), trusted("rope")) == (False, True)
        assert (trusted(), trusted("rope")) == (True, False)
    assert not trust._trials


def test_what_others_learn_during_a_trial_is_not_lost(one_card: list[str]) -> None:
    with trusted_kernels.on_trial(["softmax"], "float32", CARD):
        elsewhere(lambda: save(Verdicts((cell("rope"),))))
    assert trusted("rope")
    assert not trusted()


def test_nobody_meets_a_table_that_is_half_empty() -> None:
    many = {(f"kernel {n}", "float32", CARD) for n in range(300)}
    trusted_kernels._replace(many)
    done = Event()

    def missed() -> int:
        count = 0
        while not done.is_set():
            count += not trust.is_trusted("kernel 7", "float32", CARD)
        return count

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as others:
            watching = others.submit(missed)
            for n in range(300):
                trusted_kernels._replace(many - {(f"kernel {n}", "float32", CARD)} | {KEPT})
            done.set()
            assert watching.result(timeout=400) == 0
    finally:
        done.set()
        sys.setswitchinterval(interval)


def test_two_that_verify_at_once_leave_the_warnings_as_they_were() -> None:
    before = list(warnings.filters)
    with ThreadPoolExecutor(3) as several:
        jobs = [
            several.submit(verify, ["exp"], engines="numpy", dtypes="float32", isolated=False)
            for _ in range(6)
        ]
        assert all(bool(job.result(timeout=400)) for job in jobs)
    assert warnings.filters == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, while it compiles
def test_compiled_code_asks_the_table_and_looks_through_a_trial(one_card: list[str]) -> None:
    torch = pytest.importorskip("torch", reason="its compiler traces the question")

    def asked(x: Any) -> Any:
        return x + 1 if trust.is_trusted("softmax", "float32", CARD) else x

    torch.compiler.reset()
    compiled, zero = torch.compile(asked, fullgraph=True, backend="eager"), torch.zeros(1)
    assert compiled(zero).item() == 0
    with trusted_kernels.on_trial(["softmax"], "float32", CARD):
        assert compiled(zero).item() == 1
    assert compiled(zero).item() == 0
    trusted_kernels._replace({("softmax", "float32", CARD)})
    assert compiled(zero).item() == 1
