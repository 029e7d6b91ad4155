"""The TPU reader against trees of files as TPU machines have them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from anydevice._core.finding import BackendScan
from anydevice._machine.hardware.tpu import reader as tpu
from tests.machine.scans import stop_of
from tests.machine.tree import Tree, write_file
from tests.programs import output_of, run_python
from tests.reasons import fix_of, text_of

fcntl = pytest.importorskip("fcntl", reason="TPUs are a matter of Linux")

GIB = 2**30


class Machine(Tree):
    """A tree of files, and the reader on it with an environment of its own."""

    def pci(self, address: str, device: str, *, vendor: str = "0x1ae0", **more: str) -> None:
        files = {"vendor": vendor, "device": device, **more}
        self.write(files, f"sys/bus/pci/devices/{address}")

    def chips(self, count: int, device: str, *, subsystem: str = "0x0000") -> Machine:
        for number in range(count):
            self.pci(f"0000:00:{4 + number:02x}.0", device, subsystem_device=subsystem)
        return self

    def accel(self, count: int) -> Machine:
        return self.write({f"dev/accel{number}": "" for number in range(count)})

    def vfio(self, groups: list[int]) -> Machine:
        """Device files of IOMMU groups, in the order of the chips' PCI addresses."""
        self.write({"dev/vfio/vfio": "", **{f"dev/vfio/{group}": "" for group in groups}})
        for number, group in enumerate(groups):
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


def test_machines_without_a_tpu_and_other_systems(machine: Machine) -> None:
    stop = (False, "driver", "no TPU on the PCI bus nor in /dev")
    assert stop_of(machine.look()) == stop
    machine.pci("0000:00:05.0", "0x0042")  # Google's network card
    machine.pci("0000:00:06.0", "0x1eb8", vendor="0x10de")
    assert stop_of(machine.accel(1).look()) == stop  # another vendor's accelerator
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
    assert (facts.total_memory, facts.memory_kind) == (32 * GIB, "dedicated")
    assert (facts.free_memory, facts.architecture) == (None, "TPU v4")
    assert facts.details["memory"] == "by generation"
    assert {seen.kind for seen in found.devices} == {"tpu"}


def test_v5e_8_through_vfio_groups(machine: Machine) -> None:
    found = machine.chips(8, "0x0063").vfio([3, 2, 1, 0, 7, 6, 5, 4]).look()
    assert names(found) == ["Google TPU v5e"] * 8
    first, last = found.devices[0].facts, found.devices[7].facts
    assert (first.total_memory, first.details["device_file"]) == (16 * GIB, "/dev/vfio/3")
    assert last.details["device_file"] == "/dev/vfio/4"


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
    # The first name wins unless it is empty.
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


def test_device_files_that_were_not_passed_on(machine: Machine) -> None:
    found = machine.chips(4, "0x005e").look()
    text = "4 TPU chips on the PCI bus, but no device file /dev/accel0"
    assert (*stop_of(found), found.devices) == (True, "driver", text, ())
    assert "--privileged" in fix_of(found)
    found = machine.accel(2).look()
    assert chips_of(found) == [0, 1]
    assert found.notes == ("2 of 4 TPU chips have a device file here",)


def test_no_permission_for_any_chip_and_for_one(machine: Machine) -> None:
    found = machine.chips(2, "0x005e").accel(2).look(accessible=lambda node: False)
    assert stop_of(found) == (True, "driver", "no permission to open /dev/accel0")
    assert fix_of(found) == "sudo chmod a+rw /dev/accel* (a udev rule makes it last)"
    assert names(found) == ["Google TPU v4"] * 2
    assert text_of(found.devices[1]) == "no permission to open /dev/accel1"
    found = machine.look(accessible=lambda node: node.name == "accel0")
    assert (found.stage, text_of(found)) == (None, None)
    assert [text_of(seen) for seen in found.devices] == [None, "no permission to open /dev/accel1"]


def test_no_permission_for_the_vfio_container(machine: Machine) -> None:
    machine.chips(1, "0x0063").vfio([0])
    found = machine.look(accessible=lambda node: node.name != "vfio")
    assert text_of(found) == "no permission to open /dev/vfio/vfio"
    assert fix_of(found) == "sudo chmod a+rw /dev/vfio/* (a udev rule makes it last)"


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
        ("v4-8", ["accel0", "accel1"], ["Google TPU v4"] * 2),
        ("v5litepod-4", ["vfio/0", "vfio/10", "vfio/vfio"], ["Google TPU v5e"] * 2),
        ("v3-8", ["accel0", "accelerate"], ["Google TPU v3"] * 2),
        ("tpu7x-4", ["vfio/1"], ["Google TPU7x"] * 2),
        ("v4-8", [], []),
        ("v99-8", ["accel0"], []),
        ("", ["accel0"], []),
    ],
)
def test_a_hidden_bus(machine: Machine, kind: str, files: list[str], expected: list[str]) -> None:
    found = machine.write(dict.fromkeys(files, ""), "dev").look(TPU_ACCELERATOR_TYPE=kind)
    assert names(found) == expected
    assert found.present is bool(expected)


def test_files_that_cannot_be_read(machine: Machine) -> None:
    machine.chips(1, "0x005e").accel(1)
    machine.write({"sys/bus/pci/devices/0000:00:09.0/vendor": ""})
    (machine.root / "sys/bus/pci/devices/0000:00:0a.0/vendor").mkdir(parents=True)
    assert names(machine.look()) == ["Google TPU v4"]


HOLD = """
import fcntl, sys
file = open(sys.argv[1], 'r+')
fcntl.lockf(file, fcntl.LOCK_EX)
print('held', flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lock(machine: Machine) -> Path:
    """Return libtpu's lock file on a machine with one chip, whose locks are those of this one."""
    machine.chips(1, "0x005e").accel(1)
    (machine.root / "proc").mkdir()
    (machine.root / "proc/locks").symlink_to("/proc/locks")
    return write_file(machine.root, "tmp/libtpu_lockfile")


def test_tpus_that_another_process_holds(machine: Machine, lock: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        locks, notes = Path("/proc/locks"), machine.look().notes
        listed = locks.exists() and str(holder.pid) in locks.read_text()
        holder.communicate()
    if not listed:
        pytest.skip("this kernel does not list its file locks")
    note = f"the TPUs are in use by process {holder.pid}; JAX gets them when it ends"
    assert notes == (note,)


def test_a_lock_of_our_own_is_kept_and_not_reported(machine: Machine, lock: Path) -> None:
    """Opening and closing the lock file would drop it: POSIX locks go with the first close."""
    attempt = f"import fcntl; fcntl.lockf(open({str(lock)!r}, 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with open(lock, "r+") as ours:
        fcntl.lockf(ours, fcntl.LOCK_EX)
        assert machine.look().notes == ()
        assert "BlockingIOError" in run_python("-c", attempt).stderr


def test_a_lock_file_that_nobody_holds_any_more(machine: Machine) -> None:
    locks = "1: POSIX  ADVISORY  WRITE 12 00:19:1 0 EOF\ngarbled"
    machine.write({"tmp/libtpu_lockfile": "", "proc/locks": locks})
    assert machine.chips(1, "0x005e").accel(1).look().notes == ()
