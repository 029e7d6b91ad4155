"""Intel GPUs, from answers that were written from the documentation of Linux and Level Zero."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from anydevice import testing
from anydevice._core.child.parent import Outcome
from anydevice._core.finding import BackendScan, Facts
from anydevice._machine.discovery.libraries import findings_of
from anydevice._machine.hardware import linux
from anydevice._machine.hardware.linux import CardMachine
from anydevice._machine.hardware.opencl import diagnosis as opencl
from anydevice._machine.hardware.opencl.facts import OpenCLMachine
from anydevice._machine.hardware.xpu.diagnosis import interpret
from tests.machine.scans import only, stop_of
from tests.machine.tree import write_file
from tests.reasons import code_of, fix_of, text_of

WRITTEN = Path(__file__).parent / "written"
CARD, NODE = "sys/bus/pci/devices/0000:03:00.0", "dev/dri/renderD128"
DRIVER = f"{CARD}/driver"
GIB = 2**30

See = Callable[..., BackendScan]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="writes files as Linux names them")


def answer_of(name: str, **changes: Any) -> dict[str, Any]:
    """The answer of the child; what Level Zero leaves out is `None`."""
    answer = tomllib.loads((WRITTEN / f"{name}.toml").read_text())["level_zero"]
    answer["devices"] = [{"free": None, **device} for device in answer["devices"]]
    return {"problem": None, **answer, **changes}


@pytest.fixture
def see(tmp_path: Path) -> See:
    """Look at a written machine with other `files`, a link where it is a driver, `None` for none.

    `answers` are those of Level Zero that differ, `closed` is a file that may not be opened.
    """

    def see(
        name: str,
        *,
        answers: Mapping[str, Any] | None = None,
        files: Mapping[str, str | None] | None = None,
        closed: str = "",
        **variables: str,
    ) -> BackendScan:
        machine = tomllib.loads((WRITTEN / f"{name}.toml").read_text())
        for path, content in {**machine["files"], **machine["links"], **(files or {})}.items():
            (tmp_path / path).unlink(missing_ok=True)
            if content is not None and path.endswith("/driver"):
                (tmp_path / path).symlink_to(content)
            elif content is not None:
                write_file(tmp_path, path, content)
        outcome = Outcome("answered", answer_of(name, **(answers or {})))
        may_open = lambda path: path != tmp_path / closed and linux.may_open(path)  # noqa: E731
        cards = linux.cards(linux.INTEL, tmp_path)
        return interpret(CardMachine(tmp_path, variables, may_open, cards), outcome)

    return see


def test_an_arc_card(see: See) -> None:
    scan = see("arc_a770")
    assert (*stop_of(scan), scan.notes) == (True, None, None, ())
    assert only(scan).reason is None
    assert only(scan).facts == Facts(
        name="Intel Arc A770 Graphics",
        uuid="8680a056-0800-0000-0300-000000000000",
        pci_address="0000:03:00.0",
        memory_kind="dedicated",
        total_memory=16225243136,
        free_memory=14 * GIB,
        architecture="Xe-HPG",
        driver_version="1.6.32224",
        runtime_version="1.6",
        details={"device_id": "56a0", "kernel_driver": "i915", "mappable_memory": 16 * GIB},
    )


def test_a_gpu_in_the_processor_shares_its_memory(see: See) -> None:
    facts = only(see("meteor_lake")).facts  # and its accelerator for neural networks is no GPU
    assert (facts.name, facts.memory_kind) == ("Intel Arc Graphics", "unified")
    assert (facts.total_memory, facts.free_memory) == (30839066624, 20 * GIB)
    assert (facts.architecture, facts.details["kernel_driver"]) == ("Xe-LPG", "xe")


def test_a_generation_that_pytorch_does_not_name_is_noted(see: See) -> None:
    (chip,) = answer_of("meteor_lake")["devices"]
    scan = see("meteor_lake", answers={"devices": [chip | {"device": 0x9A49}]})  # Tiger Lake
    assert only(scan).facts.architecture == "Xe-LP"
    assert "PyTorch is not tested on Xe-LP" in scan.notes[0]


def opencl_scan(name: str) -> BackendScan:
    """OpenCL's view: its driver is of the same release, with the same UUIDs and addresses."""
    rows = [
        {"name": row["name"], "vendor": "Intel(R) Corporation", "vendor_id": linux.INTEL}
        | {"type": 4, "version": "OpenCL 3.0 NEO ", "driver": "24.52.032224", "unified": False}
        | {"memory": row["memory"], "compute_units": 512, "work_group": 1024, "half": True}
        | {"double": False, "uuid": row["uuid"], "pci": row["pci"]}
        for row in answer_of(name)["devices"]
    ]
    platforms = [{"name": "Intel(R) OpenCL Graphics", "devices": rows}]
    devices = opencl.read_devices(platforms, OpenCLMachine("linux"))
    return BackendScan("opencl", present=True, devices=devices, engines=("numpy",))


@pytest.mark.parametrize(
    ("name", "cards"),
    [
        ("arc_a770", [["xpu:0", "opencl:0"]]),
        ("max_1550", [["xpu:0", "opencl:0"], ["xpu:1", "opencl:1"]]),  # its two tiles
    ],
)
def test_opencl_shows_the_same_cards(see: See, name: str, cards: list[list[str]]) -> None:
    with testing.fake_machine(scans=[see(name), opencl_scan(name)]) as report:
        seen = [[str(device) for device in card] for card in report.cards]
    assert [card for card in seen if not card[0].startswith("cpu")] == cards


def test_pytorch_counts_cards_first_and_leaves_out_the_processor(see: See) -> None:
    (card,) = answer_of("arc_a770")["devices"]
    uuid, name = "868080a7040000000002000000000000", "Intel(R) UHD Graphics 770"
    chip = {"device": 0xA780, "integrated": True, "name": name, "uuid": uuid, "pci": [0, 0, 2, 0]}
    first, second = see("arc_a770", answers={"devices": [card | chip, card]}).devices
    assert (first.index, first.facts.name, first.reason) == (0, "Intel Arc A770 Graphics", None)
    assert (second.facts.name, code_of(second)) == ("Intel UHD Graphics 770", "not_driven")
    assert fix_of(second) == "export ZE_AFFINITY_MASK=0"


APT = "sudo apt install libze1 libze-intel-gpu1"
RUN = "docker run --device=/dev/dri --group-add render …"
INSIDE = {".dockerenv": ""}
NONE: dict[str, Any] = {"devices": []}
NO_LOADER: dict[str, Any] = {"library": None, "devices": []}
OLD = {f"{CARD}/device": "0x3e92\n"}  # a UHD Graphics 630
OTHER = {"etc/os-release": "ID=gentoo\n"}


@pytest.mark.parametrize(
    ("how", "code", "words", "fix"),
    [
        ({"files": {DRIVER: None}}, "driver_not_loaded", "has none", "sudo modprobe -a i915 xe"),
        ({"files": {DRIVER: "../../vfio-pci"}}, "driver_not_loaded", "has vfio-pci", None),
        ({"files": {NODE: None}}, "not_in_container", f"/{NODE} of Intel GPU 56a0 at", None),
        ({"files": {NODE: None, **INSIDE}}, "not_in_container", "is missing", RUN),
        ({"closed": NODE}, "no_permission", f"open /{NODE}", "sudo usermod -a -G render $USER"),
        ({"closed": NODE, "files": INSIDE}, "no_permission", f"open /{NODE}", RUN),
        ({"files": OLD, "answers": NO_LOADER}, "card_too_old", "3e92 is older than Xe", None),
        ({"answers": NO_LOADER}, "loader_missing", "its loader is not installed", APT),
        ({"answers": NO_LOADER, "files": OTHER}, "loader_missing", "loader", "install Intel's …"),
        ({"answers": NO_LOADER | {"problem": "bad ELF"}}, "driver_broken", "load: bad ELF", APT),
        ({"answers": {"loader_version": "1.7.9"}}, "driver_too_old", "older than 1.8.0", APT),
        ({"answers": {"error": 0x70010000}}, "no_permission", "may not open the GPU", "sudo user…"),
        ({"answers": {"error": 0x70000001}}, "driver_failed", "returned 0x70000001", APT),
        ({"answers": NONE, "ZE_AFFINITY_MASK": "7"}, "hidden", "=7 hides every", "unset ZE_…"),
    ],
)
def test_a_gpu_that_cannot_be_used(
    see: See, how: dict[str, Any], code: str, words: str, fix: str | None
) -> None:
    scan = see("arc_a770", **how)
    assert (scan.present, code_of(scan)) == (True, code)
    assert scan.stage == ("device" if code in ("card_too_old", "hidden") else "driver")
    assert words in str(text_of(scan))
    assert str(fix_of(scan)).startswith(str(fix).removesuffix("…"))
    assert only(scan).facts.pci_address == "0000:03:00.0"  # as far as the files tell it


def test_notes(see: See, site) -> None:
    another = "sys/bus/pci/devices/0000:04:00.0"
    small = "0 0 0\n0 0 0\n0x4000000000 0x400fffffff 0x14220c\n"
    files = {
        f"{CARD}/resource": small,
        f"{another}/vendor": "0x8086",
        f"{another}/class": "0x030000",
    }
    site.distribution("intel-extension-for-openxla", "0.6.0")
    notes = see("arc_a770", files=files, ZE_AFFINITY_MASK="0").notes
    assert [note.partition(" (fix:")[0] for note in notes] == [
        "Intel GPU 0000 at 0000:04:00.0 needs the driver i915 or xe, and has none",
        "ZE_AFFINITY_MASK=0 chooses among the GPUs",
        "Intel Arc A770 Graphics: only 256 MiB of its memory can be mapped at a time",
        "JAX may drive it, too, through intel-extension-for-openxla 0.6.0: not tested",
    ]


def test_files_that_are_garbled_are_unknown(see: See) -> None:
    files = dict.fromkeys([f"{CARD}/device", f"{CARD}/resource"], "?\n\n1 zz 3")
    assert only(see("arc_a770", files=files)).facts.details["mappable_memory"] is None


FROM_INDEX = "torch --index-url https://download.pytorch.org/whl/xpu"


@pytest.mark.parametrize(
    ("version", "runtimes", "code", "fix"),
    [
        ("2.13.0+cpu", {}, "cpu_only_build", f"pip install --force-reinstall {FROM_INDEX}"),
        ("2.13.0", {"cuda": "13.0"}, "other_build", f"pip install --force-reinstall {FROM_INDEX}"),
        ("2.13.0+xpu", {"xpu": "20250302"}, None, None),
        (None, {}, "library_missing", f"pip install {FROM_INDEX}"),
    ],
)
def test_the_build_of_pytorch(
    see: See, site, version: str | None, runtimes: dict[str, str], code: str | None, fix: str | None
) -> None:
    if version:
        site.torch(version, **runtimes)
    (finding,) = findings_of([see("arc_a770")])
    assert (finding.tier, finding.usable) == ("untested", code is None)
    assert (finding.code, finding.fix) == (code, fix)
