"""The TPU reader against trees of files as TPU machines have them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anydevice._core.finding import BackendScan
from anydevice._machine.hardware.tpu import reader as tpu
from tests.machine.tree import write_file
from tests.programs import output_of, run_python
from tests.reasons import fix_of, text_of

fcntl = pytest.importorskip("fcntl", reason="TPUs are a matter of Linux")

GIB = 2**30


class Machine:
    """A tree of files, and the reader on it with an environment of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, text: str = "") -> Path:
        return write_file(self.root, name, text)

    def pci(self, address: str, device: str, *, vendor: str = "0x1ae0", **more: str) -> None:
        for name, text in {"vendor": vendor, "device": device, **more}.items():
            self.write(f"sys/bus/pci/devices/{address}/{name}", f"{text}\n")

    def chips(self, count: int, device: str, *, subsystem: str = "0x0000") -> Machine:
        for number in range(count):
            self.pci(f"0000:00:{4 + number:02x}.0", device, subsystem_device=subsystem)
        return self

    def accel(self, count: int) -> Machine:
        for number in range(count):
            self.write(f"dev/accel{number}")
        return self

    def vfio(self, groups: list[int]) -> Machine:
        """Device files of IOMMU groups, in the order of the chips' PCI addresses."""
        self.write("dev/vfio/vfio")
        for number, group in enumerate(groups):
            self.write(f"dev/vfio/{group}")
            link = self.root / f"sys/bus/pci/devices/0000:00:{4 + number:02x}.0/iommu_group"
            link.symlink_to(f"../../../../kernel/iommu_groups/{group}")
        return self

    def look(
        self, accessible: Callable[[Path], bool] | None = None, **environment: str
    ) -> BackendScan:
        return tpu.look(
            5.0, root=self.root, system="linux", environment=environment, accessible=accessible
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def names(scan: BackendScan) -> list[str]:
    return [seen.facts.name for seen in scan.devices]


def chips_of(scan: BackendScan) -> list[object]:
    return [seen.facts.details["chip"] for seen in scan.devices]


def test_a_machine_without_a_tpu(machine: Machine) -> None:
    scan = machine.look()
    assert (scan.present, scan.stage) == (False, "driver")
    assert text_of(scan) == "no TPU on the PCI bus nor in /dev"
    machine.pci("0000:00:05.0", "0x0042")  # Google's network card
    machine.pci("0000:00:06.0", "0x1eb8", vendor="0x10de")
    machine.write("dev/accel0")  # another vendor's accelerator
    scan = machine.look()
    assert (scan.present, scan.stage) == (False, "driver")
    assert text_of(scan) == "no TPU on the PCI bus nor in /dev"


def test_this_machine_and_other_systems() -> None:
    scan = tpu.look(1.0, system="win32")
    assert (scan.present, text_of(scan)) == (False, "TPUs are only on Linux")
    assert not tpu.look(1.0, system="darwin").present
    assert tpu.look(1.0).backend == "tpu"


def test_v3_chips_are_two_devices_each(machine: Machine) -> None:
    found = machine.chips(4, "0x0027", subsystem="0x004f").accel(4).look()
    assert names(found) == ["Google TPU v3"] * 8
    assert [seen.index for seen in found.devices] == list(range(8))
    assert chips_of(found) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [seen.facts.details["core"] for seen in found.devices] == [0, 1] * 4
    assert {seen.facts.total_memory for seen in found.devices} == {16 * GIB}
    assert found.stage is None
    assert found.devices[2].facts.pci_address == "0000:00:05.0"
    assert found.devices[2].facts.details["device_file"] == "/dev/accel1"


def test_v4_is_one_device_a_chip(machine: Machine) -> None:
    found = machine.chips(4, "0x005e").accel(4).look()
    assert names(found) == ["Google TPU v4"] * 4
    facts = found.devices[3].facts
    assert (facts.total_memory, facts.memory_kind, facts.free_memory) == (
        32 * GIB,
        "dedicated",
        None,
    )
    assert facts.architecture == "TPU v4"
    assert facts.details["memory"] == "by generation"
    assert {seen.kind for seen in found.devices} == {"tpu"}


def test_v5e_8_through_vfio_groups(machine: Machine) -> None:
    found = machine.chips(8, "0x0063").vfio([3, 2, 1, 0, 7, 6, 5, 4]).look()
    assert names(found) == ["Google TPU v5e"] * 8
    assert found.devices[0].facts.total_memory == 16 * GIB
    assert found.devices[0].facts.details["device_file"] == "/dev/vfio/3"
    assert found.devices[7].facts.details["device_file"] == "/dev/vfio/4"


@pytest.mark.parametrize(
    ("device", "name", "memory", "per_chip", "file"),
    [
        ("0x0027", "Google TPU v2", 8 * GIB, 2, "/dev/accel0"),  # v3 but for its subsystem
        ("0x0062", "Google TPU v5p", 95 * GIB, 1, "/dev/vfio/0"),
        ("0x006f", "Google TPU v6e", 32 * GIB, 1, "/dev/vfio/0"),
        ("0x0076", "Google TPU7x", 96 * GIB, 2, "/dev/vfio/0"),
        ("0x0063", "Google TPU v5e", 16 * GIB, 1, "/dev/accel0"),  # by an image of the old way
        ("0x0056", "Google TPU of a generation without a public name", None, 1, "/dev/accel0"),
    ],
)
def test_other_generations(
    machine: Machine, device: str, name: str, memory: int | None, per_chip: int, file: str
) -> None:
    machine.chips(1, device, subsystem="0x004e")
    found = (machine.vfio([0]) if "vfio" in file else machine.accel(1)).look()
    assert names(found) == [name] * per_chip
    facts = found.devices[0].facts
    assert (facts.total_memory, facts.details["device_file"]) == (memory, file)
    assert facts.architecture == (name.removeprefix("Google ") if memory else None)


def test_visible_chips_leave_a_part_and_number_it_anew(machine: Machine) -> None:
    machine.chips(8, "0x006f").vfio(list(range(8)))
    found = machine.look(TPU_VISIBLE_CHIPS="6, 2")
    assert [seen.index for seen in found.devices] == [0, 1]
    assert chips_of(found) == [2, 6]
    assert found.devices[1].facts.pci_address == "0000:00:0a.0"


def test_the_first_name_wins_unless_it_is_empty(machine: Machine) -> None:
    machine.chips(4, "0x005e").accel(4)
    assert chips_of(machine.look(TPU_VISIBLE_CHIPS="1", TPU_VISIBLE_DEVICES="3")) == [1]
    assert chips_of(machine.look(TPU_VISIBLE_CHIPS="", TPU_VISIBLE_DEVICES="3")) == [3]


@pytest.mark.parametrize("value", ["4", "0,9", "-1", "all", "0,", "1.0"])
def test_a_wrong_visible_list_is_named(machine: Machine, value: str) -> None:
    found = machine.chips(4, "0x005e").accel(4).look(TPU_VISIBLE_CHIPS=value)
    assert (found.present, found.stage, found.devices) == (True, "device", ())
    assert text_of(found) == f"TPU_VISIBLE_CHIPS={value} does not name chips of this machine"
    assert fix_of(found) == "unset TPU_VISIBLE_CHIPS, or name chips 0 to 3"


@pytest.mark.parametrize(
    ("environment", "chips"),
    [
        ({"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"}, [0]),
        ({"TPU_CHIPS_PER_HOST_BOUNDS": "1,2,1"}, [0, 1]),
        ({"TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}, [0, 1, 2, 3]),
        ({"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}, [0]),
        ({"TPU_CHIPS_PER_PROCESS_BOUNDS": "many"}, [0, 1, 2, 3]),
        ({"TPU_CHIPS_PER_PROCESS_BOUNDS": "0,0"}, [0, 1, 2, 3]),
        ({"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,2,1", "TPU_VISIBLE_CHIPS": "2,3"}, [2, 3]),
    ],
)
def test_chips_per_process(machine: Machine, environment: dict[str, str], chips: list[int]) -> None:
    found = machine.chips(4, "0x005e").accel(4).look(**environment)
    assert chips_of(found) == chips


def test_chips_whose_device_files_were_not_passed_on(machine: Machine) -> None:
    found = machine.chips(4, "0x005e").look()
    assert (found.present, found.stage, found.devices) == (True, "driver", ())
    assert text_of(found) == "4 TPU chips on the PCI bus, but no device file /dev/accel0"
    assert "--privileged" in fix_of(found)


def test_some_device_files_passed_on(machine: Machine) -> None:
    found = machine.chips(4, "0x005e").accel(2).look()
    assert chips_of(found) == [0, 1]
    assert found.notes == ("2 of 4 TPU chips have a device file here",)


def test_no_permission_for_any_chip(machine: Machine) -> None:
    found = machine.chips(2, "0x005e").accel(2).look(accessible=lambda node: False)
    assert (found.present, found.stage) == (True, "driver")
    assert text_of(found) == "no permission to open /dev/accel0"
    assert fix_of(found) == "sudo chmod a+rw /dev/accel* (a udev rule makes it last)"
    assert names(found) == ["Google TPU v4"] * 2
    assert text_of(found.devices[1]) == "no permission to open /dev/accel1"


def test_no_permission_for_the_vfio_container(machine: Machine) -> None:
    machine.chips(1, "0x0063").vfio([0])
    found = machine.look(accessible=lambda node: node.name != "vfio")
    assert text_of(found) == "no permission to open /dev/vfio/vfio"
    assert fix_of(found) == "sudo chmod a+rw /dev/vfio/* (a udev rule makes it last)"


def test_no_permission_for_one_of_two_chips(machine: Machine) -> None:
    machine.chips(2, "0x005e").accel(2)
    found = machine.look(accessible=lambda node: node.name == "accel0")
    assert (found.stage, text_of(found)) == (None, None)
    assert [text_of(seen) for seen in found.devices] == [None, "no permission to open /dev/accel1"]


def test_a_group_that_may_open_it_is_named(machine: Machine) -> None:
    grp = pytest.importorskip("grp", reason="groups are a thing of POSIX")
    other = next((each for each in grp.getgrall() if each.gr_gid not in (0, 65534)), None)
    machine.chips(1, "0x005e").accel(1)
    node = machine.root / "dev/accel0"
    if other is None or os.getuid() != 0:
        pytest.skip("only root can give a file to another group")
    os.chown(node, 0, other.gr_gid)
    node.chmod(0o660)
    fix = fix_of(machine.look(accessible=lambda node: False).devices[0])
    assert fix == f"sudo usermod -aG {other.gr_name} $USER, then log in again"
    node.chmod(0o600)
    fix = fix_of(machine.look(accessible=lambda node: False).devices[0])
    assert fix == "sudo chmod a+rw /dev/accel* (a udev rule makes it last)"


def test_a_group_without_a_name(machine: Machine) -> None:
    machine.chips(1, "0x005e").accel(1)

    def vanish(node: Path) -> bool:
        node.unlink()
        return False

    fix = fix_of(machine.look(accessible=vanish).devices[0])
    assert fix == "sudo chmod a+rw /dev/accel* (a udev rule makes it last)"


def test_a_real_user_without_permission() -> None:
    """As another user, with files that only root may open, and the reader's own check."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder)).chips(1, "0x005e").accel(1)
        Path(folder).chmod(0o755)
        (machine.root / "dev/accel0").chmod(0o600)
        # Everything is imported before the user changes: the interpreter may be out of reach then.
        program = (
            "import os, grp, pathlib\n"
            "from anydevice._machine.hardware.tpu import reader as tpu\n"
            "os.setgid(65534); os.setuid(65534)\n"
            f"found = tpu.look(root=pathlib.Path({folder!r}), system='linux', environment={{}})\n"
            "print(found.reason)\n"
        )
        assert output_of("-c", program) == "no permission to open /dev/accel0\n"
        assert machine.look().stage is None


@pytest.mark.parametrize(
    ("kind", "files", "expected"),
    [
        ("v4-8", ["dev/accel0", "dev/accel1"], ["Google TPU v4"] * 2),
        ("v5litepod-4", ["dev/vfio/0", "dev/vfio/10", "dev/vfio/vfio"], ["Google TPU v5e"] * 2),
        ("v3-8", ["dev/accel0", "dev/accelerate"], ["Google TPU v3"] * 2),
        ("tpu7x-4", ["dev/vfio/1"], ["Google TPU7x"] * 2),
        ("v4-8", [], []),
        ("v99-8", ["dev/accel0"], []),
        ("", ["dev/accel0"], []),
    ],
)
def test_where_the_pci_bus_is_hidden(
    machine: Machine, kind: str, files: list[str], expected: list[str]
) -> None:
    for file in files:
        machine.write(file)
    found = machine.look(TPU_ACCELERATOR_TYPE=kind)
    assert names(found) == expected
    assert found.present is bool(expected)


def test_files_that_cannot_be_read(machine: Machine) -> None:
    machine.chips(1, "0x005e").accel(1)
    machine.write("sys/bus/pci/devices/0000:00:09.0/vendor", "")
    (machine.root / "sys/bus/pci/devices/0000:00:0a.0/vendor").mkdir(parents=True)
    assert names(machine.look()) == ["Google TPU v4"]


@pytest.fixture
def holder(machine: Machine) -> Iterator[int]:
    """A process that holds libtpu's lock as libtpu does."""
    file = machine.write("tmp/libtpu_lockfile")
    program = (
        "import fcntl, sys\n"
        f"file = open({str(file)!r}, 'r+')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    yield process.pid
    process.communicate()


def test_tpus_that_another_process_holds(machine: Machine, holder: int) -> None:
    locks = Path("/proc/locks")
    if not locks.exists() or str(holder) not in locks.read_text():
        pytest.skip("this kernel does not list its file locks")
    (machine.root / "proc").mkdir()
    (machine.root / "proc/locks").symlink_to(locks)
    found = machine.chips(1, "0x005e").accel(1).look()
    assert found.notes == (f"the TPUs are in use by process {holder}; JAX gets them when it ends",)


def test_a_lock_of_our_own_is_kept_and_not_reported(machine: Machine) -> None:
    """Opening and closing the lock file would drop it: POSIX locks go with the first close."""
    file = machine.write("tmp/libtpu_lockfile")
    (machine.root / "proc").mkdir()
    (machine.root / "proc/locks").symlink_to("/proc/locks")
    machine.chips(1, "0x005e").accel(1)
    attempt = f"import fcntl; fcntl.lockf(open({str(file)!r}, 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with open(file, "r+") as ours:
        fcntl.lockf(ours, fcntl.LOCK_EX)
        assert machine.look().notes == ()
        assert "BlockingIOError" in run_python("-c", attempt).stderr


def test_a_lock_file_that_nobody_holds_any_more(machine: Machine) -> None:
    machine.write("tmp/libtpu_lockfile")
    machine.write("proc/locks", "1: POSIX  ADVISORY  WRITE 12 00:19:1 0 EOF\ngarbled\n")
    assert machine.chips(1, "0x005e").accel(1).look().notes == ()
