"""The variables that hide AMD GPUs, read as ROCm's two runtimes read them."""

from __future__ import annotations

import pytest

from anydevice._machine.hardware.rocm.visible import visible
from tests.reasons import fix_of, text_of

UUIDS = ["GPU-1f7a2c33d4e5b601", "GPU-1f7a2c33d4e5b602", "GPU-52e1aa0917c0de03", None]

ROCR = "ROCR_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
CUDA = "CUDA_VISIBLE_DEVICES"


def test_without_variables_every_gpu_is_seen() -> None:
    left = visible(UUIDS, {"GPU_DEVICE_ORDINAL": "1"})
    assert left.positions == (0, 1, 2, 3)
    assert text_of(left) is None
    assert left.notes == ()


@pytest.mark.parametrize(
    ("value", "positions"),
    [
        ("0", (0,)),
        ("3,1", (3, 1)),
        (" 2 , 0 ", (2, 0)),
        ("0x2,+1,03", (2, 1, 3)),
        ("GPU-52e1aa0917c0de03", (2,)),
        ("gpu-52E1,0", (2, 0)),
        ("GPU-1f7a2c33d4e5b602,GPU-1f7a2c33d4e5b601", (1, 0)),
        ("1,9,0", (1,)),
        ("1,1,0", (1,)),
        ("1,,0", (1,)),
        ("1,GPU-1f7a,0", (1,)),
        ("2,GPU-,0", (2,)),
        ("2,nonsense", (2,)),
        ("2,-1,0", (2,)),
        ("2,-0x1", (2,)),
        ("0,1,2,3,9", (0, 1, 2, 3)),
    ],
)
def test_rocr_reads_its_list(value: str, positions: tuple[int, ...]) -> None:
    assert visible(UUIDS, {ROCR: value}).positions == positions


@pytest.mark.parametrize("value", ["-1", "4", "none", "GPU-1f7a", "GPU-52e1aa0917c0de0300", ","])
def test_rocr_hides_all_where_its_first_entry_names_none(value: str) -> None:
    left = visible(UUIDS, {ROCR: value})
    assert left.positions == ()
    assert text_of(left) == f"{ROCR}={value} does not show any of the 4 GPUs"
    assert fix_of(left) == f"unset {ROCR}"


@pytest.mark.parametrize("variable", [HIP, CUDA])
@pytest.mark.parametrize(
    ("value", "positions"),
    [
        ("2,0", (2, 0)),
        ("1,1,0", (1, 0)),
        ("0, 1", (0,)),
        ("0,01", (0,)),
        ("0,0x1", (0,)),
        ("1,9,0", (1,)),
        ("GPU-1f7a,3", (0, 3)),
        ("GPU-52e1aa0917c0de03", (2,)),
        ("1,GPU-XX", (1,)),
    ],
)
def test_hip_reads_its_list(variable: str, value: str, positions: tuple[int, ...]) -> None:
    assert visible(UUIDS, {variable: value}).positions == positions


@pytest.mark.parametrize("value", ["-1", "4", "gpu-52e1aa0917c0de03", "all"])
def test_hip_hides_all_where_its_first_entry_names_none(value: str) -> None:
    left = visible(UUIDS, {HIP: value})
    assert left.positions == ()
    assert fix_of(left) == f"unset {HIP}"


@pytest.mark.parametrize("variable", [ROCR, HIP, CUDA])
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_value_hides_all(variable: str, value: str) -> None:
    left = visible(UUIDS, {variable: value})
    assert left.positions == ()
    assert text_of(left) == f"{variable} is set to an empty value, which hides every GPU"


def test_hip_goes_before_cuda() -> None:
    assert visible(UUIDS, {HIP: "1", CUDA: "-1"}).positions == (1,)
    assert visible(UUIDS, {HIP: "", CUDA: "0"}).positions == ()


def test_hip_counts_over_what_rocr_left() -> None:
    assert visible(UUIDS, {ROCR: "3,2,0", HIP: "2,0"}).positions == (0, 3)
    assert visible(UUIDS, {ROCR: "3,2", CUDA: "GPU-52"}).positions == (2,)


def test_the_same_index_in_both_hides_all_and_both_are_named() -> None:
    left = visible(UUIDS, {ROCR: "1", HIP: "1"})
    assert left.positions == ()
    assert text_of(left) == f"{HIP}=1 does not show the one GPU that {ROCR}=1 leaves"
    assert fix_of(left) == f"unset {HIP}"


def test_an_entry_that_ends_the_list_is_noted() -> None:
    left = visible(UUIDS, {ROCR: "2,7,1"})
    assert left.notes == (f'{ROCR}=2,7,1: "7" names no further GPU, so the list ends there',)
