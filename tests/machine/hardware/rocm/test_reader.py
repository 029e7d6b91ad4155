"""AMD GPUs, from recorded trees of the files that their driver shows."""

from __future__ import annotations

import os
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from anydevice._core.child import amdsmi
from anydevice._core.finding import BackendScan, Facts, RawDevice
from anydevice._machine.discovery import discover
from anydevice._machine.hardware import linux
from anydevice._machine.hardware.readers import Look
from anydevice._machine.hardware.rocm import facts as rocm_facts
from anydevice._machine.hardware.rocm import reader as rocm
from tests.machine.scans import only, stop_of
from tests.machine.tree import write_file
from tests.reasons import fix_of, text_of

RECORDED = Path(__file__).parents[3] / "recorded" / "rocm"
GIB = 2**30

Record = Callable[[str], Path]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Lay a recording out as files: `record("mi300x")` is the root of that machine."""

    def lay_out(name: str) -> Path:
        files = tomllib.loads((RECORDED / f"{name}.toml").read_text())["files"]
        for path, content in files.items():
            write_file(tmp_path, path, content)
        return tmp_path

    return lay_out


def change_node(root: Path, old: str, new: str) -> None:
    properties = root / "sys/class/kfd/kfd/topology/nodes/1/properties"
    properties.write_text(properties.read_text().replace(old, new))


def see(
    root: Path, *, closed: tuple[str, ...] = (), limit: float = 20, **names: str
) -> BackendScan:
    """Look at a recorded machine with these variables set and these device files closed."""
    shut = {root / file for file in closed}
    return rocm.look(
        limit,
        root=root,
        environment=names,
        accessible=lambda path: path not in shut and linux.may_open(path),
        platform="linux",
    )


def in_discovery(look: Look, limit: float) -> BackendScan:
    """The scan that discovery makes of a reader, which may raise or hang."""
    return discover._start({"rocm": lambda: look}, limit)()["rocm"]


# ---------------------------------------------------------------- machines that work


def test_two_mi250x_are_four_gpus(record: Record) -> None:
    seen = see(record("mi250x"))
    assert (*stop_of(seen), seen.notes) == (True, None, None, ())
    addresses = ["0000:c1:00.0", "0000:c6:00.0", "0000:c9:00.0", "0000:ce:00.0"]
    assert [device.facts.pci_address for device in seen.devices] == addresses
    assert [device.index for device in seen.devices] == [0, 1, 2, 3]
    facts = Facts(
        name="AMD INSTINCT MI250X",
        uuid="GPU-1f7a2c33d4e5b602",
        pci_address="0000:c6:00.0",
        memory_kind="dedicated",
        total_memory=68702699520,
        usable_memory=68702699520,
        free_memory=68702699520 - 2 * GIB,
        architecture="gfx90a",
        driver_version="6.8.5",
        runtime_version="6.2.4",
    )
    assert seen.devices[1] == RawDevice(index=1, kind="gpu", facts=facts)
    assert seen.devices[3].facts.uuid == "GPU-02e1aa0917c0de04"


def test_mi300x(record: Record) -> None:
    facts = only(see(record("mi300x"))).facts
    assert (facts.name, facts.architecture) == ("AMD Instinct MI300X OAM", "gfx942")
    assert facts.uuid == "GPU-3cbe002bd3b6313d"
    assert (facts.total_memory, facts.memory_kind) == (206141652992, "dedicated")
    assert (facts.driver_version, facts.runtime_version) == ("6.10.5", "6.3.1")


def test_a_card_beside_the_gpu_of_the_processor(record: Record) -> None:
    seen = see(record("rx7900xtx"))
    card, small = (device.facts for device in seen.devices)
    assert (card.name, card.memory_kind) == ("AMD Radeon RX 7900 XTX", "dedicated")
    assert (card.total_memory, card.free_memory) == (25753026560, 25753026560 - 1287651328)
    assert card.driver_version == "6.14.0-37-generic"
    assert (small.name, small.uuid) == ("AMD gfx1036 GPU", None)
    assert small.memory_kind == "unified"
    assert (small.details["carve_out"], small.details["gtt"]) == (512 * 2**20, 16390000640)
    assert [note for note in seen.notes if "gfx1036 (RDNA 2) is experimental" in note]
    assert not [note for note in seen.notes if "gfx1100" in note]


def memory_of(facts: Facts) -> tuple[int | None, int | None, int | None]:
    return facts.total_memory, facts.usable_memory, facts.free_memory


def test_an_apu_shows_carve_out_and_gtt(record: Record) -> None:
    facts = only(see(record("strix_halo"))).facts
    assert (facts.name, facts.architecture) == ("AMD Radeon 8060S Graphics", "gfx1151")
    assert facts.memory_kind == "unified"
    assert memory_of(facts) == (100 * GIB, 96 * GIB, 95 * GIB)
    pools = {"integrated": True, "carve_out": 4 * GIB, "gtt": 96 * GIB, "pool": "gtt"}
    assert facts.details == pools


def test_an_mi300a_has_the_memory_of_its_system(record: Record) -> None:
    first, second = (device.facts for device in see(record("mi300a")).devices)
    assert (first.pci_address, second.pci_address) == ("0000:02:00.0", "0001:02:00.0")
    assert first.memory_kind == "unified"
    assert memory_of(first) == (134754598912, 96 * GIB, 94 * GIB)
    assert (first.details["carve_out"], first.details["pool"]) == (0, "system memory")


# ---------------------------------------------------------------- memory


APU = "0000:c5:00.0"
COUNTERS = f"sys/bus/pci/devices/{APU}/mem_info_"
BANKS = "sys/class/kfd/kfd/topology/nodes/1/mem_banks"


def set_memory(root: Path, address: str, **sizes: int) -> None:
    for name, size in sizes.items():
        write_file(root, f"sys/bus/pci/devices/{address}/mem_info_{name}", f"{size}\n")


def set_system_memory(root: Path, total: int, available: int) -> None:
    text = f"MemTotal: {total * 2**20} kB\nMemAvailable: {available * 2**20} kB\n"
    write_file(root, "proc/meminfo", text)


def test_the_pools_of_an_apu(record: Record) -> None:
    root = record("strix_halo")
    set_memory(root, APU, vram_total=96 * GIB, vram_used=90 * GIB, gtt_total=15 * GIB)
    set_system_memory(root, 31, 20)
    facts = only(see(root)).facts
    assert memory_of(facts) == (111 * GIB, 96 * GIB, 6 * GIB)
    assert facts.details["pool"] == "carve-out"
    # GTT is capped at the memory of the system.
    set_memory(record("strix_halo"), APU, vram_total=8 * GIB, gtt_total=124 * GIB)
    write_file(root, f"{BANKS}/0/properties", f"heap_type 1\nsize_in_bytes {124 * GIB}\n")
    set_system_memory(root, 119, 50)
    assert memory_of(only(see(root)).facts) == ((119 + 8) * GIB, 124 * GIB, 50 * GIB)
    # Both are counted if the driver does not tell its pool.
    shutil.rmtree(record("strix_halo") / BANKS)
    facts = only(see(root)).facts
    assert memory_of(facts) == (100 * GIB, 100 * GIB, 95 * GIB + 4 * GIB - 188743680)
    assert facts.details["pool"] == "carve-out and gtt"
    assert rocm.free_memory(0, facts, root=root) == facts.free_memory


@pytest.mark.parametrize(
    ("name", "missing", "memory"),
    [
        # Without counters, a GPU has what its driver offers.
        ("strix_halo", [f"{COUNTERS}vram_total", f"{COUNTERS}gtt_total"], (96 * GIB, None)),
        ("mi300x", ["sys/bus/pci/devices/0000:47:00.0/mem_info_vram_total"], (206141652992, None)),
        ("strix_halo", ["proc/meminfo"], (100 * GIB, 95 * GIB)),  # nothing caps it
    ],
)
def test_memory_where_files_are_missing(
    record: Record, name: str, missing: list[str], memory: tuple[int, int | None]
) -> None:
    root = record(name)
    for file in missing:
        (root / file).unlink()
    facts = only(see(root)).facts
    assert (facts.total_memory, facts.free_memory) == memory


def test_an_unknown_gpu_with_next_to_no_memory_is_an_apu(record: Record) -> None:
    root = record("strix_halo")
    change_node(root, "version 110501", "version 130001")
    set_memory(root, "0000:c5:00.0", vram_total=512 * 2**20)
    seen = see(root)
    assert only(seen).facts.memory_kind == "unified"
    assert "gfx1301 is newer than the architectures that anydevice knows" in seen.notes


def test_a_node_with_cpu_cores_is_an_apu(record: Record) -> None:
    root = record("mi300x")
    change_node(root, "cpu_cores_count 0", "cpu_cores_count 8")
    assert only(see(root)).facts.memory_kind == "unified"


def test_a_divided_card_gives_each_part_its_share(record: Record) -> None:
    root = record("mi300x")
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    text = (nodes / "1/properties").read_text()
    (nodes / "1/mem_banks/0/properties").write_text(f"heap_type 1\nsize_in_bytes {48 * GIB}\n")
    other = text.replace("location_id 18176", "location_id 18177").replace("4376936", "4376937")
    write_file(root, "sys/class/kfd/kfd/topology/nodes/2/properties", other)
    first, second = (device.facts for device in see(root).devices)
    assert first.pci_address == second.pci_address == "0000:47:00.0"
    assert first.details == {"partitions": 2}
    assert first.total_memory == first.free_memory == 48 * GIB
    assert second.total_memory == 206141652992 // 2
    (root / MI300X / "mem_info_vram_total").unlink()
    assert see(root).devices[1].facts.total_memory is None


def test_a_function_of_its_own_keeps_its_address(record: Record) -> None:
    root = record("mi300x")
    change_node(root, "location_id 18176", "location_id 18177")
    set_memory(root, "0000:47:00.1", vram_total=64 * GIB, vram_used=GIB)
    facts = only(see(root)).facts
    assert (facts.pci_address, facts.free_memory) == ("0000:47:00.1", 63 * GIB)


def test_free_memory_is_read_anew(record: Record) -> None:
    root = record("rx7900xtx")
    card, small = (device.facts for device in see(root).devices)
    set_memory(root, "0000:03:00.0", vram_used=20 * GIB)
    set_memory(root, "0000:18:00.0", gtt_used=16390000640 - GIB)
    assert rocm.free_memory(0, card, root=root) == 25753026560 - 20 * GIB
    assert rocm.free_memory(1, small, root=root) == GIB
    (root / "sys/bus/pci/devices/0000:03:00.0/mem_info_vram_used").unlink()
    assert rocm.free_memory(0, card, root=root) is None
    assert rocm.free_memory(0, Facts(name="somewhere"), root=root) is None
    # It is never below zero.
    now = rocm_facts.Counters(10, 12, 10, 12, 100, 100)
    assert rocm_facts.free_of_card(10, now) == 0
    assert rocm_facts.free_of_shared(10, "gtt", now) == 0


# ---------------------------------------------------------------- variables


def test_variables_choose_and_order(record: Record) -> None:
    names = {"ROCR_VISIBLE_DEVICES": "3,GPU-1f7a2c33d4e5b602", "HIP_VISIBLE_DEVICES": "1,0"}
    seen = see(record("mi250x"), **names)
    uuids = [(0, "GPU-1f7a2c33d4e5b602"), (1, "GPU-02e1aa0917c0de04")]
    assert [(device.index, device.facts.uuid) for device in seen.devices] == uuids


def test_hidden_gpus_are_present_and_the_variable_is_named(record: Record) -> None:
    seen = see(record("mi250x"), HIP_VISIBLE_DEVICES="-1")
    assert (seen.present, seen.devices, seen.stage) == (True, (), "device")
    assert text_of(seen) == "HIP_VISIBLE_DEVICES=-1 does not show any of the 4 GPUs"
    assert fix_of(seen) == "unset HIP_VISIBLE_DEVICES"
    seen = see(record("mi250x"), HIP_VISIBLE_DEVICES="0,9")  # a list that ends early
    assert len(seen.devices) == 1
    assert 'HIP_VISIBLE_DEVICES=0,9: "9" names no further GPU' in seen.notes[0]


def test_an_override_of_the_architecture_is_noted(record: Record) -> None:
    seen = see(record("rx7900xtx"), HSA_OVERRIDE_GFX_VERSION="10.3.0")
    assert seen.devices[1].facts.architecture == "gfx1036"
    assert seen.devices[1].facts.details["architecture_override"] == "gfx1030"
    assert "HSA_OVERRIDE_GFX_VERSION=10.3.0: the runtime takes every GPU for gfx1030" in seen.notes


@pytest.mark.parametrize("value", ["gfx1030", "10.3", "10.3.x", "100.0.0", "9.99.0"])
def test_an_override_that_says_nothing_is_noted_as_that(record: Record, value: str) -> None:
    seen = see(record("mi300x"), HSA_OVERRIDE_GFX_VERSION=value)
    assert f"HSA_OVERRIDE_GFX_VERSION={value}: this is no version" in seen.notes
    assert "architecture_override" not in only(seen).facts.details


# ---------------------------------------------------------------- what stops a backend


@pytest.mark.parametrize(("platform", "system"), [("win32", "Windows"), ("darwin", "macOS")])
def test_other_systems_are_refused_at_once(platform: str, system: str) -> None:
    stop = (False, "driver", f"ROCm needs Linux; this is {system}")
    assert stop_of(rocm.look(5, platform=platform)) == stop


def test_machines_without_amd_hardware_and_wsl(tmp_path: Path) -> None:
    assert stop_of(see(tmp_path)) == (False, "driver", "no AMD GPU on the PCI bus")
    write_file(tmp_path, "dev/kfd")
    text = "/dev/kfd is there, but no AMD GPU is on the PCI bus"
    assert (*stop_of(see(tmp_path)), fix_of(see(tmp_path))) == (False, "driver", text, None)
    (tmp_path / "dev/kfd").rename(tmp_path / "dev/dxg")
    seen = see(tmp_path)
    assert (seen.present, seen.stage) == (False, "driver")
    assert "librocdxg" in text_of(seen)
    write_file(tmp_path, "opt/rocm-7.2.0/lib/librocdxg.so")
    seen = see(tmp_path)
    assert (seen.present, seen.stage) == (True, "device")
    assert "/dev/dxg" in text_of(seen)


def without_driver(root: Path) -> Path:
    (root / "dev/kfd").unlink()
    shutil.rmtree(root / "sys/module/amdgpu")
    return root


@pytest.mark.parametrize(
    ("release", "fix"),
    [
        ("ID=ubuntu\nID_LIKE=debian\n", "sudo apt install linux-firmware linux-modules-extra-"),
        ("ID=debian\n", "sudo apt install firmware-amd-graphics && sudo modprobe amdgpu"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "sudo dnf install kernel-modules linux-"),
        ("ID='opensuse-leap'\nID_LIKE='suse opensuse'\n", "sudo zypper install kernel-firmware-"),
        ("ID=nixos\n", "sudo modprobe amdgpu"),
        ("", "sudo modprobe amdgpu"),
    ],
)
def test_a_card_without_a_driver(record: Record, release: str, fix: str) -> None:
    root = without_driver(record("rx7900xtx"))
    write_file(root, "etc/os-release", release)
    seen, card = see(root), "the AMD GPU 0000:03:00.0 (and 1 more)"
    text = f"{card} is on the PCI bus, but the driver amdgpu is not loaded"
    assert stop_of(seen) == (True, "driver", text)
    assert fix_of(seen).startswith(fix)


MI300X = "sys/bus/pci/devices/0000:47:00.0"


def test_a_card_that_another_driver_holds(record: Record) -> None:
    root = without_driver(record("mi300x"))
    (root / MI300X / "driver").symlink_to("../../drivers/vfio-pci")
    text = "the AMD GPU 0000:47:00.0 is held by the driver vfio-pci, not by amdgpu"
    assert text_of(see(root)) == text


@pytest.mark.parametrize(
    ("release", "fix"), [("ID=ubuntu\n", "sudo apt install amdgpu-dkms"), ("ID=arch\n", None)]
)
def test_a_driver_without_its_compute_part(record: Record, release: str, fix: str | None) -> None:
    root = record("mi300x")
    (root / "dev/kfd").unlink()
    (root / MI300X / "driver").symlink_to("../../drivers/amdgpu")
    write_file(root, "etc/os-release", release)
    seen = see(root)
    assert (seen.present, seen.stage, fix_of(seen)) == (True, "driver", fix)
    assert "/dev/kfd is missing" in text_of(seen)


@pytest.mark.parametrize(
    "mark", [".dockerenv", "run/.containerenv", "cgroup", "container", "KUBERNETES_SERVICE_HOST"]
)
def test_a_container_without_the_device_files(record: Record, mark: str) -> None:
    root = record("rx7900xtx")
    (root / "dev/kfd").unlink()
    names = {}
    if mark == "cgroup":
        write_file(root, "proc/1/cgroup", "0::/kubepods/besteffort/pod6a\n")
    elif mark.startswith((".", "run")):
        write_file(root, mark)
    else:
        names[mark] = "oci"
    seen = see(root, **names)
    assert (seen.present, seen.stage) == (True, "driver")
    assert text_of(seen).endswith("but this container has no /dev/kfd")
    assert fix_of(seen).startswith("docker run --device=/dev/kfd --device=/dev/dri")


def test_no_permission_for_the_compute_driver(record: Record) -> None:
    seen = see(record("rx7900xtx"), closed=("dev/kfd",))
    assert stop_of(seen) == (True, "driver", "no permission to open /dev/kfd")
    assert fix_of(seen) == "sudo usermod -a -G render,video $USER"
    assert [text_of(device) for device in seen.devices] == [text_of(seen), text_of(seen)]
    contained = see(record("rx7900xtx"), closed=("dev/kfd",), container="podman")
    assert fix_of(contained).startswith("docker run")


def test_closed_render_nodes_stop_their_gpus_and_all_of_them_the_backend(record: Record) -> None:
    seen = see(record("rx7900xtx"), closed=("dev/dri/renderD128",))
    assert seen.stage is None
    assert text_of(seen.devices[0]) == "no permission to open /dev/dri/renderD128"
    assert fix_of(seen.devices[0]) == "sudo usermod -a -G render,video $USER"
    assert text_of(seen.devices[1]) is None
    seen = see(record("mi250x"), closed=tuple(f"dev/dri/renderD{n}" for n in range(128, 132)))
    assert seen.stage == "driver"
    assert text_of(seen) == "no permission to open /dev/dri/renderD128"
    assert text_of(seen.devices[3]) == "no permission to open /dev/dri/renderD131"


def test_a_render_node_is_missing_only_if_the_gpu_has_a_number(record: Record) -> None:
    root = record("mi300x")
    (root / "dev/dri/renderD128").unlink()
    assert stop_of(see(root)) == (True, "driver", "/dev/dri/renderD128 of this GPU is missing")
    change_node(root, "drm_render_minor 128\n", "")
    assert text_of(only(see(root))) is None


def make_unreadable(root: Path, node: int) -> None:
    # The kernel lets the file be listed and refuses to read it, which a folder does as well.
    properties = root / f"sys/class/kfd/kfd/topology/nodes/{node}/properties"
    properties.unlink()
    properties.mkdir()


def test_gpus_that_a_job_may_not_see_are_not_numbered(record: Record) -> None:
    root = record("mi250x")
    make_unreadable(root, 1)
    make_unreadable(root, 3)
    seen = see(root)
    assert [device.facts.pci_address for device in seen.devices] == ["0000:c6:00.0", "0000:ce:00.0"]
    assert "2 node(s) of the GPU topology may not be read by this process" in seen.notes


def test_a_topology_of_which_nothing_may_be_read(record: Record) -> None:
    root = record("mi300x")
    make_unreadable(root, 1)
    seen = see(root)
    assert stop_of(seen) == (True, "driver", "no permission to read 1 node of the GPU topology")
    assert fix_of(seen) == "sudo usermod -a -G render,video $USER"
    make_unreadable(root, 0)
    seen = see(root, container="oci")
    assert text_of(seen) == "no permission to read 2 nodes of the GPU topology"
    assert fix_of(seen).startswith("docker run")


def test_a_card_that_the_compute_driver_did_not_take(record: Record) -> None:
    root = record("mi300x")
    (root / "sys/class/kfd/kfd/topology/nodes").rename(root / "elsewhere")
    seen = see(root)
    assert (seen.present, seen.stage) == (True, "device")
    assert text_of(seen).endswith("but the compute driver did not take it")


def test_an_architecture_that_is_too_old(record: Record) -> None:
    seen = see(record("gfx803"))
    device = only(seen)
    assert (device.facts.architecture, device.facts.name) == ("gfx803", "AMD gfx803 GPU")
    assert text_of(device).startswith("gfx803 is older than GCN 5 (gfx900)")
    assert fix_of(device) == "use OpenCL (pip install pyopencl) or the CPU"
    assert seen.notes == ()


def test_a_rocm_that_is_too_old(record: Record) -> None:
    root = record("mi300x")
    version = write_file(root, "opt/rocm/.info/version", "4.5.2-164\n")
    seen, text = see(root), "ROCm 4.5.2 is too old; anydevice needs ROCm 5.0 or newer"
    assert stop_of(seen) == (True, "driver", text)
    assert fix_of(seen) is not None
    assert text_of(only(seen)) == text
    version.unlink()
    seen = see(root)
    assert (seen.stage, only(seen).facts.runtime_version) == (None, None)
    assert seen.notes == ("ROCm itself is not installed; a library must bring its own copy of it",)


def test_a_kernel_that_does_not_tell_the_architecture(record: Record) -> None:
    root = record("mi300x")
    change_node(root, "gfx_target_version 90402\n", "")
    seen = see(root)
    assert only(seen).facts.architecture is None
    assert "Linux 5.16 or newer does" in seen.notes[0]


@pytest.fixture
def stuck(record: Record) -> Iterator[Path]:
    """A machine whose driver never answers a read: a pipe that nobody writes to."""
    root = record("mi300x")
    pipe = root / MI300X / "mem_info_vram_used"
    pipe.unlink()
    os.mkfifo(pipe)
    yield root
    os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


def test_a_driver_that_hangs_is_a_finding(stuck: Path) -> None:
    start = time.monotonic()
    seen = in_discovery(lambda limit: see(stuck, limit=limit), limit=0.3)
    assert stop_of(seen) == (True, "driver", "timed out: no answer within 0.3 s")
    assert fix_of(seen) == "sudo dmesg | grep -i amdgpu"
    assert time.monotonic() - start < 60


def test_what_nobody_thought_of_is_a_finding(record: Record) -> None:
    def broken(path: Path) -> bool:
        raise RuntimeError("the moon is full")

    root = record("mi300x")
    look = partial(rocm.look, root=root, environment={}, accessible=broken, platform="linux")
    text = "reading it failed: RuntimeError: the moon is full"
    assert stop_of(in_discovery(look, limit=5)) == (True, "driver", text)


def test_this_machine_can_be_looked_at() -> None:
    seen = rocm.look(5)
    assert seen.backend == "rocm"
    assert seen.devices or text_of(seen)


# ---------------------------------------------------------------- versions and names


def test_the_version_comes_from_the_place_that_binds_most(tmp_path: Path) -> None:
    def version(**variables: str) -> str | None:
        return rocm_facts.rocm_version(tmp_path, variables)

    for release in ("5.7.1", "6.10.0", "6.9.0"):
        write_file(tmp_path, f"opt/rocm-{release}/.info/version", f"{release}-1")
    assert version() == "6.10.0"
    write_file(tmp_path, "opt/rocm/.info/version", "nonsense")
    assert version() == "6.10.0"
    write_file(tmp_path, "opt/rocm/.info/version", "6.9.0-1")
    assert version() == "6.9.0"
    write_file(tmp_path, "home/me/rocm/.info/version", "7.0.0")
    assert version(ROCM_PATH="/home/me/rocm") == "7.0.0"


AMDSMI = """
def amdsmi_init():
    {fault}

def amdsmi_get_processor_handles():
    return [7]

def amdsmi_get_gpu_device_bdf(handle):
    return "0000:18:00.0"

def amdsmi_get_gpu_asic_info(handle):
    return {{"market_name": "AMD Radeon Graphics", "device_id": 5710}}

def amdsmi_get_gpu_driver_info(handle):
    return {{"driver_name": "amdgpu", "driver_version": "6.12.12"}}
"""


def install_amdsmi(root: Path, fault: str = "pass") -> Path:
    write_file(root, "opt/rocm/share/amd_smi/amdsmi/__init__.py", AMDSMI.format(fault=fault))
    return root / "opt/rocm/share/amd_smi"


def test_amdsmi_tells_the_name_that_the_files_lack(record: Record) -> None:
    root = record("rx7900xtx")
    install_amdsmi(root, "print('noise of a library')")
    (root / "proc/sys/kernel/osrelease").unlink()
    known = [(seen.facts.name, seen.facts.driver_version) for seen in see(root).devices]
    assert known == [("AMD Radeon RX 7900 XTX", None), ("AMD Radeon Graphics", "6.12.12")]


@pytest.mark.parametrize(
    ("fault", "limit", "told"),
    [
        ("raise OSError('no device')", 20, "failed (OSError: no device) in amdsmi_init"),
        ("import os; os.abort()", 20, "crashed (SIGABRT) in amdsmi_init"),
        ("import time; time.sleep(60)", 2, "timed out (no answer within"),
    ],
)
def test_a_failing_amdsmi_is_a_note(record: Record, fault: str, limit: float, told: str) -> None:
    root = record("rx7900xtx")
    install_amdsmi(root, fault)
    seen = see(root, limit=limit)
    assert seen.stage is None
    assert seen.devices[1].facts.name == "AMD gfx1036 GPU"
    note = next(note for note in seen.notes if "amdsmi" in note)
    assert note.startswith(f"amdsmi did not tell more of the GPUs: {told}")


def test_amdsmi_is_left_alone_where_the_files_tell_all(record: Record) -> None:
    root = record("mi300x")
    install_amdsmi(root, "raise OSError('asked in vain')")
    assert see(root).notes == ()


def test_amdsmi_is_found_and_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = install_amdsmi(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(folder), *sys.path])
    assert rocm_facts.amdsmi_folder(Path("/"), {}) == folder
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    steps: list[str] = []
    answer = amdsmi.ask(steps.append, {"folder": str(folder)})
    monkeypatch.delitem(sys.modules, "amdsmi")
    assert answer == {"0000:18:00.0": {"name": "AMD Radeon Graphics", "driver": "6.12.12"}}
    assert steps[:3] == ["import amdsmi", "amdsmi_init", "amdsmi_get_processor_handles"]


# ---------------------------------------------------------------- the topology itself


def test_the_topology(record: Record, tmp_path: Path) -> None:
    assert rocm_facts.topology(tmp_path) == rocm_facts.Topology((), 0)
    root = record("mi250x")
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    (nodes / "2").rename(nodes / "10")  # numbers count, not names
    (nodes / "notes").mkdir()
    assert [gpu.node for gpu in rocm_facts.topology(root).gpus] == [1, 3, 4, 10]


def test_a_name_of_last_resort(record: Record) -> None:
    root = record("mi300x")
    (root / MI300X / "product_name").write_text("\n")
    assert only(see(root)).facts.name == "AMD Instinct MI300X"
    assert rocm_facts.topology(root).gpus[0].device_id == 0x74A1


@pytest.mark.parametrize(
    ("version", "name"),
    [
        *((80003, "gfx803"), (90000, "gfx900"), (90010, "gfx90a"), (90012, "gfx90c")),
        *((90402, "gfx942"), (90500, "gfx950"), (100306, "gfx1036"), (110000, "gfx1100")),
        *((110501, "gfx1151"), (120001, "gfx1201")),
        *((0, None), (110099, None), (119900, None), (4294967296, None)),
    ],
)
def test_the_architecture_in_a_number(version: int, name: str | None) -> None:
    assert rocm_facts.gfx_name(version) == name
