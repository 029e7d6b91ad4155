"""Containers, distributions and PCI cards, from trees of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from anydevice._machine.hardware import linux
from tests.machine.tree import write_file


@pytest.mark.parametrize("file", [".dockerenv", "run/.containerenv"])
def test_a_container_is_known_by_its_file(tmp_path: Path, file: str) -> None:
    write_file(tmp_path, file)
    assert linux.in_container(tmp_path, {})


@pytest.mark.parametrize("name", ["container", "KUBERNETES_SERVICE_HOST"])
def test_a_container_is_known_by_its_variable(tmp_path: Path, name: str) -> None:
    assert linux.in_container(tmp_path, {name: "oci"})
    assert not linux.in_container(tmp_path, {name: ""})


@pytest.mark.parametrize(
    ("group", "contained"),
    [
        ("0::/kubepods/besteffort/pod1\n", True),
        ("12:memory:/docker/0f3a\n", True),
        ("0::/machine.slice/libpod-2a.scope\n", True),
        ("0::/init.scope\n", False),
        ("", False),
    ],
)
def test_a_container_is_known_by_the_group_of_its_first_process(
    tmp_path: Path, group: str, contained: bool
) -> None:
    write_file(tmp_path, "proc/1/cgroup", group)
    assert linux.in_container(tmp_path, {}) is contained


def test_an_empty_tree_is_no_container_and_no_distribution(tmp_path: Path) -> None:
    assert not linux.in_container(tmp_path, {})
    assert linux.distribution(tmp_path) == ()


@pytest.mark.parametrize(
    ("release", "names", "has_apt"),
    [
        ('NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\n', ("ubuntu", "debian"), True),
        ("ID=debian\n", ("debian",), True),
        (
            'ID="rocky"\nID_LIKE="rhel centos fedora"\n',
            ("rocky", "rhel", "centos", "fedora"),
            False,
        ),
        ("ID='opensuse-leap'\nID_LIKE='suse opensuse'\n", ("suse", "suse", "suse"), False),
        ("ID=Arch\nVARIANT_ID=debian\n", ("arch",), False),
        ("no such thing\n", (), False),
    ],
)
def test_a_distribution_and_those_it_is_like(
    tmp_path: Path, release: str, names: tuple[str, ...], has_apt: bool
) -> None:
    write_file(tmp_path, "etc/os-release", release)
    assert linux.distribution(tmp_path) == names
    assert linux.uses_apt(names) is has_apt


def test_the_command_of_the_nearest_relative_fits() -> None:
    commands = {"debian": "apt", "ubuntu": "ubuntu-drivers"}
    assert linux.fitting(commands, ("pop", "ubuntu", "debian")) == "ubuntu-drivers"
    assert linux.fitting(commands, ("arch",)) is None
    assert linux.fitting(commands, ()) is None


def plug(root: Path, address: str, vendor: str, device_class: str) -> Path:
    entry = root / "sys/bus/pci/devices" / address
    entry.mkdir(parents=True)
    (entry / "vendor").write_text(vendor + "\n")
    (entry / "class").write_text(device_class + "\n")
    return entry


@pytest.mark.parametrize("device_class", ["0x030000", "0x030200", "0x038000", "0x120000"])
def test_a_display_or_compute_function_is_a_card(tmp_path: Path, device_class: str) -> None:
    plug(tmp_path, "0000:00:06.0", "0x10de", device_class)
    assert linux.cards(linux.NVIDIA, tmp_path) == ("0000:00:06.0",)


@pytest.mark.parametrize("device_class", ["0x040300", "0x0c0330", "0x060400", "0x020000"])
def test_audio_usb_bridge_and_network_functions_are_not(tmp_path: Path, device_class: str) -> None:
    plug(tmp_path, "0000:00:06.1", "0x10de", device_class)
    assert linux.cards(linux.NVIDIA, tmp_path) == ()


def test_vendors_are_told_apart_and_addresses_are_sorted(tmp_path: Path) -> None:
    plug(tmp_path, "0000:41:00.0", "0x10de", "0x030200")
    plug(tmp_path, "0000:05:00.0", "0x10de", "0x030000")
    plug(tmp_path, "0000:03:00.0", "0x1002", "0x030000")
    assert linux.cards(linux.NVIDIA, tmp_path) == ("0000:05:00.0", "0000:41:00.0")
    assert linux.cards(linux.AMD, tmp_path) == ("0000:03:00.0",)


def test_a_machine_without_a_pci_tree_has_no_cards(tmp_path: Path) -> None:
    assert linux.cards(linux.NVIDIA, tmp_path) == ()


def test_a_broken_entry_hides_no_other(tmp_path: Path) -> None:
    plug(tmp_path, "0000:01:00.0", "0x10de", "nonsense")
    (plug(tmp_path, "0000:02:00.0", "0x10de", "0x030000") / "vendor").unlink()
    plug(tmp_path, "0000:03:00.0", "0x10de", "0x030000")
    assert linux.cards(linux.NVIDIA, tmp_path) == ("0000:03:00.0",)
