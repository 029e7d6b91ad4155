"""The reader of Intel GPUs against libraries that answer, crash and hang, through real children."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from anydevice._core.finding import BackendScan
from anydevice._machine.hardware import readers
from anydevice._machine.hardware.xpu import reader
from anydevice._machine.hardware.xpu.reader import begin
from tests.machine.tree import plug_card, write_file
from tests.reasons import code_of, fix_of, text_of

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the faulty libraries are ELF files found by LD_LIBRARY_PATH"
)

WRITTEN = Path(__file__).parents[1] / "machine" / "hardware" / "xpu" / "written"
HEALTHY = (WRITTEN / "healthy_level_zero.c").read_text()
CRASHES = "volatile int *nowhere = 0; *nowhere = 1; return 0;"
HANGS = "for (;;) sleep(1000); return 0;"
LIMIT, USUAL_LIMIT = 5.0, 100.0
"""Seconds for a library that hangs, and for one that answers: a busy machine is no fault."""
GIB = 2**30

Look = Callable[..., BackendScan]


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """The root of a machine with a card of Intel's that this process may open."""
    root = tmp_path / "machine"
    folder = plug_card(root, "0000:03:00.0", "0x8086")
    (folder / "device").write_text("0x56a0\n")
    (folder / "driver").symlink_to("../../i915")
    (folder / "drm/renderD128").mkdir(parents=True)
    write_file(root, "dev/dri/renderD128")
    return root


@pytest.fixture
def look(
    card: Path, build_library: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> Look:
    """Look with a library in place of Level Zero's loader, in a child, within the time."""
    monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)

    def look(*defines: str, limit: float = USUAL_LIMIT) -> BackendScan:
        source = "".join(f"#define {define}\n" for define in defines) + HEALTHY
        monkeypatch.setenv("LD_LIBRARY_PATH", str(build_library("libze_loader.so.1", source)))
        return begin(card)(limit)

    return look


def test_a_card_is_read_through_structures_of_c(look: Look) -> None:
    scan = look()
    (device,) = scan.devices
    facts = device.facts
    assert (scan.stage, scan.notes, device.reason) == (None, (), None)
    assert (facts.name, facts.architecture) == ("Intel Arc A770 Graphics", "Xe-HPG")
    assert (facts.uuid, facts.pci_address) == (
        "8680a056-0800-0000-0300-000000000000",
        "0000:03:00.0",
    )
    assert (facts.total_memory, facts.free_memory) == (16225243136, 14 * GIB)
    assert (facts.driver_version, facts.runtime_version) == ("1.6.32224", "1.6")


@pytest.mark.parametrize(
    ("defines", "code", "words"),
    [
        (["MINOR 7"], "driver_too_old", "its loader 1.7.2 is older than 1.8.0"),
        (["INIT return 0x78000001;"], "driver_missing", "its loader finds no driver"),
        (["INIT return 0x70010000;"], "no_permission", "may not open the GPU"),
        (["NONE"], "no_device", "it shows no GPU"),
        ([f"INIT {CRASHES}"], "crashed", "Level Zero crashed (SIGSEGV) in zeInit"),
    ],
)
def test_a_library_that_fails(look: Look, defines: list[str], code: str, words: str) -> None:
    scan = look(*defines)
    assert (scan.present, scan.stage == "driver", code_of(scan)) == (
        True,
        code != "no_device",
        code,
    )
    assert words in str(text_of(scan))
    assert fix_of(scan)
    assert [device.facts.pci_address for device in scan.devices] == ["0000:03:00.0"]


def test_a_library_that_hangs(look: Look) -> None:
    scan = look(f"INIT {HANGS}", limit=LIMIT)
    assert (scan.present, scan.stage, code_of(scan)) == (True, "driver", "timed_out")
    assert re.search(r"timed out \(no answer within [\d.]+ s\) in zeInit", str(text_of(scan)))


def test_free_memory_is_read_again(look: Look, card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (device,) = look().devices
    monkeypatch.setattr(reader, "begin", lambda: lambda _: begin(card)(USUAL_LIMIT))
    reader._free_memory.cache_clear()
    assert reader.free_memory(0, device.facts) == 14 * GIB
    assert readers.readings("xpu", 0, device.facts).free_memory == 14 * GIB
    assert readers.processes("xpu", 0, device.facts) == ()


def test_a_machine_without_traces_starts_no_child(tmp_path: Path) -> None:
    scan = begin(tmp_path)(USUAL_LIMIT)
    assert (scan.present, code_of(scan)) == (False, "no_hardware")


def test_wsl_without_intel_s_driver_has_none(look: Look, tmp_path: Path) -> None:
    look("INIT return 0x78000001;")
    write_file(tmp_path, "dev/dxg")
    scan = begin(tmp_path)(USUAL_LIMIT)
    assert (scan.present, code_of(scan)) == (False, "driver_missing")
