"""`anydevice` alone, against the page that says what its first minute should be like."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anydevice import device
from anydevice._core.finding import BackendScan, Facts, RawDevice
from anydevice._core.record import replace
from anydevice._machine.choose.scope import why
from anydevice.cli.overview import NEXT
from anydevice.errors import AnyDeviceWarning
from tests.cli.conftest import Anydevice
from tests.machines import BROKEN_CPU, machine_of

GIB = 2**30

A_CARD_WITHOUT_A_LIBRARY = BackendScan(
    "cuda",
    present=True,
    devices=(
        RawDevice(
            0,
            "gpu",
            Facts(
                "NVIDIA RTX 4070",
                total_memory=12 * GIB,
                free_memory=int(11.3 * GIB),
                compute_capability="8.9",
                driver_version="560.35",
                runtime_version="12.6",
            ),
        ),
    ),
)


@pytest.mark.needs("torch")
def test_the_first_minute(anydevice: Anydevice) -> None:
    out = anydevice.text(scans=[A_CARD_WITHOUT_A_LIBRARY])
    expected = [
        r"anydevice \d+\.\d+ · (Linux|macOS|Windows) · Python 3\.\d+ · \d+ ms",
        r"",
        r"✗ cuda:0   NVIDIA RTX 4070, sm 8\.9   12\.0 GiB, 11\.3 free   driver 560\.35 answers",
        r"           stopped at: library",
        r"             torch \S+ is a CPU-only build",
        r"             jax \S+ has no CUDA plugin",
        r"           fix: pip install .+",
        r"✓ cpu      .+, \d+ cores?   [\d.]+ \wiB, [\d.]+( \w+)? free   numpy \d+\.\d+, torch .+",
        r"– rocm, metal, xpu, tpu, opencl",
        r"",
        r'Chosen: cpu, because cuda:0 stopped at "library"',
        r"One command away from the RTX 4070\. Then: anydevice doctor",
    ]
    lines = out.rstrip("\n").split("\n")
    assert len(lines) == len(expected), out
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), f"{line!r} is not {pattern!r}"


def test_as_json(anydevice: Anydevice) -> None:
    with machine_of(cuda=1) as report:
        assert anydevice.json() == report.to_dict() | {
            "chosen": "cuda:0",
            "because": "it is the first usable one in the order of backends",
        }


@pytest.mark.parametrize("content", ["device = ", 'device = "quantum"', "time_limit = -1"])
def test_a_broken_file_hides_nothing(anydevice: Anydevice, project: Path, content: str) -> None:
    project.write_text(f"# mine\n{content}\n")
    with machine_of():
        code, out, err = anydevice()
        data = anydevice.json(code=2)
    assert code == 2
    assert "✓ cpu" in out
    assert "Recommended: cpu" in out
    assert f"{project}, line 2" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert f"{project}, line 2" in data["error"]
    assert data["recommended"] == "cpu"
    assert data["chosen"] is None


def test_a_variable_hides_nothing(anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYDEVICE_DEVICE", "quantum")
    code, out, err = anydevice(cuda=0)
    assert code == 2
    assert "✓ cpu" in out
    assert err.startswith("anydevice: ANYDEVICE_DEVICE: there is no backend 'quantum'")


def test_a_wish_that_is_not_met(anydevice: Anydevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYDEVICE_ENGINE", "cupy")
    with machine_of():
        out, data = anydevice.text(), anydevice.json()
    assert "cupy is not available, although ANYDEVICE_ENGINE asks for it" in out
    assert data["chosen"] == "cpu"


def test_nothing_at_all_is_usable(anydevice: Anydevice) -> None:
    with machine_of(scans=[BROKEN_CPU]):
        out, data = anydevice.text(code=1), anydevice.json(code=1)
    assert "Chosen: nothing, because no device fits" in out
    assert "reading it failed" in out
    assert data["chosen"] is None


def test_where_nothing_is_to_be_fixed_it_leads_on(anydevice: Anydevice) -> None:
    out = anydevice.text(cuda=1)
    assert out.splitlines()[-1].startswith("Next: anydevice doctor, anydevice verify")
    assert "Next: " not in anydevice.text(scans=[A_CARD_WITHOUT_A_LIBRARY])


def test_no_text_decides_what_comes_next(anydevice: Anydevice) -> None:
    note = "a driver that says: run anydevice doctor"
    told = BackendScan("cuda", True, (RawDevice(0, "gpu", Facts("A card")),), engines=("torch",))
    out = anydevice.text(scans=[replace(told, notes=(note,))])
    assert note in out
    assert NEXT in out


def test_an_opencl_card_that_is_passed_over_is_said_alike_everywhere(anydevice: Anydevice) -> None:
    card = BackendScan(
        "opencl", True, (RawDevice(0, "gpu", Facts("Arc A770")),), engines=("opencl",)
    )
    with machine_of(scans=[card]):
        (reason,) = why().reasons
        with pytest.warns(AnyDeviceWarning) as said:
            assert str(device()) == "cpu"
        _, summary, _ = anydevice()
        _, steps, _ = anydevice("config", "--why")
        (step,) = [
            step for step in anydevice.json("config", "--why")["steps"] if step["asked"] == "opencl"
        ]
    assert (reason.code, step["code"]) == ("only_by_name", "only_by_name")
    warning = said[0].message
    assert isinstance(warning, AnyDeviceWarning)
    assert warning.reasons == (reason,)
    assert str(warning) == f"using cpu: {reason.text}"
    assert f"Chosen: cpu, because {reason.text}" in summary
    assert f"order of backends   opencl   {reason.text}" in steps
    assert step["outcome"] == reason.text
    assert "no accelerator" not in summary + steps
