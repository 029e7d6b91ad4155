"""Ceilings: which one binds an op, how near it came, and what raises them."""

from __future__ import annotations

import pytest

from anydevice._bench.measure import Raised, ceiling_of, judge, raise_ceilings
from anydevice._bench.results import Ceiling, Measurement
from anydevice._core.record import replace

from .tiny import CEILINGS, measurement


def judged(*given: Measurement, written: int = 5 * 10**5) -> tuple[Measurement, ...]:
    return judge(given, CEILINGS, [written] * len(given))


@pytest.mark.parametrize(
    ("given", "written", "bound", "fraction", "rate"),
    [
        (measurement(seconds=2e-4), 5 * 10**5, "memory", 1e6 / 10e9 / 2e-4, 1e6 / 2e-4),
        (measurement(seconds=1e-4), 4, "memory", 1e6 / 20e9 / 1e-4, 1e6 / 1e-4),  # mostly reads
        (measurement("matmul", 0.04, operations=2 * 10**9), 5 * 10**5, "compute", 0.5, 5e10),
        (
            measurement("matmul", 0.04, operations=2 * 10**9, dtype="float16"),  # no ceiling
            5 * 10**5, "memory", 1e6 / 10e9 / 0.04, 1e6 / 0.04,
        ),
        (measurement(device="cuda:0"), 0, None, None, 1e9),  # nor of this device
    ],
)  # fmt: skip
def test_the_ceiling_that_an_op_comes_nearest_to_binds_it(
    given: Measurement, written: int, bound: str | None, fraction: float | None, rate: float
) -> None:
    [one] = judged(given, written=written)
    assert (one.bound, one.fraction) == (bound, fraction and pytest.approx(fraction))
    assert one.rate == pytest.approx(rate)


def test_a_view_and_what_was_not_measured_have_no_bound() -> None:
    told, taken = judged(
        measurement("reshape", 1e-6, moved=0, operations=0),
        measurement("reshape", 1e-6, engine="mlx", moved=10**9, operations=0),
    )
    assert (told.bound, told.fraction, told.rate) == (None, None, None)
    assert (taken.bound, taken.fraction, taken.rate, taken.moved) == (None, None, None, 0)
    lost = measurement(seconds=0.0, state="failed", reason="broken")
    assert judged(lost) == (lost,)


def test_on_the_cpu_everything_is_held_against_numpy() -> None:
    numpy, torch, jax = judged(
        measurement(), measurement(seconds=5e-4, engine="torch"), measurement("sum", engine="jax")
    )
    assert (numpy.speed_up, torch.speed_up) == (1.0, 2.0)
    assert torch.over == "cpu with numpy"
    assert (jax.speed_up, jax.over) == (1.0, "cpu with jax")  # the only one of that op


def test_without_numpy_the_fastest_engine_of_the_cpu_counts() -> None:
    slow, fast, pocl = judged(
        measurement(engine="mlx"),
        measurement(seconds=5e-4, engine="torch"),
        measurement(seconds=1e-3, engine="opencl", device="opencl:0"),
    )
    assert slow.speed_up == fast.speed_up * 0.5 == 0.5
    assert (pocl.speed_up, pocl.over) == (0.5, "cpu with torch")


def test_an_accelerator_at_another_size_is_compared_by_work_a_second() -> None:
    ceilings = (*CEILINGS, Ceiling("cuda:0", "copy", 1e12, "torch", "copy of 1 GiB"))
    here = [
        measurement(),
        measurement(seconds=5e-4, engine="torch"),
        measurement("cast", operations=0),
        measurement(device="cuda:0", case="large", operations=10**9, dtype="bfloat16"),
        measurement("cast", device="cuda:0", case="large", operations=0, moved=10**9),
        measurement("none", device="cuda:0", case="large"),
    ]
    *_, card, cast, nothing = judge(here, ceilings, [5 * 10**5] * len(here))
    assert card.speed_up == pytest.approx(500)  # 1e12 a second against 2e9
    assert card.over == "cpu with torch"
    assert cast.speed_up == pytest.approx(1000)
    assert nothing.speed_up is None


def test_a_case_that_the_cpu_does_not_have_is_not_compared_on_the_cpu() -> None:
    one, other = judged(measurement(), measurement(case="large", engine="torch"))
    assert one.speed_up == other.speed_up == 1.0
    assert other.over == "cpu with torch"


def raised(*given: Measurement, written: int = 5 * 10**5) -> Raised:
    """The ceilings after these, whose samples are all alike."""
    given = tuple(replace(each, high=each.seconds) for each in given)
    return raise_ceilings(given, CEILINGS, [written] * len(given))


def rate(found: Raised, what: str, dtype: str | None = None) -> float:
    ceiling = ceiling_of(found.ceilings, "cpu", what, dtype)  # type: ignore[arg-type]
    assert ceiling is not None
    return ceiling.rate


def test_what_stays_below_changes_nothing() -> None:
    found = raised(measurement(seconds=2e-4), measurement(seconds=0.0, state="failed"))
    assert (found.ceilings, found.notes) == (CEILINGS, ())
    card = (Ceiling("cuda:0", "copy", 1.0, "torch", "copy"),)
    assert raise_ceilings([measurement()], card, [0]).ceilings == card, "it has no ceilings"


def test_a_copy_that_is_faster_raises_copying_alone() -> None:
    found = raised(measurement(seconds=9e-5, engine="torch"), measurement(seconds=9.5e-5))
    assert rate(found, "copy") == pytest.approx(1e6 / 9e-5)
    assert rate(found, "read") == 20e9
    [note] = found.notes
    assert note.startswith("copy ceiling of cpu raised by 11 %: torch did more in add, small")
    assert "busy" not in note
    judged = judge(found.measurements, found.ceilings, [5 * 10**5] * 2)
    assert [each.fraction for each in judged] == pytest.approx([1.0, 9 / 9.5])


def test_an_op_whose_samples_differ_raises_nothing_by_its_median() -> None:
    noisy = measurement(seconds=9e-5, high=1.2e-4)
    once = measurement(seconds=9e-5, high=9e-5, samples=1)
    for each in (noisy, once):
        found = raise_ceilings([each], CEILINGS, [5 * 10**5])
        assert (found.ceilings, found.notes) == (CEILINGS, ())


def test_what_mostly_reads_raises_reading() -> None:
    found = raised(measurement(seconds=4e-5), written=4)
    assert (rate(found, "copy"), rate(found, "read")) == (10e9, pytest.approx(25e9))
    assert "busy machine, repeat it" in found.notes[0]  # it is far above


def test_what_computes_raises_the_matmul_of_its_type() -> None:
    found = raised(measurement(operations=2 * 10**8), measurement(dtype="float16"))
    assert rate(found, "matmul", "float32") == pytest.approx(2e11)
    assert found.notes[0].startswith("matmul float32 ceiling of cpu raised by 100 %")


def test_a_view_raises_nothing_and_what_is_as_fast_as_ops_that_compute_is_none() -> None:
    found = raised(measurement("reshape", 1e-6, operations=0))
    assert (found.ceilings, found.measurements[0].moved) == (CEILINGS, 0)
    found = raised(measurement("take", 4e-5, operations=0), measurement("negative", 4.2e-5))
    assert found.measurements[0].moved == 10**6
    assert rate(found, "copy") == pytest.approx(25e9)
