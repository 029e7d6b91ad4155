"""An op that does more than a ceiling raises it, and that is said."""

from __future__ import annotations

import pytest

from anydevice.bench.ceilings import Raised, ceiling_of, judge, raise_ceilings
from anydevice.bench.results import Ceiling, Measurement

from .tiny import CEILINGS, measurement


def raised(*given: Measurement, written: int = 5 * 10**5) -> Raised:
    return raise_ceilings(given, CEILINGS, [written] * len(given))


def rate(found: Raised, what: str, dtype: str | None = None) -> float:
    ceiling = ceiling_of(found.ceilings, "cpu", what, dtype)  # type: ignore[arg-type]
    assert ceiling is not None
    return ceiling.rate


def test_what_stays_below_changes_nothing() -> None:
    found = raised(measurement(seconds=2e-4), measurement(seconds=0.0, state="failed"))
    assert (found.ceilings, found.notes) == (CEILINGS, ())


def test_a_copy_that_is_faster_raises_copying_alone() -> None:
    found = raised(measurement(seconds=9e-5, engine="torch"), measurement(seconds=9.5e-5))
    assert rate(found, "copy") == pytest.approx(1e6 / 9e-5)
    assert rate(found, "read") == 20e9
    [note] = found.notes
    assert note.startswith("copy ceiling of cpu raised by 11 %: torch did more in add, small")
    assert "busy" not in note
    judged = judge(found.measurements, found.ceilings, [5 * 10**5] * 2)
    assert [each.fraction for each in judged] == pytest.approx([1.0, 9 / 9.5])


def test_far_above_the_machine_was_busy() -> None:
    [note] = raised(measurement(seconds=5e-5)).notes
    assert "busy machine, repeat it" in note


def test_what_mostly_reads_raises_reading() -> None:
    found = raised(measurement(seconds=4e-5), written=4)
    assert (rate(found, "copy"), rate(found, "read")) == (10e9, pytest.approx(25e9))


def test_what_computes_raises_the_matmul_of_its_type() -> None:
    found = raised(measurement(operations=2 * 10**8), measurement(dtype="float16"))
    assert rate(found, "matmul", "float32") == pytest.approx(2e11)
    assert found.notes[0].startswith("matmul float32 ceiling of cpu raised by 100 %")


def test_a_view_raises_nothing() -> None:
    found = raised(measurement("reshape", 1e-6, operations=0))
    assert (found.ceilings, found.measurements[0].moved) == (CEILINGS, 0)


def test_what_is_as_fast_as_ops_that_compute_is_no_view() -> None:
    found = raised(measurement("take", 4e-5, operations=0), measurement("negative", 4.2e-5))
    assert found.measurements[0].moved == 10**6
    assert rate(found, "copy") == pytest.approx(25e9)


def test_a_device_without_ceilings_is_left_alone() -> None:
    card = (Ceiling("cuda:0", "copy", 1.0, "torch", "copy"),)
    assert raise_ceilings([measurement()], card, [0]).ceilings == card
